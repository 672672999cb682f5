"""Operators that submit a job and wait for it: their job's name is kept before they wait, and a later try attaches.

An adapter says how to look at a job and where the operator submits; :func:`run` does the rest. Operators that follow
Airflow's own ``ResumableJobMixin`` (Livy, Glue, Databricks, …) need no adapter of their own. The mixin's memory is
switched off: it does not survive a new run of the same work, and it submits again where it knows nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

from airflow_runguard.core.context import GuardContext
from airflow_runguard.core.jobs import FailedForGood, JobFailed, JobNotFound, JobState, NotFound, Running, Succeeded

T = TypeVar("T")


class Submit(Protocol):
    """Makes the request that submits, and keeps its job's name (:meth:`GuardContext.jobs`)."""

    def __call__(self, submit: Callable[[], T], name: Callable[[T], str], one_request: bool, /) -> T: ...


class JobAdapter(Protocol):
    """What the guard must know of an operator that submits a job.

    A job's name is a text; ``submits`` and ``look`` agree on how it is written.
    """

    def look(self, operator: Any, job: str, context: Any) -> JobState:
        """How the job stands at the vendor. What it raises proves nothing."""
        ...

    def submits(self, operator: Any, known: str, submit: Submit) -> Any:
        """A context in which the operator, where it would submit, takes up the job ``known``; if that is '', it submits
        through ``submit``."""
        ...


@contextmanager
def replaced(holder: Any, name: str, value: Any) -> Iterator[None]:
    """One object's method or attribute, replaced for a while."""
    object.__setattr__(holder, name, value)
    try:
        yield
    finally:
        object.__delattr__(holder, name)


ONE_REQUEST = {
    "airflow.providers.amazon.aws.operators.glue.GlueJobOperator",
    "airflow.providers.amazon.aws.operators.redshift_data.RedshiftDataOperator",
    "airflow.providers.apache.livy.operators.livy.LivyOperator",
}
"""Whose ``submit_job`` sends nothing after the request that submits, as far as it was read."""


def _written_in(operator: Any, method: str) -> str:
    """The class whose method an operator has."""
    owner = next(kind for kind in type(operator).__mro__ if method in vars(kind))
    return f"{owner.__module__}.{owner.__qualname__}"


class ResumableJob:
    """Operators with ``ResumableJobMixin``."""

    def look(self, operator: Any, job: str, context: Any) -> JobState:
        status = operator.get_job_status(json.loads(job), context)
        if operator.is_job_active(status):
            return Running()
        if operator.is_job_succeeded(status):
            return Succeeded()
        if str(status).upper() in ("NOT_FOUND", "UNKNOWN"):  # Glue's word for a run that it has forgotten
            return NotFound(f"status {status}")
        return FailedForGood(f"status {status}")

    def submits(self, operator: Any, known: str, submit: Submit) -> Any:
        real = operator.submit_job
        operator.durable = False

        def submit_job(context: Any) -> Any:
            if known:
                return json.loads(known)
            return submit(lambda: real(context), json.dumps, _written_in(operator, "submit_job") in ONE_REQUEST)

        return replaced(operator, "submit_job", submit_job)


class DbtCloudRun:
    """``DbtCloudRunJobOperator``: a run of a dbt Cloud job."""

    def look(self, operator: Any, job: str, context: Any) -> JobState:
        from airflow.providers.dbt.cloud.hooks.dbt import DbtCloudJobRunStatus as Status

        status = operator.hook.get_job_run_status(run_id=int(job), account_id=operator.account_id)
        if status == Status.SUCCESS.value:
            return Succeeded()
        return FailedForGood(f"status {status}") if Status.is_terminal(status) else Running()

    def submits(self, operator: Any, known: str, submit: Submit) -> Any:
        hook = operator.hook
        real = hook.trigger_job_run

        def trigger_job_run(*args: Any, **kwargs: Any) -> Any:
            if known:
                return hook.get_job_run(run_id=int(known), account_id=operator.account_id)
            return submit(lambda: real(*args, **kwargs), lambda answer: str(answer.json()["data"]["id"]), True)

        return replaced(hook, "trigger_job_run", trigger_job_run)


def run(adapter: JobAdapter, operator: Any, guard: GuardContext, context: Any, body: Callable[[], Any]) -> Any:
    """Run an operator's body so that its job is submitted once over all tries.

    :raises JobFailed: the job that was submitted before failed for good; the next try submits it anew.
    :raises JobNotFound: the vendor does not know it; a person decides.
    """
    known = guard.jobs.submitted()
    if known:
        with guard.jobs.following(known):
            match adapter.look(operator, known, context):
                case FailedForGood(reason=reason):
                    raise JobFailed(f"Job {known} failed for good: {reason}.")
                case NotFound(reason=reason):
                    raise JobNotFound(f"The vendor does not know job {known}: {reason}.")
            with adapter.submits(operator, known, guard.jobs.submit):
                return body()
    with adapter.submits(operator, "", guard.jobs.submit), guard.jobs.following():
        return body()
