"""The accidents, each driven on the plain and on the guarded billing DAG, side by side and step by step the same.

Those that befall one task or one run all happen at once, on different invoices; those that befall a server that all
share come one by one after them. What the steps are made of is ``demo/drive.py``, what is counted ``demo/report.py``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime

from demo.batch import Batch, BatchDrive
from demo.drive import PATIENCE, Drive, NotDriven
from demo.ground import Ground
from demo.report import Count, Row

AT_ONCE = 8
"""So many DAGs have an accident at the same time. More would only make two cores slower."""
QUOTA = 45
"""Seconds for which the vendor has enough: longer than the plain task's retries last."""
DAYS = (datetime(2026, 1, 5, tzinfo=UTC), datetime(2026, 1, 6, tzinfo=UTC))


# -- what befalls one task or one run ----------------------------------------------------------------------------------


def task_killed(drive: Drive) -> None:
    run_id = drive.start_held()
    task = drive.processes(run_id).task
    drive.tell(f"charged, the answer is on its way: kill -9 of the task process {task.pid}")
    task.kill()
    drive.finish(run_id)


def supervisor_killed(drive: Drive) -> None:
    run_id = drive.start_held()
    supervisor = drive.processes(run_id).supervisor
    drive.tell(f"charged, the answer is on its way: kill -9 of the supervisor {supervisor.pid}; the task lives on")
    supervisor.kill()
    drive.wait_for_second(run_id)
    drive.let_go()
    drive.finish(run_id)


def exception_after_the_charge(drive: Drive) -> None:
    drive.finish(drive.start(books="down"))


def read_timeout(drive: Drive) -> None:
    run_id = drive.start_held(patience=2)
    drive.tell("charged, but the answer does not come: the client gives up after 2 s")
    drive.finish(run_id)


def marked_failed_and_cleared(drive: Drive) -> None:
    run_id = drive.start_held()
    drive.tell("charged, the answer is on its way: somebody marks the task failed and clears it")
    drive.mark_failed(run_id)
    drive.clear(run_id)
    drive.wait_for_second(run_id)
    drive.let_go()
    drive.finish(run_id)


def quota_for_a_while(drive: Drive) -> None:
    # The plain one's retries last longer on a busy machine: its wall stands until they are used up.
    drive.vendor.script("wall", customer=drive.customer, seconds=QUOTA if drive.guarded else 2 * PATIENCE)
    run_id = drive.start(account=drive.invoice)
    drive.tell(f'the vendor answers "429 too many requests" for {QUOTA} s')
    if not drive.guarded:
        state, tries = drive.ended(run_id), drive.task(run_id).try_number
        requests = len(drive.vendor.requests(drive.customer))
        drive.tell(f"{requests} requests into the wall; the run is {state}")
        if (state, requests, drive.vendor.charges(drive.customer)) != ("failed", tries, 0) or tries < 2:
            raise NotDriven(
                f"The plain run is {state}: {tries} tries, {requests} requests; retries used up was expected."
            )
        return
    drive.wait_until_it_waits(run_id)
    drive.finish(run_id)
    requests = len(drive.vendor.requests(drive.customer))
    if requests != 2:
        raise NotDriven(f"{requests} requests were made; one into the wall and one after it were expected.")
    drive.story.append("quota, so it waits; none was sent while closed")


def finished_run_cleared(drive: Drive) -> None:
    run_id = drive.start()
    drive.finish(run_id)
    drive.tell("finished; somebody clears it")
    drive.clear(run_id)
    drive.finish(run_id)


def backfilled_again(drive: Drive) -> None:
    for what, reprocess in (
        ("two days are backfilled", "none"),
        ("the same two days again, completed ones too", "completed"),
    ):
        drive.tell(what)
        drive.api.wait_backfill(drive.api.backfill(drive.dag_id, *DAYS, reprocess), 2 * PATIENCE)
    ends = {run: state for run, state in drive.api.runs(drive.dag_id).items() if run.startswith("backfill__")}
    if len(ends) != len(DAYS) or set(ends.values()) != {"success"}:
        raise NotDriven(f"The backfill ended as {ends}.")


