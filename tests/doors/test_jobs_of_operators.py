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
import requests
from airflow.sdk import BaseOperator
from airflow.sdk.bases.resumablejobmixin import ResumableJobMixin
from botocore.exceptions import ClientError

from airflow_runguard import Guard, guarded
from airflow_runguard.core.record import Effect, State
from tests.doors.conftest import begun

RULES = Guard(key="etl", namespace="jobs", quota="wall")


@dataclass
class Vendor:
    """A vendor of jobs. ``states`` is what a look is told, in turn; the last one stays."""

    submits: int = 0
    busy: bool = False
    """It answers "too many" to whoever would submit."""
    states: list[Any] = field(default_factory=list)
    task: Callable[[], Any] = lambda: None
    deferrable: bool = False
    details: int = 0
    """With which status it refuses to tell why a job failed; 0 = it tells."""

    def state(self) -> Any:
        state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        if isinstance(state, int):
            raise _Refuses(state)
        return state

    def submit(self) -> int:
        if self.busy:
            raise _Refuses(TOO_MANY)
        self.submits += 1
        return self.submits


TOO_MANY = 429


class _Refuses(Exception):
    """An HTTP status in place of an answer."""

    def of_client(self) -> requests.HTTPError:
        """What a client of the vendor raises."""
        answer = requests.Response()
        answer.status_code, answer.url = self.args[0], "https://vendor.example/jobs"
        answer.headers["Retry-After"] = "120"
        answer.request = requests.Request("POST", answer.url).prepare()
        return requests.HTTPError(f"{answer.status_code} from {answer.url}", response=answer)


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
            self.send_header("Retry-After", "120")
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
            return {"id": vendor.submit()}
        if path.endswith("/state"):
            return {"state": vendor.state()}
        return {"id": 1, "appId": "app_1", "log": [], "from": 0, "size": 0, "total": 0}

    def task() -> Any:
        return guarded(LivyOperator)(task_id="job", file="etl.jar", polling_interval=1, durable=True, guard=RULES)

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
            try:
                return Answer(vendor.submit())
            except _Refuses as refused:
                raise refused.of_client() from None

        def log_job_run_failure_details(self, **_: Any) -> None:
            if vendor.details:
                raise _Refuses(vendor.details).of_client()

        def get_job_run(self, run_id: int, account_id: int) -> Answer:
            return Answer(run_id)

        def get_job_run_status(self, run_id: int, account_id: int) -> int:
            try:
                return words[vendor.state()]
            except _Refuses as refused:
                raise refused.of_client() from None

        def wait_for_job_run_status(self, run_id: int, account_id: int, **_: Any) -> bool:
            return self.get_job_run_status(run_id, account_id) == words["success"]

    def task() -> Any:
        operator = guarded(DbtCloudRunJobOperator)(
            task_id="job", job_id=7, account_id=1, guard=RULES, deferrable=vendor.deferrable
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
            try:
                return {"JobRunId": f"jr_{vendor.submit()}"}
            except _Refuses as refused:
                raise throttled(refused, "StartJobRun") from None

        def get_job_state(self, name: str, run: str) -> str:
            try:
                return words[vendor.state()]
            except _Refuses as refused:
                raise throttled(refused, "GetJobRun") from None

        def job_completion(self, name: str, run: str, *_: Any) -> dict[str, str]:
            if (state := self.get_job_state(name, run)) != "SUCCEEDED":
                raise RuntimeError(f"the run is {state}")
            return {"JobRunState": state, "JobRunId": run}

    def task() -> Any:
        operator = guarded(GlueJobOperator)(task_id="job", job_name="etl", script_location="s3://b/s.py", guard=RULES)
        operator.__dict__["hook"] = Hook()
        return operator

    vendor.task = task
    return vendor


def throttled(refused: _Refuses, operation: str) -> ClientError:
    code = "ThrottlingException" if refused.args[0] == TOO_MANY else "InternalServiceException"
    told: Any = {
        "Error": {"Code": code, "Message": "said the vendor"},
        "ResponseMetadata": {
            "HTTPStatusCode": 400 if refused.args[0] == TOO_MANY else refused.args[0],
            "RetryAttempts": 0,
        },
    }
    return ClientError(told, operation)


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


def opened(airflow: Any) -> None:
    assert airflow.ledger.open_gate("wall", rate=1000, actor="person:t", reason="raised") == "ok"


@pytest.mark.filterwarnings("ignore")
def test_p06_r45_told_to_wait_while_polling_it_keeps_the_job_and_pauses(airflow: Any, jobs: Vendor) -> None:
    first = tried(airflow, jobs, TOO_MANY)
    record = airflow.record()
    assert (record.state, first.states) == (State.PAUSED, {"job": "up_for_reschedule"}), first.log
    (call,) = airflow.ledger.calls(record.id)
    assert (call.submitted, bool(call.external_id)) == (True, True)
    assert [gate["name"] for gate in airflow.ledger.gates()] == ["wall"]
    opened(airflow)
    second = tried(airflow, jobs, "success")
    assert (second.states, jobs.submits) == ({"job": "success"}, 1), second.log


@pytest.mark.filterwarnings("ignore")
def test_p06_r45_told_to_wait_while_submitting_it_pauses_and_submits_once(airflow: Any, jobs: Vendor) -> None:
    jobs.busy = True
    first = tried(airflow, jobs, "success")
    record = airflow.record()
    assert (record.state, record.effect) == (State.PAUSED, Effect.NOT_APPLIED), first.log
    assert [gate["name"] for gate in airflow.ledger.gates()] == ["wall"]
    jobs.busy = False
    opened(airflow)
    second = tried(airflow, jobs, "success")
    assert (second.states, jobs.submits) == ({"job": "success"}, 1), second.log


def test_p03_r30_a_submit_step_that_nobody_read_may_have_submitted_before_it_was_told_to_wait(airflow: Any) -> None:
    """An operator of one's own that asks for its job's link after the POST, still in ``submit_job``, and is refused."""
    vendor = Vendor(states=["success"])

    class Own(ResumableJobMixin, BaseOperator):
        def submit_job(self, context: Any) -> Any:
            job = vendor.submit()
            if job == 1:
                raise _Refuses(TOO_MANY).of_client()
            return job

        def get_job_status(self, external_id: Any, context: Any) -> str:
            return str(vendor.state())

        def is_job_active(self, status: str) -> bool:
            return False

        def is_job_succeeded(self, status: str) -> bool:
            return status == "success"

        def poll_until_complete(self, external_id: Any, context: Any) -> None:
            return None

        def get_job_result(self, external_id: Any, context: Any) -> Any:
            return external_id

        def execute(self, context: Any) -> Any:
            return self.execute_resumable(context)

    with airflow.dag() as dag:
        guarded(Own)(task_id="job", guard=RULES)
    first = airflow.once(dag)
    record = airflow.record()
    assert (record.state, record.effect) == (State.IN_DOUBT, Effect.UNKNOWN), first.log
    with airflow.dag() as dag:
        guarded(Own)(task_id="job", guard=RULES)
    airflow.once(dag)
    assert vendor.submits == 1


@pytest.mark.parametrize("told", ["too many", "dead"])
@pytest.mark.filterwarnings("ignore")
def test_p06_r45_a_deferred_job_is_attached_to_again_whatever_came_after_the_deferral(
    airflow: Any, dbt: Vendor, told: str
) -> None:
    """Its trigger says that it failed; the operator asks for the details, and is told to wait, or believes it."""
    dbt.deferrable, dbt.states, dbt.details = True, ["running"], TOO_MANY if told == "too many" else 0
    with airflow.dag() as dag:
        dbt.task()
    with begun(dag) as task:
        assert task.enter() == "deferred"
        assert task.enter({"status": "error", "run_id": 1, "message": "it failed"}) == "deferred", airflow.log()
        assert airflow.record().state is (State.IN_DOUBT if told == "dead" else State.PAUSED)
        if told == "too many":
            opened(airflow)
        dbt.states = ["success" if told == "too many" else "dead"]
        assert task.enter() == ("success" if told == "too many" else "failed"), airflow.log()
    assert dbt.submits == 1
