"""One connection to the book: how a statement is sent, repeated, and what its errors mean.

Foreign errors are mapped here, once: out of reach is :class:`LedgerUnavailable`, not usable is :class:`LedgerNotReady`.
Serialisation failures, deadlocks and lost answers are repeated, which is safe: a claim is recognised by its nonce, a
write by its fence.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

import psycopg
from psycopg import IsolationLevel
from psycopg.pq import TransactionStatus
from psycopg.rows import DictRow, dict_row

from airflow_runguard.core.errors import LedgerNotReady, LedgerUnavailable, PlanningError
from airflow_runguard.core.sending import Sending

T = TypeVar("T")
Connect = Callable[[], "psycopg.Connection[Any]"]

UPGRADE = "Run `airflow runguard db upgrade`."
NEWER = "Install the newer version of airflow-runguard here."
GRANTS = "Run `airflow runguard doctor`: it says which rights the role lacks, and what to type."
REPEATED = {"40001", "40P01"}  # serialization_failure, deadlock_detected: nothing happened
UNPREPARED = {"26000", "42P05", "0A000"}  # prepared statement is gone, taken or outdated: nothing happened
NOT_READY = {"42P01", "3F000", "42883", "42703"}  # undefined table, schema, function, column
ATTEMPTS = 20
LONGEST = 1_000_000_000
"""Bytes of one statement's parameters; at a few more PostgreSQL ends the connection, as often as it is sent."""


@cache
def queries(name: str = "queries.sql") -> Mapping[str, str]:
    """The blocks of one file of statements, by their names."""
    text = files("airflow_runguard.core").joinpath("sql", name).read_text(encoding="utf-8")
    blocks = re.split(r"^-- name: (\w+)\n", text, flags=re.MULTILINE)[1:]
    return dict(zip(blocks[::2], blocks[1::2], strict=True))


class Seam:
    """One connection to the book.

    :param connect: opens a psycopg connection; called again after a lost one.
    :param deployment: whose records these are.
    :raises PlanningError: ``connect`` gives something that is not a psycopg 3 connection.
    """

    def __init__(self, connect: Connect, *, deployment: str) -> None:
        self._connect = connect
        self.deployment = deployment
        self._connection: psycopg.Connection[DictRow] | None = None
        self._sending: Sending | None = None
        self._explicit = False
        self.installation = ""
        self.epoch = 0

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _statement(self, name: str) -> str:
        return queries()[name]

    def _word(self, name: str, **parameters: Any) -> str:
        return str(self._one(name, parameters)["verdict"])

    def _one(self, name: str, parameters: Mapping[str, Any]) -> DictRow:
        return self._all(name, parameters)[0]

    def _all(
        self, name: str, parameters: Mapping[str, Any], meanwhile: Callable[[], None] = lambda: None
    ) -> Sequence[DictRow]:
        """:raises psycopg.DataError: its parameters are too long for one statement, which no waiting mends."""
        statement = self._statement(name)
        try:
            return self._carried(lambda send: send(statement, parameters, meanwhile))
        except LedgerUnavailable as error:
            if _length(list(parameters.values())) > LONGEST:
                raise psycopg.DataError(f"over {LONGEST} bytes in one statement") from error
            raise

    def _carried(self, send: Callable[[Sending], T], *, whole: bool = False) -> T:
        """Send one statement, or (``whole``) several in one transaction; repeat it where that is safe and useful."""
        sent = reconnected = False
        for _ in range(ATTEMPTS):
            asked = False
            try:
                connection = self._open()
                asked = True
                if self._explicit or whole:
                    with connection.transaction():
                        return send(self._sending_on(connection))
                return send(self._sending_on(connection))
            except LedgerUnavailable as error:
                raise LedgerUnavailable(error.what, sent=sent) from error.__cause__
            except psycopg.Error as error:
                lost = self._connection is None or self._connection.broken or self._connection.closed
                lost = lost or self._torn()
                if lost:
                    self.close()
                    sent = sent or asked  # an error that did arrive means that nothing was carried out
                if error.sqlstate == "RG001":
                    self._explicit = True  # the role's isolation is another: say it with each transaction from now on
                elif error.sqlstate in UNPREPARED and self._connection is not None:
                    self._connection.prepare_threshold = None  # a pooler keeps none: send statements whole from now on
                elif error.sqlstate in REPEATED:
                    pass
                elif lost and not reconnected and not isinstance(error, psycopg.errors.ConnectionTimeout):
                    reconnected = True
                else:
                    raise self._translated(error, sent) from error
            except BaseException:
                self.close()  # a signal tore the statement: the connection's state is unknown
                raise
        raise LedgerUnavailable(f"The ledger refused {ATTEMPTS} times for serialisation.", sent=sent)

    def _open(self) -> psycopg.Connection[DictRow]:
        if self._connection is None:
            try:
                connection = self._connect()
            except psycopg.Error:
                raise
            except Exception as error:
                if self._sending is None:
                    raise
                # It was there before, so whoever keeps it (Airflow's API server, a secrets backend) is away.
                raise LedgerUnavailable(f"The ledger's Connection cannot be had at present: {error}") from error
            if not isinstance(connection, psycopg.Connection):
                raise PlanningError(
                    f"The ledger's Connection gives a {type(connection).__module__} connection, not a psycopg 3 one.",
                    "Install psycopg[binary]>=3.2.4, or set sqlalchemy_scheme=postgresql+psycopg in its extra.",
                )
            connection.rollback()
            connection.autocommit = True
            connection.isolation_level = IsolationLevel.READ_COMMITTED
            connection.row_factory = dict_row
            self._connection = connection
        return self._connection

    def _torn(self) -> bool:
        """Whether a statement was given up that the connection still waits for: the closing was torn as well."""
        assert self._connection is not None
        return self._connection.info.transaction_status is TransactionStatus.ACTIVE

    def _sending_on(self, connection: psycopg.Connection[DictRow]) -> Sending:
        if self._sending is None or self._sending.connection is not connection:
            self._sending = Sending(connection)
        return self._sending

    def _translated(self, error: psycopg.Error, sent: bool) -> Exception:
        said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if error.sqlstate in NOT_READY:
            return LedgerNotReady(f"The ledger cannot be used as it is: {said}.", UPGRADE)
        if error.sqlstate == "42501":
            return LedgerNotReady(f"The ledger's role may not do this: {said}.", GRANTS)
        if error.sqlstate == "RG002":
            return PlanningError(f"{said}. Nothing was changed.", "Say another state (`--set-state`).")
        if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) or error.sqlstate == "25006":
            return LedgerUnavailable(f"The ledger is out of reach: {said}.", sent=sent)
        return error


def _length(value: Any) -> int:
    """Of what a parameter carries; roughly."""
    if isinstance(value, list):
        return sum(map(_length, value))
    return len(value) if isinstance(value, str | bytes) else 0
