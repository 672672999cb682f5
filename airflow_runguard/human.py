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
from airflow_runguard.core.items import Items, Selection
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Call, CallState, Record, State
from airflow_runguard.explain import OPEN, command, one_line, standing, when

HAPPENED, DO_IT, LEAVE = "it happened", "it did not happen: do it", "leave it failed"
ANSWERS: Mapping[str, str] = {HAPPENED: "happened", DO_IT: "did_not_happen", LEAVE: "failed"}
"""What a person may choose → the ledger's word for it."""

ANSWERED = "_guard_answered"
"""The method with which a parked task comes back."""

LOOK_AGAIN = timedelta(minutes=10)
"""A parked task looks into the ledger by itself so often, where no triggerer wakes it when somebody resolved there."""

SHOWN = 50
"""Doubtful calls that the form lists; the rest is counted."""


DOUBTFUL = Selection(CallState.IN_DOUBT)


@dataclass(frozen=True, slots=True)
class Question:
    """:param fields: those of :data:`PARAMS` that the form has."""

    subject: str
    body: str
    fields: Sequence[str]


def doubtful(ledger: Ledger, record: Record) -> list[Call]:
    """Its calls in doubt; of a batch those that a form shows, in order of their keys."""
    if record.calls == "batch":
        return Items(ledger).page(record.id, record.generation, DOUBTFUL, limit=SHOWN)
    calls = ledger.calls(record.id)
    return [call for call in calls if call.generation == record.generation and call.state in OPEN]


def question(ledger: Ledger, record: Record, now: datetime) -> Question:
    """What is asked about a record in doubt, in plain words: subject as text, body as markdown. Of a batch, once about
    all of its items in doubt."""
    calls, events = doubtful(ledger, record), ledger.events(record.id)
    items = record.calls == "batch" and bool(calls)
    number = _items_in_doubt(ledger, record) if items else len(calls)
    one, more = ("item", "items --state=in_doubt") if items else ("call", "show")
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
    lines += [
        "",
        "**Look it up at the vendor by these:**",
        "",
        f"| {one} | vendor key | vendor's own id | sent | with |",
    ]
    lines += ["|---|---|---|---|---|"]
    for call in calls[:SHOWN]:
        key = keys.sent_under(ledger.installation, record.identity, events, call)
        sent = when(call.intent_at, now)
        cells = (call.name, f"`{key}`", call.external_id, sent, _shown(call.intent))
        lines.append("| " + " | ".join(_cell(cell) for cell in cells) + " |")
    if number > SHOWN:
        verb, _, options = more.partition(" ")
        lines.append(f"\n… and {number - SHOWN} more: `{command(verb, record.identity, options)}` lists them.")
    if items and number > 1:
        subject = f"Did these {number} items of {record.identity} happen?"
        choices = (
            f"Your answer is taken for **all {number} items**. *{HAPPENED}*: none of them is sent, the batch goes on "
            f"with the others. *{DO_IT}*: each of them is sent now. *{LEAVE}*: none of them is sent, the task fails. "
            "Where it is not the same for all, first answer the exceptions, on the ledger's page or by "
            f"`{command('resolve', record.identity, '--items=key=ITEM …')}`; this form then speaks of the rest."
        )
        return Question(subject, "\n".join([*lines, "", choices]), [name for name in PARAMS if name != "result"])
    several = (
        " Your answer is taken for all of these calls; to answer them one by one, use the ledger's page or "
        f"`{command('resolve', record.identity, '--call=NAME …')}`."
        if number > 1
        else ""
    )
    fields = [name for name in PARAMS if number <= 1 or name != "result"]  # a result is one call's
    gets = "item has" if items else "task ends with" if record.calls == "body" else "call gives back"
    gives = f"; the {gets} the result that you give" if "result" in fields else ""
    lines += [
        "",
        f"*{HAPPENED}*: nothing is sent{gives}. "
        f"*{DO_IT}*: it is sent now. *{LEAVE}*: nothing is sent and the task fails.{several}",
    ]
    what = f"item {calls[0].name} of {record.identity}" if items else str(record.identity)
    return Question(f"Did {what} happen?", "\n".join(lines), fields)


def _items_in_doubt(ledger: Ledger, record: Record) -> int:
    counts = Items(ledger).count(record.id, record.generation)
    return sum(count.items for count in counts if count.state in OPEN)


PARAMS: Mapping[str, Any] = {
    "reference": {
        "value": "",
        "description": f"With “{HAPPENED}”: the vendor's own id of it, for whoever looks later.",
        "schema": {"type": ["string", "null"]},
    },
    "result": {
        "value": "",
        "description": f"With “{HAPPENED}”: what the call would have returned (where the task is one call: the task), "
        "as JSON; a text has its own quotes. Left empty, the task fails where its result is needed; "
        "`airflow runguard resolve` can still give it then.",
        "schema": {"type": ["string", "null"]},
    },
    "reason": {
        "value": "",
        "description": "How you know. Kept in the ledger with your name.",
        "schema": {"type": ["string", "null"]},
    },
}


