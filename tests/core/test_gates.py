"""Quota waits (P6) and people stop everything (P12): gates, their pacing, the budget of pauses, freezes.

The shared case R45 (thousands of tasks that run into one wall) at the level of the ledger.
"""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg

from airflow_runguard.core import guard
from airflow_runguard.core.errors import NotApplied
from airflow_runguard.core.items import Items
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import FailureClass, Grant, Order, Record, Settlement, State, Verdict
from tests.core import engine
from tests.core.accidents import attempt
from tests.core.books import (
    NEVER_SENT,
    QUOTA,
    UNKNOWN,
    Held,
    come_due,
    enter,
    expire,
    kinds,
    state_of,
    wait_until,
)
from tests.core.conftest import OpenLedger

Connection = psycopg.Connection[Any]


def tomorrow() -> datetime:
    return datetime.now(UTC) + timedelta(days=1)


def order(key: str, **rules: Any) -> Order:
    return engine.order(key, gate="stripe", **rules)


def hit_the_wall(ledger: Ledger, key: str = "first", **rules: Any) -> None:
    """A call that is answered "too many": the gate closes for an hour."""
    enter(ledger, order(key, **rules)).settle(State.PAUSED, QUOTA)


def close(ledger: Ledger) -> None:
    assert ledger.close_gate("stripe", until=tomorrow(), rate=5, actor="ann", reason="over the budget") == "ok"


def open_gate(ledger: Ledger, rate: float = 5) -> None:
    assert ledger.open_gate("stripe", rate=rate, actor="ann", reason="raised") == "ok"


def slots(sql: Connection) -> list[float]:
    """Seconds from now until each of those that wait may go on, in order."""
    waits = "extract(epoch from resume_at - clock_timestamp())"
    query = f"select {waits} from runguard.record where state = 'paused' order by 1"
    return [float(row[0]) for row in sql.execute(query)]


def gate(ledger: Ledger) -> Any:
    [row] = ledger.gates("stripe")
    return row


def record_of(ledger: Ledger, held: Held) -> Record:
    record = ledger.get(held.order.identity)
    assert record is not None
    return record


def test_p06_the_first_that_hits_the_wall_closes_the_gate_for_all(ledger: Ledger) -> None:
    hit_the_wall(ledger)
    claim = ledger.claim(order("second"), engine.holder())
    assert claim.verdict is Verdict.PAUSED
    assert claim.until is not None
    assert claim.until - claim.now > timedelta(seconds=3590)
    assert state_of(ledger, order("second")) is State.PAUSED
    assert ledger.calls(claim.record_id) == []
    assert enter(ledger, engine.order("of another vendor")).claim.verdict is Verdict.RUN
    assert gate(ledger)["waiting"] == 2


def test_p06_those_that_wait_are_given_slots_one_by_one(ledger: Ledger, sql: Connection) -> None:
    hit_the_wall(ledger, resume_rate=2.0)
    for i in range(10):
        assert ledger.claim(order(f"k{i}", resume_rate=2.0), engine.holder()).verdict is Verdict.PAUSED
    waits = slots(sql)
    gaps = [b - a for a, b in itertools.pairwise(waits)]
    assert waits[0] > 3590
    assert all(abs(gap - 0.5) < 0.05 for gap in gaps), gaps


def test_p06_who_comes_back_at_its_slot_goes_on_and_who_comes_new_stands_behind(
    ledger: Ledger, sql: Connection
) -> None:
    hit_the_wall(ledger)
    for i in range(3):
        ledger.claim(order(f"k{i}"), engine.holder())
    sql.execute("update runguard.gate set closed_until = clock_timestamp()")  # its time is over; slots lie ahead
    assert ledger.claim(order("new"), engine.holder()).verdict is Verdict.PAUSED
    come_due(sql, 2)
    assert ledger.claim(order("k0"), engine.holder()).verdict is Verdict.RUN


