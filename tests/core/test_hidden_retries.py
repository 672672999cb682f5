"""A client that repeats requests inside one call is told of in the task's log, where anything tells of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import requests
import tenacity
from requests.adapters import HTTPAdapter
from urllib3.util import Retry

from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import State
from demo.vendor import Vendor
from demo.vendor_control import VendorControl
from tests.core import engine
from tests.core.accidents import attempt, record_of


def post(url: str, retries: int = 0) -> requests.Response:
    """What a session that was told to repeat does, and a function that gives back its whole answer."""
    again = Retry(retries, status_forcelist=[503], allowed_methods=None, backoff_factor=0, raise_on_status=False)
    with requests.Session() as session:
        session.mount("http://", HTTPAdapter(max_retries=again))
        answer = session.post(f"{url}/charges", json={"customer": "cust", "amount": 1}, timeout=30)
    answer.raise_for_status()
    return answer


def decorated(url: str) -> Any:
    return tenacity.retry(stop=tenacity.stop_after_attempt(2))(post)(url)


WARNED = "More than one request left inside call"
ONE_BEFORE = "a request before it was answered with HTTP 503"


@pytest.mark.parametrize(
    ("make", "refused", "said", "state"),
    [
        (lambda url: post(url, 3), 1, ONE_BEFORE, State.DONE),
        (lambda url: post(url, 1), 2, ONE_BEFORE, State.IN_DOUBT),
        (decorated, 2, "tenacity made 1 hidden retry", State.IN_DOUBT),
        (lambda url: post(url), 1, "", State.IN_DOUBT),
        (lambda url: post(url), 0, "", State.DONE),
    ],
    ids=["an answer after a retry", "an error after a retry", "tenacity", "one error", "one answer"],
)
@pytest.mark.parametrize("calls", ["explicit", "body"])
def test_p03_requests_that_a_client_repeats_by_itself_are_warned_of(
    ledger_url: str,
    ledger: Ledger,
    vendor: Vendor,
    vendor_control: VendorControl,
    caplog: pytest.LogCaptureFixture,
    calls: str,
    make: Callable[[str], Any],
    refused: int,
    said: str,
    state: State,
) -> None:
    for _ in range(refused):
        vendor_control.script("status", status=503, charged=False)
    what = engine.order("k", calls=calls)
    body = (lambda _: make(vendor.url)) if calls == "body" else (lambda guard: guard.call("pay", make, vendor.url))
    attempt(ledger_url, what, lambda guard: body(guard) and "paid", single_request=calls == "body")
    assert record_of(ledger, what).state is state
    warned = [record.getMessage() for record in caplog.records if WARNED in record.getMessage()]
    if calls == "body" and state is State.DONE:  # what a body returns is the author's own: only an error tells of it
        assert not warned
        return
    assert len(warned) == bool(said)
    if said:
        assert warned[0].startswith(f"{WARNED} {'body' if calls == 'body' else 'pay'!r}: ")
        assert said in warned[0]
