"""What the tests of the engine share: a ledger on a fresh database, and work to run through it."""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from typing import Any

import psycopg

from airflow_runguard.core import guard, keys, payloads
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Holder, Identity, Order

DEPLOYMENT = "test"


def open_ledger(url: str) -> Ledger:
    ledger = Ledger(lambda: psycopg.connect(url), deployment=DEPLOYMENT)
    ledger.check()
    return ledger


def ledger_on(connection: psycopg.Connection[Any]) -> Ledger:
    """A ledger whose connection, and so its transactions, are the test's."""
    ledger = Ledger(lambda: connection, deployment=DEPLOYMENT)
    ledger.check()
    return ledger


def identity(key: str, namespace: str = "billing") -> Identity:
    return keys.identity(DEPLOYMENT, namespace, key)


def order(key: str, payload: dict[str, Any] | None = None, **rules: Any) -> Order:
    return Order(identity=identity(key), payload=payloads.payload(payload or {"amount": 500}), **rules)


def holder(**who: Any) -> Holder:
    """A new entry: its own nonce, and a task instance of its own unless ``ti_id`` says otherwise."""
    default = {"ti_id": uuid.uuid4().hex, "dag_id": "bill", "task_id": "charge", "run_id": "r1", "try_number": 1}
    return Holder(nonce=uuid.uuid4().hex, host="testhost", pid=4711, **{**default, **who})


def work(what: Order, body: Callable[[guard.GuardContext], Any], **rules: Any) -> guard.Work:
    return guard.Work(
        order=what,
        holder=rules.pop("holder", None) or holder(),
        body=body,
        dump=lambda value: json.dumps(value).encode(),
        load=json.loads,
        **rules,
    )
