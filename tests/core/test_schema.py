"""The schema: upgraded twice, by a DBA from its text, used without DDL rights; and ledgers that are not ready."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from airflow_runguard.core import guard
from airflow_runguard.core.errors import LedgerNotReady
from airflow_runguard.core.leases import Leases
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.migrations import upgrade
from airflow_runguard.core.record import TRANSITIONS, State, Verdict, Witness
from tests.core import books, engine
from tests.core.books import bring, enter

SQL = psycopg.Connection[Any]


@pytest.fixture
def empty_url(postgres: str) -> Iterator[str]:
    with books.empty_database(postgres) as url:
        yield url


SCHEMA = {
    "columns": """select table_name, column_name, ordinal_position, data_type, is_nullable, column_default, is_identity
                    from information_schema.columns where table_schema = 'runguard'""",
    "constraints": """select conrelid::regclass::text, conname, pg_get_constraintdef(oid) from pg_constraint
                       where connamespace = 'runguard'::regnamespace""",
    "indexes": "select indexdef from pg_indexes where schemaname = 'runguard'",
    "triggers": """select tgrelid::regclass::text, pg_get_triggerdef(oid) from pg_trigger
                    where not tgisinternal and tgrelid::regclass::text like 'runguard.%'""",
    "functions": "select pg_get_functiondef(oid) from pg_proc where pronamespace = 'runguard'::regnamespace",
    "arrows": "select source, target from runguard.transition",
    "version": "select version_num from runguard.alembic_version",
    "meta": "select deployment, schema_version, system_identifier, timeline, epoch, lost from runguard.meta",
}


def schema(url: str) -> dict[str, list[tuple[Any, ...]]]:
    with psycopg.connect(url) as connection:
        return {name: sorted(connection.execute(query.encode()).fetchall()) for name, query in SCHEMA.items()}


def test_running_the_upgrade_twice_changes_nothing(ledger_url: str, ledger: Ledger) -> None:
    before, installation = schema(ledger_url), ledger.installation
    held = bring(ledger, State.DONE, engine.order("kept"))
    upgrade(ledger_url, deployment=engine.DEPLOYMENT)
    assert schema(ledger_url) == before
    with closing(engine.open_ledger(ledger_url)) as again:
        assert again.installation == installation
        assert again.claim(held.order, engine.holder()).verdict is Verdict.REPLAY


def test_the_text_for_a_dba_makes_the_same_schema(empty_url: str, ledger_url: str) -> None:
    text = upgrade(empty_url, deployment=engine.DEPLOYMENT, sql=True)
    with psycopg.connect(empty_url, autocommit=True) as connection:
        assert connection.execute("select to_regnamespace('runguard')").fetchone() == (None,)  # it only wrote text
        connection.execute(text.encode())
    by_hand, by_upgrade = schema(empty_url), schema(ledger_url)
    assert {name: rows for name, rows in by_hand.items() if name != "meta"} == {
        name: rows for name, rows in by_upgrade.items() if name != "meta"
    }
    assert len(by_hand["arrows"]) == len(TRANSITIONS)
    with closing(engine.open_ledger(empty_url)) as ledger:
        assert enter(ledger, engine.order("first")).settle(State.DONE).state is State.DONE


def test_the_upgrade_of_another_deployment_s_ledger_is_refused_and_changes_nothing(ledger_url: str) -> None:
    before = schema(ledger_url)
    with pytest.raises(LedgerNotReady, match="'test'"):
        upgrade(ledger_url, deployment="other")
    assert schema(ledger_url) == before


# -- a role without DDL rights -----------------------------------------------------------------------------------------


@pytest.fixture
def worker_url(postgres: str, ledger_url: str, sql: SQL) -> Iterator[str]:
    """The ledger's URL for a role that may use the schema's tables and functions and nothing else."""
    role = f"runguard_test_{uuid.uuid4().hex[:12]}"
    sql.execute(f"create role {role}")
    sql.execute(f"grant usage on schema runguard to {role}")
    sql.execute(f"grant select, insert, update on all tables in schema runguard to {role}")
    sql.execute(f"grant execute on all functions in schema runguard to {role}")
    try:
        yield f"{ledger_url}?options=-c%20role%3D{role}"
    finally:
        sql.execute(f"drop owned by {role}")
        sql.execute(f"drop role {role}")


def test_a_role_without_ddl_rights_works_with_an_upgraded_ledger(worker_url: str) -> None:
    who = {"actor": "ann", "reason": "a test"}
    with closing(engine.open_ledger(worker_url)) as ledger:
        leases = guard.ready(ledger, None)
        done = guard.run(ledger, leases, engine.work(engine.order("done"), lambda _: "ch_1"))
        assert done == guard.Done("ch_1", replayed=False)
        for state in State:
            bring(ledger, state, engine.order(f"to {state}"))
        record = ledger.get(engine.identity("to in_doubt"))
        assert record is not None
        assert ledger.resolve(record.id, "happened", **who) == "ok"
        assert ledger.reopen(record.id, seen_generation=1, again_although_applied=True, **who) == "ok"
        ledger.sweep("sweep")
        assert not ledger.confront(Witness(ledger.epoch, 10**6, "gone"))
        assert ledger.acknowledge_restore(lost_since=datetime.now(UTC), **who) == ledger.epoch + 1
        with pytest.raises(psycopg.errors.InsufficientPrivilege):
            ledger._open().execute("drop table runguard.event")


def test_a_role_that_may_not_even_read_is_told_so(ledger_url: str, sql: SQL) -> None:
    role = f"runguard_test_{uuid.uuid4().hex[:12]}"
    sql.execute(f"create role {role}")
    try:
        url = f"{ledger_url}?options=-c%20role%3D{role}"
        assert "permission denied" in refused(url)
    finally:
        sql.execute(f"drop role {role}")


# -- not ready ---------------------------------------------------------------------------------------------------------


def refused(url: str, deployment: str = engine.DEPLOYMENT) -> str:
    ledger = Ledger(lambda: psycopg.connect(url), deployment=deployment)
    with closing(ledger), pytest.raises(LedgerNotReady) as refusal:
        guard.ready(ledger, None)
    assert "No call was made" in str(refusal.value)
    return str(refusal.value)


def test_p12_a_database_without_the_schema_is_not_ready_and_names_the_command(empty_url: str) -> None:
    assert "airflow runguard db upgrade" in refused(empty_url)
    with closing(Ledger(lambda: psycopg.connect(empty_url), deployment=engine.DEPLOYMENT)) as ledger:
        made: list[int] = []
        how = guard.run(ledger, Leases(None, ""), engine.work(engine.order("x"), lambda _: made.append(1)))
    assert isinstance(how, guard.Ended)
    assert "airflow runguard db upgrade" in how.message
    assert made == []


@pytest.mark.parametrize(("version", "remedy"), [(0, "db upgrade"), (99, "Install the newer version")])
def test_p12_another_schema_version_is_not_ready_and_names_the_command(
    ledger_url: str, sql: SQL, version: int, remedy: str
) -> None:
    sql.execute("update runguard.meta set schema_version = %s", [version])
    assert remedy in refused(ledger_url)


def test_p12_another_deployment_s_ledger_is_not_ready(ledger_url: str) -> None:
    said = refused(ledger_url, "staging")
    assert "'test'" in said
    assert "[runguard] deployment" in said


def test_a_deployment_s_tests_may_use_its_ledger_under_their_own_name(ledger_url: str) -> None:
    with closing(Ledger(lambda: psycopg.connect(ledger_url), deployment="test~dag.test")) as ledger:
        ledger.check()


def test_p12_a_schema_that_goes_away_during_work_is_not_ready(ledger: Ledger, sql: SQL) -> None:
    held = enter(ledger, engine.order("cut off", calls="explicit"))
    sql.execute("drop schema runguard cascade")
    with pytest.raises(LedgerNotReady, match="db upgrade"):
        held.intent("charge")
    with pytest.raises(LedgerNotReady, match="db upgrade"):
        ledger.claim(held.order, engine.holder())
