"""The routes by which people change something. Each asks for a reason and for what was seen of the record.

The right is asked for the DAG on the record's own line. What moved after it was looked at is refused by the ledger, in
the same statement as the change; the ledger's event and the change are one transaction (P13).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, HTTPException
from pydantic import AfterValidator, AwareDatetime, BaseModel, ConfigDict, Field, model_validator

from airflow_runguard import codec, commands, stops
from airflow_runguard.config import settings
from airflow_runguard.core.errors import PlanningError
from airflow_runguard.core.items import Selection
from airflow_runguard.core.record import FOR_GOOD, FailureClass, Record
from airflow_runguard.core.rows import record_of
from airflow_runguard.refusals import Refused
from airflow_runguard.ui.access import ReaderDep, audit
from airflow_runguard.ui.reading import BoardDep, Number, Text, seen, storable

Data = dict[str, Any]
LONGEST = timedelta(seconds=FOR_GOOD)
"""For which a gate is closed; beyond it lies a slip of the pen."""
router = APIRouter(
    responses={409: {"description": "The ledger refused it; its sentence says why. Nothing was changed."}}
)


def said(text: str) -> str:
    """:raises ValueError: it says nothing."""
    if not text.strip():
        raise ValueError("it is empty")
    return storable(text)


Reason = Annotated[str, AfterValidator(said), Field(min_length=1, max_length=2_000)]
Fence = Annotated[int, Field(ge=0, le=2**62, description="of the record, as it was looked at")]
Generation = Annotated[int, Field(ge=1, le=2**31 - 1, description="of the record, as it was looked at")]


class Change(BaseModel):
    model_config = ConfigDict(extra="forbid")
    reason: Reason


class RecordChange(Change):
    fence: Fence
    generation: Generation


class Resolve(RecordChange):
    answer: Literal["happened", "did_not_happen", "failed"]
    call: Text | None = None
    reference: Text | None = None
    result: Annotated[Any, Field(description="only with `happened`; left out = no result is known")] = None
    force: bool = False
    as_of: Annotated[
        AwareDatetime | None,
        Field(
            description="of the record, as it was looked at: younger doubt is not answered. `did_not_happen` needs it"
        ),
    ] = None

    @model_validator(mode="after")
    def denies_what_was_seen(self) -> Self:
        if self.answer == "did_not_happen" and self.as_of is None:
            raise ValueError("did_not_happen has it sent again, so it needs as_of, as it was looked at")
        return self


class Reopen(RecordChange):
    again_although_applied: bool = False


class ReopenItems(Reopen):
    """Which items: those named, or all that stand in one state (and failure class)."""

    items: Annotated[list[Text] | None, Field(min_length=1, max_length=1_000)] = None
    state: Literal["done", "failed"] | None = None
    failure_class: FailureClass | None = None

    @model_validator(mode="after")
    def one_way(self) -> Self:
        if (self.items is None) == (self.state is None) or (self.failure_class and not self.state):
            raise ValueError("name the items, or a state (and a failure class), not both")
        return self

    def chosen(self) -> Selection:
        names = None if self.items is None else tuple(self.items)
        return Selection(self.state, self.failure_class, names)


class Repair(Change):
    seen: Annotated[str, Field(pattern="^[0-9a-f]{64}$", description="`seen` of the record, as it was looked at")]
    state: Annotated[
        Literal["pending", "done", "failed", "in_doubt"] | None, Field(description="null = the line is right as it is")
    ] = None


class GateChange(Change):
    gate: Annotated[Text, Field(min_length=1)]
    epoch: Annotated[int | None, Field(ge=1, le=2**31 - 1, description="of the gate, as it was looked at")] = None


class Close(GateChange):
    until: AwareDatetime


class Rate(GateChange):
    rate: Annotated[float | None, Field(gt=0, lt=10**6, description="a second; null = [runguard] resume_rate")] = None


class Freeze(Change):
    scope: Literal["all", "dag_id", "namespace", "key_prefix"]
    value: Text = ""


# -- records -----------------------------------------------------------------------------------------------------------


@router.post("/records/{record_id}/resolve", summary="Say what happened to a record, or to one of its calls")
def resolve(board: BoardDep, who: ReaderDep, record_id: Number, body: Resolve) -> Data:
    row, record = _mine(board, who, record_id, body)
    result = None
    if "result" in body.model_fields_set:
        if body.answer != "happened":
            raise PlanningError("Only what happened has a result. Nothing was changed.", "Leave it out.")
        result = _stored(body.result)
    done = commands.resolve(
        board,
        record,
        body.answer,
        actor=who.actor,
        reason=body.reason,
        call=body.call,
        result=result,
        reference=body.reference,
        force=body.force,
        as_of=body.as_of,
    )
    audit(who, "resolve", row, answer=body.answer, call=body.call, reference=body.reference, reason=body.reason)
    return _answer(done)


@router.post("/records/{record_id}/reopen", summary="Order finished work anew, as the next generation")
def reopen(board: BoardDep, who: ReaderDep, record_id: Number, body: Reopen) -> Data:
    row, record = _mine(board, who, record_id, body)
    done = commands.reopen(
        board,
        record,
        actor=who.actor,
        reason=body.reason,
        again_although_applied=body.again_although_applied,
    )
    audit(who, "reopen", row, although_applied=body.again_although_applied, reason=body.reason)
    return _answer(done)


@router.post("/records/{record_id}/items/reopen", summary="Order finished items of a batch anew")
def reopen_items(board: BoardDep, who: ReaderDep, record_id: Number, body: ReopenItems) -> Data:
    """The next run of the task calls them. What happened, or may have, is left and counted, unless that is said too."""
    row, record = _mine(board, who, record_id, body)
    applied, chosen = body.again_although_applied, body.chosen()
    done = commands.reopen_items(
        board, record, chosen, actor=who.actor, reason=body.reason, again_although_applied=applied
    )
    audit(who, "reopen_items", row, items=str(chosen)[:500], although_applied=applied, reason=body.reason)
    return {**_answer(done), "items": done["items"], "left": done["left"]}


@router.post("/records/{record_id}/release", summary="Take a record from its holder")
def release(board: BoardDep, who: ReaderDep, record_id: Number, body: RecordChange) -> Data:
    row, record = _mine(board, who, record_id, body)
    done = commands.release(board, record, actor=who.actor, reason=body.reason)
    audit(who, "release", row, reason=body.reason)
    return _answer(done)


@router.post("/records/{record_id}/resume", summary="Let a paused record go on at once, if its gate lets it")
def resume(board: BoardDep, who: ReaderDep, record_id: Number, body: RecordChange) -> Data:
    row, record = _mine(board, who, record_id, body)
    done = stops.resume(board, record, actor=who.actor, reason=body.reason)
    audit(who, "resume", row, reason=body.reason)
    return _answer(done)


@router.post("/records/{record_id}/repair", summary="Say what a broken line should say")
def repair(board: BoardDep, who: ReaderDep, record_id: Number, body: Repair) -> Data:
    row = _writable(board, who, record_id)
    done = commands.repair(board, record_of(row), state=body.state, seen=body.seen, actor=who.actor, reason=body.reason)
    audit(who, "repair", row, state=body.state, reason=body.reason)
    return _answer(done)


def _writable(board: BoardDep, who: ReaderDep, record_id: int) -> Mapping[str, Any]:
    row = seen(board, who, record_id)
    who.must_change(row["dag_id"])
    return row


def _mine(board: BoardDep, who: ReaderDep, record_id: int, change: RecordChange) -> tuple[Mapping[str, Any], Record]:
    """The line, and the record as the person saw it: the ledger compares that with what is there when it changes it.

    :raises Refused: it moved on.
    """
    row = _writable(board, who, record_id)
    record = record_of(row)
    if record.generation != change.generation:
        raise Refused(
            f"{record.identity} was ordered anew after you looked at it (generation {record.generation}). "
            "Nothing was changed.",
            "Look at it again.",
        )
    return row, replace(record, fence=change.fence)


def _stored(value: Any) -> bytes:
    try:
        json.dumps(value, allow_nan=False)
        return codec.dump(value)
    except (ValueError, TypeError, RecursionError) as error:
        raise PlanningError(
            f"This result cannot be stored: {error}. Nothing was changed.", "Give it as JSON."
        ) from error


def _said(done: Data) -> Data:
    return {"said": done["said"]}


def _answer(done: Data) -> Data:
    """What is true now, in the sentences of the command line."""
    return {name: done[name] for name in ("said", "why", "who")}


# -- gates and freezes -------------------------------------------------------------------------------------------------


@router.post("/gates/close", summary="Close a gate until a time")
def close_gate(board: BoardDep, who: ReaderDep, body: Close) -> Data:
    _gate(board, who, body)
    if body.until > datetime.now(UTC) + LONGEST:
        raise PlanningError("A gate is closed for ten years at most. Nothing was changed.", "Say an earlier time.")
    done = stops.close_gate(
        board, body.gate, until=body.until, rate=settings().resume_rate, actor=who.actor, reason=body.reason
    )
    audit(who, "close_gate", None, gate=body.gate, until=body.until, reason=body.reason)
    return _said(done)


@router.post("/gates/open", summary="Open a gate; those that wait go on, paced")
def open_gate(board: BoardDep, who: ReaderDep, body: GateChange) -> Data:
    _gate(board, who, body)
    done = stops.open_gate(board, body.gate, rate=settings().resume_rate, actor=who.actor, reason=body.reason)
    audit(who, "open_gate", None, gate=body.gate, reason=body.reason)
    return _said(done)


@router.post("/gates/rate", summary="Say how many go on each second when a gate opens")
def rate_of_gate(board: BoardDep, who: ReaderDep, body: Rate) -> Data:
    _gate(board, who, body)
    default = settings().resume_rate
    done = stops.set_rate(board, body.gate, rate=body.rate, default=default, actor=who.actor, reason=body.reason)
    audit(who, "rate_of_gate", None, gate=body.gate, rate=body.rate, reason=body.reason)
    return _said(done)


def _gate(board: BoardDep, who: ReaderDep, body: GateChange) -> None:
    """A gate is everybody's, so it is for those who may change all DAGs.

    :raises Refused: a person opened it after it was looked at.
    """
    who.must_change(None)
    now = [row["epoch"] for row in board.gates(body.gate)]
    if body.epoch is not None and now != [body.epoch]:
        raise Refused(
            f"Gate {body.gate} was opened by somebody after you looked at it. Nothing was changed.", "Look at it again."
        )


@router.post("/freezes", summary="Let no new call start in a scope")
def freeze(board: BoardDep, who: ReaderDep, body: Freeze) -> Data:
    _scope(who, body)
    done = stops.freeze(board, body.scope, body.value, actor=who.actor, reason=body.reason)
    audit(who, "freeze", None, scope=body.scope, value=body.value, reason=body.reason)
    return _said(done)


@router.post("/freezes/thaw", summary="End a freeze")
def thaw(board: BoardDep, who: ReaderDep, body: Freeze) -> Data:
    _scope(who, body)
    done = stops.thaw(board, body.scope, body.value, actor=who.actor, reason=body.reason)
    audit(who, "thaw", None, scope=body.scope, value=body.value, reason=body.reason)
    return _said(done)


def _scope(who: ReaderDep, body: Freeze) -> None:
    """One DAG is for those who may change it, everything else for those who may change all."""
    who.must_change(body.value if body.scope == "dag_id" else None)
    if (body.scope == "all") != (body.value == ""):
        raise HTTPException(422, "Everything has no value; any other scope needs one. Nothing was changed.")
