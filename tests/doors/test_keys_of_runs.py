"""Which work a run stands for: the default key of each kind of run that Airflow makes, never its run id."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any

import pytest
from airflow.sdk import PartitionedAtRuntime
from airflow.utils.types import DagRunTriggeredByType, DagRunType

from airflow_runguard import guarded_task
from tests.doors.conftest import DAY

NOON = datetime(2026, 10, 1, 12, tzinfo=UTC)
AFTER = datetime(2026, 10, 2, tzinfo=UTC)


def counting(airflow, calls: list[Any], schedule: Any = None, **options: Any) -> Any:
    with airflow.dag(schedule=schedule, params={"account": None}) as dag:

        @guarded_task(**{"on_doubt": "ask", **options})
        def work() -> int:
            calls.append(1)
            return len(calls)

        work()
    return dag


def dated(run_type: DagRunType, **more: Any) -> dict[str, Any]:
    return {"run_type": run_type, "logical_date": DAY, "data_interval": (DAY, DAY), "run_after": AFTER, **more}


def partitioned(key: str, day: datetime | None, run_type: DagRunType) -> dict[str, Any]:
    run_id = f"{run_type.value}__{uuid.uuid4().hex}"
    return {"run_id": run_id, "partition_key": key, "partition_date": day, "run_type": run_type}


def forget(dag: Any) -> None:
    """Delete the DAG's runs, as a person does in the UI."""
    from airflow.models.dagrun import DagRun
    from airflow.utils.session import create_session
    from sqlalchemy import select

    with create_session() as session:
        for run in session.scalars(select(DagRun).where(DagRun.dag_id == dag.dag_id)):
            session.delete(run)


def test_scheduled_backfilled_and_manual_runs_of_one_date_are_one_piece_of_work(airflow):
    calls: list[int] = []
    dag = counting(airflow, calls)
    for run_type in (DagRunType.SCHEDULED, DagRunType.BACKFILL_JOB, DagRunType.MANUAL):
        run = airflow.once(dag, **dated(run_type, run_id=f"{run_type.value}__x"))
        assert run.states == {"work": "success"}
        assert run.result("work") == 1
        forget(dag)  # Airflow allows one run a date
    assert airflow.record().identity.key == "ld:2026-10-01T00:00:00Z"
    assert calls == [1]


def test_another_date_is_another_piece_of_work(airflow):
    calls: list[int] = []
    dag = counting(airflow, calls)
    airflow.run(dag, day=DAY)
    airflow.run(dag, day=NOON)
    assert {record.identity.key for record in airflow.records()} == {
        "ld:2026-10-01T00:00:00Z",
        "ld:2026-10-01T12:00:00Z",
    }


def test_a_partition_is_named_by_its_date_however_it_is_labelled(airflow):
    """A partitioned backfill is a new run with a random id, its first try, and no logical date."""
    calls: list[int] = []
    dag = counting(airflow, calls, schedule=PartitionedAtRuntime())
    for label, run_type in (("2026-10-01", DagRunType.SCHEDULED), ("20261001", DagRunType.BACKFILL_JOB)):
        run = airflow.once(dag, **partitioned(label, DAY, run_type))
        assert run.states == {"work": "success"}
    assert airflow.record().identity.key == "pd:2026-10-01T00:00:00Z"
    assert calls == [1]


def test_p02_partitions_of_one_date_are_several_pieces_of_work(airflow):
    """As a ``ProductMapper`` makes them: a region and a day. Named by the day alone, the second charge would be
    answered with the first one, and never made."""
    calls: list[int] = []
    dag = counting(airflow, calls, schedule=PartitionedAtRuntime())
    for label in ("eu|2026-10-01", "us|2026-10-01", "us|2026-10-01"):
        run = airflow.once(dag, **partitioned(label, DAY, DagRunType.ASSET_TRIGGERED))
        assert run.states == {"work": "success"}
    assert {record.identity.key for record in airflow.records()} == {
        "pd:2026-10-01T00:00:00Z/pk:eu|2026-10-01",
        "pd:2026-10-01T00:00:00Z/pk:us|2026-10-01",
    }
    assert calls == [1, 1]
    # The same partition made by hand, of which an ``IdentityMapper`` cannot say the date: under a name of its own it
    # would be done again.
    run = airflow.once(dag, **partitioned("us|2026-10-01", None, DagRunType.MANUAL))
    assert run.states == {"work": "failed"}
    assert "has no date in this run" in run.log
    assert calls == [1, 1]


