"""How long the vendor asks to wait, in seconds: from headers, else the body, else its prose.

The first source that says something usable counts, in the order of :func:`wait_seconds`. A date counts against the
response's own ``Date``, since the worker's clock may be wrong; without one, against ``now``. What lies in the past is
no wait (0), never a negative one; what cannot be read for sure is no hint (``None``). No wait is longer than
:data:`LONGEST`, so that whoever adds it to a time stays within the years that there are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import partial
from itertools import islice
from typing import Any

from airflow_runguard.core.failures.answer import Answer
from airflow_runguard.core.failures.reading import item, read, text

# Clients and vendors print a float with up to 17 digits. \d would take the digits of every script.
_NUMBER = re.compile(r"[0-9]{1,14}(\.[0-9]{1,20})?")
_UNITS = {"d": 86_400.0, "h": 3_600.0, "m": 60.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "µs": 1e-6, "μs": 1e-6, "ns": 1e-9}
_GO = re.compile(r"(?:[0-9]{1,9}(?:\.[0-9]{1,20})?(?:ms|us|µs|μs|ns|d|h|m|s))+")
_GO_PART = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,20})?)(ms|us|µs|μs|ns|d|h|m|s)")
_EPOCH = 1e9
"""From here on a number is a moment (2001 and later), not a span (31 years and longer)."""
LONGEST = _EPOCH
"""Seconds. Who asks for more asks never to be called again; how long a pause may be is for its own limit to say."""

MILLISECONDS = ("retry-after-ms", "x-ms-retry-after-ms", "x-retry-after-ms", "grpc-retry-pushback-ms")
SECONDS = (
    "retry-after",
    "x-retry-after",
    "x-ratelimit-retry-after",
    "x-ratelimit-reset-after",
    "ratelimit-reset-after",
)


def wait_seconds(answer: Answer, have: Mapping[str, Any], now: datetime | None) -> float | None:
    """The vendor's wait, never negative. See RFC 9110, section 10.2.3, for ``Retry-After``.

    :param have: attributes of the error that carries the answer.
    """
    start = _Start(answer.headers, now)
    wait = _in_headers(answer.headers, start) if answer.headers else None
    for name, value in answer.waits:
        wait = _in_body(name, value, start) if wait is None else wait
    if wait is None:
        wait = _protobuf(have)
    if wait is None:
        wait = _in_prose(answer.message, start)
    return None if wait is None else min(wait, LONGEST)


class _Start:
    """The moment that dates count against, read when the first one comes up."""

    def __init__(self, headers: Mapping[str, str], now: datetime | None) -> None:
        self.headers, self.now = headers, now

    def until(self, moment: datetime | float) -> float | None:
        """Seconds until a moment (or seconds since 1970), never negative; ``None`` where nobody knows the time."""
        start = _date(self.headers.get("date", "")) or self.now
        if start is None:
            return None
        if start.tzinfo is None:
            start = start.replace(tzinfo=UTC)
        end = moment.timestamp() if isinstance(moment, datetime) else moment
        return max(0.0, end - start.timestamp())


def _in_headers(headers: Mapping[str, str], start: _Start) -> float | None:
    for names, reading in ((MILLISECONDS, _milliseconds), (SECONDS, partial(_span_or_moment, start=start))):
        for name in names:
            if name in headers and (wait := reading(headers[name])) is not None:
                return wait
    wait = _exhausted(headers, start)
    return _vendors(headers) if wait is None else wait


def _milliseconds(value: str) -> float | None:
    return float(value) / 1000 if _NUMBER.fullmatch(value) else None


def _span_or_moment(value: str, start: _Start) -> float | None:
    """Seconds, a Go duration, epoch seconds or milliseconds, RFC 3339, or an HTTP date."""
    if _NUMBER.fullmatch(value):
        number = float(value)
        if number < _EPOCH:
            return number
        while number >= _EPOCH * 100:  # milliseconds, microseconds
            number /= 1000
        return start.until(number)
    if _GO.fullmatch(value):
        return sum(float(number) * _UNITS[unit] for number, unit in _GO_PART.findall(value))
    moment = _date(value)
    return None if moment is None else start.until(moment)


def _date(value: str) -> datetime | None:
    if len(value) < 10 or value.isdecimal():
        return None
    try:
        at = datetime.fromisoformat(value) if value[4:5] == "-" else parsedate_to_datetime(value)
    except Exception:
        return None
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)


# -- the exhausted bucket decides --------------------------------------------------------------------------------------

_BUCKET = re.compile(r"(?:^|-)(?:ratelimit|rate-limit|ratelimits)(?:-|$)")
_STRUCTURED = re.compile(r"(?:^|[;,\s])\s*(remaining|resets?|r|t)\s*=\s*([0-9]{1,12})", re.IGNORECASE)


def _exhausted(headers: Mapping[str, str], start: _Start) -> float | None:
    """The latest reset among the buckets that are empty; where no bucket says how full it is, the latest at all."""
    left: dict[str, float | None] = {}
    resets: dict[str, float] = {}
    for name, value in headers.items():
        if "limit" not in name or not _BUCKET.search(name):
            continue
        parts = _BUCKET.sub("-", name).strip("-").split("-")
        bucket = "-".join(part for part in parts if part not in ("x", "remaining", "reset", "resets"))
        if "remaining" in parts:
            left[bucket] = float(value) if _NUMBER.fullmatch(value) else None
        elif "reset" in parts or "resets" in parts:
            wait = _span_or_moment(value, start)
            if wait is not None:
                resets[bucket] = wait
        elif "=" in value:  # RateLimit: limit=100, remaining=0, reset=50 · "default";r=0;t=50 (IETF drafts, Zendesk)
            told = {key.lower()[0:3]: float(number) for key, number in _STRUCTURED.findall(value)}
            remaining, reset = told.get("rem", told.get("r")), told.get("res", told.get("t"))
            if remaining is not None:
                left[name] = remaining
            if reset is not None:
                resets[name] = reset
    empty = [resets[bucket] for bucket, remaining in left.items() if remaining == 0 and bucket in resets]
    silent = [wait for bucket, wait in resets.items() if bucket not in left and wait > 0] if not left else []
    return max(empty or silent, default=None)


def is_exhausted(headers: Mapping[str, str]) -> bool:
    """A bucket says that nothing is left."""
    return any(
        "remaining" in name and _NUMBER.fullmatch(value) and float(value) == 0 and _BUCKET.search(name)
        for name, value in headers.items()
    )


# -- vendors that put the wait elsewhere -------------------------------------------------------------------------------

_MINUTES = re.compile(r'"estimated_time_to_regain_access"\s*:\s*(\d{1,6})')
_AD_ACCOUNT = re.compile(r'"reset_time_duration"\s*:\s*(\d{1,9})')


def _vendors(headers: Mapping[str, str]) -> float | None:
    """Meta: minutes inside JSON. https://developers.facebook.com/docs/graph-api/overview/rate-limiting"""
    minutes = max(map(int, _MINUTES.findall(headers.get("x-business-use-case-usage", ""))), default=0)
    seconds = max(map(int, _AD_ACCOUNT.findall(headers.get("x-ad-account-usage", ""))), default=0)
    return minutes * 60.0 or float(seconds) or None


