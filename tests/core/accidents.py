"""What the tests that hurt the guard share: paid calls at the fake vendor, attempts, and waiting with a deadline."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, closing, nullcontext
from http.client import HTTPConnection
from io import BytesIO
from typing import Any, TypeVar
from urllib.error import HTTPError
from urllib.parse import urlsplit

from airflow_runguard.core import guard
from airflow_runguard.core.errors import NotApplied
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Order, Record
from airflow_runguard.core.resp import Redis
from demo.vendor_control import VendorControl
from tests.core.engine import open_ledger, work

T = TypeVar("T")

DEADLINE = 30.0
"""Seconds after which a wait has failed."""


def charge(url: str, customer: str, key: str, timeout: float = 60.0) -> str:
    """One paid request, without any retry of its own. Returns the charge's id.

    On a connection of its own, without a pool: an alarm in the main thread would leave a pool's lock locked for ever.
    """
    parts = urlsplit(url)
    with closing(HTTPConnection(parts.hostname or "", parts.port, timeout=timeout)) as connection:
        headers = {"Idempotency-Key": key, "Content-Type": "application/json"}
        connection.request("POST", "/charges", json.dumps({"customer": customer}), headers)
        with connection.getresponse() as answer:
            said = answer.read()
    if answer.status >= 400:
        raise HTTPError(f"{url}/charges", answer.status, answer.reason, answer.headers, BytesIO(said))
    return str(json.loads(said)["id"])


def look_up(vendor: VendorControl, customer: str) -> guard.Applied | NotApplied:
    """What the vendor's own look-up says, as a reconcile function or a person uses it."""
    found = vendor.find(customer=customer)
    return guard.Applied(found[0]["id"]) if found else NotApplied("the vendor has no such charge")


def attempt(
    url: str, order: Order, body: Callable[[guard.GuardContext], Any], *, redis_url: str | None = None, **rules: Any
) -> guard.How:
    """One try of the work on connections of its own, as another process would make it."""
    with closing(open_ledger(url)) as ledger, redis_of(redis_url) as client:
        return guard.run(ledger, guard.ready(ledger, client), work(order, body, **rules))


def redis_of(url: str | None) -> AbstractContextManager[Any]:
    """A client of its own; ``None`` where there is no Redis."""
    return closing(Redis.from_url(url)) if url else nullcontext()


def record_of(ledger: Ledger, order: Order) -> Record:
    record = ledger.get(order.identity)
    assert record is not None
    assert record.broken == ""
    return record


def until(ask: Callable[[], T], met: Callable[[T], bool] = bool, *, what: str = "") -> T:
    """Ask again and again until the answer is as wanted."""
    deadline = time.monotonic() + DEADLINE
    while not met(answer := ask()):
        assert time.monotonic() < deadline, f"waited {DEADLINE:g} s in vain {what}; last: {answer}"
        time.sleep(0.05)
    return answer
