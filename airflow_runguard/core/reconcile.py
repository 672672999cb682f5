"""Asking about a doubt: each doubtful call of one record is asked about once, and what is learnt is booked.

One way for the task that meets the doubt, for the command, and for whatever sweeps. A doubt leaves only with an answer:
an error of the look-up proves nothing, and "not found" counts only where it was asked for after the call can no longer
arrive. A look-up that was told to wait waits; nothing is ever sent from here.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any, TypeVar

from airflow_runguard.core import keys
from airflow_runguard.core.errors import NotApplied
from airflow_runguard.core.failures import Family, Rule, classify
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import CallState, Record, Result, State
from airflow_runguard.core.rows import DEFAULT_PAUSE
from airflow_runguard.core.work import (
    BODY,
    NOT_STORED,
    Answer,
    Applied,
    Doubt,
    Fenced,
    Reconcile,
    StillUnknown,
    Submitted,
    said,
)

log = logging.getLogger("airflow_runguard")

T = TypeVar("T")
DOUBTFUL = (CallState.STARTED, CallState.IN_DOUBT)


@dataclass(frozen=True, slots=True)
class Finding:
    """What came of asking about one call.

    :param word: ``happened``, ``did_not_happen`` or ``submitted`` (booked) · ``too_early`` (nothing found, but the call
        may still arrive) · ``still_unknown`` · ``wait`` (the look-up itself was told to wait) · ``error`` (it failed) ·
        ``nobody`` (there is nobody to ask) · ``moved`` (meanwhile somebody else changed the record).
    :param seconds: when it is worth asking again, where that is known.
    """

    call: str
    word: str
    why: str = ""
    seconds: float | None = None

    @property
    def settled(self) -> bool:
        return self.word in ("happened", "did_not_happen", "submitted")


def doubts(ledger: Ledger, record: Record) -> list[Doubt]:
    """What is doubtful about a record, each with what a look-up needs. ``now`` is the time of the question."""
    ledger.check()  # whose keys the vendor was given
    now = ledger.time_of_question(record.identity)
    renamed = ledger.renamed(record.id)
    calls = [call for call in ledger.calls(record.id) if call.generation == record.generation]
    return [
        Doubt(
            record=record,
            call=call,
            vendor_key=keys.sent_under(ledger.installation, record.identity, renamed, call),
            intent=record.payload.readable if call.name == BODY else call.intent,
            now=now,
            alone=len(calls) == 1 and record.calls != "batch",
        )
        for call in calls
        if call.state in DOUBTFUL
    ]


def settle(
    ledger: Ledger,
    record: Record,
    reconcile: Reconcile,
    dump: Callable[[Any], Result],
    *,
    skip: set[str],
    on_ledger: Callable[[Callable[[], Any]], Any] = lambda run: run(),
    hide: Callable[[Any], Any] = lambda words: words,
    actor: str = "reconcile",
    rules: tuple[Rule | Family, ...] = (),
) -> list[Finding]:
    """Ask about each doubtful call of a record that is in doubt, and book the answers.

    :param dump: the result as it is stored.
    :param skip: names of calls that were asked about already; grows by those that are asked about now.
    :param on_ledger: runs something on the thread that owns the ledger's connection.
    :param hide: masks what was answered, before it is stored or told to anybody.
    :param rules: the author's own, by which an error of ``reconcile`` is judged first.
    """
    if record.broken or record.state is not State.IN_DOUBT:
        return []
    findings = []
    for doubt in on_ledger(lambda: doubts(ledger, record)):
        if doubt.call.name not in skip:
            skip.add(doubt.call.name)
            finding = _settled(ledger, doubt, reconcile, dump, on_ledger, hide, actor, rules)
            finding = replace(finding, why=hide(finding.why))
            log.info("%s, call %r: %s %s", record.identity, doubt.call.name, finding.word, finding.why)
            findings.append(finding)
            if finding.word == "wait":  # it spoke for the vendor: the others would only be told the same
                break
    return findings


def takes_many(reconcile: Callable[..., Any]) -> bool:
    """Whether a function is asked about a list of doubts (its parameter is called ``doubts``) and answers with a
    mapping call → answer."""
    return "doubts" in inspect.signature(reconcile).parameters


def of_one(reconcile: Callable[..., Any]) -> Reconcile:
    """A function that may take many doubts, as a function of one."""
    if not takes_many(reconcile):
        return reconcile

    def one(doubt: Doubt) -> Any:
        answers = reconcile([doubt])
        return _picked(answers, doubt) if inspect.isawaitable(answers) else answers.get(doubt.call.name)

    return one


async def _picked(answers: Awaitable[Mapping[str, Any]], doubt: Doubt) -> Any:
    return (await answers).get(doubt.call.name)


def ask(reconcile: Reconcile, doubt: Doubt, rules: tuple[Rule | Family, ...] = ()) -> Answer | Fenced | Finding | None:
    """The answer of one function, sync or async; where there is none, the :class:`Finding` that says why.

    Signals (an execution timeout, say) go through: they say nothing about the vendor.
    """
    try:
        answer: object = of_one(reconcile)(doubt)
        if inspect.isawaitable(answer):
            answer = asyncio.run(awaited(answer))
    except NotApplied as error:
        answer = error
    except Exception as error:
        failure = classify(error, effect_kind="read", now=doubt.now, rules=rules)
        if failure.pausable:
            seconds = max(failure.resume_after or DEFAULT_PAUSE, failure.floor or 0.0)
            return Finding(doubt.call.name, "wait", f"the look-up was told to wait: {said(error)}", seconds)
        log.warning("The look-up for %s failed; it stays in doubt.", doubt.record.identity, exc_info=True)
        return Finding(doubt.call.name, "error", f"the look-up failed: {said(error)}")
    if answer is None or isinstance(answer, Applied | NotApplied | Fenced | StillUnknown | Submitted):
        return believed(answer, doubt)
    return StillUnknown(f"the look-up answered {answer!r}, which is none of Applied, NotApplied, StillUnknown")


def believed(answer: Answer | Fenced | None, doubt: Doubt) -> Answer | Fenced | None:
    """That it is not there under the present key denies nothing that is said to be applied under an earlier one."""
    if doubt.call.earlier_key and isinstance(answer, NotApplied | Fenced | Submitted):
        return StillUnknown("a stale holder reported that it was applied under an earlier vendor key: a person decides")
    return answer


async def awaited(answer: Awaitable[T]) -> T:
    return await answer


def _settled(
    ledger: Ledger,
    doubt: Doubt,
    reconcile: Reconcile,
    dump: Callable[[Any], Result],
    on_ledger: Callable[[Callable[[], Any]], Any],
    hide: Callable[[Any], Any],
    actor: str,
    rules: tuple[Rule | Family, ...],
) -> Finding:
    record, name = doubt.record, doubt.call.name
    answer = ask(reconcile, doubt, rules)
    early = _too_early(record, doubt.now)
    match answer:
        case Finding():
            return answer
        case None:
            return Finding(name, "nobody", "there is nobody to ask")
        case StillUnknown(reason=reason):
            return Finding(name, "still_unknown", reason or "it could not be said", answer.seconds)
        case Submitted(external_id=job):
            verdict = on_ledger(
                lambda: ledger.adopt(record.id, call=name, external_id=job, seen_fence=record.fence, actor=actor)
            )
            word = "submitted" if verdict == "ok" else "moved"
            return Finding(
                name, word, f"it is job {job}" if verdict == "ok" else f"somebody else settled it ({verdict})"
            )
        case NotApplied() if early is not None:
            # Looked for at a time when the call could still arrive: what is not there may come after the look.
            return Finding(name, "too_early", f"{answer.what}; it may still arrive", early)
        case Applied():
            result = None if answer.result is NOT_STORED else dump(answer.result).data
            word, why, reference = "happened", "it is there", answer.reference
        case NotApplied() | Fenced():
            word, why, result, reference = "did_not_happen", answer.what, None, None
    verdict = on_ledger(
        lambda: ledger.resolve(
            record.id,
            word,
            call=None if name == BODY else name,
            result=result,
            reference=reference,
            actor=actor,
            reason=hide(f"asked: {why}"),
            force=isinstance(answer, Fenced),
            seen_fence=record.fence,
            known_by=doubt.now,
        )
    )
    if verdict == "ok":
        return Finding(name, word, why)
    if verdict == "too_early":
        return Finding(name, "too_early", "it may still arrive", DEFAULT_PAUSE)
    return Finding(name, "moved", f"meanwhile somebody else settled it ({verdict})")


def _too_early(record: Record, asked_at: datetime) -> float | None:
    """Seconds until "not found" counts; ``None`` = it does."""
    until = record.no_later_than
    return (until - asked_at).total_seconds() if until is not None and until > asked_at else None
