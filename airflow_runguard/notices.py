"""Telling people, through Airflow's own notifiers: what was booked to be told becomes a message, once.

A notice is booked in the ledger with the change that it tells of, so a killed process tells people too. It is sent by
whoever takes it first (the triggerer's caretaker, a ``SweepOperator``), never by the task that it is about.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from airflow_runguard.core.errors import PlanningError
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Identity
from airflow_runguard.explain import command

if TYPE_CHECKING:
    from airflow.sdk.bases.notifier import BaseNotifier

log = logging.getLogger("airflow_runguard")

KINDS: Mapping[str, str] = {
    "in_doubt": "Nobody knows whether {name} happened",
    "needs_person": "{name} did not work and needs a person",
    "broken": "{name} cannot be read in the ledger",
    "late_outcome": "A process that was no longer the holder reported about {name}",
    "stale_writer": "A process that was no longer the holder of {name} was refused",
    "ledger_lost_time": "The run ledger lost time: nothing is called",
    "restore_acknowledged": "The run ledger is used again after it lost time",
    "vendor_differs": "The vendor's list and the run ledger differ",
    "prevented": "Calls that were not repeated",
    "audit": "The audit of the run ledger found something",
}
"""What people can be told, and its headline."""


@dataclass(frozen=True)
class RunGuardNotifier:
    """One of Airflow's notifiers, and what it is told.

    The notifier's templates have ``runguard``: ``kind``, ``title``, ``text``, ``command``, ``record``, ``dag_id``,
    ``task_id``, ``run_id``, ``reason``, ``amount``, ``currency``.

    :param notifier: of any provider, for example ``SlackWebhookNotifier(text="{{ runguard.text }}", …)``.
    :param kinds: of :data:`KINDS`; ``None`` = all.
    :raises PlanningError: a kind that does not exist.
    """

    notifier: BaseNotifier
    kinds: Collection[str] | None = None

    def __post_init__(self) -> None:
        unknown = sorted(set(self.kinds or ()) - KINDS.keys())
        if unknown:
            raise PlanningError(f"A notice has no kind {', '.join(unknown)}.", f"There are: {', '.join(KINDS)}.")


def load(path: str) -> Sequence[RunGuardNotifier]:
    """What ``[runguard] notifiers`` names.

    :raises PlanningError: it cannot be imported, or is something else.
    """
    if not path:
        return ()
    module, _, name = path.rpartition(".")
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise PlanningError(
            f"[runguard] notifiers = {path!r} cannot be imported: {error}. Nobody is told of anything.",
            "Put the module where the triggerer can import it (plugins/ or a package).",
        ) from error
    several = list(found) if isinstance(found, list | tuple) else [found]
    if not all(isinstance(one, RunGuardNotifier) for one in several):
        raise PlanningError(f"[runguard] notifiers = {path!r} is no RunGuardNotifier.", "Wrap it: RunGuardNotifier(…).")
    return several


def send(ledger: Ledger, notifiers: Sequence[RunGuardNotifier], actor: str) -> int:
    """Tell what is to be told. A notifier that fails is tried again in five minutes, and the ledger keeps its error.

    :returns: how many notices were sent.
    """
    sent = 0
    for row in ledger.take_notices(actor):
        said = _said(row)
        try:
            for one in notifiers:
                if one.kinds is None or row["kind"] in one.kinds:
                    copy.copy(one.notifier)({"runguard": said})  # its templates are rendered in place
        except Exception as error:
            log.exception("A notice (%s) could not be sent; it is tried again.", said["title"])
            ledger.notice_sent(row["id"], f"{type(error).__name__}: {error}")
        else:
            ledger.notice_sent(row["id"])
            sent += 1
    return sent


def _said(row: Mapping[str, Any]) -> dict[str, Any]:
    identity = Identity(row["deployment"], row["namespace"], row["key"]) if row["namespace"] is not None else None
    name = str(identity) if identity else "the ledger"
    title = KINDS.get(row["kind"], row["kind"]).format(name=name)
    todo = command("explain", identity) if identity else "airflow runguard db check"
    at_stake = f" At stake: {row['amount']} {row['currency'] or ''}.".rstrip() if row["amount"] is not None else ""
    reason = row["reason"] or row["error"] or ""
    return {
        "kind": row["kind"],
        "title": title,
        "text": f"{title}: {reason}.{at_stake} What to do: {todo}" if reason else f"{title}.{at_stake} {todo}",
        "command": todo,
        "record": str(identity or ""),
        "reason": reason,
        "at": row["at"],
        **{name: row[name] for name in ("dag_id", "task_id", "run_id", "map_index", "state", "amount", "currency")},
    }
