"""How the tests of the pages look: Chromium, Airflow's page with our frame in it, and records to look at."""

from __future__ import annotations

import os
import shutil
import urllib.parse
import uuid
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest

from airflow_runguard.core import keys, payloads
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Effect, Failure, FailureClass, Grant, Holder, Order, Outcome, Settlement, State
from demo.airflow_api import AirflowApi
from demo.drive import PATIENCE
from demo.ground import DEPLOYMENT, Ground
from demo.stack import USER

CHROMIUM = next((found for name in ("chromium", "chromium-browser") if (found := shutil.which(name))), None)
SAFE = "--no-sandbox --disable-gpu --no-first-run --disable-background-networking --disable-sync --no-proxy-server"
HOSTILE = '<img src=x onerror="window.top.hacked=1"><script>window.top.hacked=1</script>\'"{{7*7}}'
RUN = "run-of-pages"


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Ends with its module: while it lives, Playwright's event loop runs in this thread, and no other can."""
    if CHROMIUM is None and os.environ.get("CI") != "true":
        pytest.skip("The pages are looked at in Chromium, which is not installed: apt-get install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=CHROMIUM, args=SAFE.split())
        yield running
        running.close()


class Page:
    """Airflow's own page, with the frame that is ours.

    :param url: of the api-server.
    """

    def __init__(self, browser: Any, url: str, user: str, theme: str = "light", width: int = 1280) -> None:
        self.url = url
        context = browser.new_context(viewport={"width": width, "height": 900})
        api = AirflowApi(self.url, user, user)
        token = api.call("POST", "/auth/token", {"username": user, "password": user}, login=False)["access_token"]
        context.add_cookies([{"name": "_token", "value": token, "url": self.url}])
        context.add_init_script(f"if (!localStorage.getItem('theme')) localStorage.setItem('theme', '{theme}')")
        self.page = context.new_page()
        self.page.set_default_timeout(60_000)
        self.errors: list[str] = []
        self.page.on("pageerror", lambda error: self.errors.append(str(error)))

    def open(self, place: str = "", host: str = "/plugin/runguard") -> Any:
        """Our frame, when it has its data."""
        own = f"{urllib.parse.urlsplit(self.url).path}/runguard/ui/{place}"  # what Airflow itself puts behind it
        self.page.goto(f"{self.url}{host}{own if place else ''}")
        return self.frame()

    def frame(self) -> Any:
        frame = self.page.frame_locator('iframe[title="Ledger"]')
        frame.locator("body[data-ready]").wait_for()
        return frame


@pytest.fixture
def page(browser: Any, ground: Ground) -> Iterator[Page]:
    page = Page(browser, ground.airflow.url, USER)
    yield page
    page.page.context.close()
    assert page.errors == []


@pytest.fixture(scope="session")
def ledger(ground: Ground) -> Iterator[Ledger]:
    with closing(Ledger(lambda: psycopg.connect(ground.ledger_url), deployment=DEPLOYMENT)) as ledger:
        ledger.check()
        yield ledger


def doubtful(ledger: Ledger, key: str, **more: Any) -> int:
    """A record in doubt, as a task leaves it whose answer never came."""
    order = Order(
        identity=keys.identity(DEPLOYMENT, "pages", key),
        payload=payloads.payload({"n": key}),
        max_call_time=0.01,
        **more,
    )
    holder = Holder(uuid.uuid4().hex, uuid.uuid4().hex, "paging", "single", "no-such-run", 1, -1, "host", 1)
    claim = ledger.claim(order, holder)
    unknown = Failure(FailureClass.TIMEOUT, Effect.UNKNOWN, evidence=f"read timeout {HOSTILE}")
    ledger.write(
        Grant(order.identity, claim.record_id, claim.generation, claim.fence),
        holder=holder,
        order=order,
        outcomes=[Outcome("body", failure=unknown, error=f"no answer {HOSTILE}")],
        settlement=Settlement(State.IN_DOUBT, failure=unknown, error=f"no answer {HOSTILE}"),
    )
    return claim.record_id


@pytest.fixture(scope="session")
def paged(ground: Ground) -> str:
    """A run with records of a mapped task and of one that is not."""
    api = ground.airflow.api
    api.wait_dag("paging", PATIENCE)
    api.unpause("paging")
    api.trigger("paging", run_id=RUN)
    assert api.wait_run("paging", RUN, PATIENCE) == "success"
    return RUN
