"""Runs one command of the command line: usage that argparse cannot judge, where the ledger is, printing, exit codes.

The two doors differ only in how they find the ledger. Whatever ends a command is one sentence with a remedy, as text
or as JSON, and never shows a password.
"""

from __future__ import annotations

import argparse
import getpass
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import psycopg
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from airflow_runguard import codec, commands, screen, stops
from airflow_runguard.core.errors import LedgerNotReady, LedgerUnavailable, PlanningError, RunGuardError
from airflow_runguard.core.items import Selection
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.seam import Connect

RESUME_RATE = 5.0
"""What applies where no ``[runguard] resume_rate`` is at hand."""
DONE, REFUSED, USAGE, UNAVAILABLE = 0, 1, 2, 3
WHY = (
    "It is kept in the ledger with your name and the time, for whoever asks later why money moved (or did not). "
    "Add --reason 'what you found out, and where'."
)


@dataclass(frozen=True)
class Door:
    """Where the ledger is, as one of the two doors knows it. ``settings`` is ``None`` without Airflow."""

    deployment: str
    connect: Connect
    settings: Any = None


def through_airflow(args: argparse.Namespace) -> Door:
    """The ledger of ``[runguard]``; its Connection is looked up when it is first needed.

    :raises PlanningError: an option that cannot be used.
    """
    from airflow_runguard import config

    settings = config.settings()
    resolve = cache(partial(config.connect_ledger, settings))

    def connect() -> psycopg.Connection[Any]:
        try:
            return resolve()()
        except PlanningError as error:
            raise LedgerNotReady(error.what, error.remedy) from error

    return Door(args.deployment or settings.deployment, connect, settings)


def through_dsn(args: argparse.Namespace) -> Door:
    """The ledger of ``--dsn``. :raises PlanningError: it is missing or malformed; it is never repeated."""
    if not args.dsn:
        raise PlanningError("Nothing says where the ledger is.", "Add --dsn postgresql://user@host:5432/database.")
    try:
        conninfo = make_conninfo(args.dsn, **{**DEFAULTS, **conninfo_to_dict(args.dsn)})  # type: ignore[arg-type]
    except psycopg.Error:
        raise PlanningError(
            "--dsn is no PostgreSQL URL (it is not repeated here, since there may be a password in it).",
            "Write it like postgresql://user@host:5432/database; a special character in a password is percent-encoded.",
        ) from None
    return Door(args.deployment or "default", lambda: psycopg.connect(conninfo))


DEFAULTS = {"connect_timeout": 10, "application_name": "airflow_runguard"}


def run(name: str, args: argparse.Namespace, through: Callable[[argparse.Namespace], Door], *, changes: bool) -> int:
    """Run one command and print what comes of it. Returns the exit code.

    :param changes: it changes a record or the ledger in a person's name, so it needs a reason.
    """
    as_json = args.output == "json"
    try:
        _check_usage(name, args, changes)
        data = _do(name, args, through, changes)
    except RunGuardError as error:
        return refuse(error, as_json=as_json, secrets=_secrets(args))
    except psycopg.Error as error:  # a CHECK of the ledger, say: its transaction is undone
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        refused = RunGuardError(
            f"The ledger refused it: {said}. Nothing was changed.", "Run `airflow runguard doctor`."
        )
        return refuse(refused, as_json=as_json, secrets=_secrets(args))
    _print(_hide(screen.as_json(data) if as_json else screen.as_text(name, data), _secrets(args)))
    return REFUSED if data.get("failed") else DONE


def refuse(error: RunGuardError, *, as_json: bool, secrets: tuple[str, ...] = ()) -> int:
    """Print an error: text to stderr, JSON to stdout. Returns the exit code."""
    what, remedy = _hide(error.what, secrets), _hide(error.remedy, secrets)
    if as_json:
        _print(json.dumps({"error": what, "remedy": remedy}, ensure_ascii=False))
    else:
        print(screen.harmless(f"{what}\n{remedy}"), file=sys.stderr)  # noqa: T201
    match error:
        case LedgerUnavailable() | LedgerNotReady():
            return UNAVAILABLE
        case PlanningError():
            return USAGE
    return REFUSED


