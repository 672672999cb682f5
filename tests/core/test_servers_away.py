"""Servers that are away, lie or restart (P10, P12, R37, R38): no ledger, no call; no Redis, slower and said once."""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.parse
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import psycopg
import pytest

from airflow_runguard.core import guard, seam
from airflow_runguard.core.errors import LedgerUnavailable
from airflow_runguard.core.leases import Leases
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.migrations import upgrade
from airflow_runguard.core.record import State, Verdict
from airflow_runguard.core.resp import Redis
from demo.processes import free_port
from demo.servers import Postgres
from demo.servers import Redis as RedisServer
from tests.core import books, engine
from tests.core.books import bring, enter, state_of

SQL = psycopg.Connection[Any]
OUT_OF_REACH = "Redis is out of reach"


def charge(
    ledger: Ledger, leases: Leases, key: str, during: Callable[[], object] = lambda: None, **rules: Any
) -> tuple[guard.How, int]:
    """Work whose call takes as long as ``during``; how it ended, and how often it was made."""
    made: list[int] = []

    def body(_: guard.GuardContext) -> str:
        made.append(1)
        during()
        return "ch_1"

    return guard.run(ledger, leases, engine.work(engine.order(key, **rules), body)), len(made)


DONE = (guard.Done("ch_1", replayed=False), 1)


# -- Redis -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def redis_server(server_directory: Path, needs_redis: None) -> Iterator[RedisServer]:
    with RedisServer(server_directory) as server:
        yield server


@pytest.fixture
def client(redis_server: RedisServer) -> Iterator[Redis]:
    with closing(Redis.from_url(redis_server.url)) as connected:
        yield connected


def said_once(caplog: pytest.LogCaptureFixture) -> bool:
    return sum(OUT_OF_REACH in record.message for record in caplog.records) == 1


def test_p12_with_no_redis_at_all_the_ledger_s_own_lease_is_enough(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    leases = guard.ready(ledger, None)
    assert charge(ledger, leases, "no redis") == DONE
    assert charge(ledger, leases, "no redis") == (guard.Done("ch_1", replayed=True), 0)
    assert caplog.records == []


def test_r38_two_racing_tries_with_a_refused_redis_make_one_call(
    open_ledger: Callable[[], Ledger], caplog: pytest.LogCaptureFixture
) -> None:
    address = ("127.0.0.1", free_port())
    barrier, release = threading.Barrier(2), threading.Event()
    answers: list[tuple[guard.How, int]] = []

    def attempt(ledger: Ledger) -> None:
        leases = guard.ready(ledger, Redis(*address))
        barrier.wait(timeout=books.DEADLINE)
        answers.append(charge(ledger, leases, "refused", lambda: release.wait(books.DEADLINE)))
        release.set()  # the refused one ends first

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(attempt, [open_ledger(), open_ledger()]))
    (busy, refused), (done, made) = answers
    assert isinstance(busy, guard.Waiting)
    assert busy.busy
    assert "testhost" in busy.reason  # who holds it
    assert (done, refused, made) == (*DONE[:1], 0, 1)
    assert sum(OUT_OF_REACH in record.message for record in caplog.records) == 2  # once a process, and here are "two"


