"""The command line: ``airflow runguard …`` (Airflow's provider door) and ``python -m airflow_runguard … --dsn URL``.

One definition of the commands serves both doors. This module is imported on every start of ``airflow``, so it imports
nothing but the standard library; what runs a command is imported when one runs (``dispatch.py``), and the second door
never imports Airflow. Exit codes: 0 done · 1 refused, nothing changed (``doctor``: a check failed) · 2 wrong usage ·
3 the ledger is out of reach or not usable.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, NoReturn

STATES = ("pending", "running", "done", "failed", "paused", "in_doubt")
REPAIRED = ("pending", "done", "failed", "in_doubt")
EPILOG = "Exit codes: 0 done, 1 refused and nothing changed, 2 wrong usage, 3 the ledger is out of reach or not usable."


# -- what there is to type ---------------------------------------------------------------------------------------------


class Argument:
    """One argument, in the shape that Airflow's own ``Arg`` has, so that it serves both doors."""

    def __init__(self, *flags: str, **options: Any) -> None:
        self.flags, self.options = flags, options

    def add_to_parser(self, parser: argparse._ActionsContainer) -> None:
        parser.add_argument(*self.flags, **self.options)


class OneOf(Argument):
    """Arguments of which only one may be given."""

    def __init__(self, *arguments: Argument) -> None:
        super().__init__(*arguments[0].flags)
        self.arguments = arguments

    def add_to_parser(self, parser: argparse._ActionsContainer) -> None:
        group = parser.add_mutually_exclusive_group()
        for argument in self.arguments:
            argument.add_to_parser(group)


@dataclass(frozen=True)
class Command:
    """:param name: ``resolve``, or ``db upgrade`` for a command of a group. :param changes: needs ``--reason``."""

    name: str
    help: str
    arguments: tuple[Argument, ...] = ()
    changes: bool = False

    @property
    def group(self) -> str:
        return self.name.partition(" ")[0] if " " in self.name else ""

    def all_arguments(self) -> tuple[Argument, ...]:
        return (*self.arguments, *(CHANGE if self.changes else ()), *EVERYWHERE)


def _moment(text: str) -> datetime:
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no time like 2026-03-10T12:00:00Z") from None
    if moment.tzinfo is None:
        raise argparse.ArgumentTypeError(f"{text!r} has no time zone; write it like 2026-03-10T12:00:00Z (UTC)")
    return moment.astimezone(UTC)


def _count(least: int) -> Callable[[str], int]:
    def check(text: str) -> int:
        if not text.isdecimal() or not least <= int(text) < 2**63:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
        return int(text)

    return check


def _alarm(text: str) -> tuple[str, int]:
    """``SECONDS`` for all, ``NAMESPACE=SECONDS`` for one."""
    namespace, _, seconds = text.rpartition("=")
    return namespace, _count(1)(seconds)


def _rate(text: str) -> float:
    try:
        rate = float(text)
    except ValueError:
        rate = 0.0
    if not 0 < rate < 10**6:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of tasks a second")
    return rate


def _span(text: str) -> timedelta:
    number, unit = text[:-1], text[-1:]
    if not number.isdecimal() or unit not in SPANS or not 0 < int(number) < 10**6:
        raise argparse.ArgumentTypeError(f"{text!r} is no time like 90s, 30m, 12h or 2d")
    return timedelta(seconds=int(number) * SPANS[unit])


SPANS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
GATE = Argument("gate", metavar="NAME", help="the gate's name, as quota= says it")
SCOPE = OneOf(
    Argument("--all", action="store_true", help="everything"),
    Argument("--dag-id", metavar="ID", help="only this DAG's tasks"),
    Argument("--namespace", metavar="NAME", help="only this namespace"),
    Argument("--key-prefix", metavar="TEXT", help="only keys that begin so"),
)
KEY = Argument("key", metavar="KEY", help="KEY or NAMESPACE/KEY; after `--` if it begins with a dash")
NAMESPACE = Argument("--namespace", metavar="NAME", help="the namespace, where KEY alone names several records")
ACTOR = Argument("--actor", metavar="NAME", help="who you are (default: the user of this shell)")
ITEMS = Argument(
    "--items",
    metavar="SELECTION",
    help="of a batch, only these: a state (in_doubt, failed), with a class (failed:validation), or key=ITEM",
)
CHANGE = (Argument("--reason", metavar="TEXT", help="why; kept in the ledger with who and when (needed)"), ACTOR)
EVERYWHERE = (
    Argument("-o", "--output", choices=("text", "json"), default="text", help="json: one object, errors too"),
    Argument(
        "--deployment",
        metavar="NAME",
        help="whose records (default: Airflow's option runguard.deployment, else 'default')",
    ),
)
DSN = Argument(
    "--dsn",
    metavar="URL",
    help="the ledger: postgresql://user@host:5432/database (a password is better kept in PGPASSWORD or ~/.pgpass)",
)

