"""Does the ledger, and Airflow beside it, look right? Findings for people, each with what it means and what to type.

The ledger is only read. Airflow's metadata are compared where they are at hand.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any

from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Identity
from airflow_runguard.explain import command

Data = dict[str, Any]
Finding = dict[str, Any]
Alarm = float | Mapping[str, float] | None
Told = Mapping[tuple[str, str, str, int], str]
"""Airflow's states, by DAG, task, run and map index."""

LIMIT = 200
"""Findings of one kind that are listed."""
PAGE = 2000
SETTLED_WITHOUT = {"success", "failed", "skipped"}


def audit(
    ledger: Ledger,
    *,
    days: float = 7,
    alarm_after: Alarm = None,
    burst: int = 5,
    stuck_after: float = 86_400,
    airflow: bool,
    tell: bool = False,
) -> Data:
    """Look for what should not be: work that was observed to be done twice, runs far beyond their own history, bursts
    of errors, records that nobody moves on, pauses that Airflow shows as failures, ledger and Airflow disagreeing.

    :param days: how far back.
    :param alarm_after: seconds beyond which any run counts as too long, whatever its history; for all, or by namespace
        (a task's own is ``dag_id.task_id``), where ``""`` stands for all others.
    :param burst: errors of one namespace within ten minutes.
    :param stuck_after: seconds after which an unfinished record is stuck.
    :param airflow: whether Airflow's metadata are at hand.
    :param tell: book a notice, once a day, if there is anything.
    """
    now = ledger.check()["now"]
    since = now - timedelta(days=days)
    look = {"since": since, "limit": LIMIT}
    found = [
        *_twice(ledger.audit("twice", **look)),
        *_slow(ledger.audit("slow", alarms=json.dumps(_alarms(alarm_after)), **look)),
        *_bursts(ledger.audit("bursts", burst=burst, **look)),
        *_stuck(ledger.audit("stuck", stuck_after=stuck_after, limit=LIMIT)),
        *_told(ledger.audit("told", **look)),
        *(_disagreeing(ledger, since) if airflow else ()),
    ]
    kinds = sorted({finding["kind"] for finding in found})
    said = f"{len(found)} finding(s): {', '.join(kinds)}." if found else "Nothing that should not be."
    if found and tell:
        ledger.tell(0, now.date().toordinal(), "audit", said)
    return {"said": said, "failed": found, "findings": found, "since": since, "now": now}


def _name(row: Mapping[str, Any]) -> str:
    return f"{row['namespace']}/{row['key']}"


def _explain(row: Mapping[str, Any]) -> str:
    return f"`{command('explain', Identity('', row['namespace'], row['key']))}`"


def _finding(kind: str, what: str, **more: Any) -> Finding:
    return {"kind": kind, "what": what, **more}


def _twice(rows: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    for row in rows:
        when = f"{row['at']:%Y-%m-%d %H:%M %Z}"
        what = f"{_name(row)} was done again by run {row['run_id']} at {when}: it is {row['reason']}."
        yield _finding("done twice", f"{what} Guard its task (depth = ledger).", record=_name(row), at=row["at"])


def _alarms(alarm_after: Alarm) -> Mapping[str, float]:
    if alarm_after is None:
        return {}
    return dict(alarm_after) if isinstance(alarm_after, Mapping) else {"": alarm_after}


def _slow(rows: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    for row in rows:
        usual = (
            "" if row["median"] is None else f" Its namespace usually takes {row['median']:.0f} s ± {row['mad']:.0f} s."
        )
        alarm = f" The alarm is at {row['alarm']:.0f} s." if row["alarm"] is not None else ""
        still = "takes" if row["state"] == "running" else "took"
        yield _finding(
            "took too long", f"{_name(row)} {still} {row['seconds']:.0f} s.{usual}{alarm}", record=_name(row)
        )


def _bursts(rows: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    for row in rows:
        what = f"{row['errors']} errors of {row['namespace']} within the ten minutes to {row['at']:%Y-%m-%d %H:%M %Z}"
        yield _finding(
            "errors in a burst", f"{what}, for example: {row['reason'][:200] or 'no reason given'}.", at=row["at"]
        )


def _stuck(rows: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    for row in rows:
        age = timedelta(seconds=round(row["seconds"]))
        what = f"{_name(row)} is {row['state'].replace('_', ' ')}, and nobody has moved it on for {age}."
        todo = "`airflow runguard sweep`" if row["state"] == "running" else _explain(row)
        yield _finding("stuck", f"{what} {todo}.", record=_name(row), seconds=row["seconds"])


def _told(rows: Sequence[Mapping[str, Any]]) -> Iterator[Finding]:
    for row in rows:
        what = f"{row['actor']} told Airflow {row['word']} of {_name(row)}, which is {row['state'].replace('_', ' ')}."
        yield _finding("Airflow disagrees", f"{what} {_explain(row)}.", record=_name(row), at=row["at"])


def _disagreeing(ledger: Ledger, since: datetime) -> Iterator[Finding]:
    after = 0
    while page := ledger.audit("recent", since=since, after=after, limit=PAGE):
        after = page[-1]["id"]
        states = _airflow_states(page)
        for row in page:
            told = states.get((row["dag_id"], row["task_id"], row["run_id"], row["map_index"]))
            kind = _disagreement(row["state"], told)
            if kind:
                state = row["state"].replace("_", " ")
                what = f"{_name(row)} is {state} in the ledger; Airflow shows its task ({row['run_id']}) as {told}."
                yield _finding(kind, f"{what} {_explain(row)}.", record=_name(row))


def _disagreement(state: str, told: str | None) -> str:
    """A failed try whose task will run again is no disagreement; neither is a replay that failed for another reason."""
    if told not in SETTLED_WITHOUT:
        return ""
    if state == "paused":
        return "paused, shown as ended"
    if state == "done":
        return "Airflow disagrees" if told == "failed" else ""
    return "Airflow disagrees" if told == "success" else ""


def _airflow_states(page: Sequence[Mapping[str, Any]]) -> Told:
    from airflow.models.taskinstance import TaskInstance
    from airflow.utils.session import create_session
    from sqlalchemy import select

    columns = (
        TaskInstance.dag_id,
        TaskInstance.task_id,
        TaskInstance.run_id,
        TaskInstance.map_index,
        TaskInstance.state,
    )
    query = select(*columns).where(TaskInstance.run_id.in_({row["run_id"] for row in page}))
    with create_session() as session:
        return {(dag, task, run, index): str(state) for dag, task, run, index, state in session.execute(query)}
