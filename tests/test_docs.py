"""The documents are true: what they name exists, what they show can be typed, and the states are those of the code."""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from pathlib import Path

import pytest

from airflow_runguard import BatchGuard, GuardContext
from airflow_runguard.cli import _parser
from airflow_runguard.core.record import TRANSITIONS
from airflow_runguard.provider_info import get_provider_info

ROOT = Path(__file__).parent.parent
DOCS = sorted(p.relative_to(ROOT).as_posix() for p in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")))
OPERATIONS, ARCHITECTURE = "docs/operations.md", "docs/architecture.md"


@cache
def text(document: str) -> str:
    return (ROOT / document).read_text(encoding="utf-8")


def section(document: str, name: str) -> str:
    """What stands between ``<!-- name begins -->`` and ``<!-- name ends -->``."""
    found = re.search(rf"<!-- {name} begins -->\n(.*)<!-- {name} ends -->", text(document), re.DOTALL)
    assert found, f"{document} has no part {name!r}"
    return found[1].strip()


def code(document: str) -> Iterator[str]:
    """Every line of a code block, every piece of code in a sentence."""
    fence = re.compile(r"^( *)```\w*\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
    for block in fence.finditer(text(document)):
        yield from block[2].splitlines()
    yield from re.findall(r"`([^`\n]+)`", fence.sub("", text(document)))


def rows(table: str) -> list[list[str]]:
    """The cells of a Markdown table, without its head."""
    return [[cell.strip() for cell in line.strip("| \n").split(" | ")] for line in table.splitlines()[2:]]


def test_the_documents_that_a_newcomer_needs_are_there() -> None:
    assert {"README.md", "CHANGELOG.md", "CONTRIBUTING.md", ARCHITECTURE, OPERATIONS, "docs/vocabulary.md"} <= set(DOCS)
    numbers = [Path(name).name[:4] for name in DOCS if name.startswith("docs/decisions/")]
    assert numbers == [f"{n:04}" for n in range(1, len(numbers) + 1)]


# -- the state machine -------------------------------------------------------------------------------------------------


def test_the_diagram_has_every_transition_and_no_other() -> None:
    drawn = "\n".join(
        (
            "```mermaid",
            "stateDiagram-v2",
            "    [*] --> running : first claim",
            *(f"    {t.source} --> {t.target} : {t.mover}" for t in TRANSITIONS),
            "```",
        )
    )
    assert section(ARCHITECTURE, "diagram") == drawn


def test_the_table_says_of_every_transition_who_makes_it_and_when() -> None:
    told = [tuple(cells) for cells in rows(section(ARCHITECTURE, "transitions"))]
    assert told == [(f"`{t.source}`", f"`{t.target}`", t.mover, t.when) for t in TRANSITIONS]


def test_every_room_has_its_line_in_the_architecture() -> None:
    package = ROOT / "airflow_runguard"
    rooms = {p.relative_to(package).as_posix() for p in (*package.glob("[!_]*.py"), *package.glob("core/[!_]*.py"))}
    assert {name for name in rooms if f"`{name}`" not in text(ARCHITECTURE)} == set()


# -- what is named exists ----------------------------------------------------------------------------------------------


def slug(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-")


@pytest.mark.parametrize("document", DOCS)
def test_every_link_inside_the_repository_leads_somewhere(document: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text(document)):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        there = (ROOT / document).parent / path if path else ROOT / document
        assert there.exists(), f"{document}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.+)$", there.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(slug, headings), f"{document}: {target}"


@pytest.mark.parametrize("document", DOCS)
def test_every_test_that_is_named_exists(document: str) -> None:
    files = ROOT.joinpath("tests").rglob("test_*.py")
    there = set(re.findall(r"def (test_\w+)", "".join(f.read_text(encoding="utf-8") for f in files)))
    named = {name for piece in code(document) for name in re.findall(r"\btest_\w+\b(?!\.py)", piece)}
    options = {"test_deployment"}
    assert {name for name in named - options if not name.endswith("_")} <= there  # `test_p03_…` is a form, not a name


def test_every_promise_of_this_version_names_its_test() -> None:
    told = {cells[0]: cells[-1] for cells in rows(section("README.md", "promises"))}
    assert list(told) == [f"P{n}" for n in range(1, 15)]
    for number, tests in told.items():
        assert "`test_" in tests, number


def test_every_make_target_that_is_named_exists() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = {name for document in DOCS for piece in code(document) for name in re.findall(r"\bmake ([a-z-]+)", piece)}
    assert named
    assert named <= targets


def test_the_readmes_dag_is_the_example_that_is_run() -> None:
    example = (ROOT / "dags_examples" / "billing_guarded.py").read_text(encoding="utf-8")
    block = re.search(r"^```python\n(.*?)^```", text("README.md"), re.DOTALL | re.MULTILINE)
    assert block
    assert ast.dump(_undocumented(block[1])) == ast.dump(_undocumented(example))
    assert sum(map(bool, block[1].splitlines())) <= 15


def _undocumented(source: str) -> ast.Module:
    module = ast.parse(source)
    if ast.get_docstring(module) is not None:
        del module.body[0]
    return module


# -- what is shown can be typed ----------------------------------------------------------------------------------------


def commands(document: str) -> Iterator[str]:
    for piece in code(document):
        found = re.search(r"(?:airflow runguard|python -m airflow_runguard) +(\S.*)", piece)
        if found:
            yield found[1]


def words(typed: str) -> list[str]:
    """What a shell gives to the program: up to a pipe, a redirection or a comment."""
    split = shlex.shlex(typed, posix=True, punctuation_chars="|&;<>")
    split.whitespace_split = True
    return list(takewhile(lambda word: word not in {"|", ">", "&&", ";"}, split))


@pytest.mark.parametrize("document", [document for document in DOCS if list(commands(document))])
def test_every_command_can_be_typed_as_it_is_shown(document: str) -> None:
    for typed in commands(document):
        _parser().parse_args(words(typed))


def test_every_command_there_is_has_its_place_in_the_operations_page() -> None:
    from airflow_runguard.cli import COMMANDS

    shown = " ".join(commands(OPERATIONS))
    assert [command.name for command in COMMANDS if not re.search(rf"\b{command.name}\b", shown)] == []


def test_every_option_is_told_with_its_default() -> None:
    options = get_provider_info()["config"]["runguard"]["options"]
    told = {cells[0].strip("`"): cells[1].strip("`") for cells in rows(section(OPERATIONS, "options"))}
    assert told == {name: option["default"] or "(empty)" for name, option in options.items()}


# -- what is quoted is what the code says ------------------------------------------------------------------------------


@cache
def sentences() -> str:
    """Every text of the package, one a line, with ``…`` where a value is filled in."""
    said: list[str] = []
    for path in ROOT.joinpath("airflow_runguard").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                parts = (part.value if isinstance(part, ast.Constant) else "…" for part in node.values)
                said.append("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                said.append(node.value)
    return "\n".join(said)


@pytest.mark.parametrize("part", ["task sentences", "command sentences"])
def test_every_sentence_that_is_explained_is_one_that_is_said(part: str) -> None:
    quoted = [cells[0].strip("“”") for cells in rows(section(OPERATIONS, part))]
    assert quoted
    assert [sentence for sentence in quoted if sentence not in sentences()] == []


def test_every_option_of_an_author_has_its_line() -> None:
    page = (ROOT / "docs/options.md").read_text()
    told = set(re.findall(r"`([a-z_]+)`", page))
    options = {option.name for option in dataclasses.fields(BatchGuard)}
    assert options - told == set()
    for method in ("call", "acall", "gather", "map", "sql", "submit", "remember"):
        assert hasattr(GuardContext, method)
        assert f"guard.{method}(" in page