GROUPS = {"db": "The ledger itself", "quota": "Gates: what a vendor's allowance lets through"}
DAG = Argument("--dag-id", metavar="ID", required=True, help="the DAG")

COMMANDS = (
    Command(
        "db upgrade",
        "Create the ledger's schema or bring it up to this version",
        (Argument("--sql", action="store_true", help="only print the statements, for a DBA"),),
    ),
    Command("db check", "Say whether this deployment can use the ledger"),
    Command(
        "db acknowledge-restore",
        "Use a ledger again that was restored, failed over or copied",
        (
            OneOf(
                Argument("--lost-since", metavar="TIME", type=_moment, help="commits after this time may be gone"),
                Argument("--nothing-lost", action="store_true", help="you know that nothing is gone"),
            ),
        ),
        changes=True,
    ),
    Command("doctor", "Check ledger, server, Redis and Airflow's settings"),
    Command(
        "list",
        "List records",
        (
            Argument("--state", choices=STATES, help="only in this state"),
            Argument("--dag-id", metavar="ID", help="only last worked on by this DAG"),
            Argument("--namespace", metavar="NAME", help="only of this namespace"),
            Argument("--key-prefix", metavar="TEXT", help="only keys that begin so"),
            Argument("--needs-person", action="store_true", help="only what waits for a person's decision"),
            Argument("--limit", type=_count(1), default=100, metavar="N", help="at most so many (default: 100)"),
            Argument("--after", type=_count(0), default=0, metavar="ID", help="go on after this record's id"),
        ),
    ),
    Command("show", "Show what the ledger has of a record", (KEY, NAMESPACE)),
    Command("explain", "Say what happened, why it stands where it stands, and who moves it on", (KEY, NAMESPACE)),
    Command(
        "items",
        "List the items of a batch",
        (
            KEY,
            NAMESPACE,
            Argument("--state", metavar="SELECTION", help="only these: failed, failed:validation, in_doubt, key=ITEM"),
            Argument("--limit", type=_count(1), default=100, metavar="N", help="at most so many (default: 100)"),
            Argument("--after-item", metavar="ITEM", default="", help="go on after this item"),
        ),
    ),
    Command(
        "resolve",
        "Say what became of a record in doubt",
        (
            KEY,
            NAMESPACE,
            OneOf(
                Argument(
                    "--happened",
                    dest="answer",
                    action="store_const",
                    const="happened",
                    help="it happened: all of it, or with --call that call",
                ),
                Argument(
                    "--did-not-happen",
                    dest="answer",
                    action="store_const",
                    const="did_not_happen",
                    help="it did not: the next try runs it",
                ),
                Argument(
                    "--failed",
                    dest="answer",
                    action="store_const",
                    const="failed",
                    help="leave it: it may have happened, and does not run again",
                ),
            ),
            Argument("--result", metavar="JSON", help="with --happened: the result that a clear gives back"),
            Argument("--call", metavar="NAME", help="only this call of it"),
            ITEMS,
            Argument("--reference", metavar="ID", help="the vendor's own name for it"),
            Argument("--force", action="store_true", help="with --did-not-happen: although it may still arrive"),
            Argument(
                "--as-of",
                type=_moment,
                metavar="TIME",
                help="when you looked, as `explain` gives it (--did-not-happen needs it): no younger doubt is answered",
            ),
        ),
        changes=True,
    ),
    Command(
        "reopen",
        "Order finished work anew, with new vendor keys",
        (
            KEY,
            NAMESPACE,
            Argument("--again-although-applied", action="store_true", help="have the effect a second time"),
            ITEMS,
        ),
        changes=True,
    ),
    Command("release", "Take a record from a dead or hung holder", (KEY, NAMESPACE), changes=True),
    Command(
        "repair",
        "Look at a broken line of the ledger; with --accept or --set-state, mend it",
        (
            KEY,
            NAMESPACE,
            OneOf(
                Argument("--accept", action="store_true", help="the line is right as it stands"),
                Argument("--set-state", choices=REPAIRED, help="the state that is true"),
            ),
            Argument("--seen", metavar="TOKEN", help="what looking at it showed, so that this very line is mended"),
        ),
        changes=True,
    ),
    Command("accept-payload", "Let the next try bring another payload", (KEY, NAMESPACE, ITEMS), changes=True),
    Command(
        "rename",
        "Give a record another key",
        (
            Argument("key", metavar="OLD", help="KEY or NAMESPACE/KEY"),
            Argument("new", metavar="NEW", help="the new key, without a namespace"),
            NAMESPACE,
            Argument("--new-namespace", metavar="NAME", help="the new namespace (default: the old one)"),
        ),
        changes=True,
    ),
    Command(
        "classify",
        "Say what a vendor's answer or an error means, and by which rule",
        (
            Argument(
                "file",
                nargs="?",
                metavar="FILE",
                help="a body, a whole answer (`curl -i`) or a traceback; `-` reads standard input",
            ),
            Argument("--status", type=_count(100), metavar="N", help="the answer's HTTP status"),
            Argument("--header", action="append", default=[], metavar="'NAME: VALUE'", help="one header; repeat it"),
            Argument("--url", default="", metavar="URL", help="where the request went, which may tell the vendor"),
            Argument("--read", action="store_true", help="the call only reads: repeating it is harmless"),
            Argument("--at", type=_moment, metavar="TIME", help="when it was answered (default: now)"),
        ),
    ),
    Command("sweep", "Settle what dead holders left behind, and ask the vendors about it where Airflow runs", (ACTOR,)),
    Command(
        "preview",
        "Say what the guarded tasks of a DAG would do: in its runs if they were cleared, or in a backfill",
        (
            DAG,
            Argument(
                "--backfill", metavar=("FROM", "TO"), nargs=2, type=_moment, help="the runs of a backfill instead"
            ),
        ),
    ),
    Command(
        "baseline",
        "Book what Airflow did before a DAG was guarded as done, so that clearing it does not do it again",
        (
            DAG,
            Argument("--before", metavar="TIME", type=_moment, required=True, help="successes that ended before this"),
            Argument("--apply", action="store_true", help="book them; without it nothing is changed"),
        ),
        changes=True,
    ),
    Command(
        "candidates",
        "List unguarded tasks that look as if they had an effect outside",
        (Argument("--dag-id", metavar="ID", help="only of this DAG"),),
    ),
    Command(
        "audit",
        "Look for what should not be: done twice, too long, bursts of errors, stuck, shown wrongly by Airflow",
        (
            Argument("--days", type=_count(1), default=7, metavar="N", help="how far back (default: 7)"),
            Argument(
                "--alarm-after",
                type=_alarm,
                action="append",
                metavar="[NAMESPACE=]SECONDS",
                help="any run longer than this is a finding; repeated: one for a namespace (a task's own: dag.task)",
            ),
            Argument("--burst", type=_count(2), default=5, metavar="N", help="errors within ten minutes (default: 5)"),
            Argument("--stuck-after", type=_count(1), default=86_400, metavar="SECONDS", help="default: a day"),
            Argument("--tell", action="store_true", help="tell people, through the notifiers, if there is anything"),
        ),
    ),
    Command(
        "reconcile",
        "Ask the vendors about everything in doubt, by the functions in the DAGs",
        (
            Argument("--dag-id", metavar="ID", help="only last worked on by this DAG"),
            Argument("--namespace", metavar="NAME", help="only of this namespace"),
            Argument("--key-prefix", metavar="TEXT", help="only keys that begin so"),
            ACTOR,
        ),
    ),
    Command("resume", "Let a paused record go on now, if its gate lets it", (KEY, NAMESPACE), changes=True),
    Command(
        "bypass",
        "Book work that was done by hand, so that its task calls nothing",
        (
            Argument("key", metavar="KEY", help="the key alone; after `--` if it begins with a dash"),
            Argument("--namespace", metavar="NAME", required=True, help="the namespace"),
            Argument("--result", metavar="JSON", help="the result that the task gives back"),
            Argument("--reference", metavar="ID", help="the vendor's own name for it"),
        ),
        changes=True,
    ),
    Command("freeze", "Start no new call in a scope: tasks wait, what is under way is settled", (SCOPE,), changes=True),
    Command("thaw", "Let a frozen scope go on", (SCOPE,), changes=True),
    Command("freezes", "List what is frozen", (Argument("--thawed", action="store_true", help="also what was"),)),
    Command("quota list", "List gates: closed until when, why, and how many wait"),
    Command("quota show", "Show one gate and what waits for it", (GATE,)),
    Command(
        "quota close",
        "Close a gate: nothing that names it calls until then",
        (
            GATE,
            OneOf(
                Argument("--for", dest="span", metavar="SPAN", type=_span, help="like 90s, 30m, 12h, 2d"),
                Argument("--until", metavar="TIME", type=_moment, help="like 2026-03-10T12:00:00Z"),
            ),
        ),
        changes=True,
    ),
    Command("quota open", "Open a gate: those that wait go on, one by one", (GATE,), changes=True),
    Command(
        "quota rate",
        "Say how many of those that wait go on each second",
        (
            GATE,
            OneOf(
                Argument("rate", nargs="?", metavar="N", type=_rate, help="so many a second"),
                Argument("--default", action="store_true", help="[runguard] resume_rate again"),
            ),
        ),
        changes=True,
    ),
)


