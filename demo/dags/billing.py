"""One billing job, written twice: as people write it, and guarded. Everything else is the same in both.

An invoice is the business key: that of the run's conf, else the run's date. ``books``, ``patience`` and ``account`` in
the conf are what some of the accidents need.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta

import requests
from airflow.sdk import dag, get_current_context, task

from airflow_runguard import GuardContext, guarded_task

VENDOR = os.environ["RUNGUARD_VENDOR_URL"]
ACCOUNT = "{{ (dag_run.conf or {}).get('account') or 'shop' }}"
INVOICE = "{{ (dag_run.conf or {}).get('invoice') or ds }}"
RETRIES = {"retries": 2, "retry_delay": timedelta(seconds=8)}

billing = dag(
    schedule="@daily",
    start_date=datetime(2026, 1, 1, tzinfo=UTC),
    end_date=datetime(2026, 1, 31, tzinfo=UTC),  # in the past: what runs is what is asked for
    catchup=False,
    max_active_runs=32,
    max_active_tasks=32,
)


def post_charge(invoice: str, idempotency_key: str | None = None) -> str:
    """Charge the invoice at the vendor; the charge's id."""
    context = get_current_context()
    answer = requests.post(
        f"{VENDOR}/charges",
        json={"customer": f"{context['dag'].dag_id}/{invoice}", "amount": 4200, "currency": "eur"},
        headers={"Idempotency-Key": idempotency_key} if idempotency_key else {},
        timeout=(context["dag_run"].conf or {}).get("patience", 200),
    )
    answer.raise_for_status()
    charge: str = answer.json()["id"]
    return charge


def write_the_books(charge: str) -> None:
    """What a billing job does after the charge. Where the run's conf says so, the books are down at the first try."""
    context = get_current_context()
    if (context["dag_run"].conf or {}).get("books") == "down" and context["ti"].try_number == 1:
        raise RuntimeError(f"The books are down; {charge} is not in them.")


@billing
def billing_plain():
    @task(**RETRIES)
    def charge(invoice: str) -> str:
        paid = post_charge(invoice)
        write_the_books(paid)
        return paid

    charge(INVOICE)


@billing
def billing_guarded():
    @guarded_task(
        key="invoice/{{ args.invoice }}", namespace="billing", quota=ACCOUNT, lease=6, max_call_time=15, **RETRIES
    )
    def charge(guard: GuardContext, invoice: str) -> str:
        paid = guard.call("charge", post_charge, vendor_key_as="idempotency_key", invoice=invoice)
        write_the_books(paid)
        return paid

    charge(INVOICE)


billing_plain()
billing_guarded()
