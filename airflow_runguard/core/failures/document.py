"""What the documents of an answer say: bodies parsed, and codes and sentences out of the fields where vendors put them.

Bounded and forgiving: what is too large, too deep or not a document says nothing. Who carried the body is the business
of ``answer.py``, what a code means that of the rules.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from airflow_runguard.core.failures.reading import integer, is_mapping, names, read, sequence
from airflow_runguard.core.failures.rule import fold

MAX_BODY = 256 * 1024
"""Bytes of a body that are parsed; of a larger one nothing, since half a document proves nothing."""
MAX_TEXT = 4_000
MAX_NODES = 400

# https://github.com/googleapis/googleapis/blob/master/google/rpc/code.proto
GRPC_AS_HTTP: Mapping[str, int] = {
    "CANCELLED": 499,
    "UNKNOWN": 500,
    "INVALID_ARGUMENT": 400,
    "DEADLINE_EXCEEDED": 504,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "PERMISSION_DENIED": 403,
    "UNAUTHENTICATED": 401,
    "RESOURCE_EXHAUSTED": 429,
    "FAILED_PRECONDITION": 400,
    "ABORTED": 409,
    "OUT_OF_RANGE": 400,
    "UNIMPLEMENTED": 501,
    "INTERNAL": 500,
    "UNAVAILABLE": 503,
    "DATA_LOSS": 500,
}


def parsed(raw: object) -> Iterator[Any]:
    """The document in a raw body; also each of a short list of documents."""
    if is_mapping(raw):
        yield raw
    elif isinstance(raw, list | tuple):
        if any(is_mapping(entry) for entry in raw[:MAX_NODES]):
            yield raw
    elif isinstance(raw, bytes | bytearray | str) and 1 < len(raw) <= MAX_BODY:
        document = parsed_text(raw)
        if document is not None:
            yield document


def parsed_text(raw: bytes | bytearray | str) -> Any:
    """JSON, or an XML error's codes as a document; ``None`` for anything else."""
    try:
        content = raw.decode("utf-8") if isinstance(raw, bytes | bytearray) else str.__str__(raw)
        start = content.lstrip("\ufeff \r\n\t")
        if start[:1] in ("{", "["):
            return json.loads(start)
        if start[:1] == "<" and not start[:15].lower().startswith(("<!doctype html", "<html")):
            return _xml(start[:MAX_TEXT])
    except (ValueError, RecursionError):
        pass
    return None


_XML = re.compile(
    r"<(?:\w+:)?(code|errorCode|exceptionCode|faultcode|message|exceptionMessage|faultstring)>([^<]{1,500})<", re.I
)


def _xml(content: str) -> dict[str, Any] | None:
    """The error of an XML answer (AWS, Azure Storage, SOAP), without a parser that an attacker could feed."""
    found = {"code": "", "message": ""}
    for name, value in _XML.findall(content):
        kind = "code" if name.lower() in ("code", "errorcode", "exceptioncode", "faultcode") else "message"
        found[kind] = found[kind] or value.rpartition(":")[2] if kind == "code" else found[kind] or value
    return found if found["code"] else None


# Where errors name their codes, and what they wrap them in. Everything else in a body may be the user's own text.
_CODE_FIELDS = names("""
    code type reason status error error_code errorcode error_type errortype error_subcode __type statuscode
    category policyname subcategory domain decline_code status_code substatus sqlstate errorclass quotaerror
    classification subcode
""")
_MESSAGE_FIELDS = names("""
    message reason error_description description detail title msg error errormessage error_message quotaid quota_limit
    quota_unit quotalimit errors
""")
_WRAPPERS = names("""
    error errors details detail extensions fault innererror root_cause caused_by failed_shards failures parameters
    violations metadata errorcode cancellationreasons errordetails error_data exception quota_error_details meta body
    response
""")
_CODE = re.compile(r"[\w.:/#-]{1,120}")


_LISTS = (list, tuple)
_CODE_ATTRIBUTES = names("code type error_code errno sqlstate pgcode reason status")


