"""Submitted jobs: what a vendor says of one, and waiting for it.

A job is one call in two phases. Submitting is the effect; its answer, the job's name at the vendor, is kept in the
ledger before anybody waits. Waiting only reads, so an error there says nothing about the effect: the job and its name
stay, and whoever comes next attaches to it. Whether to submit again is decided by the vendor's word alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from airflow_runguard.core.errors import RunGuardError
from airflow_runguard.core.failures import Family, Rule, classify
from airflow_runguard.core.record import Effect, Failure, FailureClass

PATIENCE = 3
"""Looks in a row that failed, or did not find the job, before that is believed."""


@dataclass(frozen=True, slots=True)
class Running:
    """It is not over yet."""


@dataclass(frozen=True, slots=True)
class Succeeded:
    """It is over, with this result."""

    result: Any = None


@dataclass(frozen=True, slots=True)
class FailedForGood:
    """It is over without an effect that counts, and may be submitted anew under a new vendor key."""

    reason: str = ""


@dataclass(frozen=True, slots=True)
class NotFound:
    """The vendor does not know it (any more): nobody can say what became of it."""

    reason: str = ""


JobState = Running | Succeeded | FailedForGood | NotFound
Look = Callable[[str], JobState]


class JobFailed(RunGuardError):
    """The vendor says that the job failed for good."""

    remedy = "The next try submits it anew, under a new vendor key."


class JobNotFound(RunGuardError):
    """The vendor does not know the job that it was given."""

    remedy = "Look at the vendor what became of it, then say so: `airflow runguard resolve KEY …`."


class JobLeft(RunGuardError):
    """The waiting ended before the job did."""

    remedy = "Nothing to do: the next try attaches to it."


def followed(job: str, look: Look, wait: Callable[[], bool], rules: tuple[Rule | Family, ...] = ()) -> Any:
    """Wait for a job to end; its result.

    :param wait: until the next look; whether this process was told to stop.
    :param rules: the author's own, asked before all others.
    :raises JobFailed, JobNotFound, JobLeft: what else became of it; and whatever ``look`` raises again and again, or
        that says to wait.
    """
    missing = failed = 0
    while True:
        try:
            state = look(job)
            failed = 0
        except Exception as error:
            failed += 1
            if failed >= PATIENCE or classify(error, effect_kind="read", rules=rules).pausable:
                raise
            state = Running()
        match state:
            case Succeeded(result=result):
                return result
            case FailedForGood(reason=reason):
                raise JobFailed(f"Job {job} failed for good{': ' + reason if reason else ''}.")
            case NotFound(reason=reason):
                missing += 1
                if missing >= PATIENCE:
                    raise JobNotFound(f"The vendor does not know job {job}{': ' + reason if reason else ''}.")
            case Running():
                missing = 0
            case _:
                raise TypeError(
                    f"attach answered {state!r}, which is none of Running, Succeeded, FailedForGood, NotFound"
                )
        if wait():
            raise JobLeft(f"The task was told to stop while job {job} goes on at the vendor.")


def judged(error: BaseException, rules: tuple[Rule | Family, ...] = ()) -> Failure:
    """What an error means that came after the job was submitted and its name was kept."""
    if isinstance(error, JobFailed):
        return Failure(FailureClass.PROCESSING, Effect.NOT_APPLIED, final=True, evidence=error.what)
    if isinstance(error, JobNotFound):
        return Failure(FailureClass.UNKNOWN, Effect.UNKNOWN, evidence=error.what)
    said = classify(error, effect_kind="read", rules=rules)
    if said.pausable:
        return said
    why = f"{said.evidence}; the job goes on at the vendor, and the next try attaches to it"
    return replace(said, effect=Effect.UNKNOWN, needs_person=False, final=False, evidence=why)
