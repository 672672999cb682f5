"""Results that look like a success and are none (P9)."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from anthropic.types.messages import MessageBatchIndividualResponse
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_runguard.core.failures import classify_result, found, hidden_retries
from airflow_runguard.core.failures.families import FAMILIES
from airflow_runguard.core.record import Effect, FailureClass
from demo import vendor_errors as v
from demo.error_shapes import AGAIN, DAY, DOUBT, MONEY, NOW, PAUSE, REFUSED, Means, wait
from tests.core.test_classifier_vendors import check

QUOTA, UNKNOWN = FailureClass.QUOTA, Effect.UNKNOWN


def throttled(asked: int, most: int, there: int) -> dict[str, Any]:
    status = {"maximumAvailable": most, "currentlyAvailable": there, "restoreRate": 50}
    return {
        "errors": [{"message": "Throttled", "extensions": {"code": "THROTTLED"}}],
        "extensions": {"cost": {"requestedQueryCost": asked, "throttleStatus": status}},
    }


STORED = {"index": {"_id": "a", "status": 201}}
BUSY = {"index": {"_id": "b", "status": 429, "error": {"type": "es_rejected_execution_exception"}}}
WRONG = {"index": {"_id": "c", "status": 400, "error": {"type": "mapper_parsing_exception"}}}
PART = replace(PAUSE, effect=UNKNOWN)
OPEN: dict[str, Any] = {"pausable": False, "effect": UNKNOWN}
GITHUB = {"errors": [{"type": "RATE_LIMITED", "message": "x"}]}
UNDER_WAY = replace(REFUSED, effect=UNKNOWN, person=False)
ALL_BUSY = {"FailedRecordCount": 1, "Records": [{"ErrorCode": "ProvisionedThroughputExceededException"}]}


def openai_line(status: int, error: Any = None, code: str = "x") -> dict[str, Any]:
    response = {"status_code": status, "request_id": "r", "body": {"error": {"code": code, "message": "x"}}}
    return {"id": "b", "custom_id": "a", "response": response if status else None, "error": error}


def anthropic_line(kind: str, error: str = "") -> dict[str, Any]:
    told = {"error": {"type": "error", "error": {"type": error, "message": "x"}}} if error else {}
    return {"custom_id": "a", "result": {"type": kind, **told}}


def meta_item(status: int, code: int = 100) -> dict[str, Any]:
    body = {"error": {"message": "x", "type": "OAuthException", "code": code}} if status >= 400 else {"id": "1"}
    return {"code": status, "headers": [{"name": "Content-Type", "value": "text/javascript"}], "body": json.dumps(body)}


def bigquery(*reasons: str) -> list[dict[str, Any]]:
    return [{"index": n, "errors": [{"reason": reason, "location": "a"}]} for n, reason in enumerate(reasons)]


def google_ads(*results: dict[str, str]) -> dict[str, Any]:
    details = [{"@type": "GoogleAdsFailure", "errors": [{"errorCode": {"fieldError": "REQUIRED"}, "message": "x"}]}]
    return {"results": list(results), "partialFailureError": {"code": 3, "message": "x", "details": details}}


HUBSPOT_ERROR = {"status": "error", "category": "VALIDATION_ERROR", "message": "x", "context": {"ids": ["1"]}}
OPENAI_OVER = {"code": "batch_expired", "message": "This request could not be executed before the window expired."}


class HubSpotBatch:
    """As the OpenAPI generator makes models: attributes, and a list of their names on the class."""

    openapi_types: ClassVar[dict[str, str]] = {
        "status": "str",
        "results": "list",
        "num_errors": "int",
        "errors": "list",
    }

    def __init__(self, errors: int) -> None:
        self.status, self.results, self.num_errors, self.errors = "COMPLETE", [], errors, None


class GoogleAdsResponse:
    """A message whose error is there in every answer, empty in most."""

    def __init__(self, code: int) -> None:
        self.results, self.partial_failure_error = [], SimpleNamespace(code=code, message="x", details=[])


SOAP = "<s:Envelope xmlns:s='x'><s:Body><s:Fault><faultcode>s:Server</faultcode></s:Fault></s:Body></s:Envelope>"
SES = {"Status": "ACCOUNT_DAILY_QUOTA_EXCEEDED", "Error": "x"}

FAULTS: list[tuple[str, Any, Means]] = [
    # -- batches of models
    ("openai line expired", openai_line(0, OPENAI_OVER), AGAIN),
    ("openai line expired and more", {**openai_line(0, OPENAI_OVER), "charge": "ch_1"}, DOUBT),
    ("openai line error", openai_line(0, {"code": "server_error", "message": "x"}), DOUBT),
    ("openai line refused", openai_line(400), REFUSED),
    ("openai line busy", openai_line(429, code="rate_limit_exceeded"), PAUSE),
    ("openai line out of credit", openai_line(429, code="insufficient_quota"), MONEY),
    ("openai line broke down", openai_line(500), DOUBT),
    ("openai lines", [{**openai_line(200), "error": None}, openai_line(400)], UNDER_WAY),
    ("openai lines as text", "\n".join(json.dumps(openai_line(status)) for status in (200, 429)), PART),
    ("anthropic line expired", anthropic_line("expired"), AGAIN),
    ("anthropic line cancelled", anthropic_line("canceled"), REFUSED),
    ("anthropic line refused", anthropic_line("errored", "invalid_request_error"), REFUSED),
    ("anthropic line out of credit", anthropic_line("errored", "billing_error"), MONEY),
    ("anthropic line busy", anthropic_line("errored", "overloaded_error"), PAUSE),
    ("anthropic line broke down", anthropic_line("errored", "api_error"), AGAIN),
    ("anthropic line and more", {**anthropic_line("expired"), "id": "ch_1"}, DOUBT),
    (
        "anthropic line of its client",
        MessageBatchIndividualResponse.model_validate(anthropic_line("errored", "invalid_request_error")),
        REFUSED,
    ),
    # -- batches of others
    ("meta refused", [meta_item(400)], REFUSED),
    ("meta busy", [meta_item(400, 17)], PAUSE),
    ("meta broke down", [meta_item(500, 2)], DOUBT),
    ("meta part", [meta_item(200), meta_item(400)], UNDER_WAY),
    ("meta left out", [meta_item(200), None], DOUBT),
    ("meta item", meta_item(403, 10), REFUSED),
    ("bigquery stopped", {"kind": "bigquery#x", "insertErrors": bigquery("invalid", "stopped")}, REFUSED),
    ("bigquery perhaps others", {"insertErrors": bigquery("invalid")}, UNDER_WAY),
    ("bigquery rows", bigquery("invalid", "stopped"), REFUSED),
    ("bigquery rows and more", {"insertErrors": bigquery("invalid", "stopped"), "id": 1}, UNDER_WAY),
    ("google ads part", google_ads({}, {"resourceName": "customers/1"}), UNDER_WAY),
    ("google ads all", google_ads({}), UNDER_WAY),
    ("google ads message", GoogleAdsResponse(3), UNDER_WAY),
    (
        "hubspot part",
        {"status": "COMPLETE", "numErrors": 1, "results": [{"id": "1"}], "errors": [HUBSPOT_ERROR]},
        UNDER_WAY,
    ),
    ("hubspot's client", HubSpotBatch(1), DOUBT),
    ("salesforce bulk", [{"numberRecordsFailed": 1, "numberRecordsProcessed": 2, "job_id": "7"}], DOUBT),
    ("ses", {"BulkEmailEntryResults": [SES]}, DAY),
    ("ses part", {"BulkEmailEntryResults": [{"Status": "SUCCESS", "MessageId": "1"}, SES]}, PART),
    ("ses mail", {"Status": "ACCOUNT_SENDING_PAUSED", "Error": "x"}, DOUBT),
    ("partiql", {"Responses": [{"Error": {"Code": "ThrottlingError"}, "TableName": "t"}]}, PAUSE),
    ("ecs", {"tasks": [], "failures": [{"arn": "a", "reason": "RESOURCE:MEMORY"}]}, DOUBT),
    ("lambda", {"StatusCode": 200, "FunctionError": "Unhandled", "ExecutedVersion": "1"}, DOUBT),
    ("s3 without its metadata", {"Errors": [{"Key": "k", "Code": "AccessDenied", "Message": "x"}]}, REFUSED),
    ("elasticsearch by query", {"took": 1, "timed_out": False, "failures": [{"status": 409}]}, DOUBT),
    ("elasticsearch-py's bulk", (98, [WRONG]), UNDER_WAY),
    ("elasticsearch-py's streaming_bulk", [(True, STORED), (False, BUSY)], PART),
    ("bulk items by themselves", [WRONG], REFUSED),
    ("postmark", [{"ErrorCode": 0, "Message": "OK"}, {"ErrorCode": 406, "Message": "x"}], DOUBT),
    ("kinesis entry beside an id", {"ErrorCode": "InternalFailure", "ErrorMessage": "x", "id": "ch_1"}, DOUBT),
    ("lambda's payload", {"errorType": "KeyError", "errorMessage": "x", "stackTrace": []}, DOUBT),
    ("wechat", {"errcode": 40001, "errmsg": "invalid credential"}, DOUBT),
    ("monday", {"error_code": "ComplexityException", "error_message": "x", "status_code": 200}, DOUBT),
    # -- one answer
    ("json-rpc", {"jsonrpc": "2.0", "id": 1, "error": {"code": -32601, "message": "x"}}, DOUBT),
    ("json-rpc batch", [{"jsonrpc": "2.0", "id": 1, "error": {"code": -32601, "message": "x"}}], DOUBT),
    ("json:api", {"errors": [{"status": "422", "title": "Invalid", "source": {}}]}, UNDER_WAY),
    ("soap", SOAP, DOUBT),
    ("an xml error", "<?xml version='1.0'?><Error><Code>InternalError</Code><Message>x</Message></Error>", DOUBT),
    ("mutation without data", {"create": {"product": None, "userErrors": [{"message": "blank"}]}}, UNDER_WAY),
    ("mutation's own", {"product": None, "userErrors": [{"message": "blank"}]}, UNDER_WAY),
    ("mutation of media", {"data": {"create": {"mediaUserErrors": [{"message": "x"}]}}}, REFUSED),
    ("large answer", v.http(200, {"pad": "x" * 300_000, "errors": True, "items": [STORED, WRONG]}).response, UNDER_WAY),
    ("the last of many", [1] * 12_000 + [WRONG], UNDER_WAY),
    ("many that failed", [WRONG] * 1_200, UNDER_WAY),
    # -- as they were
    ("shopify throttled", throttled(752, 1000, 152), wait(12)),
    ("shopify never", throttled(1400, 1000, 1000), REFUSED),
    (
        "shopify user text",
        {"errors": [{"message": "'Throttled Down' is invalid", "extensions": {"code": "INVALID"}}]},
        REFUSED,
    ),
    ("shopify as text", '{"errors": [{"message": "x", "extensions": {"code": "THROTTLED"}}]}', PAUSE),
    (
        "graphql before any work",
        {"errors": [{"message": "x", "extensions": {"code": "BAD_USER_INPUT"}}]},
        REFUSED,
    ),
    (
        "graphql under way",
        {"data": None, "errors": [{"message": "x", "path": ["pay"], "extensions": {"code": "BAD_USER_INPUT"}}]},
        replace(REFUSED, effect=UNKNOWN, person=False),
    ),
    ("graphql as GitHub answers", v.http(200, GITHUB, {"x-github-request-id": "A"}).response, PAUSE),
    ("graphql like GitHub", GITHUB, replace(PAUSE, **OPEN)),
    (
        "graphql with data",
        {"data": {"a": 1}, "errors": [{"message": "x"}]},
        replace(REFUSED, effect=UNKNOWN, person=False),
    ),
    ("mutation refused", {"data": {"create": {"userErrors": [{"field": ["t"], "message": "blank"}]}}}, REFUSED),
    ("bulk mixed", {"errors": True, "items": [STORED, BUSY, WRONG]}, PART),
    ("bulk all busy", {"errors": True, "items": [BUSY, BUSY]}, PAUSE),
    ("bulk all wrong", {"errors": True, "items": [WRONG]}, REFUSED),
    ("bulk item busy", BUSY, PAUSE),
    ("bulk item wrong", WRONG, REFUSED),
    (
        "graph batch",
        {
            "responses": [
                {"id": "1", "status": 200},
                {"id": "2", "status": 429, "headers": {"Retry-After": "7"}, "body": {}},
            ]
        },
        replace(PART, wait=7),
    ),
    ("dynamodb", {"UnprocessedItems": {"t": [{"PutRequest": {}}]}}, PART),
    (
        "kinesis",
        {
            "FailedRecordCount": 1,
            "Records": [{"ShardId": "s"}, {"ErrorCode": "ProvisionedThroughputExceededException"}],
        },
        PART,
    ),
    ("sqs", {"Failed": [{"Id": "2", "SenderFault": True, "Code": "AccessDenied"}]}, REFUSED),
    (
        "salesforce rows",
        [{"success": False, "errors": [{"statusCode": "UNABLE_TO_LOCK_ROW"}]}],
        Means(FailureClass.PROCESSING),
    ),
    ("slack rate", {"ok": False, "error": "ratelimited"}, PAUSE),
    ("ok false in anybody's words", {"ok": False, "error": "Read timed out."}, DOUBT),
    ("slack channel", {"ok": False, "error": "channel_not_found"}, REFUSED),
    ("error inside", {"error": {"message": "something"}}, DOUBT),
    ("bulk that hides which", {"errors": True, "items": [STORED]}, DOUBT),
    ("salesforce tree", {"hasErrors": True, "results": [{"referenceId": "1", "errors": []}]}, DOUBT),
    ("salesforce error", [{"errorCode": "UNABLE_TO_LOCK_ROW", "message": "x"}], DOUBT),
    ("a row that was made", {"success": False, "id": "a1", "errors": [{"statusCode": "MAIL", "message": "x"}]}, DOUBT),
    (
        "a gateway's timeout",
        {"errors": [{"message": "x", "extensions": {"code": "GATEWAY_TIMEOUT"}}]},
        Means(FailureClass.VALIDATION, **OPEN),
    ),
    ("elasticsearch", {"status": 429, "error": {**BUSY["index"]["error"], "root_cause": []}}, PAUSE),
    ("kinesis entry", {"ErrorCode": "ProvisionedThroughputExceededException", "ErrorMessage": "x"}, PAUSE),
    ("kinesis after a retry", {**ALL_BUSY, "ResponseMetadata": {"RetryAttempts": 1}}, replace(PAUSE, **OPEN)),
    ("kinesis all busy", {**ALL_BUSY, "ResponseMetadata": {"RetryAttempts": 0}}, PAUSE),
    ("gathered", ["ok", v.http(429, None, {"Retry-After": "3"})], replace(PART, wait=3)),
    ("returned exception", v.http(429, None, {"Retry-After": "3"}), wait(3)),
    ("unchecked response", v.http(429, None, {"Retry-After": "9"}).response, wait(9)),
    ("checked too little", v.http(200, throttled(752, 1000, 152)).response, wait(12)),
    ("nothing", None, DOUBT),
    ("empty", [], DOUBT),
]


@pytest.mark.parametrize(("value", "means"), [pytest.param(*fault[1:], id=fault[0]) for fault in FAULTS])
def test_p09_an_error_inside_a_success_is_found(value: Any, means: Means) -> None:
    failure = classify_result(value, now=NOW)
    assert failure is not None
    check(failure, means)


@pytest.mark.parametrize("value", [pytest.param(fault[1], id=fault[0]) for fault in FAULTS if type(fault[1]) is dict])
def test_p03_a_field_too_many_and_it_is_nobodys_form(value: dict[str, Any]) -> None:
    for more in ({"charge": "ch_1"}, {"id": "ch_1", "amount": 5}):
        failure = classify_result({**more, **value}, now=NOW)
        assert failure is None or failure.effect is UNKNOWN, failure


scalars = st.none() | st.booleans() | st.sampled_from([200, 429, 503, "THROTTLED", "ratelimited", "Throttling", "x"])
SAID = """
    error errors code type status statusCode ErrorCode ErrorMessage Code Id SenderFault message extensions data items
    responses Records FailedRecordCount Failed hasErrors results index body headers success ok userErrors root_cause
    custom_id result response insertErrors reason partialFailureError numErrors Errors Key Error Responses Status
    BulkEmailEntryResults errcode errmsg FunctionError failures
