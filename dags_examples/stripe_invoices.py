"""Invoices paid at Stripe: each once, whatever is killed or cleared, also where its answer was lost.

Stripe remembers an idempotency key for 24 hours, so within that time repeating is safe and nobody has to be asked. The
client's own retries are off: the guard counts what left. Reads ``STRIPE_API_KEY``, and ``STRIPE_API_BASE`` for a mock.
"""

import os
from datetime import timedelta

import pendulum
import stripe
from airflow.sdk import dag, task

from airflow_runguard import ItemContext, guarded_batch_task


@dag(
    schedule=None,
    start_date=pendulum.datetime(2026, 1, 1, tz="UTC"),
    catchup=False,
    params={"invoices": ["in_1", "in_2", "in_3"]},
)
def stripe_invoices():
    @task
    def due(params: dict | None = None) -> list[dict]:
        return [{"id": invoice} for invoice in (params or {})["invoices"]]

    @guarded_batch_task(
        key="stripe-invoices/2026-10",
        item_key="id",
        quota="stripe",
        concurrency=4,
        on_doubt="replay",
        key_lifetime=timedelta(hours=23),
        retries=3,
        retry_delay=timedelta(minutes=1),
    )
    def pay(guard: ItemContext, invoice: dict) -> str:
        client = stripe.StripeClient(
            os.environ["STRIPE_API_KEY"],
            base_addresses={"api": os.environ.get("STRIPE_API_BASE", "https://api.stripe.com")},
            max_network_retries=0,
        )
        return client.v1.invoices.pay(invoice["id"], options={"idempotency_key": guard.idempotency_key}).id

    pay(due())


stripe_invoices()
