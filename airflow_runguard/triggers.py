"""Waiting without a worker: the trigger of guarded tasks, and the one watcher that all triggers of a process share.

The watcher asks the ledger in one query a tick, over one connection, on a thread of its own, so that thousands of waits
cost the triggerer's loop nothing; and at once where something was changed by hand (LISTEN). It wakes; the claim
decides. Firing twice, early or after the triggerer died is harmless, and nothing here has an effect anywhere else.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from airflow.triggers.base import BaseTrigger, TriggerEvent

from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.series import Place

log = logging.getLogger("airflow_runguard")

VERSION = 1
TICK = 0.5
"""Seconds between two looks into the ledger, where nobody changes anything by hand."""
BREATH = 0.1
"""Seconds between two looks at the least, however much is changed."""
SAID_EVERY = 5.0
"""Seconds between two signs of life to the ledger, by which tasks know that somebody would wake them."""
BLIND = timedelta(seconds=60)
"""A watcher that has not reached the ledger for so long lets those go whose time has come; the claim then decides."""


class ResumeTrigger(BaseTrigger):
    """Fires when a waiting task may look at its record again.

    :param deployment: whose ledger.
    :param record_id: the record that is waited for; 0 = only the time.
    :param until: when it may be claimed as far as was known (ISO 8601); ``None`` = a person says.
    :param not_before: a task that comes back too fast can be failed by the scheduler although it runs (3.3.2).
    """

    def __init__(
        self, deployment: str, record_id: int, until: str | None, not_before: str, version: int = VERSION
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.deployment, self.record_id, self.until, self.not_before = deployment, record_id, until, not_before
        self.version = version

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return (
            f"{type(self).__module__}.{type(self).__qualname__}",
            {
                "deployment": self.deployment,
                "record_id": self.record_id,
                "until": self.until,
                "not_before": self.not_before,
                "version": self.version,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        await _until(datetime.fromisoformat(self.not_before))
        until = None if self.until is None else datetime.fromisoformat(self.until)
        if self.record_id:
            await Watcher.of(self.deployment).wait(self.record_id, until)
        elif until is not None:
            await _until(until)
        yield TriggerEvent({"record_id": self.record_id})  # type: ignore[no-untyped-call]


class PreviousTrigger(BaseTrigger):
    """Fires when the one before a place of a series lets the next one begin, or says that it never will.

    :param deployment: whose ledger.
    :param place: the place, as a dict (see :class:`~airflow_runguard.core.series.Place`).
    :param not_before: as for :class:`ResumeTrigger`.
    """

    def __init__(self, deployment: str, place: dict[str, Any], not_before: str, version: int = VERSION) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.deployment, self.place, self.not_before, self.version = deployment, place, not_before, version

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return (
            f"{type(self).__module__}.{type(self).__qualname__}",
            {
                "deployment": self.deployment,
                "place": self.place,
                "not_before": self.not_before,
                "version": self.version,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        await _until(datetime.fromisoformat(self.not_before))
        await Watcher.of(self.deployment).wait(Place(**self.place), None)
        yield TriggerEvent({"place": self.place["place"]})  # type: ignore[no-untyped-call]


async def _until(moment: datetime) -> None:
    await asyncio.sleep(max(0.0, (moment - datetime.now(UTC)).total_seconds()))


class Watcher:
    """Looks at the records that this process's triggers wait for. It runs while somebody waits."""

    _all: ClassVar[dict[tuple[str, int], Watcher]] = {}

    @classmethod
    def of(cls, deployment: str) -> Watcher:
        """The one of this process (and event loop) for a deployment."""
        key = (deployment, id(asyncio.get_running_loop()))
        return cls._all.setdefault(key, cls(deployment))

    def __init__(self, deployment: str) -> None:
        self.deployment = deployment
        self.name = f"{socket.gethostname()}:{os.getpid()}:{deployment}"
        self._waits: dict[int | Place, dict[asyncio.Future[None], datetime | None]] = {}
        """Who waits for what, and until when at the latest as far as was known."""
        self._task: asyncio.Task[None] | None = None
        self._ledger: Ledger | None = None
        self._said_at = self._seen_at = datetime.now(UTC)
        self.looks = 0
        """How often the ledger has answered."""
        self.longest_on_loop = 0.0
        """Seconds that one look took from the triggerer's loop at most."""

    async def wait(self, what: int | Place, until: datetime | None) -> None:
        """:param what: a record's id, or a place in a series that may not begin yet."""
        woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waits.setdefault(what, {})[woken] = until
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch(), name="runguard-watcher")
        try:
            await woken
        finally:
            del self._waits[what][woken]
            if not self._waits[what]:
                del self._waits[what]

    async def _watch(self) -> None:
        self._seen_at = datetime.now(UTC)
        self._said_at = self._seen_at - timedelta(seconds=SAID_EVERY)
        with ThreadPoolExecutor(1, "runguard-watcher") as thread:
            loop = asyncio.get_running_loop()
            try:
                while self._waits:
                    began = time.perf_counter()
                    asked = loop.run_in_executor(
                        thread, self._look, list(self._waits), sum(map(len, self._waits.values()))
                    )
                    took = time.perf_counter() - began
                    due = await asked
                    began = time.perf_counter()
                    for woken in self._woken_by(due):
                        if not woken.done():
                            woken.set_result(None)
                    self.longest_on_loop = max(self.longest_on_loop, took + time.perf_counter() - began)
                    await loop.run_in_executor(thread, self._rest)
            finally:
                await loop.run_in_executor(thread, self._leave)

    def _woken_by(self, due: set[int | Place]) -> list[asyncio.Future[None]]:
        """Work for those that are due, not for all that wait: the triggerer's loop has others to serve."""
        latest = datetime.now(UTC) - BLIND
        if self._seen_at >= latest:
            return [woken for what in due for woken in self._waits.get(what, ())]
        return [
            woken
            for waits in self._waits.values()
            for woken, until in waits.items()
            if until is not None and until < latest
        ]

    # -- on the thread ------------------------------------------------------------------------------------------------

    def _look(self, asked: list[int | Place], waits: int) -> set[int | Place]:
        ids = [what for what in asked if isinstance(what, int)]
        places = [what for what in asked if isinstance(what, Place)]
        try:
            ledger = self._opened()
            now = datetime.now(UTC)
            if (now - self._said_at).total_seconds() >= SAID_EVERY:
                ledger.watching(self.name, waits)
                self._said_at = now
            due: set[int | Place] = set(ledger.due(ids)) if ids else set()
            if places:
                due.update(ledger.due_places(places))
        except Exception as error:
            if datetime.now(UTC) - self._seen_at < timedelta(seconds=2 * TICK):
                log.warning("The ledger cannot be asked; tasks that wait for it go on waiting: %s", error)
            self._close()
            return set()
        self._seen_at = datetime.now(UTC)
        self.looks += 1
        return due

    def _opened(self) -> Ledger:
        if self._ledger is None:
            from airflow_runguard.config import connect_ledger, settings

            ledger = Ledger(connect_ledger(settings()), deployment=self.deployment)
            ledger.check()
            ledger.listen()  # before the first look, so that nothing falls between the two
            self._ledger = ledger
        return self._ledger

    def _rest(self) -> None:
        """Until the next look: a tick, or less where somebody opens, thaws or resolves something."""
        time.sleep(BREATH)
        try:
            if self._ledger is not None:
                return self._ledger.rest(TICK - BREATH)
        except Exception as error:
            log.info("The watcher's connection to the ledger is gone: %s", error)
            self._close()
        time.sleep(TICK - BREATH)

    def _leave(self) -> None:
        with suppress(Exception):
            if self._ledger is not None:
                self._ledger.watching(self.name, 0)
        self._close()

    def _close(self) -> None:
        ledger, self._ledger = self._ledger, None
        if ledger is not None:
            with suppress(Exception):
                ledger.close()
