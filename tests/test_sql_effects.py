"""``guard.sql``: an order in a database is booked once, and nobody is asked (P3): PostgreSQL, SQLite, MariaDB."""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from airflow_runguard import listener
from airflow_runguard.core import guard
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import CallState, Effect, State
from airflow_runguard.listener import Caretaker
from airflow_runguard.reconcile import settle_markers
from airflow_runguard.sqlguard import SqlTransaction
from airflow_runguard.upkeep import SweepOperator
from tests.core import engine
from tests.core.accidents import DEADLINE, until
from tests.core.books import empty_database
from tests.sql_targets import MariaDb, Target, Worker

KINDS = ("postgresql", "sqlite", "mysql")


@pytest.fixture(scope="session")
def mariadb(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    if not MariaDb.available() and os.environ.get("CI") != "true":
        pytest.skip("MariaDB is not installed: apt-get install mariadb-server")
    with MariaDb(tmp_path_factory.mktemp("maria")) as server:
        yield server.target


@pytest.fixture(params=KINDS)
def target(
    request: pytest.FixtureRequest, tmp_path: Path, postgres: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Target]:
    monkeypatch.setenv("AIRFLOW_CONN_ORDERS", "")
    orders = "create table orders (id integer, customer varchar(100))"
    match request.param:
        case "postgresql":
            with empty_database(postgres) as url:
                yield _used(Target("postgresql", url), orders)
        case "sqlite":
            yield _used(Target("sqlite", str(tmp_path / "orders.db")), orders)
        case "mysql":
            target = request.getfixturevalue("mariadb")
            target.run("drop table if exists orders", "drop table if exists runguard_marker")
            yield _used(target, orders)


def _used(target: Target, orders: str) -> Target:
    target.run(orders)
    target.use()
    return target


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    with closing(engine.open_ledger(ledger_url)) as opened:
        yield opened


def order(key: str = "k", **rules: Any) -> Any:
    return engine.order(key, **{"calls": "explicit", "lease": 1.0, **rules})


def booking(target: Target, customer: str = "k") -> Any:
    return lambda context: context.sql("book", "orders", target.book, customer=customer)


def the_call(ledger: Ledger) -> Any:
    (record,) = ledger.list()
    (call,) = ledger.calls(record.id)
    return call


def test_p02_it_is_booked_once_and_given_back(target: Target, ledger_url: str, ledger: Ledger) -> None:
    assert target.attempt(ledger_url, order(), booking(target)) == guard.Done(1, replayed=False)
    assert target.attempt(ledger_url, order(), booking(target)) == guard.Done(1, replayed=True)
    assert target.attempt(ledger_url, order("other"), booking(target, "other")) == guard.Done(2, replayed=False)
    assert target.rows() == [(1, "k"), (2, "other")]
    assert {row[0] for row in target.rows("select state from runguard_marker")} == {"done"}
    assert dict(ledger.calls(1)[0].intent) == {"runguard.sql": "orders", "customer": "k"}


@pytest.mark.parametrize("step", ["before the marker", "in the transaction", "after the commit"])
def test_p03_r33_after_a_kill_the_marker_decides_and_nobody_is_asked(
    target: Target, ledger_url: str, ledger: Ledger, step: str
) -> None:
    assert target.attempt(ledger_url, order("first"), booking(target, "first")) == guard.Done(1, replayed=False)
    worker = Worker(target, ledger_url, "k", step)
    worker.die()
    how = until(
        lambda: target.attempt(ledger_url, order(), booking(target)), lambda how: not isinstance(how, guard.Waiting)
    )
    assert how == guard.Done(2, replayed=False)
    assert target.rows() == [(1, "first"), (2, "k")]
    assert "resolved" in [event.kind for event in ledger.events(2)], "the doubt was settled by the marker"
    (call,) = ledger.calls(2)
    assert call.state is CallState.DONE


@pytest.mark.parametrize("target", ["postgresql"], indirect=True)
@pytest.mark.parametrize("on_doubt", ["ask", "replay"])
def test_p03_a_function_that_committed_before_its_process_died_is_a_persons(
    target: Target, ledger_url: str, ledger: Ledger, on_doubt: str
) -> None:
    worker = Worker(target, ledger_url, "k", "after a commit of its own")
    worker.die()
    again = replace(order(), on_doubt=on_doubt)
    how = until(
        lambda: target.attempt(ledger_url, again, booking(target)), lambda how: not isinstance(how, guard.Waiting)
    )
    assert isinstance(how, guard.InDoubt)
    assert target.rows("select state from runguard_marker") == [("torn",), ("torn",)], "its own line, and the marker's"
    assert target.rows() == [(1, "k")]


@pytest.mark.parametrize("target", ["postgresql"], indirect=True)
def test_p03_a_transaction_that_broke_with_the_target_away_is_decided_later(
    target: Target, ledger_url: str, ledger: Ledger
) -> None:
    class Away(SqlTransaction):
        def _first_line(self, nonce: str) -> str:
            Target("postgresql", "postgresql://u@127.0.0.1:1/x?sslmode=disable&gssencmode=disable").use()
            self._hook = None
            try:
                return super()._first_line(nonce)
            finally:
                target.use()

    def breaks(connection: Any, customer: str) -> None:
        target.book(connection, customer)
        hangs_up(target, connection)

    body = lambda context: context.sql("book", "orders", breaks, customer="k")  # noqa: E731
    target.attempt(ledger_url, order(), body, transaction=Away)
    assert the_call(ledger).state is CallState.IN_DOUBT
    assert target.attempt(ledger_url, order(), booking(target)) == guard.Done(1, replayed=False)
    assert target.rows() == [(1, "k")]


WITH_HOOK = pytest.mark.parametrize("target", ["postgresql", "sqlite"], indirect=True)
"""Enough where no dialect matters."""


@WITH_HOOK
@pytest.mark.parametrize("step", ["before the marker", "in the transaction", "after the commit"])
def test_p03_r33_the_caretaker_settles_a_dead_holder_by_its_marker_without_a_dag(
    target: Target, ledger_url: str, ledger: Ledger, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_RUNGUARD_LEDGER", ledger_url)
    monkeypatch.setenv("AIRFLOW__RUNGUARD__DEPLOYMENT", engine.DEPLOYMENT)
    target.attempt(ledger_url, order("first"), booking(target, "first"))
    Worker(target, ledger_url, "k", step).die()
    (_, dead) = ledger.list()
    assert dead.lease_until is not None
    until(lambda: ledger.check()["now"], lambda now: now > dead.lease_until)
    Caretaker().round()
    until(lambda: ledger.list()[1].state, lambda state: state not in (State.RUNNING, State.IN_DOUBT))
    assert ledger.list()[1].state is State.PENDING, "the rest of the task goes on with the next try"
    (call,) = ledger.calls(dead.id)
    assert call.state is (CallState.DONE if step == "after the commit" else CallState.PENDING)
    (resolved,) = [event for event in ledger.events(dead.id) if event.kind == "resolved"]
    assert resolved.actor.startswith("caretaker ")
    assert target.attempt(ledger_url, order(), booking(target)) == guard.Done(2, replayed=False)
    assert target.rows() == [(1, "first"), (2, "k")]


@pytest.mark.parametrize("target", ["sqlite"], indirect=True)
def test_p10_where_no_triggerer_runs_the_sweep_operator_asks_the_markers(
    target: Target, ledger_url: str, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_RUNGUARD_LEDGER", ledger_url)
    monkeypatch.setenv("AIRFLOW__RUNGUARD__DEPLOYMENT", engine.DEPLOYMENT)
    Worker(target, ledger_url, "k", "after the commit").die()
    (dead,) = ledger.list()
    assert dead.lease_until is not None
    until(lambda: ledger.check()["now"], lambda now: now > dead.lease_until)
    said = SweepOperator(task_id="sweep").execute({})
    assert said["in_doubt"] == ["billing/k"]
    assert [line["outcome"] for line in said["asked"]] == ["happened"]
    assert ledger.calls(dead.id)[0].state is CallState.DONE


@pytest.mark.parametrize("target", ["sqlite"], indirect=True)
def test_p03_a_look_waits_longer_for_a_locked_database_than_sqlite_does_by_itself(target: Target) -> None:
    transaction = SqlTransaction("orders")
    target.run(transaction._dialect.ddl)
    with contextlib.closing(sqlite3.connect(target.url, isolation_level=None, check_same_thread=False)) as writer:
        writer.execute("begin immediate")
        release = threading.Timer(6.0, writer.rollback)
        release.start()
        assert transaction.void("k", 1) == ("void", None)
        release.join()


@pytest.mark.parametrize("target", ["postgresql"], indirect=True)
def test_p10_markers_that_cannot_be_reached_stay_in_doubt_and_are_tried_once_a_round(
    target: Target, ledger_url: str, ledger: Ledger
) -> None:
    for key in ("a", "b"):
        Worker(target, ledger_url, key, "in the transaction").die()
    until(lambda: [record.state for record in swept(ledger)], lambda states: states == [State.IN_DOUBT] * 2)
    with socket.create_server(("127.0.0.1", 0)) as away:
        came = accepts(away)
        port = away.getsockname()[1]
        Target("postgresql", f"postgresql://u@127.0.0.1:{port}/x?sslmode=disable&gssencmode=disable").use()
        asked = settle_markers(ledger, actor="sweep")["asked"]
        assert [line["outcome"] for line in asked] == ["error", "still_unknown"]
        assert len(came) == 1
    target.use()
    assert settle_markers(ledger, actor="sweep")["settled"] == 2
    assert settle_markers(ledger, actor="sweep")["asked"] == []


@pytest.mark.parametrize("target", ["postgresql"], indirect=True)
def test_p10_a_target_that_never_answers_holds_up_its_markers_only(
    target: Target, ledger_url: str, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    Worker(target, ledger_url, "k", "in the transaction").die()
    until(lambda: [record.state for record in swept(ledger)], lambda states: states == [State.IN_DOUBT])
    monkeypatch.setenv("AIRFLOW_CONN_RUNGUARD_LEDGER", ledger_url)
    monkeypatch.setenv("AIRFLOW__RUNGUARD__DEPLOYMENT", engine.DEPLOYMENT)
    monkeypatch.setattr(listener, "SWEEP", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # it lets everybody in, and says nothing
        Target("postgresql", f"postgresql://u@127.0.0.1:{silent.getsockname()[1]}/x?sslmode=disable").use()
        caretaker = Caretaker()
        caretaker.round()
        first = dict(caretaker._asking)
        first["functions"].join(DEADLINE)
        caretaker.round()
        assert caretaker._asking["markers"] is first["markers"]
        assert first["markers"].is_alive()
        assert caretaker._asking["functions"] is not first["functions"]
    for thread in caretaker._asking.values():
        thread.join(DEADLINE)
        assert not thread.is_alive()


def swept(ledger: Ledger) -> list[Any]:
    ledger.sweep("sweep")
    return ledger.list()


def accepts(server: socket.socket) -> list[Any]:
    """Hangs up on everybody; who came."""
    came: list[Any] = []

    def listen() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, who = server.accept()
                came.append(who)
                connection.close()

    threading.Thread(target=listen, daemon=True).start()
    return came


def test_p02_r46_a_success_that_was_never_reported_is_given_back_with_the_target_away(
    target: Target, ledger_url: str
) -> None:
    assert target.attempt(ledger_url, order(), booking(target)) == guard.Done(1, replayed=False)

    def away(conn_id: str) -> SqlTransaction:
        raise AssertionError("finished work opens no database")

    assert target.attempt(ledger_url, order(), booking(target), transaction=away) == guard.Done(1, replayed=True)


def test_p03_a_target_without_the_markers_table_is_perhaps_another_one_and_proves_nothing(
    target: Target, ledger_url: str, ledger: Ledger
) -> None:
    worker = Worker(target, ledger_url, "k", "in the transaction")
    worker.die()
    until(lambda: not isinstance(target.attempt(ledger_url, order(), _never), guard.Waiting))
    assert ledger.list()[0].state is State.PENDING
    other = Worker(target, ledger_url, "k", "in the transaction")
    other.die()
    target.run("drop table runguard_marker")
    how = until(lambda: target.attempt(ledger_url, order(), _never), lambda how: not isinstance(how, guard.Waiting))
    assert isinstance(how, guard.InDoubt)
    assert target.rows() == []


def _never(context: guard.GuardContext) -> None:
    raise RuntimeError("this body makes no call")


@pytest.mark.parametrize(
    "target",
    ["postgresql", *(pytest.param(kind, marks=pytest.mark.soak) for kind in ("sqlite", "mysql"))],
    indirect=True,
)
def test_p05_a_sleeper_that_had_not_begun_commits_nothing_when_it_wakes_up(
    target: Target, ledger_url: str, ledger: Ledger
) -> None:
    target.attempt(ledger_url, order("first"), booking(target, "first"))
    worker = Worker(target, ledger_url, "k", "before the marker")
    worker.freeze()
    try:
        how = until(
            lambda: target.attempt(ledger_url, order(), booking(target)), lambda how: not isinstance(how, guard.Waiting)
        )
        assert isinstance(how, guard.Done)
    finally:
        worker.thaw()
    worker.go_on()
    assert target.rows() == [(1, "first"), (how.value, "k")]
    assert [record.state for record in ledger.list()] == [State.DONE, State.DONE]


SLEEPERS = ["postgresql", "sqlite", pytest.param("mysql", marks=pytest.mark.soak)]


@pytest.mark.parametrize("target", SLEEPERS, indirect=True)
def test_p05_a_sleeper_in_its_transaction_leaves_doubt_until_it_wakes_up_and_then_it_is_booked_once(
    target: Target, ledger_url: str, ledger: Ledger
) -> None:
    """Its proof is shut out, but a function that ends the transaction itself could still commit its work."""
    target.attempt(ledger_url, order("first"), booking(target, "first"))
    worker = Worker(target, ledger_url, "k", "in the transaction")
    worker.freeze()
    try:
        until(
            lambda: target.attempt(ledger_url, order(), booking(target)),
            lambda how: isinstance(how, guard.InDoubt) or "is not over yet" in str(how),
        )
        assert target.rows() == [(1, "first")]
    finally:
        worker.thaw()
    worker.go_on()
    assert target.attempt(ledger_url, order(), booking(target)) == guard.Done(2, replayed=False)
    assert target.rows() == [(1, "first"), (2, "k")]


@pytest.mark.parametrize("target", ["postgresql"], indirect=True)
def test_p03_what_a_person_denied_is_in_doubt_again_while_the_sleeper_may_still_do_it(
    target: Target, ledger_url: str, ledger: Ledger
) -> None:
    """It was not there when the person looked, since it was not committed: nobody may go on under another key."""
    worker = Worker(target, ledger_url, "k", "in the transaction")
    worker.freeze()
    try:
        (record,) = until(lambda: swept(ledger), lambda found: found[0].state is State.IN_DOUBT)
        words = {"actor": "ann", "reason": "it is not there"}
        assert ledger.resolve(record.id, "did_not_happen", call="book", force=True, **words) == "ok"
        target.attempt(ledger_url, order(), booking(target))
        assert ledger.list()[0].state is State.IN_DOUBT
        assert ledger.accept_payload(record.id, **words) != "ok"
    finally:
        worker.thaw()
    worker.go_on()
    until(lambda: target.attempt(ledger_url, order(), booking(target)), lambda how: isinstance(how, guard.Done))
    assert target.rows() == [(1, "k")]


@pytest.mark.parametrize("target", ["postgresql"], indirect=True)
@pytest.mark.parametrize("on_doubt", ["ask", "replay"])
def test_p03_a_statement_that_commits_by_itself_and_outlives_its_process_is_a_persons(
    target: Target, ledger_url: str, ledger: Ledger, on_doubt: str
) -> None:
    again = replace(order(), on_doubt=on_doubt)
    with contextlib.closing(target.connect()) as holding:
        holding.cursor().execute("select pg_advisory_lock(1)")
        worker = Worker(target, ledger_url, "k", "at a statement that commits by itself")
        until(lambda: target.rows("select 1 from pg_locks where locktype = 'advisory' and not granted"))
        worker.die()
        until(lambda: target.attempt(ledger_url, again, booking(target)), lambda how: "is not over yet" in str(how))
        assert target.rows() == []
    until(lambda: target.rows(), what="for the server to commit what nobody waits for any more")
    how = until(
        lambda: target.attempt(ledger_url, again, booking(target)), lambda how: not isinstance(how, guard.Waiting)
    )
    assert isinstance(how, guard.InDoubt)
    assert target.rows() == [(1, "k"), (2, "k")], "both by the first attempt"


def test_p03_what_the_function_raises_is_rolled_back_and_proven_not_applied(
    target: Target, ledger_url: str, ledger: Ledger
) -> None:
    def half(connection: Any, customer: str) -> int:
        target.book(connection, customer)
        raise TimeoutError("the credit check did not answer")

    how = target.attempt(ledger_url, order(), lambda context: context.sql("book", "orders", half, customer="k"))
    assert isinstance(how, guard.Ended)
    assert how.retry
    assert target.rows() == []
    call = the_call(ledger)
    assert (call.state, call.effect) == (CallState.FAILED, Effect.NOT_APPLIED)
    assert target.attempt(ledger_url, order(), booking(target)) == guard.Done(1, replayed=False)
    assert target.rows() == [(1, "k")]


def test_p03_an_error_of_the_database_that_was_swallowed_is_no_success(
    target: Target, ledger_url: str, ledger: Ledger
) -> None:
    def careless(connection: Any, customer: str) -> str:
        target.book(connection, customer)
        try:
            connection.cursor().execute("insert into nothing values (1)")
        except Exception:
            return "ok"
        raise AssertionError("there is no such table")

    how = target.attempt(ledger_url, order(), lambda context: context.sql("book", "orders", careless, customer="k"))
    if target.kind == "postgresql":  # its transaction is in error from then on
        assert isinstance(how, guard.Ended)
        assert the_call(ledger).effect is Effect.NOT_APPLIED
        assert target.rows() == []
    else:
        assert how == guard.Done("ok", replayed=False)
        assert target.rows() == [(1, "k")]


@pytest.mark.parametrize("how_it_ends", ["commit", "raise"])
def test_p03_a_function_that_ends_the_transaction_itself_is_a_persons(
    target: Target, ledger_url: str, ledger: Ledger, how_it_ends: str
) -> None:
    def ends(connection: Any, customer: str) -> int:
        number = target.book(connection, customer)
        connection.cursor().execute("commit")
        if how_it_ends == "raise":
            raise ValueError("after its own commit")
        return number

    how = target.attempt(ledger_url, order(), lambda context: context.sql("book", "orders", ends, customer="k"))
    assert isinstance(how, guard.Ended)
    assert "In doubt" in how.message
    assert target.rows() == [(1, "k")]
    for _ in range(2):
        again = target.attempt(ledger_url, order(), booking(target))
        assert isinstance(again, guard.Ended)
        assert "In doubt" in again.message
    assert target.rows() == [(1, "k")]


def hangs_up(target: Target, connection: Any) -> None:
    """The server ends the session that is given, and it is gone."""
    cursor = connection.cursor()
    cursor.execute("select pg_backend_pid()" if target.kind == "postgresql" else "select connection_id()")
    (session,) = cursor.fetchone()
    target.run(f"select pg_terminate_backend({session}, 60000)" if target.kind == "postgresql" else f"kill {session}")
    cursor.execute("select 1")


def collides(target: Target, connection: Any) -> None:
    """Becomes MySQL's victim of a deadlock: the transaction that wrote less."""
    mine = connection.cursor()
    mine.execute("update locks set v = v + 1 where id = 1")
    with contextlib.closing(target.connect()) as other:
        theirs = other.cursor()
        theirs.executemany("insert into heavy values (%s)", [(number,) for number in range(1000)])
        theirs.execute("update locks set v = v + 1 where id = 2")
        waiting = threading.Thread(target=theirs.execute, args=("update locks set v = v + 1 where id = 1",))
        waiting.start()
        try:
            until(lambda: waits_for_a_lock(target), bool)
            mine.execute("update locks set v = v + 1 where id = 2")
        finally:
            waiting.join()


def waits_for_a_lock(target: Target) -> bool:
    return bool(target.rows("select 1 from information_schema.innodb_trx where trx_state = 'LOCK WAIT'"))


@pytest.mark.parametrize("target", ["postgresql", "mysql"], indirect=True)
@pytest.mark.parametrize("commits", [False, True])
def test_p03_what_the_server_ended_is_undone_only_if_nothing_of_it_was_committed_before(
    target: Target, ledger_url: str, ledger: Ledger, commits: bool
) -> None:
    """An ORM's own commit, or DDL in MySQL, and then the connection breaks or is the victim of a deadlock: that error
    undoes only what came after."""
    accidents = [hangs_up]
    if target.kind == "mysql":
        accidents.append(collides)
        target.run(
            "create table if not exists locks (id integer primary key, v integer)",
            "create table if not exists heavy (id integer)",
            "replace into locks values (1, 0), (2, 0)",
        )
    for number, accident in enumerate(accidents, 1):

        def books(connection: Any, customer: str, accident: Any = accident) -> int:
            booked = target.book(connection, customer)
            if commits:
                ddl = target.kind == "mysql"
                connection.cursor().execute("create table if not exists scratch (id integer)" if ddl else "commit")
            accident(target, connection)
            return booked

        key = accident.__name__
        body = lambda context, key=key, books=books: context.sql("book", "orders", books, customer=key)  # noqa: E731
        how = target.attempt(ledger_url, order(key), body)
        (call,) = ledger.calls(number)
        again = target.attempt(ledger_url, order(key), booking(target, key))
        if commits:
            assert call.state is CallState.IN_DOUBT, call.evidence
            assert isinstance(again, guard.InDoubt), how
        else:
            assert (call.state, call.effect) == (CallState.FAILED, Effect.NOT_APPLIED), call.evidence
            assert again == guard.Done(number, replayed=False), how
    assert target.rows() == [(number, accident.__name__) for number, accident in enumerate(accidents, 1)]


def test_ending_the_transaction_through_the_connection_is_refused(
    target: Target, ledger_url: str, ledger: Ledger
) -> None:
    def commits(connection: Any, customer: str) -> None:
        target.book(connection, customer)
        connection.commit()

    how = target.attempt(ledger_url, order(), lambda context: context.sql("book", "orders", commits, customer="k"))
    assert isinstance(how, guard.Ended)
    assert "connection.commit() belongs to guard.sql" in how.message
    assert target.rows() == []
    assert the_call(ledger).effect is Effect.NOT_APPLIED


class CutAtCommit(SqlTransaction):
    """The connection breaks while the commit is on its way: before it arrived, or with the answer."""

    arrives = False
    marker_away = False

    def _begun(self) -> tuple[Any, Any]:
        connection, cursor = super()._begun()
        cut = self

        class Cut:
            def commit(self) -> None:
                if cut.arrives:
                    connection.commit()
                connection.close()
                raise ConnectionError("server closed the connection unexpectedly")

            def __getattr__(self, name: str) -> Any:
                return getattr(connection, name)

        return Cut(), cursor

    def _void_quietly(self, marker: Any) -> tuple[str, str | None]:
        return ("unknown", None) if self.marker_away else super()._void_quietly(marker)


@pytest.mark.parametrize("arrives", [True, False])
@pytest.mark.parametrize("marker_away", [True, False])
def test_p03_a_commit_without_an_answer_is_decided_by_the_marker(
    target: Target, ledger_url: str, ledger: Ledger, arrives: bool, marker_away: bool
) -> None:
    def cut(conn_id: str) -> SqlTransaction:
        transaction = CutAtCommit(conn_id)
        transaction.arrives, transaction.marker_away = arrives, marker_away
        return transaction

    how = target.attempt(ledger_url, order(), booking(target), transaction=cut)
    if marker_away:
        assert isinstance(how, guard.Ended)
        assert the_call(ledger).state is CallState.IN_DOUBT
    elif arrives:
        assert how == guard.Done(1, replayed=False)
    else:
        assert isinstance(how, guard.Ended)
        assert (the_call(ledger).state, the_call(ledger).effect) == (CallState.FAILED, Effect.NOT_APPLIED)
    assert isinstance(target.attempt(ledger_url, order(), booking(target)), guard.Done)
    assert target.rows() == [(1, "k")]


def test_p12_without_the_right_to_create_the_table_nothing_is_done_and_the_ddl_is_said(
    postgres: str, ledger_url: str, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    with empty_database(postgres) as url:
        target = Target("postgresql", url)
        monkeypatch.setenv("AIRFLOW_CONN_ORDERS", url)
        target.run(
            "create table orders (id integer, customer varchar(100))",
            "revoke create on schema public from public",
            "drop role if exists clerk",
            "create role clerk login password 'c'",
            "grant all on orders to clerk",
        )
        at = url.rpartition("@")[2] if "@" in url else url.partition("://")[2]
        clerk = Target("postgresql", f"postgresql://clerk:c@{at}")
        clerk.use()
        how = clerk.attempt(ledger_url, order(), booking(clerk))
        assert isinstance(how, guard.Ended)
        assert "create table if not exists runguard_marker" in how.message
        assert target.rows() == []
        target.run("reassign owned by clerk to current_user", "drop owned by clerk", "drop role clerk")


@pytest.mark.parametrize("target", ["postgresql"], indirect=True)
def test_p13_a_role_that_may_not_delete_its_marker_is_told_so_and_nothing_is_in_doubt(
    target: Target, ledger_url: str, ledger: Ledger
) -> None:
    target.attempt(ledger_url, order("first"), booking(target, "first"))  # the marker's table is there
    target.run("drop role if exists booker", "create role booker login")
    target.run("grant select, insert, update on orders, runguard_marker to booker")
    try:
        limited = Target("postgresql", re.sub("//[^@]*@", "//booker@", target.url))
        limited.use()
        how = limited.attempt(ledger_url, order(), booking(limited))
        assert isinstance(how, guard.Ended)
        assert "permission denied" in how.message
        assert ledger.list()[1].state is not State.IN_DOUBT
        assert target.rows() == [(1, "first")]
    finally:
        target.use()
        target.run("drop owned by booker", "drop role booker")
