"""Batches whose process is killed at random moments: each item is charged once, and what nobody knows is said.

A round is one ``kill -9``. The seed is printed; ``RUNGUARD_SEED=… pytest …`` repeats the kills of one run. Two of the
cases hold their lease in a real Redis too, which at each kill forgets it, or keeps it for the dead.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg
import pytest

from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import CallState
from demo.vendor import Vendor
from demo.vendor_control import VendorControl
from tests.core import batches, books
from tests.core.accidents import redis_of

ROOT = Path(__file__).parents[2]
ITEMS, KILLS = 60, 6
BACKENDS = "select count(*) from pg_stat_activity where application_name = 'worker' and datname = current_database()"


class Workers:
    """Workers of one batch after another, by the process that forks them."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self._server = server

    def start(self, plan: dict[str, Any]) -> int:
        return int(self._asked(plan))

    def ended(self) -> str:
        """How the worker's batch ended, when it has; '' if it was killed before."""
        return self._asked(None)

    def _asked(self, line: dict[str, Any] | None) -> str:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        print(json.dumps(line), file=self._server.stdin, flush=True)
        said = self._server.stdout.readline()
        assert said, "the process that forks the workers is gone"
        return said.strip()


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    command = [sys.executable, "-m", "tests.core.batch_worker"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT) as server:
        yield Workers(server)


@dataclass(frozen=True)
class Case:
    """
    :param honours: whether the vendor honours idempotency keys.
    :param redis: what the Redis that holds the lease does at each kill: ``forgets`` or ``keeps``; '' = there is none.
    """

    on_doubt: str
    honours: bool
    concurrency: int
    bulk: int | None = None
    redis: str = ""

    @property
    def at_once(self) -> int:
        """Items that one kill may leave in doubt."""
        return self.concurrency * (self.bulk or 1)


CASES = {
    "asks": Case("ask", honours=False, concurrency=4),
    "replays": Case("replay", honours=True, concurrency=4, redis="forgets"),
    "bulk": Case("ask", honours=False, concurrency=2, bulk=2, redis="keeps"),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
@pytest.mark.parametrize("batches_of_a_case", [6, pytest.param(300, marks=[pytest.mark.soak, pytest.mark.timeout(0)])])
def test_p03_kill_9_at_random_moments_charges_each_item_once(
    ledger: Ledger,
    ledger_url: str,
    sql: psycopg.Connection[Any],
    vendor: Vendor,
    vendor_control: VendorControl,
    workers: Workers,
    empty_redis: str | None,
    case: Case,
    batches_of_a_case: int,
) -> None:
    vendor_control.honour_keys(case.honours)
    redis_url = empty_redis if case.redis else None
    first = int(os.environ.get("RUNGUARD_SEED") or random.SystemRandom().randrange(1_000_000))
    for seed in range(first, first + batches_of_a_case):
        sys.stdout.write(f"RUNGUARD_SEED={seed}\n")
        plan = {
            "ledger": f"{ledger_url}{'&' if '?' in ledger_url else '?'}application_name=worker",
            "vendor": vendor.url,
            "key": f"crash{seed}",
            "items": ITEMS,
            "concurrency": case.concurrency,
            "bulk": case.bulk,
            "on_doubt": case.on_doubt,
            "redis": redis_url,
        }
        chance = random.Random(seed)
        begun = vendor_control.charges()
        # What kills left in doubt may never be charged: so many charges come, whatever they hit.
        moments = sorted(chance.randint(0, ITEMS - KILLS * case.at_once) for _ in range(KILLS))
        for moment in moments:
            worker = workers.start(plan)
            vendor_control.wait(charged=begun + moment, timeout=60)
            time.sleep(chance.uniform(0, 0.03))  # the moment is what is random; nothing waits for it
            os.kill(worker, signal.SIGKILL)
            workers.ended()
            # Its server process may still write the last of what it was sent, a longer lease among it.
            books.wait_until(lambda: sql.execute(BACKENDS).fetchone() == (0,), "the dead worker's connection is gone")
            sql.execute("update runguard.record set lease_until = clock_timestamp() where state = 'running'")
            if redis_url and case.redis == "forgets":
                with redis_of(redis_url) as client:
                    client.command("FLUSHALL")
        workers.start(plan)
        check(ledger, vendor_control, case, plan["key"], workers.ended())


def check(ledger: Ledger, vendor: VendorControl, case: Case, key: str, ended: str) -> None:
    items = batches.items(ledger, batches.order(key))
    sent = Counter(request.customer for request in vendor.requests() if request.customer.startswith(f"{key}-"))
    charged = Counter(effect.customer for effect in vendor.effects() if effect.customer.startswith(f"{key}-"))
    done = {name for name, item in items.items() if item.state is CallState.DONE}
    doubtful = {name: item for name, item in items.items() if item.state is CallState.IN_DOUBT}
    told = {name: (item.error, item.evidence) for name, item in doubtful.items()}
    assert set(items) == {f"{key}-{number}" for number in range(ITEMS)}, key  # nothing lost
    assert set(charged.values()) == {1}, (key, charged)  # nothing twice
    assert done <= set(charged), key
    if case.on_doubt == "replay":
        assert (ended, len(charged), told) == ("Done", ITEMS, {}), key
    else:
        assert set(sent.values()) == {1}, (key, sent)
        assert set(items) == done | set(doubtful), key
        assert len(doubtful) <= KILLS * case.at_once, key
        assert all(error for error, _ in told.values()), told  # each with its reason
        assert ended == ("InDoubt" if doubtful else "Done"), key
