"""Waiting without a worker (P6): one watcher, one connection, paced, and harmless to others on a triggerer (R45)."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest
from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_runguard import triggers
from airflow_runguard.core.record import State, Verdict
from airflow_runguard.triggers import ResumeTrigger, Watcher
from tests.core import engine
from tests.core.books import QUOTA, enter, expire

MANY = 5000
RATE = 1000.0
"""Slots a second in the test of many."""


@pytest.fixture(autouse=True)
def configured(monkeypatch: pytest.MonkeyPatch, ledger_url: str) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_RUNGUARD_LEDGER", ledger_url)
    monkeypatch.setenv("AIRFLOW__RUNGUARD__DEPLOYMENT", engine.DEPLOYMENT)


@pytest.fixture
def sql(ledger_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(ledger_url, autocommit=True) as connection:
        yield connection


def trigger(record_id: int, until: datetime | None = None, not_before: datetime | None = None) -> ResumeTrigger:
    """As Airflow makes it: from what it serialised before."""
    now = datetime.now(UTC)
    first = ResumeTrigger(
        engine.DEPLOYMENT, record_id, until.isoformat() if until else None, (not_before or now).isoformat()
    )
    _, kwargs = first.serialize()
    return ResumeTrigger(**kwargs)


async def fired(one: BaseTrigger) -> float:
    async for _ in one.run():
        return time.monotonic()
    raise AssertionError("it ended without an event")


def pause(url: str, sql: psycopg.Connection[Any], many: int) -> list[int]:
    """So many records that wait at one gate which is closed for a day; the first has hit the wall."""
    ledger = engine.open_ledger(url)
    enter(ledger, engine.order("0", gate="stripe")).settle(State.PAUSED, QUOTA)
    ledger.close_gate("stripe", until=datetime.now(UTC) + timedelta(days=1), rate=RATE, actor="t", reason="t")
    sql.execute(
        """insert into runguard.record (deployment, namespace, key, state, failure_class, effect, gate, resume_at,
               calls, on_doubt, payload_version, payload_digest, payload_fields, payload_readable, store_result, digest)
           select deployment, namespace, n::text, state, failure_class, effect, gate, resume_at, calls, on_doubt,
               payload_version, payload_digest, payload_fields, payload_readable, store_result, ''
             from runguard.record, generate_series(1, %s) n""",
        [many - 1],
    )
    ledger.close()
    return [row[0] for row in sql.execute("select id from runguard.record order by id")]


def open_gate(url: str, rate: float) -> None:
    ledger = engine.open_ledger(url)
    assert ledger.open_gate("stripe", rate=rate, actor="t", reason="t") == "ok"
    ledger.close()


def connections(sql: psycopg.Connection[Any]) -> int:
    query = "select count(*) from pg_stat_activity where datname = current_database() and pid <> pg_backend_pid()"
    row = sql.execute(query).fetchone()
    assert row is not None
    return int(row[0])


class Ticking(BaseTrigger):
    """Somebody else's trigger on the same triggerer."""

    def __init__(self) -> None:
        super().__init__()
        self.ticks = 0

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return "", {}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        while True:
            await asyncio.sleep(0.005)
            self.ticks += 1
        yield TriggerEvent(None)


def test_r45_five_thousand_waits_cost_one_connection_and_come_back_paced(
    ledger_url: str, sql: psycopg.Connection[Any]
) -> None:
    ids = pause(ledger_url, sql, MANY)

    async def at(one: int) -> tuple[int, datetime]:
        await fired(trigger(one))
        return one, datetime.now(UTC)

    async def scenario() -> tuple[dict[int, datetime], int, int, int]:
        other = Ticking()
        ticking = asyncio.create_task(fired(other))
        waits = [asyncio.create_task(at(one)) for one in ids]
        watcher = Watcher.of(engine.DEPLOYMENT)
        began = watcher.looks
        while watcher.looks < began + 4:
            await asyncio.sleep(0.05)
        open_at_most = connections(sql)
        early = sum(wait.done() for wait in waits)
        await asyncio.to_thread(open_gate, ledger_url, RATE)
        times = dict(await asyncio.gather(*waits))
        ticking.cancel()
        return times, other.ticks, open_at_most, early

    times, ticks, open_at_most, early = asyncio.run(scenario())
    assert early == 0
    assert open_at_most == 1
    assert len(times) == MANY
    slots = dict(sql.execute("select id, resume_at from runguard.record order by resume_at").fetchall())
    assert all(times[one] >= slot for one, slot in slots.items()), "nobody before its slot"
    gaps = [(b - a).total_seconds() for a, b in itertools.pairwise(slots.values())]
    assert min(gaps) > 0.99 / RATE, (
        "and no two of them have slots that are closer than the pace: there is no second burst"
    )
    assert ticks > 100, "other triggers on this triggerer kept running"


