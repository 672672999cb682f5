"""Results that look like a success and are none (P9)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from airflow_runguard.core.failures import classify_result, hidden_retries, results
from airflow_runguard.core.failures.families import FAMILIES
from airflow_runguard.core.record import Effect, FailureClass
from demo import vendor_errors as v
from demo.error_shapes import DOUBT, NOW, PAUSE, REFUSED, Means, wait
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
ALL_BUSY = {"FailedRecordCount": 1, "Records": [{"ErrorCode": "ProvisionedThroughputExceededException"}]}

FAULTS: list[tuple[str, Any, Means]] = [
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


scalars = st.none() | st.booleans() | st.sampled_from([200, 429, 503, "THROTTLED", "ratelimited", "Throttling", "x"])
SAID = """
    error errors code type status statusCode ErrorCode ErrorMessage Code Id SenderFault message extensions data items
    responses Records FailedRecordCount Failed hasErrors results index body headers success ok userErrors root_cause
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


@pytest.mark.parametrize("family", [results.AWS, results.ELASTIC, results.GRAPH, results.SALESFORCE, results.SHOPIFY])
def test_p07_a_documented_form_is_that_of_a_family(family: str) -> None:
    assert family in {known.name for known in FAMILIES}
    assert results.SLACK in {known.name for known in FAMILIES}


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
    ],
    ids=repr,
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
