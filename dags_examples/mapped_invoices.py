"""Mapped tasks that are named by what they do.

A map index is a place in a list: after a clear another invoice may stand there. The key is made of the invoice's own
id, so that a longer, shorter or reordered list charges what is new and nothing else. Reads ``RUNGUARD_VENDOR_URL``.
"""

import os

import pendulum
import requests
from airflow.sdk import dag, task

from airflow_runguard import GuardContext, guarded_task


def create_charge(customer: str, amount: int, idempotency_key: str) -> dict:
    answer = requests.post(
        f"{os.environ['RUNGUARD_VENDOR_URL']}/charges",
        json={"customer": customer, "amount": amount, "currency": "eur"},
        headers={"Idempotency-Key": idempotency_key},
        timeout=30,
    )
    answer.raise_for_status()
    return answer.json()


@dag(
    schedule=None,
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    catchup=False,
    params={"customers": ["anna", "ben", "cleo"]},
)
def mapped_invoices():
    @task
    def due(params: dict | None = None) -> list[dict]:
        return [{"id": f"2026-10/{name}", "customer": name, "cents": 1500} for name in (params or {})["customers"]]

    @guarded_task(key="invoice/{{ args.invoice.id }}", namespace="billing", retries=1)
    def charge(guard: GuardContext, invoice: dict) -> str:
        created = guard.call(
            "charge",
            create_charge,
            vendor_key_as="idempotency_key",
            customer=invoice["customer"],
            amount=invoice["cents"],
        )
        return created["id"]

    charge.expand(invoice=due())


mapped_invoices()
