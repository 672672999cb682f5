"""Whether the promises can be kept here: ledger, server, Redis, and Airflow's own settings.

Every check stands alone: what is out of reach is a finding with a remedy, never a traceback, and never hides the
others. ``fail`` = a promise or the work is at risk; ``warn`` = slower, or less than it could be. Without Airflow
(``settings`` is ``None``) its checks are skipped with the reason, and nothing of it is imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import entry_points
from importlib.resources import files
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import psycopg
from psycopg.rows import dict_row

from airflow_runguard.core.errors import RunGuardError
from airflow_runguard.core.failures import SWITCHES
from airflow_runguard.core.failures.book import GROUP
from airflow_runguard.core.ledger import Ledger, belongs
from airflow_runguard.core.record import SCHEMA_VERSION
from airflow_runguard.core.seam import NEWER, UPGRADE, Connect

if TYPE_CHECKING:
    from airflow_runguard.config import Settings

OK, WARN, FAIL, SKIPPED = "ok", "warn", "fail", "skipped"

HEARTBEAT_FLOOR = 135
"""Seconds. A supervisor that lost the API server kills its task after three failed heartbeats, each with five retries;
a scheduler that gives up earlier starts the next try while the task still calls."""
CALLBACK_FLOOR = 20
"""Seconds; Airflow's default."""
CLOCK_LIMIT = 5.0
SLACK = 10
"""Connections that should stay free beside one for each task: people, sweeps, upgrades."""


@dataclass(frozen=True, slots=True)
class Check:
    """:param found: what is there. :param meaning: for the work and the money. :param remedy: '' where all is well."""

    name: str
    status: str
    found: str
    meaning: str
    remedy: str = ""


Checks = Iterable[Check]


def examine(connect: Connect, *, deployment: str, settings: Settings | None) -> list[Check]:
    """All checks, in the order in which a person would mend them."""
    server: dict[str, Any] = {}

    def reached() -> Checks:
        server.update(_look(connect))
        yield Check("ledger", OK, f"PostgreSQL {server['version']} answers", "Tasks can book what they do.")

    checks = list(_alone(("ledger",), reached))
    if server:
        for names, examined in (
            (("grants",), lambda: _grants(connect, of_tasks=settings is not None)),
            (("schema", "deployment", "lost_time"), lambda: _book(connect, deployment)),
            (("writable",), lambda: _writable(server)),
            (("durability",), lambda: _durability(server)),
            (("isolation",), lambda: _isolation(server)),
            (("clock",), lambda: _clock(server)),
            (("pooler",), lambda: _pooler(server)),
            (("connections",), lambda: _connections(server, settings)),
        ):
            checks += _alone(names, examined)
    else:
        unseen = ("grants", "schema", "deployment", "lost_time", "writable", "durability", "isolation", "clock")
        checks += _skipped((*unseen, "pooler", "connections"), "The ledger is out of reach.")
    checks += _alone(("psycopg",), _psycopg)
    checks += _alone(("hidden_retries",), _hidden_retries)
    checks += _alone(("failure_rules",), _failure_rules)
    of_airflow: tuple[tuple[str, Callable[[Settings], Checks]], ...] = (
        ("redis", _redis),
        ("heartbeat_timeout", _heartbeat),
        ("callback_time", _callback_time),
        ("triggerer", _triggerer),
        ("retries", _retries),
    )
    for name, check in of_airflow:
        if settings is None:
            checks += _skipped((name,), "Airflow's settings are not read with --dsn; run `airflow runguard doctor`.")
        else:
            checks += _alone((name,), lambda check=check: check(settings))  # type: ignore[misc]
    return checks


