"""Errors that come back as values: what in a result is a fault, whose form it has, and how much of it was done.

Finds the places only; what a fault means is said by the same rules as for exceptions. A shape is known by fields that
errors have and results have not, so that a list of ordinary business data is no fault. A function that returned may
have had its effect, so that its value is believed to say "it did not happen" only where it has a vendor's own
documented form and no field besides: anybody may return ``{"id": …, "error": …}``.

GraphQL: https://spec.graphql.org/October2021/#sec-Errors · Shopify: https://shopify.dev/docs/api/usage/response-codes ·
Elasticsearch bulk: https://www.elastic.co/guide/en/elasticsearch/reference/current/docs-bulk.html · Graph ``$batch``:
https://learn.microsoft.com/en-us/graph/json-batching · DynamoDB, Kinesis, Firehose, EventBridge, SQS, SNS, S3:
https://docs.aws.amazon.com/boto3/latest/reference/services/ · Salesforce collections and composite:
https://developer.salesforce.com/docs/atlas.en-us.api_rest.meta/api_rest/resources_composite_sobjects_collections.htm ·
Slack: https://docs.slack.dev/apis/web-api/#responses
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_runguard.core.failures.answer import Answer, answer_in, answer_of, lowered
from airflow_runguard.core.failures.document import MAX_NODES, parsed_text
from airflow_runguard.core.failures.reading import http_status, item, names, read, response_status, type_keys
from airflow_runguard.core.failures.rule import Rule, open_end, rate, refused
from airflow_runguard.core.record import FailureClass

EMPTY = open_end("result-empty", "nothing came back where something must; nobody can say what was done")
ENVELOPE = open_end("result-says-error", "the answer says by itself that it is an error, and not what was done")
REFUSED = refused("result-refused", "the vendor took the request and refused what is in it")
REFUSED_UNDER_WAY = open_end(
    "result-refused-under-way",
    "a part of the query was refused while it was carried out",
    failure_class=FailureClass.VALIDATION,
)
UNPROCESSED = rate("result-unprocessed", "the vendor gave back what it had no capacity for at this moment")
NEVER = refused("result-too-expensive", "it costs more than the vendor's whole allowance holds; it can never pass")
_MAX_ITEMS = 10_000

# Families whose forms are known here, by their names.
AWS, ELASTIC, GRAPH = "AWS", "Elasticsearch, OpenSearch", "Microsoft Graph, Azure"
SALESFORCE, SHOPIFY, SLACK = "Salesforce", "Shopify", "Slack"


class Unchecked(Exception):
    """The error that a client would have raised of a response, had anybody asked it to."""

    def __init__(self, response: Any) -> None:
        super().__init__("nobody checked it")
        self.response = response


@dataclass(slots=True)
class Fault:
    """One thing that went wrong.

    :param otherwise: what it means where no vendor's rule knows it; believed, since it goes by the form.
    :param never: it costs more than there will ever be.
    :param answered: it stands in a response, whose host and headers say whose it is.
    """

    answer: Answer = field(default_factory=Answer)
    otherwise: Rule = ENVELOPE
    label: str = "the result"
    error: BaseException | None = None
    never: bool = False
    answered: bool = False


@dataclass(slots=True)
class Found:
    """:param done: items that were done. :param partial: why a part of it may have been done, where none is counted."""

    faults: list[Fault] = field(default_factory=list)
    done: int = 0
    partial: str = ""


def read_result(value: object, *, may_be_empty: bool) -> Found | None:
    """What is wrong with a value; ``None`` where nothing is."""
    if type(value) in (int, float, bool):
        return None
    if isinstance(value, BaseException):
        return Found([Fault(error=value)])
    if value is None or (isinstance(value, str | bytes | list | tuple | dict | set | frozenset) and len(value) == 0):
        return None if may_be_empty else Found([Fault(otherwise=EMPTY, label="an empty result")])
    if isinstance(value, str | bytes):
        return _document(parsed_text(value), Answer())
    if (unchecked := _unchecked(value)) is not None:
        return Found([unchecked])
    if isinstance(document := _fields(value), Mapping | list | tuple):
        return _document(document, Answer())
    if response_status(value) is None:
        return None
    answer = answer_of(value, frozenset(), {"response": value})
    return next(filter(None, (_document(part, answer) for part in answer.parts)), None)


_RESPONSES = names("""
    requests.Response httpx.Response httpx2.Response aiohttp.ClientResponse urllib3.BaseHTTPResponse
    urllib3.HTTPResponse http.HTTPResponse urllib.addinfourl httplib2.Response niquests.Response curl_cffi.Response
    tornado.HTTPResponse