def test_a_partition_without_a_date_is_named_by_its_key(airflow):
    calls: list[int] = []
    dag = counting(airflow, calls, schedule=PartitionedAtRuntime())
    for label in ("shop-eu", "shop-eu", "shop-us"):
        airflow.once(dag, **partitioned(label, None, DagRunType.MANUAL))
    assert {record.identity.key for record in airflow.records()} == {"pk:shop-eu", "pk:shop-us"}
    assert calls == [1, 1]


def test_p02_a_run_whose_date_is_only_when_a_task_triggered_it_asks_for_a_key(airflow):
    """The task that triggers it is tried again, and gives it another date: a second charge."""
    calls: list[int] = []
    dag = counting(airflow, calls)
    triggered = {"triggered_by": DagRunTriggeredByType.OPERATOR}
    for moment, state in ((DAY.replace(microsecond=1), "failed"), (DAY, "success")):
        run = airflow.once(
            dag, **dated(DagRunType.OPERATOR_TRIGGERED, run_id=f"by-{state}", **triggered) | {"logical_date": moment}
        )
        assert run.states == {"work": state}
        assert ("only the moment of that" in run.log) is (state == "failed")
    assert (calls, airflow.record().identity.key) == ([1], "ld:2026-10-01T00:00:00Z")


@pytest.mark.parametrize(
    "run",
    [
        {"run_type": DagRunType.MANUAL},
        {"run_type": DagRunType.ASSET_TRIGGERED, "triggered_by": DagRunTriggeredByType.ASSET},
    ],
    ids=["manual", "asset"],
)
def test_a_run_that_stands_for_no_date_asks_for_a_key(airflow, run):
    calls: list[int] = []
    name = run["run_type"].value
    refused = airflow.once(counting(airflow, calls), run_id=f"{name}__now", **run)
    assert refused.states == {"work": "failed"}
    assert "has neither a partition nor a logical date" in refused.log
    assert "guard=Guard(key='…')" in refused.log
    keyed = airflow.once(counting(airflow, calls, key="the-feed"), run_id=f"{name}__then", **run)
    assert keyed.states == {"work": "success"}
    assert (calls, airflow.record().identity.key) == ([1], "the-feed")


@pytest.mark.parametrize(
    ("key", "conf", "fault"),
    [
        ("p/{{ params.account }}", None, "{{ params.account }} is None"),
        ("p/{{ params.nobody }}", None, "{{ params.nobody }} is undefined"),
        ("p/{{ dag_run.conf.shop }}", None, "{{ dag_run.conf.shop }} is undefined"),
        ("p/{{ dag_run.conf.shop }}", {"shop": None}, "{{ dag_run.conf.shop }} is None"),
        ("p/{{ dag_run.conf['shop'] }}", {"shop": ""}, "{{ dag_run.conf['shop'] }} is empty"),
    ],
)
def test_a_key_of_something_missing_is_refused_by_its_name(airflow, key, conf, fault):
    calls: list[int] = []
    run = airflow.run(counting(airflow, calls, key=key, retries=2), run_conf=conf)
    assert (run.state, run.tries) == ("failed", {"work": 1})
    assert fault in run.log
    assert (calls, airflow.records()) == ([], [])


def test_a_key_of_the_runs_conf_is_that_work_in_whatever_run(airflow):
    calls: list[int] = []
    dag = counting(airflow, calls, key="shop/{{ dag_run.conf.shop }}")
    airflow.run(dag, run_conf={"shop": "eu"})
    airflow.run(dag, day=NOON, run_conf={"shop": "eu"})
    airflow.run(dag, day=None, run_conf={"shop": "eu", "comment": "again"})
    assert (calls, airflow.record().identity.key) == ([1], "shop/eu")


def test_a_test_run_marks_no_production_work_done(airflow, monkeypatch):
    calls: list[int] = []
    dag = counting(airflow, calls)
    airflow.run(dag)
    assert airflow.record().identity.deployment == "test~test"
    monkeypatch.setenv("AIRFLOW__RUNGUARD__TEST_DEPLOYMENT", "test")
    airflow.run(dag)
    deployments = airflow.sql.execute("select deployment from runguard.record order by 1").fetchall()
    assert (deployments, calls) == ([("test",), ("test~test",)], [1, 1])


def test_tasks_have_their_own_names_unless_they_share_a_namespace(airflow):
    calls: list[int] = []
    for options in ({}, {}, {"namespace": "shared"}, {"namespace": "shared"}):
        airflow.run(counting(airflow, calls, key="k", **options))
    assert len(calls) == 3
    assert sorted(record.identity.namespace for record in airflow.records())[-1] == "shared"
