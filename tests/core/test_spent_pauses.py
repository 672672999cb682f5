"""A spent budget of pauses (P6): a person lets it go on, whatever the vendor had said, by what the refusal says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import psycopg
import pytest

from airflow_runguard import commands, stops
from airflow_runguard.core import guard, work
from airflow_runguard.core.batch import Pause
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Record, Settlement, State, Verdict
from airflow_runguard.refusals import Refused
from tests.core import batches, engine
from tests.core.books import DECLINED, NEVER_SENT, QUOTA, bring, enter, kinds

SQL = psycopg.Connection[Any]
DAYS = 86_400.0
LONG = replace(QUOTA, resume_after=20 * DAYS)
"""Longer than max_pause."""
WORDS = {"actor": "ann", "reason": "raised the plan"}


def spent(ledger: Ledger, key: str, **rules: Any) -> Any:
    """A record that was told to wait for longer than it may, and its order."""
    what = engine.order(key, **rules)
    held = enter(ledger, what)
    if what.calls == "explicit":
        assert held.intent("pay") == "run"
        held.outcome("pay", LONG)
        assert held.write(settlement=Settlement(State.PAUSED, failure=LONG)).state is State.FAILED
    else:
        assert held.settle(State.PAUSED, LONG).state is State.FAILED
    return what


def found(ledger: Ledger, what: Any) -> Record:
    record = ledger.get(what.identity)
    assert record is not None
    return record


def text(ledger: Ledger, what: Any) -> str:
    """What a clear of it says in the log."""
    claim = ledger.claim(what, engine.holder())
    assert (claim.verdict, claim.reason) == (Verdict.REFUSED, "pauses")
    how = work.refusal(claim, engine.work(what, lambda guard: None))
    assert isinstance(how, work.Ended)
    return how.message


@pytest.mark.parametrize("calls", ["body", "explicit"])
def test_p06_a_spent_budget_goes_on_after_the_gate_was_opened_and_the_task_cleared(ledger: Ledger, calls: str) -> None:
    what = spent(ledger, "k", gate="stripe", calls=calls)
    error = found(ledger, what).error
    assert "0 time(s)" not in error
    assert "longer than it may" in error
    assert "max_pause" in error
    if calls == "body":
        assert "`airflow runguard quota open stripe --reason …`" in text(ledger, what)
    shown = commands.explain(ledger, found(ledger, what))
    assert "airflow runguard quota open stripe --reason=…" in shown["commands"].values()
    stops.open_gate(ledger, "stripe", rate=1000.0, **WORDS)
    held = enter(ledger, what)
    if calls == "explicit":
        assert held.intent("pay") == "run"


@pytest.mark.parametrize("calls", ["body", "explicit"])
def test_p06_a_spent_budget_without_a_gate_goes_on_after_resume_and_a_clear(ledger: Ledger, calls: str) -> None:
    what = spent(ledger, "k", calls=calls)
    if calls == "body":
        assert "`airflow runguard resume 'billing/k' --reason …`" in text(ledger, what)
    shown = commands.explain(ledger, found(ledger, what))
    assert "airflow runguard resume billing/k --reason=…" in shown["commands"].values()
    said = stops.resume(ledger, found(ledger, what), **WORDS)
    assert said["record"]["state"] == "failed"
    assert kinds(ledger, found(ledger, what).id)[-1] == "resumed"
    held = enter(ledger, what)
    if calls == "explicit":
        assert held.intent("pay") == "run"


def test_p06_the_items_of_a_batch_whose_budget_is_spent_go_on_too(ledger: Ledger) -> None:
    def call(context: Any, item: Any) -> Any:
        return Pause(20 * DAYS) if item["id"] == "2" and not raised else "paid"

    for gate in ("stripe", None):
        raised = False
        what = batches.order(f"of {gate}", gate=gate)
        for _ in range(2):
            how = batches.run(ledger, batches.invoices(1, 2, 3), call, what=what)
            assert isinstance(how, guard.Ended)
            assert batches.states(ledger, what)["2"] == "paused"
        assert ("quota open stripe" if gate else f"resume 'billing/of {gate}'") in how.message
        raised = True
        if gate:
            stops.open_gate(ledger, gate, rate=1000.0, **WORDS)
        else:
            stops.resume(ledger, found(ledger, what), **WORDS)
        assert isinstance(batches.run(ledger, batches.invoices(1, 2, 3), call, what=what), guard.Done)


def test_p13_resume_is_refused_where_nothing_waits(ledger: Ledger) -> None:
    for state, failure in ((State.FAILED, DECLINED), (State.PENDING, NEVER_SENT)):
        held = bring(ledger, state, engine.order(f"{state}"))
        assert failure is not None
        with pytest.raises(Refused, match="nothing to resume"):
            stops.resume(ledger, found(ledger, held.order), **WORDS)


def test_p06_a_gate_that_is_opened_leaves_what_others_were_told(ledger: Ledger, sql: SQL) -> None:
    spent(ledger, "other", gate="other")
    spent(ledger, "stripe", gate="stripe")
    stops.open_gate(ledger, "stripe", rate=1000.0, **WORDS)
    query = "select count(*) from runguard.call where state = 'paused' and resume_at > clock_timestamp()"
    assert sql.execute(query).fetchone() == (1,)


def test_p06_a_budget_that_is_spent_by_number_says_how_often(ledger: Ledger) -> None:
    what = engine.order("k", max_pauses=1)
    held = enter(ledger, what)
    assert held.settle(State.PAUSED, QUOTA).state is State.PAUSED
    assert ledger.resume_now(held.id, **WORDS) == "ok"
    assert enter(ledger, what).settle(State.PAUSED, QUOTA).state is State.FAILED
    assert "paused 1 time(s)" in found(ledger, what).error
    assert "max_pauses" in found(ledger, what).error
