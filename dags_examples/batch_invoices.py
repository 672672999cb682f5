"""A list of invoices in one task: each is charged once, whatever is killed, cleared or added to the list.

The downstream task reads the results from the ledger, item by item. Reads ``RUNGUARD_VENDOR_URL``.
"""

import os

import pendulum
import requests
from airflow.sdk import dag, task

from airflow_runguard import BatchResults, ItemContext, guarded_batch_task


@dag(
    schedule=None,
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    catchup=False,
    params={"customers": ["anna", "ben", "cleo"]},
)
def batch_invoices():
    @task
    def due(params: dict | None = None) -> list[dict]:
        return [{"id": f"2026-10/{name}", "customer": name, "cents": 1500} for name in (params or {})["customers"]]

    @guarded_batch_task(key="invoices/2026-10", namespace="billing", item_key="id", concurrency=4)
    def charge(guard: ItemContext, invoice: dict) -> dict:
        answer = requests.post(
            f"{os.environ['RUNGUARD_VENDOR_URL']}/charges",
            json={"customer": invoice["customer"], "amount": invoice["cents"], "currency": "eur"},
            headers={"Idempotency-Key": guard.idempotency_key},
            timeout=30,
        )
        answer.raise_for_status()
        return answer.json()

    @task
    def report(summary: dict) -> int:
        return sum(result["amount"] for _, result in BatchResults(summary))

    report(charge(due()))


batch_invoices()
