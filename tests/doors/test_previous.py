"""Was the previous run finished? The sensor and the guard that wait for it, through ``dag.test()``."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from airflow_runguard import PlanningError, Previous, PreviousRunSensor, Series, guarded_task
from airflow_runguard.core import keys, payloads
from airflow_runguard.core.record import Order, State, Verdict
from tests.core import engine
from tests.core.books import QUOTA, UNKNOWN, Held
from tests.doors.conftest import DEPLOYMENT

FIRST, SECOND, THIRD = (datetime(2026, 10, day, tzinfo=UTC) for day in (1, 2, 3))
SERIES = Series(name="payout", order="{{ ds }}")


def job(airflow, charge, sensor: dict[str, Any] | None = None, **options: Any) -> Any:
    """A daily payout: a sensor before it, where one is asked for."""
    with airflow.dag(schedule="@daily") as dag:

        @guarded_task(on_doubt="ask", **options)
        def pay_out(amount: int = 500) -> Any:
            return charge(amount=amount)["id"]

        paid = pay_out()
        if sensor is not None:
            PreviousRunSensor(task_id="previous_done", **{"deferrable": False, **sensor}) >> paid
    return dag


def hold(airflow, day: str) -> Held:
    """Somebody works on that day's payout: a real claim in the same ledger."""
    order = Order(
        identity=keys.identity(DEPLOYMENT, "payouts", day),
        payload=payloads.payload({}),
        place=engine_place(day),
    )
    holder = engine.holder()
    claim = airflow.ledger.claim(order, holder)
    assert claim.verdict is Verdict.RUN
    return Held(airflow.ledger, order, claim, holder)


def engine_place(day: str) -> Any:
    from airflow_runguard.core.series import Place

    return Place(series="payout", place=day, waits=False)


# -- the sensor --------------------------------------------------------------------------------------------------------


def test_the_sensor_finds_the_series_of_the_guarded_task_behind_it_and_the_run_before_it(airflow, charge):
    dag = job(airflow, charge, sensor={})
    first, second = airflow.run(dag, day=FIRST), airflow.run(dag, day=SECOND)
    assert (first.state, second.state) == ("success", "success")
    assert "Nothing comes before this one in series" in first.log
    assert f"{dag.dag_id}.pay_out/ld:2026-10-01T00:00:00Z, is finished" in second.log
    assert airflow.vendor.charges() == 2


def test_a_run_of_airflow_s_that_the_ledger_does_not_know_is_no_reason_to_go(airflow, charge):
    dag = job(airflow, charge, sensor={"on_previous_absent": "fail", "series": Series(name="new")})
    assert airflow.run(dag, day=FIRST).states["pay_out"] == "success"
    run = airflow.run(dag, day=SECOND)
    assert run.states == {"previous_done": "failed", "pay_out": "upstream_failed"}
    assert "should have 'ld:2026-10-01T00:00:00Z', and the ledger has no record of it" in run.log


@pytest.mark.parametrize(("wants", "state"), [("fail", "failed"), ("skip", "skipped"), ("go", "success")])
def test_the_sensor_does_what_the_author_said_of_a_previous_run_that_did_not_end_well(airflow, charge, wants, state):
    hold(airflow, "2026-10-01").settle(State.PAUSED, QUOTA)
    dag = job(airflow, charge, sensor={"series": SERIES, "on_previous_failed": wants})
    run = airflow.run(dag, day=SECOND)
    assert run.states["previous_done"] == state
    assert "payouts/2026-10-01, is paused" in run.log


@pytest.mark.parametrize(("soft", "state"), [({}, "failed"), ({"soft_fail": True}, "skipped")])
@pytest.mark.parametrize(("deferrable", "timeout"), [(True, 0.2), (False, 0.2)])
def test_timeout_and_soft_fail_are_those_of_any_sensor(airflow, charge, soft, state, deferrable, timeout):
    hold(airflow, "2026-10-01")
    sensor = {"series": SERIES, "timeout": timeout, "poke_interval": 0.05, "deferrable": deferrable, **soft}
    run = airflow.run(job(airflow, charge, sensor=sensor), day=SECOND)
    assert run.states["previous_done"] == state
    assert "is being worked on by bill.charge run r1 try 1 on testhost:4711, since" in run.log
    assert airflow.vendor.charges() == 0


def test_in_reschedule_mode_it_leaves_its_worker(airflow, charge):
    hold(airflow, "2026-10-01")
    sensor = {"series": SERIES, "mode": "reschedule", "poke_interval": 60}
    dag = job(airflow, charge, sensor=sensor)
    run = airflow.once(dag, logical_date=SECOND, data_interval=(SECOND, SECOND), run_after=SECOND)
    assert run.states["previous_done"] == "up_for_reschedule"


