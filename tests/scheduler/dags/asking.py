"""What the scheduler tests of doubt, quota and freezes run: one guarded charge a run, on an invoice of its own."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta

import requests
from airflow.sdk import dag, get_current_context, task

from airflow_runguard import GuardContext, guarded_task

VENDOR = os.environ["RUNGUARD_VENDOR_URL"]
INVOICE = "{{ dag_run.conf['invoice'] }}"

alone = dag(schedule=None, start_date=datetime(2026, 1, 1, tzinfo=UTC), max_active_runs=32, max_active_tasks=32)


def post_charge(invoice: str, idempotency_key: str | None = None) -> str:
    context = get_current_context()
    answer = requests.post(
        f"{VENDOR}/charges",
        json={"customer": f"{context['dag'].dag_id}/{invoice}", "amount": 4200, "currency": "eur"},
        headers={"Idempotency-Key": idempotency_key or ""},
        timeout=(context["dag_run"].conf or {}).get("patience", 200),
    )
    answer.raise_for_status()
    return answer.json()["id"]


def guarded(**options):
    @guarded_task(
        key="invoice/{{ args.invoice }}",
        namespace="asking",
        lease=6,
        max_call_time=6,
        retry_delay=timedelta(seconds=5),
        **options,
    )
    def charge(guard: GuardContext, invoice: str) -> str:
        return guard.call("charge", post_charge, vendor_key_as="idempotency_key", invoice=invoice)

    return charge


@alone
def asking():
    guarded(retries=1)(INVOICE)


@alone
def asking_briefly():
    guarded(retries=0, ask_timeout=8)(INVOICE)


@alone
def under_quota():
    guarded(retries=0, quota="wall/{{ args.invoice }}")(INVOICE)


@alone
def under_quota_plain():
    @task(retries=1, retry_delay=timedelta(seconds=2))
    def charge(invoice: str) -> str:
        return post_charge(invoice)

    charge(INVOICE)


asking()
asking_briefly()
under_quota()
under_quota_plain()