def _alone(names: tuple[str, ...], examined: Callable[[], Checks]) -> list[Check]:
    """Run it so that its failure is its own finding."""
    done: list[Check] = []
    try:
        done.extend(examined())
    except RunGuardError as error:
        done.append(Check(names[len(done)], FAIL, error.what, "No call can be made like this.", error.remedy))
    except psycopg.errors.InsufficientPrivilege as error:
        done.append(
            Check(names[len(done)], FAIL, _said(error), "No call can be made like this.", "Type what grants says.")
        )
    except (psycopg.Error, OSError) as error:
        done.append(
            Check(names[len(done)], FAIL, _said(error), "No ledger, no call: tasks wait.", "Bring the ledger back.")
        )
    except Exception as error:
        found = f"Could not be looked at: {_said(error)}"
        done.append(Check(names[len(done)], SKIPPED, found, "Whether it is right is not known."))
    return done + _skipped(names[len(done) :], f"{names[len(done) - 1]} comes first.")


def _skipped(names: Iterable[str], why: str) -> list[Check]:
    return [Check(name, SKIPPED, why, "Not looked at.") for name in names]


def _said(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


# -- the ledger and its server -----------------------------------------------------------------------------------------


def _look(connect: Connect) -> dict[str, Any]:
    """The server's own answers, and what only this side can know: the clocks' offset, the announced process."""
    with connect() as connection:
        connection.rollback()
        connection.autocommit = True
        connection.prepare_threshold = None
        before = datetime.now(UTC)
        with connection.cursor(row_factory=dict_row) as cursor:
            row = cursor.execute(_query("doctor.sql")).fetchone()
        after = datetime.now(UTC)
        assert row is not None
        offset = (row["now"] - before - (after - before) / 2).total_seconds()
        return {**row, "offset": offset, "announced_pid": connection.info.backend_pid}


def _query(name: str) -> bytes:
    return files("airflow_runguard").joinpath(name).read_bytes()


def _grants(connect: Connect, *, of_tasks: bool) -> Checks:
    """What the connected role lacks, with the GRANT to type.

    :param of_tasks: it is the role of Airflow's own Connection, by which tasks call; else that of whoever typed the
        command, who may be meant to read only.
    """
    with connect() as connection, connection.cursor(row_factory=dict_row) as cursor:
        rows = cursor.execute(_query("grants.sql")).fetchall()
    role, only_reads, there = rows[0]["role"], rows[0]["only_reads"], rows[0]["there"]
    lacked = [row for row in rows if row["granted"]]
    to_read = [row for row in lacked if row["purpose"] == "read"]
    to_write = [row for row in lacked if row["purpose"] == "write"]
    if not there:
        yield from _skipped(("grants",), "There is no runguard schema yet.")
    elif not lacked:
        yield Check("grants", OK, f"Role {role} has a worker's rights", "It runs tasks, and all commands.")
    elif only_reads and not to_read and not of_tasks:
        found = f"Role {role} has a reader's rights"
        yield Check("grants", OK, found, "Right for whoever only looks. A task with it would make no call.")
    else:
        found = f"Role {role} lacks {'; '.join(_lacked(row) for row in lacked)}"
        meaning = "Who works with it cannot even look, and calls nothing." if to_read else "It can look."
        remedy = f"To look, type as the schema's owner: `{_granting(to_read, role)}`. " if to_read else ""
        if to_write:
            meaning += " A task with it makes no call, or cannot book it, which is then in doubt."
            remedy += f"For tasks, and commands that change something: `{_granting(to_write, role)}`."
        yield Check("grants", FAIL, found, meaning, remedy.strip())


def _lacked(row: Mapping[str, Any]) -> str:
    objects = row["objects"]
    more = f" and {len(objects) - 2} more" if len(objects) > 3 else ""
    return f"{row['granted']} {', '.join(objects[:2] if more else objects)}{more}"


def _granting(lacked: Iterable[Mapping[str, Any]], role: str) -> str:
    return " ".join(f"grant {row['granted']} {', '.join(row['objects'])} to {role};" for row in lacked)


def _book(connect: Connect, deployment: str) -> Checks:
    """Schema, deployment and lost time, each only where the one before it is right."""
    with connect() as connection:
        connection.rollback()
        connection.autocommit = True
        there = connection.execute("select to_regclass('runguard.meta') is not null").fetchone()
        if there != (True,):
            yield Check("schema", FAIL, "No runguard schema", "Tasks wait; no call is made.", UPGRADE)
            return
        row = connection.execute("select schema_version, deployment from runguard.meta").fetchone()
        version, bound = row or (0, "")
    if version != SCHEMA_VERSION:
        remedy = UPGRADE if version < SCHEMA_VERSION else NEWER
        found = f"Version {version}, this code needs {SCHEMA_VERSION}"
        yield Check("schema", FAIL, found, "Tasks wait; no call is made.", remedy)
        return
    yield Check("schema", OK, f"Version {version}", "This code can read and write it.")
    if not belongs(deployment, bound):
        yield Check(
            "deployment",
            FAIL,
            f"The ledger belongs to {bound!r}, this is {deployment!r}",
            "Tasks wait; no call is made, since another deployment's records would count as this one's.",
            "Correct [runguard] deployment, --deployment, or the Connection of the ledger.",
        )
        return
    yield Check("deployment", OK, deployment, "The ledger is this deployment's own.")
    ledger = Ledger(connect, deployment=deployment)
    try:
        lost = ledger.check()["lost_time"]
    finally:
        ledger.close()
    if lost:
        yield Check(
            "lost_time",
            FAIL,
            lost,
            "What looks new may have been done (and paid) in the time that is gone, so no call is made.",
            "Find out what was lost, then run `airflow runguard db acknowledge-restore --lost-since TIME --reason …`.",
        )
    else:
        yield Check("lost_time", OK, "Same server, timeline and database as before", "Absent means new.")


def _writable(server: Mapping[str, Any]) -> Checks:
    if server["standby"] or server["read_only"] == "on":
        found = "The server is a standby" if server["standby"] else "default_transaction_read_only is on"
        yield Check(
            "writable", FAIL, found, "Nothing can be booked, so tasks wait.", "Point the Connection at the primary."
        )
    else:
        yield Check("writable", OK, "The server takes writes", "Intents and outcomes can be booked.")


def _durability(server: Mapping[str, Any]) -> Checks:
    off = [name for name in ("fsync", "full_page_writes") if server[name] != "on"]
    found = ", ".join(f"{name}={server[name]}" for name in ("fsync", "full_page_writes", "synchronous_commit"))
    if off:
        yield Check(
            "durability",
            FAIL,
            found,
            "A power cut can lose what was booked: a charge that was made would look as if it never was.",
            f"Turn on {' and '.join(off)} in the server's configuration.",
        )
    elif server["synchronous_commit"] == "off":
        yield Check("durability", OK, found, "The ledger turns synchronous_commit on for each of its own writes.")
    else:
        yield Check("durability", OK, found, "What is booked survives a power cut.")


def _isolation(server: Mapping[str, Any]) -> Checks:
    if server["isolation"] == "read committed":
        yield Check("isolation", OK, "read committed", "Claims decide on the newest line.")
    else:
        yield Check(
            "isolation",
            WARN,
            str(server["isolation"]),
            "As safe, but slower: every statement has to open a transaction of its own first.",
            "Run `ALTER ROLE … SET default_transaction_isolation = 'read committed'` for the ledger's role.",
        )


def _clock(server: Mapping[str, Any]) -> Checks:
    offset = server["offset"]
    way = "behind" if offset > 0 else "ahead of"
    apart = f"{abs(offset):.1f} s" if abs(offset) >= 0.05 else "less than 0.1 s"
    found = f"This machine is {apart} {way} the ledger"
    if abs(offset) > CLOCK_LIMIT:
        yield Check(
            "clock",
            WARN,
            found,
            "Only the ledger's clock counts for leases and deadlines; logs and Airflow's own times will not fit to it.",
            "Synchronise both clocks (NTP).",
        )
    else:
        yield Check("clock", OK, found, "Times in logs and in the ledger can be compared.")


def _pooler(server: Mapping[str, Any]) -> Checks:
    if server["announced_pid"] == server["pid"]:
        yield Check("pooler", OK, "None: the server itself answers", "Connections are counted where they are made.")
    else:
        yield Check(
            "pooler",
            WARN,
            "A pooler stands between (the process that answers is not the one that was announced)",
            "Right in session and transaction mode; in statement mode tasks could not book. Its pool limits the tasks "
            "at once, not the server.",
            "Set pool_mode to transaction or session, and a pool size of one connection for each task at once.",
        )


def _connections(server: Mapping[str, Any], settings: Settings | None) -> Checks:
    free = server["max_connections"] - server["reserved"] - server["in_use"]
    found = f"{free} free of {server['max_connections']} ({server['in_use']} in use, {server['reserved']} reserved)"
    if settings is None:
        yield Check(
            "connections",
            WARN if free < SLACK else OK,
            found,
            "Each running guarded task needs one; how many run at once, Airflow's [core] parallelism says.",
            "Raise max_connections." if free < SLACK else "",
        )
        return
    parallelism = _airflow_number("core", "parallelism")
    found = f"{found}; [core] parallelism = {parallelism}"
    if free >= parallelism + SLACK:
        yield Check("connections", OK, found, "Each running guarded task can have its own.")
    else:
        yield Check(
            "connections",
            WARN,
            found,
            "Each running guarded task needs one (parallelism counts for each scheduler); who gets none calls nothing.",
            f"Raise max_connections so that {parallelism + SLACK} stay free, or lower [core] parallelism.",
        )


def _psycopg() -> Checks:
    version, implementation = psycopg.__version__, psycopg.pq.__impl__
    found = f"psycopg {version} ({implementation})"
    if tuple(map(int, re.findall(r"\d+", version)[:3])) < (3, 2, 4):
        yield Check("psycopg", FAIL, found, "Too old for the ledger.", "Install 'psycopg[binary]>=3.2.4'.")
    elif implementation == "python":
        yield Check(
            "psycopg", WARN, found, "Right, but slow.", "Install 'psycopg[binary]' (or psycopg[c]) in every process."
        )
    else:
        yield Check("psycopg", OK, found, "The ledger's driver is there.")


def _hidden_retries() -> Checks:
    """Clients that are installed here and repeat requests by themselves; whether a DAG turns it off is in its code."""
    installed = [(client, switch) for client, switch in SWITCHES.items() if client != "redirect" and _there(client)]
    found = "; ".join(f"{client}: {switch}" for client, switch in installed) or "No client that repeats by itself"
    yield Check(
        "hidden_retries",
        OK,
        found,
        "A client that repeats a request by itself can have the effect twice behind the guard; where it does not say "
        "whether it did, a failed call is in doubt.",
    )


def _there(client: str) -> bool:
    return find_spec(client.replace("-", "_")) is not None


def _failure_rules() -> Checks:
    good, bad = [], []
    for entry in entry_points(group=GROUP):
        try:
            entry.load()
            good.append(entry.name)
        except Exception as error:
            bad.append(f"{entry.name} ({_said(error)})")
    if bad:
        yield Check(
            "failure_rules",
            WARN,
            f"Cannot be loaded: {', '.join(bad)}",
            "Their vendors' errors are judged by the built-in rules, which may call in doubt what waiting would mend.",
            f"Mend the entry points of group {GROUP}, or uninstall their packages.",
        )
    else:
        found = ", ".join(good) or "Only the built-in ones"
        yield Check("failure_rules", OK, found, "Vendors' errors are judged by them.")


# -- Redis and Airflow -------------------------------------------------------------------------------------------------


def _redis(settings: Settings) -> Checks:
    from airflow_runguard.config import redis_client
    from airflow_runguard.core.resp import RedisAway

    client = redis_client(settings)
    if client is None:
        found = f"depth = {settings.depth}, and there is no Redis to use"
        yield Check("redis", SKIPPED, found, "The ledger keeps every promise alone; crowds on one key cost it more.")
        return
    try:
        lines = client.command("INFO").decode().splitlines()
    except RedisAway as error:
        yield Check(
            "redis",
            WARN,
            _said(error),
            "Work goes on under the ledger's own lease, slower. Nothing is charged twice.",
            f"Bring Redis back, or correct the Connection {settings.redis_conn_id}.",
        )
        return
    finally:
        client.close()
    info = dict(line.partition(":")[::2] for line in lines)
    policy, version = info.get("maxmemory_policy", "unknown"), info.get("redis_version", "unknown")
    found = f"Redis {version}, maxmemory-policy = {policy}"
    if policy != "noeviction":
        yield Check(
            "redis",
            WARN,
            found,
            "A full Redis drops leases that are still held. The ledger's fence keeps charges single; crowds come back.",
            "Run `CONFIG SET maxmemory-policy noeviction`, or give the leases a Redis of their own.",
        )
    else:
        yield Check("redis", OK, found, "Leases stay until they end.")


def _airflow_number(section: str, option: str) -> int:
    from airflow.configuration import conf

    return int(conf.getint(section, option))


def _heartbeat(_: Settings) -> Checks:
    seconds = _airflow_number("scheduler", "task_instance_heartbeat_timeout")
    found = f"[scheduler] task_instance_heartbeat_timeout = {seconds} s"
    if seconds < HEARTBEAT_FLOOR:
        yield Check(
            "heartbeat_timeout",
            FAIL,
            found,
            "The scheduler starts the next try while a task that is merely cut off still calls. Guarded calls stay "
            "single (the try waits, or the record goes in doubt); anything unguarded happens twice.",
            f"Set it to {HEARTBEAT_FLOOR} or more (Airflow's default is 300).",
        )
    else:
        yield Check("heartbeat_timeout", OK, found, "A task that is cut off ends itself before its next try starts.")


def _callback_time(_: Settings) -> Checks:
    seconds = _airflow_number("core", "task_success_overtime")
    found = f"[core] task_success_overtime = {seconds} s"
    if seconds < CALLBACK_FLOOR:
        yield Check(
            "callback_time",
            WARN,
            found,
            "Callbacks and listeners that take longer are killed. No record depends on them: it was settled before.",
            f"Set it to {CALLBACK_FLOOR} or more if your callbacks matter.",
        )
    else:
        yield Check("callback_time", OK, found, "Callbacks have Airflow's usual time; no record depends on them.")


def _triggerer(_: Settings) -> Checks:
    from airflow.jobs.job import most_recent_job

    job = most_recent_job("TriggererJob")
    if job is not None and job.is_alive():
        yield Check("triggerer", OK, f"Alive on {job.hostname}", "Waiting costs no worker slot.")
    else:
        found = "None was ever started" if job is None else f"Last heard of at {job.latest_heartbeat}"
        yield Check(
            "triggerer",
            WARN,
            found,
            "Tasks that wait must be rescheduled instead of deferred, and nothing sweeps by itself.",
            "Run `airflow triggerer`.",
        )


def _retries(_: Settings) -> Checks:
    from airflow.models.serialized_dag import SerializedDagModel

    guarded = [
        (f"{dag_id}.{task.task_id}", task.retries)
        for dag_id, dag in SerializedDagModel.read_all_dags().items()
        for task in dag.tasks
        if _is_guarded(task)
    ]
    without = sorted(name for name, retries in guarded if not retries)
    if without:
        yield Check(
            "retries",
            WARN,
            f"{len(without)} of {len(guarded)} guarded tasks have retries = 0: {', '.join(without[:10])}",
            "After a killed worker nothing takes the work up again until a person clears the task.",
            "Give them retries >= 1: a retry of a guarded task never repeats what happened.",
        )
    else:
        yield Check(
            "retries", OK, f"{len(guarded)} guarded tasks, all with retries >= 1", "A killed worker's work goes on."
        )


def _is_guarded(task: Any) -> bool:
    """What of the guard is left in a serialised task: its module, its operator's name, or a mapped task's argument."""
    return (
        str(task._task_module).startswith("airflow_runguard")
        or "guarded" in str(task.operator_name).lower()
        or "guard" in getattr(task, "partial_kwargs", {})
    )
