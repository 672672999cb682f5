"""Entering a record: one holder (P1), done is done (P2), the fence (P5), the payload (P11), expiry and poison."""

from __future__ import annotations

import threading
import urllib.parse
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import psycopg
import pytest

from airflow_runguard.core import guard
from airflow_runguard.core.errors import PlanningError
from airflow_runguard.core.leases import Leases
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Claim, Order, Outcome, Result, Settlement, State, Verdict
from airflow_runguard.core.rows import claim_parameters
from airflow_runguard.core.seam import queries
from tests.core import books, engine
from tests.core.books import bring, enter, kinds, line, state_of

OpenLedger = Callable[..., Ledger]
SQL = psycopg.Connection[Any]
EVERY_STATE = [State.RUNNING, State.DONE, State.FAILED, State.PAUSED, State.IN_DOUBT, State.PENDING]


def race(open_ledger: OpenLedger, threads: int, orders: list[Order]) -> list[list[Claim]]:
    """Each order is claimed by all threads at once; round by round."""
    barrier = threading.Barrier(threads)

    def claims(ledger: Ledger) -> list[Claim]:
        answers = []
        for order in orders:
            barrier.wait(timeout=books.DEADLINE)
            answers.append(ledger.claim(order, engine.holder()))
        return answers

    with ThreadPoolExecutor(threads) as pool:
        ledgers = [open_ledger() for _ in range(threads)]
        return list(map(list, zip(*pool.map(claims, ledgers), strict=True)))


def one_run(answers: list[Claim]) -> bool:
    return Counter(claim.verdict for claim in answers) == {Verdict.RUN: 1, Verdict.BUSY: len(answers) - 1}


# -- one holder -------------------------------------------------------------------------------------------------------


def test_p01_of_fifty_racing_claims_one_is_granted_and_the_others_are_refused(open_ledger: OpenLedger) -> None:
    rounds = race(open_ledger, 50, [engine.order(f"race/{n}") for n in range(200)])
    assert [n for n, answers in enumerate(rounds) if not one_run(answers)] == []


@pytest.mark.parametrize("state", [State.PENDING, State.FAILED, State.PAUSED])
def test_p01_of_racing_claims_on_a_record_that_is_there_one_is_granted(
    open_ledger: OpenLedger, ledger: Ledger, sql: SQL, state: State
) -> None:
    orders = [engine.order(f"again/{n}") for n in range(20)]
    for order in orders:
        held = bring(ledger, state, order)
        if state is State.PAUSED:
            books.come_due(sql, held.id)
    assert all(one_run(answers) for answers in race(open_ledger, 20, orders))


@pytest.fixture
def careless(ledger_url: str, sql: SQL) -> None:
    """What a DBA may have set for the database: another isolation, and commits that are not durable."""
    name = psycopg.sql.Identifier(urllib.parse.urlsplit(ledger_url).path[1:])
    for setting in ("default_transaction_isolation = serializable", "synchronous_commit = off"):
        sql.execute(psycopg.sql.SQL("alter database {} set " + setting).format(name))


@pytest.mark.usefixtures("careless")
def test_p01_a_database_set_to_serializable_changes_no_verdict(open_ledger: OpenLedger) -> None:
    rounds = race(open_ledger, 30, [engine.order(f"race/{n}") for n in range(20)])
    assert all(one_run(answers) for answers in rounds)


@pytest.mark.usefixtures("careless")
def test_p04_claims_and_intents_are_durable_although_the_database_says_otherwise(
    open_ledger: OpenLedger, ledger_url: str, sql: SQL
) -> None:
    def where(kind: str) -> int:
        row = sql.execute(f"select pg_current_wal_{kind}_lsn() - '0/0'").fetchone()
        assert row is not None
        return int(row[0])

    def flushed(act: Callable[[], object]) -> bool:
        before = where("insert")
        act()
        return where("flush") > before

    ledger = open_ledger()
    held = enter(ledger, engine.order("warm", calls="explicit"))
    for n in range(25):
        order = engine.order(f"durable/{n}")
        assert flushed(lambda order=order: enter(ledger, order))  # type: ignore[misc]
        assert flushed(lambda n=n: held.intent(f"call {n}"))  # type: ignore[misc]
    with psycopg.connect(ledger_url, autocommit=True) as plain:  # the measure can tell: a plain write is not flushed
        plain.execute("create table plain (n integer)")
        books.wait_until(
            lambda: not flushed(lambda: plain.execute("insert into plain values (1)")), "an unflushed commit"
        )


