"""What a vendor's answer says, read from whatever carries it: status, headers, codes, message, host.

Takes an exception, a response object or a plain parsed body. Facts only, bounded, and never through a method that could
go to the network: a body that was not read yet stays unread. What the facts mean is said by the rules.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import islice
from typing import Any
from urllib.parse import urlsplit

from airflow_runguard.core.failures.document import GRPC_AS_HTTP, MAX_BODY, MAX_TEXT, Said, document_in_text, parsed
from airflow_runguard.core.failures.reading import (
    gather,
    http_status,
    is_mapping,
    item,
    names,
    read,
    response_status,
    sequence,
    text,
)

MAX_HEADERS = 200
_SCALARS = (str, int, float)
_TEXTS = (str, bytes)


@dataclass(slots=True)
class Answer:
    """
    :param message: the vendor's own sentences, in lower case.
    :param parts: the parsed documents that the answer was read from.
    :param waits: what they say of a wait (:class:`~airflow_runguard.core.failures.document.Said`).
    :param vendor: the family whose documented form it has, where that tells.
    """

    status: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    codes: frozenset[str] = frozenset()
    message: str = ""
    host: str = ""
    parts: tuple[Any, ...] = ()
    waits: tuple[tuple[str, Any], ...] = ()
    vendor: str = ""


ERROR = names("""
    response request resp meta headers response_headers _http_headers status_code http_status status
    response_status_code _http_status code type error_code errno sqlstate pgcode reason operation_name failure body
    json_body http_body _body content data details error_details errors _content uri url request_info
    trailing_metadata retry_after_secs __cause__ __context__ __traceback__ os_error cause orig error inner_exception
    last_attempt exceptions history args
