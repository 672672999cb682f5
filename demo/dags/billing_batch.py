"""500 charges in one task, written twice: as people write it, and as a guarded batch. The request is the same."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import requests
from airflow.sdk import dag, task

from airflow_runguard import ItemContext, guarded_batch_task

VENDOR = os.environ["RUNGUARD_VENDOR_URL"]
DUE = [{"id": f"batch-{number:03}", "cents": 4200} for number in range(1, 501)]
AT_ONCE = 8
RETRIES = {"retries": 9, "retry_delay": timedelta(seconds=8)}

billing = dag(schedule=None, start_date=datetime(2026, 1, 1, tzinfo=UTC))


def post_charge(dag_id: str, invoice: dict, idempotency_key: str | None = None) -> str:
    """Charge one invoice at the vendor; the charge's id."""
    answer = requests.post(
        f"{VENDOR}/charges",
        json={"customer": f"{dag_id}/{invoice['id']}", "amount": invoice["cents"], "currency": "eur"},
        headers={"Idempotency-Key": idempotency_key} if idempotency_key else {},
        timeout=200,
    )
    answer.raise_for_status()
    charge: str = answer.json()["id"]
    return charge


@billing
def billing_batch_plain():
    @task(**RETRIES)
    def charge(invoices: list[dict]) -> list[str]:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            return list(pool.map(lambda invoice: post_charge("billing_batch_plain", invoice), invoices))

    charge(DUE)


@billing
def billing_batch_guarded():
    @guarded_batch_task(
        key="batch/2026-01",
        namespace="billing",
        item_key="id",
        concurrency=AT_ONCE,
        quota="batch",
        lease=6,
        max_call_time=15,
        **RETRIES,
    )
    def charge(guard: ItemContext, invoice: dict) -> str:
        return post_charge("billing_batch_guarded", invoice, guard.idempotency_key)

    charge(DUE)


billing_batch_plain()
billing_batch_guarded()
