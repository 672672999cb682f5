"""The holder's one writing thread: claim, renewals, intents, outcomes, settlement.

It lives in the task's process and alone uses the ledger's connection, so that no signal handler (``SIGALRM`` of
``execution_timeout`` hits the main thread) can tear a statement. Outcomes are written at once, intents that are ready
ride along; a group whose data is refused is written one by one. What is known is tried again for as long as the
process lives (P4); an intent only for as long as the lease runs.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, Generic, Protocol, TypeVar, cast

from airflow_runguard.core.errors import LedgerNotReady, LedgerUnavailable, RunGuardError
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import (
    Claim,
    Effect,
    Failure,
    FailureClass,
    Grant,
    Holder,
    IntentAnswer,
    Order,
    Outcome,
    Result,
    Settlement,
    State,
    Verdict,
    Written,
)

log = logging.getLogger("airflow_runguard")

T = TypeVar("T")
E = TypeVar("E", Outcome, Settlement)


class Renewed(Protocol):
    """An answer that says until when the lease runs (``None`` = not the holder any more)."""

    @property
    def now(self) -> datetime: ...
    @property
    def until(self) -> datetime | None: ...


R = TypeVar("R", bound=Renewed)

FIRST_PAUSE, LONGEST_PAUSE = 0.05, 2.0
"""Seconds between two tries at a ledger that is away."""

GATHERING = 0.002
"""Seconds after which a group that is ready gives way to no other thread any more."""

NEVER_SENT = Failure(FailureClass.PROCESSING, Effect.NOT_APPLIED, evidence="the call was never sent")


class Answer(Generic[T]):
    """What the writing thread says to one question; one may wait for it.

    A signal may hit the waiting at any bytecode. A ``concurrent.futures.Future`` can be left locked by that, and then
    the thread, which locks it to answer, hangs for ever, and the task with it. Here the only lock is the thread's to
    release.
    """

    def __init__(self) -> None:
        self.said = False
        self._value: T | None = None
        self._error: BaseException | None = None
        self._pending = threading.Lock()
        self._pending.acquire()
        self._wake: Callable[[], object] = lambda: None

    def say(self, value: T | None, error: BaseException | None = None) -> None:
        self._value, self._error = value, error
        self.said = True
        self._pending.release()
        with contextlib.suppress(RuntimeError):  # the event loop is closed: nobody waits any more
            self._wake()

    def result(self) -> T:
        if not self.said:
            self._pending.acquire()
        if self._error is not None:
            raise self._error
        return cast(T, self._value)

    async def waited(self) -> T:
        """:meth:`result` for a coroutine. A cancellation ends the waiting and nothing else."""
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()
        self._wake = lambda: loop.call_soon_threadsafe(woken.set)
        if not self.said:  # asked after the line above: whoever comes second sees the first
            await woken.wait()
        return self.result()


@dataclass(slots=True)
class _Job:
    """One thing to write. Outcomes and intents are grouped; anything else runs by itself."""

    answer: Answer[Any] = field(default_factory=Answer)
    outcome: Outcome | None = None
    intent: tuple[str, str] | None = None
    run: Callable[[], Any] | None = None

    def answer_with(self, run: Callable[[], Any]) -> None:
        try:
            value = run()
        except BaseException as error:
            self.answer.say(None, error)
        else:
            self.answer.say(value)


class Writer:
    """The thread of one entry into one record, there while a question is open or the lease is held. Not reused: every
    entry has a nonce of its own.

    Each question returns its answer to wait for. Giving up waiting (a signal, a timeout) takes nothing back; see
    :meth:`withdraw`.

    :param keep: called after a renewal that the ledger confirmed, three times in the length of a lease at most (renews
        the Redis lease, and a group of a batch need not wait for Redis).
    :param hide: masks what an error or a vendor said, before it is stored.
    """

    def __init__(
        self,
        ledger: Ledger,
        order: Order,
        holder: Holder,
        keep: Callable[[], None] = lambda: None,
        hide: Callable[[Any], Any] = lambda value: value,
    ) -> None:
        self.ledger, self.order, self.holder = ledger, order, holder
        self.last_event = 0
        self._keep, self._hide = keep, hide
        self.meanwhile: Callable[[], None] = lambda: None
        """Done on the thread while the ledger writes items, since a batch's threads wait then; does not raise."""
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._grant: Grant | None = None
        self._held = self._over = False
        self._open: set[str] = set()
        self._lease_ends = 0.0
        self._renew_at = self._keep_at = 0.0
        self._serving, self._coming = threading.Lock(), False
        self._last: Answer[Any] = Answer()
        self._last.say(None)

    def claim(self) -> Claim:
        """Enter, on the caller's thread: most answers are refusals and replays, which need no other. With a verdict of
        ``run`` the thread starts and renews. A signal may tear this: see :meth:`withdraw_claim`."""
        claim = self._claim()
        if claim.verdict is Verdict.RUN:
            self.do(lambda: None)  # starts the thread, or (a reconciliation started it) wakes it to renew from now on
        return claim

    def withdraw_claim(self) -> Answer[None]:
        """The claim's answer was lost, or nobody wants it any more: if it is granted, nothing was called under it."""
        return self.do(self._withdraw_claim)

    def intent(self, name: str, readable: str) -> Answer[IntentAnswer]:
        """Book that a call is about to be made. Without the answer ``run``, do not make it."""
        return self._put(_Job(intent=(name, readable)))

    def withdraw(self, name: str) -> Answer[None]:
        """The call whose intent was asked for was not and will not be made."""
        return self.do(lambda: self._withdraw(name))

    def outcome(self, outcome: Outcome) -> Answer[Written]:
        return self._put(_Job(outcome=self._masked(outcome)))

    def settle(self, settlement: Settlement, *outcomes: Outcome) -> Answer[Written]:
        """Leave the record; renewal ends."""
        left, ended = self._masked(settlement), tuple(map(self._masked, outcomes))
        return self.do(lambda: self._settle(left, ended))

    def _masked(self, what: E) -> E:
        if what.failure is None and not what.error:
            return what
        failure = what.failure and replace(what.failure, evidence=self._hide(what.failure.evidence))
        return replace(what, failure=failure, error=self._hide(what.error))

    def held(self, run: Callable[[Grant], R]) -> Answer[R]:
        """Run a statement of the holder that renews the lease: its answer says ``now`` and ``until``."""
        return self.do(lambda: self._insist(lambda: self._held_by(run), until=self._lease_ends))

    def hand_over(self, seconds: float, told: Failure | None = None, error: str = "") -> Answer[Written]:
        """Stay the holder while waiting in Airflow for at most so long; the same task instance may re-enter.

        :param told: the quota that it waits for: its gate is closed, and the seconds count from its slot. Where it may
            not pause any more, it is in doubt instead.
        :param error: what told of it; without ``told``, why it only begins to wait anew.
        """
        told, error = told and replace(told, evidence=self._hide(told.evidence)), self._hide(error)
        return self.do(lambda: self._insist(lambda: self._write(hand_over=seconds, told=told, error=error)))

    def do(self, run: Callable[[], T]) -> Answer[T]:
        """Run something on the ledger's thread, after all that was asked before."""
        return self._put(_Job(run=run))

    def remember(self, call: str, external_id: str, *, submitted: bool) -> Answer[str]:
        """Keep the vendor's own name for what a call set going; tried until the ledger answers, like an outcome."""
        return self.do(lambda: self._insist(lambda: self._remember(call, external_id, submitted)))

    def external_id(self, call: str) -> Answer[str]:
        """The name under which a call was submitted; '' = it was not."""
        return self.do(lambda: self._insist(lambda: self._submitted(call)))

    def stopped(self, seconds: float) -> bool:
        """Wait for so long, at most until it was told to stop; whether it was."""
        return self._stop.wait(seconds)

    def stop(self) -> None:
        """Start no further call (Airflow wants the task gone)."""
        self._stop.set()

    def may_call(self) -> bool:
        """Whether a call may start *now*: not told to stop, and the lease runs by this machine's ``CLOCK_BOOTTIME``,
        which counts suspends, so that a process that slept past its lease knows."""
        return self._held and not self._over and not self._stop.is_set() and _clock() < self._lease_ends

    def close(self) -> None:
        """All that was asked for is written, or was given up with its error; the lease is not renewed any more."""
        self._over = True
        if self._held or not self._last.said:
            self.do(lambda: None).result()  # wakes the thread, and comes after all else

    def _put(self, job: _Job) -> Answer[Any]:
        """Ask, and see to it that somebody serves.

        A signal may hit between any two bytecodes here, and then a thread too many is started, or none until the next
        question. So it is not the starter that says which thread serves but the thread, which no signal hits: the first
        to take ``_serving`` does, any other ends at once. Only these threads take that lock, and nobody waits for it.
        ``threading.Thread.start`` would wait for the thread under a lock that a signal can leave locked or released
        twice; this start is one step. A thread of the body that outlives the body is served like anybody.
        """
        self._last = job.answer
        self._jobs.put(job)
        if not self._coming and not self._serving.locked():
            try:
                self._coming = True
                _thread.start_new_thread(self._serve, ())
            except BaseException:
                self._coming = False
                raise
        return job.answer

    # -- on the thread -----------------------------------------------------------------------------------------------

    def _serve(self) -> None:
        """Answer until nothing is asked and no lease is held. Who asks looks after asking whether somebody comes or
        serves, and this looks for questions after taking either back: no question falls between the two."""
        self._coming = False
        while not self._jobs.empty() and self._serving.acquire(blocking=False):
            try:
                self._loop()
            finally:
                self._serving.release()

    def _loop(self) -> None:
        while True:
            job = self._next(wait=self._held and not self._over)
            group: list[_Job] = []
            until = _clock() + GATHERING
            while job is not None and (job.outcome or job.intent):
                group.append(job)
                job = self._next(wait=False) or self._after_others(until)
            if group:
                self._write_group(group)
            if job is not None and job.run is not None:
                job.answer_with(job.run)
            elif not group and self._held and not self._over:
                self._renew()
            elif not group:
                return

    def _next(self, *, wait: bool) -> _Job | None:
        """The next job; ``None`` when none is there, or when it is time to renew."""
        try:
            return self._jobs.get(wait, max(0.001, self._renew_at - _clock()) if wait else None)
        except queue.Empty:
            return None

    def _after_others(self, until: float) -> _Job | None:
        """What threads ask that were only waiting for their turn at the interpreter: those that the last group's answer
        woke up. All in one group cost the ledger half of what they cost in two. Nobody's work is waited for."""
        if _clock() >= until:
            return None
        time.sleep(0)
        return self._next(wait=False)

    def _renew(self) -> None:
        try:
            self._write()
        except Exception as error:
            self._renew_at = _clock() + min(LONGEST_PAUSE, self.order.lease / 10)
            with contextlib.suppress(Exception):  # a log that is gone must not end this thread
                log.warning("The lease could not be renewed, trying again: %s", error)

    def _claim(self) -> Claim:
        sent = _clock()
        claim = self.ledger.claim(self.order, self.holder)
        if claim.verdict is Verdict.RUN:
            if self.order.calls == "body" and not claim.reentered:
                self._open.add("body")  # before the grant: a signal between the two must not leave it out
            self._grant = Grant(claim.identity, claim.record_id, claim.generation, claim.fence)
            self._believe(sent, claim.now, claim.until)
        return claim

    def _believe(self, sent: float, now: datetime, until: datetime | None) -> None:
        """The lease, carried over to this machine's clock: counted from before the question, so never too long."""
        self._held = until is not None
        self._lease_ends = sent + ((until - now).total_seconds() if until else 0.0)
        self._renew_at = sent + self.order.lease / 3

    def _held_by(self, run: Callable[[Grant], R]) -> R:
        assert self._grant is not None, "asked before the claim was granted"
        sent = _clock()
        answer = run(self._grant)
        self._believe(sent, answer.now, answer.until)
        return answer

    def _write(self, **what: Any) -> Written:
        assert self._grant is not None, "written before the claim was granted"
        sent = _clock()
        written = self.ledger.write(self._grant, holder=self.holder, order=self.order, **what)
        self.last_event = written.event_id or self.last_event
        self._believe(sent, written.now, written.until if written.held and not what.get("hand_over") else None)
        for outcome in what.get("outcomes", ()):
            self._open.discard(outcome.call)
        self._open.update(name for name, answer in written.intents.items() if answer.verdict in ("run", "attach"))
        if self._held and sent >= self._keep_at:
            self._keep_at = sent + self.order.lease / 3
            self._keep()
        elif written.verdict == "missing":
            self.ledger.lose(f"record {self._grant.identity}, which a living holder works on, is no longer in it")
        return written

    def _withdraw_claim(self) -> None:
        if self._grant is None:  # asked once more under the same nonce, the ledger answers as it did
            self._insist(self._claim, until=_clock() + self.order.lease)
        if self._grant is not None:  # also when the lease is gone: what is known to be unsent is said
            unsent = tuple(Outcome(name, failure=NEVER_SENT) for name in self._open)
            self._settle(Settlement(State.PENDING, error="the task was stopped before it called anything"), unsent)

    def _remember(self, call: str, external_id: str, submitted: bool) -> str:
        assert self._grant is not None
        return self.ledger.remember(self._grant, self.holder, call, external_id, submitted=submitted)

    def _submitted(self, call: str) -> str:
        assert self._grant is not None
        lines = self.ledger.calls(self._grant.record_id)
        mine = (line for line in lines if (line.generation, line.name) == (self._grant.generation, call))
        return next((line.external_id for line in mine if line.submitted), "")

    def _withdraw(self, name: str) -> None:
        if name in self._open:
            unsent = Outcome(name, failure=NEVER_SENT, unsent=self.order.calls == "batch")
            self._insist(lambda: self._write(outcomes=[unsent]))

    def _settle(self, settlement: Settlement, outcomes: tuple[Outcome, ...]) -> Written:
        try:
            return self._insist(lambda: self._write(settlement=settlement, outcomes=outcomes))
        except RunGuardError:
            raise
        except Exception as error:
            # Only data can be refused. What is known must be booked all the same, without what was refused.
            log.exception("The ledger refused the result's data; the outcome is booked without it.")
            bare, reduced = _reduced(settlement, error), [_reduced(outcome, error) for outcome in outcomes]
            return self._insist(lambda: self._write(settlement=bare, outcomes=reduced))

    def _write_group(self, group: list[_Job]) -> None:
        outcomes = [job.outcome for job in group if job.outcome]
        intents = [job.intent for job in group if job.intent]
        try:
            written = self._insist(
                lambda: self._write(outcomes=outcomes, intents=intents, meanwhile=self.meanwhile),
                until=None if outcomes else self._lease_ends,
            )
        except BaseException as error:
            if isinstance(error, RunGuardError) or not isinstance(error, Exception):
                for job in group:
                    job.answer.say(None, error)
            elif len(group) > 1:
                for job in group:  # one of them has data that tears the others
                    self._write_group([job])
            elif (outcome := group[0].outcome) is not None:
                log.exception("The ledger refused the data of call %r; its outcome is booked without it.", outcome.call)
                bare = _reduced(outcome, error)
                group[0].answer_with(lambda: self._insist(lambda: self._write(outcomes=[bare])))
            else:
                group[0].answer.say(None, error)
        else:
            for job in group:  # an intent that got no answer fails by itself; it must not end this thread
                job.answer_with(lambda job=job: written.intents[job.intent[0]] if job.intent else written)  # type: ignore[misc]

    def _insist(self, write: Callable[[], T], until: float | None = None) -> T:
        """Try until the ledger answers, or (an intent, a claim) only until then. What is known is also tried for
        ``max_call_time`` at a ledger that answers and may not be used: it could be, and somebody is at work on it."""
        pause, mended = FIRST_PAUSE, _clock() + self.order.max_call_time
        while True:
            try:
                return write()
            except (LedgerUnavailable, LedgerNotReady) as error:
                end = until
                if isinstance(error, LedgerNotReady):
                    end = mended if until is None else 0.0
                if end is not None and _clock() >= end:
                    raise
                if pause == FIRST_PAUSE:
                    log.warning("%s Trying again until it answers.", error.what)
                time.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE)


D = TypeVar("D", Outcome, Settlement)


def _reduced(what: D, error: Exception) -> D:
    note = f"the ledger refused it: {type(error).__name__}"
    failure = what.failure and replace(what.failure, evidence=note)
    return replace(what, error=note, failure=failure, result=Result(None, note) if what.result else None)


def _clock() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)
