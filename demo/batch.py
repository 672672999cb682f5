"""The accident of a batch: 500 charges, 8 at once; the worker is killed three times, the vendor puts up a wall, and it
hangs up twice, once having charged and once not.

All of it is driven by what the vendor has counted: which requests it holds, drops or refuses is said before the job
begins, and the worker is killed when all its calls are charged and none is answered.
"""

from __future__ import annotations

import json
import random
from typing import Any

from demo.drive import PATIENCE, TASK, Drive, NotDriven
from demo.processes import end_all, wait_for

CHARGES = 500
AT_ONCE = 8
"""The concurrency of both DAGs: so many charges are on their way when the worker is killed."""
KILLS = 3
WALL = 12
"""Seconds for which the vendor has enough."""
KEY = "billing/batch/2026-01"


class Batch:
    """The accident, at moments that ``seed`` decides: the same ones for both DAGs.

    :ivar invoices: the business keys.
    :ivar charged_before: after how many answered charges of each life of the task its worker is killed, and in the
        last one, trouble begins.
    """

    def __init__(self, seed: int) -> None:
        self.invoices = [f"batch-{number:03}" for number in range(1, CHARGES + 1)]
        chance = random.Random(seed)
        self.charged_before = [chance.randint(30, 110) for _ in range(KILLS + 1)]

    def drive(self, drive: Drive) -> None:
        assert isinstance(drive, BatchDrive)
        for life, answered in enumerate(self.charged_before):
            drive.vendor.script(customer=drive.all, times=answered)
            if life < KILLS:
                drive.vendor.script(customer=drive.all, times=AT_ONCE, gate=drive.gate(life))
        drive.vendor.script("drop", customer=drive.all)
        drive.vendor.script("drop_before", customer=drive.all)
        drive.vendor.script("wall", customer=drive.all, seconds=WALL)
        run_id = drive.start()
        charged = 0
        for life, answered in enumerate(self.charged_before[:KILLS]):
            charged += answered + AT_ONCE
            drive.kill(run_id, life, charged)
        drive.tell(f"the vendor charges and hangs up, hangs up without charging, and has enough for {WALL} s")
        drive.finish(run_id)
        drive.look_at_the_requests()


class BatchDrive(Drive):
    """What befalls the batch, and the person who answers for it."""

    DAGS = ("billing_batch_plain", "billing_batch_guarded")
    patience = 2 * PATIENCE  # each of its steps takes several tries of the task

    @property
    def all(self) -> str:
        """The customers of all its charges."""
        return f"{self.dag_id}/*"

    def gate(self, life: int) -> str:
        return f"{self.dag_id}, life {life + 1}"

    def kill(self, run_id: str, life: int, charged: int) -> None:
        """kill -9 of the task's process when so many charges were made in all its lives, the last ones unanswered."""
        self.vendor.wait(self.all, charged=charged, timeout=self.patience)
        task = self.processes(run_id).task
        self.tell(f"{charged} charged, {AT_ONCE} of them not answered yet: kill -9 of the task process {task.pid}")
        end_all([task])
        self.vendor.release(self.gate(life))

    def fill_in_the_form(self, run_id: str) -> None:
        """What a person does: has the ledger list what is in doubt, looks each up at the vendor, says first what did
        not happen, and then in the form that the rest did.

        :raises NotDriven: it is not asked about all of them at once, or the vendor knows of none.
        """
        asked = self.api.form(self.dag_id, run_id, TASK)["subject"]
        told = self._in_doubt()
        listed = [item["name"] for item in told["items"]]
        happened = [name for name in listed if self.vendor.find(customer=f"{self.dag_id}/{name}")]
        missing = [name for name in listed if name not in happened]
        if not happened or f"Did these {len(listed)} items of {KEY} happen?" != asked:
            raise NotDriven(f"Airflow asks: {asked} In doubt are {listed}; the vendor knows {happened}.")
        self.tell(
            f"Airflow asks: {asked} A person types `airflow runguard items {KEY} --state in_doubt`, finds "
            f"{len(happened)} of them at the vendor, and answers: {', '.join(missing)} did not happen, the rest did"
        )
        for name in missing:
            wait_for(
                lambda name=name: self._did_not_happen(name, told["now"]),
                PATIENCE,
                f"it can be said of {name}",
                pause=1.0,
            )
        self.api.answer(self.dag_id, run_id, TASK, "it happened", reason="seen at the vendor")
        self.story.append(f"{len(listed)} of {CHARGES} in doubt, listed and asked about once")
        self.story.append(f"{len(happened)} happened, {len(missing)} did not")

    def look_at_the_requests(self) -> None:
        """:raises NotDriven: more requests were made than charges, refusals and the one that was dropped; or not one
        form asked about all doubts."""
        requests = self.vendor.requests(self.all)
        refused = sum(request.status == 429 for request in requests)
        self.tell(f"{len(requests)} requests, {self.vendor.charges(self.all)} charges, {refused} refused by the wall")
        if not self.guarded:
            return
        if not 1 <= refused <= AT_ONCE or len(requests) != CHARGES + refused + 1:
            raise NotDriven(f"{len(requests)} requests were made, {refused} of them into the wall.")
        kinds = [event["kind"] for event in self.explain()["timeline"]]
        if kinds.count("asked") != 1 or "paused" not in kinds:
            raise NotDriven(f"It was to be asked about once, and to wait: {kinds}.")
        self.story.insert(0, "quota, so it waits")

    def _in_doubt(self) -> dict[str, Any]:
        told: dict[str, Any] = json.loads(self.runguard("items", KEY, "--state=in_doubt", "--output=json"))
        return told

    def _did_not_happen(self, name: str, as_of: str) -> bool:
        """Whether the ledger takes it: not while the request may still arrive."""
        said = (f"--items=key={name}", "--did-not-happen", f"--as-of={as_of}", "--reason=not at the vendor")
        try:
            self.runguard("resolve", KEY, *said)
        except RuntimeError as error:
            if "too early" not in str(error):
                raise
            return False
        return True

    def read_ledger(self) -> None:
        stands = self.explain()
        told = json.loads(self.runguard("items", KEY, "--limit=1", "--output=json"))["counts"]
        counts = ", ".join(f"{count['items']} {count['state']}" for count in told)
        self.ledger = " → ".join([*self.story, f"{stands['record']['state']} ({counts})"])

    def _name(self, invoice: str | None = None) -> str:
        return KEY
