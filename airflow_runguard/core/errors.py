"""Every error of this project, and what the reader should do about it.

One tree. ``str(error)`` says what happened, what it means for the money, and the remedy. A refusal (busy, paused,
replay, …) is a value and not an error: see :class:`~airflow_runguard.core.record.Claim`. This room imports nothing.
"""

from __future__ import annotations


class RunGuardError(Exception):
    """Something went wrong that the caller cannot be expected to handle.

    :param what: what happened and what it means for the effect.
    :param remedy: an imperative sentence; where there is one, the command to type.
    """

    remedy = "Read the message; nothing was called."

    def __init__(self, what: str, remedy: str | None = None) -> None:
        self.what = what
        if remedy is not None:
            self.remedy = remedy
        super().__init__(what, self.remedy)

    def __str__(self) -> str:
        return f"{self.what} {self.remedy}"


class PlanningError(RunGuardError):
    """Found before any call: a key, payload, option or Connection that cannot be used. The ledger is untouched."""

    remedy = "Correct the task's definition (or the option named); no call was made."


class LedgerUnavailable(RunGuardError):
    """The ledger cannot be reached or written. No ledger = no call: the task waits.

    :param sent: the statement was sent, so it may have been carried out.
    """

    remedy = "Bring the ledger back (`airflow runguard doctor`); the task goes on by itself."

    def __init__(self, what: str, remedy: str | None = None, *, sent: bool = False) -> None:
        super().__init__(what, remedy)
        self.sent = sent


class LedgerNotReady(RunGuardError):
    """The ledger answers, but is not one that this deployment may use: schema version, deployment or lost time."""

    remedy = "Run `airflow runguard doctor`."


class LeaseLost(RunGuardError):
    """The ledger no longer knows this process as the holder, so it may start no further call."""

    remedy = "Nothing to do: the holder that replaced this one, or the next try, goes on."


class CallRefused(RunGuardError):
    """One call of a running record was refused by the ledger (in doubt, other generation, already under way)."""

    remedy = "Run `airflow runguard explain KEY`."


class ResultNotStored(RunGuardError):
    """The work is done, but its result was not stored, so it cannot be given back. Nothing was called again."""

    remedy = (
        "Make the result serialisable, or say store_result='none' where nobody reads it; `airflow runguard "
        "resolve KEY --happened --result JSON --reason …` gives it a result by hand (one call of it: --call NAME, an "
        "item of a batch: --items key=ITEM)."
    )


class ResultIsError(RunGuardError):
    """A call came back like a success with an error inside (P9). It is booked as that failure, never as done."""

    remedy = (
        "Let it pass: the guard has booked what it means. To hand on a part of such an answer, take it out inside the "
        "function that guard.call is given."
    )


class NotApplied(RunGuardError):
    """Raised by the author of a guarded function: the effect has provably not happened, the work may run again."""

    remedy = "The next try runs it."

    def __init__(self, reason: str = "the author says that nothing was sent", remedy: str | None = None) -> None:
        super().__init__(reason, remedy)