@pytest.mark.parametrize("deferrable", [True, False])
def test_it_goes_when_the_previous_run_settles(airflow, charge, deferrable):
    """Where no triggerer is (``dag.test()``), a deferrable sensor pokes."""
    held = hold(airflow, "2026-10-01")
    dag = job(airflow, charge, sensor={"series": SERIES, "deferrable": deferrable, "poke_interval": 0.05})
    sensor = dag.task_dict["previous_done"]
    poke = sensor.poke

    def poking(context: Any) -> bool:
        goes: bool = poke(context)
        if not goes:
            held.settle(State.DONE)
        return goes

    object.__setattr__(sensor, "poke", poking)
    run = airflow.run(dag, day=SECOND)
    assert run.state == "success"
    assert "payouts/2026-10-01, is finished" in run.log


def test_p08_the_sensor_never_goes_on_from_a_broken_record(airflow, charge):
    held = hold(airflow, "2026-10-01")
    held.settle(State.DONE)
    airflow.sql.execute("update runguard.record set payload_digest = 'another' where id = %s", [held.id])
    dag = job(airflow, charge, sensor={"series": SERIES, "on_previous_failed": "go"})
    run = airflow.run(dag, day=SECOND)
    assert run.states["previous_done"] == "failed"
    assert "airflow runguard repair 'payouts/2026-10-01'" in run.log


def test_p12_a_ledger_out_of_reach_means_waiting(airflow, charge, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_RUNGUARD_LEDGER", "postgresql://nobody@127.0.0.1:1/none")
    sensor = {"series": SERIES, "timeout": 0.1, "poke_interval": 0.05}
    run = airflow.run(job(airflow, charge, sensor=sensor), day=SECOND)
    assert run.states["previous_done"] == "failed"
    assert "out of reach" in run.log
    assert "timed out" in run.log


def test_what_cannot_be_meant_is_said_when_the_dag_is_parsed(airflow):
    with airflow.dag():
        for wrong in ({"on_previous_failed": "panic"}, {"completion": "most"}, {"min_gap": -1}):
            with pytest.raises(PlanningError):
                PreviousRunSensor(task_id="s", **wrong)
        with pytest.raises(PlanningError, match="must say by what it is ordered"):
            Series(previous="{{ ds }}")


def test_a_sensor_that_names_nothing_says_so(airflow):
    with airflow.dag(schedule="@daily") as dag:
        PreviousRunSensor(task_id="previous_done", deferrable=False)
    assert "of guarded tasks behind it there is none" in airflow.run(dag).log


# -- the guard ---------------------------------------------------------------------------------------------------------


def test_a_guard_waits_for_the_previous_run_of_its_series(airflow, charge):
    held = hold(airflow, "2026-10-01")
    dag = job(airflow, charge, namespace="payouts", key="{{ ds }}", series=SERIES, wait_for_previous=True)
    run = airflow.once(dag, logical_date=SECOND, data_interval=(SECOND, SECOND), run_after=SECOND)
    assert run.states == {"pay_out": "up_for_reschedule"}
    assert "payouts/2026-10-02 was not begun. The previous one of series 'payout', payouts/2026-10-01" in run.log
    held.settle(State.DONE)
    assert airflow.run(dag, day=THIRD).state == "success"  # the second never ran, and nobody said that it should have
    assert airflow.vendor.charges() == 1


@pytest.mark.parametrize(("wants", "state"), [("fail", "failed"), ("skip", "skipped")])
def test_a_guard_does_what_the_author_said_of_a_previous_run_that_did_not_end_well(airflow, charge, wants, state):
    hold(airflow, "2026-10-01").settle(State.IN_DOUBT, UNKNOWN)
    waits = Previous(on_failed=wants)
    dag = job(airflow, charge, namespace="payouts", key="{{ ds }}", series=SERIES, wait_for_previous=waits)
    run = airflow.run(dag, day=SECOND)
    assert run.states == {"pay_out": state}
    assert airflow.vendor.charges() == 0


def test_by_default_the_series_is_the_task_ordered_by_its_runs(airflow, charge):
    dag = job(airflow, charge, wait_for_previous=Previous(on_absent="fail", on_failed="fail"))
    assert airflow.run(dag, day=FIRST).state == "success"
    assert airflow.run(dag, day=SECOND).state == "success"
    assert airflow.run(dag, day=FIRST).state == "success", "done: given back"
    assert airflow.vendor.charges() == 2


def test_numbers_given_by_a_function_are_ordered_as_numbers(airflow, charge):
    def batch(number: int, before: int | None) -> Any:
        series = Series(name="batches", order=lambda args: number, previous=lambda args: before)
        waits = Previous(on_absent="fail")
        return job(airflow, charge, namespace="b", key=f"b/{number}", series=series, wait_for_previous=waits)

    assert airflow.run(batch(9, None)).state == "success"
    assert airflow.run(batch(10, 9)).state == "success"
    refused = airflow.run(batch(12, 11))
    assert refused.state == "failed"
    assert "should have '000000000000000011'" in refused.log
