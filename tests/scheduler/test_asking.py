"""Through a running Airflow: doubt is asked about and answered by every way there is; quota and freezes wait.

All scenarios run side by side on one Airflow (those of pausing, too), each on an invoice of its own, and each test
waits for its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from typing import Any

import psycopg
import pytest

from airflow_runguard.core import keys
from airflow_runguard.core.items import Items
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import CallState, Record, State
from demo.airflow_api import ApiError
from demo.drive import PATIENCE, TASK, WAITS, Drive
from demo.ground import DEPLOYMENT, Ground
from demo.processes import end_all, wait_for

pytestmark = [pytest.mark.scheduler, pytest.mark.timeout(900)]

HAPPENED, DO_IT, LEAVE = "it happened", "it did not happen: do it", "leave it failed"


class Asked(Drive):
    """A charge whose answer never comes, so that its task ends parked with a form."""

    def __init__(self, ground: Ground, name: str, dag_id: str = "asking") -> None:
        super().__init__(ground, dag_id, [name], lambda _: None)

    def park(self, then: str = "drop") -> str:
        """:param then: what the vendor does: ``drop`` = charges and hangs up, ``drop_before`` = hangs up at once."""
        self.vendor.script(then, customer=self.customer)
        run_id = self.start()
        self.until_parked(run_id)
        return run_id

    def until_parked(self, run_id: str) -> None:
        state = self.ended_or_asked(run_id)
        assert state == "awaiting_input", self.evidence()

    def answer(self, run_id: str, option: str, **given: str) -> None:
        self.api.answer(self.dag_id, run_id, TASK, option, **given)

    def resolve(self, *how: str) -> None:
        self.runguard("resolve", self._name(), "--call=charge", *how, "--reason=seen at the vendor")

    def end(self, run_id: str) -> dict[str, Any]:
        state = self.ended(run_id)
        explained = self.explain()
        return {
            "run": state,
            "tries": self.task(run_id).try_number,
            "record": explained["record"]["state"],
            "charges": self.vendor.charges(self.customer),
            "requests": len(self.vendor.requests(self.customer)),
            "result": self.result(run_id) if state == "success" else None,
            "kinds": [event["kind"] for event in explained["timeline"]],
            "actors": [event["actor"] for event in explained["timeline"] if event["kind"] == "resolved"],
        }

    def result(self, run_id: str) -> Any:
        path = f"/api/v2/dags/{self.dag_id}/dagRuns/{run_id}/taskInstances/{TASK}/xcomEntries/return_value"
        return self.api.call("GET", path)["value"]

    def record(self) -> Record:
        found = self.on_ledger(
            lambda ledger: ledger.get(keys.identity(DEPLOYMENT, "asking", f"invoice/{self.invoice}"))
        )
        assert found is not None
        return found

    def until_paused(self, run_id: str) -> None:
        """Its record waits for quota, and its task has left the worker."""
        wait_for(
            lambda: self.record().state is State.PAUSED and self.task(run_id).state in WAITS,
            PATIENCE,
            f"{self.invoice} waits for its quota",
            pause=0.5,
        )

    def items(self) -> dict[str, int]:
        """How many items of its batch stand in each state."""
        record = self.record()
        counts = self.on_ledger(lambda ledger: Items(ledger).count(record.id, record.generation))
        return {state: sum(c.items for c in counts if c.state == state) for state in {c.state for c in counts}}

    def on_ledger(self, ask: Callable[[Ledger], Any]) -> Any:
        """What the code behind a command does, without a process of its own."""
        with closing(Ledger(lambda: psycopg.connect(self.ground.ledger_url), deployment=DEPLOYMENT)) as ledger:
            ledger.check()
            return ask(ledger)

    def _name(self, invoice: str | None = None) -> str:
        return f"asking/invoice/{invoice or self.invoice}"


def form_says_it_happened(ground: Ground) -> Any:
    drive = Asked(ground, "form-happened")
    run_id = drive.park()
    form = drive.api.form(drive.dag_id, run_id, TASK)
    charge = drive.vendor.find(customer=drive.customer)[0]["id"]
    drive.answer(run_id, HAPPENED, reference=charge, result=json.dumps(charge), reason="seen in the portal")
    return drive.end(run_id) | {"form": form, "charge": charge}


def form_says_do_it_too_early_then_again(ground: Ground) -> Any:
    drive = Asked(ground, "form-do-it")
    run_id = drive.park("drop_before")
    for _ in range(5):
        drive.answer(run_id, DO_IT)
        wait_for(lambda: drive.task(run_id).state != "awaiting_input", PATIENCE, "it goes on", pause=0.5)
        if drive.ended_or_asked(run_id) != "awaiting_input":  # too early: it waits, and asks again
            break
    return drive.end(run_id)


def form_says_leave_it(ground: Ground) -> Any:
    drive = Asked(ground, "form-leave")
    run_id = drive.park()
    drive.answer(run_id, LEAVE)
    return drive.end(run_id)


def bad_json_in_the_form(ground: Ground) -> Any:
    drive = Asked(ground, "form-bad-json")
    run_id = drive.park()
    drive.answer(run_id, HAPPENED, result="ch_1 without quotes")
    wait_for(lambda: drive.task(run_id).state != "awaiting_input", PATIENCE, "it goes on", pause=0.5)
    drive.until_parked(run_id)
    drive.answer(run_id, HAPPENED, result='"ch_1"')
    return drive.end(run_id)


def settled_by_a_command_while_parked(ground: Ground) -> Any:
    drive = Asked(ground, "command")
    run_id = drive.park()
    drive.resolve("--happened", '--result="by command"')
    return drive.end(run_id)


def command_and_form_both(ground: Ground) -> Any:
    drive = Asked(ground, "both")
    run_id = drive.park()
    drive.resolve("--happened", '--result="by command"')
    try:
        drive.answer(run_id, DO_IT)  # a second person, who is mistaken, at the same moment
    except ApiError as error:
        if error.status != 409:  # the caretaker was faster
            raise
    return drive.end(run_id)


def marked_success_while_parked(ground: Ground) -> Any:
    drive = Asked(ground, "marked")
    run_id = drive.park()
    drive.api.set_state(drive.dag_id, run_id, TASK, "success")
    drive.api.wait_run(drive.dag_id, run_id, PATIENCE, pause=1.0)
    before = drive.explain()["record"]["state"]
    drive.resolve("--happened", '--result="by command"')
    drive.clear(run_id)
    return drive.end(run_id) | {"before": before}


def cleared_while_parked(ground: Ground) -> Any:
    drive = Asked(ground, "cleared")
    run_id = drive.park()
    first = drive.task(run_id).try_number
    drive.clear(run_id)
    wait_for(lambda: drive.task(run_id).try_number > first, PATIENCE, "a new try", pause=0.5)
    drive.until_parked(run_id)
    drive.answer(run_id, HAPPENED, result='"seen"')
    return drive.end(run_id)


def answered_after_its_try_had_failed(ground: Ground) -> Any:
    drive = Asked(ground, "late-answer")
    run_id = drive.park()
    drive.api.set_state(drive.dag_id, run_id, TASK, "failed")
    drive.api.wait_run(drive.dag_id, run_id, PATIENCE, pause=1.0)
    drive.answer(run_id, HAPPENED, result='"seen"')
    wait_for(lambda: drive.explain()["record"]["state"] != "in_doubt", PATIENCE, "the caretaker hears", pause=1.0)
    drive.clear(run_id)
    return drive.end(run_id)


def answered_while_its_try_failed(ground: Ground) -> Any:
    """What Airflow 3.3.2 leaves of an answer that came before the scheduler saw the parked process end."""
    drive = Asked(ground, "mismatch")
    run_id = drive.park()
    ti_id = drive.task(run_id).id
    with psycopg.connect(ground.airflow.metadata.url) as metadata:
        metadata.execute(
            "update hitl_detail set responded_at = now(), chosen_options = %s, params_input = %s where ti_id = %s",
            [json.dumps([HAPPENED]), json.dumps({"result": '"seen"'}), ti_id],
        )
        metadata.execute(
            "update task_instance set state = 'up_for_retry', end_date = now(), next_method = null, next_kwargs = null"
            " where id = %s",
            [ti_id],
        )
    return drive.end(run_id)


def nobody_answers(ground: Ground) -> Any:
    drive = Asked(ground, "nobody", "asking_briefly")
    run_id = drive.park()
    end = drive.end(run_id)
    told = "select kind from runguard.notice n join runguard.record r on r.id = n.record_id where r.key = %s"
    with psycopg.connect(ground.ledger_url) as sql:
        kinds = [kind for (kind,) in sql.execute(told, [f"invoice/{drive.invoice}"])]
    return end | {"needs_person": drive.explain()["record"]["needs_person"], "notices": kinds}


def quota_then_open(ground: Ground) -> Any:
    drive = Asked(ground, "quota", "under_quota")
    drive.vendor.script("status", customer=drive.customer, status=429, headers={"Retry-After": "3600"}, charged=False)
    run_id = drive.start()
    wait_for(lambda: drive.task(run_id).state in WAITS, PATIENCE, "it waits", pause=0.5)
    waits = drive.task(run_id).state
    requests = len(drive.vendor.requests(drive.customer))
    drive.runguard("quota", "open", f"wall/{drive.invoice}", "--reason=raised by the vendor")
    return drive.end(run_id) | {"waits": waits, "requests while closed": requests}


def frozen_then_thawed(ground: Ground) -> Any:
    drive = Asked(ground, "frozen")
    drive.runguard("freeze", f"--key-prefix=invoice/{drive.invoice}", "--reason=looking into it")
    run_id = drive.start()
    wait_for(lambda: drive.task(run_id).state in WAITS, PATIENCE, "it waits", pause=0.5)
    requests = len(drive.vendor.requests(drive.customer))
    drive.runguard("thaw", f"--key-prefix=invoice/{drive.invoice}", "--reason=found it")
    return drive.end(run_id) | {"requests while frozen": requests}


def holder_died_and_nobody_comes(ground: Ground) -> Any:
    """No retry is left: the caretaker finds the dead holder, and people are told."""
    drive = Asked(ground, "swept", "asking_briefly")
    run_id = drive.start_held()
    drive.processes(run_id).task.kill()
    drive.let_go()
    wait_for(lambda: drive.explain()["record"]["state"] == "in_doubt", PATIENCE, "the sweep settles it", pause=1.0)
    return drive.end(run_id)


def answered_before_it_was_parked(ground: Ground) -> Any:
    drive = Asked(ground, "at-once", "answered_at_once")
    drive.vendor.script("drop", customer=drive.customer)
    return drive.end(drive.start())


def its_job_was_found_while_parked(ground: Ground) -> Any:
    drive = Asked(ground, "job", "submitting")
    run_id = drive.park()
    found = drive.vendor.find(customer=drive.customer)[0]["id"]
    seen = drive.record()
    adopted = drive.on_ledger(
        lambda ledger: ledger.adopt(seen.id, call="charge", external_id=found, seen_fence=seen.fence, actor="reconcile")
    )
    return drive.end(run_id) | {"adopted": adopted, "found": found}


def killed_inside_its_transaction(ground: Ground) -> Any:
    """Nobody comes for it, and nobody is asked: the caretaker of a real triggerer asks its marker."""
    shop = ground.airflow.env["AIRFLOW_CONN_SHOP_DB"]
    with psycopg.connect(shop) as sql:
        sql.execute("create table booked (invoice text)")
    drive = Asked(ground, "marker", "booking")
    run_id = drive.start_held()
    drive.processes(run_id).task.kill()
    drive.let_go()
    wait_for(lambda: drive.record().state is State.PENDING, PATIENCE, "the marker settles it", pause=1.0)
    (call,) = drive.on_ledger(lambda ledger: ledger.calls(drive.record().id))
    drive.clear(run_id)
    end = drive.end(run_id)
    with psycopg.connect(shop) as sql:
        return end | {"call": call.state, "rows": sql.execute("select invoice from booked").fetchall()}


def a_batch_is_killed_paused_and_asked_about(ground: Ground) -> Any:
    """Killed with three items charged and not answered; told to wait when it comes back; a person answers at last."""
    drive = Asked(ground, "batch", "asking_in_a_batch")
    items = f"{drive.dag_id}/item-*"
    drive.vendor.script(customer=items, times=4)
    drive.vendor.script(customer=items, times=3, gate=items)
    drive.vendor.script("status", customer=items, status=429, headers={"Retry-After": "3600"}, charged=False)
    run_id = drive.start()
    drive.vendor.wait(items, charged=7, timeout=PATIENCE)
    end_all([drive.processes(run_id).task])
    drive.vendor.release(items)
    drive.until_paused(run_id)
    paused = drive.items()
    drive.runguard("quota", "open", "wall/batch", "--reason=raised by the vendor")
    drive.until_parked(run_id)
    parked = drive.items()
    form = drive.api.form(drive.dag_id, run_id, TASK)
    drive.answer(run_id, HAPPENED, reason="seen in the portal")
    end = drive.end(run_id)
    charged = sorted(effect.customer for effect in drive.vendor.effects(items))
    requests = len(drive.vendor.requests(items))
    return end | {
        "paused": paused,
        "parked": parked,
        "form": form,
        "items": drive.items(),
        "charged": charged,
        "requests": requests,
    }


SCENARIOS = (
    a_batch_is_killed_paused_and_asked_about,
    killed_inside_its_transaction,
    form_says_it_happened,
    form_says_do_it_too_early_then_again,
    form_says_leave_it,
    bad_json_in_the_form,
    settled_by_a_command_while_parked,
    command_and_form_both,
    marked_success_while_parked,
    cleared_while_parked,
    answered_after_its_try_had_failed,
    answered_while_its_try_failed,
    nobody_answers,
    quota_then_open,
    frozen_then_thawed,
    holder_died_and_nobody_comes,
    answered_before_it_was_parked,
    its_job_was_found_while_parked,
)
Scenario = Callable[[Ground], Any]


After = Callable[[Scenario], Any]


def test_p03_a_person_says_in_the_form_that_it_happened_and_the_task_ends_with_that_result(after: After) -> None:
    end = after(form_says_it_happened)
    assert (end["run"], end["tries"], end["record"], end["charges"], end["requests"]) == ("success", 1, "done", 1, 1)
    assert end["result"] == end["charge"]
    assert end["actors"] == ["person:admin"]
    form = end["form"]
    assert form["subject"] == "Did asking/invoice/form-happened happen?"
    assert form["options"] == [HAPPENED, DO_IT, LEAVE]
    assert "too early" in form["body"]
    assert "vendor key" in form["body"]


def test_p03_a_person_says_that_it_did_not_happen_and_it_is_done_once_when_it_cannot_arrive_any_more(
    after: After,
) -> None:
    end = after(form_says_do_it_too_early_then_again)
    assert (end["run"], end["tries"], end["record"], end["charges"]) == ("success", 1, "done", 1)
    assert end["requests"] == 2


def test_p03_a_person_leaves_it_failed(after: After) -> None:
    end = after(form_says_leave_it)
    assert (end["run"], end["record"], end["requests"]) == ("failed", "failed", 1)


def test_p03_an_answer_that_cannot_be_read_is_asked_for_again(after: After) -> None:
    end = after(bad_json_in_the_form)
    assert (end["run"], end["record"], end["charges"], end["result"]) == ("success", "done", 1, "ch_1")


def test_p03_settled_by_a_command_its_parked_task_goes_on(after: After) -> None:
    end = after(settled_by_a_command_while_parked)
    assert (end["run"], end["tries"], end["record"], end["charges"]) == ("success", 1, "done", 1)
    assert end["result"] == "by command"


def test_p03_the_first_answer_counts_and_the_second_changes_nothing(after: After) -> None:
    end = after(command_and_form_both)
    assert (end["run"], end["record"], end["charges"], end["requests"]) == ("success", "done", 1, 1)
    assert end["result"] == "by command"


def test_p10_marked_success_while_parked_the_ledger_keeps_its_doubt(after: After) -> None:
    end = after(marked_success_while_parked)
    assert end["before"] == "in_doubt"
    assert (end["run"], end["record"], end["charges"], end["result"]) == ("success", "done", 1, "by command")


def test_p03_cleared_while_parked_it_asks_anew(after: After) -> None:
    end = after(cleared_while_parked)
    assert (end["run"], end["record"], end["charges"], end["requests"]) == ("success", "done", 1, 1)
    assert end["kinds"].count("asked") == 2


def test_p03_an_answer_to_a_try_that_has_ended_is_not_lost(after: After) -> None:
    end = after(answered_after_its_try_had_failed)
    assert (end["run"], end["record"], end["charges"], end["result"]) == ("success", "done", 1, "seen")


def test_p03_an_answer_that_its_failing_try_did_not_hear_is_not_lost(after: After) -> None:
    end = after(answered_while_its_try_failed)
    assert (end["run"], end["tries"], end["record"], end["charges"], end["requests"]) == ("success", 2, "done", 1, 1)
    assert end["result"] == "seen"


def test_p03_an_answer_between_the_form_and_the_parking_is_not_lost(after: After) -> None:
    """Airflow lets the task go on at once, or (3.3.2) fails its try; then the caretaker books what was said."""
    end = after(answered_before_it_was_parked)
    assert (end["run"], end["record"], end["charges"], end["requests"]) == ("success", "done", 1, 1)
    assert end["result"] == "seen at once"
    assert end["actors"] == ["person:admin"]


def test_p03_a_parked_task_whose_job_was_found_attaches_to_it_at_once(after: After) -> None:
    """Within :data:`PATIENCE`, while by itself it would look after ten minutes."""
    end = after(its_job_was_found_while_parked)
    assert end["adopted"] == "ok"
    assert (end["run"], end["tries"], end["record"], end["charges"], end["requests"]) == ("success", 1, "done", 1, 1)
    assert end["result"] == end["found"]


def test_p03_killed_inside_its_transaction_it_is_settled_by_its_marker_and_then_booked_once(after: After) -> None:
    end = after(killed_inside_its_transaction)
    assert end["call"] is CallState.PENDING
    assert (end["run"], end["tries"], end["record"]) == ("success", 2, "done")
    assert end["rows"] == [("marker",)]
    assert [actor.startswith("caretaker ") for actor in end["actors"]] == [True]


def test_p03_p06_a_batch_that_was_killed_and_paused_charges_each_item_once_and_asks_once(after: After) -> None:
    end = after(a_batch_is_killed_paused_and_asked_about)
    assert (end["paused"]["in_doubt"], end["paused"]["paused"]) == (3, 1)
    assert end["parked"] == {"done": 9, "in_doubt": 3}
    assert end["form"]["subject"] == "Did these 3 items of asking/invoice/batch happen?"
    assert (end["run"], end["record"], end["kinds"].count("asked")) == ("success", "done", 1)
    assert end["items"] == {"done": 12}
    assert end["charged"] == sorted(f"asking_in_a_batch/item-{number}" for number in range(12))
    assert end["requests"] == 13
    assert (end["result"]["done"], end["result"]["replayed"], end["result"]["complete"]) == (12, 12, True)


def test_p13_where_nobody_answers_the_task_fails_and_people_are_told(after: After) -> None:
    end = after(nobody_answers)
    assert (end["run"], end["record"], end["needs_person"], end["requests"]) == ("failed", "failed", True, 1)
    assert {"in_doubt", "needs_person"} <= set(end["notices"])


def test_p06_quota_waits_without_a_worker_and_without_a_retry_and_goes_on_when_the_gate_opens(after: After) -> None:
    end = after(quota_then_open)
    assert (end["run"], end["tries"], end["record"], end["charges"]) == ("success", 1, "done", 1)
    assert (end["waits"], end["requests while closed"], end["requests"]) == ("deferred", 1, 2)


def test_p12_frozen_it_waits_and_thawed_it_goes_on(after: After) -> None:
    end = after(frozen_then_thawed)
    assert (end["run"], end["tries"], end["record"], end["charges"]) == ("success", 1, "done", 1)
    assert end["requests while frozen"] == 0


def test_p10_a_holder_that_died_unseen_is_settled_by_the_caretaker(after: After) -> None:
    end = after(holder_died_and_nobody_comes)
    assert (end["run"], end["record"], end["charges"]) == ("failed", "in_doubt", 1)
    assert "in_doubt" in end["kinds"]
