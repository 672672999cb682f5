"""A batch: many calls under one record. What a batch does as the body of ``guard.run``.

Plan → work → leave. The whole list is written down before anything is called, in chunks; the items that may be called
are kept aside meanwhile (in memory, many of them in a file), so that a list is read once and its size does not matter.
Then worker threads, or coroutines on one thread, take item by item: intent, call, outcome. The main thread only waits
and tells how far it is, so that a signal tears no call and no booking. The last thing asked is the ledger: what it
counts decides how the record is left. Nothing here holds all items.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import pickle
import queue
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import IO, Any

from airflow_runguard.core import keys
from airflow_runguard.core.context import GuardContext, never_ran
from airflow_runguard.core.errors import LedgerUnavailable, NotApplied, PlanningError
from airflow_runguard.core.failures import classify
from airflow_runguard.core.items import PAGE, Count, Items, Planned, Selection
from airflow_runguard.core.record import (
    Call,
    CallState,
    Completeness,
    Effect,
    Failure,
    FailureClass,
    Grant,
    IntentAnswer,
    Outcome,
    Settlement,
    State,
)
from airflow_runguard.core.rows import outcome_state
from airflow_runguard.core.work import (
    THAW,
    Applied,
    Done,
    Doubt,
    Ended,
    InDoubt,
    Leave,
    StillUnknown,
    Waiting,
    dumped,
    said,
)
from airflow_runguard.core.writer import Answer

log = logging.getLogger("airflow_runguard")

CHUNK = 2_000
"""Items that are planned in one statement."""

IN_MEMORY = 10_000
"""Planned items that wait in memory; what is more waits in a file."""

TELL_EVERY = 5.0
"""Seconds between two lines of progress."""

SOON = 30.0
"""Seconds after which the vendor is asked again about items in doubt."""

LAST_WORDS = 5.0
"""Seconds that calls under way are waited for when the task is being ended; then they are in doubt."""

NAMED = 20
"""Keys that a message names at most."""

PLAIN_LIST = "Give a list, or a function that returns an iterable of items."


@dataclass(frozen=True, slots=True)
class Pause:
    """The vendor said "too many" for this item, which did not happen: it may be sent again after so many seconds."""

    seconds: float
    reason: str = "the vendor asked to wait"


@dataclass(frozen=True, slots=True)
class ItemContext:
    """The guard at run time for one item, or for the items of one bulk call.

    :param batch: the key of the batch's record.
    :param idempotency_keys: the vendor key of each item of this call, by its key.
    """

    batch: str
    idempotency_keys: Mapping[str, str]

    @property
    def key(self) -> str:
        """The item's key.

        :raises PlanningError: this is a bulk call of several.
        """
        return self._only()[0]

    @property
    def idempotency_key(self) -> str:
        """The item's vendor key: the same for every repetition of this attempt, of no other item.

        :raises PlanningError: this is a bulk call of several.
        """
        return self._only()[1]

    def _only(self) -> tuple[str, str]:
        if len(self.idempotency_keys) != 1:
            raise PlanningError("A bulk call has no key of its own.", "Use guard.idempotency_keys[item's key].")
        return next(iter(self.idempotency_keys.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a door says about one batch. Times are seconds.

    :param items: the list, read once: a function, so that a generator can be begun anew by each entry.
    :param key_of: the item's key, by its content.
    :param payload_of: what of an item is its order, in plain data.
    :param call: given ``(guard, item)``, or with ``bulk`` ``(guard, {key: item})``; makes one request.
    :param asynchronous: ``call`` is a coroutine function.
    :param concurrency: so many calls at once at most.
    :param bulk: so many items go into one call, which answers with a mapping key → outcome; ``None`` = one by one.
    :param accept: says whether a result is one: raises, or returns ``False``, where not.
    :param allow_empty: ``None`` and what is empty may be results.
    :param stop_after, stop_after_share: so many failed or doubtful items (of all) end the batch.
    :param allow_partial: ends as done (partially) although some items failed or are in doubt.
    :param reconcile_chunks: the reconcile function takes a list of doubts and answers with a mapping key → answer.
    """

    items: Callable[[], Iterable[Any]]
    key_of: Callable[[Any], Any]
    call: Callable[[ItemContext, Any], Any]
    payload_of: Callable[[Any], Any] = lambda item: item
    asynchronous: bool = False
    concurrency: int = 1
    bulk: int | None = None
    accept: Callable[[Any], Any] | None = None
    allow_empty: bool = False
    stop_after: int | None = None
    stop_after_share: float | None = None
    allow_partial: bool = False
    reconcile_chunks: bool = False


