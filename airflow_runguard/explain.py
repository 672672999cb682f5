"""A record in sentences: what happened when and by whom, why it stands where it stands, and who moves it on.

Made for the person who is woken up. Says nothing that the ledger does not say, and never guesses whether an effect
happened. Reads values only: no ledger, no clock (``now`` is the database's).
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from airflow_runguard.core.record import (
    FOR_GOOD,
    Call,
    CallState,
    Completeness,
    Effect,
    Event,
    Failure,
    FailureClass,
    Identity,
    Record,
    State,
)

OPEN = (CallState.STARTED, CallState.IN_DOUBT)
SHOWN = 20
"""Items that a sentence names at most."""


@dataclass(frozen=True, slots=True)
class Standing:
    """:param why: it stands where it stands. :param who: moves it on. :param commands: what is true → what to type."""

    why: str
    who: str
    commands: Mapping[str, str] = field(default_factory=dict)


def command(verb: str, identity: Identity, options: str = "") -> str:
    """A line to paste into a shell."""
    name = shlex.quote(str(identity))
    options = f"{options} {identity.where}".strip()
    parts = (verb, options, "--", name) if str(identity).startswith("-") else (verb, name, options)
    return " ".join(("airflow runguard", *filter(None, parts)))


def iso(moment: datetime) -> str:
    return moment.astimezone(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")


def when(moment: datetime | None, now: datetime) -> str:
    """``2026-03-10T12:00:00Z (3 min ago)``; '' for no time."""
    if moment is None:
        return ""
    seconds = (now - moment).total_seconds()
    if abs(seconds) < 1:
        return f"{iso(moment)} (now)"
    units = (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172_800), ("days", 86_400, float("inf")))
    span = next(f"{abs(seconds) / length:.0f} {unit}" for unit, length, limit in units if abs(seconds) < limit)
    return f"{iso(moment)} ({span} ago)" if seconds > 0 else f"{iso(moment)} (in {span})"


def one_line(text: str) -> str:
    """So that a vendor's words cannot look like lines of ours."""
    return " ".join(text.split())


def standing(record: Record, calls: Sequence[Call], now: datetime) -> Standing:
    """Why the record stands where it stands, and who moves it on with which command."""
    name = record.identity
    anew = {"A second effect is meant": command("reopen", name, "--again-although-applied --reason=…")}
    happened = {"It happened": command("resolve", name, "--happened --result=JSON --reason=…")}
    if record.broken:
        return Standing(
            f"Its line in the ledger cannot be trusted: {record.broken}. Nothing is called for it and nothing is "
            "overwritten, since what it says of the money may be wrong.",
            "A person looks at the line, asks the vendor, and repairs it",
            {"First": command("repair", name)},
        )
    if record.renamed_to is not None:
        return _former_name(record)
    if record.holder.observes and record.state is not State.RUNNING:
        return _observed(record, now)
    if record.calls == "batch" and record.state in (State.FAILED, State.PAUSED, State.DONE):
        return _batch(record, calls, now)
    match record.state:
        case State.PENDING:
            return _pending(record, calls)
        case State.RUNNING:
            return _running(record, now)
        case State.DONE:
            return Standing(
                f"It happened; booked at {when(record.finished_at, now)}. {_stored(record)}",
                "Nobody: it never runs again by itself. A person may order it anew, which has the effect a second time",
                anew,
            )
        case State.PAUSED:
            return Standing(
                f"It waits, and waiting will mend it: {_trouble(record)}. It did not happen.",
                f"The task does, by itself, {_not_before(record, now)}",
                _wakes(record, now),
            )
        case State.FAILED if record.effect is Effect.NOT_APPLIED:
            unplanned = record.failure_class is FailureClass.PLANNING  # what was sent beside guard.call is not known
            it = "No guarded call of it happened" if unplanned else "It did not happen"
            return Standing(
                f"{it}, and waiting will not mend it: {_trouble(record)}.",
                "A person mends the cause and clears the task; the next try then runs it"
                if record.needs_person
                else "The next try or run does; clear the task if there is none",
                _let_go(record, calls),
            )
        case State.FAILED if record.effect is Effect.APPLIED:
            return Standing(
                f"It happened, but what came back was refused: {_trouble(record)}. It does not run again, since that "
                "would have the effect twice.",
                "A person says what its result is, or orders it anew",
                happened | anew,
            )
        case State.FAILED:
            return Standing(
                f"It failed for good, and it may have happened: {_trouble(record)}. It does not run again.",
                "A person, who finds out that it happened after all, or orders it anew (after asking the vendor)",
                happened | anew,
            )
        case _:
            return _in_doubt(record, calls, now)


