"""What a door brings, what it gets back, and what is said to people: the nouns around the algorithm of ``guard.py``.

Frozen values and the sentences of refusals; no I/O. A refusal says what happened, what it means for the effect, and the
command to type.
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Protocol

from airflow_runguard.core.errors import NotApplied, ResultNotStored
from airflow_runguard.core.failures import Family, Rule
from airflow_runguard.core.record import (
    FOR_GOOD,
    Call,
    Claim,
    Failure,
    Holder,
    Order,
    Record,
    Result,
    Settlement,
    Verdict,
)
from airflow_runguard.core.series import Place

log = logging.getLogger("airflow_runguard")

IN_SQL = "runguard.sql"
"""In the intent of a call of ``guard.sql``: the Connection of its target. A call's argument cannot have this name."""
LARGEST_RESULT = 256 * 1024 * 1024
"""Bytes of a stored result at most. PostgreSQL takes a message of a gigabyte, and an item's result is sent as text,
twice as long."""
NOT_STORED: Any = object()
"""The result of something that happened and whose result is not known (any more)."""

BODY = "body"
"""The name of the one call of a function or operator that is a single call."""


@dataclass(frozen=True, slots=True)
class Applied:
    """The vendor says that it happened, with this result.

    :param reference: the vendor's own name for it, kept with the call.
    """

    result: Any = None
    reference: str | None = None


@dataclass(frozen=True, slots=True)
class StillUnknown:
    """The vendor could not say. :param seconds: after which it is worth asking again, where that is known."""

    reason: str = ""
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Submitted:
    """The vendor has the job that the call submitted, under this name: the next try attaches to it."""

    external_id: str


@dataclass(frozen=True, slots=True)
class Fenced:
    """It did not happen, and whoever might still have brought it about can no longer: proof at any time, while a look
    that finds nothing is proof only after the call can no longer arrive."""

    what: str


@dataclass(frozen=True, slots=True)
class Doubt:
    """What a reconcile function is asked about.

    :param vendor_key: the idempotency key that the call carried.
    :param intent: the call's readable arguments (for a whole body: the order's readable fields).
    :param now: the ledger's time when the asking began; count from it, never by this machine's clock.
    :param alone: it is the only call of its order so far, so that what is found under the order's key is this call's.
    """

    record: Record
    call: Call
    vendor_key: str
    intent: Any
    now: datetime
    alone: bool

    @property
    def external_id(self) -> str:
        """The vendor's own name for it, where ``guard.remember`` kept one; else ''."""
        return self.call.external_id


Answer = Applied | NotApplied | StillUnknown | Submitted
Reconcile = Callable[[Doubt], Answer | Fenced | Awaitable[Answer] | None]
"""A function that asks the vendor; ``None`` = this doubt is none that it can ask about."""


@dataclass(frozen=True, slots=True)
class Marker:
    """By what a target database knows one call of ``guard.sql``.

    :param key: the call's vendor key.
    :param stores: whether the result is kept; then ``dump`` and ``load`` give it back equal.
    """

    key: str
    fence: int
    stores: bool
    dump: Callable[[Any], Result]
    load: Callable[[bytes], Any]


class Transaction(Protocol):
    """A call's effect in a database that keeps the proof beside it (``sqlguard.py``)."""

    def make(self, marker: Marker, fn: Callable[[Any], Any], accept: Callable[[Any], None]) -> Any: ...

    def judge(self, error: BaseException) -> Failure: ...


