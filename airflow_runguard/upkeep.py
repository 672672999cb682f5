"""Operators that look after the ledger from a DAG, where no triggerer does or a schedule of one's own is wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator

from airflow_runguard import commands, notices, reconcile
from airflow_runguard.config import connect_ledger, settings
from airflow_runguard.core.ledger import Ledger

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context


class SweepOperator(BaseOperator):
    """Settle what dead holders left behind and what a marker of ``guard.sql`` can settle; send the due notices.

    :returns: what ``airflow runguard sweep`` says: the records that came in doubt, and those that the next try runs;
        and as ``markers`` what the markers said.
    :raises LedgerUnavailable: the ledger is out of reach; the next run sweeps.
    """

    def execute(self, context: Context) -> dict[str, Any]:
        options = settings()
        ledger = Ledger(connect_ledger(options), deployment=options.deployment)
        try:
            ledger.check()
            actor = f"{self.dag_id}.{self.task_id}"
            swept = commands.sweep(ledger, actor=actor)
            swept["markers"] = reconcile.settle_markers(ledger, actor=actor)["asked"]
            told = notices.send(ledger, notices.load(options.notifiers), actor)
        finally:
            ledger.close()
        self.log.info("%s %d notice(s) sent.", swept["said"], told)
        return swept
