"""Lines of the ledger as JSON. Nothing here is HTML, and nothing decides.

Times are ISO 8601 in UTC, amounts are texts; results, orders and arguments appear only where ``show_results`` is on,
masked. The sentences are those of ``explain.py``, the same as on the command line.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from decimal import Decimal
from typing import Any

from airflow_runguard import commands
from airflow_runguard import explain as words
from airflow_runguard.core import keys
from airflow_runguard.core.board import Board
from airflow_runguard.core.record import Call, Event, Record, State
from airflow_runguard.core.rows import call_of, object_of
from airflow_runguard.masking import Hide

Data = dict[str, Any]

LINE = (
    "id", "namespace", "key", "generation", "state", "failure_class", "effect", "needs_person", "fence", "open_calls",
    "dag_id", "task_id", "run_id", "try_number", "map_index", "host", "lease_until", "claimed_at", "resume_at",
    "no_later_than", "first_unknown_at", "gate", "partition", "amount", "currency", "error", "created_at", "updated_at",
    "finished_at", "broken",
)  # fmt: skip
"""The fields of a record in a list, and the columns of an export."""


def plain(value: Any) -> Any:
    match value:
        case datetime():
            return words.iso(value)
        case Decimal():
            return f"{value:f}"
        case bytes() | memoryview():
            return None
        case _:
            return value


def line(row: Mapping[str, Any]) -> Data:
    """A record as a list shows it. ``state`` is ``broken`` where the line cannot be trusted."""
    shown = {name: plain(row[name]) for name in LINE}
    shown["error"] = words.one_line(row["error"])[:500]
    shown["progress"] = object_of(row["progress"])
    shown["as_of"] = row["updated_at"].isoformat()  # to the last digit: an answer is compared with it
    if row["broken"]:
        shown["state"] = "broken"
    return shown


def event(row: Mapping[str, Any]) -> Event:
    return Event(
        row["id"],
        row["at"],
        row["kind"],
        row["generation"] or 0,
        row["fence"] or 0,
        row["actor"],
        row["reason"],
        object_of(row["detail"]),
    )


def told(row: Mapping[str, Any]) -> Data:
    """An event with its sentence. Its details may hold results and the order, so only those that are safe are named."""
    one = event(row)
    return {
        "id": one.id,
        "at": plain(one.at),
        "kind": one.kind,
        "generation": one.generation,
        "fence": one.fence,
        "actor": one.actor,
        "reason": one.reason,
        "sentence": words.sentence(one),
        "call": one.detail.get("call"),
    }


def ledger_event(row: Mapping[str, Any]) -> Data:
    """What happened to the ledger itself; the names in it are safe to show."""
    detail = object_of(row["detail"])
    about = {name: detail[name] for name in ("gate", "until", "rate", "scope", "value", "deployment") if name in detail}
    return {
        "id": row["id"],
        "at": plain(row["at"]),
        "kind": row["kind"],
        "actor": row["actor"],
        "reason": row["reason"],
        **about,
    }


def call(board: Board, record: Record, row: Mapping[str, Any], renamed: Sequence[Event], hide: Hide | None) -> Data:
    """A call, with the key that it was sent under, made from the name that the record had then."""
    one = call_of(row)
    shown = {
        "name": one.name,
        "state": one.state,
        "open": one.state in words.OPEN,
        "generation": one.generation,
        "attempt": one.attempt,
        "fence": one.fence,
        "effect": one.effect,
        "failure_class": one.failure_class,
        "intent_at": plain(one.intent_at),
        "no_later_than": plain(one.no_later_than),
        "first_unknown_at": plain(one.first_unknown_at),
        "outcome_at": plain(one.outcome_at),
        "error": one.error,
        "evidence": one.evidence,
        "external_id": one.external_id,
        "result_missing": one.result_missing,
        "vendor_key": None  # who only observes hands none over
        if record.holder.observes
        else keys.sent_under(board.installation, record.identity, renamed, one),
    }
    if hide is not None:
        shown["intent"] = hide(dict(one.intent))
    return shown


def record(row: Mapping[str, Any], value: Record, calls: Sequence[Call], hide: Hide | None) -> Data:
    """The whole record: its line, the sentence that says where it stands, and who moves it next."""
    stands = words.standing(value, calls, row["now"])
    shown = {
        **line(row),
        "observed": value.holder.observes,
        "why": stands.why,
        "who": stands.who,
        "commands": dict(stands.commands),
        "doubtful": [call.name for call in calls if call.state in words.OPEN],
        "claims": row["claims"],
        "pauses": row["pauses"],
        "call_style": row["calls"],
        "on_doubt": row["on_doubt"],
        "store_result": row["store_result"],
        "completeness": row["completeness"],
        "evidence": row["evidence"],
        "error": row["error"],
        "ti_id": row["ti_id"],
        "pid": row["pid"],
        "first_intent_at": plain(row["first_intent_at"]),
        "result_missing": row["result_missing"],
        "payload_fields": sorted(value.payload.fields),
        "seen": row["seen"],
        "shows_results": hide is not None,
    }
    if hide is not None:
        shown["payload"] = hide(dict(value.payload.readable))
        result = commands.shown_result(value.result) if value.state is State.DONE else None
        shown["result"] = hide(result)
    return shown


def generation(row: Mapping[str, Any]) -> Data:
    """How the generation before this one had ended; its result and order are not repeated here."""
    detail = object_of(row["detail"])
    return {
        "generation": row["generation"],
        "at": plain(row["at"]),
        "actor": row["actor"],
        "reason": row["reason"],
        "before": detail.get("state"),
        "although_applied": bool(detail.get("although_applied")),
    }


def text(value: Any) -> str:
    """A cell of an export: never a formula to a spreadsheet."""
    if value is None:
        return ""
    cell = json.dumps(value) if isinstance(value, dict | list | bool) else str(value)
    return f"'{cell}" if cell[:1] in ("=", "+", "-", "@", "\t", "\r") else cell
