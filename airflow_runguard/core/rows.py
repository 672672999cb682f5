"""Between values and the ledger's columns: parameters of statements, and rows as records, calls and results.

No I/O and no decisions. A damaged line is carried as far as it can be read (``broken`` says why it cannot be trusted);
data that PostgreSQL would refuse is cleaned, so that it never tears an outcome (P4).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, TypeVar

from airflow_runguard.core.record import (
    OBSERVER,
    Call,
    CallState,
    Claim,
    Completeness,
    Effect,
    Failure,
    FailureClass,
    Holder,
    Identity,
    Order,
    Outcome,
    Payload,
    Record,
    Result,
    Settlement,
    State,
    Verdict,
)
from airflow_runguard.core.series import Before, Place

SEPARATOR = "\x1f"
"""Between the texts of a list that is sent as one: packing an array takes longer than planning it. No name of an item
has a control character."""

DEFAULT_PAUSE = 60.0
"""Seconds to pause where the vendor asks for a pause but does not say how long."""

LONGEST_WAIT = 10.0**9
"""Seconds; for good. PostgreSQL would refuse a longer one, and with it the outcome."""


def clean(text: str | None) -> str | None:
    """Text that PostgreSQL takes: no NUL, no lone surrogates. Data must never tear an outcome (P4)."""
    if text is None:
        return None
    return text.replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")


def outcome_state(failure: Failure | None) -> CallState:
    """What a call ends in. An error is never a result (P9); what is not proven is in doubt (P3)."""
    if failure is None:
        return CallState.DONE
    if failure.effect is Effect.UNKNOWN:
        return CallState.IN_DOUBT
    if failure.effect is Effect.NOT_APPLIED and failure.pausable and not failure.needs_person:
        return CallState.PAUSED
    return CallState.FAILED


def replay_parameters(order: Order) -> dict[str, Any]:
    return {
        "deployment": order.identity.deployment,
        "namespace": order.identity.namespace,
        "key": order.identity.key,
        "payload_version": order.payload.version,
        "payload_digest": order.payload.digest,
    }


def claim_parameters(order: Order, holder: Holder) -> dict[str, Any]:
    return {
        **replay_parameters(order),
        "payload_fields": json.dumps(dict(order.payload.fields), sort_keys=True),
        "payload_readable": clean(json.dumps(dict(order.payload.readable), sort_keys=True, default=str)),
        "calls": order.calls,
        "store_result": order.store_result,
        "on_doubt": order.on_doubt,
        **_holder_parameters(holder),
        "run_at": order.run_at,
        "lease": order.lease,
        "max_hold": order.max_hold,
        "max_claims": order.max_claims,
        "max_call_time": order.max_call_time,
        "key_lifetime": order.resent_within,
        "partition": order.partition,
        "amount": order.amount,
        "currency": order.currency,
        "gate": order.gate,
        **pause_parameters(order),
    }


def _holder_parameters(holder: Holder) -> dict[str, Any]:
    return {
        "nonce": holder.nonce,
        "ti_id": holder.ti_id,
        "dag_id": holder.dag_id,
        "task_id": holder.task_id,
        "run_id": holder.run_id,
        "try_number": holder.try_number,
        "map_index": holder.map_index,
        "host": holder.host,
        "pid": holder.pid,
        "actor": str(holder),
    }


def pause_parameters(order: Order) -> dict[str, Any]:
    return {"rate": order.resume_rate, "max_pauses": order.max_pauses, "max_pause": order.max_pause}


def place_parameters(place: Place, identity: Identity, actor: str) -> dict[str, Any]:
    return {
        "deployment": identity.deployment,
        "namespace": identity.namespace,
        "key": identity.key,
        "series": place.series,
        "place": place.place,
        "expected": place.expected,
        "min_gap": place.min_gap,
        "partial": place.partial,
        "on_failed": place.on_failed,
        "on_absent": place.on_absent,
        "actor": actor,
    }


def before_of(row: Mapping[str, Any]) -> Before:
    """:param row: of ``may_follow``, or of a refused claim, which has its own verdict and this one as ``so``."""
    verdict = row.get("so") or row["verdict"]
    words = (row["standing"], row["name"] or "", row["holder"] or "", row["why"] or "")
    return Before(verdict, *words, until=row["until"], now=row["now"])


def observe_parameters(
    identity: Identity,
    holder: Holder,
    what: str,
    *,
    order: Order | None,
    max_hold: float,
    partition: str | None,
    failure: Failure | None,
    error: str,
    result: Result | None,
) -> dict[str, Any]:
    """Of the statement ``observe``. Without an order the observer does not know the payload, so none binds."""
    payload = order.payload if order else None
    return {
        "deployment": identity.deployment,
        "namespace": identity.namespace,
        "key": identity.key,
        "payload_version": payload.version if payload else 0,
        "payload_digest": payload.digest if payload else "",
        "payload_fields": json.dumps(dict(payload.fields), sort_keys=True) if payload else "{}",
        "payload_readable": clean(json.dumps(dict(payload.readable), sort_keys=True, default=str)) if payload else "{}",
        "store_result": order.store_result if order else "none",
        "what": what,
        **_holder_parameters(holder),
        "nonce": f"{OBSERVER}{holder.ti_id or holder.nonce}",
        "max_hold": max_hold,
        "partition": partition,
        "class": failure.failure_class.value if failure else None,
        "effect": failure.effect.value if failure else None,
        "error": clean(error),
        "result": result.data if result else None,
        "missing": (clean(result.missing) or None) if result else None,
    }


def speaks_for_body(settlement: Settlement | None, outcomes: Sequence[Outcome]) -> bool:
    """Whether the settlement says all that the one outcome says: the body is one call, and it is done."""
    return (
        settlement is not None
        and settlement.state is State.DONE
        and settlement.failure is None
        and len(outcomes) == 1
        and outcomes[0] == Outcome("body", result=settlement.result, error=settlement.error)
    )


SETTLED = ("completeness", "error", "result", "missing")
"""What of a settlement ``settle_body`` asks for."""


def outcome_parameters(outcomes: Sequence[Outcome]) -> dict[str, list[Any] | None]:
    columns = ("name", "state", "class", "effect", "final", "resume_after", "error", "evidence", "result", "missing")
    if not outcomes:  # an empty list costs more to send than none
        return dict.fromkeys(f"o_{column}" for column in columns)
    values: dict[str, list[Any]] = {f"o_{column}": [] for column in columns}
    for outcome in outcomes:
        failure, result = outcome.failure, outcome.result
        row = (
            outcome.call,
            (CallState.PENDING if outcome.unsent else outcome_state(failure)).value,
            failure.failure_class.value if failure else None,
            failure.effect.value if failure else Effect.APPLIED.value,
            failure.final if failure else False,
            _wait(failure),
            clean(outcome.error),
            clean(failure.evidence) if failure else "",
            result.data if result else None,
            clean(result.missing) or None if result else None,
        )
        for column, value in zip(columns, row, strict=True):
            values[f"o_{column}"].append(value)
    return {**values}


def item_parameters(
    outcomes: Sequence[Outcome], intents: Sequence[tuple[str, str]], store_result: str
) -> dict[str, str]:
    """What of a group of items is plain as far as this side can tell: results that are stored, and intents."""
    done, results, calls, readable = [], [], [], []
    for outcome in outcomes:
        result = outcome.result
        if outcome.failure or outcome.error or result is None or result.missing:
            continue
        if result.data is not None or store_result == "none":
            done.append(outcome.call)
            results.append("\\x" + (result.data or b"").hex())
    for name, intent in intents:
        text = clean(intent) or ""
        if SEPARATOR not in text:
            calls.append(name)
            readable.append(text)
    lists = {"done": done, "results": results, "calls": calls, "intents": readable}
    return {name: SEPARATOR.join(texts) for name, texts in lists.items()}


def settlement_parameters(settlement: Settlement | None) -> dict[str, Any]:
    failure = settlement.failure if settlement else None
    result = settlement.result if settlement else None
    return {
        "to": settlement.state.value if settlement else None,
        "class": failure.failure_class.value if failure else None,
        "effect": failure.effect.value if failure else None,
        "needs_person": failure.needs_person if failure else False,
        "resume_after": _wait(failure),
        "result": result.data if result else None,
        "missing": (clean(result.missing) or None) if result else None,
        "completeness": settlement.completeness.value if settlement else None,
        "error": clean(settlement.error) if settlement else None,
        "evidence": clean(failure.evidence) if failure else None,
    }


def waiting_parameters(told: Failure | None, error: str) -> dict[str, Any]:
    """Of a holder that waits in Airflow: the quota that it waits for, or why it begins to wait anew; else nothing."""
    waits = {"resume_after": _wait(told), "evidence": clean(told.evidence)} if told else {}
    return waits | ({"error": clean(error)} if told or error else {})


def _wait(failure: Failure | None) -> float | None:
    if failure is None or not failure.pausable:
        return None
    asked = failure.resume_after
    if asked is None or math.isnan(asked):
        asked = DEFAULT_PAUSE
    return min(max(asked, failure.floor or 0.0), LONGEST_WAIT)


E = TypeVar("E", bound=StrEnum)


def word_of(kind: type[E], text: str | None) -> E | None:
    """A word of ours; ``None`` for none and for one that a damaged line has instead."""
    return kind(text) if text in list(kind) else None


def object_of(text: str) -> Mapping[str, Any]:
    """An object of ours; an empty one for what a damaged line has instead."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def replay_of(identity: Identity, row: Mapping[str, Any]) -> Claim:
    return Claim(
        Verdict.REPLAY,
        identity,
        row["now"],
        record_id=row["record_id"],
        generation=row["generation"],
        fence=row["fence"],
        result=result_of(row, row["store_result"]),
    )


