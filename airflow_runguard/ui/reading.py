"""The routes that read. Every one needs a user, and its statement leaves out what that user may not see.

GET only, without any effect. Lists are read by key: ``next`` of one answer is ``after`` of the next; a page may have
fewer records than asked for, even none, while ``next`` says that there is more to look at.
"""

from __future__ import annotations

import csv
import io
import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.metadata import version
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, HTTPException, Path, Query, Request
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field

from airflow_runguard import commands
from airflow_runguard.config import Settings, connect_ledger, settings
from airflow_runguard.core.board import MANY, Board, Filter
from airflow_runguard.core.record import Call, FailureClass, Record, State
from airflow_runguard.core.rows import call_of, object_of, record_of
from airflow_runguard.masking import Hide, hider
from airflow_runguard.ui import shapes
from airflow_runguard.ui.access import ReaderDep
from airflow_runguard.ui.lending import Lender

Data = dict[str, Any]
router = APIRouter()

WINDOWS = {"24h": ("hour", timedelta(hours=24)), "7d": ("day", timedelta(days=7)), "30d": ("day", timedelta(days=30))}
SHOWN = 10
"""Records that the overview lists of each kind."""


def storable(text: str) -> str:
    """What PostgreSQL takes as text. :raises ValueError: a NUL, or half of a surrogate pair."""
    if "\x00" in text or any("\ud800" <= char <= "\udfff" for char in text):
        raise ValueError("it holds a character that is no text")
    return text


Text = Annotated[str, AfterValidator(storable), Field(max_length=512)]
Number = Annotated[int, Path(ge=1, le=2**62)]
Moment = AwareDatetime | None


class Wanted(BaseModel):
    """Which records; what is left out does not matter."""

    model_config = ConfigDict(extra="forbid")

    state: Annotated[list[State] | None, Field(description="any of these states")] = None
    failure_class: FailureClass | Literal["none"] | None = None
    dag_id: Text | None = None
    task_id: Text | None = None
    run_id: Text | None = None
    map_index: Annotated[int | None, Field(ge=-1, le=2**31 - 1)] = None
    namespace: Text | None = None
    key_prefix: Text | None = None
    partition: Text | None = None
    gate: Text | None = None
    currency: Text | None = None
    holder: Annotated[Text | None, Field(description="host, run or task instance id of the (last) holder")] = None
    needs_person: bool = False
    waiting: Annotated[bool, Field(description="has a turn at a gate: paused, or in doubt and sent again")] = False
    prevented: Annotated[
        Literal["replay", "doubt"] | None,
        Field(description="in the last 30 days its result was given back instead of calling again / it came in doubt"),
    ] = None
    since: Annotated[Moment, Field(description="begun at or after")] = None
    until: Annotated[Moment, Field(description="begun before")] = None
    sort: Literal["newest", "oldest", "name"] | None = None

    def filter(self) -> Filter:
        named = self.model_dump(exclude={"state", "key_prefix", "sort", "after", "limit", "ids", "format"})
        states = tuple(state.value for state in self.state) if self.state else None
        return Filter(states=states, prefix=self.key_prefix or None, **named)


class WantedPage(Wanted):
    after: Annotated[Text | None, Field(description="`next` of the page before", max_length=8_000)] = None
    limit: Annotated[int, Field(ge=1, le=200)] = 50


class WantedExport(Wanted):
    format: Literal["csv", "json"] = "csv"


class WantedLines(BaseModel):
    model_config = ConfigDict(extra="forbid")
    ids: Annotated[list[Annotated[int, Field(ge=1, le=2**62)]], Field(max_length=200)]


def lender(request: Request) -> Lender:
    kept: Lender = request.app.state.lender
    return kept


def lent(request: Request) -> Iterator[Board]:
    with lender(request).board() as board:
        yield board


BoardDep = Annotated[Board, Depends(lent)]


