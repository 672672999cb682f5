"""Was yesterday's payout finished? Asked before the work starts.

The sensor asks the ledger, not Airflow: what counts is that the guarded task behind it was completed, and that an hour
has passed since. It waits in the triggerer; all such sensors share one connection and wake within a second. Yesterday's
run failed, in doubt or paused: it waits for whoever mends it. The first run ever goes, and says so.
"""

import os
from datetime import timedelta

import pendulum
import requests
from airflow.sdk import dag

from airflow_runguard import GuardContext, PreviousRunSensor, guarded_task


def post_payout(day: str, idempotency_key: str) -> dict:
    answer = requests.post(
        f"{os.environ['RUNGUARD_VENDOR_URL']}/charges",
        json={"customer": f"payout-{day}", "amount": 100, "currency": "eur"},
        headers={"Idempotency-Key": idempotency_key},
        timeout=30,
    )
    answer.raise_for_status()
    return answer.json()


@dag(schedule="@daily", start_date=pendulum.datetime(2026, 1, 1, tz="UTC"), catchup=False)
def payout_in_series():
    @guarded_task
    def pay_out(guard: GuardContext, day: str) -> str:
        return guard.call("payout", post_payout, vendor_key_as="idempotency_key", day=day)["id"]

    previous_done = PreviousRunSensor(task_id="previous_done", min_gap=timedelta(hours=1), timeout=timedelta(hours=20))
    previous_done >> pay_out("{{ ds }}")


payout_in_series()
