"""The caretaker: a thread in each triggerer that looks after records which nobody holds.

Every few seconds it hears answers that a form was given and its task did not get, wakes parked tasks that were settled
elsewhere, and tells people; once a minute it settles what died, by its marker what ``guard.sql`` left in doubt, and by
the functions of the DAGs what their tasks do not come back for. Whoever is asked may hang, so that has a thread of its
own, and the DAGs' code a process of its own. All of it may run many times (in several triggerers at once), or not at
all: the next claim, the parked task's own look and commands (``sweep``, ``reconcile``) do the same, later.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from airflow.listeners import hookimpl

from airflow_runguard import asking, human, measures, notices
from airflow_runguard.config import Settings, connect_ledger, settings
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Identity

log = logging.getLogger("airflow_runguard")

FIRST_ROUND = 10.0
"""Seconds after the start: by then the triggerer has forked its runner."""
ROUND = 3.0
SWEEP = 60.0
"""Seconds between two rounds, and two sweeps."""
IDLE = 60.0
"""Seconds for which nobody moved what is in doubt, before the vendor is asked for it: its task asks by itself."""
ASK_AGAIN = 600.0
"""Seconds after which the vendor is asked again for one DAG. Each time costs a process that loads the DAG."""
ASK_TIMEOUT = 300.0
"""Seconds after which a process that asks is given up."""
ENDED = ("success", "failed", "skipped", "upstream_failed", "removed")
BRINGS_IT = ("scheduled", "queued", "running")
"""States in which a task that was parked is on its way with its answer."""
WOKEN: dict[str, Any] = {
    "chosen_options": [],
    "params_input": {},
    "responded_at": None,
    "responded_by_user": None,
    "timedout": False,
}
"""What a parked task hears that was settled elsewhere: no answer, so it looks into the ledger."""


@hookimpl
def on_starting(component: Any) -> None:
    if "triggerer" in sys.argv[1:2]:
        threading.Thread(target=Caretaker().run, name="runguard-caretaker", daemon=True).start()


class Caretaker:
    def __init__(self) -> None:
        self.name = f"caretaker {socket.gethostname()}:{os.getpid()}"
        self._swept_at = 0.0
        self._asking: dict[str, threading.Thread] = {}
        """One thread for the markers and one for the DAGs' functions: a database that never answers holds up one."""
        self._asked: dict[str, float] = {}
        self._complained = ""

    def run(self) -> None:
        pause = threading.Event()
        pause.wait(FIRST_ROUND)
        while True:
            self.round()
            pause.wait(ROUND)

    def round(self) -> None:
        """One round on a connection of its own. What goes wrong is said once, until it is something else."""
        try:
            options = settings()
            ledger = Ledger(connect_ledger(options), deployment=options.deployment)
            try:
                ledger.check()
                self._round(ledger, options)
            finally:
                ledger.close()
            self._complained = ""
        except Exception as error:
            if str(error) != self._complained:
                log.warning("The caretaker could not make its round: %s", error)
            self._complained = str(error)

    def _round(self, ledger: Ledger, options: Settings) -> None:
        ledger.watching(self.name, 0)
        now = datetime.now(UTC).timestamp()
        if now - self._swept_at >= SWEEP:
            self._swept_at = now
            for identity, state in ledger.sweep(self.name):
                log.info("The holder of %s died; it is %s now.", identity, state)
            measures.gauge(ledger)
            for name, ask in (("markers", self.ask_markers), ("functions", self.ask_functions)):
                if name not in self._asking or not self._asking[name].is_alive():
                    self._asking[name] = threading.Thread(
                        target=ask, args=(options,), name=f"runguard-{name}", daemon=True
                    )
                    self._asking[name].start()
        attend(ledger)
        notices.send(ledger, notices.load(options.notifiers), self.name)

    def ask_markers(self, options: Settings) -> None:
        """Settle the effects in databases by their markers, without a DAG."""
        from airflow_runguard.reconcile import settle_markers

        with _reached(options) as ledger:
            settle_markers(ledger, actor=self.name)

    def ask_functions(self, options: Settings) -> None:
        """Settle by the functions of the DAGs what they can settle."""
        due: list[str] = []
        with _reached(options) as ledger:
            due = ledger.dags_to_ask(IDLE)
        now = time.monotonic()
        self._asked = {dag_id: at for dag_id, at in self._asked.items() if now - at < ASK_AGAIN}
        for dag_id in due:
            if dag_id in self._asked:
                continue
            try:
                ask_by_dag(dag_id, self.name)
            except Exception as error:  # it hangs, say: the others are asked all the same
                log.warning("The functions of DAG %r could not be asked: %s", dag_id, error)
            self._asked[dag_id] = time.monotonic()