""")
"""What is looked for on an error."""
RESPONSE = names("status_code status headers url request _content data history raw retries")
"""What is looked for on a response."""


def answer_of(
    error: object, types: frozenset[str], have: Mapping[str, Any], there: Mapping[str, Any] | None = None
) -> Answer:
    """Read an exception, or whatever else carries a response.

    :param have: its attributes of :data:`ERROR`. :param there: its response's attributes of :data:`RESPONSE`.
    """
    response = have.get("response")
    if there is None:
        there = gather(response, RESPONSE) if response is not None else {}
    headers = _headers(response, there, have)
    status = _status(error, response, there, types, have)
    parts = [document for raw in _raw(response, there, have) if (document := parsed(raw)) is not None]
    if not types.isdisjoint(_TOLD_IN_TEXT) and (document := document_in_text(text(error))) is not None:
        parts.append(document)
    if status is None and not parts and not headers and packages(types) <= _SILENT:
        return Answer()
    said = Said()
    for part in parts:
        said.take(part)
    said.attributes(have)
    if headers:
        said.errortype(headers)
    if not said.messages:
        said.messages.append(_plain(error, there))
    return Answer(
        status if status is not None or not said.grpc else GRPC_AS_HTTP.get(said.grpc),
        headers,
        frozenset(said.codes),
        "\n".join(said.messages)[:MAX_TEXT].lower(),
        _host(there, have) if status is not None or headers else "",
        tuple(parts),
        tuple(said.waits),
    )


# Packages whose errors by themselves say no more than their class does.
_SILENT = names("airflow_runguard urllib3 httpcore httpcore2 ssl socket http tenacity")


def answer_in(body: object, headers: Mapping[str, str] | None = None, host: str = "", vendor: str = "") -> Answer:
    """Read a parsed body that came with a success, or one item of a bulk answer. Has the code ``inside`` as well."""
    said = Said()
    said.codes.add("inside")
    said.take(body)
    return Answer(
        _inner_status(body),
        headers or {},
        frozenset(said.codes),
        "\n".join(said.messages)[:MAX_TEXT].lower(),
        host,
        (body,),
        tuple(said.waits),
        vendor,
    )


# -- the status --------------------------------------------------------------------------------------------------------


# The Databricks SDK keeps the status in the class only.
# https://github.com/databricks/databricks-sdk-py/blob/main/databricks/sdk/errors/platform.py
_CLASS_AS_HTTP: Mapping[str, int] = {
    "databricks.BadRequest": 400,
    "databricks.Unauthenticated": 401,
    "databricks.PermissionDenied": 403,
    "databricks.NotFound": 404,
    "databricks.ResourceConflict": 409,
    "databricks.TooManyRequests": 429,
    "databricks.Cancelled": 499,
    "databricks.InternalError": 500,
    "databricks.NotImplemented": 501,
    "databricks.TemporarilyUnavailable": 503,
    "databricks.DeadlineExceeded": 504,
}
_STATUS_NAMES = ("status_code", "http_status", "status", "response_status_code", "_http_status")
# ``code`` is a status in these packages; elsewhere it may be anything (an exit code, a driver's number).
_CODE_IS_STATUS = frozenset({"google", "urllib", "tornado", "twilio", "werkzeug"})

# Sentences that a client library, and nobody else, makes of a status. Whole or after the caller's own words and ": ".
_STATUS_TEXT = re.compile(
    r"(?:^|: )(?:"
    r"([45]\d\d):\S"  # Airflow's HttpHook: 429:Too Many Requests
    r"|([45]\d\d) (?:Client|Server) Error: "  # requests
    r"|(?:Client|Server) error '([45]\d\d) "  # httpx
    r"|HTTP Error ([45]\d\d): "  # urllib
    r"|Error code: ([45]\d\d) - "  # openai, anthropic
    r"|([45]\d\d), message="  # aiohttp
    r"|<HttpError ([45]\d\d) when requesting "  # googleapiclient
    r"|too many ([45]\d\d) error responses"  # urllib3
    r")|, Status Code: ([45]\d\d)$"  # Airflow's Databricks hook
)
# Whose text may be all that is left of an answer.
_TOLD_IN_TEXT = frozenset({"airflow.AirflowException", "urllib3.ResponseError", "airflow_runguard.FromText"})


def status_in_text(message: str) -> int | None:
    found = _STATUS_TEXT.search(message[:MAX_TEXT])
    return http_status(int(next(filter(None, found.groups())))) if found else None


def _status(
    error: object, response: object, there: Mapping[str, Any], types: frozenset[str], have: Mapping[str, Any]
) -> int | None:
    """The HTTP status that the error carries (a gRPC code as the one it maps to)."""
    if response is not None:
        # Not "if response": requests calls a response with an error status false.
        status = http_status(there.get("status_code")) or http_status(there.get("status"))
        if status is None and is_mapping(response):
            status = http_status(item(item(response, "ResponseMetadata"), "HTTPStatusCode"))
        if status is not None:
            return status
    if not types.isdisjoint(_TOLD_IN_TEXT):
        # AirflowException's own status_code (500, or 404 for a missing Connection) is what Airflow's API would answer.
        return status_in_text(text(error))
    for name in _STATUS_NAMES:
        if name in have:
            status = http_status(have[name])
            if status is not None:
                return status
    for name in ("resp", "meta"):
        if name in have:
            status = response_status(have[name])
            if status is not None:
                return status
    if "grpc.RpcError" in types:
        return _grpc_status(error)
    if "code" in have and not _CODE_IS_STATUS.isdisjoint(packages(types)):
        return http_status(have["code"])
    return next((_CLASS_AS_HTTP[name] for name in types & _CLASS_AS_HTTP.keys()), None)


def _grpc_status(error: object) -> int | None:
    try:
        name, details = error.code().name, text(error.details())  # type: ignore[attr-defined]
    except Exception:
        return None
    # Said by the client of an *answer* that is too big: the work was done.
    if "larger than max" in details:
        return None
    return GRPC_AS_HTTP.get(name)


def _inner_status(body: object) -> int | None:
    """An error status that a body names: ``{"status": 429}``, ``{"error": {"code": 429}}``."""
    for place in (body, item(body, "error"), item(body, "Error")):
        for name in ("status", "code", "statusCode", "status_code", "httpStatusCode"):
            number = http_status(item(place, name)) if isinstance(place, Mapping) else None
            if number is not None:
                return number
    return None


@lru_cache(maxsize=1_024)
def packages(types: frozenset[str]) -> frozenset[str]:
    return frozenset(name.partition(".")[0] for name in types) - {"builtins"}


# -- headers and host --------------------------------------------------------------------------------------------------


def _headers(response: object, there: Mapping[str, Any], have: Mapping[str, Any]) -> dict[str, str]:
    """All headers of the answer under lower-case names; the response's own win."""
    sources = [have[name] for name in ("resp", "_http_headers", "response_headers", "headers") if name in have]
    if "meta" in have:
        sources.append(read(have["meta"], "headers"))
    if "headers" in there:
        sources.append(there["headers"])
    elif is_mapping(response):
        sources.append(item(item(response, "ResponseMetadata"), "HTTPHeaders"))
    found = lowered(sources[0]) if sources else {}
    for source in sources[1:]:
        found.update(lowered(source))
    return found