"""
answers = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=2)
        | st.dictionaries(st.sampled_from(SAID.split()), inner, min_size=1, max_size=3)
    ),
    max_leaves=10,
)


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from(SAID.split()), answers, max_size=4), st.booleans())
def test_p03_what_a_function_says_of_its_own_is_never_proof_that_nothing_was_done(
    said: dict[str, Any], listed: bool
) -> None:
    value = {**said, "charge": "ch_1"}
    failure = classify_result([value] if listed else value, now=NOW)
    if failure is not None:
        assert failure.effect is UNKNOWN, failure
        assert (failure.needs_person, failure.final) == (False, False)
    read = classify_result(value, effect_kind="read", now=NOW)
    assert read is None or read.effect is Effect.NOT_APPLIED


def test_p06_a_read_that_was_told_to_wait_in_a_value_waits() -> None:
    said = {"error": {"code": "rate_limit_exceeded", "retry_after": 5}}
    read = classify_result(said, effect_kind="read", now=NOW)
    assert read is not None
    check(read, wait(5))
    write = classify_result(said, now=NOW)
    assert write is not None
    assert not write.pausable
    assert "raise NotApplied" in write.evidence


def test_p07_a_documented_form_is_that_of_a_family() -> None:
    vendors = {value for name, value in vars(found).items() if name.isupper() and isinstance(value, str)}
    assert len(vendors) > 5
    assert vendors <= {known.name for known in FAMILIES}


@pytest.mark.parametrize(
    "value",
    [
        0,
        False,
        "ok",
        b"\xff\xfe",
        [1, 2],
        {"id": 1},
        {"errors": []},
        {"error": None},
        {"status": "failed", "rows": 3},
        {"errors": ["row 3 was skipped"], "rows": 9},
        {"errors": False, "items": [STORED]},
        {"UnprocessedItems": {}},
        STORED,
        '{"ok": true}',
        v.http(200, {"id": 1}).response,
        {"errorCode": "SUCCESS", "message": "x"},
        {"id": "b", "custom_id": "a", "response": {"status_code": 200, "body": {"id": "x"}}, "error": None},
        {"custom_id": "a", "result": {"type": "succeeded", "message": {"content": []}}},
        {"custom_id": "order-7", "total": 12},
        [meta_item(200), meta_item(201)],
        [{"code": 7, "body": "text"}, None],
        [None, None],
        {"kind": "bigquery#tableDataInsertAllResponse"},
        [{"index": 1, "errors": []}, {"index": 2, "total": 3}],
        {"results": [{"resourceName": "customers/1"}]},
        GoogleAdsResponse(0),
        HubSpotBatch(0),
        {"status": "COMPLETE", "results": [{"id": "1"}], "numErrors": 0},
        {"numberRecordsFailed": 0, "numberRecordsProcessed": 2},
        {"BulkEmailEntryResults": [{"Status": "SUCCESS", "MessageId": "1"}]},
        [{"Status": "FAILED", "MessageId": "1"}],
        {"Status": "Active"},
        {"Responses": [{"Item": {}, "TableName": "t"}]},
        {"Responses": {"t": [{"error": {}}]}},
        {"tasks": [{"taskArn": "a"}], "failures": []},
        {"StatusCode": 200, "ExecutedVersion": "$LATEST"},
        {"Deleted": [{"Key": "k"}]},
        {"took": 1, "timed_out": False, "failures": []},
        (98, []),
        [(True, STORED)],
        [["a", 1], ["b", 2]],
        [{"ErrorCode": 0, "Message": "OK", "To": "x"}],
        {"errcode": 0, "errmsg": "ok"},
        {"errorCode": "", "errorMessage": ""},
        {"sid": "SM1", "error_code": None, "error_message": None},
        {"jsonrpc": "2.0", "id": 1, "result": 5},
        {"data": {"create": {"product": {"id": 1}, "userErrors": []}}},
        {"errors": [{"row": 3, "title": "a book"}], "rows": 9},
        "<feed><error>none</error></feed>",
        "<s:Envelope><s:Body><Paid><code>A1</code></Paid></s:Body></s:Envelope>",
        "first line\nsecond line",
        '{"a": 1}\n{"a": 2}',
        '{not json}\n{"a": 2}',
        {"failures": 3, "rows": 9},
        {"charge": {"status": "failed", "failure_code": "x"}},
        range(3),
    ],
    ids=lambda value: re.sub(r" at 0x\w+", "", repr(value)),
)
def test_p09_a_result_is_no_error(value: Any) -> None:
    assert classify_result(value, now=NOW) is None


@pytest.mark.parametrize("value", [None, "", b"", [], {}, (), set()])
def test_p09_what_may_be_empty_may_be_empty(value: Any) -> None:
    assert classify_result(value, now=NOW, may_be_empty=True) is None


def test_p07_a_repeated_request_behind_a_success_is_told_with_its_switch() -> None:
    assert hidden_retries({"ResponseMetadata": {"HTTPStatusCode": 200, "RetryAttempts": 2}}) == (
        "botocore made 2 hidden retries, which nothing proves harmless: set Config(retries={'total_max_attempts': 1})"
    )
    for value in (None, {"id": 1}, {"ResponseMetadata": {"RetryAttempts": 0}}, v.http(200).response, object()):
        assert hidden_retries(value) == ""