def _in_body(name: str, value: Any, start: _Start) -> float | None:
    """One of the fields of a document that tell of a wait."""
    if name == "":
        return _protobuf_info(value)
    if name == "cost":
        return _shopify(value)
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    return _milliseconds(text(value)) if name.endswith("ms") else _span_or_moment(text(value), start)


def _shopify(cost: object) -> float | None:
    """(requested − available) / restore rate. https://shopify.dev/docs/api/usage/limits#graphql-admin-api-rate-limits"""
    throttle = item(cost, "throttleStatus")
    wanted, there = item(cost, "requestedQueryCost"), item(throttle, "currentlyAvailable")
    speed = item(throttle, "restoreRate")
    numbers = [n for n in (wanted, there, speed) if isinstance(n, int | float) and not isinstance(n, bool)]
    if len(numbers) < 3 or not numbers[2] > 0:
        return None
    try:
        return max(0.0, (numbers[0] - numbers[1]) / numbers[2])
    except OverflowError:
        return LONGEST


# -- protobuf: google.rpc.RetryInfo as an object, or as the bytes of a trailer -----------------------------------------


def _protobuf(have: Mapping[str, Any]) -> float | None:
    seconds = have.get("retry_after_secs")  # Databricks
    if isinstance(seconds, int | float) and not isinstance(seconds, bool) and seconds >= 0:
        return float(min(seconds, LONGEST))
    details = have.get("details")
    if isinstance(details, list | tuple):
        for one in details[:50]:
            found = _protobuf_info(one)
            if found is not None:
                return found
    if "failure" in have:  # Google Ads
        try:
            for failed in islice(read(have["failure"], "errors") or (), 20):
                found = _protobuf_info(read(failed, "details", "quota_error_details"))
                if found is not None:
                    return found
        except Exception:
            return None
    return _trailers(have.get("trailing_metadata"))


