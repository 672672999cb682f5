"""The doors for batches: ``@task.guarded_batch``, :func:`guarded_batch_task`, :class:`GuardedBatchOperator`; and
:class:`BatchResults`, which reads what the items gave in a downstream task.

The author writes a function of one item; the task is given the list. What runs is ``core/batch.py`` as the body of one
record. ``entry.py`` is the way in and out, as for every guarded task.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar, cast, overload

import attr
from airflow.providers.standard.decorators.python import _PythonDecoratedOperator
from airflow.providers.standard.operators.python import PythonOperator

from airflow_runguard import codec
from airflow_runguard.config import connect_ledger, settings
from airflow_runguard.core import guard as core
from airflow_runguard.core import payloads
from airflow_runguard.core.batch import Batch, ItemContext
from airflow_runguard.core.conduct import conduct
from airflow_runguard.core.errors import PlanningError, ResultNotStored
from airflow_runguard.core.items import Items
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.reconcile import takes_many
from airflow_runguard.core.record import Payload, Result
from airflow_runguard.decorators import _GuardedTaskDecorator
from airflow_runguard.entry import Entry
from airflow_runguard.operators import GuardMixin, with_defaults
from airflow_runguard.options import BatchGuard, BatchOptions
from airflow_runguard.ordering import as_read
from airflow_runguard.rendering import render_key

if TYPE_CHECKING:
    from typing import Protocol, Unpack

    from airflow.sdk.bases.decorator import Task

    from airflow_runguard.decorators import _Options as _TaskOptions

I = TypeVar("I")  # noqa: E741  # an item
P = ParamSpec("P")
R = TypeVar("R")


class BatchEntry(Entry):
    """One entry of a batch: its list is no part of the record's payload (each item has its own), and its summary is
    given also where the task fails."""

    def _arguments(self) -> Mapping[str, Any]:
        arguments = dict(super()._arguments())
        arguments.pop(getattr(cast(Any, self.operator).python_callable, "_items", ""), None)
        return arguments

    def _payload(self) -> Payload:
        return payloads.payload(as_read(self._arguments()))

    def _depth(self) -> str | None:
        """A batch goes on by what the ledger has of its items, so where all is only observed it is guarded all the
        same."""
        depth = super()._depth()
        return "auto" if depth == "observe" else depth

    def end(self, how: core.Ended) -> None:
        if how.value is not None:
            self.ti.xcom_push(key="return_value", value=how.value)
        super().end(how)


class BatchMixin(GuardMixin):
    """What the operators of batches have in common."""

    _entry = BatchEntry


class GuardedBatchOperator(BatchMixin, PythonOperator):
    """Call a function for each item of a list, each item once over all tries, runs and clears.

    :param items: a list, an upstream task's output, or a function without parameters that returns an iterable (a
        generator of millions of lines is fine: it is read once for each entry, and never held).
    :param python_callable: given the item (after ``guard``, where that is its first parameter).
    :param guard: the settings.
    """

    @with_defaults
    def __init__(self, *, items: Any, python_callable: Callable[..., Any], guard: BatchGuard, **kwargs: Any) -> None:
        function = for_items(python_callable, guard)
        super().__init__(python_callable=function, op_args=[items, *kwargs.pop("op_args", ())], guard=guard, **kwargs)


class _GuardedBatchDecoratedOperator(BatchMixin, _PythonDecoratedOperator):
    """The operator behind ``@task.guarded_batch``."""

    custom_operator_name = "@task.guarded_batch"

    @with_defaults
    def __init__(self, *, python_callable: Callable[..., Any], guard: BatchGuard, **kwargs: Any) -> None:
        super().__init__(python_callable=for_items(python_callable, guard), guard=guard, **kwargs)


def for_items(function: Callable[..., Any], guard: BatchGuard) -> Callable[..., Any]:
    """The function of one item as the function of a list, which is what Airflow binds and calls.

    :raises PlanningError: it takes no item.
    """
    if hasattr(function, "_items"):
        return function
    if not isinstance(guard, BatchGuard):
        raise PlanningError(f"guard={guard!r} is not a BatchGuard.", "Write guard=BatchGuard(item_key=…).")
    if guard.depth == "observe":
        raise PlanningError(
            "A batch cannot be observed only: it goes on by what the ledger has of its items.",
            "Leave depth out, or look at the DAG by [runguard] observe_dags before you guard it.",
        )
    signature = inspect.signature(function)
    parameters = list(signature.parameters.values())
    takes_guard = bool(parameters) and parameters[0].name == "guard"
    rest = parameters[1:] if takes_guard else parameters
    if not rest or rest[0].kind not in (rest[0].POSITIONAL_ONLY, rest[0].POSITIONAL_OR_KEYWORD):
        raise PlanningError(
            f"{function.__name__} takes no item.",
            "Its first parameter (after `guard`) is the item; the task gets a list.",
        )
    asynchronous, name = inspect.iscoroutinefunction(function), rest[0].name

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> None:
        by_name = name in kwargs  # as of a mapped task
        items, others = (kwargs.pop(name), args) if by_name else (args[0], args[1:])

        def call(context: ItemContext, item: Any) -> Any:
            return function(context, item, *others, **kwargs) if takes_guard else function(item, *others, **kwargs)

        conduct(_batch(guard, items, call, asynchronous), core.current_guard())

    del wrapper.__wrapped__  # else an async function would make an async task of it
    wrapper.__signature__ = signature.replace(parameters=rest)  # type: ignore[attr-defined]
    wrapper._items = name  # type: ignore[attr-defined]
    return wrapper


def _batch(guard: BatchGuard, items: Any, call: Callable[..., Any], asynchronous: bool) -> Batch:
    return Batch(
        items=items if callable(items) else lambda: items,
        key_of=_key_of(guard.item_key),
        payload_of=_payload_of(guard.payload),
        call=call,
        asynchronous=asynchronous,
        concurrency=guard.concurrency,
        bulk=guard.bulk,
        accept=getattr(guard.accept, "model_validate", guard.accept),
        allow_empty=guard.allow_empty,
        stop_after=guard.stop_after,
        stop_after_share=guard.stop_after_share,
        allow_partial=guard.allow_partial,
        reconcile_chunks=callable(guard.on_doubt) and takes_many(guard.on_doubt),
    )


def _key_of(item_key: Any) -> Callable[[Any], Any]:
    if callable(item_key):
        return cast(Callable[[Any], Any], item_key)
    if "{{" in item_key or "{%" in item_key:
        return lambda item: render_key(item_key, {"item": item})
    return lambda item: _field(item, item_key)


def _payload_of(payload: Any) -> Callable[[Any], Any]:
    if payload is None:
        return lambda item: item
    if callable(payload):
        return cast(Callable[[Any], Any], payload)
    return lambda item: {name: _field(item, name) for name in payload}


def _field(item: Any, name: str) -> Any:
    try:
        return item[name] if isinstance(item, Mapping) else getattr(item, name)
    except (KeyError, AttributeError):
        raise PlanningError(f"It has no field {name!r}: {item!r:.200}.") from None


# -- the decorator -----------------------------------------------------------------------------------------------------

if TYPE_CHECKING:

    class _Options(BatchOptions, _TaskOptions, total=False):
        """The options of a batch and those of every operator."""

    class _Decorator(Protocol):
        @overload
        def __call__(
            self, function: Callable[Concatenate[ItemContext, I, P], R], /
        ) -> Task[Concatenate[Any, P], dict[str, Any]]: ...
        @overload
        def __call__(
            self, function: Callable[Concatenate[I, P], R], /
        ) -> Task[Concatenate[Any, P], dict[str, Any]]: ...


def guarded_batch_task(**options: Unpack[_Options]) -> _Decorator:
    """Make a function of one item a guarded batch: the task is called with a list, the function with each of its items.

    The list is a list, an upstream task's output, or a function that returns an iterable. The task gives back a summary
    (see :class:`BatchResults`), also where it fails because some items did.

    :param options: those of :class:`~airflow_runguard.options.BatchGuard`; all others are the operator's.
    :raises PlanningError: an option or value that cannot be used, when the DAG is parsed.
    """
    given: dict[str, Any] = dict(options)
    names = BatchOptions.__annotations__.keys()
    mine = {name: given.pop(name) for name in list(given) if name in names}
    guard = given.pop("guard", None) or BatchGuard(**mine)

    def decorate(function: Callable[..., Any]) -> Any:
        return _GuardedTaskDecorator(
            function=for_items(function, guard),
            multiple_outputs=cast(bool, attr.NOTHING),
            operator_class=_GuardedBatchDecoratedOperator,
            kwargs={**given, "guard": guard},
            decorator_name="task.guarded_batch",
        )

    return cast("_Decorator", decorate)


# -- downstream --------------------------------------------------------------------------------------------------------


class BatchResults(Iterable[tuple[str, Any]]):
    """What the items of a batch gave, read from the ledger as it is asked for, a page at a time.

    ``for key, result in BatchResults(summary)``, ``len(…)``: the items of that entry's list that are done.
    ``BatchResults(summary)[key]``: of any item of the record that is done, also one that is gone from the list.

    :param summary: what the batch's task gave back.
    :raises ResultNotStored: of one item: it is done, but its result was not stored.
    """

    def __init__(self, summary: Mapping[str, Any]) -> None:
        missing = {"deployment", "record_id", "generation", "fence", "done", "replayed"} - set(summary)
        if missing:
            raise PlanningError(f"This is no batch's summary: it lacks {', '.join(sorted(missing))}.")
        self._summary = summary

    def __len__(self) -> int:
        return int(self._summary["done"])

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        """:raises PlanningError: what the list named is not known any more, since a later entry had another one."""
        with closing(self._ledger()) as ledger:
            items, fence = Items(ledger), self._summary["fence"]
            record, generation = self._summary["record_id"], self._summary["generation"]
            of_list = items.done_of_list(record, generation, fence)
            everything = of_list.named == of_list.done
            if not everything and not of_list.kept and self._summary["replayed"] and of_list.named < len(self):
                raise PlanningError(
                    "A later run of this batch had another list, and which items this summary counts is not kept.",
                    "Read the later run's summary, or single items with BatchResults(summary)[key].",
                )
            planned = None if everything else fence
            for key, result in items.results(record, generation, self._stored(), planned):
                yield key, self._loaded(key, result)

    def __getitem__(self, key: str) -> Any:
        """:raises KeyError: no such item, or it is not done."""
        with closing(self._ledger()) as ledger:
            record, generation = self._summary["record_id"], self._summary["generation"]
            result = Items(ledger).result(record, generation, key, self._stored())
        if result is None:
            raise KeyError(key)
        return self._loaded(key, result)

    def _ledger(self) -> Ledger:
        return Ledger(connect_ledger(settings()), deployment=self._summary["deployment"])

    def _stored(self) -> str:
        return str(self._summary.get("store_result", "all"))

    def _loaded(self, key: str, result: Result) -> Any:
        if result.data is None and result.missing:
            raise ResultNotStored(f"Item {key} is done, but its result was not stored ({result.missing}).")
        return None if result.data is None else codec.load(result.data)
