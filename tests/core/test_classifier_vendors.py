"""What the classifier says of vendors' errors, built from the real exception classes of their clients."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import requests
import stripe
from hypothesis import given
from hypothesis import strategies as st

from airflow_runguard.core.failures import Family, Rule, classify, decide
from airflow_runguard.core.failures.book import GROUP, installed
from airflow_runguard.core.failures.families import FAMILIES, RULES
from airflow_runguard.core.failures.rule import OPEN, rate, words
from airflow_runguard.core.record import Effect, Failure
from demo import vendor_errors as v
from demo.error_shapes import NOT_APPLIED, NOW, PAUSE, QUOTA, REFUSED, SHAPES, Means


def check(failure: Failure, means: Means) -> None:
    said = (failure.failure_class, failure.pausable, failure.effect, failure.needs_person)
    assert said == (means.failure_class, means.pausable, means.effect, means.person), failure
    assert failure.resume_after == (None if means.wait is None else pytest.approx(means.wait)), failure
    assert (failure.floor or 0.0) >= means.floor, failure


@pytest.mark.parametrize(("error", "means"), [pytest.param(*shape[1:], id=shape[0]) for shape in SHAPES])
def test_p07_vendors_errors_mean_what_their_manuals_say(error: BaseException, means: Means) -> None:
    check(classify(error, now=NOW), means)


def test_p07_a_read_that_fails_has_no_effect_whoever_the_vendor_is() -> None:
    for name, error, _ in SHAPES:
        assert classify(error, effect_kind="read", now=NOW).effect is NOT_APPLIED, name


# -- waits -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "seconds"),
    [
        ("12", 12.0),
        ("0.493", 0.493),
        ("1m30s", 90.0),
        ("6m0s", 360.0),
        ("7.66s", 7.66),
        ("76ms", 0.076),
        ("2m59.56s", 179.56),
        ("1h0m0s", 3600.0),
        ("0s", 0.0),
        ("250us", 0.00025),
        ("1773144041", 41.0),
        ("1773144041500", 41.5),
        ("2026-03-10T12:00:41Z", 41.0),
        ("2026-03-10T13:00:41+01:00", 41.0),
        ("Tue, 10 Mar 2026 12:02:30 GMT", 150.0),
        ("Tue, 10 Mar 2026 11:00:00 GMT", 0.0),
        ("1773140000", 0.0),
        ("-5", None),
        ("", None),
        ("soon", None),
        ("1e9", None),
        ("nan", None),
    ],
)
def test_p06_every_way_to_say_when_is_read(value: str, seconds: float | None) -> None:
    failure = classify(v.http(429, None, {"Retry-After": value}), now=NOW)
    assert failure.resume_after == (None if seconds is None else pytest.approx(seconds, abs=1e-6))
    assert failure.pausable
    assert failure.floor == 1.0


def test_p06_a_date_counts_against_the_responses_own_clock() -> None:
    late = {"Retry-After": "Tue, 10 Mar 2026 12:12:30 GMT", "Date": "Tue, 10 Mar 2026 12:10:00 GMT"}
    assert classify(v.http(429, None, late), now=NOW).resume_after == 150.0


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"x-ratelimit-remaining-requests": "0", "x-ratelimit-reset-requests": "12s"}, 12.0),
        (
            {
                "x-ratelimit-remaining-requests": "0",
                "x-ratelimit-reset-requests": "12s",
                "x-ratelimit-remaining-tokens": "0",
                "x-ratelimit-reset-tokens": "6m0s",
            },
            360.0,
        ),
        ({"x-ratelimit-remaining-tokens": "-1", "x-ratelimit-reset-tokens": "0"}, None),
        ({"x-ratelimit-remaining": "7", "x-ratelimit-reset": "1773147600"}, None),
        ({"x-ratelimit-reset": "1773144012"}, 12.0),
        ({"ratelimit-remaining": "0", "ratelimit-reset": "42"}, 42.0),
    ],
)
def test_p06_the_exhausted_bucket_decides(headers: dict[str, str], seconds: float | None) -> None:
    assert classify(v.http(429, None, headers), now=NOW).resume_after == seconds


def test_p06_a_header_beats_the_body_and_the_body_beats_the_prose() -> None:
    body = {"error": {"message": "Please retry after 20 seconds.", "retry_after": 30}}
    assert classify(v.http(429, body, {"Retry-After": "10"}), now=NOW).resume_after == 10.0
    assert classify(v.http(429, body), now=NOW).resume_after == 30.0


def test_p06_a_wait_of_years_is_said_and_not_taken_for_granted() -> None:
    failure = classify(v.http(429, None, {"Retry-After": "99999999"}), now=NOW)
    assert (failure.pausable, failure.resume_after) == (True, 99_999_999.0)
    assert "1,157 days" in failure.evidence


# -- rules -------------------------------------------------------------------------------------------------------------


def test_p07_a_vendor_is_ten_lines() -> None:
    acme = Family(
        "Acme",
        "https://acme.example/errors",
        hosts=("api.acme.example",),
        rules=(rate("acme-busy", "the anvil is hot", codes=words("anvil_hot"), floor=30.0),),
    )
    error = v.http(400, {"error": "anvil_hot"}, url="https://api.acme.example/v1")
    check(classify(error, rules=[acme], now=NOW), replace(PAUSE, floor=30))
    check(classify(error, now=NOW), REFUSED)
    elsewhere = v.http(400, {"error": "anvil_hot"})
    check(classify(elsewhere, rules=[acme], now=NOW), REFUSED)
    loose = Rule("mine", "wait", QUOTA, NOT_APPLIED, codes=words("anvil_hot"), pausable=True)
    decision = decide(elsewhere, rules=(loose,), now=NOW)
    assert (decision.failure.pausable, decision.rule and decision.rule.name) == (True, "mine")


class Entry:
    """An installed package's entry point."""

    def __init__(self, value: Any) -> None:
        self.name, self.value, self.given = "mine", "package:rules", value

    def load(self) -> Any:
        if isinstance(self.given, Exception):
            raise self.given
        return self.given