def _protobuf_info(message: object) -> float | None:
    delay = read(message, "retry_delay")
    if isinstance(delay, timedelta):
        return max(0.0, delay.total_seconds()) or None
    seconds, nanos = read(delay, "seconds"), read(delay, "nanos")
    if isinstance(seconds, int) and isinstance(nanos, int) and (seconds or nanos):
        return max(0, min(seconds, int(LONGEST))) + max(0, min(nanos, 10**9)) / 1e9
    return None


def _trailers(ask: object) -> float | None:
    """A raw gRPC error: its status details travel as bytes. https://github.com/googleapis/googleapis, google/rpc"""
    if not callable(ask):
        return None
    try:
        for key, value in islice(ask() or (), 50):
            if key == "grpc-retry-pushback-ms":
                return _milliseconds(value)
            if key == "google.rpc.retryinfo-bin":
                return _retry_info(value)
            if key == "grpc-status-details-bin":
                for number, entry in _fields(value):
                    if number == 3:
                        any_of = dict(_fields(entry))
                        if any_of.get(1, b"").endswith(b"google.rpc.RetryInfo"):
                            return _retry_info(any_of.get(2, b""))
    except Exception:
        return None
    return None


def _retry_info(message: bytes) -> float | None:
    delay = dict(_fields(dict(_fields(message)).get(1, b"")))
    seconds, nanos = delay.get(1, 0), delay.get(2, 0)
    return (
        float(seconds) + nanos / 1e9 if isinstance(seconds, int) and isinstance(nanos, int) and seconds < 1e9 else None
    )


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The fields of a protobuf message: numbers and byte strings."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 127) << shift
            shift += 7
            if byte < 128 or shift > 63:
                return value

    while at < len(message):
        tag = varint()
        if tag & 7 == 0:
            yield tag >> 3, varint()
        elif tag & 7 == 2:
            size = varint()
            yield tag >> 3, message[at : at + size]
            at += size
        else:
            at += 8 if tag & 7 == 1 else 4


# -- prose, where nothing better is there ------------------------------------------------------------------------------

_SPAN = r"\d{1,9}(?:\.\d{1,9})?\s?(?:milliseconds?|ms|seconds?|secs?|s|minutes?|mins?|m|hours?|hrs?|h|days?|d)\b"
_PROSE = re.compile(
    r"(?:retry|try\s+again|try\s+your\s+request\s+again|wait|available|regain\s+access|resets?|retries)\b"
    r"[^.\n]{0,60}?\b(?:after|in|for|within|wait)\s+(?:about\s+|approximately\s+|another\s+)?"
    rf"((?:{_SPAN}(?:\s*(?:,|and)?\s*)){{1,4}}|(?:\d{{1,9}}(?:\.\d{{1,9}})?(?:ms|h|m|s)){{1,4}})"
)
_SPAN_PART = re.compile(r"(\d{1,9}(?:\.\d{1,9})?)\s?([a-z]+)")
_MOMENT = re.compile(
    r"(?:retry|try\s+again|access|resets?)\b[^\n]{0,60}?\b(?:after|at|on|until)\s+"
    r"(\d{4}-\d\d-\d\d[t ]\d\d:\d\d(?::\d\d(?:\.\d{1,9})?)?(?:z|[+-]\d\d:?\d\d)?)"
)
_DIGIT = re.compile(r"\d")


def _in_prose(message: str, start: _Start) -> float | None:
    if not _DIGIT.search(message):
        return None
    found = _PROSE.search(message)
    if found:
        return sum(float(n) * _unit(u) for n, u in _SPAN_PART.findall(found[1]))
    moment = _MOMENT.search(message)
    return _span_or_moment(moment[1].upper(), start) if moment else None


def _unit(word: str) -> float:
    return _UNITS["ms" if word.startswith(("ms", "milli")) else word[0]]
