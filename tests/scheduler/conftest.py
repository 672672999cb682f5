"""One running Airflow for all tests of this room."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from demo.drive import GUARDED, PATIENCE
from demo.ground import ROOT, Ground


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    dags = tmp_path_factory.mktemp("dags")
    for folder in (ROOT / "demo" / "dags", Path(__file__).parent / "dags"):
        shutil.copytree(folder, dags, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    with Ground(tmp_path_factory.mktemp("ground"), dags, lambda _: None) as running:
        running.control.honour_keys(False)
        running.airflow.api.wait_dag(GUARDED, PATIENCE)
        running.airflow.api.unpause(GUARDED)
        yield running
