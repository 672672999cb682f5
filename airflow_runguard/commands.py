"""What each command does: plain functions over the ledger that return data that JSON can carry.

The command line prints what they return, and so may anything else. A change is made only to the record that was looked
at, and answers with what is true after it; a refusal is :class:`Refused`, which says what it means for the money and
what to type. Never imports Airflow.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import psycopg

from airflow_runguard import explain as words
from airflow_runguard.core import keys
from airflow_runguard.core.errors import LedgerNotReady, LedgerUnavailable, PlanningError
from airflow_runguard.core.items import Changed, Items, Selection
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Call, Event, Record, Result, State
from airflow_runguard.core.seam import Connect
from airflow_runguard.explain import command
from airflow_runguard.refusals import Refused, refusal

if TYPE_CHECKING:
    from airflow_runguard.config import Settings

Data = dict[str, Any]
BODY = "body"


# -- looking -----------------------------------------------------------------------------------------------------------


def list_records(ledger: Ledger, *, limit: int = 100, after: int = 0, **filters: Any) -> Data:
    """A page of records; ``next`` is the id to go on after, ``None`` on the last page."""
    found = ledger.list(after=after, limit=limit + 1, **filters)
    page = found[:limit]
    return {
        "now": ledger.check()["now"],
        "deployment": ledger.deployment,
        "records": [_record(record) for record in page],
        "next": page[-1].id if len(found) > limit else None,
    }


def find(ledger: Ledger, name: str, namespace: str | None = None) -> Record:
    """The one record that ``key`` or ``namespace/key`` means.

    :param namespace: then ``name`` is the key alone, exactly.
    :raises Refused: there is none, or there are several, which are listed.
    """
    if namespace is not None:
        record = ledger.get(keys.identity(ledger.deployment, namespace, name))
        found = [] if record is None else [record]
    else:
        found = ledger.find(name)
    found = [record for record in found if record.renamed_to is None] or found
    if len(found) == 1:
        return found[0]
    if not found:
        where = f" in namespace {namespace!r}" if namespace is not None else ""
        raise Refused(
            f"The ledger has no record {name!r}{where} of deployment {ledger.deployment!r}. Nothing was changed.",
            "Look for it with `airflow runguard list --key-prefix …`, or say another --deployment (what dag.test() did "
            "has one of its own: NAME~test).",
        )
    several = "; ".join(f"--namespace={r.identity.namespace} {r.identity.key}" for r in found)
    raise Refused(f"{name!r} names {len(found)} records: {several}. Nothing was changed.", "Say which one.")


def show(ledger: Ledger, record: Record) -> Data:
    """Everything that the ledger has of a record, except its history."""
    now = ledger.check()["now"]
    return {
        "now": now,
        **_record(record),
        "payload": dict(record.payload.readable),
        "result": shown_result(record.result),
        "calls": _calls(ledger, record, ledger.calls(record.id), ledger.events(record.id)),
    }


def explain(ledger: Ledger, record: Record) -> Data:
    """Its history as sentences, why it stands where it stands, who moves it on, and what to look up at the vendor."""
    meta = ledger.check()
    calls, events = ledger.calls(record.id), ledger.events(record.id)
    return {
        **_standing(record, calls, meta["now"]),
        "now": meta["now"],
        "record": _record(record),
        "lost_time": meta["lost_time"],
        "payload": dict(record.payload.readable),
        "calls": _calls(ledger, record, calls, events),
        "timeline": [
            {"at": e.at, "kind": e.kind, "actor": e.actor, "reason": e.reason, "sentence": words.sentence(e)}
            for e in events
        ],
    }


# -- people's changes --------------------------------------------------------------------------------------------------


def resolve(
    ledger: Ledger,
    record: Record,
    answer: str,
    *,
    actor: str,
    reason: str,
    call: str | None = None,
    result: bytes | None = None,
    reference: str | None = None,
    force: bool = False,
    as_of: datetime | None = None,
) -> Data:
    """Book what a person found out: ``happened``, ``did_not_happen``, or ``failed`` (leave it as it is).

    :param call: only this call; the task then goes on after it. The body of a task that is one call is all of it.
    :param as_of: ``updated_at`` of the record as the person looked at it: what came into doubt since is not answered.
        ``None``: the newest line is. Command and API demand it of ``did_not_happen``.
    :raises PlanningError: ``as_of`` is yet to come.
    """
    if call == BODY and record.calls == BODY:
        call = None
    verdict = ledger.resolve(
        record.id,
        answer,
        actor=actor,
        reason=reason,
        call=call,
        result=result,
        reference=reference,
        force=force,
        seen_fence=record.fence,
        known_by=_looked(ledger, record, as_of),
    )
    return changed(ledger, record, verdict)


def _looked(ledger: Ledger, record: Record, as_of: datetime | None) -> datetime | None:
    """The line itself may be from then: a database's clock can be put back."""
    if as_of is not None and as_of > max(filter(None, (ledger.check()["now"], record.updated_at))):
        raise PlanningError(
            f"Nobody looked at {as_of}, which is yet to come. Nothing was changed.", "Correct the time."
        )
    return as_of


