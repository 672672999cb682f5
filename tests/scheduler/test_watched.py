"""Through a running Airflow: what the listener and the callbacks book where no task process is left to say it.

Everything happens side by side: a person marks a running task in the api-server, two tasks are killed with their
supervisors (the scheduler hears of one, the dag-processor calls the other's callbacks), and a sensor gives up softly.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import psycopg
import pytest
from psycopg.rows import dict_row

from demo.drive import PATIENCE, TASK
from demo.ground import Ground
from demo.processes import wait_for
from demo.stack import USER

pytestmark = [pytest.mark.scheduler, pytest.mark.timeout(900)]


class Watched:
    """One run of an unguarded task, whose charge has happened and whose answer the vendor keeps back."""

    def __init__(self, ground: Ground, dag_id: str, run_id: str, day: int) -> None:
        self.ground, self.dag_id, self.run_id = ground, dag_id, run_id
        self.api, self.vendor = ground.airflow.api, ground.control
        self.api.wait_dag(dag_id, PATIENCE)
        self.api.unpause(dag_id)
        self.vendor.script(customer=run_id, gate=run_id)
        self.api.trigger(dag_id, run_id=run_id, logical_date=datetime(2026, 3, day, tzinfo=UTC))
        self.key = f"ld:2026-03-{day:02}"

    def charged(self) -> None:
        self.vendor.wait(self.run_id, charged=1, timeout=PATIENCE)
        self.booked("observed_started")

    def kill(self) -> None:
        """The task and who reports for it: nothing of the try is left."""
        both = self.ground.airflow.task_processes(self.dag_id, self.run_id, TASK, timeout=PATIENCE)
        both.supervisor.kill()
        both.task.kill()

    def booked(self, kind: str) -> dict[str, Any]:
        """The event of this kind, as soon as there is one, with the record's state."""

        def find() -> dict[str, Any] | None:
            with psycopg.connect(self.ground.ledger_url, row_factory=dict_row) as connection:
                return connection.execute(
                    "select e.kind, e.actor, e.reason, r.state, r.needs_person from runguard.event e"
                    " join runguard.record r on r.id = e.record_id"
                    " where r.namespace = %s and starts_with(r.key, %s) and e.kind = %s",
                    [f"{self.dag_id}.{TASK}", self.key, kind],
                ).fetchone()

        return wait_for(find, PATIENCE, f"{kind} of {self.dag_id}, run {self.run_id}, is in the ledger", pause=1.0)

    def let_go(self) -> None:
        self.vendor.release(self.run_id)


def test_marks_of_people_and_tries_that_died_are_booked_by_whoever_of_airflows_processes_hears_of_them(
    ground: Ground,
) -> None:
    api = ground.airflow.api
    api.wait_dag("waits_softly", PATIENCE)
    api.unpause("waits_softly")
    api.trigger("waits_softly", run_id="softly")
    marked = {
        "success": Watched(ground, "watched", "marked-success", 1),
        "failed": Watched(ground, "watched", "marked-failed", 2),
    }
    died = [Watched(ground, "watched", "died-heard", 3), Watched(ground, "called_back", "died-called-back", 4)]
    try:
        for one in (*marked.values(), *died):
            one.charged()
        for word, one in marked.items():
            api.set_state(one.dag_id, one.run_id, TASK, word)
        for one in died:
            one.kill()
        for word, one in marked.items():
            told = one.booked("airflow_was_told")
            assert (told["actor"], told["reason"]) == (f"person:{USER}", word)
            assert told["state"] != "done", "only the task itself says that it happened"
        for one in died:
            failed = one.booked("observed_failed")
            assert (failed["state"], failed["needs_person"]) == ("in_doubt", True), "it died with its charge on the way"
    finally:
        for one in (*marked.values(), *died):
            one.let_go()
    assert api.wait_run("waits_softly", "softly", PATIENCE) == "success"
    assert api.task("waits_softly", "softly", "previous_done").state == "skipped"
    log = api.log("waits_softly", "softly", "previous_done", 1)
    assert "Waiting" in log, "it was deferred before it gave up"
