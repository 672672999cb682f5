"""What waiting costs: a triggerer's loop with thousands of waits, and how soon a task hears that its gate is open."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from datetime import UTC, datetime, timedelta

import psycopg

from airflow_runguard.core import keys, payloads
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Holder, Order, Verdict
from airflow_runguard.triggers import ResumeTrigger, Watcher
from benchmarks.speed import DEPLOYMENT

GATE = "bench"
MORE = """
    insert into runguard.record (deployment, namespace, key, state, failure_class, effect, gate, resume_at, calls,
        on_doubt, payload_version, payload_digest, payload_fields, payload_readable, store_result, digest)
    select deployment, namespace, key || '/' || n, state, failure_class, effect, gate, resume_at, calls, on_doubt,
        payload_version, payload_digest, payload_fields, payload_readable, store_result, ''
      from runguard.record cross join generate_series(2, %s) n where gate = 'bench' and key = %s
"""


def measure(ledger_url: str, waits: int, openings: int) -> tuple[float, float]:
    """Seconds from a gate's opening until a waiting task's trigger fires (median), and milliseconds that one look takes
    from the triggerer's loop with ``waits`` waits: the longest of ten, once the connection is open. Opening it is the
    first look's, once in a triggerer's life: Python lets its thread keep the loop waiting for 5 ms at a time."""
    os.environ["AIRFLOW_CONN_RUNGUARD_LEDGER"] = ledger_url
    os.environ["AIRFLOW__RUNGUARD__DEPLOYMENT"] = DEPLOYMENT
    ledger = Ledger(lambda: psycopg.connect(ledger_url), deployment=DEPLOYMENT)
    ledger.check()
    try:
        resumes = statistics.median(asyncio.run(_resume(ledger, number)) for number in range(openings))
        return resumes, asyncio.run(_crowd(ledger, ledger_url, waits)) * 1000
    finally:
        ledger.close()


def _paused(ledger: Ledger, key: str) -> int:
    """A record that waits at the gate, which is closed for a day."""
    until = datetime.now(UTC) + timedelta(days=1)
    ledger.close_gate(GATE, until=until, rate=1000, actor="bench", reason="bench")
    order = Order(identity=keys.identity(DEPLOYMENT, "waiting", key), payload=payloads.payload({}), gate=GATE)
    claim = ledger.claim(order, Holder(key))
    if claim.verdict is not Verdict.PAUSED:
        raise RuntimeError(f"the record does not wait: {claim}")
    return claim.record_id


def _trigger(record_id: int) -> ResumeTrigger:
    return ResumeTrigger(DEPLOYMENT, record_id, None, datetime.now(UTC).isoformat())


async def _fired(one: ResumeTrigger) -> float:
    async for _ in one.run():
        break
    return time.perf_counter()


async def _looked(times: int) -> Watcher:
    watcher = Watcher.of(DEPLOYMENT)
    begun = watcher.looks
    while watcher.looks < begun + times:
        await asyncio.sleep(0.01)
    return watcher


async def _resume(ledger: Ledger, number: int) -> float:
    wait = asyncio.create_task(_fired(_trigger(_paused(ledger, f"resumed/{number}"))))
    await _looked(1)
    await asyncio.sleep(0.1 * (number % 5))  # at different moments between two looks
    opened = time.perf_counter()
    ledger.open_gate(GATE, rate=1000, actor="bench", reason="bench")
    return await wait - opened


async def _crowd(ledger: Ledger, url: str, waits: int) -> float:
    first = _paused(ledger, "crowd")
    with psycopg.connect(url) as connection:
        connection.execute("select runguard.open_for_writing()")
        connection.execute(MORE, [waits, "crowd"])
        query = "select id from runguard.record where gate = 'bench' and state = 'paused'"
        ids = [row[0] for row in connection.execute(query)]
    tasks = [asyncio.create_task(_fired(_trigger(one))) for one in {first, *ids}]
    watcher = await _looked(1)
    watcher.longest_on_loop = 0.0
    await _looked(10)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return watcher.longest_on_loop
