"""The classifier as Airflow's ``RetryPolicy``, for tasks without a guard too.

Knows no rule of its own. A guarded task has better than a policy (the ledger, and what its author declared), so that
one is left to itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal

from airflow.sdk.definitions.retry_policy import RetryDecision, RetryPolicy

from airflow_runguard.core.failures import MIN_FLOOR, Failure, Family, Rule, classify
from airflow_runguard.core.record import Effect
from airflow_runguard.options import Guard, checked_rules

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context

LONGEST = timedelta(days=30)


class GuardRetryPolicy(RetryPolicy):
    """Fail what no retry mends, retry what waiting mends, when the vendor says; fail what may have happened.

    ``evaluate`` never raises: whatever it cannot read, it fails. Airflow's ``retries`` still bound the retries.

    :param effect_kind: ``"read"`` where repeating the task is harmless by nature: then a timeout is retried as well.
    :param rules: rules or families of one's own, asked before all others.
    """

    def __init__(self, effect_kind: Literal["write", "read"] = "write", rules: Sequence[Rule | Family] = ()) -> None:
        self.effect_kind = effect_kind
        self.rules = checked_rules(rules)

    def evaluate(
        self, exception: BaseException, try_number: int, max_tries: int, context: Context | None = None
    ) -> RetryDecision:
        """Airflow's question after a failed try."""
        try:
            if _is_guarded(context):
                return RetryDecision.default()
            return _decision(classify(exception, effect_kind=self.effect_kind, rules=self.rules))
        except Exception as trouble:
            return RetryDecision.fail(f"RunGuard could not judge the error ({type(trouble).__name__})")

    def serialize(self) -> dict[str, Any]:
        """For people to read; Airflow asks the policy of the DAG's own file, in the task's process."""
        told = {"__type": "GuardRetryPolicy", "effect_kind": self.effect_kind}
        return {**told, "rules": [rule.name for rule in self.rules]}

    @classmethod
    def deserialize(cls, data: dict[str, Any]) -> GuardRetryPolicy:
        """Without the rules, which live in the DAG's file."""
        return cls(data["effect_kind"])


def _is_guarded(context: Context | None) -> bool:
    return context is not None and isinstance(getattr(context.get("task"), "guard", None), Guard)


def _decision(failure: Failure) -> RetryDecision:
    if failure.effect is Effect.UNKNOWN:
        return RetryDecision.fail(f"It may have happened: {failure.evidence}")
    if failure.needs_person or failure.final:
        return RetryDecision.fail(f"No retry mends it: {failure.evidence}")
    wait = max(failure.resume_after or 0.0, failure.floor or 0.0)
    # Without a vendor's word and a floor of its own, the task's own delay (and back-off) is the better one.
    told = failure.resume_after is not None or wait > MIN_FLOOR
    delay = timedelta(seconds=min(wait, LONGEST.total_seconds())) if told else None
    return RetryDecision.retry(delay, failure.evidence)