def hidden() -> tuple[Settings, Hide | None]:
    """The settings, and how results and arguments are masked; ``None`` = they are not shown."""
    from airflow._shared.secrets_masker import redact

    options = settings()
    return options, hider(options.mask_fields, redact) if options.show_results else None


# -- who, and the whole ------------------------------------------------------------------------------------------------


@router.get("/me", summary="Who is asking, and what they may do")
def me(who: ReaderDep) -> Data:
    options = settings()
    return {
        "name": who.name,
        "sees_all": who.dags is None,
        "may_change_all": who.may_change(None),
        "may_see_settings": who.may_see_settings(),
        "deployment": options.deployment,
        "show_results": options.show_results,
    }


@router.get("/overview", summary="How many records stand where, and what needs a person")
def overview(board: BoardDep, who: ReaderDep) -> Data:
    meta = board.check()
    readable = who.dags
    gates = board.board_gates(readable)
    needing = board.page(Filter(needs_person=True), readable=readable, sort="oldest", limit=SHOWN)
    running = board.page(Filter(states=("running",)), readable=readable, sort="oldest", limit=SHOWN)
    return {
        "now": shapes.plain(meta["now"]),
        "deployment": board.deployment,
        "lost_time": meta["lost_time"],
        "counts": [
            {name: shapes.plain(value) for name, value in row.items() if name != "amount" or row["currency"]}
            for row in board.tallied(readable)
        ],
        "running": {"n": (n := board.running(readable)), "more": n >= MANY},
        "running_now": [shapes.line(row) for row in running.rows],
        "needs_person": [shapes.line(row) for row in needing.rows],
        "gates": [_gate(row) for row in gates if row["closed"]],
        "freezes": [_freeze(row) for row in board.board_freezes(readable) if row["thawed_at"] is None],
        "prevented": {
            kind: dict(zip(("n", "more"), board.prevented(kind, readable), strict=True)) for kind in ("replay", "doubt")
        },
    }


@router.get("/pulse", summary="Where the records stand that began in each hour or day (UTC)")
def pulse(board: BoardDep, who: ReaderDep, window: Literal["24h", "7d", "30d"] = "24h") -> Data:
    span, length = WINDOWS[window]
    now = board.check()["now"].astimezone(UTC)
    step = timedelta(hours=1) if span == "hour" else timedelta(days=1)
    last = now.replace(minute=0, second=0, microsecond=0)
    last = last if span == "hour" else last.replace(hour=0)
    first = last - length + step
    found: dict[datetime, dict[str, int]] = {}
    for row in board.pulses(span, first, who.dags):
        found.setdefault(row["at"].astimezone(UTC), {})[row["state"]] = row["n"]
    slots = [first + step * n for n in range(int(length / step))]
    return {"window": window, "span": span, "slots": [{"at": shapes.plain(at), **found.get(at, {})} for at in slots]}


# -- records -----------------------------------------------------------------------------------------------------------


@router.get("/records", summary="A page of records", response_model=Data)
def records(board: BoardDep, who: ReaderDep, wanted: Annotated[WantedPage, Query()]) -> JSONResponse:
    page = board.page(wanted.filter(), readable=who.dags, sort=wanted.sort, after=wanted.after, limit=wanted.limit)
    return JSONResponse(  # plain already: having FastAPI look at each value would take longer than all the rest
        {
            "now": shapes.plain(page.now),
            "records": [_line(row, who) for row in page.rows],
            "next": page.after,
        }
    )


@router.get("/records/lines", summary="These records, as a list has them; those that may not be seen are missing")
def lines(board: BoardDep, who: ReaderDep, wanted: Annotated[WantedLines, Query()]) -> Data:
    return {"records": [_line(row, who) for row in board.some(wanted.ids, readable=who.dags)]}


