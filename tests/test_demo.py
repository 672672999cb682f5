"""The demo's report: it counts right, says what it counted, and never passes what was not driven."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from demo.accidents import phases
from demo.batch import AT_ONCE, CHARGES, KILLS, Batch
from demo.report import WIDTH, Count, Row, as_json, as_table, exit_code, summary

GOOD = Row("kill -9", Count.of({"a": 2}), Count.of({"a": 1}), "in doubt → a person: it happened → done")


@pytest.mark.parametrize(
    ("charges", "count"),
    [
        ({"a": 1}, Count(charges=1, duplicates=0, lost=0)),
        ({"a": 3}, Count(charges=3, duplicates=2, lost=0)),
        ({"a": 0}, Count(charges=0, duplicates=0, lost=1)),
        ({"a": 2, "b": 0}, Count(charges=2, duplicates=1, lost=1)),  # the right total, and both wrong
    ],
)
def test_charges_are_counted_for_each_business_key(charges: dict[str, int], count: Count) -> None:
    assert Count.of(charges) == count


def test_only_a_demo_without_duplicates_losses_and_gaps_passes() -> None:
    assert exit_code([GOOD, GOOD]) == 0
    assert exit_code([GOOD, replace(GOOD, guarded=Count.of({"a": 2}))]) == 1
    assert exit_code([GOOD, replace(GOOD, guarded=Count.of({"a": 0}))]) == 1
    assert exit_code([GOOD, replace(GOOD, trouble="the task never started")]) == 1
    assert exit_code([]) == 1


def test_a_plain_dag_that_shows_no_duplicate_is_reported_as_it_is() -> None:
    row = replace(GOOD, plain=Count.of({"a": 1}))
    assert exit_code([row]) == 0
    assert json.loads(as_json([row]))[0]["plain"] == {"charges": 1, "duplicates": 0}


def test_the_json_has_exactly_the_promised_fields() -> None:
    assert json.loads(as_json([GOOD])) == [
        {
            "accident": "kill -9",
            "plain": {"charges": 2, "duplicates": 1},
            "guarded": {"charges": 1, "duplicates": 0, "lost": 0, "ledger": GOOD.ledger},
        }
    ]


def test_what_was_not_driven_is_said_with_its_reason_everywhere() -> None:
    rows = [GOOD, replace(GOOD, accident="restore", trouble="the server did not start")]
    for text in (as_table(rows), as_json(rows)):
        assert "NOT DRIVEN" in text
        assert "the server did not" in text
    assert summary(rows).endswith("NOT DRIVEN: restore.")


def test_the_table_fits_its_width_and_keeps_every_word() -> None:
    rows = [Row(one.name, Count(10, 9, 0), Count(1, 0, 0), GOOD.ledger) for phase in phases() for one in phase]
    table = as_table(rows)
    assert max(map(len, table.splitlines())) <= WIDTH
    words = table.split()
    for row in rows:
        assert all(word in words for word in f"{row.accident} {row.ledger}".split())


def test_a_seed_decides_the_random_moments_and_leaves_charges_for_the_last_life_of_the_batch() -> None:
    for seed in range(200):
        moments = Batch(seed).charged_before
        assert moments == Batch(seed).charged_before
        assert sum(moments) + KILLS * AT_ONCE + 2 < CHARGES
    assert Batch(1).charged_before != Batch(2).charged_before


def test_the_summary_adds_up() -> None:
    assert summary([GOOD, GOOD]) == "2 accidents. Plain: 2 duplicate charges. Guarded: 0 duplicates, 0 lost."


def test_no_two_accidents_share_an_invoice() -> None:
    invoices = [invoice for phase in phases() for one in phase for invoice in one.invoices]
    assert len(invoices) == len(set(invoices))