# -- the two doors -----------------------------------------------------------------------------------------------------


def get_commands() -> list[Any]:
    """Airflow's provider CLI (named in ``provider_info``)."""
    from airflow.cli.cli_config import ActionCommand, GroupCommand

    def action(command: Command) -> Any:
        return ActionCommand(
            name=command.name.split()[-1],
            help=command.help,
            func=partial(in_airflow, command),
            args=command.all_arguments(),  # type: ignore[arg-type]  # has all that Airflow's Arg has
            epilog=EPILOG,
        )

    groups = [
        GroupCommand(name=group, help=what, subcommands=[action(c) for c in COMMANDS if c.group == group])
        for group, what in GROUPS.items()
    ]
    rest = [action(command) for command in COMMANDS if not command.group]
    return [GroupCommand(name="runguard", help="Guarded tasks: see and settle", subcommands=[*rest, *groups])]


def in_airflow(command: Command, args: argparse.Namespace) -> NoReturn:
    """Run a command with Airflow's settings and Connections, noted in Airflow's audit log."""
    # Without it only Connections from the environment would be found.
    os.environ["_AIRFLOW_PROCESS_CONTEXT"] = "server"
    from airflow.utils.cli import action_cli

    from airflow_runguard.dispatch import run, through_airflow

    def runguard(args: argparse.Namespace) -> int:
        return run(command.name, args, through_airflow, changes=command.changes)

    sys.exit(action_cli(check_db=False)(runguard)(args))  # type: ignore[no-untyped-call]