# -- what a door brings, and what it gets back ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HandOver:
    """A control-flow exception that means: the same task instance comes back within so many seconds.

    :param anew: why it only begins to wait anew; '' = the work has gone on.
    """

    seconds: float
    anew: str = ""


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
    :param hide: masks what is stored for people to read.
    :param transaction: opens a database for ``guard.sql``, by the name of its Connection.
    :param single_request: the author's word that the body makes exactly one request; its errors speak for it.
    :param rules: the author's own rules, asked before all others whenever an error or an answer is judged.
    :param requests_here: the author's word that it is made by this entry, and by none before it.
    :param watch: put around the ``claim``, each ``call <name>`` and the ``settle``, to be timed. It may not raise.
    """

    order: Order
    holder: Holder
    body: Callable[[Any], Any]
    dump: Callable[[Any], bytes]
    load: Callable[[bytes], Any]
    signal: Callable[[BaseException], HandOver | Decision | None] = lambda error: None
    reconcile: Reconcile | None = None
    hide: Callable[[Any], Any] = lambda value: value
    transaction: Callable[[str], Transaction] | None = None
    rules: tuple[Rule | Family, ...] = ()
    single_request: bool = False
    requests_here: bool = False
    allow_no_call: bool = False
    watch: Callable[[str], AbstractContextManager[None]] = lambda what: nullcontext()


@dataclass(frozen=True, slots=True)
class Done:
    """The effect happened, now or before; ``value`` equals the first result."""

    value: Any
    replayed: bool


@dataclass(frozen=True, slots=True)
class Waiting:
    """Nothing may be called now; come back (in so many ``seconds``, where the ledger says so).

    :param record_id: the record that is waited for, where there is one.
    :param place: the place in a series that may not begin yet.
    :param limited: it may be waited for only so long; else the ledger or a person ends the waiting.
    :param tells: the kind of notice that people get.
    :param keeps_place: a body that had deferred goes on where it was, since what it did before is not done again.
    """

    reason: str
    seconds: float | None = None
    busy: bool = False
    record_id: int = 0
    place: Place | None = None
    limited: bool = True
    tells: str = ""
    keeps_place: bool = False


@dataclass(frozen=True, slots=True)
class Ended:
    """The try is over.

    :param retry: another try may do better (Airflow's own retries apply); else a person or a command moves it on.
    :param skip: it is to be skipped, as its author said.
    :param error: the exception that ended the body, where there was one.
    :param value: what there is to give all the same (the summary of a batch).
    :param tells: the kind of notice that people get. :param about: the record that it is about, where it is another.
    """

    message: str
    retry: bool
    error: BaseException | None = None
    value: Any = None
    tells: str = ""
    about: str = ""
    skip: bool = False


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


class Leave(BaseException):
    """A body that knows by itself how its record is to be left: a batch. Nothing else raises it.

    :param value: what ``settlement`` books as the result, where it is ``done``.
    """

    def __init__(self, settlement: Settlement, how: How, value: Any = None) -> None:
        super().__init__(settlement.error)
        self.settlement, self.how, self.value = settlement, how, value


BRING_BACK = (
    "Let the class that it is of be found again where it was (leave an alias under its old name, and allow it in "
    "[core] allowed_deserialization_classes), then clear the task. Ordering it anew would make the call again."
)
KEYLESS = (
    "on_doubt='replay' sends again what is in doubt, but the vendor is given no key here by which it could know the "
    "second time: unless the same request twice has one effect, that is a second charge."
)
THAW = "`airflow runguard thaw … --reason …` lets it go on."

# -- what is said ------------------------------------------------------------------------------------------------------


def more_pauses(order: Order) -> str:
    """What lets work go on whose budget of pauses is spent."""
    return (
        f"Raise the allowance at the vendor and say so with {_lets_go(order)} (or raise max_pauses or max_pause), then "
        "clear the task."
    )


def _lets_go(order: Order) -> str:
    gate = f"quota open {shlex.quote(order.gate)} {order.identity.where}" if order.gate else ""
    it = gate.rstrip() or f"resume {order.identity.typed}"
    return f"`airflow runguard {it} --reason …`"


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
        case Verdict.PAUSED if left is None or left > FOR_GOOD:
            what = f"gate {work.order.gate}" if work.order.gate else "it"
            waits = f"{name} waits until somebody opens {what}: {_lets_go(work.order)}. No call was made."
            return Waiting(waits, record_id=claim.record_id, limited=False)
        case Verdict.PAUSED:
            return Waiting(f"{name} is paused until {until}.", left, record_id=claim.record_id, limited=False)
        case Verdict.PREVIOUS:
            return _previous(claim, work.order)
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
                "Run `airflow runguard db acknowledge-restore --lost-since TIME --reason …` when you know.",
                tells="ledger_lost_time",
            )
        case Verdict.BROKEN:
            return Ended(
                f"{name} is in the ledger but cannot be read: {claim.reason}. No call was made and nothing was "
                f"overwritten. Run `airflow runguard repair {name.typed}`.",
                retry=False,
                tells="broken",
            )
        case _:
            return Ended(_refused(claim, work.order), retry=False)


def _previous(claim: Claim, order: Order) -> How:
    assert claim.before is not None
    assert order.place is not None
    before = claim.before
    said = f"{claim.identity} was not begun. {before.sentence(order.place.series)} No call was made."
    if before.verdict == "wait":
        return Waiting(said, before.seconds, place=order.place, limited=before.standing == "absent")
    if before.standing == "broken":
        return Ended(said, retry=False, tells="broken", about=before.name)
    return Ended(said, retry=False, skip=before.verdict == "skip")


def _refused(claim: Claim, order: Order) -> str:
    name = claim.identity
    if claim.reason == "place":
        return (
            f"{name} says that it stands where another record of its series stands. No call was made. Name the series "
            "by what makes them two jobs (`series='payout/{{ args.account }}'`), or give it a place of its own."
        )
    if claim.reason == "renamed":
        return (
            f"{name} is only a former name of {claim.holder}: what was ordered under it is that record, and may have "
            "happened. No call was made. If this is that work, order it by its present name (`airflow runguard explain "
            f"'{claim.holder}'`); if it is other work, give it a key of its own."
        )
    if claim.reason == "payload":
        fields = ", ".join(claim.differing) or "their canonical form"
        return (
            f"{name} was begun with another payload; these differ: {fields}. No call was made and the record is as it "
            f"was. If it is the same work in other words, run `airflow runguard accept-payload {name.typed} --reason "
            "…` (what is done is then given back, and nothing is sent for the new payload); if it is other work, give "
            "it a key of its own."
        )
    if claim.reason == "calls":
        return (
            f"{name} was begun when the task was cut into other calls (one body, or guard.call by name), some of which "
            "happened or may have; this code would repeat them. No call was made. Bring the calls back as they were, "
            f"or decide about what happened: `airflow runguard explain {name.typed}`."
        )
    if claim.reason == "pauses":
        return (
            f"{name} waited for its quota as often, or as long, as it may, without any progress. No call was made. "
            f"{more_pauses(order)}"
        )
    if claim.reason == "poison":
        return (
            f"{name} was claimed again and again without any outcome: something kills its worker (memory?). No call "
            "was made. Mend that, then clear the task."
        )
    return (
        f"{name} failed for good: its effect may have happened, and a person said to leave it. No call was made. "
        f"Run `airflow runguard explain {name.typed}`, and `airflow runguard reopen {name.typed} --reason …` to do it "
        "anew."
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
        "reconcile": "The task asks the vendor; a person may decide",
        "replay": "The next try repeats it under the same vendor key, while the vendor remembers; a person may decide",
    }[on_doubt]
    return InDoubt(
        f"In doubt: nobody knows whether {name} happened ({why}). It is not sent again blindly. {who}: look it up at "
        f"the vendor (`airflow runguard explain {name.typed}` shows what to look for), then run `airflow runguard "
        f"resolve {name.typed} --happened [--result JSON]{call} --reason …` or "
        f"`… --did-not-happen --as-of TIME --reason …`.{early}",
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
        why = f"{what}, but its stored result cannot be read ({type(error).__name__}: {error})."
        missing = ResultNotStored(why, BRING_BACK)
        return Ended(str(missing), retry=False, error=missing)


def said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:2000]


def dumped(work: Work, value: Any) -> Result:
    return Result(None) if work.order.store_result == "none" else stored(work.dump, value)


def stored(dump: Callable[[Any], bytes], value: Any) -> Result:
    """A result as the ledger takes it; or why it does not."""
    try:
        data = dump(value)
        if len(data) > LARGEST_RESULT:
            raise ValueError(f"it has {len(data)} bytes, and a result may have {LARGEST_RESULT}")
    except Exception as error:
        log.warning("The result cannot be stored, so a replay will fail with ResultNotStored: %s", error)
        return Result(None, f"{type(error).__name__}: {error}"[:500])
    return Result(data)
