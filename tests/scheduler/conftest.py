"""One running Airflow for all tests of this room."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from demo.drive import GUARDED, PATIENCE
from demo.ground import ROOT, Ground
from tests.scheduler.looking import browser, ledger, page, paged  # noqa: F401 - fixtures of the pages' tests

ASKING = (
    "asking",
    "asking_briefly",
    "asking_in_a_batch",
    "answered_at_once",
    "booking",
    "interrupted",
    "submitting",
    "under_quota",
    "under_quota_in_a_pool",
    "under_quota_one_at_a_time",
    "under_quota_with_a_timeout",
)
"""The DAGs of those scenarios that run side by side."""


@pytest.fixture(scope="session")
def ground(tmp_path_factory: pytest.TempPathFactory, with_redis: bool) -> Iterator[Ground]:
    dags = tmp_path_factory.mktemp("dags")
    for folder in (ROOT / "demo" / "dags", Path(__file__).parent / "dags"):
        shutil.copytree(folder, dags, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    seen = {"AIRFLOW__RUNGUARD__OBSERVE_DAGS": "watched", "AIRFLOW__RUNGUARD__OBSERVE_TIMEOUT": "60"}
    with Ground(tmp_path_factory.mktemp("ground"), dags, lambda _: None, env=seen, with_redis=with_redis) as running:
        running.control.honour_keys(False)
        running.airflow.api.wait_dag(GUARDED, PATIENCE)
        running.airflow.api.unpause(GUARDED)
        yield running


@pytest.fixture(scope="session")
def after(ground: Ground) -> Iterator[Callable[[Callable[[Ground], Any]], Any]]:
    """What came of a scenario of asking or pausing. All run side by side, since most of their time is waiting."""
    from tests.scheduler import test_asking, test_interrupted_batches, test_pausing

    for dag_id in ASKING:
        ground.airflow.api.wait_dag(dag_id, PATIENCE)
        ground.airflow.api.unpause(dag_id)
    pool = ThreadPoolExecutor(6)
    try:
        scenarios = (*test_asking.SCENARIOS, *test_interrupted_batches.SCENARIOS, *test_pausing.SCENARIOS)
        running = {_name(scenario): pool.submit(scenario, ground) for scenario in scenarios}
        yield lambda scenario: running[_name(scenario)].result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _name(scenario: Callable[[Ground], Any]) -> str:
    """Of one in one file: pytest imports it under another package than this file does."""
    return f"{scenario.__module__.rpartition('.')[2]}.{scenario.__name__}"