def main(argv: Sequence[str] | None = None) -> int:
    """``python -m airflow_runguard``; needs no Airflow. Returns the exit code."""
    from airflow_runguard.dispatch import refuse, run, through_dsn

    output = argparse.ArgumentParser(add_help=False)
    output.add_argument("-o", "--output", nargs="?")
    try:
        args = _parser().parse_args(argv)
    except SystemExit:  # --help
        return 0
    except _WrongUsage as wrong:
        return refuse(wrong.error(), as_json=output.parse_known_args(argv)[0].output == "json")
    return run(args.command.name, args, through_dsn, changes=args.command.changes)


class _WrongUsage(Exception):
    def error(self) -> Any:
        from airflow_runguard.core.errors import PlanningError

        return PlanningError(*self.args)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _WrongUsage(f"{message[:1].upper()}{message[1:]}. Nothing was changed.", f"Run `{self.prog} --help`.")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m airflow_runguard",
        description="See and settle what guarded tasks did, without Airflow. Where a message says `airflow runguard "
        "X`, type `python -m airflow_runguard X --dsn URL` here.",
        epilog=EPILOG,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    groups = {
        group: commands.add_parser(group, help=what).add_subparsers(metavar="COMMAND", required=True)
        for group, what in GROUPS.items()
    }
    for command in COMMANDS:
        where = groups.get(command.group, commands)
        one = where.add_parser(command.name.split()[-1], help=command.help, description=command.help, epilog=EPILOG)
        for argument in (*command.all_arguments(), DSN):
            argument.add_to_parser(one)
        one.set_defaults(command=command)
    return parser
