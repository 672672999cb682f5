"""Broken is not new (P8): a line that is there but cannot be trusted stops everything until a person decides."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psycopg
import pytest

from airflow_runguard.core import guard
from airflow_runguard.core.errors import PlanningError
from airflow_runguard.core.leases import Leases
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Record, State, Verdict
from tests.core import books, engine
from tests.core.books import Held, bring, kinds, line

SQL = psycopg.Connection[Any]
fresh = partial(next, (f"damaged/{n}" for n in itertools.count()))
TARGETS = ["pending", "done", "failed", "in_doubt"]
WORDS = {"actor": "ann", "reason": "looked at it"}


@dataclass(frozen=True)
class Damage:
    """What somebody does to a record outside the ledger.

    :param change: columns and their new values.
    :param reason: words that the verdict says.
    :param signed: with a digest that fits, as by somebody who knows how, or by a newer version of this code.
    """

    name: str
    state: State
    change: str
    reason: str
    signed: bool = False


DAMAGES = [
    Damage("a flipped bit in the digest", State.DONE, "digest = set_bit(digest, 7, 1 - get_bit(digest, 7))", "digest"),
    Damage("an empty digest", State.DONE, "digest = ''", "digest"),
    Damage("done set back to pending", State.DONE, "state = 'pending', finished_at = null, effect = null", "digest"),
    Damage("failed set to done", State.FAILED, "state = 'done', effect = 'applied', finished_at = now()", "digest"),
    Damage("an unknown effect called harmless", State.FAILED, "effect = 'unknown'", "digest"),
    Damage("doubt set to pending", State.IN_DOUBT, "state = 'pending', effect = null, open_calls = 0", "digest"),
    Damage("the open call of a dead holder hidden", State.RUNNING, "open_calls = 0, lease_until = now()", "digest"),
    Damage("another order under the same key", State.DONE, "payload_digest = repeat('0', 64)", "digest"),
    Damage("another key", State.RUNNING, "generation = generation + 1", "digest"),
    Damage("the fence set back", State.RUNNING, "fence = 0", "digest"),
    Damage("a pause without end", State.PAUSED, "resume_at = 'infinity'", "digest"),
    Damage("a pause made shorter", State.PAUSED, "resume_at = now()", "digest"),
    Damage("a truncated result", State.DONE, "result = substr(result, 1, 2)", "truncated or changed"),
    Damage("a result of another shape", State.DONE, "result = '[1, 2]'", "truncated or changed"),
    Damage("a result that is gone", State.DONE, "result = null", "its result is gone"),
    Damage(
        "done without a result's digest",
        State.DONE,
        "result = null, result_digest = null",
        "it is done, but its result is gone",
        True,
    ),
    Damage("a state that does not exist", State.DONE, "state = 'teleported'", "'teleported', which does not", True),
    Damage("a newer row", State.DONE, "row_version = 2", "version 2", True),
    Damage("a newer digest", State.DONE, "digest_version = 2", "version 2", True),
    Damage("running without a lease", State.RUNNING, "lease_until = null", "contradict", True),
    Damage("done that never ended", State.DONE, "finished_at = null", "say that it is not", True),
    Damage("failed without a class", State.FAILED, "failure_class = null", "contradict", True),
    Damage("failed without an effect", State.FAILED, "effect = null", "contradict", True),
    Damage("paused without an end", State.PAUSED, "resume_at = null", "contradict", True),
    Damage("doubt without a beginning", State.IN_DOUBT, "first_unknown_at = null", "contradict", True),
    Damage("a call open while paused", State.PAUSED, "open_calls = 1", "contradict", True),
]
all_damages = pytest.mark.parametrize("damage", DAMAGES, ids=lambda damage: damage.name.replace(" ", "_"))


@pytest.fixture(scope="module")
def ledger_url(postgres: str, ledger_template: str) -> Iterator[str]:
    with books.fresh_ledger(postgres, ledger_template) as url:
        yield url


def harm(sql: SQL, record_id: int, damage: Damage) -> None:
    """Past the trigger, as on a restored or meddled-with database."""
    with sql.transaction():
        sql.execute("alter table runguard.record disable trigger check_record")
        sql.execute(f"update runguard.record set {damage.change} where id = %s", [record_id])
        if damage.signed:
            resign = "update runguard.record r set digest = runguard.record_digest(r) where id = %s"
            sql.execute(resign, [record_id])
        sql.execute("alter table runguard.record enable trigger check_record")


def harmed(ledger: Ledger, sql: SQL, damage: Damage) -> Held:
    held = bring(ledger, damage.state, engine.order(fresh()))
    harm(sql, held.id, damage)
    return held


def shown(ledger: Ledger, held: Held) -> Record:
    record = ledger.get(held.order.identity)
    assert record is not None
    return record


@all_damages
def test_p08_a_damaged_record_is_broken_and_nothing_is_called_or_changed(
    ledger: Ledger, sql: SQL, damage: Damage
) -> None:
    held = harmed(ledger, sql, damage)
    before = line(sql, held.id)

    claim = ledger.claim(held.order, engine.holder())
    assert claim.verdict is Verdict.BROKEN
    assert damage.reason in claim.reason
    assert shown(ledger, held).broken == claim.reason

    made: list[int] = []
    how = guard.run(ledger, Leases(None, ledger.installation), engine.work(held.order, lambda _: made.append(1)))
    assert isinstance(how, guard.Ended)
    assert not how.retry
    assert "repair" in how.message
    assert made == []

    ledger.sweep("sweep")
    assert line(sql, held.id) == before


@all_damages
def test_p08_the_holder_and_people_leave_a_broken_record_as_it_is(ledger: Ledger, sql: SQL, damage: Damage) -> None:
    held = harmed(ledger, sql, damage)
    before = line(sql, held.id)[0]
    written = held.write(intents=[("charge", "{}")], outcomes=[books.said("charge")])
    assert (written.verdict, written.intents["charge"].verdict) in {("broken", "lost"), ("missing", "lost")}
    assert {
        ledger.resolve(held.id, "did_not_happen", force=True, **WORDS),
        ledger.reopen(held.id, seen_generation=1, again_although_applied=True, **WORDS),
        ledger.release(held.id, **WORDS),
        ledger.accept_payload(held.id, **WORDS),
        ledger.rename(held.id, namespace="billing", key="other", **WORDS),
    } == {"broken"}
    assert line(sql, held.id)[0] == before


@pytest.mark.parametrize("state", [State.RUNNING, State.IN_DOUBT])
def test_p08_the_outcome_that_a_holder_of_a_broken_record_brings_is_kept_as_evidence(
    ledger: Ledger, sql: SQL, state: State
) -> None:
    held = harmed(ledger, sql, Damage("", state, "digest = ''", ""))
    before = line(sql, held.id)[0]
    assert held.settle(State.DONE, data=b'"ch_123"').verdict == "broken"
    assert line(sql, held.id)[0] == before
    event = ledger.events(held.id)[-1]
    assert (event.kind, event.detail["effect"], event.detail["result"]) == ("late_outcome", "applied", '"ch_123"')


def test_p08_broken_records_do_not_keep_the_sweep_from_the_others(ledger: Ledger, sql: SQL) -> None:
    expire = "update runguard.record set lease_until = clock_timestamp()"
    sql.execute(f"{expire} where state = 'running' and runguard.broken(record) = ''")
    ledger.sweep("sweep")  # what other tests left
    first, second = (bring(ledger, State.RUNNING, engine.order(fresh())) for _ in range(2))
    harm(sql, first.id, Damage("", State.RUNNING, "digest = '', lease_until = now()", ""))
    books.expire(sql, second.id)
    assert ledger.sweep("sweep", limit=1) == [(second.order.identity, State.IN_DOUBT)]


def test_p08_what_is_merely_shown_may_be_unreadable(ledger: Ledger, sql: SQL) -> None:
    held = bring(ledger, State.DONE, engine.order("shown", {"amount": 500}))
    harm(sql, held.id, Damage("", State.DONE, "payload_fields = '{', payload_readable = '[]'", ""))
    assert shown(ledger, held).payload.fields == {}
    other = ledger.claim(engine.order("shown", {"amount": 501}), engine.holder())
    assert (other.verdict, other.differing) == (Verdict.REFUSED, ("amount",))


# -- no false alarm ---------------------------------------------------------------------------------------------------

SETTINGS = {
    "TimeZone": ["America/St_Johns", "Pacific/Kiritimati", "UTC"],
    "DateStyle": ["German, DMY", "SQL, MDY", "ISO"],
    "extra_float_digits": ["-15", "0", "3"],
    "bytea_output": ["escape", "hex", "escape"],
    "IntervalStyle": ["sql_standard", "postgres_verbose", "iso_8601"],
    "standard_conforming_strings": ["off", "on", "on"],
    "client_encoding": ["LATIN1", "UTF8", "WIN1252"],
    "search_path": ["", "pg_temp, public", "runguard"],
    "lc_numeric": ["C", "POSIX", "C"],
    "lc_time": ["C", "POSIX", "C"],
    "lc_monetary": ["C", "POSIX", "C"],
}


def test_p08_no_session_setting_makes_a_sound_record_look_broken(ledger: Ledger, ledger_url: str, sql: SQL) -> None:
    def use(connection: SQL, n: int) -> None:
        for name, values in SETTINGS.items():
            connection.execute("select set_config(%s, %s, false)", [name, values[n]])

    def opened(n: int) -> SQL:
        connection = psycopg.connect(ledger_url, autocommit=True)
        use(connection, n)
        return connection

    orders = []
    for n in range(3):  # written under each of the settings
        other = Ledger(lambda n=n: opened(n), deployment=engine.DEPLOYMENT)  # type: ignore[misc]
        for state in State:
            plain = engine.order(f"{n}/{state}/käse")
            orders.append(replace(plain, identity=engine.identity(plain.identity.key, "settings")))
            bring(other, state, orders[-1])
        other.close()
    for n in range(3):  # and read under each
        use(sql, n)
        broken = "select r.key, runguard.broken(r) from runguard.record r where r.namespace = 'settings'"
        assert dict(sql.execute(broken).fetchall()) == {what.identity.key: "" for what in orders}


# -- the way out ------------------------------------------------------------------------------------------------------


def test_p13_repair_accepts_the_line_as_it_stands_and_keeps_the_old_one(ledger: Ledger, sql: SQL) -> None:
    held = harmed(ledger, sql, Damage("", State.DONE, "result = '\"fixed\"'", ""))
    before = line(sql, held.id)
    seen = shown(ledger, held).seen
    assert ledger.repair(held.id, seen=seen, state=None, **WORDS) == "ok"
    claim = ledger.claim(held.order, engine.holder())
    assert claim.result is not None
    assert (claim.verdict, claim.result.data) == (Verdict.REPLAY, b'"fixed"')
    event = ledger.events(held.id)[-1]
    assert (event.kind, event.actor, event.reason) == ("repaired", "ann", "looked at it")
    assert event.detail["old"]["digest"] in before[0].replace("\\\\", "\\")


@pytest.mark.parametrize(("start", "target"), list(itertools.product(State, TARGETS)))
def test_p13_repair_gives_a_record_the_state_that_a_person_says_and_it_can_be_lived_with(
    ledger: Ledger, sql: SQL, start: State, target: str
) -> None:
    held = harmed(ledger, sql, Damage("", start, "digest = ''", ""))
    sql.execute("update runguard.call set no_later_than = clock_timestamp() where record_id = %s", [held.id])
    sql.execute(  # whatever it had sent has arrived by now
        "update runguard.record set no_later_than = case when no_later_than is not null then clock_timestamp() end, "
        "lease_until = case when lease_until is not null then clock_timestamp() end where id = %s",
        [held.id],
    )
    assert ledger.repair(held.id, seen=shown(ledger, held).seen, state=target, **WORDS) == "ok"
    record = shown(ledger, held)
    assert (record.state, record.broken) == (target, "")
    assert kinds(ledger, held.id)[-1] == "repaired"
    verdict = ledger.claim(held.order, engine.holder()).verdict
    assert verdict == {"pending": "run", "done": "replay", "failed": "refused", "in_doubt": "in_doubt"}[target]


def test_p13_repair_of_a_line_that_moved_since_it_was_shown_is_refused(ledger: Ledger, sql: SQL) -> None:
    held = harmed(ledger, sql, Damage("", State.DONE, "digest = ''", ""))
    seen = shown(ledger, held).seen
    harm(sql, held.id, Damage("", State.DONE, "evidence = 'somebody was here'", ""))
    before = line(sql, held.id)[0]
    assert ledger.repair(held.id, seen=seen, state=None, **WORDS) == "moved"
    assert line(sql, held.id)[0] == before


def test_p13_a_sound_record_is_not_repaired(ledger: Ledger) -> None:
    held = bring(ledger, State.DONE, engine.order("sound"))
    seen = shown(ledger, held).seen
    assert ledger.repair(held.id, seen=seen, state="pending", **WORDS) == "not_broken"


@pytest.mark.parametrize("state", [None, "running", "paused", "teleported"])
def test_p13_repair_to_what_cannot_be_is_refused_with_a_remedy(ledger: Ledger, sql: SQL, state: str | None) -> None:
    held = harmed(ledger, sql, Damage("", State.DONE, "state = 'teleported'", "", signed=True))
    before = line(sql, held.id)[0]
    with pytest.raises(PlanningError, match="--set-state"):
        ledger.repair(held.id, seen=shown(ledger, held).seen, state=state, **WORDS)
    assert line(sql, held.id)[0] == before


def test_p13_a_record_accepted_although_its_call_is_open_is_in_doubt_and_not_run(ledger: Ledger, sql: SQL) -> None:
    held = harmed(ledger, sql, Damage("", State.RUNNING, "open_calls = 0, lease_until = now()", ""))
    assert ledger.repair(held.id, seen=shown(ledger, held).seen, state=None, **WORDS) == "ok"
    assert ledger.claim(held.order, engine.holder()).verdict is Verdict.IN_DOUBT