""")


def _unchecked(value: object) -> Fault | None:
    """A client's response with an error status is judged as the error it did not raise; another object with such a
    number may be anything.
    """
    status = None if type(value) is dict else response_status(value)
    if status is None or status < 400:
        return None
    cls: Any = type(value)
    if not _RESPONSES.isdisjoint(type_keys(cls)):
        return Fault(error=Unchecked(value))
    return Fault(answer_of(value, frozenset(), {"response": value}), label=f"HTTP {status} in an object")


def _fields(value: object) -> Any:
    """A data class, a named tuple or a model of pydantic or attrs as a mapping; anything else as it is."""
    if isinstance(value, Mapping | list | str | bytes | int | float) or type(value) is tuple:
        return value
    cls = type(value)
    for listing in ("__dataclass_fields__", "model_fields", "__attrs_attrs__", "_fields"):
        listed = read(cls, listing)
        if isinstance(listed, Mapping | tuple) and listed:
            named = (one if isinstance(one, str) else read(one, "name") for one in listed)
            return {name: read(value, name) for name in named if isinstance(name, str)}
    return value


def _document(document: Any, around: Answer) -> Found | None:
    """:param around: the response that it came in, where there is one."""
    if isinstance(document, list | tuple):
        return _items(document)
    if not isinstance(document, Mapping):
        return None
    for look in (_carried, _bulk, _unprocessed, _user_errors):
        found = look(document)
        if found is not None:
            return found
    return _graphql(document, around) or _envelope(document, around)


def _only(document: Any, allowed: frozenset[str]) -> bool:
    """A documented form: a mapping that has no other fields than these."""
    return isinstance(document, Mapping) and document.keys() <= allowed


# -- many items --------------------------------------------------------------------------------------------------------


def _items(
    entries: list[Any] | tuple[Any, ...], vendor_of: Callable[[Any], str] | None = None, *, failed: bool = False
) -> Found | None:
    """A list of results, of which some may be exceptions or refusals (``gather``, Salesforce collections).

    :param vendor_of: whose form an item has. :param failed: the list holds what failed and nothing else.
    """
    vendor_of = vendor_of or _vendor_of_one
    found = Found(done=max(0, len(entries) - _MAX_ITEMS))
    for number, one in enumerate(entries[:_MAX_ITEMS]):
        if isinstance(one, BaseException):
            found.faults.append(Fault(error=one))
        elif (unchecked := _unchecked(one)) is not None:
            found.faults.append(unchecked)
        elif item_failed(entry := _fields(one)) or failed:
            found.faults.append(_item_fault(entry, f"item {number + 1}", vendor_of(entry)))
        else:
            found.done += 1
    return found if found.faults else None


def _carried(document: Mapping[Any, Any]) -> Found | None:
    """Exceptions that a mapping carries as values."""
    carried = [Fault(error=value) for value in document.values() if isinstance(value, BaseException)]
    return Found(carried, done=len(document) - len(carried)) if carried else None


# Where each vendor lists its items: the field, whose form it is, what says that some of them failed (``None``: only the
# items do), and the fields of an item that failed.
_Told = Callable[[Mapping[Any, Any]], bool]


def _positive(name: str) -> _Told:
    return lambda document: isinstance(item(document, name), int) and item(document, name) > 0


_ELASTIC_ITEM = names("_index _id _type status error failure_store")
_GRAPH_ITEM = names("id status headers body")
_COMPOSITE_ITEM = names("body httpHeaders httpStatusCode referenceId")
_ELASTIC_ERROR = names("status error")
_SALESFORCE_ERROR = names("message errorCode fields extendedErrorDetails")
_SALESFORCE_ROW = names("id success created errors")
_PUT_ITEM = names("ErrorCode ErrorMessage")
_SQS_ITEM = names("Id SenderFault Code Message")
_BULKS: tuple[tuple[str, str, _Told | None, frozenset[str]], ...] = (
    ("items", ELASTIC, lambda document: item(document, "errors") is True, _ELASTIC_ITEM),
    ("responses", GRAPH, None, _GRAPH_ITEM),
    ("compositeResponse", SALESFORCE, None, _COMPOSITE_ITEM),
    ("results", SALESFORCE, lambda document: item(document, "hasErrors") is True, names("statusCode result")),
    ("Records", AWS, _positive("FailedRecordCount"), _PUT_ITEM),
    ("RequestResponses", AWS, _positive("FailedPutCount"), _PUT_ITEM),
    ("Entries", AWS, _positive("FailedEntryCount"), _PUT_ITEM),
    ("Failed", AWS, lambda document: True, _SQS_ITEM),
    (
        "Errors",
        AWS,
        lambda document: "Deleted" in document or "ResponseMetadata" in document,
        names("Key VersionId Code Message"),
    ),
)
_ONLY_FAILED = ("Failed", "Errors")
# What else stands in such an answer.
_AROUND = names("""
    took ingest_took errors @odata.context @odata.nextLink hasErrors FailedRecordCount FailedPutCount FailedEntryCount
    EncryptionType Encrypted Successful Deleted RequestCharged ResponseMetadata
