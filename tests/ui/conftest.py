"""The API in this process on a real ledger and real metadata, and people with different rights who ask it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import psycopg
import pytest

from airflow_runguard.core.board import Board
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Order, State
from tests.core import engine
from tests.core.books import Held, bring
from tests.ui import rights


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    with closing(engine.open_ledger(ledger_url)) as ledger:
        yield ledger


@pytest.fixture
def board(ledger_url: str) -> Iterator[Board]:
    with Board(lambda: psycopg.connect(ledger_url), deployment=engine.DEPLOYMENT) as board:
        board.check()
        yield board


@pytest.fixture
def sql(ledger_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(ledger_url, autocommit=True) as connection:
        yield connection


@pytest.fixture(scope="session")
def dags(metadata: None) -> None:
    """Airflow knows the DAGs ``bill`` and ``ship``; records of any other are of deleted ones."""
    from airflow.models.dag import DagModel
    from airflow.models.dagbundle import DagBundleModel
    from airflow.utils.session import create_session

    with create_session() as session:
        if session.get(DagBundleModel, "tests") is None:
            session.add(DagBundleModel(name="tests"))
            session.flush()
        for dag_id in ("bill", "ship"):
            session.add(DagModel(dag_id=dag_id, bundle_name="tests"))


@pytest.fixture(scope="session")
def airflow_users(dags: None) -> Iterator[Any]:
    """The auth manager of this process, for these tests."""
    from airflow.api_fastapi import app

    before = app._AuthManagerState.instance
    app._AuthManagerState.instance = manager = rights.TeamRights()
    yield manager
    app._AuthManagerState.instance = before


@dataclass
class Person:
    """Somebody who asks the API with a token; nobody where there is none."""

    client: Any
    headers: dict[str, str]

    def get(self, path: str, **query: Any) -> Any:
        return self.client.get(f"/api/{path}", params=query, headers=self.headers)

    def post(self, path: str, body: Any) -> Any:
        return self.client.post(f"/api/{path}", json=body, headers=self.headers)

    def see(self, path: str, **query: Any) -> Any:
        """What a question that must be answered is answered."""
        answer = self.get(path, **query)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def keys(self, **query: Any) -> list[str]:
        """The keys of all records that fit, page by page."""
        found: list[str] = []
        after = None
        while True:
            page = self.see("records", **query, **({"after": after} if after else {}))
            found += [record["key"] for record in page["records"]]
            after = page["next"]
            if after is None:
                return found


class Api:
    """The application, as people of different rights meet it."""

    def __init__(self, manager: Any) -> None:
        from starlette.testclient import TestClient

        from airflow_runguard.ui.app import create_app

        self.app = create_app()
        self.manager = manager
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # starlette's own, about the library its client is made of
            self.client = TestClient(self.app, raise_server_exceptions=True)

    def token(self, name: str) -> str:
        from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser

        token: str = self.manager.generate_jwt(SimpleAuthManagerUser(username=name, role=rights.ROLES[name]))
        return token

    def as_(self, name: str) -> Person:
        return Person(self.client, {"Authorization": f"Bearer {self.token(name)}"})

    def nobody(self) -> Person:
        return Person(self.client, {})


@pytest.fixture
def api(airflow_users: Any, ledger_url: str, lease_url: str | None, monkeypatch: pytest.MonkeyPatch) -> Iterator[Api]:
    for name, value in {
        **({"AIRFLOW_CONN_RUNGUARD_REDIS": lease_url} if lease_url else {}),
        "AIRFLOW__RUNGUARD__DEPLOYMENT": engine.DEPLOYMENT,
        "AIRFLOW_CONN_RUNGUARD_LEDGER": ledger_url,
    }.items():
        monkeypatch.setenv(name, value)
    api = Api(airflow_users)
    yield api
    api.app.state.lender.close()


def put(ledger: Ledger, key: str, state: State = State.DONE, dag_id: str = "bill", **rules: Any) -> Held:
    """A record of that DAG, brought there by honest ways."""
    rules.setdefault("max_call_time", 0.001)  # so that nobody has to wait before it did not happen
    return bring(ledger, state, order(key, **rules), engine.holder(dag_id=dag_id))


def order(key: str, **rules: Any) -> Order:
    return engine.order(key, **rules)
