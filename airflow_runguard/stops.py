"""What people stop and let go on: gates, freezes, one paused record; and work that they did by hand.

Like ``commands.py``: plain functions over the ledger whose data JSON can carry. Never imports Airflow.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from airflow_runguard import commands
from airflow_runguard.commands import Data
from airflow_runguard.core import keys
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Record
from airflow_runguard.explain import command, iso
from airflow_runguard.refusals import Refused, refusal

QUOTA = "Its name is what the tasks say as `quota=`."
SHOWN = 50
"""Waiting records that ``quota show`` lists."""


def gates(ledger: Ledger) -> Data:
    """Every gate that was ever named by a pause or a person."""
    return {"now": ledger.check()["now"], "gates": [_gate(row) for row in ledger.gates()]}


def gate(ledger: Ledger, name: str) -> Data:
    """One gate, and the first of those that wait for it, each in its turn: what is paused, what keeps its place, and
    what is in doubt and may be sent again.

    :raises Refused: there is none.
    """
    shown = [
        {"record": str(r.identity), "state": r.state, "resume_at": r.resume_at, "holder": str(r.holder)}
        for r in ledger.waiting(name, limit=SHOWN)
    ]
    return {"now": ledger.check()["now"], **_gate(_found(ledger, name)), "records": shown}


def close_gate(ledger: Ledger, name: str, *, until: datetime, rate: float, actor: str, reason: str) -> Data:
    """Nothing that names this gate calls before ``until``.

    :raises Refused: that is over already.
    """
    now = ledger.check()["now"]
    if until <= now:
        raise Refused(f"{iso(until)} is over, so nothing would wait. Nothing was changed.", "Say a later time.")
    known = ledger.gates(name)
    ledger.close_gate(keys.gate_name(name), until=until, rate=rate, actor=actor, reason=reason)
    row = _found(ledger, name)
    told = f"Gate {name} is closed until {iso(row['closed_until'])}. {_waiting(row)}"
    if not known:
        told += f" Nothing was ever paused by it, or said of it: if it is misspelt, tasks go on calling. {QUOTA}"
    return {"said": told, **_gate(row)}


def open_gate(ledger: Ledger, name: str, *, rate: float, actor: str, reason: str) -> Data:
    """Those that wait go on from now, one by one; an answer to an older call does not close it again.

    :raises Refused: there is no such gate.
    """
    row = _found(ledger, name)
    ledger.open_gate(name, rate=rate, actor=actor, reason=reason)
    each = row["rate"] or rate
    return {
        "said": f"Gate {name} is open. {_waiting(row)} {each:g} of them go on each second.",
        **_gate(_found(ledger, name)),
    }


def set_rate(ledger: Ledger, name: str, *, rate: float | None, default: float, actor: str, reason: str) -> Data:
    ledger.set_rate(keys.gate_name(name), rate=rate, default=default, actor=actor, reason=reason)
    return {
        "said": f"{rate or default:g} of those that wait for gate {name} go on each second.",
        **_gate(_found(ledger, name)),
    }


def freeze(ledger: Ledger, scope: str, value: str, *, actor: str, reason: str) -> Data:
    """No new call starts in the scope: tasks wait, what is under way is settled.

    :raises Refused: it is frozen already.
    """
    if ledger.freeze(scope, value, actor=actor, reason=reason) == "already":
        raise Refused(
            f"{_scope(scope, value)} is frozen already. Nothing was changed.", "Run `airflow runguard freezes`."
        )
    told = f"{_scope(scope, value)} is frozen: no new call starts. Calls under way are settled; tasks wait."
    filters = {"dag_id": "dag_id", "namespace": "namespace", "key_prefix": "prefix"}
    if scope in filters and not ledger.list(**{filters[scope]: value}, limit=1):  # type: ignore[arg-type]
        told += " But the ledger has no record there: if it is misspelt, tasks go on calling."
    return {
        "said": told,
        "commands": {"To let it go on": f"airflow runguard thaw {_flag(scope, value)} --reason=…"},
    }


def thaw(ledger: Ledger, scope: str, value: str, *, actor: str, reason: str) -> Data:
    """:raises Refused: it was not frozen."""
    if ledger.thaw(scope, value, actor=actor, reason=reason) == "missing":
        raise Refused(
            f"{_scope(scope, value)} is not frozen under that scope. Nothing was changed.",
            "Run `airflow runguard freezes`; thaw what it lists, with the same words.",
        )
    left = len(ledger.freezes())
    more = f" {left} other freeze(s) are in force: `airflow runguard freezes`." if left else ""
    return {"said": f"{_scope(scope, value)} goes on.{more}"}


def freezes(ledger: Ledger, *, thawed: bool = False) -> Data:
    rows = [
        {name: value for name, value in row.items() if name != "deployment"} for row in ledger.freezes(thawed=thawed)
    ]
    return {"now": ledger.check()["now"], "freezes": rows}


def resume(ledger: Ledger, record: Record, *, actor: str, reason: str) -> Data:
    """Let a record go on now that is paused or keeps its place, if its gate lets it."""
    verdict = ledger.resume_now(record.id, actor=actor, reason=reason, seen_fence=record.fence)
    return commands.changed(ledger, record, verdict)


def bypass(
    ledger: Ledger, key: str, namespace: str, *, result: bytes | None, reference: str | None, actor: str, reason: str
) -> Data:
    """Book work that was done by hand: its task then gives the result back and calls nothing.

    :raises Refused: a task works on it, nobody knows whether it happened, or some of it is done.
    """
    identity = keys.identity(ledger.deployment, namespace, key)
    known = ledger.get(identity) is not None
    verdict = ledger.bypass(identity, result=result, reference=reference, actor=actor, reason=reason)
    if verdict == "renamed":
        raise refusal(ledger, commands.find(ledger, key, namespace), verdict)
    if verdict != "ok":
        raise Refused(
            f"{identity} is {verdict.replace('_', ' ')} (or a part of it is done), so booking it as done by hand could "
            "hide a second effect. Nothing was changed.",
            f"Look at it: `{command('explain', identity)}`.",
        )
    given = "its task gives that result back" if result is not None else "where its result is needed, its task says so"
    told = f"{identity} is booked as done by hand. It is never called; {given}."
    if not known:
        told += (
            " No task has asked for this key yet: if it is misspelt, the task still calls. `airflow runguard preview` "
            "shows the keys that a DAG would ask for."
        )
    return {"said": told, "known": known}


def _found(ledger: Ledger, name: str) -> Mapping[str, Any]:
    rows = ledger.gates(name)
    if not rows:
        raise Refused(f"There is no gate {name!r}. Nothing was changed.", "Run `airflow runguard quota list`.")
    return rows[0]


def _gate(row: Mapping[str, Any]) -> Data:
    closed = row["closed_until"] is not None and row["closed_until"] > row["now"]
    return {
        "gate": row["name"],
        "open": not closed,
        "closed_until": row["closed_until"] if closed else None,
        "why": row["why"],
        "by": row["actor"],
        "rate": row["rate"],
        "waiting": row["waiting"],
        "last_slot": row["next_slot"],
        "updated_at": row["updated_at"],
    }


def _waiting(row: Mapping[str, Any]) -> str:
    return f"{row['waiting']} record(s) wait for it."


def _scope(scope: str, value: str) -> str:
    return "Everything" if scope == "all" else f"{scope.replace('_', ' ').capitalize()} {value!r}"


def _flag(scope: str, value: str) -> str:
    return "--all" if scope == "all" else f"--{scope.replace('_', '-')}={value}"