def _former_name(record: Record) -> Standing:
    return Standing(
        f"It is only a former name of {record.renamed_to}: what was ordered under it is that record. Whoever orders it "
        "under this name is given the result of that, or is refused while there is none, and nothing is called.",
        "Nobody. A person may free the name for other work, which has vendor keys of its own",
        {
            "That record": command("explain", record.renamed_to or record.identity),
            "Other work is to be done under this name": command(
                "reopen", record.identity, "--again-although-applied --reason=…"
            ),
        },
    )


def _pending(record: Record, calls: Sequence[Call]) -> Standing:
    why = f" ({one_line(record.error)})" if record.error else ""
    next_one = "The next try or run does; clear the task if there is none"
    done = [call for call in calls if call.generation == record.generation and call.state is CallState.DONE]
    if record.calls == "batch" or not done:
        begun = (
            "What is done of its items is not called again; the others have" if record.calls == "batch" else "It has"
        )
        return Standing(f"{begun} not begun, or it is proven that it did not happen{why}.", next_one)
    named = ", ".join(call.name for call in done[:SHOWN]) + (", …" if len(done) > SHOWN else "")
    lacking = [call.name for call in done if call.result_missing]
    if not lacking:
        return Standing(
            f"Part of it happened and is not called again: {named}. The rest is still to be done{why}.", next_one
        )
    give = {
        f"The result of {name!r}": command(
            "resolve", record.identity, f"--call={shlex.quote(name)} --happened --result=JSON --reason=…"
        )
        for name in lacking[:SHOWN]
    }
    return Standing(
        f"Part of it happened and is not called again: {named}. But nobody has said what came back of "
        f"{', '.join(lacking[:SHOWN])}, so a task that reads that ends in an error, without calling anything{why}.",
        "A person says what the call gave back; then clear the task",
        give,
    )


def _observed(record: Record, now: datetime) -> Standing:
    """What a guard would keep from happening, nobody keeps from happening here."""
    unguarded = "Its task is only observed: a retry or a clear of it makes the call again"
    happened = {"It happened": command("resolve", record.identity, "--happened --result=JSON --reason=…")}
    match record.state:
        case State.DONE:
            return Standing(
                f"It happened; booked at {when(record.finished_at, now)}. {unguarded}.",
                "Nobody. Clear the task only if a second effect is meant, until it is guarded",
            )
        case State.PENDING | State.PAUSED:
            return Standing(f"It did not happen, as its task said. {unguarded}.", "The next try or run does")
        case State.FAILED if record.effect is Effect.NOT_APPLIED:
            return Standing(f"It did not happen: {_trouble(record)}. {unguarded}.", "The next try or run does")
        case State.FAILED:
            return Standing(
                f"It failed, and it may have happened: {_trouble(record)}. {unguarded}.",
                "A person, who asks the vendor before the task is cleared",
                happened,
            )
        case _:
            denied = command("resolve", record.identity, f"--did-not-happen {_as_of(record)} --reason=…")
            return Standing(
                f"Nobody knows whether it happened: {_trouble(record)}. {unguarded}, although it may have happened.",
                "A person, who asks the vendor before the task is cleared, and says what is true",
                {**happened, "It did not happen": denied},
            )


def _running(record: Record, now: datetime) -> Standing:
    if (
        record.resume_at is not None or record.lease_until is None
    ):  # a time that Python does not know; else it is broken
        late = (
            f" It was to be back by {when(record.lease_until, now)}: while a freeze or its gate holds it back, that is "
            "no death; else a sweep books that nobody knows whether it happened."
            if record.lease_until is not None and record.lease_until <= now
            else ""
        )
        return Standing(
            f"{record.holder} was told to wait after it had deferred, and keeps its place; {_open(record)}.{late}",
            f"Its task, which comes back by itself, {_not_before(record, now)}",
            _wakes(record, now) | {"Its task is gone for good": command("release", record.identity, "--reason=…")},
        )
    if record.lease_until > now:
        return Standing(
            f"{record.holder} works on it; {_open(record)}. Its lease ends at {when(record.lease_until, now)} unless "
            "it is renewed.",
            "Its holder does. If that is certainly dead or hung, a person may take it away",
            {"It is dead or hung": command("release", record.identity, "--reason=…")},
        )
    after = "nobody will know whether it happened" if record.open_calls else "the next try runs it"
    return Standing(
        f"Its holder ({record.holder}) has been silent since its lease ended at {when(record.lease_until, now)}, with "
        f"{_open(record)}; once that is booked, {after}.",
        "The next try does, or a sweep, which does not wait for it",
        {"At once": "airflow runguard sweep"},
    )


