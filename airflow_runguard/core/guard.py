"""The one algorithm: enter → work → leave. Every door runs its work through :func:`run`.

Enter asks the ledger for the record, work makes calls (each: intent, then call, then outcome), leave settles. What
comes back is a value that says how it ended; doors turn it into Airflow's words. A call that may not be made ends the
body with :class:`Interrupt`, which no ``except Exception`` can swallow.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any, TypeVar, cast

from airflow_runguard.core import keys
from airflow_runguard.core.errors import (
    LeaseLost,
    LedgerUnavailable,
    NotApplied,
    PlanningError,
    ResultNotStored,
    RunGuardError,
)
from airflow_runguard.core.failures import classify
from airflow_runguard.core.leases import Leases
from airflow_runguard.core.ledger import Ledger, outcome_state
from airflow_runguard.core.record import (
    Call,
    CallState,
    Claim,
    Effect,
    Failure,
    FailureClass,
    Holder,
    IntentAnswer,
    Order,
    Outcome,
    Record,
    Result,
    Settlement,
    State,
    Verdict,
    Witness,
    Written,
)
from airflow_runguard.core.resp import Redis
from airflow_runguard.core.writer import Answer, Writer

log = logging.getLogger("airflow_runguard")

T = TypeVar("T")

BODY = "body"


# -- what a reconcile function answers -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Applied:
    """The vendor says that it happened, with this result."""

    result: Any = None


@dataclass(frozen=True, slots=True)
class StillUnknown:
    """The vendor could not say."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class Doubt:
    """What a reconcile function is asked about.

    :param vendor_key: the idempotency key that the call carried.
    :param intent: the call's readable arguments (for a whole body: the order's readable fields).
    """

    record: Record
    call: Call
    vendor_key: str
    intent: Any


Reconcile = Callable[[Doubt], Applied | NotApplied | StillUnknown]


# -- what a door brings, and what it gets back ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HandOver:
    """A control-flow exception that means: the same task instance comes back within so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Decision:
    """A control-flow exception that is the work's answer (skip, branch): booked as the result, raised again on replay."""

    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a door brings.

    :param body: called with the :class:`GuardContext` once the record is granted.
    :param dump, load: the result to bytes and back; ``dump`` raises where ``load`` would not give back an equal value.
    :param signal: what a control-flow exception of the body means; ``None`` = it is an error.
    :param single_request: the author's word that the body makes exactly one request, so that its errors speak for it.
    """

    order: Order
    holder: Holder
    body: Callable[[GuardContext], Any]
    dump: Callable[[Any], bytes]
    load: Callable[[bytes], Any]
    signal: Callable[[BaseException], HandOver | Decision | None] = lambda error: None
    reconcile: Reconcile | None = None
    single_request: bool = False
    allow_no_call: bool = False


@dataclass(frozen=True, slots=True)
class Done:
    """The effect happened, now or before; ``value`` equals the first result."""

    value: Any
    replayed: bool


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nothing may be called now; come back (in so many ``seconds``, where the ledger says so)."""

    reason: str
    seconds: float | None = None
    busy: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """The try is over.

    :param retry: another try may do better (Airflow's own retries apply); else a person or a command moves it on.
    :param error: the exception that ended the body, where there was one.
    """

    message: str
    retry: bool
    error: BaseException | None = None


@dataclass(frozen=True, slots=True)
class Passed:
    """A control-flow exception of the body, booked, to be raised on."""

    signal: BaseException


How = Done | Waiting | Ended | Passed


class Interrupt(BaseException):
    """A call may not be made: the body ends here. Derives from ``BaseException`` so that no body goes on by mistake."""

    def __init__(self, how: Waiting | Ended) -> None:
        super().__init__(how.reason if isinstance(how, Waiting) else how.message)
        self.how = how


# -- the algorithm -----------------------------------------------------------------------------------------------------


def ready(ledger: Ledger, client: Redis | None) -> Leases:
    """Make sure, once a process, that this ledger may be used: its schema and deployment, and that it did not go back in
    time behind the witness that Redis keeps (P14).

    :raises LedgerNotReady: it may not.
    """
    ledger.check()
    leases = Leases(client, ledger.installation)
    witness = leases.witness()
    if witness is not None:
        ledger.confront(witness)  # if it is gone, the ledger remembers so, and every claim hears it
    return leases


