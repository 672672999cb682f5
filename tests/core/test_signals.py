"""Exceptions that are no errors of the work, at any moment: the ledger stays truthful (R44, P4).

Truthful: a call that the vendor charged for stands as done, in doubt or open, never as pending or failed, and is never
made a second time.
"""

from __future__ import annotations

import asyncio
import functools
import random
import signal
import threading
from collections.abc import Callable
from typing import Any

import psycopg
import pytest

from airflow_runguard.core import guard
from airflow_runguard.core.leases import Leases
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import CallState, State
from demo.vendor_control import VendorControl
from tests.core.accidents import attempt, charge, record_of, until
from tests.core.engine import order, work

CALLS = ("reserve", "pay")


class Alarm(BaseException):
    """As Airflow's AirflowTaskTimeout."""


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, asyncio.CancelledError, Alarm, GeneratorExit])
@pytest.mark.parametrize("moment", ["before sending", "after the charge", "between the calls", "after the last call"])
def test_p04_r44_an_exception_that_is_no_error_leaves_the_truth(
    moment: str, error: type[BaseException], ledger_url: str, ledger: Ledger, vendor_control: VendorControl
) -> None:
    what = order("k", calls="explicit")
    raised = []

    def strike(now: str) -> None:
        if now == moment and not raised:
            raised.append(error())
            raise raised[0]

    def first(key: str) -> str:
        strike("before sending")
        said = charge(vendor_control.url, "reserve", key)
        strike("after the charge")
        return said

    def body(context: guard.GuardContext) -> str:
        context.call("reserve", first, vendor_key_as="key")
        strike("between the calls")
        said = context.call("pay", functools.partial(charge, vendor_control.url, "pay"), vendor_key_as="key")
        strike("after the last call")
        return said

    how = attempt(ledger_url, what, body)
    assert isinstance(how, guard.Ended)
    assert how.error is raised[0], "the door raises it again"
    record = record_of(ledger, what)
    calls = {call.name: call.state for call in ledger.calls(record.id)}
    if moment in ("before sending", "after the charge"):
        assert (record.state, calls) == (State.IN_DOUBT, {"reserve": CallState.IN_DOUBT})
        assert isinstance(attempt(ledger_url, what, body), guard.Ended)
        assert len(vendor_control.requests()) == (moment == "after the charge")
    else:
        done = CALLS if moment == "after the last call" else CALLS[:1]
        assert (record.state, calls) == (State.PENDING, dict.fromkeys(done, CallState.DONE))
        assert isinstance(attempt(ledger_url, what, body), guard.Done)
        assert [vendor_control.charges(call) for call in CALLS] == [1, 1]


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, asyncio.CancelledError, Alarm])
def test_p04_r44_a_body_that_is_one_call_is_in_doubt_after_it(
    error: type[BaseException], ledger_url: str, ledger: Ledger, vendor_control: VendorControl
) -> None:
    what = order("k")

    def body(context: guard.GuardContext) -> None:
        charge(vendor_control.url, "c", context.idempotency_key)
        raise error

    assert isinstance(attempt(ledger_url, what, body), guard.Ended)
    assert record_of(ledger, what).state is State.IN_DOUBT


def alarmed(action: Callable[[], Any], seconds: float) -> None:
    """Run it; ``SIGALRM`` hits it in the main thread after so many seconds, as ``execution_timeout`` does."""
    armed = True

    def ring(*_: object) -> None:
        if armed:
            raise Alarm

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        action()
    except Alarm:
        pass
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def storm(ledger: Ledger, url: str, vendor_control: VendorControl, rounds: int, seed: int, swallows: bool) -> None:
    """Rounds of work under an alarm at a random moment; then the books of ledger and vendor are compared."""
    chance = random.Random(seed)
    leases = Leases(None, ledger.installation)

    def calls_of(key: str, context: guard.GuardContext) -> list[str]:
        if context.body_is_call:
            return [charge(url, f"{key} body", context.idempotency_key)]
        said = []
        for name in CALLS:
            pay = functools.partial(charge, url, f"{key} {name}")
            while True:
                try:
                    said.append(context.call(name, pay, vendor_key_as="key"))
                    break
                except Alarm:
                    if not swallows:
                        raise
        return said

    orders = {}
    for number in range(rounds):
        what = order(f"{seed}-{number}", calls=chance.choice(("body", "explicit")), lease=60.0)
        orders[what.identity.key] = what
        body = functools.partial(calls_of, what.identity.key)
        alarmed(lambda what=what, body=body: guard.run(ledger, leases, work(what, body)), chance.uniform(1e-4, 0.03))
        assert threading.active_count() < 100, "a writing thread was left behind"

    until(lambda: all(request.status is not None for request in vendor_control.requests()))
    charged: dict[str, int] = {}
    for request in vendor_control.effects():
        charged[request.customer] = charged.get(request.customer, 0) + 1
    assert set(charged.values()) <= {1}, "charged twice"
    states = set()
    for key, what in orders.items():
        record = ledger.get(what.identity)
        calls = {call.name: call.state for call in ledger.calls(record.id)} if record else {}
        for name in CALLS if what.calls == "explicit" else ("body",):
            state = calls.get(name)
            states.add(state)
            truthful = (CallState.DONE, CallState.IN_DOUBT, CallState.STARTED)
            assert state in truthful or f"{key} {name}" not in charged, (key, name, state, record)
            assert state is not CallState.DONE or f"{key} {name}" in charged, (key, name, record)
        if record is not None and {CallState.STARTED, CallState.IN_DOUBT} & set(calls.values()):
            assert record.state in (State.RUNNING, State.IN_DOUBT), (key, record)
    assert {None, CallState.DONE, CallState.IN_DOUBT} <= states, "the alarms did not hit what they were meant to hit"


@pytest.mark.timeout(120, method="thread")
@pytest.mark.parametrize("swallows", [False, True], ids=["body_ends", "body_tries_again"])
def test_p04_r44_an_alarm_at_any_moment_leaves_the_ledger_truthful(
    swallows: bool, ledger: Ledger, vendor_control: VendorControl
) -> None:
    storm(ledger, vendor_control.url, vendor_control, rounds=200, seed=44, swallows=swallows)


@pytest.mark.soak
@pytest.mark.timeout(900, method="thread")
@pytest.mark.parametrize("seed", range(10))
def test_p04_r44_soak_of_alarms(seed: int, ledger: Ledger, vendor_control: VendorControl) -> None:
    storm(ledger, vendor_control.url, vendor_control, rounds=2_000, seed=seed, swallows=seed % 2 == 1)
