"""What people say, racing with a holder's writes, with claims and sweeps, and with what other people say (P3, P5, P13).

Of each pair the first is held open in its transaction while the second begins in another session. Then both answers,
the record, its calls and its events must be those of one after the other, in one order or the other.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Claim, Failure, Order, Result, Settlement, State, Verdict, Written
from tests.core import engine
from tests.core.books import DECLINED, NEVER_SENT, QUOTA, UNKNOWN, Held, bring, come_due, enter, expire, said

SQL = psycopg.Connection[Any]
WORDS = {"actor": "ann", "reason": "looked it up"}
ANY = {"force": True, **WORDS}


# -- where it begins ---------------------------------------------------------------------------------------------------


def explicit(key: str, **rules: Any) -> Order:
    return engine.order(key, calls="explicit", **rules)


def called(ledger: Ledger, sql: SQL, key: str, **rules: Any) -> Held:
    held = enter(ledger, explicit(key, **rules))
    assert held.intent("pay") == "run"
    return held


def dead(held: Held, sql: SQL) -> Held:
    expire(sql, held.id)
    return held


def released(ledger: Ledger, held: Held, *answers: str) -> Held:
    """Taken from its holder, which may live; then a person says this of it."""
    assert ledger.release(held.id, **WORDS) == "ok"
    for answer in answers:
        assert ledger.resolve(held.id, answer, **ANY) == "ok"
    return held


def partly(ledger: Ledger, sql: SQL, key: str, failure: Failure | None, left: State) -> Held:
    held = called(ledger, sql, key)
    held.outcome("pay", failure)
    held.settle(left)
    return held


def kept(ledger: Ledger, sql: SQL, key: str) -> Held:
    """It waits for a quota in its place, and its time has come."""
    held = enter(ledger, engine.order(key))
    held.write(hand_over=600.0, told=QUOTA, error="429")
    come_due(sql, held.id)
    return held


def handed_over(ledger: Ledger, sql: SQL, key: str) -> Held:
    held = enter(ledger, engine.order(key))
    held.write(hand_over=600.0)
    return held


def paused(ledger: Ledger, sql: SQL, key: str) -> Held:
    held = bring(ledger, State.PAUSED, engine.order(key))
    come_due(sql, held.id)
    return held


BEGINNINGS: dict[str, Callable[[Ledger, SQL, str], Held]] = {
    "pending": lambda ledger, sql, key: bring(ledger, State.PENDING, engine.order(key)),
    "pending in part": lambda ledger, sql, key: partly(ledger, sql, key, None, State.PENDING),
    "a body runs": lambda ledger, sql, key: enter(ledger, engine.order(key)),
    "runs between calls": lambda ledger, sql, key: enter(ledger, explicit(key)),
    "runs in a call": called,
    "died in its body": lambda ledger, sql, key: dead(enter(ledger, engine.order(key)), sql),
    "died between calls": lambda ledger, sql, key: dead(enter(ledger, explicit(key)), sql),
    "died in a call": lambda ledger, sql, key: dead(called(ledger, sql, key), sql),
    "died, replays": lambda ledger, sql, key: dead(called(ledger, sql, key, on_doubt="replay"), sql),
    "in doubt": lambda ledger, sql, key: bring(ledger, State.IN_DOUBT, engine.order(key)),
    "a call in doubt": lambda ledger, sql, key: partly(ledger, sql, key, UNKNOWN, State.IN_DOUBT),
    "in doubt, its caller lives": lambda ledger, sql, key: released(ledger, called(ledger, sql, key)),
    "in doubt, its body lives": lambda ledger, sql, key: released(ledger, enter(ledger, engine.order(key))),
    "denied, its caller lives": lambda ledger, sql, key: released(ledger, called(ledger, sql, key), "did_not_happen"),
    "denied, its body lives": lambda ledger, sql, key: released(
        ledger, enter(ledger, engine.order(key)), "did_not_happen"
    ),
    "paused": paused,
    "declined": lambda ledger, sql, key: bring(ledger, State.FAILED, engine.order(key)),
    "left as failed": lambda ledger, sql, key: released(ledger, enter(ledger, engine.order(key)), "failed"),
    "done": lambda ledger, sql, key: bring(ledger, State.DONE, engine.order(key)),
    "keeps its place": kept,
    "kept its place and died": lambda ledger, sql, key: dead(kept(ledger, sql, key), sql),
    "handed over": handed_over,
}

# -- what is done ------------------------------------------------------------------------------------------------------


def outcome(held: Held, ledger: Ledger, failure: Failure | None, left: State | None = None) -> Written:
    settlement = left and Settlement(left, failure=failure, result=None if failure else Result(b'"ok"'))
    call = "body" if held.order.calls == "body" else "pay"
    return held.write(ledger, outcomes=[said(call, failure)], settlement=settlement)


def again(held: Held, ledger: Ledger, payload: dict[str, Any] | None = None, **who: Any) -> Claim:
    mine = held.order
    what = engine.order(mine.identity.key, payload, calls=mine.calls, on_doubt=mine.on_doubt)
    return ledger.claim(what, engine.holder(**who))


def intent(held: Held, ledger: Ledger) -> Written:
    return held.write(ledger, intents=[("pay", "{}")] if held.order.calls == "explicit" else [])


def named(held: Held) -> str:
    return f"{held.order.identity.key}, renamed"


def sweep(held: Held, ledger: Ledger) -> list[State]:
    return [state for found, state in ledger.sweep("sweep") if found == held.order.identity]


OTHERS: dict[str, Callable[[Held, Ledger], Any]] = {
    "done": lambda held, ledger: outcome(held, ledger, None, State.DONE),
    "left in doubt": lambda held, ledger: outcome(held, ledger, UNKNOWN, State.IN_DOUBT),
    "left unsent": lambda held, ledger: outcome(held, ledger, NEVER_SENT, State.PENDING),
    "applied": lambda held, ledger: outcome(held, ledger, None),
    "unknown": lambda held, ledger: outcome(held, ledger, UNKNOWN),
    "declined": lambda held, ledger: outcome(held, ledger, DECLINED),
    "intent": intent,
    "hand over": lambda held, ledger: held.write(ledger, hand_over=600.0),
    "claim": again,
    "re-entry": lambda held, ledger: again(held, ledger, ti_id=held.holder.ti_id),
    "other payload": lambda held, ledger: again(held, ledger, {"amount": 9}),
}
PEOPLE: dict[str, Callable[[Held, Ledger], Any]] = {
    "happened": lambda held, ledger: ledger.resolve(held.id, "happened", result=b'"p"', **ANY),
    "did not happen": lambda held, ledger: ledger.resolve(held.id, "did_not_happen", **ANY),
    "failed": lambda held, ledger: ledger.resolve(held.id, "failed", **ANY),
    "call happened": lambda held, ledger: ledger.resolve(held.id, "happened", call="pay", result=b'"p"', **ANY),
    "call did not": lambda held, ledger: ledger.resolve(held.id, "did_not_happen", call="pay", **ANY),
    "release": lambda held, ledger: ledger.release(held.id, **WORDS),
    "reopen": lambda held, ledger: ledger.reopen(held.id, seen_generation=1, **WORDS),
    "reopen although": lambda held, ledger: ledger.reopen(
        held.id, seen_generation=1, again_although_applied=True, **WORDS
    ),
    "rename": lambda held, ledger: ledger.rename(held.id, namespace="billing", key=named(held), **WORDS),
    "accept payload": lambda held, ledger: ledger.accept_payload(held.id, **WORDS),
    "by hand": lambda held, ledger: ledger.bypass(held.order.identity, result=b'"b"', reference=None, **WORDS),
    "resume": lambda held, ledger: ledger.resume_now(held.id, **WORDS),
    "give up": lambda held, ledger: ledger.give_up_asking(held.id, seen_fence=held.claim.fence, **WORDS),
    "sweep": sweep,
}
ALL = {**OTHERS, **PEOPLE}
PAIRS = [pair for pair in itertools.product(ALL, ALL) if not OTHERS.keys() >= set(pair)]

LINE = """
select r.state, r.effect, r.failure_class, r.needs_person, r.fence, r.generation, r.open_calls, r.late_applied,
       r.claims, r.pauses, r.handed_over, r.payload_accepted, r.completeness, r.result, r.renamed_to is null,
       r.lease_until is null, r.resume_at is null, r.first_intent_at is null, r.first_unknown_at is null,
       (select json_agg(json_build_array(c.generation, c.name, c.state, c.attempt, c.fence, c.effect, c.final,
                        c.same_again, c.late_applied, c.earlier_key, c.first_unknown_at is null)
                        order by c.generation, c.name)::text from runguard.call c where c.record_id = r.id),
       (select array_agg(e.kind order by e.id) from runguard.event e where e.record_id = r.id),
       runguard.broken(r)
  from runguard.record r where r.id = %s
