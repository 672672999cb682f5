"""What it takes to wait for the previous run, and what it costs a task to be observed."""

from __future__ import annotations

import asyncio
import os
import statistics
import time
import uuid
from dataclasses import asdict
from datetime import UTC, datetime

import psycopg

from airflow_runguard.core import keys, observe, payloads
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Grant, Holder, Order, Result, Settlement, State, Verdict
from airflow_runguard.core.series import Place
from airflow_runguard.core.work import Work
from airflow_runguard.triggers import PreviousTrigger, Watcher
from benchmarks.speed import DEPLOYMENT

CALL = 0.1
"""Seconds that a vendor takes to answer."""
CONNECTIONS = """
    select count(*) from pg_stat_activity
     where datname = current_database() and pid <> pg_backend_pid() and application_name = 'airflow_runguard'
"""


def measure(ledger_url: str, sensors: int, wakes: int) -> tuple[float, float]:
    """Seconds from the previous run's settlement until its sensor's trigger fires, among so many ``sensors`` (the
    longest of ``wakes``); and the connections that all of them have together."""
    os.environ["AIRFLOW_CONN_RUNGUARD_LEDGER"] = ledger_url
    os.environ["AIRFLOW__RUNGUARD__DEPLOYMENT"] = DEPLOYMENT
    ledger = _opened(ledger_url)
    try:
        held = [_held(ledger, f"job {number}") for number in range(sensors)]
        return asyncio.run(_wait(ledger, ledger_url, held, wakes))
    finally:
        ledger.close()


def observe_ms(ledger_url: str, calls: int) -> float:
    """Milliseconds that depth ``observe`` adds to a task whose body waits for a vendor for 100 ms: its thread and
    connection, what it books before and after (median)."""
    took = []
    for number in range(calls):
        order = Order(
            identity=keys.identity(DEPLOYMENT, "observed", f"{number}"), payload=payloads.payload({"amount": 500})
        )
        work = Work(
            order=order, holder=_holder(), body=lambda _: time.sleep(CALL), dump=lambda _: b"1", load=lambda _: 1
        )
        begun = time.perf_counter()
        bystander = observe.Bystander(lambda: Ledger(lambda: psycopg.connect(ledger_url), deployment=DEPLOYMENT), 5.0)
        observe.run(work, bystander, lambda level, what: None)
        took.append(time.perf_counter() - begun - CALL)
        bystander.close()
        if bystander.trouble:
            raise RuntimeError(f"the observed work was not booked: {bystander.trouble}")
    return statistics.median(took) * 1000


def _opened(url: str) -> Ledger:
    ledger = Ledger(lambda: psycopg.connect(url), deployment=DEPLOYMENT)
    ledger.check()
    return ledger


def _holder() -> Holder:
    return Holder(uuid.uuid4().hex, uuid.uuid4().hex, "bill", "charge", "run", 1, -1, "host", 1)


def _held(ledger: Ledger, series: str) -> tuple[Order, Holder, Grant]:
    """The first run of a series, at work."""
    place = Place(series=series, place="1", waits=False)
    order = Order(
        identity=keys.identity(DEPLOYMENT, "previous", series),
        payload=payloads.payload({}),
        calls="explicit",
        lease=3600,
        place=place,
    )
    holder = _holder()
    claim = ledger.claim(order, holder)
    if claim.verdict is not Verdict.RUN:
        raise RuntimeError(f"the first run was not granted: {claim}")
    return order, holder, Grant(order.identity, claim.record_id, claim.generation, claim.fence)


async def _fired(series: str) -> float:
    place = Place(series=series, place="2", expected="1")
    trigger = PreviousTrigger(DEPLOYMENT, asdict(place), datetime.now(UTC).isoformat())
    async for _ in trigger.run():
        break
    return time.perf_counter()


async def _wait(ledger: Ledger, url: str, held: list[tuple[Order, Holder, Grant]], wakes: int) -> tuple[float, float]:
    waits = [asyncio.create_task(_fired(f"job {number}")) for number in range(len(held))]
    watcher = Watcher.of(DEPLOYMENT)
    begun = watcher.looks
    while watcher.looks < begun + 3:
        await asyncio.sleep(0.01)
    with psycopg.connect(url) as connection:
        (connections,) = connection.execute(CONNECTIONS).fetchone() or (0,)
    longest = 0.0
    for number in range(wakes):
        await asyncio.sleep(0.1 * (number % 5))  # at different moments between two looks
        order, holder, grant = held[number]
        done = Settlement(State.DONE, result=Result(b"1"))
        await asyncio.to_thread(lambda: ledger.write(grant, holder=holder, order=order, settlement=done))  # noqa: B023
        settled = time.perf_counter()
        longest = max(longest, await waits[number] - settled)
    for wait in waits:
        wait.cancel()
    await asyncio.gather(*waits, return_exceptions=True)
    return longest, float(connections)
