"""The databases that ``guard.sql`` has effects in, each a real one, and a process that dies or sleeps while it has one.

That process books an order under a guard, says "here" at the step it was told, and goes on when it is told anything. It
is forked by a server that has loaded everything before (``multiprocessing``'s), so that it costs no start of Python.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

import psycopg
import pymysql

from airflow_runguard import codec
from airflow_runguard.core import guard
from airflow_runguard.core.leases import Leases
from airflow_runguard.sqlguard import SqlTransaction, answers
from demo.processes import free_port
from tests.core import engine


@dataclass(frozen=True)
class Target:
    """:param url: PostgreSQL's URL, SQLite's file, or PyMySQL's arguments as JSON."""

    kind: str
    url: str

    def connect(self) -> Any:
        if self.kind == "postgresql":
            return psycopg.connect(self.url)
        if self.kind == "sqlite":
            return sqlite3.connect(self.url)
        return pymysql.connect(**json.loads(self.url))

    def use(self) -> None:
        """Define the Connection ``orders`` in this process."""
        match self.kind:
            case "postgresql":
                connection = self.url
            case "sqlite":
                connection = json.dumps({"conn_type": "sqlite", "host": self.url})
            case "mysql":
                driver = {"client": "mysql-connector-python"}  # of MySqlHook's drivers the one that has wheels
                to = json.loads(self.url)
                server = {"host": to["host"], "port": to["port"], "login": to["user"], "schema": to["database"]}
                connection = json.dumps({"conn_type": "mysql", **server, "extra": driver})
        os.environ["AIRFLOW_CONN_ORDERS"] = connection

    def run(self, *statements: str) -> None:
        with contextlib.closing(self.connect()) as connection:
            cursor = connection.cursor()
            for statement in statements:
                cursor.execute(statement)
            connection.commit()

    def rows(self, query: str = "select id, customer from orders") -> list[tuple[Any, ...]]:
        with contextlib.closing(self.connect()) as connection:
            cursor = connection.cursor()
            cursor.execute(query)
            return [tuple(row) for row in cursor.fetchall()]

    def book(self, connection: Any, customer: str) -> int:
        """The author's function: books an order and returns its number."""
        cursor = connection.cursor()
        mark = "?" if self.kind == "sqlite" else "%s"
        cursor.execute("select coalesce(max(id), 0) + 1 from orders")
        number = int(cursor.fetchone()[0])
        cursor.execute(f"insert into orders values ({mark}, {mark})", (number, customer))
        return number

    def attempt(self, ledger_url: str, what: Any, body: Callable[[guard.GuardContext], Any], **rules: Any) -> guard.How:
        """One try, as a door would make it."""
        ledger = engine.open_ledger(ledger_url)
        transaction = rules.pop("transaction", SqlTransaction)
        work = engine.work(what, body, transaction=transaction, reconcile=answers(None), **rules)
        try:
            return guard.run(ledger, Leases(None, ledger.installation), replace(work, dump=codec.dump, load=codec.load))
        finally:
            ledger.close()


class MariaDb:
    """A MariaDB server on a free port, with a database ``shop``. From Debian's package ``mariadb-server``."""

    def __init__(self, directory: Path) -> None:
        self._data = directory / "data"
        self._socket = str(directory / "s")
        self._port = free_port()

    @staticmethod
    def available() -> bool:
        return shutil.which("mariadbd", path=PATH) is not None

    def __enter__(self) -> Self:
        install = [
            shutil.which("mariadb-install-db", path=PATH),
            f"--datadir={self._data}",
            "--auth-root-authentication-method=normal",
        ]
        subprocess.run([*install, "--user=root", "--skip-test-db"], check=True, capture_output=True)
        self._process = subprocess.Popen(
            [
                str(shutil.which("mariadbd", path=PATH)),
                "--no-defaults",
                f"--datadir={self._data}",
                f"--socket={self._socket}",
                f"--port={self._port}",
                "--bind-address=127.0.0.1",
                "--user=root",
                "--skip-log-bin",
            ],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        end = time.monotonic() + 60
        while True:
            try:
                with contextlib.closing(pymysql.connect(host="127.0.0.1", port=self._port, user="root")) as connection:
                    connection.cursor().execute("create database shop")
                return self
            except pymysql.err.OperationalError:
                if time.monotonic() > end or self._process.poll() is not None:
                    raise
                time.sleep(0.05)  # until it listens

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(60)

    @property
    def target(self) -> Target:
        return Target(
            "mysql", json.dumps({"host": "127.0.0.1", "port": self._port, "user": "root", "database": "shop"})
        )


PATH = f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/bin"


FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(
    ["tests.sql_targets", "airflow.providers.postgres.hooks.postgres", "airflow.providers.sqlite.hooks.sqlite"]
)


class Worker:
    """The process, stopped at its step."""

    def __init__(self, target: Target, ledger_url: str, key: str, step: str) -> None:
        self._line, its_end = FORKS.Pipe()
        self._process = FORKS.Process(target=_book, args=(its_end, target, ledger_url, key, step), daemon=True)
        self._process.start()
        its_end.close()
        assert self._line.recv() == "here"  # else it ended before its step: EOFError

    def die(self) -> None:
        self._process.kill()
        self._process.join()

    def freeze(self) -> None:
        os.kill(self._process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self._process.pid, signal.SIGCONT)

    def go_on(self) -> str:
        """Let it run to its end; what it says then."""
        self._line.send("")
        how: str = self._line.recv()
        self._process.join()
        return how


def _book(line: Connection, target: Target, ledger_url: str, key: str, stop_at: str) -> None:
    target.use()

    def reaches(step: str) -> None:
        if stop_at == step:
            line.send("here")
            line.recv()

    class Doomed(SqlTransaction):
        def make(self, *args: Any) -> Any:
            reaches("before the marker")
            value = super().make(*args)
            reaches("after the commit")
            return value

    def book(connection: Any, customer: str) -> int:
        number = target.book(connection, customer)
        if stop_at == "after a commit of its own":
            connection.cursor().execute("commit")
        if stop_at == "at a statement that commits by itself":
            line.send("here")
            insert = f"insert into orders values ({number + 1}, '{customer}')"
            connection.cursor().execute(f"{insert}; select pg_advisory_xact_lock(1); commit")  # held by the test
        reaches(stop_at if stop_at == "after a commit of its own" else "in the transaction")
        return number

    how = target.attempt(
        ledger_url,
        engine.order(key, calls="explicit", lease=1.0),
        lambda context: context.sql("book", "orders", book, customer=key),
        transaction=Doomed,
    )
    line.send(str(how))
