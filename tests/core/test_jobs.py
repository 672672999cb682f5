"""Submitted jobs (shared cases R30, R31): submitted once, waited for by whoever comes, submitted anew only by the
vendor's word."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest
import requests

from airflow_runguard.core import guard
from airflow_runguard.core.errors import NotApplied
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import CallState, State
from tests.batch_api import BatchApi, order, training
from tests.core.accidents import attempt, until
from tests.core.books import come_due, long_ago

ROOT = Path(__file__).parents[2]


@pytest.fixture
def api() -> Iterator[BatchApi]:
    with BatchApi() as running:
        yield running


def killed(api: BatchApi, ledger_url: str, *, submits: int = 1, looks: int = 0) -> None:
    """A process that submitted (and looked so often) and was killed then."""
    plan = json.dumps({"ledger": ledger_url, "url": api.url})
    process = subprocess.Popen([sys.executable, "-m", "tests.batch_api", plan], cwd=ROOT)
    try:
        api.wait(submits=submits, looks=looks)
    finally:
        process.kill()
        process.wait()


def again(ledger_url: str, api: BatchApi, **rules: Any) -> guard.How:
    """The next try that is not told to wait for a dead one's lease."""
    return until(
        lambda: attempt(ledger_url, order(), training(api.url), **rules),
        lambda how: not (isinstance(how, guard.Waiting) and how.busy),
    )


def the_call(ledger: Ledger, name: str = "train") -> Any:
    (found,) = [call for call in ledger.calls(1) if call.name == name]
    return found


def test_p02_a_job_is_submitted_once_and_its_result_given_back(api: BatchApi, ledger_url: str, ledger: Ledger) -> None:
    api.next_state = "succeeded"
    for replayed in (False, True):
        how = attempt(ledger_url, order(), training(api.url))
        assert how == guard.Done("published model of job-1", replayed=replayed)
    assert len(api.keys) == 1
    assert (the_call(ledger).external_id, the_call(ledger).state) == ("job-1", CallState.DONE)


def test_p02_r46_a_jobs_success_that_was_never_reported_is_given_back_without_the_vendor(
    api: BatchApi, ledger_url: str
) -> None:
    api.next_state = "succeeded"
    first = attempt(ledger_url, order(), training(api.url))
    again = attempt(ledger_url, order(), training("http://127.0.0.1:9"))
    assert (first, again) == tuple(guard.Done("published model of job-1", replayed=said) for said in (False, True))


@pytest.mark.parametrize("state", ["succeeded", "failed", "unknown", "running"])
def test_p03_r30_after_a_kill_while_polling_the_next_try_attaches(
    api: BatchApi, ledger_url: str, ledger: Ledger, sql: psycopg.Connection[Any], state: str
) -> None:
    killed(api, ledger_url, looks=3)
    assert the_call(ledger).external_id == "job-1"
    api.jobs["job-1"] = state
    if state == "running":
        over = "select lease_until < clock_timestamp() from runguard.record"
        until(lambda: sql.execute(over).fetchone() == (True,))  # else the second one is told to wait, and ends
        killed(api, ledger_url, looks=api.looks + 3)  # the second one attaches, waits, and dies as well
        api.jobs["job-1"] = "succeeded"
    api.next_state = "succeeded"
    how = again(ledger_url, api)
    match state:
        case "succeeded" | "running":
            assert how == guard.Done("published model of job-1", replayed=False)
            assert len(api.keys) == 1
        case "failed":
            assert how == guard.Done("published model of job-2", replayed=False)
            assert len(set(api.keys)) == 2, "submitted anew, under a new vendor key"
        case _:
            assert isinstance(how, guard.Ended)
            assert "In doubt" in how.message
            assert isinstance(again(ledger_url, api), guard.Ended), "not before a person has said so"
            assert len(api.keys) == 1
            assert ledger.list()[0].needs_person
            assert the_call(ledger).external_id == "job-1", "a person has something to look up"


def test_p03_a_job_that_a_person_says_does_not_exist_is_submitted_anew(
    api: BatchApi, ledger_url: str, ledger: Ledger, sql: psycopg.Connection[Any]
) -> None:
    killed(api, ledger_url, looks=1)
    api.jobs["job-1"] = "unknown"
    again(ledger_url, api)
    long_ago(sql, 1)
    assert ledger.resolve(1, "did_not_happen", call="train", actor="person:p", reason="asked the vendor") == "ok"
    api.next_state = "succeeded"
    assert again(ledger_url, api) == guard.Done("published model of job-2", replayed=False)
    assert len(api.keys) == 2


