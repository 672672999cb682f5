"""Existing tasks, booked from the outside: by their callbacks, or by a listener for whole DAGs. All of it is hints."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from airflow.providers.standard.operators.python import PythonOperator
from airflow.sdk.listener import get_listener_manager

from airflow_runguard import guarded_task, ledger_callbacks, onlooker
from airflow_runguard.core.record import State
from airflow_runguard.explain import standing
from tests.doors.conftest import DAY


def plain(airflow, charge, callbacks: dict[str, Any] | None = None, **options: Any) -> Any:
    with airflow.dag() as dag:
        PythonOperator(
            task_id="pay",
            python_callable=lambda: charge()["id"],
            retry_delay=timedelta(0),
            **(callbacks or {}),
            **options,
        )
    return dag


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("AIRFLOW__RUNGUARD__OBSERVE_DAGS", "other, dag_*")
    manager = get_listener_manager()
    manager.add_listener(onlooker)
    yield
    manager.clear()


def stands(airflow: Any) -> str:
    """What people are told of the record."""
    return standing(airflow.record(), airflow.ledger.calls(airflow.record().id), airflow.ledger.check()["now"]).why


@pytest.fixture
def real(airflow, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in production: all that runs is real work, and every DAG is listened to."""
    monkeypatch.setenv("AIRFLOW__RUNGUARD__OBSERVE_DAGS", "*")
    monkeypatch.setenv("AIRFLOW__RUNGUARD__TEST_DEPLOYMENT", "test")
    airflow.ledger.deployment = "test"


# -- callbacks ---------------------------------------------------------------------------------------------------------


def test_callbacks_book_a_task_and_note_its_second_run(airflow, charge, caplog):
    dag = plain(airflow, charge, ledger_callbacks(key="invoice/7", namespace="billing"))
    airflow.run(dag)
    second = airflow.run(dag)
    assert (second.state, airflow.vendor.charges()) == ("success", 2)
    assert airflow.record().state is State.DONE
    assert airflow.kinds() == ["observed_started", "observed_done", "observed_again", "observed_again"]
    assert "a retry or a clear of it makes the call again" in stands(airflow)
    assert "Under a guard, this would have been a duplicate of" in caplog.text


def test_a_task_that_fails_leaves_a_doubt_and_its_retry_settles_it(airflow, charge):
    airflow.vendor.script("drop")
    run = airflow.run(plain(airflow, charge, ledger_callbacks(key="invoice/7"), retries=1))
    assert run.state == "success"
    assert airflow.record().state is State.DONE
    assert airflow.kinds() == ["observed_started", "observed_failed", "observed_again", "observed_done"]


def test_what_callbacks_saw_is_honoured_by_a_guard(airflow, charge):
    dag = plain(airflow, charge, ledger_callbacks())
    airflow.run(dag)
    with airflow.dag() as guarded:

        @guarded_task(namespace=f"{dag.dag_id}.pay", on_doubt="ask", store_result="none")
        def pay() -> Any:
            return charge()["id"]

        pay()
    run = airflow.run(guarded)
    assert (run.state, airflow.vendor.charges()) == ("success", 1)
    assert "Done before" in run.log


def test_nothing_that_goes_wrong_is_raised_into_airflow(airflow, charge, monkeypatch, caplog):
    monkeypatch.setenv("AIRFLOW_CONN_RUNGUARD_LEDGER", "postgresql://nobody@127.0.0.1:1/none")
    run = airflow.run(plain(airflow, charge, ledger_callbacks()))
    assert run.state == "success"
    assert "was observed, but not booked" in caplog.text


# -- the listener ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("listening")
def test_the_listener_books_the_tasks_of_the_dags_that_it_is_told(airflow, charge):
    dag = plain(airflow, charge)
    airflow.run(dag)
    airflow.run(dag)
    assert str(airflow.record().identity) == f"{dag.dag_id}.pay/ld:2026-10-01T00:00:00Z"
    assert airflow.kinds() == ["observed_started", "observed_done", "observed_again", "observed_again"]


