"""The doctor finds what is wrong, says what it means and what to do, and is never itself the traceback."""

from __future__ import annotations

import re
import urllib.parse
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import psycopg
import pytest

from airflow_runguard.config import Settings, settings
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.migrations import upgrade
from airflow_runguard.doctor import Check, _clock, _grants, examine
from demo.servers import PgBouncer, Postgres, Redis
from tests.core import engine

NOBODY = "postgresql://postgres@127.0.0.1:1/nothing"
LEDGER_CHECKS = {
    "ledger",
    "grants",
    "schema",
    "deployment",
    "lost_time",
    "writable",
    "durability",
    "isolation",
    "clock",
    "pooler",
    "connections",
}
HERE = {"psycopg", "failure_rules", "hidden_retries"}
AIRFLOW_CHECKS = {"redis", "heartbeat_timeout", "callback_time", "triggerer", "retries"}


def look(url: str, deployment: str = engine.DEPLOYMENT, options: Settings | None = None) -> dict[str, Check]:
    checks = examine(lambda: psycopg.connect(url), deployment=deployment, settings=options)
    assert len({check.name for check in checks}) == len(checks)
    for check in checks:
        assert check.found
        assert check.meaning
        assert check.remedy or check.status in ("ok", "skipped")
    return {check.name: check for check in checks}


def status(checks: dict[str, Check], *names: str) -> list[str]:
    return [checks[name].status for name in names]


def with_option(url: str, option: str) -> str:
    return f"{url}?{urllib.parse.urlencode({'options': f'-c {option}'}, quote_via=urllib.parse.quote)}"


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Postgres]:
    """A server that keeps what it was told, unlike the one that the other tests share."""
    with Postgres(tmp_path_factory.mktemp("sound")) as server:
        yield server


@pytest.fixture
def ledger_url(sound: Postgres) -> Iterator[str]:
    url = sound.create_database("book")
    upgrade(url, deployment=engine.DEPLOYMENT)
    yield url
    sound.drop_database("book")


# -- the ledger and its server -----------------------------------------------------------------------------------------


def test_a_sound_ledger_passes_and_without_airflow_its_checks_are_skipped_with_the_reason(ledger_url: str) -> None:
    checks = look(ledger_url)
    assert set(checks) == LEDGER_CHECKS | AIRFLOW_CHECKS | HERE
    assert LEDGER_CHECKS | {"psycopg", "failure_rules"} <= {name for name, one in checks.items() if one.status == "ok"}
    assert all("--dsn" in checks[name].found for name in AIRFLOW_CHECKS)


def test_a_ledger_out_of_reach_is_one_finding_and_hides_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__CORE__TASK_SUCCESS_OVERTIME", "5")
    checks = look(NOBODY, options=settings())
    assert checks["ledger"].status == "fail"
    assert set(status(checks, *(LEDGER_CHECKS - {"ledger"}))) == {"skipped"}
    assert status(checks, "psycopg", "callback_time") == ["ok", "warn"]


@pytest.fixture
def empty_database(sound: Postgres) -> Iterator[str]:
    try:
        yield sound.create_database("runguard_test_doctor")
    finally:
        sound.drop_database("runguard_test_doctor")


def test_a_database_without_schema_is_told_to_upgrade_and_the_server_is_still_looked_at(empty_database: str) -> None:
    checks = look(empty_database)
    seen = status(checks, "grants", "schema", "deployment", "lost_time", "durability")
    assert seen == ["skipped", "fail", "skipped", "skipped", "ok"]
    assert "db upgrade" in checks["schema"].remedy


@pytest.mark.parametrize(("version", "remedy"), [(0, "db upgrade"), (99, "Install the newer version")])
def test_another_schema_version_says_which_side_is_behind(ledger_url: str, version: int, remedy: str) -> None:
    with psycopg.connect(ledger_url) as connection:
        connection.execute("update runguard.meta set schema_version = %s", [version])
    checks = look(ledger_url)
    assert checks["schema"].status == "fail"
    assert remedy in checks["schema"].remedy


@pytest.fixture
def roles(ledger_url: str) -> Iterator[psycopg.Connection]:
    """The owner's session, with the two roles that docs/operations.md makes, not granted anything."""
    with psycopg.connect(ledger_url, autocommit=True) as owner:
        owner.execute("create role runguard_worker login; create role runguard_reader login")
        try:
            yield owner
        finally:
            owner.execute("drop owned by runguard_worker, runguard_reader; drop role runguard_worker, runguard_reader")


