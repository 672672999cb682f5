"""What a door brings, what it gets back, and what is said to people: the nouns around the algorithm of ``guard.py``.

Frozen values and the sentences of refusals; no I/O. A refusal says what happened, what it means for the effect, and the
command to type.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from airflow_runguard.core.errors import NotApplied, ResultNotStored
from airflow_runguard.core.record import Call, Claim, Holder, Order, Record, Result, Verdict

log = logging.getLogger("airflow_runguard")

BODY = "body"
"""The name of the one call of a function or operator that is a single call."""


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


# -- what a door brings, and what it gets back ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HandOver:
    """A control-flow exception that means: the same task instance comes back within so many seconds."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Decision:
    """A control-flow exception that is the work's answer (skip, branch): booked as result, raised again on replay."""

    value: Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What a door brings.

    :param body: called with the guard (``context.py``) once the record is granted.
    :param dump, load: the result to bytes and back; ``dump`` raises where ``load`` would not give back an equal value.
    :param signal: what a control-flow exception of the body means; ``None`` = it is an error.
    :param single_request: the author's word that the body makes exactly one request; its errors speak for it.
    """

    order: Order
    holder: Holder
    body: Callable[[Any], Any]
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
    """Nothing may be called now; come back (in so many ``seconds``, where the ledger says so).

    :param record_id: the record that is waited for, where there is one.
    :param limited: it may be waited for only so long; else the ledger or a person ends the waiting.
    :param tells: the kind of notice that people get.
    """

    reason: str
    seconds: float | None = None
    busy: bool = False
    record_id: int = 0
    limited: bool = True
    tells: str = ""


@dataclass(frozen=True, slots=True)
class Ended:
    """The try is over.

    :param retry: another try may do better (Airflow's own retries apply); else a person or a command moves it on.
    :param error: the exception that ended the body, where there was one.
    :param tells: the kind of notice that people get.
    """

    message: str
    retry: bool
    error: BaseException | None = None
    tells: str = ""


@dataclass(frozen=True, slots=True)
class InDoubt(Ended):
    """The try is over because nobody knows whether a call happened.

    :param who: answers it: ``ask`` a person, ``reconcile`` with the vendor, ``replay`` (the next try sends it again).
    :param seconds: how soon asking the vendor again makes sense; ``None`` = the vendor cannot say, a person must.
    """

    who: str = "ask"
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Passed:
    """A control-flow exception of the body, booked, to be raised on."""

    signal: BaseException


How = Done | Waiting | Ended | Passed


class Interrupt(BaseException):
    """A call may not be made: the body ends here. Derives from ``BaseException`` so that no body goes on by mistake.

    :param pause: seconds for which the record is paused, where waiting for its quota is the reason.
    """

    def __init__(self, how: Waiting | Ended, pause: float | None = None) -> None:
        super().__init__(how.reason if isinstance(how, Waiting) else how.message)
        self.how, self.pause = how, pause


THAW = "`airflow runguard thaw … --reason …` lets it go on."

# -- what is said ------------------------------------------------------------------------------------------------------


def refusal(claim: Claim, work: Work) -> How:
    """A refusal as a value, with a reason that the user can read."""
    name = claim.identity
    until = f"{claim.until:%Y-%m-%d %H:%M:%S %Z}" if claim.until else ""
    left = (claim.until - claim.now).total_seconds() if claim.until else None
    match claim.verdict:
        case Verdict.REPLAY:
            assert claim.result is not None
            return replayed(claim.result, f"{name} is done", work)
        case Verdict.BUSY:
            return Waiting(
                f"{name} is being worked on by {claim.holder}; its lease runs until {until}.",
                left,
                busy=True,
                record_id=claim.record_id,
            )
        case Verdict.PAUSED:
            return Waiting(f"{name} is paused until {until}.", left, record_id=claim.record_id, limited=False)
        case Verdict.FROZEN:
            frozen = f"{name} waits: {claim.reason}. No call was made. {THAW}"
            return Waiting(frozen, record_id=claim.record_id, limited=False)
        case Verdict.IN_DOUBT:
            # Where repeating was declared safe, this answer means that it no longer is: a person decides.
            on_doubt = "reconcile" if work.order.on_doubt == "reconcile" else "ask"
            return in_doubt(work.order, claim.reason, on_doubt=on_doubt, until=claim.until, seconds=left)
        case Verdict.LOST_TIME:
            return Waiting(
                f"No call was made: {claim.reason}. What looks new may have been done in the time that is gone. "
                "Run `airflow runguard db acknowledge-restore --reason …` when you know.",
                tells="ledger_lost_time",
            )
        case Verdict.BROKEN:
            return Ended(
                f"{name} is in the ledger but cannot be read: {claim.reason}. No call was made and nothing was "
                f"overwritten. Run `airflow runguard repair '{name}'`.",
                retry=False,
                tells="broken",
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
            "happened or may have; this code would repeat them. No call was made. Bring the calls back as they were, "
            f"or decide about what happened: `airflow runguard explain '{name}'`."
        )
    if claim.reason == "pauses":
        return (
            f"{name} waited for its quota as often, or as long, as it may, without any progress. No call was made. "
            "Raise the allowance at the vendor (or max_pause), then clear the task."
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


def in_doubt(
    order: Order,
    why: str,
    *,
    on_doubt: str | None = None,
    until: datetime | None = None,
    seconds: float | None = None,
    error: BaseException | None = None,
) -> InDoubt:
    """:param until: before it (so many ``seconds`` from now), nobody can say that it did not happen."""
    name, on_doubt = order.identity, on_doubt or order.on_doubt
    early = f" It is too early to say that it did not happen before {until:%Y-%m-%d %H:%M:%S %Z}." if until else ""
    call = " [--call NAME: only that call, the rest of the body goes on]" if order.calls == "explicit" else ""
    who = {
        "ask": "A person decides",
        "reconcile": "The next try asks the vendor again; a person may decide",
        "replay": "The next try repeats it under the same vendor key, while the vendor remembers; a person may decide",
    }[on_doubt]
    return InDoubt(
        f"In doubt: nobody knows whether {name} happened ({why}). It is not sent again blindly. {who}: look it up at "
        f"the vendor (`airflow runguard explain '{name}'` shows what to look for), then run `airflow runguard resolve "
        f"'{name}' --happened [--result JSON]{call} --reason …` or `… --did-not-happen --reason …`.{early}",
        retry=on_doubt != "ask",
        error=error,
        who=on_doubt,
        seconds=seconds,
    )


def replayed(result: Result, what: str, work: Work) -> How:
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


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:2000]


def dumped(work: Work, value: Any) -> Result:
    if work.order.store_result == "none":
        return Result(None)
    try:
        return Result(work.dump(value))
    except Exception as error:
        log.warning("The result cannot be stored, so a replay will fail with ResultNotStored: %s", error)
        return Result(None, f"{type(error).__name__}: {error}"[:500])