def _check_usage(name: str, args: argparse.Namespace, changes: bool) -> None:
    """What argparse cannot say, or cannot say why."""
    for option, value in vars(args).items():
        if isinstance(value, str) and any("\ud800" <= char <= "\udfff" for char in value):
            raise PlanningError(f"{option} is not readable text in this terminal's encoding.", "Write it in UTF-8.")
    looks_only = (name == "repair" and not (args.accept or args.set_state)) or (name == "baseline" and not args.apply)
    if changes and not looks_only and not (args.reason or "").strip():
        raise PlanningError(f"`{name}` changes the ledger, so it needs a --reason. Nothing was changed.", WHY)
    if name == "resolve":
        if not args.answer:
            raise PlanningError(
                "Say what you found out at the vendor. Nothing was changed.",
                "Add --happened (it never runs again), --did-not-happen (the next try runs it) or --failed (leave it).",
            )
        if args.result is not None and args.answer != "happened":
            raise PlanningError(
                "Only what happened has a --result. Nothing was changed.", "Add --happened, or leave it out."
            )
        if args.items and args.call:
            raise PlanningError("--items and --call say two things. Nothing was changed.", "Leave one of them out.")
        if args.items and args.result is not None and not args.items.startswith("key="):
            raise PlanningError("One --result is of one item. Nothing was changed.", "Say --items key=ITEM.")
        if args.force and args.answer != "did_not_happen":
            raise PlanningError("--force belongs to --did-not-happen. Nothing was changed.", "Leave it out.")
        if args.answer == "did_not_happen" and args.as_of is None:
            raise PlanningError(
                "--did-not-happen has it sent again, so it needs --as-of: what came to be known after you looked "
                "would be denied unread. Nothing was changed.",
                f"Run `airflow runguard explain {shlex.quote(args.key)}`, and type what it gives for this answer.",
            )
    if name in ("freeze", "thaw") and not (args.all or args.dag_id or args.namespace or args.key_prefix):
        raise PlanningError(
            f"Say what to {name}. Nothing was changed.", "Add --all, --dag-id, --namespace or --key-prefix."
        )
    if name == "quota close" and not (args.span or args.until):
        raise PlanningError("Say until when. Nothing was changed.", "Add --for 30m, or --until TIME.")
    if name == "quota rate" and not (args.rate or args.default):
        raise PlanningError("Say how many a second. Nothing was changed.", "Say a number, or --default.")
    if name == "db acknowledge-restore" and not (args.lost_since or args.nothing_lost):
        raise PlanningError(
            "Say what was lost, since what looks new may have been done in the time that is gone. Nothing was changed.",
            "Add --lost-since TIME, or --nothing-lost if you know.",
        )
    if name == "repair" and not looks_only and not args.seen:
        raise PlanningError(
            "Say which line you looked at, so that none that changed meanwhile is mended. Nothing was changed.",
            "Run `airflow runguard repair KEY` first; it shows the line and the token for --seen.",
        )


def _do(
    name: str, args: argparse.Namespace, through: Callable[[argparse.Namespace], Door], changes: bool
) -> commands.Data:
    if name == "db upgrade" and args.sql:
        deployment = args.deployment or ("default" if "dsn" in args else through(args).deployment)
        return commands.db_upgrade(None, deployment=deployment, sql=True)
    if name == "classify":
        return commands.classify(
            _read(args.file),
            status=args.status,
            headers=args.header,
            url=args.url,
            reads=args.read,
            at=args.at,
        )
    door = through(args)
    if name in ("preview", "baseline", "candidates") and door.settings is None:
        raise PlanningError(
            f"`{name}` reads Airflow's DAGs, so it exists only in Airflow.", f"Type `airflow runguard {name} …`."
        )
    if name == "candidates":
        from airflow_runguard import adoption

        return adoption.candidates(args.dag_id)
    if name == "db upgrade":
        return commands.db_upgrade(door.connect, deployment=door.deployment, sql=False)
    if name == "doctor":
        return commands.doctor(door.connect, deployment=door.deployment, settings=door.settings)
    if name == "reconcile" and door.settings is None:
        raise PlanningError(
            "The functions that ask the vendors are in the DAGs, which only Airflow can load. Nobody was asked.",
            "Run `airflow runguard reconcile` where Airflow runs.",
        )
    ledger = Ledger(door.connect, deployment=door.deployment)
    try:
        ledger.check()
        if name in ("preview", "baseline", "audit"):
            return _beside_airflow(name, args, ledger, airflow=door.settings is not None)
        if name == "reconcile" or (name == "sweep" and door.settings is not None):
            return _ask_vendors(name, args, ledger)
        return _with_ledger(name, args, ledger, changes, getattr(door.settings, "resume_rate", RESUME_RATE))
    finally:
        ledger.close()


