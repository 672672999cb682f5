"""One item of an answer about many: whether it failed, whose form it has, and the fault that it is.

An item that failed is believed to say "it did not happen" only where it has the vendor's documented form and no field
besides. Asked of each item by ``bulks.py``, and of a value that is one item by itself, as a batch settles them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from airflow_runguard.core.failures.answer import answer_in, lowered
from airflow_runguard.core.failures.document import parsed_text
from airflow_runguard.core.failures.found import (
    ANTHROPIC,
    AWS,
    ELASTIC,
    ENVELOPE,
    GRAPH,
    META,
    OPENAI,
    REFUSED,
    SALESFORCE,
    Fault,
    count,
    fields_of,
    only,
    plain,
)
from airflow_runguard.core.failures.reading import http_status, item, names
from airflow_runguard.core.failures.rule import fold, undone, words
from airflow_runguard.core.record import FailureClass

NOT_ATTEMPTED = undone(
    "result-not-attempted", "the vendor did not come to this request, made nothing and bills nothing"
)
CANCELLED = undone(
    "result-cancelled",
    "somebody cancelled it before the vendor came to it",
    failure_class=FailureClass.VALIDATION,
    needs_person=True,
)

ELASTIC_ITEM = names("_index _id _type status error failure_store")
GRAPH_ITEM = names("id status headers body")
COMPOSITE_ITEM = names("body httpHeaders httpStatusCode referenceId")
_ELASTIC_ERROR = names("status error")
_SALESFORCE_ERROR = names("message errorCode fields extendedErrorDetails")
SALESFORCE_ROW = names("id success created errors")
PUT_ITEM = names("ErrorCode ErrorMessage")
SQS_ITEM = names("Id SenderFault Code Message")
S3_ITEM = names("Key VersionId Code Message")
SES_ITEM = names("Status Error")
PARTIQL_ITEM = names("Error TableName")
_OPENAI_LINE = names("id custom_id response error model")
_ANTHROPIC_LINE = names("custom_id result")
_META_ITEM = names("code headers body")
BIGQUERY_ROW = names("index errors")
_OPERATIONS = ("index", "create", "update", "delete")


def operation(entry: Any) -> Any:
    if isinstance(entry, Mapping) and len(entry) == 1:
        for name in _OPERATIONS:
            if isinstance(item(entry, name), Mapping):
                return item(entry, name)
    return entry


def line_fault(entry: Any) -> Fault | None:
    """A line of the results of OpenAI's or Anthropic's batches that is an error; many others write OpenAI's."""
    if not isinstance(entry, Mapping) or "custom_id" not in entry:
        return None
    result = fields_of(item(entry, "result"))
    kind = item(result, "type")
    if kind in ("errored", "expired", "canceled"):
        return _anthropics(plain(result), ANTHROPIC if only(entry, _ANTHROPIC_LINE) else "")
    response, error = fields_of(item(entry, "response")), fields_of(item(entry, "error"))
    vendor = OPENAI if only(entry, _OPENAI_LINE) else ""
    status = http_status(item(response, "status_code")) or 0
    if isinstance(error, Mapping | str) and error:
        expired = vendor and not response and item(error, "code") == "batch_expired"
        answer = answer_in({"error": plain(error)}, vendor=vendor)
        return Fault(answer, NOT_ATTEMPTED if expired else ENVELOPE)
    if status >= 400:
        answer = answer_in(plain(item(response, "body")), vendor=vendor)
        return Fault(replace(answer, status=status))
    return None


# https://docs.anthropic.com/en/api/errors
_ANTHROPICS_STATUS = {
    "invalid_request_error": 400,
    "authentication_error": 401,
    "billing_error": 402,
    "permission_error": 403,
    "not_found_error": 404,
    "request_too_large": 413,
    "rate_limit_error": 429,
    "overloaded_error": 529,
}


def _anthropics(result: Mapping[Any, Any], vendor: str) -> Fault:
    """Of what is no success, Anthropic makes nothing and bills nothing, its own breakdowns included."""
    otherwise = CANCELLED if item(result, "type") == "canceled" else NOT_ATTEMPTED
    answer = answer_in(item(result, "error") or {}, vendor=vendor)
    named = item(item(item(result, "error"), "error"), "type")
    status = _ANTHROPICS_STATUS.get(named) if isinstance(named, str) else None
    return Fault(replace(answer, status=status), otherwise if vendor else ENVELOPE)


def is_metas(entry: Any, *, failed: bool = False) -> bool:
    """Whether it is one answer of Meta's ``batch`` (that failed)."""
    status = http_status(item(entry, "code"))
    return (
        only(entry, _META_ITEM)
        and status is not None
        and "body" in entry
        and isinstance(item(entry, "body"), str | None)
        and (status >= 400 or not failed)
    )


def _metas(entry: Mapping[Any, Any]) -> Fault:
    headers = {item(one, "name"): item(one, "value") for one in item(entry, "headers") or ()}
    body = parsed_text(item(entry, "body") or "")
    answer = answer_in(body, lowered(headers), vendor=META if isinstance(item(body, "error"), Mapping) else "")
    return Fault(replace(answer, status=http_status(item(entry, "code"))))