@pytest.mark.usefixtures("listening")
def test_the_listener_leaves_guarded_tasks_and_other_dags_alone(airflow, charge, monkeypatch):
    with airflow.dag() as dag:

        @guarded_task(on_doubt="ask")
        def pay() -> Any:
            return charge()["id"]

        pay()
    airflow.run(dag)
    assert "observed_started" not in airflow.kinds()
    monkeypatch.setenv("AIRFLOW__RUNGUARD__OBSERVE_DAGS", "other")
    airflow.run(plain(airflow, charge))
    assert len(airflow.records()) == 1


def hear(dag: Any, *hooks: Any, ti_id: Any = None, **more: Any) -> None:
    """Call the listener's hooks as Airflow does in the task: (hook, further arguments)."""
    ti = SimpleNamespace(id=ti_id or uuid4(), dag_id=dag.dag_id, task_id="pay", run_id="r", try_number=1, map_index=-1)
    ti.task = None
    ti.get_template_context = lambda: {"dag_run": SimpleNamespace(logical_date=DAY)}
    for hook in hooks:
        extra = {"error": RuntimeError("no")} if hook is onlooker.on_task_instance_failed else {}
        hook(previous_state="running", task_instance=ti, **extra)


@pytest.mark.usefixtures("real")
@pytest.mark.parametrize(
    ("hooks", "state"),
    [
        (["running", "running", "success", "success"], State.DONE),
        (["success"], State.DONE),
        (["running", "failed", "failed"], State.IN_DOUBT),
        (["running", "failed", "success"], State.DONE),
        (["running", "skipped", "skipped"], State.PENDING),
        (["running"], State.RUNNING),
    ],
)
def test_it_is_right_when_called_zero_one_or_two_times_or_late(airflow, charge, hooks, state):
    dag = plain(airflow, charge)
    hear(dag, *(getattr(onlooker, f"on_task_instance_{hook}") for hook in hooks))
    assert airflow.record().state is state
    assert airflow.record().broken == ""


@pytest.mark.usefixtures("real")
def test_p05_a_hint_never_overrules_the_holder_of_a_guard(airflow, charge):
    airflow.vendor.script("drop")
    with airflow.dag() as dag:

        @guarded_task(on_doubt="ask", retries=0)
        def pay() -> Any:
            return charge()["id"]

        pay()
    airflow.run(dag)
    before = airflow.record()
    for hook in (
        onlooker.on_task_instance_success,
        onlooker.on_task_instance_failed,
        onlooker.on_task_instance_skipped,
    ):
        hear(dag, hook)
    after = airflow.record()
    assert (after.state, after.fence, after.holder) == (State.IN_DOUBT, before.fence, before.holder)


@pytest.mark.usefixtures("real")
def test_what_a_person_tells_airflow_is_noted_and_the_ledger_keeps_its_truth(airflow, charge):
    """Mark success in the UI: Airflow's api-server calls the listener with its own kind of task instance."""
    from airflow.models.log import Log
    from airflow.models.taskinstance import TaskInstance
    from airflow.utils.session import create_session
    from sqlalchemy import select

    airflow.vendor.script("drop")
    with airflow.dag() as dag:

        @guarded_task(on_doubt="ask", retries=0)
        def pay() -> Any:
            return charge()["id"]

        pay()
    airflow.run(dag)
    with create_session() as session:
        ti = session.scalars(select(TaskInstance).where(TaskInstance.dag_id == dag.dag_id)).one()
        names = {"dag_id": dag.dag_id, "task_id": ti.task_id, "run_id": ti.run_id}
        session.add(Log(event="patch_task_instance", owner="anna", **names))
        session.commit()  # as Airflow's API does, before it acts
        for _ in range(2):
            onlooker.on_task_instance_success(previous_state=None, task_instance=ti)
        session.rollback()
    assert airflow.record().state is State.IN_DOUBT
    told = [event for event in airflow.ledger.events(airflow.record().id) if event.kind == "airflow_was_told"]
    assert [(event.actor, event.reason) for event in told] == [("person:anna", "success")]


def test_it_is_not_registered_where_no_dag_is_named(monkeypatch):
    from airflow_runguard.plugin import RunguardPlugin

    assert RunguardPlugin().listeners == []
    monkeypatch.setenv("AIRFLOW__RUNGUARD__OBSERVE_DAGS", "billing_*")
    assert RunguardPlugin().listeners == [onlooker]