def _in_doubt(record: Record, calls: Sequence[Call], now: datetime) -> Standing:
    name = record.identity
    doubtful = [call.name for call in calls if call.generation == record.generation and call.state in OPEN]
    which = f" The calls in question: {', '.join(doubtful)}." if doubtful and doubtful != ["body"] else ""
    early = ""
    if record.no_later_than is not None and record.no_later_than > now:
        early = (
            " It is too early to say that it did not happen: its request may still reach the vendor until "
            f"{when(record.no_later_than, now)}."
        )
    others = {
        "ask": "",
        "reconcile": ", or the task's next try, which asks the vendor",
        "replay": ", or the task's next try, which repeats it under its vendor key while the vendor remembers that",
    }[record.on_doubt]
    if record.resume_at is not None:
        others += f"; at its gate it has its turn {when(record.resume_at, now)}"
    commands = {}
    if record.calls == "batch":
        commands["All of these happened"] = command("resolve", name, "--items=in_doubt --happened --reason=…")
        denied = f"--items=in_doubt --did-not-happen {_as_of(record)} --reason=…"
        commands["None of them did"] = command("resolve", name, denied)
        commands["Only one of them did"] = command(
            "resolve", name, "--items=key=ITEM --happened --result=JSON --reason=…"
        )
        which = f" The items in question: {', '.join(doubtful[:SHOWN])}{', …' if len(doubtful) > SHOWN else ''}."
        doubtful = []
    for call in doubtful or ([] if record.calls == "batch" else ["body"]):
        # Of an explicit task only the call is settled: what comes after it is still to be done.
        only, it = ("", "It") if call == "body" else (f" --call={shlex.quote(call)}", f"{call!r}")
        commands[f"{it} happened"] = command("resolve", name, f"--happened{only} --result=JSON --reason=…")
        denied = f"--did-not-happen{only} {_as_of(record)} --reason=…"
        commands[f"{it} did not happen"] = command("resolve", name, denied)
    return Standing(
        f"Nobody knows whether it happened: {_trouble(record)}. It is not sent again blindly.{which}{early}",
        f"A person, who looks it up at the vendor and says what is true{others}",
        {**commands, "Nobody can find out, leave it": command("resolve", name, "--failed --reason=…")},
    )


def _as_of(record: Record) -> str:
    """So that "it did not happen" does not deny what a stale holder reports while a person looks it up."""
    return f"--as-of={record.updated_at.astimezone(UTC).isoformat().replace('+00:00', 'Z')}"


def _batch(record: Record, calls: Sequence[Call], now: datetime) -> Standing:
    """A batch's items have their own states; what it says of itself counts them."""
    name = record.identity
    look = {"Its items": command("items", name)}
    failed = {"They are corrected": command("reopen", name, "--items=failed:validation --reason=…")}
    if record.state is State.DONE and record.completeness is Completeness.FULL:
        return Standing(
            f"Every item of its list happened; booked at {when(record.finished_at, now)}.",
            "Nobody: a clear calls only items that are new in the list. A person may order items anew",
            look,
        )
    if record.state is State.PAUSED:
        return Standing(
            f"It waits, and waiting will mend it: {_trouble(record)}. What is done is not called again.",
            f"The task does, by itself, {_not_before(record, now)}",
            look | _wakes(record, now),
        )
    ended = "Not every item happened, which its author allows" if record.state is State.DONE else "It did not end"
    return Standing(
        f"{ended}: {_trouble(record)}. What is done is not called again.",
        "The next try or clear calls what may go on; that an item itself was mended, a person says",
        look | failed | _let_go(record, calls),
    )