@pytest.mark.parametrize("found", ["adopted", "absent", "cannot tell"])
def test_p03_r31_killed_between_the_submission_and_its_answer_the_vendor_is_asked(
    api: BatchApi, ledger_url: str, ledger: Ledger, sql: psycopg.Connection[Any], found: str
) -> None:
    api.holds_answer.clear()
    killed(api, ledger_url, submits=1)
    api.holds_answer.set()
    assert the_call(ledger).external_id == ""
    if found == "absent":
        api.keys.clear()
    api.jobs["job-1"] = api.next_state = "succeeded"
    assert isinstance(again(ledger_url, api), guard.Ended), "nobody to ask: a person, never a second submission"
    long_ago(sql, 1)

    def look_up(doubt: guard.Doubt) -> Any:
        if found == "cannot tell":
            return guard.StillUnknown("the list is down")
        with requests.Session() as session:
            session.trust_env = False
            jobs = session.get(f"{api.url}/jobs", params={"key": doubt.vendor_key}, timeout=10).json()["jobs"]
        return guard.Submitted(jobs[0]) if jobs else NotApplied("the vendor has no such job")

    how = again(ledger_url, api, reconcile=look_up)
    if found == "cannot tell":
        assert isinstance(how, guard.Ended)
    else:
        assert how == guard.Done("published model of job-1", replayed=False)
    assert len(api.keys) == 1


def test_p06_told_to_wait_while_polling_keeps_the_job_and_its_name(
    api: BatchApi, ledger_url: str, ledger: Ledger, sql: psycopg.Connection[Any]
) -> None:
    api.refuse_looks = 1
    how = attempt(ledger_url, order(), training(api.url))
    assert isinstance(how, guard.Waiting)
    assert ledger.list()[0].state is State.PAUSED
    assert (the_call(ledger).state, the_call(ledger).external_id) == (CallState.PAUSED, "job-1")
    come_due(sql, 1)
    api.jobs["job-1"] = "succeeded"
    assert again(ledger_url, api) == guard.Done("published model of job-1", replayed=False)
    assert len(api.keys) == 1


def test_p06_told_to_wait_while_polling_after_a_kill_is_a_pause_all_the_same(
    api: BatchApi, ledger_url: str, ledger: Ledger, sql: psycopg.Connection[Any]
) -> None:
    killed(api, ledger_url, looks=1)
    api.refuse_looks = 1
    assert isinstance(again(ledger_url, api), guard.Waiting)
    assert ledger.list()[0].state is State.PAUSED
    come_due(sql, 1)
    api.jobs["job-1"] = "failed"
    api.next_state = "succeeded"
    assert again(ledger_url, api) == guard.Done("published model of job-2", replayed=False)


def test_p06_told_to_wait_while_submitting_submits_once(
    api: BatchApi, ledger_url: str, ledger: Ledger, sql: psycopg.Connection[Any]
) -> None:
    api.refuse_submits = 1
    api.next_state = "succeeded"
    assert isinstance(attempt(ledger_url, order(), training(api.url)), guard.Waiting)
    assert the_call(ledger).external_id == ""
    come_due(sql, 1)
    assert again(ledger_url, api) == guard.Done("published model of job-1", replayed=False)
    assert len(api.keys) == 1


def test_p03_looks_that_fail_again_and_again_leave_the_job_to_the_next_try(
    api: BatchApi, ledger_url: str, ledger: Ledger
) -> None:
    api.break_looks = 2
    api.next_state = "succeeded"
    assert isinstance(attempt(ledger_url, order("two"), training(api.url)), guard.Done), "two are got over"
    api.break_looks = 3
    how = attempt(ledger_url, order(), training(api.url))
    assert isinstance(how, guard.Waiting)
    assert "nothing is sent again" in how.reason
    done = attempt(ledger_url, order(), training(api.url))
    assert done == guard.Done("published model of job-2", replayed=False)
    assert len(api.keys) == 2


def test_p03_a_job_is_not_sent_again_by_a_body_that_calls_instead_of_submitting(
    api: BatchApi, ledger_url: str, ledger: Ledger
) -> None:
    killed(api, ledger_url, looks=1)
    made: list[str] = []
    how = until(
        lambda: attempt(ledger_url, order(), lambda context: context.call("train", made.append, "again")),
        lambda how: not isinstance(how, guard.Waiting),
    )
    assert isinstance(how, guard.Ended)
    assert "bring guard.submit back" in how.message
    assert made == []
    api.jobs["job-1"] = "succeeded"
    assert again(ledger_url, api) == guard.Done("published model of job-1", replayed=False)


def test_p04_a_name_that_a_call_remembers_is_there_for_whoever_looks_into_the_doubt(
    ledger_url: str, ledger: Ledger
) -> None:
    def body(context: guard.GuardContext) -> None:
        def pay() -> None:
            context.remember("ch_1")
            raise TimeoutError

        context.call("pay", pay)

    asked: list[str] = []
    what = order("k", on_doubt="reconcile")
    attempt(ledger_url, what, body)

    def find(doubt: guard.Doubt) -> Any:
        asked.append(doubt.external_id)
        return guard.Applied("paid")

    assert attempt(ledger_url, what, lambda context: context.call("pay", str), reconcile=find) == guard.Done(
        "paid", False
    )
    assert asked == ["ch_1"]
    assert "remembered" in [event.kind for event in ledger.events(1)]
