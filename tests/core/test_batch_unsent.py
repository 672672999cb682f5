"""An item whose intent was granted and not used stands where it stood, as if it had not been asked for (P3, P11)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from hashlib import sha256
from typing import Any

import psycopg
import pytest

from airflow_runguard.core import guard
from airflow_runguard.core.batch import Batch
from airflow_runguard.core.conduct import conduct
from airflow_runguard.core.errors import LedgerUnavailable
from airflow_runguard.core.items import Items, Selection
from airflow_runguard.core.leases import Leases
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.payloads import canonical
from airflow_runguard.core.record import Call, Grant, Order, Outcome, State, Written
from airflow_runguard.core.work import Done, Ended
from airflow_runguard.core.writer import NEVER_SENT
from tests.core import batches, books, engine
from tests.core.batches import Counting, invoices
from tests.core.test_two_ways import LongWay

SQL = psycopg.Connection[Any]


class Interrupted(Ledger):
    """A ledger whose holder is told to stop at the moment in which it hears that item c may be called, and which loses
    its first answer to what the holder says about that."""

    stop: Callable[[], None]
    lost = 0

    def write(self, *args: Any, **what: Any) -> Written:
        written = super().write(*args, **what)
        if "c" in written.intents:
            self.stop()
        if not self.lost and any(outcome.unsent for outcome in what.get("outcomes", ())):
            self.lost += 1
            raise LedgerUnavailable("The connection is gone.", "Wait.", sent=True)
        return written


def test_p11_an_item_that_was_asked_for_and_not_called_is_pending_and_takes_a_corrected_payload(
    ledger: Ledger, ledger_url: str
) -> None:
    pay = Counting()
    batch = Batch(items=lambda: invoices(*"abcd"), key_of=lambda item: item["id"], call=pay)

    def body(context: Any) -> None:
        stopped.stop = context.stop
        conduct(batch, context)

    with closing(Interrupted(lambda: psycopg.connect(ledger_url), deployment=ledger.deployment)) as stopped:
        stopped.check()
        how = guard.run(stopped, Leases(None, ledger.installation), engine.work(batches.order(), body))
    assert stopped.lost == 1
    assert isinstance(how, Ended)
    assert how.retry
    assert (how.value["done"], how.value["pending"], how.value["failed"]) == (2, 2, {})
    assert batches.states(ledger) == {"a": "done", "b": "done", "c": "pending", "d": "pending"}
    record, c = batches.record(ledger), batches.items(ledger)["c"]
    assert (record.state, record.open_calls) == (State.PENDING, 0)
    assert (c.first_intent_at, c.failure_class, c.effect, c.attempt) == (None, None, None, 1)
    said = [event for event in ledger.events(record.id) if event.kind == "answered"]
    assert [(event.detail["call"], event.detail["state"]) for event in said] == [("c", "pending")]

    corrected = [*invoices(*"ab"), {"id": "c", "cents": 700}, *invoices("d")]
    assert isinstance(batches.run(ledger, corrected, pay), Done)
    assert pay.calls == ["a", "b", "c", "d"]


def entered(ledger: Ledger, what: Order, said: str = "work", cents: int = 500) -> books.Held:
    """A holder whose list is the one item ``a``; planning says of it what is expected."""
    held = books.enter(ledger, what)
    grant = Grant(what.identity, held.id, held.claim.generation, held.claim.fence)
    digest = sha256(canonical({"id": "a", "cents": cents})).hexdigest()
    assert Items(ledger).begin(grant, held.holder)
    assert Items(ledger).plan(grant, held.holder, what, ["a"], [digest]).said == [said]
    return held


def unsent(held: books.Held) -> Written:
    return held.write(outcomes=[Outcome("a", failure=NEVER_SENT, unsent=True)])


def asked_and_unsent(ledger: Ledger, what: Order) -> Call:
    held = entered(ledger, what)
    assert held.intent("a") == "run"
    assert unsent(held).verdict == "ok"
    held.settle(State.PENDING)
    record = batches.record(ledger, what)
    assert record.open_calls == 0
    return batches.items(ledger, what)["a"]


def test_p03_what_an_earlier_attempt_left_is_not_forgotten(ledger: Ledger, sql: SQL) -> None:
    ends = {"declined": books.DECLINED, "paused": books.QUOTA, "doubtful": books.UNKNOWN, "anew": None}
    orders = {key: batches.order(key, on_doubt="replay") for key in ends}
    before: dict[str, Call] = {}
    for key, failure in ends.items():
        what = orders[key]
        held = entered(ledger, what)
        assert held.intent("a") == "run"
        held.outcome("a", failure)
        held.settle(State.PENDING)
        books.come_due(sql, held.id)
        before[key] = batches.items(ledger, what)["a"]
    again = Items(ledger).reopen(
        batches.record(ledger, orders["anew"]).id,
        Selection(names=("a",)),
        seen_generation=1,
        actor="ann",
        reason="once more",
        again_although_applied=True,
    )
    assert again.verdict == "ok"

    after = {key: asked_and_unsent(ledger, what) for key, what in orders.items()}
    assert [str(call.state) for call in after.values()] == ["pending", "pending", "in_doubt", "pending"]
    assert [call.attempt for call in after.values()] == [2, 1, 1, 2]
    for key in ("declined", "paused"):  # called before: its payload binds
        assert (after[key].failure_class, str(after[key].effect)) == (None, "not_applied")
        held = entered(ledger, orders[key], said="changed", cents=700)
        held.settle(State.PENDING)
    doubt, was = after["doubtful"], before["doubtful"]
    assert (doubt.first_unknown_at, doubt.first_intent_at) == (was.first_unknown_at, was.first_intent_at)
    assert (doubt.failure_class, doubt.error, doubt.evidence) == (was.failure_class, was.error, was.evidence)
    assert after["anew"].first_intent_at is None  # ordered anew, and not called since
    for key, what in orders.items():
        held = entered(ledger, what, cents=700 if key == "anew" else 500)
        assert held.intent("a") == "run"
        held.outcome("a")
        assert batches.items(ledger, what)["a"].attempt == after[key].attempt, "the vendor key that was not used"


def test_an_item_that_is_asked_for_and_not_called_again_and_again_kills_no_worker(ledger: Ledger) -> None:
    what = batches.order(max_claims=2)
    for _ in range(4):
        assert asked_and_unsent(ledger, what).first_intent_at is None
    entered(ledger, what)


@pytest.mark.parametrize("way", [Ledger, LongWay])
def test_p05_unsent_is_said_once_and_speaks_of_no_other_intent(
    way: type[Ledger], ledger: Ledger, ledger_url: str
) -> None:
    with closing(way(lambda: psycopg.connect(ledger_url), deployment=ledger.deployment)) as book:
        first = entered(book, batches.order())
        assert first.intent("a") == "run"
        assert first.intent("a") == "run"  # its answer was lost
        unsent(first)
        told = len(ledger.events(first.id))
        assert unsent(first).verdict == "ok"  # likewise
        assert len(ledger.events(first.id)) == told
        assert batches.record(ledger).open_calls == 0
        # What is still on its way of a repetition could take back an intent that is used: none is given in this entry.
        assert first.intent("a") == "pending"
        first.settle(State.PENDING)
        second = entered(book, batches.order())
        assert second.intent("a") == "run"
        assert unsent(first).verdict == "lost"
        assert batches.states(ledger) == {"a": "started"}
        assert batches.record(ledger).open_calls == 1
        assert second.outcome("a").verdict == "ok"
        assert unsent(second).verdict == "ok"
        assert batches.states(ledger) == {"a": "done"}


def test_p03_an_effect_that_is_reported_after_all_is_doubt(ledger: Ledger) -> None:
    held = entered(ledger, batches.order())
    assert held.intent("a") == "run"
    unsent(held)
    held.outcome("a")
    assert batches.states(ledger) == {"a": "in_doubt"}
    held.settle(State.PENDING)
    entered(ledger, batches.order(), said="in_doubt")


@pytest.mark.parametrize("resolved", [False, True])
def test_p05_who_was_taken_for_dead_still_says_what_it_did_not_send(resolved: bool, ledger: Ledger, sql: SQL) -> None:
    swept, taken = (entered(ledger, batches.order(key)) for key in ("swept", "taken"))
    for held in (swept, taken):
        assert held.intent("a") == "run"
        books.expire(sql, held.id)
    later = entered(ledger, taken.order, said="in_doubt")
    ledger.sweep("sweeper")
    assert batches.record(ledger, swept.order).state is State.IN_DOUBT
    if resolved:  # a person was there first, and is believed
        for held in (swept, taken):
            by = {"actor": "ann", "reason": "in their books"}
            assert Items(ledger).resolve(held.id, "happened", Selection(names=("a",)), **by).verdict == "ok"
    for held in (swept, taken):
        unsent(held)
        assert batches.states(ledger, held.order) == {"a": "done" if resolved else "pending"}
        assert (batches.items(ledger, held.order)["a"].first_intent_at is None) is not resolved
    assert batches.record(ledger, swept.order).state is State.PENDING
    assert batches.record(ledger, taken.order).open_calls == 0
    later.settle(State.PENDING)
    if not resolved:
        for held in (swept, taken):
            entered(ledger, held.order, cents=700)
