"""A way in for DAGs that run already: what a guard would do, what was done before it, and where it is missing.

Needs Airflow's metadata and the DAG's code, so these commands exist only as ``airflow runguard …``. Keys are rendered
as the task would render them, from its run; one that needs what only a task knows is counted and not guessed.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sized
from dataclasses import dataclass
from datetime import datetime
from types import SimpleNamespace
from typing import Any

import jinja2

from airflow_runguard import series
from airflow_runguard.adapters import adapter_for
from airflow_runguard.core import keys
from airflow_runguard.core.errors import PlanningError
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Effect, Identity, Record, State
from airflow_runguard.core.series import Place
from airflow_runguard.effects import why_effect
from airflow_runguard.operators import GuardMixin
from airflow_runguard.options import Guard
from airflow_runguard.refusals import Refused
from airflow_runguard.rendering import render_key
from airflow_runguard.sensors import guard_of

Data = dict[str, Any]

WOULD = {
    "run": "would run",
    "replay": "would replay",
    "in_doubt": "in doubt: would ask",
    "busy": "would wait for its holder",
    "paused": "would wait for its quota",
    "refused": "would be refused",
    "broken": "cannot be read: would be refused",
    "unknown": "cannot be said before it runs",
}


@dataclass(frozen=True)
class Work:
    """One guarded task in one run. ``identity`` is ``None`` where only the task itself can name it (``why``).

    :param map_index: -1 = it is not mapped; ``None`` = all of a mapped task, whose items are not known before it runs.
    """

    task_id: str
    run_id: str
    map_index: int | None
    identity: Identity | None
    place: Place | None = None
    why: str = ""


def preview(ledger: Ledger, dag_id: str, backfill: tuple[datetime, datetime] | None = None) -> Data:
    """What guarded tasks of a DAG would do: in the runs that it has, if they were cleared, or in a backfill.

    :raises Refused: there is no such DAG, or nothing in it is guarded.
    """
    dag = _dag(dag_id)
    runs = _runs(dag_id) if backfill is None else list(_planned(dag_id, *backfill))
    found = []
    for work in _works(ledger.deployment, dag, runs):
        record = None if work.identity is None else ledger.get(work.identity)
        would = "unknown" if work.identity is None else _would(record)
        found.append(
            {
                "task_id": work.task_id,
                "run_id": work.run_id,
                "map_index": work.map_index,
                "record": None if work.identity is None else str(work.identity),
                "would": would,
                "why": work.why,
            }
        )
    counts = Counter(one["would"] for one in found)
    told = ", ".join(f"{counts[word]} {sentence}" for word, sentence in WOULD.items() if counts[word])
    about = f"{len(runs)} run(s) of {dag_id}"
    return {"said": f"{about}: {told or 'nothing guarded in them'}.", "counts": dict(counts), "works": found}


def baseline(ledger: Ledger, dag_id: str, *, before: datetime, apply: bool, actor: str, reason: str) -> Data:
    """Book what Airflow says was done before the guard was there, as done without a result: clearing history then does
    not charge again. Without ``apply`` nothing is changed. What the ledger knows already is left as it is.

    :raises Refused: there is no such DAG, or nothing in it is guarded.
    """
    dag = _dag(dag_id)
    succeeded = _successes(dag_id, before)
    booked, known, unknown = [], 0, 0
    for work in _works(ledger.deployment, dag, _runs(dag_id)):
        done = succeeded.get((work.task_id, work.run_id), frozenset())
        if work.map_index is None:
            unknown += len(done)
        elif work.map_index not in done:
            continue
        elif work.identity is None:
            unknown += 1
        elif ledger.get(work.identity) is not None:
            known += 1
        else:
            booked.append(str(work.identity))
            if apply:
                _book(ledger, work, actor, reason)
    verb = "Booked" if apply else "Would book"
    said = (
        f"{verb} {len(booked)} past success(es) of {dag_id} before {before:%Y-%m-%d %H:%M %Z} as done, without a "
        f"result; {known} are in the ledger already; {unknown} cannot be named outside of their task."
    )
    if not apply:
        said += " Nothing was changed. Add --apply to book them."
    return {"said": said, "records": booked, "known": known, "unknown": unknown, "applied": apply}


def candidates(dag_id: str | None = None) -> Data:
    """Unguarded tasks that look as if they had an effect outside: read from their code, nothing is run or asked."""
    found = []
    for dag in _dags():
        if dag_id not in (None, dag.dag_id):
            continue
        for task in dag.tasks:
            why = "" if guard_of(task) is not None else why_effect(task)
            if why:
                found.append({"dag_id": dag.dag_id, "task_id": task.task_id, "why": why, "file": dag.fileloc})
    said = f"{len(found)} unguarded task(s) look like effects." if found else "No unguarded task looks like an effect."
    return {"said": said, "tasks": found}


def _book(ledger: Ledger, work: Work, actor: str, reason: str) -> None:
    assert work.identity is not None
    ledger.bypass(work.identity, result=None, reference=f"airflow:{work.run_id}", actor=actor, reason=reason)
    record = ledger.get(work.identity)
    if work.place is not None and record is not None:
        ledger.take_place(work.place, record)


def _would(record: Record | None) -> str:
    if record is None:
        return "run"
    if record.broken:
        return "broken"
    match record.state:
        case State.DONE:
            return "replay"
        case State.RUNNING:
            return "busy"
        case State.IN_DOUBT | State.PAUSED:
            return record.state.value
        case State.FAILED if record.effect is not Effect.NOT_APPLIED:
            return "refused"
    return "run"


# -- the DAG, its guarded tasks, and its runs --------------------------------------------------------------------------


def _works(deployment: str, dag: Any, runs: list[Any]) -> Iterator[Work]:
    tasks = [(task, guard) for task in dag.tasks if (guard := guard_of(task)) is not None]
    if not tasks:
        raise Refused(
            f"DAG {dag.dag_id!r} has no guarded task. Nothing was changed.",
            f"Run `airflow runguard candidates --dag-id {dag.dag_id}`.",
        )
    for run in runs:
        for (task, guard), (map_index, one) in ((pair, one) for pair in tasks for one in _expanded(pair[0])):
            namespace = guard.namespace or f"{dag.dag_id}.{task.task_id}"
            try:
                name, place = _named(dag, one, guard, run)
                identity = keys.identity(deployment, namespace, name)
            except (PlanningError, jinja2.TemplateError) as error:
                what = error.what if isinstance(error, PlanningError) else str(error)
                yield Work(task.task_id, run.run_id, map_index, None, why=what)
            else:
                yield Work(task.task_id, run.run_id, map_index, identity, place)


def _expanded(task: Any) -> list[tuple[int | None, Any]]:
    """What one run has of a task: itself; or, of a mapped one, what its DAG's text expands it to, by map index."""
    if isinstance(task, GuardMixin):
        return [(-1, task)]
    expand = task._get_specified_expand_input()  # Airflow 3.3 has no public way to unmap outside of a task
    over = list(expand.value.values()) if isinstance(expand.value, Mapping) else [expand.value, *_items(expand.value)]
    if not all(isinstance(one, Sized) and not hasattr(one, "resolve") for one in over):
        return [(None, task)]
    number = math.prod(map(len, over)) if isinstance(expand.value, Mapping) else len(expand.value)
    at = [task._expand_mapped_kwargs({"ti": SimpleNamespace(map_index=index)})[0] for index in range(number)]
    return [(index, task.unmap(kwargs)) for index, kwargs in enumerate(at)]