@pytest.mark.parametrize("as_list", [True, False])
def test_p07_installed_packages_bring_rules_along(as_list: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rule = Rule("acme", "wait", QUOTA, NOT_APPLIED, source="https://acme.example", codes=words("anvil"), pausable=True)
    with_entries(monkeypatch, [Entry([rule] if as_list else rule)])
    check(classify(v.http(400, {"code": "anvil"}), now=NOW), PAUSE)


def test_p07_rules_that_cannot_be_loaded_are_left_out_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_entries(monkeypatch, [Entry(ImportError("no such module"))])
    with caplog.at_level(logging.ERROR):
        check(classify(v.http(429), now=NOW), PAUSE)
    assert "left out" in caplog.text


def with_entries(monkeypatch: pytest.MonkeyPatch, entries: list[Entry]) -> None:
    def entry_points(*, group: str) -> list[Entry]:
        assert group == GROUP
        return entries

    monkeypatch.setattr("airflow_runguard.core.failures.book.entry_points", entry_points)
    installed.cache_clear()


@pytest.fixture(autouse=True)
def forget_installed() -> Any:
    yield
    installed.cache_clear()


def test_p07_every_family_says_how_it_is_told_and_where_it_comes_from() -> None:
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    assert FAMILIES[-1].is_general
    for family in FAMILIES:
        assert family.source.startswith("https://"), family.name
        assert family.rules, family.name


# -- laws --------------------------------------------------------------------------------------------------------------

ALL_CODES = sorted(frozenset().union(*(rule.codes | rule.also for rule in RULES)))
BUILDERS: list[Callable[[int, Any], BaseException]] = [
    lambda status, body: v.http(status, body),
    lambda status, body: v.of_openai(status, body),
    lambda status, body: v.of_anthropic(status, body),
    lambda status, body: v.of_google(status, body),
    lambda status, body: v.of_elastic(status, body),
    lambda status, body: v.of_stripe(stripe.APIError, status, body["error"]),
    lambda status, body: v.of_aws(body["error"]["code"], status),
]


@given(
    st.sampled_from(BUILDERS),
    st.sampled_from(sorted(OPEN)),
    st.sampled_from(ALL_CODES),
    st.sampled_from(
        ["", "rate limit exceeded", "daily limit", "credit balance is too low", "exceeded your current quota"]
    ),
)
def test_p03_no_code_and_no_sentence_takes_the_doubt_from_a_status_that_leaves_it_open(
    build: Callable[[int, Any], BaseException], status: int, code: str, message: str
) -> None:
    body = {"error": {"code": code, "type": code, "reason": code, "message": message}}
    failure = classify(build(status, body), now=NOW)
    assert failure.effect is Effect.UNKNOWN, failure
    assert not failure.needs_person


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["error", "errors", "code", "details", "message", "type", "extensions", "cost"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@given(st.sampled_from(BUILDERS[:5]), st.integers(100, 599), json_values)
def test_p07_no_body_makes_it_raise_or_wait_backwards(
    build: Callable[[int, Any], BaseException], status: int, body: Any
) -> None:
    failure = classify(build(status, body), now=NOW)
    assert failure.resume_after is None or failure.resume_after >= 0
    if failure.pausable:
        assert (failure.floor or 0) >= 1.0
    if failure.needs_person or failure.final:
        assert failure.effect is NOT_APPLIED
    assert "while reading it" not in failure.evidence


def test_p07_a_huge_body_is_left_alone() -> None:
    body = b'{"error": {"code": "insufficient_quota"}, "pad": "' + b"x" * 2_000_000 + b'"}'
    check(classify(v.http(429, body), now=NOW), PAUSE)


def test_p07_a_body_that_was_not_read_stays_unread() -> None:
    class Stream:
        def read(self, *_: object) -> bytes:
            raise AssertionError("the classifier read from the network")

    error = v.http(429)
    error.response._content = False
    error.response.raw = Stream()
    check(classify(error, now=NOW), PAUSE)
    assert isinstance(error, requests.HTTPError)
