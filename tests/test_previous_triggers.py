"""A thousand sensors that wait for the previous run of their series: one connection, and woken within a second."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from airflow_runguard.core.record import State
from airflow_runguard.core.series import Place
from airflow_runguard.triggers import PreviousTrigger, Watcher
from tests.core import engine
from tests.core.books import enter
from tests.test_triggers import connections, fired

SENSORS = 1000


@pytest.fixture(autouse=True)
def configured(monkeypatch: pytest.MonkeyPatch, ledger_url: str) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_RUNGUARD_LEDGER", ledger_url)
    monkeypatch.setenv("AIRFLOW__RUNGUARD__DEPLOYMENT", engine.DEPLOYMENT)


@pytest.fixture
def sql(ledger_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(ledger_url, autocommit=True) as connection:
        yield connection


def trigger(series: str) -> PreviousTrigger:
    """As Airflow makes it: from what it serialised before."""
    place = Place(series=series, place="2", expected="1")
    _, kwargs = PreviousTrigger(engine.DEPLOYMENT, asdict(place), datetime.now(UTC).isoformat()).serialize()
    return PreviousTrigger(**kwargs)


def test_a_thousand_sensors_use_one_connection_and_wake_within_a_second(
    ledger_url: str, sql: psycopg.Connection[Any]
) -> None:
    with closing(engine.open_ledger(ledger_url)) as ledger:
        held = [
            enter(ledger, engine.order(f"{n}", place=Place(series=f"job {n}", place="1", waits=False)))
            for n in range(SENSORS)
        ]
        others = connections(sql)

        async def scenario() -> tuple[float, int, int]:
            waits = [asyncio.create_task(fired(trigger(f"job {n}"))) for n in range(SENSORS)]
            watcher = Watcher.of(engine.DEPLOYMENT)
            while watcher.looks < 3:
                await asyncio.sleep(0.05)
            early, opened = sum(wait.done() for wait in waits), connections(sql) - others
            await asyncio.to_thread(held[-1].settle, State.DONE)
            settled = time.monotonic()
            woken = await waits[-1] - settled
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
            return woken, early, opened

        woken, early, opened = asyncio.run(scenario())
    assert (early, opened) == (0, 1)
    assert woken <= 1.0
