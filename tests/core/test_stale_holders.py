"""Holders that were cut off and come back: they change nothing that is no longer theirs, and no proof is lost (P5, P3).

A frozen holder is a real process under ``SIGSTOP``; it is thawed with ``SIGCONT`` after others have moved on.
"""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import psutil
import psycopg
import pytest

from airflow_runguard.core import guard
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import CallState, Order, State
from demo.vendor_control import VendorControl
from tests.core.accidents import attempt, charge, record_of, until
from tests.core.crash_worker import CALLS
from tests.core.engine import order

LEASE = 1.0
PERSON = {"actor": "the person on call", "reason": "looked it up at the vendor"}


class FrozenHolder:
    """A process that was stopped at ``step`` of its attempt, and whose lease (one second) then runs out."""

    def __init__(self, url: str, vendor: VendorControl, key: str, calls: str, step: str, call: str, rules: Any) -> None:
        scenario = {"key": key, "calls": calls, "on_doubt": "ask", "step": step, "call": call, "redis": None}
        self._plan = {
            "ledger": url,
            "vendor": vendor.url,
            "signal": signal.SIGSTOP,
            "rules": {"lease": LEASE, "max_call_time": 600, **rules},
            "scenarios": [scenario],
        }
        self._key = key
        self._child: psutil.Process | None = None

    def __enter__(self) -> Self:
        self._worker = subprocess.Popen(
            [sys.executable, "-m", "tests.core.crash_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        )
        assert self._worker.stdin is not None
        self._worker.stdin.write(json.dumps(self._plan))
        self._worker.stdin.close()
        [self._child] = until(lambda: psutil.Process(self._worker.pid).children(), what="for the holder")
        until(self._child.status, lambda status: status == psutil.STATUS_STOPPED, what="for it to freeze")
        return self

    def thaw(self) -> str:
        """How its attempt ended."""
        assert self._child is not None
        assert self._worker.stdout is not None
        self._child.resume()
        said = self._worker.stdout.read()
        assert self._worker.wait(20) == 0
        return str(json.loads(said)[self._key])

    def __exit__(self, *_: object) -> None:
        if self._child is not None and self._child.is_running():
            self._child.kill()
        self._worker.wait(20)
        assert self._worker.stdout is not None
        self._worker.stdout.close()


Freeze = Callable[..., FrozenHolder]


@pytest.fixture
def freeze(ledger_url: str, vendor_control: VendorControl) -> Freeze:
    def frozen(key: str, calls: str, step: str, call: str = "", **rules: Any) -> FrozenHolder:
        return FrozenHolder(ledger_url, vendor_control, key, calls, step, call, rules)

    return frozen


def body_of(vendor: VendorControl, key: str, calls: str) -> Callable[[guard.GuardContext], Any]:
    """The same work as the frozen holder's."""

    def body(context: guard.GuardContext) -> list[str]:
        if calls == "body":
            return [charge(vendor.url, f"{key} body", context.idempotency_key)]
        return [
            context.call(call, functools.partial(charge, vendor.url, f"{key} {call}"), vendor_key_as="key")
            for call in CALLS
        ]

    return body


def lines(url: str) -> list[Any]:
    """Every line of the ledger as it stands, without the times of renewals."""
    with psycopg.connect(url) as connection:
        records = connection.execute("select id, fence, state, nonce, result, digest, updated_at from runguard.record")
        return [*records.fetchall(), *connection.execute("select * from runguard.call order by name").fetchall()]


def in_doubt_after(url: str, what: Order, body: Callable[[guard.GuardContext], Any]) -> guard.Ended:
    """The next try's answer once the lease has run out: nobody knows."""
    how = until(functools.partial(attempt, url, what, body), lambda how: not isinstance(how, guard.Waiting))
    assert isinstance(how, guard.Ended)
    assert how.message.startswith("In doubt")
    return how


@pytest.mark.parametrize("step", ["before intent", "before settle"])
def test_p05_r27_r39_a_thawed_holder_calls_nothing_and_overwrites_nothing_of_the_newer_one(
    step: str, ledger_url: str, vendor_control: VendorControl, freeze: Freeze
) -> None:
    what = order("k", calls="explicit")
    with freeze("k", "explicit", step) as first:
        second = functools.partial(attempt, ledger_url, what, body_of(vendor_control, "k", "explicit"))
        done = until(second, lambda how: not isinstance(how, guard.Waiting))
        assert isinstance(done, guard.Done)
        before = lines(ledger_url)
        assert ("no longer the holder" if step == "before intent" else "was taken over") in first.thaw()
    assert lines(ledger_url) == before
    assert [vendor_control.charges(f"k {call}") for call in CALLS] == [1, 1]
    assert len(vendor_control.requests()) == 2


@pytest.mark.parametrize(("calls", "step"), [("body", "after claim"), ("explicit", "after intent")])
def test_p05_r27_a_holder_that_slept_past_its_lease_does_not_send_what_it_was_granted(
    calls: str, step: str, ledger_url: str, ledger: Ledger, vendor_control: VendorControl, freeze: Freeze
) -> None:
    what = order("k", calls=calls)
    body = body_of(vendor_control, "k", calls)
    with freeze("k", calls, step, CALLS[0] if calls == "explicit" else "") as first:
        in_doubt_after(ledger_url, what, body)
        said = first.thaw()
    assert "o longer the holder" in said or "lease" in said
    assert vendor_control.requests() == []
    assert record_of(ledger, what).state is State.PENDING, "it knows that it sent nothing, and says so"
    assert isinstance(attempt(ledger_url, what, body), guard.Done)
    assert vendor_control.charges() == len(vendor_control.requests()) == (1 if calls == "body" else 2)


@pytest.mark.parametrize("calls", ["body", "explicit"])
def test_p05_a_call_frozen_between_intent_and_sending_is_doubt_and_settles_its_own_record(
    calls: str, ledger_url: str, ledger: Ledger, vendor_control: VendorControl, freeze: Freeze
) -> None:
    what = order("k", calls=calls)
    body = body_of(vendor_control, "k", calls)
    with freeze("k", calls, "before sending", CALLS[0] if calls == "explicit" else "") as first:
        in_doubt_after(ledger_url, what, body)
        assert vendor_control.charges() == 0, "the vendor has nothing, which is true now and no proof"
        record = record_of(ledger, what)
        assert ledger.resolve(record.id, "did_not_happen", **PERSON) == "too_early"
        assert record_of(ledger, what) == record
        first.thaw()
    assert vendor_control.charges() == 1
    record = record_of(ledger, what)
    [call] = ledger.calls(record.id)
    assert (call.state, record.fence) == (CallState.DONE, 1)
    assert record.state is (State.DONE if calls == "body" else State.PENDING)
    assert isinstance(attempt(ledger_url, what, body), guard.Done)
    assert len(vendor_control.requests()) == (1 if calls == "body" else 2)


@pytest.mark.parametrize("calls", ["body", "explicit"])
def test_p03_a_late_outcome_puts_what_a_person_denied_back_in_doubt(
    calls: str, ledger_url: str, ledger: Ledger, vendor_control: VendorControl, freeze: Freeze
) -> None:
    what = order("k", calls=calls)
    body = body_of(vendor_control, "k", calls)
    name = CALLS[0] if calls == "explicit" else "body"
    with freeze("k", calls, "before sending", name if calls == "explicit" else "") as first:
        in_doubt_after(ledger_url, what, body)
        record = record_of(ledger, what)
        assert ledger.resolve(record.id, "did_not_happen", force=True, **PERSON) == "ok"
        assert record_of(ledger, what).state is State.PENDING
        first.thaw()
    record = record_of(ledger, what)
    assert (record.state, record.needs_person) == (State.IN_DOUBT, True)
    [kept] = [event for event in ledger.events(record.id) if event.kind == "late_outcome"]
    [effect] = vendor_control.effects()
    assert (kept.detail["call"], kept.detail["effect"]) == (name, "applied")
    assert effect.id in kept.detail["result"], "the proof is kept"
    in_doubt_after(ledger_url, what, body)
    answer = {"call": name if calls == "explicit" else None, "result": json.dumps(effect.id).encode()}
    assert ledger.resolve(record.id, "happened", **answer, **PERSON) == "ok"
    assert isinstance(attempt(ledger_url, what, body), guard.Done)
    assert vendor_control.charges(f"k {name}") == len(vendor_control.requests(f"k {name}")) == 1


@pytest.mark.parametrize("later_holder", ["goes on", "dies"])
def test_p05_a_later_holder_is_told_of_a_late_outcome_before_its_next_call(
    later_holder: str, ledger_url: str, ledger: Ledger, vendor_control: VendorControl, freeze: Freeze
) -> None:
    what = order("k", calls="explicit", lease=2.0)
    body = body_of(vendor_control, "k", "explicit")
    entered, go_on = threading.Event(), threading.Event()
    ended: list[guard.How] = []

    def slow_body(context: guard.GuardContext) -> list[str]:
        entered.set()
        assert go_on.wait(20)
        return list(body(context))

    with freeze("k", "explicit", "before sending", CALLS[0]) as first:
        in_doubt_after(ledger_url, what, body)
        record = record_of(ledger, what)
        assert ledger.resolve(record.id, "did_not_happen", force=True, **PERSON) == "ok"
        if later_holder == "dies":
            with freeze("k", "explicit", "before intent") as second:
                first.thaw()
                del second  # killed where it stands when the block ends
        else:
            later = threading.Thread(target=lambda: ended.append(attempt(ledger_url, what, slow_body)))
            later.start()
            assert entered.wait(20)
            first.thaw()
            assert record_of(ledger, what).state is State.RUNNING
            go_on.set()
            later.join()
            [how] = ended
            assert isinstance(how, guard.Ended)
            assert how.message.startswith("In doubt")
    in_doubt_after(ledger_url, what, body)
    assert vendor_control.charges() == len(vendor_control.requests()) == 1
    [effect] = vendor_control.effects()
    assert ledger.resolve(record.id, "happened", call=CALLS[0], result=json.dumps(effect.id).encode(), **PERSON) == "ok"
    assert isinstance(attempt(ledger_url, what, body), guard.Done)
    assert [vendor_control.charges(f"k {call}") for call in CALLS] == [1, 1]


def test_p05_a_late_outcome_of_done_work_is_kept_and_changes_nothing(
    ledger_url: str, ledger: Ledger, vendor_control: VendorControl, freeze: Freeze
) -> None:
    what = order("k")
    body = body_of(vendor_control, "k", "body")
    with freeze("k", "body", "after answer") as first:
        in_doubt_after(ledger_url, what, body)
        record = record_of(ledger, what)
        assert ledger.resolve(record.id, "happened", result=b'["ch_1"]', **PERSON) == "ok"
        before = lines(ledger_url)
        first.thaw()
    assert lines(ledger_url) == before
    assert [event.kind for event in ledger.events(record.id)][-1] == "late_outcome"
    assert attempt(ledger_url, what, body) == guard.Done(["ch_1"], replayed=True)
    assert vendor_control.charges() == 1
