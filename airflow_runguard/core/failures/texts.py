"""Failures that are only text: a traceback, or an answer as ``curl -i`` shows it. For people who ask what it means.

Builds stand-ins that the classifier reads like the real thing. A traceback has class names and messages, not classes: a
name counts as every class of that name which a rule knows. Nothing that the text names is imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from airflow_runguard.core.failures.book import installed
from airflow_runguard.core.failures.document import document_in_text

CAUSE = "The above exception was the direct cause of the following exception:"
CONTEXT = "During handling of the above exception, another exception occurred:"
_CHAIN = re.compile(f"^({re.escape(CAUSE)}|{re.escape(CONTEXT)})$", re.MULTILINE)
_RAISED = re.compile(r"^(?P<path>[A-Za-z_][\w.]*)(?:: (?P<message>.*))?$", re.DOTALL)
_MAX_TEXT = 1_000_000


class FromText(Exception):
    """What is left of an exception in a text. Its message may tell the status and the body of an answer."""

    __module__ = "airflow_runguard.core.failures"


class Response:
    """An answer that somebody has as text."""

    def __init__(self, status: int | None, headers: Mapping[str, str], body: bytes, url: str = "") -> None:
        self.status_code, self.headers, self._content, self.url = status, dict(headers), body, url


class Answered(FromText):
    """The error that a client would have raised of a response."""

    def __init__(self, response: Response) -> None:
        super().__init__("")
        self.response = response


def read_response(text: str, status: int | None = None, headers: Iterable[str] = (), url: str = "") -> BaseException:
    """An error out of a body, or out of a whole answer with its status line and headers.

    :param headers: each ``Name: value``.
    :raises ValueError: there is neither a status nor anything that a rule could read.
    """
    found: dict[str, str] = {}
    while text.startswith("HTTP/"):  # one block for each answer that curl followed; the last counts
        head, _, text = text.replace("\r\n", "\n").partition("\n\n")
        first, *lines = head.split("\n")
        found = _headers(lines)
        told = first.split()
        if status is None and len(told) > 1 and told[1].isdecimal():
            status = int(told[1])
            if text.startswith("HTTP/"):
                status = None
    found.update(_headers(headers))
    if status is None and not text.strip():
        raise ValueError("there is no status, no body and no traceback")
    return Answered(Response(status, found, text.encode(), url))


def _headers(lines: Iterable[str]) -> dict[str, str]:
    parts = (line.partition(":") for line in lines)
    return {name.strip(): value.strip() for name, colon, value in parts if colon}


def is_traceback(text: str) -> bool:
    return "Traceback (most recent call last)" in text or bool(_last_line(text))


def read_traceback(text: str) -> BaseException:
    """The chain of exceptions that a traceback shows.

    :raises ValueError: it shows none.
    """
    pieces = _CHAIN.split(text[-_MAX_TEXT:])
    error: BaseException | None = None
    link = ""
    for piece in pieces:
        if piece in (CAUSE, CONTEXT):
            link = piece
            continue
        raised = _last_line(piece)
        if raised is None:
            continue
        outer = _stand_in(*raised)
        if error is not None:
            outer.__cause__, outer.__context__ = (error, error) if link == CAUSE else (None, error)
        error = outer
    if error is None:
        raise ValueError("it shows no exception")
    return error


def _last_line(piece: str) -> tuple[str, str] | None:
    """The exception's path and message: what follows the last indented line of the frames."""
    lines = [line.rstrip() for line in piece.strip("\n").split("\n")]
    framed = max((n for n, line in enumerate(lines) if line.startswith(("  ", "Traceback"))), default=-1)
    for start in range(framed + 1, len(lines)):
        found = _RAISED.match("\n".join(lines[start:]))
        if found and (framed >= 0 or "." in found["path"] or found["path"].endswith(("Error", "Exception", "Timeout"))):
            return found["path"], found["message"] or ""
    return None


def _stand_in(path: str, message: str) -> BaseException:
    module, _, name = path.rpartition(".")
    module = module or "builtins"
    top = module.partition(".")[0]
    alike = {key for rule in installed().rules for key in rule.types if key.partition(".")[2] == name}
    own = {key for key in alike if key.startswith(f"{top}.")}
    bases = tuple(type(name, (FromText,), {"__module__": key.partition(".")[0]}) for key in sorted(own or alike)) or (
        FromText,
    )
    error: Any = type(name, bases, {"__module__": module})(message)
    document = document_in_text(message)
    if top in ("botocore", "boto3", "aiobotocore") and document is not None:
        error.response = document
    return error  # type: ignore[no-any-return]