# -- refusals and replays ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [State.RUNNING, State.DONE, State.PAUSED, State.IN_DOUBT])
def test_p02_refusals_and_replays_write_and_lock_nothing(
    open_ledger: OpenLedger, ledger: Ledger, ledger_url: str, sql: SQL, state: State
) -> None:
    held = bring(ledger, state, engine.order("quiet"))
    ledger.claim(held.order, engine.holder())  # sets hint bits and prunes, which is nobody's doing
    before = line(sql, held.id)
    claim = "explain (analyze, wal, format json) " + queries()["claim"]
    parameters = claim_parameters(held.order, engine.holder())
    with psycopg.connect(ledger_url, cursor_factory=psycopg.ClientCursor) as connection:
        plans = [connection.execute(claim, parameters).fetchone() for _ in range(3)]
        xid = connection.execute("select pg_current_xact_id_if_assigned()").fetchone()
    assert xid == (None,)
    assert min(plan[0][0]["Plan"].get("WAL Bytes", 0) for plan in plans if plan) == 0
    assert line(sql, held.id) == before


@pytest.mark.parametrize("data", [b"0", b"[]", b"false", b"null", b'""', b"\x00\xff\\x00"])
def test_p02_a_clear_of_done_work_replays_the_stored_bytes(ledger: Ledger, data: bytes) -> None:
    held = enter(ledger, engine.order("once"))
    held.settle(State.DONE, data=data)
    again = ledger.claim(held.order, engine.holder())
    assert (again.verdict, again.result) == (Verdict.REPLAY, Result(data))


def test_p01_a_claim_whose_answer_was_lost_is_granted_to_its_own_nonce_only(ledger: Ledger, sql: SQL) -> None:
    held = enter(ledger, engine.order("lost answer"))
    before = line(sql, held.id)
    again = ledger.claim(held.order, held.holder)
    assert (again.verdict, again.fence, again.attempt) == (Verdict.RUN, held.claim.fence, 1)
    assert line(sql, held.id) == before
    assert ledger.claim(held.order, engine.holder()).verdict is Verdict.BUSY


# -- fences, leases, expiry -------------------------------------------------------------------------------------------


def test_p05_reentry_by_the_same_task_instance_raises_the_fence_and_counts_no_claim(ledger: Ledger) -> None:
    held = enter(ledger, engine.order("deferred"), engine.holder(ti_id="ti-1"))
    assert held.write(hand_over=600.0).verdict == "ok"
    assert ledger.claim(held.order, engine.holder(ti_id="ti-2")).verdict is Verdict.BUSY
    again = enter(ledger, held.order, engine.holder(ti_id="ti-1"))
    record = ledger.get(held.order.identity)
    assert record is not None
    assert (again.claim.fence, record.claims, record.open_calls) == (held.claim.fence + 1, 1, 1)
    assert held.settle(State.DONE).verdict == "lost"
    assert again.settle(State.DONE).state is State.DONE
    assert ledger.claim(held.order, engine.holder(ti_id="ti-1")).verdict is Verdict.REPLAY


def test_p05_without_a_handover_the_same_task_instance_is_as_busy_as_any(ledger: Ledger) -> None:
    held = enter(ledger, engine.order("twin"), engine.holder(ti_id="ti-1"))
    assert ledger.claim(held.order, engine.holder(ti_id="ti-1")).verdict is Verdict.BUSY


def test_p03_a_call_left_open_by_the_segment_before_is_not_made_again_by_the_next(ledger: Ledger) -> None:
    held = enter(ledger, engine.order("segments", calls="explicit"), engine.holder(ti_id="ti-1"))
    assert held.intent("charge") == "run"
    held.write(hand_over=600.0)
    again = enter(ledger, held.order, engine.holder(ti_id="ti-1"))
    assert again.intent("charge") == "open"
    assert again.settle(State.DONE).state is State.IN_DOUBT


def test_r33_an_expired_holder_without_an_open_call_is_replaced_at_once(ledger: Ledger, sql: SQL) -> None:
    held = enter(ledger, engine.order("died early", calls="explicit"))
    books.expire(sql, held.id)
    after = enter(ledger, held.order)
    assert after.claim.fence == held.claim.fence + 1
    assert kinds(ledger, held.id) == ["claimed", "taken_over"]
    assert (held.intent("charge"), after.intent("charge")) == ("lost", "run")


