"""Loyalty points, up to 50 members in one request: each answer is booked on its own member.

The function gives back a dict by key. What the vendor's answer leaves out is in doubt, what it refused is failed, and
neither hides behind the HTTP 200 of the others. Reads ``RUNGUARD_VENDOR_URL``.
"""

import os

import pendulum
import requests
from airflow.sdk import dag, task

from airflow_runguard import ItemContext, NotApplied, guarded_batch_task


@dag(
    schedule=None,
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    catchup=False,
    params={"members": ["anna", "ben", "cleo"]},
)
def points_accrual():
    @task
    def earned(params: dict | None = None) -> list[dict]:
        return [{"order": f"o-{name}", "member": name, "points": 50} for name in (params or {})["members"]]

    @guarded_batch_task(key="points/2026-10", item_key="order", bulk=50)
    def accrue(guard: ItemContext, accruals: dict[str, dict]) -> dict:
        answer = requests.post(
            f"{os.environ['RUNGUARD_VENDOR_URL']}/accruals",
            json=[{**accrual, "key": guard.idempotency_keys[order]} for order, accrual in accruals.items()],
            timeout=60,
        )
        answer.raise_for_status()
        return {
            one["order"]: one["balance"] if one["ok"] else NotApplied(one["reason"])
            for one in answer.json()["accruals"]
        }

    accrue(earned())


points_accrual()
