"""A way in: observe first. Nothing is held up; what runs is booked, and a second run is said to be one.

``depth`` in ``default_args`` counts for all guarded tasks of the DAG. When the log has been quiet for a while, take it
out: what was observed is honoured then, and the second run below gives back the first one's result.
"""

import os

import pendulum
import requests
from airflow.sdk import dag

from airflow_runguard import guarded_task

DEPTH = os.environ.get("OBSERVED_FIRST_DEPTH", "observe")


@dag(
    schedule=None,
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    catchup=False,
    default_args={"depth": DEPTH},
)
def observed_first():
    @guarded_task(key="invoice/{{ args.invoice }}", namespace="observed", on_doubt="ask")
    def charge(invoice: str) -> str:
        answer = requests.post(
            f"{os.environ['RUNGUARD_VENDOR_URL']}/charges",
            json={"customer": invoice, "amount": 700, "currency": "eur"},
            timeout=30,
        )
        answer.raise_for_status()
        return answer.json()["id"]

    charge("2026-10/cust-9")


observed_first()
