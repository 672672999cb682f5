"""What the body sees: the guard at run time, which makes each call at most once.

Each call is intent, call, outcome; :class:`GuardContext` asks the writing thread for the first and gives it the last.
A call that may not be made ends the body with :class:`~airflow_runguard.core.work.Interrupt`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, TypeVar, cast

from airflow_runguard.core import keys, payloads
from airflow_runguard.core.errors import LedgerUnavailable, PlanningError, ResultIsError
from airflow_runguard.core.failures import classify, classify_result, hidden_retries
from airflow_runguard.core.given import likeness
from airflow_runguard.core.jobs import JobFailed, Jobs, Look, followed
from airflow_runguard.core.record import (
    CallState,
    Claim,
    Effect,
    Failure,
    FailureClass,
    IntentAnswer,
    Outcome,
    Result,
    Written,
)
from airflow_runguard.core.returned import accept, called, chain
from airflow_runguard.core.rows import outcome_state
from airflow_runguard.core.work import (
    BODY,
    IN_SQL,
    KEYLESS,
    THAW,
    Done,
    Ended,
    Interrupt,
    Marker,
    Waiting,
    Work,
    dumped,
    in_doubt,
    replayed,
    said,
)
from airflow_runguard.core.writer import Answer, Writer

T = TypeVar("T")
I = TypeVar("I")  # noqa: E741  # an item

log = logging.getLogger("airflow_runguard")

KEY_OF_A_CALL = "Say vendor_key_as='…' in guard.call: the name under which the function takes the key."
SINGLE_BODY = "This guarded function is one call itself, so it has no calls of its own to make."
EXPLICIT = "Say calls='explicit', or take `guard` as its first parameter."
SUBMIT = "It is not sent again: bring guard.submit back, which attaches to it."
IN_THREADS = "Make calls in the task's own process; guard.map makes them side by side, in threads."
OTHER_WORK = "Call {!r} is done, and this body asks for it again with other arguments: that was not made."
NAMES = "Give each call a name of its own, by its content: guard.call(f'charge {invoice_id}', …)."
CHECK_IT = "Where such an answer is a success, say so (HttpOperator: response_check=…)."
REOPEN = "`airflow runguard reopen` does it anew."


_calling: ContextVar[str | None] = ContextVar("runguard_call", default=None)
"""The call whose function runs here."""


def _raise(errors: list[BaseException]) -> None:
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise BaseExceptionGroup(f"{len(errors)} calls failed", errors)


_current: ContextVar[GuardContext | None] = ContextVar("runguard", default=None)


def current_guard() -> GuardContext:
    """The guard of the running body, for code deeper down.

    :raises PlanningError: outside a guarded body, or in one that is a single call itself (it has no calls to make).
    """
    guard = _current.get()
    if guard is None:
        raise PlanningError("current_guard() was asked outside a guarded task. No call was made.")
    if guard.body_is_call:
        raise PlanningError(SINGLE_BODY, EXPLICIT)
    return guard


@dataclass(frozen=True, slots=True)
class Go:
    """The ledger's yes to one call: its vendor key, or the result of a call that is done already."""

    vendor_key: str = ""
    replay: Done | None = None
    job: str = ""
    """The name at the vendor of what was submitted before."""


