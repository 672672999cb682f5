"""Who keeps its place (decision 0035) is not dead while something holds it back, is woken like one that is paused, and
its budget counts only the pauses of one run."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from airflow_runguard import commands, stops
from airflow_runguard.core import work
from airflow_runguard.core.board import Board
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Order, Record, State, Verdict
from tests.core import engine
from tests.core.books import QUOTA, Held, bring, enter, kinds

SQL = psycopg.Connection[Any]
WORDS = {"actor": "ann", "reason": "raised"}
FOR_GOOD = datetime(9999, 12, 31, 23, 59, 59, 999999, tzinfo=UTC)
"""A slot behind it is a time that Python does not know."""
KEPT = {"hand_over": 600.0, "told": QUOTA, "error": "429"}


def order(key: str, **rules: Any) -> Order:
    return engine.order(key, **{"gate": "stripe", **rules})


def kept(ledger: Ledger, key: str = "k", **rules: Any) -> Held:
    """A body that had deferred, and was told to wait for an hour."""
    held = enter(ledger, order(key, **rules))
    assert held.write(**KEPT).state is State.RUNNING
    return held


def back(ledger: Ledger, held: Held) -> Held:
    """The same task instance, which comes back."""
    return enter(ledger, held.order, engine.holder(ti_id=held.holder.ti_id))


def found(ledger: Ledger, held: Held) -> Record:
    record = ledger.get(held.order.identity)
    assert record is not None
    assert record.broken == ""
    return record


def hours_pass(sql: SQL, hours: float = 3) -> None:
    """So much time goes by, over all that is booked."""
    span = timedelta(hours=hours)
    with sql.transaction():
        sql.execute("select runguard.open_for_writing()")
        sql.execute(
            "update runguard.record set resume_at = resume_at - %(h)s, lease_until = lease_until - %(h)s,"
            " hold_until = hold_until - %(h)s, claimed_at = claimed_at - %(h)s, paused_since = paused_since - %(h)s",
            {"h": span},
        )
        sql.execute("update runguard.call set resume_at = resume_at - %(h)s", {"h": span})
        sql.execute(
            "update runguard.gate set closed_until = closed_until - %(h)s, updated_at = updated_at - %(h)s,"
            " next_slot = next_slot - %(h)s",
            {"h": span},
        )
        sql.execute("update runguard.freeze set at = at - %(h)s, thawed_at = thawed_at - %(h)s", {"h": span})


@pytest.mark.parametrize("by", ["freeze", "gate", "gate for good"])
def test_p06_what_holds_it_back_is_not_its_death(ledger: Ledger, sql: SQL, by: str) -> None:
    held = kept(ledger)
    if by == "freeze":
        ledger.freeze("namespace", "billing", actor="ann", reason="an incident")
    hours_pass(sql)
    if by != "freeze":  # after its slot, for which it had not come yet
        until = FOR_GOOD if by == "gate for good" else datetime.now(UTC) + timedelta(hours=4)
        ledger.close_gate("stripe", until=until, rate=5, actor="ann", reason="over the budget")
    assert ledger.sweep("sweep") == []
    assert ledger.due([held.id]) == set()
    other = ledger.claim(held.order, engine.holder())
    assert other.verdict is Verdict.BUSY
    assert other.until is not None
    assert other.until > other.now
    mine = ledger.claim(held.order, engine.holder(ti_id=held.holder.ti_id))
    assert mine.verdict is (Verdict.FROZEN if by == "freeze" else Verdict.PAUSED)
    if by == "freeze":
        ledger.thaw("namespace", "billing", actor="ann", reason="over")
    else:
        ledger.open_gate("stripe", rate=1000, actor="ann", reason="raised")
    assert ledger.sweep("sweep") == [], "it has ten minutes to come back"
    assert ledger.due([held.id]) == {held.id}
    assert back(ledger, held).claim.reentered
    assert "in_doubt" not in kinds(ledger, held.id)


@pytest.mark.parametrize("by", ["freeze", "gate"])
def test_p06_who_does_not_come_back_when_it_may_is_dead_after_all(ledger: Ledger, sql: SQL, by: str) -> None:
    """Not only once: a gate that was opened long ago, or a freeze, explains nothing."""
    held = kept(ledger)
    if by == "freeze":
        ledger.freeze("all", actor="ann", reason="an incident")
        ledger.thaw("all", actor="ann", reason="over")
    else:
        ledger.open_gate("stripe", rate=1000, actor="ann", reason="raised")
    hours_pass(sql, 0.1)
    assert ledger.sweep("sweep") == []
    hours_pass(sql)
    assert [state for _, state in ledger.sweep("sweep")] == [State.IN_DOUBT]
    assert found(ledger, held).state is State.IN_DOUBT


def test_p06_a_gate_holds_it_back_for_max_hold_at_most_and_a_freeze_as_long_as_it_lasts(
    ledger: Ledger, sql: SQL
) -> None:
    held, frozen = (enter(ledger, order(key, max_hold=7200.0)) for key in ("k", "f"))
    for one in (held, frozen):
        assert one.write(**KEPT).state is State.RUNNING
    ledger.freeze("key_prefix", "f", actor="ann", reason="an incident")
    hours_pass(sql, 2.5)
    ledger.close_gate("stripe", until=FOR_GOOD, rate=5, actor="ann", reason="over the budget")
    assert ledger.sweep("sweep") == []
    hours_pass(sql, 1)
    assert [state for _, state in ledger.sweep("sweep")] == [State.IN_DOUBT]
    assert found(ledger, held).state is State.IN_DOUBT
    hours_pass(sql, 300)
    assert ledger.sweep("sweep") == [], "nobody can call it, so nobody need ask whether its task is there"
    ledger.thaw("key_prefix", "f", actor="ann", reason="over")
    assert ledger.sweep("sweep") == [], "it has ten minutes to come back"
    hours_pass(sql, 0.2)
    assert [state for _, state in ledger.sweep("sweep")] == [State.IN_DOUBT], "it did not"
    assert found(ledger, frozen).state is State.IN_DOUBT


def test_p06_what_a_freeze_held_back_comes_back_one_by_one(ledger: Ledger, sql: SQL) -> None:
    """Each keeps its place and is woken by its slot, which is long past: the vendor would get all of them at once."""
    held = [enter(ledger, order(key)) for key in "abc"]
    for one in held:
        assert one.write(**KEPT).state is State.RUNNING
    ledger.set_rate("stripe", rate=0.01, default=5, actor="ann", reason="slowly")
    ledger.freeze("all", actor="ann", reason="an incident")
    hours_pass(sql)
    ledger.thaw("all", actor="ann", reason="over")
    assert ledger.due([one.id for one in held]) == {one.id for one in held}
    came = [ledger.claim(one.order, engine.holder(ti_id=one.holder.ti_id)) for one in held]
    assert [claim.verdict for claim in came] == [Verdict.RUN, Verdict.PAUSED, Verdict.PAUSED]
    waits = [(claim.until - claim.now).total_seconds() for claim in came[1:] if claim.until is not None]
    assert [round(seconds, -1) for seconds in waits] == [200, 300], "one slot is the first one's"
    assert [found(ledger, one).state for one in held] == [State.RUNNING] * 3
    assert ledger.sweep("sweep") == []
    assert ledger.due([one.id for one in held[1:]]) == set()
    hours_pass(sql, 0.1)
    assert all(back(ledger, one).claim.reentered for one in held[1:]), "each at its slot, or little later"


def test_p06_a_gate_under_another_name_since_a_deploy_holds_it_too(ledger: Ledger, sql: SQL) -> None:
    held = kept(ledger)
    hours_pass(sql)
    ledger.close_gate("mail", until=datetime.now(UTC) + timedelta(hours=4), rate=5, actor="ann", reason="over")
    moved = engine.order("k", gate="mail")
    assert ledger.claim(moved, engine.holder(ti_id=held.holder.ti_id)).verdict is Verdict.PAUSED
    assert found(ledger, held).gate == "mail"
    assert ledger.sweep("sweep") == []
    assert ledger.due([held.id]) == set()


@pytest.mark.parametrize("gate", ["stripe", None])
def test_p06_resume_wakes_it_like_one_that_is_paused(ledger: Ledger, gate: str | None) -> None:
    held = kept(ledger, gate=gate)
    assert ledger.due([held.id]) == set()
    shown = commands.explain(ledger, found(ledger, held))
    assert "airflow runguard resume billing/k --reason=…" in shown["commands"].values()
    said = stops.resume(ledger, found(ledger, held), **WORDS)
    assert said["record"]["state"] == "running"
    assert kinds(ledger, held.id)[-1] == "resumed"
    if gate:
        assert ledger.due([held.id]) == set(), "its gate is closed, as for those that are paused"
        ledger.open_gate(gate, rate=1000, actor="ann", reason="raised")
    assert ledger.due([held.id]) == {held.id}
    assert back(ledger, held).claim.reentered


def test_p06_good_days_are_not_counted_as_waiting(ledger: Ledger, sql: SQL) -> None:
    """It was told to wait, went on, and waited for its own trigger for days; then it is told to wait again."""
    day = 86_400.0
    held = kept(ledger, gate=None, max_pause=day, max_pauses=2)
    hours_pass(sql, 1.1)
    held = back(ledger, held)
    assert held.write(hand_over=3 * day).verdict == "ok"  # it defers: the quota let it through
    hours_pass(sql, 48)
    for _ in range(2):
        held = back(ledger, held)
        assert held.write(**KEPT).state is State.RUNNING
        hours_pass(sql, 1.1)
    spent = back(ledger, held).write(**KEPT)
    assert spent.state is State.IN_DOUBT, "max_pauses of one run"
    assert "paused 2 time(s)" in found(ledger, held).error


def test_p06_one_run_of_pauses_is_counted_from_its_first(ledger: Ledger, sql: SQL) -> None:
    held = kept(ledger, gate=None, max_pause=3 * 3600.0)
    hours_pass(sql, 1.1)
    again = back(ledger, held)
    again.write(hand_over=600.0, error="its trigger is started anew")  # which is no progress
    hours_pass(sql, 1.1)
    assert back(ledger, again).write(**KEPT).state is State.IN_DOUBT
    assert "max_pause" in found(ledger, held).error


def test_p06_all_who_count_those_that_wait_count_it(ledger_url: str, ledger: Ledger, sql: SQL) -> None:
    with Board(lambda: psycopg.connect(ledger_url), deployment=engine.DEPLOYMENT) as board:
        board.check()

        def counts() -> tuple[int, int, int]:
            (gate,), shown = board.board_gates(), stops.gate(ledger, "stripe")
            return gate["waiting"], shown["waiting"], len(shown["records"])

        running = enter(ledger, order("other"))
        held = kept(ledger)
        running.settle(State.PAUSED, QUOTA)
        assert counts() == (2, 2, 2)
        assert {(row["state"], row["n"]) for row in board.tallied()} == {("paused", 1)}, "not what runs"
        sql.execute("select runguard.fold()")
        assert counts() == (2, 2, 2)
        ledger.open_gate("stripe", rate=1000, actor="ann", reason="raised")
        hours_pass(sql, 0.1)
        held = back(ledger, held)
        assert counts() == (1, 1, 1)
        held.settle(State.DONE)
        sql.execute("select runguard.fold()")
        assert counts() == (1, 1, 1)
        assert {(row["state"], row["n"]) for row in board.tallied()} == {("paused", 1), ("done", 1)}


@pytest.mark.parametrize("how", ["paused", "kept"])
def test_p06_a_gate_that_is_closed_for_good_names_who_opens_it(ledger: Ledger, how: str) -> None:
    held = kept(ledger) if how == "kept" else bring(ledger, State.PAUSED, order("k"))
    ledger.close_gate("stripe", until=FOR_GOOD, rate=5, actor="ann", reason="over the budget")
    claim = ledger.claim(held.order, engine.holder(ti_id=held.holder.ti_id))
    waits = work.refusal(claim, engine.work(held.order, lambda guard: None))
    assert isinstance(waits, work.Waiting)
    assert "until somebody opens gate stripe" in waits.reason
    assert "`airflow runguard quota open stripe --reason …`" in waits.reason
    told = commands.explain(ledger, found(ledger, held))
    assert "somebody opens gate stripe" in f"{told['why']} {told['who']}"
    assert "airflow runguard quota open stripe --reason=…" in told["commands"].values()
