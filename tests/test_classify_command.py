"""``airflow runguard classify`` and ``GuardRetryPolicy``: people and Airflow ask the one classifier."""

from __future__ import annotations

import io
import json
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from airflow.sdk.definitions.retry_policy import RetryAction

from airflow_runguard import Guard, GuardRetryPolicy
from airflow_runguard.cli import main
from airflow_runguard.core.failures.families import RULES
from airflow_runguard.core.failures.texts import read_traceback
from demo import vendor_errors as v


def asked(capsys: pytest.CaptureFixture[str], *typed: str) -> tuple[int, dict[str, Any]]:
    code = main(["classify", *typed, "-o", "json"])
    answer = json.loads(capsys.readouterr().out)
    assert isinstance(answer, dict)
    return code, answer


def test_p07_a_status_and_headers_are_explained_with_their_rule(capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = asked(capsys, "--status", "429", "--header", "Retry-After: 12")
    assert (code, answer["failure_class"], answer["resume_after"]) == (0, "quota", 12.0)
    assert answer["rule"]["name"] in {rule.name for rule in RULES}
    assert answer["rule"]["source"].startswith("https://")
    assert main(["classify", "--status", "429"]) == 0
    assert "Rule http-429" in capsys.readouterr().out


def test_p07_a_body_from_standard_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO('{"error": {"code": "insufficient_quota"}}'))
    _, answer = asked(capsys, "-", "--status", "429")
    assert (answer["pausable"], answer["needs_person"]) == (False, True)


def test_p07_a_whole_answer_as_curl_shows_it(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    answered = tmp_path / "answer"
    answered.write_text(
        'HTTP/2 403\nx-ratelimit-remaining: 0\nx-ratelimit-reset: 60\n\n{"message": "API rate limit exceeded"}'
    )
    _, answer = asked(capsys, str(answered))
    assert (answer["failure_class"], answer["resume_after"]) == ("quota", 60.0)


TRACEBACK = """Traceback (most recent call last):
  File "x.py", line 3, in f
    r.raise_for_status()
requests.exceptions.HTTPError: 429 Client Error: Too Many Requests for url: https://api.x/y

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  File "x.py", line 5, in g
    raise AirflowException("x")
airflow.exceptions.AirflowException: 429:Too Many Requests
"""


@pytest.mark.parametrize(
    ("text", "failure_class", "effect"),
    [
        (TRACEBACK, "quota", "not_applied"),
        ("requests.exceptions.ReadTimeout: Read timed out. (read timeout=10)", "timeout", "unknown"),
        (
            "botocore.exceptions.ClientError: An error occurred (ThrottlingException) when calling the PutItem "
            "operation (reached max retries: 4): Rate exceeded",
            "quota",
            "unknown",
        ),
        (
            "openai.RateLimitError: Error code: 429 - {'error': {'code': 'insufficient_quota'}}",
            "quota",
            "not_applied",
        ),
        ("ValueError: row 429: amount must be positive", "unknown", "unknown"),
    ],
)
def test_p07_a_traceback_is_read(
    text: str, failure_class: str, effect: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "traceback.txt"
    path.write_text(text)
    _, answer = asked(capsys, str(path))
    assert (answer["failure_class"], answer["effect"]) == (failure_class, effect), answer


def test_p07_the_chain_of_a_traceback_is_kept() -> None:
    error = read_traceback(TRACEBACK)
    assert (error.__cause__, type(error.__context__).__name__) == (None, "HTTPError")


@pytest.mark.parametrize("typed", [(), ("/no/such/file",)])
def test_p07_nothing_to_judge_is_wrong_usage(typed: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    code, answer = asked(capsys, *typed)
    assert code == 2
    assert answer["remedy"]


# -- Airflow's retry policy --------------------------------------------------------------------------------------------


def decide(error: BaseException, context: Any = None, **options: Any) -> tuple[RetryAction, timedelta | None]:
    decision = GuardRetryPolicy(**options).evaluate(error, 1, 3, context)
    assert decision.action is RetryAction.DEFAULT or decision.reason
    return decision.action, decision.retry_delay


def test_p07_the_policy_fails_what_no_retry_mends_and_retries_when_the_vendor_says() -> None:
    retry, fail = RetryAction.RETRY, RetryAction.FAIL
    assert decide(v.http(429, None, {"Retry-After": "12"})) == (retry, timedelta(seconds=12))
    assert decide(v.http(429)) == (retry, None)
    assert decide(v.http(429, {"policyName": "DAILY"})) == (retry, timedelta(hours=1))
    assert decide(httpx.ConnectError("refused")) == (retry, None)
    assert decide(v.http(429, None, {"Retry-After": "99999999"})) == (retry, timedelta(days=30))
    assert decide(v.http(400)) == (fail, None)
    assert decide(v.of_openai(429, {"error": {"code": "insufficient_quota"}})) == (fail, None)
    assert decide(httpx.ReadTimeout("no answer")) == (fail, None)
    assert decide(httpx.ReadTimeout("no answer"), effect_kind="read") == (retry, None)


def test_p07_the_policy_leaves_a_guarded_task_to_its_guard() -> None:
    guarded: Any = {"task": SimpleNamespace(guard=Guard())}
    assert decide(v.http(400), guarded) == (RetryAction.DEFAULT, None)
    assert decide(v.http(400), {"task": SimpleNamespace()}) == (RetryAction.FAIL, None)


def test_p07_the_policy_cannot_raise() -> None:
    class Hostile(Exception):
        def __getattribute__(self, name: str) -> Any:
            raise RuntimeError("hostile")

    class HostileContext(dict[str, Any]):
        def get(self, *_: Any) -> Any:
            raise RuntimeError("hostile")

    assert decide(Hostile())[0] is RetryAction.FAIL
    assert decide(ValueError(), HostileContext())[0] is RetryAction.FAIL


def test_p07_the_policy_survives_serialisation() -> None:
    policy = GuardRetryPolicy("read")
    assert GuardRetryPolicy.deserialize(policy.serialize()).effect_kind == "read"
