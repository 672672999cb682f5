"""What the scheduler tests of series run: payouts of one job, each of which may begin only after the one before."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta

import requests
from airflow.sdk import dag, get_current_context

from airflow_runguard import GuardContext, PreviousRunSensor, Series, guarded_task

VENDOR = os.environ["RUNGUARD_VENDOR_URL"]
SERIES = Series(
    name="{{ dag_run.conf['job'] }}", order="{{ dag_run.conf['number'] }}", previous="{{ dag_run.conf['previous'] }}"
)

alone = dag(schedule=None, start_date=datetime(2026, 1, 1, tzinfo=UTC), max_active_runs=32, max_active_tasks=32)


def post_charge(number: str, idempotency_key: str) -> str:
    context = get_current_context()
    answer = requests.post(
        f"{VENDOR}/charges",
        json={"customer": f"{context['dag_run'].conf['job']}-{number}", "amount": 4200, "currency": "eur"},
        headers={"Idempotency-Key": idempotency_key},
        timeout=200,
    )
    answer.raise_for_status()
    return answer.json()["id"]


def payout(**options):
    @guarded_task(
        key="{{ dag_run.conf['job'] }}/{{ args.number }}",
        namespace="payouts",
        series=SERIES,
        lease=6,
        max_call_time=6,
        retries=2,
        retry_delay=timedelta(seconds=5),
        **options,
    )
    def charge(guard: GuardContext, number: str) -> str:
        return guard.call("charge", post_charge, vendor_key_as="idempotency_key", number=number)

    return charge("{{ dag_run.conf['number'] }}")


@alone
def in_turn():
    payout(wait_for_previous=True)


@alone
def asks_first():
    PreviousRunSensor(task_id="previous_done", timeout=300) >> payout()


in_turn()
asks_first()
