"""A payout by a stock operator, and the vendor asked when nobody knows.

``guarded(HttpOperator)`` is the operator that you know with ``guard=`` added. Where an answer was lost, ``find_payout``
looks the payout up by its idempotency key before anything is sent again. Reads the Connection ``runguard_vendor`` (type
http) and ``RUNGUARD_VENDOR_URL``.
"""

import json
import os
from datetime import timedelta

import pendulum
import requests
from airflow.providers.http.operators.http import HttpOperator
from airflow.sdk import dag

from airflow_runguard import Applied, Doubt, Guard, NotApplied, guarded


def find_payout(doubt: Doubt) -> Applied | NotApplied:
    """The vendor's own word. An error in here leaves the record in doubt."""
    found = requests.get(
        f"{os.environ['RUNGUARD_VENDOR_URL']}/charges", params={"idempotency_key": doubt.vendor_key}, timeout=30
    )
    found.raise_for_status()
    payouts = found.json()["data"]
    return Applied(payouts[0]["id"]) if payouts else NotApplied("the vendor has no such payout")


@dag(schedule="@daily", start_date=pendulum.datetime(2026, 1, 1, tz="UTC"), catchup=False)
def payout_http_operator():
    guarded(HttpOperator)(
        task_id="pay_out",
        guard=Guard(key="payout/{{ ds }}", namespace="payouts", on_doubt=find_payout, max_call_time=90),
        http_conn_id="runguard_vendor",
        endpoint="/charges",
        headers={"Content-Type": "application/json", "Idempotency-Key": "{{ guard.idempotency_key }}"},
        data=json.dumps({"customer": "shop-1", "amount": 120000, "currency": "eur"}),
        response_filter=lambda response: response.json()["id"],
        retries=2,
        retry_delay=timedelta(minutes=2),  # longer than max_call_time: before that, "not found" proves nothing
    )


payout_http_operator()
