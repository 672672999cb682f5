"""The numbers of the pages are the lines' own, however they came to be and whenever they were added up."""

from __future__ import annotations

import random
import re
from collections import Counter
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import psycopg
import pytest

from airflow_runguard.core.board import Board, Filter, beyond
from airflow_runguard.core.errors import PlanningError
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import State, Verdict
from tests.core import books, engine

SQL = psycopg.Connection[Any]
MANY = """
    insert into runguard.record (deployment, namespace, key, state, fence, effect, completeness, finished_at, calls,
        on_doubt, payload_version, payload_digest, payload_fields, payload_readable, store_result, digest, host)
    select 'test', 'many', lpad(n::text, 6, '0'), 'done', 1, 'applied', 'full', clock_timestamp(), 'body', 'ask', 1, '',
        '{}', '{}', 'none', '', case when n in (7, 29000) then 'rare' end from generate_series(1, 30000) n
"""
PEOPLE = {"actor": "person:x", "reason": "x"}


@pytest.fixture
def board(ledger_url: str) -> Any:
    with Board(lambda: psycopg.connect(ledger_url), deployment=engine.DEPLOYMENT) as board:
        board.check()
        yield board


def counted(sql: SQL) -> Counter[tuple[Any, ...]]:
    rows = sql.execute(
        "select state, coalesce(failure_class, ''), needs_person, coalesce(currency, ''), count(*), "
        "sum(coalesce(amount, 0)) from runguard.record where state <> 'running' group by 1, 2, 3, 4"
    ).fetchall()
    return Counter({(*row[:4], Decimal(row[5])): row[4] for row in rows})


def tallied(board: Board) -> Counter[tuple[Any, ...]]:
    return Counter(
        {
            (row["state"], row["failure_class"], row["needs_person"], row["currency"], Decimal(row["amount"])): row["n"]
            for row in board.tallied()
        }
    )


@pytest.mark.parametrize("seed", range(3))
def test_the_tally_is_the_count_whatever_happens_and_whenever_it_is_folded(
    ledger: Ledger, sql: SQL, board: Board, seed: int
) -> None:
    chance = random.Random(seed)
    ids: list[int] = []
    for number in range(60):
        state = chance.choice([State.DONE, State.FAILED, State.PAUSED, State.IN_DOUBT, State.PENDING])
        rules: dict[str, Any] = {"amount": Decimal(chance.randint(1, 99)), "currency": chance.choice(["EUR", "USD"])}
        ids.append(books.bring(ledger, state, engine.order(f"k{number}", **rules)).id)
        one = chance.choice(ids)
        match chance.randint(0, 4):
            case 0:
                ledger.resolve(one, "did_not_happen", force=True, **PEOPLE)
            case 1:
                ledger.reopen(one, seen_generation=1, again_although_applied=True, **PEOPLE)
            case 2:
                ledger.resolve(one, "happened", result=b"1", **PEOPLE)
            case 3:
                sql.execute("select runguard.fold()")
    books.enter(ledger, engine.order("running"))
    assert tallied(board) == counted(sql)
    sql.execute("select runguard.fold()")
    assert tallied(board) == counted(sql)
    assert sql.execute("select count(*) from runguard.tally_change").fetchone() == (0,)
    for span, length in (("hour", timedelta(hours=1)), ("day", timedelta(days=1))):
        for slot in board.pulses(span, datetime.now(UTC) - timedelta(days=2)):
            listed = Filter(states=(slot["state"],), since=slot["at"], until=slot["at"] + length)
            assert len(list(board.whole(listed))) == slot["n"], slot
    assert board.prevented("doubt") == (len(list(board.whole(Filter(prevented="doubt")))), False)


def waiting(board: Board, readable: set[str] | None = None) -> dict[str, int]:
    return {gate["name"]: gate["waiting"] for gate in board.board_gates(readable) if gate["waiting"]}


def waiting_lines(sql: SQL, dags: str = "%") -> dict[str, int]:
    lines = "select gate, count(*) from runguard.record where resume_at is not null and gate <> '' and dag_id like %s"
    return dict(sql.execute(f"{lines} group by 1", [dags]).fetchall())


