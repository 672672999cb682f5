"""Airflow's REST API v2, as far as demo and tests need it: trigger, watch, clear, mark, backfill, read logs.

Standard library only, blind to proxies, logs in by itself. It changes what a person could change in the UI and nothing
else; processes are :mod:`demo.stack`'s matter.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from urllib.parse import quote

from demo.processes import wait_for

_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

FINISHED = frozenset({"success", "failed", "skipped", "upstream_failed", "removed"})


class ApiError(RuntimeError):
    """Airflow refused a request. ``status`` is its HTTP status, the message what it said."""

    def __init__(self, method: str, path: str, status: int, text: str) -> None:
        self.status = status
        super().__init__(f"{method} {path} answered {status}: {text}")


@dataclass(frozen=True)
class TaskState:
    """One task instance as Airflow sees it. ``id`` changes with every retry and clear; ``state`` None = not begun."""

    id: str
    task_id: str
    map_index: int
    state: str | None
    try_number: int


class AirflowApi:
    """The api-server at ``url``, for one user."""

    def __init__(self, url: str, user: str, password: str) -> None:
        self.url, self._login = url, {"username": user, "password": password}
        self._token: str | None = None

    def health(self) -> dict[str, str | None]:
        """Status of each component: ``healthy``, ``unhealthy``, None = never seen. Needs no login."""
        found = self.call("GET", "/api/v2/monitor/health", login=False)
        return {name: part["status"] for name, part in found.items()}

    def wait_dag(self, dag_id: str, timeout: float = 60) -> None:
        """Return when the DAG was parsed and can be triggered.

        :raises TimeoutError: with the import errors of all DAG files.
        """

        def known() -> bool:
            try:
                self.call("GET", f"/api/v2/dags/{quote(dag_id)}")
                return True
            except ApiError as error:
                if error.status != 404:
                    raise
                return False

        try:
            wait_for(known, timeout, f"DAG {dag_id} is parsed", pause=0.2)
        except TimeoutError as error:
            raise TimeoutError(f"{error} Import errors: {self.import_errors()}") from None

    def import_errors(self) -> dict[str, str]:
        """File name → traceback."""
        found = self.call("GET", "/api/v2/importErrors")["import_errors"]
        return {error["filename"]: error["stack_trace"] for error in found}

    def unpause(self, dag_id: str) -> None:
        self.call("PATCH", f"/api/v2/dags/{quote(dag_id)}", {"is_paused": False})

    def trigger(
        self,
        dag_id: str,
        *,
        conf: Mapping[str, Any] | None = None,
        logical_date: datetime | None = None,
        run_id: str | None = None,
    ) -> str:
        """A manual run; its run id. Without ``logical_date`` the run has none."""
        body: dict[str, Any] = {"conf": dict(conf or {}), "logical_date": logical_date and logical_date.isoformat()}
        if run_id is not None:
            body["dag_run_id"] = run_id
        identifier: str = self.call("POST", f"/api/v2/dags/{quote(dag_id)}/dagRuns", body)["dag_run_id"]
        return identifier

    def backfill(self, dag_id: str, start: datetime, end: datetime, reprocess: str = "none") -> int:
        """Order a backfill and return its id. ``reprocess``: ``none``, ``failed`` or ``completed``."""
        body = {"dag_id": dag_id, "from_date": start.isoformat(), "to_date": end.isoformat()}
        identifier: int = self.call("POST", "/api/v2/backfills", body | {"reprocess_behavior": reprocess})["id"]
        return identifier

    def wait_backfill(self, backfill_id: int, timeout: float) -> None:
        """Return when all runs of the backfill have ended."""
        path = f"/api/v2/backfills/{backfill_id}"
        wait_for(
            lambda: self.call("GET", path)["completed_at"], timeout, f"backfill {backfill_id} has ended", pause=0.3
        )

    def runs(self, dag_id: str) -> dict[str, str]:
        """Run id → state, oldest first."""
        found = self.call("GET", f"/api/v2/dags/{quote(dag_id)}/dagRuns?limit=100&order_by=run_after")["dag_runs"]
        return {run["dag_run_id"]: run["state"] for run in found}

    def tasks(self, dag_id: str, run_id: str) -> list[TaskState]:
        """All task instances of a run."""
        found = self.call("GET", f"{_run(dag_id, run_id)}/taskInstances?limit=1000")["task_instances"]
        return [TaskState(t["id"], t["task_id"], t["map_index"], t["state"], t["try_number"]) for t in found]

    def task(self, dag_id: str, run_id: str, task_id: str, map_index: int = -1) -> TaskState:
        """One task instance. Refused with ``LookupError`` while Airflow has not made it yet."""
        for task in self.tasks(dag_id, run_id):
            if (task.task_id, task.map_index) == (task_id, map_index):
                return task
        raise LookupError(f"Run {run_id} of {dag_id} has no task {task_id} with map index {map_index}.")

    def wait_state(
        self,
        dag_id: str,
        run_id: str,
        task_id: str,
        states: Collection[str] = FINISHED,
        timeout: float = 60,
        *,
        try_number: int | None = None,
    ) -> TaskState:
        """Return the task instance when it is in one of ``states`` (and, if given, at least at that try).

        :raises TimeoutError: it did not come to that; names the state it is in.
        """
        seen: TaskState | None = None

        def reached() -> TaskState | None:
            nonlocal seen
            seen = next((t for t in self.tasks(dag_id, run_id) if t.task_id == task_id), None)
            return seen if seen and seen.state in states and seen.try_number >= (try_number or 0) else None

        try:
            return wait_for(reached, timeout, f"{dag_id}.{task_id} is in {sorted(states)}", pause=0.1)
        except TimeoutError as error:
            raise TimeoutError(f"{error} It is {seen}.") from None

    def wait_run(self, dag_id: str, run_id: str, timeout: float = 60, pause: float = 0.2) -> str:
        """Return the state in which the run ended; looks every ``pause`` seconds."""
        path = _run(dag_id, run_id)

        def ended() -> str | None:
            state: str = self.call("GET", path)["state"]
            return state if state in FINISHED else None

        return wait_for(ended, timeout, f"run {run_id} of {dag_id} has ended", pause)

    def clear(self, dag_id: str, run_id: str, task_ids: Collection[str] | None = None) -> None:
        """Clear these tasks of the run (None: all), whatever state they are in, as the UI's button does."""
        body: dict[str, Any] = {"dry_run": False, "only_failed": False, "dag_run_id": run_id}
        if task_ids is not None:
            body["task_ids"] = list(task_ids)
        self.call("POST", f"/api/v2/dags/{quote(dag_id)}/clearTaskInstances", body)

    def set_state(self, dag_id: str, run_id: str, task_id: str, state: str) -> None:
        """Mark one task as ``success``, ``failed`` or ``skipped``."""
        self.call("PATCH", f"{_run(dag_id, run_id)}/taskInstances/{quote(task_id)}", {"new_state": state})

    def form(self, dag_id: str, run_id: str, task_id: str) -> dict[str, Any]:
        """The form with which a parked task asks.

        :raises ApiError: it has none.
        """
        form: dict[str, Any] = self.call("GET", f"{_run(dag_id, run_id)}/taskInstances/{quote(task_id)}/-1/hitlDetails")
        return form

    def answer(self, dag_id: str, run_id: str, task_id: str, option: str, **given: str) -> None:
        """Fill in a parked task's form, as a person does on its page.

        :raises ApiError: it has none, or it was answered before.
        """
        body = {"chosen_options": [option], "params_input": given}
        self.call("PATCH", f"{_run(dag_id, run_id)}/taskInstances/{quote(task_id)}/-1/hitlDetails", body)

    def log(self, dag_id: str, run_id: str, task_id: str, try_number: int = 1) -> str:
        """The text of one try's log."""
        path = f"{_run(dag_id, run_id)}/taskInstances/{quote(task_id)}/logs/{try_number}?full_content=true"
        content = self.call("GET", path)["content"]
        return "\n".join(line if isinstance(line, str) else _log_line(line) for line in content)

    def call(self, method: str, path: str, body: object = None, *, login: bool = True) -> Any:
        """One request; its decoded answer.

        :raises ApiError: Airflow refused it.
        :raises OSError: nobody answers at ``url``.
        """
        headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if login:
            if self._token is None:
                self._token = self.call("POST", "/auth/token", self._login, login=False)["access_token"]
            headers["Authorization"] = f"Bearer {self._token}"
        data = None if body is None else json.dumps(body).encode()
        try:
            with _open(urllib.request.Request(self.url + path, data, headers, method=method), timeout=120) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            with error:
                raise ApiError(method, path, error.code, error.read().decode(errors="replace")[:500]) from None


def _run(dag_id: str, run_id: str) -> str:
    return f"/api/v2/dags/{quote(dag_id)}/dagRuns/{quote(run_id)}"


def _log_line(line: Mapping[str, Any]) -> str:
    return " ".join(str(line[name]) for name in ("timestamp", "level", "event", "error_detail") if line.get(name))
