"""What the accidents came to: counted, as a table, as JSON, and as an exit code.

Pure: values in, text out. The rule of this room: a number is shown as it was counted, also where it is not what was
expected, and what could not be driven is said and never counts as passed.
"""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

WIDTH = 100
_COLUMNS = (35, 7, 6, 9, 6, 5)  # the last column takes what is left

CAPTION = (
    "Both DAGs ran the same code under the same accidents. The vendor ignores idempotency keys here, so that it is the "
    "guard alone that prevents duplicates. dup. = charges beyond one per business key; lost = business keys that ended "
    "with no charge. Done = nobody needs to move it: a repeat gets the stored result."
)


@dataclass(frozen=True)
class Count:
    """:param duplicates: charges beyond one per key. :param lost: keys without any."""

    charges: int
    duplicates: int
    lost: int

    @classmethod
    def of(cls, charges: Mapping[str, int]) -> Count:
        """:param charges: business key → how often it was charged."""
        numbers = charges.values()
        return cls(sum(numbers), sum(max(0, number - 1) for number in numbers), sum(number == 0 for number in numbers))


@dataclass(frozen=True)
class Row:
    """:param ledger: what it says and who moves it next. :param trouble: why it could not be driven; '' = it was."""

    accident: str
    plain: Count
    guarded: Count
    ledger: str
    trouble: str = ""

    @property
    def passed(self) -> bool:
        return not (self.trouble or self.guarded.duplicates or self.guarded.lost)


def as_json(rows: Sequence[Row]) -> str:
    return json.dumps([_plain(row) for row in rows], ensure_ascii=False, indent=2) + "\n"


def _plain(row: Row) -> dict[str, Any]:
    plain, guarded = row.plain, row.guarded
    return {
        "accident": row.accident,
        "plain": {"charges": plain.charges, "duplicates": plain.duplicates},
        "guarded": {
            "charges": guarded.charges,
            "duplicates": guarded.duplicates,
            "lost": guarded.lost,
            "ledger": _ledger(row),
        },
    }


def as_table(rows: Sequence[Row]) -> str:
    """At most :data:`WIDTH` columns wide."""
    lines = [
        " " * _COLUMNS[0] + "plain".rjust(sum(_COLUMNS[1:3])) + "guarded".rjust(sum(_COLUMNS[3:6])),
        *_line("accident", ("charges", "dup.", "charges", "dup.", "lost"), "the ledger, and who moves it"),
        "─" * WIDTH,
    ]
    for row in rows:
        numbers = (
            row.plain.charges,
            row.plain.duplicates,
            row.guarded.charges,
            row.guarded.duplicates,
            row.guarded.lost,
        )
        lines += _line(row.accident, numbers, _ledger(row))
    return "\n".join([*lines, "─" * WIDTH, *textwrap.wrap(CAPTION, WIDTH)])


def _line(accident: str, numbers: Sequence[object], ledger: str) -> list[str]:
    left = textwrap.wrap(accident, _COLUMNS[0] - 1)
    right = textwrap.wrap(ledger, WIDTH - sum(_COLUMNS) - 2)
    middle = "".join(str(number).rjust(width) for number, width in zip(numbers, _COLUMNS[1:], strict=True))
    lines = []
    for at in range(max(len(left), len(right))):
        first = left[at] if at < len(left) else ""
        last = right[at] if at < len(right) else ""
        lines.append(f"{first:<{_COLUMNS[0]}}{middle if at == 0 else ' ' * len(middle)}  {last}".rstrip())
    return lines


def _ledger(row: Row) -> str:
    return f"NOT DRIVEN: {row.trouble}" if row.trouble else row.ledger


def summary(rows: Sequence[Row]) -> str:
    plain, guarded = sum(row.plain.duplicates for row in rows), sum(row.guarded.duplicates for row in rows)
    lost, undriven = sum(row.guarded.lost for row in rows), [row.accident for row in rows if row.trouble]
    said = f"{len(rows)} accidents. Plain: {plain} duplicate charges. Guarded: {guarded} duplicates, {lost} lost."
    return f"{said} NOT DRIVEN: {'; '.join(undriven)}." if undriven else said


def exit_code(rows: Sequence[Row]) -> int:
    """0 only if every accident was driven and cost the guarded DAG neither a duplicate nor a lost charge."""
    return 0 if rows and all(row.passed for row in rows) else 1