@pytest.mark.parametrize("calls", ["body", "explicit"])
def test_r33_an_expired_holder_with_an_open_call_leaves_doubt(ledger: Ledger, sql: SQL, calls: str) -> None:
    held = enter(ledger, engine.order("died late", calls=calls))
    if calls == "explicit":
        held.intent("charge")
    books.expire(sql, held.id)
    claim = ledger.claim(held.order, engine.holder())
    assert (claim.verdict, claim.fence) == (Verdict.IN_DOUBT, held.claim.fence)
    assert "stopped renewing" in claim.reason


def test_r36_a_dead_holder_is_replaced_within_its_lease_without_anybody_helping(ledger: Ledger) -> None:
    held = enter(ledger, engine.order("killed", calls="explicit", lease=0.5))
    refused: list[Claim] = []

    def granted() -> bool:
        refused.append(ledger.claim(held.order, engine.holder()))
        return refused[-1].verdict is Verdict.RUN

    books.wait_until(granted, "a takeover")
    assert held.claim.until is not None
    assert (refused[-1].now - held.claim.now).total_seconds() >= 0.5
    assert all(claim.verdict is Verdict.BUSY and "4711" in claim.holder for claim in refused[:-1])
    assert all(claim.now < held.claim.until for claim in refused[:-1])


@pytest.mark.parametrize("lease", [0, -1, 0.0, float("nan"), float("inf"), True])
def test_r33_a_lease_that_is_no_time_is_refused(lease: float) -> None:
    with pytest.raises(PlanningError, match="lease"):
        engine.order("no lease", lease=lease)


def test_p05_nobody_is_believed_beyond_max_hold(ledger: Ledger, sql: SQL) -> None:
    held = enter(ledger, engine.order("hung", calls="explicit", lease=30.0, max_hold=20.0))
    hold_until = sql.execute("select hold_until from runguard.record where id = %s", [held.id]).fetchone()
    assert (held.claim.until,) == (held.write().until,) == hold_until
    sql.execute("update runguard.record set hold_until = clock_timestamp() where id = %s", [held.id])
    assert held.intent("charge") == "lost"
    assert ledger.claim(held.order, engine.holder()).verdict is Verdict.RUN


def test_claims_without_any_outcome_are_poison_and_an_outcome_resets_the_count(ledger: Ledger, sql: SQL) -> None:
    order = engine.order("poison", calls="explicit", max_claims=2)

    def crash(*calls: str) -> None:
        held = enter(ledger, order)
        for call in calls:
            held.intent(call)
            held.outcome(call)
        books.expire(sql, held.id)

    crash()
    crash("first")
    crash()
    crash()
    claim = ledger.claim(order, engine.holder())
    record = ledger.get(order.identity)
    assert record is not None
    assert (claim.verdict, claim.reason) == (Verdict.REFUSED, "poison")
    assert (record.state, record.failure_class, record.needs_person) == (State.FAILED, "processing", True)


# -- the payload ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", EVERY_STATE)
def test_p11_another_payload_is_refused_in_every_state_and_touches_nothing(
    ledger: Ledger, sql: SQL, state: State
) -> None:
    held = bring(ledger, state, engine.order("order", {"amount": 10, "currency": "eur"}))
    before = line(sql, held.id)
    other = ledger.claim(engine.order("order", {"amount": 11, "currency": "eur"}), engine.holder())
    assert (other.verdict, other.reason, other.differing) == (Verdict.REFUSED, "payload", ("amount",))
    assert line(sql, held.id) == before


@pytest.mark.parametrize("state", EVERY_STATE)
def test_p11_the_guard_makes_no_call_for_another_payload(ledger: Ledger, state: State) -> None:
    bring(ledger, state, engine.order("order", {"amount": 10}))
    made: list[int] = []
    work = engine.work(engine.order("order", {"amount": 11}), lambda _: made.append(1))
    how = guard.run(ledger, Leases(None, ledger.installation), work)
    assert isinstance(how, guard.Ended)
    assert "amount" in how.message
    assert made == []


def test_p11_before_the_first_intent_the_newer_payload_counts(ledger: Ledger) -> None:
    held = enter(ledger, engine.order("early", {"amount": 10}, calls="explicit"))
    held.settle(State.PENDING)
    after = enter(ledger, engine.order("early", {"amount": 11}, calls="explicit"))
    assert kinds(ledger, held.id) == ["claimed", "released", "payload_changed", "claimed"]
    after.intent("charge")
    after.outcome("charge", books.DECLINED)
    after.settle(State.FAILED, books.DECLINED)
    assert ledger.claim(held.order, engine.holder()).verdict is Verdict.REFUSED