@router.get(
    "/records/export",
    summary="All records that fit, streamed",
    response_class=StreamingResponse,
    responses={200: {"content": {"text/csv": {}, "application/json": {}}}},
)
def export(request: Request, who: ReaderDep, wanted: Annotated[WantedExport, Query()]) -> StreamingResponse:
    kept = lender(request)
    with kept.board() as board:  # what is wrong is said before the first byte
        board.page(wanted.filter(), readable=who.dags, sort=wanted.sort, limit=1)

    def rows() -> Iterator[Mapping[str, Any]]:
        with kept.board() as board:
            yield from board.whole(wanted.filter(), readable=who.dags, sort=wanted.sort)

    made = _as_csv(rows()) if wanted.format == "csv" else _as_json(rows())
    kind = "text/csv; charset=utf-8" if wanted.format == "csv" else "application/json"
    name = f"ledger-{datetime.now(UTC):%Y-%m-%dT%H%M%SZ}.{wanted.format}"
    return StreamingResponse(made, media_type=kind, headers={"Content-Disposition": f'attachment; filename="{name}"'})


def _as_csv(rows: Iterator[Mapping[str, Any]]) -> Iterator[str]:
    buffer = io.StringIO()
    out = csv.writer(buffer)
    out.writerow(shapes.LINE)
    for number, row in enumerate(rows):
        shown = shapes.line(row)
        out.writerow([shapes.text(shown[name]) for name in shapes.LINE])
        if number % 200 == 199:
            yield buffer.getvalue()
            buffer.seek(0)
            buffer.truncate()
    yield buffer.getvalue()


def _as_json(rows: Iterator[Mapping[str, Any]]) -> Iterator[str]:
    yield "["
    for number, row in enumerate(rows):
        yield (",\n" if number else "\n") + json.dumps(shapes.line(row))
    yield "\n]\n"


@router.get("/namespaces", summary="The namespaces there are")
def namespaces(board: BoardDep, who: ReaderDep) -> Data:
    """For those who may see all records; to others a namespace may tell of DAGs that they may not see."""
    return {"namespaces": board.namespaces(1_000) if who.dags is None else []}


@router.get("/records/{record_id}", summary="One record: where it stands, who moves it next, and its latest events")
def record(board: BoardDep, who: ReaderDep, record_id: Number) -> Data:
    row = seen(board, who, record_id)
    value = record_of(row)
    board.check()
    _, hide = hidden()
    gates = board.board_gates(who.dags, name=row["gate"]) if row["gate"] else ()
    return {
        "now": shapes.plain(row["now"]),
        "record": shapes.record(row, value, _telling(board, value), hide),
        "may_change": who.may_change(row["dag_id"]),
        "gate": _gate(gates[0]) if gates else None,
        "replays": {name: shapes.plain(value) for name, value in replays[0].items()}
        if (replays := board.replays_of(record_id))
        else None,
        "events": [shapes.told(event) for event in board.events_of(record_id, limit=100)],
        "questions": [
            {name: shapes.plain(value) for name, value in asked.items()} for asked in board.questions_of(record_id)
        ],
        "generations": [shapes.generation(event) for event in board.generations_of(record_id)],
    }


def _line(row: Mapping[str, Any], who: ReaderDep) -> Data:
    return {**shapes.line(row), "may_change": who.may_change(None) or who.may_change(row["dag_id"])}


def seen(board: Board, who: ReaderDep, record_id: int) -> Mapping[str, Any]:
    """:raises HTTPException: 404: there is none, or none that this reader may see."""
    row = board.line_of(record_id, who.dags)
    if row is None:
        raise HTTPException(404, f"The ledger has no record {record_id} that you may see.")
    return row


def _telling(board: Board, value: Record) -> list[Call]:
    """Some of the calls that say why it stands there, to name them: those in doubt, or what is done."""
    asked = "in_doubt" if value.state is State.IN_DOUBT else "done" if value.state is State.PENDING else None
    if asked is None:
        return []
    return [call_of(row) for row in board.calls_of(value.id, value.generation, state=asked, limit=20).rows]


