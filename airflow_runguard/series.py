"""What an author says about a series, and a run's place in it: for guards and for the sensor alike.

By default a series is one task of one DAG, ordered by the run's partition or logical date, and the one expected before
is the run that Airflow had before. Nothing here asks the ledger.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date, datetime, timedelta
from typing import Any, Literal

from airflow_runguard.core import keys
from airflow_runguard.core.errors import PlanningError
from airflow_runguard.core.series import ON_ABSENT, ON_FAILED, Place
from airflow_runguard.rendering import render_key

NONE_BEFORE = "none"
"""What a template of ``previous`` renders to where nothing comes before."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One recurring job and its order.

    :param name: of the series; a template or a function of the arguments. Default: ``<dag_id>.<task_id>``.
    :param order: what a run's place is sorted by: a template that renders to text which sorts (``{{ ds }}``), or a
        function of the arguments that gives a date, a whole number or such a text. Default: the run's partition, else
        its logical date.
    :param previous: the ``order`` of the run that should come before, likewise; where there is none, a template says
        ``none`` and a function gives ``None``. Default: the run that Airflow had before, for the default order; else
        unknown, and the latest earlier one that the ledger has counts.
    """

    name: str | Callable[[Any], Any] | None = None
    order: str | Callable[[Any], Any] | None = None
    previous: str | Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if self.previous is not None and self.order is None:
            raise PlanningError("A series that says `previous` must say by what it is ordered.", "Add order=….")
        for name in ("name", "order", "previous"):
            value = getattr(self, name)
            if not (value is None or callable(value) or (isinstance(value, str) and value)):
                raise PlanningError(f"A series' {name} is a template or a function, not {value!r}.")


@dataclass(frozen=True, kw_only=True)
class Previous:
    """What is wanted of the previous run before the next one begins.

    :param min_gap: seconds or a timedelta since its end.
    :param completion: ``full``, or ``partial`` where one that is done in part is enough.
    :param on_failed: it is failed, in doubt or paused: ``wait``, ``fail``, ``skip`` or ``go``.
    :param on_absent: there should be one, and the ledger has none: ``wait`` or ``fail``.
    """

    min_gap: float | timedelta = 0.0
    completion: Literal["full", "partial"] = "full"
    on_failed: Literal["wait", "fail", "skip", "go"] = "wait"
    on_absent: Literal["wait", "fail"] = "wait"

    def __post_init__(self) -> None:
        words = {"completion": ("full", "partial"), "on_failed": ON_FAILED, "on_absent": ON_ABSENT}
        for name, allowed in words.items():
            if getattr(self, name) not in allowed:
                raise PlanningError(f"{name}={getattr(self, name)!r} is none of {', '.join(map(repr, allowed))}.")
        if not 0 <= self.gap < 10**9:
            raise PlanningError(f"min_gap={self.min_gap!r} must be 0 or more, and below 10^9 (seconds or a timedelta).")

    @property
    def gap(self) -> float:
        return self.min_gap.total_seconds() if isinstance(self.min_gap, timedelta) else float(self.min_gap)


def series_of(said: str | Series | None) -> Series:
    return said if isinstance(said, Series) else Series(name=said)


def place(
    series: Series,
    wants: Previous | None,
    *,
    task: str,
    context: Mapping[str, Any],
    env: Any = None,
) -> Place:
    """Where the run of ``context`` stands.

    :param wants: ``None`` = it waits for nobody.
    :param task: ``<dag_id>.<task_id>`` of the recurring task.
    :param context: Airflow's, and ``args``, the arguments that functions are given.
    :raises PlanningError: the order comes to nothing, or does not sort.
    """
    rules = wants or Previous()
    here, before = (
        _ordered(series, context, env) if series.order is not None else _by_run(context, known=wants is not None)
    )
    return Place(
        series=task if series.name is None else render_key(series.name, context, env=env),
        place=here,
        expected=before,
        waits=wants is not None,
        min_gap=rules.gap,
        partial=rules.completion == "partial",
        on_failed=rules.on_failed,
        on_absent=rules.on_absent,
    )


def _ordered(series: Series, context: Mapping[str, Any], env: Any) -> tuple[str, str | None]:
    assert series.order is not None
    before = None if series.previous is None else _sortable(series.previous, context, env)
    return _sortable(series.order, context, env), before


def _sortable(said: str | Callable[[Any], Any], context: Mapping[str, Any], env: Any) -> str:
    """Text that sorts; ``""`` = there is none."""
    if isinstance(said, str):
        text = render_key(said, context, env=env)
        return "" if text == NONE_BEFORE else text
    match said(context.get("args")):
        case None:
            return ""
        case datetime() as moment:
            return keys.moment_text(moment)
        case date() as day:
            return day.isoformat()
        case bool() as value:
            raise PlanningError(f"A place in a series came to {value!r}, which has no order.")
        case int() as number if 0 <= number < 10**18:
            return f"{number:018}"
        case str() as text:
            return text
        case value:
            raise PlanningError(
                f"A place in a series came to {value!r}.",
                "Give a date, a whole number from 0 on, or a text that sorts.",
            )


def _by_run(context: Mapping[str, Any], *, known: bool) -> tuple[str, str | None]:
    """The run's partition or logical date; and (``known``: it matters) that of the run before, as Airflow has it."""
    dag_run = context.get("dag_run")
    partitions = (getattr(dag_run, "partition_date", None), getattr(dag_run, "partition_key", None))
    remedy = "Say what orders it: series=Series(order='…')."
    try:
        here = keys.default_scope(*partitions, getattr(dag_run, "logical_date", None))
    except PlanningError as error:
        raise PlanningError(error.what, remedy) from error
    if here is None:
        raise PlanningError(
            "The run has neither a partition nor a logical date, so it has no place in its series.", remedy
        )
    if not known or any(partitions):
        return here, None
    last = context["ti"].get_previous_dagrun()
    return here, "" if last is None else keys.default_scope(None, None, last.logical_date)