def _let_go(record: Record, calls: Sequence[Call]) -> dict[str, str]:
    """What lets a record go on that may wait no longer, although the vendor told it (or its gate) to."""
    told = any(call.generation == record.generation and call.state is CallState.PAUSED for call in calls)
    if record.state is not State.FAILED or record.failure_class is not FailureClass.QUOTA or not (told or record.gate):
        return {}
    let_go = _opens(record.identity, record.gate) if record.gate else command("resume", record.identity, "--reason=…")
    return {"The vendor lets it go on now; then clear the task": let_go}


def _opens(identity: Identity, gate: str) -> str:
    return f"airflow runguard quota open {shlex.quote(gate)} {identity.where}".rstrip() + " --reason=…"


def _for_good(record: Record, now: datetime) -> bool:
    return record.resume_at is None or (record.resume_at - now).total_seconds() > FOR_GOOD


def _not_before(record: Record, now: datetime) -> str:
    if _for_good(record, now):
        return f"when somebody opens gate {record.gate}" if record.gate else "when somebody lets it go on"
    return f"not before {when(record.resume_at, now)}"


def _wakes(record: Record, now: datetime) -> dict[str, str]:
    """What lets a record go on now that waits."""
    if record.gate and _for_good(record, now):
        return {"The vendor lets it go on now": _opens(record.identity, record.gate)}
    return {"It may go on now": command("resume", record.identity, "--reason=…")}


def _open(record: Record) -> str:
    if not record.open_calls:
        return "no call is open"
    return f"{record.open_calls} call{'s are' if record.open_calls > 1 else ' is'} open"


def _trouble(record: Record) -> str:
    said = one_line(record.error or record.evidence) or "no reason was booked"
    kind = f" [{record.failure_class}]" if record.failure_class not in (None, FailureClass.UNKNOWN) else ""
    return said.rstrip(".") + kind


def _stored(record: Record) -> str:
    result = record.result
    if result is not None and result.data is not None:
        return "Its result is stored; a clear gives it back without calling anything."
    if record.store_result == "none":
        return "It keeps no result (store_result='none'); a clear gives back None without calling anything."
    why = (result.missing if result else "") or f"store_result='{record.store_result}'"
    return f"Its result is not stored ({why}); a clear ends in an error without calling anything."


