"""A former name leads to its record: its order is not sent again, nor other work under a vendor key that was used."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any

import psycopg
import pytest

from airflow_runguard import commands, explain, stops
from airflow_runguard.core import guard
from airflow_runguard.core.board import Board, Filter
from airflow_runguard.core.errors import NotApplied
from airflow_runguard.core.keys import vendor_key
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Identity, Order, Record, Result, Settlement, State, Verdict
from airflow_runguard.core.series import Place
from airflow_runguard.refusals import Refused
from tests.core import batches, books, engine
from tests.core.books import Held, bring, enter

SQL = psycopg.Connection[Any]
WORDS = {"actor": "ann", "reason": "the key has another format"}
fresh = partial(next, (f"renamed/{n}" for n in itertools.count()))
WAITING = "select count(*) from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
RENAMED = [State.PENDING, State.DONE, State.FAILED]


@pytest.fixture(scope="module")
def ledger_url(postgres: str, ledger_template: str) -> Iterator[str]:
    with books.fresh_ledger(postgres, ledger_template) as url:
        yield url


@pytest.fixture
def board(ledger_url: str) -> Iterator[Board]:
    with Board(lambda: psycopg.connect(ledger_url), deployment=engine.DEPLOYMENT) as board:
        board.check()
        yield board


def rename(ledger: Ledger, held: Held, key: str) -> Order:
    """Its order by the new name."""
    assert ledger.rename(held.id, namespace="billing", key=key, **WORDS) == "ok"
    return engine.order(key, calls=held.order.calls)


def record_of(ledger: Ledger, identity: Identity) -> Record:
    record = ledger.get(identity)
    assert record is not None
    assert record.broken == ""
    return record


def sent(ledger: Ledger, held: Held) -> str:
    """Send the body, decline it for good, and say under which vendor key it went out."""
    held.settle(State.FAILED, books.DECLINED)
    return vendor_key(ledger.installation, held.order.identity, "body", held.claim.generation, held.claim.attempt)


@pytest.mark.parametrize("state", RENAMED)
def test_p03_an_order_under_a_former_name_never_calls(ledger: Ledger, state: State) -> None:
    held, name = bring(ledger, state, engine.order(fresh())), fresh()
    renamed = rename(ledger, held, name)
    claim = ledger.claim(held.order, engine.holder())
    if state is State.DONE:
        assert (claim.verdict, claim.result) == (Verdict.REPLAY, Result(b'"ok"'))
    else:
        assert (claim.verdict, claim.reason, claim.holder) == (Verdict.REFUSED, "renamed", f"billing/{name}")
    other = ledger.claim(engine.order(held.order.identity.key, {"amount": 7}), engine.holder())
    assert (other.verdict, other.reason, other.holder) == (Verdict.REFUSED, "renamed", f"billing/{name}")
    assert ledger.bypass(held.order.identity, result=b"1", reference=None, **WORDS) == "renamed"
    if state is not State.DONE:
        enter(ledger, renamed).settle(State.DONE)
    assert ledger.claim(renamed, engine.holder()).verdict is Verdict.REPLAY


def test_p09_a_former_name_gives_back_what_its_record_is_now_and_not_what_it_was(ledger: Ledger) -> None:
    """Refunded and ordered anew, it is not done: an older run that is cleared must not end well with the old charge."""
    held = bring(ledger, State.DONE, engine.order(fresh()))
    renamed = rename(ledger, held, fresh())
    assert ledger.claim(held.order, engine.holder()).verdict is Verdict.REPLAY
    assert ledger.reopen(held.id, seen_generation=1, again_although_applied=True, **WORDS) == "ok"
    claim = ledger.claim(held.order, engine.holder())
    assert (claim.verdict, claim.reason, claim.holder) == (Verdict.REFUSED, "renamed", str(renamed.identity))
    enter(ledger, renamed).settle(State.IN_DOUBT, books.UNKNOWN)
    assert ledger.claim(held.order, engine.holder()).reason == "renamed"
    assert ledger.resolve(held.id, "happened", **WORDS) == "ok"
    unknown = ledger.claim(held.order, engine.holder())
    assert (unknown.verdict, unknown.result) == (Verdict.REPLAY, Result(None, "resolved by hand without a result"))
    assert ledger.resolve(held.id, "happened", result=b'"ch_2"', **WORDS) == "ok"
    assert ledger.claim(held.order, engine.holder()).result == Result(b'"ch_2"')


def test_p11_a_former_name_answers_for_the_payload_that_its_record_has_now(ledger: Ledger) -> None:
    held = bring(ledger, State.DONE, engine.order(fresh()))
    renamed = rename(ledger, held, fresh())
    assert ledger.reopen(held.id, seen_generation=1, again_although_applied=True, **WORDS) == "ok"
    other = engine.order(renamed.identity.key, {"amount": 7})
    enter(ledger, other).settle(State.DONE)
    assert ledger.claim(held.order, engine.holder()).reason == "renamed", "that amount was paid back"
    assert ledger.claim(other, engine.holder()).verdict is Verdict.REPLAY


def test_p02_a_batch_under_its_former_name_is_refused_since_its_list_may_have_grown(ledger: Ledger) -> None:
    """Its old result would say that the item which came since was paid, too."""
    what, calls = batches.order(fresh()), batches.Counting()
    assert isinstance(batches.run(ledger, batches.invoices("a", "b"), calls, what=what), guard.Done)
    record = batches.record(ledger, what)
    new = fresh()
    assert ledger.rename(record.id, namespace="billing", key=new, **WORDS) == "ok"
    again = batches.run(ledger, batches.invoices("a", "b", "c"), calls, what=what)
    assert isinstance(again, guard.Ended)
    assert new in again.message
    assert sorted(calls.calls) == ["a", "b"]


def test_p03_a_batch_that_is_done_in_part_does_not_look_whole_under_its_former_name(ledger: Ledger) -> None:
    what, calls = batches.order(fresh()), batches.Counting(b=NotApplied("refused"))
    batches.run(ledger, batches.invoices("a", "b"), calls, what=what, allow_partial=True)
    record = batches.record(ledger, what)
    assert ledger.rename(record.id, namespace="billing", key=fresh(), **WORDS) == "ok"
    assert ledger.claim(what, engine.holder()).reason == "renamed"


def test_p03_other_work_under_a_former_name_has_vendor_keys_that_were_never_used(ledger: Ledger) -> None:
    first = enter(ledger, engine.order(fresh()))
    used = {sent(ledger, first)}
    second = enter(ledger, rename(ledger, first, fresh()))
    used.add(sent(ledger, second))
    assert ledger.reopen(first.id, seen_generation=1, **WORDS) == "ok"
    third = enter(ledger, second.order)
    used.add(sent(ledger, third))
    rename(ledger, third, first.order.identity.key)  # back again, after two names and a generation
    fourth = enter(ledger, first.order)
    used.add(sent(ledger, fourth))
    assert fourth.id == first.id
    left = record_of(ledger, second.order.identity)
    reopen = partial(ledger.reopen, left.id, seen_generation=left.generation, **WORDS)
    assert reopen() == "renamed"
    assert reopen(again_although_applied=True) == "ok"
    other = enter(ledger, engine.order(second.order.identity.key, {"amount": 7}))
    assert other.id not in {held.id for held in (first, second, third, fourth)}
    used.add(sent(ledger, other))
    assert len(used) == 5
    assert ledger.rename(fourth.id, namespace="billing", key=second.order.identity.key, **WORDS) == "taken"


def test_p13_a_record_goes_back_to_any_of_its_former_names_and_each_of_them_leads_to_it(ledger: Ledger) -> None:
    held = bring(ledger, State.FAILED, engine.order(fresh()))
    first, second, third = held.order.identity.key, fresh(), fresh()
    for name in (second, third, first, second, first):
        now = rename(ledger, held, name)
        record = record_of(ledger, now.identity)
        assert (record.id, record.renamed_to) == (held.id, None)
        for former in {first, second, third} - {name}:
            record = ledger.get(engine.identity(former))
            assert record is None or (record.renamed_to, record.broken) == (now.identity, "")
    held = enter(ledger, now)
    held.settle(State.DONE)
    rename(ledger, held, second)  # what is done now is done under all names that it has from here on
    assert ledger.claim(engine.order(first), engine.holder()).verdict is Verdict.REPLAY
    assert ledger.claim(engine.order(third), engine.holder()).verdict is Verdict.REPLAY
    reopened = ledger.reopen(held.id, seen_generation=1, again_although_applied=True, **WORDS)
    assert reopened == "ok"
    rename(ledger, held, first)
    assert ledger.claim(engine.order(second), engine.holder()).reason == "renamed"


def test_p13_nothing_but_a_new_order_by_a_person_changes_a_former_name(ledger: Ledger, sql: SQL) -> None:
    for state in RENAMED:
        held = bring(ledger, state, engine.order(fresh()))
        rename(ledger, held, fresh())
        left = record_of(ledger, held.order.identity)
        before = books.line(sql, left.id)[0]
        assert {
            ledger.resolve(left.id, "happened", **WORDS),
            ledger.resolve(left.id, "did_not_happen", force=True, **WORDS),
            ledger.release(left.id, **WORDS),
            ledger.accept_payload(left.id, **WORDS),
            ledger.rename(left.id, namespace="billing", key=fresh(), **WORDS),
            ledger.resume_now(left.id, **WORDS),
        } == {"renamed"}
        assert ledger.rename(held.id, namespace="billing", key=held.order.identity.key, **WORDS) == "ok"
        rename(ledger, held, fresh())
        other = bring(ledger, State.DONE, engine.order(fresh()))
        assert ledger.rename(other.id, namespace="billing", key=held.order.identity.key, **WORDS) == "taken"
        assert books.line(sql, left.id)[0] != before  # it traded names in between


def test_p08_a_former_name_that_was_made_a_record_outside_is_broken_and_repaired_to_nothing_that_runs(
    ledger: Ledger, sql: SQL
) -> None:
    held = bring(ledger, State.FAILED, engine.order(fresh()))
    rename(ledger, held, fresh())
    left = record_of(ledger, held.order.identity)
    with pytest.raises(psycopg.errors.CheckViolation):
        sql.execute("update runguard.record set state = 'pending' where id = %s", [left.id])
    sql.execute("update runguard.record set renamed_to = null where id = %s", [left.id])
    assert ledger.claim(held.order, engine.holder()).verdict is Verdict.BROKEN
    sql.execute("update runguard.record set renamed_to = %s, payload_digest = 'x' where id = %s", [held.id, left.id])
    broken = ledger.get(held.order.identity)
    assert broken is not None
    assert broken.broken != ""
    for state in ("pending", "done", "in_doubt"):
        assert ledger.repair(left.id, seen=broken.seen, state=state, **WORDS) == "renamed"
    assert ledger.repair(left.id, seen=broken.seen, state="failed", **WORDS) == "ok"
    assert ledger.claim(held.order, engine.holder()).reason == "renamed"


def test_p01_claims_under_the_old_name_while_it_is_renamed_find_the_record_or_its_former_name(
    ledger: Ledger, ledger_url: str, sql: SQL
) -> None:
    """Each claim is held up at the line that the rename has locked, or comes after it: none of them begins anew."""
    for state in RENAMED:
        held = bring(ledger, state, engine.order(fresh()))
        with psycopg.connect(ledger_url) as renamer, ThreadPoolExecutor(2) as pool:
            renamer.execute("select runguard.rename(%s, 'billing', %s, 'ann', 'renamed')", [held.id, fresh()])
            claims = [pool.submit(_claim, ledger_url, held.order) for _ in range(2)]
            if state is not State.DONE:  # what is done is given back by a plain look
                books.wait_until(lambda: sql.execute(WAITING).fetchone() == (2,), "both claims wait")
            renamer.commit()
            for claim in claims:
                assert claim.result(books.DEADLINE) in {(Verdict.REPLAY, ""), (Verdict.REFUSED, "renamed")}


def _claim(url: str, order: Order) -> tuple[Verdict, str]:
    with closing(engine.open_ledger(url)) as ledger:
        claim = ledger.claim(order, engine.holder())
        return claim.verdict, claim.reason


def test_a_former_name_is_found_by_its_name_and_counted_nowhere(ledger: Ledger, board: Board, sql: SQL) -> None:
    def numbers() -> Any:
        counted = [(row["state"], row["n"], row["amount"]) for row in board.tallied()]
        return sorted(counted), sorted((row["state"], row["records"]) for row in ledger.standing())

    done = bring(ledger, State.DONE, engine.order(fresh(), amount=500, currency="EUR"))
    failed = bring(ledger, State.FAILED, engine.order(fresh(), amount=500, currency="EUR"))
    before, listed = numbers(), len(ledger.list(limit=1000))
    for held in (done, failed):
        old, name = held.order.identity, fresh()
        rename(ledger, held, name)
        shown = commands.explain(ledger, commands.find(ledger, str(old)))
        assert f"a former name of billing/{name}" in shown["why"]
        assert shown["timeline"][-1]["sentence"].startswith(f"ann named the record billing/{name}; this name stays")
        assert f"airflow runguard explain billing/{name}" in shown["commands"].values()
        assert [str(record.renamed_to) for record in ledger.list(prefix=old.key)] == [f"billing/{name}"]
        page = board.page(Filter(prefix=old.key))
        assert [row["error"] for row in page.rows] == [f"renamed to billing/{name}"]
        assert old not in [record.identity for record in ledger.list(limit=1000)]
        assert old.key not in [row["key"] for row in board.page(Filter(), limit=1000).rows]
        with pytest.raises(Refused, match=f"only a former name of billing/{name}"):
            stops.bypass(ledger, old.key, old.namespace, result=None, reference=None, **WORDS)
    assert (numbers(), len(ledger.list(limit=1000))) == (before, listed)
    stuck = [row["key"] for row in ledger.audit("stuck", stuck_after=0.0, limit=1000)]
    assert failed.order.identity.key not in stuck
    left = record_of(ledger, failed.order.identity)
    assert ledger.reopen(left.id, seen_generation=1, again_although_applied=True, **WORDS) == "ok"
    assert len(ledger.list(limit=1000)) == listed + 1
    assert sum(n for _, n, _ in numbers()[0]) == sum(n for _, n, _ in before[0]) + 1
    sql.execute("select runguard.fold()")
    assert sum(n for _, n, _ in numbers()[0]) == sum(n for _, n, _ in before[0]) + 1


def test_a_key_alone_means_the_record_that_has_it_now(ledger: Ledger) -> None:
    held = bring(ledger, State.DONE, engine.order(fresh()))
    key = held.order.identity.key
    assert ledger.rename(held.id, namespace="payouts", key=key, **WORDS) == "ok"
    assert str(commands.find(ledger, key).identity) == f"payouts/{key}"
    assert explain.standing(commands.find(ledger, f"billing/{key}"), [], ledger.check()["now"]).commands
    with pytest.raises(Refused, match="has that name already"):
        commands.rename(ledger, commands.find(ledger, key), key, namespace=None, **WORDS)


def test_p03_what_only_observes_does_not_turn_a_former_name_into_work_that_is_done(ledger: Ledger) -> None:
    held, name = bring(ledger, State.FAILED, engine.order(fresh())), fresh()
    rename(ledger, held, name)
    for what in ("started", "done"):
        seen = ledger.observe(held.order, engine.holder(), what)
        assert (seen.verdict, seen.said) == ("duplicate", f"a duplicate of what is named billing/{name} now")
    assert record_of(ledger, held.order.identity).renamed_to == engine.identity(name)


def test_p02_the_run_after_a_renamed_one_of_a_series_sees_what_became_of_it(ledger: Ledger) -> None:
    series = fresh()
    place = partial(Place, series=series, waits=False)
    first = bring(ledger, State.FAILED, engine.order(fresh(), place=place(place="1", expected="")))
    renamed = rename(ledger, first, fresh())
    assert ledger.claim(first.order, engine.holder()).reason == "renamed"
    assert ledger.before(place(place="2", expected="1")).verdict == "wait"
    enter(ledger, renamed).write(
        settlement=Settlement(State.DONE, result=Result(b"1")), outcomes=[books.said("body", data=b"1")]
    )
    assert ledger.before(place(place="2", expected="1")).verdict == "go"
    # By its default keys, which are its places.
    held = bring(ledger, State.FAILED, engine.order("ld:2026-01-01T00:00:00Z"))
    follows = Place(series="billing", place="ld:2026-01-02T00:00:00Z", expected="ld:2026-01-01T00:00:00Z")
    renamed = rename(ledger, held, fresh())
    assert ledger.due_places([follows]) == set()
    enter(ledger, renamed).settle(State.DONE)
    assert ledger.due_places([follows]) == {follows}
