"""A batch that is ended in the middle: what had begun is in doubt, the rest is not begun, and the next try goes on."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from airflow_runguard.core.errors import NotApplied
from airflow_runguard.core.items import Items, Selection
from airflow_runguard.core.record import Completeness, Outcome, Result, Settlement, State
from airflow_runguard.core.work import Applied, Decision, Done, Ended, HandOver, InDoubt, Passed, Waiting
from tests.core import batches, books, engine
from tests.core.batches import Counting, invoices


class TaskTimeout(BaseException):
    """What Airflow raises in the main thread at execution_timeout."""


class Skip(Exception):
    """Control flow that is an Exception."""


@contextmanager
def alarm(seconds: float) -> Iterator[None]:
    def strike(*_: Any) -> None:
        raise TaskTimeout("too long")

    before = signal.signal(signal.SIGALRM, strike)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_r44_a_timeout_puts_what_had_begun_into_doubt_and_begins_nothing_else(ledger, monkeypatch, asynchronous):
    monkeypatch.setattr("airflow_runguard.core.calling.LAST_WORDS", 0.2)
    held, entered = threading.Event(), threading.Event()

    def pay(context, item):
        if item["id"] == "c":
            entered.set()
            held.wait(20)
        return "paid"

    async def pay_async(context, item):
        if item["id"] == "c":
            entered.set()
            await asyncio.sleep(20)
        return "paid"

    begun = time.monotonic()
    with alarm(0.7):
        how = batches.run(
            ledger, invoices(*"abcde"), pay_async if asynchronous else pay, asynchronous=asynchronous, concurrency=1
        )
    assert entered.is_set()
    assert time.monotonic() - begun < 10
    assert isinstance(how, InDoubt)
    assert isinstance(how.error, TaskTimeout)
    assert batches.states(ledger) == {"a": "done", "b": "done", "c": "in_doubt", "d": "pending", "e": "pending"}
    assert batches.record(ledger).state is State.IN_DOUBT
    held.set()
    if not asynchronous:  # its own thread still settles what it knows
        books.wait_until(lambda: batches.states(ledger)["c"] == "done", "the late caller books its outcome")
        assert batches.record(ledger).state is State.PENDING


PASSING = [KeyboardInterrupt(), SystemExit(3), asyncio.CancelledError(), Skip("x"), TaskTimeout()]


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("error", PASSING, ids=lambda error: type(error).__name__)
def test_r44_what_is_for_airflow_or_python_passes_through_and_is_no_failure(ledger, error, asynchronous):
    pay = Counting(c=error)

    async def pay_async(context, item):
        return pay(context, item)

    how = batches.run(
        ledger,
        invoices(*"abcde"),
        pay_async if asynchronous else pay,
        asynchronous=asynchronous,
        work={"signal": lambda error: Decision("skip") if isinstance(error, Skip) else None},
    )
    assert (how.signal if isinstance(how, Passed) else how.error) is error
    assert pay.calls == ["a", "b", "c"]
    assert batches.states(ledger) == {"a": "done", "b": "done", "c": "in_doubt", "d": "pending", "e": "pending"}


def test_a_reschedule_keeps_the_record_and_the_same_task_instance_goes_on(ledger):
    pay = Counting(b=Skip("later"))
    who = engine.holder(ti_id="ti-1")
    work = {"signal": lambda error: HandOver(600.0), "holder": who}
    assert isinstance(batches.run(ledger, invoices(*"abc"), pay, work=work), Passed)
    assert batches.record(ledger).state is State.RUNNING
    again = {"holder": engine.holder(ti_id="ti-1")}
    assert isinstance(batches.run(ledger, invoices(*"abc"), pay, work=again), InDoubt)
    assert pay.calls == ["a", "b", "c"]


def test_p05_a_stopped_batch_awaits_what_is_under_way_and_begins_nothing(ledger):
    stop: list[Any] = []

    def pay(context, item):
        if item["id"] == "b":
            stop[0]()
        return "paid"

    from airflow_runguard.core import guard
    from airflow_runguard.core.batch import Batch
    from airflow_runguard.core.conduct import conduct
    from airflow_runguard.core.leases import Leases

    batch = Batch(items=lambda: invoices(*"abcd"), key_of=lambda item: item["id"], call=pay)

    def body(context):
        stop.append(context.stop)
        conduct(batch, context)

    how = guard.run(ledger, Leases(None, ledger.installation), engine.work(batches.order(), body))
    assert isinstance(how, Ended)
    assert how.retry
    assert batches.states(ledger) == {"a": "done", "b": "done", "c": "pending", "d": "pending"}


def dead(sql, ledger) -> None:
    """Its holder is gone, and no request of it can arrive any more."""
    books.expire(sql, batches.record(ledger).id)


def begun_and_killed(ledger, key: str, what=None) -> books.Held:
    """A holder that planned a, b, c, booked the intent of ``key``, and is no more."""
    what = what or batches.order()
    held = books.enter(ledger, what)
    grant_of = books.Grant(what.identity, held.id, held.claim.generation, held.claim.fence)
    from hashlib import sha256

    from airflow_runguard.core.payloads import canonical

    items = Items(ledger)
    assert items.begin(grant_of, held.holder)
    listed = invoices(*"abc")
    digests = [sha256(canonical(item)).hexdigest() for item in listed]
    said = items.plan(grant_of, held.holder, what, [item["id"] for item in listed], digests).said
    assert said is not None
    assert held.intent(key) == "run"
    return held


def test_p03_a_killed_batch_goes_on_with_the_others_and_asks_once_about_the_rest(ledger, sql):
    begun_and_killed(ledger, "b")
    assert isinstance(batches.run(ledger, invoices(*"abc"), Counting()), Waiting)  # its lease still runs
    dead(sql, ledger)
    pay = Counting()
    how = batches.run(ledger, invoices(*"abc"), pay)
    assert pay.calls == ["a", "c"]
    assert isinstance(how, InDoubt)
    assert "Nobody knows whether these happened: b." in how.message
    line = batches.record(ledger)
    assert (line.state, line.needs_person) == (State.IN_DOUBT, True)
    assert "stopped renewing the lease" in batches.items(ledger)["b"].error
    changed = Items(ledger).resolve(
        line.id, "happened", Selection.parse("in_doubt"), actor="ann", reason="looked it up", results=None
    )
    assert (changed.verdict, changed.items) == ("ok", 1)
    assert batches.record(ledger).state is State.PENDING
    assert isinstance(batches.run(ledger, invoices(*"abc"), pay), Done)
    assert pay.calls == ["a", "c"]


def test_p04_a_group_that_is_repeated_after_a_lost_answer_skips_no_vendor_key(ledger, sql):
    """The list names an item twice: its refusal and the asking for its twin are in one group."""
    held = begun_and_killed(ledger, "a")
    for _ in range(2):
        written = held.write(
            outcomes=[Outcome("a", failure=books.DECLINED, error="402")], intents=[("a", "{}"), ("b", "{}")]
        )
        assert {name: (it.verdict, it.attempt) for name, it in written.intents.items()} == {
            "a": ("failed", 1),
            "b": ("run", 1),
        }
    held.write(outcomes=[Outcome("b", result=Result(b"1"))])
    held.settle(State.PENDING)
    pay = Counting()
    assert isinstance(batches.run(ledger, invoices(*"abc"), pay), Done)
    assert pay.calls == ["a", "c"]
    assert batches.items(ledger)["a"].attempt == 2


def test_an_item_that_a_person_releases_while_the_others_are_called_is_named_and_the_next_try_calls_it(
    ledger, open_ledger, sql
):
    begun_and_killed(ledger, "b")
    dead(sql, ledger)
    other = open_ledger()

    def released():
        line = batches.record(other)
        by = {"actor": "ann", "reason": "not in their books", "force": True}
        assert Items(other).resolve(line.id, "did_not_happen", Selection(names=("b",)), **by).verdict == "ok"
        return "paid"

    pay = Counting(a=released)
    how = batches.run(ledger, invoices(*"abc"), pay)
    assert isinstance(how, Ended)
    assert how.retry
    assert how.message.endswith("Without an outcome: b.")
    assert (how.value["done"], how.value["pending"], how.value["complete"]) == (2, 1, False)
    assert batches.record(ledger).state is State.PENDING
    assert isinstance(batches.run(ledger, invoices(*"abc"), pay), Done)
    assert pay.calls == ["a", "c", "b"]


def test_p05_the_caller_of_an_item_still_settles_it_after_a_takeover_and_changes_nothing_else(ledger, sql):
    frozen = begun_and_killed(ledger, "b")
    dead(sql, ledger)
    inside, go_on = threading.Event(), threading.Event()

    def slow(context, item):
        inside.set()
        assert go_on.wait(20)
        return "paid"

    ended: list[Any] = []
    other = engine.open_ledger(sql.info.dsn)
    thread = threading.Thread(target=lambda: ended.append(batches.run(other, invoices(*"abc"), slow)))
    thread.start()
    assert inside.wait(20)
    assert frozen.outcome("b").verdict == "lost"  # it hears that it is not the holder, and its answer counts
    assert frozen.intent("c") == "lost"
    assert batches.states(ledger)["b"] == "done"
    assert batches.record(ledger).state is State.RUNNING
    go_on.set()
    thread.join(20)
    other.close()
    (how,) = ended
    assert isinstance(how, Done)


def test_p05_a_late_applied_of_an_item_that_a_person_released_is_doubt_of_that_item_alone(ledger, sql):
    frozen = begun_and_killed(ledger, "b")
    dead(sql, ledger)
    pay = Counting()
    batches.run(ledger, invoices(*"abc"), pay)
    line = batches.record(ledger)
    said = Items(ledger).resolve(
        line.id, "did_not_happen", Selection.parse("key=b"), actor="ann", reason="nothing there"
    )
    assert said.verdict == "too_early"
    said = Items(ledger).resolve(
        line.id, "did_not_happen", Selection.parse("key=b"), actor="ann", reason="nothing there", force=True
    )
    assert said.verdict == "ok"
    frozen.outcome("b")
    how = batches.run(ledger, invoices(*"abcd"), pay)
    assert isinstance(how, InDoubt)
    assert pay.calls == ["a", "c", "d"]


def test_p03_a_reconciler_is_asked_about_each_item_in_doubt_or_about_many_at_once(ledger, sql):
    order = batches.order(on_doubt="reconcile")
    begun_and_killed(ledger, "b", order)
    dead(sql, ledger)
    pay = Counting()
    how = batches.run(ledger, invoices(*"abc"), pay, what=order, work={"reconcile": lambda doubt: NotApplied()})
    assert isinstance(how, InDoubt)  # too early: its request may still arrive
    assert (how.who, how.retry) == ("reconcile", True)
    asked: list[list[str]] = []

    def chunk(doubts):
        asked.append([doubt.call.name for doubt in doubts])
        assert all(doubt.vendor_key.startswith("rg1-") for doubt in doubts)
        return {doubt.call.name: Applied("found") for doubt in doubts}

    how = batches.run(ledger, invoices(*"abc"), pay, what=order, work={"reconcile": chunk}, reconcile_chunks=True)
    assert isinstance(how, Done)
    assert asked == [["b"]]
    assert pay.calls == ["a", "c"]
    line = batches.record(ledger)
    result = Items(ledger).result(line.id, line.generation, "b", "all")
    assert result is not None
    assert result.data == b'"found"'


def test_p03_repeating_is_safe_where_it_was_said_and_under_the_same_vendor_key(ledger, sql):
    order = batches.order(on_doubt="replay")
    begun_and_killed(ledger, "b", order)
    dead(sql, ledger)
    pay = Counting()
    assert isinstance(batches.run(ledger, invoices(*"abc"), pay, what=order), Done)
    assert sorted(pay.calls) == ["a", "b", "c"]


def test_an_item_that_kills_its_worker_is_set_aside_and_the_others_go_on(ledger, sql):
    order = batches.order(on_doubt="replay", max_claims=3)
    for _ in range(3):
        begun_and_killed(ledger, "b", order)
        dead(sql, ledger)
    pay = Counting()
    how = batches.run(ledger, invoices(*"abc"), pay, what=order)
    assert isinstance(how, InDoubt)
    assert sorted(pay.calls) == ["a", "c"]
    line = batches.record(ledger)
    Items(ledger).resolve(
        line.id, "did_not_happen", Selection.parse("in_doubt"), actor="ann", reason="nothing there", force=True
    )
    how = batches.run(ledger, invoices(*"abc"), pay, what=order)
    assert isinstance(how, Ended)
    assert sorted(pay.calls) == ["a", "c"]
    assert "kills its worker" in batches.items(ledger)["b"].error
    changed = Items(ledger).reopen(
        line.id, Selection.parse("failed"), seen_generation=1, actor="ann", reason="more memory"
    )
    assert changed.verdict == "ok"
    assert isinstance(batches.run(ledger, invoices(*"abc"), pay, what=order), Done)
    assert sorted(pay.calls) == ["a", "b", "c"]


def test_p14_a_batch_of_a_ledger_that_lost_time_calls_nothing_until_a_person_has_said_so(ledger, sql):
    pay = Counting()
    batches.run(ledger, invoices("a"), pay)
    begun_and_killed(ledger, "b", batches.order("open"))
    sql.execute("select runguard.acknowledge_restore(now() - interval '1 hour', 'ann', 'restored')")
    for key in ("invoices", "open"):
        what = batches.order(key)
        books.expire(sql, batches.record(ledger, what).id) if key == "open" else None
        how = batches.run(ledger, invoices(*"abc"), pay, what=what)
        assert isinstance(how, InDoubt), how
    assert pay.calls == ["a"]


def test_work_that_a_person_booked_by_hand_is_not_looked_at_item_by_item(ledger):
    pay = Counting(a=NotApplied("closed"))
    batches.run(ledger, invoices("a"), pay)
    identity = batches.order().identity
    assert ledger.bypass(identity, result=b'"by hand"', reference=None, actor="ann", reason="paid by cheque") == "ok"
    how = batches.run(ledger, invoices("a", "b"), pay)
    assert isinstance(how, Done)
    assert how.replayed
    assert pay.calls == ["a"]


def test_a_batch_under_the_key_of_other_work_is_refused(ledger):
    what = engine.order("invoices", payload={}, calls="explicit")
    held = books.enter(ledger, what)
    held.intent("charge")
    held.outcome("charge")
    held.settle(State.PENDING)
    how = batches.run(ledger, invoices("a"), Counting())
    assert isinstance(how, Ended)
    assert "other calls" in how.message


def test_p05_a_batch_that_another_holder_took_over_begins_no_other_item_and_keeps_what_is_done(ledger, open_ledger):
    """R37: it hears of it with the outcome of the item that it was at, which is still believed."""
    other, later = open_ledger(), []

    def taken_over():
        line = batches.record(other)
        assert other.release(line.id, actor="ann", reason="it hangs") == "ok"
        later.append(books.enter(other, batches.order()))
        return "paid"

    pay = Counting(**{"4": taken_over})
    how = batches.run(ledger, invoices(*range(1, 11)), pay)
    assert isinstance(how, Ended | Waiting)
    assert pay.calls == ["1", "2", "3", "4"]
    assert {state for name, state in batches.states(ledger).items() if int(name) > 4} == {"pending"}
    later[0].settle(State.PENDING)
    pay._does.clear()
    assert isinstance(batches.run(ledger, invoices(*range(1, 11)), pay), Done)
    assert sorted(pay.calls, key=int) == [str(n) for n in range(1, 11)]


@pytest.mark.parametrize("completeness", [Completeness.FULL, Completeness.PARTIAL])
def test_p08_a_batch_that_a_person_took_away_is_not_done_by_what_its_old_holder_counted(ledger, completeness):
    """Between its count and its settlement an item may have been ordered anew."""
    held = begun_and_killed(ledger, "b")
    assert ledger.release(held.id, actor="ann", reason="it hangs") == "ok"
    held.write(settlement=Settlement(State.DONE, Result(b"{}"), completeness=completeness), outcomes=[books.said("b")])
    assert batches.states(ledger) == {"a": "pending", "b": "done", "c": "pending"}
    assert batches.record(ledger).state is State.PENDING
    pay = Counting()
    assert isinstance(batches.run(ledger, invoices(*"abc"), pay), Done)
    assert pay.calls == ["a", "c"]


def test_p02_a_person_says_later_what_an_item_gave_back(ledger, sql):
    begun_and_killed(ledger, "b")
    dead(sql, ledger)
    batches.run(ledger, invoices(*"abc"), Counting())
    line, items = batches.record(ledger), Items(ledger)
    said = {"actor": "ann", "reason": "looked it up"}
    assert items.resolve(line.id, "happened", Selection.parse("in_doubt"), **said).verdict == "ok"
    missing = items.result(line.id, 1, "b", "all")
    assert missing is not None
    assert missing.missing
    later = items.resolve(line.id, "happened", Selection.parse("key=b"), results=[b'"ch_1"'], **said)
    assert (later.verdict, later.items) == ("ok", 1)
    found = items.result(line.id, 1, "b", "all")
    assert (found.data, found.missing) == (b'"ch_1"', "")
    again = items.resolve(line.id, "happened", Selection.parse("key=b"), results=[b'"ch_2"'], **said)
    assert again.verdict == "no_such_call"
    assert isinstance(batches.run(ledger, invoices(*"abc"), Counting()), Done)


def test_p05_a_late_outcome_of_an_item_of_a_batch_that_is_done_is_doubt_and_the_next_run_does_not_call_it(ledger, sql):
    frozen = begun_and_killed(ledger, "b")
    dead(sql, ledger)
    batches.run(ledger, invoices(*"abc"), Counting())
    said = {"actor": "ann", "reason": "nothing there"}
    Items(ledger).resolve(batches.record(ledger).id, "did_not_happen", Selection.parse("key=b"), force=True, **said)
    declines = Counting(b=NotApplied("declined"))
    assert isinstance(batches.run(ledger, invoices(*"abc"), declines, allow_partial=True), Done)
    assert (declines.calls, batches.record(ledger).completeness) == (["b"], Completeness.PARTIAL)
    frozen.outcome("b")
    assert (batches.record(ledger).state, batches.record(ledger).needs_person) == (State.IN_DOUBT, True)
    pay = Counting()
    assert isinstance(batches.run(ledger, invoices(*"abcd"), pay), InDoubt)
    assert pay.calls == ["d"]
