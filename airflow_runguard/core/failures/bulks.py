"""Answers about many items: where each vendor lists them, which of them failed, and whose form those have.

A shape is known by fields that errors have and results have not. One item is read in ``items.py``; what its code means,
the vendor's rules say.

Elasticsearch bulk: https://www.elastic.co/guide/en/elasticsearch/reference/current/docs-bulk.html · Graph ``$batch``:
https://learn.microsoft.com/en-us/graph/json-batching · DynamoDB, ECS, Kinesis, Firehose, EventBridge, SES, SQS, SNS,
S3: https://docs.aws.amazon.com/boto3/latest/reference/services/ · Salesforce collections and composite:
https://developer.salesforce.com/docs/atlas.en-us.api_rest.meta/api_rest/resources_composite_sobjects_collections.htm ·
OpenAI's batches: https://platform.openai.com/docs/guides/batch · Anthropic's:
https://docs.anthropic.com/en/docs/build-with-claude/batch-processing · Meta's:
https://developers.facebook.com/docs/graph-api/batch-requests · BigQuery:
https://cloud.google.com/bigquery/docs/reference/rest/v2/tabledata/insertAll and
https://cloud.google.com/bigquery/docs/streaming-data-into-bigquery · Google Ads:
https://developers.google.com/google-ads/api/docs/best-practices/partial-failures · HubSpot:
https://developers.hubspot.com/docs/api-reference/error-handling#multi-status-errors · Postmark:
https://postmarkapp.com/developer/api/email-api#send-batch-emails
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from airflow_runguard.core.failures.answer import Answer, answer_in
from airflow_runguard.core.failures.found import (
    AWS,
    ELASTIC,
    GOOGLE,
    GRAPH,
    REFUSED,
    REFUSED_UNDER_WAY,
    SALESFORCE,
    Fault,
    Found,
    count,
    fields_of,
    only,
    plain,
    unchecked,
)
from airflow_runguard.core.failures.items import (
    BIGQUERY_ROW,
    COMPOSITE_ITEM,
    ELASTIC_ITEM,
    GRAPH_ITEM,
    PARTIQL_ITEM,
    PUT_ITEM,
    S3_ITEM,
    SALESFORCE_ROW,
    SES_ITEM,
    SQS_ITEM,
    is_item,
    is_metas,
    item_failed,
    item_fault,
    line_fault,
    mail_failed,
    numbered,
    operation,
    vendor_of_one,
)
from airflow_runguard.core.failures.reading import http_status, item, names
from airflow_runguard.core.failures.rule import open_end, rate

UNPROCESSED = rate("result-unprocessed", "the vendor gave back what it had no capacity for at this moment")
NULL = open_end(
    "result-null",
    "the answer to this request is missing: it was not finished in time, or left out as a success that another one "
    "depends on (send omit_response_on_success=false)",
)
_MAX_FAULTS = 1_000


# -- lists -------------------------------------------------------------------------------------------------------------


def items_in(
    entries: list[Any] | tuple[Any, ...],
    vendor_of: Callable[[Any], str] | None = None,
    *,
    failed: bool = False,
    depth: int = 2,
) -> Found | None:
    """A list of results, of which some may be exceptions or refusals (``gather``, Salesforce collections), or lists of
    such (elasticsearch-py's ``bulk`` and ``streaming_bulk``).

    :param vendor_of: whose form an item has. :param failed: the list holds what failed and nothing else.
    """
    vendor_of = vendor_of or vendor_of_one
    found = Found()
    nulls = _metas_nulls(entries)
    for number, one in enumerate(entries):
        if isinstance(one, str | int | float) and not failed:
            found.done += 1
        elif isinstance(one, BaseException):
            found.faults.append(Fault(error=one))
        elif (fault := unchecked(one)) is not None:
            found.faults.append(fault)
        elif type(one) in (list, tuple):
            inner = items_in(one, depth=depth - 1) if depth and one else None
            found.done += inner.done if inner else 1
            found.faults += inner.faults if inner else ()
        elif item_failed(entry := fields_of(one)) or failed:
            found.faults.append(item_fault(entry, f"item {number + 1}", vendor_of(entry)))
        elif one is None and nulls:
            found.faults.append(Fault(otherwise=NULL, label=f"item {number + 1}"))
        else:
            found.done += 1
    if len(found.faults) > _MAX_FAULTS:
        found.partial = f"{len(found.faults) - _MAX_FAULTS:,} more items failed, which were not read"
        del found.faults[_MAX_FAULTS:]
    return found if found.faults else None


def _metas_nulls(entries: list[Any] | tuple[Any, ...]) -> bool:
    """Whether what is missing in the list is missing in an answer of Meta's."""
    there = [entry for entry in entries[:50] if entry is not None]
    return len(there) < len(entries[:50]) and bool(there) and all(is_metas(entry) for entry in there)


def _carried(document: Mapping[Any, Any]) -> Found | None:
    """Exceptions that a mapping carries as values."""
    carried = [Fault(error=value) for value in document.values() if isinstance(value, BaseException)]
    return Found(carried, done=len(document) - len(carried)) if carried else None


# -- where each vendor lists its items ---------------------------------------------------------------------------------

# The field, whose form it is, what says that some of them failed (``None``: only the items do), and the fields of an
# item that failed.
_Told = Callable[[Mapping[Any, Any]], bool]


def _positive(name: str) -> _Told:
    return lambda document: count(document, name) > 0


def _deleted(document: Mapping[Any, Any]) -> bool:
    entries = item(document, "Errors")
    return "Deleted" in document or "ResponseMetadata" in document or only(entries[0], S3_ITEM)


_BULKS: tuple[tuple[str, str, _Told | None, frozenset[str]], ...] = (
    ("items", ELASTIC, lambda document: item(document, "errors") is True, ELASTIC_ITEM),
    ("responses", GRAPH, None, GRAPH_ITEM),
    ("compositeResponse", SALESFORCE, None, COMPOSITE_ITEM),
    ("results", SALESFORCE, lambda document: item(document, "hasErrors") is True, names("statusCode result")),
    ("Records", AWS, _positive("FailedRecordCount"), PUT_ITEM),
    ("RequestResponses", AWS, _positive("FailedPutCount"), PUT_ITEM),
    ("Entries", AWS, _positive("FailedEntryCount"), PUT_ITEM),
    ("Failed", AWS, lambda document: True, SQS_ITEM),
    ("Errors", AWS, _deleted, S3_ITEM),
    ("BulkEmailEntryResults", AWS, None, SES_ITEM),
    ("Status", AWS, None, SES_ITEM),
    ("Responses", AWS, None, PARTIQL_ITEM),
)
_ONLY_FAILED = ("Failed", "Errors")
# What else stands in such an answer.
_AROUND = names("""
    took ingest_took errors @odata.context @odata.nextLink hasErrors FailedRecordCount FailedPutCount FailedEntryCount
    EncryptionType Encrypted Successful Deleted RequestCharged ConsumedCapacity ResponseMetadata
""")


def bulk(document: Mapping[Any, Any]) -> Found | None:
    """What went wrong in an answer about many items, or in one of them by itself; ``None`` where it is no such answer
    or nothing did.
    """
    for look in (_carried, _listed, _insert_errors, _partial_failure, _multi_status, _counted, _one_of_many):
        found = look(document)
        if found is not None:
            return found
    return _unprocessed(document)


def _listed(document: Mapping[Any, Any]) -> Found | None:
    for name, vendor, told, fields in _BULKS:
        entries = item(document, name)
        if not isinstance(entries, list) or not entries or (told is not None and not told(document)):
            continue

        def vendor_of(entry: Any, name: str = name, vendor: str = vendor, fields: frozenset[str] = fields) -> str:
            return vendor if only(document, _AROUND | {name}) and is_item(entry, vendor, fields) else ""

        found = items_in([operation(entry) for entry in entries], vendor_of, failed=name in _ONLY_FAILED)
        if found is None and told is not None:
            found = Found([Fault(label=f"{name} of which some failed")])
        if found is not None:
            found.done += sum(len(item(document, others) or ()) for others in ("Successful", "Deleted"))
            return found
    return None


def _insert_errors(document: Mapping[Any, Any]) -> Found | None:
    """BigQuery: ``insertErrors`` of ``tabledata.insertAll``."""
    rows = item(document, "insertErrors")
    return rows_refused(rows, only(document, names("kind insertErrors"))) if isinstance(rows, list) and rows else None


def rows_refused(rows: list[Any], form: bool) -> Found | None:
    """BigQuery's list of rows that it did not insert, also as ``insert_rows_json`` gives it back.

    Where one was "stopped" for the sake of others, no row at all was inserted. Without such a row nobody can say: the
    others may have been inserted (``skipInvalidRows``), or there were none.

    :param form: nothing else stands around it.
    """
    if not all(only(row, BIGQUERY_ROW) and isinstance(item(row, "errors"), list) for row in rows):
        return None
    if not all(isinstance(item(row, "index"), int) for row in rows):
        return None
    reasons = [item(error, "reason") for row in rows for error in row["errors"]]
    none = form and "stopped" in reasons
    told = [row for row in rows if {item(error, "reason") for error in row["errors"]} != {"stopped"}] or rows
    faults = [
        Fault(
            answer_in({"errors": row["errors"]}, vendor=GOOGLE if none else ""),
            REFUSED if none else REFUSED_UNDER_WAY,
            f"row {row['index']} of insertErrors",
        )
        for row in told[:_MAX_FAULTS]
    ]
    return Found(faults, partial="" if none else "rows that are not among the insertErrors may have been inserted")


def _partial_failure(document: Mapping[Any, Any]) -> Found | None:
    """Google Ads: operations that failed beside others that were done."""
    for name in ("partialFailureError", "partial_failure_error"):
        error = fields_of(item(document, name))
        if isinstance(error, Mapping) and error:
            fault = Fault(answer_in({"error": plain(error)}), REFUSED_UNDER_WAY, name)
            return Found([fault], partial=f"what is not in {name} was done")
    return None


def _multi_status(document: Mapping[Any, Any]) -> Found | None:
    """HubSpot: a batch of which some failed. Elasticsearch: what a query by which documents are changed did not do.
    ECS: tasks that were not placed.
    """
    errors = item(document, "errors")
    if count(document, "numErrors", "num_errors") and isinstance(errors, list) and errors:
        return Found(
            [Fault(answer_in(plain(error)), REFUSED_UNDER_WAY, "numErrors") for error in errors[:_MAX_FAULTS]],
            partial="what is among the results was done" if item(document, "results") else "",
        )
    failures = item(document, "failures")
    if isinstance(failures, list) and failures and ("tasks" in document or "timed_out" in document):
        faults = [Fault(answer_in(plain(one)), label="one of the failures") for one in failures[:_MAX_FAULTS]]
        return Found(faults, partial="what is not among the failures may have been done")
    return None


# What is only counted: the field that counts, and one that stands beside it.
_COUNTS = (
    ("numErrors", "results"),
    ("num_errors", "results"),
    ("numberRecordsFailed", "numberRecordsProcessed"),
)


def _counted(document: Mapping[Any, Any]) -> Found | None:
    for name, beside in _COUNTS:
        if count(document, name) and beside in document:
            return Found([Fault(label=f"{name}={count(document, name)}")], partial="the others may have been done")
    return None


def _one_of_many(document: Mapping[Any, Any]) -> Found | None:
    """One item of a bulk answer by itself, as a batch settles them."""
    vendor, entry = vendor_of_one(document), operation(document)
    status = http_status(item(document, "status")) or 0
    if (
        vendor
        or (entry is not document and item_failed(entry))
        or (status >= 400 and document.keys() & {"body", "error"})
        or (only(document, SALESFORCE_ROW) and item(document, "success") is False)
        or line_fault(document) is not None
        or numbered(document)
        or mail_failed(document)
        or is_metas(document, failed=True)
    ):
        return Found([item_fault(document, "the result", vendor)])
    return None


def _unprocessed(document: Mapping[Any, Any]) -> Found | None:
    for name in ("UnprocessedItems", "UnprocessedKeys"):
        left = item(document, name)
        if isinstance(left, Mapping) and left:
            fault = Fault(Answer(vendor=AWS), UNPROCESSED, label=name)
            return Found([fault], partial=f"what is not in {name} was done")
    return None