def test_p06_a_later_bad_answer_moves_the_slots(ledger: Ledger, sql: Connection) -> None:
    inside = enter(ledger, order("inside"))
    hit_the_wall(ledger)
    for i in range(3):
        ledger.claim(order(f"k{i}"), engine.holder())
    later = QUOTA.__class__(FailureClass.QUOTA, QUOTA.effect, pausable=True, resume_after=7200.0, evidence="429")
    inside.settle(State.PAUSED, later)
    waits = slots(sql)
    assert len(waits) == 5
    assert min(waits) > 7190
    assert len({round(wait, 1) for wait in waits}) == 5


def test_p06_an_answer_from_before_a_person_opened_the_gate_does_not_close_it_again(
    ledger: Ledger, sql: Connection
) -> None:
    old = enter(ledger, order("old"))
    hit_the_wall(ledger)
    open_gate(ledger)
    old.settle(State.PAUSED, QUOTA)
    [opened] = sql.execute("select closed_until < clock_timestamp() from runguard.gate")
    assert opened == (True,)
    record = ledger.get(old.order.identity)
    assert record is not None
    assert record.resume_at is not None
    assert record.resume_at - datetime.now(UTC) > timedelta(seconds=3500)  # what the vendor told this one still holds


def test_p06_neither_does_an_old_answer_to_an_item_after_the_next_item_was_sent(
    ledger: Ledger, sql: Connection
) -> None:
    def is_open() -> bool:
        [(closed,)] = sql.execute("select closed_until > clock_timestamp() from runguard.gate")
        return not closed

    close(ledger)
    open_gate(ledger, rate=1000)
    wait_until(lambda: gate(ledger)["next_slot"] <= gate(ledger)["now"], "nobody stands before it")
    items, each = Items(ledger), enter(ledger, order("explicit", calls="explicit"))
    batch = enter(ledger, order("batch", calls="batch"))
    grant = Grant(batch.order.identity, batch.id, batch.claim.generation, batch.claim.fence)
    assert items.begin(grant, batch.holder)
    assert items.plan(grant, batch.holder, batch.order, ["old", "new"], ["x", "y"]).said == ["work", "work"]
    for held in (each, batch):
        assert held.intent("old") == "run"
    open_gate(ledger, rate=1000)
    for held in (each, batch):
        assert held.intent("new") == "run"
        held.outcome("old", QUOTA)
        assert is_open()
    batch.outcome("new", QUOTA)
    assert not is_open()


def test_p06_nobody_goes_on_before_the_time_that_the_vendor_named_to_it_whoever_else_is_told_what(
    ledger: Ledger, sql: Connection
) -> None:
    quick = replace(QUOTA, resume_after=2.0)
    close(ledger)
    open_gate(ledger, rate=1000)
    wait_until(lambda: gate(ledger)["next_slot"] <= gate(ledger)["now"], "nobody stands before it")
    told = [enter(ledger, order(key)) for key in ("an hour", "briefly")]
    open_gate(ledger, rate=1000)  # what those are told now closes it no more
    told[0].settle(State.PAUSED, QUOTA)
    told[1].settle(State.PAUSED, quick)
    wait_until(lambda: gate(ledger)["next_slot"] <= gate(ledger)["now"], "nobody stands before it")
    enter(ledger, order("last")).settle(State.PAUSED, quick)  # closes the gate, and gives all new slots
    assert ledger.set_rate("stripe", rate=50.0, default=5.0, actor="ann", reason="more") == "ok"
    left = slots(sql)
    assert len(left) == 3
    assert left[-1] > 3500
    assert max(left[:-1]) < 60
    assert gate(ledger)["next_slot"] - gate(ledger)["now"] < timedelta(seconds=60)  # nobody stands behind that hour

    with sql.transaction():  # and if it is looked at too early after all, it waits, and nobody asks whether it happened
        sql.execute("select runguard.open_for_writing()")
        sql.execute("update runguard.record set resume_at = clock_timestamp() where id = %s", [told[0].id])
        sql.execute("update runguard.gate set closed_until = '-infinity'")
    claim = ledger.claim(told[0].order, engine.holder())
    assert (claim.verdict, state_of(ledger, told[0].order)) == (Verdict.PAUSED, State.PAUSED)
    assert claim.until is not None
    assert claim.until - claim.now > timedelta(seconds=3500)
    assert ledger.resume_now(told[0].id, actor="ann", reason="the vendor says so") == "ok"
    assert ledger.claim(told[0].order, engine.holder()).verdict is Verdict.RUN


