"""The door for operators: any class, mapped, deferrable or made by ``@task``, through a real ``dag.test()``."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import pytest
from airflow.providers.standard.operators.bash import BashOperator
from airflow.providers.standard.operators.python import BranchPythonOperator, PythonOperator, ShortCircuitOperator
from airflow.providers.standard.triggers.temporal import DateTimeTrigger
from airflow.sdk import BaseOperator, task
from airflow.sdk.exceptions import AirflowRescheduleException

from airflow_runguard import Guard, codec, guarded
from airflow_runguard.core.record import State

ASK = Guard(on_doubt="ask")


class Submits(BaseOperator):
    """Submits a job in ``execute``, then defers ``rounds`` times before it gives back the job's id.

    :param journal: by customer, what was done; outlives the operator's copies, as a vendor's memory does.
    """

    template_fields = ("customer",)

    def __init__(
        self,
        *,
        submit: Callable[..., Any],
        journal: dict[str, list[str]],
        customer: str = "cust",
        rounds: int = 1,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.submit, self.journal, self.customer, self.rounds = submit, journal, customer, rounds

    def execute(self, context: Any) -> Any:
        self.journal.setdefault(self.customer, []).append(self.submit(customer=self.customer)["id"])
        self._defer()

    def poll(self, context: Any, event: Any = None) -> Any:
        done = self.journal[self.customer]
        done.append("polled")
        if done.count("polled") < self.rounds:
            self._defer()
        return done[0]

    def _defer(self) -> None:
        self.defer(trigger=DateTimeTrigger(moment=datetime(2026, 1, 1, tzinfo=UTC)), method_name="poll")


class Reschedules(BaseOperator):
    def __init__(self, *, until: datetime, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.until, self.looks = until, []

    def execute(self, context: Any) -> Any:
        self.looks.append(context["ti"].id)
        if len(self.looks) == 1:
            raise AirflowRescheduleException(self.until)
        return len(self.looks)


def test_p02_a_classic_operator_runs_once_and_is_given_its_vendor_key(airflow, tmp_path):
    log = tmp_path / "calls"
    with airflow.dag() as dag:
        guarded(BashOperator)(
            task_id="pay",
            guard=Guard(key="payout/{{ ds }}", on_doubt="ask"),
            bash_command="echo {{ guard.idempotency_key }} $KEY >> " + str(log) + "; echo paid",
            env={"KEY": "{{ guard.idempotency_key }}"},
        )
    first, second = airflow.run(dag), airflow.run(dag)
    assert first.result("pay") == second.result("pay") == "paid"
    (line,) = log.read_text().splitlines()
    once, again = line.split()
    assert once == again
    assert once.startswith("rg1-")
    assert airflow.record().identity.key == "payout/2026-10-01"


def test_p02_a_command_that_a_function_makes_is_run_once_with_its_vendor_key(airflow, tmp_path):
    """Such an operator renders its fields once more when it runs, when the key is known."""
    log = tmp_path / "calls"
    with airflow.dag() as dag:
        for name in ("a", "b"):

            @task.bash(task_id=name)
            def pay(customer: str) -> str:
                return "echo " + customer + " {{ guard.idempotency_key }} >> " + str(log)

            guarded(pay(name), ASK)
    first, second = airflow.run(dag), airflow.run(dag)
    assert (first.state, second.state) == ("success", "success")
    sent = dict(line.split() for line in log.read_text().splitlines())
    assert sorted(sent) == ["a", "b"]
    assert len(set(sent.values())) == len(log.read_text().splitlines()) == 2
    assert all(key.startswith("rg1-") for key in sent.values())
    assert [record.payload.readable["op_args"] for record in airflow.records()] in ([["a"], ["b"]], [["b"], ["a"]])


def test_p02_a_mapped_operator_has_a_record_for_each_piece_of_work(airflow, charge):
    customers = [["a"], ["b"]]
    with airflow.dag() as dag:
        guarded(PythonOperator).partial(
            task_id="pay", guard=Guard(key="cust/{{ args.customer }}", on_doubt="ask"), python_callable=charge
        ).expand(op_args=customers)
    airflow.run(dag)
    customers[:] = [["b"], ["a"]]
    second = airflow.run(dag)
    assert second.state == "success"
    assert sorted(effect.customer for effect in airflow.vendor.effects()) == ["a", "b"]


def made_by_task(charge):
    @task(task_id="pay")
    def pay() -> Any:
        return charge()["id"]

    guarded(pay(), ASK)


def made_by_task_and_mapped(charge):
    @task(task_id="pay")
    def pay(customer: str) -> Any:
        return charge(customer=customer)["id"]

    guarded(pay.expand(customer=["cust"]), Guard(key="c/{{ args.customer }}", on_doubt="ask"))


def classic_and_mapped(charge):
    operator = PythonOperator.partial(task_id="pay", python_callable=lambda c: charge(c)["id"]).expand(op_args=[["c"]])
    guarded(operator, Guard(key="c/{{ args.c }}", on_doubt="ask"))


def classic(charge):
    guarded(PythonOperator(task_id="pay", python_callable=lambda: charge()["id"]), ASK)


@pytest.mark.parametrize("made", [made_by_task, made_by_task_and_mapped, classic, classic_and_mapped])
def test_p02_a_task_that_exists_already_can_be_guarded(airflow, charge, made):
    with airflow.dag() as dag:
        made(charge)
    first, second = airflow.run(dag), airflow.run(dag)
    assert (first.state, second.state) == ("success", "success")
    assert list(second.xcoms.values()) == list(first.xcoms.values()) == [airflow.vendor.effects()[0].id]


def test_r40_a_deferred_task_takes_up_its_own_work(airflow, charge):
    """Deferred and resumed three times: one submission, one record, one claim's worth of attempts."""
    with airflow.dag() as dag:
        journal: dict[str, list[str]] = {}
        guarded(Submits)(task_id="pay", guard=ASK, submit=charge, journal=journal, rounds=3)
    first = airflow.run(dag)
    assert first.state == "success"
    assert journal["cust"] == [first.result("pay"), "polled", "polled", "polled"]
    record = airflow.record()
    assert (record.state, record.fence) == (State.DONE, 4)  # each entry raises the fence
    (call,) = airflow.ledger.calls(record.id)
    assert call.attempt == 1
    second = airflow.run(dag)
    assert second.result("pay") == first.result("pay")
    assert airflow.vendor.charges() == 1