class WantedCalls(BaseModel):
    model_config = ConfigDict(extra="forbid")
    generation: Annotated[int | None, Field(ge=1, le=2**31 - 1)] = None
    state: Literal["pending", "started", "done", "failed", "paused", "in_doubt"] | None = None
    after: Text = ""
    limit: Annotated[int, Field(ge=1, le=500)] = 100


@router.get("/records/{record_id}/calls", summary="The calls (items) of one generation, by name", response_model=Data)
def calls(board: BoardDep, who: ReaderDep, record_id: Number, wanted: Annotated[WantedCalls, Query()]) -> JSONResponse:
    row = seen(board, who, record_id)
    value = record_of(row)
    if not board.installation:
        board.check()
    generation = wanted.generation or value.generation
    page = board.calls_of(record_id, generation, state=wanted.state, after=wanted.after, limit=wanted.limit)
    renamed = [shapes.event(event) for event in board.names_of(record_id)]
    _, hide = hidden()
    return JSONResponse(  # as in records()
        {
            "generation": generation,
            "calls": [shapes.call(board, value, one, renamed, hide) for one in page.rows],
            "next": page.after,
            "progress": object_of(row["progress"]),
        }
    )


@router.get("/records/{record_id}/events", summary="Earlier events, newest first")
def events(
    board: BoardDep,
    who: ReaderDep,
    record_id: Number,
    before: Annotated[int, Query(ge=1, le=2**62)],
    limit: Annotated[int, Query(ge=1, le=500)] = 100,
) -> Data:
    seen(board, who, record_id)
    found = board.events_of(record_id, before=before, limit=limit)
    return {
        "events": [shapes.told(event) for event in found],
        "next": found[-1]["id"] if len(found) == limit else None,
    }


# -- gates, freezes, health --------------------------------------------------------------------------------------------


@router.get("/gates", summary="Gates and freezes, with what people and vendors did to them")
def gates(board: BoardDep, who: ReaderDep) -> Data:
    """The history is for those who may see all DAGs."""
    return {
        "now": shapes.plain(board.check()["now"]),
        "gates": [_gate(row) for row in board.board_gates(who.dags)],
        "freezes": [_freeze(row) for row in board.board_freezes(who.dags)],
        "history": [shapes.ledger_event(row) for row in board.ledger_events()] if who.dags is None else [],
        "default_rate": settings().resume_rate,
        "may_change": who.may_change(None),
    }


def _gate(row: Mapping[str, Any]) -> Data:
    return {name: shapes.plain(value) for name, value in row.items() if name != "now"}


def _freeze(row: Mapping[str, Any]) -> Data:
    return {name: shapes.plain(value) for name, value in row.items() if name not in ("now", "deployment")}


@router.get("/health", summary="What a report of a fault needs; secrets are masked")
def health(who: ReaderDep) -> Data:
    """Every check of ``airflow runguard doctor``, the settings of this api-server, and versions."""
    from airflow._shared.secrets_masker import redact

    if not who.may_see_settings():
        raise HTTPException(403, "You may not see Airflow's configuration, so you may not see this page.")
    options = settings()
    connect = partial(_connect, options)
    found = commands.doctor(connect, deployment=options.deployment, settings=options)
    packages = ("airflow-runguard", "apache-airflow", "psycopg", "fastapi", "hiredis")
    answer = {
        "said": found["said"],
        "checks": found["checks"],
        "settings": redact(asdict(options)),
        "versions": {"python": platform.python_version(), **{name: version(name) for name in packages}},
        "now": shapes.plain(datetime.now(UTC)),
        "ledger": None,
    }
    if not {"ledger", "schema", "deployment"} & set(found["failed"]):
        with Board(connect, deployment=options.deployment) as board:
            meta = board.check()
            names = ("deployment", "schema_version", "epoch", "lost_time", "unknown_before", "server_version", "now")
            answer["ledger"] = {name: shapes.plain(meta[name]) for name in names}
    return answer


def _connect(options: Settings) -> Any:
    return connect_ledger(options)()