def test_p06_cleared_before_the_vendors_time_it_waits_for_that_and_is_not_in_doubt(ledger: Ledger) -> None:
    what = engine.order("k", max_pause=60.0)
    assert enter(ledger, what).settle(State.PAUSED, QUOTA).state is State.FAILED  # an hour is more than it may
    claim = ledger.claim(what, engine.holder())
    assert (claim.verdict, claim.reason) == (Verdict.REFUSED, "pauses")
    claim = ledger.claim(engine.order("k"), engine.holder())  # somebody raised max_pause
    assert (claim.verdict, state_of(ledger, what)) == (Verdict.PAUSED, State.PAUSED)
    record = ledger.get(what.identity)
    assert record is not None
    assert record.error == "no"  # what the vendor said


def test_p06_opened_by_hand_all_go_on_paced(ledger: Ledger, sql: Connection) -> None:
    close(ledger)
    for i in range(20):
        assert ledger.claim(order(f"k{i}"), engine.holder()).verdict is Verdict.PAUSED
    open_gate(ledger, rate=10)
    waits = slots(sql)
    assert waits[0] <= 0.1
    assert 1.5 < waits[-1] <= 2.0


def test_p06_while_it_is_closed_no_explicit_call_starts_and_the_record_pauses(ledger_url: str, ledger: Ledger) -> None:
    made: list[str] = []

    def body(context: guard.GuardContext) -> None:
        context.call("one", lambda: made.append("one"))
        close(ledger)
        context.call("two", lambda: made.append("two"))

    what = order("k", calls="explicit")
    how = attempt(ledger_url, what, body)
    assert isinstance(how, guard.Waiting)
    assert "gate stripe is closed" in how.reason
    assert "over the budget" in how.reason
    assert made == ["one"]
    assert state_of(ledger, what) is State.PAUSED
    open_gate(ledger)
    ledger.resume_now(1, actor="ann", reason="now")
    attempt(ledger_url, what, lambda context: [context.call(n, lambda n=n: made.append(n)) for n in ("one", "two")])
    assert made == ["one", "two"]
    assert state_of(ledger, what) is State.DONE


def test_p06_too_many_pauses_without_progress_go_to_a_person(ledger: Ledger, sql: Connection) -> None:
    what = order("k", max_pauses=2)
    for _ in range(2):
        enter(ledger, what).settle(State.PAUSED, QUOTA)
        open_gate(ledger)
        come_due(sql, 1)
    written = enter(ledger, what).settle(State.PAUSED, QUOTA)
    assert written.state is State.FAILED
    record = ledger.get(what.identity)
    assert record is not None
    assert (record.failure_class, record.needs_person) == (FailureClass.QUOTA, True)
    assert record.effect is not None
    assert record.effect.value == "not_applied"
    assert "paused 2 time(s)" in record.error
    open_gate(ledger)
    come_due(sql, 1)
    held = enter(ledger, what)  # a clear: nothing had happened, so it runs
    assert held.settle(State.DONE).state is State.DONE


def test_p06_a_pause_longer_than_max_pause_goes_to_a_person_at_once(ledger: Ledger) -> None:
    close(ledger)
    claim = ledger.claim(order("k", max_pause=3600.0), engine.holder())
    assert (claim.verdict, claim.reason) == (Verdict.REFUSED, "pauses")
    assert state_of(ledger, order("k")) is State.FAILED
    again = ledger.claim(order("k"), engine.holder())  # a clear, after somebody raised max_pause
    assert (again.verdict, state_of(ledger, order("k"))) == (Verdict.PAUSED, State.PAUSED)


def test_p06_a_call_that_is_done_is_progress_and_fills_the_budget_again(ledger: Ledger, sql: Connection) -> None:
    what = order("k", calls="explicit", max_pauses=1)
    for i in range(3):
        held = enter(ledger, what)
        assert held.intent(f"c{i}") == "run"
        held.outcome(f"c{i}")
        assert held.write(settlement=Settlement(State.PAUSED, failure=QUOTA)).state is State.PAUSED
        come_due(sql, 1)