def sentence(event: Event) -> str:
    """One event in plain words, without its time."""
    detail = event.detail
    because = f": {one_line(event.reason).rstrip('.')}" if event.reason else ""
    call = f"call {detail['call']!r}" if detail.get("call") else "the whole record"
    match event.kind:
        case "claimed":
            return f"{event.actor} took it on (fence {event.fence})."
        case "reentered":
            return f"{event.actor} came back from waiting (fence {event.fence})."
        case "taken_over":
            return (
                f"{event.actor} took it over from a holder that was silent and had nothing open (fence {event.fence})."
            )
        case "handed_over":
            return f"{event.actor} went to wait in Airflow{because}."
        case "resend":
            return f"{event.actor} sends again under the same vendor key{because}."
        case "attaches":
            return f"{event.actor} took it on to attach to the job that was submitted (fence {event.fence})."
        case "remembered":
            late = ", too late to be of use but for looking it up" if detail.get("late") else ""
            kind = "job" if detail.get("submitted") else "reference"
            return f"{event.actor} kept the vendor's {kind} {detail.get('external_id')!r} of {call}{late}."
        case "effect_missing" | "effect_denied" | "effect_twice":
            return f"{event.actor} compared with the vendor's list{because}."
        case "called":
            return f"{event.actor} was about to send {call}, attempt {detail.get('attempt', 1)}."
        case "answered":
            ended = _plain(detail.get("state"))
            return f"{call[0].upper()}{call[1:]} ended as {ended}{because}{_evidence(detail)}."
        case "done":
            return f"{event.actor} booked that it happened."
        case "released":
            return f"{event.actor} let go of it; nothing is open{because}."
        case "waits":
            return f"{event.actor} may send it again, and waits for its turn{because}."
        case "paused" | "failed" | "in_doubt":
            return f"{event.actor} booked it as {_plain(event.kind)}{because}{_evidence(detail)}."
        case "poison":
            return f"{event.actor} found it poisoned{because}."
        case "late_outcome":
            return (
                f"{event.actor}, no longer its holder (fence {event.fence}), reported late: {call} ended as "
                f"{_plain(detail.get('state'))}, effect {_plain(detail.get('effect'))}{because}. Kept as evidence."
            )
        case "payload_changed":
            return f"{event.actor} brought another payload, which counts from here on{because}."
        case "resolved":
            reference = f", vendor's reference {detail['reference']}" if detail.get("reference") else ""
            forced = ", forced although it was too early to know" if detail.get("forced") else ""
            said = {"happened": "it happened", "did_not_happen": "it did not happen"}.get(
                detail.get("answer", ""), "leave it as failed"
            )
            return f"{event.actor} said of {call}: {said}{reference}{forced}{because}."
        case "items_called":
            return f"{event.actor} was about to send the items {_names(detail)}."
        case "items_answered":
            return f"Items were answered: {_names(detail)}."
        case "items_resolved":
            answer = {"happened": "they happened", "did_not_happen": "they did not happen"}.get(
                detail.get("answer", ""), "leave them as failed"
            )
            return f"{event.actor} said of {detail.get('items')} item(s) ({_names(detail)}): {answer}{because}."
        case "items_reopened":
            return f"{event.actor} ordered {detail.get('items')} item(s) anew ({_names(detail)}){because}."
        case "items_accepted":
            which = f"{detail.get('items')} item(s) ({_names(detail)})"
            return f"{event.actor} lets the next list bring another payload for {which}{because}."
        case "reopened":
            return f"{event.actor} ordered it anew, as generation {event.generation}{because}."
        case "payload_accepted":
            return f"{event.actor} lets the next try bring another payload{because}."
        case "renamed":
            return f"{event.actor} gave it its present name; before it was {'/'.join(detail.get('from', ()))}{because}."
        case "left_behind":
            return f"{event.actor} named the record {'/'.join(detail.get('to', ()))}; this name stays behind{because}."
        case "turn_missed":
            return f"{event.actor} came too late for its turn at the gate, and was given another{because}."
        case "turn_given_up":
            return f"{event.actor} gave its turn at the gate up: it is not sent again by itself, so somebody is asked."
        case "repaired":
            return f"{event.actor} repaired the line{because}. The old line is kept in this event."
        case "observed_started" | "observed_done" | "observed_failed" | "observed_skipped":
            return f"{event.actor}, only observed, {_OBSERVED[event.kind]}{because}."
        case "observed_again" if detail.get("verdict") == "late":
            return f"{event.actor}, only observed, {_OBSERVED['observed_' + detail['what']]}, but another one held it."
        case "observed_again":
            did = _OBSERVED["observed_" + str(detail.get("what", "started"))]
            return f"{event.actor}, only observed, {did} once more; under a guard this would have been{because[1:]}."
        case "airflow_was_told":
            return f"{event.actor} told Airflow that its task is {event.reason}. This record says what is true."
        case kind:
            return f"{event.actor}: {kind}{because}."


_OBSERVED = {
    "observed_started": "began",
    "observed_done": "ended well",
    "observed_failed": "ended in an error",
    "observed_skipped": "skipped itself",
}


def decided(failure: Failure, *, reads: bool = False) -> str:
    """What becomes of a call that ends like this."""
    if failure.effect is Effect.UNKNOWN:
        again = (
            f" (where repeating is declared safe: after {failure.resume_after:,.0f} s)"
            if failure.pausable and failure.resume_after is not None
            else ""
        )
        return f"In doubt: nobody knows whether it happened. It is not sent again blindly{again}."
    if failure.pausable:
        wait = max(failure.resume_after or 0.0, failure.floor or 0.0)
        told = "the vendor says" if failure.resume_after is not None else "no wait is said, so at least"
        return f"Paused: it did not happen, and waiting mends it ({told} {wait:,.0f} s)."
    if failure.needs_person:
        return "Failed: it did not happen, and neither waiting nor retrying mends it. A person must act."
    harmless = "it only reads" if reads else "it did not happen"
    return f"Failed: {harmless}, so the next try may do it."


def _names(detail: Mapping[str, Any]) -> str:
    names = [str(name) for name in detail.get("names", ())]
    return ", ".join(names[:SHOWN]) + (", …" if len(names) > SHOWN else "")


def _plain(word: Any) -> str:
    return str(word or "not known").replace("_", " ")


def _evidence(detail: Mapping[str, Any]) -> str:
    return f" [{one_line(detail['evidence'])}]" if detail.get("evidence") else ""
