"""Errors that come back as values: what in a result is a fault, and how much of it was done.

Finds the places only; what a fault means is said by the same rules as for exceptions. A shape is known by fields that
errors have and results have not, so that a list of ordinary business data is no fault.

GraphQL: https://spec.graphql.org/October2021/#sec-Errors · Elasticsearch bulk:
https://www.elastic.co/guide/en/elasticsearch/reference/current/docs-bulk.html · Graph ``$batch``:
https://learn.microsoft.com/en-us/graph/json-batching · DynamoDB, Kinesis, Firehose, EventBridge, SQS, SNS, S3:
https://docs.aws.amazon.com/boto3/latest/reference/services/ · Salesforce collections and composite:
https://developer.salesforce.com/docs/atlas.en-us.api_rest.meta/api_rest/resources_composite_sobjects_collections.htm
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_runguard.core.failures.answer import Answer, answer_in, answer_of, pairs
from airflow_runguard.core.failures.document import parsed_text
from airflow_runguard.core.failures.reading import http_status, item, response_status
from airflow_runguard.core.failures.rule import Rule, open_end, rate, refused

EMPTY = open_end("result-empty", "nothing came back where something must; nobody can say what was done")
ENVELOPE = open_end("result-says-error", "the answer says by itself that it is an error, and not what was done")
REFUSED = refused("result-refused", "the vendor took the request and refused what is in it")
UNPROCESSED = rate("result-unprocessed", "the vendor gave back what it had no capacity for at this moment")
NEVER = refused("result-too-expensive", "it costs more than the vendor's whole allowance holds; it can never pass")
_MAX_ITEMS = 10_000


@dataclass(slots=True)
class Fault:
    """One thing that went wrong. :param otherwise: what it means where no vendor's rule knows it."""

    answer: Answer = field(default_factory=Answer)
    otherwise: Rule = ENVELOPE
    label: str = "the result"
    error: BaseException | None = None
    never: bool = False


@dataclass(slots=True)
class Found:
    """:param done: items that were done. :param partial: why a part of it may have been done, where none is counted."""

    faults: list[Fault] = field(default_factory=list)
    done: int = 0
    partial: str = ""
    error: BaseException | None = None


def read_result(value: object, *, may_be_empty: bool) -> Found | None:
    """What is wrong with a value; ``None`` where nothing is."""
    if isinstance(value, BaseException):
        return Found(error=value)
    if value is None or (isinstance(value, str | bytes | list | tuple | dict | set | frozenset) and len(value) == 0):
        return None if may_be_empty else Found([Fault(otherwise=EMPTY, label="an empty result")])
    if isinstance(value, str | bytes):
        return _document(parsed_text(value), {})
    if isinstance(value, Mapping | list | tuple):
        return _document(value, {})
    status = response_status(value)
    if status is None:
        return None
    answer = answer_of(value, frozenset(), {"response": value})
    if status >= 400:
        return Found([Fault(answer, label=f"HTTP {status} in a response that was not checked")])
    return next(filter(None, (_document(part, answer.headers) for part in answer.parts)), None)


def _document(document: Any, headers: Mapping[str, str]) -> Found | None:
    if isinstance(document, list | tuple):
        return _items(document)
    if not isinstance(document, Mapping):
        return None
    for look in (_bulk, _unprocessed, _graphql, _user_errors):
        found = look(document)
        if found is not None:
            return found
    return _envelope(document, headers)


# -- many items --------------------------------------------------------------------------------------------------------


def _items(entries: list[Any] | tuple[Any, ...]) -> Found | None:
    """A list of results, of which some may be exceptions or refusals (``gather``, Salesforce collections)."""
    found = Found()
    for number, entry in enumerate(entries[:_MAX_ITEMS]):
        if isinstance(entry, BaseException):
            found.faults.append(Fault(error=entry))
        elif item_failed(entry):
            found.faults.append(_item_fault(entry, number))
        else:
            found.done += 1
    return found if found.faults else None


def _bulk(document: Mapping[Any, Any]) -> Found | None:
    for name, told in _BULKS:
        entries = item(document, name)
        if isinstance(entries, list) and entries and told(document):
            inner = [_operation(entry) for entry in entries[:_MAX_ITEMS]]
            found = Found()
            for number, entry in enumerate(inner):
                if name in ("Failed", "Errors") or item_failed(entry):
                    found.faults.append(_item_fault(entry, number))
                else:
                    found.done += 1
            for others in ("Successful", "Deleted"):
                found.done += len(item(document, others) or ())
            if found.faults:
                return found
    # One item of a bulk answer by itself: {"index": {"_id": "a", "status": 429, "error": {…}}}
    if len(document) == 1 and _operation(document) is not document:
        entry = _operation(document)
        return Found([_item_fault(entry, 0)]) if item_failed(entry) else None
    status = http_status(item(document, "status"))
    if status is not None and status >= 400 and ("body" in document or "error" in document):
        return Found([_item_fault(document, 0)])
    return None


