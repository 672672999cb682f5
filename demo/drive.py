"""One accident on one of the two DAGs: what the outside world and the people around it do, step by step.

Nothing here depends on which of the two it is, except that the ledger can be asked about the guarded one only, and that
a person answers where the ledger asks. Every step waits for something that can be seen (at the vendor, in Airflow, in
the ledger) and has a deadline; none merely lets time go by.
"""

from __future__ import annotations

import json
import shlex
from collections import Counter
from collections.abc import Callable, Collection
from datetime import datetime
from typing import Any

from demo.airflow_api import FINISHED, TaskState
from demo.ground import DEPLOYMENT, Ground, run_guard
from demo.processes import wait_for
from demo.stack import TaskProcesses

PLAIN, GUARDED = "billing_plain", "billing_guarded"
TASK = "charge"
PATIENCE = 180.0
"""Seconds that any one step may take: generous, since all accidents share two cores."""
WAITS = frozenset({"up_for_reschedule", "deferred"})
STANDS_BACK = frozenset({*WAITS, "awaiting_input", *FINISHED})


class NotDriven(Exception):
    """Something did not come to pass, so what this accident would show is not known."""


class Drive:
    """:cvar DAGS: the plain and the guarded one. :cvar patience: seconds until its run must have ended or ask a person.
    :param invoices: the business keys of this accident.
    :param tell: hears what happens, line by line."""

    DAGS = (PLAIN, GUARDED)
    patience = PATIENCE

    def __init__(self, ground: Ground, dag_id: str, invoices: Collection[str], tell: Callable[[str], None]) -> None:
        self.ground, self.dag_id, self.invoices, self.tell = ground, dag_id, list(invoices), tell
        self.api, self.vendor = ground.airflow.api, ground.control
        self.invoice = self.invoices[0]
        self.runs: list[str] = []
        self.story: list[str] = []
        """What the ledger said on the way, and who moved it on."""
        self.ledger = ""
        """All of that, and where it stands at last; see :meth:`read_ledger`."""

    @property
    def guarded(self) -> bool:
        return self.dag_id == self.DAGS[1]

    @property
    def customer(self) -> str:
        return f"{self.dag_id}/{self.invoice}"

    def charges(self) -> dict[str, int]:
        """How often each business key was charged."""
        charged = Counter(effect.customer for effect in self.vendor.effects(f"{self.dag_id}/*"))
        return {invoice: charged[f"{self.dag_id}/{invoice}"] for invoice in self.invoices}

    # -- the job and the vendor ------------------------------------------------------------------------------------

    def start(self, **conf: Any) -> str:
        """A new run for the invoice; its run id."""
        run_id = f"{self.invoice}-{len(self.runs) + 1}"
        self.runs.append(self.api.trigger(self.dag_id, conf={"invoice": self.invoice, **conf}, run_id=run_id))
        return run_id

    def start_held(self, **conf: Any) -> str:
        """A new run whose charge has happened, and whose answer the vendor keeps back until :meth:`let_go`."""
        self.vendor.script(customer=self.customer, gate=self.customer)
        run_id = self.start(**conf)
        self.vendor.wait(self.customer, charged=1, timeout=PATIENCE)
        return run_id

    def let_go(self) -> None:
        self.vendor.release(self.customer)

    def wait_for_second(self, run_id: str) -> None:
        """Return when this run's attempt, the second for the invoice, has charged or stands back."""

        def came() -> bool:
            return self.vendor.charges(self.customer) > 1 or self.task(run_id).state in STANDS_BACK

        wait_for(came, PATIENCE, f"the second attempt for {self.customer} charges or stands back", pause=1.0)
        if self.vendor.charges(self.customer) > 1:
            self.tell("the second attempt has charged, too")
        elif self.task(run_id).state in WAITS:
            self.tell("the second attempt found it held, and waits")
            self.story.append("held, so the second waits")

    # -- Airflow and its people --------------------------------------------------------------------------------------

    def task(self, run_id: str) -> TaskState:
        return self.api.task(self.dag_id, run_id, TASK)

    def processes(self, run_id: str) -> TaskProcesses:
        return self.ground.airflow.task_processes(self.dag_id, run_id, TASK, timeout=PATIENCE)

    def clear(self, run_id: str) -> None:
        self.api.clear(self.dag_id, run_id, [TASK])

    def mark_failed(self, run_id: str) -> None:
        self.api.set_state(self.dag_id, run_id, TASK, "failed")
        self.ended(run_id)

    def wait_until_it_waits(self, run_id: str) -> None:
        """Return when the task of this run waits in Airflow, without a worker."""
        wait_for(
            lambda: self.task(run_id).state in WAITS,
            PATIENCE,
            f"the task of {self.dag_id}, run {run_id}, waits",
            pause=1.0,
        )

    def finish(self, run_id: str) -> None:
        """Return when the run has succeeded, a person having answered where the ledger asked.

        :raises NotDriven: it ended otherwise.
        """
        state = self.ended_or_asked(run_id)
        if state == "awaiting_input":
            self.fill_in_the_form(run_id)
            state = self.ended(run_id)
        if state != "success":
            raise NotDriven(f"Run {run_id} of {self.dag_id} ended as {state}.")

    def ended_or_asked(self, run_id: str) -> str:
        """``awaiting_input`` when its task is parked with a form that a person may have read, else the run's end."""

        def reached() -> str | None:
            if self.task(run_id).state == "awaiting_input":
                return "awaiting_input" if self.ground.airflow.saw_it_park(self.dag_id, run_id, TASK) else None
            path = f"/api/v2/dags/{self.dag_id}/dagRuns/{run_id}"
            state: str = self.api.call("GET", path)["state"]
            return state if state in FINISHED else None

        return wait_for(reached, self.patience, f"run {run_id} of {self.dag_id} has ended or asks a person", pause=1.0)

    def ended(self, run_id: str) -> str:
        """The state in which the run ended. The run's and not its task's: what is cleared between the two is lost
        (Airflow 3.3.2 ends the run although its task is to run again).

        :raises NotDriven: it did not end in time; with all that a person needs to find out why.
        """
        try:
            return self.api.wait_run(self.dag_id, run_id, self.patience, pause=1.0)
        except TimeoutError as error:
            raise NotDriven(f"{error} Its task is {self.task(run_id)}.\n{self.evidence()}") from error

    # -- the ledger and its people -----------------------------------------------------------------------------------

    def runguard(self, *words: str) -> str:
        """A command that a person types, as ``airflow runguard …``; its output."""
        return run_guard(*words, "--dsn", self.ground.ledger_url, "--deployment", DEPLOYMENT)

    def explain(self, invoice: str | None = None) -> dict[str, Any]:
        data: dict[str, Any] = json.loads(self.runguard("explain", self._name(invoice), "--output", "json"))
        return data

    def fill_in_the_form(self, run_id: str) -> None:
        """What a person does: reads the form in Airflow, looks the charge up at the vendor, says what is true.

        :raises NotDriven: the vendor knows nothing of it.
        """
        asked = self.api.form(self.dag_id, run_id, TASK)["subject"]
        found = self.vendor.find(customer=self.customer)
        if not found:
            raise NotDriven("The ledger is in doubt about a charge that never reached the vendor.")
        charge = found[0]["id"]
        self.tell(f"Airflow asks: {asked} A person finds {charge} at the vendor and answers: it happened")
        self.api.answer(
            self.dag_id,
            run_id,
            TASK,
            "it happened",
            reference=charge,
            result=json.dumps(charge),
            reason="seen at the vendor",
        )
        self.story += ["in doubt, so a person is asked", "it happened"]

    def acknowledge_restore(self, lost_since: datetime) -> None:
        """What a person does about a ledger that lost time."""
        words = ["db", "acknowledge-restore", f"--lost-since={lost_since.isoformat()}", "--reason=restored from backup"]
        self.tell(f"the ledger lost time, so the task waits. A person types: airflow runguard {shlex.join(words)}")
        self.runguard(*words)
        self.story.append("lost time, so all wait")

    def read_ledger(self) -> None:
        """Where all the invoices stand, and who moves them next where somebody has to."""
        ends = set()
        for invoice in self.invoices:
            stands = self.explain(invoice)
            who = "" if stands["who"].startswith("Nobody") else f" (next: {stands['who']})"
            ends.add(stands["record"]["state"] + who)
        self.ledger = " → ".join([*self.story, *sorted(ends)])

    def evidence(self) -> str:
        """For a person who must find out why it went wrong: the end of the task's log, and what the ledger says."""
        parts = []
        if self.runs:
            run_id = self.runs[-1]
            lines = self.api.log(self.dag_id, run_id, TASK, self.task(run_id).try_number).splitlines()
            parts += [f"The end of the log of {self.dag_id}, run {run_id}:", *lines[-20:]]
        if self.guarded:
            parts += [f"explain {self._name()}:", self.runguard("explain", self._name())]
        return "\n".join(parts)

    def _name(self, invoice: str | None = None) -> str:
        return f"billing/invoice/{invoice or self.invoice}"
