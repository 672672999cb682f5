"""Answers that are like the samples and not among them: other versions of an SDK, other cases, nothing but a class."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import opensearchpy
import pytest
from snowflake.connector import errors as snowflake_errors

from airflow_runguard.core.failures import classify
from airflow_runguard.core.record import Effect, FailureClass
from demo import vendor_errors as v
from demo.error_shapes import DAY, DOUBT, MONEY, NOW, PAUSE, REFUSED, Means, wait
from tests.core.test_classifier_vendors import check

UNKNOWN, TIMEOUT = Effect.UNKNOWN, FailureClass.TIMEOUT
AGAIN = Means(FailureClass.PROCESSING)


def of(path: str, *args: Any, base: type[Exception] = Exception, **attributes: Any) -> Exception:
    """An error of a client that is not installed here: its class by name, and what it keeps."""
    module, _, name = path.rpartition(".")
    error: Exception = type(name, (base,), {"__module__": module})(*args)
    for attribute, value in attributes.items():
        setattr(error, attribute, value)
    return error


def snowflake(number: int, message: str = "refused", kind: Any = snowflake_errors.OperationalError) -> Exception:
    error: Exception = kind(msg=message, errno=number, send_telemetry=False)
    return error


BUSY = {"error": {"type": "opensearch_rejected_execution_exception", "reason": "full"}, "status": 429}
SPENT = "250003: Failed to execute request: HTTPSConnectionPool(host='x', port=443): Read timed out."
DB_TOO_MANY = "databricks.sdk.errors.platform.TooManyRequests"

VARIANTS: list[tuple[str, BaseException, Means]] = [
    ("openai, upper-case header", v.of_openai(429, {"error": {"code": "x"}}, {"RETRY-AFTER": "3"}), wait(3)),
    ("openai, page of a gateway", v.of_openai(429, "<html>Too Many Requests</html>"), PAUSE),
    ("anthropic, body lost", v.of_anthropic(529, None), PAUSE),
    ("anthropic, page of a gateway", v.of_anthropic(502, "<html>rate_limit_error</html>"), DOUBT),
    ("google, reason in ErrorInfo", v.of_google(429, {"error": {"code": 429, "status": "RESOURCE_EXHAUSTED"}}), PAUSE),
    ("google, page", v.of_google(403, "<html>Sorry</html>"), REFUSED),
    ("aws, code with a namespace", v.of_aws("com.amazonaws.kinesis#ThrottlingException"), PAUSE),
    ("aws, code with an address", v.of_aws("ThrottlingException:http://internal.amazon.com/x"), PAUSE),
    ("stripe, headers lost", v.http(429, {"error": {"code": "rate_limit"}}, url="https://api.stripe.com/v1"), PAUSE),
    (
        "stripe, page of a gateway",
        v.http(504, "<html>429</html>", url="https://api.stripe.com"),
        replace(DOUBT, failure_class=TIMEOUT),
    ),
    ("github, class only", of("github.GithubException.RateLimitExceededException", status=403, headers=None), PAUSE),
    (
        "github, missing right",
        of("github.GithubException.GithubException", status=403, data={"message": "no"}),
        REFUSED,
    ),
    ("slack, async client", v.of_slack(429, {"ok": False, "error": "ratelimited"}, {"retry-after": "30"}), wait(30)),
    ("slack, page of a gateway", v.http(503, "<html></html>", url="https://slack.com/api/chat.postMessage"), DOUBT),
    (
        "salesforce, lower-case code",
        v.of_salesforce(403, [{"errorCode": "request_limit_exceeded", "message": "TotalRequests"}]),
        DAY,
    ),
    (
        "salesforce, its server stopped",
        v.of_salesforce(500, [{"errorCode": "REQUEST_LIMIT_EXCEEDED", "message": "x"}]),
        DOUBT,
    ),
    (
        "hubspot, SDK's exception",
        of("hubspot.crm.contacts.exceptions.ApiException", status=429, body='{"policyName": "DAILY"}'),
        DAY,
    ),
    (
        "hubspot, by seconds",
        of("hubspot.crm.contacts.exceptions.ApiException", status=429, body='{"policyName": "SECONDLY"}'),
        PAUSE,
    ),
    ("shopify, frozen", v.http(402, None, {"X-Shopify-Stage": "p"}), MONEY),
    ("shopify, upper-case header", v.http(429, None, {"RETRY-AFTER": "2.0", "X-SHOPID": "1"}), wait(2)),
    ("meta, body as text", v.http(400, '{"error": {"code": 17, "type": "OAuthException"}}'), replace(PAUSE, floor=60)),
    ("meta, broke down", v.http(500, {"error": {"code": 2, "type": "OAuthException"}}), DOUBT),
    (
        "graph, kiota",
        of(
            "msgraph.generated.models.o_data_errors.o_data_error.ODataError",
            response_status_code=429,
            response_headers={"Retry-After": "9"},
        ),
        wait(9),
    ),
    ("graph, full", of("kiota_abstractions.api_error.APIError", response_status_code=507), MONEY),
    ("snowflake, request failed", snowflake(250003, SPENT), DOUBT),
    ("snowflake, no login", snowflake(250001, kind=snowflake_errors.DatabaseError), AGAIN),
    ("snowflake, unavailable", snowflake(390503), DOUBT),
    ("snowflake, http 429", snowflake(290429, kind=snowflake_errors.HttpError), PAUSE),
    ("snowflake, too many", snowflake_errors.TooManyRequests(), PAUSE),
    ("snowflake, http 500", snowflake_errors.InternalServerError(), DOUBT),
    ("snowflake, http 503", snowflake_errors.ServiceUnavailableError(), DOUBT),
    ("snowflake, http 504", snowflake_errors.GatewayTimeoutError(), DOUBT),
    ("snowflake, older http 503", snowflake(290503, kind=snowflake_errors.HttpError), DOUBT),
    ("snowflake, syntax", snowflake(1003, kind=snowflake_errors.ProgrammingError), REFUSED),
    ("snowflake, credits", snowflake(90073, "... resource monitor M has exceeded its quota."), MONEY),
    ("snowflake, waiters", snowflake(625, kind=snowflake_errors.ProgrammingError), AGAIN),
    ("snowflake, statement timeout", snowflake(630), replace(DOUBT, failure_class=TIMEOUT)),
    ("databricks, class only", of(DB_TOO_MANY, retry_after_secs=7), wait(7)),
    (
        "databricks, deadline",
        of("databricks.sdk.errors.platform.DeadlineExceeded"),
        replace(DOUBT, failure_class=TIMEOUT),
    ),
    ("opensearch, busy", opensearchpy.TransportError(429, "x", BUSY), PAUSE),
    ("opensearch, wrong", opensearchpy.RequestError(400, "mapper_parsing_exception", {}), REFUSED),
    ("opensearch, conflict", opensearchpy.ConflictError(409, "version_conflict", {}), DOUBT),
    (
        "opensearch, no answer",
        opensearchpy.ConnectionTimeout("TIMEOUT", "x", OSError("x")),
        replace(DOUBT, failure_class=TIMEOUT),
    ),
    ("opensearch, broken off", opensearchpy.ConnectionError("N/A", "x", ConnectionResetError("x")), DOUBT),
]


@pytest.mark.parametrize(("error", "means"), [pytest.param(*variant[1:], id=variant[0]) for variant in VARIANTS])
def test_p07_a_variant_that_is_not_among_the_samples_is_read_right(error: BaseException, means: Means) -> None:
    check(classify(error, now=NOW), means)
