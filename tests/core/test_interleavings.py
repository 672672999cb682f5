"""Takeover against intent (P1, P3, P5): two sessions held open, one of them seen to wait for the other; then a soak.

The sessions use the ledger's own statements inside transactions that the test begins and ends, so that each order of
events in which one could overtake the other is played exactly once.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import psycopg
import pytest

from airflow_runguard.core.items import Items, Selection
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Claim, Grant, Order, State, Verdict, Written
from tests.core import books, engine
from tests.core.books import Held, bring, enter, kinds, state_of

T = TypeVar("T")
SQL = psycopg.Connection[Any]


@dataclass
class Session:
    """A ledger whose transaction the test holds open."""

    connection: SQL
    ledger: Ledger
    watch: SQL
    pool: ThreadPoolExecutor

    def begin(self) -> None:
        self.connection.execute("begin")

    def commit(self) -> None:
        self.connection.execute("commit")

    def roll_back(self) -> None:
        self.connection.execute("rollback")

    def waits(self, act: Callable[[], T]) -> Future[T]:
        """Begin something that cannot end before the other session does; seen to wait when this returns."""
        future = self.pool.submit(act)
        pid = self.connection.info.backend_pid
        blocked = "select cardinality(pg_blocking_pids(%s)) > 0"
        books.wait_until(lambda: self.watch.execute(blocked, [pid]).fetchone() == (True,), "the second session to wait")
        assert not future.done()
        return future


@pytest.fixture
def sessions(ledger_url: str, sql: SQL) -> Iterator[tuple[Session, Session]]:
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(1))
        made = []
        for _ in range(2):
            connection = stack.enter_context(closing(psycopg.connect(ledger_url)))
            made.append(Session(connection, engine.ledger_on(connection), sql, pool))
        yield made[0], made[1]


ORDER = engine.order("race", calls="explicit")


@pytest.fixture
def frozen(ledger: Ledger, sql: SQL) -> Held:
    """A holder that called nothing yet and whose lease has run out."""
    held = enter(ledger, ORDER)
    books.expire(sql, held.id)
    return held


def claimed(session: Session, order: Order = ORDER) -> Claim:
    return session.ledger.claim(order, engine.holder())


# -- takeover against intent ------------------------------------------------------------------------------------------


def test_p05_an_intent_that_commits_first_turns_the_waiting_takeover_away(
    sessions: tuple[Session, Session], frozen: Held, sql: SQL
) -> None:
    a, b = sessions
    a.begin()
    assert frozen.intent("charge", a.ledger) == "run"
    takeover = b.waits(lambda: claimed(b))
    a.commit()
    assert takeover.result(books.DEADLINE).verdict is Verdict.BUSY  # the intent renewed the lease
    books.expire(sql, frozen.id)
    assert claimed(b).verdict is Verdict.IN_DOUBT


def test_p05_an_intent_that_is_rolled_back_lets_the_waiting_takeover_in(
    sessions: tuple[Session, Session], frozen: Held
) -> None:
    a, b = sessions
    a.begin()
    frozen.intent("charge", a.ledger)
    takeover = b.waits(lambda: claimed(b))
    a.roll_back()
    assert takeover.result(books.DEADLINE).verdict is Verdict.RUN
    assert frozen.intent("charge", a.ledger) == "lost"


def test_p05_a_takeover_that_commits_first_refuses_the_waiting_intent(
    sessions: tuple[Session, Session], frozen: Held
) -> None:
    a, b = sessions
    b.begin()
    assert claimed(b).verdict is Verdict.RUN
    intent = a.waits(lambda: frozen.intent("charge", a.ledger))
    b.commit()
    assert intent.result(books.DEADLINE) == "lost"


def test_p05_a_takeover_that_is_rolled_back_grants_the_waiting_intent(
    sessions: tuple[Session, Session], frozen: Held
) -> None:
    a, b = sessions
    b.begin()
    claimed(b)
    intent = a.waits(lambda: frozen.intent("charge", a.ledger))
    b.roll_back()
    assert intent.result(books.DEADLINE) == "run"


# -- a question against a report -----------------------------------------------------------------------------------


@pytest.mark.parametrize("call_is", ["in doubt", "open"])
def test_p03_a_question_waits_for_a_report_that_is_being_written_so_that_its_answer_knows_of_it(
    sessions: tuple[Session, Session], ledger: Ledger, sql: SQL, call_is: str
) -> None:
    """A stale holder reports that it was applied while the record is asked about. Whoever is asked before the report is
    committed would not be told of it; an answer that is given as of that moment would deny it."""
    a, b = sessions
    stale = enter(a.ledger, ORDER)
    stale.intent("charge")
    books.expire(sql, stale.id)
    ledger.sweep("sweep")
    words = {"actor": "ann", "reason": "not in their books"}
    assert ledger.resolve(stale.id, "did_not_happen", force=True, **words) == "ok"
    second = enter(ledger, ORDER)
    second.intent("charge")
    if call_is == "in doubt":
        second.outcome("charge", books.UNKNOWN)
    second.settle(State.IN_DOUBT, books.UNKNOWN)
    before = ledger.time_of_question(ORDER.identity)
    a.begin()
    stale.outcome("charge")
    asking = b.waits(lambda: b.ledger.time_of_question(ORDER.identity))
    a.commit()
    at = asking.result(books.DEADLINE)
    (call,) = ledger.calls(stale.id)
    assert call.first_unknown_at is not None
    assert before < call.first_unknown_at < at
    denied = partial(ledger.resolve, stale.id, "did_not_happen", force=True, **words)
    assert (denied(known_by=before), denied(known_by=at)) == ("moved", "ok")


# -- what else may meet -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("ending", "verdict"), [("commit", Verdict.BUSY), ("roll_back", Verdict.RUN)])
def test_p01_two_first_claims_meet_at_the_key(sessions: tuple[Session, Session], ending: str, verdict: Verdict) -> None:
    a, b = sessions
    a.begin()
    assert claimed(a).verdict is Verdict.RUN
    second = b.waits(lambda: claimed(b))
    getattr(a, ending)()
    assert second.result(books.DEADLINE).verdict is verdict


def test_p05_a_renewal_that_commits_first_turns_the_waiting_takeover_away(
    sessions: tuple[Session, Session], frozen: Held
) -> None:
    a, b = sessions
    a.begin()
    frozen.write(a.ledger)
    takeover = b.waits(lambda: claimed(b))
    a.commit()
    assert takeover.result(books.DEADLINE).verdict is Verdict.BUSY


def test_p02_an_outcome_that_commits_first_is_replayed_to_the_waiting_claim(
    sessions: tuple[Session, Session], ledger: Ledger, sql: SQL
) -> None:
    a, b = sessions
    held = enter(a.ledger, engine.order("slow"))
    books.expire(sql, held.id)
    a.begin()
    held.settle(State.DONE)
    takeover = b.waits(lambda: claimed(b, held.order))
    a.commit()
    assert takeover.result(books.DEADLINE).verdict is Verdict.REPLAY


def test_p03_a_waiting_outcome_settles_the_doubt_that_came_first(
    sessions: tuple[Session, Session], ledger: Ledger, sql: SQL
) -> None:
    a, b = sessions
    held = enter(a.ledger, engine.order("slow"))
    books.expire(sql, held.id)
    b.begin()
    assert claimed(b, held.order).verdict is Verdict.IN_DOUBT
    settled: Future[Written] = a.waits(lambda: held.settle(State.DONE))
    b.commit()
    assert settled.result(books.DEADLINE).state is State.DONE
    assert claimed(b, held.order).verdict is Verdict.REPLAY


def test_p03_an_outcome_that_waits_for_a_person_who_says_otherwise_brings_the_doubt_back(
    sessions: tuple[Session, Session], ledger: Ledger, sql: SQL
) -> None:
    a, b = sessions
    held = enter(a.ledger, engine.order("slow"))
    books.expire(sql, held.id)
    claimed(b, held.order)
    b.begin()
    words = {"actor": "ann", "reason": "not in their books"}
    assert b.ledger.resolve(held.id, "did_not_happen", force=True, **words) == "ok"
    settled: Future[Written] = a.waits(lambda: held.settle(State.DONE))
    b.commit()
    assert settled.result(books.DEADLINE).verdict == "lost"
    assert state_of(ledger, held.order) is State.IN_DOUBT
    assert claimed(b, held.order).verdict is Verdict.IN_DOUBT
    assert kinds(ledger, held.id)[-3:] == ["resolved", "late_outcome", "in_doubt"]


def test_p05_a_late_applied_stops_the_running_later_holder_before_its_next_call(ledger: Ledger, sql: SQL) -> None:
    stale = enter(ledger, ORDER)
    stale.intent("charge")
    books.expire(sql, stale.id)
    ledger.claim(ORDER, engine.holder())
    ledger.resolve(stale.id, "did_not_happen", actor="ann", reason="not in their books", force=True)
    later = enter(ledger, ORDER)
    stale.outcome("charge")
    assert later.intent("charge") == "in_doubt"
    assert later.settle(State.PENDING).state is State.IN_DOUBT
    assert ledger.resolve(stale.id, "happened", call="charge", result=b"1", actor="ann", reason="found") == "ok"
    assert enter(ledger, ORDER).intent("charge") == "replay"


# -- a group of a batch, which one statement writes -------------------------------------------------------------------


def planned(ledger: Ledger, key: str, *names: str) -> Held:
    """A batch that holds its record, with these items to call."""
    held = enter(ledger, engine.order(key, calls="batch"))
    grant = Grant(held.order.identity, held.id, held.claim.generation, held.claim.fence)
    assert Items(ledger).begin(grant, held.holder)
    assert Items(ledger).plan(grant, held.holder, held.order, names, ["d" * 64] * len(names)).said is not None
    return held


def group(held: Held, ledger: Ledger | None = None, done: Sequence[str] = (), calls: Sequence[str] = ()) -> Written:
    return held.write(ledger, outcomes=[books.said(name) for name in done], intents=[(name, "{}") for name in calls])


def open_calls(ledger: Ledger, held: Held) -> tuple[int, str]:
    record = ledger.get(held.order.identity)
    assert record is not None
    return record.open_calls, record.broken


@pytest.mark.parametrize("before", [0, 1], ids=["first", "later"])
def test_p05_a_group_meets_a_takeover(sessions: tuple[Session, Session], ledger: Ledger, sql: SQL, before: int) -> None:
    a, b = sessions
    held = planned(ledger, f"group against takeover {before}", "1", "2", "3")
    done = ["1"][:before]
    group(held, calls=done)
    books.expire(sql, held.id)
    a.begin()
    assert group(held, a.ledger, done, ["2"]).intents["2"].verdict == "run"
    takeover = b.waits(lambda: b.ledger.claim(held.order, engine.holder()))
    a.commit()
    assert takeover.result(books.DEADLINE).verdict is Verdict.BUSY  # the group renewed the lease

    books.expire(sql, held.id)
    b.begin()
    assert b.ledger.claim(held.order, engine.holder()).verdict is Verdict.RUN
    waits = a.waits(lambda: group(held, a.ledger, ["2"], ["3"]))
    b.commit()
    written = waits.result(books.DEADLINE)
    assert (written.verdict, written.intents["3"].verdict) == ("lost", "lost")
    items = {call.name: call.state for call in Items(ledger).page(held.id, held.claim.generation)}
    assert items == {"1": "done" if before else "pending", "2": "done", "3": "pending"}  # its own caller's word counts


def test_p05_a_group_that_waited_for_another_change_of_the_row_counts_its_calls_rightly(
    sessions: tuple[Session, Session], ledger: Ledger
) -> None:
    a, b = sessions
    held = planned(ledger, "group after a change", "1", "2", "3")
    group(held, calls=["1"])
    b.begin()
    b.connection.execute("update runguard.record set progress = '{}' where id = %s", [held.id])
    waits = a.waits(lambda: group(held, a.ledger, ["1"], ["2", "3"]))
    b.commit()
    written = waits.result(books.DEADLINE)
    assert (written.verdict, {answer.verdict for answer in written.intents.values()}) == ("ok", {"run"})
    assert open_calls(ledger, held) == (2, "")


def test_p03_a_late_applied_that_commits_first_stops_its_item_in_the_waiting_group(
    sessions: tuple[Session, Session], ledger: Ledger, sql: SQL
) -> None:
    a, b = sessions
    stale = planned(ledger, "group after a late outcome", "1", "2")
    group(stale, calls=["1"])
    books.expire(sql, stale.id)
    ledger.sweep("sweep")
    by = {"actor": "ann", "reason": "asked"}
    chosen = Selection(names=("1",))
    assert Items(ledger).resolve(stale.id, "failed", chosen, force=True, **by).verdict == "ok"
    again = Items(ledger).reopen(stale.id, chosen, seen_generation=1, again_although_applied=True, **by)
    assert again.verdict == "ok"
    later = planned(ledger, "group after a late outcome", "1", "2")
    b.begin()
    assert group(stale, b.ledger, ["1"]).verdict == "lost"
    waits = a.waits(lambda: group(later, a.ledger, calls=["1", "2"]))
    b.commit()
    answers = waits.result(books.DEADLINE).intents
    assert (answers["1"].verdict, answers["2"].verdict) == ("in_doubt", "run")
    assert open_calls(ledger, later) == (1, "")


@pytest.mark.parametrize("ending", ["dies", "is released"])
def test_p05_a_late_applied_is_not_forgotten_when_the_later_holder_is_gone(
    ledger: Ledger, sql: SQL, ending: str
) -> None:
    stale = enter(ledger, ORDER)
    stale.intent("charge")
    books.expire(sql, stale.id)
    ledger.claim(ORDER, engine.holder())
    ledger.resolve(stale.id, "did_not_happen", actor="ann", reason="not in their books", force=True)
    enter(ledger, ORDER)
    stale.outcome("charge")
    if ending == "dies":
        books.expire(sql, stale.id)
        ledger.sweep("sweep")
    else:
        ledger.release(stale.id, actor="ann", reason="stuck")
    assert ledger.claim(ORDER, engine.holder()).verdict is Verdict.IN_DOUBT


@pytest.mark.parametrize("calls", ["body", "explicit"])
def test_p06_a_last_caller_that_was_told_to_wait_ends_the_doubt_as_a_pause(
    ledger: Ledger, sql: SQL, calls: str
) -> None:
    held = enter(ledger, engine.order("slow 429", calls=calls))
    name = "body" if calls == "body" else "charge"
    held.intent(name)
    books.expire(sql, held.id)
    assert ledger.claim(held.order, engine.holder()).verdict is Verdict.IN_DOUBT
    if calls == "body":
        assert held.settle(State.PAUSED, books.QUOTA).state is State.PAUSED
        assert ledger.claim(held.order, engine.holder()).verdict is Verdict.PAUSED
    else:
        assert held.outcome(name, books.QUOTA).state is State.PENDING
        assert enter(ledger, held.order).intent(name) == "paused"


# -- the soak ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seconds", [3, pytest.param(12, marks=pytest.mark.soak)])
def test_p01_no_key_has_two_granted_intents_whoever_freezes_or_dies(ledger_url: str, seconds: int) -> None:
    ends = time.monotonic() + seconds
    granted: Counter[str] = Counter()
    seen: Counter[str] = Counter()
    lock = threading.Lock()
    current = 0

    def work(seed: int) -> None:
        nonlocal current
        chance = random.Random(seed)
        with closing(engine.open_ledger(ledger_url)) as ledger:
            while time.monotonic() < ends:
                n = current
                what = engine.order(f"soak/{n}", calls="explicit", lease=0.02, max_claims=10_000)
                who = engine.holder()
                claim = ledger.claim(what, who)
                if claim.verdict in (Verdict.REPLAY, Verdict.IN_DOUBT):
                    with lock:
                        current = max(current, n + 1)
                if claim.verdict is not Verdict.RUN:
                    continue
                held = Held(ledger, what, claim, who)
                time.sleep(chance.choice([0, 0, 0.01, 0.03, 0.05]))  # the freeze before the intent
                said = held.intent("charge")
                with lock:
                    seen[said] += 1
                    granted[what.identity.key] += said == "run"
                if said == "run" and chance.random() < 0.5:  # else: it crashes after the call
                    held.outcome("charge")
                    held.settle(State.DONE)

    with ThreadPoolExecutor(10) as pool:
        list(pool.map(work, range(10)))
    assert {key: n for key, n in granted.items() if n > 1} == {}
    assert seen["run"] > 0
    assert seen["lost"] > 0, "no stale intent was tried, so nothing was shown"


def test_p12_a_freeze_is_in_force_although_another_is_thawed_in_the_same_moment(
    sessions: tuple[Session, Session], ledger: Ledger
) -> None:
    """Who thaws counts what is left; it must not overlook one that is being set, or claims do not look for it."""
    first, second = sessions
    words = {"actor": "ann", "reason": "an incident"}
    for begun, meanwhile in (("freeze", "thaw"), ("thaw", "freeze")):
        assert ledger.freeze("namespace", "elsewhere", **words) == "ok"
        acts: dict[str, Callable[[Ledger], str]] = {
            "freeze": lambda book: book.freeze("all", **words),
            "thaw": lambda book: book.thaw("namespace", "elsewhere", **words),
        }
        first.begin()
        assert acts[begun](first.ledger) == "ok"
        waiting = second.waits(lambda act=acts[meanwhile]: act(second.ledger))  # type: ignore[misc]
        first.commit()
        assert waiting.result(books.DEADLINE) == "ok"
        assert ledger.claim(engine.order(f"{begun} first"), engine.holder()).verdict is Verdict.FROZEN
        assert ledger.thaw("all", **words) == "ok"


def test_p03_a_stale_outcome_is_kept_once_however_often_it_is_sent(ledger: Ledger, sql: SQL) -> None:
    held = bring(ledger, State.IN_DOUBT, engine.order("late"))
    ledger.resolve(held.id, "did_not_happen", actor="ann", reason="looked", force=True)
    enter(ledger, held.order)
    for _ in range(3):
        assert held.settle(State.DONE).verdict == "lost"
    assert kinds(ledger, held.id).count("late_outcome") == 1