@contextmanager
def _reached(options: Settings) -> Iterator[Ledger]:
    """The ledger, on a connection of its own. What goes wrong with it or with asking ends this round of asking."""
    try:
        with closing(Ledger(connect_ledger(options), deployment=options.deployment)) as ledger:
            yield ledger
    except Exception as error:
        log.warning("The caretaker could not ask about what is in doubt: %s", error)


def ask_by_dag(dag_id: str, actor: str) -> None:
    """Ask by a DAG's own functions about what is in doubt there. Its code does not run in the triggerer: it may hang,
    or end its process. What hangs is killed with every process that it began, also where the triggerer is killed.

    :raises subprocess.SubprocessError: the process could not be run to its end; all stays in doubt.
    """
    words = [sys.executable, "-m", "airflow", "runguard", "reconcile", f"--dag-id={dag_id}", f"--actor={actor}"]
    ended = asking.run(words, ASK_TIMEOUT)
    asked = ended.returncode == 0
    said = (ended.stdout if asked else ended.stderr).strip()
    log.log(logging.INFO if asked else logging.WARNING, "Asked for DAG %r: %s", dag_id, said[-2000:])


def attend(ledger: Ledger) -> None:
    """Answers that their task did not get go into the ledger; parked tasks are woken whose record was settled, or is
    now known to be a job that they can attach to.

    Runs where Airflow's metadata is at hand: in the triggerer's own process.
    """
    from airflow.utils.session import create_session

    for asked in ledger.questions():
        with create_session() as session:
            if asked["stands"]:
                _hear(ledger, asked, session)
            elif _wake(asked["ti_id"], session):
                ledger.close_question(asked["ti_id"])


def _hear(ledger: Ledger, asked: Any, session: Any) -> None:
    """Book an answer that its task will not get, so that it is not lost: the try has ended, or Airflow failed it after
    the parking ("state mismatch") and begins another, under the same id (3.3.2)."""
    from airflow.models.hitl import HITLDetail
    from airflow.models.hitl_history import HITLDetailHistory
    from airflow.models.taskinstance import TaskInstance

    ti_id = UUID(asked["ti_id"])
    ti = session.get(TaskInstance, ti_id)
    if ti is not None and ti.state in BRINGS_IT and ti.next_method == human.ANSWERED:
        return
    form = session.get(HITLDetailHistory if ti is None else HITLDetail, ti_id)
    if form is None or form.responded_at is None:
        return
    response = {
        "chosen_options": list(form.chosen_options or []),
        "params_input": form.params_input,
        "responded_by_user": form.responded_by_user,
    }
    answer = human.answer_of(response)
    if answer is None and ti is not None and ti.state not in ENDED:
        return
    record = ledger.get(Identity(asked["deployment"], asked["namespace"], asked["key"]))
    if answer is not None and record is not None:
        verdict = human.apply(ledger, record, answer, human.Asked(asked["fence"], asked["at"]))
        if verdict == "ok":
            log.info("The form of %s was answered, and its try had not waited for it.", record.identity)
    if ti is None or ti.state in ENDED:  # else a try may have parked again: it is woken
        ledger.close_question(asked["ti_id"])


def _wake(ti_id: str, session: Any) -> bool:
    """Let a parked task look again. Whether its question is over: also true where it is parked no more."""
    from airflow.models.hitl import HITLDetail
    from airflow.models.taskinstance import TaskInstance
    from airflow.models.trigger import handle_event_submit
    from airflow.triggers.base import TriggerEvent
    from sqlalchemy import select

    query = select(TaskInstance).where(TaskInstance.id == UUID(ti_id))
    ti = session.scalar(query.with_for_update(of=TaskInstance))
    if ti is None or ti.state in ENDED:
        return True
    if ti.state != "awaiting_input":
        return False  # it is on its way into the parking, or out of it
    form = session.get(HITLDetail, ti.id)
    if form is not None and form.responded_at is None:
        form.responded_at, form.chosen_options = datetime.now(UTC), []
    woken = TriggerEvent(WOKEN)  # type: ignore[no-untyped-call]
    handle_event_submit(woken, task_instance=ti, session=session)
    log.info("%s was settled elsewhere; it goes on.", ti)
    return True
