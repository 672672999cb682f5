"""A quota that a deferred operator meets after it came back: it waits, its gate is closed, and nothing is sent twice.

The test plays the triggerer: it says with which event the task comes back.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import requests
from airflow.providers.standard.triggers.temporal import DateTimeTrigger
from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException, TaskDeferred

from airflow_runguard import Guard, deferrals, explain, guarded
from airflow_runguard.core.errors import PlanningError
from airflow_runguard.core.record import Effect, State
from airflow_runguard.masking import hider
from tests.doors.conftest import begun

TOLD = "Trigger failed: 429 Client Error: Too Many Requests for url: https://api.example/jobs/1 (Retry-After: 120)"


class Deferred(BaseOperator):
    """Defers, then goes on: ``early`` is done before, ``late`` after; an event that is a text is an error."""

    template_fields = ()

    def __init__(self, *, early: Callable[[], Any], late: Callable[[], Any], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.early, self.late = early, late

    def execute(self, context: Any) -> None:
        self.early()
        self.defer(trigger=DateTimeTrigger(moment=datetime(2026, 1, 1, tzinfo=UTC)), method_name="go_on")

    def go_on(self, context: Any, event: Any = None) -> Any:
        if event:
            raise AirflowException(f"It failed: {event}")
        return self.late()


def deferring(airflow: Any, early: Any, late: Any, **said: Any) -> Any:
    with airflow.dag() as dag:
        guard = Guard(**{"key": "k", "on_doubt": "ask", "quota": "wall", **said})
        guarded(Deferred)(task_id="pay", early=early, late=late, guard=guard)
    return dag


def told_to_wait(airflow: Any) -> None:
    airflow.vendor.script("status", status=429, headers={"Retry-After": "120"}, charged=False)


def is_closed(airflow: Any) -> bool:
    (gate,) = airflow.ledger.gates()
    return 30 < (gate["closed_until"] - datetime.now(UTC)).total_seconds() < 180


def opened(airflow: Any) -> None:
    assert airflow.ledger.open_gate("wall", rate=1000, actor="person:t", reason="raised") == "ok"


def nothing() -> None:
    pass


def test_p06_a_request_after_the_deferral_waits_where_it_was(airflow, charge):
    told_to_wait(airflow)
    with begun(deferring(airflow, nothing, lambda: charge()["id"], single_request=True)) as task:
        assert [task.enter(), task.enter()] == ["deferred", "deferred"]
        record = airflow.record()
        assert (record.state, record.resume_at is not None) == (State.RUNNING, True)
        assert is_closed(airflow)
        (now,) = airflow.sql.execute("select clock_timestamp()").fetchone()
        assert "keeps its place" in explain.standing(record, (), now).why
        assert task.enter() == "deferred", "early: it waits again"
        assert len(airflow.vendor.requests()) == 1
        opened(airflow)
        assert task.enter() == "success"
    assert (airflow.vendor.charges(), len(airflow.vendor.requests())) == (1, 2)
    assert airflow.record().state is State.DONE


def test_p06_p03_what_was_sent_before_the_deferral_is_not_sent_again(airflow, charge):
    """It polls after the deferral, and its author said that it is one request: the charge is not made again, nor is it
    called not applied."""
    polls: list[int] = []

    def poll() -> str:
        polls.append(1)
        if len(polls) == 1:
            refused = requests.Response()
            refused.status_code, refused.headers["Retry-After"] = 429, "120"
            refused.request = requests.Request("GET", "https://api.example/1").prepare()
            refused.raise_for_status()
        return "polled"

    with begun(deferring(airflow, charge, poll, single_request=True)) as task:
        assert [task.enter(), task.enter()] == ["deferred", "deferred"]
        assert is_closed(airflow)
        (call,) = airflow.ledger.calls(airflow.record().id)
        assert (call.state, call.effect) == ("started", None)
        opened(airflow)
        assert task.enter() == "success"
    assert (airflow.vendor.charges(), len(polls)) == (1, 2)


def test_p06_a_task_that_keeps_its_place_ends_in_doubt_when_its_pauses_are_spent(airflow, charge):
    for _ in range(2):
        told_to_wait(airflow)
    with begun(deferring(airflow, nothing, charge, single_request=True, max_pauses=1)) as task:
        assert [task.enter(), task.enter()] == ["deferred", "deferred"]
        opened(airflow)
        assert task.enter() == "failed"
    record = airflow.record()
    assert (record.state, airflow.vendor.charges()) == (State.IN_DOUBT, 0)
    assert "paused 1 time(s)" in record.error


def test_p06_p03_a_trigger_that_came_back_with_the_quota_is_started_anew(airflow, charge):
    """What it submitted before is not sent again, and the method does not meet the same event for ever."""
    with begun(deferring(airflow, charge, lambda: "polled", single_request=True)) as task:
        assert [task.enter(), task.enter(TOLD)] == ["deferred", "deferred"]
        assert is_closed(airflow)
        for again in (TOLD, {"status": "error", "message": TOLD}):
            assert task.enter() == "deferred", "early: it waits again"
            opened(airflow)
            assert task.enter() == "deferred"
            assert task.ti.next_method == "go_on", "it waits for its own trigger again"
            assert task.enter(again) == "deferred"
        opened(airflow)
        assert [task.enter(), task.enter()] == ["deferred", "success"]
    assert airflow.vendor.charges() == 1
    assert airflow.record().state is State.DONE


def test_p06_a_trigger_that_comes_back_with_the_quota_again_and_again_spends_the_pauses(airflow, charge):
    with begun(deferring(airflow, nothing, charge, single_request=True, max_pauses=1)) as task:
        assert [task.enter(), task.enter(TOLD)] == ["deferred", "deferred"]
        opened(airflow)
        assert [task.enter(), task.enter(TOLD)] == ["deferred", "failed"]
    record = airflow.record()
    assert (record.state, airflow.vendor.charges()) == (State.IN_DOUBT, 0)
    assert "paused 1 time(s)" in record.error


def test_a_trigger_that_has_something_to_hide_is_not_kept_where_people_may_read_it():
    def deferral(**said: Any) -> TaskDeferred:
        trigger = DateTimeTrigger(moment=datetime(2026, 1, 1, tzinfo=UTC))
        trigger.serialize = lambda: ("a.Trigger", said)
        return TaskDeferred(trigger=trigger, method_name="go_on", kwargs={"a": 1}, timeout=timedelta(minutes=5))

    redact = hider("iban", lambda value: value)
    open_one, secret, odd = deferral(job="7"), deferral(iban="DE02"), deferral(job=object())
    for one in (open_one, secret, odd):
        deferrals.noted(one, redact)
    arguments, note = deferrals.taken({**open_one.kwargs, "event": "429"})
    assert arguments == {"a": 1, "event": "429"}
    assert json.loads(note)["value"] == ["a.Trigger", {"job": "7"}, 300.0]
    assert secret.kwargs == odd.kwargs == {"a": 1}


@pytest.mark.parametrize("by", ["request", "event"])
def test_p06_where_the_resume_method_makes_the_request_its_quota_is_a_pause(airflow, charge, by):
    """Nothing was sent before, so it begins anew, with a new trigger."""
    if by == "request":
        told_to_wait(airflow)
    with begun(deferring(airflow, nothing, lambda: charge()["id"], single_request="go_on")) as task:
        assert [task.enter(), task.enter(TOLD if by == "event" else None)] == ["deferred", "deferred"]
        record = airflow.record()
        assert (record.state, record.effect) == (State.PAUSED, Effect.NOT_APPLIED)
        assert is_closed(airflow)
        opened(airflow)
        assert [task.enter(), task.enter()] == ["deferred", "success"]
    assert airflow.vendor.charges() == 1


@pytest.mark.parametrize(
    ("said", "remedy"), [({}, "say single_request=True"), ({"single_request": True}, "single_request='the_method'")]
)
def test_p03_what_is_not_known_of_the_time_before_the_deferral_stays_doubt(airflow, charge, said, remedy):
    def refused() -> None:
        raise AirflowException(TOLD) if not said else ConnectionRefusedError("nobody listens")

    with begun(deferring(airflow, charge, refused, **said)) as task:
        assert [task.enter(), task.enter()] == ["deferred", "failed"]
    record = airflow.record()
    assert record.state is State.IN_DOUBT
    assert remedy in record.evidence
    assert [gate["name"] for gate in airflow.ledger.gates()] == ([] if said else ["wall"]), "the vendor's word is heard"


def test_a_resume_method_that_is_not_there_is_refused_when_the_dag_is_parsed(airflow):
    with pytest.raises(PlanningError, match="has no method of that name"):
        deferring(airflow, nothing, nothing, single_request="go_off")