def result_of(row: Mapping[str, Any], store_result: str) -> Result:
    """The result of what is done. One that is not there is an empty one only where nobody reads it."""
    missing = row["result_missing"] or ""
    if row["result"] is None and not missing and store_result != "none":
        missing = "the task said store_result='digest' or 'none' when it was done"
    return Result(row["result"], missing)


def record_of(row: Mapping[str, Any]) -> Record:
    """A line as a value; a broken one too (its readable parts, and ``broken`` says why it cannot be trusted)."""
    state = word_of(State, row["state"])
    result = Result(row["result"], row["result_missing"] or "") if row["state"] == State.DONE else None
    return Record(
        id=row["id"],
        identity=Identity(row["deployment"], row["namespace"], row["key"]),
        generation=row["generation"],
        state=state,
        failure_class=word_of(FailureClass, row["failure_class"]),
        effect=word_of(Effect, row["effect"]),
        completeness=word_of(Completeness, row["completeness"]) or Completeness.NONE,
        needs_person=row["needs_person"],
        fence=row["fence"],
        claims=row["claims"],
        open_calls=row["open_calls"],
        lease_until=row["lease_until"],
        no_later_than=row["no_later_than"],
        resume_at=row["resume_at"],
        first_intent_at=row["first_intent_at"],
        first_unknown_at=row["first_unknown_at"],
        holder=Holder(
            nonce=row["nonce"] or "",
            ti_id=row["ti_id"] or "",
            dag_id=row["dag_id"] or "",
            task_id=row["task_id"] or "",
            run_id=row["run_id"] or "",
            try_number=row["try_number"] or 0,
            map_index=row["map_index"] if row["map_index"] is not None else -1,
            host=row["host"] or "",
            pid=row["pid"] or 0,
        ),
        calls=row["calls"],
        on_doubt=row["on_doubt"],
        payload=Payload(
            row["payload_version"],
            row["payload_digest"],
            object_of(row["payload_fields"]),
            object_of(row["payload_readable"]),
        ),
        store_result=row["store_result"],
        result=result,
        gate=row["gate"] or "",
        partition=row["partition"] or "",
        amount=row["amount"],
        currency=row["currency"] or "",
        progress=object_of(row["progress"]),
        error=row["error"],
        evidence=row["evidence"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        finished_at=row["finished_at"],
        known_since=row["known_since"],
        broken=row["broken"],
        seen=row["seen"],
        renamed_to=Identity(row["deployment"], *row["present_name"]) if row["present_name"] else None,
    )


def call_of(row: Mapping[str, Any]) -> Call:
    """:param row: a line of ``runguard.call``, and what ``runguard.attachable`` says of it."""
    return Call(
        name=row["name"],
        generation=row["generation"],
        state=word_of(CallState, row["state"]),
        attempt=row["attempt"],
        fence=row["fence"],
        intent_at=row["intent_at"],
        no_later_than=row["no_later_than"],
        first_intent_at=row["first_intent_at"],
        first_unknown_at=row["first_unknown_at"],
        outcome_at=row["outcome_at"],
        effect=word_of(Effect, row["effect"]),
        failure_class=word_of(FailureClass, row["failure_class"]),
        error=row["error"],
        evidence=row["evidence"],
        external_id=row["external_id"] or "",
        submitted=row["submitted"],
        attachable=row["attachable"],
        earlier_key=row["earlier_key"],
        intent=object_of(row["intent"] or "{}"),
        result_missing=row["result_missing"] or "",
    )
