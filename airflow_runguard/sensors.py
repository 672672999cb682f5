"""The sensor that asks, before the work starts, whether the previous run of a job was finished."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NoReturn, cast

from airflow.sdk import BaseSensorOperator
from airflow.sdk.definitions.context import Context
from airflow.sdk.definitions.mappedoperator import MappedOperator
from airflow.sdk.exceptions import AirflowFailException, AirflowSensorTimeout, AirflowSkipException

from airflow_runguard.config import connect_ledger, settings
from airflow_runguard.core.errors import LedgerUnavailable, PlanningError
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.series import Place
from airflow_runguard.entry import SHORTEST_WAIT
from airflow_runguard.operators import GuardMixin, with_defaults
from airflow_runguard.options import Guard
from airflow_runguard.ordering import deployment_of, is_test
from airflow_runguard.series import Previous, Series, place, series_of


class PreviousRunSensor(BaseSensorOperator):
    """Succeeds when the previous run of a series is complete in the ledger and ``min_gap`` has passed since its end.

    Airflow's success is not asked: what counts is what the ledger says of the guarded task. Nothing before this run: it
    goes, and says so. The previous run is at work: it waits, and names the holder. One that should be there and is
    absent is never a reason to go, and neither is a record that cannot be read, whatever else is said here.

    :param series: the name of the series, or a :class:`Series`. Default: that of the one guarded task downstream.
    :param min_gap: seconds or a timedelta between the end of the previous run and the start of this one.
    :param completion: ``full``, or ``partial`` where one that is done in part is enough.
    :param on_previous_failed: the previous run is failed, in doubt or paused: ``wait`` (for whoever mends it),
        ``fail``, ``skip`` or ``go``.
    :param on_previous_absent: there should be a previous run, and the ledger has none: ``wait`` or ``fail``.
    :param deferrable: wait in the triggerer, all of whose sensors share one connection and wake within a second; with
        ``False``, ``mode`` and ``poke_interval`` count as in any sensor.
    :raises PlanningError: an option that cannot be used, when the DAG is parsed.
    """

    @with_defaults
    def __init__(
        self,
        *,
        series: str | Series | None = None,
        min_gap: float | timedelta = 0.0,
        completion: Literal["full", "partial"] = "full",
        on_previous_failed: Literal["wait", "fail", "skip", "go"] = "wait",
        on_previous_absent: Literal["wait", "fail"] = "wait",
        deferrable: bool = True,
        **kwargs: Any,
    ) -> None:
        Previous(min_gap=min_gap, completion=completion, on_failed=on_previous_failed, on_absent=on_previous_absent)
        super().__init__(**kwargs)
        self.series, self.min_gap, self.completion = series, min_gap, completion
        self.on_previous_failed, self.on_previous_absent = on_previous_failed, on_previous_absent
        self.deferrable = deferrable

    def execute(self, context: Context) -> Any:
        if not self.deferrable or is_test():  # a test has no triggerer
            return super().execute(context)
        return self.look_again(context, since=datetime.now(UTC).isoformat())

    def look_again(self, context: Context, since: str, event: Any = None) -> None:
        """:param since: when it first looked (ISO 8601); ``timeout`` counts from there."""
        from airflow_runguard.triggers import PreviousTrigger

        with self._softened():
            here = self.here(context)
            if self._may_go(here):
                return
            left = self.timeout - (datetime.now(UTC) - datetime.fromisoformat(since)).total_seconds()
            if left <= 0:
                raise AirflowSensorTimeout(f"The previous run was waited for longer than {self.timeout:.0f} s.")
        self.defer(
            trigger=PreviousTrigger(
                deployment_of(settings()),
                asdict(here),
                (datetime.now(UTC) + timedelta(seconds=min(SHORTEST_WAIT, left))).isoformat(),
            ),
            method_name="look_again",
            kwargs={"since": since},
            timeout=timedelta(seconds=left),
        )

    def poke(self, context: Context) -> bool:
        return self._may_go(self.here(context))

    def here(self, context: Context) -> Place:
        """This run's place in the series, and what it wants of the one before."""
        said, task = self._series(context)
        wants = Previous(
            min_gap=self.min_gap,
            completion=self.completion,
            on_failed=self.on_previous_failed,
            on_absent=self.on_previous_absent,
        )
        try:
            return place(said, wants, task=task, context=cast("dict[str, Any]", context), env=self.get_template_env())
        except PlanningError as error:
            raise AirflowFailException(str(error)) from error

    def _series(self, context: Context) -> tuple[Series, str]:
        if self.series is not None:
            said = series_of(self.series)
            if said.name is not None:
                return said, ""
        tasks = [task for task in self.get_flat_relatives(upstream=False) if guard_of(task) is not None]
        if len(tasks) != 1:
            found = f"there are {len(tasks)}" if tasks else "there is none"
            raise AirflowFailException(
                f"Sensor {self.task_id!r} names no series, and of guarded tasks behind it {found}. Say series='…'."
            )
        guard = guard_of(tasks[0])
        assert guard is not None
        return series_of(self.series or guard.series), f"{context['ti'].dag_id}.{tasks[0].task_id}"

    def _may_go(self, here: Place) -> bool:
        """Whether the run may begin now.

        :raises AirflowFailException, AirflowSkipException: it may not, and waiting is not wanted or does not help.
        """
        try:
            options = settings()
            with closing(Ledger(connect_ledger(options), deployment=deployment_of(options))) as ledger:
                ledger.check()
                before = ledger.before(here)
        except LedgerUnavailable as error:
            self.log.warning("RunGuard: %s Waiting.", error.what)
            return False
        said = before.sentence(here.series)
        match before.verdict:
            case "go":
                self.log.info("RunGuard: %s", said)
                return True
            case "wait":
                self.log.info("RunGuard: %s Waiting.", said)
                return False
            case "skip":
                raise AirflowSkipException(said)
        raise AirflowFailException(said)

    @contextmanager
    def _softened(self) -> Iterator[None]:
        """``soft_fail`` and ``never_fail``, as Airflow's loop has them, which is not used where the triggerer waits."""
        try:
            yield
        except (AirflowFailException, AirflowSensorTimeout) as error:
            self._soft(error)

    def _soft(self, error: Exception) -> NoReturn:
        for name in ("soft_fail", "never_fail"):
            if getattr(self, name):
                raise AirflowSkipException(f"Skipped, since {name} is set: {error}") from error
        raise error


def guard_of(task: Any) -> Guard | None:
    if isinstance(task, GuardMixin):
        return task.guard
    if isinstance(task, MappedOperator) and issubclass(task.operator_class, GuardMixin):
        guard: Guard = task.partial_kwargs["guard"]
        return guard
    return None
