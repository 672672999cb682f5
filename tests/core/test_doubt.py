"""Doubt is sticky, one vendor key goes over all of it, and the same work entered twice is one call (P3, P2).

The shared cases R28 (delivered twice), R32 (key over unknown outcomes), R40 (deferral) and R46 (success not reported).
"""

from __future__ import annotations

import contextlib
import functools
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from airflow_runguard.core import guard
from airflow_runguard.core.errors import PlanningError
from airflow_runguard.core.leases import Leases
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import CallState, Order, State
from demo.processes import free_port
from demo.vendor_control import VendorControl
from tests.core.accidents import attempt, charge, record_of, until
from tests.core.books import come_due
from tests.core.engine import DEPLOYMENT, holder, order, work
from tests.core.test_crash_points import Scenario, die_all

Body = Callable[[guard.GuardContext], Any]


def pay(url: str, customer: str, timeout: float = 20.0) -> Body:
    """One explicit call."""

    def body(context: guard.GuardContext) -> str:
        return context.call("pay", functools.partial(charge, url, customer, timeout=timeout), vendor_key_as="key")

    return body


def assert_in_doubt(how: guard.How, ledger: Ledger, what: Order) -> None:
    assert isinstance(how, guard.Ended)
    assert how.message.startswith("In doubt")
    record = record_of(ledger, what)
    assert record.state is State.IN_DOUBT
    [call] = ledger.calls(record.id)
    assert call.state is CallState.IN_DOUBT
    assert call.first_unknown_at is not None


def test_p03_doubt_is_sticky_what_a_later_attempt_learns_says_nothing_about_the_earlier_one(
    ledger_url: str, ledger: Ledger, vendor_control: VendorControl
) -> None:
    what = order("k", calls="explicit", on_doubt="replay")
    vendor_control.script(gate="answer")
    assert_in_doubt(attempt(ledger_url, what, pay(vendor_control.url, "c", timeout=0.3)), ledger, what)
    began = ledger.calls(1)[0].first_unknown_at

    vendor_control.script("status", status=429, headers={"Retry-After": "1"})
    assert_in_doubt(attempt(ledger_url, what, pay(vendor_control.url, "c")), ledger, what)
    nobody = f"http://127.0.0.1:{free_port()}"
    assert_in_doubt(attempt(ledger_url, what, pay(nobody, "c")), ledger, what)
    vendor_control.script("status", status=402, saved=False)
    assert_in_doubt(attempt(ledger_url, what, pay(vendor_control.url, "c")), ledger, what)
    assert ledger.calls(1)[0].first_unknown_at == began

    assert isinstance(attempt(ledger_url, what, pay(vendor_control.url, "c")), guard.Done)
    assert vendor_control.charges() == 1
    assert len({request.key for request in vendor_control.requests()}) == 1
    vendor_control.release("answer")


def test_p03_replay_is_allowed_only_while_the_vendor_remembers_the_key_pauses_included(
    ledger_url: str, ledger: Ledger, vendor_control: VendorControl
) -> None:
    what = functools.partial(order, "k", calls="explicit", on_doubt="replay")
    vendor_control.script("drop")
    assert_in_doubt(attempt(ledger_url, what(), pay(vendor_control.url, "c")), ledger, what())
    vendor_control.script("status", status=429)
    assert_in_doubt(attempt(ledger_url, what(), pay(vendor_control.url, "c")), ledger, what())
    assert len(vendor_control.requests()) == 2

    too_late = what(key_lifetime=600.000001, max_call_time=600.0)  # from the first intent until it arrives
    assert_in_doubt(attempt(ledger_url, too_late, pay(vendor_control.url, "c")), ledger, too_late)
    assert len(vendor_control.requests()) == 2, "asked, not sent"
    assert isinstance(attempt(ledger_url, what(), pay(vendor_control.url, "c")), guard.Done)
    assert vendor_control.charges() == 1


def test_p03_replay_ends_in_asking_when_the_same_stored_error_comes_back(
    ledger_url: str, ledger: Ledger, vendor_control: VendorControl
) -> None:
    what = order("k", calls="explicit", on_doubt="replay")
    vendor_control.script("status", status=500, times=5)
    for _ in range(4):
        assert_in_doubt(attempt(ledger_url, what, pay(vendor_control.url, "c")), ledger, what)
    assert len(vendor_control.requests()) == 2