def _items(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else []


def _named(dag: Any, task: Any, guard: Guard, run: Any) -> tuple[str, Place | None]:
    if not isinstance(task, GuardMixin):
        raise PlanningError("It is mapped over what another task gives, which is known when it runs.")
    env = task.get_template_env(dag=dag)
    context = _context(dag, task, run)
    context["args"] = _Arguments(adapter_for(type(task)).arguments(task), context, env)
    if guard.key is None:
        name = keys.default_scope(run.partition_date, run.partition_key, run.logical_date)
        if name is None:
            raise PlanningError("The run has neither a partition nor a logical date.")
    else:
        name = render_key(guard.key, context, env=env)
    if guard.series is None:
        return name, None
    told = series.series_of(guard.series)
    return name, series.place(told, None, task=f"{dag.dag_id}.{task.task_id}", context=context, env=env)


def _context(dag: Any, task: Any, run: Any) -> dict[str, Any]:
    """What a template may ask of a run, as far as it is known outside of the task."""
    context: dict[str, Any] = {"dag": dag, "task": task, "dag_run": run, "run_id": run.run_id, "params": {}}
    context["params"] = {**dag.params.dump(), **(run.conf or {})}
    moment = run.logical_date
    if moment is not None:
        day = f"{moment:%Y-%m-%d}"
        context |= {"logical_date": moment, "ds": day, "ds_nodash": day.replace("-", ""), "ts": moment.isoformat()}
    for name in ("data_interval_start", "data_interval_end", "partition_key", "partition_date"):
        if getattr(run, name, None) is not None:
            context[name] = getattr(run, name)
    return context


class _Arguments(Mapping[str, Any]):
    """A task's arguments as its DAG writes them: templates rendered from the run; what another task gives is absent."""

    def __init__(self, written: Mapping[str, Any], context: Mapping[str, Any], env: Any) -> None:
        self._written, self._context, self._env = written, context, env

    def __getitem__(self, name: str) -> Any:
        return self._plain(self._written[name])

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._written)

    def __len__(self) -> int:
        return len(self._written)

    def _plain(self, value: Any) -> Any:
        if isinstance(value, str):
            return render_key(value, self._context, env=self._env) if "{{" in value else value
        if isinstance(value, dict):
            return {name: self._plain(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._plain(item) for item in value]
        if hasattr(value, "resolve"):
            raise PlanningError("It needs what another task gives.")
        return value


def _dags() -> Iterator[Any]:
    from airflow.dag_processing.bundles.manager import DagBundlesManager
    from airflow.dag_processing.dagbag import BundleDagBag

    manager = DagBundlesManager()  # type: ignore[no-untyped-call]
    for bundle in manager.get_all_dag_bundles():
        bundle.initialize()
        yield from BundleDagBag(dag_folder=bundle.path, bundle_path=bundle.path, bundle_name=bundle.name).dags.values()


def _dag(dag_id: str) -> Any:
    found = next((dag for dag in _dags() if dag.dag_id == dag_id), None)
    if found is None:
        raise Refused(f"There is no DAG {dag_id!r} that can be imported here.", "Look at `airflow dags list`.")
    return found


def _runs(dag_id: str) -> list[Any]:
    from airflow.models.dagrun import DagRun
    from airflow.utils.session import create_session
    from sqlalchemy import select

    with create_session() as session:
        return [_plain_run(run) for run in session.scalars(select(DagRun).where(DagRun.dag_id == dag_id))]


def _plain_run(run: Any) -> Any:
    names = (
        "run_id",
        "logical_date",
        "data_interval_start",
        "data_interval_end",
        "partition_key",
        "partition_date",
        "conf",
    )
    return SimpleNamespace(**{name: getattr(run, name, None) for name in names})


def _planned(dag_id: str, first: datetime, last: datetime) -> Iterator[Any]:
    """The runs that a backfill would create."""
    from airflow.models.serialized_dag import SerializedDagModel
    from airflow.utils.session import create_session

    with create_session() as session:
        model = SerializedDagModel.get(dag_id, session=session)
        infos = [] if model is None else list(model.dag.iter_dagrun_infos_between(first, last))
    for info in infos:
        interval = info.data_interval
        yield SimpleNamespace(
            run_id=f"backfill of {info.logical_date or info.partition_date}",
            logical_date=info.logical_date,
            data_interval_start=interval.start if interval else None,
            data_interval_end=interval.end if interval else None,
            partition_key=getattr(info, "partition_key", None),
            partition_date=getattr(info, "partition_date", None),
            conf={},
        )


def _successes(dag_id: str, before: datetime) -> Mapping[tuple[str, str], Collection[int]]:
    """The map indexes that succeeded, by task and run."""
    from airflow.models.taskinstance import TaskInstance
    from airflow.utils.session import create_session
    from sqlalchemy import select

    query = select(TaskInstance.task_id, TaskInstance.run_id, TaskInstance.map_index).where(
        TaskInstance.dag_id == dag_id, TaskInstance.state == "success", TaskInstance.end_date < before
    )
    found: dict[tuple[str, str], set[int]] = {}
    with create_session() as session:
        for task_id, run_id, map_index in session.execute(query):
            found.setdefault((task_id, run_id), set()).add(map_index)
    return found
