"""Tasks without a guard under ``GuardRetryPolicy``, and rules of one's own, through real tries of a real Airflow."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from airflow.sdk import task

from airflow_runguard import Guard, GuardRetryPolicy, Succeeded, guarded_batch_task, guarded_task
from airflow_runguard.core.errors import PlanningError
from airflow_runguard.core.failures.rule import rate
from airflow_runguard.core.record import State

HOT = rate("acme-hot", "the anvil is hot", statuses={418})
"""Of a vendor that nobody else knows: without it, a 418 is a refusal for good."""


def tried(dag_id: str) -> dict[str, tuple[float | None, str]]:
    """By task: the delay and the reason that the policy gave to the try."""
    from airflow.models.taskinstance import TaskInstance
    from airflow.utils.session import create_session
    from sqlalchemy import select

    with create_session() as session:
        tis = session.scalars(select(TaskInstance).where(TaskInstance.dag_id == dag_id)).all()
        return {ti.task_id: (ti.retry_delay_override, ti.retry_reason or "") for ti in tis}


def test_p07_a_task_without_a_guard_is_retried_when_the_vendor_says_and_fails_where_no_retry_mends_it(airflow, charge):
    answers: dict[str, Any] = {
        "told": {"status": 429, "headers": {"Retry-After": "2"}, "charged": False},
        "refused": {"status": 400, "charged": False},
        "unknown": {"status": 500, "charged": True},
    }

    def script() -> None:
        for customer, answer in answers.items():
            airflow.vendor.script("status", customer=customer, **answer)

    with airflow.dag() as dag:
        for name in answers:
            # Its own delay would outlast the test: what is retried was retried when the vendor said.
            policy = {"retries": 1, "retry_delay": timedelta(hours=9), "retry_policy": GuardRetryPolicy()}
            task(task_id=name, **policy)(lambda name: charge(name)["id"])(name)
    script()
    first = airflow.once(dag)
    assert first.states == {"told": "up_for_retry", "refused": "failed", "unknown": "failed"}, first.log
    (delay, why), refused, unknown = (tried(dag.dag_id)[name] for name in answers)
    assert (delay, refused[0], unknown[0]) == (2.0, None, None)
    assert "rule http-429" in why
    script()
    last = airflow.run(dag)
    assert last.states == {"told": "success", "refused": "failed", "unknown": "failed"}, last.log
    assert last.tries == {"told": 2, "refused": 1, "unknown": 1}
    assert [airflow.vendor.charges(name) for name in answers] == [1, 0, 2]


def test_p07_ones_own_rules_are_asked_first_wherever_an_error_is_judged(airflow, charge):
    names = ("body", "call", "job", "batch", "plain")
    for customer in names:
        airflow.vendor.script("status", customer=customer, status=418, charged=False)
    with airflow.dag() as dag:

        @guarded_task(key="body", on_doubt="ask", single_request=True, rules=[HOT])
        def body() -> Any:
            return charge("body")["id"]

        @guarded_task(key="call", rules=[HOT])
        def call(guard) -> Any:
            return guard.call("charge", charge, "call")["id"]

        @guarded_task(key="job", rules=[HOT])
        def job(guard) -> Any:
            return guard.submit("charge", lambda: charge("job")["id"], Succeeded)

        @guarded_batch_task(key="batch", item_key="id", rules=[HOT])
        def batch(guard, item) -> Any:
            return charge("batch")["id"]

        @task(retries=1, retry_policy=GuardRetryPolicy(rules=[HOT]))
        def plain() -> Any:
            return charge("plain")["id"]

        body(), call(), job(), batch([{"id": 1}]), plain()
    run = airflow.once(dag)
    assert run.states == {**dict.fromkeys(names, "up_for_reschedule"), "plain": "up_for_retry"}, run.log
    assert {record.state for record in airflow.records()} == {State.PAUSED}
    assert len(airflow.records()) == len(names) - 1
    assert "rule acme-hot" in tried(dag.dag_id)["plain"][1]
    assert airflow.vendor.charges() == 0


def test_p07_own_rules_are_checked_when_the_dag_is_parsed_and_named_the_same_in_every_process():
    assert repr(Guard(rules=[HOT])) == "Guard(rules=('acme-hot',))"
    assert GuardRetryPolicy(rules=[HOT]).serialize()["rules"] == ["acme-hot"]
    for wrong in (["429"], "acme", 429, {HOT}):  # a set has another order in every process
        with pytest.raises(PlanningError, match="neither a Rule nor a Family"):
            Guard(rules=wrong)
        with pytest.raises(PlanningError, match="neither a Rule nor a Family"):
            GuardRetryPolicy(rules=wrong)
