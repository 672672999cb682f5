"""Planning a list: in chunks, in key order, once, and without holding it."""

from __future__ import annotations

import threading
import tracemalloc
from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_runguard.core import conduct, payloads, spool
from airflow_runguard.core.errors import PlanningError
from airflow_runguard.core.items import Items
from airflow_runguard.core.record import Grant
from airflow_runguard.core.work import Done, Ended
from tests.core import batches, books, engine
from tests.core.batches import Counting, invoices

MANY = 10_000


def test_two_batches_plan_the_same_ten_thousand_items_in_opposite_order(open_ledger):
    """Under one record (the second took the first over, which does not know it yet) and under two."""

    def plan(ledger: Any, held: books.Held, names: list[str], said: list[Any]) -> None:
        grant = Grant(held.order.identity, held.id, held.claim.generation, held.claim.fence)
        for start in range(0, MANY, conduct.CHUNK):
            chunk = names[start : start + conduct.CHUNK]
            digests = [sha256(name.encode()).hexdigest() for name in chunk]
            said.append(Items(ledger).plan(grant, held.holder, held.order, chunk, digests).said)

    names = [f"inv-{number}" for number in range(MANY)]
    first, second = open_ledger(), open_ledger()
    one, two = books.enter(first, batches.order("one")), books.enter(second, batches.order("two"))
    stale = books.Held(second, one.order, one.claim, engine.holder())  # another process under the same record
    for ledger, held in ((second, two), (second, stale)):
        answers: list[list[Any]] = [[], []]
        threads = [
            threading.Thread(target=plan, args=(first, one, names, answers[0])),
            threading.Thread(target=plan, args=(ledger, held, names[::-1], answers[1])),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        assert sum(len(said) for said in answers[0]) == MANY
        if held is stale:
            assert answers[1] == [None] * (MANY // conduct.CHUNK)
        else:
            assert sum(len(said) for said in answers[1]) == MANY
    assert len(batches.items(first, batches.order("one"))) == MANY


def test_a_resumed_batch_writes_no_line_of_what_is_done_and_counts_it_once(ledger, sql, monkeypatch):
    monkeypatch.setattr(conduct, "CHUNK", 3)
    batches.run(ledger, invoices(*"abcdefg"), Counting())
    line = batches.record(ledger)

    def versions():
        told = sql.execute(
            "select name, xmin::text from runguard.call where record_id = %s and state = 'done'", [line.id]
        )
        return dict(told.fetchall())

    before = versions()
    how = batches.run(ledger, invoices(*"fabcdhabcf"), Counting())  # named again in other chunks; e and g are not named
    assert isinstance(how, Done)
    assert {key: how.value[key] for key in ("items", "done", "replayed", "complete")} == {
        "items": 6, "done": 6, "replayed": 5, "complete": True,
    }  # fmt: skip
    assert {name: xmin for name, xmin in versions().items() if name != "h"} == before
    assert isinstance(batches.run(ledger, invoices(*"abc"), Counting()), Done)
    entries = "select count(distinct fence), max(fence) from runguard.listed"
    assert sql.execute(entries).fetchone() == (2, 3)
    ledger.sweep("test")
    assert sql.execute(entries).fetchone() == (1, 3), "the last list is kept, by which the results are read"


def test_a_stream_is_read_once_and_never_held(ledger, monkeypatch):
    monkeypatch.setattr(spool, "IN_MEMORY", 1_000)
    read = 0

    def lines():
        nonlocal read
        for number in range(6_000):
            read += 1
            yield {"id": str(number), "text": "x" * 4_000}

    seen: list[str] = []

    def call(context, item):
        seen.append(item["id"])
        if len(seen) == 1_100:
            raise KeyboardInterrupt
        return "ok"

    tracemalloc.start()
    how = batches.run(ledger, lines, call)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert isinstance(how, Ended)
    assert read == 6_000
    assert seen == [str(number) for number in range(1_100)]  # in the order of the list, also through the file
    assert peak < 6_000 * 4_000 / 2


def test_items_that_cannot_wait_in_a_file_are_refused_before_any_call(ledger, monkeypatch):
    monkeypatch.setattr(spool, "IN_MEMORY", 1)
    pay = Counting()
    listed = [{"id": str(number), "open": lambda: None} for number in range(3)]
    how = batches.run(ledger, listed, pay, payload_of=lambda item: item["id"])
    assert isinstance(how, Ended)
    assert "plain data" in how.message
    assert pay.calls == []


@pytest.mark.parametrize("key", [None, "", "  x", "a\nb", "x" * 513, "body", 1.5, True, ["a"]])
def test_a_key_that_names_nothing_is_refused_before_any_call(ledger, key):
    pay = Counting()
    how = batches.run(ledger, invoices("a"), pay, key_of=lambda item: key)
    assert isinstance(how, Ended)
    assert "Item 1 of the list" in how.message
    assert pay.calls == []


@pytest.mark.parametrize("items", ["abc", {"a": 1}, None, 5])
def test_what_is_no_list_is_refused(ledger, items):
    how = batches.run(ledger, lambda: items, Counting())
    assert isinstance(how, Ended)
    assert not how.retry


def test_an_item_of_a_list_that_breaks_off_leaves_nothing_called(ledger):
    def lines():
        yield from invoices("a")
        raise OSError("the file is gone")

    pay = Counting()
    how = batches.run(ledger, lines, pay)
    assert isinstance(how, Ended)
    assert how.retry
    assert pay.calls == []
    assert isinstance(batches.run(ledger, invoices("a"), pay), Done)


names = st.one_of(st.text(), st.from_regex(r"\A[A-Za-z_][A-Za-z0-9_]{0,5}\Z"))
values = st.one_of(st.text(), st.integers(), st.booleans(), st.none(), st.floats(allow_nan=False, allow_infinity=False))


@given(st.dictionaries(names, values))
def test_the_short_way_to_the_canonical_form_is_the_long_one(fields):
    def of(way: Any) -> Any:
        try:
            return way()
        except PlanningError:
            return None

    slow = of(lambda: payloads._Encoder().encode(fields, "payload", 0).encode("ascii"))
    assert of(lambda: payloads.canonical(fields)) == slow


@given(st.dictionaries(st.sampled_from(["id", "token", "url", "cents", "note"]), values))
def test_the_short_way_to_what_people_read_is_the_long_one(fields):
    assert payloads.readable(fields) == payloads._rendition(
        {name: value if payloads._has_form(value) else f"<{type(value).__name__}>" for name, value in fields.items()}
    )