""")
_OPERATIONS = ("index", "create", "update", "delete")


def _bulk(document: Mapping[Any, Any]) -> Found | None:
    for name, vendor, told, fields in _BULKS:
        entries = item(document, name)
        if not isinstance(entries, list) or not entries or (told is not None and not told(document)):
            continue

        def vendor_of(entry: Any, name: str = name, vendor: str = vendor, fields: frozenset[str] = fields) -> str:
            return vendor if _only(document, _AROUND | {name}) and _is_item(entry, vendor, fields) else ""

        found = _items([_operation(entry) for entry in entries], vendor_of, failed=name in _ONLY_FAILED)
        if found is None and told is not None:
            found = Found([Fault(label=f"{name} of which some failed")])
        if found is not None:
            found.done += sum(len(item(document, others) or ()) for others in ("Successful", "Deleted"))
            return found
    return _one_of_many(document)


def _one_of_many(document: Mapping[Any, Any]) -> Found | None:
    """One item of a bulk answer by itself, as a batch settles them."""
    vendor, entry = _vendor_of_one(document), _operation(document)
    status = http_status(item(document, "status")) or 0
    if (
        vendor
        or (entry is not document and item_failed(entry))
        or (status >= 400 and document.keys() & {"body", "error"})
        or (_only(document, _SALESFORCE_ROW) and item(document, "success") is False)
    ):
        return Found([_item_fault(entry, "the result", vendor)])
    return None


def _operation(entry: Any) -> Any:
    if isinstance(entry, Mapping) and len(entry) == 1:
        for name in _OPERATIONS:
            if isinstance(item(entry, name), Mapping):
                return item(entry, name)
    return entry


def _is_item(entry: Any, vendor: str, fields: frozenset[str]) -> bool:
    """Whether an item that failed has the vendor's form: what must be there, and nothing that is not the vendor's."""
    if not _only(entry, fields):
        return False
    if vendor == ELASTIC:
        return isinstance(item(item(entry, "error"), "type"), str)
    return vendor != GRAPH or isinstance(item(entry, "headers"), Mapping) or _has_code(item(entry, "body"))


def _has_code(body: Any) -> bool:
    return isinstance(item(item(body, "error"), "code"), str)


def _vendor_of_one(entry: Any) -> str:
    """Whose form an item has that stands alone or in a bare list, if it failed; '' for nobody's."""
    if not isinstance(entry, Mapping):
        return ""
    inner = _operation(entry)
    if inner is not entry:
        return ELASTIC if item_failed(inner) and _is_item(inner, ELASTIC, _ELASTIC_ITEM) else ""
    if _only(entry, _GRAPH_ITEM) and item_failed(entry) and _has_code(item(entry, "body")):
        return GRAPH
    if _only(entry, _PUT_ITEM) and isinstance(item(entry, "ErrorCode"), str):
        return AWS
    if _only(entry, _SQS_ITEM) and isinstance(item(entry, "SenderFault"), bool) and "Code" in entry:
        return AWS
    if _only(entry, _ELASTIC_ERROR) and item_failed(entry) and isinstance(item(entry["error"], "root_cause"), list):
        return ELASTIC
    return SALESFORCE if _is_refused_row(entry) else ""