def conduct(batch: Batch, guard: GuardContext) -> None:
    """Run the batch as the body of its record. Always ends by :class:`~airflow_runguard.core.work.Leave`, or by the
    signal or control-flow exception that ended it."""
    _Conductor(batch, guard).conduct()


Chosen = list[tuple[str, Any]]


class _Spool:
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
                self._file = tempfile.TemporaryFile(prefix="runguard-")
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


@dataclass(slots=True)
class _Halt:
    """Why no further item starts.

    :param how: how the try ends for it; ``None`` = what the ledger counts decides.
    """

    why: str
    how: Waiting | Ended | None = None
    pause: bool = False
    money: bool = False
    error: BaseException | None = None


@dataclass(slots=True)
class _Conductor:
    batch: Batch
    guard: GuardContext
    _spool: _Spool = field(default_factory=_Spool)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _news: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)
    _halt: _Halt | None = None
    _loop: asyncio.AbstractEventLoop | None = None
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _begun: float = field(default_factory=time.monotonic)
    _seen: int = 0
    """Lines of the list, equal ones counted again."""
    _standing: dict[str, int] = field(default_factory=dict)
    """What planning found, by its word."""
    _refused: list[str] = field(default_factory=list)
    _conflicts: list[str] = field(default_factory=list)
    _done: int = 0
    _troubles: int = 0

    # GuardContext and this are two halves of one room: what the body sees, and what makes many calls for it.
    @property
    def _writer(self) -> Any:
        return self.guard._writer

    @property
    def _work(self) -> Any:
        return self.guard._work

    @property
    def _claim(self) -> Any:
        return self.guard._claim

    def conduct(self) -> None:
        try:
            if not self._ask(lambda grant: self._items.begin(grant, self._work.holder)):
                self._halt = self._lost()
            elif self._work.reconcile is not None:
                self._reconcile()
            if self._halt is None:
                self._plan()
            if self._halt is None and self._spool.length:
                self._call_all()
            self._leave()
        finally:
            self._spool.close()

    # -- the ledger's side -----------------------------------------------------------------------------------------

    @property
    def _items(self) -> Items:
        return Items(self._writer.ledger)

    @property
    def _grant(self) -> Grant:
        claim = self._claim
        return Grant(claim.identity, claim.record_id, claim.generation, claim.fence)

    def _ask(self, run: Callable[[Grant], Any]) -> Any:
        return self._writer.do(lambda: run(self._grant)).result()

    def _count(self) -> list[Count]:
        return list(self._ask(lambda grant: self._items.count(grant.record_id, grant.generation, self._claim.fence)))

    def _named(self, state: CallState) -> str:
        """The first keys of that state, for a message."""
        calls = self._ask(
            lambda grant: self._items.page(
                grant.record_id, grant.generation, Selection(state), planned=grant.fence, limit=NAMED + 1
            )
        )
        return _few([call.name for call in calls])

    # -- reconcile -------------------------------------------------------------------------------------------------

    def _reconcile(self) -> None:
        """Ask the vendor once about each item in doubt, a page at a time."""
        record = self._ask(lambda grant: self._writer.ledger.get(grant.identity))
        after = ""
        while True:
            page: list[Call] = self._ask(
                lambda grant, after=after: self._items.page(
                    grant.record_id, grant.generation, Selection(CallState.IN_DOUBT), after=after, limit=PAGE
                )
            )
            if not page:
                return
            after = page[-1].name
            doubts = [Doubt(record, call, self._vendor_key(call.name, call.attempt), call.intent) for call in page]
            self._book_answers(self._answers(doubts))

    def _answers(self, doubts: list[Doubt]) -> dict[str, Any]:
        if self.batch.reconcile_chunks:
            try:
                return dict(self._work.reconcile(doubts))
            except Exception as error:
                log.warning("The reconcile function failed; these items stay in doubt: %s", error, exc_info=True)
                return {}
        answers: dict[str, Any] = {}
        for doubt in doubts:
            try:
                answers[doubt.call.name] = self._work.reconcile(doubt)
            except NotApplied as error:
                answers[doubt.call.name] = error
            except Exception as error:
                log.warning("The reconcile function failed; %s stays in doubt: %s", doubt.call.name, error)
        return answers

    def _book_answers(self, answers: Mapping[str, Any]) -> None:
        happened = {key: answer for key, answer in answers.items() if isinstance(answer, Applied)}
        not_applied = [key for key, answer in answers.items() if isinstance(answer, NotApplied)]
        results = [dumped(self._work, answer.result).data for answer in happened.values()]
        for answer, names, given in (("happened", [*happened], results), ("did_not_happen", not_applied, None)):
            if names:
                changed = self._ask(
                    lambda grant, answer=answer, names=names, given=given: self._items.resolve(
                        grant.record_id,
                        answer,
                        Selection(names=tuple(names)),
                        results=given,
                        actor="reconcile",
                        reason="the vendor was asked",
                        nonce=self._work.holder.nonce,
                    )
                )
                if changed.left:
                    log.info("The vendor has nothing of %d item(s) yet; their calls may still arrive.", changed.left)

    # -- plan ------------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Write the whole list down, one chunk in the ledger while the next is made ready.

        :raises Leave: it cannot be worked on; nothing was called.
        """
        try:
            asked: tuple[dict[str, tuple[str, Any]], Answer[Planned]] | None = None
            for chunk in self._chunks():
                names, digests = [*chunk], [digest for digest, _ in chunk.values()]
                answer = self._writer.held(
                    lambda grant, names=names, digests=digests: self._items.plan(
                        grant, self._work.holder, self._work.order, names, digests
                    )
                )
                if asked and not self._planned(*asked):
                    return
                asked = chunk, answer
            if asked and not self._planned(*asked):
                return
            if self._conflicts:
                raise PlanningError(
                    f"The list names {len(self._conflicts)} item(s) more than once, with different payloads: "
                    f"{_few(self._conflicts)}.",
                    "Give each item a key of its own, or make equal ones equal; no call was made.",
                )
            if not self._seen and not self._work.allow_no_call:
                raise PlanningError(
                    "The list of items is empty, which may be an error upstream.",
                    "Say allow_no_call=True where an empty list is work done; no call was made.",
                )
        except PlanningError as error:
            failure = Failure(FailureClass.PLANNING, Effect.NOT_APPLIED, needs_person=True, evidence=error.what)
            settlement = Settlement(State.FAILED, failure=failure, error=error.what)
            raise Leave(settlement, Ended(str(error), retry=False, error=error)) from error

    def _chunks(self) -> Iterator[dict[str, tuple[str, Any]]]:
        """Key → (digest of the payload, item), so many at a time."""
        source = self.batch.items()
        if source is None or isinstance(source, str | bytes | Mapping) or not isinstance(source, Iterable):
            raise PlanningError(f"The items are a {type(source).__name__}, which is no list of them.", PLAIN_LIST)
        lines = iter(source)
        while batch := list(islice(lines, CHUNK)):
            chunk: dict[str, tuple[str, Any]] = {}
            for item in batch:
                self._seen += 1
                key, digest = self._identified(item)
                if chunk.setdefault(key, (digest, item))[0] != digest:
                    self._conflicts.append(key)
            yield chunk

    def _identified(self, item: Any) -> tuple[str, str]:
        try:
            key = keys.item_name(self.batch.key_of(item))
            return key, hashlib.sha256(keys.canonical(self.batch.payload_of(item))).hexdigest()
        except PlanningError as error:
            raise PlanningError(f"Item {self._seen} of the list: {error.what}", error.remedy) from error

    def _planned(self, chunk: dict[str, tuple[str, Any]], answer: Answer[Planned]) -> bool:
        """Keep aside what may be called. Whether this process still holds the record."""
        words = answer.result().said
        if words is None:
            self._halt = self._lost()
            return False
        may: Chosen = []
        for (key, (_, item)), word in zip(chunk.items(), words, strict=True):
            self._standing[word] = self._standing.get(word, 0) + 1
            if word == "work":
                may.append((key, item))
            elif word == "conflict":
                self._conflicts.append(key)
            elif word == "changed":
                self._refused.append(key)
        self._refused[NAMED + 1 :] = []
        self._spool.add(may)
        return True

    # -- work: the main thread ---------------------------------------------------------------------------------------

    def _call_all(self) -> None:
        run, count = (self._on_a_loop, 1) if self.batch.asynchronous else (self._one_after_another, self._workers)
        threads = [
            threading.Thread(target=copy_context().run, args=(run,), name=f"runguard-item-{n}", daemon=True)
            for n in range(count)
        ]
        try:
            for thread in threads:
                thread.start()
            self._attend(threads)
        except BaseException as error:
            # A timeout or a signal: no item starts any more; calls under way may still say how they ended.
            self._halt = self._halt or _Halt(said(error))
            if self._loop is not None:
                with suppress(RuntimeError):  # it has just been closed
                    self._loop.call_soon_threadsafe(self._cancel)
            self._attend(threads, until=time.monotonic() + LAST_WORDS)
            raise
        if self._halt is not None and self._halt.error is not None:
            raise self._halt.error

    @property
    def _workers(self) -> int:
        calls = -(-self._spool.length // (self.batch.bulk or 1))
        return max(1, min(self.batch.concurrency, calls))

    def _attend(self, threads: Sequence[threading.Thread], until: float = float("inf")) -> None:
        """Wait for the workers, and tell how far they are."""
        tell_at = time.monotonic() + TELL_EVERY
        while any(thread.is_alive() for thread in threads) and time.monotonic() < until:
            with suppress(queue.Empty):
                self._news.get(timeout=max(0.0, min(tell_at, until, time.monotonic() + 1.0) - time.monotonic()))
            if time.monotonic() >= tell_at:
                tell_at += TELL_EVERY
                self._tell()

    def _tell(self) -> None:
        seconds = time.monotonic() - self._begun
        ended = self._done + self._troubles
        rate = ended / seconds if seconds else 0.0
        left = self._spool.length - ended
        how_far = {
            "total": sum(self._standing.values()),
            "done": self._standing.get("done", 0) + self._done,
            "replayed": self._standing.get("done", 0),
            "troubled": self._troubles,
            "left": left,
            "rate": round(rate, 2),
            "eta": round(left / rate) if rate else None,
        }
        eta = f", about {how_far['eta']} s to go" if rate and left else ""
        log.info(
            "RunGuard: %s: %d of %d items done (%d of them before), %d failed or in doubt, %.1f a second%s.",
            self._claim.identity,
            how_far["done"],
            how_far["total"],
            how_far["replayed"],
            self._troubles,
            rate,
            eta,
        )
        self._writer.do(lambda: self._items.progress(self._grant, self._work.holder, how_far))

    # -- work: the workers -------------------------------------------------------------------------------------------

    def _one_after_another(self) -> None:
        """One worker thread: no intent before it is free."""
        try:
            while chosen := self._take():
                answers = self._intents(chosen)
                try:
                    granted = self._granted(chosen, [answer.result() for answer in answers])
                except BaseException as error:
                    self._not_asked(chosen, error)
                    return
                if granted:
                    try:
                        value = self.batch.call(*self._arguments(granted))
                        value = (
                            NotApplied("nothing ran: the function is async or yields") if never_ran(value) else value
                        )
                    except BaseException as error:
                        value = error
                    self._ended(granted, value)
        except BaseException as error:
            self._halt = self._halt or _Halt(said(error), error=error)
        finally:
            self._news.put(None)

    def _on_a_loop(self) -> None:
        try:
            asyncio.run(self._coroutines())
        except BaseException as error:
            self._halt = self._halt or _Halt(said(error), error=error)
        finally:
            self._loop = None
            self._news.put(None)

    async def _coroutines(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._tasks = [asyncio.create_task(self._coroutine()) for _ in range(self._workers)]
        for ended in await asyncio.gather(*self._tasks, return_exceptions=True):
            if isinstance(ended, BaseException):  # ours, not an item's: those are settled one by one
                self._halt = self._halt or _Halt(said(ended), error=ended)

    async def _coroutine(self) -> None:
        while chosen := self._take():
            answers = self._intents(chosen)
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
                self._ended(granted, value)

    def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()

    def _take(self) -> Chosen:
        with self._lock:
            if self._halt is None and not self._writer.may_call():
                self._halt = self._lost()
            return [] if self._halt is not None else self._spool.take(self.batch.bulk or 1)

    def _intents(self, chosen: Chosen) -> list[Answer[IntentAnswer]]:
        return [self._writer.intent(key, json.dumps(keys.readable(_by_name(item)))) for key, item in chosen]

    def _not_asked(self, chosen: Chosen, error: BaseException) -> None:
        """Whatever ended the asking (a cancellation, a ledger out of reach): these items are not called."""
        for key, _ in chosen:
            self._writer.withdraw(key)
        if isinstance(error, LedgerUnavailable):
            why = f"{error.what} The items whose intent was asked for were not called"
            self._halt = self._halt or _Halt(why, Waiting(f"{why}."))
        else:
            self._halt = self._halt or _Halt(said(error), error=error)

    def _granted(self, chosen: Chosen, answers: list[IntentAnswer]) -> dict[str, tuple[Any, int]]:
        """What may be called now: key → (item, attempt). Where one may not, none is, and the batch halts."""
        granted = {}
        for (key, item), answer in zip(chosen, answers, strict=True):
            match answer.verdict:
                case "run":
                    granted[key] = item, answer.attempt
                case "replay":  # somebody found out meanwhile that it happened
                    pass
                case "frozen":
                    self._halt = self._halt or _Halt(answer.error, Waiting(f"{answer.error}. {THAW}"))
                case "gated" | "paused":
                    self._halt = self._halt or _Halt(answer.error or f"item {key} waits", pause=True)
                case "lost":
                    self._halt = self._halt or self._lost()
                case verdict:
                    why = f"item {key} is {verdict} although it was free when it was planned"
                    self._halt = self._halt or _Halt(why)
        if self._halt is None and not self._writer.may_call():
            self._halt = self._lost()
        if self._halt is not None:
            for key in granted:
                self._writer.withdraw(key)
            return {}
        return granted

    def _arguments(self, granted: dict[str, tuple[Any, int]]) -> tuple[ItemContext, Any]:
        vendor_keys = {key: self._vendor_key(key, attempt) for key, (_, attempt) in granted.items()}
        context = ItemContext(self._claim.identity.key, vendor_keys)
        items = {key: item for key, (item, _) in granted.items()}
        return context, items if self.batch.bulk else next(iter(items.values()))

    def _vendor_key(self, name: str, attempt: int) -> str:
        claim = self._claim
        return keys.vendor_key(self._writer.ledger.installation, claim.identity, name, claim.generation, attempt)

    # -- outcomes ----------------------------------------------------------------------------------------------------

    def _ended(self, granted: dict[str, tuple[Any, int]], value: Any) -> None:
        """Book what a call ended in, on each of its items (P9)."""
        if isinstance(value, BaseException) and self._passes(value):
            self._halt = self._halt or _Halt(said(value), error=value)
            passed = Failure(FailureClass.UNKNOWN, Effect.UNKNOWN, evidence="it ended the task; its call had begun")
            self._book({key: Outcome(key, failure=passed, error=said(value)) for key in granted})
        elif isinstance(value, BaseException) or not self.batch.bulk:
            self._book({key: self._outcome(key, value) for key in granted})
        elif isinstance(value, Mapping):
            if strangers := value.keys() - granted.keys():
                log.warning(
                    "The bulk call answered for items that it was not given: %s", _few(sorted(map(str, strangers)))
                )
            missing = StillUnknown("it is missing in the answer of the bulk call")
            self._book({key: self._outcome(key, value.get(key, missing)) for key in granted})
        else:
            wrong = StillUnknown(f"the bulk call answered with a {type(value).__name__}, not with a mapping by key")
            self._book({key: self._outcome(key, wrong) for key in granted})

    def _passes(self, error: BaseException) -> bool:
        """Whether it is for Airflow or Python and says nothing about the call."""
        return not isinstance(error, Exception) or self._work.signal(error) is not None

    def _outcome(self, key: str, value: Any) -> Outcome:
        match value:
            case BaseException():
                return Outcome(key, failure=classify(value), error=said(value))
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
                value = result
        failure = self._unfit(value)
        if failure is not None:
            return Outcome(key, failure=failure, error=f"{failure.evidence}: {value!r:.500}")
        return Outcome(key, result=dumped(self._work, value))

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

    def _book(self, outcomes: dict[str, Outcome]) -> None:
        for outcome in outcomes.values():
            self._writer.outcome(outcome)
        with self._lock:
            for outcome in outcomes.values():
                self._weigh(outcome)

    def _weigh(self, outcome: Outcome) -> None:
        """Whether the batch goes on after this outcome."""
        failure = outcome.failure
        state = outcome_state(failure)
        if failure is None:
            self._done += 1
        elif state is CallState.PAUSED:
            self._halt = self._halt or _Halt(f"item {outcome.call}: {failure.evidence}", pause=True)
        else:
            self._troubles += 1
            if failure.failure_class is FailureClass.QUOTA and failure.needs_person:
                self._halt = self._halt or _Halt(f"item {outcome.call}: {failure.evidence}", money=True)
            elif self._too_many():
                self._halt = self._halt or _Halt(f"{self._troubles} items failed or are in doubt, which ends the batch")

    def _too_many(self) -> bool:
        share = self.batch.stop_after_share
        total = sum(self._standing.values())
        return (self.batch.stop_after is not None and self._troubles >= self.batch.stop_after) or (
            share is not None and self._troubles > share * total
        )

    # -- leave -------------------------------------------------------------------------------------------------------

    def _lost(self) -> _Halt:
        why = f"This process was told to stop, or is no longer the holder of {self._claim.identity}"
        return _Halt(why, Ended(f"{why}. Items that were not begun are not called.", retry=True))

    def _leave(self) -> None:
        """Settle the record by what the ledger counts.

        :raises Leave: always.
        """
        counts = self._count()
        by_state = {state: sum(c.items for c in counts if c.state == state) for state in CallState}
        failed: dict[str, int] = {}
        for count in counts:
            if count.state == CallState.FAILED:
                failed[str(count.failure_class)] = failed.get(str(count.failure_class), 0) + count.items
        done, doubtful = by_state[CallState.DONE], by_state[CallState.IN_DOUBT] + by_state[CallState.STARTED]
        paused, pending = by_state[CallState.PAUSED], by_state[CallState.PENDING]
        refused = self._standing.get("changed", 0)
        identity, halt = self._claim.identity, self._halt
        complete = done == sum(by_state.values()) and not refused
        summary = {
            "deployment": identity.deployment,
            "namespace": identity.namespace,
            "key": identity.key,
            "record_id": self._claim.record_id,
            "generation": self._claim.generation,
            "items": sum(by_state.values()),
            "done": done,
            "replayed": max(0, done - self._done),
            "failed": failed,
            "refused": refused,
            "paused": paused,
            "in_doubt": doubtful,
            "pending": pending,
            "complete": complete,
        }
        self._writer.do(lambda: self._items.progress(self._grant, self._work.holder, _how_far(summary)))
        said_of = self._said(summary)
        log.info("RunGuard: %s", said_of)
        why = f"{said_of} {halt.why}." if halt else said_of
        troubled = bool(failed or doubtful or refused)

        if halt is not None and halt.how is not None:
            self._end(State.PENDING, why, halt.how, summary)
        if halt is not None and halt.money:
            failure = Failure(FailureClass.QUOTA, Effect.NOT_APPLIED, needs_person=True, evidence=halt.why)
            mend = "Raise the allowance at the vendor, then clear the task: the items that are not done go on."
            self._end(State.FAILED, why, Ended(f"{why} {mend}", retry=False), summary, failure)
        if paused if halt is None else halt.pause:
            wait = max((count.resume_after for count in counts if count.state == CallState.PAUSED), default=0.0)
            waits = Failure(
                FailureClass.QUOTA, Effect.NOT_APPLIED, pausable=True, resume_after=max(0.0, wait), evidence=why
            )
            self._end(State.PAUSED, why, Waiting(why), summary, waits)
        if complete:
            raise Leave(Settlement(State.DONE), Done(summary, replayed=False), summary)
        if self.batch.allow_partial and halt is None and not pending and done and troubled:
            partial = Settlement(State.DONE, completeness=Completeness.PARTIAL, error=why)
            raise Leave(partial, Done(summary, replayed=False), summary)
        if doubtful:
            failure = Failure(FailureClass.UNKNOWN, Effect.UNKNOWN, evidence=why)
            self._end(State.IN_DOUBT, why, self._ended_with_trouble(why, summary), summary, failure)
        if troubled:
            worst = max(failed, key=lambda name: failed[name], default=FailureClass.PLANNING.value)
            known = FailureClass(worst) if worst in list(FailureClass) else FailureClass.UNKNOWN
            failure = Failure(known, Effect.NOT_APPLIED, needs_person=not self._mends(summary), evidence=why)
            self._end(State.FAILED, why, self._ended_with_trouble(why, summary), summary, failure)
        named = self._named(CallState.PENDING)
        self._end(State.PENDING, why, Ended(f"{why} Without an outcome: {named}.", retry=True), summary)

    def _end(
        self, state: State, why: str, how: Waiting | Ended, summary: dict[str, Any], failure: Failure | None = None
    ) -> None:
        ended = replace(how, value=summary) if isinstance(how, Ended) else how
        raise Leave(Settlement(state, failure=failure, error=why[:2000]), ended)

    def _mends(self, summary: dict[str, Any]) -> bool:
        """Whether another try may do better by itself."""
        again = sum(n for name, n in summary["failed"].items() if name not in ("validation", "planning"))
        asks = bool(summary["in_doubt"]) and self._work.order.on_doubt != "ask"
        return bool(again or asks or summary["pending"])

    def _ended_with_trouble(self, why: str, summary: dict[str, Any]) -> Ended:
        name = f"'{self._claim.identity}'"
        parts = [why]
        if summary["in_doubt"]:
            parts.append(
                f"Nobody knows whether these happened: {self._named(CallState.IN_DOUBT)}. They are not sent again blindly. "
                f"Look them up at the vendor, then run `airflow runguard resolve {name} --items in_doubt --happened "
                "--reason …` or `… --did-not-happen --reason …` (one item: --items key=ITEM)."
            )
        if summary["failed"]:
            parts.append(
                f"Failed: {self._named(CallState.FAILED)}. What is wrong with an item itself (validation) is not sent "
                f"again until a person says so: `airflow runguard reopen {name} --items failed:validation --reason …`."
            )
        if self._refused:
            parts.append(
                f"Begun with another payload, so they were not called: {_few(self._refused)}. Give other work another "
                "key, or name the fields that are the order with payload=[…]."
            )
        message, retry = " ".join(parts), self._mends(summary)
        if not summary["in_doubt"]:
            return Ended(message, retry=retry)
        return InDoubt(message, retry=retry, who=self._work.order.on_doubt, seconds=SOON)

    def _said(self, summary: dict[str, Any]) -> str:
        failed = ", ".join(f"{name} {count}" for name, count in sorted(summary["failed"].items()))
        told = [
            f"{summary['done']} of {summary['items']} items are done ({summary['replayed']} of them before)",
            f"{sum(summary['failed'].values())} failed ({failed})" if failed else "",
            f"{summary['refused']} refused" if summary["refused"] else "",
            f"{summary['in_doubt']} in doubt" if summary["in_doubt"] else "",
            f"{summary['paused']} paused" if summary["paused"] else "",
            f"{summary['pending']} not begun" if summary["pending"] else "",
        ]
        return f"{self._claim.identity}: {', '.join(filter(None, told))}."


def _how_far(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "total": summary["items"],
        "done": summary["done"],
        "replayed": summary["replayed"],
        "troubled": sum(summary["failed"].values()) + summary["in_doubt"] + summary["refused"],
        "left": summary["pending"] + summary["paused"],
        "rate": 0,
        "eta": None,
    }


def _few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMED])
    return f"{shown}, …" if len(names) > NAMED else shown


def _by_name(item: Any) -> Mapping[str, Any]:
    if isinstance(item, Mapping) and all(isinstance(name, str) for name in item):
        return item
    return {"item": item}


def _empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | bytes | list | tuple | dict | set | frozenset) and not value)
