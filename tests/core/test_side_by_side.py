"""Calls side by side in one body: each is settled on its own, and no error is lost."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import multiprocessing
import signal
import threading
from dataclasses import dataclass
from typing import Any

import pytest
import requests

from airflow_runguard.core import guard
from airflow_runguard.core.leases import Leases
from airflow_runguard.core.record import Order, State
from airflow_runguard.core.work import Done, Ended, InDoubt, Waiting
from tests.core import engine
from tests.core.test_batch import answered


def run(ledger: Any, body: Any) -> guard.How:
    return ran(ledger, engine.order("k", calls="explicit"), body)


def ran(ledger: Any, what: Order, body: Any) -> guard.How:
    return guard.run(ledger, Leases(None, ledger.installation), engine.work(what, body))


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


@dataclass
class Invoice:
    id: int

    def pay(self, paid: list[Any]) -> str:
        paid.append(self.id)
        return "paid"


class Stopped(BaseException):
    """What a signal raises."""


def test_p05_after_a_signal_no_other_item_of_a_map_begins(ledger):
    main, begun = threading.main_thread().ident, []

    def pay_slowly(item: str) -> str:
        begun.append(item)
        if item == "a":
            signal.pthread_kill(main, signal.SIGUSR1)
            stopped.wait(60)
        return f"paid {item}"

    def stop(*_: object) -> None:
        stopped.set()
        raise Stopped

    stopped = threading.Event()
    before = signal.signal(signal.SIGUSR1, stop)
    try:
        how = run(ledger, lambda guard: guard.map(pay_slowly, "abcdefgh", name=str, concurrency=1))
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert isinstance(how.error, Stopped)
    assert "h" not in begun
    assert calls(ledger) == dict.fromkeys(begun, "done")


def test_p09_a_name_that_other_work_had_gives_its_result_to_nobody_else(ledger):
    """A loop whose calls all have one name would pay the first and give its receipt to all the others."""
    invoices, paid = [{"id": 1, "cents": 5}, {"id": 2, "cents": 7}], []

    def charge(invoice: Any) -> Any:
        paid.append(invoice)
        return "paid"

    async def acharge(invoice: Any) -> Any:
        return charge(invoice)

    async def one_by_one(guard: Any, name: str) -> None:
        for invoice in invoices:
            await guard.acall(name, acharge, invoice)

    def another(invoice: Any) -> Any:
        return charge(invoice)

    def swallowed(guard: Any, name: str) -> None:
        for invoice in invoices:
            with contextlib.suppress(BaseException):
                guard.call(name, charge, invoice=invoice)
        guard.call("what follows from them", charge, "all")

    loops = {
        "positional": lambda guard, name: [guard.call(name, charge, invoice) for invoice in invoices],
        "swallowed": swallowed,
        "closure": lambda guard, name: [guard.call(name, lambda: charge(it)) for it in invoices],  # noqa: B023
        "partial": lambda guard, name: [guard.call(name, functools.partial(charge, each)) for each in invoices],
        "method": lambda guard, name: [guard.call(name, Invoice(each["id"]).pay, paid) for each in invoices],
        "map": lambda guard, name: guard.map(charge, invoices, name=lambda _: name, concurrency=1),
        "async": lambda guard, name: asyncio.run(one_by_one(guard, name)),
        "function": lambda guard, name: [guard.call(name, function, 1) for function in (charge, another)],
    }
    for name, loop in loops.items():
        what = engine.order(name, calls="explicit")
        for _ in range(2):  # the next try does no better
            how = ran(ledger, what, lambda guard, name=name, loop=loop: loop(guard, name))
            assert isinstance(how, Ended), name
            assert how.retry
            assert "with other arguments" in how.message, name
            assert ledger.get(what.identity).state is State.PENDING, name
        assert len(paid) == 1, name
        paid.clear()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_p04_a_process_that_the_body_forked_makes_no_call_and_does_not_hang(ledger, capfd):
    """It has the holder's memory, but no thread that would write an intent."""

    def body(guard: Any) -> Any:
        child = multiprocessing.get_context("fork").Process(target=guard.call, args=("a", pay, "a"))
        child.start()
        child.join(60)
        return child.exitcode, guard.call("b", pay, "b")

    assert run(ledger, body) == Done((1, "paid b"), replayed=False)
    assert calls(ledger) == {"b": "done"}
    assert "forked" in capfd.readouterr().err


def test_p02_the_same_work_asked_for_again_in_one_body_has_its_result(ledger):
    paid, sessions = [], []

    def pay_with(_: object, invoice: Any) -> str:
        paid.append(invoice["id"])
        return "paid"

    def pay_once_more(guard: Any) -> Any:
        def countdown(left: int = 3) -> int:
            return left and countdown(left - 1)  # carries itself along

        for _ in range(2):  # as a retry around a part of the body does
            guard.call("countdown", countdown)
            sessions.append(object())
            result = guard.call("a", pay_with, sessions[-1], invoice={"id": 1})
        return result

    assert ran(ledger, engine.order("again", calls="explicit"), pay_once_more) == Done("paid", replayed=False)
    assert paid == [1]
