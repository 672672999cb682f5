"""Batches whose process is killed at random moments: each item is charged once, and what nobody knows is said."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.core import batches, books

ROOT = Path(__file__).parents[2]
ITEMS, KILLS = 120, 3


def start(plan: dict[str, Any]) -> subprocess.Popen[bytes]:
    worker = subprocess.Popen(
        [sys.executable, "-m", "tests.core.batch_worker"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT
    )
    assert worker.stdin is not None
    worker.stdin.write(json.dumps(plan).encode())
    worker.stdin.close()
    return worker


@pytest.mark.parametrize(
    ("on_doubt", "honours", "bulk"), [("ask", False, None), ("replay", True, None), ("ask", False, 5)]
)
@pytest.mark.parametrize("seed", [1, 2])
def test_p03_kill_9_at_random_moments_charges_each_item_once(
    ledger, ledger_url, sql, vendor, vendor_control, seed, on_doubt, honours, bulk
):
    chance = random.Random(seed)
    vendor_control.honour_keys(honours)
    concurrency = 4
    plan = {
        "ledger": ledger_url,
        "vendor": vendor.url,
        "key": f"crash{seed}",
        "items": ITEMS,
        "concurrency": concurrency,
        "bulk": bulk,
        "on_doubt": on_doubt,
    }
    what = batches.order(plan["key"])
    kills = 0
    for moment in sorted(chance.sample(range(1, 45), KILLS)):
        with start(plan) as worker:
            vendor_control.wait(charged=moment, timeout=60)
            worker.kill()
            kills += 1
        books.expire(sql, batches.record(ledger, what).id)
    with start(plan) as worker:
        assert worker.stdout is not None
        ended = worker.stdout.read().decode()

    states = batches.states(ledger, what)
    charged = [effect.customer for effect in vendor_control.effects()]
    doubtful = [key for key, state in states.items() if state == "in_doubt"]
    assert kills > 0
    assert len(states) == ITEMS
    assert len(charged) == len(set(charged))  # nothing twice
    if on_doubt == "replay":
        assert (ended, len(charged), doubtful) == ("Done", ITEMS, [])
    else:
        assert set(states.values()) <= {"done", "in_doubt"}
        assert len(doubtful) <= kills * concurrency * (bulk or 1)
        assert {key for key, state in states.items() if state == "done"} <= set(charged)
        assert all(batches.items(ledger, what)[key].error for key in doubtful)  # each with a reason
        assert ended == ("InDoubt" if doubtful else "Done")