def present(ti: Any, asked: Question) -> None:
    """Put the form before people. An answer to an earlier form of this task instance is wiped by it (Airflow 3.3.2)."""
    from airflow.sdk.execution_time.hitl import upsert_hitl_detail

    params = {name: PARAMS[name] for name in asked.fields}
    upsert_hitl_detail(ti_id=ti.id, subject=asked.subject, body=asked.body, options=list(ANSWERS), params=params)


@dataclass(frozen=True, slots=True)
class Asked:
    """What a form told of: the doubt that the holder of this fence had left, as far as it was known at that time. What
    came into doubt later was not asked about, so its answer does not settle it."""

    fence: int
    at: datetime


def park(since: datetime, asked: Asked, timeout: timedelta) -> NoReturn:
    """Leave the task instance parked with its form.

    :param since: when it was first asked. It comes back with what was ``asked``.
    """
    from airflow.sdk.exceptions import TaskAwaitingInput

    kwargs = {"since": since.isoformat(), "fence": asked.fence, "at": asked.at.isoformat()}
    raise TaskAwaitingInput(method_name=ANSWERED, kwargs=kwargs, timeout=min(timeout, LOOK_AGAIN))


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


def left_behind(ti: Any) -> Answer | None:
    """What the form of this task instance was answered while its try failed, so that no try heard it.

    An answer that comes before the scheduler has seen the parked process end can fail the try ("state mismatch",
    Airflow 3.3.2); the next try has the same form.
    """
    from airflow.sdk.exceptions import AirflowRuntimeError
    from airflow.sdk.execution_time.hitl import get_hitl_detail_content_detail

    try:
        form = get_hitl_detail_content_detail(ti.id)
    except AirflowRuntimeError:  # it has none any more
        return None
    return answer_of(form.model_dump())


ANEW = "it came into doubt anew after the form was made"


def apply(ledger: Ledger, record: Record, answer: Answer, asked: Asked) -> str:
    """Book a form's answer. For a batch, and for a task that makes its calls itself, it settles each item or call in
    doubt, so that the rest goes on after it.

    :returns: the ledger's word: ``ok``, ``too_early`` (ask again after ``no_later_than``), ``not_in_doubt`` (somebody
        was first), …
    """
    if answer.problem:
        return answer.problem
    if record.state is not State.IN_DOUBT or record.broken:
        return "not_in_doubt"
    if record.fence != asked.fence:
        return "somebody worked on it after the form was made"
    lost = ledger.check()["unknown_before"]
    if lost is not None and asked.at < lost:  # nobody knows what became of an answer to it
        return "the ledger lost time after the form was made"
    doubts = doubtful(ledger, record)
    if record.calls == "batch" and doubts:
        return _apply_to_items(ledger, record, answer, asked, doubts)
    calls = [call for call in doubts if call.first_unknown_at is None or call.first_unknown_at <= asked.at]
    since = record.first_unknown_at
    if (doubts and not calls) or (not doubts and since is not None and since > asked.at):
        return ANEW
    names: list[str | None] = [call.name for call in calls]
    if record.calls == "body" or (answer.word == "failed" and calls == doubts):
        names = [None]
    verdict = "ok"
    for name in names or [None]:
        verdict = ledger.resolve(
            record.id,
            answer.word,
            call=name,
            result=answer.result if len(names) <= 1 else None,
            actor=answer.actor,
            reason=answer.reason,
            reference=answer.reference,
            seen_fence=record.fence,
            known_by=asked.at,
        )
    return verdict


def _apply_to_items(ledger: Ledger, record: Record, answer: Answer, asked: Asked, calls: Sequence[Call]) -> str:
    """A result is one item's: only where no other is in doubt."""
    alone = len(calls) == 1 and answer.result is not None
    done = Items(ledger).resolve(
        record.id,
        answer.word,
        Selection(CallState.IN_DOUBT, names=(calls[0].name,)) if alone else DOUBTFUL,
        results=[answer.result] if alone else None,
        actor=answer.actor,
        reason=answer.reason,
        reference=answer.reference,
        seen_fence=record.fence,
        known_by=asked.at,
    )
    if done.left:
        return "too_early"
    return ANEW if done.verdict == "no_such_call" else done.verdict


def _shown(value: Any) -> str:
    return json.dumps(value, default=str, ensure_ascii=False) if value else ""


def _cell(text: str) -> str:
    return one_line(text).replace("|", "\\|")