def reopen(ledger: Ledger, record: Record, *, actor: str, reason: str, again_although_applied: bool = False) -> Data:
    """Order finished work anew, as a new generation with new vendor keys."""
    verdict = ledger.reopen(
        record.id,
        seen_generation=record.generation,
        seen_fence=record.fence,
        actor=actor,
        reason=reason,
        again_although_applied=again_although_applied,
    )
    return changed(ledger, record, verdict)


def items(ledger: Ledger, record: Record, selection: str | None, *, after: str = "", limit: int = 100) -> Data:
    """A page of a batch's items in order of their keys; ``next`` is the key to go on after, ``None`` on the last page.

    :raises Refused: it is no batch.
    """
    if record.calls != "batch":
        raise refusal(ledger, record, "no_batch")
    chosen = Selection.parse(selection) if selection else None
    found = Items(ledger).page(record.id, record.generation, chosen, after=after, limit=limit + 1)
    return {
        "now": ledger.check()["now"],
        "counts": [asdict(count) for count in Items(ledger).count(record.id, record.generation)],
        "items": _calls(ledger, record, found[:limit], ledger.events(record.id)),
        "next": found[limit - 1].name if len(found) > limit else None,
    }


def resolve_items(
    ledger: Ledger,
    record: Record,
    answer: str,
    chosen: Selection,
    *,
    actor: str,
    reason: str,
    result: bytes | None = None,
    reference: str | None = None,
    force: bool = False,
    as_of: datetime | None = None,
) -> Data:
    """:func:`resolve` for a selection of a batch's items. Those that may still arrive are left, and counted."""
    done = Items(ledger).resolve(
        record.id,
        answer,
        chosen,
        actor=actor,
        reason=reason,
        results=None if result is None else [result],
        reference=reference,
        force=force,
        seen_fence=record.fence,
        known_by=_looked(ledger, record, as_of),
    )
    left = f" {done.left} may still arrive at the vendor, so they were left." if done.left else ""
    return _items_changed(ledger, record, done, f"{done.items} item(s) settled.{left}")


def reopen_items(
    ledger: Ledger, record: Record, chosen: Selection, *, actor: str, reason: str, again_although_applied: bool = False
) -> Data:
    """Order a selection of a batch's items anew; the next run of the task calls them."""
    done = Items(ledger).reopen(
        record.id,
        chosen,
        seen_generation=record.generation,
        seen_fence=record.fence,
        actor=actor,
        reason=reason,
        again_although_applied=again_although_applied,
    )
    left = f" {done.left} happened or may have, so they were left." if done.left else ""
    return _items_changed(ledger, record, done, f"{done.items} item(s) are called by the next run.{left}")


def _items_changed(ledger: Ledger, record: Record, done: Changed, what: str) -> Data:
    told = changed(ledger, record, done.verdict)
    return {**told, "said": f"{what} {told['said']}", "items": done.items, "left": done.left}


