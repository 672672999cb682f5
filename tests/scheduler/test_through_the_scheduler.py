"""Through a running Airflow whose processes are killed: its scheduler runs a task again, and it charges once.

All scenarios run side by side on one Airflow, on different invoices, and each test waits for its own. The vendor
ignores idempotency keys, so that nothing but the guard prevents a second charge. Rows A and B (the supervisor dies) and
G (marked failed and cleared) are ways in which Airflow has two processes of one task at work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from demo.drive import GUARDED, PATIENCE, TASK, Drive
from demo.ground import Ground
from demo.processes import alive, wait_for

pytestmark = [pytest.mark.scheduler, pytest.mark.timeout(900)]  # starting Airflow is part of the first test


@dataclass(frozen=True)
class Seen:
    """What came of a scenario. :param first: the task's result before the accident, where it had ended."""

    requests: int
    state: str | None
    tries: int
    result: Any
    record: str
    log: str
    """Of the last try."""
    first: Any = None
    overlapped: bool = False
    """Whether the first process was still at work when the second looked."""
    doubt: str = ""
    """The log of the try that ended in doubt."""


Scenario = Callable[[Drive], Seen]


def supervisor_killed(drive: Drive) -> Seen:
    run_id = drive.start_held()
    processes = drive.processes(run_id)
    processes.supervisor.kill()
    drive.wait_for_second(run_id)
    overlapped = alive(processes.task)
    drive.let_go()
    drive.finish(run_id)
    return seen(drive, overlapped=overlapped)


def marked_failed_and_cleared(drive: Drive) -> Seen:
    run_id = drive.start_held()
    processes = drive.processes(run_id)
    processes.supervisor.suspend()  # so that the overlap of 8 s lasts as long as a slow machine needs
    drive.mark_failed(run_id)
    drive.clear(run_id)
    drive.wait_for_second(run_id)
    overlapped = alive(processes.task)
    processes.supervisor.resume()  # it hears that the task should not run, and kills it
    wait_for(lambda: not alive(processes.task), PATIENCE, "the first process is killed")
    drive.finish(run_id)
    return seen(drive, overlapped=overlapped)


def task_killed(drive: Drive) -> Seen:
    run_id = drive.start_held()
    drive.processes(run_id).task.kill()
    assert drive.ended_or_asked(run_id) == "awaiting_input"
    doubt = seen(drive)
    assert doubt.record == "in_doubt", doubt
    name, charge = f"billing/invoice/{drive.invoice}", '--result="as a person said"'
    drive.runguard("resolve", name, "--happened", "--call=charge", charge, "--reason=seen at the vendor")
    assert drive.ended(run_id) == "success", "nobody fills in its form: the caretaker wakes it"
    return seen(drive, doubt=doubt.log)


def finished_run_cleared(drive: Drive) -> Seen:
    run_id = drive.start()
    drive.finish(run_id)
    first = seen(drive)
    drive.clear(run_id)
    drive.finish(run_id)
    return seen(drive, first=first.result)


SCENARIOS = (supervisor_killed, marked_failed_and_cleared, task_killed, finished_run_cleared)


def seen(drive: Drive, **more: Any) -> Seen:
    (run_id,) = drive.runs
    task = drive.task(run_id)
    entry = (
        f"/api/v2/dags/{drive.dag_id}/dagRuns/{run_id}/taskInstances/{TASK}/xcomEntries?xcom_key_pattern=return_value"
    )
    pushed = drive.api.call("GET", entry)["total_entries"]
    result = drive.api.call("GET", entry.replace("?xcom_key_pattern=", "/"))["value"] if pushed else None
    return Seen(
        requests=len(drive.vendor.requests(drive.customer)),
        state=task.state,
        tries=task.try_number,
        result=result,
        record=drive.explain()["record"]["state"],
        log=drive.api.log(drive.dag_id, run_id, TASK, task.try_number),
        **more,
    )


@pytest.fixture(scope="session")
def after(ground: Ground) -> Iterator[Callable[[Scenario], Seen]]:
    """What was seen after a scenario."""
    pool = ThreadPoolExecutor(len(SCENARIOS))
    try:
        drives = {scenario: Drive(ground, GUARDED, [scenario.__name__], lambda _: None) for scenario in SCENARIOS}
        running = {scenario: pool.submit(scenario, drive) for scenario, drive in drives.items()}
        yield lambda scenario: running[scenario].result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def test_p02_a_cleared_run_that_was_done_gives_its_result_again_and_calls_nothing(
    after: Callable[[Scenario], Seen],
) -> None:
    end = after(finished_run_cleared)
    assert (end.requests, end.state, end.tries, end.record) == (1, "success", 2, "done")
    assert end.result == end.first
    assert end.result.startswith("ch_")
    assert "Done before" in end.log


def test_p03_a_task_killed_after_the_charge_is_in_doubt_not_retried_and_ends_as_a_person_said(
    after: Callable[[Scenario], Seen],
) -> None:
    end = after(task_killed)
    assert "In doubt" in end.doubt
    assert "airflow runguard resolve" in end.doubt
    assert (end.requests, end.state, end.record) == (1, "success", "done")
    assert end.tries == 2, "the killed one, and the one that found the doubt, asked, and went on when it was settled"
    assert end.result == "as a person said"


def test_p05_the_retry_of_a_task_that_lost_its_supervisor_and_lives_on_waits_and_replays_its_call(
    after: Callable[[Scenario], Seen],
) -> None:
    """Rows A and B: nothing in Airflow ends the first process, and the retry runs beside it. The first books its charge
    when the answer comes; then it fails, since its log leads nowhere any more (3.3.2), and the retry goes on."""
    end = after(supervisor_killed)
    assert end.overlapped
    assert (end.requests, end.state, end.tries, end.record) == (1, "success", 2, "done")
    assert "is being worked on by" in end.log
    assert end.result.startswith("ch_")


def test_p05_a_task_marked_failed_and_cleared_while_it_runs_does_not_charge_beside_itself(
    after: Callable[[Scenario], Seen],
) -> None:
    """Row G: the first process is killed seconds after the second began, and nobody knows what became of its call."""
    end = after(marked_failed_and_cleared)
    assert end.overlapped
    assert (end.requests, end.state, end.record) == (1, "success", "done")