def _positive(name: str) -> Any:
    return lambda document: isinstance(item(document, name), int) and item(document, name) > 0


# Where each vendor lists its items, and what says that some of them failed.
_BULKS: tuple[tuple[str, Any], ...] = (
    ("items", lambda document: item(document, "errors") is True),
    ("responses", lambda document: True),
    ("compositeResponse", lambda document: True),
    ("results", lambda document: item(document, "hasErrors") is True),
    ("Records", _positive("FailedRecordCount")),
    ("RequestResponses", _positive("FailedPutCount")),
    ("Entries", _positive("FailedEntryCount")),
    ("Failed", lambda document: True),
    ("Errors", lambda document: "Deleted" in document or "ResponseMetadata" in document),
)
_OPERATIONS = ("index", "create", "update", "delete")


def _operation(entry: Any) -> Any:
    if isinstance(entry, Mapping) and len(entry) == 1:
        for name in _OPERATIONS:
            if isinstance(item(entry, name), Mapping):
                return item(entry, name)
    return entry


def item_failed(entry: Any) -> bool:
    """Whether an item of a bulk answer says that it was not done."""
    if not isinstance(entry, Mapping):
        return False
    status = next(filter(None, (http_status(item(entry, n)) for n in ("status", "statusCode", "httpStatusCode"))), 0)
    return (
        status >= 400
        or item(entry, "success") is False
        or isinstance(item(entry, "ErrorCode"), str)
        or (isinstance(item(entry, "error"), Mapping) and bool(item(entry, "error")))
    )


def _item_fault(entry: Any, number: int) -> Fault:
    # No other vendor spells it so, and its codes are read only where the answer is seen to be its own.
    host = "items.amazonaws.com" if isinstance(item(entry, "ErrorCode") or item(entry, "Code"), str) else ""
    answer = answer_in(entry, headers=dict(pairs(item(entry, "headers"))), host=host)
    refusal = answer.status is None and item(entry, "success") is False
    label = f"item {number + 1}" + (f" (HTTP {answer.status})" if answer.status else "")
    return Fault(answer, REFUSED if refusal else ENVELOPE, label)


def _unprocessed(document: Mapping[Any, Any]) -> Found | None:
    for name in ("UnprocessedItems", "UnprocessedKeys"):
        left = item(document, name)
        if isinstance(left, Mapping) and left:
            return Found([Fault(otherwise=UNPROCESSED, label=name)], partial=f"what is not in {name} was done")
    return None


# -- one answer --------------------------------------------------------------------------------------------------------


def _graphql(document: Mapping[Any, Any]) -> Found | None:
    errors = item(document, "errors")
    if not isinstance(errors, list) or not errors or not all(isinstance(e, Mapping) and "message" in e for e in errors):
        return None
    cost = item(item(document, "extensions"), "cost")
    asked, most = item(cost, "requestedQueryCost"), item(item(cost, "throttleStatus"), "maximumAvailable")
    never = isinstance(asked, int | float) and isinstance(most, int | float) and asked > most
    faults = []
    for error in errors[:50]:
        answer = answer_in({"errors": [error], "extensions": item(document, "extensions")})
        faults.append(Fault(answer, REFUSED, "an error inside a success", never=never))
    data = item(document, "data")
    there = isinstance(data, Mapping) and any(value is not None for value in data.values())
    return Found(faults, partial="a part of the answer has data" if there else "")


def _user_errors(document: Mapping[Any, Any]) -> Found | None:
    """What a Shopify mutation refuses, field by field."""
    data = item(document, "data")
    for payload in data.values() if isinstance(data, Mapping) else ():
        errors = item(payload, "userErrors")
        if isinstance(errors, list) and errors:
            return Found([Fault(answer_in({"errors": errors}), REFUSED, "userErrors inside a success")])
    return None


def _envelope(document: Mapping[Any, Any], headers: Mapping[str, str]) -> Found | None:
    error, message = item(document, "error"), item(document, "message")
    unsuccessful = item(document, "ok") is False or item(document, "success") is False
    named = isinstance(error, Mapping | str) and bool(error)
    called = item(document, "status") in ("error", "fail", "failed") and bool(error or message)
    if not (unsuccessful or named or called):
        return None
    answer = answer_in(document, headers=headers)
    return Found([Fault(answer, REFUSED if item(document, "ok") is False else ENVELOPE, "an error inside a success")])