def run_again_by_hand(drive: Drive) -> None:
    drive.finish(drive.start())
    drive.tell("finished; somebody starts a run of the same invoice by hand")
    drive.finish(drive.start())


def two_runs_at_once(drive: Drive) -> None:
    first = drive.start_held()
    drive.tell("charged, the answer is on its way: another run of the same invoice starts")
    second = drive.start()
    drive.wait_for_second(second)
    drive.let_go()
    drive.finish(first)
    drive.finish(second)


# -- what befalls a server ---------------------------------------------------------------------------------------------


def held(drive: Drive) -> None:
    drive.start_held()
    drive.tell("charged, the answer is on its way")


def let_go_and_cleared(drive: Drive) -> None:
    drive.let_go()
    drive.finish(drive.runs[0])
    drive.tell("finished; somebody clears it")
    drive.clear(drive.runs[0])
    drive.finish(drive.runs[0])


def kill_redis(ground: Ground) -> None:
    """kill -9 of Redis"""
    ground.redis.kill()


def start_redis(ground: Ground) -> None:
    """Redis is started again, empty"""
    ground.redis.start()


def restart_postgres(ground: Ground) -> None:
    """the ledger's PostgreSQL is restarted"""
    ground.postgres.restart()


def charged(drive: Drive) -> None:
    drive.finish(drive.start())


class Restore:
    """A base backup of the ledger's server from before the charges takes the place of its data after them."""

    def back_up(self, ground: Ground) -> None:
        """a base backup of the ledger is made, then the invoices are charged"""
        self.at = datetime.now(UTC)
        ground.postgres.base_backup(ground.home / "backup")

    def restore(self, ground: Ground) -> None:
        """the backup takes the place of the ledger"""
        ground.postgres.restore(ground.home / "backup")

    def cleared(self, drive: Drive) -> None:
        (run_id,) = drive.runs
        drive.tell("somebody clears the run that had finished after the backup")
        drive.clear(run_id)
        if drive.guarded:
            drive.wait_until_it_waits(run_id)
            drive.acknowledge_restore(self.at)
            drive.clear(run_id)  # as people do who do not want to wait until the task looks again
        drive.finish(run_id)


# -- all of them -------------------------------------------------------------------------------------------------------

Step = Callable[[Drive], None]
Blow = Callable[[Ground], None]


def _nothing(_: Ground | Drive) -> None: ...


@dataclass(frozen=True)
class Accident:
    """:param begin, end: what happens on each DAG before and after ``strike``, which befalls both at one moment.
    :param drive: what it is driven by, on which DAGs.
    :param prepare, mend: what is done to the ground before and after all of it."""

    name: str
    invoices: Sequence[str]
    begin: Step
    drive: type[Drive] = Drive
    prepare: Blow = _nothing
    strike: Blow = _nothing
    end: Step = _nothing
    mend: Blow = _nothing


def phases(seed: int = 0) -> list[list[Accident]]:
    """All accidents; those of one phase happen at once, on different invoices. The longest begins first.

    :param seed: decides the moments that are random.
    """
    restore, batch = Restore(), Batch(seed)
    return [
        [
            Accident("500 charges: 3 x kill -9, a 429 wall", batch.invoices, batch.drive, BatchDrive),
            Accident("task: kill -9 after the charge", ["task-killed"], task_killed),
            Accident("supervisor: kill -9, task lives on", ["supervisor-killed"], supervisor_killed),
            Accident("exception after the charge", ["exception"], exception_after_the_charge),
            Accident("read timeout after the charge", ["read-timeout"], read_timeout),
            Accident("quota: 429 for a while", ["quota"], quota_for_a_while),
            Accident("mark failed + clear while running", ["marked-failed"], marked_failed_and_cleared),
            Accident("clear of a finished run", ["finished"], finished_run_cleared),
            Accident("backfill over two finished dates", [f"{day:%Y-%m-%d}" for day in DAYS], backfilled_again),
            Accident("manual run for a finished invoice", ["by-hand"], run_again_by_hand),
            Accident("two DAG runs at once", ["two-runs"], two_runs_at_once),
        ],
        [
            Accident(
                "Redis killed during work, then clear",
                ["redis-killed"],
                begin=held,
                strike=kill_redis,
                end=let_go_and_cleared,
                mend=start_redis,
            )
        ],
        [
            Accident(
                "ledger's PostgreSQL restarted during work, then clear",
                ["postgres-restarted"],
                begin=held,
                strike=restart_postgres,
                end=let_go_and_cleared,
            )
        ],
        [
            Accident(
                "ledger restored to before the charge, then clear",
                ["ledger-restored"],
                prepare=restore.back_up,
                begin=charged,
                strike=restore.restore,
                end=restore.cleared,
            )
        ],
    ]


