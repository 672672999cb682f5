"""[runguard] and the Connections → settings: the only reader of Airflow's configuration.

Every value is checked here, before any call; what is wrong is named with what to do. Importing this opens nothing;
Connections are resolved in the process that needs them, and again when the ledger refuses the credentials (rotation).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from airflow_runguard.core.errors import PlanningError

if TYPE_CHECKING:
    import psycopg

    from airflow_runguard.core.resp import Redis

SECTION = "runguard"
CONNECTIONS = "Set the Connection, e.g. AIRFLOW_CONN_{}='{}', in every process that runs tasks. No call was made."


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of ``[runguard]``; what each means is said in ``provider_info.py``. Times in seconds."""

    deployment: str
    test_deployment: str
    ledger_conn_id: str
    redis_conn_id: str
    depth: str
    lease_ttl: float
    max_hold: float
    max_call_time: float
    max_claims: int
    key_lifetime: float
    busy_wait_limit: float
    enabled: bool
    resume_rate: float
    max_pauses: int
    max_pause: float
    ask_timeout: float
    max_triggers: int
    notifiers: str


def settings() -> Settings:
    """The options as this process sees them.

    :raises PlanningError: a value that cannot be used.
    """
    from airflow.sdk.configuration import conf

    from airflow_runguard.provider_info import get_provider_info

    options = get_provider_info()["config"][SECTION]["options"]
    values: dict[str, Any] = {}
    for name, option in options.items():
        text = conf.get(SECTION, name, fallback=option["default"])
        values[name] = _READ[option["type"]](name, text)
    if values["depth"] not in ("auto", "ledger", "lease"):
        raise PlanningError(f"[runguard] depth = {values['depth']!r} is none of auto, ledger, lease.")
    deployment = values["deployment"]
    if not 0 < len(deployment) <= 100 or "~" in deployment:
        raise PlanningError(f"[runguard] deployment = {deployment!r} must have 1 to 100 characters and no '~'.")
    values["test_deployment"] = values["test_deployment"] or f"{deployment}~test"
    return Settings(**values)


def _boolean(name: str, text: str) -> bool:
    words = {"true": True, "t": True, "1": True, "false": False, "f": False, "0": False}
    if text.lower() not in words:
        raise PlanningError(f"[runguard] {name} = {text!r} is neither true nor false.")
    return words[text.lower()]


def _rate(name: str, text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0 < number < 10**6:
        raise PlanningError(f"[runguard] {name} = {text!r} must be a positive number.")
    return number


def _number(name: str, text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if not 0 < number < 10**9:
        raise PlanningError(f"[runguard] {name} = {text!r} must be a positive whole number.")
    return number


_READ: dict[str, Callable[[str, str], Any]] = {
    "string": lambda name, text: text,
    "integer": _number,
    "float": _rate,
    "boolean": _boolean,
}


def connect_ledger(options: Settings) -> Callable[[], psycopg.Connection[Any]]:
    """A function that opens connections to the ledger, with the extras of its Connection (sslmode, IAM, …).

    :raises PlanningError: the Connection is missing or not one to PostgreSQL.
    """
    connection = _ledger_connection(options)

    def connect() -> psycopg.Connection[Any]:
        import psycopg

        nonlocal connection
        try:
            return _opened(connection)
        except psycopg.OperationalError as error:
            # Without an answer from the server there is no sqlstate; a refusal of the credentials has one of these.
            if error.sqlstate not in (None, "28P01", "28000"):
                raise
            connection = _ledger_connection(options)  # perhaps they were rotated: resolve once more, try once more
            return _opened(connection)

    return connect


LIBPQ_DEFAULTS = {
    "application_name": "airflow_runguard",
    "connect_timeout": 10,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": 30_000,
}
"""So that a ledger behind a dead network is noticed. The Connection's extra wins."""


def _opened(connection: Any) -> psycopg.Connection[Any]:
    """By libpq alone where it knows all the extras; else by PostgresHook, whose import costs a task process 10 MB."""
    import psycopg
    from psycopg.conninfo import make_conninfo

    known = {
        "host": connection.host,
        "user": connection.login,
        "password": connection.password,
        "dbname": connection.schema,
        "port": connection.port,
    }
    try:
        conninfo = make_conninfo("", **{**LIBPQ_DEFAULTS, **connection.extra_dejson, **known})
    except psycopg.ProgrammingError:  # iam, aws_conn_id, cursor, …
        from airflow.providers.postgres.hooks.postgres import PostgresHook

        opened: Any = PostgresHook(connection=connection).get_conn()
        return cast("psycopg.Connection[Any]", opened)
    return psycopg.connect(conninfo)


def _ledger_connection(options: Settings) -> Any:
    example = "postgresql://user:password@host:5432/runguard"
    remedy = CONNECTIONS.format(options.ledger_conn_id.upper(), example)
    name = f"The ledger's Connection {options.ledger_conn_id!r}"
    connection = _connection(options.ledger_conn_id, example)
    if connection is None:
        raise PlanningError(f"{name} is not defined (or Airflow's API server did not answer).", remedy)
    if connection.conn_type not in ("postgres", "postgresql"):
        raise PlanningError(f"{name} is of type {connection.conn_type!r}, not postgres.", remedy)
    try:
        if not isinstance(connection.extra_dejson, dict):
            raise ValueError("it is not an object")
    except ValueError as error:
        raise PlanningError(f"The extra of {name[0].lower() + name[1:]} cannot be read: {error}.", remedy) from error
    return connection


def redis_client(options: Settings, depth: str | None = None) -> Redis | None:
    """A client of the lease's Redis, or ``None`` where this depth has none. Connects when first used.

    :raises PlanningError: ``depth`` is ``lease`` and there is no Connection.
    """
    depth = depth or options.depth
    if depth == "ledger":
        return None
    example = "redis://:password@host:6379/0"
    connection = _connection(options.redis_conn_id, example)
    if connection is None:
        if depth == "lease":
            raise PlanningError(
                f"depth = lease needs the Connection {options.redis_conn_id!r}, which is not defined.",
                CONNECTIONS.format(options.redis_conn_id.upper(), example) + " Or say depth = auto.",
            )
        return None
    from airflow_runguard.core.resp import Redis

    extra = connection.extra_dejson
    database = extra.get("db", connection.schema or 0)
    if not str(database).isdigit():
        raise PlanningError(f"Connection {options.redis_conn_id!r} names the database {database!r}, not a number.")
    return Redis(
        connection.host or "localhost",
        connection.port or 6379,
        username=connection.login or None,
        password=connection.password or None,
        database=int(database),
        tls=bool(extra.get("ssl", connection.conn_type == "rediss")),
    )


def _connection(conn_id: str, example: str) -> Any:
    """A Connection as Airflow resolves it; ``None`` where there is none."""
    from airflow.sdk import BaseHook
    from airflow.sdk.exceptions import AirflowNotFoundException

    try:
        return BaseHook.get_connection(conn_id)
    except AirflowNotFoundException:
        return None
    except (ValueError, TypeError) as error:
        raise PlanningError(
            f"The Connection {conn_id!r} cannot be read: {error}.", CONNECTIONS.format(conn_id.upper(), example)
        ) from error
