"""The one algorithm: enter → work → leave. Every door runs its work through :func:`run`.

Enter asks the ledger for the record, work makes calls (see ``context.py``), leave settles. What comes back is a value
that says how it ended (see ``work.py``); doors turn it into Airflow's words.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

from airflow_runguard.core.context import GuardContext, current_guard, told_to_wait
from airflow_runguard.core.errors import (
    LeaseLost,
    LedgerNotReady,
    LedgerUnavailable,
    NotApplied,
    PlanningError,
    ResultIsError,
    RunGuardError,
)
from airflow_runguard.core.failures.found import unchecked
from airflow_runguard.core.leases import Leases
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.reconcile import Finding, settle
from airflow_runguard.core.record import (
    CallState,
    Claim,
    Effect,
    Failure,
    FailureClass,
    Outcome,
    Settlement,
    State,
    Verdict,
    Witness,
    Written,
)
from airflow_runguard.core.resp import Redis
from airflow_runguard.core.returned import closed, unfinished
from airflow_runguard.core.rows import outcome_state
from airflow_runguard.core.work import (
    BODY,
    Applied,
    Decision,
    Done,
    Doubt,
    Ended,
    HandOver,
    How,
    InDoubt,
    Interrupt,
    Leave,
    Passed,
    Reconcile,
    StillUnknown,
    Submitted,
    Waiting,
    Work,
    dumped,
    in_doubt,
    more_pauses,
    refusal,
    said,
)
from airflow_runguard.core.writer import Writer

__all__ = [
    "Applied",
    "Decision",
    "Done",
    "Doubt",
    "Ended",
    "GuardContext",
    "HandOver",
    "How",
    "InDoubt",
    "Interrupt",
    "NotApplied",
    "Passed",
    "Reconcile",
    "StillUnknown",
    "Submitted",
    "Waiting",
    "Work",
    "current_guard",
    "ready",
    "run",
]

log = logging.getLogger("airflow_runguard")

ASYNC_BODY = "Write it as `def`; for an async client use asyncio.run inside it, with await guard.acall(…)."
CHECK_IT = "Check it in the function (`response.raise_for_status()`), and give back what it says (`response.json()`)."
SOON = 30.0
"""Seconds after which the vendor is asked about a call that has just fallen in doubt."""
NO_MORE_PAUSES = "It has waited as often, or as long, as it may, without progress."
STAYS = 600.0
"""Seconds beyond its slot within which a task that keeps its place must be back."""
NO_CALL = (
    "Wrap the request in guard.call(name, fn, …), or say allow_no_call=True. What it has sent without one is not "
    "booked: look at the vendor before you clear the task, which would send it again."
)


def ready(ledger: Ledger, client: Redis | None) -> Leases:
    """Make sure, once a process, that this ledger may be used: its schema and deployment, and that it did not go back
    in time behind the witness that Redis keeps (P14).

    :raises LedgerNotReady: it may not.
    """
    try:
        ledger.check()
    except LedgerNotReady as error:
        raise _before_any_call(error) from error
    leases = Leases(client, ledger.installation)
    witness = leases.witness()
    if witness is not None:
        ledger.confront(witness)  # if it is gone, the ledger remembers so, and every claim hears it
    return leases


def _before_any_call(error: LedgerNotReady) -> LedgerNotReady:
    return LedgerNotReady(f"{error.what} No call was made.", error.remedy)


def run(ledger: Ledger, leases: Leases, work: Work) -> How:
    """Have the effect of ``work`` once. What the ledger, Redis, the vendor or the body do comes back as a value; only a
    signal that hits the guard itself goes through, after what is known is booked.
    """
    order, holder = work.order, work.holder
    keep = lambda: leases.renew(order.identity, holder.nonce, order.lease)  # noqa: E731
    writer = Writer(ledger, order, holder, keep, work.hide)
    try:
        leases.acquire(order.identity, holder.nonce, order.lease)
        with work.watch("claim"):
            claim = _enter(writer, work)
        if isinstance(claim, Waiting):
            return claim
        if claim.verdict is not Verdict.RUN:
            return refusal(claim, work)
        if not writer.may_call():  # frozen since the claim was sent; a body may be a call, and its intent may be old
            if claim.reentered:  # it may have been sent by an earlier entry: stay its holder, and come back
                writer.hand_over(order.max_hold).result()
                return Waiting(f"The lease on {order.identity} ran out before the work went on.")
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


def _enter(writer: Writer, work: Work) -> Claim | Waiting:
    """Claim; where the record is in doubt and the vendor can be asked, ask and claim again."""
    asked: set[str] = set()
    waits: Finding | None = None
    while True:
        try:
            claim = writer.claim()
        except LedgerUnavailable as error:
            if error.sent:  # it may have been granted all the same
                writer.withdraw_claim()
            raise
        except LedgerNotReady as error:
            raise _before_any_call(error) from error
        except BaseException:  # a signal: likewise
            writer.withdraw_claim()
            raise
        if claim.verdict is not Verdict.IN_DOUBT or work.reconcile is None:
            return claim
        findings = _reconcile(writer, work, work.reconcile, asked)
        if findings is None:
            continue
        waits = next((finding for finding in findings if finding.seconds is not None), waits)
        if any(finding.settled for finding in findings):
            continue
        if waits is None:
            return claim
        return Waiting(
            f"In doubt: call {waits.call!r} of {claim.identity}: {waits.why}. Nothing is sent; it is asked again.",
            waits.seconds,
        )


def _reconcile(writer: Writer, work: Work, reconcile: Reconcile, asked: set[str]) -> list[Finding] | None:
    """Ask about each doubtful call once; ``None`` = it is in doubt no more, so claim again."""
    ledger = writer.ledger
    record = writer.do(lambda: ledger.get(work.order.identity)).result()
    if record is None or record.broken:
        return []
    if record.state is not State.IN_DOUBT:
        return None
    return settle(
        ledger,
        record,
        reconcile,
        lambda value: dumped(work, value),
        skip=asked,
        on_ledger=lambda run: writer.do(run).result(),
        hide=work.hide,
        rules=work.rules,
    )


def _work_and_leave(writer: Writer, work: Work, guard: GuardContext) -> How:
    try:
        with guard.entered():
            value = work.body(guard)
    except Leave as leave:
        return _leave_as(writer, work, guard, leave)
    except BaseException as error:
        if guard.interrupt is not None:
            return _leave_interrupted(writer, work, guard, guard.interrupt)
        return _leave_with_error(writer, work, guard, error)
    if guard.interrupt is not None:  # swallowed (gather, a pool's future that nobody reads): not all of it was done
        return _leave_interrupted(writer, work, guard, guard.interrupt)
    if guard.waits is not None:  # swallowed: waiting mends it, and nothing was done in its place
        return _leave_with_error(writer, work, guard, guard.waits)
    if isinstance(value, BaseException):
        return _leave_with_error(writer, work, guard, value)  # P9: an exception given back is an error, not a result
    lazy = closed(value)
    if lazy and not guard.body_is_call:
        return _leave_unplanned(writer, "The guarded function is async or yields, so not all of it ran.", ASYNC_BODY)
    if not guard.body_is_call and not guard.called and not work.allow_no_call:
        return _leave_unplanned(
            writer, "The guarded function made no guard.call, so nothing proves what it did.", NO_CALL
        )
    if guard.body_is_call:
        if (wrong := _no_result(value, lazy=lazy)) is not None:
            return _leave_with_error(writer, work, guard, wrong)
        guard.warn_of_repeats(BODY, value)
    return _leave_done(writer, work, guard, value, Done(value, replayed=False))


def _no_result(value: object, *, lazy: bool) -> RunGuardError | None:
    """Why what a body that is one call gave back is no result; ``None`` = it is one."""
    if unfinished(value):
        what = f"The guarded function gave back a {type(value).__name__}, whose work may still come."
        return PlanningError(what, ASYNC_BODY if lazy else "Wait for it inside the function.")
    fault = unchecked(value)
    if fault is None or fault.error is None:
        return None
    wrong = ResultIsError(f"The guarded function gave back {fault.error}.", CHECK_IT)
    wrong.__cause__ = fault.error  # judged as if it had been raised
    return wrong


def _leave_interrupted(writer: Writer, work: Work, guard: GuardContext, interrupt: Interrupt) -> How:
    if interrupt.pause is None:
        writer.settle(Settlement(State.PENDING, error=str(interrupt))).result()
        return interrupt.how
    waits = Failure(
        FailureClass.QUOTA, Effect.NOT_APPLIED, pausable=True, resume_after=interrupt.pause, evidence=str(interrupt)
    )
    written = writer.settle(Settlement(State.PAUSED, failure=waits, error=str(interrupt))).result()
    return _paused(written, work, guard, str(interrupt))


def _paused(written: Written, work: Work, guard: GuardContext, why: str) -> How:
    """A record that was left to wait for its quota; the ledger says until when, or that it may wait no longer."""
    if written.state is State.PAUSED and written.resume_at is not None:
        left = (written.resume_at - written.now).total_seconds()
        return Waiting(why, left, record_id=guard.record_id, limited=False)
    if written.state is State.FAILED:
        spent = f"{NO_MORE_PAUSES} {more_pauses(work.order)}"
        return Ended(f"{why} {spent}", retry=False)
    return Waiting(why)


def _leave_as(writer: Writer, work: Work, guard: GuardContext, leave: Leave) -> How:
    settlement = leave.settlement
    if settlement.state is State.DONE:
        settlement = replace(settlement, result=dumped(work, leave.value))
        return _done(writer.settle(settlement).result(), work, leave.how)
    written = writer.settle(settlement).result()
    return _paused(written, work, guard, settlement.error) if settlement.state is State.PAUSED else leave.how


def _leave_done(writer: Writer, work: Work, guard: GuardContext, value: Any, how: How) -> How:
    result = dumped(work, value)
    outcomes = [Outcome(BODY, result=result)] if guard.body_is_call else []
    with work.watch("settle"):
        written = writer.settle(Settlement(State.DONE, result=result), *outcomes).result()
    return _done(written, work, how)


def _done(written: Written, work: Work, how: How) -> How:
    if written.verdict == "ok" and written.state is State.DONE:
        return how
    if written.verdict == "ok" and written.state is State.IN_DOUBT:
        return in_doubt(work.order, "one of its calls is in doubt", seconds=SOON)
    error = LeaseLost(
        f"{work.order.identity} was taken over, released or changed while this process worked ({written.verdict}). "
        "What it did is kept as evidence."
    )
    return Ended(str(error), retry=True, error=error, tells="stale_writer")


def _leave_unplanned(writer: Writer, what: str, remedy: str) -> How:
    failure = Failure(FailureClass.PLANNING, Effect.NOT_APPLIED, needs_person=True, evidence=what)
    writer.settle(Settlement(State.FAILED, failure=failure, error=what)).result()
    error = PlanningError(what, remedy)
    return Ended(str(error), retry=False, error=error)


def _leave_with_error(writer: Writer, work: Work, guard: GuardContext, error: BaseException) -> How:
    signal = work.signal(error)
    if isinstance(signal, HandOver):
        writer.hand_over(signal.seconds, error=signal.anew).result()
        return Passed(error)
    if isinstance(signal, Decision):
        if guard.waits is not None:
            return _leave_with_error(writer, work, guard, guard.waits)
        if guard.body_is_call or guard.called:  # of a batch: its other items are still to be done
            return _leave_done(writer, work, guard, signal.value, Passed(error))
        writer.settle(Settlement(State.PENDING, error=said(error))).result()
        return Passed(error)

    failure = guard.failure_behind(error) if not guard.body_is_call else guard.jobs.judged(error)
    meant = guard.classified(error) if guard.body_is_call and failure is None else None
    if meant is not None and (told := _told_to_wait_where_it_is(meant, work, guard)) is not None:
        written = writer.hand_over(STAYS, told, said(error)).result()
        if written.held and written.resume_at is not None:
            left = (written.resume_at - written.now).total_seconds()
            why = (
                f"{work.order.identity} was told to wait after it had deferred: {told.evidence}. It goes on from there."
            )
            return Waiting(why, left, record_id=guard.record_id, limited=False, keeps_place=True)
        if written.verdict == "ok":
            return in_doubt(
                work.order, f"{said(error)}. {NO_MORE_PAUSES} A person decides.", on_doubt="ask", error=error
            )
    if meant is not None:
        failure = of_body(error, meant, work, guard)
    outcomes = [Outcome(BODY, failure=failure, error=said(error))] if guard.body_is_call else []
    if guard.body_is_call:
        guard.warn_of_repeats(BODY, error)
    with work.watch("settle"):
        written = writer.settle(Settlement(_state_of(failure), failure=failure, error=said(error)), *outcomes).result()
    if written.state is State.IN_DOUBT and guard.jobs.go_on(error):
        what = f"{said(error)}. The job goes on at the vendor; nothing is sent again, this task comes back to it."
        return Waiting(what, SOON, record_id=guard.record_id)
    if written.state is State.IN_DOUBT:
        return in_doubt(work.order, said(error), seconds=SOON, error=error)
    if failure is not None and failure.pausable and written.state in (State.PAUSED, State.FAILED):
        return _paused(written, work, guard, f"{work.order.identity} is paused: {failure.evidence}.")
    if failure is not None and failure.needs_person:
        mend = "It had no effect, and retrying does not mend it: correct it, then clear the task."
        return Ended(f"{said(error)}: {failure.evidence}. {mend}", retry=False, error=error)
    return Ended(said(error), retry=True, error=error)


def _told_to_wait_where_it_is(meant: Failure, work: Work, guard: GuardContext) -> Failure | None:
    """The quota that stopped a body which had deferred, makes one request, and may have made it before: its effect is
    unknown, and waiting and going on from there sends nothing again; ``None`` = it is no such error."""
    stays = guard.reentered and work.single_request and not work.requests_here and not guard.answered
    return told_to_wait(meant) if stays else None


def of_body(error: BaseException, meant: Failure, work: Work, guard: GuardContext) -> Failure:
    """What an error of a whole body means: an unknown effect, unless the author or one single request proves more.

    :param meant: what it means where it is of one request.

    A quota is one of the vendor's, whatever is unknown of this body's effect: it stays pausable, which closes the gate.
    """
    failure = guard.failure_behind(error) or meant
    earlier = guard.reentered and not work.requests_here
    if (work.single_request and not earlier and not guard.answered) or isinstance(error, NotApplied):
        return failure
    if not work.single_request:
        why = (
            "That speaks for one request; the body may have made others. Take `guard` as the first parameter and wrap "
            "the request in guard.call, or say single_request=True"
        )
    elif earlier:
        why = (
            "It came after the body had deferred, so it says nothing about what was sent before. If a resume method "
            "makes the request, name it: single_request='the_method'"
        )
    else:
        why = "It came after the request was answered, so it says nothing about what was sent"
    waits = failure.pausable and failure.failure_class is FailureClass.QUOTA
    evidence = f"{failure.evidence}. {why}"
    return replace(failure, effect=Effect.UNKNOWN, pausable=waits, final=False, evidence=evidence)


def _state_of(failure: Failure | None) -> State:
    """Where a record goes with an error. Nothing failed for good where the error came from between the calls: the next
    try goes on, and the calls that are done are replayed."""
    if failure is None:
        return State.PENDING
    states = {CallState.IN_DOUBT: State.IN_DOUBT, CallState.PAUSED: State.PAUSED}
    return states.get(outcome_state(failure), State.FAILED)