class Driven:
    """An accident under way on both DAGs."""

    def __init__(self, accident: Accident, ground: Ground, say: Callable[[str], None]) -> None:
        self.accident, self.ground, self.say = accident, ground, say
        self.plain, self.guarded = map(self._drive, accident.drive.DAGS)
        self.trouble = ""
        """Why it could not be driven to its end; '' = it was."""
        self.evidence = ""

    def _drive(self, dag_id: str) -> Drive:
        door = dag_id.rpartition("_")[2]
        return self.accident.drive(
            self.ground, dag_id, self.accident.invoices, lambda line: self.say(f"{self.accident.name} · {door}: {line}")
        )

    def step(self, step: Step, drive: Drive) -> None:
        """One step on one DAG. What goes wrong is kept, and no later step is tried."""
        if self.trouble:
            return
        try:
            step(drive)
        except Exception as error:
            self.trouble = f"{drive.dag_id}: {error}"
            drive.tell(f"NOT DRIVEN: {error}")
            try:
                self.evidence = drive.evidence()
            except Exception as another:
                self.evidence = f"Neither its log nor the ledger could be read: {another}"

    def blow(self, blow: Blow) -> None:
        """Something that befalls the ground."""
        if self.trouble or blow is _nothing:
            return
        try:
            self.say(f"{self.accident.name} · {blow.__doc__}")
            blow(self.ground)
        except Exception as error:
            self.trouble = str(error)

    def row(self) -> Row:
        plain, guarded = Count.of(self.plain.charges()), Count.of(self.guarded.charges())
        return Row(self.accident.name, plain, guarded, self.guarded.ledger, self.trouble)


def drive_all(ground: Ground, say: Callable[[str], None], seed: int) -> list[Driven]:
    """Every accident, driven as far as it went. Ends early only by an interrupt."""
    ground.control.honour_keys(False)
    planned = phases(seed)
    for dag_id in {dag_id for accidents in planned for one in accidents for dag_id in one.drive.DAGS}:
        ground.airflow.api.wait_dag(dag_id, PATIENCE)
        ground.airflow.api.unpause(dag_id)
    over = threading.Event()
    pool = ThreadPoolExecutor(AT_ONCE)
    try:
        driven = []
        for accidents in planned:
            phase = [Driven(one, ground, lambda line: None if over.is_set() else say(line)) for one in accidents]
            driven += phase
            drive_phase(phase, pool)
        return driven
    finally:
        # After an interrupt the drives are neither waited for nor heard: they end when the servers have ended.
        over.set()
        pool.shutdown(wait=False, cancel_futures=True)


def drive_phase(phase: Sequence[Driven], pool: Executor) -> None:
    def everywhere(step: Callable[[Accident], Step]) -> None:
        doors = [(one, drive) for one in phase for drive in (one.plain, one.guarded)]
        for ended in [pool.submit(one.step, step(one.accident), drive) for one, drive in doors]:
            ended.result()

    try:
        for one in phase:
            one.blow(one.accident.prepare)
        everywhere(lambda accident: accident.begin)
        for one in phase:
            one.blow(one.accident.strike)
        everywhere(lambda accident: accident.end)
        for one in phase:
            one.step(lambda drive: drive.read_ledger(), one.guarded)
    finally:
        for one in phase:
            one.accident.mend(one.ground)
