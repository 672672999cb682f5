"""What the scheduler tests of onlookers run: unguarded charges, seen by the listener or by callbacks, and a sensor."""

from __future__ import annotations

import os
from datetime import UTC, datetime

import requests
from airflow.sdk import dag, get_current_context, task

from airflow_runguard import PreviousRunSensor, Series, ledger_callbacks

VENDOR = os.environ["RUNGUARD_VENDOR_URL"]
alone = dag(schedule=None, start_date=datetime(2026, 1, 1, tzinfo=UTC), max_active_runs=32, max_active_tasks=32)


def pay() -> None:
    customer = get_current_context()["run_id"]
    requests.post(f"{VENDOR}/charges", json={"customer": customer, "amount": 1, "currency": "eur"}, timeout=200)


@alone
def watched():
    task(task_id="charge")(pay)()


@alone
def called_back():
    task(task_id="charge", **ledger_callbacks())(pay)()


@alone
def waits_softly():
    series = Series(name="soft", order="2", previous="1")
    PreviousRunSensor(task_id="previous_done", series=series, timeout=20, soft_fail=True)


watched()
called_back()
waits_softly()
