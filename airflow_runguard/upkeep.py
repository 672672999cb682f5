"""Operators that look after the ledger from a DAG, where no triggerer does or a schedule of one's own is wanted."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowFailException

from airflow_runguard import commands, notices, reconcile
from airflow_runguard.audit import Alarm, audit
from airflow_runguard.config import connect_ledger, settings
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Record
from airflow_runguard.operators import with_defaults
from airflow_runguard.ordering import deployment_of

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context


class SweepOperator(BaseOperator):
    """Settle what dead holders left behind; ask the markers of ``guard.sql``, and whom ``on_doubt`` names, about all
    that is in doubt; send the due notices.

    :param on_doubt: who is asked about the records of a task: ``{"dag_id.task_id": function}``. (A worker may not load
        other DAGs; the triggerer's caretaker and ``airflow runguard reconcile`` do.)
    :returns: what ``airflow runguard sweep`` says: the records that came in doubt, and those that the next try runs;
        and as ``asked`` what was said of each.
    :raises LedgerUnavailable: the ledger is out of reach; the next run sweeps.
    """

    @with_defaults
    def __init__(self, *, on_doubt: Mapping[str, Callable[[Any], Any]] | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.on_doubt = dict(on_doubt or {})

    def execute(self, context: Context) -> dict[str, Any]:
        options = settings()
        ledger = Ledger(connect_ledger(options), deployment=options.deployment)
        try:
            ledger.check()
            actor = f"{self.dag_id}.{self.task_id}"
            swept = commands.sweep(ledger, actor=actor)
            swept["asked"] = reconcile.settle_markers(ledger, actor=actor)["asked"]
            if self.on_doubt:
                swept["asked"] += reconcile.settle_all(ledger, self._who, actor=actor)["asked"]
            told = notices.send(ledger, notices.load(options.notifiers), actor)
        finally:
            ledger.close()
        self.log.info("%s %d notice(s) sent.", swept["said"], told)
        return swept

    def _who(self, record: Record) -> Callable[[Any], Any] | str:
        task = f"{record.holder.dag_id}.{record.holder.task_id}"
        return self.on_doubt.get(task) or f"this sweep asks nobody about task {task}"


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
