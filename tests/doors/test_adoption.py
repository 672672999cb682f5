"""A way in: what a guard would do, what was done before it, where it is missing, and what the audit finds."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from airflow_runguard import dispatch
from airflow_runguard.cli import COMMANDS
from airflow_runguard.core.record import State

# A DAG of two versions: Airflow 3.3.2 looks up its serialised form by a relation that finds both.
pytestmark = pytest.mark.filterwarnings("ignore:Multiple rows returned with uselist:sqlalchemy.exc.SAWarning")

SOURCE = """
import os
import requests
from datetime import datetime, UTC
from airflow.sdk import dag, task
from airflow.providers.standard.operators.bash import BashOperator
from airflow_runguard import guarded_task, ledger_callbacks

VENDOR = os.environ["RUNGUARD_VENDOR_URL"] + "/charges"
ORDER = {"customer": "c", "amount": 5}

@dag(schedule="@daily", start_date=datetime(2026, 1, 1, tzinfo=UTC), catchup=False)
def NAME():
    if os.environ.get("GUARDED"):
        @guarded_task(task_id="pay", key="invoice/{{ ds }}/{{ args.customer }}", namespace="billing", on_doubt="ask")
        def pay(customer: str):
            return requests.post(VENDOR, json=ORDER).json()["id"]
    else:
        @task(task_id="pay")
        def pay(customer: str):
            return requests.post(VENDOR, json=ORDER).json()["id"]
    pay("cust-{{ ds_nodash }}")
    BashOperator(task_id="look", bash_command="echo nothing to see")

NAME()
"""
DAYS = [datetime(2026, 10, day, tzinfo=UTC) for day in (1, 2, 3)]


@pytest.fixture
def adopted(airflow, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The DAG of a team that has run it for years; ``guarded()`` gives it its guard."""
    airflow.name = f"adopted_{uuid4().hex[:8]}"
    folder = tmp_path / "dags"
    folder.mkdir()
    (folder / "adopted.py").write_text(SOURCE.replace("NAME", airflow.name))
    bundle = {"name": "dags-folder", "classpath": "airflow.dag_processing.bundles.local.LocalDagBundle"}
    bundle["kwargs"] = {"path": str(folder)}
    monkeypatch.setenv("AIRFLOW__DAG_PROCESSOR__DAG_BUNDLE_CONFIG_LIST", json.dumps([bundle]))
    monkeypatch.setenv("AIRFLOW__RUNGUARD__DEPLOYMENT", "test")
    monkeypatch.setenv("AIRFLOW__RUNGUARD__TEST_DEPLOYMENT", "test")
    airflow.ledger.deployment = "test"

    def dag(guarded: bool, source: str | None = None) -> Any:
        from airflow.dag_processing.dagbag import DagBag

        if source is not None:
            (folder / "adopted.py").write_text(source.replace("NAME", airflow.name))
        monkeypatch.setenv("GUARDED", "yes" if guarded else "")
        bag = DagBag(folder / "adopted.py", collect_dags=True)
        assert bag.import_errors == {}
        return bag.dags[airflow.name]

    return dag


def typed(airflow, *words: str) -> dict[str, Any]:
    """The command as ``airflow runguard`` runs it; its JSON."""
    command = next(command for command in COMMANDS if command.name == words[0])
    parser = argparse.ArgumentParser()
    for argument in command.all_arguments():
        argument.add_to_parser(parser)
    airflow.log()
    args = parser.parse_args([*words[1:], "--output", "json"])
    code = dispatch.run(command.name, args, dispatch.through_airflow, changes=command.changes)
    out = airflow.log()
    data: dict[str, Any]
    data, _ = json.JSONDecoder().raw_decode(out[out.index('{"') if '{"' in out else out.index("{\n") :])
    return {**data, "code": code}