@pytest.mark.parametrize("accident", ["killed", "restarted empty", "flushed"])
def test_p10_a_redis_that_forgets_during_work_changes_nothing(
    ledger: Ledger,
    open_ledger: Callable[[], Ledger],
    redis_server: RedisServer,
    client: Redis,
    accident: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    leases = guard.ready(ledger, client)
    twin: list[tuple[guard.How, int]] = []

    def during() -> None:
        if accident == "killed":
            redis_server.kill()
        elif accident == "restarted empty":
            redis_server.restart()
        else:
            client.command("FLUSHALL")
        with closing(Redis.from_url(redis_server.url)) as other:  # finds no lease in Redis
            twin.append(charge(open_ledger(), Leases(other, ledger.installation), "forgotten"))

    assert charge(ledger, leases, "forgotten", during) == DONE
    [(refused, made)] = twin
    assert isinstance(refused, guard.Waiting)
    assert (refused.busy, made) == (True, 0)
    complaints = sum(OUT_OF_REACH in record.message for record in caplog.records)
    assert complaints == (2 if accident == "killed" else 0)  # the holder's and the twin's


def test_p10_a_flushed_lease_is_taken_again_by_the_holder_that_the_ledger_stands_by(
    ledger: Ledger, client: Redis
) -> None:
    what = engine.order("retaken")
    leases = Leases(client, ledger.installation)
    leases.acquire(what.identity, "mine", 30.0)
    assert client.command("GET", leases._key(what.identity)) == b"mine"
    client.command("FLUSHALL")
    leases.renew(what.identity, "mine", 30.0)
    assert client.command("GET", leases._key(what.identity)) == b"mine"
    assert 0 < client.command("PTTL", leases._key(what.identity)) <= 30_000


def test_r37_a_foreign_token_in_redis_stops_nothing_and_is_left_alone(ledger: Ledger, client: Redis) -> None:
    leases = guard.ready(ledger, client)
    what = engine.order("stolen", calls="explicit")
    key = leases._key(what.identity)
    made: list[int] = []

    def body(context: guard.GuardContext) -> None:
        for n in range(10):
            context.call(f"item {n}", lambda n=n: made.append(n))
            if n == 4:
                client.command("SET", key, "somebody else")

    assert guard.run(ledger, leases, engine.work(what, body)) == guard.Done(None, replayed=False)
    assert made == list(range(10))
    assert state_of(ledger, what) is State.DONE
    assert client.command("GET", key) == b"somebody else"


@contextlib.contextmanager
def mute() -> Iterator[tuple[tuple[str, int], list[socket.socket]]]:
    """A server that accepts and never says a word; and who has come."""
    came: list[socket.socket] = []

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                came.append(listener.accept()[0])

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=accept)
        thread.start()
        try:
            yield listener.getsockname(), came
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join(books.DEADLINE)
            for connection in came:
                connection.close()


