"""The calls of a batch: worker threads, or coroutines on one thread, take item by item: intent, call, outcome.

The main thread only waits and tells how far it is, so that a signal tears no call and no booking. No intent is written
before a worker is free, and none once something halts the batch; calls under way are settled then.
"""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence, Sized
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from typing import Any

from airflow_runguard.core import payloads
from airflow_runguard.core.batch import Halt, Holding, ItemContext, Pause, VendorKeys, few
from airflow_runguard.core.errors import LedgerUnavailable
from airflow_runguard.core.failures.book import installed
from airflow_runguard.core.record import CallState, Effect, Failure, FailureClass, IntentAnswer, Outcome, Written
from airflow_runguard.core.returned import closed, unfinished
from airflow_runguard.core.rows import outcome_state
from airflow_runguard.core.spool import Chosen, Spool
from airflow_runguard.core.work import THAW, Applied, StillUnknown, Waiting, dumped, said
from airflow_runguard.core.writer import Answer

log = logging.getLogger("airflow_runguard")

TELL_EVERY = 5.0
"""Seconds between two lines of progress."""

LAST_WORDS = 5.0
"""Seconds that calls under way are waited for when the task is being ended; then they are in doubt."""


TEXTS, NUMBERS = (str, bytes), {bool, int, float}
"""Data, a model's answer, say: no answer of a vendor to be read. A subclass of a number may be more than that."""

MAY_STILL_COME = "so some of its work may not have run, or may still come"

PLAIN = {str, int, float, bool, type(None)}
"""Values whose reading runs no code of the author's."""

Asked = list[tuple[str, Any, str]]
"""The items of one call: key, item, what people read of it ('' = not made yet)."""


