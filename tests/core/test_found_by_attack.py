"""Timelines by which a fresh pair of eyes once got a second charge or lost one; each stays closed."""

from __future__ import annotations

import asyncio
import dataclasses
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import psycopg
import pytest

from airflow_runguard import human
from airflow_runguard.core import guard
from airflow_runguard.core.errors import NotApplied
from airflow_runguard.core.items import Items, Selection
from airflow_runguard.core.keys import vendor_key
from airflow_runguard.core.leases import Leases
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.reconcile import doubts, settle
from airflow_runguard.core.record import Holder, Result, State, Verdict
from airflow_runguard.core.series import Place
from airflow_runguard.core.writer import Writer
from tests.core import batches, books, engine
from tests.core.accidents import until
from tests.core.books import enter, state_of

Sql = psycopg.Connection[Any]
WORDS = {"actor": "ann", "reason": "asked the vendor"}


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    with closing(engine.open_ledger(ledger_url)) as opened:
        yield opened


@pytest.fixture
def sql(ledger_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(ledger_url, autocommit=True) as connection:
        yield connection


def run(ledger: Ledger, what: Any, body: Any, **rules: Any) -> guard.How:
    return guard.run(ledger, Leases(None, ledger.installation), engine.work(what, body, **rules))


def test_p03_withdrawing_the_claim_of_a_body_that_came_back_does_not_say_that_it_was_never_sent(ledger: Ledger) -> None:
    """Submitted, deferred, came back; then the process is stopped before its work goes on."""
    order, who = engine.order("submitted"), engine.holder()
    enter(ledger, order, who).write(hand_over=3600.0)
    back = Writer(ledger, order, Holder("another entry", who.ti_id))
    claim = back.claim()
    assert (claim.verdict, claim.reentered) == (Verdict.RUN, True)
    back.withdraw_claim().result()
    back.close()
    assert state_of(ledger, order) is State.IN_DOUBT


def test_p03_one_request_speaks_for_itself_only_in_the_entry_that_made_it(ledger: Ledger) -> None:
    """A refused connection while polling says nothing about the submission before the deferral."""
    order, who = engine.order("polled"), engine.holder()
    enter(ledger, order, who).write(hand_over=3600.0)

    def poll(_: guard.GuardContext) -> None:
        raise ConnectionRefusedError("nobody listens")

    ended = run(ledger, order, poll, single_request=True, holder=Holder("another entry", who.ti_id))
    assert isinstance(ended, guard.Ended)
    assert state_of(ledger, order) is State.IN_DOUBT


def test_p05_the_lease_is_renewed_also_after_a_reconciliation(ledger: Ledger, sql: psycopg.Connection[Any]) -> None:
    order = engine.order("asked", lease=0.3, on_doubt="reconcile")
    held = enter(ledger, order)
    books.expire(sql, held.claim.record_id)
    books.long_ago(sql, held.claim.record_id)
    lease = "select lease_until, clock_timestamp() from runguard.record where id = %s"

    def slow(_: guard.GuardContext) -> str:
        first = sql.execute(lease, [held.claim.record_id]).fetchone()
        assert first is not None
        books.wait_until(
            lambda: (
                (now := sql.execute(lease, [held.claim.record_id]).fetchone()) is not None
                and now[0] > first[0] + timedelta(seconds=0.5)
            ),
            "the lease is renewed twice",
        )
        return "ok"

    done = run(ledger, order, slow, reconcile=lambda doubt: NotApplied("the vendor has nothing"))
    assert done == guard.Done("ok", replayed=False)


@pytest.mark.parametrize("swallow", ["gather", "pool"])
def test_p09_a_call_that_was_refused_is_not_done_because_the_body_did_not_look(ledger: Ledger, swallow: str) -> None:
    order = engine.order(swallow, calls="explicit")
    made: list[str] = []

    async def charge() -> None:
        made.append("b")

    def body(context: guard.GuardContext) -> str:
        context.call("a", made.append, "a")
        context.stop()  # Airflow wants the task gone: no further call may start
        if swallow == "pool":
            with ThreadPoolExecutor(1) as pool:
                pool.submit(context.call, "b", made.append, "b")
        else:

            async def charge_the_rest() -> None:
                await asyncio.gather(context.acall("b", charge), return_exceptions=True)

            asyncio.run(charge_the_rest())
        return "all charged"

    assert isinstance(run(ledger, order, body), guard.Ended)
    assert (made, state_of(ledger, order)) == (["a"], State.PENDING)


def test_p03_a_body_that_lives_may_still_send_so_it_is_too_early_to_say_that_it_did_not(
    ledger: Ledger, sql: psycopg.Connection[Any]
) -> None:
    held = enter(ledger, engine.order("long"))
    books.long_ago(sql, held.claim.record_id)
    held.write()  # a sign of life
    assert ledger.release(held.claim.record_id, **WORDS) == "ok"
    assert ledger.resolve(held.claim.record_id, "did_not_happen", **WORDS) == "too_early"


def test_p03_work_that_has_not_ended_is_not_done(ledger: Ledger) -> None:
    order, gate, made = engine.order("later", calls="explicit"), threading.Event(), []

    def charge() -> None:
        gate.wait(30)
        made.append("charged")

    with ThreadPoolExecutor(1) as pool:
        ended = run(ledger, order, lambda context: context.call("charge", pool.submit, charge))
        gate.set()
    assert isinstance(ended, guard.Ended)
    assert (made, state_of(ledger, order)) == (["charged"], State.IN_DOUBT)


def test_p03_a_generator_is_no_call(ledger: Ledger) -> None:
    order = engine.order("lazy", calls="explicit")

    def charge() -> Any:
        yield "never reached"

    assert isinstance(run(ledger, order, lambda context: context.call("charge", charge)), guard.Ended)
    assert state_of(ledger, order) is State.FAILED


def test_p03_a_late_applied_of_the_generation_before_stops_the_new_one(
    ledger: Ledger, sql: psycopg.Connection[Any]
) -> None:
    """A is frozen; "it did not happen"; B is declined; a person reopens, since nothing happened; A wakes: it did."""
    order = engine.order("reopened")
    frozen = enter(ledger, order)
    books.expire(sql, frozen.claim.record_id)
    assert ledger.claim(order, engine.holder()).verdict is Verdict.IN_DOUBT
    assert ledger.resolve(frozen.claim.record_id, "did_not_happen", force=True, **WORDS) == "ok"
    enter(ledger, order).settle(State.FAILED, books.DECLINED)
    assert ledger.reopen(frozen.claim.record_id, seen_generation=1, **WORDS) == "ok"
    frozen.settle(State.DONE)
    assert state_of(ledger, order) is State.IN_DOUBT


# -- lost time, names, orders and repairs ------------------------------------------------------------------------------

FUTURE = {"run_at": datetime.now(UTC) + timedelta(days=1)}


def lose_time(ledger: Ledger) -> None:
    ledger.lose("a test")
    ledger.acknowledge_restore(lost_since=datetime.now(UTC) - timedelta(hours=1), **WORDS)


def sweep(ledger: Ledger, sql: Sql, held: books.Held) -> None:
    books.expire(sql, held.id)
    ledger.sweep("caretaker")


def open_gate(ledger: Ledger, sql: Sql, held: books.Held) -> None:
    held.settle(State.PAUSED, books.QUOTA)
    ledger.open_gate("stripe", rate=1000.0, **WORDS)


def resume(ledger: Ledger, sql: Sql, held: books.Held) -> None:
    held.settle(State.PAUSED, books.QUOTA)
    ledger.resume_now(held.id, **WORDS)


def submitted(ledger: Ledger, sql: Sql, held: books.Held) -> None:
    assert held.intent("train") == "run"
    grant = books.Grant(held.order.identity, held.id, held.claim.generation, held.claim.fence)
    assert ledger.remember(grant, held.holder, "train", "job-1", submitted=True) == "ok"
    sweep(ledger, sql, held)


def answered_call_by_call(ledger: Ledger, sql: Sql, held: books.Held) -> None:
    assert held.intent("charge") == "run"
    sweep(ledger, sql, held)
    assert ledger.resolve(held.id, "happened", call="charge", result=b"1", **WORDS) == "ok"


@pytest.mark.parametrize("touch", [sweep, open_gate, resume, submitted, answered_call_by_call])
def test_p14_touching_a_line_does_not_make_it_known_again_after_lost_time(
    ledger: Ledger, sql: Sql, touch: Callable[[Ledger, Sql, books.Held], None]
) -> None:
    order = engine.order("touched", calls="explicit", gate="stripe", **FUTURE)
    held = enter(ledger, order)
    if touch in (open_gate, resume):
        touch(ledger, sql, held)  # as the backup has it
        ledger.lose("a test")
        ledger.acknowledge_restore(lost_since=datetime.now(UTC) - timedelta(hours=1), **WORDS)
        ledger.set_rate("stripe", rate=1000.0, default=5.0, **WORDS)
        ledger.resume_now(held.id, **WORDS)
    else:
        lose_time(ledger)
        touch(ledger, sql, held)
    assert ledger.claim(order, engine.holder()).verdict is Verdict.IN_DOUBT
    record = ledger.get(order.identity)
    assert record is not None
    assert (record.state, record.broken) == (State.IN_DOUBT, "")
    assert ledger.resolve(held.id, "did_not_happen", force=True, **WORDS) == "ok"
    assert ledger.claim(order, engine.holder()).verdict is Verdict.RUN


def test_p14_a_batch_that_was_done_before_the_lost_time_waits_for_a_person_and_then_calls_what_is_new(
    ledger: Ledger,
) -> None:
    pay = batches.Counting()
    assert isinstance(batches.run(ledger, batches.invoices("a"), pay), guard.Done)
    lose_time(ledger)
    record = batches.record(ledger)
    assert ledger.accept_payload(record.id, **WORDS) == "ok"
    grown = batches.invoices("a", "b")
    assert isinstance(batches.run(ledger, grown, pay, work={"reconcile": lambda doubt: None}), guard.InDoubt)
    assert batches.record(ledger).state is State.IN_DOUBT
    assert ledger.resolve(record.id, "did_not_happen", **WORDS) == "ok"
    assert isinstance(batches.run(ledger, grown, pay), guard.Done)
    assert pay.calls == ["a", "b"]


@pytest.mark.parametrize("what", ["freeze", "lost time"])
def test_p12_p14_a_claim_that_waited_for_the_line_looks_again_at_what_forbids_it(
    ledger: Ledger, sql: Sql, ledger_url: str, what: str
) -> None:
    order = engine.order("waits", **FUTURE)
    held = enter(ledger, order)
    held.settle(State.PENDING, books.NEVER_SENT)
    with psycopg.connect(ledger_url) as blocker, closing(engine.open_ledger(ledger_url)) as other:
        blocker.execute("select from runguard.record where id = %s for update", [held.id])
        with ThreadPoolExecutor(1) as pool:
            claim = pool.submit(other.claim, order, engine.holder())
            waits = "select from pg_stat_activity where wait_event_type = 'Lock' and datname = current_database()"
            books.wait_until(lambda: sql.execute(waits).fetchone() is not None, "the claim waits for the line")
            if what == "freeze":
                ledger.freeze("all", **WORDS)
            else:
                lose_time(ledger)
            blocker.rollback()
            assert claim.result(30).verdict is (Verdict.FROZEN if what == "freeze" else Verdict.IN_DOUBT)


def test_p03_what_is_unknown_keeps_the_name_that_its_vendor_key_was_made_from(ledger: Ledger, sql: Sql) -> None:
    pay = batches.Counting(a=TimeoutError("no answer"))
    what = batches.order("old", on_doubt="replay")
    assert isinstance(batches.run(ledger, batches.invoices("a", "b"), pay, what=what, allow_partial=True), guard.Done)
    record = batches.record(ledger, what)
    assert ledger.rename(record.id, namespace="billing", key="new", **WORDS) == "under_way"


@pytest.mark.parametrize("on_doubt", ["replay", "reconcile"])
def test_p03_a_late_outcome_after_a_rename_is_looked_up_under_the_old_name_and_not_repeated_under_the_new_one(
    ledger: Ledger, sql: Sql, on_doubt: str
) -> None:
    order = engine.order("old name", calls="explicit", on_doubt=on_doubt)
    held = enter(ledger, order)
    assert held.intent("charge") == "run"
    sent_under = vendor_key(ledger.installation, order.identity, "charge", 1, 1)
    sweep(ledger, sql, held)
    assert ledger.resolve(held.id, "did_not_happen", force=True, **WORDS) == "ok"
    assert ledger.rename(held.id, namespace="billing", key="new name", **WORDS) == "ok"
    held.outcome("charge")
    renamed = engine.order("new name", calls="explicit", on_doubt=on_doubt)
    assert state_of(ledger, renamed) is State.IN_DOUBT
    record = ledger.get(renamed.identity)
    assert record is not None
    assert [doubt.vendor_key for doubt in doubts(ledger, record)] == [sent_under]
    assert ledger.claim(renamed, engine.holder()).verdict is Verdict.IN_DOUBT
    assert ledger.resolve(held.id, "did_not_happen", force=True, **WORDS) == "ok"
    again = enter(ledger, renamed).write(intents=[("charge", "{}")]).intents["charge"]
    assert (again.verdict, again.attempt) == ("run", 2)


def test_p03_what_was_refused_for_good_and_then_reported_as_applied_is_not_repeated_under_its_next_key(
    ledger: Ledger, sql: Sql
) -> None:
    order = engine.order("refused", calls="explicit", on_doubt="replay")
    held = enter(ledger, order)
    assert held.intent("charge") == "run"
    sweep(ledger, sql, held)
    assert ledger.resolve(held.id, "did_not_happen", force=True, **WORDS) == "ok"
    second = enter(ledger, order)
    assert second.intent("charge") == "run"
    second.outcome("charge", dataclasses.replace(books.DECLINED, final=True))
    second.settle(State.FAILED, books.DECLINED)
    held.outcome("charge")
    assert ledger.claim(order, engine.holder()).verdict is Verdict.IN_DOUBT


def test_p13_a_new_order_or_payload_passes_over_nothing_that_may_have_happened(ledger: Ledger, sql: Sql) -> None:
    order = engine.order("jobs", calls="explicit", max_pauses=1)
    held = enter(ledger, order)
    assert held.intent("train") == "run"
    grant = books.Grant(order.identity, held.id, held.claim.generation, held.claim.fence)
    assert ledger.remember(grant, held.holder, "train", "job-1", submitted=True) == "ok"
    held.outcome("train", books.QUOTA)
    held.settle(State.PAUSED, books.QUOTA)  # a 429 while polling: the job goes on
    assert ledger.accept_payload(held.id, **WORDS) == "partly_done"
    assert ledger.bypass(order.identity, result=None, reference=None, **WORDS) == "paused"
    books.come_due(sql, held.id)
    recut = ledger.claim(engine.order("jobs"), engine.holder())
    assert (recut.verdict, recut.reason) == (Verdict.REFUSED, "calls")
    again = enter(ledger, order)
    again.settle(State.FAILED, books.DECLINED)
    assert ledger.reopen(held.id, seen_generation=1, **WORDS) == "applied"


def test_p13_reopening_is_refused_where_the_record_moved_since_it_was_seen(ledger: Ledger) -> None:
    order = engine.order("seen")
    held = enter(ledger, order)
    held.settle(State.FAILED, books.DECLINED)
    enter(ledger, order).settle(State.DONE)
    said = ledger.reopen(held.id, seen_generation=1, seen_fence=1, again_although_applied=True, **WORDS)
    assert said == "moved"


def test_p08_a_line_that_was_repaired_while_its_calls_were_open_takes_their_outcomes(ledger: Ledger, sql: Sql) -> None:
    held = enter(ledger, engine.order("repaired", calls="explicit"))
    assert [held.intent(call) for call in ("a", "b")] == ["run", "run"]
    sql.execute("update runguard.record set digest = 'x' where id = %s", [held.id])
    row = sql.execute("select encode(sha256(convert_to(r::text, 'UTF8')), 'hex') from runguard.record r").fetchone()
    assert row is not None
    assert ledger.repair(held.id, seen=row[0], state="in_doubt", **WORDS) == "ok"
    held.outcome("a")
    held.outcome("b")
    assert [call.state for call in ledger.calls(held.id)] == ["done", "done"]
    assert state_of(ledger, held.order) is State.PENDING


def test_p10_a_batch_of_a_series_is_entered_again_after_it_was_done(ledger: Ledger) -> None:
    place = Place(series="payout", place="001", expected="")
    order = batches.order("payout/1", place=place)
    pay = batches.Counting()
    for listed in ("a", "ab"):
        assert isinstance(batches.run(ledger, batches.invoices(*listed), pay, what=order), guard.Done)
    assert pay.calls == ["a", "b"]
    after = engine.order("payout/2", place=Place(series="payout", place="002", expected="001"))
    assert ledger.claim(after, engine.holder()).verdict is Verdict.RUN


# -- what a look-up, a form or a holder may not speak of ---------------------------------------------------------------


def test_p03_a_look_up_does_not_settle_a_doubt_that_came_after_it(ledger: Ledger, sql: Sql) -> None:
    """Two look-ups at once; between their answers the stale holder reports that it was applied."""
    order = engine.order("two look-ups", calls="explicit", on_doubt="reconcile")
    held = enter(ledger, order)
    assert held.intent("charge") == "run"
    sweep(ledger, sql, held)
    books.long_ago(sql, held.id)
    record = ledger.get(order.identity)
    assert record is not None

    def slow(_: Any) -> NotApplied:
        assert ledger.resolve(held.id, "did_not_happen", **WORDS) == "ok"
        held.outcome("charge")
        return NotApplied("nothing under its key")

    (finding,) = settle(ledger, record, slow, lambda value: Result(b"1"), skip=set())
    assert finding.word == "moved"
    assert state_of(ledger, order) is State.IN_DOUBT


def test_p03_a_batch_does_not_book_an_old_look_over_a_late_applied(ledger: Ledger, sql: Sql) -> None:
    what = batches.order("old look", on_doubt="reconcile")
    pay = batches.Counting(a=TimeoutError("no answer"))
    assert isinstance(batches.run(ledger, batches.invoices("a"), pay, what=what), guard.InDoubt)
    call = batches.items(ledger, what)["a"]
    said = Items(ledger).resolve(
        batches.record(ledger, what).id,
        "did_not_happen",
        Selection(names=("a",)),
        force=True,
        known_by=call.first_unknown_at - timedelta(seconds=1) if call.first_unknown_at else None,
        **WORDS,
    )
    assert said.verdict == "no_such_call"
    assert batches.states(ledger, what) == {"a": "in_doubt"}


def test_p05_a_late_applied_of_an_earlier_generation_is_doubt_also_of_a_call_that_this_one_has_not_begun(
    ledger: Ledger, sql: Sql
) -> None:
    order = engine.order("two generations", calls="explicit")
    held = enter(ledger, order)
    assert held.intent("a") == "run"
    sweep(ledger, sql, held)
    assert ledger.resolve(held.id, "did_not_happen", force=True, **WORDS) == "ok"
    enter(ledger, order).settle(State.FAILED, books.DECLINED)
    assert ledger.reopen(held.id, seen_generation=1, **WORDS) == "ok"
    second = enter(ledger, order)
    assert second.intent("b") == "run"
    sweep(ledger, sql, second)
    held.outcome("a")
    assert ledger.resolve(held.id, "happened", call="b", result=b"1", **WORDS) == "ok"
    assert state_of(ledger, order) is State.IN_DOUBT
    assert {call.name: call.state for call in ledger.calls(held.id) if call.generation == 2}["a"] == "in_doubt"


def test_p08_a_repaired_line_is_too_early_to_deny_while_its_call_may_arrive(ledger: Ledger, sql: Sql) -> None:
    held = enter(ledger, engine.order("repaired early", calls="explicit"))
    assert held.intent("a") == "run"
    with sql.transaction():
        sql.execute("set local session_replication_role = replica")  # damage, which no trigger sees
        sql.execute("update runguard.record set digest = 'x', no_later_than = null where id = %s", [held.id])
    row = sql.execute("select encode(sha256(convert_to(r::text, 'UTF8')), 'hex') from runguard.record r").fetchone()
    assert row is not None
    assert ledger.repair(held.id, seen=row[0], state="in_doubt", **WORDS) == "ok"
    assert ledger.resolve(held.id, "did_not_happen", call="a", **WORDS) == "too_early"


@pytest.mark.parametrize("asked", ["before the lost time", "before the doubt"])
def test_p14_a_form_of_before_the_lost_time_is_no_word_about_it(ledger: Ledger, asked: str) -> None:
    order = engine.order("old form", calls="explicit", **FUTURE)
    held = enter(ledger, order)
    held.settle(State.PENDING)
    form = human.Asked(held.claim.fence, ledger.check()["now"])
    lose_time(ledger)
    if asked == "before the doubt":
        form = dataclasses.replace(form, at=ledger.check()["now"])
    assert ledger.claim(order, engine.holder()).verdict is Verdict.IN_DOUBT
    record = ledger.get(order.identity)
    assert record is not None
    said = human.apply(ledger, record, human.Answer("did_not_happen", "person:ann", "seen"), form)
    assert said == (human.ANEW if asked == "before the doubt" else "the ledger lost time after the form was made")
    assert ledger.claim(order, engine.holder()).verdict is Verdict.IN_DOUBT


def test_p03_an_item_whose_call_outlasts_its_time_may_arrive_as_long_as_its_holder_lived(
    ledger: Ledger, ledger_url: str
) -> None:
    """The client repeats by itself, so that its last request leaves late; the holder lives and renews all the time.
    What is looked for before that one can have arrived, and not found, proves nothing."""
    what = batches.order(on_doubt="reconcile", max_call_time=1.0, lease=0.6)

    def renewed() -> bool:
        with closing(engine.open_ledger(ledger_url)) as watching:
            line, now = batches.record(watching, what), watching.check()["now"]
            return batches.items(watching, what)["a"].no_later_than < now < line.no_later_than

    def outlasting() -> Any:
        until(renewed)
        raise TimeoutError("read timed out")

    pay = batches.Counting(a=outlasting)
    looked = {"reconcile": lambda doubt: NotApplied("the vendor has none")}
    assert isinstance(batches.run(ledger, batches.invoices("a"), pay, what=what, work=looked), guard.InDoubt)
    left = batches.items(ledger, what)["a"].no_later_than
    assert isinstance(batches.run(ledger, batches.invoices("a"), pay, what=what, work=looked), guard.InDoubt)
    assert pay.calls == ["a"]
    until(lambda: ledger.check()["now"] > left)
    again = batches.Counting()
    assert isinstance(batches.run(ledger, batches.invoices("a"), again, what=what, work=looked), guard.Done)
    assert again.calls == ["a"]
