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
    ("ui/static/api.js", "status === 401"): "our own API: the session is over",
    ("ui/static/live.js", "status !== 401"): "our own API: the session is over",
    ("ui/static/record.js", "status === 404"): "our own API: no such record",
    ("ui/static/record.js", "status !== 404"): "our own API: no such record",
    ("ui/static/strings.js", "quota exceeded"): "what people are shown of our own class",
}
"""What looks like a second rule and is none, with the reason."""

# These numbers mean a status wherever they stand; the others only where something is compared with them.
ALWAYS_A_STATUS = {402, 425, 429, 499, 529}
STATUSES = ALWAYS_A_STATUS | {400, 401, 403, 404, 408, 409, 423, 500, 501, 502, 503, 504}
IN_A_TEXT = re.compile(rf"(?<![\w.-])({'|'.join(map(str, sorted(ALWAYS_A_STATUS)))})(?![\w.-])")
WORDS = re.compile(
    r"rate.{0,3}limit|too.?many|throttl|retry.?after|exhausted|slow.?down|limit.{0,4}exceeded|over.?load|over.?limit|"
    r"(insufficient|exceeded|your).{0,20}quota|quota.{0,5}exceeded|no.?credit|out.?of.?credit",
    re.IGNORECASE,
)
ATTRIBUTES = {"status_code", "http_status", "retry_after", "RetryAttempts", "ResponseMetadata", "HTTPStatusCode"}


def second_rules(source: str) -> Iterator[str]:
    """Code that looks for a status, a vendor's word or a response's fields. Prose is not code."""
    tree = ast.parse(source)
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    compared = {
        id(part)
        for node in ast.walk(tree)
        if isinstance(node, ast.Compare | ast.MatchValue | ast.Set)
        for part in ast.walk(node)
    }
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        match node:
            case ast.Constant(value=int(number)) if number in ALWAYS_A_STATUS:
                yield f"{line}: the status {number}"
            case ast.Constant(value=int(number)) if number in STATUSES and id(node) in compared:
                yield f"{line}: compares with the status {number}"
            case ast.Constant(value=str(words)) if id(node) not in prose:
                if WORDS.search(words) or IN_A_TEXT.search(words):
                    yield f"{line}: the words {words!r}"
                elif words in ATTRIBUTES:
                    yield f"{line}: reads .{words}"
                elif id(node) in compared and words.isdigit() and int(words) in STATUSES:
                    yield f"{line}: compares with the status {words}"
                elif id(node) in compared and "quota" in words.lower() and words not in COMMANDS:
                    yield f"{line}: compares with {words!r}"
            case ast.Attribute(attr=name) if name in ATTRIBUTES:
                yield f"{line}: reads .{name}"
            case ast.Name(id="HTTPStatus") | ast.Attribute(attr="HTTPStatus") | ast.alias(name="HTTPStatus"):
                yield f"{line}: HTTPStatus"


COMMENTS = {".sql": r"--[^\n]*", ".js": r"/\*.*?\*/|(?<![:'\"])//[^\n]*", ".html": r"<!--.*?-->"}
"""Of the files that are no Python."""
STATUS_COMPARED = re.compile(r"\b(status|code)\b\s*(===?|!==?|=|<>|in|>=?|<=?)\s*\(?\s*'?([1-5]\d\d)\b")


def second_rules_of_text(source: str, kind: str) -> Iterator[str]:
    """The same of SQL and JavaScript, comments left out; a comment's lines stay, so that the numbers hold."""
    code = re.sub(COMMENTS[kind], lambda found: "\n" * found[0].count("\n"), source, flags=re.DOTALL)
    for number, line in enumerate(code.splitlines(), 1):
        for found in (IN_A_TEXT.search(line), WORDS.search(line), STATUS_COMPARED.search(line)):
            if found is not None:
                yield f"{number}: {found[0]}"


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
        "if '429' in str(error): pass",
        "if code == '429': pass",
        "if code in ('500', '503'): pass",
        "if answer.status == HTTPStatus.TOO_MANY_REQUESTS: pass",
        "from http import HTTPStatus",
        "import http\nwait = http.HTTPStatus(status)",
        "status = getattr(error, 'status_code', None)",
        "status = answer['HTTPStatusCode']",
        "PAUSE = {'SlowDown', 'RequestLimitExceeded'}",
        "if 'slow down' in text: pass",
        "if 'Error 429: busy' in text: pass",
        "if name in {'quota'}: pass",
        "OVER = 'Overloaded'",
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


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        (".sql", "where error like '%429%'"),
        (".sql", "where c.code = '503'"),
        (".sql", "select error ~* 'rate.?limit'"),
        (".js", "if (answer.status === 503) wait();"),
        (".js", "const BUSY = [429];"),
        (".js", "if (/slow down/i.test(text)) wait();"),
    ],
)
def test_p07_a_second_rule_is_found_in_what_is_no_python(kind: str, source: str) -> None:
    assert list(second_rules_of_text(source, kind))


def test_p07_comments_and_our_own_classes_are_no_second_rule() -> None:
    assert not list(second_rules_of_text("-- 429, rate limit\nwhere failure_class = 'quota'", ".sql"))
    assert not list(second_rules_of_text("/* 429\n */ const rows = 42; // too many", ".js"))


def test_p07_there_is_one_classifier() -> None:
    kinds = {".py", *COMMENTS}
    files = [path for path in PACKAGE.rglob("*") if path.suffix in kinds and CLASSIFIER not in path.parents]
    found = []
    for path in files:
        name, source = path.relative_to(PACKAGE).as_posix(), path.read_text("utf-8")
        hits = second_rules(source) if path.suffix == ".py" else second_rules_of_text(source, path.suffix)
        found += [f"{name}:{hit}" for hit in hits if (name, hit.partition(": ")[2]) not in OWN]
    assert kinds <= {path.suffix for path in files}
    assert not found, "Ask core/failures/ instead:\n" + "\n".join(found)


def test_p07_the_scan_sees_the_classifier_itself() -> None:
    assert any(True for path in CLASSIFIER.glob("*.py") for _ in second_rules(path.read_text("utf-8")))
