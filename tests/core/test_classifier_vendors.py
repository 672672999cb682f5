"""What the classifier says of vendors' errors, built from the real exception classes of their clients."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import psycopg
import pymysql
import pytest
import requests
import sqlalchemy.exc
import stripe
import urllib3.exceptions
from airflow.sdk.exceptions import AirflowException
from google.api_core.exceptions import DeadlineExceeded, TooManyRequests
from google.rpc import error_details_pb2
from hypothesis import given
from hypothesis import strategies as st

from airflow_runguard.core.failures import Family, Rule, classify, decide
from airflow_runguard.core.failures.book import GROUP, installed
from airflow_runguard.core.failures.families import FAMILIES, RULES
from airflow_runguard.core.failures.rule import OPEN, rate, words
from airflow_runguard.core.record import Effect, Failure, FailureClass
from tests.core import vendors as v

NOW = datetime(2026, 3, 10, 12, tzinfo=UTC)  # 1773144000
QUOTA, VALIDATION, PROCESSING = FailureClass.QUOTA, FailureClass.VALIDATION, FailureClass.PROCESSING
TIMEOUT = FailureClass.TIMEOUT


@dataclass(frozen=True)
class Means:
    """:param wait: what the vendor asks for. :param floor: the least that the floor must be."""

    failure_class: FailureClass
    pausable: bool = False
    wait: float | None = None
    floor: float = 0.0
    effect: Effect = Effect.NOT_APPLIED
    person: bool = False


PAUSE = Means(QUOTA, pausable=True)
DAY = replace(PAUSE, floor=3600)
MONEY = Means(QUOTA, person=True)
REFUSED = Means(VALIDATION, person=True)
AGAIN = Means(PROCESSING)
DOUBT = Means(PROCESSING, effect=Effect.UNKNOWN)


def wait(seconds: float, floor: float = 0.0) -> Means:
    return replace(PAUSE, wait=seconds, floor=floor)


def check(failure: Failure, means: Means) -> None:
    said = (failure.failure_class, failure.pausable, failure.effect, failure.needs_person)
    assert said == (means.failure_class, means.pausable, means.effect, means.person), failure
    assert failure.resume_after == (None if means.wait is None else pytest.approx(means.wait)), failure
    assert (failure.floor or 0.0) >= means.floor, failure


def retry_info(seconds: int, nanos: int = 0) -> Any:
    info: Any = error_details_pb2.RetryInfo()
    info.retry_delay.seconds, info.retry_delay.nanos = seconds, nanos
    return info


def google(reason: str, **more: Any) -> dict[str, Any]:
    return {"error": {"code": 403, "message": reason, "errors": [{"domain": "usageLimits", "reason": reason}], **more}}


def gemini(quota: str) -> dict[str, Any]:
    details = [
        {"@type": "type.googleapis.com/google.rpc.QuotaFailure", "violations": [{"quotaId": quota}]},
        {"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": "34.5s"},
    ]
    said = "You exceeded your current quota, please check your plan and billing details."
    return {"error": {"code": 429, "message": said, "status": "RESOURCE_EXHAUSTED", "details": details}}


def meta(code: int) -> dict[str, Any]:
    return {"error": {"message": "(#) refused", "type": "OAuthException", "code": code, "fbtrace_id": "A"}}


def salesforce(code: str, message: str) -> list[dict[str, str]]:
    return [{"message": message, "errorCode": code}]


def sqlstate(kind: Any) -> Any:
    return kind("refused")


USAGE = json.dumps({"1": [{"type": "ads_management", "call_count": 100, "estimated_time_to_regain_access": 19}]})
NOT_APPLIED = Effect.NOT_APPLIED

SHAPES: list[tuple[str, BaseException, Means]] = [
    # -- OpenAI, Azure OpenAI
    ("openai credit", v.of_openai(429, {"error": {"type": "insufficient_quota", "code": "insufficient_quota"}}), MONEY),
    ("openai rate", v.of_openai(429, {"error": {"code": "rate_limit_exceeded"}}, {"retry-after": "7"}), wait(7)),
    (
        "openai credit that forbids a retry and says when",
        v.of_openai(429, {"error": {"type": "billing_error"}}, {"x-should-retry": "false", "retry-after": "3600"}),
        MONEY,
    ),
    (
        "openai exhausted bucket",
        v.of_openai(
            429,
            {"error": {"code": "rate_limit_exceeded"}},
            {
                "x-ratelimit-remaining-requests": "0",
                "x-ratelimit-reset-requests": "1m30s",
                "x-ratelimit-remaining-tokens": "149984",
                "x-ratelimit-reset-tokens": "6ms",
            },
        ),
        wait(90),
    ),
    (
        "openai per day",
        v.of_openai(
            429, {"error": {"code": "rate_limit_exceeded", "message": "on requests per day. Try again in 7m12s."}}
        ),
        wait(432),
    ),
    ("openai deactivated", v.of_openai(403, {"error": {"code": "account_deactivated"}}), MONEY),
    ("openai only words", v.of_openai(429, {"error": {"message": "You exceeded your current quota"}}), MONEY),
    ("openai overload", v.of_openai(503, {"error": {"code": "slow_down"}}), PAUSE),
    ("openai 500", v.of_openai(500, {"error": {"type": "server_error"}}), DOUBT),
    (
        "azure prose",
        v.of_openai(429, {"error": {"code": "429", "message": "Please retry after 20 seconds."}}),
        wait(20),
    ),
    (
        "azure a day",
        v.of_openai(429, {"error": {"code": "429", "message": "retry after 86400 seconds."}}),
        wait(86_400),
    ),
    (
        "azure ms",
        v.of_openai(429, {"error": {"code": "429"}}, {"retry-after-ms": "1500", "retry-after": "2"}),
        wait(1.5),
    ),
    # -- Anthropic
    (
        "anthropic bucket",
        v.of_anthropic(
            429,
            {"type": "error", "error": {"type": "rate_limit_error"}},
            {
                "anthropic-ratelimit-requests-remaining": "0",
                "anthropic-ratelimit-requests-reset": "2026-03-10T12:00:41Z",
                "anthropic-ratelimit-tokens-remaining": "38000",
                "anthropic-ratelimit-tokens-reset": "2026-03-10T12:00:05Z",
            },
        ),
        wait(41),
    ),
    ("anthropic overload", v.of_anthropic(529, {"error": {"type": "overloaded_error"}}), PAUSE),
    (
        "anthropic overload inside a stream that had begun",
        v.of_anthropic(200, {"error": {"type": "overloaded_error"}}),
        DOUBT,
    ),
    ("anthropic size", v.of_anthropic(413, {"error": {"type": "request_too_large"}}), REFUSED),
    (
        "anthropic credit",
        v.of_anthropic(400, {"error": {"type": "invalid_request_error", "message": "Your credit balance is too low"}}),
        MONEY,
    ),
    # -- Google
    ("google user rate", v.of_google(403, google("userRateLimitExceeded")), PAUSE),
    ("google day", v.of_google(403, google("dailyLimitExceeded")), DAY),
    ("google quota", v.of_google(403, google("quotaExceeded")), DAY),
    ("google not enabled", v.of_google(403, google("accessNotConfigured")), REFUSED),
    ("google billing", v.of_google(403, google("billingNotEnabled")), MONEY),
    ("google 429", v.of_google(429, google("rateLimitExceeded")), PAUSE),
    ("google storage", v.of_google(403, google("storageQuotaExceeded")), MONEY),
    ("gemini minute", v.of_google(429, gemini("GenerateRequestsPerMinutePerProject")), wait(34.5)),
    ("gemini day", v.of_google(429, gemini("GenerateRequestsPerDayPerProject-FreeTier")), wait(34.5, floor=3600)),
    ("gemini by requests", v.http(429, gemini("GenerateRequestsPerMinutePerProject")), wait(34.5)),
    ("google grpc", v.of_grpc([retry_info(34, 500_000_000)]), wait(34.5)),
    ("google grpc no info", v.of_grpc(), PAUSE),
    ("google 429 class", TooManyRequests("m", errors=[{"reason": "rateLimitExceeded"}]), PAUSE),  # type: ignore[no-untyped-call]
    ("google deadline", v.of_grpc(kind=DeadlineExceeded), replace(DOUBT, failure_class=TIMEOUT)),
    # -- AWS
    ("aws cap", v.of_aws("LimitExceededException", metadata={"RetryAttempts": 0}), MONEY),
    ("aws service quota", v.of_aws("ServiceQuotaExceededException"), MONEY),
    ("aws instance cap", v.of_aws("VcpuLimitExceeded"), MONEY),
    ("aws kinesis list", v.of_aws("LimitExceededException", operation="ListShards"), PAUSE),
    ("aws throttle", v.of_aws("ThrottlingException"), PAUSE),
    (
        "aws throttled read after hidden retries",
        v.of_aws("Throttling", operation="DescribeStacks", metadata={"RetryAttempts": 4}),
        PAUSE,
    ),
    (
        "aws throttled write after hidden retries",
        v.of_aws("Throttling", metadata={"RetryAttempts": 4}),
        Means(QUOTA, effect=Effect.UNKNOWN),
    ),
    ("aws s3", v.of_aws("SlowDown", 503), PAUSE),
    ("aws bedrock", v.of_aws("ModelNotReadyException", 429), PAUSE),
    ("aws bedrock timeout", v.of_aws("ModelTimeoutException", 408), Means(TIMEOUT, effect=Effect.UNKNOWN)),
    ("aws denied", v.of_aws("AccessDeniedException"), REFUSED),
    ("aws ses day", v.of_aws("Throttling", message="Daily message quota exceeded."), DAY),
    ("aws ses paused", v.of_aws("AccountSendingPausedException"), MONEY),
    ("aws dynamodb", v.of_aws("ProvisionedThroughputExceededException"), PAUSE),
    (
        "aws transaction throttled",
        v.of_aws("TransactionCanceledException", CancellationReasons=[{"Code": "None"}, {"Code": "ThrottlingError"}]),
        PAUSE,
    ),
    (
        "aws transaction refused",
        v.of_aws(
            "TransactionCanceledException",
            CancellationReasons=[{"Code": "ConditionalCheckFailed"}, {"Code": "ThrottlingError"}],
        ),
        REFUSED,
    ),
    (
        "aws same token under way",
        v.of_aws("TransactionInProgressException"),
        replace(PAUSE, effect=Effect.UNKNOWN),
    ),
    # -- Stripe
    ("stripe key in use", v.of_stripe(stripe.APIError, 409, {"code": "idempotency_key_in_use"}), DOUBT),
    ("stripe lock", v.of_stripe(stripe.RateLimitError, 429, {"code": "lock_timeout"}), PAUSE),
    (
        "stripe decline",
        v.of_stripe(
            stripe.CardError, 402, {"type": "card_error", "code": "card_declined", "decline_code": "insufficient_funds"}
        ),
        REFUSED,
    ),
    ("stripe balance", v.of_stripe(stripe.APIError, 400, {"code": "balance_insufficient"}), MONEY),
    ("stripe payouts", v.of_stripe(stripe.APIError, 400, {"code": "payouts_limit_exceeded"}), DAY),
    # -- GitHub
    (
        "github primary",
        v.http(
            403,
            {"message": "API rate limit exceeded"},
            {"x-ratelimit-remaining": "0", "x-ratelimit-reset": "1773144300"},
        ),
        wait(300),
    ),
    (
        "github secondary",
        v.http(403, {"message": "You have exceeded a secondary rate limit."}),
        replace(PAUSE, floor=60),
    ),
    (
        "github forbidden",
        v.http(
            403,
            {"message": "Resource not accessible"},
            {"x-ratelimit-remaining": "9", "x-ratelimit-reset": "1773147600"},
        ),
        REFUSED,
    ),
    # -- Slack
    ("slack rate", v.of_slack(429, {"ok": False, "error": "ratelimited"}, {"Retry-After": "30"}), wait(30)),
    ("slack webhook", v.of_slack(429, {"retry_after": 1, "ok": False, "error": "rate_limited"}), wait(1)),
    ("slack channel", v.of_slack(200, {"ok": False, "error": "channel_not_found"}), REFUSED),
    ("slack broke down", v.of_slack(200, {"ok": False, "error": "fatal_error"}), DOUBT),
    # -- Salesforce
    (
        "salesforce day",
        v.of_salesforce(403, salesforce("REQUEST_LIMIT_EXCEEDED", "TotalRequests Limit exceeded.")),
        DAY,
    ),
    (
        "salesforce at once",
        v.of_salesforce(403, salesforce("REQUEST_LIMIT_EXCEEDED", "ConcurrentRequests Limit exceeded.")),
        PAUSE,
    ),
    ("salesforce off", v.of_salesforce(403, salesforce("API_DISABLED_FOR_ORG", "not enabled")), REFUSED),
    ("salesforce row", v.of_salesforce(400, salesforce("UNABLE_TO_LOCK_ROW", "unable")), AGAIN),
    ("salesforce by requests", v.http(403, salesforce("REQUEST_LIMIT_EXCEEDED", "TotalRequests Limit exceeded.")), DAY),
    # -- HubSpot, Shopify, Meta
    ("hubspot day", v.http(429, {"errorType": "RATE_LIMIT", "policyName": "DAILY"}), DAY),
    ("hubspot seconds", v.http(429, {"errorType": "RATE_LIMIT", "policyName": "TEN_SECONDLY_ROLLING"}), PAUSE),
    ("shopify rest", v.http(429, {"errors": "Exceeded 2 calls per second"}, {"Retry-After": "2.0"}), wait(2)),
    ("shopify frozen", v.http(402, {"errors": "Payment Required"}, url="https://a.myshopify.com/admin"), MONEY),
    ("meta user", v.http(400, meta(17)), PAUSE),
    ("meta business", v.http(400, meta(80_004), {"X-Business-Use-Case-Usage": USAGE}), wait(19 * 60)),
    ("meta token", v.http(401, meta(190)), REFUSED),
    ("meta unpaid", v.http(400, meta(131_042)), MONEY),
    ("meta unknown", v.http(500, meta(2)), DOUBT),
    # -- Microsoft
    ("cosmos", v.of_cosmos(429, {"x-ms-retry-after-ms": "830", "x-ms-substatus": "3200"}), wait(0.83)),
    ("graph", v.http(429, {"error": {"code": "TooManyRequests"}}, {"Retry-After": "10"}), wait(10)),
    ("graph bandwidth", v.http(509, None, {"client-request-id": "a"}), PAUSE),
    # -- Elasticsearch
    ("elastic busy", v.of_elastic(429, {"error": {"type": "es_rejected_execution_exception"}}), PAUSE),
    (
        "elastic disk",
        v.of_elastic(429, {"error": {"type": "cluster_block_exception", "reason": "disk usage exceeded flood-stage"}}),
        MONEY,
    ),
    ("elastic mapping", v.of_elastic(400, {"error": {"type": "mapper_parsing_exception"}}), REFUSED),
    ("elastic conflict", v.of_elastic(409, {"error": {"type": "version_conflict_engine_exception"}}), DOUBT),
    # -- SQL
    ("postgres unique", sqlstate(psycopg.errors.UniqueViolation), REFUSED),
    ("postgres deadlock", sqlstate(psycopg.errors.DeadlockDetected), AGAIN),
    ("postgres crowded", sqlstate(psycopg.errors.TooManyConnections), PAUSE),
    ("postgres cancelled", sqlstate(psycopg.errors.QueryCanceled), Means(TIMEOUT)),
    ("postgres shut down", sqlstate(psycopg.errors.AdminShutdown), DOUBT),
    ("postgres commit unknown", sqlstate(psycopg.errors.StatementCompletionUnknown), DOUBT),
    ("postgres lost", psycopg.OperationalError("server closed the connection unexpectedly"), DOUBT),
    ("postgres refused", psycopg.OperationalError('connection failed: connection to server at "h" failed'), AGAIN),
    ("postgres full", sqlstate(psycopg.errors.DiskFull), MONEY),
    (
        "mysql hour",
        pymysql.err.OperationalError(1226, "exceeded the 'max_questions' resource"),
        replace(PAUSE, floor=60),
    ),
    ("mysql lost", pymysql.err.OperationalError(2013, "Lost connection to MySQL server during query"), DOUBT),
    ("mysql duplicate", pymysql.err.IntegrityError(1062, "Duplicate entry"), REFUSED),
    ("mysql lock", pymysql.err.OperationalError(1205, "Lock wait timeout exceeded"), AGAIN),
    (
        "sqlalchemy around postgres",
        sqlalchemy.exc.IntegrityError("insert", {}, psycopg.errors.UniqueViolation("dup")),
        REFUSED,
    ),
    ("sqlalchemy pool", sqlalchemy.exc.TimeoutError("QueuePool limit of size 5 reached"), AGAIN),
    # -- vendors without a file
    ("openrouter", v.http(402, {"error": {"code": 402, "message": "Insufficient credits."}}), MONEY),
    ("deepseek", v.http(402, {"error": {"message": "Insufficient Balance", "code": "invalid_request_error"}}), MONEY),
    ("payer's funds by code", v.http(402, {"error": {"code": "INSUFFICIENT_FUNDS", "message": "Declined"}}), REFUSED),
    ("payer's card in words", v.http(402, {"message": "Your card has an insufficient balance."}), REFUSED),
    ("payer's balance in words", v.http(402, {"message": "Insufficient balance on the card"}), REFUSED),
    ("our credit, paid by card", v.http(402, {"message": "No credits left. Please add a credit card."}), MONEY),
    ("bare 402", v.http(402, None), REFUSED),
    ("must pay first", v.http(403, {"message": "Payment required"}), MONEY),
    ("suspended", v.http(403, {"code": "ACCOUNT_SUSPENDED"}), MONEY),
    ("monthly plan", v.http(429, {"message": "You have exceeded the MONTHLY quota for Requests"}), DAY),
    ("telegram", v.http(429, {"ok": False, "error_code": 429, "parameters": {"retry_after": 35}}), wait(35)),
    ("discord", v.http(429, {"message": "You are being rate limited.", "retry_after": 64.57}), wait(64.57)),
    ("django", v.http(429, {"detail": "Request was throttled. Expected available in 38 seconds."}), wait(38)),
    ("ietf", v.http(429, None, {"RateLimit": '"default";r=0;t=50'}), wait(50)),
    ("okta", v.http(429, None, {"X-Rate-Limit-Remaining": "0", "X-Rate-Limit-Reset": "1773144050"}), wait(50)),
    (
        "milliseconds",
        v.http(429, None, {"X-RateLimit-Remaining": "0", "X-RateLimit-Reset": "1773144012500"}),
        wait(12.5),
    ),
    (
        "unavailable and told",
        v.http(503, "maintenance", {"Retry-After": "120"}),
        Means(PROCESSING, True, 120, 0, Effect.UNKNOWN),
    ),
    ("unavailable", v.http(503, "bad gateway"), DOUBT),
    ("words on a page", v.http(404, "<p>See our rate limit policy</p>", {"Content-Type": "text/html"}), REFUSED),
    ("page", v.http(429, "<!doctype html><title>429</title>", {"Retry-After": "0.493"}), wait(0.493, floor=1)),
    # -- wrappers
    ("hook's text", AirflowException("429:Too Many Requests"), PAUSE),
    ("tenacity", v.given_up(v.http(429, None, {"Retry-After": "12"})), wait(12)),
    (
        "a printed body",
        AirflowException("Error code: 429 - {'error': {'type': 'insufficient_quota', 'code': 'insufficient_quota'}}"),
        MONEY,
    ),
    (
        "hidden read timeout",
        v.unreachable(urllib3.exceptions.ReadTimeoutError(None, "/x", "Read timed out.")),  # type: ignore[arg-type]
        Means(TIMEOUT, effect=Effect.UNKNOWN),
    ),
    (
        "a number in business text",
        ValueError("row 429: amount must be positive"),
        Means(FailureClass.UNKNOWN, effect=Effect.UNKNOWN),
    ),
]


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
