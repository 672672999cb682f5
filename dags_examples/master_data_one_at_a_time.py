"""Two runs of one job never at the same time, and never out of order: the guard itself waits for the previous run.

``order`` says where a run stands. The ledger lets one run of a series begin at a time; a run whose previous one failed
is skipped here, since tomorrow's brings the whole master data again.
"""

import os

import pendulum
import requests
from airflow.sdk import dag

from airflow_runguard import GuardContext, Previous, Series, guarded_task


def push_master_data(day: str, idempotency_key: str) -> dict:
    answer = requests.post(
        f"{os.environ['RUNGUARD_VENDOR_URL']}/charges",
        json={"customer": f"master-data-{day}", "amount": 1, "currency": "eur"},
        headers={"Idempotency-Key": idempotency_key},
        timeout=30,
    )
    answer.raise_for_status()
    return answer.json()


@dag(schedule="@daily", start_date=pendulum.datetime(2026, 1, 1, tz="UTC"), catchup=False)
def master_data_one_at_a_time():
    @guarded_task(
        key="master-data/{{ ds }}",
        namespace="erp",
        series=Series(name="master-data", order="{{ ds }}"),
        wait_for_previous=Previous(on_failed="skip"),
    )
    def push(guard: GuardContext, day: str) -> str:
        return guard.call("push", push_master_data, vendor_key_as="idempotency_key", day=day)["id"]

    push("{{ ds }}")


master_data_one_at_a_time()
