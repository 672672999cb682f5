"""What the tests of the pages look at: work of a task instance that is mapped, and of one that is not."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal

from airflow.sdk import dag

from airflow_runguard import GuardContext, guarded_task


@dag(schedule=None, start_date=datetime(2026, 1, 1, tzinfo=UTC))
def paging():
    @guarded_task(key="single/{{ run_id }}", namespace="paging", amount=lambda args: Decimal("12.50"), currency="EUR")
    def single(guard: GuardContext) -> str:
        return guard.call("charge", lambda: "ch_single")

    @guarded_task(key="mapped/{{ run_id }}/{{ args.customer }}", namespace="paging")
    def mapped(guard: GuardContext, customer: str) -> str:
        return guard.call("charge", lambda: f"ch_{customer}")

    single() >> mapped.expand(customer=["anna", "bert"])


paging()
