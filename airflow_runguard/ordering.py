"""What one task instance is to do once: its key, payload and rules, from the author's words and Airflow's context.

Rendered twice and compared: what differs between two renderings names nothing. Nothing here calls anything.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from airflow_runguard import series
from airflow_runguard.adapters import Adapter, adapter_for
from airflow_runguard.config import Settings
from airflow_runguard.core import keys, payloads
from airflow_runguard.core.errors import PlanningError
from airflow_runguard.core.record import Order, Payload
from airflow_runguard.core.series import Place
from airflow_runguard.masking import Hide, hider
from airflow_runguard.options import Guard, check_mapped, seconds
from airflow_runguard.rendering import render_key

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.definitions.context import Context

VENDOR_KEY = "runguard-idempotency-key"
"""What ``{{ guard.idempotency_key }}`` renders to. The real key is put in its place once the record is granted, since
only then the ledger knows the attempt; until then it also keeps the key out of the payload."""


def hiding(options: Settings) -> Hide:
    """What this process hides from people."""
    from airflow.sdk._shared.secrets_masker import redact

    return hider(options.mask_fields, redact)


class Ordering:
    """What an operator's guard says, rendered for one task instance."""

    def __init__(self, operator: BaseOperator, guard: Guard, context: Context) -> None:
        self.operator, self.guard, self.context = operator, guard, context
        self.ti: Any = context["ti"]
        self.adapter: Adapter = adapter_for(type(operator))

    def order(self, options: Settings) -> Order:
        """The key and the payload, rendered twice: what differs between two renderings names nothing."""
        self._check_vendor_key()
        name, order = self._named(), self._payload()
        if name != self._named() or order.digest != self._payload().digest:
            raise PlanningError(
                "The key or the payload came out differently when it was rendered twice (a clock, a random number, an "
                "iterator?), so it cannot name the same work tomorrow."
            )
        guard = self.guard
        deployment = deployment_of(options)
        namespace = guard.namespace or f"{self.ti.dag_id}.{self.ti.task_id}"
        on_doubt = guard.on_doubt if isinstance(guard.on_doubt, str) else "reconcile"
        dag_run: Any = self.context.get("dag_run")
        return Order(
            identity=keys.identity(deployment, namespace, name),
            payload=replace(order, readable=hiding(options)(dict(order.readable))),
            calls=guard.calls or "body",
            on_doubt=on_doubt,
            store_result=guard.store_result,
            lease=seconds(guard.lease, options.lease_ttl),
            max_hold=seconds(guard.max_hold, options.max_hold),
            max_call_time=seconds(guard.max_call_time, options.max_call_time),
            max_claims=guard.max_claims or options.max_claims,
            key_lifetime=seconds(guard.key_lifetime, options.key_lifetime),
            run_at=getattr(dag_run, "run_after", None) or getattr(dag_run, "logical_date", None),
            gate=keys.gate_name(self._rendered(guard.quota)) if guard.quota else None,
            resume_rate=options.resume_rate,
            max_pauses=guard.max_pauses or options.max_pauses,
            max_pause=seconds(guard.max_pause, options.max_pause),
            partition=self._partition(dag_run),
            amount=self._amount(),
            currency=self._rendered(guard.currency) if guard.currency else None,
            place=self._place(),
        )

    def _place(self) -> Place | None:
        """Where this run stands in its series, where its author named one or waits for the previous run."""
        waits = self.guard.wait_for_previous
        if self.guard.series is None and waits is False:
            return None
        return series.place(
            series.series_of(self.guard.series),
            waits if isinstance(waits, series.Previous) else series.Previous() if waits else None,
            task=f"{self.ti.dag_id}.{self.ti.task_id}",
            context={**self.context, "args": _View(self._arguments())},
            env=self.operator.get_template_env(),
        )

    @staticmethod
    def _partition(dag_run: Any) -> str | None:
        date, key = getattr(dag_run, "partition_date", None), getattr(dag_run, "partition_key", None)
        return None if date is None and key is None else str(date.date() if date is not None else key)

    def _amount(self) -> Decimal | None:
        if self.guard.amount is None:
            return None
        if callable(self.guard.amount):
            value = self.guard.amount(_View(self._arguments()))
        else:
            value = self._rendered(self.guard.amount)
        try:
            amount = Decimal(str(value))
        except ArithmeticError:
            amount = Decimal("nan")
        if not amount.is_finite():
            raise PlanningError(f"amount came to {value!r}, which is no number. No call was made.")
        return amount

    def _rendered(self, template: str | Callable[[Any], Any]) -> str:
        context: dict[str, Any] = {**self.context, "args": _View(self._arguments())}
        return render_key(template, context, env=self.operator.get_template_env())

    def _check_vendor_key(self) -> None:
        """Each ``{{ guard.idempotency_key }}`` must stand where its stand-in can be found and replaced. One that a
        filter changed or an object hides would go out as it is: one key for every customer."""
        wanted = getattr(self.operator, "_guard_key_reads", 0)
        found = sum(_stand_ins(getattr(self.operator, name, None)) for name in self.operator.template_fields)
        if found < wanted:
            raise PlanningError(
                "{{ guard.idempotency_key }} was changed by a filter, or stands where it cannot be filled in.",
                "Use it as it is, in text, lists and dicts. No call was made.",
            )

    def _named(self) -> str:
        if self.guard.key is None:
            if self.ti.map_index is not None and self.ti.map_index >= 0:
                check_mapped(None, type(self.operator))
            dag_run: Any = self.context.get("dag_run")
            if _is_moment_of_triggering(dag_run):
                raise PlanningError(
                    f"Run {self.ti.run_id!r} was triggered by a task, and its logical date is only the moment of that: "
                    "when that task is tried again, the same work has another date.",
                    "Say what it is: guard=Guard(key='…').",
                )
            scope = keys.default_scope(
                getattr(dag_run, "partition_date", None),
                getattr(dag_run, "partition_key", None),
                getattr(dag_run, "logical_date", None),
            )
            if scope is None:
                raise PlanningError(
                    f"Run {self.ti.run_id!r} has neither a partition nor a logical date, so nothing names the work.",
                    "Say what it is: guard=Guard(key='…').",
                )
            return scope
        return self._rendered(self.guard.key)

    def _payload(self) -> Payload:
        arguments = as_read(self._arguments())
        chosen = self.guard.payload
        if chosen is None:
            return payloads.payload(arguments)
        if callable(chosen):
            return payloads.payload(chosen(_View(arguments)))
        missing = [name for name in chosen if name not in arguments]
        if missing:
            raise PlanningError(f"payload names {', '.join(missing)}; the task has {', '.join(arguments)}.")
        return payloads.payload({name: arguments[name] for name in chosen})

    def _arguments(self) -> Mapping[str, Any]:
        return self.adapter.arguments(self.operator)


