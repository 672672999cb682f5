"""Master data to another system: each version of each customer is pushed once, and what did not change is not pushed.

The version is part of the item's key, so a changed customer is new work and an unchanged one is none. Writing the same
version twice does no harm, so what is in doubt is simply pushed again. Reads ``RUNGUARD_VENDOR_URL``.
"""

import os
from datetime import timedelta

import pendulum
import requests
from airflow.sdk import dag, task

from airflow_runguard import ItemContext, guarded_batch_task


@dag(
    schedule=None,
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    catchup=False,
    params={"versions": {"anna": 1, "ben": 1}},
)
def master_data_sync():
    @task
    def customers(params: dict | None = None) -> list[dict]:
        return [{"id": name, "version": version} for name, version in (params or {})["versions"].items()]

    @guarded_batch_task(
        key="master-data",
        item_key="{{ item.id }}/v{{ item.version }}",
        on_doubt="replay",
        concurrency=4,
        retries=3,
        retry_delay=timedelta(minutes=1),
    )
    def push(guard: ItemContext, customer: dict) -> str:
        answer = requests.post(
            f"{os.environ['RUNGUARD_VENDOR_URL']}/charges",
            json={**customer, "customer": guard.key},
            headers={"Idempotency-Key": guard.idempotency_key},
            timeout=30,
        )
        answer.raise_for_status()
        return answer.json()["id"]

    push(customers())


master_data_sync()
