"""P7: nothing outside ``core/failures/`` decides what an error or an answer means."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import airflow_runguard
from airflow_runguard import cli

PACKAGE = Path(airflow_runguard.__file__).parent
CLASSIFIER = PACKAGE / "core" / "failures"
COMMANDS = {command.name for command in cli.COMMANDS}
"""What people type ("quota close") is no vendor's word."""

OWN = {
    ("reconcilers.py", "reads .status_code"): "HttpLookup: its author says which statuses mean that it is not there",
    ("ui/app.py", "reads .status_code"): "the status of our own answer",
}
"""What looks like a second rule and is none, with the reason."""

# These numbers mean a status wherever they stand; the others only where something is compared with them.
ALWAYS_A_STATUS = {402, 425, 429, 499, 529}
STATUSES = ALWAYS_A_STATUS | {400, 401, 403, 404, 408, 409, 423, 500, 501, 502, 503, 504}
WORDS = re.compile(
    r"rate.?limit|too.?many.?requests|throttl|retry.?after|resource.?exhausted|"
    r"(insufficient|exceeded|your).{0,20}quota|quota.{0,5}exceeded",
    re.IGNORECASE,
)
ATTRIBUTES = {"status_code", "http_status", "retry_after", "RetryAttempts"}


def second_rules(source: str) -> Iterator[str]:
    """Code that looks for a status, a vendor's word or a response's fields. Prose is not code."""
    tree = ast.parse(source)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.Constant(value=int(number)) if number in ALWAYS_A_STATUS:
                yield f"{line}: the status {number}"
            case ast.Constant(value=str(words)) if id(node) not in prose and WORDS.search(words):
                yield f"{line}: the words {words!r}"
            case ast.Attribute(attr=name) if name in ATTRIBUTES:
                yield f"{line}: reads .{name}"
            case ast.Compare() | ast.MatchValue():
                for part in ast.walk(node):
                    match part:
                        case ast.Constant(value=int(number)) if number in STATUSES - ALWAYS_A_STATUS:
                            yield f"{line}: compares with the status {number}"
                        case ast.Constant(value=str(words)) if "quota" in words.lower() and words not in COMMANDS:
                            yield f"{line}: compares with {words!r}"


@pytest.mark.parametrize(
    "source",
    [
        "if answer.status == 429: pass",
        "if answer.code in (500, 503): pass",
        "PAUSE = {429}",
        "if 'quota' in str(error): pass",
        "match word:\n    case 'quota': pass",
        "if error.status_code: pass",
        "if re.search('rate limit', text): pass",
        "wait = headers.get('Retry-After')",
        "MARK = 'insufficient_quota'",
    ],
)
def test_p07_a_second_rule_is_found(source: str) -> None:
    assert list(second_rules(source))


@pytest.mark.parametrize(
    "source",
    [
        '"""Waits on 429 and "rate limit"."""\nx = 1  # quota exceeded: 429',
        "class FailureClass(StrEnum):\n    QUOTA = 'quota'\n    '''Too many requests.'''",
        "def guarded_task(*, quota: str = '') -> None: ...",
        "if failure.failure_class is FailureClass.QUOTA: pass",
        "group = 500",
        "if name == 'quota close': pass",
    ],
)
def test_p07_naming_the_class_is_no_second_rule(source: str) -> None:
    assert not list(second_rules(source))


def test_p07_there_is_one_classifier() -> None:
    files = [path for path in PACKAGE.rglob("*.py") if CLASSIFIER not in path.parents]
    found = []
    for path in files:
        name = path.relative_to(PACKAGE).as_posix()
        hits = second_rules(path.read_text("utf-8"))
        found += [f"{name}:{hit}" for hit in hits if (name, hit.partition(": ")[2]) not in OWN]
    assert files
    assert not found, "Ask core/failures/ instead:\n" + "\n".join(found)


def test_p07_the_scan_sees_the_classifier_itself() -> None:
    assert any(True for path in CLASSIFIER.glob("*.py") for _ in second_rules(path.read_text("utf-8")))