def run(ledger: Ledger, leases: Leases, work: Work) -> How:
    """Have the effect of ``work`` once. What the ledger, Redis, the vendor or the body do comes back as a value; only a
    signal that hits the guard itself goes through, after what is known is booked.
    """
    order, holder = work.order, work.holder
    writer = Writer(ledger, order, holder, lambda: leases.renew(order.identity, holder.nonce, order.lease))
    try:
        leases.acquire(order.identity, holder.nonce, order.lease)
        claim = _enter(writer, work)
        if claim.verdict is not Verdict.RUN:
            return _refusal(claim, work)
        if not writer.may_call():  # frozen since the claim was sent; a body may be a call, and its intent may be old
            writer.withdraw_claim().result()
            return Ended(f"The lease on {order.identity} ran out before the work began. No call was made.", retry=True)
        return _work_and_leave(writer, work, GuardContext(writer, work, claim))
    except LedgerUnavailable as error:
        return Waiting(f"{error.what} No call was made.")
    except RunGuardError as error:
        return Ended(str(error), retry=False, error=error)
    finally:
        writer.close()
        witness = Witness(ledger.epoch, writer.last_event, holder.nonce) if writer.last_event else None
        leases.release(order.identity, holder.nonce, witness)


def _enter(writer: Writer, work: Work) -> Claim:
    """Claim; where the record is in doubt and the vendor can be asked, ask and claim again."""
    asked: set[str] = set()
    while True:
        try:
            claim = writer.claim().result()
        except (
            BaseException
        ):  # a signal, most likely: if the claim is granted all the same, nothing was called under it
            writer.withdraw_claim()
            raise
        if claim.verdict is not Verdict.IN_DOUBT or work.reconcile is None:
            return claim
        progress = _reconcile(writer, work, asked)
        if not progress:
            return claim


def _reconcile(writer: Writer, work: Work, asked: set[str]) -> bool:
    """Ask the vendor about each doubtful call once. Whether any answer changed the record."""
    assert work.reconcile is not None
    ledger = writer.ledger
    record = writer.do(lambda: ledger.get(work.order.identity)).result()
    if record is None or record.broken or record.state is not State.IN_DOUBT:
        return record is not None and not record.broken
    changed = False
    for call in writer.do(lambda: ledger.calls(record.id)).result():
        doubtful = call.generation == record.generation and call.state in (CallState.STARTED, CallState.IN_DOUBT)
        if not doubtful or call.name in asked:
            continue
        asked.add(call.name)
        key = keys.vendor_key(ledger.installation, record.identity, call.name, call.generation, call.attempt)
        intent = record.payload.readable if call.name == BODY else call.intent
        try:
            said = work.reconcile(Doubt(record, call, key, intent))
        except NotApplied as error:
            said = error
        except Exception as error:
            log.warning("The reconcile function failed; the record stays in doubt: %s", error, exc_info=True)
            continue
        if isinstance(said, StillUnknown):
            log.info("The vendor could not say whether %s happened: %s", record.identity, said.reason)
            continue
        happened = isinstance(said, Applied)
        result = _dumped(work, said.result).data if isinstance(said, Applied) else None
        verdict = writer.do(
            lambda call=call, happened=happened, result=result: ledger.resolve(  # type: ignore[misc]
                record.id,
                "happened" if happened else "did_not_happen",
                call=None if call.name == BODY else call.name,
                result=result,
                actor="reconcile",
                reason="the vendor was asked",
                seen_fence=record.fence,
            )
        ).result()
        if verdict == "too_early":
            log.info(
                "The vendor has nothing of %s yet, but the call may still arrive until %s.",
                record.identity,
                record.no_later_than,
            )
        changed = changed or verdict == "ok"
    return changed


