"""Booking unguarded tasks from the outside: by callbacks of the task, or by a listener for whole DAGs.

Airflow calls these never, once or twice, early or late, in the task, the dag-processor, the scheduler or the api-server
(3.3). So all of it is hints: each is told under the attempt's own id, told twice it changes nothing, and none overrules
the holder of a guard. Nothing is raised into Airflow, and nobody is held longer than ``[runguard] observe_timeout``.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from fnmatch import fnmatchcase
from typing import Any

from airflow.listeners import hookimpl

from airflow_runguard.config import Settings, connect_ledger, settings
from airflow_runguard.core import keys
from airflow_runguard.core.errors import NotApplied
from airflow_runguard.core.failures import classify
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.observe import Bystander
from airflow_runguard.core.record import Effect, Failure, FailureClass, Holder, Identity
from airflow_runguard.core.work import said
from airflow_runguard.ordering import deployment_of
from airflow_runguard.rendering import render_key

log = logging.getLogger("airflow_runguard")

DIED = Failure(FailureClass.UNKNOWN, Effect.UNKNOWN, evidence="its process ended without saying how")


# -- callbacks of one task ---------------------------------------------------------------------------------------------


def ledger_callbacks(*, key: str | Callable[[Any], Any] | None = None, namespace: str | None = None) -> dict[str, Any]:
    """The callbacks that book an existing task in the ledger without changing it: ``BashOperator(…,
    **ledger_callbacks())``. It is observed, not guarded: nothing is held up, and a second run is noted as one.

    :param key: names the work, as in :class:`Guard`; a function is given the operator's ``op_kwargs``. Default: the
        run's partition or logical date. Mapped tasks must say it.
    :param namespace: default ``<dag_id>.<task_id>``.
    """

    def book(what: str) -> Callable[[Any], None]:
        def callback(context: Any) -> None:
            _quietly(lambda: _of_context(context, what, key, namespace))

        return callback

    failed = book("failed")
    return {
        "on_execute_callback": book("started"),
        "on_success_callback": book("done"),
        "on_failure_callback": failed,
        "on_retry_callback": failed,
        "on_skipped_callback": book("skipped"),
    }


def _of_context(context: Any, what: str, key: Any, namespace: str | None) -> None:
    ti = context["ti"]
    task = context.get("task") or getattr(ti, "task", None)
    if key is None:
        name = _name_by_run(ti, context.get("dag_run"))
    else:
        rendered: Mapping[str, Any] = {**context, "args": getattr(task, "op_kwargs", {})}
        name = render_key(key, rendered, env=task.get_template_env() if task is not None else None)
    if name is None:
        return
    _tell(settings(), ti, namespace or f"{ti.dag_id}.{ti.task_id}", name, what, context.get("exception"))


# -- the listener, for whole DAGs --------------------------------------------------------------------------------------


@hookimpl
def on_task_instance_running(previous_state: Any, task_instance: Any) -> None:
    _quietly(lambda: _heard("started", previous_state, task_instance))


@hookimpl
def on_task_instance_success(previous_state: Any, task_instance: Any) -> None:
    _quietly(lambda: _heard("done", previous_state, task_instance))


@hookimpl
def on_task_instance_failed(previous_state: Any, task_instance: Any, error: Any) -> None:
    _quietly(lambda: _heard("failed", previous_state, task_instance, error))


@hookimpl
def on_task_instance_skipped(previous_state: Any, task_instance: Any) -> None:
    _quietly(lambda: _heard("skipped", previous_state, task_instance))


WORDS = {"done": "success", "failed": "failed", "skipped": "skipped"}
MARKED_BY = ("patch_task_instance", "patch_task_group_instances", "bulk_task_instances", "patch_dag_run")
"""What Airflow's audit log calls it when a person marks a task, by itself or with others."""


def _heard(what: str, previous_state: Any, ti: Any, error: Any = None) -> None:
    options = settings()
    patterns = [pattern.strip() for pattern in options.observe_dags.split(",")]
    if not any(fnmatchcase(ti.dag_id, pattern) for pattern in patterns if pattern):
        return
    in_task = not hasattr(ti, "_sa_instance_state")
    dag_run = ti.get_template_context().get("dag_run") if in_task else ti.dag_run
    name = _name_by_run(ti, dag_run)
    if name is None:
        return
    namespace = f"{ti.dag_id}.{ti.task_id}"
    if not in_task and previous_state is None and what in WORDS:  # a person, through the API or the UI
        _told(options, ti, namespace, name, WORDS[what])
    elif not _guarded(getattr(ti, "task", None)):
        _tell(options, ti, namespace, name, what, error)


