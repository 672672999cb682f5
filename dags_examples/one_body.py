"""A function left as it is, guarded as one call.

Any error of it may come after the effect, so it has to say who decides then: here a person, told by the task's log
which command to type. Without ``on_doubt`` the DAG is refused with an explanation. Reads ``RUNGUARD_VENDOR_URL``.
"""

import os

import pendulum
import requests
from airflow.sdk import dag, task


@dag(schedule="@daily", start_date=pendulum.datetime(2026, 1, 1, tz="UTC"), catchup=False)
def one_body():
    @task.guarded(on_doubt="ask", retries=2)
    def order_paper(sheets: int = 5000) -> str:
        answer = requests.post(f"{os.environ['RUNGUARD_VENDOR_URL']}/orders/paper", json={"sheets": sheets}, timeout=30)
        answer.raise_for_status()
        return answer.json()["id"]

    order_paper()


one_body()
