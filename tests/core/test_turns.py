"""Who has a turn at a gate: listed while it waits, and no longer than it may be sent at that turn."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from airflow_runguard import screen, stops
from airflow_runguard.core.board import Board, Filter
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Order, State, Verdict
from tests.core import engine
from tests.core.books import QUOTA, UNKNOWN, Held, come_due, enter, expire, kinds, state_of, wait_until

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


def late(sql: SQL, seconds: float, *, but: str = "") -> None:
    """Whoever waits comes so late for its turn: nobody woke it, and the gate has long been open."""
    with sql.transaction():
        sql.execute("select runguard.open_for_writing()")
        past = "clock_timestamp() - make_interval(secs => %s)"
        sql.execute(f"update runguard.record set resume_at = {past} where resume_at is not null", [seconds])
        sql.execute(f"update runguard.call set resume_at = {past} where resume_at is not null", [seconds])
        sql.execute(f"update runguard.gate set closed_until = {past}, next_slot = {past}", [seconds, seconds])


def turns(sql: SQL) -> dict[str, float]:
    """Seconds until the turn of each that waits, by its key."""
    query = "select key, extract(epoch from resume_at - clock_timestamp())::float8 from runguard.record"
    return dict(sql.execute(f"{query} where resume_at is not null order by resume_at, id").fetchall())


def test_p06_who_never_came_back_for_its_turn_holds_up_nobody(ledger: Ledger, sql: SQL) -> None:
    slow = {"resume_rate": 0.01}
    in_doubt(ledger, "ghost in doubt", **slow)
    enter(ledger, order("first", **slow)).settle(State.PAUSED, QUOTA)
    for i in range(3):
        assert claim(ledger, order(f"ghost {i}", **slow)) is Verdict.PAUSED
    assert claim(ledger, order("ghost in doubt", **slow)) is Verdict.PAUSED
    late(sql, 3 * 86_400)
    enter(ledger, order("today", **slow)).settle(State.PAUSED, replace(QUOTA, resume_after=10.0))
    assert claim(ledger, order("new", **slow)) is Verdict.PAUSED
    left = {key: seconds for key, seconds in turns(sql).items() if seconds > 0}
    assert list(left) == ["today", "new"]
    assert left["new"] < 2 * 100 + 10 + 5
    ledger.set_rate(GATE, rate=0.01, default=5.0, actor="ann", reason="slowly")
    assert ledger.open_gate(GATE, rate=5.0, actor="ann", reason="raised") == "ok"
    assert sum(seconds > 0 for seconds in turns(sql).values()) == 2, "nor when the slots are given anew by hand"


def test_p06_whom_nobody_woke_in_time_goes_on_paced_all_the_same(ledger: Ledger, sql: SQL) -> None:
    slow = {"resume_rate": 0.001}
    keys = [f"k{i}" for i in range(6)]
    in_doubt(ledger, keys[0], **slow)
    enter(ledger, order("first", **slow)).settle(State.PAUSED, QUOTA)
    for key in keys:
        assert claim(ledger, order(key, **slow)) is Verdict.PAUSED
    late(sql, 30)
    assert claim(ledger, order("first", **slow)) is Verdict.RUN, "half a minute is the way of a wake-up to its worker"
    late(sql, 3600)
    said = [claim(ledger, order(key, **slow)) for key in keys]
    assert said == [Verdict.RUN, *[Verdict.PAUSED] * 5], "the first goes, the others are given turns of their own"
    left = list(turns(sql).values())
    assert min(b - a for a, b in itertools.pairwise(left)) > 900
    assert claim(ledger, order("new", **slow)) is Verdict.PAUSED, "behind them"
    assert list(turns(sql)) == [*keys[1:], "new"]
    record = ledger.get(order("k1").identity)
    assert record is not None
    assert kinds(ledger, record.id)[-1] == "turn_missed"
    assert "after its turn" in record.error


def test_p06_where_everything_is_slow_all_go_on_nevertheless(ledger: Ledger, sql: SQL) -> None:
    """Each comes 70 seconds late, every time, and there are always others in the line."""
    slow = {"resume_rate": 0.001, "max_pauses": 1, "max_pause": 1.0}
    keys = [f"k{i}" for i in range(4)]
    close(ledger, hours=1)
    for key in keys:
        assert claim(ledger, order(key, resume_rate=0.001)) is Verdict.PAUSED
    late(sql, 70)
    for key in keys:
        claim(ledger, order(key, **slow))  # and that it missed its turn takes nothing from its budget of pauses
    assert list(turns(sql)) == keys[1:]
    for key in keys[1:]:
        record = ledger.get(order(key).identity)
        assert record is not None
        with sql.transaction():
            sql.execute("select runguard.open_for_writing()")
            back = "resume_at = clock_timestamp() - interval '70 seconds'"
            sql.execute(f"update runguard.record set {back} where id = %s", [record.id])
        assert claim(ledger, order(key, **slow)) is Verdict.RUN


def test_p06_what_a_person_let_go_on_is_not_late(ledger: Ledger, sql: SQL) -> None:
    close(ledger, hours=1)
    for key in ("k0", "k1"):
        assert claim(ledger, order(key, resume_rate=0.001)) is Verdict.PAUSED
    sql.execute("update runguard.gate set closed_until = clock_timestamp()")
    record = ledger.get(order("k1").identity)
    assert record is not None
    assert ledger.resume_now(record.id, actor="ann", reason="this one first") == "ok"
    with sql.transaction():
        sql.execute("select runguard.open_for_writing()")
        sql.execute("update runguard.record set resume_at = resume_at - interval '1 hour' where id = %s", [record.id])
    assert claim(ledger, order("k1")) is Verdict.RUN


def test_p06_a_gate_that_is_closed_for_longer_lets_nobody_in_doubt_sleep_through_its_key(
    ledger: Ledger, sql: SQL
) -> None:
    held = in_doubt(ledger, "k", key_lifetime=7200.0)
    close(ledger, hours=1)
    assert claim(ledger, held.order) is Verdict.PAUSED
    before = turns(sql)["k"]
    ledger.close_gate(GATE, until=datetime.now(UTC) + timedelta(days=30), rate=5, actor="ann", reason="no money")
    assert turns(sql)["k"] <= before, "longer than the vendor knows its key"
    come_due(sql, held.id)
    assert ledger.due([held.id]) == {held.id}, "it looks, although its gate is closed"
    assert claim(ledger, held.order) is Verdict.IN_DOUBT
    assert kinds(ledger, held.id)[-1] == "turn_given_up"


def test_p05_a_holder_that_waits_behind_its_gate_keeps_its_whole_lease(
    ledger: Ledger, sql: SQL, ledger_url: str
) -> None:
    lease = 0.5
    enter(ledger, order("first")).settle(State.PAUSED, replace(QUOTA, resume_after=0.001))
    wait_until(lambda: ledger.gates(GATE)[0]["next_slot"] <= ledger.gates(GATE)[0]["now"], "nobody stands before it")
    held = enter(ledger, engine.order("k", gate=GATE, calls="explicit", lease=lease))
    assert [held.intent(name) for name in ("a", "b")] == ["run", "run"]
    waits = """select clock_timestamp() > query_start + interval '1 second' from pg_stat_activity
                where datname = current_database() and wait_event_type = 'Lock'"""
    with ThreadPoolExecutor(1) as pool, psycopg.connect(ledger_url) as other:
        other.execute("select from runguard.gate for update")
        writes = pool.submit(held.outcome, "a", QUOTA)
        wait_until(lambda: sql.execute(waits).fetchone() == (True,), "it waits for twice its lease")
        [(released,)] = sql.execute("select clock_timestamp()").fetchall()
        other.commit()
        written = writes.result()
    assert written.until is not None
    assert written.until >= released + timedelta(seconds=lease)
    expire(sql, held.id)
    ledger.sweep("caretaker")
    assert state_of(ledger, held.order) is State.IN_DOUBT


def test_p06_slots_are_given_anew_only_where_it_matters(ledger: Ledger, sql: SQL) -> None:
    def moved(seconds: float) -> bool:
        before = list(sql.execute("select id, resume_at from runguard.record order by id"))
        until = ledger.gates(GATE)[0]["closed_until"] + timedelta(seconds=seconds)
        assert ledger.close_gate(GATE, until=until, rate=5, actor="ann", reason="later") == "ok"
        assert ledger.gates(GATE)[0]["closed_until"] == until
        after = list(sql.execute("select id, resume_at from runguard.record order by id"))
        assert all(slot > until - timedelta(seconds=1) for _, slot in after), "at most a second's slots come together"
        return before != after

    close(ledger, hours=1)
    for i in range(3):
        assert claim(ledger, order(f"k{i}")) is Verdict.PAUSED
    assert [moved(0.9), moved(0.9)] == [False, True]
    first = ledger.get(order("k0").identity)
    assert first is not None
    sql.execute(
        """insert into runguard.record (deployment, namespace, key, state, failure_class, effect, gate, resume_at,
               calls, on_doubt, payload_version, payload_digest, payload_fields, payload_readable, store_result, digest)
           select deployment, namespace, 'n' || n, state, failure_class, effect, gate, resume_at + n * interval '0.2 s',
               calls, on_doubt, payload_version, payload_digest, payload_fields, payload_readable, store_result, ''
             from runguard.record, generate_series(1, 1000) n where id = %s""",
        [first.id],
    )
    assert [moved(3), moved(1.5), moved(1.4), moved(1.4)] == [True, False, False, True], "a long line is left room"
