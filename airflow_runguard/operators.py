"""The doors for operators: ``guarded(OperatorClass)`` and :class:`GuardedPythonOperator`.

A guarded operator is a dynamic subclass whose ``execute`` and ``resume_execution`` run through the guard; nothing else
decides anything (callbacks and listeners are hints in Airflow). ``entry.py`` is what the two methods do;
``adapters.py`` knows which operators are one request and what their order is.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, TypeVar, cast

from airflow.providers.standard.operators.python import PythonOperator
from airflow.sdk import BaseOperator
from airflow.sdk.bases.operator import BaseOperatorMeta
from airflow.sdk.definitions.mappedoperator import MappedOperator
from airflow.sdk.definitions.xcom_arg import XComArg

from airflow_runguard import deferrals
from airflow_runguard.adapters import adapter_for
from airflow_runguard.core import guard as core
from airflow_runguard.core.errors import PlanningError
from airflow_runguard.entry import PUT_OFF, Entry, depth_of_dag
from airflow_runguard.human import ANSWERED, Asked, answer_of
from airflow_runguard.options import ON_DOUBT, Guard, check_mapped
from airflow_runguard.ordering import VENDOR_KEY

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context

    _Operator = BaseOperator
else:
    _Operator = object

F = TypeVar("F", bound=Callable[..., None])


def with_defaults(constructor: F) -> F:
    """Airflow applies ``default_args`` only in constructors that carry this."""
    return cast(F, BaseOperatorMeta._apply_defaults(cast(Any, constructor)))


class _TemplateGuard:
    """``guard`` in templates.

    :param running: the guard of the body that renders its fields itself, where one does (``@task.bash``).
    """

    def __init__(self, guard: Guard, running: core.GuardContext | None) -> None:
        self._guard, self._running = guard, running
        self.reads = 0

    @property
    def idempotency_key(self) -> str:
        if self._guard.calls in ("explicit", "batch"):
            raise PlanningError(
                "{{ guard.idempotency_key }} is the key of a body that is one call; here each call has its own.",
                "Hand it over with guard.call(name, fn, vendor_key_as='idempotency_key').",
            )
        if self._running is not None:
            return self._running.idempotency_key
        self.reads += 1
        return VENDOR_KEY


class GuardMixin(_Operator):
    """What :func:`guarded` puts before an operator class. Not for direct use."""

    guard: Guard
    _entry: type[Entry] = Entry

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        for method in ("execute", "resume_execution"):
            owner = next(kind for kind in cls.__mro__ if method in vars(kind))
            if owner is not GuardMixin:
                raise PlanningError(
                    f"{cls.__name__} is made of a guarded class and has its own {method}, which would run past "
                    "the guard, again with every try.",
                    f"Derive it from the operator itself, and guard it: guarded({cls.__name__})(…).",
                )

    @with_defaults
    def __init__(self, *, guard: Guard | None = None, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.guard = _checked(guard or Guard(), self)

    @classmethod
    def partial(cls, *, guard: Guard | None = None, **kwargs: Any) -> Any:
        check_mapped(guard, cls)
        _check_start(kwargs.get("start_from_trigger", cls.start_from_trigger))
        return super().partial(guard=guard, **kwargs)

    def _do_render_template_fields(
        self, parent: Any, template_fields: Any, context: Context, jinja_env: Any, seen_oids: set[int]
    ) -> None:
        """What Airflow calls for any task, also one of a mapped task; and for what is inside a field."""
        if parent is not self:
            super()._do_render_template_fields(parent, template_fields, context, jinja_env, seen_oids)
            return
        guard = _TemplateGuard(self.guard, getattr(self, "_guard_context", None))
        within = cast("Context", {**context, "guard": guard})
        super()._do_render_template_fields(parent, template_fields, within, jinja_env, seen_oids)
        object.__setattr__(self, "_guard_key_reads", guard.reads)

    def execute(self, context: Context) -> Any:
        return self._entry(self, self.guard, context).run(lambda: super(GuardMixin, self).execute(context))

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        method: str | None = next_method
        waited_since = asked_since = answer = None
        asked: Asked | None = None
        starts_anew = False
        if next_method == PUT_OFF:
            put_off = next_kwargs or {}
            method, next_kwargs, waited_since = put_off["method"], put_off["kwargs"], put_off["since"]
            starts_anew = put_off.get("anew", False)
        elif next_method == ANSWERED:
            parked = next_kwargs or {}
            method, asked_since, answer = None, parked.get("since"), answer_of(parked.get("event"))
            if answer and "at" in parked:  # else nobody knows what the form told of: it is asked again
                asked = Asked(parked["fence"], datetime.fromisoformat(parked["at"]))
        if method is None:  # it had not begun, or a person has said what became of it: from the start
            entry = self._entry(
                self,
                self.guard,
                context,
                waited_since=waited_since,
                asked_since=asked_since,
                asked=asked,
                answer=answer,
            )
            return entry.run(lambda: super(GuardMixin, self).execute(context))
        resumes = (method, next_kwargs)
        entry = self._entry(
            self, self.guard, context, resumes=resumes, waited_since=waited_since, starts_anew=starts_anew
        )
        arguments, note = deferrals.taken(next_kwargs)

        def go_on() -> Any:
            if starts_anew:
                raise deferrals.anew(note, method, arguments)
            return super(GuardMixin, self).resume_execution(method, arguments, context)

        return entry.run(lambda: super(GuardMixin, self).execute(context), go_on)

    def on_kill(self) -> None:
        """Airflow wants the task gone: no further call starts."""
        running = getattr(self, "_guard_context", None)
        if running is not None:
            running.stop()
        super().on_kill()


C = TypeVar("C", bound=type[BaseOperator])


def guarded(operator: Any, guard: Guard | None = None) -> Any:
    """Guard an operator: a class (then ``guard=Guard(…)`` is an argument of its constructor and of ``partial``), or a
    task that exists already (classic, mapped or made by ``@task``), with its :class:`Guard` given here.

    :raises PlanningError: an operator that cannot be guarded, with the reason.
    """
    if isinstance(operator, type):
        return guarded_class(operator)
    if isinstance(operator, XComArg):
        guarded(cast(Any, operator).operator, guard)
        return operator
    if isinstance(operator, MappedOperator):
        check_mapped(guard, operator.operator_class)
        _check_start(operator.start_from_trigger)
        operator.operator_class = guarded_class(operator.operator_class)
        operator.partial_kwargs["guard"] = guard
        return operator
    if not isinstance(operator, BaseOperator):
        raise PlanningError(f"{operator!r} is neither an operator nor a task.")
    operator.__class__ = guarded_class(type(operator))
    operator.guard = _checked(guard or Guard(), operator)
    return operator


@functools.cache
def guarded_class(cls: C) -> C:
    """The guarded subclass of an operator class: the same name and module, ``execute`` through the guard."""
    if issubclass(cls, GuardMixin):
        return cls
    if not issubclass(cls, BaseOperator):
        raise PlanningError(f"{cls.__name__} is not an operator.")
    if inspect.iscoroutinefunction(inspect.unwrap(cls.execute)):  # Airflow has wrapped it
        raise PlanningError(f"{cls.__name__}.execute is `async def`, which Airflow never awaits.", "Write it as `def`.")
    adapter = adapter_for(cls)
    if adapter.refused:
        raise PlanningError(f"{cls.__name__} cannot be guarded: {adapter.refused}.")
    names = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        "custom_operator_name": f"{getattr(cls, 'custom_operator_name', cls.__name__)} (guarded)",
    }
    metaclass: Any = type(cls)
    return cast(C, metaclass(cls.__name__, (GuardMixin, cls), names))


class GuardedPythonOperator(GuardMixin, PythonOperator):
    """``PythonOperator`` under a guard; a function whose first parameter is ``guard`` is given the guard.

    :param guard: the settings.
    """

    @with_defaults
    def __init__(self, *, python_callable: Callable[..., Any], guard: Guard | None = None, **kwargs: Any) -> None:
        function, takes_guard = injected(python_callable)
        super().__init__(python_callable=function, guard=for_function(guard or Guard(), takes_guard), **kwargs)


def injected(function: Callable[..., Any]) -> tuple[Callable[..., Any], bool]:
    """A function without its first parameter ``guard``, which is filled in at run time; and whether it had one."""
    if getattr(function, "_takes_guard", None) is not None:
        return function, cast(bool, function._takes_guard)  # type: ignore[attr-defined]
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    taken = [p for p in parameters if p.name == "guard" or _is_guard(p.annotation)]
    if not taken:
        return function, False
    if taken != parameters[:1] or taken[0].name != "guard" or taken[0].kind is inspect.Parameter.KEYWORD_ONLY:
        raise PlanningError(
            f"{function.__name__}{signature} takes the guard where it is not filled in.",
            "Make it the first parameter, named `guard`, and not behind a `*`.",
        )
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def wrapper(*args: Any, **kwargs: Any) -> Any:
            return await function(core.current_guard(), *args, **kwargs)
    else:

        @functools.wraps(function)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            return function(core.current_guard(), *args, **kwargs)

    wrapper.__signature__ = signature.replace(parameters=parameters[1:])  # type: ignore[attr-defined]
    wrapper._takes_guard = True  # type: ignore[attr-defined]
    return wrapper, True


def _is_guard(annotation: Any) -> bool:
    name = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", "")
    return name.rpartition(".")[2] == core.GuardContext.__name__


def for_function(guard: Guard, takes_guard: bool) -> Guard:
    """The guard with ``calls`` settled by the function's first parameter."""
    if takes_guard and guard.calls == "body":
        raise PlanningError(
            "calls='body', but the function takes `guard` to make its calls with.", "Leave one of them out."
        )
    return replace(guard, calls="explicit") if takes_guard else guard


