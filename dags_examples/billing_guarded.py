"""A charge that happens once: the DAG of the README.

``guard.call`` books the intent, charges, and books the outcome. Run it again (a retry, a clear, a backfill, by hand,
from another DAG that names the namespace): the stored id comes back and nobody is charged. The vendor is given an
idempotency key that stays the same over all of them. Reads ``RUNGUARD_VENDOR_URL``.
"""

import os

import requests
from airflow.sdk import DAG

from airflow_runguard import GuardContext, guarded_task


def create_charge(idempotency_key: str, **charge) -> dict:
    url, headers = f"{os.environ['RUNGUARD_VENDOR_URL']}/charges", {"Idempotency-Key": idempotency_key}
    answer = requests.post(url, json=charge, headers=headers, timeout=30)
    answer.raise_for_status()
    return answer.json()


with DAG("billing_guarded", schedule=None):

    @guarded_task(key="invoice/{{ args.invoice.id }}", namespace="billing", retries=2)
    def charge(guard: GuardContext, invoice: dict) -> str:
        return guard.call("charge", create_charge, vendor_key_as="idempotency_key", **invoice)["id"]

    charge({"id": "2026-10/cust-7", "customer": "cust-7", "amount": 4900, "currency": "eur"})
