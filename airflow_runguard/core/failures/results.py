"""Errors that come back as values: what in a result is a fault, whose form it has, and how much of it was done.

Finds the places only; what a fault means is said by the same rules as for exceptions. A shape is known by fields that
errors have and results have not, so that a list of ordinary business data is no fault. A function that returned may
have had its effect, so that its value is believed to say "it did not happen" only where it has a vendor's own
documented form and no field besides: anybody may return ``{"id": …, "error": …}``. Answers about many items are read
in ``bulks.py``.

GraphQL: https://spec.graphql.org/October2021/#sec-Errors · Shopify: https://shopify.dev/docs/api/usage/response-codes ·
Slack: https://docs.slack.dev/apis/web-api/#responses · JSON-RPC: https://www.jsonrpc.org/specification#error_object ·
JSON:API: https://jsonapi.org/format/#errors · SOAP: https://www.w3.org/TR/soap12-part1/#soapfault · Lambda:
https://docs.aws.amazon.com/lambda/latest/api/API_Invoke.html
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from airflow_runguard.core.failures.answer import Answer, answer_in, answer_of
from airflow_runguard.core.failures.bulks import bulk, items_in, rows_refused
from airflow_runguard.core.failures.document import MAX_BODY, MAX_NODES, MAX_TEXT, parsed_text
from airflow_runguard.core.failures.found import (
    REFUSED,
    REFUSED_UNDER_WAY,
    SHOPIFY,
    SLACK,
    Fault,
    Found,
    fields_of,
    only,
    plain,
    unchecked,
)
from airflow_runguard.core.failures.reading import item, names, read, response_status
from airflow_runguard.core.failures.rule import open_end, refused

EMPTY = open_end("result-empty", "nothing came back where something must; nobody can say what was done")
NEVER = refused("result-too-expensive", "it costs more than the vendor's whole allowance holds; it can never pass")


def read_result(value: object, *, may_be_empty: bool) -> Found | None:
    """What is wrong with a value; ``None`` where nothing is."""
    if type(value) in (int, float, bool):
        return None
    if isinstance(value, BaseException):
        return Found([Fault(error=value)])
    if value is None or (isinstance(value, str | bytes | list | tuple | dict | set | frozenset) and len(value) == 0):
        return None if may_be_empty else Found([Fault(otherwise=EMPTY, label="an empty result")])
    if isinstance(value, str | bytes):
        return _text(value)
    if (fault := unchecked(value)) is not None:
        return Found([fault])
    if isinstance(document := fields_of(value), Mapping | list | tuple):
        return _document(document, Answer())
    if response_status(value) is None:
        return _message(value)
    answer = answer_of(value, frozenset(), {"response": value})
    content = read(value, "_content")
    # The answer keeps no body that is too large for an error's; this one may say of many items how they ended.
    large = parsed_text(content) if isinstance(content, bytes) and len(content) > MAX_BODY else None
    return next(filter(None, (_document(part, answer) for part in (*answer.parts, large))), None)


_FAULT = re.compile(
    r"\s*(?:<\?xml[^>]*>\s*)?<(?:\w+:)?(?:Envelope\b.*?<(?:\w+:)?Fault[\s>]|Error(?:Response)?[\s>])", re.S
)


def _text(value: str | bytes) -> Found | None:
    """A document as text; one a line (JSONL), as the vendors of models write the results of batches; an XML fault."""
    document = parsed_text(value)
    if document is None:
        return _document(_lines(value), Answer())
    content = value[:MAX_TEXT] if isinstance(value, str) else value[:MAX_TEXT].decode("utf-8", "replace")
    if content.lstrip("\ufeff \r\n\t")[:1] == "<":
        return _document({"error": document}, Answer()) if _FAULT.match(content) else None
    return _document(document, Answer())


def _lines(value: str | bytes) -> list[Any] | None:
    lines = value.strip().splitlines()
    if len(lines) < 2 or lines[0][:1] not in ("{", b"{"):
        return None
    try:
        return [json.loads(line) for line in lines if line.strip()]
    except (ValueError, RecursionError):
        return None


def _message(value: object) -> Found | None:
    """A protobuf message of Google Ads, which has fields and no list of them that could be read without its package."""
    error = read(value, "partial_failure_error")
    code = read(error, "code")
    if not isinstance(code, int) or isinstance(code, bool) or code <= 0:
        return None
    return _document({"partial_failure_error": {"code": code, "message": read(error, "message")}}, Answer())


def _document(document: Any, around: Answer) -> Found | None:
    """:param around: the response that it came in, where there is one."""
    if isinstance(document, list | tuple):
        rows = rows_refused(list(document), form=True) if isinstance(document, list) and document else None
        return rows or items_in(document)
    if not isinstance(document, Mapping):
        return None
    for look in (bulk, _user_errors, _function_error):
        found = look(document)
        if found is not None:
            return found
    return _graphql(document, around) or _envelope(document, around)


# -- one answer --------------------------------------------------------------------------------------------------------

_GRAPHQL = names("errors data extensions")
_MUTATION = names("data extensions")
_BEFORE_ANY_WORK = frozenset(
    {
        "GRAPHQL_PARSE_FAILED",
        "GRAPHQL_VALIDATION_FAILED",
        "BAD_USER_INPUT",
        "UNAUTHENTICATED",
        "FORBIDDEN",
        "PERSISTED_QUERY_NOT_FOUND",
        "PERSISTED_QUERY_NOT_SUPPORTED",
        "OPERATION_RESOLUTION_FAILURE",
        "INVALID",
    }
)
"""Codes of a request that was refused as a whole. A gateway gives others (a timeout, an internal error) after it has
passed the request on."""
_SHOPIFYS = ("THROTTLED", "MAX_COST_EXCEEDED", "SHOP_INACTIVE")


def _graphql(document: Mapping[Any, Any], around: Answer) -> Found | None:
    errors = item(document, "errors")
    errors = plain(errors) if isinstance(errors, list) else None
    if not errors or not all(map(_is_error, errors)):
        return None
    extensions, data = item(document, "extensions"), item(document, "data")
    cost = item(extensions, "cost")
    asked, most = item(cost, "requestedQueryCost"), item(item(cost, "throttleStatus"), "maximumAvailable")
    never = isinstance(asked, int | float) and isinstance(most, int | float) and asked > most
    form = only(document, _GRAPHQL)
    faults = []
    for error in errors[:MAX_NODES]:
        code = item(item(error, "extensions"), "code")
        # Nobody else counts costs so or has these words.
        vendor = SHOPIFY if form and data is None and (isinstance(cost, Mapping) or code in _SHOPIFYS) else ""
        # An error of the request as a whole comes before any work; then there is no data, not even null.
        whole = form and "data" not in document and "path" not in error and code in _BEFORE_ANY_WORK
        answer = answer_in({"errors": [error], "extensions": extensions}, around.headers, around.host, vendor)
        otherwise = REFUSED if vendor or whole else REFUSED_UNDER_WAY
        faults.append(
            Fault(answer, otherwise, "an error inside a success", never=never, answered=around.status is not None)
        )
    there = isinstance(data, Mapping) and any(value is not None for value in data.values())
    unread = len(errors) - len(faults)
    return Found(faults, unread, "a part of the answer has data" if there else "")


def _is_error(entry: Any) -> bool:
    """An error object of GraphQL, or of JSON:API and its kin."""
    if not isinstance(entry, Mapping):
        return False
    return "message" in entry or "detail" in entry or ("title" in entry and not entry.keys().isdisjoint(_NUMBERED))


_NUMBERED = names("status code type")


def _user_errors(document: Mapping[Any, Any]) -> Found | None:
    """What Shopify's mutations refuse, field by field. One that was refused gives nothing else back. Clients take the
    ``data`` off, and the name of the mutation; then it is nobody's form.
    """
    data = item(document, "data")
    payloads = list(data.values()) if isinstance(data, Mapping) else [document, *document.values()]
    refusals = [errors for payload in payloads if (errors := _refusals(payload))]
    if not refusals:
        return None
    rest = [value for payload in payloads if isinstance(payload, Mapping) for value in payload.values()]
    whole = len(refusals) == len(payloads) and not any(value for value in rest if value not in refusals)
    vendor = SHOPIFY if data is not None and only(document, _MUTATION) else ""
    otherwise = REFUSED if vendor else REFUSED_UNDER_WAY
    faults = [
        Fault(answer_in({"errors": e}, vendor=vendor), otherwise, "userErrors inside a success") for e in refusals
    ]
    return Found(faults, partial="" if whole or not vendor else "a part of the answer has data")


def _refusals(payload: Any) -> list[Any]:
    """``userErrors``, ``customerUserErrors``, ``mediaUserErrors``, … of one mutation."""
    if not isinstance(payload, Mapping):
        return []
    for name, value in payload.items():
        if isinstance(name, str) and name.endswith("serErrors") and isinstance(value, list) and value:
            return value
    return []


def _function_error(document: Mapping[Any, Any]) -> Found | None:
    """Lambda answers 200 for a function that ran and failed."""
    error = item(document, "FunctionError")
    return Found([Fault(label=f"FunctionError {error}")]) if isinstance(error, str) and error else None


_SLACKS = names("ok error errors warning needed provided response_metadata")


def _envelope(document: Mapping[Any, Any], around: Answer) -> Found | None:
    error, message = item(document, "error"), item(document, "message")
    unsuccessful = item(document, "ok") is False or item(document, "success") is False
    named = isinstance(error := fields_of(error), Mapping | str) and bool(error)
    called = item(document, "status") in ("error", "fail", "failed") and bool(error or message)
    if not (unsuccessful or named or called):
        return None
    slack = item(document, "ok") is False and isinstance(error, str) and only(document, _SLACKS)
    answer = answer_in({**document, "error": error}, around.headers, around.host, SLACK if slack else "")
    return Found([Fault(answer, label="an error inside a success", answered=around.status is not None)])
