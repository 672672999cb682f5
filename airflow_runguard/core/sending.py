"""How one statement is sent on a connection, and its rows read.

psycopg's cursors do this too, in Python and for every case, at three times the cost (decision 0036). What the driver
knows is left to it: the protocol (``psycopg.pq``), packing and reading of values (``Transformer``), what an error is.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import select
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any

import psycopg
from psycopg.abc import Buffer
from psycopg.abc import Transformer as Values
from psycopg.adapt import PyFormat, Transformer
from psycopg.errors import error_from_result
from psycopg.pq import ExecStatus, Format
from psycopg.pq.abc import PGresult
from psycopg.rows import DictRow
from psycopg.types.datetime import TimestamptzBinaryLoader

KEPT = 100
"""Prepared statements of one connection at most; a statement whose parameters have other types is another."""

ENDED_WELL = {ExecStatus.TUPLES_OK, ExecStatus.COMMAND_OK}


class _Times(TimestamptzBinaryLoader):
    """Times in binary, so that no DateStyle matters. ``None`` for one that Python cannot hold: only a damaged line has
    it, and must not hide the others."""

    def load(self, data: Buffer) -> datetime | None:  # type: ignore[override]
        try:
            return super().load(data)
        except psycopg.DataError:
            return None


class Sending:
    """Statements of one connection, one at a time, whichever thread asks.

    A statement is prepared at its second use, unless ``connection.prepare_threshold`` is ``None``. Prepared ones are
    numbered from a random start: behind a pooler, another client's ``_0`` may be a different statement; under a name of
    our own it is ours or not there.
    """

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        connection.adapters.register_loader("timestamptz", _Times)
        self.connection = connection
        self._names: dict[tuple[bytes, tuple[int, ...]], bytes] = {}
        self._used: dict[str, Values] = {}
        self._prefix = secrets.token_hex(8)

    def __call__(
        self, statement: str, parameters: Mapping[str, Any], meanwhile: Callable[[], None] = lambda: None
    ) -> list[DictRow]:
        """The rows of one statement, whose parameters are ``%(name)s``.

        :param meanwhile: done while the server works; does not raise.
        :raises psycopg.Error: it was refused, or the connection is lost.
        """
        text, names = numbered(statement)
        with self.connection.lock:
            used = self._used.get(statement)
            values: Values = used or self._used.setdefault(statement, Transformer(self.connection))
            packed = values.dump_sequence([parameters[name] for name in names], [PyFormat.AUTO] * len(names))
            types, formats = values.types or (), values.formats or []
            prepared = self._prepared(text, types) if used else None
            if prepared is None:
                self.connection.pgconn.send_query_params(text, packed, types, formats, Format.BINARY)
            else:
                self.connection.pgconn.send_query_prepared(prepared, packed, formats, Format.BINARY)
            result = self._answer(meanwhile)
            values.set_pgresult(result)
            columns = [(result.fname(n) or b"").decode() for n in range(result.nfields)]
            rows = values.load_rows(0, result.ntuples, lambda row: dict(zip(columns, row, strict=True)))
            values.set_pgresult(None)
            return rows

    def _prepared(self, text: bytes, types: Sequence[int]) -> bytes | None:
        """Its name; ``None`` where none is kept."""
        if self.connection.prepare_threshold is None:
            return None
        which = text, tuple(types)
        if which not in self._names:
            if len(self._names) >= KEPT:
                return None
            name = f"rg{self._prefix}{len(self._names)}".encode()
            self.connection.pgconn.send_prepare(name, text, types)
            self._answer()
            self._names[which] = name
        return self._names[which]

    def _answer(self, meanwhile: Callable[[], None] = lambda: None) -> PGresult:
        """Wait until the server is done. After a signal that ends the waiting, the connection is of no more use. Ctrl-C
        takes the statement back."""
        try:
            return self._awaited(meanwhile)
        except KeyboardInterrupt:
            with contextlib.suppress(psycopg.Error):
                self.connection.cancel_safe(timeout=5.0)
            raise

    def _awaited(self, meanwhile: Callable[[], None]) -> PGresult:
        server, ready = self.connection.pgconn, select.poll()
        ready.register(server.socket, select.POLLIN)
        while server.flush():
            ready.modify(server.socket, select.POLLIN | select.POLLOUT)
            ready.poll()
            server.consume_input()
            ready.modify(server.socket, select.POLLIN)
        meanwhile()
        last: PGresult | None = None
        try:
            while True:
                while server.is_busy():
                    ready.poll()
                    server.consume_input()
                if (answer := server.get_result()) is None:
                    break
                last = answer
        except psycopg.OperationalError:
            # A refusal says why the server went. What went well is known to be committed only when the server is done.
            if last is None or last.status in ENDED_WELL:
                raise
        while heard := server.notifies():  # for who listens on this connection
            if server.notify_handler:
                server.notify_handler(heard)
        if last is None:
            raise psycopg.OperationalError("the connection is lost")
        if last.status not in ENDED_WELL:
            raise error_from_result(last)
        return last


@cache
def numbered(statement: str) -> tuple[bytes, tuple[str, ...]]:
    """A statement as the server reads it (``$1``), and the names of its parameters in that order."""
    names: dict[str, str] = {}

    def number(match: re.Match[str]) -> str:
        return "%" if match[0] == "%%" else names.setdefault(match[1], f"${len(names) + 1}")

    text = re.sub(r"%%|%\((\w+)\)s", number, statement)
    return text.encode(), tuple(names)
