"""What is known of a call is booked, whatever stands in the way meanwhile (P4), and is not forgotten (P3)."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any

import psycopg
import pytest

from airflow_runguard.core import guard
from airflow_runguard.core.batch import Pause
from airflow_runguard.core.errors import NotApplied, PlanningError
from airflow_runguard.core.leases import Leases
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Outcome, Result, State, Verdict, Witness
from airflow_runguard.core.resp import Redis
from airflow_runguard.core.writer import Writer
from tests.core import batches, books, engine
from tests.core.books import bring, enter, state_of

SQL = psycopg.Connection[Any]
TRIES_AGAIN = "Trying again until it answers"


@contextmanager
def once_it_says(words: str, act: Callable[[], object]) -> Iterator[list[str]]:
    """Do something when the guard logs these words for the first time; all that it logged so."""
    heard: list[str] = []

    class Heard(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if words in record.getMessage():
                heard.append(record.getMessage())
                if len(heard) == 1:
                    act()

    handler, log = Heard(), logging.getLogger("airflow_runguard")
    log.addHandler(handler)
    try:
        yield heard
    finally:
        log.removeHandler(handler)


@pytest.mark.parametrize("calls", ["explicit", "body"])
def test_p04_an_outcome_outlasts_a_ledger_that_may_not_be_used_for_a_while(
    ledger: Ledger, sql: SQL, calls: str
) -> None:
    """A grant is taken back, or a function is away, while a call is under way; then it is there again."""
    order = engine.order(calls, calls=calls)

    def charge() -> str:
        sql.execute("alter function runguard.write rename to written; alter function runguard.settle_body rename to s")
        return "ch_1"

    def mended() -> None:
        sql.execute("alter function runguard.written rename to write; alter function runguard.s rename to settle_body")

    bodies: dict[str, Callable[[guard.GuardContext], str]] = {
        "explicit": lambda context: context.call("charge", charge),
        "body": lambda _: charge(),
    }
    with once_it_says(TRIES_AGAIN, mended) as heard:
        how = guard.run(ledger, Leases(None, ledger.installation), engine.work(order, bodies[calls]))
    assert how == guard.Done("ch_1", replayed=False)
    assert state_of(ledger, order) is State.DONE
    assert heard
    assert not any("No call was made" in words for words in heard)


def test_p04_an_outcome_outlasts_whoever_keeps_the_connections(ledger_url: str, ledger: Ledger, sql: SQL) -> None:
    """Airflow's metadata is on the same server as the ledger: both are away, and the Connection with them."""
    away = False

    def connect() -> SQL:
        if away:
            raise PlanningError("The Connection is not defined (or Airflow's API server did not answer).")
        return psycopg.connect(ledger_url, application_name="worker")

    def charge() -> str:
        nonlocal away
        away = True
        sql.execute("select pg_terminate_backend(pid, 60000) from pg_stat_activity where application_name = 'worker'")
        return "ch_1"

    def back() -> None:
        nonlocal away
        away = False

    order = engine.order("k", calls="explicit")
    with closing(Ledger(connect, deployment=engine.DEPLOYMENT)) as worker, once_it_says(TRIES_AGAIN, back) as heard:
        worker.check()
        work = engine.work(order, lambda context: context.call("charge", charge))
        assert guard.run(worker, Leases(None, worker.installation), work) == guard.Done("ch_1", replayed=False)
    assert heard
    assert state_of(ledger, order) is State.DONE
    away = True
    with pytest.raises(PlanningError):  # the first time it is what it says
        Ledger(connect, deployment=engine.DEPLOYMENT).check()


def test_p04_an_intent_that_cannot_be_written_tears_no_outcome(ledger: Ledger) -> None:
    """Both are in one group; a text that is none (half of a surrogate pair) is refused before it is sent."""
    order, holder, gate = engine.order("k", calls="explicit"), engine.holder(), threading.Event()
    with closing(Writer(ledger, order, holder)) as writer:
        writer.claim()
        assert writer.intent("charge", "{}").result().verdict == "run"
        held_up = writer.do(lambda: gate.wait(60))
        booked = writer.outcome(Outcome("charge", result=Result(b'"ch_1"')))
        refused = writer.intent("half a \ud800", "{}")
        gate.set()
        assert held_up.result()
        assert booked.result().verdict == "ok"
        with pytest.raises(UnicodeEncodeError):
            refused.result()
    record = ledger.get(order.identity)
    assert record is not None
    assert [(call.name, str(call.state)) for call in ledger.calls(record.id)] == [("charge", "done")]