def test_p02_a_mapped_deferrable_operator_submits_each_piece_once(airflow, charge):
    with airflow.dag() as dag:
        guarded(Submits).partial(
            task_id="pay", guard=Guard(key="c/{{ args.customer }}", on_doubt="ask"), submit=charge, journal={}
        ).expand(customer=["a", "b"])
    first, second = airflow.run(dag), airflow.run(dag)
    assert (first.state, second.state) == ("success", "success")
    assert second.xcoms == first.xcoms
    assert sorted(effect.customer for effect in airflow.vendor.effects()) == ["a", "b"]


def test_p05_a_resumed_task_whose_record_was_taken_makes_no_further_call(airflow, charge):
    """While it was deferred a person took the record away; what it submitted is in doubt, so it does not go on."""

    class Taken(Submits):
        def _defer(self) -> None:
            record = airflow.record()
            assert airflow.ledger.release(record.id, actor="person:tester", reason="test") == "ok"
            super()._defer()

    with airflow.dag() as dag:
        journal: dict[str, list[str]] = {}
        guarded(Taken)(task_id="pay", guard=ASK, submit=charge, journal=journal)
    run = airflow.run(dag)
    assert run.state == "failed"
    assert "polled" not in journal["cust"]
    assert "In doubt" in run.log
    assert airflow.record().state is State.IN_DOUBT


def test_a_rescheduled_task_comes_back_to_its_own_work(airflow):
    with airflow.dag() as dag:
        operator = guarded(Reschedules)(task_id="look", guard=ASK, until=datetime(2026, 1, 1, tzinfo=UTC))
    run = airflow.run(dag)
    assert (run.state, run.result("look")) == ("success", 2)
    assert len(set(operator.looks)) == 1
    assert airflow.record().state is State.DONE


def test_p02_a_branch_is_taken_again_on_replay(airflow):
    decided: list[str] = []

    def decide() -> str:
        decided.append("left")
        return "left"

    with airflow.dag() as dag:
        branch = guarded(BranchPythonOperator)(task_id="branch", guard=ASK, python_callable=decide)
        for name in ("left", "right"):
            branch >> PythonOperator(task_id=name, python_callable=list)
    first, second = airflow.run(dag), airflow.run(dag)
    assert first.states == second.states == {"branch": "success", "left": "success", "right": "skipped"}
    with dag:  # a way that the DAG did not have when it was decided is not taken either
        branch >> PythonOperator(task_id="new", python_callable=list)
    assert airflow.run(dag).states == second.states | {"new": "skipped"}
    assert decided == ["left"]


def test_p09_a_branch_that_was_cut_off_before_it_decided_is_not_done(airflow):
    """Its supervisor is gone, and with it the pipe that Airflow logs to: what its function returned is no decision yet,
    and given back as one it would run every branch."""

    class Orphan(BranchPythonOperator):
        def execute(self, context: Any) -> Any:
            PythonOperator.execute(self, context)
            raise BrokenPipeError("the supervisor is gone")

    with airflow.dag() as dag:
        branch = guarded(Orphan)(task_id="branch", guard=ASK, python_callable=lambda: "left")
        for name in ("left", "right"):
            branch >> PythonOperator(task_id=name, python_callable=list)
    assert airflow.run(dag).states == {"branch": "failed", "left": "upstream_failed", "right": "upstream_failed"}
    assert airflow.record().state is State.IN_DOUBT
    # A person says which way it went: that one is taken, and not every way.
    Orphan.execute = BranchPythonOperator.execute
    assert airflow.resolve("happened", result=codec.dump("left")) == "ok"
    assert airflow.run(dag).states == {"branch": "success", "left": "success", "right": "skipped"}


@pytest.mark.parametrize(("answer", "downstream"), [(False, "skipped"), (True, "success")])
def test_p02_a_short_circuit_cuts_again_on_replay(airflow, answer, downstream):
    decided: list[bool] = []

    def decide() -> bool:
        decided.append(answer)
        return answer

    with airflow.dag() as dag:
        cut = guarded(ShortCircuitOperator)(task_id="cut", guard=ASK, python_callable=decide)
        cut >> PythonOperator(task_id="after", python_callable=list)
    first, second = airflow.run(dag), airflow.run(dag)
    assert first.states == second.states == {"cut": "success", "after": downstream}
    assert decided == [answer]