def test_p03_r32_one_vendor_key_over_timeout_500_crash_and_pause_until_success(
    ledger_url: str,
    ledger: Ledger,
    vendor_control: VendorControl,
    sql: psycopg.Connection[Any],
) -> None:
    accident = Scenario("explicit", "replay", "after charge", "pay")
    customer = f"{accident.key} pay"
    what = order(accident.key, calls="explicit", on_doubt="replay")
    body = pay(vendor_control.url, customer)

    vendor_control.script("status", status=429, headers={"Retry-After": "3600"})

    def before_that(context: guard.GuardContext) -> Any:
        context.call("reserve", lambda: "reserved")
        return body(context)

    assert isinstance(attempt(ledger_url, what, before_that), guard.Waiting)
    assert record_of(ledger, what).state is State.PAUSED
    come_due(sql, record_of(ledger, what).id)
    vendor_control.script("slow", gate_before="never")
    timed_out = pay(vendor_control.url, customer, timeout=0.3)
    assert isinstance(attempt(ledger_url, what, timed_out), guard.Ended)
    vendor_control.script("status", status=500)
    assert isinstance(attempt(ledger_url, what, body), guard.Ended)
    die_all([accident], ledger_url, vendor_control.url, {})
    vendor_control.script("status", status=429)
    how = until(functools.partial(attempt, ledger_url, what, body), lambda how: not isinstance(how, guard.Waiting))
    assert isinstance(how, guard.Ended), "the pause came while the outcome was unknown"
    assert isinstance(attempt(ledger_url, what, body), guard.Done)

    requests = vendor_control.requests(customer)
    assert len(requests) == 6
    assert len({request.key for request in requests}) == 1
    assert vendor_control.charges(customer) == 1


def test_p03_a_new_vendor_key_comes_only_after_a_final_refusal(
    ledger_url: str, ledger: Ledger, vendor_control: VendorControl, sql: psycopg.Connection[Any]
) -> None:
    what = order("k", calls="explicit")
    body = pay(vendor_control.url, "c")
    vendor_control.script("status", status=429)
    attempt(ledger_url, what, body)
    come_due(sql, record_of(ledger, what).id)
    attempt(ledger_url, what, pay(f"http://127.0.0.1:{free_port()}", "c"))
    vendor_control.script("status", status=402)
    how = attempt(ledger_url, what, body)
    assert isinstance(how, guard.Ended)
    assert record_of(ledger, what).state is State.FAILED
    assert isinstance(attempt(ledger_url, what, body), guard.Done)

    first, second, third = vendor_control.requests()
    assert first.key == second.key != third.key, "the vendor would have said 402 for ever under the first key"
    assert vendor_control.charges() == 1


@pytest.mark.parametrize("calls", ["body", "explicit"])
def test_p01_r28_the_same_context_delivered_twice_at_once_makes_one_call(
    calls: str, ledger_url: str, vendor_control: VendorControl
) -> None:
    what = order("k", calls=calls)
    vendor_control.script(gate="answer")
    body = (
        pay(vendor_control.url, "c") if calls == "explicit" else lambda context: charge(vendor_control.url, "c", "key")
    )
    started = threading.Barrier(2)

    def deliver() -> guard.How:
        same = holder(ti_id="the same", try_number=1)
        started.wait(20)
        how = attempt(ledger_url, what, body, holder=same)
        vendor_control.release("answer")  # the refused one comes first
        return how

    with ThreadPoolExecutor(2) as pool:
        hows = [future.result() for future in [pool.submit(deliver) for _ in range(2)]]
    assert sorted(type(how).__name__ for how in hows) == ["Done", "Waiting"]
    assert next(how for how in hows if isinstance(how, guard.Waiting)).busy
    assert vendor_control.charges() == len(vendor_control.requests()) == 1


class Deferred(BaseException):
    """As Airflow's TaskDeferred: control flow, not an error."""


def signals(error: BaseException) -> guard.HandOver | None:
    return guard.HandOver(60) if isinstance(error, Deferred) else None


@pytest.mark.parametrize("calls", ["body", "explicit"])
def test_p05_r40_handing_over_and_coming_back_three_times_is_one_claim_and_one_call(
    calls: str, ledger_url: str, ledger: Ledger, vendor_control: VendorControl
) -> None:
    what = order("k", calls=calls, max_claims=2)
    entries = 0

    def body(context: guard.GuardContext) -> Any:
        nonlocal entries
        entries += 1
        said = pay(vendor_control.url, "c")(context) if calls == "explicit" else ""
        if entries <= 3:
            raise Deferred
        return said or charge(vendor_control.url, "c", context.idempotency_key)

    enter = functools.partial(attempt, ledger_url, what, body, signal=signals)
    for _ in range(3):
        assert isinstance(enter(holder=holder(ti_id="one")), guard.Passed)
        stranger = enter(holder=holder(ti_id="another"))
        assert isinstance(stranger, guard.Waiting), "somebody else's retry finds it busy"
    assert record_of(ledger, what).claims == (0 if calls == "explicit" else 1)
    done = enter(holder=holder(ti_id="one"))
    assert isinstance(done, guard.Done)
    assert (entries, record_of(ledger, what).fence) == (4, 4), "each entry raises the fence"
    assert vendor_control.charges() == len(vendor_control.requests()) == 1
    assert [event.kind for event in ledger.events(1)].count("claimed") == 1


