"""Who has a turn at a gate: listed while it waits, and no longer than it may be sent at that turn."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from airflow_runguard import screen, stops
from airflow_runguard.core.board import Board, Filter
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Order, State, Verdict
from tests.core import engine
from tests.core.books import QUOTA, UNKNOWN, Held, come_due, enter, kinds

SQL = psycopg.Connection[Any]
GATE = "stripe"


@pytest.fixture
def board(ledger_url: str) -> Iterator[Board]:
    with Board(lambda: psycopg.connect(ledger_url), deployment=engine.DEPLOYMENT) as board:
        board.check()
        yield board


def order(key: str, **rules: Any) -> Order:
    return engine.order(key, gate=GATE, **{"on_doubt": "replay", **rules})


def in_doubt(ledger: Ledger, key: str, **rules: Any) -> Held:
    held = enter(ledger, order(key, **rules))
    held.settle(State.IN_DOUBT, UNKNOWN)
    return held


def close(ledger: Ledger, hours: float) -> None:
    until = datetime.now(UTC) + timedelta(hours=hours)
    ledger.close_gate(GATE, until=until, rate=5, actor="ann", reason="over the budget")


def waiting(ledger: Ledger) -> list[str]:
    return [record.identity.key for record in ledger.waiting(GATE, limit=100)]


def claim(ledger: Ledger, what: Order) -> Verdict:
    return ledger.claim(what, engine.holder()).verdict


def test_p06_what_may_not_be_sent_again_waits_at_its_gate_no_more(ledger: Ledger, sql: SQL) -> None:
    held = {key: in_doubt(ledger, key) for key in ("forgotten", "asked", "often", "frozen", "kept")}
    close(ledger, hours=1)
    for one in held.values():
        assert claim(ledger, one.order) is Verdict.PAUSED
    assert waiting(ledger) == list(held)
    for one in held.values():
        come_due(sql, one.id)
    sql.execute("update runguard.gate set closed_until = clock_timestamp(), next_slot = clock_timestamp()")
    ledger.freeze("key_prefix", "frozen", actor="ann", reason="looks wrong")
    sql.execute(
        "update runguard.call set first_intent_at = first_intent_at - interval '1 day' where record_id = any (%s)",
        [[held["forgotten"].id, held["frozen"].id]],
    )
    sql.execute("update runguard.record set claims = 5 where id = %s", [held["often"].id])
    for key, rules in {"forgotten": {}, "asked": {"on_doubt": "ask"}, "often": {}, "frozen": {}}.items():
        assert claim(ledger, order(key, **rules)) is Verdict.IN_DOUBT, key
        assert kinds(ledger, held[key].id)[-1] == "turn_given_up"
        before = kinds(ledger, held[key].id)
        assert claim(ledger, order(key, **rules)) is Verdict.IN_DOUBT, key
        assert kinds(ledger, held[key].id) == before, "the second look writes nothing"
    assert waiting(ledger) == ["kept"]
    assert ledger.gates(GATE)[0]["waiting"] == 1
    assert claim(ledger, held["kept"].order) is Verdict.RUN


def test_p06_nobody_waits_for_a_turn_at_which_the_vendor_has_forgotten_the_key(ledger: Ledger) -> None:
    held = in_doubt(ledger, "k")
    close(ledger, hours=25)
    assert claim(ledger, held.order) is Verdict.IN_DOUBT, "a person is asked now, not in a day"
    assert claim(ledger, order("k", key_lifetime=200_000.0)) is Verdict.PAUSED
    assert claim(ledger, held.order) is Verdict.IN_DOUBT
    assert waiting(ledger) == []


def test_p06_who_waits_at_a_gate_is_listed_in_turn_whether_it_is_paused_or_in_doubt(
    ledger: Ledger, board: Board
) -> None:
    doubt = in_doubt(ledger, "doubt")
    in_doubt(ledger, "doubt of a person", on_doubt="ask")
    enter(ledger, order("paused")).settle(State.PAUSED, QUOTA)
    enter(ledger, engine.order("elsewhere", gate="other")).settle(State.PAUSED, QUOTA)
    assert claim(ledger, doubt.order) is Verdict.PAUSED
    shown = stops.gate(ledger, GATE)
    assert [(one["record"], one["state"]) for one in shown["records"]] == [
        ("billing/paused", "paused"),
        ("billing/doubt", "in_doubt"),
    ]
    assert shown["waiting"] == 2
    assert "billing/doubt   in_doubt" in screen.gate(shown)
    found = board.page(Filter(gate=GATE, waiting=True))
    assert [row["key"] for row in found.rows] == ["paused", "doubt"]
    assert board.page(Filter(gate=GATE, waiting=True, states=("paused",))).rows[0]["key"] == "paused"
