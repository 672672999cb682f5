"""The ledger behind a real PgBouncer in transaction mode: no session state is needed, and nothing is left behind."""

from __future__ import annotations

import os
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psycopg
import pytest

from airflow_runguard.core import guard
from airflow_runguard.core.leases import Leases
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.migrations import upgrade
from airflow_runguard.core.record import State, Verdict
from demo.servers import PgBouncer
from tests.core import books, engine
from tests.core.books import bring, enter, kinds
from tests.core.test_claims import one_run, race
from tests.core.test_servers_away import CUT

SQL = psycopg.Connection[Any]


@pytest.fixture(scope="module")
def bouncer(postgres: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[PgBouncer]:
    if not PgBouncer.available() and os.environ.get("CI") != "true":
        pytest.skip("PgBouncer is not installed: apt-get install pgbouncer")
    with PgBouncer(tmp_path_factory.mktemp("bouncer"), postgres) as running:
        yield running


@pytest.fixture
def pooled_url(bouncer: PgBouncer, ledger_url: str) -> str:
    netloc = urllib.parse.urlsplit(bouncer.url).netloc
    return urllib.parse.urlsplit(ledger_url)._replace(netloc=netloc).geturl()


@pytest.fixture
def pooled(pooled_url: str) -> Iterator[Ledger]:
    with closing(engine.open_ledger(pooled_url)) as ledger:
        yield ledger


@pytest.fixture
def careless(ledger_url: str, sql: SQL) -> None:
    name = urllib.parse.urlsplit(ledger_url).path[1:]
    sql.execute(f"alter database {name} set default_transaction_isolation = serializable")
    sql.execute(f"alter database {name} set synchronous_commit = off")


def test_p01_racing_claims_through_a_pooler_grant_one(pooled_url: str, open_ledger: Callable[[str], Ledger]) -> None:
    rounds = race(lambda: open_ledger(pooled_url), 20, [engine.order(f"race/{n}") for n in range(20)])
    assert all(one_run(answers) for answers in rounds)


@pytest.mark.usefixtures("careless")
def test_p01_racing_claims_through_a_pooler_to_a_serializable_database_grant_one(
    pooled_url: str, open_ledger: Callable[[str], Ledger]
) -> None:
    rounds = race(lambda: open_ledger(pooled_url), 20, [engine.order(f"race/{n}") for n in range(5)])
    assert all(one_run(answers) for answers in rounds)


def test_p06_through_a_pooler_nobody_listens_on_a_connection_that_others_get(pooled: Ledger, ledger: Ledger) -> None:
    assert not pooled.listen()
    pooled.rest(0.01)
    assert ledger.listen()


def test_every_state_is_reached_and_answered_through_a_pooler(pooled: Ledger) -> None:
    answers = {state: bring(pooled, state, engine.order(state)) for state in State}
    verdicts = {state: pooled.claim(held.order, engine.holder()).verdict for state, held in answers.items()}
    assert verdicts == {
        State.PENDING: Verdict.RUN,
        State.RUNNING: Verdict.BUSY,
        State.DONE: Verdict.REPLAY,
        State.FAILED: Verdict.RUN,
        State.PAUSED: Verdict.PAUSED,
        State.IN_DOUBT: Verdict.IN_DOUBT,
    }


def test_p03_a_dead_holder_s_call_is_in_doubt_through_a_pooler(pooled: Ledger, sql: SQL) -> None:
    held = enter(pooled, engine.order("dead", calls="explicit"))
    assert held.intent("charge") == "run"
    books.expire(sql, held.id)
    assert pooled.claim(held.order, engine.holder()).verdict is Verdict.IN_DOUBT
    assert held.outcome("charge").state is State.PENDING
    assert kinds(pooled, held.id)[-2:] == ["answered", "released"]


def test_p04_many_calls_and_a_cut_server_connection_through_a_pooler(pooled: Ledger, sql: SQL) -> None:
    made: list[int] = []

    def body(context: guard.GuardContext) -> int:
        for n in range(20):
            context.call(f"item {n}", lambda n=n: made.append(n))
            if n == 10:
                sql.execute(CUT)
        return len(made)

    work = engine.work(engine.order("many", calls="explicit"), body)
    assert guard.run(pooled, Leases(None, ""), work) == guard.Done(20, replayed=False)
    assert made == list(range(20))


def test_an_upgrade_through_a_pooler_works(bouncer: PgBouncer, postgres: str) -> None:
    with books.empty_database(postgres) as url:
        netloc = urllib.parse.urlsplit(bouncer.url).netloc
        through = urllib.parse.urlsplit(url)._replace(netloc=netloc).geturl()
        upgrade(through, deployment=engine.DEPLOYMENT)
        upgrade(through, deployment=engine.DEPLOYMENT)
        with closing(engine.open_ledger(through)) as ledger:
            assert enter(ledger, engine.order("first")).settle(State.DONE).state is State.DONE


def test_p14_a_copy_is_noticed_through_a_pooler_that_served_the_original_before(
    bouncer: PgBouncer, postgres: str, pooled: Ledger, ledger_url: str
) -> None:
    enter(pooled, engine.order("original")).settle(State.DONE)
    pooled.close()
    name = urllib.parse.urlsplit(ledger_url).path[1:]
    with psycopg.connect(postgres, autocommit=True) as admin:
        admin.execute("select pg_terminate_backend(pid, 60000) from pg_stat_activity where datname = %s", [name])
    with books.empty_database(postgres, name) as copy:
        netloc = urllib.parse.urlsplit(bouncer.url).netloc
        url = urllib.parse.urlsplit(copy)._replace(netloc=netloc).geturl()
        with closing(engine.open_ledger(url)) as ledger:
            assert ledger.claim(engine.order("new"), engine.holder()).verdict is Verdict.LOST_TIME