def rights(url: str, role: str, of_tasks: bool = False) -> Check:
    (check,) = _grants(lambda: psycopg.connect(with_option(url, f"role={role}"), autocommit=True), of_tasks=of_tasks)
    return check


def type_remedy(owner: psycopg.Connection, check: Check, words: str = "") -> None:
    for typed in re.findall(f"{words}[^`]*`(grant [^`]*)`", check.remedy):
        owner.execute(typed)


def test_what_operations_grants_is_enough_and_each_right_that_is_missing_is_named_with_its_grant(
    ledger_url: str, roles: psycopg.Connection
) -> None:
    text = (Path(__file__).parents[1] / "docs/operations.md").read_text(encoding="utf-8")
    roles.execute("".join(re.findall(r"^grant [^;]*;", text, flags=re.MULTILINE)))
    assert (rights(ledger_url, "runguard_worker", True).status, rights(ledger_url, "runguard_reader").status) == (
        "ok",
    ) * 2
    of_tasks = rights(ledger_url, "runguard_reader", True)
    assert (of_tasks.status, "makes no call" in of_tasks.meaning) == ("fail", True)
    roles.execute(
        "revoke insert on runguard.event, runguard.call from runguard_worker;"
        "revoke update on runguard.gate from runguard_worker; revoke delete on runguard.listed from runguard_worker;"
        "revoke select on runguard.freeze from runguard_reader;"
        "revoke execute on function runguard.broken from public"
    )
    worker, reader = rights(ledger_url, "runguard_worker", True), rights(ledger_url, "runguard_reader")
    assert (worker.status, reader.status) == ("fail", "fail")
    assert worker.found == (
        "Role runguard_worker lacks delete on runguard.listed; insert on runguard.call, runguard.event; "
        "update on runguard.gate; execute on function runguard.broken(r runguard.record)"
    )
    assert reader.remedy.startswith(
        "To look, type as the schema's owner: `grant select on runguard.freeze to runguard_reader; grant execute on"
    )
    type_remedy(roles, worker)
    type_remedy(roles, reader, "To look")
    assert rights(ledger_url, "runguard_worker", True).found == "Role runguard_worker has a worker's rights"
    assert rights(ledger_url, "runguard_reader").found == "Role runguard_reader has a reader's rights"


def used_by_the_ledgers_own_statements() -> set[tuple[str, str]]:
    sql = Path(__file__).parents[1] / "airflow_runguard/core/sql"
    used: set[tuple[str, str]] = set()
    for statement in ";".join(file.read_text(encoding="utf-8") for file in sql.glob("*.sql")).split(";"):
        for verb, table in re.findall(r"\b(insert into|update|delete from) runguard\.(\w+)", statement):
            used.add((verb.split()[0], table))
            if verb == "insert into" and "do update" in statement:
                used.add(("update", table))
    return used - {("insert", "transition")}  # `db upgrade` alone writes the rules


def asked_of(check: Check) -> set[tuple[str, str]]:
    (typed,) = re.findall(r"change something: `(.*)`", check.remedy)
    grants = re.findall(r"grant (\w+) on ([^;]*) to", typed)
    return {(verb, table.removeprefix("runguard.")) for verb, tables in grants for table in tables.split(", ")}


def test_a_role_that_may_not_read_the_ledger_is_told_what_to_type_for_which_purpose(
    ledger_url: str, roles: psycopg.Connection
) -> None:
    parts = urllib.parse.urlsplit(ledger_url)
    url = parts._replace(netloc=f"runguard_reader@{parts.hostname}:{parts.port}").geturl()
    checks = look(url)
    assert status(checks, "ledger", "grants", "schema", "clock") == ["ok", "fail", "fail", "ok"]
    assert "permission denied" in checks["schema"].found
    assert checks["schema"].remedy == "Type what grants says."
    assert asked_of(checks["grants"]) == used_by_the_ledgers_own_statements()
    type_remedy(roles, checks["grants"], "To look")
    assert status(look(url), "grants", "schema", "deployment", "lost_time") == ["ok"] * 4


