"""Timelines by which a fresh pair of eyes once got a second charge or lost one; each stays closed."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import timedelta
from typing import Any

import psycopg
import pytest

from airflow_runguard.core import guard
from airflow_runguard.core.errors import NotApplied
from airflow_runguard.core.leases import Leases
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Holder, State, Verdict
from airflow_runguard.core.writer import Writer
from tests.core import books, engine
from tests.core.books import enter, state_of

WORDS = {"actor": "ann", "reason": "asked the vendor"}


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    with closing(engine.open_ledger(ledger_url)) as opened:
        yield opened


@pytest.fixture
def sql(ledger_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(ledger_url, autocommit=True) as connection:
        yield connection


def run(ledger: Ledger, what: Any, body: Any, **rules: Any) -> guard.How:
    return guard.run(ledger, Leases(None, ledger.installation), engine.work(what, body, **rules))


def test_p03_withdrawing_the_claim_of_a_body_that_came_back_does_not_say_that_it_was_never_sent(ledger: Ledger) -> None:
    """Submitted, deferred, came back; then the process is stopped before its work goes on."""
    order, who = engine.order("submitted"), engine.holder()
    enter(ledger, order, who).write(hand_over=3600.0)
    back = Writer(ledger, order, Holder("another entry", who.ti_id))
    claim = back.claim()
    assert (claim.verdict, claim.reentered) == (Verdict.RUN, True)
    back.withdraw_claim().result()
    back.close()
    assert state_of(ledger, order) is State.IN_DOUBT


def test_p03_one_request_speaks_for_itself_only_in_the_entry_that_made_it(ledger: Ledger) -> None:
    """A refused connection while polling says nothing about the submission before the deferral."""
    order, who = engine.order("polled"), engine.holder()
    enter(ledger, order, who).write(hand_over=3600.0)

    def poll(_: guard.GuardContext) -> None:
        raise ConnectionRefusedError("nobody listens")

    ended = run(ledger, order, poll, single_request=True, holder=Holder("another entry", who.ti_id))
    assert isinstance(ended, guard.Ended)
    assert state_of(ledger, order) is State.IN_DOUBT


def test_p05_the_lease_is_renewed_also_after_a_reconciliation(ledger: Ledger, sql: psycopg.Connection[Any]) -> None:
    order = engine.order("asked", lease=0.3, on_doubt="reconcile")
    held = enter(ledger, order)
    books.expire(sql, held.claim.record_id)
    books.long_ago(sql, held.claim.record_id)
    lease = "select lease_until, clock_timestamp() from runguard.record where id = %s"

    def slow(_: guard.GuardContext) -> str:
        first = sql.execute(lease, [held.claim.record_id]).fetchone()
        assert first is not None
        books.wait_until(
            lambda: (
                (now := sql.execute(lease, [held.claim.record_id]).fetchone()) is not None
                and now[0] > first[0] + timedelta(seconds=0.5)
            ),
            "the lease is renewed twice",
        )
        return "ok"

    done = run(ledger, order, slow, reconcile=lambda doubt: NotApplied("the vendor has nothing"))
    assert done == guard.Done("ok", replayed=False)


@pytest.mark.parametrize("swallow", ["gather", "pool"])
def test_p09_a_call_that_was_refused_is_not_done_because_the_body_did_not_look(ledger: Ledger, swallow: str) -> None:
    order = engine.order(swallow, calls="explicit")
    made: list[str] = []

    async def charge() -> None:
        made.append("b")

    def body(context: guard.GuardContext) -> str:
        context.call("a", made.append, "a")
        context.stop()  # Airflow wants the task gone: no further call may start
        if swallow == "pool":
            with ThreadPoolExecutor(1) as pool:
                pool.submit(context.call, "b", made.append, "b")
        else:

            async def charge_the_rest() -> None:
                await asyncio.gather(context.acall("b", charge), return_exceptions=True)

            asyncio.run(charge_the_rest())
        return "all charged"

    assert isinstance(run(ledger, order, body), guard.Ended)
    assert (made, state_of(ledger, order)) == (["a"], State.PENDING)


def test_p03_a_body_that_lives_may_still_send_so_it_is_too_early_to_say_that_it_did_not(
    ledger: Ledger, sql: psycopg.Connection[Any]
) -> None:
    held = enter(ledger, engine.order("long"))
    books.long_ago(sql, held.claim.record_id)
    held.write()  # a sign of life
    assert ledger.release(held.claim.record_id, **WORDS) == "ok"
    assert ledger.resolve(held.claim.record_id, "did_not_happen", **WORDS) == "too_early"


def test_p03_work_that_has_not_ended_is_not_done(ledger: Ledger) -> None:
    order, gate, made = engine.order("later", calls="explicit"), threading.Event(), []

    def charge() -> None:
        gate.wait(30)
        made.append("charged")

    with ThreadPoolExecutor(1) as pool:
        ended = run(ledger, order, lambda context: context.call("charge", pool.submit, charge))
        gate.set()
    assert isinstance(ended, guard.Ended)
    assert (made, state_of(ledger, order)) == (["charged"], State.IN_DOUBT)


def test_p03_a_generator_is_no_call(ledger: Ledger) -> None:
    order = engine.order("lazy", calls="explicit")

    def charge() -> Any:
        yield "never reached"

    assert isinstance(run(ledger, order, lambda context: context.call("charge", charge)), guard.Ended)
    assert state_of(ledger, order) is State.FAILED


def test_p03_a_late_applied_of_the_generation_before_stops_the_new_one(
    ledger: Ledger, sql: psycopg.Connection[Any]
) -> None:
    """A is frozen; "it did not happen"; B is declined; a person reopens, since nothing happened; A wakes: it did."""
    order = engine.order("reopened")
    frozen = enter(ledger, order)
    books.expire(sql, frozen.claim.record_id)
    assert ledger.claim(order, engine.holder()).verdict is Verdict.IN_DOUBT
    assert ledger.resolve(frozen.claim.record_id, "did_not_happen", force=True, **WORDS) == "ok"
    enter(ledger, order).settle(State.FAILED, books.DECLINED)
    assert ledger.reopen(frozen.claim.record_id, seen_generation=1, **WORDS) == "ok"
    frozen.settle(State.DONE)
    assert state_of(ledger, order) is State.IN_DOUBT
