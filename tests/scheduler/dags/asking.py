"""What the scheduler tests of doubt, quota and freezes run: one guarded charge a run, on an invoice of its own."""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta

import requests
from airflow.sdk import dag, get_current_context
from airflow.sdk.execution_time import hitl

from airflow_runguard import GuardContext, ItemContext, Succeeded, guarded_batch_task, guarded_task

VENDOR = os.environ["RUNGUARD_VENDOR_URL"]
INVOICE = "{{ dag_run.conf['invoice'] }}"

QUOTA = "wall/{{ args.invoice }}"

rules = {"namespace": "asking", "lease": 6, "max_call_time": 6, "retry_delay": timedelta(seconds=5)}
together = {
    "schedule": None,
    "start_date": datetime(2026, 1, 1, tzinfo=UTC),
    "max_active_runs": 32,
    "max_active_tasks": 32,
}
alone = dag(**together)


def post_charge(invoice: str, idempotency_key: str | None = None) -> str:
    context = get_current_context()
    answer = requests.post(
        f"{VENDOR}/charges",
        json={"customer": f"{context['dag'].dag_id}/{invoice}", "amount": 4200, "currency": "eur"},
        headers={"Idempotency-Key": idempotency_key or ""},
        timeout=(context["dag_run"].conf or {}).get("patience", 200),
    )
    answer.raise_for_status()
    return answer.json()["id"]


def charge_it(guard: GuardContext, invoice: str) -> str:
    return guard.call("charge", post_charge, vendor_key_as="idempotency_key", invoice=invoice)


def guarded(body=charge_it, **options):
    return guarded_task(task_id="charge", key="invoice/{{ args.invoice }}", **rules, **options)(body)


def answer_at_once(context):
    """In the first try, a person answers after the form is there and before its task is parked."""
    upsert, ti, api = hitl.upsert_hitl_detail, context["ti"], os.environ["AIRFLOW__API__BASE_URL"]

    def upsert_and_answer(ti_id, **form):
        upsert(ti_id=ti_id, **form)
        login = {"username": "admin", "password": "admin"}
        token = requests.post(f"{api}/auth/token", json=login, timeout=60).json()["access_token"]
        answered = requests.patch(
            f"{api}/api/v2/dags/{ti.dag_id}/dagRuns/{ti.run_id}/taskInstances/{ti.task_id}/-1/hitlDetails",
            json={"chosen_options": ["it happened"], "params_input": {"result": '"seen at once"'}},
            headers={"Authorization": f"Bearer {token}"},
            timeout=60,
        )
        answered.raise_for_status()

    if ti.try_number == 1:
        hitl.upsert_hitl_detail = upsert_and_answer


def book_it(guard: GuardContext, invoice: str) -> str:
    def book(connection, invoice: str) -> str:
        connection.execute("insert into booked values (%s)", [invoice])
        return post_charge(invoice)  # only so that the test can hold it inside its transaction

    return guard.sql("book", "shop_db", book, invoice)


def submit_it(guard: GuardContext, invoice: str) -> str:
    return guard.submit("charge", post_charge, Succeeded, invoice, poll=1)


@alone
def asking():
    guarded(retries=1)(INVOICE)


@alone
def asking_briefly():
    guarded(retries=0, ask_timeout=8)(INVOICE)


@alone
def under_quota():
    guarded(retries=0, quota=QUOTA)(INVOICE)


@alone
def under_quota_in_a_pool():
    guarded(retries=0, quota=QUOTA, pool="narrow")(INVOICE)


@alone
def under_quota_one_at_a_time():
    guarded(retries=0, quota=QUOTA, max_active_tis_per_dag=1)(INVOICE)


@dag(**together, dagrun_timeout=timedelta(seconds=90))
def under_quota_with_a_timeout():
    guarded(retries=0, quota=QUOTA)(INVOICE)


@alone
def answered_at_once():
    guarded(retries=1, pre_execute=answer_at_once)(INVOICE)


@alone
def booking():
    guarded(book_it, retries=0)(INVOICE)


@alone
def submitting():
    guarded(submit_it, retries=1)(INVOICE)


@alone
def asking_in_a_batch():
    @guarded_batch_task(
        task_id="charge", key=f"invoice/{INVOICE}", item_key="id", concurrency=3, quota="wall/batch", retries=9, **rules
    )
    def charge(guard: ItemContext, item: dict) -> str:
        return post_charge(item["id"], guard.idempotency_key)

    charge([{"id": f"item-{number}"} for number in range(12)])


def tell_when_stopped(context):
    """The vendor hears when the task was told to stop, so that a test need not guess when that was."""
    stop, invoice = context["task"].on_kill, context["dag_run"].conf["invoice"]

    def stop_and_tell():
        stop()
        post_charge(f"told/{invoice}")

    context["task"].on_kill = stop_and_tell


@alone
def interrupted():
    @guarded_batch_task(
        task_id="charge",
        key=f"invoice/{INVOICE}",
        item_key="id",
        concurrency=3,
        retries=9,
        execution_timeout=timedelta(hours=1),  # the test strikes its alarm when it has seen enough
        pre_execute=tell_when_stopped,
        **rules,
    )
    def charge(guard: ItemContext, item: dict) -> str:
        return post_charge(item["id"], guard.idempotency_key)

    charge([{"id": f"{INVOICE}/{number}"} for number in range(8)])


asking()
asking_briefly()
under_quota()
under_quota_in_a_pool()
under_quota_one_at_a_time()
under_quota_with_a_timeout()
answered_at_once()
booking()
submitting()
asking_in_a_batch()
interrupted()