def test_p03_a_closed_gate_leaves_doubt_where_it_is(ledger: Ledger, sql: Connection) -> None:
    held = enter(ledger, order("k", on_doubt="replay", lease=0.001))
    assert ledger.claim(order("k", on_doubt="ask"), engine.holder()).verdict is Verdict.IN_DOUBT
    close(ledger)
    claim = ledger.claim(order("k", on_doubt="replay", key_lifetime=200_000.0), engine.holder())
    assert claim.verdict is Verdict.PAUSED
    assert state_of(ledger, held.order) is State.IN_DOUBT


def test_p06_what_is_in_doubt_keeps_the_slot_that_it_was_given_and_goes_on_at_it(
    ledger: Ledger, sql: Connection
) -> None:
    rules = {"on_doubt": "replay"}
    waiting = [enter(ledger, order(f"k{i}", **rules)) for i in range(4)]
    for held in waiting:
        held.settle(State.IN_DOUBT, UNKNOWN)
    hit_the_wall(ledger)
    first = [ledger.claim(held.order, engine.holder()) for held in waiting]
    assert [claim.verdict for claim in first] == [Verdict.PAUSED] * 4
    tail = gate(ledger)["next_slot"]
    for held, before in zip(waiting, first, strict=True):  # each looks again, early: nothing moves
        again = ledger.claim(held.order, engine.holder())
        assert (again.verdict, again.until) == (Verdict.PAUSED, before.until)
        assert state_of(ledger, held.order) is State.IN_DOUBT
    assert (gate(ledger)["next_slot"], gate(ledger)["waiting"]) == (tail, 5)
    assert ledger.due([held.id for held in waiting]) == set()
    assert kinds(ledger, waiting[0].id)[-1] == "waits"

    sql.execute("update runguard.gate set closed_until = clock_timestamp()")  # its time is over; slots lie ahead
    come_due(sql, waiting[3].id)
    assert ledger.due([held.id for held in waiting]) == {waiting[3].id}
    assert ledger.claim(waiting[3].order, engine.holder()).verdict is Verdict.RUN

    open_gate(ledger, rate=1000)
    wait_until(lambda: len(ledger.due([held.id for held in waiting[:3]])) == 3, "opened by hand, all have their turn")
    enter(ledger, waiting[0].order).settle(State.DONE)
    assert ledger.resolve(waiting[1].id, "did_not_happen", force=True, actor="ann", reason="looked it up") == "ok"
    assert [record_of(ledger, held).resume_at for held in waiting[:2]] == [None, None]


def test_p10_whose_record_a_restore_took_away_is_woken_and_asks_again(ledger: Ledger) -> None:
    held = enter(ledger, order("k"))
    gone = held.id + 1000
    assert ledger.due([held.id, gone]) == {gone}
    assert ledger.freeze("all", actor="ann", reason="restored") == "ok"
    assert ledger.due([held.id, gone]) == {gone}


def test_p06_a_dead_holder_that_called_nothing_leaves_a_record_that_waits_in_its_place(
    ledger: Ledger, sql: Connection
) -> None:
    held = enter(ledger, order("k", calls="explicit"))
    close(ledger)
    expire(sql, held.id)
    claim = ledger.claim(held.order, engine.holder())
    assert (claim.verdict, state_of(ledger, held.order)) == (Verdict.PAUSED, State.PAUSED)
    assert held.intent("pay") == "lost"
    assert ledger.claim(held.order, engine.holder()).until == claim.until
    short = enter(ledger, engine.order("short", gate="other", calls="explicit", max_pause=3600.0))
    ledger.close_gate("other", until=tomorrow(), rate=5, actor="ann", reason="over the budget")
    expire(sql, short.id)
    assert ledger.claim(short.order, engine.holder()).reason == "pauses"
    assert state_of(ledger, short.order) is State.FAILED


def test_p01_many_that_come_at_once_get_slots_of_their_own(open_ledger: OpenLedger, sql: Connection) -> None:
    hit_the_wall(open_ledger())
    barrier = threading.Barrier(8)

    def come(i: int) -> None:
        ledger = open_ledger()
        barrier.wait()
        for j in range(25):
            assert ledger.claim(order(f"k{i}/{j}"), engine.holder()).verdict is Verdict.PAUSED

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(come, range(8)))
    waits = slots(sql)
    assert len(waits) == 201
    assert min(b - a for a, b in itertools.pairwise(waits)) > 0.15