@pytest.mark.parametrize("seed", range(3))
def test_the_tally_counts_those_that_wait_at_each_gate_whatever_moves_them(
    ledger: Ledger, sql: SQL, board: Board, seed: int
) -> None:
    chance = random.Random(seed)
    outcomes = {
        State.DONE: None,
        State.FAILED: books.DECLINED,
        State.PAUSED: books.QUOTA,
        State.IN_DOUBT: books.UNKNOWN,
        State.PENDING: books.NEVER_SENT,
    }
    most = Counter[str]()
    for number in range(100):
        first = number < 2  # one waits at each gate, whatever chance does after that
        gate = ["stripe", "mail"][number] if first else chance.choice(["stripe", "mail"])
        rules: dict[str, Any] = {
            "gate": gate if first else chance.choice([gate, None]),
            "on_doubt": "replay",
            "max_call_time": 0.001,
        }
        what = engine.order(f"first{number}" if first else f"k{chance.randrange(60)}", **rules)
        claim = ledger.claim(what, holder := engine.holder(dag_id=chance.choice(["bill", "ship"])))
        if claim.verdict is Verdict.RUN:
            state = State.PAUSED if first else chance.choice(list(outcomes))
            books.Held(ledger, what, claim, holder).settle(state, outcomes[state])
        match chance.randrange(12):
            case 0:
                ledger.open_gate(gate, rate=1000, actor="ann", reason="raised")
            case 1:
                ledger.set_rate(gate, rate=100, default=5, actor="ann", reason="slower")
            case 2:
                ledger.close_gate(gate, until=datetime(2040, 1, 1, tzinfo=UTC), rate=5, actor="ann", reason="over")
            case 3:
                ledger.resolve(claim.record_id, chance.choice(["happened", "did_not_happen"]), force=True, **PEOPLE)
            case 4:
                ledger.resume_now(claim.record_id, **PEOPLE)
            case 5:
                sql.execute("select runguard.fold()")
        assert waiting(board) == waiting_lines(sql)
        assert waiting(board, {"ship"}) == waiting_lines(sql, "ship")
        most |= Counter(waiting(board))
    assert sorted(most) == ["mail", "stripe"]
    assert tallied(board) == counted(sql)


def test_a_claim_that_is_refused_or_replayed_counts_nothing(ledger: Ledger, sql: SQL, board: Board) -> None:
    held = books.bring(ledger, State.DONE, engine.order("once"))
    before = sql.execute("select count(*) from runguard.tally_change").fetchone()
    for _ in range(3):
        ledger.claim(held.order, engine.holder())
    assert sql.execute("select count(*) from runguard.tally_change").fetchone() == before