def _is_refused_row(entry: Mapping[Any, Any]) -> bool:
    """A row that Salesforce refused: nothing was made of it."""
    errors = item(entry, "errors")
    return (
        _only(entry, _SALESFORCE_ROW)
        and item(entry, "success") is False
        and not item(entry, "id")
        and item(entry, "created") is not True
        and isinstance(errors, list)
        and bool(errors)
        and all(isinstance(item(error, "statusCode"), str) for error in errors)
    )


def item_failed(entry: Any) -> bool:
    """Whether an item of a bulk answer says that it was not done."""
    if not isinstance(entry, Mapping):
        return False
    status = next(filter(None, (http_status(item(entry, n)) for n in ("status", "statusCode", "httpStatusCode"))), 0)
    error = _fields(item(entry, "error"))
    return (
        status >= 400
        or item(entry, "success") is False
        or isinstance(item(entry, "ErrorCode"), str)
        or (isinstance(error, Mapping | BaseException) and bool(error))
        or (_only(entry, _SALESFORCE_ERROR) and isinstance(item(entry, "errorCode"), str))
    )


def _item_fault(entry: Any, label: str, vendor: str) -> Fault:
    answer = answer_in(entry, lowered(item(entry, "headers")), vendor=vendor)
    refusal = vendor == SALESFORCE and answer.status is None
    label += f" (HTTP {answer.status})" if answer.status else ""
    return Fault(answer, REFUSED if refusal else ENVELOPE, label)


def _unprocessed(document: Mapping[Any, Any]) -> Found | None:
    for name in ("UnprocessedItems", "UnprocessedKeys"):
        left = item(document, name)
        if isinstance(left, Mapping) and left:
            fault = Fault(Answer(vendor=AWS), UNPROCESSED, label=name)
            return Found([fault], partial=f"what is not in {name} was done")
    return None


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
    if not isinstance(errors, list) or not errors or not all(isinstance(e, Mapping) and "message" in e for e in errors):
        return None
    extensions, data = item(document, "extensions"), item(document, "data")
    cost = item(extensions, "cost")
    asked, most = item(cost, "requestedQueryCost"), item(item(cost, "throttleStatus"), "maximumAvailable")
    never = isinstance(asked, int | float) and isinstance(most, int | float) and asked > most
    form = _only(document, _GRAPHQL)
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


def _user_errors(document: Mapping[Any, Any]) -> Found | None:
    """What Shopify's mutations refuse, field by field. One that was refused gives nothing else back."""
    data = item(document, "data")
    payloads = list(data.values()) if isinstance(data, Mapping) else []
    refusals = [errors for payload in payloads if isinstance(errors := item(payload, "userErrors"), list) and errors]
    if not refusals:
        return None
    rest = [value for payload in payloads if isinstance(payload, Mapping) for value in payload.values()]
    only = len(refusals) == len(payloads) and not any(value for value in rest if value not in refusals)
    vendor = SHOPIFY if _only(document, _MUTATION) else ""
    otherwise = REFUSED if vendor else REFUSED_UNDER_WAY
    faults = [
        Fault(answer_in({"errors": e}, vendor=vendor), otherwise, "userErrors inside a success") for e in refusals
    ]
    return Found(faults, partial="" if only else "a part of the answer has data")


_SLACKS = names("ok error errors warning needed provided response_metadata")


def _envelope(document: Mapping[Any, Any], around: Answer) -> Found | None:
    error, message = item(document, "error"), item(document, "message")
    unsuccessful = item(document, "ok") is False or item(document, "success") is False
    named = isinstance(error := _fields(error), Mapping | str) and bool(error)
    called = item(document, "status") in ("error", "fail", "failed") and bool(error or message)
    if not (unsuccessful or named or called):
        return None
    slack = item(document, "ok") is False and isinstance(error, str) and _only(document, _SLACKS)
    answer = answer_in({**document, "error": error}, around.headers, around.host, SLACK if slack else "")
    return Found([Fault(answer, label="an error inside a success", answered=around.status is not None)])
