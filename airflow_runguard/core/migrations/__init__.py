"""The ledger's schema: Alembic for the tables, and the functions installed afresh by every upgrade.

Runs under one advisory lock in one transaction, so that two upgrades at once make one. Only ``db upgrade`` changes the
schema; everything else checks the version and says what to type. A role without DDL rights works with an upgraded
ledger.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from airflow_runguard.core.errors import LedgerNotReady, PlanningError
from airflow_runguard.core.seam import NEWER

if TYPE_CHECKING:
    import psycopg
    import sqlalchemy

FUNCTION_FILES = (
    "rules.sql",
    "tally.sql",
    "gates.sql",
    "calls.sql",
    "claim.sql",
    "batch.sql",
    "write.sql",
    "vendors.sql",
    "people.sql",
    "watch.sql",
    "series.sql",
    "observe.sql",
)
"""In order of installation; ``tables.sql`` belongs to the first migration."""


def sql_file(name: str) -> str:
    return files("airflow_runguard.core").joinpath("sql", name).read_text(encoding="utf-8")


def run_file(connection: sqlalchemy.Connection, name: str) -> None:
    """Straight to the driver: a file holds many statements, and its percent signs are no parameters."""
    driver: Any = connection.connection.driver_connection
    driver.execute(sql_file(name))


def upgrade(
    connect: str | Callable[[], psycopg.Connection[Any]], *, deployment: str = "default", sql: bool = False
) -> str:
    """Bring the ledger to this code's schema version and bind it to ``deployment``. Running it twice changes nothing.

    :param connect: a PostgreSQL URL, or a function that opens a connection.
    :param sql: return the statements instead of running them (for a DBA).
    :raises LedgerNotReady: the ledger is bound to another deployment, or newer than this code.
    :raises PlanningError: the deployment has no usable name.
    """
    from alembic import command
    from alembic.config import Config
    from alembic.script.revision import ResolutionError
    from alembic.util import CommandError

    if not 0 < len(deployment) <= 128:
        raise PlanningError(f"A deployment's name has 1 to 128 characters, not {len(deployment)}.")
    output = io.StringIO()
    config = Config(output_buffer=output)
    config.set_main_option("script_location", str(files("airflow_runguard.core").joinpath("migrations")))
    config.attributes.update(connect=_connector(connect), deployment=deployment)
    try:
        command.upgrade(config, "head", sql=sql)
    except CommandError as error:
        if isinstance(error.__cause__, ResolutionError):
            raise LedgerNotReady(
                "The ledger's schema is newer than this version of airflow-runguard. Nothing was changed.",
                NEWER,
            ) from error
        raise
    return output.getvalue()


def _connector(connect: str | Callable[[], psycopg.Connection[Any]]) -> Callable[[], psycopg.Connection[Any]]:
    if not isinstance(connect, str):
        return connect
    import psycopg

    url = connect
    return lambda: psycopg.connect(url)