def test_history_that_was_booked_is_not_charged_again(airflow, adopted):
    for day in DAYS:
        assert airflow.run(adopted(guarded=False), day=day).state == "success"
    dag = adopted(guarded=True)
    would = typed(airflow, "preview", "--dag-id", airflow.name)
    assert (would["counts"], would["code"]) == ({"run": 3}, 0)

    before = ["--before", (datetime.now(UTC) + timedelta(days=1)).isoformat()]
    dry = typed(airflow, "baseline", "--dag-id", airflow.name, *before)
    assert len(dry["records"]) == 3
    assert "Nothing was changed" in dry["said"]
    assert airflow.records() == []
    refused = typed(airflow, "baseline", "--dag-id", airflow.name, *before, "--apply")
    assert (refused["code"], "--reason" in refused["error"]) == (2, True)
    booked = typed(airflow, "baseline", "--dag-id", airflow.name, *before, "--apply", "--reason", "seen in the books")
    assert booked["records"] == [f"billing/invoice/2026-10-0{n}/cust-2026100{n}" for n in (1, 2, 3)]
    assert typed(airflow, "preview", "--dag-id", airflow.name)["counts"] == {"replay": 3}

    charges = airflow.vendor.charges()
    cleared = airflow.run(dag, day=DAYS[0])
    assert airflow.vendor.charges() == charges, "clearing history charges nobody"
    assert "its result was not stored" in cleared.log
    again = typed(airflow, "baseline", "--dag-id", airflow.name, *before, "--apply", "--reason", "once more")
    assert (again["records"], again["known"]) == ([], 2), "the cleared one is no success any more"


def test_mapped_tasks_are_named_one_by_one_where_the_dag_says_over_what(airflow, adopted):
    expanded = 'pay.expand(customer=["cust-{{ ds_nodash }}", "cust-8"])'
    dag = adopted(guarded=False, source=SOURCE.replace('pay("cust-{{ ds_nodash }}")', expanded))
    assert airflow.run(dag, day=DAYS[0]).state == "success"
    adopted(guarded=True)
    names = [f"billing/invoice/2026-10-01/{name}" for name in ("cust-20261001", "cust-8")]
    would = typed(airflow, "preview", "--dag-id", airflow.name)
    assert [(one["map_index"], one["record"], one["would"]) for one in would["works"]] == [
        (0, names[0], "run"),
        (1, names[1], "run"),
    ]
    before = ["--before", (datetime.now(UTC) + timedelta(days=1)).isoformat()]
    booked = typed(airflow, "baseline", "--dag-id", airflow.name, *before, "--apply", "--reason", "seen in the books")
    assert booked["records"] == names
    charges = airflow.vendor.charges()
    airflow.run(adopted(guarded=True), day=DAYS[0])
    assert airflow.vendor.charges() == charges, "clearing history charges nobody"

    given = SOURCE.replace('pay("cust-{{ ds_nodash }}")', "pay.expand(customer=customers())")
    given = given.replace(
        "    if os.environ", '    @task\n    def customers():\n        return ["a"]\n\n    if os.environ', 1
    )
    adopted(guarded=True, source=given)
    would = typed(airflow, "preview", "--dag-id", airflow.name)
    assert would["counts"] == {"unknown": 1}
    assert "mapped over what another task gives" in would["works"][0]["why"]


def test_a_backfill_is_told_before_it_runs(airflow, adopted):
    dag = adopted(guarded=True)
    airflow.run(dag, day=DAYS[0])
    would = typed(
        airflow, "preview", "--dag-id", airflow.name, "--backfill", "2026-10-01T00:00:00Z", "2026-10-03T00:00:00Z"
    )
    assert would["counts"] == {"replay": 1, "run": 2}
    assert would["said"] == f"3 run(s) of {airflow.name}: 2 would run, 1 would replay."


def test_a_dag_without_a_guard_says_what_to_do(airflow, adopted):
    airflow.run(adopted(guarded=False), day=DAYS[0])
    refused = typed(airflow, "preview", "--dag-id", airflow.name)
    assert (refused["code"], refused["remedy"]) == (1, f"Run `airflow runguard candidates --dag-id {airflow.name}`.")


