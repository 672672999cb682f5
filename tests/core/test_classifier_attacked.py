"""The classifier under attack: waits beyond time, money beside a word for haste, a day beside one, and conflicts."""

from __future__ import annotations

from datetime import timedelta
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_runguard.core.failures import classify
from airflow_runguard.core.failures.families import RULES
from airflow_runguard.core.failures.rule import DAY
from airflow_runguard.core.failures.waits import LONGEST
from airflow_runguard.core.record import Effect, FailureClass
from demo import vendor_errors as v
from demo.error_shapes import NOW
from tests.core.test_classifier_vendors import ALL_CODES, BUILDERS

RULE = {rule.name: rule for rule in RULES}
MONEY = sorted(RULE["http-out-of-credit"].codes | RULE["http-account-suspended"].codes)
HASTE = [
    "rate_limit_exceeded",
    "rate_limit_error",
    "requests",
    "tokens",
    "RESOURCE_EXHAUSTED",
    "ratelimited",
    "THROTTLED",
]
SENTENCES = [
    "Insufficient balance, please recharge",
    "You have no credits left",
    "Your credit balance is too low",
    "The team has used all available credits or reached its monthly spending limit",
    "Your account has been suspended",
    "payment required",
]


def refusals(code: str, kind: str, message: str) -> list[BaseException]:
    """The same answer through the clients of several vendors, which many others are asked by as well."""
    body = {"error": {"code": code, "type": kind, "message": message}}
    hurry = {"retry-after": "1", "x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "1s"}
    return [build(429, body) for build in BUILDERS[:6]] + [v.http(429, body, hurry), v.of_openai(429, body, hurry)]


@pytest.mark.parametrize("haste", HASTE)
def test_p06_no_money_cap_is_waited_for_whatever_word_for_haste_stands_beside_it(haste: str) -> None:
    coded = [error for money in MONEY for error in refusals(money, haste, "Rate limit reached, try again in 1s")]
    spoken = [error for said in SENTENCES for error in refusals(haste, haste, said)]
    for error in coded + spoken:
        failure = classify(error, now=NOW)
        assert (failure.failure_class, failure.pausable) == (FailureClass.QUOTA, False), failure
        assert failure.needs_person, failure


@pytest.mark.parametrize("haste", HASTE)
def test_p06_no_allowance_of_a_day_is_a_blip(haste: str) -> None:
    said = ["Limit of 200 requests per day reached", "Your daily quota is used up", "monthly limit exceeded"]
    body = [{"error": {"code": haste, "type": haste, "message": message}} for message in said]
    for build, answer in product(BUILDERS[:6], body):
        failure = classify(build(429, answer), now=NOW)
        assert failure.pausable
        assert failure.floor is not None
        assert failure.floor >= DAY, failure


def test_p03_no_code_of_any_vendor_settles_a_conflict() -> None:
    """A 409 may say that a limit is reached (IAM, Azure). That it was refused or rolled back no code says of it."""
    for build, code in product(BUILDERS, ALL_CODES):
        failure = classify(build(409, {"error": {"code": code, "type": code, "reason": code}}), now=NOW)
        if failure.effect is Effect.NOT_APPLIED:
            assert failure.failure_class is FailureClass.QUOTA, failure


# -- waits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("9999-12-31T23:59:59Z", LONGEST),
        ("Fri, 31 Dec 9999 23:59:59 GMT", LONGEST),
        ("0001-01-01T00:00:00+23:59", 0.0),
        ("9999-12-31T23:59:59-23:59", LONGEST),
        ("99999999999999", LONGEST),
        ("999999999d999999999h", LONGEST),
        ("1.2999999523162842", 1.2999999523162842),
        ("1.2999999523162842s", 1.2999999523162842),
        ("1e308", None),
        ("Infinity", None),
        ("-1", None),
        ("+5", None),
        ("0x10", None),
        ("1_000", None),
        ("١٢", None),
        ("１２", None),
        ("²", None),
        ("999999999999999999999", None),
        ("2026-13-45T99:99:99Z", None),
    ],
)
def test_p06_no_wait_is_negative_or_longer_than_time(value: str, seconds: float | None) -> None:
    for headers in ({"Retry-After": value}, {"x-ratelimit-remaining": "0", "x-ratelimit-reset": value}):
        failure = classify(v.http(429, None, headers), now=NOW)
        assert failure.resume_after == (None if seconds is None else pytest.approx(seconds)), failure
        assert failure.pausable
        if failure.resume_after is not None:
            assert NOW + timedelta(seconds=failure.resume_after) > NOW - timedelta(seconds=1)


HUGE = [float("nan"), float("inf"), -float("inf"), 1e308, -1e308, 1e-308, 10**400, -(10**400), 0, -5, True, None]


@pytest.mark.parametrize("asked", HUGE, ids=lambda number: str(number)[:8])
def test_p06_no_number_in_a_body_breaks_the_wait(asked: Any) -> None:
    for there in HUGE:
        waits_within_time(asked, there)


def waits_within_time(asked: Any, there: Any) -> None:
    cost = {"requestedQueryCost": asked, "throttleStatus": {"currentlyAvailable": there, "restoreRate": asked}}
    bodies: list[Any] = [
        {"errors": [{"message": "x", "extensions": {"code": "THROTTLED"}}], "extensions": {"cost": cost}},
        {"error": {"code": "rate_limit_exceeded", "retry_after": asked, "retry_after_ms": there}},
    ]
    errors = [v.of_openai(429, None), v.of_openai(429, None)]
    for error, body in zip(errors, bodies, strict=True):
        error.body = body
    delay = SimpleNamespace(seconds=asked, nanos=there)
    errors += [v.of_grpc([SimpleNamespace(retry_delay=delay)]), v.of_openai(429, None)]
    errors[-1].retry_after_secs = asked
    for error in errors:
        failure = classify(error, now=NOW)
        assert (failure.failure_class, failure.pausable) == (FailureClass.QUOTA, True), failure
        assert failure.resume_after is None or 0 <= failure.resume_after <= LONGEST, failure


numbers = st.text(alphabet="0123456789.:-+eEdhmsnuZTµ ٣", max_size=24)


@given(
    st.sampled_from(["Retry-After", "retry-after-ms", "x-ratelimit-reset", "RateLimit", "Date", "x-ms-retry-after-ms"]),
    numbers | st.text(max_size=12) | st.floats().map(str) | st.integers().map(str) | st.datetimes().map(str),
    numbers,
)
def test_p06_no_header_waits_backwards_or_for_ever(name: str, value: str, date: str) -> None:
    error = v.http(429)
    error.response.headers = {name: value, "date": date, "x-ratelimit-remaining": "0"}
    failure = classify(error, now=NOW)
    assert failure.pausable, failure
    assert failure.resume_after is None or 0 <= failure.resume_after <= LONGEST, failure