def test_another_deployments_ledger_is_a_failure(ledger_url: str) -> None:
    checks = look(ledger_url, deployment="other")
    assert status(checks, "deployment", "lost_time") == ["fail", "skipped"]
    assert "'test'" in checks["deployment"].found


def test_p14_lost_time_is_a_failure_that_names_the_way_out(ledger_url: str) -> None:
    with closing(Ledger(lambda: psycopg.connect(ledger_url), deployment=engine.DEPLOYMENT)) as ledger:
        ledger.lose("restored from a backup")
    checks = look(ledger_url)
    assert checks["lost_time"].status == "fail"
    assert "restored from a backup" in checks["lost_time"].found
    assert "acknowledge-restore" in checks["lost_time"].remedy


@pytest.mark.parametrize(
    ("option", "name", "expected"),
    [
        ("default_transaction_isolation=serializable", "isolation", "warn"),
        ("default_transaction_read_only=on", "writable", "fail"),
        ("synchronous_commit=off", "durability", "ok"),
    ],
)
def test_what_the_role_has_set_is_found(ledger_url: str, option: str, name: str, expected: str) -> None:
    assert look(with_option(ledger_url, option))[name].status == expected


def test_a_server_that_forgets_and_is_small_is_found(server_directory: Path) -> None:
    small = {"fsync": "off", "full_page_writes": "off", "max_connections": "10"}
    with Postgres(server_directory, settings=small) as server:
        url = server.create_database("book")
        upgrade(url, deployment=engine.DEPLOYMENT)
        checks = look(url)
    assert status(checks, "durability", "connections", "schema") == ["fail", "warn", "ok"]
    assert "fsync and full_page_writes" in checks["durability"].remedy


@pytest.mark.skipif(not PgBouncer.available(), reason="PgBouncer is not installed (apt-get install pgbouncer)")
@pytest.mark.parametrize("mode", ["transaction", "session"])
def test_a_pooler_is_noticed_and_nothing_else_breaks_behind_it(
    ledger_url: str, server_directory: Path, mode: str
) -> None:
    with PgBouncer(server_directory, ledger_url, mode) as pooler:
        checks = look(pooler.url)
    assert checks["pooler"].status == "warn"
    assert set(status(checks, *(LEDGER_CHECKS - {"pooler"}))) == {"ok"}


@pytest.mark.parametrize(("offset", "expected"), [(0.4, "ok"), (-4.9, "ok"), (5.1, "warn"), (-3600.0, "warn")])
def test_clocks_that_are_five_seconds_apart_are_a_warning(offset: float, expected: str) -> None:
    (check,) = _clock({"offset": offset})
    assert check.status == expected
    assert ("behind" if offset > 0 else "ahead of") in check.found


# -- Redis and Airflow -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seconds", "expected"), [("134", "fail"), ("135", "ok")])
def test_a_short_heartbeat_timeout_is_a_failure(
    ledger_url: str, monkeypatch: pytest.MonkeyPatch, seconds: str, expected: str
) -> None:
    monkeypatch.setenv("AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT", seconds)
    assert look(ledger_url, options=settings())["heartbeat_timeout"].status == expected


def test_more_tasks_than_connections_is_a_warning(ledger_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__CORE__PARALLELISM", "5000")
    check = look(ledger_url, options=settings())["connections"]
    assert check.status == "warn"
    assert "5000" in check.found


@pytest.mark.usefixtures("needs_redis")
def test_a_redis_that_drops_leases_and_one_that_is_gone_are_warnings(
    ledger_url: str, monkeypatch: pytest.MonkeyPatch, server_directory: Path
) -> None:
    from airflow_runguard.core.resp import Redis as Client

    def check() -> Check:
        return look(ledger_url, options=settings())["redis"]

    assert check().status == "skipped"
    with Redis(server_directory) as server:
        monkeypatch.setenv("AIRFLOW_CONN_RUNGUARD_REDIS", server.url)
        assert check().status == "ok"
        client = Client.from_url(server.url)
        client.command("CONFIG", "SET", "maxmemory-policy", "allkeys-lru")
        client.close()
        assert (check().status, "allkeys-lru" in check().found) == ("warn", True)
    gone = check()
    assert gone.status == "warn"
    assert "ledger's own lease" in gone.meaning
    monkeypatch.setenv("AIRFLOW_CONN_RUNGUARD_REDIS", '{"conn_type": "redis", "schema": "nonsense"}')
    assert check().status == "fail"