def test_p11_an_accepted_payload_is_answered_by_the_done_record(ledger: Ledger) -> None:
    held = bring(ledger, State.DONE, engine.order("deployed", {"amount": 10}))
    newer = engine.order("deployed", {"amount": 10, "currency": "eur"})
    assert ledger.accept_payload(held.id, actor="ann", reason="a field was added") == "ok"
    assert ledger.claim(held.order, engine.holder()).verdict is Verdict.REPLAY
    assert ledger.claim(newer, engine.holder()).result == Result(b'"ok"')
    assert ledger.claim(held.order, engine.holder()).verdict is Verdict.REFUSED
    assert kinds(ledger, held.id)[-2:] == ["payload_accepted", "payload_changed"]


def test_p11_an_accepted_payload_runs_under_a_new_vendor_key_where_nothing_was_applied(ledger: Ledger) -> None:
    held = bring(ledger, State.FAILED, engine.order("declined", {"amount": 10}))
    assert ledger.accept_payload(held.id, actor="ann", reason="the amount was wrong") == "ok"
    after = enter(ledger, engine.order("declined", {"amount": 11}))
    assert (held.claim.attempt, after.claim.attempt) == (1, 2)


@pytest.mark.parametrize("state", [State.RUNNING, State.IN_DOUBT])
def test_p11_no_payload_is_accepted_while_its_effect_is_unknown(ledger: Ledger, sql: SQL, state: State) -> None:
    held = bring(ledger, state, engine.order("unknown", {"amount": 10}))
    before = line(sql, held.id)[0]
    assert ledger.accept_payload(held.id, actor="ann", reason="hopeful") == "unknown_effect"
    assert line(sql, held.id)[0] == before


def test_p11_no_payload_is_accepted_after_one_of_several_calls_was_made(ledger: Ledger) -> None:
    held = enter(ledger, engine.order("half", {"amount": 10}, calls="explicit"))
    held.intent("charge")
    held.outcome("charge")
    held.settle(State.PENDING)
    assert ledger.accept_payload(held.id, actor="ann", reason="hopeful") == "partly_done"


@pytest.mark.parametrize(("before", "after"), [("explicit", "body"), ("body", "explicit")])
def test_p03_work_that_is_cut_into_other_calls_by_a_deploy_does_not_repeat_what_happened(
    ledger: Ledger, before: str, after: str
) -> None:
    held = enter(ledger, engine.order("refactored", calls=before, on_doubt="replay"))
    name = "body" if before == "body" else "charge"
    held.intent(name)
    held.write(outcomes=[said_unknown(name)], settlement=Settlement(State.IN_DOUBT, failure=books.UNKNOWN))
    claim = ledger.claim(engine.order("refactored", calls=after, on_doubt="replay"), engine.holder())
    assert (claim.verdict, claim.reason) == (Verdict.REFUSED, "calls")
    assert ledger.claim(held.order, engine.holder()).verdict is Verdict.RUN


def said_unknown(name: str) -> Outcome:
    return books.said(name, books.UNKNOWN)


# -- the same work, seen twice ----------------------------------------------------------------------------------------


def test_r41_identity_is_the_content_and_not_the_position(ledger: Ledger) -> None:
    made: list[str] = []

    def run(items: list[str]) -> None:
        for item in items:
            work = engine.work(engine.order(f"item/{item}", {"item": item}), lambda _, item=item: made.append(item))
            assert isinstance(guard.run(ledger, Leases(None, ledger.installation), work), guard.Done)

    run(["a", "b", "c"])
    run(["z", "c", "a", "b"])
    assert made == ["a", "b", "c", "z"]


def test_r47_of_many_orders_to_do_it_anew_one_makes_the_second_generation(
    open_ledger: OpenLedger, ledger: Ledger
) -> None:
    held = bring(ledger, State.DONE, engine.order("anew"))
    barrier = threading.Barrier(10)

    def reopen(one: Ledger) -> str:
        barrier.wait(timeout=books.DEADLINE)
        return one.reopen(held.id, seen_generation=1, actor="ann", reason="again", again_although_applied=True)

    with ThreadPoolExecutor(10) as pool:
        words = list(pool.map(reopen, [open_ledger() for _ in range(10)]))
    assert Counter(words) == {"ok": 1, "moved": 9}
    assert state_of(ledger, held.order) is State.PENDING
    assert enter(ledger, held.order).claim.generation == 2
