"""A ledger that lost time says so (P14): restored, failed over, copied; and what a person then makes of "absent"."""

from __future__ import annotations

import subprocess
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from airflow_runguard.core import guard
from airflow_runguard.core.leases import Leases
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.migrations import upgrade
from airflow_runguard.core.record import Outcome, Result, State, Verdict
from airflow_runguard.core.resp import Redis
from demo.servers import Postgres
from tests.core import books, engine
from tests.core.books import Held, bring, enter, state_of

WORDS = {"actor": "ann", "reason": "compared with the vendor"}
OpenLedger = Callable[..., Ledger]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    """A server that tests may set back in time."""
    with Postgres(tmp_path_factory.mktemp("restored"), settings={"fsync": "off"}) as running:  # restores faster
        yield running


@pytest.fixture
def url(server: Postgres) -> str:
    """A new ledger there."""
    made = server.create_database(f"ledger_{uuid.uuid4().hex[:8]}")
    upgrade(made, deployment=engine.DEPLOYMENT)
    return made


@pytest.fixture
def client(redis_url: str) -> Iterator[Redis]:
    with closing(Redis.from_url(redis_url)) as connected:
        yield connected


@pytest.fixture
def opened() -> Iterator[OpenLedger]:
    with ExitStack() as stack:
        yield lambda url: stack.enter_context(closing(engine.open_ledger(url)))


def refused_for_lost_time(ledger: Ledger, leases: Leases) -> str:
    """No key is granted and no body runs, whatever is done is at most replayed; what the tasks of the others say."""
    made: list[int] = []
    reasons = set()
    for key in ("before", "after", "never seen"):
        how = guard.run(ledger, leases, engine.work(engine.order(key), lambda _: made.append(1)))
        verdict = ledger.claim(engine.order(key), engine.holder()).verdict
        if ledger.get(engine.identity(key)) is None:
            assert isinstance(how, guard.Waiting)
            assert verdict is Verdict.LOST_TIME
            reasons.add(how.reason)
        else:
            assert verdict is Verdict.REPLAY  # what is in the book happened, whatever else is not in it
    assert made == []
    assert len(reasons) == 1
    reason = reasons.pop()
    assert "acknowledge-restore" in reason
    return reason


def test_p14_a_restored_ledger_is_noticed_by_what_redis_remembers(
    server: Postgres, url: str, client: Redis, opened: OpenLedger, tmp_path: Path
) -> None:
    ledger = opened(url)
    leases = guard.ready(ledger, client)
    charged: list[str] = []

    def run(ledger: Ledger, key: str, leases: Leases) -> guard.How:
        return guard.run(ledger, leases, engine.work(engine.order(key), lambda _: charged.append(key)))

    run(ledger, "before", leases)
    server.base_backup(tmp_path / "backup")
    run(ledger, "after", leases)
    ledger.close()
    server.restore(tmp_path / "backup")

    again = opened(url)
    assert again.get(engine.identity("after")) is None  # paid, and not in the book
    assert "no longer in it" in refused_for_lost_time(again, guard.ready(again, client))
    assert charged == ["before", "after"]

    again.acknowledge_restore(lost_since=None, **WORDS)
    leases = guard.ready(again, client)  # the old witness is of an older epoch
    assert run(again, "before", leases) == guard.Done(None, replayed=True)
    assert run(again, "never seen", leases) == guard.Done(None, replayed=False)


def test_p14_a_restore_that_began_a_new_timeline_is_noticed_without_redis(
    server: Postgres, url: str, opened: OpenLedger, tmp_path: Path
) -> None:
    leases = Leases(None, "")
    bring(opened(url), State.DONE, engine.order("before"))
    server.base_backup(tmp_path / "backup")
    (tmp_path / "backup" / "recovery.signal").touch()
    server.settings["restore_command"] = "false"  # nothing archived: recover what the backup has, then go on
    try:
        server.restore(tmp_path / "backup")
    finally:
        del server.settings["restore_command"]
    with psycopg.connect(url, autocommit=True) as plain:
        books.wait_until(lambda: plain.execute("select pg_is_in_recovery()").fetchone() == (False,), "its promotion")
    again = opened(url)
    assert "timeline" in refused_for_lost_time(again, leases)
    assert again.check()["lost_time"]
    again.acknowledge_restore(lost_since=None, **WORDS)
    assert again.claim(engine.order("before"), engine.holder()).verdict is Verdict.REPLAY


