"""What the body sees: the guard at run time, which makes each call at most once.

Each call is intent, call, outcome; :class:`GuardContext` asks the writing thread for the first and gives it the last.
A call that may not be made ends the body with :class:`~airflow_runguard.core.work.Interrupt`.
"""

from __future__ import annotations

import inspect
import json
import logging
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, TypeVar, cast

from airflow_runguard.core import keys
from airflow_runguard.core.errors import LedgerUnavailable, NotApplied, PlanningError, ResultIsError
from airflow_runguard.core.failures import classify, classify_result, hidden_retries
from airflow_runguard.core.record import Claim, Effect, Failure, IntentAnswer, Outcome, Written
from airflow_runguard.core.work import (
    BODY,
    THAW,
    Done,
    Ended,
    Interrupt,
    Waiting,
    Work,
    dumped,
    in_doubt,
    replayed,
    said,
)
from airflow_runguard.core.writer import Answer, Writer

T = TypeVar("T")

log = logging.getLogger("airflow_runguard")

ASYNC_CALL = "For an async function use `await guard.acall(…)`."
WAIT_FOR_IT = "Wait for it inside the function that guard.call is given, so that its outcome can be booked."
SINGLE_BODY = "This guarded function is one call itself, so it has no calls of its own to make."
EXPLICIT = "Say calls='explicit', or take `guard` as its first parameter."
REOPEN = "`airflow runguard reopen` does it anew."


def never_ran(value: object) -> bool:
    """Whether a returned value is a body that Python has not begun: a coroutine or a generator. It never will be."""
    if inspect.iscoroutine(value) or inspect.isgenerator(value):
        value.close()
        return True
    return inspect.isasyncgen(value)


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
class _Go:
    """The ledger's yes to one call: its vendor key, or the result of a call that is done already."""

    vendor_key: str = ""
    replay: Done | None = None


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
    _unbooked: set[str] = field(default_factory=set)
    """Calls that may have been sent and whose outcome the writing thread was not given (yet)."""
    _failures: list[tuple[BaseException, Failure]] = field(default_factory=list)
    interrupt: Interrupt | None = None
    """The first call that might not be made: with it the body has ended, whatever it does with the exception."""

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
        """The vendor key of a body that is one call. Calls of an explicit body have one each (``vendor_key_as``)."""
        return self._vendor_key(BODY, self._claim.attempt)

    def stop(self) -> None:
        """Start no further call; what is under way is settled."""
        self._writer.stop()

    def call(
        self, name: str, fn: Callable[..., T], /, *args: Any, vendor_key_as: str | None = None, **arguments: Any
    ) -> T:
        """Make one external call, once over all tries of this work.

        :param name: of the call: unique in this body and the same in every try ("charge", never with a time in it).
        :param vendor_key_as: the keyword under which ``fn`` takes the idempotency key.
        :returns: what ``fn`` returned, now or the first time.
        :raises ResultIsError: ``fn`` gave back an error; what it means is booked.
        :raises BaseException: what ``fn`` raised; :class:`Interrupt` where the call may not be made.
        """
        with self._alone(name):
            with self._asking(name):
                answer = self._intent(name, arguments).result()
            go = self._go(name, answer)
            if go.replay is not None:
                return cast(T, go.replay.value)
            try:
                value = fn(*args, **self._with_key(go, vendor_key_as, arguments))
                if never_ran(value):
                    raise NotApplied(
                        f"What guard.call({name!r}) was given is async or yields: nothing ran.", ASYNC_CALL
                    )
                if hasattr(value, "add_done_callback"):
                    raise PlanningError(f"guard.call({name!r}) got a future, whose work may still come.", WAIT_FOR_IT)
            except BaseException as error:
                self._failed(name, error).result()
                raise
            booked, wrong = self._ended(name, value)
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
        with self._alone(name):
            with self._asking(name):
                answer = await self._intent(name, arguments).waited()
            go = self._go(name, answer)
            if go.replay is not None:
                return cast(T, go.replay.value)
            try:
                value = await fn(*args, **self._with_key(go, vendor_key_as, arguments))
            except BaseException as error:
                await self._failed(name, error).waited()
                raise
            booked, wrong = self._ended(name, value)
            await booked.waited()
            if wrong is not None:
                raise wrong
            return value

    @contextmanager
    def entered(self) -> Iterator[None]:
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def failure_behind(self, error: BaseException) -> Failure | None:
        """The booked failure of the call that ``error`` stems from; ``None`` where it comes from between the calls."""
        chain: list[BaseException] = []
        link: BaseException | None = error
        while link is not None and link not in chain:
            chain.append(link)
            link = link.__cause__ or link.__context__
        return next((failure for failed, failure in reversed(self._failures) if any(failed is e for e in chain)), None)

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
        if self.body_is_call:
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
        if any(failure.effect is Effect.UNKNOWN for _, failure in self._failures):
            raise self._interrupted(self._in_doubt("an earlier call of this body is in doubt"))
        return self._writer.intent(name, json.dumps(keys.readable(arguments)))

    def _go(self, name: str, answer: IntentAnswer) -> _Go:
        """The ledger's answer to an intent, checked once more right before the call."""
        match answer.verdict:
            case "run":
                if not self._writer.may_call():
                    self._writer.withdraw(name)
                    raise self._interrupted(Ended(f"{self._lost()} Call {name!r} was not made.", retry=True))
                self.called = True
                self._unbooked.add(name)
                return _Go(vendor_key=self._vendor_key(name, answer.attempt))
            case "replay":
                assert answer.result is not None
                self.called = True
                how = replayed(answer.result, f"Call {name!r} of {self._claim.identity} is done", self._work)
                if isinstance(how, Done):
                    return _Go(replay=how)
                assert isinstance(how, Ended)
                raise self._interrupted(how)
            case "frozen":
                raise self._interrupted(Waiting(f"Call {name!r} was not made: {answer.error}. {THAW}"))
            case "gated":
                raise self._interrupted(Waiting(f"Call {name!r} was not made: {answer.error}."), pause=0.0)
            case "paused":
                left = (answer.until - self._claim.now).total_seconds() if answer.until else 0.0
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
        failure = failure or classify(error, now=self.now())
        self._failures.append((error, failure))
        return self._booked(Outcome(name, failure=failure, error=said(error)))

    def _ended(self, name: str, value: Any) -> tuple[Answer[Written], BaseException | None]:
        """Book what a call came back with; and the error to raise where that is no result (P9)."""
        if isinstance(value, BaseException):
            return self._failed(name, value), value
        failure = classify_result(value, now=self.now(), may_be_empty=True)
        if failure is not None:
            error = ResultIsError(f"Call {name!r} came back with an error: {failure.evidence}.")
            return self._failed(name, error, failure), error
        booked = self._booked(Outcome(name, result=dumped(self._work, value)))
        if repeated := hidden_retries(value):
            with suppress(OSError):  # the pipe of a killed supervisor: what is booked is booked
                log.warning("More than one request left inside call %r: %s", name, repeated)
        return booked, None

    def _booked(self, outcome: Outcome) -> Answer[Written]:
        answer = self._writer.outcome(outcome)
        self._unbooked.discard(outcome.call)
        return answer

    def _with_key(self, go: _Go, vendor_key_as: str | None, arguments: dict[str, Any]) -> dict[str, Any]:
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