def release(ledger: Ledger, record: Record, *, actor: str, reason: str) -> Data:
    """Take a record from its holder; what that one has open goes to ``in_doubt``."""
    return changed(ledger, record, ledger.release(record.id, actor=actor, reason=reason, seen_fence=record.fence))


def repair(ledger: Ledger, record: Record, *, state: str | None, seen: str, actor: str, reason: str) -> Data:
    """Accept a broken line as it stands (``state`` is ``None``) or give it a state.

    :param seen: the token that :func:`broken_line` showed.
    """
    try:
        verdict = ledger.repair(record.id, seen=seen, state=state, actor=actor, reason=reason)
    except PlanningError as error:
        raise Refused(error.what, error.remedy) from error
    except psycopg.Error as error:
        said = error.diag.message_primary or type(error).__name__
        raise Refused(
            f"{record.identity} cannot be repaired like that: {said}. Nothing was changed; no call is made for it.",
            "Say another state (`--set-state in_doubt` is always true of what nobody knows).",
        ) from error
    return changed(ledger, record, verdict)


def broken_line(ledger: Ledger, record: Record) -> Data:
    """What a person must see before a repair: the line as it is, why it is not trusted, and the token of this look.

    :raises Refused: it is not broken.
    """
    if not record.broken:
        raise refusal(ledger, record, "not_broken")
    choices = {
        "Nobody knows whether it happened": "--set-state=in_doubt",
        "It happened": "--set-state=done",
        "It did not happen, the next try is to run it": "--set-state=pending",
        "It may have happened, leave it": "--set-state=failed",
        "All of the line is right as it stands": "--accept",
    }
    return {
        **show(ledger, record),
        "why": record.broken,
        "seen": record.seen,
        "commands": {
            true: command("repair", record.identity, f"{choice} --seen={record.seen} --reason=…")
            for true, choice in choices.items()
        },
    }


def accept_payload(ledger: Ledger, record: Record, *, actor: str, reason: str) -> Data:
    """Let the next try bring another payload under the same key."""
    told = changed(ledger, record, ledger.accept_payload(record.id, actor=actor, reason=reason))
    if record.state is State.DONE:
        return {**told, "said": f"{told['said']} Its old result is given back; nothing is sent for the new payload."}
    return told


def accept_payload_of_items(ledger: Ledger, record: Record, chosen: Selection, *, actor: str, reason: str) -> Data:
    """:func:`accept_payload` for a selection of a batch's items. What may have happened is left, and counted."""
    done = Items(ledger).accept_payload(record.id, chosen, seen_fence=record.fence, actor=actor, reason=reason)
    left = f" Nobody knows whether {done.left} happened, so they were left." if done.left else ""
    what = f"{done.items} item(s) take whatever payload the next run's list has for them.{left}"
    return _items_changed(ledger, record, done, what)


def rename(ledger: Ledger, record: Record, new: str, *, namespace: str | None, actor: str, reason: str) -> Data:
    """Give a record another key, and another namespace where one is said. The old name stays behind, leading to it."""
    name = keys.identity(ledger.deployment, namespace or record.identity.namespace, new)
    if name == record.identity:
        raise Refused(f"{name} has that name already. Nothing was changed.", "Say another one.")
    verdict = ledger.rename(record.id, namespace=name.namespace, key=name.key, actor=actor, reason=reason)
    if verdict == "taken":
        raise Refused(
            f"There is another record named {name}; two records under one name would be two charges for one order. "
            "Nothing was changed.",
            f"Look at it (`{command('explain', name)}`), and choose another name.",
        )
    return changed(ledger, record, verdict)


