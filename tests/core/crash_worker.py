"""A process whose children each make one attempt, and are killed or frozen at the step that they were told.

Reads a plan from standard input: ``ledger`` and ``vendor`` (URLs), ``signal``, the order's ``rules``, and ``scenarios``
of ``key``, ``calls``, ``on_doubt``, ``step``, ``call`` and ``redis`` (a URL, or ``null`` for none). Forks one child for
each scenario, a few at a time, and writes for each key the signal that ended it, or how its attempt ended. The
production code knows nothing of it: steps are reached by subclasses that do the same as their parents and raise the
signal before or after.
"""

from __future__ import annotations

import functools
import json
import os
import signal
import sys
import threading
from typing import Any

import psycopg

from airflow_runguard.core import guard
from airflow_runguard.core.leases import Leases
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Claim, Written
from airflow_runguard.core.resp import Redis
from demo.vendor_control import VendorControl
from tests.core.accidents import charge
from tests.core.engine import DEPLOYMENT, order, work

AT_ONCE = 6
CALLS = ("reserve", "pay")


class Fate:
    """Strikes once, when its step comes; ``call`` says at which call of an explicit body ('' = any)."""

    def __init__(self, scenario: dict[str, Any], blow: int) -> None:
        self.step, self.call, self.blow = scenario["step"], scenario["call"], blow
        self.struck = False

    def reaches(self, step: str, *calls: str) -> None:
        if step == self.step and (not self.call or self.call in calls) and not self.struck:
            self.struck = True
            signal.pthread_kill(threading.get_ident(), self.blow)  # this thread takes no further step


class DoomedLedger(Ledger):
    fate: Fate

    def claim(self, *args: Any, **kwargs: Any) -> Claim:
        self.fate.reaches("before claim")
        claim = super().claim(*args, **kwargs)
        self.fate.reaches("after claim")
        return claim

    def write(self, *args: Any, **kwargs: Any) -> Written:
        intents = [name for name, _ in kwargs.get("intents", ())]
        outcomes = [outcome.call for outcome in kwargs.get("outcomes", ())]
        settles = kwargs.get("settlement") is not None
        self.fate.reaches("before intent", *intents)
        self.fate.reaches("before outcome", *outcomes)
        if settles:
            self.fate.reaches("before settle")
        written = super().write(*args, **kwargs)
        self.fate.reaches("after intent", *intents)
        self.fate.reaches("after outcome", *outcomes)
        if settles:
            self.fate.reaches("after settle")
        return written


class DoomedLeases(Leases):
    fate: Fate

    def release(self, *args: Any, **kwargs: Any) -> None:
        self.fate.reaches("before release")
        super().release(*args, **kwargs)
        self.fate.reaches("after release")


def pay(vendor: str, fate: Fate, customer: str, call: str, key: str) -> str:
    fate.reaches("before sending", call)
    if fate.step == "after charge" and fate.call in ("", call):
        control = VendorControl(vendor)
        control.script(customer=customer, gate=f"never {customer}")
        threading.Thread(
            target=lambda: (control.wait(customer, charged=1), fate.reaches("after charge", call)), daemon=True
        ).start()
    answer = charge(vendor, customer, key)
    fate.reaches("after answer", call)
    return answer


def body(vendor: str, fate: Fate, scenario: dict[str, Any], context: guard.GuardContext) -> list[str]:
    if scenario["calls"] == "body":
        return [pay(vendor, fate, f"{scenario['key']} body", "body", context.idempotency_key)]
    return [
        context.call(
            call,
            lambda key, call=call: pay(vendor, fate, f"{scenario['key']} {call}", call, key),
            vendor_key_as="key",
        )
        for call in CALLS
    ]


def live(plan: dict[str, Any], scenario: dict[str, Any]) -> str:
    fate = Fate(scenario, plan["signal"])
    ledger = DoomedLedger(lambda: psycopg.connect(plan["ledger"]), deployment=DEPLOYMENT)
    ledger.fate = fate
    ledger.check()
    leases = DoomedLeases(scenario["redis"] and Redis.from_url(scenario["redis"]), ledger.installation)
    leases.fate = fate
    what = order(
        scenario["key"],
        calls=scenario["calls"],
        on_doubt=scenario["on_doubt"],
        **plan["rules"],
    )
    return str(guard.run(ledger, leases, work(what, functools.partial(body, plan["vendor"], fate, scenario))))


def main() -> None:
    plan = json.load(sys.stdin)
    waiting = list(plan["scenarios"])
    living: dict[int, tuple[str, int]] = {}
    ended: dict[str, int | str] = {}
    while waiting or living:
        while waiting and len(living) < AT_ONCE:
            scenario = waiting.pop(0)
            ear, mouth = os.pipe()
            pid = os.fork()
            if pid == 0:
                try:
                    os.write(mouth, live(plan, scenario).encode())
                finally:
                    os._exit(0)
            os.close(mouth)
            living[pid] = scenario["key"], ear
        pid, status = os.wait()
        key, ear = living.pop(pid)
        ended[key] = os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.read(ear, 65_536).decode()
        os.close(ear)
    json.dump(ended, sys.stdout)


if __name__ == "__main__":
    main()
