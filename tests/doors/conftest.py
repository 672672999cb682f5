"""One Airflow in this process for all doors: real metadata, real ``dag.test()``, a fresh ledger and vendor a test.

:class:`Airflow` is what a test holds: it runs DAGs, and looks into the ledger and at the vendor afterwards. Nothing of
ours is replaced; what Airflow is told (Connections, options) it is told by environment variables.
"""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest

from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Record
from demo.vendor import Vendor
from demo.vendor_control import VendorControl

DAY = datetime(2026, 10, 1, tzinfo=UTC)
DEPLOYMENT = "test~test"
"""``dag.test()`` writes under the deployment's test name."""


@dataclass
class Airflow:
    """What a test of a door holds."""

    ledger: Ledger
    sql: psycopg.Connection[Any]
    vendor: VendorControl
    logs: pytest.CaptureFixture[str]

    def log(self) -> str:
        """What was logged since the last look."""
        out, err = self.logs.readouterr()
        return out + err

    def dag(self, schedule: Any = None, **arguments: Any) -> Any:
        """A DAG of this test alone; use it as a context manager, then :meth:`run` it."""
        from airflow.sdk import DAG

        dag_id = f"dag_{uuid.uuid4().hex[:8]}"
        return DAG(dag_id, schedule=schedule, start_date=datetime(2026, 1, 1, tzinfo=UTC), **arguments)

    def run(self, dag: Any, *, day: datetime | None = DAY, **arguments: Any) -> Run:
        """``dag.test()`` to the end. Of the same day it is what a person does with "clear": new tries, the same run."""
        register(dag)
        self.log()
        run = dag.test(logical_date=day, **arguments)
        return ended(run, self.log())

    def once(self, dag: Any, **run: Any) -> Run:
        """Create a run as ``run`` says and try each task once, as ``dag.test()`` does; nothing is waited for."""
        from airflow.sdk.definitions.dag import _run_task

        self.log()
        with created(dag, **run) as (dag_run, session):
            tis, _ = dag_run.update_state(session=session)
            for ti in tis:
                ti.try_number += 1
                session.commit()
                _run_task(ti=ti, task=dag.task_dict[ti.task_id])
            session.expire_all()
            return ended(dag_run, self.log())

    def records(self, state: str | None = None) -> list[Record]:
        return self.ledger.list(state=state)

    def record(self, key: str | None = None) -> Record:
        """The one record of the ledger, or the one of that key."""
        (found,) = [record for record in self.records() if key in (None, record.identity.key)]
        return found

    def kinds(self) -> list[str]:
        """The events of the one record."""
        return [event.kind for event in self.ledger.events(self.record().id)]

    def after_the_call_time(self) -> None:
        """No open call can still be on its way (its ``no_later_than`` has passed), as time would bring it."""
        with self.sql.transaction():
            self.sql.execute("select runguard.open_for_writing()")
            self.sql.execute(
                "update runguard.record set no_later_than = clock_timestamp() where no_later_than is not null"
            )

    def resolve(self, answer: str, **how: Any) -> str:
        self.after_the_call_time()
        return self.ledger.resolve(self.record().id, answer, actor="person:tester", reason="asked the vendor", **how)


@dataclass(frozen=True)
class Run:
    """How one run ended, as Airflow's metadata have it: kept, since the next run of the same day replaces it."""

    state: str
    log: str
    states: dict[str, str]
    tries: dict[str, int]
    xcoms: dict[tuple[str, str, int], Any]
    """By task, key and map index."""

    def result(self, task_id: str, key: str = "return_value", map_index: int = -1) -> Any:
        """What a downstream task gets.

        :raises KeyError: there is none.
        """
        return self.xcoms[task_id, key, map_index]


def ended(dag_run: Any, log: str) -> Run:
    from airflow.models.xcom import XComModel
    from airflow.sdk.serde import deserialize
    from airflow.utils.session import create_session
    from sqlalchemy import select

    with create_session() as session:
        rows = session.scalars(select(XComModel).where(XComModel.run_id == dag_run.run_id)).all()
        xcoms = {
            (row.task_id, row.key, row.map_index): deserialize(row.value)
            for row in rows
            if row.dag_id == dag_run.dag_id
        }
        tis = dag_run.get_task_instances(session=session)
    return Run(
        state=dag_run.state.value,
        log=log,
        states={_name(ti): str(ti.state) for ti in tis},
        tries={_name(ti): ti.try_number for ti in tis},
        xcoms=xcoms,
    )


