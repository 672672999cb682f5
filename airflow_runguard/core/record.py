"""The nouns: states, classes, effects, transitions, and the values that the ledger gives and takes.

Everything here is frozen and does no I/O. The SQL has the same words in its columns, CHECKs and in
``runguard.transition``, whose rows are :data:`TRANSITIONS`. Start reading here, then go to ``guard.py``.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any

from airflow_runguard.core.errors import PlanningError
from airflow_runguard.core.series import Before, Place

SCHEMA_VERSION = 1
"""The version of the ledger's tables and functions that this code speaks."""

POSITIVE = (
    "lease",
    "max_hold",
    "max_call_time",
    "max_claims",
    "key_lifetime",
    "resume_rate",
    "max_pauses",
    "max_pause",
)

MAX_KEY_LENGTH = 512
"""Characters in a key or namespace; longer ones are refused, never cut."""
FOR_GOOD = 3660 * 86_400.0
"""Seconds. Who closes a gate for longer means no time (and Python knows none after the year 9999)."""


class State(StrEnum):
    """Where a record stands. Each member says what is true, and who moves it on."""

    PENDING = "pending"
    """Not started, or proven not to have happened. The next claim moves it on."""
    RUNNING = "running"
    """A holder works on it until ``lease_until``. The holder moves it on; if it died, the next claim or a sweep."""
    DONE = "done"
    """The effect happened and the result is booked. Nobody moves it on, except a person who reopens it;
    of a batch also a claim, or a late outcome."""
    FAILED = "failed"
    """Waiting will not mend it. A claim moves it on where ``effect`` is ``not_applied``, else a person."""
    PAUSED = "paused"
    """Waiting will mend it. A claim moves it on at ``resume_at``."""
    IN_DOUBT = "in_doubt"
    """Nobody knows whether the effect happened. The vendor's answer moves it on, a person, or a late
    outcome; a claim only of a batch, or where repeating was declared safe: never a blind retry."""


class FailureClass(StrEnum):
    """Why it did not work."""

    TIMEOUT = "timeout"
    QUOTA = "quota"
    VALIDATION = "validation"
    PROCESSING = "processing"
    PLANNING = "planning"
    """Found before any call."""
    UNKNOWN = "unknown"


class Effect(StrEnum):
    """What is known about the effect."""

    NOT_APPLIED = "not_applied"
    UNKNOWN = "unknown"
    APPLIED = "applied"


class Completeness(StrEnum):
    FULL = "full"
    PARTIAL = "partial"
    NONE = "none"


class CallState(StrEnum):
    """Where one call of a record stands."""

    PENDING = "pending"
    """Proven not to have happened."""
    STARTED = "started"
    """Its intent is committed; its outcome is not."""
    DONE = "done"
    FAILED = "failed"
    """It provably had no effect, or (``effect`` = ``applied``) its result was refused."""
    PAUSED = "paused"
    IN_DOUBT = "in_doubt"


@dataclass(frozen=True, slots=True)
class Transition:
    """One arrow of the state machine; the pair of states is what the database checks."""

    source: State
    target: State
    mover: str
    when: str


