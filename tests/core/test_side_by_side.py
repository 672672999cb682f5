"""Calls side by side in one body: each is settled on its own, and no error is lost."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import requests

from airflow_runguard.core import guard
from airflow_runguard.core.leases import Leases
from airflow_runguard.core.record import State
from airflow_runguard.core.work import Done, Ended, InDoubt, Waiting
from tests.core import engine
from tests.core.test_batch import answered


def run(ledger: Any, body: Any) -> guard.How:
    return guard.run(ledger, Leases(None, ledger.installation), engine.work(engine.order("k", calls="explicit"), body))


def calls(ledger: Any) -> dict[str, str]:
    record = ledger.get(engine.identity("k"))
    return {call.name: str(call.state) for call in ledger.calls(record.id)}


def pay(item: str) -> str:
    match item:
        case "quota":
            raise answered(429, **{"Retry-After": "60"})
        case "timeout":
            raise requests.ReadTimeout("no answer")
        case "wrong":
            raise answered(422)
    return f"paid {item}"


def mapped(*items: str, concurrency: int = 8) -> Any:
    return lambda context: context.map(pay, items, name=lambda item: item, concurrency=concurrency)


def gathered(*items: str) -> Any:
    async def one(item: str) -> str:
        await asyncio.sleep(0)
        return pay(item)

    async def all_of(context: guard.GuardContext) -> list[str]:
        return await context.gather(*(context.acall(item, one, item) for item in items))

    return lambda context: asyncio.run(all_of(context))


@pytest.mark.parametrize("way", [mapped, gathered])
def test_what_they_return_comes_back_in_order_and_is_replayed(ledger, way):
    how = run(ledger, way("a", "b", "c"))
    assert isinstance(how, Done)
    assert how.value == ["paid a", "paid b", "paid c"]
    assert calls(ledger) == dict.fromkeys("abc", "done")


@pytest.mark.parametrize("way", [mapped, gathered])
def test_r42_no_error_is_lost_and_siblings_are_settled(ledger, way):
    how = run(ledger, way("a", "quota", "wrong", "b"))
    assert isinstance(how, Waiting)
    assert ledger.get(engine.identity("k")).state is State.PAUSED
    assert calls(ledger)["quota"] == "paused"
    settled = calls(ledger)
    assert "started" not in settled.values()
    assert settled["a"] == "done"


@pytest.mark.parametrize("way", [mapped, gathered])
def test_doubt_among_them_is_doubt_of_the_record(ledger, way):
    assert isinstance(run(ledger, way("a", "timeout", "wrong")), InDoubt)
    assert calls(ledger)["timeout"] == "in_doubt"


def test_after_the_first_error_no_other_item_of_a_map_begins(ledger):
    assert isinstance(run(ledger, mapped("a", "wrong", "b", "c", "d", concurrency=1)), Ended)
    assert "d" not in calls(ledger)
