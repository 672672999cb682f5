"""What the ledger does in one statement where nothing is unusual is what its long way does."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from airflow_runguard.core.items import Items
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Completeness, Grant, Order, Outcome, Result, Settlement, State
from tests.core import engine
from tests.core.books import DECLINED, QUOTA, Held, come_due, enter

SQL = psycopg.Connection[Any]
OWN = {"id", "record_id", "key", "nonce", "mark", "ti_id", "actor", "digest"}


def lines(sql: SQL, held: Held) -> list[list[dict[str, Any]]]:
    """The record, its calls, its events; of times only whether they are there and agree with the record's end."""
    with sql.cursor(row_factory=dict_row) as cursor:
        read = [
            cursor.execute(
                f"select * from runguard.{table} where {column} = %s order by 1".encode(), [held.id]
            ).fetchall()
            for table, column in (("record", "id"), ("call", "record_id"), ("event", "record_id"))
        ]
    ends = ("_at", "_until", "_since")
    times = {column for table in read for line in table for column in line if column.endswith(ends)}
    times |= {"at", "no_later_than"}
    return [
        [{c: v is not None if c in times else v for c, v in line.items() if c not in OWN} for line in table]
        for table in read
    ]


@pytest.mark.parametrize("store_result", ["all", "digest", "none"])
@pytest.mark.parametrize("result", [Result(b"[]"), Result(None, "too large")], ids=["stored", "missing"])
@pytest.mark.parametrize("completeness", [Completeness.FULL, Completeness.PARTIAL])
@pytest.mark.parametrize("before", [None, QUOTA, DECLINED], ids=["first", "after_a_pause", "after_a_decline"])
def test_p02_a_body_that_is_done_is_booked_alike_both_ways(
    before: Any, completeness: Completeness, result: Result, store_result: str, ledger: Ledger, sql: SQL
) -> None:
    def work(key: str, said: int) -> Held:
        held = enter(ledger, engine.order(key, store_result=store_result))
        if before is not None:
            held.settle(State.PAUSED if before is QUOTA else State.FAILED, before)
            if before is QUOTA:
                come_due(sql, held.id)
            held = enter(ledger, held.order)
        settlement = Settlement(State.DONE, result=result, completeness=completeness)
        written = held.write(settlement=settlement, outcomes=[Outcome("body", result=result)] * said)
        assert (written.verdict, written.state) == ("ok", State.DONE)
        record = ledger.get(held.order.identity)
        assert record is not None
        assert record.broken == ""
        return held

    short, long = work("short", 1), work("long", 2)  # said twice, the second says nothing new, but it is not the usual
    assert lines(sql, short) == lines(sql, long)


def test_p01_the_body_of_a_new_key_is_begun_as_that_of_one_that_waited(ledger: Ledger, sql: SQL) -> None:
    def explicit(order: Order) -> None:
        enter(ledger, order).settle(State.PENDING)

    explicit(engine.order("waited", calls="explicit"))
    new, waited = enter(ledger, engine.order("new")), enter(ledger, engine.order("waited"))
    (record, (call,), _), (other, (as_call,), _) = lines(sql, new), lines(sql, waited)
    assert (call, record[0]) == ({**as_call, "fence": 1}, {**other[0], "fence": 1})
    assert new.claim.attempt == waited.claim.attempt == 1


class LongWay(Ledger):
    """A ledger whose short ways find nothing that is plain."""

    def _all(self, name: str, parameters: Mapping[str, Any], *meanwhile: Any) -> Sequence[Any]:
        return [] if name in ("settle_body", "write_items") else super()._all(name, parameters, *meanwhile)


@pytest.mark.parametrize("store_result", ["all", "digest", "none"])
@pytest.mark.parametrize("gate", [None, "stripe"])
def test_p04_a_group_of_a_batch_is_booked_alike_both_ways(
    gate: str | None, store_result: str, ledger: Ledger, ledger_url: str, sql: SQL
) -> None:
    """First intents, outcomes with the next intents, one of each that is not plain, and what was said before."""

    def work(key: str, book: Ledger) -> tuple[Held, list[Any]]:
        held = enter(book, engine.order(key, calls="batch", store_result=store_result, gate=gate))
        grant = Grant(held.order.identity, held.id, held.claim.generation, held.claim.fence)
        names = ["declined", "done", "empty", "later", "new", "paused", "refused"]
        assert Items(book).begin(grant, held.holder)
        assert Items(book).plan(grant, held.holder, held.order, names, ["d" * 64] * 7).said == ["work"] * 7
        assert held.intent("declined") == "run"
        held.write(outcomes=[Outcome("declined", failure=DECLINED, error="402")])
        held.settle(State.PENDING)
        held = enter(book, held.order)  # an entry calls an item once, so only this one may call it again
        refused = Outcome("refused", failure=DECLINED, error="402")
        done = Outcome("done", result=Result(b"[1]"))
        groups: list[tuple[list[Outcome], list[str]]] = [
            ([], ["refused", "done"]),
            ([refused, done], ["empty", "later"]),
            (
                [done, refused, Outcome("empty", result=Result(None, "too large"))],
                ["later", "declined", "refused", "new"],
            ),
            ([Outcome("later", result=Result(b"")), Outcome("new", result=Result(b"2"), error="but")], ["done"]),
        ]
        said = []
        for outcomes, calls in groups:
            written = held.write(outcomes=outcomes, intents=[(name, "{}") for name in calls])
            answers = {name: (it.verdict, it.attempt, it.result) for name, it in written.intents.items()}
            said.append((written.verdict, written.state, answers, written.until is not None))
        assert held.write(outcomes=[Outcome("declined", result=Result(b"3"))]).verdict == "ok"
        assert (said[2][2]["declined"], said[2][2]["refused"]) == (("run", 2, None), ("failed", 1, None))
        assert said[3][2]["done"][0] == "replay"
        if gate is None:
            held.write(intents=[("paused", "{}")])
            held.write(outcomes=[Outcome("paused", failure=QUOTA, error="429")])
            assert held.intent("paused") == "paused"
            sql.execute(
                "update runguard.call set resume_at = clock_timestamp() where record_id = %s and state = 'paused'",
                [held.id],
            )
            assert held.intent("paused") == "run"
            assert held.outcome("paused").verdict == "ok"
        record = book.get(held.order.identity)
        assert record is not None
        assert (record.broken, record.open_calls) == ("", 0)
        return held, said

    with contextlib.closing(LongWay(lambda: psycopg.connect(ledger_url), deployment=ledger.deployment)) as long_way:
        (short, heard), (long, heard_too) = work("short", ledger), work("long", long_way)
    assert heard == heard_too
    assert lines(sql, short)[:2] == lines(sql, long)[:2]  # the events of a group are told together
