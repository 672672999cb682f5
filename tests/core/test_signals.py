"""Exceptions that are no errors of the work, at any moment: the ledger stays truthful (R44, P4).

Truthful: a call that the vendor charged for stands as done, in doubt or open, never as pending or failed, and is never
made a second time.
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from airflow_runguard.core import guard
from airflow_runguard.core.leases import Leases
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import CallState, State
from airflow_runguard.core.writer import Answer, Writer, _Job
from demo.vendor_control import VendorControl
from tests.core.accidents import attempt, charge, record_of, until
from tests.core.alarm_worker import CALLS, Alarm
from tests.core.engine import identity, order, work


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


class Torn(Exception):
    """The alarm comes exactly between the call and the booking of its outcome."""

    def __str__(self) -> str:
        raise Alarm


def test_p03_r44_a_call_whose_booking_was_torn_is_not_made_again_by_a_body_that_catches_the_signal(
    ledger_url: str, ledger: Ledger, vendor_control: VendorControl
) -> None:
    what = order("k", calls="explicit")

    def torn(key: str) -> None:
        charge(vendor_control.url, "c", key)
        raise Torn

    def body(context: guard.GuardContext) -> str:
        try:
            context.call("pay", torn, vendor_key_as="key")
        except Alarm:
            return context.call("pay", functools.partial(charge, vendor_control.url, "c"), vendor_key_as="key")
        raise AssertionError("the alarm did not come")

    how = attempt(ledger_url, what, body)
    assert isinstance(how, guard.Ended)
    assert how.message.startswith("In doubt")
    assert record_of(ledger, what).state is State.IN_DOUBT
    assert len(vendor_control.requests()) == 1


@pytest.mark.parametrize("calls", ["body", "explicit"])
def test_p04_r44_an_alarm_between_any_two_bytecodes_of_asking_the_writing_thread_leaves_the_truth(
    calls: str, ledger_url: str, ledger: Ledger, vendor_control: VendorControl
) -> None:
    """Torn at the first bytecode, at the second, and so on, until a run comes through. None hangs."""
    asking = {getattr(Writer, name).__code__ for name in ("claim", "_put", "do", "close")}
    asking |= {Answer.result.__code__, Answer.__init__.__code__, _Job.__init__.__code__}

    def body(context: guard.GuardContext) -> str:
        pay = functools.partial(charge, vendor_control.url, what.identity.key)
        return pay(context.idempotency_key) if calls == "body" else context.call("pay", pay, vendor_key_as="key")

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal left
        if frame.f_code not in asking:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left -= 1
            if left == 0:
                raise Alarm
        return trace

    booked = Counter()
    for number in itertools.count(1):
        what, left = order(f"{calls}-{number}", calls=calls), number
        sys.settrace(trace)
        try:
            how = guard.run(ledger, Leases(None, ledger.installation), work(what, body))
        except Alarm:
            how = None
        finally:
            sys.settrace(None)
        record, paid = ledger.get(what.identity), vendor_control.charges(what.identity.key)
        states = {call.state for call in ledger.calls(record.id)} if record else set()
        if paid:
            assert states <= {CallState.DONE, CallState.IN_DOUBT, CallState.STARTED}, (number, record)
        else:
            assert CallState.DONE not in states, (number, record)
        booked[record and record.state] += 1
        if left > 0:
            break
    assert isinstance(how, guard.Done)
    assert number > 100
    assert {State.PENDING, State.DONE} <= set(booked)


def storm(ledger_url: str, ledger: Ledger, vendor: VendorControl, **plan: Any) -> None:
    """Rounds of work under an alarm at a random moment; then the books of ledger and vendor are compared."""
    command = [sys.executable, "-m", "tests.core.alarm_worker"]
    said = json.dumps({"ledger": ledger_url, "vendor": vendor.url, **plan})
    root = Path(__file__).parents[2]
    worker = subprocess.run(command, input=said, capture_output=True, text=True, cwd=root, timeout=800)
    assert worker.returncode == 0, worker.stderr

    until(lambda: all(request.status is not None for request in vendor.requests()))
    charges = Counter(effect.customer for effect in vendor.effects() if effect.customer)  # '': torn while it was sent
    assert set(charges.values()) <= {1}, "charged twice"
    seen = Counter()
    for key, calls in json.loads(worker.stdout).items():
        record = ledger.get(identity(key))
        states = {call.name: call.state for call in ledger.calls(record.id)} if record else {}
        for name in CALLS if calls == "explicit" else ("body",):
            state = states.get(name)
            seen[state] += 1
            if charges[f"{key} {name}"]:
                assert state in (CallState.DONE, CallState.IN_DOUBT, CallState.STARTED), (key, name, state, record)
            else:
                assert state is not CallState.DONE, (key, name, record)
        if {CallState.STARTED, CallState.IN_DOUBT} & set(states.values()):
            assert record.state in (State.RUNNING, State.IN_DOUBT), (key, record)
    assert {None, CallState.DONE, CallState.IN_DOUBT} <= set(seen), "the alarms did not hit what they were to hit"


@pytest.mark.parametrize("swallows", [False, True], ids=["body_ends", "body_tries_again"])
def test_p04_r44_an_alarm_at_any_moment_leaves_the_ledger_truthful(
    swallows: bool, ledger_url: str, ledger: Ledger, vendor_control: VendorControl
) -> None:
    storm(ledger_url, ledger, vendor_control, rounds=250, seed=44, swallows=swallows)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(4))
def test_p04_r44_soak_of_alarms(seed: int, ledger_url: str, ledger: Ledger, vendor_control: VendorControl) -> None:
    storm(ledger_url, ledger, vendor_control, rounds=3_000, seed=seed, swallows=seed % 2 == 1)