class Said:
    """The codes and sentences of a document, from the fields where vendors put them."""

    def __init__(self) -> None:
        self.codes: set[str] = set()
        self.messages: list[str] = []
        self.grpc = ""
        self.nodes = 0

    def take(self, part: Any, depth: int = 0) -> None:
        self.nodes += 1
        if self.nodes > MAX_NODES or depth > 6:
            return
        if type(part) is not dict:
            if isinstance(part, _LISTS):
                for entry in part[:50]:
                    self.take(entry, depth + 1)
                return
            if not is_mapping(part):
                return
        try:
            entries = list(islice(part.items(), MAX_NODES))
        except Exception:
            return
        for key, value in entries:
            if not isinstance(key, str):
                continue
            name = str.lower(key)
            told = isinstance(value, str)
            if told or isinstance(value, int):
                if name in _CODE_FIELDS:
                    self.code(name, value)
                if told and name in _MESSAGE_FIELDS:
                    self.message(value)
                elif told and depth and name.endswith("error"):
                    self.code(name, value)  # Google Ads: {"errorCode": {"quotaError": "RESOURCE_EXHAUSTED"}}
            elif name in _WRAPPERS:
                self.take(value, depth + 1)
                if name in ("error", "errors") and isinstance(value, list):
                    for entry in value[:50]:
                        if isinstance(entry, str):
                            self.message(entry)

    def code(self, name: str, value: str | int) -> None:
        if isinstance(value, bool):
            return
        if isinstance(value, int) or value.isdecimal():
            number = integer(value)
            if number is not None:
                self.codes.add(f"{fold(name)}={number}")
        elif _CODE.fullmatch(value):
            if value in GRPC_AS_HTTP and not self.grpc:
                self.grpc = value
            # com.amazonaws.dynamodb.v20120810#ThrottlingException · ThrottlingException:http://…
            word = fold(value.rpartition("#")[2].partition(":http")[0])
            self.codes.add(word)
            if name in ("policyname", "category"):
                self.codes.add(f"{name}={word}")

    def message(self, value: str) -> None:
        if len(self.messages) < 20 and value:
            self.messages.append(value[:MAX_TEXT])

    def attributes(self, have: Mapping[str, Any]) -> None:
        """Codes that clients keep beside the body, or instead of it."""
        for name in _CODE_ATTRIBUTES.intersection(have):
            value = have[name]
            if isinstance(value, str | int):
                self.code(name, value)
        operation = have.get("operation_name")
        if isinstance(operation, str):
            self.codes.add(f"operation={fold(operation[:120])}")
        first = next(iter(sequence(have.get("args"))), None)
        if isinstance(first, int):
            self.code("errno", first)
        quota = read(have.get("failure"), "errors")  # Google Ads: a protobuf list
        if quota is not None:
            try:
                for one in islice(quota, 20):
                    name = read(one, "error_code", "quota_error", "name")
                    if isinstance(name, str) and name not in ("UNSPECIFIED", "UNKNOWN"):
                        self.codes.add(fold("quotaerror" + name))
            except Exception:
                return

    def errortype(self, headers: Mapping[str, str]) -> None:
        for name in ("x-amzn-errortype", "x-ms-error-code"):
            if headers.get(name):
                self.code("code", headers[name].partition(":")[0])
        if headers.get("x-should-retry", "").lower() == "false":
            self.codes.add(fold("x-should-retry=false"))


_PRINTED = re.compile(r"Error code: \d{3} - (\{.*\})", re.DOTALL)
_BOTOCORE = re.compile(
    r"An error occurred \((\w{1,100})\) when calling the (\w{1,100}) operation(?: \(reached max retries: (\d{1,3})\))?"
)
_GRPC = re.compile(r"status = StatusCode\.([A-Z_]{1,30})")


def document_in_text(message: str) -> Any:
    """The body that a client printed into its message, for where only the text is left."""
    try:
        if printed := _PRINTED.search(message[:MAX_BODY]):
            return ast.literal_eval(printed[1])
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return None
    if aws := _BOTOCORE.search(message[:MAX_TEXT]):
        return {"Error": {"Code": aws[1]}, "ResponseMetadata": {"RetryAttempts": int(aws[3] or 0)}}
    if grpc := _GRPC.search(message[:MAX_TEXT]):
        return {"status": grpc[1]}
    return None