_NUMBERS = (
    ("ErrorCode", "Message"),
    ("ErrorCode", "ErrorMessage"),
    ("errcode", "errmsg"),
    ("error_code", "error_message"),
    ("errorCode", "errorMessage"),
    ("errorType", "errorMessage"),
)
_FINE = words("0 ok success none") | {""}


def numbered(entry: Any) -> bool:
    """Postmark, WeChat and DingTalk, monday.com, Lambda's payloads: a number or a word, 0 for a success."""
    for number, message in _NUMBERS:
        said = item(entry, number)
        if isinstance(said, int | str) and isinstance(item(entry, message), str) and fold(str(said)) not in _FINE:
            return True
    return False


_SES_FAILED = words("""
    MESSAGE_REJECTED MAIL_FROM_DOMAIN_NOT_VERIFIED CONFIGURATION_SET_NOT_FOUND CONFIGURATION_SET_DOES_NOT_EXIST
    TEMPLATE_NOT_FOUND TEMPLATE_DOES_NOT_EXIST ACCOUNT_SUSPENDED ACCOUNT_THROTTLED ACCOUNT_DAILY_QUOTA_EXCEEDED
    INVALID_SENDING_POOL_NAME ACCOUNT_SENDING_PAUSED CONFIGURATION_SET_SENDING_PAUSED INVALID_PARAMETER
    INVALID_PARAMETER_VALUE TRANSIENT_FAILURE FAILED
""")


def mail_failed(entry: Mapping[Any, Any]) -> bool:
    """An entry of SES's bulk mails."""
    status = item(entry, "Status")
    return only(entry, SES_ITEM) and "Error" in entry and isinstance(status, str) and fold(status) in _SES_FAILED


def is_item(entry: Any, vendor: str, fields: frozenset[str]) -> bool:
    """Whether an item that failed has the vendor's form: what must be there, and nothing that is not the vendor's."""
    if not only(entry, fields):
        return False
    if vendor == ELASTIC:
        return isinstance(item(item(entry, "error"), "type"), str)
    return vendor != GRAPH or isinstance(item(entry, "headers"), Mapping) or _has_code(item(entry, "body"))


def _has_code(body: Any) -> bool:
    return isinstance(item(item(body, "error"), "code"), str)


def vendor_of_one(entry: Any) -> str:
    """Whose form an item has that stands alone or in a bare list, if it failed; '' for nobody's."""
    if not isinstance(entry, Mapping):
        return ""
    inner = operation(entry)
    if inner is not entry:
        return ELASTIC if item_failed(inner) and is_item(inner, ELASTIC, ELASTIC_ITEM) else ""
    if only(entry, GRAPH_ITEM) and item_failed(entry) and _has_code(item(entry, "body")):
        return GRAPH
    if only(entry, PUT_ITEM) and isinstance(item(entry, "ErrorCode"), str):
        return AWS
    if only(entry, SQS_ITEM) and isinstance(item(entry, "SenderFault"), bool) and "Code" in entry:
        return AWS
    if only(entry, _ELASTIC_ERROR) and item_failed(entry) and isinstance(item(entry["error"], "root_cause"), list):
        return ELASTIC
    return SALESFORCE if _is_refused_row(entry) else ""


def _is_refused_row(entry: Mapping[Any, Any]) -> bool:
    """A row that Salesforce refused: nothing was made of it."""
    errors = item(entry, "errors")
    return (
        only(entry, SALESFORCE_ROW)
        and item(entry, "success") is False
        and not item(entry, "id")
        and item(entry, "created") is not True
        and isinstance(errors, list)
        and bool(errors)
        and all(isinstance(item(error, "statusCode"), str) for error in errors)
    )


# Some of these every item has that failed; asked first, since lists of other things may be long.
_TELLING = names("""
    status statusCode httpStatusCode error success ErrorCode Error errorCode errorType errcode error_code code Status
    numberRecordsFailed custom_id
""")


def item_failed(entry: Any) -> bool:
    """Whether an item of a bulk answer says that it was not done."""
    entry = operation(entry)
    if not isinstance(entry, Mapping) or entry.keys().isdisjoint(_TELLING):
        return False
    status = next(filter(None, (http_status(item(entry, n)) for n in ("status", "statusCode", "httpStatusCode"))), 0)
    error = fields_of(item(entry, "error"))
    return (
        status >= 400
        or item(entry, "success") is False
        or (isinstance(code := item(entry, "ErrorCode"), str) and fold(code) not in _FINE)
        or (isinstance(error, Mapping | BaseException) and bool(error))
        or isinstance(item(item(entry, "Error"), "Code"), str)
        or (only(entry, _SALESFORCE_ERROR) and isinstance(item(entry, "errorCode"), str))
        or mail_failed(entry)
        or numbered(entry)
        or is_metas(entry, failed=True)
        or bool(count(entry, "numberRecordsFailed"))
        or line_fault(entry) is not None
    )


def item_fault(entry: Any, label: str, vendor: str) -> Fault:
    fault = line_fault(entry)
    if fault is None and is_metas(entry):
        fault = _metas(entry)
    if fault is None:
        inner = operation(entry)
        answer = answer_in(inner, lowered(item(inner, "headers")), vendor=vendor)
        fault = Fault(answer, REFUSED if vendor == SALESFORCE and answer.status is None else ENVELOPE)
    fault.label = label + (f" (HTTP {fault.answer.status})" if fault.answer.status else "")
    return fault