def _refusal(claim: Claim, work: Work) -> How:
    """A refusal as a value, with a reason that the user can read."""
    name = claim.identity
    until = f"{claim.until:%Y-%m-%d %H:%M:%S %Z}" if claim.until else ""
    left = (claim.until - claim.now).total_seconds() if claim.until else None
    match claim.verdict:
        case Verdict.REPLAY:
            assert claim.result is not None
            return _replayed(claim.result, f"{name} is done", work)
        case Verdict.BUSY:
            return Waiting(
                f"{name} is being worked on by {claim.holder}; its lease runs until {until}.", left, busy=True
            )
        case Verdict.PAUSED:
            return Waiting(f"{name} is paused until {until}.", left)
        case Verdict.IN_DOUBT:
            return _in_doubt(name, claim.reason, work.order.on_doubt, claim.until)
        case Verdict.LOST_TIME:
            return Waiting(
                f"No call was made: {claim.reason}. What looks new may have been done in the time that is gone. "
                "Run `airflow runguard db acknowledge-restore --reason …` when you know."
            )
        case Verdict.BROKEN:
            return Ended(
                f"{name} is in the ledger but cannot be read: {claim.reason}. No call was made and nothing was "
                f"overwritten. Run `airflow runguard repair '{name}'`.",
                retry=False,
            )
        case _:
            return Ended(_refused(claim), retry=False)


def _refused(claim: Claim) -> str:
    name = claim.identity
    if claim.reason == "payload":
        fields = ", ".join(claim.differing) or "their canonical form"
        return (
            f"{name} was begun with another payload; these differ: {fields}. No call was made and the record is as it "
            f"was. If the change is meant, run `airflow runguard accept-payload '{name}' --reason …`; if it is other "
            "work, give it a key of its own."
        )
    if claim.reason == "calls":
        return (
            f"{name} was begun when the task was cut into other calls (one body, or guard.call by name), some of which "
            "happened or may have; this code would repeat them. No call was made. Bring the calls back as they were, or "
            f"decide about what happened: `airflow runguard explain '{name}'`."
        )
    if claim.reason == "poison":
        return (
            f"{name} was claimed again and again without any outcome: something kills its worker (memory?). No call "
            "was made. Mend that, then clear the task."
        )
    return (
        f"{name} failed for good: its effect may have happened, and a person said to leave it. No call was made. "
        f"Run `airflow runguard explain '{name}'`, and `airflow runguard reopen '{name}' --reason …` to do it anew."
    )


def _in_doubt(
    name: object, why: str, on_doubt: str, until: datetime | None, error: BaseException | None = None
) -> Ended:
    early = f" It is too early to say that it did not happen before {until:%Y-%m-%d %H:%M:%S %Z}." if until else ""
    who = {
        "ask": "A person decides",
        "reconcile": "The next try asks the vendor again; a person may decide",
        "replay": "The next try repeats it under the same vendor key while the vendor remembers that; a person may decide",
    }[on_doubt]
    return Ended(
        f"In doubt: nobody knows whether {name} happened ({why}). It is not sent again blindly. {who}: look it up at "
        f"the vendor (`airflow runguard explain '{name}'` shows what to look for), then run `airflow runguard resolve "
        f"'{name}' --happened [--result JSON] --reason …` or `… --did-not-happen --reason …`.{early}",
        retry=on_doubt != "ask",
        error=error,
    )


def _replayed(result: Result, what: str, work: Work) -> How:
    if result.data is None and result.missing:
        error = ResultNotStored(f"{what}, but its result was not stored ({result.missing}).")
        return Ended(str(error), retry=False, error=error)
    if result.data is None:
        return Done(None, replayed=True)
    try:
        return Done(work.load(result.data), replayed=True)
    except Exception as error:
        missing = ResultNotStored(f"{what}, but its stored result cannot be read ({type(error).__name__}: {error}).")
        return Ended(str(missing), retry=False, error=missing)


def _work_and_leave(writer: Writer, work: Work, guard: GuardContext) -> How:
    try:
        with guard.entered():
            value = work.body(guard)
    except Interrupt as interrupt:
        writer.settle(Settlement(State.PENDING, error=str(interrupt))).result()
        return interrupt.how
    except BaseException as error:
        return _leave_with_error(writer, work, guard, error)
    if isinstance(value, BaseException):
        return _leave_with_error(writer, work, guard, value)  # P9: an exception given back is an error, not a result
    if inspect.iscoroutine(value):
        value.close()
        return _leave_unplanned(writer, guard, "The guarded function is `async def`, so nothing of it ran.", ASYNC_BODY)
    if not guard.body_is_call and not guard.called and not work.allow_no_call:
        return _leave_unplanned(
            writer, guard, "The guarded function made no guard.call, so nothing proves what it did.", NO_CALL
        )
    return _leave_done(writer, work, guard, value, Done(value, replayed=False))