def test_p13_a_persons_closing_that_is_shorter_than_the_vendors_leaves_its_trace(
    ledger: Ledger, sql: Connection
) -> None:
    hit_the_wall(ledger)
    before = gate(ledger)
    soon = datetime.now(UTC) + timedelta(minutes=5)
    assert ledger.close_gate("stripe", until=soon, rate=5, actor="ann", reason="over the budget") == "ok"
    after = gate(ledger)
    assert (after["closed_until"], after["why"]) == (before["closed_until"], before["why"])
    [(actor, detail)] = sql.execute("select actor, detail from runguard.event where reason = 'over the budget'")
    assert actor == "ann"
    assert soon.strftime("%Y-%m-%dT%H:%M") in detail


def test_p06_a_call_that_is_still_paused_is_waited_for_from_now_and_not_from_the_claim(
    ledger_url: str, ledger: Ledger, sql: Connection
) -> None:
    asked: list[datetime] = []

    def body(context: guard.GuardContext) -> None:
        wait_until(lambda: context.now() - began[0] > timedelta(seconds=0.2), "it has worked for a while")
        asked.append(context.now())
        context.call("pay", lambda: None)

    what = engine.order("k", calls="explicit")
    held = enter(ledger, what)
    assert held.intent("pay") == "run"
    held.outcome("pay", QUOTA)
    held.write(settlement=Settlement(State.PENDING))
    began = [datetime.now(UTC)]
    how = attempt(ledger_url, what, body)
    assert isinstance(how, guard.Waiting)
    assert how.seconds is not None
    [(until,)] = sql.execute("select resume_at from runguard.call")
    assert how.seconds <= (until - asked[0]).total_seconds() + 0.001


def test_p12_frozen_means_that_nothing_starts_and_that_replays_go_on(ledger: Ledger) -> None:
    enter(ledger, order("done")).settle(State.DONE)
    assert ledger.freeze("all", actor="ann", reason="something is wrong") == "ok"
    assert ledger.freeze("all", actor="bob", reason="likewise") == "already"
    claim = ledger.claim(order("new"), engine.holder())
    assert claim.verdict is Verdict.FROZEN
    assert "ann" in claim.reason
    assert "something is wrong" in claim.reason
    assert state_of(ledger, order("new")) is State.PENDING
    assert ledger.calls(claim.record_id) == []
    assert ledger.claim(order("done"), engine.holder()).verdict is Verdict.REPLAY
    assert ledger.thaw("all", actor="bob", reason="found it") == "ok"
    assert ledger.thaw("all", actor="bob", reason="again") == "missing"
    assert ledger.claim(order("new"), engine.holder()).verdict is Verdict.RUN
    [old] = ledger.freezes(thawed=True)
    assert (old["actor"], old["thawed_by"], old["thaw_reason"]) == ("ann", "bob", "found it")


def test_p12_a_freeze_has_a_scope(ledger: Ledger) -> None:
    for scope, value in (("namespace", "billing"), ("key_prefix", "invoice/"), ("dag_id", "bill")):
        assert ledger.freeze(scope, value, actor="ann", reason="why") == "ok"
        key = f"invoice/{scope}"
        assert ledger.claim(engine.order(key), engine.holder()).verdict is Verdict.FROZEN
        ledger.thaw(scope, value, actor="ann", reason="why")
        assert ledger.freeze(scope, "other", actor="ann", reason="why") == "ok"
        assert ledger.claim(engine.order(key), engine.holder()).verdict is Verdict.RUN
        ledger.thaw(scope, "other", actor="ann", reason="why")


def test_p12_frozen_in_the_middle_what_is_under_way_settles_and_nothing_new_starts(
    ledger_url: str, ledger: Ledger
) -> None:
    made: list[str] = []

    def first() -> str:
        ledger.freeze("all", actor="ann", reason="stop")
        made.append("one")
        return "one"

    def body(context: guard.GuardContext) -> None:
        context.call("one", first)
        context.call("two", lambda: made.append("two"))

    what = order("k", calls="explicit")
    how = attempt(ledger_url, what, body)
    assert isinstance(how, guard.Waiting)
    assert "frozen by ann" in how.reason
    assert not how.limited, "a person ends it, not busy_wait_limit"
    assert made == ["one"]
    assert [call.state for call in ledger.calls(1)] == ["done"]
    assert state_of(ledger, what) is State.PENDING


