"""What a call gives back is read before it is booked: an error that looks like a success is never done (P9)."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from datetime import UTC, datetime
from email.message import Message
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psycopg
import pytest

from airflow_runguard.core import guard
from airflow_runguard.core.errors import ResultIsError
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import CallState, Order, State
from demo.vendor import Vendor
from demo.vendor_control import VendorControl
from tests.core import engine
from tests.core.accidents import attempt, record_of

THROTTLED = {
    "errors": [{"message": "Throttled", "extensions": {"code": "THROTTLED"}}],
    "extensions": {
        "cost": {
            "requestedQueryCost": 752,
            "throttleStatus": {"maximumAvailable": 2000, "currentlyAvailable": 152, "restoreRate": 5},
        }
    },
}
BULK = {"errors": True, "items": [{"index": {"status": 201}}, {"index": {"status": 429, "error": {"type": "x"}}}]}
REFUSED = {"ok": False, "error": "channel_not_found"}


def order(key: str = "k", **rules: Any) -> Order:
    return engine.order(key, calls="explicit", gate="shop", **rules)


def post(url: str) -> Any:
    """What a client that looks at the status only gives back."""
    with urlopen(Request(url + "/charges", b"{}", {"Content-Type": "application/json"}), timeout=30) as answer:
        return json.load(answer)


def state(ledger: Ledger, what: Order) -> tuple[State | None, list[CallState]]:
    record = record_of(ledger, what)
    return record.state, [call.state for call in ledger.calls(record.id)]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["call", "acall"])
def test_p09_a_throttle_inside_a_success_pauses_the_record_and_closes_its_gate(
    asynchronous: bool, ledger_url: str, ledger: Ledger, vendor: Vendor, vendor_control: VendorControl
) -> None:
    vendor_control.script("status", status=200, body=THROTTLED)
    seen: list[BaseException] = []

    async def asked(context: guard.GuardContext) -> Any:
        async def query() -> Any:
            return post(vendor.url)

        return await context.acall("query", query)

    def body(context: guard.GuardContext) -> Any:
        try:
            return asyncio.run(asked(context)) if asynchronous else context.call("query", post, vendor.url)
        except ResultIsError as error:
            seen.append(error)
            raise

    what = order()
    how = attempt(ledger_url, what, body)
    assert isinstance(how, guard.Waiting)
    assert how.seconds is not None
    assert how.seconds >= 119  # (752 - 152) / 5, said by the vendor
    assert "Call 'query' came back with an error: " in str(seen[0])
    assert "shopify-throttled" in str(seen[0])
    assert state(ledger, what) == (State.PAUSED, [CallState.PAUSED])
    [gate] = ledger.gates("shop")
    assert gate["closed_until"] is not None
    other = order("other")
    assert isinstance(attempt(ledger_url, other, body), guard.Waiting)
    assert len(vendor_control.requests()) == 1, "nobody calls while the gate is closed"


@pytest.mark.parametrize(
    ("body", "left"),
    [
        (REFUSED, (State.FAILED, [CallState.FAILED])),
        (BULK, (State.IN_DOUBT, [CallState.IN_DOUBT])),
    ],
    ids=["refused", "half done"],
)
def test_p09_an_error_inside_a_success_is_booked_as_what_it_means(
    body: Any, left: Any, ledger_url: str, ledger: Ledger, vendor: Vendor, vendor_control: VendorControl
) -> None:
    vendor_control.script("status", status=200, body=body)
    what = order()
    how = attempt(ledger_url, what, lambda context: context.call("post", post, vendor.url))
    assert isinstance(how, guard.Ended)
    assert isinstance(how.error, ResultIsError)
    assert state(ledger, what) == left


def test_p09_a_body_that_swallows_the_error_is_not_done_where_nobody_knows(
    ledger_url: str, ledger: Ledger, vendor: Vendor, vendor_control: VendorControl
) -> None:
    vendor_control.script("status", status=200, body=BULK)

    def body(context: guard.GuardContext) -> str:
        with suppress(ResultIsError):
            context.call("post", post, vendor.url)
        return "fine"

    what = order()
    assert isinstance(attempt(ledger_url, what, body), guard.Ended)
    assert state(ledger, what) == (State.IN_DOUBT, [CallState.IN_DOUBT])


def test_p09_an_exception_given_back_is_raised_and_booked(ledger_url: str, ledger: Ledger) -> None:
    what = order()
    how = attempt(ledger_url, what, lambda context: context.call("post", lambda: ConnectionResetError("gone")))
    assert isinstance(how, guard.Ended)
    assert isinstance(how.error, ConnectionResetError)
    assert state(ledger, what) == (State.IN_DOUBT, [CallState.IN_DOUBT])


@pytest.mark.parametrize("value", [None, [], {}, "", 0, False, {"id": "ch_1", "error": None}])
def test_p02_an_empty_result_is_a_result(value: Any, ledger_url: str, ledger: Ledger) -> None:
    what = order()
    assert attempt(ledger_url, what, lambda context: context.call("get", lambda: value)) == guard.Done(value, False)
    assert state(ledger, what) == (State.DONE, [CallState.DONE])


@pytest.mark.parametrize("calls", ["explicit", "body"])
def test_p06_a_moment_is_counted_against_the_databases_time(
    calls: str, ledger_url: str, ledger: Ledger, sql: psycopg.Connection[Any]
) -> None:
    """A reset as epoch seconds, in an answer that has no ``Date`` of its own."""
    [[epoch]] = sql.execute("select extract(epoch from clock_timestamp())::bigint + 7200").fetchall()

    def refuse() -> None:
        headers = Message()
        headers["X-RateLimit-Remaining"], headers["X-RateLimit-Reset"] = "0", str(epoch)
        raise HTTPError("https://api.example.com", 429, "Too Many Requests", headers, None)

    what = engine.order("k", calls=calls)
    attempt(
        ledger_url,
        what,
        lambda context: refuse() if calls == "body" else context.call("post", refuse),
        single_request=calls == "body",
    )
    record = record_of(ledger, what)
    assert record.state is State.PAUSED
    assert record.resume_at is not None
    late = record.resume_at - datetime.fromtimestamp(epoch, UTC)
    assert 0 <= late.total_seconds() < 60


@pytest.mark.parametrize("calls", ["explicit", "body"])
def test_p06_a_wait_shorter_than_its_floor_is_raised_to_it(calls: str, ledger_url: str, ledger: Ledger) -> None:
    """A daily cap with a hint of a few seconds: nobody storms it every few seconds."""

    def refuse() -> None:
        headers = Message()
        headers["Retry-After"], headers["x-hubspot-correlation-id"] = "3", "x"
        error = HTTPError("https://api.hubapi.com", 429, "Too Many Requests", headers, None)
        error.body = {"policyName": "DAILY"}  # type: ignore[attr-defined]
        raise error

    what = engine.order("k", calls=calls)
    how = attempt(
        ledger_url,
        what,
        lambda context: refuse() if calls == "body" else context.call("post", refuse),
        single_request=calls == "body",
    )
    assert isinstance(how, guard.Waiting)
    assert how.seconds is not None
    assert how.seconds > 3_500