def test_p06_a_gate_opened_by_hand_wakes_its_task_within_a_look(ledger_url: str, sql: psycopg.Connection[Any]) -> None:
    [one] = pause(ledger_url, sql, 1)

    async def scenario() -> None:
        wait = asyncio.create_task(fired(trigger(one, until=datetime.now(UTC) + timedelta(days=1))))
        watcher = Watcher.of(engine.DEPLOYMENT)
        while watcher.looks < 2:
            await asyncio.sleep(0.02)
        assert not wait.done()
        await asyncio.to_thread(open_gate, ledger_url, RATE)
        looks = watcher.looks
        await wait
        assert watcher.looks <= looks + 3

    asyncio.run(scenario())


def test_p06_what_is_done_by_hand_is_heard_before_the_next_tick(
    ledger_url: str, sql: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triggers, "TICK", 1000.0)
    [one] = pause(ledger_url, sql, 1)

    async def scenario() -> None:
        wait = asyncio.create_task(fired(trigger(one, until=datetime.now(UTC) + timedelta(days=1))))
        while not Watcher.of(engine.DEPLOYMENT).looks:
            await asyncio.sleep(0.02)
        assert not wait.done()
        await asyncio.to_thread(open_gate, ledger_url, RATE)
        await asyncio.wait_for(wait, 120)
        await asyncio.to_thread(open_gate, ledger_url, RATE)  # and the watcher, for whom nobody waits any more, ends

    asyncio.run(scenario())


def test_p10_a_busy_record_wakes_the_one_that_waits_when_its_holder_lets_go_or_dies(
    ledger_url: str, sql: psycopg.Connection[Any]
) -> None:
    ledger = engine.open_ledger(ledger_url)
    lets_go, dies = enter(ledger, engine.order("lets go")), enter(ledger, engine.order("dies"))

    async def scenario() -> None:
        waits = [asyncio.create_task(fired(trigger(held.id))) for held in (lets_go, dies)]
        watcher = Watcher.of(engine.DEPLOYMENT)
        while watcher.looks < 2:
            await asyncio.sleep(0.02)
        assert not any(wait.done() for wait in waits)
        lets_go.settle(State.DONE)
        expire(sql, dies.id)
        await asyncio.gather(*waits)

    asyncio.run(scenario())
    ledger.close()


def test_p12_a_frozen_record_wakes_nobody_until_it_is_thawed(ledger_url: str) -> None:
    ledger = engine.open_ledger(ledger_url)
    ledger.freeze("all", actor="t", reason="t")
    claim = ledger.claim(engine.order("k"), engine.holder())
    assert claim.verdict is Verdict.FROZEN

    async def scenario() -> None:
        wait = asyncio.create_task(fired(trigger(claim.record_id)))
        watcher = Watcher.of(engine.DEPLOYMENT)
        while watcher.looks < 3:
            await asyncio.sleep(0.02)
        assert not wait.done()
        ledger.thaw("all", actor="t", reason="t")
        await wait

    asyncio.run(scenario())
    ledger.close()


def test_it_never_fires_before_the_scheduler_can_bear_it(ledger_url: str) -> None:
    not_before = datetime.now(UTC) + timedelta(seconds=1.5)

    async def scenario() -> datetime:
        await fired(trigger(0, until=datetime.now(UTC), not_before=not_before))
        return datetime.now(UTC)

    assert asyncio.run(scenario()) >= not_before


def test_tasks_know_whether_somebody_would_wake_them(ledger_url: str, sql: psycopg.Connection[Any]) -> None:
    ledger = engine.open_ledger(ledger_url)
    assert ledger.watched(30) is None
    ids = pause(ledger_url, sql, 3)

    async def scenario() -> None:
        waits = [asyncio.create_task(fired(trigger(one))) for one in ids]
        while (ledger.watched(30) or 0) < 3:
            await asyncio.sleep(0.05)
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        while ledger.watched(30) != 0:
            await asyncio.sleep(0.05)

    asyncio.run(scenario())
    assert connections(sql) == 1, "only this test's own"
    ledger.close()


def test_away_and_back_again_the_ledger_is_asked_anew(ledger_url: str, sql: psycopg.Connection[Any]) -> None:
    [one] = pause(ledger_url, sql, 1)

    async def scenario() -> None:
        wait = asyncio.create_task(fired(trigger(one)))
        watcher = Watcher.of(engine.DEPLOYMENT)
        while watcher.looks < 1:
            await asyncio.sleep(0.02)
        killed = "select pg_terminate_backend(pid) from pg_stat_activity where application_name = 'airflow_runguard'"
        assert sql.execute(killed).fetchall() == [(True,)]
        await asyncio.to_thread(open_gate, ledger_url, RATE)
        await wait

    asyncio.run(scenario())
