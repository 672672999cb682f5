"""A charge that happens once: the DAG of the README.

``guard.call`` books the intent, charges, and books the outcome. Run it again (a retry, a clear, a backfill, by hand,
from another DAG that names the namespace): the stored id comes back and nobody is charged. The vendor is given an
idempotency key that stays the same over all of them. Reads ``RUNGUARD_VENDOR_URL``.
"""

import os

import pendulum
import requests
from airflow.sdk import dag

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


@dag(schedule=None, start_date=pendulum.datetime(2026, 1, 1, tz="UTC"), catchup=False)
def billing_guarded():
    @guarded_task(key="invoice/{{ args.invoice.id }}", namespace="billing", retries=2)
    def charge(guard: GuardContext, invoice: dict) -> str:
        created = guard.call(
            "charge",
            create_charge,
            vendor_key_as="idempotency_key",
            customer=invoice["customer"],
            amount=invoice["cents"],
        )
        return created["id"]

    charge({"id": "2026-10/cust-7", "customer": "cust-7", "cents": 4900})


billing_guarded()
