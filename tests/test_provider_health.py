"""Airflow with the package installed: its command line works, says nothing new, and costs next to nothing more."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.metadata import distribution
from pathlib import Path

import pytest

QUIET = os.environ | {"PYTHONWARNINGS": "default"}


def python(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=QUIET, cwd=cwd, capture_output=True, text=True, timeout=150)


def airflow(*arguments: str, cwd: Path) -> str:
    """The answer of ``airflow …``, which mentions us in no warning and no error."""
    done = python("-m", "airflow", *arguments, cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert not [line for line in done.stderr.splitlines() if "runguard" in line.lower()], done.stderr
    return done.stdout


def test_the_package_is_installed_as_a_provider():
    (entry,) = [e for e in distribution("airflow-runguard").entry_points if e.group == "apache_airflow_provider"]
    assert entry.value == "airflow_runguard.provider_info:get_provider_info"


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["version"], ["3."]),
        (["plugins"], []),
        (["providers", "list", "--output", "json"], ["airflow-runguard"]),
        (["config", "list", "--section", "runguard"], ["deployment = ", "ledger_conn_id = ", "busy_wait_limit = "]),
        (["runguard", "--help"], ["resolve", "explain", "doctor"]),
    ],
    ids=lambda value: value[0] if value and isinstance(value[0], str) else "",
)
def test_airflows_command_line_works_and_complains_of_nothing(tmp_path, arguments, shown):
    said = airflow(*arguments, cwd=tmp_path)
    assert [word for word in shown if word not in said] == []


def test_a_cold_import_of_airflows_configuration_works(tmp_path):
    done = python("-W", "error::ImportWarning", "-c", "import airflow.configuration", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "runguard" not in done.stderr


def test_importing_the_package_imports_nothing_heavy(tmp_path):
    program = (
        "import sys, airflow_runguard; "
        "print([m for m in ('airflow', 'psycopg', 'redis', 'jinja2', 'alembic', 'requests') if m in sys.modules])"
    )
    assert python("-c", program, cwd=tmp_path).stdout.strip() == "[]"


COST = """
import json, sys, time
from importlib.metadata import distribution
import airflow.sdk.execution_time.task_runner  # what a task process has imported anyway

before = set(sys.modules)
start = time.process_time()
for entry in distribution("airflow-runguard").entry_points:
    entry.load()()
spent = time.process_time() - start
print(json.dumps([spent, sorted(m for m in set(sys.modules) - before if not m.startswith("airflow_runguard"))]))
"""


def test_having_the_package_installed_costs_a_task_process_less_than_50_ms(tmp_path):
    """What Airflow does with it in every process: find the distribution, load its entry points, read its data. In CPU
    time of the process, so that a busy machine does not count; who uses the guard pays for its imports besides."""
    done = python("-c", COST, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    seconds, modules = json.loads(done.stdout.splitlines()[-1])
    assert seconds < 0.05
    assert [m for m in modules if m.partition(".")[0] not in sys.stdlib_module_names] == []
