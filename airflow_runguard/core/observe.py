"""Depth ``observe``: the body runs whatever the ledger says or does not say; it is booked, and people are warned.

Nothing here blocks, raises or decides. The ledger is told on a thread of its own, and waited for at most ``patience``
seconds in all, at the end. Calls of an explicit body are made as they come and are not journaled one by
one: an observed body is one call. What was booked is honoured when the task is guarded later.
"""

from __future__ import annotations

import _thread
import logging
import queue
import threading
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Any, TypeVar

from airflow_runguard.core import keys
from airflow_runguard.core.context import Go, GuardContext
from airflow_runguard.core.errors import ResultIsError
from airflow_runguard.core.guard import of_body
from airflow_runguard.core.jobs import Jobs
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import (
    Claim,
    Effect,
    Failure,
    FailureClass,
    Verdict,
)
from airflow_runguard.core.work import Decision, HandOver, Work, dumped, said

T = TypeVar("T")

log = logging.getLogger("airflow_runguard")

NOTHING_CALLED = Failure(FailureClass.PROCESSING, Effect.NOT_APPLIED, evidence="no call had been made")


class Bystander:
    """Tells a ledger what happens, from a thread that nobody waits for longer than ``patience`` seconds in all.

    :param ledger: makes the ledger, on that thread, where it is checked and closed as well.
    """

    def __init__(self, ledger: Callable[[], Ledger], patience: float) -> None:
        self._ledger, self._left = ledger, patience
        self._questions: queue.SimpleQueue[tuple[Callable[[Ledger], Any], queue.SimpleQueue[Any]] | None]
        self._questions = queue.SimpleQueue()
        self._started = False
        self.trouble = ""
        """Why the ledger was not told ('' = it was, as far as was heard)."""

    def tell(self, question: Callable[[Ledger], T]) -> Callable[[], T | None]:
        """Ask without waiting. What comes back waits for the answer: ``None`` where there is none in time (it may still
        come to pass). Neither raises."""
        reply: queue.SimpleQueue[tuple[T | None, str]] = queue.SimpleQueue()
        try:
            self._questions.put((question, reply))
            if not self._started:
                # Thread.start() would wait until it runs, and the body behind what it does first.
                self._started = bool(_thread.start_new_thread(self._run, ()))
        except Exception as problem:
            reply.put((None, said(problem)))

        def wait() -> T | None:
            began = time.monotonic()
            try:
                answer, error = reply.get(timeout=max(0.001, self._left))
            except queue.Empty:
                answer, error = None, "the ledger did not answer in time"
            self._left -= time.monotonic() - began
            self.trouble = self.trouble or error
            return answer

        return wait

    def ask(self, question: Callable[[Ledger], T]) -> T | None:
        return self.tell(question)()

    def close(self) -> None:
        """What was asked is still told, by a thread that ends then; this waits for nothing."""
        self._questions.put(None)

    def _run(self) -> None:
        ledger: Ledger | None = None
        checked = False
        while (asked := self._questions.get()) is not None:
            question, reply = asked
            try:
                ledger = ledger or self._ledger()
                if not checked:
                    ledger.check()
                    checked = True
                reply.put((question(ledger), ""))
            except Exception as error:
                reply.put((None, said(error)))
        if ledger is not None:
            ledger.close()


def run(work: Work, bystander: Bystander, say: Callable[[int, str], None]) -> Any:
    """Run the body of ``work`` and book it; returns and raises what the body does.

    The beginning is booked while the body runs; only its end is waited for, and a vendor key where one is wanted.

    :param say: told what a guard would have done; also from the ledger's thread.
    """

    def begin(ledger: Ledger) -> str:
        seen = ledger.observe(work.order, work.holder, "started")
        if seen.verdict == "duplicate":
            say(
                logging.WARNING, f"This would have been {seen.said} ({work.order.identity}). Observing: it runs anyway."
            )
        elif seen.verdict == "broken":
            say(
                logging.WARNING,
                f"{work.order.identity} cannot be read in the ledger ({seen.said}). Observing: it runs.",
            )
        return ledger.installation

    begun = bystander.tell(begin)
    try:
        return _run(work, bystander, begun)
    finally:
        if bystander.trouble:
            say(logging.WARNING, f"Observed, but not booked: {bystander.trouble}. The task goes on.")