"""
WAITS = "select cardinality(pg_blocking_pids(%s)) > 0"


def told(answer: Any) -> Any:
    if isinstance(answer, Claim):
        return answer.verdict, answer.fence if answer.verdict is Verdict.RUN else None
    if isinstance(answer, Written):
        return answer.verdict, answer.state, answer.held, {n: i.verdict for n, i in answer.intents.items()}
    return answer


@dataclass
class Race:
    ledger: Ledger
    sql: SQL
    sessions: tuple[SQL, SQL]
    pool: ThreadPoolExecutor
    begun: int = 0

    def begin(self, beginning: str) -> Held:
        self.begun += 1
        return BEGINNINGS[beginning](self.ledger, self.sql, f"k{self.begun}")

    def line(self, held: Held) -> tuple[Any, ...]:
        found = self.sql.execute(LINE, [held.id]).fetchone()
        assert found is not None
        assert found[-1] == "", found
        return tuple(found)

    def one_by_one(self, beginning: str, first: str, second: str) -> tuple[Any, Any, Any]:
        held = self.begin(beginning)
        return told(ALL[first](held, self.ledger)), told(ALL[second](held, self.ledger)), self.line(held)

    def at_once(self, beginning: str, first: str, second: str) -> tuple[Any, Any, Any]:
        held = self.begin(beginning)
        one, other = self.sessions
        ledgers = [engine.ledger_on(session) for session in self.sessions]
        one.execute("begin")
        answer = told(ALL[first](held, ledgers[0]))
        later = self.pool.submit(ALL[second], held, ledgers[1])
        while not later.done() and self.sql.execute(WAITS, [other.info.backend_pid]).fetchone() != (True,):
            pass
        one.execute("commit")
        return answer, told(later.result()), self.line(held)

    def check(self, beginning: str, first: str, second: str) -> None:
        so = self.at_once(beginning, first, second)
        if second == "sweep" and so[1] == []:
            return  # it passes over a line that somebody is at
        after, before, end = self.one_by_one(beginning, second, first)
        assert so in (self.one_by_one(beginning, first, second), (before, after, end)), (beginning, first, second)


@pytest.fixture
def race(ledger: Ledger, ledger_url: str, sql: SQL) -> Iterator[Race]:
    connect = lambda: closing(psycopg.connect(ledger_url))  # noqa: E731
    with connect() as one, connect() as other, ThreadPoolExecutor(1) as pool:
        yield Race(ledger, sql, (one, other), pool)


def test_p13_what_people_say_in_a_race_is_said_before_it_or_after_it(race: Race) -> None:
    """Some pairs from each beginning; none twice."""
    for number, beginning in enumerate(BEGINNINGS):
        for pair in PAIRS[number::97]:
            race.check(beginning, *pair)


@pytest.mark.soak
@pytest.mark.timeout(600)
@pytest.mark.parametrize("beginning", BEGINNINGS)
def test_p13_soak_of_what_people_say_in_a_race(beginning: str, race: Race) -> None:
    for pair in PAIRS:
        race.check(beginning, *pair)