def _name(ti: Any) -> str:
    return ti.task_id if ti.map_index < 0 else f"{ti.task_id}[{ti.map_index}]"


def register(dag: Any) -> None:
    """Write the DAG to the metadata, as the dag-processor would."""
    from airflow.dag_processing.dagbag import DagBag, sync_bag_to_db
    from airflow.models.dagbundle import DagBundleModel
    from airflow.utils.session import create_session

    with create_session() as session:
        if session.get(DagBundleModel, "tests") is None:
            session.add(DagBundleModel(name="tests"))
    bag = DagBag(dag_folder=os.devnull, bundle_path=None, collect_dags=False)
    bag.bag_dag(dag)
    sync_bag_to_db(bag, "tests", None)


@contextmanager
def created(dag: Any, **run: Any) -> Iterator[Any]:
    """A DAG run as Airflow's scheduler, API or backfill creates it, and the session that it lives in."""
    from airflow.models.serialized_dag import SerializedDagModel
    from airflow.utils.session import create_session
    from airflow.utils.state import DagRunState
    from airflow.utils.types import DagRunTriggeredByType, DagRunType

    register(dag)
    defaults = {
        "run_id": f"manual__{uuid.uuid4().hex[:8]}",
        "run_after": datetime.now(UTC),
        "run_type": DagRunType.MANUAL,
        "state": DagRunState.RUNNING,
        "triggered_by": DagRunTriggeredByType.TEST,
    }
    with create_session() as session:
        model = SerializedDagModel.get(dag.dag_id, session=session)
        yield model.dag.create_dagrun(session=session, **{**defaults, **run}), session


@dataclass
class Task:
    """One task instance, entered as often as the test says."""

    ti: Any
    task: Any

    def enter(self, event: Any = None) -> str:
        """Run it once; where it waited, it comes back with this event. Its state then."""
        from airflow.models.taskinstance import TaskInstance
        from airflow.models.trigger import handle_event_submit
        from airflow.sdk.definitions.dag import _run_task
        from airflow.triggers.base import TriggerEvent
        from airflow.utils.session import create_session

        with create_session() as session:
            ti = session.get_one(TaskInstance, self.ti.id)
            if ti.state == "deferred":
                handle_event_submit(TriggerEvent(event), task_instance=ti, session=session)
            else:
                ti.try_number += 1
        self.ti.refresh_from_db()
        _run_task(ti=self.ti, task=self.task)
        self.ti.refresh_from_db()
        return str(self.ti.state)  # the column, read anew: plain text


@contextmanager
def begun(dag: Any) -> Iterator[Task]:
    """The one task of a DAG in a run of its own, not entered yet."""
    with created(dag) as (dag_run, session):
        (ti,), _ = dag_run.update_state(session=session)
        session.commit()
        yield Task(ti, dag.task_dict[ti.task_id])


@pytest.fixture
def airflow(
    metadata: None,
    ledger_url: str,
    lease_url: str | None,
    vendor: Vendor,
    vendor_control: VendorControl,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> Iterator[Airflow]:
    with psycopg.connect(ledger_url, autocommit=True) as sql:
        sql.execute("update runguard.meta set installation = gen_random_uuid()")  # keys of its own on the shared Redis
        for name, value in {
            **({"AIRFLOW_CONN_RUNGUARD_REDIS": lease_url} if lease_url else {}),
            "AIRFLOW__RUNGUARD__DEPLOYMENT": "test",
            "AIRFLOW_CONN_RUNGUARD_LEDGER": ledger_url,
            "AIRFLOW_CONN_VENDOR": vendor.url,
            "RUNGUARD_VENDOR_URL": vendor.url,
        }.items():
            monkeypatch.setenv(name, value)
        with closing(Ledger(lambda: psycopg.connect(ledger_url), deployment=DEPLOYMENT)) as ledger:
            ledger.check()
            yield Airflow(ledger, sql, vendor_control, capsys)


@pytest.fixture
def charge(vendor: Vendor) -> Callable[..., dict[str, Any]]:
    """What an author's function does: charges, and raises what the client raises."""
    import requests

    def charge(customer: str = "cust", amount: int = 500, key: str | None = None) -> dict[str, Any]:
        headers = {"Idempotency-Key": key} if key else {}
        answer = requests.post(
            f"{vendor.url}/charges", json={"customer": customer, "amount": amount}, headers=headers, timeout=10
        )
        answer.raise_for_status()
        body: dict[str, Any] = answer.json()
        return body

    return charge