def sweep(ledger: Ledger, *, actor: str) -> Data:
    """Settle what died: an open call goes to ``in_doubt``, a record that called nothing to ``pending``."""
    swept = []
    while batch := ledger.sweep(actor):
        swept += batch
    doubtful = [str(identity) for identity, state in swept if state is State.IN_DOUBT]
    waiting = [str(identity) for identity, state in swept if state is State.PENDING]
    said = f"{len(swept)} dead holder(s) found."
    if doubtful:
        said += f" Nobody knows whether these happened: {', '.join(doubtful)}. `airflow runguard explain` each."
    if waiting:
        said += f" These did not happen, the next try runs them: {', '.join(waiting)}."
    return {"said": said, "in_doubt": doubtful, "pending": waiting}


# -- the classifier ----------------------------------------------------------------------------------------------------


def classify(
    text: str, *, status: int | None, headers: Sequence[str], url: str, reads: bool, at: datetime | None
) -> Data:
    """What an answer or an error that is only text would be decided to mean, and by which rule. Asks no ledger.

    :param text: a body, a whole answer with status line and headers, or a traceback. :param reads: no effect at stake.
    :raises PlanningError: there is nothing in it to judge.
    """
    from airflow_runguard.core.failures import decide, texts

    try:
        if status is None and not headers and not text.startswith("HTTP/") and texts.is_traceback(text):
            error = texts.read_traceback(text)
        else:
            error = texts.read_response(text, status, headers, url)
    except ValueError as nothing:
        raise PlanningError(
            f"There is nothing to judge: {nothing}.",
            "Give --status N, a FILE with the body or the traceback, or `-` and pipe it in.",
        ) from nothing
    kind = "read" if reads else "write"
    decision = decide(error, effect_kind=kind, now=at or datetime.now(UTC))
    failure, rule = decision.failure, decision.rule
    return {
        "said": words.decided(failure, reads=reads),
        **asdict(failure),
        "rule": None if rule is None else {"name": rule.name, "says": rule.says, "source": rule.source},
    }


# -- the ledger itself -------------------------------------------------------------------------------------------------


def db_upgrade(connect: Connect | None, *, deployment: str, sql: bool) -> Data:
    """Bring the schema to this version and bind the ledger to ``deployment``; with ``sql``, only say the statements.

    :param connect: ``None`` only with ``sql``.
    :raises LedgerUnavailable: out of reach. :raises LedgerNotReady: no right to change it, or not ours.
    """
    from sqlalchemy.exc import DBAPIError

    from airflow_runguard.core.migrations import upgrade

    def nowhere() -> psycopg.Connection[Any]:
        raise AssertionError("statements are made without a ledger")

    try:
        statements = upgrade(connect or nowhere, deployment=deployment, sql=sql)
    except (DBAPIError, psycopg.Error) as error:
        cause = error.orig if isinstance(error, DBAPIError) else error
        said = (str(cause).strip() or type(cause).__name__).splitlines()[0]
        if isinstance(cause, psycopg.errors.InsufficientPrivilege):
            raise LedgerNotReady(
                f"This role may not change the ledger's schema: {said}. Nothing was changed.",
                "Give `airflow runguard db upgrade --sql` to a DBA, or use a Connection whose role owns the schema.",
            ) from error
        raise LedgerUnavailable(f"The ledger could not be upgraded: {said}. Nothing was changed.") from error
    if sql:
        return {"sql": statements}
    return {"said": f"The ledger is at this version's schema and belongs to deployment {deployment!r}."}


def db_check(ledger: Ledger) -> Data:
    """Whether this deployment may use the ledger, and what it says of itself.

    :raises LedgerNotReady: it may not, or it lost time.
    """
    meta = ledger.check()
    if meta["lost_time"]:
        raise LedgerNotReady(
            f"The ledger lost time: {meta['lost_time']}. What looks new may have been done in the time that is gone, "
            "so no call is made.",
            "Find out what was lost, then run `airflow runguard db acknowledge-restore --lost-since T --reason …` or "
            "`… --nothing-lost --reason …`.",
        )
    shown = ("deployment", "schema_version", "epoch", "unknown_before", "server_version", "now")
    return {"said": "The ledger can be used.", **{name: meta[name] for name in shown}}


