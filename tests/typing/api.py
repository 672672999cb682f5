"""How the public names are used: type-checked by mypy and pyright, never run."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import XComArg

from airflow_runguard import (
    Applied,
    BatchResults,
    Doubt,
    Guard,
    GuardContext,
    GuardedPythonOperator,
    ItemContext,
    NotApplied,
    Previous,
    PreviousRunSensor,
    Series,
    StillUnknown,
    current_guard,
    guarded,
    guarded_batch_task,
    guarded_task,
    ledger_callbacks,
)


def send(amount: int, *, key: str = "") -> dict[str, str]:
    return {"id": str(amount)}


async def send_async(amount: int) -> list[int]:
    return [amount]


def find(doubt: Doubt) -> Applied | NotApplied | StillUnknown:
    if doubt.vendor_key:
        return Applied({"id": doubt.call.name})
    return NotApplied() if doubt.record.error else StillUnknown("no answer")


@guarded_task(key="invoice/{{ args.invoice.id }}", namespace="billing")
def charge(guard: GuardContext, invoice: dict[str, Any]) -> str:
    created: dict[str, str] = guard.call("charge", send, vendor_key_as="key", amount=5)
    return created["id"]


@guarded_task
async def charge_async(guard: GuardContext, amount: int, times: int = 1) -> int:
    numbers: list[int] = await guard.acall("charge", send_async, amount)
    return sum(numbers) * times


@guarded_task(
    on_doubt=find, lease=timedelta(seconds=60), max_claims=3, retries=2, retry_delay=timedelta(minutes=1), pool="vendor"
)
def one_body(amount: int) -> str:
    return send(amount)["id"]


@guarded_task(key=lambda args: f"invoice/{args.amount}", payload=["amount"], on_doubt="replay", on_busy="fail")
def by_function(guard: GuardContext, amount: int) -> None:
    current_guard().call("charge", send, amount)


# As the DAG author writes it: without the guard.
first: XComArg = charge({"id": 1})
second: XComArg = charge_async(5, times=2)
third: XComArg = one_body(amount=5)
by_function(5)

settings = Guard(key="k", store_result="digest", single_request=True, depth="lease", key_lifetime=3600)
guarded(BashOperator)(task_id="t", bash_command="x", guard=settings)
GuardedPythonOperator(task_id="t", python_callable=send, op_args=[5], guard=settings)


@guarded_task(series=Series(name="payout", order="{{ ds }}"), wait_for_previous=Previous(min_gap=60, on_failed="skip"))
def in_series(guard: GuardContext, amount: int) -> None:
    guard.call("charge", send, amount)


PreviousRunSensor(
    task_id="s", series="payout", min_gap=timedelta(hours=1), on_previous_failed="fail", mode="reschedule"
)
BashOperator(task_id="t", bash_command="x", **ledger_callbacks(key="export/{{ ds }}"))


@guarded_batch_task(key="invoices", item_key="id", concurrency=4, accept=bool, on_doubt=find, retries=2)
def charge_each(guard: ItemContext, invoice: dict[str, Any], currency: str = "eur") -> str:
    return send(invoice["cents"], key=guard.idempotency_key)["id"] + currency


@guarded_batch_task(item_key=lambda item: item.id, bulk=50, allow_partial=True)
async def charge_many(invoices: dict[str, Any]) -> dict[str, Any]:
    return dict.fromkeys(invoices, await send_async(1))


fourth: XComArg = charge_each([{"id": 1}], currency="chf")
fifth: XComArg = charge_many(lambda: iter(range(5)))
for item_key, result in BatchResults({}):
    item_key.upper(), result