def test_p04_an_outcome_whose_words_cannot_be_sent_is_booked_without_them(ledger_url: str, ledger: Ledger) -> None:
    """The worker's environment says PGCLIENTENCODING=latin1, and the vendor says "5 €"."""

    def declined() -> None:
        raise NotApplied("declined: 5 €")

    for calls in ("explicit", "body"):
        order = engine.order(calls, calls=calls)
        bodies = {"explicit": lambda context: context.call("charge", declined), "body": lambda _: declined()}
        with closing(
            Ledger(lambda: psycopg.connect(ledger_url, client_encoding="latin1"), deployment=engine.DEPLOYMENT)
        ) as worker:
            worker.check()
            guard.run(worker, Leases(None, worker.installation), engine.work(order, bodies[calls]))
        record = ledger.get(order.identity)
        assert record is not None
        assert record.state is State.FAILED
        assert [str(call.state) for call in ledger.calls(record.id)] == ["failed"]


def test_p06_a_pause_without_end_is_a_pause(ledger: Ledger) -> None:
    for seconds in (float("inf"), float("nan"), 1e300):
        what = batches.order(str(seconds))
        batches.run(ledger, batches.invoices(1), lambda *_, seconds=seconds: Pause(seconds), what=what)
        assert batches.states(ledger, what) == {"1": "paused"}


# -- the database's clock is put back ----------------------------------------------------------------------------------


def put_the_clock_back(sql: SQL, record_id: int) -> None:
    """By an hour: all that is booked so far is of a later time than now."""
    times = {
        "record": ("claimed_at", "lease_until", "hold_until", "first_intent_at", "first_unknown_at", "known_since"),
        "call": ("intent_at", "first_intent_at", "first_unknown_at", "outcome_at"),
    }
    with sql.transaction():
        sql.execute("select runguard.open_for_writing()")
        for table, columns in times.items():
            changes = ", ".join(f"{column} = {column} + interval '1 hour'" for column in columns)
            name = "id" if table == "record" else "record_id"
            sql.execute(f"update runguard.{table} set {changes} where {name} = %s", [record_id])


def test_p03_a_doubt_is_not_forgotten_because_the_clock_was_put_back(ledger: Ledger, sql: SQL) -> None:
    """Charged, no answer; sent again under its own key, declined: that speaks for the second attempt alone, and the
    next one would go out under another key."""
    order = engine.order("k", on_doubt="replay")
    held = bring(ledger, State.IN_DOUBT, order)
    put_the_clock_back(sql, held.id)
    assert enter(ledger, order).settle(State.FAILED, books.DECLINED).state is State.IN_DOUBT


def test_p03_a_body_that_was_begun_before_is_known_as_such_although_the_clock_was_put_back(
    ledger: Ledger, sql: SQL
) -> None:
    """Else it would begin anew, with what it has sent already."""
    order, holder = engine.order("k"), engine.holder()
    held = enter(ledger, order, holder)
    assert not held.claim.reentered
    held.write(hand_over=600.0)
    put_the_clock_back(sql, held.id)
    back = engine.holder(ti_id=holder.ti_id)
    for _ in range(2):  # also where the answer was lost, and it is asked again
        claim = ledger.claim(order, back)
        assert (claim.verdict, claim.reentered) == (Verdict.RUN, True)


# -- the witness -------------------------------------------------------------------------------------------------------


def test_p14_who_leaves_late_does_not_make_the_witness_forget(redis_url: str, ledger: Ledger) -> None:
    """A slept since event 9, which is the last it knows of; meanwhile others wrote up to event 10."""
    with closing(Redis.from_url(redis_url)) as client:
        leases, identity = Leases(client, ledger.installation), engine.identity("k")
        newest = Witness(2, 10, "b")
        for witness in (Witness(1, 50, "older epoch"), newest, Witness(2, 9, "a"), Witness(1, 60, "a")):
            leases.release(identity, "token", witness)
        assert leases.witness() == newest
        leases.release(identity, "token", Witness(2, 100, "c"))
        assert leases.witness() == Witness(2, 100, "c")