@dataclass(slots=True, kw_only=True)
class Calling(Holding):
    """
    :param spool: what may be called.
    :param total: items in the list.
    :param before: items that were done when it was planned.
    """

    spool: Spool
    total: int
    before: int
    done: int = 0
    troubles: int = 0
    twins: int = 0
    """Items that were taken and not called, since the list names them twice or they were settled meanwhile."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _ready: deque[Asked] = field(default_factory=deque)
    """What is called next, as far as it was made ready while the ledger wrote."""
    _ending: queue.SimpleQueue[threading.Thread] = field(default_factory=queue.SimpleQueue)
    """Workers that have nothing more to do."""
    _under_way: set[str] = field(default_factory=set)
    """Items that were asked for, and whose outcome is not on its way to the ledger yet."""
    _loop: asyncio.AbstractEventLoop | None = None
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _begun: float = field(default_factory=time.monotonic)

    # -- the main thread -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        run, count = (self._on_a_loop, 1) if self.batch.asynchronous else (self._one_after_another, self._workers)
        threads = [
            threading.Thread(target=copy_context().run, args=(run,), name=f"runguard-item-{n}", daemon=True)
            for n in range(count)
        ]
        self.writer.meanwhile = self._make_ready
        installed()  # else the first outcome is booked a tenth of a second late: the classifier's rules are read for it
        try:
            for thread in threads:
                thread.start()
            self._attend(threads)
        except BaseException as error:
            # A timeout or a signal: no item starts any more; calls under way may still say how they ended.
            self.halt = self.halt or Halt(said(error))
            self._attend(threads, until=time.monotonic() + LAST_WORDS)
            if (loop := self._loop) is not None:
                with suppress(RuntimeError):  # it has just been closed
                    loop.call_soon_threadsafe(self._cancel)
                self._attend(threads, until=time.monotonic() + LAST_WORDS)
            raise
        if self.halt is not None and self.halt.error is not None:
            raise self.halt.error

    @property
    def _workers(self) -> int:
        calls = -(-self.spool.length // (self.batch.bulk or 1))
        return max(1, min(self.batch.concurrency, calls))

    def _attend(self, threads: Sequence[threading.Thread], until: float = float("inf")) -> None:
        """Wait for the workers, and tell how far they are."""
        tell_at = time.monotonic() + TELL_EVERY
        while any(thread.is_alive() for thread in threads) and time.monotonic() < until:
            with suppress(queue.Empty):
                wait = max(0.0, min(tell_at, until, time.monotonic() + 1.0) - time.monotonic())
                self._ending.get(timeout=wait).join()  # else the last one may be seen alive, and waited for in vain
            if time.monotonic() >= tell_at:
                tell_at += TELL_EVERY
                self._tell()

    def _tell(self) -> None:
        seconds = time.monotonic() - self._begun
        ended = self.done + self.troubles
        rate = ended / seconds if seconds else 0.0
        left = self.spool.length - ended - self.twins
        how_far = {
            "total": self.total,
            "done": self.before + self.done,
            "replayed": self.before,
            "troubled": self.troubles,
            "left": left,
            "rate": round(rate, 2),
            "eta": round(left / rate) if rate else None,
        }
        eta = f", about {how_far['eta']} s to go" if rate and left else ""
        log.info(
            "RunGuard: %s: %d of %d items done (%d of them before), %d failed or in doubt, %.1f a second%s.",
            self.claim.identity,
            how_far["done"],
            how_far["total"],
            how_far["replayed"],
            self.troubles,
            rate,
            eta,
        )
        self.writer.do(lambda: self.items.progress(self.grant, self.work.holder, how_far))

    # -- work: the workers -------------------------------------------------------------------------------------------

    def _one_after_another(self) -> None:
        """One worker thread: no intent before it is free."""
        booked: list[Answer[Written]] = []
        try:
            while asked := self._take():
                chosen, answers = self._intents(asked)
                try:
                    granted = self._granted(chosen, [answer.result() for answer in answers])
                except BaseException as error:
                    self._not_asked(chosen, error)
                    return
                if granted:
                    try:
                        value = self.batch.call(*self._arguments(granted))
                    except BaseException as error:
                        value = error
                    before, booked = booked, self._ended(granted, value)
                    _said(before)
            _said(booked)
        except BaseException as error:
            self.halt = self.halt or Halt(said(error), error=error)
        finally:
            self._ending.put(threading.current_thread())

    def _on_a_loop(self) -> None:
        try:
            asyncio.run(self._coroutines())
        except BaseException as error:
            self.halt = self.halt or Halt(said(error), error=error)
        finally:
            self._loop = None
            self._ending.put(threading.current_thread())

    async def _coroutines(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks = [asyncio.create_task(self._coroutine()) for _ in range(self._workers)]
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, BaseException):  # ours, not an item's: those are settled one by one
                self.halt = self.halt or Halt(said(ended), error=ended)

    async def _coroutine(self) -> None:
        booked: list[Answer[Written]] = []
        while asked := self._take():
            chosen, answers = self._intents(asked)
            try:
                granted = self._granted(chosen, [await answer.waited() for answer in answers])
            except BaseException as error:
                self._not_asked(chosen, error)
                return
            if granted:
                try:
                    value = await self.batch.call(*self._arguments(granted))
                except BaseException as error:
                    value = error
                before, booked = booked, self._ended(granted, value)
                _said(before)
        for answer in booked:
            await answer.waited()

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _take(self) -> Asked:
        """What is called next; empty = nothing more."""
        with self._lock:
            if self.halt is None and not self.writer.may_call():
                self.halt = self.lost()
            if self.halt is not None:
                return []
            return self._ready.popleft() if self._ready else self._next()

    def _next(self) -> Asked:
        """The next of the list. An item that the list names twice is not asked for again while it is under way: the
        ledger would take the second asking for the first one's, repeated."""
        while taken := self.spool.take(self.batch.bulk or 1):
            chosen = [(key, item) for key, item in dict(taken).items() if key not in self._under_way]
            self.twins += len(taken) - len(chosen)
            if chosen:
                self._under_way.update(key for key, _ in chosen)
                return [(key, item, "") for key, item in chosen]
        return []

    def _shown(self, item: Any) -> str:
        return json.dumps(self.work.hide(payloads.readable(_by_name(item))))

    def _make_ready(self) -> None:
        """What each worker takes next. The lease is renewed on this thread: it waits for no worker, reads nothing of
        what waits in the file, and runs no code of an item's (a model's, say)."""
        if not self._lock.acquire(blocking=False):
            return
        try:
            while self.halt is None and len(self._ready) < self._workers:
                if self.spool.at_hand < (self.batch.bulk or 1) or not (asked := self._next()):
                    break
                self._ready.append([(key, item, self._shown(item) if _plain(item) else "") for key, item, _ in asked])
        except BaseException as error:
            self.halt = self.halt or Halt(said(error), error=error)
        finally:
            self._lock.release()

    def _intents(self, asked: Asked) -> tuple[Chosen, list[Answer[IntentAnswer]]]:
        shown = [(key, shown or self._shown(item)) for key, item, shown in asked]
        return [(key, item) for key, item, _ in asked], [self.writer.intent(*each) for each in shown]

    def _not_asked(self, chosen: Chosen, error: BaseException) -> None:
        """Whatever ended the asking (a cancellation, a ledger out of reach): these items are not called."""
        for key, _ in chosen:
            self.writer.withdraw(key)
        if isinstance(error, LedgerUnavailable):
            why = f"{error.what} The items whose intent was asked for were not called"
            self.halt = self.halt or Halt(why, Waiting(f"{why}."))
        else:
            self.halt = self.halt or Halt(said(error), error=error)

    def _granted(self, chosen: Chosen, answers: list[IntentAnswer]) -> dict[str, tuple[Any, int]]:
        """What may be called now: key → (item, attempt). Where one may not, none is, and the batch halts."""
        granted = {}
        for (key, item), answer in zip(chosen, answers, strict=True):
            match answer.verdict:
                case "run":
                    granted[key] = item, answer.attempt
                case "replay":  # somebody found out meanwhile that it happened, or the list names it twice
                    self._pass_over(key)
                case "failed" | "in_doubt" | "pending" if answer.attempt:  # the same; without one, the record's doubt
                    self._pass_over(key)
                case "frozen":
                    self.halt = self.halt or Halt(answer.error, self._frozen(answer.error))
                case "gated" | "paused":
                    self.halt = self.halt or Halt(answer.error or f"item {key} waits", pause=True)
                case "lost":
                    self.halt = self.halt or self.lost()
                case verdict:
                    why = f"item {key} is {verdict} although it was free when it was planned"
                    self.halt = self.halt or Halt(why)
        if self.halt is None and not self.writer.may_call():
            self.halt = self.lost()
        if self.halt is not None:
            for key in granted:
                self.writer.withdraw(key)
            return {}
        return granted

    def _pass_over(self, key: str) -> None:
        with self._lock:
            self._under_way.discard(key)
            self.twins += 1

    def _frozen(self, why: str) -> Waiting:
        return Waiting(f"{self.claim.identity} waits: {why}. {THAW}", record_id=self.claim.record_id, limited=False)

    def _arguments(self, granted: dict[str, tuple[Any, int]]) -> tuple[ItemContext, Any]:
        attempts = {key: attempt for key, (_, attempt) in granted.items()}
        claim, installation = self.claim, self.writer.ledger.installation
        vendor_keys = VendorKeys(installation, claim.identity, claim.generation, attempts)
        context = ItemContext(claim.identity.key, vendor_keys)
        items = {key: item for key, (item, _) in granted.items()}
        return context, items if self.batch.bulk else next(iter(items.values()))

    # -- outcomes ----------------------------------------------------------------------------------------------------

    def _ended(self, granted: dict[str, tuple[Any, int]], value: Any) -> list[Answer[Written]]:
        """Book what a call ended in, on each of its items (P9)."""
        if isinstance(value, BaseException) and self._passes(value):
            self.halt = self.halt or Halt(said(value), error=value)
            passed = Failure(FailureClass.UNKNOWN, Effect.UNKNOWN, evidence="it ended the task; its call had begun")
            return self._book({key: Outcome(key, failure=passed, error=said(value)) for key in granted})
        if isinstance(value, BaseException) or not self.batch.bulk:
            return self._book({key: self._outcome(key, value) for key in granted})
        if isinstance(value, Mapping):
            if strangers := value.keys() - granted.keys():
                log.warning(
                    "The bulk call answered for items that it was not given: %s", few(sorted(map(str, strangers)))
                )
            missing = StillUnknown("it is missing in the answer of the bulk call")
            return self._book({key: self._outcome(key, value.get(key, missing)) for key in granted})
        wrong = StillUnknown(f"the bulk call answered with a {type(value).__name__}, not with a mapping by key")
        return self._book({key: self._outcome(key, wrong) for key in granted})

    def _passes(self, error: BaseException) -> bool:
        """Whether it is for Airflow or Python and says nothing about the call."""
        return not isinstance(error, Exception) or self.work.signal(error) is not None

    def _outcome(self, key: str, value: Any) -> Outcome:
        try:
            return self._judged(key, value)
        except Exception as error:  # of the value's own making; its neighbours in a bulk answer have theirs
            return self._judged(key, StillUnknown(f"what it gave back cannot be read: {said(error)}"))

    def _judged(self, key: str, value: Any) -> Outcome:
        match value:
            case BaseException():
                self.guard.warn_of_repeats(key, value)
                return Outcome(key, failure=self.guard.classified(value), error=said(value))
            case StillUnknown(reason=reason):
                return Outcome(
                    key, failure=Failure(FailureClass.UNKNOWN, Effect.UNKNOWN, evidence=reason), error=reason
                )
            case Pause(seconds=seconds, reason=reason):
                wait = Failure(
                    FailureClass.QUOTA, Effect.NOT_APPLIED, pausable=True, resume_after=seconds, evidence=reason
                )
                return Outcome(key, failure=wait, error=reason)
            case Applied(result=result):
                value, failure = result, self._unfit(result)
            case _ if type(value) in NUMBERS or isinstance(value, TEXTS):
                failure = self._unfit(value)
            case _ if unfinished(value):
                closed(value)
                return self._judged(key, StillUnknown(f"it gave back a {type(value).__name__}, {MAY_STILL_COME}"))
            case _:
                self.guard.warn_of_repeats(key, value)
                failure = self.guard.classified_result(value) or self._unfit(value)
        if failure is not None:
            return Outcome(key, failure=failure, error=f"{failure.evidence}: {self.work.hide(value)!r:.500}")
        return Outcome(key, result=dumped(self.work, value))

    def _unfit(self, value: Any) -> Failure | None:
        """Why a returned value is no result."""
        if not self.batch.allow_empty and _empty(value):
            why = "the function gave nothing back, as a swallowed error does (allow_empty=True: that is a result)"
            return Failure(FailureClass.UNKNOWN, Effect.UNKNOWN, evidence=why)
        if self.batch.accept is None:
            return None
        try:
            why = "accept said no" if self.batch.accept(value) is False else ""
        except Exception as error:
            why = said(error)
        if not why:
            return None
        evidence = f"it happened, but its result was not accepted: {why}"
        return Failure(FailureClass.VALIDATION, Effect.APPLIED, needs_person=True, evidence=evidence)

    def _book(self, outcomes: dict[str, Outcome]) -> list[Answer[Written]]:
        booked = [self.writer.outcome(outcome) for outcome in outcomes.values()]
        with self._lock:
            self._under_way.difference_update(outcomes)
            for outcome in outcomes.values():
                self._weigh(outcome)
        return booked

    def _weigh(self, outcome: Outcome) -> None:
        """Whether the batch goes on after this outcome."""
        failure = outcome.failure
        state = outcome_state(failure)
        if failure is None:
            self.done += 1
        elif state is CallState.PAUSED:
            self.halt = self.halt or Halt(f"item {outcome.call}: {failure.evidence}", pause=True)
        else:
            self.troubles += 1
            if failure.failure_class is FailureClass.QUOTA and failure.needs_person:
                self.halt = self.halt or Halt(f"item {outcome.call}: {failure.evidence}", money=True)
            elif self._too_many():
                self.halt = self.halt or Halt(f"{self.troubles} items failed or are in doubt, which ends the batch")

    def _too_many(self) -> bool:
        share = self.batch.stop_after_share
        total = self.total
        return (self.batch.stop_after is not None and self.troubles >= self.batch.stop_after) or (
            share is not None and self.troubles > share * total
        )


def _said(booked: list[Answer[Written]]) -> None:
    """Outcomes that were booked before the intent of what was just called: they are answered, or the batch ends."""
    for answer in booked:
        answer.result()


def _plain(item: Any) -> bool:
    return type(item) is dict and {*map(type, item.values())} <= PLAIN


def _by_name(item: Any) -> Mapping[str, Any]:
    if isinstance(item, Mapping) and all(isinstance(name, str) for name in item):
        return item
    return {"item": item}


def _empty(value: Any) -> bool:
    return value is None or (isinstance(value, Sized) and (len(value) == 0 or (type(value) is str and value.isspace())))
