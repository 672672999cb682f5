"""Alembic's entry: one transaction under one advisory lock (transaction-level, so that it works behind a pooler)."""

from __future__ import annotations

from alembic import context
from sqlalchemy import create_engine, text
from sqlalchemy.pool import NullPool

from airflow_runguard.core.errors import LedgerNotReady
from airflow_runguard.core.migrations import FUNCTION_FILES, run_file, sql_file
from airflow_runguard.core.record import SCHEMA_VERSION

LOCK = 0x52554E47554152  # "RUNGUAR": any two upgrades of runguard on this server's database exclude each other
BIND = """
insert into runguard.meta (deployment, schema_version, system_identifier, timeline, database_oid)
select :deployment, :version, w.system_identifier, w.timeline, w.database_oid from runguard.whereabouts() w
on conflict (one) do update set schema_version = excluded.schema_version
 where runguard.meta.deployment = excluded.deployment
"""

deployment = context.config.attributes["deployment"]
bind = text(BIND).bindparams(deployment=deployment, version=SCHEMA_VERSION)

if context.is_offline_mode():
    context.configure(dialect_name="postgresql", literal_binds=True, version_table_schema="runguard")
    with context.begin_transaction():
        context.execute(f"select pg_advisory_xact_lock({LOCK})")
        context.execute("create schema if not exists runguard")
        context.run_migrations()
        for name in FUNCTION_FILES:
            context.get_context().impl.static_output(sql_file(name))
        context.execute(bind)
else:
    engine = create_engine("postgresql+psycopg://", creator=context.config.attributes["connect"], poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(text("select pg_advisory_xact_lock(:lock)"), {"lock": LOCK})
        if not connection.execute(text("select to_regnamespace('runguard') is not null")).scalar():
            connection.execute(text("create schema runguard"))
        context.configure(connection=connection, version_table_schema="runguard")
        context.run_migrations()
        for name in FUNCTION_FILES:
            run_file(connection, name)
        connection.execute(bind)
        bound = connection.execute(text("select deployment from runguard.meta")).scalar_one()
        if bound != deployment:
            raise LedgerNotReady(
                f"This ledger belongs to deployment {bound!r}, not to {deployment!r}. Nothing was changed.",
                "Use that deployment's name ([runguard] deployment) or a ledger of your own.",
            )
    engine.dispose()
