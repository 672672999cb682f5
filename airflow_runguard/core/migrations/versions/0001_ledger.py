"""The ledger: meta, transition, record, call, event."""

from __future__ import annotations

from alembic import op
from sqlalchemy import Column, Text, table

from airflow_runguard.core.migrations import run_file, sql_file
from airflow_runguard.core.record import TRANSITIONS

revision = "0001"
down_revision = None


def upgrade() -> None:
    context = op.get_context()
    if context.as_sql:
        context.impl.static_output(sql_file("tables.sql"))
    else:
        run_file(op.get_bind(), "tables.sql")
    transition = table("transition", Column("source", Text), Column("target", Text), schema="runguard")
    op.bulk_insert(
        transition,
        [{"source": a, "target": b} for a, b in sorted({(t.source.value, t.target.value) for t in TRANSITIONS})],
    )


def downgrade() -> None:
    raise NotImplementedError("A ledger is never taken down by a migration: it is the only proof of what was paid.")
