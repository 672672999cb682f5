"""Submitted jobs: what a vendor says of one, and waiting for it.

A job is one call in two phases. Submitting is the effect; its answer, the job's name at the vendor, is kept in the
ledger before anybody waits. Waiting only reads, so an error there says nothing about the effect: the job and its name
stay, and whoever comes next attaches to it. Whether to submit again is decided by the vendor's word alone.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from airflow_runguard.core.errors import PlanningError, RunGuardError
from airflow_runguard.core.failures import Family, Rule, classify
from airflow_runguard.core.record import Effect, Failure, FailureClass
from airflow_runguard.core.returned import chain
from airflow_runguard.core.work import BODY
from airflow_runguard.core.writer import Writer

T = TypeVar("T")

log = logging.getLogger("airflow_runguard")

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


@dataclass(slots=True)
class Jobs:
    """The jobs of one body: what it submitted, and which of its errors came from waiting for one."""

    _writer: Writer
    _classified: Callable[..., Failure]
    _rules: tuple[Rule | Family, ...]
    _job: str = ""
    """What the body itself submitted in this process."""
    _waited: dict[int, BaseException] = field(default_factory=dict)
    """Errors that came after a job was submitted and its name was kept."""
    _unsubmitted: list[BaseException] = field(default_factory=list)
    """What the requests that submit the body's job ended in, where they gave no job."""

    def submitted(self) -> str:
        """The job that an earlier try of this body submitted; '' = none."""
        return self._writer.external_id(BODY).result()

    def submit(self, submit: Callable[[], T], name: Callable[[T], str], one_request: bool) -> T:
        """Make the request by which the body submits its job, and keep the job's name before anything else.

        :param name: the job's name at the vendor, from what ``submit`` returned.
        :param one_request: what ``submit`` raises is the answer to the one request that it makes, whose word about the
            effect counts. Else it may have come after the job was submitted.
        """
        try:
            answer = submit()
        except BaseException as error:
            if one_request:
                self._unsubmitted.append(error)
            raise
        job = name(answer)
        self.keep(BODY, job)
        self._job = job
        return answer

    def keep(self, call: str, job: str, *, submitted: bool = True) -> None:
        """Keep a job's name at the vendor in the ledger.

        :param submitted: a later try takes it up; else it is a name to look for.
        """
        if not isinstance(job, str) or not 0 < len(job) <= 2000:
            raise PlanningError(f"The vendor's name for call {call!r} must be a text, not {job!r}.")
        if self._writer.remember(call, job, submitted=submitted).result() != "ok":
            log.warning("Call %r is no longer this process's; %r was kept as evidence only.", call, job)

    @contextmanager
    def following(self, job: str = "", call: str = BODY) -> Iterator[None]:
        """What is raised here, once a job is known, comes from waiting for it.

        :param job: '' = the one that the body submits meanwhile.
        """
        try:
            yield
        except BaseException as error:
            known = job or self._job
            if known:
                self._waited[id(error)] = error
                if isinstance(error, JobNotFound):
                    self.keep(call, known, submitted=False)
            raise

    def judged(self, error: BaseException) -> Failure | None:
        """What an error means that came from submitting the body's job or waiting for it; ``None`` = it did not."""
        if waited := self.of_waiting(error):
            return waited
        if self._job or not any(link is self._unsubmitted[-1] for link in chain(error) if self._unsubmitted):
            return None
        # Each request that submits is its own attempt: one that stayed unknown is not made good by a later refusal.
        each = [self._classified(failed, one_request=True) for failed in self._unsubmitted]
        unknown = next((failure for failure in each if failure.effect is Effect.UNKNOWN), None)
        return unknown or (each[-1] if error is self._unsubmitted[-1] else self._classified(error))

    def of_waiting(self, error: BaseException) -> Failure | None:
        """What an error means that came after a job was submitted and its name was kept; ``None`` = it did not."""
        if id(error) not in self._waited:
            return None
        if isinstance(error, JobFailed):
            return Failure(FailureClass.PROCESSING, Effect.NOT_APPLIED, final=True, evidence=error.what)
        if isinstance(error, JobNotFound):
            return Failure(FailureClass.UNKNOWN, Effect.UNKNOWN, evidence=error.what)
        said = classify(error, effect_kind="read", rules=self._rules)
        if said.pausable:
            return said
        why = f"{said.evidence}; the job goes on at the vendor, and the next try attaches to it"
        return replace(said, effect=Effect.UNKNOWN, needs_person=False, final=False, evidence=why)

    def go_on(self, error: BaseException) -> bool:
        """Whether a job was submitted whose end ``error`` did not tell: the next try attaches to it."""
        left = (self._waited.get(id(link)) for link in chain(error))
        return any(link is not None and not isinstance(link, JobNotFound | JobFailed) for link in left)
