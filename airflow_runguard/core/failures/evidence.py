"""Reading an exception: everything that it and the errors around it can tell, and nothing of what that means.

Holds the walk through causes, contexts, wrapped and grouped errors, and the reading of status, headers and waits. Duck
typing only: no vendor SDK and no HTTP library is imported, and every read survives attributes, mappings and
``__str__`` that raise. Not here: any judgement (see the rules), and what the client did before (see ``attempts.py``).
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import StrEnum

from airflow_runguard.core.failures.attempts import Attempts, attempts_before
from airflow_runguard.core.failures.reading import (
    errors,
    http_status,
    item,
    read,
    response_status,
    text,
    type_key,
    type_keys,
)

MAX_ERRORS = 64

# https://github.com/googleapis/googleapis/blob/master/google/rpc/code.proto
_GRPC_AS_HTTP: Mapping[str, int] = {
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

# HttpHook raises AirflowException("429:Too Many Requests").
_HOOK_TEXT = re.compile(r"([45]\d\d):")
_URLLIB3_STATUS_TEXT = re.compile(r"too many (\d{3}) error responses")
_SECONDS = re.compile(r"\d{1,9}(\.\d{1,9})?")
_OPERATING_SYSTEM = frozenset({"builtins", "ssl", "socket"})


class Via(StrEnum):
    """How the walk came to an error, and so what its word is worth."""

    ITSELF = "itself"
    CAUSE = "cause"
    """Named as the reason by who raised it (``__cause__``, ``args``, ``reason``, …): speaks for the outer error."""
    MEMBER = "member"
    """One of a group: each must be proven by itself."""
    ATTEMPT = "attempt"
    """An earlier attempt of the client: must be proven by itself."""
    CONTEXT = "context"
    """Was being handled when the other was raised. May be an unrelated earlier error: can add doubt, never take it."""


@dataclass(slots=True, eq=False)
class Sighting:
    """One exception that the walk came by.

    :param spoken_for: reached only by causes and members, so that its word counts for the outermost error.
    """

    error: BaseException
    via: Via
    parent: Sighting | None
    spoken_for: bool
    types: frozenset[str]
    status: int | None
    attempts: Attempts

    @property
    def label(self) -> str:
        if self.status is not None:
            return f"HTTP {self.status} from the vendor"
        return type_key(type(self.error))

    @property
    def is_operating_system(self) -> bool:
        """A bare socket error, or a group of them as connecting to several addresses ends in."""
        kind = isinstance(self.error, OSError | BaseExceptionGroup)
        return kind and read(type(self.error), "__module__") in _OPERATING_SYSTEM


def walk(error: BaseException) -> tuple[list[Sighting], bool]:
    """List the error and every error around it, parents first, contexts last; and whether the list is complete."""
    found: list[Sighting] = []
    seen: set[int] = set()
    named: deque[tuple[BaseException, Via, Sighting | None]] = deque([(error, Via.ITSELF, None)])
    contexts: deque[tuple[BaseException, Via, Sighting | None]] = deque()
    while named or contexts:
        current, via, parent = (named or contexts).popleft()
        if id(current) in seen:
            continue
        if len(found) == MAX_ERRORS:
            return found, False
        seen.add(id(current))
        sighting = _sight(current, via, parent)
        found.append(sighting)
        named.extend([(inner, Via.CAUSE, sighting) for inner in _causes(current)])
        if isinstance(current, BaseExceptionGroup):
            named.extend([(inner, Via.MEMBER, sighting) for inner in errors(read(current, "exceptions"))])
        named.extend([(inner, Via.ATTEMPT, sighting) for inner in sighting.attempts.errors])
        context = read(current, "__context__")
        if isinstance(context, BaseException):
            contexts.append((context, Via.CONTEXT, sighting))
    return found, True


def wait_seconds(error: BaseException, now: datetime | None) -> float | None:
    """Seconds of ``Retry-After``, never negative; ``None`` where there is no hint that can be parsed for sure.

    A date counts against the response's own ``Date``, since the worker's clock may be wrong; without one, against
    ``now``. See RFC 9110, section 10.2.3.
    """
    value = header(error, "retry-after").strip()
    if _SECONDS.fullmatch(value):
        return float(value)
    until = _http_date(value)
    start = _http_date(header(error, "date")) or now
    if until is None or start is None:
        return None
    if start.tzinfo is None:
        start = start.replace(tzinfo=UTC)
    return max(0.0, (until - start).total_seconds())


def header(error: BaseException, name: str) -> str:
    """A header of the error's response, under any spelling of its name; ``""`` where there is none."""
    sources = (
        read(error, "response", "headers"),
        item(item(read(error, "response"), "ResponseMetadata"), "HTTPHeaders"),
        read(error, "headers"),
    )
    for headers in sources:
        for spelling in (name, name.title()):
            value = item(headers, spelling)
            if isinstance(value, bytes):
                return value.decode("latin-1")
            if isinstance(value, str | int | float):
                return text(value)
    return ""


def _sight(error: BaseException, via: Via, parent: Sighting | None) -> Sighting:
    types = type_keys(type(error))
    lineage = via in (Via.ITSELF, Via.CAUSE, Via.MEMBER) and (parent is None or parent.spoken_for)
    status = _status(error, types)
    # A requests error without its request never came from a session. One that lost its traceback only (sent between
    # processes, say) still has it.
    by_hand = parent is not None and "requests.RequestException" in parent.types and not read(parent.error, "request")
    attempts = attempts_before(error, types, answered=status is not None, made_by_hand=by_hand)
    return Sighting(error, via, parent, lineage, types, status, attempts)


def _causes(error: BaseException) -> list[BaseException]:
    """The errors that ``error`` itself names as its reason."""
    failed = read(error, "last_attempt", "_exception")  # the method exception() would wait for an unfinished one
    named = (read(error, "__cause__"), read(error, "reason"), read(error, "os_error"), failed)
    return errors(named) + errors(read(error, "args"))


def _status(error: BaseException, types: frozenset[str]) -> int | None:
    """The HTTP status that the error carries (a gRPC code as the one it maps to)."""
    response = read(error, "response")
    if response is not None:
        # Not "if response": requests calls a response with an error status false.
        status = response_status(response)
        if status is None:
            status = http_status(item(item(response, "ResponseMetadata"), "HTTPStatusCode"))
        if status is not None:
            return status
    if "airflow.AirflowException" in types:
        # Its status_code (500, or 404 for a missing Connection) is what Airflow's own API would answer.
        return _status_in(_HOOK_TEXT.match(text(error)))
    for name in ("status_code", "http_status", "status"):
        status = http_status(read(error, name))
        if status is not None:
            return status
    if "urllib.HTTPError" in types:
        return http_status(read(error, "code"))
    if "urllib3.ResponseError" in types:
        return _status_in(_URLLIB3_STATUS_TEXT.match(text(error)))
    if "grpc.RpcError" in types:
        return _grpc_status(error)
    return None


def _status_in(match: re.Match[str] | None) -> int | None:
    return http_status(int(match[1])) if match else None


def _grpc_status(error: BaseException) -> int | None:
    try:
        name, details = error.code().name, text(error.details())  # type: ignore[attr-defined]
    except Exception:
        return None
    # Said by the client of an *answer* that is too big: the work was done.
    if "larger than max" in details:
        return None
    return _GRPC_AS_HTTP.get(name)


def _http_date(value: str) -> datetime | None:
    try:
        at = parsedate_to_datetime(value)
    except Exception:
        return None
    return at if at.tzinfo is not None else at.replace(tzinfo=UTC)