TRANSITIONS: tuple[Transition, ...] = (
    Transition(State.PENDING, State.RUNNING, "claim", "always"),
    Transition(State.PENDING, State.PAUSED, "claim", "its gate is closed: it waits without having begun"),
    Transition(State.PENDING, State.FAILED, "claim", "its gate is closed for longer than it may wait"),
    Transition(State.PENDING, State.DONE, "person", "it was done by hand"),
    Transition(State.PENDING, State.IN_DOUBT, "late outcome", "a stale holder reports that its call was applied"),
    Transition(State.RUNNING, State.RUNNING, "claim", "lease past and no open call, or its own re-entry; fence + 1"),
    Transition(State.RUNNING, State.DONE, "holder", "the effect happened and the result is booked"),
    Transition(State.RUNNING, State.FAILED, "holder", "waiting will not mend it; or max_claims without an outcome"),
    Transition(
        State.RUNNING,
        State.PAUSED,
        "holder, claim",
        "waiting will mend it; or it called nothing, its lease is past and its gate is closed",
    ),
    Transition(State.RUNNING, State.IN_DOUBT, "holder, claim, sweep", "a call's outcome is unknown"),
    Transition(State.RUNNING, State.PENDING, "holder, sweep", "nothing is open and nothing failed for good"),
    Transition(State.PAUSED, State.RUNNING, "claim", "resume_at has come"),
    Transition(State.PAUSED, State.DONE, "person", "it was done by hand"),
    Transition(State.PAUSED, State.FAILED, "claim", "the budget of pauses is spent"),
    Transition(State.PAUSED, State.IN_DOUBT, "late outcome", "a stale holder reports that its call was applied"),
    Transition(State.FAILED, State.RUNNING, "claim", "effect = not_applied"),
    Transition(State.FAILED, State.PAUSED, "claim", "effect = not_applied, and its gate is closed"),
    Transition(State.FAILED, State.DONE, "person", "it happened after all"),
    Transition(State.FAILED, State.IN_DOUBT, "person, late outcome", "it may have happened after all"),
    Transition(State.FAILED, State.PENDING, "person", "reopen: generation + 1"),
    Transition(State.IN_DOUBT, State.DONE, "reconcile, person, late outcome", "it happened"),
    Transition(State.IN_DOUBT, State.PENDING, "reconcile, person, late outcome", "it did not happen"),
    Transition(State.IN_DOUBT, State.PAUSED, "late outcome", "its last caller was told to wait: it did not happen"),
    Transition(State.IN_DOUBT, State.FAILED, "person, late outcome", "leave it; or it was refused for good"),
    Transition(State.IN_DOUBT, State.RUNNING, "claim", "repeating was declared safe (on_doubt='replay'); or a batch"),
    Transition(State.DONE, State.PENDING, "person", "reopen: generation + 1"),
    Transition(State.DONE, State.RUNNING, "claim", "a batch, whose list may have grown; what is done stays done"),
    Transition(State.DONE, State.IN_DOUBT, "claim, late outcome", "a batch: more of it may have happened"),
)


@dataclass(frozen=True, slots=True)
class Identity:
    """The full name of one piece of business work: deployment / namespace / key."""

    deployment: str
    namespace: str
    key: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.key}"

    @property
    def where(self) -> str:
        """What a command needs besides the name. Left to itself it means the Airflow's own record, and not the one of
        the same name that ``dag.test()`` made (``production~test``)."""
        return f"--deployment={shlex.quote(self.deployment)}" if "~" in self.deployment else ""

    @property
    def typed(self) -> str:
        """The name as it is typed after a command."""
        return f"'{self}' {self.where}".rstrip()


@dataclass(frozen=True, slots=True)
class Payload:
    """The order itself, in canonical form (see ``keys.py``).

    :param version: of the canonical form; a record is compared under the version it was booked with.
    :param digest: SHA-256 hex of the whole.
    :param fields: per-field SHA-256 hex, so that a refusal can name the fields that differ.
    :param readable: the readable fields, JSON-safe, so that a reconciler or a person has something to look up by.
    """

    version: int
    digest: str
    fields: Mapping[str, str]
    readable: Mapping[str, Any] = field(default_factory=dict)


OBSERVER = "observed:"
"""What the nonce of one that only observes begins with: it holds nothing up, and settles only what observers held."""


@dataclass(frozen=True, slots=True)
class Holder:
    """Who works on a record: one attempt of one task instance, in one process.

    :param nonce: new for every entry; makes the repetition of a claim whose answer was lost recognisable.
    :param ti_id: Airflow's ``ti.id``: the same over deferral and reschedule, new on retry and clear.
    """

    nonce: str
    ti_id: str = ""
    dag_id: str = ""
    task_id: str = ""
    run_id: str = ""
    try_number: int = 0
    map_index: int = -1
    host: str = ""
    pid: int = 0

    @property
    def observes(self) -> bool:
        """Nothing held this attempt up: whatever the ledger says, Airflow runs such a task again."""
        return self.nonce.startswith(OBSERVER)

    def __str__(self) -> str:
        where = f"{self.host}:{self.pid}" if self.host else "an unnamed process"
        if not self.dag_id:
            return where
        return f"{self.dag_id}.{self.task_id} run {self.run_id} try {self.try_number} on {where}"


