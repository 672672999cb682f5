"""What the documents of an answer say: bodies parsed, and codes and sentences out of the fields where vendors put them.

Bounded and forgiving: what is too large, too deep or not a document says nothing. Who carried the body is the business
of ``answer.py``, what a code means that of the rules.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import islice
from typing import Any

from airflow_runguard.core.failures.reading import integer, is_mapping, names, read, sequence
from airflow_runguard.core.failures.rule import fold

MAX_BODY = 256 * 1024
"""Bytes of a body that are parsed; of a larger one nothing, since half a document proves nothing."""
MAX_TEXT = 4_000
MAX_NODES = 400
_LISTS = (list, tuple)
_RAW = (bytes, bytearray, str)
_SCALARS = (str, int, float)

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


def parsed(raw: object) -> Any:
    """The document in a raw body: a mapping, or a list with mappings; ``None`` for anything else."""
    if isinstance(raw, _RAW):
        return parsed_text(raw) if 1 < len(raw) <= MAX_BODY else None
    if isinstance(raw, _LISTS):
        return raw if any(map(is_mapping, raw[:MAX_NODES])) else None
    return raw if is_mapping(raw) else None


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
_MAX_CODE = 121
_CODE = re.compile(r"[\w.:/#-]{1,120}")


@lru_cache(maxsize=4_096)
def _codes(name: str, value: str | int) -> tuple[str, ...]:
    """What a field's value is to the rules: folded, a number under its field's name."""
    if isinstance(value, int) or value.isdecimal():
        number = integer(value)
        return () if number is None else (f"{fold(name)}={number}",)
    if not _CODE.fullmatch(value):
        return ()
    # com.amazonaws.dynamodb.v20120810#ThrottlingException · ThrottlingException:http://…
    word = fold(value.rpartition("#")[2].partition(":http")[0])
    return (word, f"{name}={word}") if name in ("policyname", "category") else (word,)


_WAIT_FIELDS = names("""
    retry_after retryafter retry_after_seconds retryafterseconds retry_after_secs retrydelay retry_after_ms retryafterms
    cost
""")
_CODES, _MESSAGES, _INSIDE, _WAITS = 1, 2, 4, 8
_KINDS: dict[str, int] = {}
for _listed, _kind in (
    (_CODE_FIELDS, _CODES),
    (_MESSAGE_FIELDS, _MESSAGES),
    (_WRAPPERS, _INSIDE),
    (_WAIT_FIELDS, _WAITS),
):
    for _name in _listed:
        _KINDS[_name] = _KINDS.get(_name, 0) | _kind
_CODE_ATTRIBUTES = names("code type error_code errno sqlstate pgcode reason status")


class Said:
    """What a document says, from the fields where vendors put it: codes, sentences, and how long to wait.

    ``waits`` has the fields that tell of a wait as they stand there, under their names in lower case; a protobuf
    message under ``""``.
    """

    def __init__(self) -> None:
        self.codes: set[str] = set()
        self.messages: list[str] = []
        self.waits: list[tuple[str, Any]] = []
        self.grpc = ""
        self.nodes = 0

    def take(self, part: Any, depth: int = 0) -> None:
        self.nodes += 1
        if self.nodes > MAX_NODES or depth > 6:
            return
        if isinstance(part, _LISTS):
            for entry in part[:50]:
                self.take(entry, depth + 1)
            return
        if not is_mapping(part):
            if read(part, "retry_delay") is not None:
                self.waits.append(("", part))
            return
        try:
            entries = list(islice(part.items(), MAX_NODES))
        except Exception:
            return
        for key, value in entries:
            if not isinstance(key, str):
                continue
            name = str.lower(key)
            kind = _KINDS.get(name, 0)
            if isinstance(value, _SCALARS):
                if kind & _CODES:
                    self.code(name, value)
                if kind & _WAITS:
                    self.waits.append((name, value))
                if kind & _MESSAGES:
                    self.message(value)
                elif depth and name.endswith("error"):
                    self.code(name, value)  # Google Ads: {"errorCode": {"quotaError": "RESOURCE_EXHAUSTED"}}
            elif kind & _INSIDE:
                self.take(value, depth + 1)
                if name in ("error", "errors") and isinstance(value, list):
                    for entry in value[:50]:
                        self.message(entry)
            elif kind & _WAITS:
                self.waits.append((name, value))

    def code(self, name: str, value: Any) -> None:
        if isinstance(value, str):
            value = str.__str__(value)[:_MAX_CODE]
            if value in GRPC_AS_HTTP and not self.grpc:
                self.grpc = value
        elif isinstance(value, bool) or not isinstance(value, int):
            return
        self.codes.update(_codes(name, value))

    def message(self, value: Any) -> None:
        if isinstance(value, str) and value and len(self.messages) < 20:
            self.messages.append(value[:MAX_TEXT])

    def attributes(self, have: Mapping[str, Any]) -> None:
        """Codes that clients keep beside the body, or instead of it."""
        for name in _CODE_ATTRIBUTES.intersection(have):
            self.code(name, have[name])
        operation = have.get("operation_name")
        if isinstance(operation, str):
            self.codes.add(f"operation={fold(operation[:120])}")
        for first in sequence(have.get("args")):
            if isinstance(first, int):
                self.code("errno", first)
            break
        if "failure" in have:  # Google Ads: a protobuf list
            quota = read(have["failure"], "errors")
            try:
                for one in islice(quota or (), 20):
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
