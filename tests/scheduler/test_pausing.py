"""Through a running Airflow: what people and limits do to a task that waits for its quota, and what it does then.

Each scenario is told "too many" once, by a gate of its own that is closed for an hour. They run side by side with those
of asking.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from airflow_runguard.core.record import State
from demo.airflow_api import ApiError
from demo.drive import PATIENCE, TASK, WAITS
from demo.ground import Ground
from demo.processes import wait_for
from tests.scheduler import test_asking
from tests.scheduler.test_asking import Asked

pytestmark = [pytest.mark.scheduler, pytest.mark.timeout(900)]


class Paused(Asked):
    """A charge that is told to wait for an hour."""

    def pause(self) -> str:
        self.vendor.script("status", customer=self.customer, status=429, headers={"Retry-After": "3600"}, charged=False)
        run_id = self.start()
        self.until_it_waits(run_id)
        assert self.calls() == 1
        return run_id

    def until_it_waits(self, run_id: str) -> None:
        wait_for(lambda: self.task(run_id).state in WAITS, PATIENCE, f"{self.invoice} waits", pause=0.5)

    def until_state(self, run_id: str, state: str) -> None:
        wait_for(lambda: self.task(run_id).state == state, PATIENCE, f"{self.invoice} is {state}", pause=0.5)

    def open_gate(self) -> None:
        gate = f"wall/{self.invoice}"
        said = self.on_ledger(lambda ledger: ledger.open_gate(gate, rate=5, actor="person:t", reason="raised"))
        assert said == "ok"

    def calls(self) -> int:
        return len(self.vendor.requests(self.customer))

    def seen(self, run_id: str) -> dict[str, Any]:
        task = self.task(run_id)
        return {"task": task.state, "tries": task.try_number, "calls": self.calls(), "record": self.record().state}

    def call_run(self, method: str, run_id: str, body: object = None) -> Any:
        return self.api.call(method, f"/api/v2/dags/{self.dag_id}/dagRuns/{run_id}", body)


def in_a_pool_of_one(ground: Ground) -> Any:
    first, second = (Paused(ground, name, "under_quota_in_a_pool") for name in ("pool-1", "pool-2"))
    first.api.call("POST", "/api/v2/pools", {"name": "narrow", "slots": 1})
    paused = first.pause()
    beside = second.ended(second.start())
    while_it_ran = first.seen(paused)
    first.open_gate()
    return {"beside": beside, "first": while_it_ran, "run": first.ended(paused), "calls": first.calls()}


def called(drive: Paused) -> list[str]:
    """Which of those that may run one at a time have called, in their order."""
    customers = [request.customer for request in drive.vendor.requests()]
    return [customer.rpartition("/")[2] for customer in customers if "/single-" in customer]


def one_at_a_time(ground: Ground) -> Any:
    first, second = (Paused(ground, name, "under_quota_one_at_a_time") for name in ("single-1", "single-2"))
    paused = first.pause()
    next_run = second.start()
    second.until_state(next_run, "scheduled")
    before = called(first)
    first.open_gate()
    ends = [first.ended(paused), second.ended(next_run)]
    return {"ends": ends, "before": before, "order": called(first)}


def run_timed_out(ground: Ground) -> Any:
    drive = Paused(ground, "timed-out", "under_quota_with_a_timeout")
    run_id = drive.pause()
    state = drive.ended(run_id)
    drive.open_gate()
    return {"run": state, **drive.seen(run_id)}


def cleared(ground: Ground) -> Any:
    drive = Paused(ground, "cleared-paused", "under_quota")
    run_id = drive.pause()
    drive.clear(run_id)
    wait_for(lambda: drive.task(run_id).try_number == 2, PATIENCE, "a new try", pause=0.5)
    drive.until_it_waits(run_id)
    again = drive.seen(run_id)
    drive.open_gate()
    return {"again": again, "run": drive.ended(run_id), "calls": drive.calls()}


def marked(state: str) -> Callable[[Ground], Any]:
    def scenario(ground: Ground) -> Any:
        drive = Paused(ground, f"marked-{state}", "under_quota")
        run_id = drive.pause()
        drive.api.set_state(drive.dag_id, run_id, TASK, state)
        run = drive.ended(run_id)
        drive.open_gate()
        after = drive.seen(run_id)
        drive.clear(run_id)
        return {"run": run, "after": after, "cleared": drive.ended(run_id), "calls": drive.calls()}

    scenario.__name__ = f"marked_{state}"
    return scenario


marked_failed, marked_success = marked("failed"), marked("success")


def deleted(ground: Ground) -> Any:
    drive = Paused(ground, "deleted", "under_quota")
    run_id = drive.pause()
    refused = 0
    try:
        drive.call_run("DELETE", run_id)
    except ApiError as error:
        refused = error.status
    drive.call_run("PATCH", run_id, {"state": "failed"})
    drive.call_run("DELETE", run_id)
    drive.open_gate()
    kept, told = drive.record(), drive.explain()
    calls = drive.calls()
    return {
        "refused": refused,
        "record": kept.state,
        "calls": calls,
        "told": [event["kind"] for event in told["timeline"]],
        "next run": drive.ended(drive.start()),
        "calls at last": drive.calls(),
    }


def triggerer_killed(ground: Ground) -> Any:
    """It runs alone: while no triggerer lives, other tasks would wait another way than their tests look for."""
    drive = Paused(ground, "orphaned", "under_quota")
    run_id = drive.pause()
    drive.until_state(run_id, "deferred")
    triggerer = ground.airflow.services["triggerer"]
    triggerer.kill()
    drive.open_gate()  # nobody lives who could wake it
    triggerer.start()
    state = drive.ended(run_id)
    return {**drive.seen(run_id), "run": state, "charges": drive.vendor.charges(drive.customer)}


SCENARIOS = (
    run_timed_out,
    in_a_pool_of_one,
    one_at_a_time,
    cleared,
    marked_failed,
    marked_success,
    deleted,
)
After = Callable[[Callable[[Ground], Any]], Any]


def test_p06_it_holds_no_slot_of_its_pool_while_it_waits(after: After) -> None:
    end = after(in_a_pool_of_one)
    assert end["beside"] == "success"
    assert end["first"] == {"task": "deferred", "tries": 1, "calls": 1, "record": State.PAUSED}
    assert (end["run"], end["calls"]) == ("success", 2)


def test_p06_where_one_instance_of_a_task_may_run_at_a_time_the_next_one_comes_after_it(after: After) -> None:
    """Airflow counts a deferred task there (3.3), so that the limit means the same with and without a pause. When the
    paused one is woken, it stands in the queue like any other: which of the two is next is Airflow's to say."""
    end = after(one_at_a_time)
    assert end["ends"] == ["success"] * 2
    assert end["before"] == ["single-1"]
    assert sorted(end["order"]) == ["single-1", "single-1", "single-2"]