@dataclass(slots=True)
class GuardContext:
    """The guard at run time: makes each call of a body at most once.

    :meth:`call` and :meth:`acall` book the intent before and the outcome after. A call that is done is not made again:
    its stored result comes back. What the function raises is raised on, after it is booked. After a call whose outcome
    is unknown, no other is made. A result that is an error (HTTP 200 with errors inside, an exception given back) is
    booked as that failure, and ``ResultIsError`` is raised; an empty one is a result.
    """

    _writer: Writer
    _work: Work
    _claim: Claim
    _since: float = field(default_factory=time.monotonic)
    """When the claim's answer was here, on this machine's monotonic clock."""
    called: bool = False
    """Whether any call was made or replayed."""
    _busy: dict[str, object] = field(default_factory=dict)
    _process: int = field(default_factory=os.getpid)
    _given: dict[str, int] = field(default_factory=dict)
    """What each call of this body was given when it was made, or its result given back."""
    _unbooked: set[str] = field(default_factory=set)
    """Calls that may have been sent and whose outcome the writing thread was not given (yet)."""
    _failures: list[tuple[BaseException, Failure]] = field(default_factory=list)
    jobs: Jobs = field(init=False)
    """What this body submits to the vendor, and waits for."""
    answered: bool = False
    """Whether the one request of a body has its answer: what the body raises from then on is not what it ended in."""
    waits: BaseException | None = None
    """What told a call to wait, where none ended well after it: with it the body is not done, whatever it returns."""
    interrupt: Interrupt | None = None
    """The first call that might not be made: with it the body has ended, whatever it does with the exception."""

    def __post_init__(self) -> None:
        self.jobs = Jobs(self._writer, self.classified, self._work.rules)

    @property
    def key(self) -> str:
        return self._claim.identity.key

    @property
    def namespace(self) -> str:
        return self._claim.identity.namespace

    @property
    def record_id(self) -> int:
        return self._claim.record_id

    @property
    def generation(self) -> int:
        return self._claim.generation

    @property
    def body_is_call(self) -> bool:
        return self._work.order.calls == BODY

    @property
    def reentered(self) -> bool:
        """Whether an earlier entry began this body (a deferral came back)."""
        return self._claim.reentered

    @property
    def idempotency_key(self) -> str:
        """The vendor key of a body that is one call.

        :raises PlanningError: the body makes calls of its own, which have a key each (``vendor_key_as``). Under one key
            for all of them, a vendor would answer the second with what the first had done.
        """
        if not self.body_is_call:
            raise PlanningError("guard.idempotency_key was asked where each guard.call has its own key.", KEY_OF_A_CALL)
        return self._vendor_key(BODY, self._claim.attempt)

    def stop(self) -> None:
        """Start no further call; what is under way is settled."""
        self._writer.stop()

    def call(
        self, name: str, fn: Callable[..., T], /, *args: Any, vendor_key_as: str | None = None, **arguments: Any
    ) -> T:
        """Make one external call, once over all tries of this work.

        :param name: of the call: unique in this body and the same in every try ("charge", never with a time in it).
            Asked for again with other arguments, the body ends: it was another piece of work.
        :param vendor_key_as: the keyword under which ``fn`` takes the idempotency key.
        :returns: what ``fn`` returned, now or the first time.
        :raises ResultIsError: ``fn`` gave back an error; what it means is booked.
        :raises BaseException: what ``fn`` raised; :class:`Interrupt` where the call may not be made.
        """

        def make(go: Go) -> T:
            called(f"guard.call({name!r})", fn)
            value = fn(*args, **self._with_key(go, vendor_key_as, arguments))
            accept(f"guard.call({name!r})", fn, value)
            return value

        return self._made(name, likeness(fn, args, arguments), arguments, make, self.classified, reads=True)

    def sql(self, name: str, conn_id: str, fn: Callable[..., T], /, *args: Any, **arguments: Any) -> T:
        """Have an effect in a database, with its proof in the same transaction: there is no doubt afterwards.

        ``fn(connection, *args, **arguments)`` runs in a transaction that is committed when it returns and rolled back
        when it raises; it may not end the transaction itself. All of its effect must be in that transaction: what it
        does elsewhere is not undone and not proven. The proof is a line of the table ``runguard_marker`` in that
        database, which is created on first use where that is allowed (docs/doubt.md has its DDL).

        :param name: of the call, as in :meth:`call`.
        :param conn_id: the Connection of a PostgreSQL, MySQL or SQLite database.
        :returns: what ``fn`` returned, now or in the try that committed.
        :raises BaseException: what ``fn`` raised; :class:`Interrupt` where the call may not be made.
        """
        if self._work.transaction is None:
            raise PlanningError("guard.sql was called where there are no Connections.")
        transaction = self._work.transaction(conn_id)
        work = self._work

        def make(go: Go) -> T:
            stores = work.order.store_result == "all"
            marker = Marker(
                go.vendor_key,
                self._claim.fence,
                stores,
                dump=lambda value: dumped(work, value) if stores else Result(None),
                load=work.load,
            )
            value: T = transaction.make(
                marker,
                lambda connection: fn(connection, *args, **arguments),
                lambda value: accept(f"guard.sql({name!r})", fn, value),
            )
            return value

        given = likeness(fn, args, arguments)
        return self._made(name, given, {IN_SQL: conn_id, **arguments}, make, transaction.judge)

    def remember(self, external_id: str) -> None:
        """Keep the vendor's own name for what the call under way has set going, before waiting for it: whoever looks
        into a doubt (``doubt.external_id``), and the command line, then know what to look for.

        To be called by the function that :meth:`call` or :meth:`acall` was given. Where a later try shall go on waiting
        instead of asking, use :meth:`submit`.

        :raises PlanningError: no call is under way here (threads of the function's own do not know it), or no name.
        """
        name = _calling.get()
        if name is None:
            raise PlanningError("guard.remember was called outside the function of a guard.call.")
        self.jobs.keep(name, external_id, submitted=False)

    def submit(
        self,
        name: str,
        submit: Callable[..., str],
        attach: Look,
        /,
        *args: Any,
        poll: float = 30.0,
        vendor_key_as: str | None = None,
        **arguments: Any,
    ) -> Any:
        """Submit a job once over all tries of this work, and wait for it.

        ``submit(*args, **arguments)`` returns the job's name at the vendor, which is kept in the ledger at once. Then
        ``attach(job)`` is asked every ``poll`` seconds. A later try only attaches: it waits for a job that runs, takes
        the result of one that succeeded, submits anew (under a new vendor key) only where the vendor says that the job
        failed for good, and ends in doubt where the vendor does not know it. An error of ``attach`` never submits
        again; one that says to wait pauses the work, and the job goes on.

        :param attach: ``job -> Running() | Succeeded(result) | FailedForGood(reason) | NotFound(reason)``.
        :returns: the job's result, now or the first time.
        :raises JobFailed: it failed for good in this try; the next one submits it anew.
        """
        for again in (False, True):
            found: list[str] = []

            def make(go: Go, found: list[str] = found) -> Any:
                job = go.job
                if job:
                    found.append(job)
                else:
                    job = submit(*args, **self._with_key(go, vendor_key_as, arguments))
                    if not isinstance(job, str) or not job:
                        raise PlanningError(f"The submit function of {name!r} returned {job!r}, not the job's name.")
                    self.jobs.keep(name, job)
                with self.jobs.following(job, name):
                    return followed(job, attach, lambda: self._writer.stopped(poll), self._work.rules)

            def judge(error: BaseException) -> Failure:
                return self.jobs.of_waiting(error) or self.classified(error)

            try:
                given = likeness(submit, args, arguments)
                return self._made(name, given, arguments, make, judge, attaches=True)
            except JobFailed:
                if again or not found:
                    raise
        raise AssertionError("unreachable")

    def _made(
        self,
        name: str,
        given: int,
        readable: dict[str, Any],
        make: Callable[[Go], T],
        judge: Callable[[BaseException], Failure],
        *,
        attaches: bool = False,
        reads: bool = False,
    ) -> T:
        """Intent, call, outcome.

        :param judge: what an error of ``make`` means.
        :param attaches: ``make`` takes up a job that was submitted before.
        :param reads: what ``make`` gives back is the vendor's answer, which may be an error.
        """
        with self._alone(name):
            with self._asking(name):
                answer = self._intent(name, readable).result()
                job = self._writer.external_id(name).result() if answer.verdict == "attach" and attaches else ""
            go = self._go(name, answer, given, job)
            if go.replay is not None:
                return cast(T, go.replay.value)
            token = _calling.set(name)
            try:
                with self._work.watch(f"call {name}"):
                    value = make(go)
            except BaseException as error:
                self._failed(name, error, judge(error)).result()
                raise
            finally:
                _calling.reset(token)
            booked, wrong = self._ended(name, value, reads=reads)
            booked.result()
            if wrong is not None:
                raise wrong
            return value

    async def acall(
        self,
        name: str,
        fn: Callable[..., Awaitable[T]],
        /,
        *args: Any,
        vendor_key_as: str | None = None,
        **arguments: Any,
    ) -> T:
        """:meth:`call` for an async function."""
        given = likeness(fn, args, arguments)
        with self._alone(name):
            with self._asking(name):
                answer = await self._intent(name, arguments).waited()
            go = self._go(name, answer, given)
            if go.replay is not None:
                return cast(T, go.replay.value)
            token = _calling.set(name)
            try:
                with self._work.watch(f"call {name}"):
                    called(f"guard.acall({name!r})", fn)
                    value = await fn(*args, **self._with_key(go, vendor_key_as, arguments))
                    accept(f"guard.acall({name!r})", None, value)
            except BaseException as error:
                await self._failed(name, error).waited()
                raise
            finally:
                _calling.reset(token)
            booked, wrong = self._ended(name, value)
            await booked.waited()
            if wrong is not None:
                raise wrong
            return value

    async def gather(self, *calls: Awaitable[T]) -> list[T]:
        """Await calls side by side: ``await guard.gather(guard.acall("a", …), guard.acall("b", …))``.

        Every call is awaited and settled on its own, also when another fails, and no error is lost.

        :returns: what they returned, in order.
        :raises BaseException: what one of them raised; a ``BaseExceptionGroup`` where several did.
        """
        ended = await asyncio.gather(*calls, return_exceptions=True)
        _raise([error for error in ended if isinstance(error, BaseException)])
        return cast(list[T], ended)

    def map(
        self, fn: Callable[[I], T], items: Iterable[I], *, name: Callable[[I], str], concurrency: int = 8
    ) -> list[T]:
        """One call of ``fn`` for each item, side by side in threads. For lists that fit into one body; a long one is a
        batch (``guarded_batch_task``).

        After the first error (or a signal) no other item is begun; those under way are awaited and settled.

        :param name: of an item's call, by its content and never by its place.
        :returns: what they returned, in order.
        :raises BaseException: what one of them raised; a ``BaseExceptionGroup`` where several did.
        """
        threads = ThreadPoolExecutor(concurrency, thread_name_prefix="runguard-map")
        try:
            calls = [threads.submit(copy_context().run, self.call, name(item), fn, item) for item in items]
            wait(calls, return_when=FIRST_EXCEPTION)
        finally:  # a signal, too, ends the beginning of others; those that have begun are waited for
            threads.shutdown(cancel_futures=True)
        ended = [call for call in calls if not call.cancelled()]
        _raise([error for call in ended if (error := call.exception()) is not None])
        return [call.result() for call in ended]

    @contextmanager
    def entered(self) -> Iterator[None]:
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def failure_behind(self, error: BaseException) -> Failure | None:
        """The booked failure of the call that ``error`` stems from; ``None`` where it comes from between the calls."""
        for link in chain(error):
            if isinstance(link, BaseExceptionGroup):
                found = [failure for each in link.exceptions if (failure := self.failure_behind(each)) is not None]
                # Of several: doubt before waiting, waiting before a refusal.
                return min(found, key=lambda it: (it.effect is not Effect.UNKNOWN, not it.pausable), default=None)
        links = chain(error)
        return next((failure for failed, failure in reversed(self._failures) if any(failed is e for e in links)), None)

    def classified(self, error: BaseException, *, one_request: bool = False) -> Failure:
        """What an error of a call means."""
        return classify(error, now=self.now(), rules=self._work.rules, one_request=one_request)

    def read(self, answer: object) -> None:
        """Judge the answer to the one request of a body, which nobody has looked at yet.

        :raises ResultIsError: it is an error, and the body ends in what it means.
        """
        failure = self.classified_result(answer)
        if failure is not None:
            error = ResultIsError(f"The answer is an error: {failure.evidence}.", CHECK_IT)
            self._failures.append((error, failure))
            raise error

    def told_to_wait(self, error: BaseException) -> Failure | None:
        """The quota that an error means; ``None`` = it means something else, or more than that."""
        return told_to_wait(self.classified(error))

    def classified_result(self, value: object) -> Failure | None:
        """What is wrong with a value that came back like a success; ``None`` where nothing is."""
        return classify_result(value, now=self.now(), may_be_empty=True, rules=self._work.rules)

    def now(self) -> datetime:
        """The database's time: that of the claim, and what has passed since on this machine's monotonic clock.

        A vendor's dates count against it. The worker's wall clock may be wrong by hours. This one is only ever behind
        (by the answer's way here, and by the time for which the machine slept), so that a wait is never cut short.
        """
        return self._claim.now + timedelta(seconds=time.monotonic() - self._since)

    # -- the steps that call and acall share -------------------------------------------------------------------------

    @contextmanager
    def _alone(self, name: str) -> Iterator[None]:
        """One call of one name at a time, and none that makes no sense."""
        if os.getpid() != self._process:  # there is no writing thread here, and the connection is the other's
            raise PlanningError("A process that the body has forked asked for a call. It was not made.", IN_THREADS)
        if self._work.order.calls != "explicit":
            raise PlanningError(SINGLE_BODY, EXPLICIT)
        if not isinstance(name, str) or not 0 < len(name) <= 512 or name == BODY:
            raise PlanningError(f"A call's name is a text of 1 to 512 characters other than 'body', not {name!r}.")
        mine = object()
        if self._busy.setdefault(name, mine) is not mine:  # asked and taken in one step: bodies have threads
            raise PlanningError(
                f"Call {name!r} is under way in this body already.", "Give each call a name of its own."
            )
        try:
            if name in self._unbooked:  # a signal came between the call and its booking, and the body caught it
                raise self._interrupted(self._in_doubt(f"nothing is known of what call {name!r} did before"))
            yield
        finally:
            del self._busy[name]

    @contextmanager
    def _asking(self, name: str) -> Iterator[None]:
        """Whatever ends the asking (a signal, a cancellation, a ledger out of reach): the call is not made."""
        try:
            yield
        except BaseException as error:
            self._writer.withdraw(name)
            if isinstance(error, LedgerUnavailable):
                raise self._interrupted(Waiting(f"{error.what} Call {name!r} was not made.")) from error
            raise

    def _intent(self, name: str, arguments: dict[str, Any]) -> Answer[IntentAnswer]:
        if self.interrupt is not None:  # caught by the body, which has ended all the same
            raise Interrupt(self.interrupt.how, self.interrupt.pause)
        if any(failure.effect is Effect.UNKNOWN for _, failure in self._failures):
            raise self._interrupted(self._in_doubt("an earlier call of this body is in doubt"))
        return self._writer.intent(name, json.dumps(self._work.hide(payloads.readable(arguments))))

    def _go(self, name: str, answer: IntentAnswer, given: int, job: str = "") -> Go:
        """The ledger's answer to an intent, checked once more right before the call. The result of a call is given back
        to this body for the same work only: a loop that names all its calls alike would make the first one alone."""
        match answer.verdict:
            case "attach" if not job:
                self._writer.withdraw(name)
                raise self._interrupted(
                    Ended(f"Call {name!r} of {self._claim.identity} is a job at the vendor. {SUBMIT}", retry=False)
                )
            case "run" | "attach":
                if not self._writer.may_call():
                    self._writer.withdraw(name)
                    raise self._interrupted(Ended(f"{self._lost()} Call {name!r} was not made.", retry=True))
                self.called = True
                self._given[name] = given
                self._unbooked.add(name)
                return Go(vendor_key=self._vendor_key(name, answer.attempt), job=job)
            case "replay":
                assert answer.result is not None
                self.called = True
                if self._given.setdefault(name, given) != given:
                    raise self._interrupted(Ended(f"{OTHER_WORK.format(name)} {NAMES}", retry=True))
                how = replayed(answer.result, f"Call {name!r} of {self._claim.identity} is done", self._work)
                if isinstance(how, Done):
                    return Go(replay=how)
                assert isinstance(how, Ended)
                raise self._interrupted(how)
            case "frozen":
                why = f"Call {name!r} was not made: {answer.error}. {THAW}"
                raise self._interrupted(Waiting(why, record_id=self.record_id, limited=False))
            case "gated":
                raise self._interrupted(Waiting(f"Call {name!r} was not made: {answer.error}."), pause=0.0)
            case "paused":
                left = max(0.0, (answer.until - self.now()).total_seconds()) if answer.until else 0.0
                raise self._interrupted(
                    Waiting(f"Call {name!r} of {self._claim.identity} is paused.", left), pause=left
                )
            case "failed":
                raise self._interrupted(
                    Ended(f"Call {name!r} of {self._claim.identity} failed for good ({answer.error}). {REOPEN}", False)
                )
            case "broken":
                raise self._interrupted(
                    Ended(
                        f"Call {name!r} of {self._claim.identity} cannot be read in the ledger. It was not made.", False
                    )
                )
            case "in_doubt" | "open":
                raise self._interrupted(self._in_doubt(f"call {name!r}: {answer.error or 'no answer ever came'}"))
            case _:
                raise self._interrupted(Ended(f"{self._lost()} Call {name!r} was not made.", retry=True))

    def _failed(self, name: str, error: BaseException, failure: Failure | None = None) -> Answer[Written]:
        failure = failure or self.classified(error)
        self._failures.append((error, failure))
        self.waits = error if outcome_state(failure) == CallState.PAUSED else self.waits
        booked = self._booked(Outcome(name, failure=failure, error=said(error)))
        self.warn_of_repeats(name, error)
        return booked

    def _ended(self, name: str, value: Any, *, reads: bool = True) -> tuple[Answer[Written], BaseException | None]:
        """Book what a call came back with; and the error to raise where that is no result (P9)."""
        if isinstance(value, BaseException):
            return self._failed(name, value), value
        reads = reads and not isinstance(value, str | bytes)  # a text that the author's function returns is data
        failure = self.classified_result(value) if reads else None
        if failure is not None:
            error = ResultIsError(f"Call {name!r} came back with an error: {failure.evidence}.")
            self.warn_of_repeats(name, value)
            return self._failed(name, error, failure), error
        booked = self._booked(Outcome(name, result=dumped(self._work, value)))
        self.waits = None
        self.warn_of_repeats(name, value)
        return booked, None

    def warn_of_repeats(self, name: str, ended: object) -> None:
        """Say so where what a call ended in tells that its client sent more than one request."""
        if repeated := hidden_retries(ended):
            with suppress(OSError):  # the pipe of a killed supervisor: what is booked is booked
                log.warning("More than one request left inside call %r: %s", name, repeated)

    def _booked(self, outcome: Outcome) -> Answer[Written]:
        answer = self._writer.outcome(outcome)
        self._unbooked.discard(outcome.call)
        return answer

    def _with_key(self, go: Go, vendor_key_as: str | None, arguments: dict[str, Any]) -> dict[str, Any]:
        if vendor_key_as is None and self._work.order.on_doubt == "replay":
            log.warning("%s Call of %s: %s", KEYLESS, self._claim.identity, KEY_OF_A_CALL)
        return {**arguments, vendor_key_as: go.vendor_key} if vendor_key_as else arguments

    def _vendor_key(self, name: str, attempt: int) -> str:
        return keys.vendor_key(self._writer.ledger.installation, self._claim.identity, name, self.generation, attempt)

    def _in_doubt(self, why: str) -> Ended:
        return in_doubt(self._work.order, why, seconds=0.0)

    def _interrupted(self, how: Waiting | Ended, pause: float | None = None) -> Interrupt:
        interrupt = Interrupt(how, pause)
        self.interrupt = self.interrupt or interrupt
        return interrupt

    def _lost(self) -> str:
        return f"This process is no longer the holder of {self._claim.identity}."


def told_to_wait(failure: Failure) -> Failure | None:
    """The same where it is a quota that waiting mends, and nothing else is known to have come of the request."""
    quota = failure.failure_class is FailureClass.QUOTA and failure.effect is Effect.NOT_APPLIED
    return failure if quota and failure.pausable else None
