"""Items between planning and calling: in memory, and where they are many in a file without a name."""

from __future__ import annotations

import pickle
import tempfile
from collections import deque
from typing import IO, Any

from airflow_runguard.core.errors import PlanningError
from airflow_runguard.core.work import said

IN_MEMORY = 10_000
"""Planned items that wait in memory; what is more waits in a file."""

Chosen = list[tuple[str, Any]]


class Spool:
    """Items between planning and calling, in the order of the list. Filled first, emptied afterwards."""

    def __init__(self) -> None:
        self._first: deque[tuple[str, Any]] = deque()
        self._file: IO[bytes] | None = None
        self._chunks = 0
        self._reading = False
        self.length = 0

    def add(self, items: Chosen) -> None:
        self.length += len(items)
        if self._file is None and self.length <= IN_MEMORY:
            self._first.extend(items)
        elif items:
            if self._file is None:
                self._file = tempfile.TemporaryFile(prefix="runguard-")  # noqa: SIM115  # closed by close()
            try:
                pickle.dump(items, self._file, pickle.HIGHEST_PROTOCOL)
            except Exception as error:
                raise PlanningError(
                    f"Items of a batch of over {IN_MEMORY} wait in a file, and these cannot: {said(error)}.",
                    "Make items plain data (dicts, tuples, module-level dataclasses); no call was made.",
                ) from error
            self._chunks += 1

    def take(self, count: int) -> Chosen:
        taken: Chosen = []
        while len(taken) < count:
            if not self._first and not self._refill():
                break
            taken.append(self._first.popleft())
        return taken

    @property
    def at_hand(self) -> int:
        """So many can be taken without reading the file."""
        return len(self._first)

    def _refill(self) -> bool:
        if self._file is None or not self._chunks:
            return False
        if not self._reading:
            self._file.seek(0)
            self._reading = True
        self._chunks -= 1
        self._first.extend(pickle.load(self._file))  # noqa: S301  # our own file, which nobody else can open
        return True

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