def test_p06_when_its_run_times_out_it_calls_nobody_any_more(after: After) -> None:
    end = after(run_timed_out)
    assert end == {"run": "failed", "task": "skipped", "tries": 1, "calls": 1, "record": State.PAUSED}


def test_p06_cleared_while_it_waits_it_waits_again_without_a_call(after: After) -> None:
    end = after(cleared)
    assert end["again"] == {"task": "deferred", "tries": 2, "calls": 1, "record": State.PAUSED}
    assert (end["run"], end["calls"]) == ("success", 2)


@pytest.mark.parametrize(("scenario", "state"), [(marked_failed, "failed"), (marked_success, "success")])
def test_p06_marked_while_it_waits_it_calls_nobody_and_the_ledger_keeps_what_is_true(
    after: After, scenario: Callable[[Ground], Any], state: str
) -> None:
    end = after(scenario)
    assert end["run"] == state
    assert end["after"] == {"task": state, "tries": 1, "calls": 1, "record": State.PAUSED}
    assert (end["cleared"], end["calls"]) == ("success", 2)


def test_p06_its_run_deleted_while_it_waits_its_line_stays_and_the_next_run_does_it_once(after: After) -> None:
    end = after(deleted)
    assert end["refused"] == 409, "Airflow deletes no run that is not over"
    assert (end["record"], end["calls"]) == (State.PAUSED, 1)
    assert {"claimed", "paused"} & set(end["told"])
    assert (end["next run"], end["calls at last"]) == ("success", 2)


def test_p06_killed_with_the_triggerer_that_watched_it_goes_on_with_the_next_one(ground: Ground, after: After) -> None:
    for scenario in (*test_asking.SCENARIOS, *SCENARIOS):
        with suppress(Exception):  # its own test tells
            after(scenario)
    end = triggerer_killed(ground)
    assert end == {"task": "success", "tries": 1, "calls": 2, "record": State.DONE, "run": "success", "charges": 1}
