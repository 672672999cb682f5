"""People are told (issue of doubt): once, by whoever takes it first, through any of Airflow's notifiers (P13)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import Any, ClassVar

import psycopg
import pytest
from airflow.sdk.bases.notifier import BaseNotifier

from airflow_runguard import RunGuardNotifier, notices
from airflow_runguard.core.errors import PlanningError
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Outcome, Result, State
from tests.core import batches, engine
from tests.core.books import DECLINED, UNKNOWN, enter, expire, kinds


class Pager(BaseNotifier):
    """Keeps what it is told; its text is a template, as a provider's notifier has it."""

    template_fields = ("text",)
    told: ClassVar[list[str]] = []
    broken: ClassVar[bool] = False

    def __init__(self, text: str = "{{ runguard.kind }}|{{ runguard.record }}|{{ runguard.command }}") -> None:
        super().__init__()
        self.text = text

    def notify(self, context: Any) -> None:
        if Pager.broken:
            raise ConnectionError("the pager's service is away")
        Pager.told.append(self.text)


ON_CALL = RunGuardNotifier(Pager())
MONEY_ONLY = [RunGuardNotifier(Pager(), kinds={"in_doubt"})]
NOT_A_NOTIFIER = Pager()


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    with closing(engine.open_ledger(ledger_url)) as ledger:
        send(ledger)  # that this copy of a ledger was acknowledged
        yield ledger