def acknowledge_restore(ledger: Ledger, *, lost_since: datetime | None, actor: str, reason: str) -> Data:
    """Use a ledger again that lost time. ``lost_since`` is ``None`` where nothing was lost."""
    meta = ledger.check()
    if lost_since is not None and lost_since > meta["now"]:
        raise PlanningError(
            "--lost-since lies in the future, so it cannot be when the lost time began.", "Say when it was."
        )
    epoch = ledger.acknowledge_restore(lost_since=lost_since, actor=actor, reason=reason)
    said = (
        "The ledger may be used again, and nothing counts as lost."
        if lost_since is None
        else (
            "The ledger may be used again. Work of runs older than now that it does not know is in doubt from here on: "
            "a person says for each whether it happened in the time that is gone."
        )
    )
    return {"said": said, "epoch": epoch, "lost_time": meta["lost_time"]}


def doctor(connect: Connect, *, deployment: str, settings: Settings | None) -> Data:
    """Every check of :mod:`~airflow_runguard.doctor`; ``failed`` where one failed."""
    from airflow_runguard.doctor import FAIL, examine

    checks = examine(connect, deployment=deployment, settings=settings)
    failed = [check.name for check in checks if check.status == FAIL]
    said = f"Mend first: {', '.join(failed)}." if failed else "No check failed."
    return {"said": said, "failed": failed, "checks": [asdict(check) for check in checks]}


# -- what comes back ---------------------------------------------------------------------------------------------------


def _record(record: Record) -> Data:
    """The line's own fields. ``state`` is ``broken`` where the line cannot be trusted, whatever word it has there."""
    plain = asdict(record)
    for name in ("payload", "result", "seen", "identity", "calls"):
        del plain[name]
    return {
        **asdict(record.identity),
        **plain,
        "state": "broken" if record.broken else str(record.state),
        "call_style": record.calls,
        "renamed_to": None if record.renamed_to is None else str(record.renamed_to),
    }


def shown_result(result: Result | None) -> Any:
    """The stored value where it is plain data, else the stored text: nothing is imported to look at a result."""
    if result is None:
        return None
    if result.data is None:
        return {"stored": False, "why": result.missing}
    from airflow_runguard.codec import load

    try:
        value = load(result.data)
        json.dumps(value)
    except Exception:  # whatever is wrong with it, the bytes are what can be shown
        try:
            value = result.data.decode()
        except UnicodeDecodeError:
            value = base64.b64encode(result.data).decode()
    return {"stored": True, "value": value}


def _calls(ledger: Ledger, record: Record, calls: Sequence[Call], events: Sequence[Event]) -> list[Data]:
    """The calls with the key that each was sent under, made from the name that the record had then."""
    shown = []
    for call in calls:
        vendor_key = keys.sent_under(ledger.installation, record.identity, events, call)
        shown.append({**asdict(call), "vendor_key": vendor_key, "open": call.state in words.OPEN})
    return shown


def _standing(record: Record, calls: Sequence[Call], now: datetime) -> Data:
    return asdict(words.standing(record, calls, now))


def changed(ledger: Ledger, before: Record, verdict: str) -> Data:
    """What is true after a change.

    :raises Refused: there was none.
    """
    if verdict != "ok":
        raise refusal(ledger, _again(ledger, before), verdict)
    now = ledger.check()["now"]
    after = _again(ledger, before)
    stands = words.standing(after, ledger.calls(after.id), now)
    was, is_ = _record(before)["state"], _record(after)["state"]
    moved = f"{was} → {is_}" if was != is_ else f"still {is_}"
    return {
        "said": f"{after.identity}: {moved}. {stands.why} Who moves it on: {stands.who}.",
        "record": _record(after),
        **asdict(stands),
    }


def _again(ledger: Ledger, record: Record) -> Record:
    """The record as it is now, under whatever name it has now: its id is what stays."""
    return next((r for r in ledger.list(after=record.id - 1, limit=1) if r.id == record.id), record)