def _guarded(task: Any) -> bool:
    """Whether a task books itself. Where its code is not at hand (scheduler), its record says so to the ledger: an
    observer settles no guard's record."""
    from airflow_runguard.operators import GuardMixin

    return isinstance(task, GuardMixin)


def _name_by_run(ti: Any, dag_run: Any) -> str | None:
    """The default key; ``None`` for a mapped task, whose index is no name, and for a run that has none."""
    if ti.map_index is not None and ti.map_index >= 0:
        return None
    names = ("partition_date", "partition_key", "logical_date")
    return keys.default_scope(*(getattr(dag_run, name, None) for name in names))


# -- what both do ------------------------------------------------------------------------------------------------------


def _quietly(act: Callable[[], None]) -> None:
    try:
        act()
    except Exception as error:
        log.warning("The task could not be observed; it goes on: %s", said(error))


def _tell(options: Settings, ti: Any, namespace: str, name: str, what: str, error: Any) -> None:
    from airflow.sdk._shared.secrets_masker import redact

    identity, holder = keys.identity(deployment_of(options), namespace, name), _holder(ti)
    failure = _failure(error) if what == "failed" else None
    why = "" if failure is None else said(error) if isinstance(error, BaseException) else str(error or DIED.evidence)
    why = str(redact(why))
    failure = failure and replace(failure, evidence=str(redact(failure.evidence)))

    def observe(ledger: Ledger) -> None:
        seen = ledger.observe(identity, holder, what, failure=failure, error=why[:2000], max_hold=options.max_hold)
        if seen.verdict == "duplicate" and what == "started":
            log.warning("Under a guard, this would have been %s (%s).", seen.said, identity)

    _ask(options, identity, observe)


def _told(options: Settings, ti: Any, namespace: str, name: str, word: str) -> None:
    identity, holder = keys.identity(deployment_of(options), namespace, name), _holder(ti)
    actor = _who(ti)
    _ask(options, identity, lambda ledger: ledger.airflow_was_told(identity, holder, word, actor=actor))


def _ask(options: Settings, identity: Identity, question: Callable[[Ledger], Any]) -> None:
    connect = connect_ledger(options)
    bystander = Bystander(lambda: Ledger(connect, deployment=identity.deployment), options.observe_timeout)
    bystander.ask(question)
    bystander.close()
    if bystander.trouble:
        log.warning("%s was observed, but not booked: %s", identity, bystander.trouble)


def _failure(error: Any) -> Failure:
    """Nothing is known of a task that made its calls unseen, unless it says so itself."""
    if not isinstance(error, BaseException):
        return DIED
    failure = classify(error)
    return failure if isinstance(error, NotApplied) else replace(failure, effect=Effect.UNKNOWN, pausable=False)


def _holder(ti: Any) -> Holder:
    return Holder(
        nonce=str(ti.id),
        ti_id=str(ti.id),
        dag_id=ti.dag_id,
        task_id=ti.task_id,
        run_id=ti.run_id,
        try_number=ti.try_number or 0,
        map_index=-1 if ti.map_index is None else ti.map_index,
        host=socket.gethostname(),
        pid=os.getpid(),
    )


def _who(ti: Any) -> str:
    """Who told Airflow: its API commits the entry of its audit log before it acts (3.3.2). Only where that is certain:
    nobody is named for what another may have done in the same minute."""
    from airflow.models.log import Log
    from sqlalchemy import select
    from sqlalchemy.orm import object_session

    session = object_session(ti)
    owners: set[str] = set()
    if session is not None:
        about = select(Log.task_id, Log.owner).where(
            Log.dag_id == ti.dag_id,
            Log.run_id == ti.run_id,
            Log.event.in_(MARKED_BY),
            Log.dttm > datetime.now(UTC) - timedelta(minutes=1),
        )
        with session.no_autoflush:
            entries = [(task_id, owner) for task_id, owner in session.execute(about) if owner]
        owners = {owner for task_id, owner in entries if task_id == ti.task_id} or {owner for _, owner in entries}
    return f"person:{owners.pop()}" if len(owners) == 1 else "somebody, through Airflow's API (its audit log says who)"
