"""A ledger to ask, and a plain connection to look behind it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import hypothesis
import psycopg
import pytest

from airflow_runguard.core.ledger import Ledger
from demo.servers import Redis
from tests.core import engine
from tests.core.accidents import redis_of

# How long an example takes says something about the machine only, and this one may be busy.
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")

OpenLedger = Callable[..., Ledger]


@pytest.fixture
def open_ledger(ledger_url: str) -> Iterator[OpenLedger]:
    """Opens ledgers (each has a connection of its own) that are closed with the test."""
    with ExitStack() as stack:
        yield lambda url=ledger_url: stack.enter_context(closing(engine.open_ledger(url)))


@pytest.fixture
def ledger(open_ledger: OpenLedger) -> Ledger:
    return open_ledger()


@pytest.fixture
def sql(ledger_url: str) -> Iterator[psycopg.Connection[Any]]:
    """A superuser's connection to the ledger's database; each statement by itself."""
    with psycopg.connect(ledger_url, autocommit=True) as connection:
        yield connection


@pytest.fixture(scope="module")
def own_redis(tmp_path_factory: pytest.TempPathFactory, with_redis: bool) -> Iterator[Redis | None]:
    """A Redis that only this file's tests use, one after another; ``None`` in a run without Redis."""
    if not with_redis:
        yield None
        return
    with Redis(tmp_path_factory.mktemp("redis")) as server:
        yield server


@pytest.fixture
def empty_redis(own_redis: Redis | None) -> str | None:
    """Its URL; it knows of nothing."""
    if own_redis is None:
        return None
    with redis_of(own_redis.url) as client:
        client.command("FLUSHALL")
    return own_redis.url