def _check_start(from_trigger: bool) -> None:
    if from_trigger:
        raise PlanningError("start_from_trigger begins in the triggerer, past the guard.", "Set it to False.")


def _checked(guard: Guard, operator: BaseOperator) -> Guard:
    """What can be refused when the DAG is parsed is refused here."""
    _check_start(operator.start_from_trigger)
    depth_of_dag(operator)
    adapter = adapter_for(type(operator))
    adapter.prepare(operator)
    if not isinstance(guard, Guard):
        raise PlanningError(f"guard={guard!r} is not a Guard.", "Write guard=Guard(key=…).")
    if guard.calls in ("explicit", "batch"):
        return guard if guard.on_doubt is not None else replace(guard, on_doubt="ask")
    if guard.on_doubt is None and not adapter.known and not guard.single_request:
        raise PlanningError(f"Task {operator.task_id!r} does not say on_doubt. {ON_DOUBT}", "No call was made.")
    if isinstance(guard.single_request, str) and not callable(getattr(operator, guard.single_request, None)):
        raise PlanningError(
            f"single_request={guard.single_request!r}, but {type(operator).__name__} has no method of that name.",
            "Name the resume method that makes the request, or say single_request=True.",
        )
    single = guard.single_request or adapter.single_request(operator)
    return replace(guard, calls="body", on_doubt=guard.on_doubt or "ask", single_request=single)
