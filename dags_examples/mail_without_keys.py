"""Mails by a provider that knows no idempotency key: nobody gets one twice, and what nobody knows is asked about, once.

There is no key to repeat under and nothing to look up, so a lost answer is in doubt; the others go on, and in the end
Airflow asks a person about all doubtful mails in one form. After 20 troubled ones no other begins: something is wrong
with the provider. Reads ``RUNGUARD_VENDOR_URL``.
"""

import os

import pendulum
import requests
from airflow.sdk import dag, task

from airflow_runguard import guarded_batch_task


@dag(
    schedule=None,
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    catchup=False,
    params={"customers": ["anna", "ben", "cleo"]},
)
def mail_without_keys():
    @task
    def due(params: dict | None = None) -> list[dict]:
        return [{"to": f"{name}@example.test", "subject": "Your invoice"} for name in (params or {})["customers"]]

    @guarded_batch_task(key="reminders/2026-10", item_key="to", payload=["to"], concurrency=4, stop_after=20)
    def send(mail: dict) -> str:
        answer = requests.post(
            f"{os.environ['RUNGUARD_VENDOR_URL']}/charges", json={"customer": mail["to"], **mail}, timeout=30
        )
        answer.raise_for_status()
        return answer.json()["id"]

    send(due())


mail_without_keys()