def _ask_vendors(name: str, args: argparse.Namespace, ledger: Ledger) -> commands.Data:
    """``reconcile``; and ``sweep`` where Airflow can load the functions that are asked about what it finds."""
    from airflow_runguard.reconcile import Functions, settle_all

    sweeps = name == "sweep"
    scope = {} if sweeps else {"dag_id": args.dag_id, "namespace": args.namespace, "prefix": args.key_prefix}
    swept = commands.sweep(ledger, actor=_actor(args)) if sweeps else {}
    who = (args.actor or "").strip() or _actor(args)  # not always a person: the caretaker types it, too
    with _said_to_stderr():
        asked = settle_all(ledger, Functions(), actor=f"{name}, started by {who}", **scope)
    return {**swept, **asked, "said": f"{swept['said']} {asked['said']}"} if sweeps else asked


def _beside_airflow(name: str, args: argparse.Namespace, ledger: Ledger, *, airflow: bool) -> commands.Data:
    """Commands that read Airflow's DAGs and metadata (``audit`` also does without)."""
    if name == "audit":
        from airflow_runguard.audit import audit

        rules = {
            "days": args.days,
            "burst": args.burst,
            "stuck_after": args.stuck_after,
            "alarm_after": dict(args.alarm_after or ()),
        }
        return audit(ledger, airflow=airflow, tell=args.tell, **rules)
    from airflow_runguard import adoption

    if name == "preview":
        return adoption.preview(ledger, args.dag_id, None if args.backfill is None else tuple(args.backfill))
    return adoption.baseline(
        ledger, args.dag_id, before=args.before, apply=args.apply, actor=_actor(args), reason=args.reason or ""
    )


@contextmanager
def _said_to_stderr() -> Iterator[None]:
    """What a DAG's file prints, and Airflow logs while it loads it, is not this command's answer."""
    sys.stdout.flush()
    answer = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(answer, 1)
        os.close(answer)