def _leave_done(writer: Writer, work: Work, guard: GuardContext, value: Any, how: How) -> How:
    result = _dumped(work, value)
    outcomes = [Outcome(BODY, result=result)] if guard.body_is_call else []
    written = writer.settle(Settlement(State.DONE, result=result), *outcomes).result()
    if written.verdict == "ok" and written.state is State.DONE:
        return how
    if written.verdict == "ok" and written.state is State.IN_DOUBT:
        return _in_doubt(work.order.identity, "one of its calls is in doubt", work.order.on_doubt, None)
    error = LeaseLost(
        f"{work.order.identity} was taken over, released or changed while this process worked ({written.verdict}). "
        "What it did is kept as evidence."
    )
    return Ended(str(error), retry=True, error=error)


def _leave_unplanned(writer: Writer, guard: GuardContext, what: str, remedy: str) -> How:
    failure = Failure(FailureClass.PLANNING, Effect.NOT_APPLIED, needs_person=True, evidence=what)
    outcomes = [Outcome(BODY, failure=failure, error=what)] if guard.body_is_call else []
    writer.settle(Settlement(State.FAILED, failure=failure, error=what), *outcomes).result()
    error = PlanningError(what, remedy)
    return Ended(str(error), retry=False, error=error)


def _leave_with_error(writer: Writer, work: Work, guard: GuardContext, error: BaseException) -> How:
    signal = work.signal(error)
    if isinstance(signal, HandOver):
        writer.hand_over(signal.seconds).result()
        return Passed(error)
    if isinstance(signal, Decision):
        if guard.body_is_call or guard.called:
            return _leave_done(writer, work, guard, signal.value, Passed(error))
        writer.settle(Settlement(State.PENDING, error=_said(error))).result()
        return Passed(error)

    failure = _of_body(error, work) if guard.body_is_call else guard.failure_behind(error)
    outcomes = [Outcome(BODY, failure=failure, error=_said(error))] if guard.body_is_call else []
    written = writer.settle(Settlement(_state_of(failure), failure=failure, error=_said(error)), *outcomes).result()
    if written.state is State.IN_DOUBT:
        return _in_doubt(work.order.identity, _said(error), work.order.on_doubt, None, error)
    if written.state is State.PAUSED:
        return Waiting(f"{work.order.identity} is paused: {failure.evidence if failure else _said(error)}.")
    if failure is not None and failure.needs_person:
        said = f"{_said(error)}: {failure.evidence}. It had no effect, and retrying does not mend it: correct it, then clear the task."
        return Ended(said, retry=False, error=error)
    return Ended(_said(error), retry=True, error=error)


def _of_body(error: BaseException, work: Work) -> Failure:
    """What an error of a whole body means: the effect is unknown, unless the author or one single request proves more."""
    failure = classify(error)
    if work.single_request or isinstance(error, NotApplied):
        return failure
    return replace(
        failure,
        effect=Effect.UNKNOWN,
        pausable=False,
        final=False,
        evidence=f"{failure.evidence}. That speaks for one request; the body may have made others. Take `guard` as the "
        "first parameter and wrap the request in guard.call, or say single_request=True",
    )


def _state_of(failure: Failure | None) -> State:
    """Where a record goes with an error. Nothing failed for good where the error came from between the calls: the next
    try goes on, and the calls that are done are replayed."""
    if failure is None:
        return State.PENDING
    states = {CallState.IN_DOUBT: State.IN_DOUBT, CallState.PAUSED: State.PAUSED}
    return states.get(outcome_state(failure), State.FAILED)


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:2000]


def _dumped(work: Work, value: Any) -> Result:
    if work.order.store_result == "none":
        return Result(None)
    try:
        return Result(work.dump(value))
    except Exception as error:
        log.warning("The result cannot be stored, so a replay will fail with ResultNotStored: %s", error)
        return Result(None, f"{type(error).__name__}: {error}"[:500])


# -- what the body sees ------------------------------------------------------------------------------------------------