def test_what_would_have_happened_twice_is_counted_as_the_list_shows_it(
    ledger: Ledger, sql: SQL, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    done = [books.bring(ledger, State.DONE, engine.order(f"done{n}")) for n in range(4)]
    mine = [
        books.bring(ledger, State.IN_DOUBT, engine.order(f"doubt{n}"), engine.holder(dag_id="bill")) for n in range(3)
    ]
    ledger.resolve(mine[0].id, "did_not_happen", force=True, **PEOPLE)
    for held in (done[0], done[0], done[1], done[2]):
        ledger.count_replay(held.order.identity)
    sql.execute("update runguard.prevented set at = at - interval '31 days' where record_id = %s", [done[1].id])

    def keys(kind: str, **more: Any) -> list[str]:
        return sorted(row["key"] for row in board.whole(Filter(prevented=kind, **more)))

    assert (board.prevented("replay"), keys("replay")) == ((2, False), ["done0", "done2"])
    assert (board.prevented("doubt"), keys("doubt")) == ((3, False), ["doubt0", "doubt1", "doubt2"])
    assert keys("doubt", prefix="doubt1") == keys("doubt", states=("in_doubt",), prefix="doubt1") == ["doubt1"]
    assert keys("doubt", states=("in_doubt",)) == ["doubt1", "doubt2"]
    assert board.prevented("doubt", {"ship"}) == (0, False)
    assert board.prevented("doubt", {"bill"}) == (3, False)
    monkeypatch.setattr("airflow_runguard.core.board.MANY", 2)
    assert board.prevented("doubt") == (2, True), "more than two"
    assert sql.execute("select times from runguard.prevented where record_id = %s", [done[0].id]).fetchone() == (2,)


def test_the_pulse_is_the_same_before_and_after_it_is_folded(ledger: Ledger, sql: SQL, board: Board) -> None:
    for number, state in enumerate((State.DONE, State.DONE, State.IN_DOUBT)):
        books.bring(ledger, state, engine.order(f"k{number}"))
    since = datetime.now(UTC).replace(hour=0, minute=0, second=0, microsecond=0)
    before = {span: {row["state"]: row["n"] for row in board.pulses(span, since)} for span in ("hour", "day")}
    sql.execute("select runguard.fold()")
    assert {span: {row["state"]: row["n"] for row in board.pulses(span, since)} for span in ("hour", "day")} == before
    assert before["day"] == {"done": 2, "in_doubt": 1}


def test_a_search_that_finds_little_says_how_far_it_looked_and_goes_on_from_there(
    ledger: Ledger, sql: SQL, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    with sql.transaction():
        sql.execute("select runguard.open_for_writing()")
        sql.execute(MANY)
    for sort in ("newest", "oldest", "name"):
        found: list[str] = []
        after: str | None = None
        answers = 0
        while True:
            page = board.page(Filter(holder="rare"), sort=sort, after=after)
            found += [row["key"] for row in page.rows]
            answers += 1
            after = page.after
            if after is None:
                break
        assert sorted(found) == ["000007", "029000"]
        assert answers < 100

    monkeypatch.setattr("airflow_runguard.core.board.PATIENCE", 0.0)  # one look an answer, however fast the machine is
    # Who may see none of them is led past them, and told the number of one of them, but no name.
    given = board.page(Filter(prefix="0"), readable={"mine"}).after
    assert given is not None
    number, _, seal = given.partition(".")
    assert (number.isdecimal(), re.fullmatch("[0-9a-f]{32}", seal) is not None) == (True, True)
    assert board.page(Filter(prefix="0"), readable={"mine"}, after=given).rows == []
    for forged in (f"{int(number) + 1}.{seal}", f"{number}.{'0' * 32}", f"{number}", "\u0661." + seal):
        with pytest.raises(PlanningError, match="Begin with the first page"):
            board.page(Filter(prefix="0"), readable={"mine"}, after=forged)
    with sql.transaction():
        sql.execute("select runguard.open_for_writing()")
        sql.execute("update runguard.record set key = 'renamed' where id = %s", [int(number)])
    with pytest.raises(PlanningError, match="Begin with the first page"):
        board.page(Filter(prefix="0"), readable={"mine"}, after=given)


def test_the_one_item_in_doubt_among_many_is_found_at_once(
    ledger: Ledger, sql: SQL, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("airflow_runguard.core.board.BUDGET", 3)
    held = books.enter(ledger, engine.order("items", calls="explicit"))
    for number in range(30):
        held.intent(f"item-{number:02}")
        held.outcome(f"item-{number:02}", failure=books.UNKNOWN if number == 29 else None)
    page = board.calls_of(held.id, 1, state="in_doubt")
    assert ([row["name"] for row in page.rows], page.after) == (["item-29"], None)
    page = board.calls_of(held.id, 1, state="failed")
    assert (page.rows, page.after) == ([], "item-11")
    page = board.calls_of(held.id, 1, after="item-27")
    assert ([row["name"] for row in page.rows], page.after) == (["item-28", "item-29"], None)


@pytest.mark.parametrize(
    ("prefix", "end"),
    [("a", "b"), ("ab", "ac"), ("a\U0010ffff", "b"), ("\U0010ffff", None), ("\ud7ff", "\ue000"), ("", None)],
)
def test_the_end_of_a_prefix_is_the_first_text_behind_it(prefix: str, end: str | None) -> None:
    assert beyond(prefix) == end