def test_p14_a_copy_of_the_database_is_noticed(server: Postgres, url: str, opened: OpenLedger) -> None:
    copy = server.create_database(f"copy_{uuid.uuid4().hex[:8]}", url.rpartition("/")[2])
    assert "copied" in refused_for_lost_time(opened(copy), Leases(None, ""))
    assert opened(url).claim(engine.order("before"), engine.holder()).verdict is Verdict.RUN


def test_p14_a_dump_in_another_server_is_noticed(server: Postgres, url: str, postgres: str, opened: OpenLedger) -> None:
    bring(opened(url), State.DONE, engine.order("before"))
    with books.empty_database(postgres) as other:
        programs = server._install / "bin"
        dump = subprocess.run([programs / "pg_dump", f"--dbname={url}"], check=True, capture_output=True, timeout=60)
        load = [programs / "psql", "--quiet", f"--dbname={other}"]
        subprocess.run(load, input=dump.stdout, check=True, capture_output=True, timeout=60)
        again = opened(other)
        assert again.get(engine.identity("before")) is not None
        assert "copied" in refused_for_lost_time(again, Leases(None, ""))


def test_p14_a_living_holder_that_misses_its_record_makes_the_ledger_say_so(
    server: Postgres, url: str, opened: OpenLedger, tmp_path: Path
) -> None:
    server.base_backup(tmp_path / "backup")
    ledger = opened(url)
    charged: list[int] = []

    def body(_: guard.GuardContext) -> None:
        charged.append(1)
        server.restore(tmp_path / "backup")

    how = guard.run(ledger, Leases(None, ""), engine.work(engine.order("cut off"), body))
    assert isinstance(how, guard.Ended)
    assert charged == [1]
    assert "a living holder" in refused_for_lost_time(opened(url), Leases(None, ""))


# -- what a person makes of it -----------------------------------------------------------------------------------------


def test_p14_after_lost_time_absent_keys_of_older_runs_are_in_doubt_and_those_of_newer_runs_are_new(
    ledger: Ledger,
) -> None:
    now = datetime.now(UTC)
    old, new = now - timedelta(days=1), now + timedelta(days=1)
    done = bring(ledger, State.DONE, engine.order("booked", run_at=old))
    ledger.lose("a test")
    assert ledger.acknowledge_restore(lost_since=now - timedelta(hours=1), **WORDS) == ledger.epoch + 1
    claims = {
        name: ledger.claim(engine.order(name, run_at=run_at), engine.holder()).verdict
        for name, run_at in {"old": old, "of an unknown time": None, "new": new}.items()
    }
    assert claims == {"old": "in_doubt", "of an unknown time": "in_doubt", "new": "run"}
    assert ledger.claim(done.order, engine.holder()).verdict is Verdict.REPLAY
    record = ledger.get(engine.identity("old"))
    assert record is not None
    assert (record.needs_person, record.broken) == (True, "")
    assert ledger.resolve(record.id, "did_not_happen", **WORDS) == "ok"
    assert ledger.claim(engine.order("old", run_at=old), engine.holder()).verdict is Verdict.RUN