def test_tasks_that_look_like_effects_are_found_and_guarded_ones_are_not(airflow, adopted):
    adopted(guarded=False)
    found = typed(airflow, "candidates")
    assert [(one["task_id"], one["why"]) for one in found["tasks"]] == [("pay", "its function calls requests.post")]
    adopted(guarded=True)
    assert typed(airflow, "candidates", "--dag-id", airflow.name)["tasks"] == []


def test_these_commands_say_that_they_need_airflow():
    from airflow_runguard.cli import main

    assert main(["preview", "--dag-id", "d", "--dsn", "postgresql://nobody@127.0.0.1:1/x"]) == 2


# -- the audit ---------------------------------------------------------------------------------------------------------


def test_the_audit_finds_nothing_where_nothing_is(airflow, adopted):
    airflow.run(adopted(guarded=True), day=DAYS[0])
    found = typed(airflow, "audit")
    assert (found["findings"], found["code"]) == ([], 0)


def test_the_audit_shows_ledger_and_airflow_disagreeing(airflow, adopted):
    airflow.vendor.script("drop")
    airflow.run(adopted(guarded=True), day=DAYS[0])
    assert airflow.record().state is State.IN_DOUBT
    _mark(airflow.name, "pay", "success")
    found = typed(airflow, "audit", "--tell")
    kinds = [finding["kind"] for finding in found["findings"]]
    assert (kinds, found["code"]) == (["Airflow disagrees"], 1)
    assert "is in doubt in the ledger; Airflow shows its task" in found["findings"][0]["what"]
    told = airflow.sql.execute("select kind, reason from runguard.notice where kind = 'audit'").fetchall()
    assert told == [("audit", "1 finding(s): Airflow disagrees.")]


def test_p06_a_pause_that_airflow_shows_as_failed_is_found(airflow, adopted):
    airflow.run(adopted(guarded=True), day=DAYS[0])
    with airflow.sql.transaction():
        airflow.sql.execute("select set_config('runguard.writing', 'repair', true)")
        airflow.sql.execute(
            "update runguard.record set state = 'paused', resume_at = clock_timestamp(), finished_at = null, "
            "effect = null, completeness = 'none', result = null, result_digest = null, failure_class = 'quota'"
        )
    _mark(airflow.name, "pay", "failed")
    (finding,) = typed(airflow, "audit")["findings"]
    assert finding["kind"] == "paused, shown as ended"


def test_the_audit_finds_bursts_and_what_is_stuck_and_slow(airflow, adopted):
    dag = adopted(guarded=True)
    for day in DAYS:
        airflow.vendor.script("drop")
        airflow.run(dag, day=day)
    airflow.run(dag, day=datetime(2026, 10, 9, tzinfo=UTC))
    with airflow.sql.transaction():
        airflow.sql.execute("select runguard.open_for_writing()")
        airflow.sql.execute(
            "update runguard.record set claimed_at = claimed_at - interval '2 hours' where state = 'done'"
        )
    found = typed(airflow, "audit", "--burst", "3", "--stuck-after", "1", "--alarm-after", "3600")
    kinds = sorted({finding["kind"] for finding in found["findings"]})
    assert {"errors in a burst", "took too long"} <= set(kinds)
    own = ("--alarm-after", "3600", "--alarm-after", "billing=90000")
    kinds = {finding["kind"] for finding in typed(airflow, "audit", "--burst", "3", *own)["findings"]}
    assert "took too long" not in kinds, "its own alarm counts, not that for all"
    (finding,) = typed(airflow, "audit", "--burst", "9", "--alarm-after", "billing=3600")["findings"]
    assert (finding["kind"], "The alarm is at 3600 s." in finding["what"]) == ("took too long", True)


def _mark(dag_id: str, task_id: str, state: str) -> None:
    """What a person does in the UI."""
    from airflow.models.taskinstance import TaskInstance
    from airflow.utils.session import create_session
    from sqlalchemy import update

    with create_session() as session:
        session.execute(
            update(TaskInstance)
            .where(TaskInstance.dag_id == dag_id, TaskInstance.task_id == task_id)
            .values(state=state)
        )
