"""Operators that look after the ledger from a DAG, where no triggerer does or a schedule of one's own is wanted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowFailException

from airflow_runguard import commands, notices, reconcile
from airflow_runguard.audit import Alarm, audit
from airflow_runguard.config import connect_ledger, settings
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.operators import with_defaults
from airflow_runguard.ordering import deployment_of

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


class LedgerAuditOperator(BaseOperator):
    """Audit the ledger from a DAG: the task fails, and people are told, when there is anything.

    It sees what the ledger has; comparing with Airflow's metadata is ``airflow runguard audit``, which may read them.

    :param days, alarm_after, burst, stuck_after: as for :func:`~airflow_runguard.audit.audit`.
    :param fail: whether findings fail the task.
    :returns: the findings.
    """

    @with_defaults
    def __init__(
        self,
        *,
        days: float = 7,
        alarm_after: Alarm = None,
        burst: int = 5,
        stuck_after: float = 86_400,
        fail: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.days, self.alarm_after, self.burst, self.stuck_after = days, alarm_after, burst, stuck_after
        self.fail = fail

    def execute(self, context: Context) -> list[str]:
        options = settings()
        ledger = Ledger(connect_ledger(options), deployment=deployment_of(options))
        try:
            found = audit(
                ledger,
                days=self.days,
                alarm_after=self.alarm_after,
                burst=self.burst,
                stuck_after=self.stuck_after,
                airflow=False,
                tell=True,
            )
        finally:
            ledger.close()
        for finding in found["findings"]:
            self.log.warning("%s: %s", finding["kind"], finding["what"])
        if found["findings"] and self.fail:
            raise AirflowFailException(found["said"])
        return [finding["what"] for finding in found["findings"]]
