"""Operators that submit a job (R30): submitted once, whatever happens while they wait. Livy against a fake of its
HTTP API, dbt Cloud and Glue with their hooks played."""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

import pytest

from airflow_runguard import Guard, guarded
from airflow_runguard.core.record import State


@dataclass
class Vendor:
    """A vendor of jobs. ``states`` is what a look is told, in turn; the last one stays."""

    submits: int = 0
    states: list[Any] = field(default_factory=list)
    task: Callable[[], Any] = lambda: None

    def state(self) -> Any:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(state, int):
            raise _Refuses(state)
        return state


class _Refuses(Exception):
    """An HTTP status in place of an answer."""


def serve(vendor: Vendor, answer: Callable[[str, str], Any]) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self._say(lambda: answer("POST", self.path))

        def do_GET(self) -> None:
            self._say(lambda: answer("GET", self.path))

        def _say(self, make: Callable[[], Any]) -> None:
            try:
                status, body = 200, make()
            except _Refuses as refused:
                status, body = refused.args[0], {}
            payload = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_: object) -> None:
            pass

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def livy(monkeypatch: pytest.MonkeyPatch) -> Iterator[Vendor]:
    from airflow.providers.apache.livy.operators.livy import LivyOperator

    vendor = Vendor()

    def answer(method: str, path: str) -> Any:
        if method == "POST":
            vendor.submits += 1
            return {"id": vendor.submits}
        if path.endswith("/state"):
            return {"state": vendor.state()}
        return {"id": 1, "appId": "app_1", "log": [], "from": 0, "size": 0, "total": 0}

    def task() -> Any:
        return guarded(LivyOperator)(
            task_id="job", file="etl.jar", polling_interval=1, durable=True, guard=Guard(key="etl", namespace="jobs")
        )

    vendor.task = task
    for url in serve(vendor, answer):
        monkeypatch.setenv("AIRFLOW_CONN_LIVY_DEFAULT", url)
        yield vendor


@pytest.fixture
def dbt() -> Vendor:
    from airflow.providers.dbt.cloud.operators.dbt import DbtCloudRunJobOperator

    vendor = Vendor()
    words = {"running": 3, "success": 10, "dead": 20}

    @dataclass
    class Answer:
        run: int

        def json(self) -> Any:
            return {"data": {"id": self.run, "href": f"https://there/{self.run}"}}

    class Hook:
        """dbt Cloud's hook, as far as the operator uses it."""

        def trigger_job_run(self, **_: Any) -> Answer:
            vendor.submits += 1
            return Answer(vendor.submits)

        def get_job_run(self, run_id: int, account_id: int) -> Answer:
            return Answer(run_id)

        def get_job_run_status(self, run_id: int, account_id: int) -> int:
            try:
                return words[vendor.state()]
            except _Refuses as refused:
                raise ConnectionError(f"HTTP {refused}") from refused

        def wait_for_job_run_status(self, run_id: int, account_id: int, **_: Any) -> bool:
            return self.get_job_run_status(run_id, account_id) == words["success"]

    def task() -> Any:
        operator = guarded(DbtCloudRunJobOperator)(
            task_id="job", job_id=7, account_id=1, guard=Guard(key="etl", namespace="jobs")
        )
        operator.__dict__["hook"] = Hook()
        return operator

    vendor.task = task
    return vendor


@pytest.fixture
def glue() -> Vendor:
    from airflow.providers.amazon.aws.operators.glue import GlueJobOperator

    vendor = Vendor()
    words = {"running": "RUNNING", "success": "SUCCEEDED", "dead": "FAILED"}

    class Hook:
        """Glue's hook, as far as the operator uses it."""

        conn_region_name = region_name = "eu-central-1"
        conn_partition = "aws"

        def initialize_job(self, *_: Any) -> dict[str, str]:
            vendor.submits += 1
            return {"JobRunId": f"jr_{vendor.submits}"}

        def get_job_state(self, name: str, run: str) -> str:
            try:
                return words[vendor.state()]
            except _Refuses as refused:
                raise ConnectionError(f"HTTP {refused}") from refused

        def job_completion(self, name: str, run: str, *_: Any) -> dict[str, str]:
            if (state := self.get_job_state(name, run)) != "SUCCEEDED":
                raise RuntimeError(f"the run is {state}")
            return {"JobRunState": state, "JobRunId": run}

    def task() -> Any:
        operator = guarded(GlueJobOperator)(
            task_id="job", job_name="etl", script_location="s3://b/s.py", guard=Guard(key="etl", namespace="jobs")
        )
        operator.__dict__["hook"] = Hook()
        return operator

    vendor.task = task
    return vendor


@pytest.fixture(params=["livy", "dbt", "glue"])
def jobs(request: pytest.FixtureRequest) -> Vendor:
    found: Vendor = request.getfixturevalue(request.param)
    return found


def tried(airflow: Any, jobs: Vendor, *states: Any) -> Any:
    jobs.states = list(states)
    with airflow.dag() as dag:
        jobs.task()
    return airflow.once(dag)


@pytest.mark.filterwarnings("ignore")  # the providers' own
def test_p03_r30_what_goes_wrong_while_waiting_submits_nothing(airflow: Any, jobs: Vendor) -> None:
    first = tried(airflow, jobs, 500)
    assert (jobs.submits, first.states) == (1, {"job": "up_for_reschedule"}), first.log
    (call,) = airflow.ledger.calls(airflow.record().id)
    assert (call.submitted, call.external_id.strip('"')) == (True, call.external_id.strip('"') or "a name")
    second = tried(airflow, jobs, "success")
    assert second.states == {"job": "success"}, second.log
    assert jobs.submits == 1
    assert tried(airflow, jobs, 500).states == {"job": "success"}, "replayed without a look"


@pytest.mark.filterwarnings("ignore")
def test_p03_r30_a_job_that_failed_for_good_is_submitted_anew_by_the_next_try(airflow: Any, jobs: Vendor) -> None:
    tried(airflow, jobs, 500)
    dead = tried(airflow, jobs, "dead")
    assert dead.states["job"] in ("failed", "up_for_retry"), dead.log
    assert (jobs.submits, airflow.record().state) == (1, State.FAILED)
    assert tried(airflow, jobs, "success").states == {"job": "success"}
    assert jobs.submits == 2