def test_p03_a_call_that_is_under_way_while_its_body_hands_over_is_not_made_again(
    ledger: Ledger, vendor_control: VendorControl
) -> None:
    what = order("k", calls="explicit")
    vendor_control.script(gate="answer")
    threads: list[threading.Thread] = []

    def body(context: guard.GuardContext) -> Any:
        if not threads:
            threads.append(threading.Thread(target=pay(vendor_control.url, "c"), args=[context]))
            threads[0].start()
            vendor_control.wait("c", charged=1)
            raise Deferred
        return pay(vendor_control.url, "c")(context)

    def enter() -> guard.How:
        return guard.run(
            ledger, Leases(None, ledger.installation), work(what, body, signal=signals, holder=holder(ti_id="one"))
        )

    assert isinstance(enter(), guard.Passed)
    how = enter()
    assert isinstance(how, guard.Ended)
    assert how.message.startswith("In doubt")
    vendor_control.release("answer")
    threads[0].join()
    assert vendor_control.charges() == len(vendor_control.requests()) == 1
    assert record_of(ledger, what).state is State.IN_DOUBT


@pytest.mark.parametrize("value", [{"id": "ch_1", "n": [1, 2]}, 0, [], False, None, ""])
@pytest.mark.parametrize("calls", ["body", "explicit"])
def test_p02_r46_work_whose_success_was_never_reported_gives_back_the_stored_result(
    calls: str, value: Any, ledger_url: str, ledger: Ledger
) -> None:
    what = order("k", calls=calls)
    first = attempt(
        ledger_url, what, lambda context: context.call("pay", lambda: value) if calls == "explicit" else value
    )
    assert first == guard.Done(value, replayed=False)

    def must_not_run(context: guard.GuardContext) -> None:
        raise AssertionError("finished work ran again")

    again = attempt(ledger_url, what, must_not_run, holder=holder(try_number=2))
    assert again == guard.Done(value, replayed=True)
    assert type(again.value) is type(value)
    stored = record_of(ledger, what).result
    assert stored is not None
    assert stored.data == json.dumps(value).encode()


def test_p02_a_call_whose_result_was_not_stored_is_not_replayed_as_an_empty_one(
    ledger_url: str,
) -> None:
    what = order("k", calls="explicit", store_result="digest")

    def body(context: guard.GuardContext) -> Any:
        said = context.call("pay", lambda: "ch_1")
        raise OSError("lost after the call") if said == "ch_1" else AssertionError(f"the call gave back {said!r}")

    assert isinstance(attempt(ledger_url, what, body), guard.Ended)
    again = attempt(ledger_url, what, body)
    assert isinstance(again, guard.Ended)
    assert "its result was not stored" in again.message


def test_p01_threads_of_one_body_that_make_the_same_call_make_it_once(
    ledger_url: str, vendor_control: VendorControl
) -> None:
    rounds, crowd = 20, 8

    def body(context: guard.GuardContext) -> None:
        together = threading.Barrier(crowd)

        def call(number: int) -> None:
            together.wait(20)
            with contextlib.suppress(PlanningError):  # it is under way in this body already
                name = f"pay {number}"
                context.call(name, functools.partial(charge, vendor_control.url, name), vendor_key_as="key")

        with ThreadPoolExecutor(crowd) as pool:
            for number in range(rounds):
                list(pool.map(call, [number] * crowd))

    assert isinstance(attempt(ledger_url, order("k", calls="explicit"), body), guard.Done)
    assert len(vendor_control.requests()) == rounds


def test_p12_a_body_cannot_go_on_past_a_ledger_that_is_out_of_reach(ledger_url: str, ledger: Ledger) -> None:
    away, made, swallowed = threading.Event(), [], []

    def connect() -> psycopg.Connection[Any]:
        if away.is_set():
            raise psycopg.OperationalError("connection refused")
        return psycopg.connect(ledger_url)

    def body(context: guard.GuardContext) -> str:
        context.call("reserve", lambda: made.append("reserve"))
        away.set()
        with psycopg.connect(ledger_url, autocommit=True) as admin:
            admin.execute(
                "select pg_terminate_backend(pid) from pg_stat_activity"
                " where datname = current_database() and pid <> pg_backend_pid()"
            )
        try:
            context.call("pay", lambda: made.append("pay"))
        except Exception as error:
            swallowed.append(error)
        finally:
            away.clear()
        return "as if it had been paid"

    what = order("k", calls="explicit", lease=1.0)
    cut_off = Ledger(connect, deployment=DEPLOYMENT)
    cut_off.check()
    how = guard.run(cut_off, Leases(None, cut_off.installation), work(what, body))
    cut_off.close()
    assert isinstance(how, guard.Waiting)
    assert "'pay' was not made" in how.reason
    assert (made, swallowed) == (["reserve"], [])
    assert record_of(ledger, what).state is State.PENDING