@dataclass(frozen=True, slots=True)
class Failure:
    """What an error means: the one answer of the one classifier (``failures/``).

    :param failure_class: why it did not work.
    :param effect: what is known about the effect, over *every* attempt that the client library made.
    :param pausable: waiting will mend it.
    :param resume_after: seconds until the next call may be made; ``None`` = the source gives no usable hint.
    :param floor: seconds below which a sensible wait may not fall.
    :param needs_person: waiting and retrying do not mend it; somebody must act.
    :param final: the vendor answered with a final refusal (a decline), which it may save under the vendor key.
    :param evidence: one readable line: the rule and what it saw.
    """

    failure_class: FailureClass
    effect: Effect
    pausable: bool = False
    resume_after: float | None = None
    floor: float | None = None
    needs_person: bool = False
    final: bool = False
    evidence: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """A result as it is stored: the serialised bytes, or only the note that there is none.

    :param data: the serialised value; ``None`` where it was not stored.
    :param missing: why ``data`` is ``None`` ('' where the author said ``store_result="none"``).
    """

    data: bytes | None
    missing: str = ""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one call ended in: a result (``failure`` is ``None``) or a failure.

    :param unsent: it was not and will not be made: an item of a batch stands again as if it had not been asked for.
    """

    call: str
    result: Result | None = None
    failure: Failure | None = None
    error: str = ""
    unsent: bool = False


@dataclass(frozen=True, slots=True)
class Settlement:
    """How a holder leaves its record: the state it asks for, and what to show. The ledger may know of doubt that the
    holder does not, and then books ``in_doubt`` instead.
    """

    state: State
    result: Result | None = None
    failure: Failure | None = None
    error: str = ""
    completeness: Completeness = Completeness.FULL


def resent_within(key_lifetime: float, max_call_time: float) -> float:
    """Seconds from the first intent under a vendor key, within which a doubt may be sent again under it. What is sent
    may arrive ``max_call_time`` later, and then the vendor must still know the key.

    :raises PlanningError: there are none.
    """
    if key_lifetime <= max_call_time:
        raise PlanningError(
            f"on_doubt='replay' could send nothing again: a request may need {max_call_time:.10g} s (max_call_time), "
            f"and the vendor knows its key for no longer than {key_lifetime:.10g} s (key_lifetime).",
            "Say a max_call_time below key_lifetime and above your client's timeouts, or on_doubt='ask'.",
        )
    return key_lifetime - max_call_time


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What is to be done once, and under which rules. Times are seconds.

    :param calls: ``body`` = the whole function or operator is one call; ``explicit`` = it makes its calls itself;
        ``batch`` = each item of a list is a call. A word of its own, since a batch is entered again although some items
        are in doubt, and after it is done (its list may have grown).
    :param on_doubt: who answers a doubt: ``ask`` a person, ``reconcile`` with the vendor, ``replay`` under one key.
    :param store_result: ``all`` = the serialised bytes; ``digest`` = only their SHA-256; ``none`` = nobody reads it.
    :param lease: how long a silent holder is believed to live; renewed at a third of it.
    :param max_hold: beyond it a holder is not believed, however diligently it renews.
    :param max_call_time: how long after its intent a call may still reach the vendor.
    :param max_claims: so many claims in a row without any booked outcome are poison.
    :param key_lifetime: how long the vendor remembers an idempotency key; see ``resent_within``.
    :param gate: the vendor allowance that is asked before each call (``quota=``).
    :param resume_rate: so many of those that wait at the gate go on each second, where the gate has no rate of its own.
    :param max_pauses, max_pause: so often, and so long in all, it waits without progress; then a person.
    :param partition: of Airflow's run, to find it by.
    :param amount, currency: what is at stake, where the author says so.
    :param place: where it stands in its series, where it is of one.
    :param run_at: when Airflow wanted this run; decides whether "absent" is believed after lost time (P14).
    """

    identity: Identity
    payload: Payload
    calls: str = "body"
    on_doubt: str = "ask"
    store_result: str = "all"
    lease: float = 30.0
    max_hold: float = 21_600.0
    max_call_time: float = 600.0
    max_claims: int = 5
    key_lifetime: float = 86_400.0
    run_at: datetime | None = None
    gate: str | None = None
    resume_rate: float = 5.0
    max_pauses: int = 1000
    max_pause: float = 604_800.0
    partition: str | None = None
    amount: Decimal | None = None
    currency: str | None = None
    place: Place | None = None

    @property
    def resent_within(self) -> float | None:
        """:func:`resent_within`; ``None`` = not at all."""
        return resent_within(self.key_lifetime, self.max_call_time) if self.on_doubt == "replay" else None

    def __post_init__(self) -> None:
        for name, allowed in (
            ("calls", ("body", "explicit", "batch")),
            ("on_doubt", ("ask", "replay", "reconcile")),
            ("store_result", ("all", "digest", "none")),
        ):
            if getattr(self, name) not in allowed:
                raise PlanningError(f"{name}={getattr(self, name)!r} is none of {', '.join(allowed)}.")
        for name in POSITIVE:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 10**9:
                raise PlanningError(f"{name} must be a positive number (of seconds, or of claims), not {value!r}.")
        if self.on_doubt == "replay":
            resent_within(self.key_lifetime, self.max_call_time)


