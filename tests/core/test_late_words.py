"""What is said late, of an earlier key, or by a person who cannot know it: none of it leads to a second effect."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any

import psycopg
import pytest

from airflow_runguard import human
from airflow_runguard.core.errors import NotApplied
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.reconcile import settle
from airflow_runguard.core.record import Order, Record, Result, State, Verdict
from tests.core import books, engine
from tests.core.books import Held, bring, enter, state_of

SQL = psycopg.Connection[Any]
WORDS = {"actor": "ann", "reason": "asked the vendor"}
fresh = partial(next, (f"late/{n}" for n in itertools.count()))


@pytest.fixture(scope="module")
def ledger_url(postgres: str, ledger_template: str) -> Iterator[str]:
    with books.fresh_ledger(postgres, ledger_template) as url:
        yield url


def order(**rules: Any) -> Order:
    """Of a run that Airflow wants after all the time that the ledger loses here."""
    return engine.order(fresh(), **{"run_at": datetime.now(UTC) + timedelta(days=1), **rules})


def record_of(ledger: Ledger, held: Held) -> Record:
    record = ledger.get(held.order.identity)
    assert record is not None
    assert record.broken == ""
    return record


def stale(ledger: Ledger, sql: SQL, on_doubt: str) -> Held:
    """It sent the charge and went silent, and a person who was sure denied it; so the record is free."""
    held = enter(ledger, order(calls="explicit", on_doubt=on_doubt))
    assert held.intent("charge") == "run"
    books.expire(sql, held.id)
    ledger.sweep("sweep")
    assert ledger.resolve(held.id, "did_not_happen", force=True, **WORDS) == "ok"
    return held


def again(ledger: Ledger, held: Held, ends: Any) -> Held:
    """The next holder sends the charge, which ends like this."""
    following = enter(ledger, held.order)
    assert following.intent("charge") == "run"
    following.outcome("charge", ends)
    following.settle(State.IN_DOUBT if ends is books.UNKNOWN else State.FAILED, ends)
    return following


def settled_by_a_look_up(ledger: Ledger, held: Held) -> list[str]:
    """The vendor has nothing under the key of the present attempt."""
    found = settle(
        ledger, record_of(ledger, held), lambda doubt: NotApplied("not there"), lambda value: Result(b"1"), skip=set()
    )
    return [finding.word for finding in found]


@pytest.mark.parametrize("last", [books.NEVER_SENT, books.UNKNOWN], ids=["not sent", "unknown"])
@pytest.mark.parametrize("on_doubt", ["replay", "reconcile"])
def test_p03_an_earlier_attempt_that_was_applied_is_neither_repeated_nor_denied_under_a_later_key(
    ledger: Ledger, sql: SQL, on_doubt: str, last: Any
) -> None:
    """A sent the charge under key 1 and slept; B was declined under it, C used key 2. Then A says: applied."""
    first = stale(ledger, sql, on_doubt)
    again(ledger, first, books.DECLINED)
    third = again(ledger, first, last)
    first.outcome("charge")
    books.long_ago(sql, first.id)
    sql.execute("update runguard.call set no_later_than = clock_timestamp() where record_id = %s", [first.id])
    assert state_of(ledger, first.order) is State.IN_DOUBT
    assert settled_by_a_look_up(ledger, first) == ["still_unknown"]
    assert ledger.claim(first.order, engine.holder()).verdict is Verdict.IN_DOUBT
    assert ledger.resolve(first.id, "did_not_happen", call="charge", **WORDS) == "ok", "a person may still deny it"
    fourth = enter(ledger, first.order).write(intents=[("charge", "{}")]).intents["charge"]
    assert (fourth.verdict, fourth.attempt, third.id) == ("run", 2, first.id)


@pytest.mark.parametrize("on_doubt", ["replay", "reconcile"])
def test_p03_an_earlier_generation_that_was_applied_is_neither_repeated_nor_denied_under_a_later_key(
    ledger: Ledger, sql: SQL, on_doubt: str
) -> None:
    first = stale(ledger, sql, on_doubt)
    again(ledger, first, books.DECLINED)
    assert ledger.reopen(first.id, seen_generation=1, **WORDS) == "ok"
    again(ledger, first, books.NEVER_SENT)
    first.outcome("charge")
    books.long_ago(sql, first.id)
    assert state_of(ledger, first.order) is State.IN_DOUBT
    assert settled_by_a_look_up(ledger, first) == ["still_unknown"]
    assert ledger.claim(first.order, engine.holder()).verdict is Verdict.IN_DOUBT


def test_p03_what_is_called_while_an_earlier_holder_says_applied_is_in_doubt_by_its_own_name(
    ledger: Ledger, sql: SQL
) -> None:
    """B is refused by a vendor that ignores keys, A was charged; an answer about another call frees it not."""
    first = stale(ledger, sql, "ask")
    second = enter(ledger, first.order)
    for call in ("charge", "email"):
        assert second.intent(call) == "run"
    first.outcome("charge")
    second.outcome("charge", books.DECLINED)
    second.outcome("email", books.UNKNOWN)
    second.settle(State.IN_DOUBT, books.UNKNOWN)
    assert ledger.resolve(first.id, "happened", call="email", **WORDS) == "ok"
    assert state_of(ledger, first.order) is State.IN_DOUBT
    assert {call.name: call.state for call in ledger.calls(first.id)} == {"charge": "in_doubt", "email": "done"}


def test_p03_a_person_who_ordered_a_second_effect_on_purpose_did_not_know_of_an_earlier_one(
    ledger: Ledger, sql: SQL
) -> None:
    first = stale(ledger, sql, "ask")
    again(ledger, first, books.DECLINED)
    assert ledger.reopen(first.id, seen_generation=1, **WORDS) == "ok", "as far as is known, nothing happened"
    second = enter(ledger, first.order)
    assert second.intent("charge") == "run"
    second.outcome("charge")
    second.settle(State.DONE)
    assert ledger.reopen(first.id, seen_generation=2, again_although_applied=True, **WORDS) == "ok"
    first.outcome("charge")
    assert state_of(ledger, first.order) is State.IN_DOUBT


def test_p03_an_answer_that_is_older_than_the_news_that_it_was_applied_settles_nothing(
    ledger: Ledger, sql: SQL
) -> None:
    first = stale(ledger, sql, "ask")
    second = again(ledger, first, books.UNKNOWN)
    books.long_ago(sql, first.id)
    record = record_of(ledger, first)
    asked = human.Asked(record.fence, ledger.check()["now"])
    first.outcome("charge")  # while the form lay there
    answer = human.Answer("did_not_happen", "person:ann", "not in the list")
    assert human.apply(ledger, record_of(ledger, first), answer, asked) == human.ANEW
    denied = partial(ledger.resolve, first.id, "did_not_happen", seen_fence=second.claim.fence, **WORDS)
    assert denied(known_by=asked.at) == "moved"
    assert state_of(ledger, first.order) is State.IN_DOUBT
    assert denied(known_by=ledger.check()["now"]) == "ok"


def test_p14_what_was_only_observed_after_lost_time_may_have_been_done_in_it(ledger: Ledger, sql: SQL) -> None:
    """An observer runs whatever the ledger says; that its own attempt came to nothing tells of no earlier one."""
    long_ago = datetime.now(UTC) - timedelta(days=3)
    ledger.acknowledge_restore(lost_since=long_ago, actor="ann", reason="restored")
    old, new = order(run_at=long_ago), order()
    for observed in (old, new):
        who = engine.holder()
        assert ledger.observe(observed, who, "started").verdict == "booked"
        assert ledger.observe(observed, who, "failed", failure=books.NEVER_SENT).verdict == "booked"
    assert ledger.claim(old, engine.holder()).verdict is Verdict.IN_DOUBT
    enter(ledger, new).settle(State.FAILED, books.NEVER_SENT)
    assert ledger.claim(new, engine.holder()).verdict is Verdict.RUN


def break_line(sql: SQL, held: Held) -> None:
    sql.execute("update runguard.record set digest = 'damaged' where id = %s", [held.id])


def repaired(ledger: Ledger, held: Held, state: str | None) -> str:
    record = ledger.get(held.order.identity)
    assert record is not None
    return ledger.repair(held.id, seen=record.seen, state=state, **WORDS)


@pytest.mark.parametrize("state", [State.RUNNING, State.IN_DOUBT])
def test_p05_a_line_is_not_repaired_to_what_runs_while_its_call_may_still_arrive(
    ledger: Ledger, sql: SQL, state: State
) -> None:
    held = bring(ledger, state, order())
    break_line(sql, held)
    assert repaired(ledger, held, "pending") == "too_early"
    sql.execute("update runguard.call set no_later_than = clock_timestamp() where record_id = %s", [held.id])
    assert repaired(ledger, held, "pending") == "too_early", "nor while its line says so"
    sql.execute("update runguard.record set no_later_than = clock_timestamp() where id = %s", [held.id])
    if state is State.RUNNING:
        assert repaired(ledger, held, "pending") == "too_early", "its holder lives, and may send the next one"
        books.expire(sql, held.id)
    assert repaired(ledger, held, "pending") == "ok"
    assert ledger.claim(held.order, engine.holder()).verdict is Verdict.RUN


def test_p14_a_repair_that_says_only_that_nobody_knows_does_not_end_the_doubt_of_lost_time(
    ledger: Ledger, sql: SQL
) -> None:
    held = bring(ledger, State.IN_DOUBT, order(on_doubt="replay"))
    ledger.acknowledge_restore(lost_since=datetime.now(UTC), actor="ann", reason="restored")
    break_line(sql, held)
    assert repaired(ledger, held, "in_doubt") == "ok"
    assert ledger.claim(held.order, engine.holder()).verdict is Verdict.IN_DOUBT


@pytest.mark.parametrize("state", ["pending", None], ids=["pending", "as it stands"])
def test_p08_what_a_holder_said_of_a_broken_line_counts_when_it_is_repaired(
    ledger: Ledger, sql: SQL, state: str | None
) -> None:
    """Its outcome could not be booked into a line that nobody can read; whoever repairs that may not have seen it."""
    held = enter(ledger, order(calls="explicit", on_doubt="replay"))
    for call in ("charge", "email"):
        assert held.intent(call) == "run"
    break_line(sql, held)
    held.outcome("charge")
    books.expire(sql, held.id)
    books.long_ago(sql, held.id)
    break_line(sql, held)
    sql.execute("update runguard.call set no_later_than = clock_timestamp() where record_id = %s", [held.id])
    assert repaired(ledger, held, state) == "ok"
    ledger.sweep("sweep")
    record = record_of(ledger, held)
    assert record.state is State.IN_DOUBT
    assert {call.name: call.state for call in ledger.calls(held.id)}["charge"] == "in_doubt"
    assert ledger.resolve(held.id, "did_not_happen", call="email", force=True, **WORDS) in {"ok", "no_such_call"}
    assert state_of(ledger, held.order) is State.IN_DOUBT, "of the charge a person knows nothing yet"
    break_line(sql, held)
    assert repaired(ledger, held, "pending") == "ok"
    assert state_of(ledger, held.order) is State.PENDING, "it was heard before"


@pytest.mark.parametrize("changed", ["renamed", "payload accepted"])
def test_p03_what_was_applied_before_its_name_or_payload_changed_is_not_denied_under_the_new_one(
    ledger: Ledger, sql: SQL, changed: str
) -> None:
    """A look-up would ask by the new key or the new amount, and what was charged went under the old one."""
    first = stale(ledger, sql, "reconcile")
    if changed == "renamed":
        new = fresh()
        assert ledger.rename(first.id, namespace="billing", key=new, **WORDS) == "ok"
        first = replace(first, order=replace(first.order, identity=engine.identity(new)))
    else:
        assert ledger.accept_payload(first.id, **WORDS) == "ok"
    first.outcome("charge")
    books.long_ago(sql, first.id)
    assert state_of(ledger, first.order) is State.IN_DOUBT
    assert settled_by_a_look_up(ledger, first) == ["still_unknown"]
    assert ledger.claim(first.order, engine.holder()).verdict is Verdict.IN_DOUBT


def test_p03_a_job_of_another_key_than_the_one_that_was_applied_is_a_persons(ledger: Ledger, sql: SQL) -> None:
    """Nobody attaches to it, so its task must not wait for it either."""
    first = stale(ledger, sql, "ask")
    assert ledger.claim(first.order, engine.holder()).verdict is Verdict.RUN
    second = record_of(ledger, first)
    assert (second.state, [call.attachable for call in ledger.calls(first.id)]) == (State.RUNNING, [False])
    for earlier_key in (True, False):
        with sql.transaction():
            sql.execute("select runguard.open_for_writing()")
            job = "update runguard.call set submitted = true, external_id = 'j', earlier_key = %s where record_id = %s"
            sql.execute(job, [earlier_key, first.id])
        assert [call.attachable for call in ledger.calls(first.id)] == [not earlier_key]