def _with_ledger(
    name: str, args: argparse.Namespace, ledger: Ledger, changes: bool, resume_rate: float
) -> commands.Data:
    who = {"actor": _actor(args), "reason": args.reason} if changes else {}
    match name:
        case "db check":
            return commands.db_check(ledger)
        case "db acknowledge-restore":
            return commands.acknowledge_restore(ledger, lost_since=args.lost_since, **who)
        case "sweep":
            return commands.sweep(ledger, actor=_actor(args))
        case "list":
            return commands.list_records(
                ledger,
                state=args.state,
                dag_id=args.dag_id,
                namespace=args.namespace,
                prefix=args.key_prefix,
                needs_person=args.needs_person,
                after=args.after,
                limit=args.limit,
            )
        case "bypass":
            result = None if args.result is None else _as_stored(args.result)
            return stops.bypass(ledger, args.key, args.namespace, result=result, reference=args.reference, **who)
        case "freeze":
            return stops.freeze(ledger, *_scope(args), **who)
        case "thaw":
            return stops.thaw(ledger, *_scope(args), **who)
        case "freezes":
            return stops.freezes(ledger, thawed=args.thawed)
        case "quota list":
            return stops.gates(ledger)
        case "quota show":
            return stops.gate(ledger, args.gate)
        case "quota close":
            until = args.until or ledger.check()["now"] + args.span
            return stops.close_gate(ledger, args.gate, until=until, rate=resume_rate, **who)
        case "quota open":
            return stops.open_gate(ledger, args.gate, rate=resume_rate, **who)
        case "quota rate":
            return stops.set_rate(ledger, args.gate, rate=args.rate, default=resume_rate, **who)
    record = commands.find(ledger, args.key, args.namespace)
    match name:
        case "resume":
            return stops.resume(ledger, record, **who)
        case "show":
            return commands.show(ledger, record)
        case "explain":
            return commands.explain(ledger, record)
        case "resolve" if args.items:
            return commands.resolve_items(
                ledger,
                record,
                args.answer,
                Selection.parse(args.items),
                reference=args.reference,
                result=None if args.result is None else _as_stored(args.result),
                force=args.force,
                as_of=args.as_of,
                **who,
            )
        case "reopen" if args.items:
            chosen, again = Selection.parse(args.items), args.again_although_applied
            return commands.reopen_items(ledger, record, chosen, again_although_applied=again, **who)
        case "items":
            return commands.items(ledger, record, args.state, after=args.after_item, limit=args.limit)
        case "resolve":
            return commands.resolve(
                ledger,
                record,
                args.answer,
                call=args.call,
                result=None if args.result is None else _as_stored(args.result),
                reference=args.reference,
                force=args.force,
                as_of=args.as_of,
                **who,
            )
        case "reopen":
            return commands.reopen(ledger, record, again_although_applied=args.again_although_applied, **who)
        case "release":
            return commands.release(ledger, record, **who)
        case "repair" if args.accept or args.set_state:
            return commands.repair(ledger, record, state=args.set_state, seen=args.seen, **who)
        case "repair":
            return commands.broken_line(ledger, record)
        case "accept-payload" if args.items:
            return commands.accept_payload_of_items(ledger, record, Selection.parse(args.items), **who)
        case "accept-payload":
            return commands.accept_payload(ledger, record, **who)
        case "rename":
            return commands.rename(ledger, record, args.new, namespace=args.new_namespace, **who)
    raise AssertionError(f"{name} is not implemented")


def _scope(args: argparse.Namespace) -> tuple[str, str]:
    for scope in ("dag_id", "namespace", "key_prefix"):
        if getattr(args, scope):
            return scope, getattr(args, scope)
    return "all", ""


def _read(file: str | None) -> str:
    """:raises PlanningError: it cannot be read."""
    try:
        if file == "-":
            return sys.stdin.read()
        return Path(file).read_text(encoding="utf-8", errors="replace") if file else ""
    except (OSError, UnicodeDecodeError) as error:
        raise PlanningError(f"{file} cannot be read: {error}.", "Name a file, or `-` for standard input.") from error


def _actor(args: argparse.Namespace) -> str:
    if args.actor and args.actor.strip():
        return f"person:{args.actor.strip()}"
    try:
        return f"person:{getpass.getuser()}"
    except (KeyError, OSError):  # a container's user without a name
        return f"person:uid-{os.getuid()}"


def _as_stored(text: str) -> bytes:
    """The bytes that a task would have stored for this value."""

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is not JSON")

    try:
        return codec.dump(json.loads(text, parse_constant=refuse))
    except (ValueError, TypeError, RecursionError) as error:
        raise PlanningError(
            f"--result cannot be stored: {error}. Nothing was changed.",
            "Write it as JSON; a text has its own quotes: --result '\"ch_123\"'.",
        ) from error


def _secrets(args: argparse.Namespace) -> tuple[str, ...]:
    """The password of ``--dsn`` as messages may have it, also where an unescaped ``@`` made it a part of the host."""
    user, _, _ = (getattr(args, "dsn", None) or "").partition("://")[2].rpartition("@")
    password = user.partition(":")[2]
    parts = {password, unquote(password), *password.split("@")}
    return tuple(sorted((part for part in parts if len(part) > 2), key=len, reverse=True))


def _hide(text: str, secrets: tuple[str, ...]) -> str:
    for secret in secrets:
        text = text.replace(secret, "***")
    return text


def _print(text: str) -> None:
    try:
        print(text, flush=True)  # noqa: T201
    except BrokenPipeError:  # `… | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
