"""What the guard knows about operator classes: what their order is, whether they are one request, which are refused.

An operator without an adapter counts as an undeclared body: any error of it is unknown for the effect, and its payload
is its template fields without headers, environments and connections. Matching is by class path through the ancestors,
so that no provider is imported.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from airflow_runguard.core.errors import PlanningError
from airflow_runguard.jobs import DbtCloudRun, JobAdapter, ResumableJob

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator

NEVER_ORDER = ("headers", "env", "environment")
"""Template fields that carry tokens or run data, never the order."""


def _template_fields(operator: BaseOperator) -> dict[str, Any]:
    names = [name for name in operator.template_fields if name not in NEVER_ORDER and not name.endswith("conn_id")]
    fields = {name: getattr(operator, name, None) for name in names}
    return {name: value for name, value in fields.items() if not comes_later(value)}


def _fields(*names: str) -> Callable[[BaseOperator], dict[str, Any]]:
    """These fields; where a function makes one of them when it runs (``@task.sql``), its arguments are the order."""

    def order(operator: BaseOperator) -> dict[str, Any]:
        fields = {name: getattr(operator, name, None) for name in names}
        return _template_fields(operator) if any(map(comes_later, fields.values())) else fields

    return order


def comes_later(value: Any) -> bool:
    """Whether a field is set only when the operator runs."""
    return type(value).__name__ == "SetDuringExecution"


def _python_arguments(operator: BaseOperator) -> dict[str, Any]:
    """The arguments that the author gave, by the function's own names; never what Airflow adds from its context."""
    from airflow.sdk.definitions.context import KNOWN_CONTEXT_KEYS

    python: Any = operator
    signature = inspect.signature(python.python_callable)
    given = {name: value for name, value in dict(python.op_kwargs).items() if name in signature.parameters}
    free = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.parameters.values())
    if free:
        given = dict(python.op_kwargs)
    try:
        bound = signature.bind_partial(*python.op_args, **given)
    except TypeError as error:
        raise PlanningError(f"The arguments do not fit {python.python_callable.__name__}: {error}.") from error
    bound.apply_defaults()
    arguments: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_KEYWORD:
            arguments.update(value)
        elif name not in KNOWN_CONTEXT_KEYS and not (kind is inspect.Parameter.VAR_POSITIONAL and not value):
            arguments[name] = value
    return arguments


@dataclass(frozen=True)
class Adapter:
    """
    :param arguments: the order of a rendered operator, by field.
    :param single_request: whether it makes exactly one request, so that its error speaks for the effect.
    :param takes_answer: the method that is given the answer to that request, as ``response``. What is raised once it
        has begun (by a check or a filter of the author's, which may ask the vendor more) says nothing about what was
        sent before.
    :param checks_answer: whether the author says which answer is a success; else the classifier reads it.
    :param prepare: makes a parsed operator guardable, or raises :class:`PlanningError`.
    :param known: an error needs no ``on_doubt`` from the author: asking is the default.
    :param job: how its job is kept and attached to, where it submits one and waits for it.
    :param refused: why it cannot be guarded.
    """

    arguments: Callable[[BaseOperator], Mapping[str, Any]] = _template_fields
    single_request: Callable[[BaseOperator], bool] = lambda operator: False
    takes_answer: str = ""
    checks_answer: Callable[[Any], bool] = lambda operator: False
    prepare: Callable[[BaseOperator], None] = lambda operator: None
    known: bool = False
    job: JobAdapter | None = None
    refused: str = ""


HTTP = "airflow.providers.http.operators.http.HttpOperator"
HTTP_SENDS = {"execute", "execute_sync", "paginate_sync"}
"""Its methods that send. A subclass with its own may send more than one request."""


def _http_is_single(operator: Any) -> bool:
    if operator.pagination_function or operator.retry_args:
        return False
    ours = "airflow_runguard.operators"
    heirs = itertools.takewhile(lambda cls: _path(cls) != HTTP, type(operator).__mro__)
    return not any(cls.__module__ != ours and HTTP_SENDS & vars(cls).keys() for cls in heirs)


def _http_order(operator: Any) -> dict[str, Any]:
    handed_on = getattr(operator, "request_kwargs", None) or {}  # newer than some versions of the provider
    order = {name: getattr(operator, name) for name in ("endpoint", "method", "data")}
    return order | {name: handed_on[name] for name in ("json", "params") if name in handed_on}


def _in_the_worker(operator: Any) -> None:
    # Deferrable, it would send from the triggerer, which sends again after a restart.
    operator.deferrable = False


IN_THE_TRIGGERER = Adapter(
    refused="it sends from the triggerer, which sends again after a restart; make the request in a function of your "
    "own (guarded_task)"
)
BEAM = "airflow.providers.apache.beam.operators.beam"
AZURE = "airflow.providers.microsoft.azure.operators"

RESUMABLE = Adapter(known=True, job=ResumableJob())

ADAPTERS: Mapping[str, Adapter] = {
    "airflow.sdk.bases.resumablejobmixin.ResumableJobMixin": RESUMABLE,
    "airflow.providers.common.compat._resumable_job_mixin.ResumableJobMixin": RESUMABLE,
    "airflow.providers.dbt.cloud.operators.dbt.DbtCloudRunJobOperator": Adapter(
        arguments=_fields("account_id", "job_id", "steps_override", "schema_override", "additional_run_config"),
        known=True,
        job=DbtCloudRun(),
    ),
    "airflow.providers.standard.operators.python.PythonOperator": Adapter(arguments=_python_arguments),
    HTTP: Adapter(
        arguments=_http_order,
        single_request=_http_is_single,
        takes_answer="process_response",
        checks_answer=lambda operator: operator.response_check is not None,
        prepare=_in_the_worker,
        known=True,
    ),
    "airflow.providers.common.sql.operators.sql.SQLExecuteQueryOperator": Adapter(
        arguments=_fields("sql", "parameters", "database"), known=True
    ),
    # Their triggers start the pipeline, except on Dataflow; which runner it is, a template may say.
    f"{BEAM}.BeamRunPythonPipelineOperator": Adapter(prepare=_in_the_worker),
    f"{BEAM}.BeamRunJavaPipelineOperator": Adapter(prepare=_in_the_worker),
    f"{AZURE}.msgraph.MSGraphAsyncOperator": IN_THE_TRIGGERER,
    f"{AZURE}.powerbi.PowerBIDatasetRefreshOperator": IN_THE_TRIGGERER,
    f"{AZURE}.analysis_services.AzureAnalysisServicesRefreshOperator": IN_THE_TRIGGERER,
    "airflow.providers.standard.operators.empty.EmptyOperator": Adapter(
        refused="the scheduler marks it successful without running it"
    ),
    "airflow.providers.standard.operators.trigger_dagrun.TriggerDagRunOperator": Adapter(
        refused="Airflow triggers the run after execute has ended, where no guard can see it; give it a trigger_run_id "
        "of its own, which Airflow refuses to create twice"
    ),
}


def adapter_for(cls: type) -> Adapter:
    """The adapter of the nearest ancestor that has one."""
    for ancestor in cls.__mro__:
        adapter = ADAPTERS.get(_path(ancestor))
        if adapter is not None:
            return adapter
    return Adapter()


def _path(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"
