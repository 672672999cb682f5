"""The dashboard and the alert rules ask for what is measured, and what is measured is what the code counts."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from airflow_runguard import measures
from airflow_runguard.cli import COMMANDS
from airflow_runguard.core import guard as core
from airflow_runguard.core.record import FailureClass, State

FOLDER = Path(__file__).parents[1] / "docs" / "monitoring"
METRICS = {f"airflow_runguard_{name}" for name in (*measures.COUNTERS, *measures.TIMERS, *measures.GAUGES)}
LABELS = {
    "state": {str(state) for state in State},
    "failure_class": {*(str(kind) for kind in FailureClass), "none"},
    "quantile": {"0.95"},
}


def check(expression: str) -> None:
    """Every metric is one of ours, and every label has a value that it can have."""
    found = set(re.findall(r"airflow_\w+", expression))
    assert found, expression
    assert found <= METRICS, expression
    for label, value in re.findall(r'(\w+)="([^"]+)"', expression):
        assert value in LABELS[label], expression
    for labels in re.findall(r"by \(([^)]*)\)", expression):
        assert set(labels.split(", ")) <= LABELS.keys(), expression
    assert expression.count("(") == expression.count(")")


def test_the_dashboard_asks_for_what_is_measured() -> None:
    dashboard = json.loads((FOLDER / "dashboard.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    expressions = [target["expr"] for panel in panels for target in panel["targets"]]
    for expression in expressions:
        check(expression)
    shown = {name for expression in expressions for name in re.findall(r"airflow_\w+", expression)}
    assert shown == METRICS, "what is measured is shown"
    for panel in panels:
        place = panel["gridPos"]
        assert place["x"] + place["w"] <= 24, panel["title"]


def test_the_alerts_ask_for_what_is_measured_and_say_what_to_type() -> None:
    (group,) = yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    commands = {command.name for command in COMMANDS}
    for rule in group["rules"]:
        check(rule["expr"])
        assert rule["labels"]["severity"] in ("page", "warn")
        assert set(rule["annotations"]) == {"summary", "description"}
        for typed in re.findall(r"airflow runguard ([^`]+)", rule["annotations"]["description"]):
            assert any(typed.startswith(name) for name in commands), typed


def test_every_measure_is_told() -> None:
    told = set(re.findall(r"^\| `runguard\.(\w+)`", (FOLDER / "README.md").read_text(), re.MULTILINE))
    assert told == {*measures.COUNTERS, *measures.TIMERS, *measures.GAUGES}


@pytest.mark.parametrize(
    ("how", "names"),
    [
        (core.Done(1, replayed=False), ("executed",)),
        (core.Done(1, replayed=True), ("replayed", "duplicate_prevented")),
        (core.Waiting("busy", busy=True, record_id=1), ("busy",)),
        (core.Waiting("paused", 3.0, record_id=1, limited=False), ("paused",)),
        (core.Waiting("the ledger is away"), ()),
        (core.InDoubt("in doubt", retry=False), ("in_doubt",)),
        (core.Ended("broken", retry=False, tells="broken"), ("broken",)),
        (core.Ended("stale", retry=True, tells="stale_writer"), ("fenced",)),
        (core.Ended("no", retry=True), ("failed",)),
        (core.Passed(RuntimeError()), ()),
    ],
)
def test_p06_every_end_is_counted_as_what_it_is_and_a_pause_never_as_failed(how: Any, names: tuple[str, ...]) -> None:
    assert measures.counted(how) == names
    assert set(names) <= set(measures.COUNTERS)