class Verdict(StrEnum):
    """What a claim may be answered. Only ``RUN`` allows a call."""

    RUN = "run"
    REPLAY = "replay"
    """Done: here is the stored result."""
    BUSY = "busy"
    """Another holder lives; wait."""
    PAUSED = "paused"
    """Not before ``until``."""
    IN_DOUBT = "in_doubt"
    """Nobody knows whether the effect happened."""
    FROZEN = "frozen"
    """A person stopped all calls in its scope; wait."""
    PREVIOUS = "previous"
    """The previous one of its series is not complete; ``before`` says what follows from that."""
    REFUSED = "refused"
    """Other payload, failed for good, poison, a spent budget of pauses, another's place, or a former name; ``reason``
    says which."""
    BROKEN = "broken"
    """Present but unreadable; a person repairs it."""
    LOST_TIME = "lost_time"
    """The ledger is not the one it was (restored, failed over, copied); a person acknowledges it."""


@dataclass(frozen=True, slots=True)
class Claim:
    """The ledger's answer to a claim. A refusal is a value: match on ``verdict``.

    :param now: the database's time of the answer.
    :param attempt: of the body call, where the claim also booked its intent.
    :param reentered: the body was begun by an earlier entry (a deferral came back), so it may have been sent.
    :param holder: busy: who has it; refused, because it was renamed: its present name.
    :param until: busy: ``lease_until``; paused: ``resume_at``; in doubt: ``no_later_than``.
    :param differing: refused for its payload: the fields that differ.
    """

    verdict: Verdict
    identity: Identity
    now: datetime
    reason: str = ""
    record_id: int = 0
    generation: int = 0
    fence: int = 0
    attempt: int = 0
    reentered: bool = False
    until: datetime | None = None
    holder: str = ""
    result: Result | None = None
    differing: tuple[str, ...] = ()
    before: Before | None = None


@dataclass(frozen=True, slots=True)
class Observed:
    """What came of telling the ledger about a task that nothing holds up.

    :param verdict: ``booked``; ``again`` (known already); ``duplicate`` (a guard would not have begun it: ``said``);
        ``late`` (another one holds the record: kept as an event); ``broken``.
    """

    verdict: str
    said: str


@dataclass(frozen=True, slots=True)
class Witness:
    """An event that somebody outside the ledger remembers, to notice when the ledger goes back in time (P14).

    :param mark: the nonce of the holder that booked it; another event of the same number has another one.
    """

    epoch: int
    event_id: int
    mark: str


