"""The ledger's no to a person, as sentences: what it means for the money, and what to type instead.

Every word that the ledger's functions for people may answer is here, once. A refusal changed nothing, and says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from airflow_runguard import explain as words
from airflow_runguard.core.errors import RunGuardError
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Record
from airflow_runguard.explain import command


class Refused(RunGuardError):
    """A person's command that changed nothing: there is no such record, or the ledger said no."""

    remedy = "Run `airflow runguard list`."


def refusal(ledger: Ledger, record: Record, verdict: str) -> Refused:
    """The error for one of the ledger's words.

    :param record: as it is now, which may not be what the person had looked at.
    """
    what, remedy = SENTENCES[verdict](record, ledger)
    return Refused(f"{what} Nothing was changed.", remedy)


def _look(record: Record) -> str:
    return f"Look at it again: `{command('explain', record.identity)}`."


def _too_early(record: Record, ledger: Ledger) -> tuple[str, str]:
    if record.broken:
        return (
            f"It is too early to say that {record.identity} did not happen: its holder may live, or its request may "
            "still reach the vendor. Running it again now could charge twice.",
            f"Say it again later; or say that nobody knows, and settle that: `{command('repair', record.identity)}` "
            "shows what to type.",
        )
    until = words.when(record.no_later_than, ledger.check()["now"])
    return (
        f"It is too early to say that {record.identity} did not happen: its request may still reach the vendor until "
        f"{until}. Running it again before then could charge twice.",
        "Say it again after that time. Only where its process is certainly dead and the vendor certainly has nothing: "
        "add --force.",
    )


def _not_in_doubt(record: Record, ledger: Ledger) -> tuple[str, str]:
    stands = words.standing(record, ledger.calls(record.id), ledger.check()["now"])
    todo = " or ".join(f"`{line}`" for line in stands.commands.values())
    return (
        f"{record.identity} is {record.state}, not in doubt, so there is nothing to resolve. {stands.why}",
        f"Who moves it on: {stands.who}{f' ({todo})' if todo else ''}.",
    )


def _no_such_call(record: Record, ledger: Ledger) -> tuple[str, str]:
    if record.calls == "batch":
        return (
            f"{record.identity} has no item left among those chosen that could be changed like that: there is none, or "
            "it moved on.",
            f"Its items: `{command('items', record.identity)}`.",
        )
    names = [c.name for c in ledger.calls(record.id) if c.generation == record.generation and c.state in words.OPEN]
    return (
        f"{record.identity} has no call of that name that could be resolved.",
        f"Its open calls: {', '.join(names) or 'none'}. {_look(record)}",
    )


def _applied(record: Record, _: Ledger) -> tuple[str, str]:
    remedy = "If a second effect is what you want (say, after a refund), add --again-although-applied."
    if record.calls == "batch":
        return (
            f"Items of {record.identity} happened, or may have: ordered anew, they have it a second time, each "
            "under a new vendor key (a second charge).",
            remedy,
        )
    return (
        f"{record.identity} is {record.state} and its effect "
        f"{'happened' if record.effect == 'applied' else 'may have happened'}: ordering it anew has it a second time, "
        "under a new vendor key (a second charge).",
        remedy,
    )


def _unknown_effect(record: Record, _: Ledger) -> tuple[str, str]:
    if record.calls == "batch" and record.state != "running":
        return (
            f"Nobody knows yet whether the old payload of these items of {record.identity} had its effect; a new one "
            "could be a second charge.",
            f"Settle them first: `{command('resolve', record.identity, '--items=in_doubt …')}`.",
        )
    return (
        f"{record.identity} is {record.state} and nobody knows yet whether the old payload had its effect; a new one "
        "could be a second charge.",
        f"Settle that first: `{command('explain', record.identity)}` says how.",
    )


def _renamed(record: Record, _: Ledger) -> tuple[str, str]:
    present = record.renamed_to or record.identity
    anew = command("reopen", record.identity, "--again-although-applied --reason=…")
    return (
        f"{record.identity} is only a former name of {present}: what was ordered under it is that record.",
        f"Look at that one: `{command('explain', present)}`. If other work is to be done under the old name: `{anew}` "
        "(under new vendor keys).",
    )


SENTENCES: Mapping[str, Callable[[Record, Ledger], tuple[str, str]]] = {
    "too_early": _too_early,
    "not_in_doubt": _not_in_doubt,
    "no_such_call": _no_such_call,
    "no_batch": lambda r, _: (f"{r.identity} is no batch, so it has no items.", _look(r)),
    "moved": lambda r, _: (
        f"{r.identity} changed after you looked at it: its holder, the vendor's answer or another person was first.",
        _look(r),
    ),
    "missing": lambda r, _: (
        f"{r.identity} is no longer in the ledger, and lines are never deleted: the ledger may have gone back in time.",
        "Run `airflow runguard db check`.",
    ),
    "broken": lambda r, _: (
        f"{r.identity} cannot be trusted ({r.broken}), so what it says of the money may be wrong.",
        f"Look at its line first: `{command('repair', r.identity)}`.",
    ),
    "not_broken": lambda r, _: (f"{r.identity} is not broken, so there is nothing to repair.", _look(r)),
    "not_running": lambda r, _: (f"{r.identity} is {r.state}; no holder has it that it could be taken from.", _look(r)),
    "not_paused": lambda r, _: (f"{r.identity} is {r.state}, not paused, so there is nothing to resume.", _look(r)),
    "not_finished": lambda r, _: (
        f"{r.identity} is {r.state}; only finished work (done, failed) can be ordered anew, since what is under way "
        "would then have its effect twice.",
        _look(r),
    ),
    "partly_done": lambda r, _: (
        f"Some calls of {r.identity} happened under its present payload, so the rest cannot run with another one. "
        "Nothing was changed.",
        "Bring the task's arguments back as they were; or give the new work a key of its own.",
    ),
    "applied": _applied,
    "under_way": lambda r, _: (
        f"{r.identity} is {r.state}; its vendor keys are made from its name, so another name would hide what is under "
        "way from the vendor, who would charge again.",
        f"Let it end first. {_look(r)}",
    ),
    "unknown_effect": _unknown_effect,
    "renamed": _renamed,
}
