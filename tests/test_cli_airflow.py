"""The other door: ``airflow runguard …`` in real processes, with Airflow's settings, Connections and metadata."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from airflow_runguard.core.record import State
from tests.core import books, engine

AIRFLOW = Path(sys.executable).with_name("airflow")
DAG = """
from airflow.providers.http.operators.http import HttpOperator
from airflow.sdk import DAG, task
from airflow_runguard.operators import GuardedPythonOperator, guarded
from airflow_runguard.options import Guard

with DAG("bill", schedule=None):
    guard = Guard(key="x", on_doubt="ask")
    GuardedPythonOperator(task_id="charge", guard=guard, python_callable=print, retries=0)
    GuardedPythonOperator(task_id="mail", guard=guard, python_callable=print, retries=2)

    @task(retries=0)
    def plain(): ...

    plain()
"""

Airflow = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An Airflow with a migrated metadata database and one guarded DAG that it has read."""
    home = tmp_path_factory.mktemp("airflow")
    (home / "dags").mkdir()
    (home / "dags" / "bill.py").write_text(DAG)
    for command in (["db", "migrate"], ["dags", "reserialize"]):
        done = _airflow(home, {}, *command)
        assert done.returncode == 0, done.stderr
    return home


def _airflow(home: Path, extra: Mapping[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "_AIRFLOW"))}
    here = {"AIRFLOW_HOME": str(home), "AIRFLOW__CORE__LOAD_EXAMPLES": "False", "AIRFLOW__RUNGUARD__DEPLOYMENT": "test"}
    return subprocess.run(
        [str(AIRFLOW), *words],
        env={**clean, **here, **extra},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture
def airflow(home: Path, ledger_url: str) -> Airflow:
    """``airflow runguard …`` with the ledger's Connection in the environment."""

    def typed(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
        return _airflow(home, {"AIRFLOW_CONN_RUNGUARD_LEDGER": ledger_url, **env}, "runguard", *words)

    return typed


def test_the_same_commands_are_behind_this_door(airflow: Airflow, ledger_url: str) -> None:
    with closing(engine.open_ledger(ledger_url)) as ledger:
        held = books.bring(ledger, State.IN_DOUBT, engine.order("inv-7"))
        listed = airflow("list", "--needs-person", "--output", "json")
        assert listed.returncode == 0, listed.stderr
        assert [record["key"] for record in json.loads(listed.stdout)["records"]] == ["inv-7"]

        done = airflow("resolve", "inv-7", "--happened", "--result", '"ch_1"', "--reason", "seen", "--actor", "ana")
        assert done.returncode == 0, done.stderr
        assert "in_doubt → done" in done.stdout
        assert books.state_of(ledger, held.order) is State.DONE
        assert ledger.events(held.id)[-1].actor == "person:ana"


def test_a_connection_in_airflows_metadata_is_found_and_a_missing_one_is_named(home: Path, ledger_url: str) -> None:
    missing = _airflow(home, {}, "runguard", "list", "--output", "json")
    assert missing.returncode == 3
    assert "'runguard_ledger' is not defined" in json.loads(missing.stdout)["error"]
    added = _airflow(home, {}, "connections", "add", "kept_ledger", "--conn-uri", ledger_url)
    assert added.returncode == 0, added.stderr
    found = _airflow(
        home, {"AIRFLOW__RUNGUARD__LEDGER_CONN_ID": "kept_ledger"}, "runguard", "db", "check", "-o", "json"
    )
    assert found.returncode == 0, found.stderr
    assert json.loads(found.stdout)["deployment"] == "test"


def test_the_doctor_reads_airflows_settings_and_its_dags(airflow: Airflow) -> None:
    looked = airflow("doctor", "-o", "json", AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT="60")
    checks: dict[str, Any] = {check["name"]: check for check in json.loads(looked.stdout)["checks"]}
    assert looked.returncode == 1
    assert checks["heartbeat_timeout"]["status"] == "fail"
    assert checks["triggerer"]["status"] == "warn"
    assert checks["retries"]["status"] == "warn"
    assert "1 of 2 guarded tasks have retries = 0: bill.charge" in checks["retries"]["found"]


def test_the_doctor_needs_neither_a_connection_nor_a_metadata_database(tmp_path: Path) -> None:
    looked = _airflow(tmp_path, {}, "runguard", "doctor", "-o", "json")
    checks: dict[str, Any] = {check["name"]: check["status"] for check in json.loads(looked.stdout)["checks"]}
    assert looked.returncode == 1
    assert (checks["ledger"], checks["heartbeat_timeout"]) == ("fail", "ok")
    assert (checks["triggerer"], checks["retries"]) == ("skipped", "skipped")


def test_the_ledger_is_set_up_through_this_door_too(airflow: Airflow) -> None:
    assert airflow("db", "upgrade").returncode == 0


def test_every_start_of_airflow_loads_only_the_definition_of_the_commands() -> None:
    code = (
        "import sys; import airflow.cli.cli_config; before = set(sys.modules)\n"
        "from airflow_runguard.cli import get_commands; get_commands()\n"
        "print(sorted(set(sys.modules) - before))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "['airflow_runguard.cli']"
