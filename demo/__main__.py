"""``python -m demo run``: every accident, on a plain and on a guarded DAG, and a table of what they came to.
``python -m demo up``: everything stays up for a person to play with, until Ctrl-C. ``python -m demo pictures``: the
README's pictures.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import threading
import time
from pathlib import Path

from demo import pictures, report
from demo.accidents import drive_all
from demo.ground import ROOT, Ground
from demo.processes import free_port
from demo.stack import PASSWORD, USER

HOME = ROOT / ".demo"


def up(options: argparse.Namespace) -> int:
    """Airflow with the example DAGs, the ledger and the vendor; returns only by Ctrl-C."""
    started = time.monotonic()
    with Ground(HOME / "up", options.dags, say, options.port or free_port(8080)) as ground:
        say(f"Up after {time.monotonic() - started:.0f} s.")
        say(f"Airflow    {ground.airflow.url}   login {USER} / {PASSWORD}")
        say(f"Ledger     {ground.ledger_url}")
        say(f"Redis      {ground.redis.url}")
        say(f"Vendor     {ground.vendor.url}/_report")
        say(f"Logs       {ground.home}/airflow")
        say("Ctrl-C stops all of it.")
        threading.Event().wait()
    return 0


def run(options: argparse.Namespace) -> int:
    """Every accident on both DAGs; ends with the table, ``.demo/report.json`` and an exit code that says it all."""
    started = time.monotonic()

    def tell(line: str) -> None:
        say(f"{time.monotonic() - started:4.0f} s  {line}")

    with Ground(HOME / "run", ROOT / "demo" / "dags", tell) as ground:
        tell(f"random moments by seed {options.seed} (the same again: --seed {options.seed})")
        driven = drive_all(ground, tell, options.seed)
        rows = [one.row() for one in driven]
        tell("all driven; stopping the servers ...")
    for one in driven:
        if one.trouble:
            say(f"\nNOT DRIVEN: {one.accident.name}: {one.trouble}\n{one.evidence}")
    target = HOME / "report.json"
    target.write_text(report.as_json(rows))
    say(f"\n{report.as_table(rows)}\n\n{report.summary(rows)}")
    say(f"It took {time.monotonic() - started:.0f} s. The numbers: {target}; the logs: {HOME / 'run'}.")
    return report.exit_code(rows)


def take_pictures(options: argparse.Namespace) -> int:
    """The README's pictures, of accidents that are driven for them."""
    with Ground(HOME / "pictures", ROOT / "demo" / "dags", say) as ground:
        pictures.drive(ground, say)
        pictures.take_all(ground, options.into)
    say(f"Taken: {options.into}.")
    return 0


def say(line: str) -> None:
    print(f"{line}\n", end="", flush=True)  # in one piece: several threads have something to say


def interrupt(_signal: int, _frame: object) -> None:
    """Ctrl-C or ``kill``: end in order. Those that follow are not heard, so that they cannot break the ending."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m demo", description="A real Airflow with a ledger and a vendor.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    command = commands.add_parser("up", help="keep everything up until Ctrl-C")
    command.add_argument("--port", type=int, help="of Airflow's web page (default: 8080, or a free one)")
    command.add_argument("--dags", type=Path, default=ROOT / "dags_examples", help="folder with DAG files")
    command.set_defaults(run=up)
    command = commands.add_parser("run", help="drive every accident on a plain and on a guarded DAG, end with a table")
    command.add_argument(
        "--seed", type=int, default=random.randrange(10**6), help="decides the moments that are random"
    )
    command.set_defaults(run=run)
    command = commands.add_parser("pictures", help="take the README's pictures, of a ledger after real accidents")
    command.add_argument("--into", type=Path, default=ROOT / "docs" / "pictures", help="folder of the pictures")
    command.set_defaults(run=take_pictures)
    options = parser.parse_args()
    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)
    try:
        code: int = options.run(options)
    except KeyboardInterrupt:
        say("Stopped; nothing is left running.")
        code = 130
    return code


if __name__ == "__main__":
    sys.exit(main())
