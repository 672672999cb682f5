"""Asking a person inside Airflow: the form of a record in doubt, and what its answer means to the ledger.

The ledger's resolution is the record; the form is one way to give it. A task that asks is parked in Airflow's
``awaiting_input``: no worker, no triggerer. Only this room knows Airflow's human-input interface, which 3.3 does not
export from ``airflow.sdk``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, NoReturn

from airflow_runguard import codec
from airflow_runguard.core import keys
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Call, Record, State
from airflow_runguard.explain import OPEN, command, name_at, one_line, standing, when

HAPPENED, DO_IT, LEAVE = "it happened", "it did not happen: do it", "leave it failed"
ANSWERS: Mapping[str, str] = {HAPPENED: "happened", DO_IT: "did_not_happen", LEAVE: "failed"}
"""What a person may choose → the ledger's word for it."""

ANSWERED = "_guard_answered"
"""The method with which a parked task comes back."""

LOOK_AGAIN = timedelta(minutes=10)
"""A parked task looks into the ledger by itself so often, where no triggerer wakes it when somebody resolved there."""

SHOWN = 50
"""Doubtful calls that the form lists; the rest is counted."""


@dataclass(frozen=True, slots=True)
class Question:
    subject: str
    body: str


def doubtful(record: Record, calls: Sequence[Call]) -> list[Call]:
    return [call for call in calls if call.generation == record.generation and call.state in OPEN]


def question(ledger: Ledger, record: Record, now: datetime) -> Question:
    """What is asked about a record in doubt, in plain words: subject as text, body as markdown."""
    calls, events = doubtful(record, ledger.calls(record.id)), ledger.events(record.id)
    stands = standing(record, calls, now)
    facts = [
        ("What was to be done", _shown(record.payload.readable)),
        ("At stake", f"{record.amount} {record.currency}".strip() if record.amount is not None else ""),
        ("When", when(record.first_intent_at, now)),
        ("By whom", str(record.holder)),
        ("The last error", one_line(record.error)),
        ("Why that proves nothing", one_line(record.evidence) or "no answer of the vendor came back"),
    ]
    lines = [stands.why, "", "| | |", "|---|---|"]
    lines += [f"| {name} | {_cell(text)} |" for name, text in facts if text]
    lines += ["", "**Look it up at the vendor by these:**", "", "| call | vendor key | vendor's own id | sent | with |"]
    lines += ["|---|---|---|---|---|"]
    for call in calls[:SHOWN]:
        identity = name_at(record.identity, events, call.first_intent_at)
        key = keys.vendor_key(ledger.installation, identity, call.name, call.generation, call.attempt)
        sent = when(call.intent_at, now)
        cells = (call.name, f"`{key}`", call.external_id, sent, _shown(call.intent))
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    if len(calls) > SHOWN:
        lines.append(f"\n… and {len(calls) - SHOWN} more: `{command('show', record.identity)}` lists them.")
    several = (
        " Your answer is taken for all of these calls; to answer them one by one, use the ledger's page or "
        f"`{command('resolve', record.identity, '--call=NAME …')}`."
        if len(calls) > 1
        else ""
    )
    lines += [
        "",
        f"*{HAPPENED}*: nothing is sent; the task ends with the result that you give. *{DO_IT}*: it is sent now. "
        f"*{LEAVE}*: nothing is sent and the task fails.{several}",
    ]
    return Question(f"Did {record.identity} happen?", "\n".join(lines))


PARAMS: Mapping[str, Any] = {
    "reference": {
        "value": "",
        "description": f"With “{HAPPENED}”: the vendor's own id of it, for whoever looks later.",
        "schema": {"type": ["string", "null"]},
    },
    "result": {
        "value": "",
        "description": f"With “{HAPPENED}”: what the task would have returned, as JSON (a text has its own quotes). "
        "Left empty, the task ends with an error where its result is needed.",
        "schema": {"type": ["string", "null"]},
    },
    "reason": {
        "value": "",
        "description": "How you know. Kept in the ledger with your name.",
        "schema": {"type": ["string", "null"]},
    },
}


def fill_form(ti: Any, asked: Question) -> None:
    """Make the task instance's form, or empty the one that it has: what was answered there before is gone then."""
    from airflow.sdk.execution_time.hitl import upsert_hitl_detail

    upsert_hitl_detail(ti_id=ti.id, subject=asked.subject, body=asked.body, options=list(ANSWERS), params=dict(PARAMS))


def park(*, since: datetime, timeout: timedelta) -> NoReturn:
    """Leave the task instance parked with its form; one that is answered already lets it come back at once.

    :param since: when it was first asked; comes back with the task.
    """
    from airflow.sdk.exceptions import TaskAwaitingInput

    raise TaskAwaitingInput(method_name=ANSWERED, kwargs={"since": since.isoformat()}, timeout=min(timeout, LOOK_AGAIN))


@dataclass(frozen=True, slots=True)
class Answer:
    """What a person said. :param word: the ledger's. :param problem: why it cannot be taken ('' = it can)."""

    word: str
    actor: str
    reason: str
    reference: str | None = None
    result: bytes | None = None
    problem: str = ""


def answer_of(response: Mapping[str, Any] | None) -> Answer | None:
    """A form's response as Airflow hands it over; ``None`` where nobody answered (it timed out, or was woken)."""
    chosen = (response or {}).get("chosen_options") or []
    if not chosen or chosen[0] not in ANSWERS:
        return None
    assert response is not None
    given = response.get("params_input") or {}
    user = response.get("responded_by_user") or {}
    text = {name: str(given.get(name) or "").strip() for name in PARAMS}
    who = str(user.get("name") or user.get("id") or "somebody in Airflow")
    result, problem = None, ""
    if text["result"]:
        try:
            result = codec.dump(json.loads(text["result"]))
        except (ValueError, TypeError, RecursionError) as error:
            problem = f"its result is no JSON ({error}); a text has its own quotes"
    return Answer(
        ANSWERS[chosen[0]],
        f"person:{who}",
        text["reason"] or "answered in Airflow's form",
        text["reference"] or None,
        result,
        problem,
    )


def apply(ledger: Ledger, record: Record, answer: Answer) -> str:
    """Book a form's answer. For a task that makes its calls itself it settles each call in doubt, so that the rest of
    the task goes on after it.

    :returns: the ledger's word: ``ok``, ``too_early`` (ask again after ``no_later_than``), ``not_in_doubt`` (somebody
        was first), …
    """
    if answer.problem:
        return answer.problem
    if record.state is not State.IN_DOUBT or record.broken:
        return "not_in_doubt"
    names: list[str | None] = [call.name for call in doubtful(record, ledger.calls(record.id))]
    if record.calls == "body" or answer.word == "failed":
        names = [None]
    verdict = "ok"
    for name in names or [None]:
        verdict = ledger.resolve(
            record.id,
            answer.word,
            call=name,
            result=answer.result,
            actor=answer.actor,
            reason=answer.reason,
            reference=answer.reference,
            seen_fence=record.fence,
        )
    return verdict


def _shown(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False) if value else ""


def _cell(text: str) -> str:
    return one_line(text).replace("|", "\\|")
