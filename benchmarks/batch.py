"""What a batch costs: an item beside one bare pair of writes, planning and resuming 100,000 items, and memory.

Run as ``python -m benchmarks.batch rss URL N`` it plans N streamed items in its own process and prints the peak in MiB.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any

import psycopg

from airflow_runguard.core import guard, keys, payloads
from airflow_runguard.core.batch import Batch
from airflow_runguard.core.conduct import conduct
from airflow_runguard.core.leases import Leases
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Holder, Order

DEPLOYMENT = "bench"
DONE = """
    update runguard.call c set state = 'done', effect = 'applied', first_intent_at = clock_timestamp(),
           outcome_at = clock_timestamp(), result = '1'::bytea, result_digest = sha256('1'::bytea)
      from runguard.record r where r.id = c.record_id and r.key = %(key)s
       and c.name not in (select 'inv-' || n from generate_series(0, %(items)s - 1, %(items)s / 10) n)
"""


class Enough(BaseException):
    """Ends a batch at its first call."""


def lines(count: int) -> Callable[[], Iterator[dict[str, Any]]]:
    return lambda: ({"id": f"inv-{n}", "customer": f"cust-{n % 100}", "cents": 500} for n in range(count))


def run(ledger: Ledger, key: str, items: int, call: Callable[..., Any], **rules: Any) -> None:
    batch = Batch(items=lines(items), key_of=lambda item: item["id"], call=call, **rules)
    order = Order(identity=keys.identity(DEPLOYMENT, "batch", key), payload=payloads.payload({}), calls="batch")
    work = guard.Work(
        order=order,
        holder=Holder(uuid.uuid4().hex, uuid.uuid4().hex),
        body=lambda context: conduct(batch, context),
        dump=lambda value: json.dumps(value).encode(),
        load=json.loads,
    )
    guard.run(ledger, Leases(None, ledger.installation), work)


def until_the_first_call(ledger: Ledger, key: str, items: int) -> float:
    """Seconds."""
    begun, called = time.perf_counter(), []

    def call(*_: Any) -> None:
        called.append(time.perf_counter())
        raise Enough

    run(ledger, key, items, call)
    return called[0] - begun


def plan_and_resume(ledger: Ledger, url: str, items: int) -> tuple[float, float]:
    """Seconds until the first call of a new batch, and of one in which all but ten are done."""
    key = uuid.uuid4().hex
    planned = until_the_first_call(ledger, key, items)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(DONE, {"key": key, "items": items})
        connection.execute("vacuum analyze runguard.call")
    return planned, until_the_first_call(ledger, key, items)


def item(ledger: Ledger, items: int) -> float:
    """Seconds for each item of a batch with eight threads, from the first call on."""
    begun: list[float] = []

    def call(*_: Any) -> int:
        if not begun:
            begun.append(time.perf_counter())
        return 1

    run(ledger, uuid.uuid4().hex, items, call, concurrency=8)
    return (time.perf_counter() - begun[0]) / items


def pair(connection: psycopg.Connection[Any], items: int) -> float:
    """Seconds for one ``INSERT`` and one ``UPDATE``, each committed, one after another."""
    name = uuid.uuid4().hex
    begun = time.perf_counter()
    for number in range(items):
        key = f"{name}/{number}"
        connection.execute("insert into work (key, state) values (%s, 'running')", (key,))
        connection.execute("update work set state = 'done', result = %s where key = %s", ("1", key))
    return (time.perf_counter() - begun) / items


def stream_rss_mb(url: str, *, many: int, few: int) -> float:
    """MiB that planning ``many`` streamed items takes beyond planning ``few``, each in a process of its own."""

    def peak(count: int) -> float:
        command = [sys.executable, "-m", "benchmarks.batch", "rss", url, str(count)]
        return float(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    return peak(many) - peak(few)


def figures(url: str, bare: psycopg.Connection[Any], *, rounds: int, items: int, many: int) -> dict[str, float]:
    ledger = Ledger(lambda: psycopg.connect(url), deployment=DEPLOYMENT)
    ledger.check()
    ratios = [item(ledger, items) / pair(bare, items) for _ in range(rounds)]
    planned, resumed = zip(*(plan_and_resume(ledger, url, 100_000) for _ in range(max(1, rounds // 2))), strict=True)
    ledger.close()
    return {
        "item_vs_pair": statistics.median(ratios),
        "plan_100k_s": statistics.median(planned),
        "resume_100k_s": statistics.median(resumed),
        "stream_rss_mb": stream_rss_mb(url, many=many, few=10_000),
    }


if __name__ == "__main__":
    _, _, database, size = sys.argv
    measured = Ledger(lambda: psycopg.connect(database), deployment=DEPLOYMENT)
    measured.check()
    until_the_first_call(measured, uuid.uuid4().hex, int(size))
    with open("/proc/self/status") as status:
        print(next(int(line.split()[1]) / 1024 for line in status if line.startswith("VmHWM")))