def _run(work: Work, bystander: Bystander, begun: Callable[[], str | None]) -> Any:
    guard = ObservedContext(work, begun)
    try:
        with guard.entered():
            value = work.body(guard)
    except BaseException as error:
        signal = work.signal(error)
        if isinstance(signal, Decision):
            _tell(bystander, work, "done", result=dumped(work, signal.value))
        elif isinstance(signal, HandOver):  # it comes back; its beginning is in the books before it goes
            bystander.ask(lambda ledger: None)
        else:
            _tell(bystander, work, "failed", failure=guard.failure_of(error), error=work.hide(said(error)))
        raise
    if isinstance(value, BaseException):  # P9: in the books, an exception given back is an error
        _tell(bystander, work, "failed", failure=guard.failure_of(value), error=work.hide(said(value)))
    elif guard.answer is not None:
        _tell(
            bystander,
            work,
            "failed",
            failure=of_body(guard.answer, guard.classified(guard.answer), work, guard),
            error=work.hide(said(guard.answer)),
        )
    else:
        _tell(bystander, work, "done", result=dumped(work, value))
    return value


def _tell(bystander: Bystander, work: Work, what: str, **how: Any) -> None:
    bystander.ask(lambda ledger: ledger.observe(work.order, work.holder, what, **how))


class _NoWriter:
    """Stands where a guard has its writing thread: nothing is journaled, and polling for a job waits here."""

    def __init__(self) -> None:
        self._stop = threading.Event()

    def stopped(self, seconds: float) -> bool:
        return self._stop.wait(seconds)

    def stop(self) -> None:
        self._stop.set()


class _NoJobs(Jobs):
    """Whose names nobody keeps, and no later try attaches to: an observed doubt is a person's."""

    def submitted(self) -> str:
        return ""

    def keep(self, call: str, job: str, *, submitted: bool = True) -> None:
        pass


class ObservedContext(GuardContext):
    """The guard as an observed body sees it: it makes every call, and hands over the key that a guard would."""

    def __init__(self, work: Work, installation: Callable[[], str | None]) -> None:
        """:param installation: waits for the ledger's own id; asked once, where a key is wanted."""
        claim = Claim(Verdict.RUN, work.order.identity, datetime.now(UTC), generation=1, attempt=1)
        super().__init__(_NoWriter(), work, claim)  # type: ignore[arg-type]
        self.jobs = _NoJobs(self._writer, self.classified, work.rules)
        self._installation = installation
        self._salt = ""
        self._calls = 0
        self._failed_calls: list[tuple[BaseException, Failure]] = []
        self.answer: ResultIsError | None = None
        """What the answer to the one request of a body means, where it is an error. The body goes on all the same."""

    def call(
        self, name: str, fn: Callable[..., T], /, *args: Any, vendor_key_as: str | None = None, **arguments: Any
    ) -> T:
        self._calls += 1
        try:
            return fn(*args, **self._keyed(name, vendor_key_as, arguments))
        except BaseException as error:
            self._failed_calls.append((error, self.classified(error)))
            raise

    async def acall(
        self,
        name: str,
        fn: Callable[..., Awaitable[T]],
        /,
        *args: Any,
        vendor_key_as: str | None = None,
        **arguments: Any,
    ) -> T:
        self._calls += 1
        try:
            return await fn(*args, **self._keyed(name, vendor_key_as, arguments))
        except BaseException as error:
            self._failed_calls.append((error, self.classified(error)))
            raise

    def read(self, answer: object) -> None:
        try:
            super().read(answer)
        except ResultIsError as error:
            self.answer = error

    def remember(self, external_id: str) -> None:
        """Nobody looks it up: an observed doubt is a person's."""

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
        """A job that is submitted, under the key that a guard would use; or an effect in SQL, whose marker is this
        attempt's own, so that it stops no other."""
        if attaches:
            key = self._vendor_key(name, 1)
        else:
            key = keys.vendor_key(self._work.holder.nonce, self._claim.identity, name, 1, 1)
        self._calls += 1
        try:
            return make(Go(vendor_key=key))
        except BaseException as error:
            self._failed_calls.append((error, judge(error)))
            raise

    def failure_of(self, error: BaseException) -> Failure:
        """What is known after an error: nothing where a call may have happened."""
        if self.body_is_call:
            return of_body(error, self.classified(error), self._work, self)
        if not self._calls:
            return NOTHING_CALLED
        if self._calls == len(self._failed_calls) == 1:
            return self._failed_calls[0][1]
        return Failure(FailureClass.UNKNOWN, Effect.UNKNOWN, evidence="some of its calls were made")

    def _keyed(self, name: str, vendor_key_as: str | None, arguments: dict[str, Any]) -> dict[str, Any]:
        return {**arguments, vendor_key_as: self._vendor_key(name, 1)} if vendor_key_as else arguments

    def _vendor_key(self, name: str, attempt: int) -> str:
        """The key that a guard would use; where the ledger did not say which installation it is, one of this attempt's
        own, since a key that another installation might use could bring back its charge."""
        self._salt = self._salt or self._installation() or self._work.holder.ti_id or self._work.holder.nonce
        return keys.vendor_key(self._salt, self._claim.identity, name, 1, attempt)
