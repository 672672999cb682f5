"""What a call gives back is read before it is booked: an error that looks like a success is never done (P9)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from email.message import Message
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import psycopg
import pydantic
import pytest
import requests
import urllib3

from airflow_runguard.core import guard, work
from airflow_runguard.core.errors import ResultIsError
from airflow_runguard.core.leases import Leases
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import CallState, Order, State
from demo import vendor_errors as v
from demo.vendor import Vendor
from demo.vendor_control import VendorControl
from tests.core import batches, engine
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


@dataclass
class Charge:
    id: str
    error: Any = None
    status_code: int = 200


class Answer(pydantic.BaseModel):
    id: str
    error: Any = None


def unchecked(status: int, *before: int, retried: str = "") -> requests.Response:
    """A response that nobody looked at, after those that its client had before it."""
    answer: requests.Response = v.http(status, None, {"Retry-After": "3"}).response
    answer.history = [v.http(earlier).response for earlier in before]
    if retried:
        timeout = urllib3.exceptions.ReadTimeoutError(None, "/", "timed out")  # type: ignore[arg-type]
        history = (urllib3.util.retry.RequestHistory("POST", "/", timeout, None, None),)
        answer.raw = urllib3.HTTPResponse(status=status, retries=urllib3.Retry(0, history=history))
    return answer


SLOW = {"code": "rate_limit_exceeded"}
WORDS: dict[str, Callable[[], Any]] = {
    "beside an id": lambda: {"id": "ch_1", "error": SLOW},
    "nothing else": lambda: {"error": SLOW},
    "out of credit": lambda: {"id": "ch_1", "error": {"code": "insufficient_quota"}},
    "a status": lambda: {"id": "ch_1", "status": 429, "error": SLOW},
    "a status inside": lambda: {"id": "ch_1", "error": {"code": 429}},
    "declined": lambda: {"id": "ch_1", "error": {"code": 402, "type": "card_declined"}},
    "Slack's word beside an id": lambda: {"id": "ch_1", "ok": False, "error": "ratelimited"},
    "not ok": lambda: {"ok": False},
    "no success": lambda: {"id": "ch_1", "success": False},
    "in a list": lambda: [{"id": "ch_1", "error": SLOW}],
    "a status in a list": lambda: [{"id": "ch_1", "status": 429}],
    "AWS's word in a list": lambda: [{"id": "ch_1", "ErrorCode": "ThrottlingException"}],
    "no success in a list": lambda: [{"id": "ch_1", "success": False}],
    "GraphQL": lambda: {"data": None, "errors": [{"message": "x", "extensions": {"code": "RATE_LIMITED"}}]},
    "GraphQL's words": lambda: {"errors": [{"message": "the mail was refused"}]},
    "Shopify's code beside an id": lambda: {"id": "ch_1", "errors": THROTTLED["errors"]},
    "one of two mutations": lambda: {
        "data": {"pay": {"payment": {"id": "ch_1"}, "userErrors": []}, "tag": {"userErrors": [{"message": "blank"}]}}
    },
    "a mutation that did something": lambda: {
        "data": {"pay": {"payment": {"id": "ch_1"}, "userErrors": [{"message": "no receipt"}]}}
    },
    "like Graph's batch": lambda: {"responses": [{"id": "ch_1", "status": 429}]},
    "like a bulk answer": lambda: {"errors": True, "items": [{"id": "ch_1", "status": 429, "error": SLOW}]},
    "like SQS": lambda: {"Failed": [{"Id": "1", "Code": "Throttling", "charge": "ch_1"}]},
    "a dataclass": lambda: Charge("ch_1", error=SLOW),
    "a dataclass's status": lambda: Charge("ch_1", status_code=429),
    "a model": lambda: Answer(id="ch_1", error=SLOW),
    "models in a list": lambda: [Answer(id="ch_1", error=SLOW)],
    "an error beside an id": lambda: {"id": "ch_1", "mail": v.http(429)},
    "an error in an item": lambda: [{"id": "ch_1", "error": v.http(429)}],
    "a model in an item": lambda: [{"id": "ch_1", "error": Answer(id="x", error=SLOW)}],
    "an error in a list": lambda: ["ch_1", v.http(429)],
    "an error in a dataclass": lambda: Charge("ch_1", error=v.http(429)),
    "a response after a redirect": lambda: unchecked(429, 303),
    "a response after a retry": lambda: unchecked(429, retried="timeout"),
}
"""What functions return that had the effect, and something else that was refused."""


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


def test_p03_a_function_that_returned_is_not_called_again_for_words_in_what_it_returned(
    ledger: Ledger, vendor: Vendor, vendor_control: VendorControl
) -> None:
    for name, value in WORDS.items():

        def pay(value: Callable[[], Any] = value) -> Any:
            post(vendor.url)
            return value()

        for _ in range(2):
            todo = engine.work(order(name), lambda context, pay=pay: context.call("pay", pay))  # type: ignore[misc]
            how = guard.run(ledger, Leases(None, ledger.installation), todo)
            assert isinstance(how, guard.Ended), (name, how)
        assert state(ledger, order(name)) == (State.IN_DOUBT, [CallState.IN_DOUBT]), name
    assert vendor_control.charges() == len(WORDS)
    assert all(gate["closed_until"] is None for gate in ledger.gates("shop"))


def test_p03_an_item_whose_function_returned_is_not_called_again_for_words_in_what_it_returned(
    ledger: Ledger, vendor: Vendor, vendor_control: VendorControl
) -> None:
    def pay(context: Any, item: dict[str, Any]) -> Any:
        post(vendor.url)
        return WORDS[item["id"]]()

    for _ in range(2):
        batches.run(ledger, batches.invoices(*WORDS), pay)
    assert batches.states(ledger) == dict.fromkeys(WORDS, "in_doubt")
    assert vendor_control.charges() == len(WORDS)


@pytest.mark.parametrize("value", [lambda: unchecked(429), lambda: unchecked(429, 308), lambda: v.http(429)])
def test_p06_the_vendors_own_answer_pauses_although_nobody_looked_at_it(
    value: Callable[[], Any], ledger_url: str, ledger: Ledger
) -> None:
    what = order()
    assert isinstance(attempt(ledger_url, what, lambda context: context.call("pay", value)), guard.Waiting)
    assert state(ledger, what) == (State.PAUSED, [CallState.PAUSED])


def test_p09_a_body_that_gives_its_clients_response_back_is_judged_by_its_status(ledger: Ledger) -> None:
    """`return requests.post(…)`: nothing was raised, and nothing was charged."""
    booked = {402: State.FAILED, 429: State.PAUSED, 500: State.IN_DOUBT, 200: State.DONE}
    for status, one_request in booked.items():
        for single_request in (True, False):
            what = engine.order(f"{status} {single_request}")
            work = engine.work(what, lambda _, status=status: unchecked(status), single_request=single_request)  # type: ignore[misc]
            how = guard.run(ledger, Leases(None, ledger.installation), work)
            expected = one_request if single_request or status == 200 else State.IN_DOUBT
            assert record_of(ledger, what).state is expected, (status, single_request, how)
            assert isinstance(how, guard.Done) == (status == 200)


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


def test_p08_the_key_of_a_body_is_refused_to_a_body_of_calls(ledger: Ledger) -> None:
    """Handed to two calls, it would be one key: the vendor answers the second with what the first has done."""
    sent: list[str] = []

    def body(context: guard.GuardContext) -> None:
        for name in ("charge", "refund"):
            context.call(name, lambda key: sent.append(key) or "ok", key=context.idempotency_key)

    work = engine.work(engine.order("two", calls="explicit"), body)
    how = guard.run(ledger, Leases(None, ledger.installation), work)
    assert isinstance(how, guard.Ended)
    assert "vendor_key_as" in str(how)
    assert sent == []


@pytest.mark.parametrize("calls", ["body", "explicit"])
def test_p02_a_result_that_is_too_long_to_store_is_missing_and_its_effect_is_booked(
    calls: str, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(work, "LARGEST_RESULT", 1_000)
    made = []

    def run(length: int) -> guard.How:
        def pay() -> str:
            made.append(length)
            return "x" * (length - 2)  # and its quotes

        def body(context: guard.GuardContext) -> str:
            return context.call("pay", pay) if calls == "explicit" else pay()

        what = engine.order(str(length), calls=calls)
        return guard.run(ledger, Leases(None, ledger.installation), engine.work(what, body))

    for length in (1_000, 1_001):
        assert run(length) == guard.Done("x" * (length - 2), replayed=False)
    assert run(1_000) == guard.Done("x" * 998, replayed=True)
    again = run(1_001)
    assert isinstance(again, guard.Ended)
    assert "is done, but its result was not stored (ValueError: it has 1001 bytes, and a result may have 1000)" in str(
        again.error
    )
    assert made == [1_000, 1_001]
