"""A task process that is hit by ``SIGALRM`` at random moments, as by ``execution_timeout``; round after round.

Reads ``ledger`` and ``vendor`` (URLs), ``rounds``, ``seed`` and ``swallows`` (whether bodies catch the alarm and try
the call again) from standard input. Writes ``{key: calls}`` of the work that it did. Ends with all stacks if it hangs.
"""

from __future__ import annotations

import faulthandler
import functools
import json
import random
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any

from airflow_runguard.core import guard
from airflow_runguard.core.leases import Leases
from tests.core.accidents import charge
from tests.core.engine import open_ledger, order, work

CALLS = ("reserve", "pay")
LONGEST = 0.03
"""Seconds to the alarm at most; a round takes about half of it."""
PATIENCE = 30.0
"""Seconds after which a round is said to hang."""


class Alarm(BaseException):
    """As Airflow's AirflowTaskTimeout."""


def alarmed(action: Callable[[], Any], seconds: float) -> None:
    """Run it; the alarm hits the main thread after so many seconds, wherever it is."""
    armed = True

    def ring(*_: object) -> None:
        if armed:
            raise Alarm

    signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        action()
    except Alarm:
        pass
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0)


def body(url: str, key: str, swallows: bool, context: guard.GuardContext) -> list[str]:
    if context.body_is_call:
        return [charge(url, f"{key} body", context.idempotency_key)]
    said = []
    for name in CALLS:
        pay = functools.partial(charge, url, f"{key} {name}")
        while len(said) < len(CALLS):
            try:
                said.append(context.call(name, pay, vendor_key_as="key"))
                break
            except Alarm:
                if not swallows:
                    raise
    return said


def main() -> None:
    plan = json.load(sys.stdin)
    chance = random.Random(plan["seed"])
    done: dict[str, str] = {}
    ledger = open_ledger(plan["ledger"])
    leases = Leases(None, ledger.installation)
    for number in range(plan["rounds"]):
        key, calls = f"{plan['seed']}-{number}", chance.choice(("body", "explicit"))
        done[key] = calls
        task = functools.partial(body, plan["vendor"], key, plan["swallows"])
        faulthandler.dump_traceback_later(PATIENCE, exit=True)
        alarmed(
            lambda key=key, calls=calls, task=task: guard.run(
                ledger, leases, work(order(key, calls=calls, lease=60.0), task)
            ),
            chance.uniform(1e-4, LONGEST),
        )
        faulthandler.cancel_dump_traceback_later()
    assert threading.active_count() < 2 + plan["rounds"] / 50, "writing threads were left behind"
    json.dump(done, sys.stdout)


if __name__ == "__main__":
    main()