@pytest.fixture
def sql(ledger_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(ledger_url, autocommit=True) as connection:
        yield connection


def send(ledger: Ledger, name: str = "ON_CALL") -> list[str]:
    """What is told now."""
    before = len(Pager.told)
    notices.send(ledger, notices.load(f"{__name__}.{name}"), "tests")
    return Pager.told[before:]


def test_p13_a_doubt_is_told_once_with_the_command_to_type(ledger: Ledger) -> None:
    enter(ledger, engine.order("k")).settle(State.IN_DOUBT, UNKNOWN)
    assert send(ledger) == ["in_doubt|billing/k|airflow runguard explain billing/k"]
    assert send(ledger) == []


def test_p13_a_holder_that_was_killed_is_told_of_too_since_the_sweep_books_it(
    ledger: Ledger, sql: psycopg.Connection[Any]
) -> None:
    held = enter(ledger, engine.order("k"))
    expire(sql, held.id)
    assert send(ledger) == []
    ledger.sweep("tests")
    assert [told.split("|")[0] for told in send(ledger)] == ["in_doubt"]


def test_p13_what_needs_a_person_is_told_and_what_the_next_try_mends_is_not(ledger: Ledger) -> None:
    enter(ledger, engine.order("retried")).settle(State.FAILED, DECLINED)
    assert send(ledger) == []
    wrong = DECLINED.__class__(DECLINED.failure_class, DECLINED.effect, needs_person=True, evidence="422")
    enter(ledger, engine.order("wrong")).settle(State.FAILED, wrong)
    assert [told.split("|")[:2] for told in send(ledger)] == [["needs_person", "billing/wrong"]]


def test_p05_a_late_outcome_is_told(ledger: Ledger, sql: psycopg.Connection[Any]) -> None:
    held = enter(ledger, engine.order("k", calls="explicit"))
    held.intent("pay")
    ledger.release(held.id, actor="ann", reason="hung")
    ledger.resolve(held.id, "did_not_happen", actor="ann", reason="looked", force=True)
    send(ledger)
    held.write(outcomes=[Outcome("pay", result=Result(b"1"))])
    assert "late_outcome" in [told.split("|")[0] for told in send(ledger)]


def test_p13_a_doubt_is_one_until_it_is_settled_and_the_next_one_is_told_anew(
    ledger: Ledger, sql: psycopg.Connection[Any]
) -> None:
    what = engine.order("k", on_doubt="replay")
    for _ in range(2):  # the second is sent again in the same doubt; whoever finds it finds no other one
        held = enter(ledger, what)
        expire(sql, held.id)
        ledger.sweep("tests")
    sql.execute("set timezone = 'Asia/Kathmandu'")
    held = enter(ledger, what)
    expire(sql, held.id)
    sql.execute("select runguard.sweep('another session', 10)")
    assert kinds(ledger, held.id).count("in_doubt") == 3
    assert [told.split("|")[0] for told in send(ledger)] == ["in_doubt"]
    ledger.resolve(held.id, "did_not_happen", actor="ann", reason="looked", force=True)
    enter(ledger, what).settle(State.IN_DOUBT, UNKNOWN)
    assert [told.split("|")[0] for told in send(ledger)] == ["in_doubt"]


def test_p13_an_item_that_comes_into_doubt_beside_others_is_told(ledger: Ledger) -> None:
    what = batches.order()
    for late in ("A", "B"):
        fails = batches.Counting(**{late: TimeoutError("no answer")})
        batches.run(ledger, batches.invoices("A", *(["B"] if late == "B" else [])), fails)
        assert [told.split("|")[0] for told in send(ledger)] == ["in_doubt"], late
    batches.run(ledger, batches.invoices("A", "B"), batches.Counting())
    assert batches.states(ledger, what) == {"A": "in_doubt", "B": "in_doubt"}
    assert send(ledger) == []


def test_p05_a_late_applied_is_told_also_after_a_harmless_late_report(ledger: Ledger) -> None:
    held = enter(ledger, engine.order("k", calls="explicit"))
    names = [f"call {number}" for number in range(5)]
    for name in names:
        held.intent(name)
    ledger.release(held.id, actor="ann", reason="hung")
    ledger.resolve(held.id, "did_not_happen", actor="ann", reason="looked", force=True)
    send(ledger)
    for name in names[:3]:
        held.outcome(name, DECLINED)
    assert [told.split("|")[0] for told in send(ledger)] == ["late_outcome"]
    for name in (*names[3:], *names[3:]):
        held.outcome(name)
    assert [told.split("|")[0] for told in send(ledger)] == ["late_outcome", "in_doubt", "late_outcome"]


def test_p13_a_failure_that_needs_a_person_is_told_again_by_the_next_try(ledger: Ledger) -> None:
    wrong = DECLINED.__class__(DECLINED.failure_class, DECLINED.effect, needs_person=True, evidence="422")
    for _ in range(2):
        enter(ledger, engine.order("wrong")).settle(State.FAILED, wrong)
        assert [told.split("|")[0] for told in send(ledger)] == ["needs_person"]


def test_p14_lost_time_is_told(ledger: Ledger) -> None:
    ledger.lose("tests say so")
    assert send(ledger) == ["ledger_lost_time||airflow runguard db check"]


def test_p14_time_that_is_lost_unnoticed_is_told_once_until_it_is_acknowledged(
    ledger: Ledger, sql: psycopg.Connection[Any]
) -> None:
    """A failover books no event; each task that waits says so, also of a record that is not there."""
    for _ in range(2):
        sql.execute("update runguard.meta set timeline = 'failed over'")
        for record_id in (7, 0, 8):
            ledger.tell(record_id, 1, "ledger_lost_time", "it runs on another timeline")
        assert send(ledger) == ["ledger_lost_time||airflow runguard db check"]
        ledger.acknowledge_restore(lost_since=None, actor="ann", reason="nothing was lost")
        assert [told.split("|")[0] for told in send(ledger)] == ["restore_acknowledged"]
    ledger.lose("an event is gone")
    ledger.tell(7, 1, "ledger_lost_time", "an event is gone")
    assert len(send(ledger)) == 1, "the event has told of it"


def test_p08_a_broken_line_is_told_of_once_until_it_is_repaired_and_then_anew(
    ledger: Ledger, sql: psycopg.Connection[Any]
) -> None:
    held = enter(ledger, engine.order("k"))
    held.settle(State.DONE)
    for _ in range(2):
        sql.execute("update runguard.record set error = 'x', payload_digest = payload_digest || 'x'")
        for _ in range(2):
            ledger.tell(held.id, 1, "broken", "its digest does not match")
        assert [told.split("|")[0] for told in send(ledger)] == ["broken"]
        record = ledger.get(held.order.identity)
        assert record is not None
        assert ledger.repair(record.id, seen=record.seen, state=None, actor="ann", reason="looked") == "ok"


def test_each_occasion_is_told_of(ledger: Ledger) -> None:
    for occasion in ("bill.charge", "bill.refund", "bill.charge"):
        ledger.tell(0, 1, "vendor_differs", f"{occasion}: 1 not in the ledger", occasion=occasion)
    assert len(send(ledger)) == 2


def test_a_generation_is_told_of_anew(ledger: Ledger) -> None:
    held = enter(ledger, engine.order("k"))
    held.settle(State.IN_DOUBT, UNKNOWN)
    send(ledger)
    ledger.resolve(held.id, "failed", actor="ann", reason="r")
    ledger.reopen(held.id, seen_generation=1, actor="ann", reason="r", again_although_applied=True)
    enter(ledger, engine.order("k")).settle(State.IN_DOUBT, UNKNOWN)
    assert len(send(ledger)) == 1


def test_one_that_cannot_be_sent_is_kept_with_its_error_and_tried_again(
    ledger: Ledger, sql: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    enter(ledger, engine.order("k")).settle(State.IN_DOUBT, UNKNOWN)
    monkeypatch.setattr(Pager, "broken", True)
    assert send(ledger) == []
    [(error,)] = sql.execute("select error from runguard.notice where record_id > 0").fetchall()
    assert error == "ConnectionError: the pager's service is away"
    monkeypatch.setattr(Pager, "broken", False)
    assert send(ledger) == [], "whoever took it has five minutes"
    sql.execute("update runguard.notice set taken_at = taken_at - interval '6 minutes'")
    assert len(send(ledger)) == 1


def test_a_notifier_hears_only_its_kinds(ledger: Ledger) -> None:
    ledger.lose("tests say so")
    assert send(ledger, "MONEY_ONLY") == []


def test_what_is_no_notifier_is_refused_by_name() -> None:
    with pytest.raises(PlanningError, match="cannot be imported"):
        notices.load("no.such.thing")
    with pytest.raises(PlanningError, match="is no RunGuardNotifier"):
        notices.load(f"{__name__}.NOT_A_NOTIFIER")
    with pytest.raises(PlanningError, match="There are: in_doubt"):
        RunGuardNotifier(Pager(), kinds={"doubt"})


def test_two_senders_at_once_tell_each_notice_once(ledger: Ledger, ledger_url: str) -> None:
    for i in range(30):
        enter(ledger, engine.order(f"k{i}")).settle(State.IN_DOUBT, UNKNOWN)
    with closing(engine.open_ledger(ledger_url)) as other:
        taken = [*ledger.take_notices("a", 20), *other.take_notices("b", 20)]
    assert len({row["id"] for row in taken}) == len(taken) == 30
