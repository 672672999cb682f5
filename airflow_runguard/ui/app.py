"""The application: the shell of the page and its files without a user, all data with one.

Airflow does not protect what a plugin mounts, so that every API route has the user, the rights and the guard against
forged requests from here. The page brings nothing from elsewhere, and the browser is told to load nothing from there.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import psycopg
from airflow.api_fastapi.core_api.security import get_user
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import FileResponse, JSONResponse, RedirectResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException as StarletteHTTPException
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from airflow_runguard.core.errors import LedgerNotReady, LedgerUnavailable, PlanningError, RunGuardError
from airflow_runguard.ui import acting, reading
from airflow_runguard.ui.access import not_forged
from airflow_runguard.ui.lending import Lender

STATIC = Path(str(files("airflow_runguard").joinpath("ui", "static")))


class Refusal(BaseModel):
    """What every refusal says."""

    detail: str
    remedy: str


LARGEST = 256 * 1024
"""Bytes of a request's body."""
HEADERS = {
    "content-security-policy": "default-src 'self'; frame-ancestors 'self'; base-uri 'none'; object-src 'none'; "
    "form-action 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "same-origin",
}


@cache  # Airflow asks for it with every list of plugins
def create_app() -> FastAPI:
    """The pages and their API."""
    lender = Lender()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        yield
        lender.close()

    app = FastAPI(
        title="RunGuard's ledger",
        version="1",
        description="What the pages show and do. A token of Airflow (`POST /auth/token`) is what scripts need.",
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=lifespan,
    )
    app.state.lender = lender
    app.include_router(_api(app))
    app.add_api_route("/", _to_page, include_in_schema=False)
    app.add_api_route("/ui", _to_page, include_in_schema=False)
    app.add_api_route("/ui/", _page, include_in_schema=False)
    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    app.add_middleware(_Manners)
    app.add_exception_handler(RunGuardError, _refused)
    app.add_exception_handler(psycopg.Error, _refused_by_the_ledger)
    app.add_exception_handler(RequestValidationError, _malformed)
    app.add_exception_handler(StarletteHTTPException, _denied)
    return app


def _api(app: FastAPI) -> APIRouter:
    answers: dict[int | str, dict[str, Any]] = {
        401: {"description": "No token, or one that has run out.", "model": Refusal},
        403: {"description": "Not allowed, or a forged request. Nothing was changed.", "model": Refusal},
        404: {"description": "Not there, or not to be seen by this user.", "model": Refusal},
        413: {"description": "Too large. Nothing was changed."},
        422: {"description": "It cannot be meant like this. Nothing was changed.", "model": Refusal},
        503: {"description": "The ledger is out of reach, or not one that may be used.", "model": Refusal},
    }
    api = APIRouter(prefix="/api", dependencies=[Depends(get_user), Depends(not_forged)], responses=answers)
    api.include_router(reading.router)
    api.include_router(acting.router)

    @api.get("/openapi.json", include_in_schema=False)
    def openapi() -> dict[str, Any]:
        return app.openapi()

    return api


def _page() -> FileResponse:
    return FileResponse(STATIC / "index.html", headers={"cache-control": "no-cache"})


def _to_page(request: Request) -> RedirectResponse:
    return RedirectResponse(f"{request.scope.get('root_path', '')}/ui/")


# -- refusals ----------------------------------------------------------------------------------------------------------


def _refused(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RunGuardError)
    match error:
        case LedgerUnavailable() | LedgerNotReady():
            status = 503
        case PlanningError():
            status = 422
        case _:
            status = 409
    return JSONResponse({"detail": error.what, "remedy": error.remedy}, status)


def _refused_by_the_ledger(_: Request, error: Exception) -> JSONResponse:
    said = (str(error).strip() or type(error).__name__).splitlines()[0]
    return JSONResponse(
        {"detail": f"The ledger refused it: {said}. Nothing was changed.", "remedy": "Look at Health."}, 422
    )


def _malformed(_: Request, error: Exception) -> JSONResponse:
    """Names the fields; what was sent is not repeated, since there may be a secret in it."""
    assert isinstance(error, RequestValidationError)
    found = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()]
    return JSONResponse({"detail": "; ".join(found), "remedy": "Correct these fields. Nothing was changed."}, 422)


REMEDIES = {
    401: "Sign in to Airflow again.",
    403: "Ask whoever gives rights in Airflow.",
    404: "Look at the list again.",
}


def _denied(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, StarletteHTTPException)
    remedy = REMEDIES.get(error.status_code, "Correct the request.")
    return JSONResponse({"detail": str(error.detail), "remedy": remedy}, error.status_code, error.headers)


# -- every answer ------------------------------------------------------------------------------------------------------


class _Manners:
    """Headers on every answer, and an end to bodies that are too large."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        left = LARGEST

        async def counted() -> Message:
            nonlocal left
            message = await receive()
            left -= len(message.get("body", b""))
            if left < 0:
                raise HTTPException(413, f"A request has at most {LARGEST} bytes. Nothing was changed.")
            return message

        async def mannered(message: Message) -> None:
            if message["type"] == "http.response.start":
                kept = "no-store" if "/api/" in scope["path"] else "no-cache"
                names = {name.lower() for name, _ in message["headers"]}
                extra = {**HEADERS, **({} if b"cache-control" in names else {"cache-control": kept})}
                message["headers"] = [
                    *message["headers"],
                    *((name.encode(), value.encode()) for name, value in extra.items()),
                ]
            await send(message)

        length = dict(scope["headers"]).get(b"content-length", b"0")
        if length.isdigit() and int(length) > LARGEST:
            said = f"A request has at most {LARGEST} bytes. Nothing was changed."
            too_large = JSONResponse({"detail": said, "remedy": "Send less."}, 413)
            await too_large(scope, receive, mannered)
            return
        await self.app(scope, counted, mannered)