def test_p12_a_redis_that_never_answers_costs_one_timeout_and_not_one_a_call(
    ledger: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    def body(context: guard.GuardContext) -> None:
        for n in range(50):
            context.call(f"item {n}", lambda: None)

    with mute() as (address, came), closing(Redis(*address, timeout=0.3)) as client:
        leases = Leases(client, ledger.installation)
        what = engine.order("mute", calls="explicit")
        assert guard.run(ledger, leases, engine.work(what, body)) == guard.Done(None, replayed=False)
        assert len(came) <= 2
    assert said_once(caplog)


# -- PostgreSQL --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    """A server of these tests' own, to be stopped."""
    with Postgres(tmp_path_factory.mktemp("own")) as running:
        yield running


@pytest.fixture
def own_url(server: Postgres) -> str:
    url = server.create_database(f"ledger_{uuid.uuid4().hex[:8]}")
    upgrade(url, deployment=engine.DEPLOYMENT)
    return url


@pytest.fixture
def own(own_url: str) -> Iterator[Ledger]:
    with closing(engine.open_ledger(own_url)) as ledger:
        yield ledger


def test_r38_without_a_ledger_nothing_is_called_and_the_task_waits() -> None:
    url = f"postgresql://postgres@127.0.0.1:{free_port()}/ledger"
    ledger = Ledger(lambda: psycopg.connect(url), deployment=engine.DEPLOYMENT)
    how, made = charge(ledger, Leases(None, ""), "refused")
    assert isinstance(how, guard.Waiting)
    assert (how.busy, made) == (False, 0)
    assert "out of reach" in how.reason
    assert "No call was made" in how.reason


def test_p04_what_is_too_long_for_one_message_is_the_datas_fault_and_not_the_ledgers(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PostgreSQL then ends the connection, and would each time; of results that go together each is booked alone."""
    held = enter(ledger, engine.order("k", calls="explicit"))
    held.intent("pay")
    monkeypatch.setattr(seam, "LONGEST", 1_000)
    assert held.outcome("pay", data=b"x" * 2_000).verdict == "ok", "nobody counts where it goes well"
    ledger.close()
    ledger._connect = lambda: psycopg.connect(f"postgresql://postgres@127.0.0.1:{free_port()}/ledger")
    with pytest.raises(LedgerUnavailable):
        held.outcome("pay", data=b"x" * 500)
    with pytest.raises(psycopg.DataError, match="over 1000 bytes"):
        held.outcome("pay", data=b"x" * 2_000)


def test_p04_a_ledger_that_restarts_during_the_call_books_its_outcome(server: Postgres, own: Ledger) -> None:
    assert charge(own, Leases(None, ""), "restarted", server.restart) == DONE
    assert charge(own, Leases(None, ""), "restarted") == (guard.Done("ch_1", replayed=True), 0)


def test_p04_an_outcome_waits_for_a_ledger_that_is_away(
    server: Postgres, own: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    def bring_back() -> None:
        books.wait_until(lambda: "Trying again" in caplog.text, "a try at the stopped server")
        server.start()

    with ThreadPoolExecutor(1) as pool:
        back = pool.submit(bring_back)
        assert charge(own, Leases(None, ""), "away", server.kill) == DONE
        back.result(books.DEADLINE)
    assert charge(own, Leases(None, ""), "away") == (guard.Done("ch_1", replayed=True), 0)


def test_p12_a_call_that_cannot_be_announced_is_not_made_and_the_task_waits(
    server: Postgres, own: Ledger, caplog: pytest.LogCaptureFixture
) -> None:
    made: list[str] = []

    def body(context: guard.GuardContext) -> None:
        context.call("first", lambda: made.append("first"))
        server.stop()
        try:
            context.call("second", lambda: made.append("second"))
        finally:
            server.start()

    what = engine.order("unannounced", calls="explicit", lease=2.0)
    how = guard.run(own, Leases(None, ""), engine.work(what, body))
    assert made == ["first"]
    assert isinstance(how, guard.Waiting)
    assert "out of reach" in how.reason
    assert state_of(own, what) is State.PENDING


def test_p12_a_hot_standby_replays_what_is_done_and_grants_nothing(
    server: Postgres, own_url: str, own: Ledger, tmp_path: Path
) -> None:
    bring(own, State.DONE, engine.order("done"))
    server.base_backup(tmp_path / "backup")
    (tmp_path / "backup" / "standby.signal").touch()
    with Postgres(tmp_path / "standby", settings={"fsync": "off"}) as standby:
        standby.restore(tmp_path / "backup")
        url = urllib.parse.urlsplit(own_url)._replace(netloc=urllib.parse.urlsplit(standby.url).netloc).geturl()
        with closing(Ledger(lambda: psycopg.connect(url), deployment=engine.DEPLOYMENT)) as ledger:
            how, made = charge(ledger, Leases(None, ""), "new")
            assert isinstance(how, guard.Waiting)
            assert made == 0
            assert charge(ledger, Leases(None, ""), "done") == (guard.Done("ok", replayed=True), 0)


def test_p12_a_read_only_ledger_replays_what_is_done_and_grants_nothing(
    ledger_url: str, open_ledger: Callable[[], Ledger], sql: SQL
) -> None:
    ledger = open_ledger()
    charge(ledger, Leases(None, ""), "done")
    name = urllib.parse.urlsplit(ledger_url).path[1:]
    sql.execute(f"alter database {name} set default_transaction_read_only = on")
    after = open_ledger()
    assert charge(after, Leases(None, ""), "done") == (guard.Done("ch_1", replayed=True), 0)
    how, made = charge(after, Leases(None, ""), "new")
    assert isinstance(how, guard.Waiting)
    assert made == 0


def test_p04_an_outcome_outlives_statements_that_are_cancelled(
    ledger_url: str, sql: SQL, caplog: pytest.LogCaptureFixture
) -> None:
    url = ledger_url + "?options=-c%20statement_timeout%3D300"
    locked, released = threading.Event(), threading.Event()

    def hold() -> None:
        with psycopg.connect(ledger_url) as other:
            other.execute("select 1 from runguard.record for update")
            locked.set()
            books.wait_until(lambda: "Trying again" in caplog.text, "a cancelled statement")
        released.set()

    with ThreadPoolExecutor(1) as pool, closing(engine.open_ledger(url)) as ledger:
        held: list[Any] = []

        def during() -> None:
            held.append(pool.submit(hold))
            locked.wait(books.DEADLINE)

        assert charge(ledger, Leases(None, ""), "cancelled", during) == DONE
        held[0].result(books.DEADLINE)
    assert released.is_set()


CUT = """select pg_terminate_backend(pid, 60000) from pg_stat_activity
          where datname = current_database() and pid <> pg_backend_pid() and backend_type = 'client backend'"""


def test_p04_an_outcome_outlives_its_connection(ledger: Ledger, sql: SQL) -> None:
    def cut() -> None:
        assert sql.execute(CUT).fetchall() == [(True,)]

    assert charge(ledger, Leases(None, ""), "cut", cut) == DONE
    assert [event.kind for event in ledger.events(1)] == ["claimed", "done"]


def test_p10_a_claim_whose_connection_was_cut_is_asked_again_and_granted_once(ledger: Ledger, sql: SQL) -> None:
    held = enter(ledger, engine.order("asked twice"))
    sql.execute(CUT)
    again = ledger.claim(held.order, held.holder)
    assert (again.verdict, again.fence) == (Verdict.RUN, held.claim.fence)
