"""The door for functions: ``@task.guarded`` and its typed twin :func:`guarded_task`.

The twin is the same decorator with its options and the injected first parameter ``guard`` typed, so that mypy and
pyright see the call as the DAG author writes it.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, MutableMapping
from dataclasses import replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast, overload

import attr
from airflow.providers.standard.decorators.python import _PythonDecoratedOperator
from airflow.sdk import BaseOperator
from airflow.sdk.bases.decorator import _TaskDecorator

from airflow_runguard.core.errors import PlanningError
from airflow_runguard.operators import GuardMixin, for_function, injected, with_defaults
from airflow_runguard.options import Guard, GuardOptions, Seconds, check_mapped

if TYPE_CHECKING:
    from typing import Protocol, Unpack

    from airflow.sdk.bases.decorator import Task

    from airflow_runguard.core.guard import GuardContext

P = ParamSpec("P")
R = TypeVar("R")


class _GuardedDecoratedOperator(GuardMixin, _PythonDecoratedOperator):
    """The operator behind ``@task.guarded``."""

    custom_operator_name = "@task.guarded"

    @with_defaults
    def __init__(self, *, python_callable: Callable[..., Any], guard: Guard | None = None, **kwargs: Any) -> None:
        function, takes_guard = injected(python_callable)
        super().__init__(python_callable=function, guard=for_function(guard or Guard(), takes_guard), **kwargs)


class _GuardedTaskDecorator(_TaskDecorator[Any, Any, Any]):
    def _expand(self, *args: Any, **kwargs: Any) -> Any:
        check_mapped(self.kwargs.get("guard"), self.operator_class)
        return super()._expand(*args, **kwargs)

    def override(self, **options: Any) -> Any:
        """The same task with other options, the guard's among them.

        :raises PlanningError: those of a batch, whose function is made for its guard.
        """
        mine = _taken(options)
        if (mine or "guard" in options) and hasattr(self.function, "_items"):
            raise PlanningError("A batch's guard cannot be overridden.", "Decorate its function once more.")
        guard = options.pop("guard", self.kwargs["guard"])
        return super().override(**options, guard=replace(guard, **mine) if mine else guard)


if TYPE_CHECKING:

    class _Decorator(Protocol):
        @overload
        def __call__(self, function: Callable[Concatenate[GuardContext, P], R], /) -> Task[P, R]: ...
        @overload
        def __call__(self, function: Callable[P, R], /) -> Task[P, R]: ...

    class _Options(GuardOptions, total=False):
        """The guard's options and those of every operator: a wrong name is an error, a right one is not."""

        guard: Guard
        task_id: str
        task_display_name: str
        task_group: Any
        owner: str
        params: MutableMapping[str, Any]
        default_args: dict[str, Any]
        retries: int
        retry_delay: Seconds
        retry_exponential_backoff: float
        max_retry_delay: Seconds
        retry_policy: Any
        execution_timeout: timedelta | None
        start_date: datetime
        end_date: datetime
        depends_on_past: bool
        wait_for_downstream: bool
        trigger_rule: str
        priority_weight: int
        weight_rule: str
        queue: str
        pool: str
        pool_slots: int
        executor: str
        executor_config: dict[str, Any]
        run_as_user: str
        max_active_tis_per_dag: int
        max_active_tis_per_dagrun: int
        map_index_template: str
        on_execute_callback: Any
        on_failure_callback: Any
        on_success_callback: Any
        on_retry_callback: Any
        on_skipped_callback: Any
        pre_execute: Callable[[Any], None]
        post_execute: Callable[[Any, Any], None]
        inlets: Any
        outlets: Any
        do_xcom_push: bool
        doc: str
        doc_md: str


def _taken(options: dict[str, Any]) -> dict[str, Any]:
    """The guard's own options, taken out of all."""
    mine = {name: options.pop(name) for name in list(options) if name in GuardOptions.__annotations__}
    _check_names(options)
    return mine


def _check_names(options: Iterable[str]) -> None:
    """What no operator takes and looks like an option of the guard is one, misspelt.

    :raises PlanningError: it names the right one.
    """
    parameters = inspect.signature(BaseOperator.__init__).parameters
    for name in options:
        if name in parameters or name == "guard":
            continue
        import difflib  # of no use to almost every task process

        near = difflib.get_close_matches(name, GuardOptions.__annotations__, 1, 0.75)
        if near:
            raise PlanningError(
                f"Neither a guard nor an operator has an option {name!r}.", f"Did you mean {near[0]!r}?"
            )


@overload
def guarded_task(
    python_callable: None = None,
    /,
    *,
    multiple_outputs: bool | None = None,
    **options: Unpack[_Options],
) -> _Decorator: ...
@overload
def guarded_task(python_callable: Callable[Concatenate[GuardContext, P], R], /) -> Task[P, R]: ...
@overload
def guarded_task(python_callable: Callable[P, R], /) -> Task[P, R]: ...
def guarded_task(
    python_callable: Callable[..., Any] | None = None,
    /,
    *,
    multiple_outputs: bool | None = None,
    **options: Any,
) -> Any:
    """Make a function a guarded task: its external effect happens once, whatever Airflow does.

    A function whose first parameter is ``guard`` is given the :class:`GuardContext` there and makes its calls with
    ``guard.call``; any other function is one call itself and must say ``on_doubt``.

    :param options: those of :class:`Guard`; all others are the operator's (``retries``, ``pool``, …).
    :raises PlanningError: an option or value that cannot be used, when the DAG is parsed.
    """
    mine = _taken(options)
    guard = options.pop("guard", None) or Guard(**mine)

    def decorate(function: Callable[..., Any]) -> Any:
        injectable, takes_guard = injected(function)
        return _GuardedTaskDecorator(
            function=injectable,
            multiple_outputs=cast(bool, attr.NOTHING) if multiple_outputs is None else multiple_outputs,
            operator_class=_GuardedDecoratedOperator,
            kwargs={**options, "guard": for_function(guard, takes_guard)},
            decorator_name="task.guarded",
        )

    return decorate if python_callable is None else decorate(python_callable)