def lowered(headers: object) -> dict[str, str]:
    """Headers under lower-case names, as text."""
    found: dict[str, str] = {}
    try:
        if not headers:
            return found
        for name, value in islice(headers.items(), MAX_HEADERS):  # type: ignore[attr-defined]
            if isinstance(name, bytes):
                name = name.decode("latin-1")
            if isinstance(value, bytes):
                value = value.decode("latin-1")
            elif type(value) is not str:
                value = text(value) if isinstance(value, _SCALARS) else ""
            if isinstance(name, str):
                found[str.lower(name)] = value[:MAX_TEXT].strip()
    except Exception:
        return found
    return found


def _host(there: Mapping[str, Any], have: Mapping[str, Any]) -> str:
    for source in (there, have):
        for name in ("url", "uri", "request"):
            if name in source:
                found = _host_in(text(read(source[name], "url") if name == "request" else source[name])[:500])
                if found:
                    return found
    host = read(have["request_info"], "real_url", "host") if "request_info" in have else None
    return host if isinstance(host, str) else ""


@lru_cache(maxsize=1_024)
def _host_in(url: str) -> str:
    try:
        return urlsplit(url).hostname or ""
    except ValueError:
        return ""


# -- the body ----------------------------------------------------------------------------------------------------------


_BESIDE: tuple[str, ...] = ("details", "error_details", "errors")
_BODIES = ("json_body", "body", "http_body", "_body", "content", "data", "_content", *_BESIDE)


def _raw(response: object, there: Mapping[str, Any], have: Mapping[str, Any]) -> list[Any]:
    """Wherever clients keep a body, as bytes, text or parsed. Never a property that would read from the network."""
    if there.get("_content"):  # requests and httpx: what was read already; clients keep the same again on the error
        found, left = [there["_content"]], _BESIDE
    elif is_mapping(response):  # botocore
        found, left = [response], _BESIDE
    else:
        found, left = [there.get("data")], _BODIES  # slack_sdk
    found += [have[name] for name in left if name in have]
    found += [argument for argument in sequence(have.get("args")) if not isinstance(argument, _TEXTS)]
    return found


def _plain(error: object, there: Mapping[str, Any]) -> str:
    """The message where no document has one: a body that is plain text, else the error's own words. Never a page."""
    raw = there.get("_content")
    if isinstance(raw, bytes) and 0 < len(raw) <= MAX_BODY:
        content = raw[:MAX_TEXT].decode("utf-8", "replace")
    elif isinstance(error, BaseException):
        content = text(error)[:MAX_TEXT]
    else:
        return ""
    return "" if content.lstrip()[:1] == "<" and "<HttpError" not in content[:20] else content
