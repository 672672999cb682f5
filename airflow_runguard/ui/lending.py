"""Connections to the ledger, lent to one request at a time.

A few for the whole api-server process. One is given back when its request ends, and closed when it is a minute old: an
edited Connection takes effect, and no setting has to be watched.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from airflow_runguard.config import Settings, connect_ledger, settings
from airflow_runguard.core.board import Board
from airflow_runguard.core.errors import LedgerUnavailable

MOST = 8
LONGEST = 60.0
"""Seconds for which a connection is used."""
PATIENCE = 10.0
"""Seconds that a request waits for one of them."""


class Lender:
    def __init__(self) -> None:
        self._idle: list[tuple[float, Board]] = []
        self._lock = threading.Lock()
        self._free = threading.Semaphore(MOST)

    @contextmanager
    def board(self) -> Iterator[Board]:
        """A board that this thread alone uses.

        :raises LedgerUnavailable: all are in use, or the ledger is out of reach.
        :raises LedgerNotReady: no schema, another version, or another deployment's.
        :raises PlanningError: ``[runguard]`` or the Connection cannot be used.
        """
        if not self._free.acquire(timeout=PATIENCE):
            raise LedgerUnavailable(f"All {MOST} connections of the ledger's pages are in use.", "Try again.")
        try:
            begun, board = self._taken()
            try:
                yield board
            except BaseException:
                board.close()  # whatever it was, the next one begins anew
                raise
            self._give_back(begun, board)
        finally:
            self._free.release()

    def close(self) -> None:
        with self._lock:
            idle, self._idle = self._idle, []
        for _, board in idle:
            board.close()

    def _taken(self) -> tuple[float, Board]:
        now = time.monotonic()
        with self._lock:
            old = [entry for entry in self._idle if now - entry[0] > LONGEST]
            self._idle = [entry for entry in self._idle if now - entry[0] <= LONGEST]
            found = self._idle.pop() if self._idle else None
        for _, board in old:
            board.close()
        return found or (now, opened(settings()))

    def _give_back(self, begun: float, board: Board) -> None:
        with self._lock:
            self._idle.append((begun, board))


def opened(options: Settings) -> Board:
    """A board on the ledger of ``[runguard]``, which was looked at whether it may be used."""
    board = Board(connect_ledger(options), deployment=options.deployment)
    try:
        board.check()
    except BaseException:
        board.close()
        raise
    return board