class _View(Mapping[str, Any]):
    """Arguments by name, as attributes too: ``args.invoice.id`` in a template, ``args.invoice`` in a function."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self._arguments = arguments

    def __getitem__(self, name: str) -> Any:
        return self._arguments[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._arguments)

    def __len__(self) -> int:
        return len(self._arguments)

    def __getattr__(self, name: str) -> Any:
        try:
            return self._arguments[name]
        except KeyError:
            raise AttributeError(name) from None


def _is_moment_of_triggering(dag_run: Any) -> bool:
    """``TriggerDagRunOperator`` gives a run the time of its own try, where its author says no date. A date that is
    meant has no fractions of a second."""
    run_type, date = getattr(dag_run, "run_type", None), getattr(dag_run, "logical_date", None)
    if getattr(dag_run, "partition_date", None) or getattr(dag_run, "partition_key", None):
        return False
    return getattr(run_type, "value", run_type) == "operator_triggered" and date is not None and date.microsecond > 0


def as_read(value: Any) -> Any:
    """The value with Airflow's own sequences as lists: what mapped tasks gave, which it reads item by item."""
    if isinstance(value, Sequence) and type(value).__module__.startswith("airflow.sdk."):
        return [as_read(item) for item in value]
    if type(value) in (list, tuple):
        return type(value)(as_read(item) for item in value)
    if type(value) is dict:
        return {name: as_read(item) for name, item in value.items()}
    return value


def _stand_ins(value: Any) -> int:
    if isinstance(value, str):
        return value.count(VENDOR_KEY)
    if type(value) in (list, tuple):
        return sum(_stand_ins(item) for item in value)
    if type(value) is dict:
        return sum(_stand_ins(item) for item in value.values())
    return 0


def deployment_of(options: Settings) -> str:
    """Whose records this process works on."""
    return options.test_deployment if is_test() else options.deployment


def is_test() -> bool:
    """Whether ``dag.test()`` or ``airflow tasks test`` runs this: then Airflow's supervisor lives in this process."""
    from airflow.sdk.execution_time import task_runner

    supervisor = sys.modules.get("airflow.sdk.execution_time.supervisor")  # a real task need not have loaded it
    comms = getattr(task_runner, "SUPERVISOR_COMMS", None)
    return supervisor is not None and isinstance(comms, supervisor.InProcessSupervisorComms)