@dataclass(frozen=True, slots=True)
class Grant:
    """The right to work on a record: what every write of a holder is guarded by."""

    identity: Identity
    record_id: int
    generation: int
    fence: int


@dataclass(frozen=True, slots=True)
class IntentAnswer:
    """The ledger's answer to one intent. Only ``run`` allows the call.

    :param verdict: ``run``; ``attach`` (it was submitted before: take up its job, send nothing); ``replay`` (the call
        is done: here is its result); or why not: ``in_doubt``, ``paused``, ``gated`` (the gate is closed), ``frozen``
        (a person stopped it), ``failed``, ``broken``, ``open`` (another holder's), ``lost`` (this holder is not, or no
        longer, the holder).
    :param until: ``run``: the time until which the call may still reach the vendor; ``paused``, ``gated``: when it may
        be made.
    """

    verdict: str
    attempt: int = 0
    until: datetime | None = None
    result: Result | None = None
    error: str = ""


@dataclass(frozen=True, slots=True)
class Written:
    """The ledger's answer to a holder's write.

    :param verdict: ``ok``; ``lost`` (another holder, a person or a new generation came first); ``missing`` (the ledger
        lost time); ``broken``.
    :param state: of the record now. A holder goes on only while it is ``running``.
    :param until: the lease.
    :param resume_at: when a paused record may be claimed again.
    """

    verdict: str
    state: State | None
    now: datetime
    until: datetime | None
    intents: Mapping[str, IntentAnswer]
    event_id: int = 0
    """The last event booked by this write; 0 = none."""
    resume_at: datetime | None = None

    @property
    def held(self) -> bool:
        return self.verdict == "ok" and self.state is State.RUNNING


@dataclass(frozen=True, slots=True)
class Call:
    """One external effect under a record, as the ledger has it."""

    name: str
    generation: int
    state: CallState | None
    """``None`` = the line has a word there that is no state."""
    attempt: int
    fence: int
    intent_at: datetime | None
    no_later_than: datetime | None
    first_intent_at: datetime | None
    first_unknown_at: datetime | None
    outcome_at: datetime | None
    effect: Effect | None
    failure_class: FailureClass | None
    error: str
    evidence: str
    external_id: str
    submitted: bool
    """``external_id`` names a job that was submitted."""
    attachable: bool
    """A later holder attaches to that job, and sends nothing."""
    earlier_key: bool
    """In doubt, since a stale holder says that it was applied, perhaps under a vendor key before the present one."""
    intent: Mapping[str, Any]
    result_missing: str
    """Why a result that should be there is not; '' = it is there, or none is kept."""


@dataclass(frozen=True, slots=True)
class Event:
    """One line of a record's history; written in the same transaction as the change it tells of."""

    id: int
    at: datetime
    kind: str
    generation: int
    fence: int
    actor: str
    reason: str
    detail: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Record:
    """One line of the ledger: the truth about one key."""

    id: int
    identity: Identity
    generation: int
    state: State | None
    """``None`` = the line has a word there that is no state (see ``broken``)."""
    failure_class: FailureClass | None
    effect: Effect | None
    completeness: Completeness
    needs_person: bool
    fence: int
    claims: int
    open_calls: int
    lease_until: datetime | None
    no_later_than: datetime | None
    resume_at: datetime | None
    first_intent_at: datetime | None
    first_unknown_at: datetime | None
    holder: Holder
    calls: str
    on_doubt: str
    payload: Payload
    store_result: str
    result: Result | None
    gate: str
    partition: str
    amount: Decimal | None
    currency: str
    progress: Mapping[str, Any]
    error: str
    evidence: str
    created_at: datetime
    updated_at: datetime
    finished_at: datetime | None
    known_since: datetime
    """When it was last entered, or spoken of as a whole by a person."""
    broken: str
    """Why it cannot be read ('' = it can)."""
    seen: str = ""
    """What ``repair`` wants to be told back, so that a person repairs the line that they looked at."""
    renamed_to: Identity | None = None
    """It is only a former name of that record: nothing is called under it until a person reopens it."""
