"""Through a running Airflow: the previous run of a series is finished before the next one begins, whatever happens.

A scheduler restarted during a run, two schedulers, and a run that outgrows its interval. One after the other, since a
restarted scheduler ends the tasks of everybody.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from demo.drive import PATIENCE, TASK, WAITS
from demo.ground import DEPLOYMENT, Ground, run_guard
from demo.processes import wait_for
from tests.scheduler.test_asking import HAPPENED, Asked

pytestmark = [pytest.mark.scheduler, pytest.mark.timeout(900)]


class Job:
    """One recurring job: its runs by number."""

    def __init__(self, ground: Ground, dag_id: str, name: str) -> None:
        self.ground, self.dag_id, self.name = ground, dag_id, name
        self.api, self.vendor = ground.airflow.api, ground.control
        self.api.wait_dag(dag_id, PATIENCE)
        self.api.unpause(dag_id)

    def start(self, number: int, previous: int | str) -> None:
        conf = {"job": self.name, "number": str(number), "previous": str(previous)}
        self.api.trigger(self.dag_id, conf=conf, run_id=self.run_id(number))

    def hold(self, number: int) -> None:
        """The vendor charges this one, and keeps its answer back until :meth:`let_go`."""
        self.vendor.script(customer=self.customer(number), gate=self.customer(number))

    def let_go(self, number: int) -> None:
        self.vendor.release(self.customer(number))

    def charged(self, number: int) -> None:
        self.vendor.wait(self.customer(number), charged=1, timeout=PATIENCE)

    def waits(self, number: int, task: str = TASK) -> None:
        """Return when the task waits in Airflow, without a worker, and has not called anybody."""
        state = lambda: self.api.task(self.dag_id, self.run_id(number), task).state  # noqa: E731
        wait_for(lambda: state() in WAITS, PATIENCE, f"run {number} of {self.name} waits", pause=0.5)
        assert self.charges(number) == 0

    def end(self, number: int) -> str:
        return self.api.wait_run(self.dag_id, self.run_id(number), PATIENCE, pause=1.0)

    def charges(self, number: int) -> int:
        return self.vendor.charges(self.customer(number))

    def log(self, number: int, task: str = TASK) -> str:
        state = self.api.task(self.dag_id, self.run_id(number), task)
        return self.api.log(self.dag_id, self.run_id(number), task, state.try_number)

    def run_id(self, number: int) -> str:
        return f"{self.name}-{number}"

    def customer(self, number: int) -> str:
        return f"{self.name}-{number}"

    def runguard(self, *words: str) -> str:
        return run_guard(*words, "--dsn", self.ground.ledger_url, "--deployment", DEPLOYMENT)


@pytest.fixture
def job(ground: Ground, request: pytest.FixtureRequest) -> Iterator[Job]:
    dag_id, name = request.param
    job = Job(ground, dag_id, name)
    yield job
    for number in (1, 2, 3):
        job.let_go(number)


def jobs(dag_id: str, name: str) -> Any:
    return pytest.mark.parametrize("job", [(dag_id, name)], indirect=True, ids=[name])


@jobs("asks_first", "outgrown")
def test_a_run_that_outgrows_its_interval_is_waited_for_by_the_runs_after_it(job: Job) -> None:
    job.hold(1)
    job.start(1, "none")
    job.charged(1)
    job.start(2, previous=1)
    job.start(3, previous=2)
    job.waits(2, "previous_done")
    job.waits(3, "previous_done")
    assert "outgrown/1, is being worked on by asks_first.charge run outgrown-1" in job.log(2, "previous_done")
    assert "should have '2', and the ledger has no record of it" in job.log(3, "previous_done")
    job.let_go(1)
    assert [job.end(number) for number in (1, 2, 3)] == ["success"] * 3
    order = [effect.customer for effect in job.vendor.effects() if effect.customer.startswith("outgrown-")]
    assert order == ["outgrown-1", "outgrown-2", "outgrown-3"]


@jobs("in_turn", "twins")
def test_p01_two_schedulers_start_one_run_of_a_series_at_a_time(job: Job) -> None:
    with job.ground.airflow.another_scheduler():
        for number in (1, 2, 3):
            job.hold(number)
        job.start(1, "none")
        job.charged(1)
        job.start(2, previous=1)
        job.start(3, previous=1)  # both may follow the first: the ledger lets one of them begin
        job.waits(2)
        job.waits(3)
        job.let_go(1)
        first = wait_for(lambda: [n for n in (2, 3) if job.charges(n)], PATIENCE, "one of them begins", pause=0.5)
        (other,) = {2, 3} - set(first)
        job.waits(other)
        job.let_go(first[0])
        job.charged(other)
        job.let_go(other)
        assert [job.end(number) for number in (1, 2, 3)] == ["success"] * 3
    assert [job.charges(number) for number in (1, 2, 3)] == [1, 1, 1]


@jobs("in_turn", "restarted")
def test_p03_a_scheduler_restarted_during_a_run_lets_the_next_one_wait_for_what_a_person_says(job: Job) -> None:
    """And what was parked meanwhile goes on with its answer, whether that was given without a scheduler or after it."""
    job.api.wait_dag("asking", PATIENCE)
    job.api.unpause("asking")
    parked = [Asked(job.ground, name) for name in ("parked-1", "parked-2")]
    runs = [drive.park() for drive in parked]
    job.hold(1)
    job.start(1, "none")
    job.charged(1)
    job.start(2, previous=1)
    job.waits(2)
    job.ground.airflow.services["scheduler"].stop()  # which kills the first one's process
    parked[0].answer(runs[0], HAPPENED, result='"without a scheduler"')
    job.ground.airflow.services["scheduler"].start()
    parked[1].answer(runs[1], HAPPENED, result='"after it"')
    asked = lambda: job.api.task(job.dag_id, job.run_id(1), TASK).state == "awaiting_input"  # noqa: E731
    wait_for(asked, PATIENCE, "a person is asked about the first", pause=1.0)
    job.waits(2)
    job.runguard("resolve", "payouts/restarted/1", "--call=charge", "--happened", '--result="ch"', "--reason=seen")
    assert [job.end(number) for number in (1, 2)] == ["success"] * 2
    assert [job.charges(number) for number in (1, 2)] == [1, 1]
    for drive, run_id, result in zip(parked, runs, ("without a scheduler", "after it"), strict=True):
        end = drive.end(run_id)
        assert (end["run"], end["record"], end["charges"], end["requests"]) == ("success", "done", 1, 1)
        assert end["result"] == result
