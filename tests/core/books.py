"""What the tests of the ledger share: honest ways into each state, the raw line, and waiting for what another does."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg

from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import (
    Claim,
    Effect,
    Failure,
    FailureClass,
    Grant,
    Holder,
    Order,
    Outcome,
    Result,
    Settlement,
    State,
    Verdict,
    Written,
)
from demo.servers import create_database, drop_database
from tests.core import engine

UNKNOWN = Failure(FailureClass.TIMEOUT, Effect.UNKNOWN, evidence="read timeout")
QUOTA = Failure(FailureClass.QUOTA, Effect.NOT_APPLIED, pausable=True, resume_after=3600.0, evidence="429")
DECLINED = Failure(FailureClass.PROCESSING, Effect.NOT_APPLIED, final=True, evidence="402")
NEVER_SENT = Failure(FailureClass.PROCESSING, Effect.NOT_APPLIED, evidence="never sent")
DEADLINE = 60.0
"""Seconds after which something that must happen is said not to."""


@dataclass(frozen=True)
class Held:
    """A granted claim, and what its holder may write."""

    ledger: Ledger
    order: Order
    claim: Claim
    holder: Holder = field(default_factory=engine.holder)

    @property
    def id(self) -> int:
        return self.claim.record_id

    def write(self, ledger: Ledger | None = None, **what: Any) -> Written:
        grant = Grant(self.order.identity, self.id, self.claim.generation, self.claim.fence)
        return (ledger or self.ledger).write(grant, holder=self.holder, order=self.order, **what)

    def intent(self, name: str, ledger: Ledger | None = None) -> str:
        return self.write(ledger, intents=[(name, "{}")]).intents[name].verdict

    def outcome(self, name: str, failure: Failure | None = None, data: bytes = b'"ok"') -> Written:
        return self.write(outcomes=[said(name, failure, data)])

    def settle(self, state: State, failure: Failure | None = None, data: bytes = b'"ok"') -> Written:
        """Leave with this state; a body's call ends in the same."""
        outcomes = [said("body", failure, data)] if self.order.calls == "body" else []
        result = None if failure else Result(data)
        return self.write(settlement=Settlement(state, result=result, failure=failure), outcomes=outcomes)


@contextmanager
def empty_database(postgres: str, template: str | None = None) -> Iterator[str]:
    """URL of a database with nothing in it (or a copy of ``template``), dropped in the end."""
    name = f"runguard_test_{uuid.uuid4().hex[:12]}"
    try:
        yield create_database(postgres, name, template)
    finally:
        drop_database(postgres, name)


@contextmanager
def fresh_ledger(postgres: str, template: str) -> Iterator[str]:
    """URL of an empty ledger for many tests, which keep to keys of their own."""
    with empty_database(postgres, template) as url:
        with psycopg.connect(url) as connection:
            connection.execute("select runguard.acknowledge_restore(null, 'tests', 'cloned for a module')")
        yield url


def said(name: str, failure: Failure | None = None, data: bytes = b'"ok"') -> Outcome:
    return Outcome(name, result=None if failure else Result(data), failure=failure, error="no" if failure else "")


def enter(ledger: Ledger, what: Order, holder: Holder | None = None) -> Held:
    who = holder or engine.holder()
    claim = ledger.claim(what, who)
    assert claim.verdict is Verdict.RUN, claim
    return Held(ledger, what, claim, who)


def bring(ledger: Ledger, state: State, what: Order, who: Holder | None = None) -> Held:
    """A record that came into ``state`` by an order which made (or said to make) its call."""
    held = enter(ledger, what, who)
    match state:
        case State.PENDING:
            held.settle(State.PENDING, NEVER_SENT)
        case State.DONE:
            held.settle(State.DONE)
        case State.FAILED:
            held.settle(State.FAILED, DECLINED)
        case State.PAUSED:
            held.settle(State.PAUSED, QUOTA)
        case State.IN_DOUBT:
            held.settle(State.IN_DOUBT, UNKNOWN)
    record = ledger.get(what.identity)
    assert record is not None
    assert (record.state, record.broken) == (state, "")
    return held


def expire(sql: psycopg.Connection[Any], record_id: int) -> None:
    """The holder's lease has run out, now."""
    sql.execute("update runguard.record set lease_until = clock_timestamp() where id = %s", [record_id])


def come_due(sql: psycopg.Connection[Any], record_id: int) -> None:
    """A pause is over, now: as the ledger itself would have written it earlier."""
    with sql.transaction():
        sql.execute("select runguard.open_for_writing()")
        sql.execute("update runguard.record set resume_at = clock_timestamp() where id = %s", [record_id])
        sql.execute("update runguard.call set resume_at = clock_timestamp() where record_id = %s", [record_id])


def long_ago(sql: psycopg.Connection[Any], record_id: int) -> None:
    """No open call of the record can still be on its way."""
    with sql.transaction():
        sql.execute("select runguard.open_for_writing()")
        sql.execute("update runguard.record set no_later_than = clock_timestamp() where id = %s", [record_id])
        sql.execute("update runguard.call set no_later_than = clock_timestamp() where record_id = %s", [record_id])


def line(sql: psycopg.Connection[Any], record_id: int) -> tuple[Any, ...]:
    """The record to the last byte, its place on the page and who wrote or locked it included."""
    query = "select r::text, r.ctid::text, r.xmin::text, r.xmax::text from runguard.record r where r.id = %s"
    row = sql.execute(query, [record_id]).fetchone()
    assert row is not None
    return tuple(row)


def kinds(ledger: Ledger, record_id: int) -> list[str]:
    return [event.kind for event in ledger.events(record_id)]


def state_of(ledger: Ledger, what: Order) -> State | None:
    record = ledger.get(what.identity)
    assert record is not None
    return record.state


def wait_until(condition: Callable[[], Any], what: str) -> None:
    """Poll until it is so.

    :raises TimeoutError: it did not come to that.
    """
    end = time.monotonic() + DEADLINE
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"Waited {DEADLINE:g} s in vain: {what}.")
        time.sleep(0.005)  # between two looks, not instead of one