ASYNC_BODY = "Write it as `def`; for an async client use asyncio.run inside it, with await guard.acall(…)."
ASYNC_CALL = "Use `await guard.acall(…)`."
NO_CALL = "Wrap the request in guard.call(name, fn, …), or say allow_no_call=True."
SINGLE_BODY = "This guarded function is one call itself, so it has no calls of its own to make."
EXPLICIT = "Say calls='explicit', or take `guard` as its first parameter."
REOPEN = "`airflow runguard reopen` does it anew."

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
    is unknown, no other is made.
    """

    _writer: Writer
    _work: Work
    _claim: Claim
    called: bool = False
    """Whether any call was made or replayed."""
    _busy: dict[str, object] = field(default_factory=dict)
    _unbooked: set[str] = field(default_factory=set)
    """Calls that may have been sent and whose outcome the writing thread was not given (yet)."""
    _failures: list[tuple[BaseException, Failure]] = field(default_factory=list)

    @property
    def key(self) -> str:
        return self._claim.identity.key

    @property
    def namespace(self) -> str:
        return self._claim.identity.namespace

    @property
    def generation(self) -> int:
        return self._claim.generation

    @property
    def body_is_call(self) -> bool:
        return self._work.order.calls == BODY

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
                if inspect.iscoroutine(value):
                    value.close()
                    raise NotApplied(
                        f"guard.call({name!r}) was given an async function, so nothing was sent.", ASYNC_CALL
                    )
            except BaseException as error:
                self._failed(name, error).result()
                raise
            self._ended(name, value).result()
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
            await self._ended(name, value).waited()
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
                raise Interrupt(self._in_doubt(f"nothing is known of what call {name!r} did before"))
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
                raise Interrupt(Waiting(f"{error.what} Call {name!r} was not made.")) from error
            raise

    def _intent(self, name: str, arguments: dict[str, Any]) -> Answer[IntentAnswer]:
        if any(failure.effect is Effect.UNKNOWN for _, failure in self._failures):
            raise Interrupt(self._in_doubt("an earlier call of this body is in doubt"))
        return self._writer.intent(name, json.dumps(keys.readable(arguments)))

    def _go(self, name: str, answer: IntentAnswer) -> _Go:
        """The ledger's answer to an intent, checked once more right before the call."""
        match answer.verdict:
            case "run":
                if not self._writer.may_call():
                    self._writer.withdraw(name)
                    raise Interrupt(Ended(f"{self._lost()} Call {name!r} was not made.", retry=True))
                self.called = True
                self._unbooked.add(name)
                return _Go(vendor_key=self._vendor_key(name, answer.attempt))
            case "replay":
                assert answer.result is not None
                self.called = True
                how = _replayed(answer.result, f"Call {name!r} of {self._claim.identity} is done", self._work)
                if isinstance(how, Done):
                    return _Go(replay=how)
                assert isinstance(how, Ended)
                raise Interrupt(how)
            case "paused":
                raise Interrupt(Waiting(f"Call {name!r} of {self._claim.identity} is paused."))
            case "failed":
                raise Interrupt(
                    Ended(f"Call {name!r} of {self._claim.identity} failed for good ({answer.error}). {REOPEN}", False)
                )
            case "in_doubt" | "open":
                raise Interrupt(self._in_doubt(f"call {name!r}: {answer.error or 'no answer ever came'}"))
            case _:
                raise Interrupt(Ended(f"{self._lost()} Call {name!r} was not made.", retry=True))

    def _failed(self, name: str, error: BaseException) -> Answer[Written]:
        failure = classify(error)
        self._failures.append((error, failure))
        return self._booked(Outcome(name, failure=failure, error=_said(error)))

    def _ended(self, name: str, value: Any) -> Answer[Written]:
        if isinstance(value, BaseException):  # P9
            self._failed(name, value).result()
            raise value
        return self._booked(Outcome(name, result=_dumped(self._work, value)))

    def _booked(self, outcome: Outcome) -> Answer[Written]:
        answer = self._writer.outcome(outcome)
        self._unbooked.discard(outcome.call)
        return answer

    def _with_key(self, go: _Go, vendor_key_as: str | None, arguments: dict[str, Any]) -> dict[str, Any]:
        return {**arguments, vendor_key_as: go.vendor_key} if vendor_key_as else arguments

    def _vendor_key(self, name: str, attempt: int) -> str:
        return keys.vendor_key(self._writer.ledger.installation, self._claim.identity, name, self.generation, attempt)

    def _in_doubt(self, why: str) -> Ended:
        return _in_doubt(self._claim.identity, why, self._work.order.on_doubt, None)

    def _lost(self) -> str:
        return f"This process is no longer the holder of {self._claim.identity}."