def test_p13_done_by_hand_is_booked_and_never_done_again(ledger: Ledger) -> None:
    what = order("k")
    booked = ledger.bypass(what.identity, result=b'"by hand"', reference="ch_1", actor="ann", reason="vendor portal")
    assert booked == "ok"
    claim = ledger.claim(what, engine.holder())
    assert claim.verdict is Verdict.REPLAY
    assert claim.result is not None
    assert claim.result.data == b'"by hand"'
    assert kinds(ledger, 1) == ["done_by_hand"]


def test_p13_by_hand_is_refused_where_a_task_works_or_nobody_knows(ledger: Ledger) -> None:
    held = enter(ledger, order("k", calls="explicit"))
    who = {"result": None, "reference": None, "actor": "ann", "reason": "w"}
    assert ledger.bypass(held.order.identity, **who) == "running"
    held.intent("pay")
    held.outcome("pay", NEVER_SENT)
    held.write(settlement=Settlement(State.PENDING))
    assert ledger.bypass(held.order.identity, **who) == "ok"
    assert ledger.bypass(held.order.identity, **who) == "done"


def test_a_not_applied_that_the_author_says_does_not_close_a_gate(ledger_url: str, ledger: Ledger) -> None:
    def body(context: guard.GuardContext) -> None:
        def refuse() -> None:
            raise NotApplied("closed on Sundays")

        context.call("one", refuse)

    attempt(ledger_url, order("k", calls="explicit"), body)
    assert ledger.gates() == []


def test_p06_who_keeps_its_place_stays_its_holder_however_late_its_slot_becomes(ledger: Ledger) -> None:
    """It had deferred, and was told to wait: its effect is unknown, so it is neither free nor in doubt meanwhile."""
    what, who = order("kept"), engine.holder()
    held = enter(ledger, what, who)
    first = held.write(hand_over=600.0, told=QUOTA, error="429")
    again = held.write(hand_over=600.0, told=QUOTA, error="429")  # the first one's answer was lost
    assert (first.resume_at, first.state) == (again.resume_at, State.RUNNING)
    assert gate(ledger)["closed_until"] is not None
    close(ledger)
    record = record_of(ledger, held)
    assert record.resume_at is not None
    assert record.lease_until is not None
    assert record.resume_at > tomorrow() - timedelta(hours=1)
    assert record.lease_until >= record.resume_at + timedelta(minutes=10)
    early, other = ledger.claim(what, engine.holder(ti_id=who.ti_id)), ledger.claim(what, engine.holder())
    assert (early.verdict, early.until, other.verdict) == (Verdict.PAUSED, record.resume_at, Verdict.BUSY)
    open_gate(ledger, rate=1000)
    opened = record_of(ledger, held)
    assert opened.lease_until is not None
    assert opened.lease_until < tomorrow() - timedelta(hours=12), "else a task that was cleared would wait for it a day"
    wait_until(lambda: ledger.due([record.id]) == {record.id}, "its slot has come")
    close(ledger)
    stopped = ledger.claim(what, engine.holder(ti_id=who.ti_id))
    assert stopped.verdict is Verdict.PAUSED
    assert stopped.until is not None
    assert stopped.until >= gate(ledger)["closed_until"]
    open_gate(ledger, rate=1000)
    ledger.freeze("all", actor="ann", reason="an incident")
    assert ledger.claim(what, engine.holder(ti_id=who.ti_id)).verdict is Verdict.FROZEN
    ledger.thaw("all", actor="ann", reason="over")
    wait_until(lambda: ledger.due([record.id]) == {record.id}, "its slot has come")
    back = ledger.claim(what, engine.holder(ti_id=who.ti_id))
    assert (back.verdict, back.reentered) == (Verdict.RUN, True)
    assert record_of(ledger, held).resume_at is None