@pytest.mark.parametrize("state", [State.PENDING, State.FAILED, State.PAUSED, State.RUNNING])
def test_p14_an_unfinished_line_last_heard_of_before_the_lost_time_is_in_doubt(
    ledger: Ledger, sql: psycopg.Connection[Any], state: State
) -> None:
    """It stands there as it was at the backup: it may have been done, and paid, in the time that is gone."""
    order = engine.order("unfinished", run_at=datetime.now(UTC) + timedelta(days=1))
    if state is State.RUNNING:
        books.expire(sql, enter(ledger, order).claim.record_id)
    else:
        held = bring(ledger, state, order)
        if state is State.PAUSED:
            books.come_due(sql, held.claim.record_id)
    ledger.lose("a test")
    ledger.acknowledge_restore(lost_since=datetime.now(UTC) - timedelta(hours=1), **WORDS)
    assert ledger.claim(order, engine.holder()).verdict is Verdict.IN_DOUBT
    record = ledger.get(order.identity)
    assert record is not None
    assert (record.state, record.needs_person, record.broken) == (State.IN_DOUBT, True, "")
    assert ledger.resolve(record.id, "did_not_happen", force=True, **WORDS) == "ok"
    assert ledger.claim(order, engine.holder()).verdict is Verdict.RUN


def test_p13_lost_time_and_its_acknowledgement_are_events(ledger: Ledger, sql: psycopg.Connection[Any]) -> None:
    ledger.lose("first")
    ledger.lose("second")
    ledger.acknowledge_restore(lost_since=None, **WORDS)
    events = sql.execute(
        "select kind, actor, reason from runguard.event where record_id is null and id > 1 order by id"
    )
    assert events.fetchall() == [
        ("ledger_lost_time", "ledger", "first"),
        ("restore_acknowledged", "ann", "compared with the vendor"),
    ]


# -- holders that live on ----------------------------------------------------------------------------------------------


def test_p14_a_living_holder_may_start_no_call_but_still_book_what_it_knows(ledger: Ledger) -> None:
    held = enter(ledger, engine.order("living", calls="explicit"))
    held.intent("charge")
    ledger.lose("a test")
    written = held.write(outcomes=[Outcome("charge", result=Result(b"1"))], intents=[("email", "{}")])
    assert (written.verdict, written.intents["email"].verdict) == ("ok", "lost")
    assert [call.state for call in ledger.calls(held.id)] == ["done"]


def foreign(held: Held, other: Held) -> Held:
    """A holder from before a restore, whose record's number was given away again afterwards."""
    return replace(held, claim=replace(held.claim, record_id=other.id))


def test_p14_a_holder_whose_record_number_now_is_another_record_changes_nothing(
    ledger: Ledger, sql: psycopg.Connection[Any]
) -> None:
    held, other = (enter(ledger, engine.order(key)) for key in ("mine", "somebody else's"))
    before = books.line(sql, other.id)[0]
    for write in (foreign(held, other).settle, lambda _: foreign(held, other).write(intents=[("charge", "{}")])):
        written = write(State.DONE)
        assert written.verdict == "missing"
        assert [answer.verdict for answer in written.intents.values()] in ([], ["lost"])
    assert books.line(sql, other.id)[0] == before
    assert state_of(ledger, other.order) is State.RUNNING


def test_p14_a_record_with_an_older_fence_than_its_holder_s_is_a_ledger_that_went_back(ledger: Ledger) -> None:
    held = enter(ledger, engine.order("went back"))
    newer = replace(held, claim=replace(held.claim, fence=held.claim.fence + 1))
    assert newer.settle(State.DONE).verdict == "missing"
    assert state_of(ledger, held.order) is State.RUNNING


def test_p14_a_call_that_is_asked_for_on_a_vanished_record_is_answered_and_not_made(
    ledger_url: str, sql: psycopg.Connection[Any]
) -> None:
    made: list[str] = []

    def body(context: guard.GuardContext) -> None:
        context.call("first", lambda: made.append("first"))
        sql.execute("set session_replication_role = replica")  # as after a restore: its record is not there
        sql.execute("delete from runguard.record")
        context.call("second", lambda: made.append("second"))

    with closing(engine.open_ledger(ledger_url)) as ledger:
        how = guard.run(ledger, Leases(None, ""), engine.work(engine.order("gone", calls="explicit"), body))
        assert isinstance(how, guard.Ended)
        assert made == ["first"]
        assert ledger.claim(engine.order("gone"), engine.holder()).verdict is Verdict.LOST_TIME
