"""Depth ``observe``: books, warns, blocks nothing, also with the ledger away; and what was observed is honoured."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest

from airflow_runguard import PlanningError, guarded_task
from airflow_runguard.core.record import State
from demo.processes import free_port

AGAIN = {"retries": 1, "retry_delay": timedelta(0)}


def paying(airflow, charge, default_args: dict[str, Any] | None = None, **options: Any) -> Any:
    with airflow.dag(default_args=default_args or {}) as dag:

        @guarded_task(**{"key": "invoice/7", "namespace": "billing", "on_doubt": "ask", **AGAIN, **options})
        def pay(amount: int = 500) -> Any:
            return charge(amount=amount)["id"]

        pay()
    return dag


def explicit(airflow, charge, depth: str) -> Any:
    with airflow.dag() as dag:

        @guarded_task(key="invoice/7", namespace="billing", depth=depth, **AGAIN)
        def pay(guard) -> Any:
            return guard.call("charge", charge, vendor_key_as="key", customer="cust", amount=500)["id"]

        pay()
    return dag


def test_it_books_runs_again_and_says_what_it_would_have_been(airflow, charge):
    dag = paying(airflow, charge, depth="observe")
    first, second = airflow.run(dag), airflow.run(dag)
    assert (first.state, second.state) == ("success", "success")
    assert airflow.vendor.charges() == 2, "nothing is held up"
    assert "would have been" not in first.log
    assert f"This would have been a duplicate of what was done by {dag.dag_id}.pay run" in second.log
    assert airflow.record().state is State.DONE
    assert airflow.kinds() == ["observed_started", "observed_done", "observed_again", "observed_again"]


@pytest.mark.parametrize("cut", ["body", "explicit"])
def test_moving_up_is_a_change_of_configuration_and_what_was_observed_is_honoured(airflow, charge, cut):
    make = (
        (lambda depth: paying(airflow, charge, depth=depth))
        if cut == "body"
        else lambda d: explicit(airflow, charge, d)
    )
    observed = airflow.run(make("observe"))
    guarded = airflow.run(make("ledger"))
    assert (observed.state, guarded.state) == ("success", "success")
    assert guarded.result("pay") == observed.result("pay")
    assert airflow.vendor.charges() == 1


def test_p03_an_observed_error_after_the_charge_is_a_doubt_that_a_guard_does_not_resend(airflow, charge):
    airflow.vendor.script("drop")
    assert airflow.run(paying(airflow, charge, depth="observe", retries=0)).state == "failed"
    assert airflow.record().state is State.IN_DOUBT
    guarded = airflow.run(paying(airflow, charge, depth="ledger"))
    assert "In doubt: nobody knows whether billing/invoice/7 happened" in guarded.log
    assert airflow.vendor.charges() == 1


def test_an_observed_retry_that_succeeds_settles_what_observers_left_in_doubt(airflow, charge):
    airflow.vendor.script("drop")
    run = airflow.run(paying(airflow, charge, depth="observe"))
    assert run.state == "success"
    assert "This would have been a blind resend" in run.log
    assert airflow.record().state is State.DONE


def test_a_guards_record_is_not_settled_by_one_that_only_observes(airflow, charge):
    airflow.vendor.script("drop")
    airflow.run(paying(airflow, charge, depth="ledger"))
    assert airflow.record().state is State.IN_DOUBT
    assert airflow.run(paying(airflow, charge, depth="observe")).state == "success"
    assert airflow.record().state is State.IN_DOUBT, "a newer fence is never overruled"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("AIRFLOW_CONN_RUNGUARD_LEDGER", "postgresql://nobody@127.0.0.1:1/none"),
        ("AIRFLOW_CONN_RUNGUARD_LEDGER", "mysql://nobody@127.0.0.1:1/none"),
        ("AIRFLOW__RUNGUARD__DEPLOYMENT", "another"),
        ("AIRFLOW__RUNGUARD__LEASE_TTL", "soon"),
        ("AIRFLOW__RUNGUARD__ENABLED", "false"),
    ],
)
def test_nothing_that_is_wrong_with_the_ledger_or_the_options_holds_it_up(airflow, charge, monkeypatch, name, value):
    monkeypatch.setenv(name, value)
    run = airflow.run(paying(airflow, charge, depth="observe"))
    assert run.state == "success"
    assert airflow.vendor.charges() == 1
    if name != "AIRFLOW__RUNGUARD__ENABLED":
        assert "Observed, but not booked" in run.log


def test_a_ledger_that_never_answers_costs_no_more_than_observe_timeout(airflow, charge, monkeypatch):
    import socket

    with socket.create_server(("127.0.0.1", free_port())) as silent:
        monkeypatch.setenv("AIRFLOW_CONN_RUNGUARD_LEDGER", f"postgresql://u@127.0.0.1:{silent.getsockname()[1]}/x")
        monkeypatch.setenv("AIRFLOW__RUNGUARD__OBSERVE_TIMEOUT", "0.2")
        took: list[float] = []
        with airflow.dag() as dag:

            @guarded_task(key="k", on_doubt="ask", depth="observe")
            def pay() -> Any:
                took.append(time.monotonic())

            pay()
        began = time.monotonic()
        assert airflow.run(dag).state == "success"
    assert took[0] > began
    assert airflow.records() == []


def test_a_key_that_comes_to_nothing_is_said_and_holds_nothing_up(airflow, charge):
    run = airflow.run(paying(airflow, charge, depth="observe", key="invoice/{{ args.nothing }}"))
    assert run.state == "success"
    assert "Observed, but not booked" in run.log


@pytest.mark.parametrize("by", ["guard", "dag", "all"])
def test_the_depth_is_the_guards_else_the_dags_else_that_of_all(airflow, charge, monkeypatch, by):
    monkeypatch.setenv("AIRFLOW__RUNGUARD__DEPTH", "observe" if by == "all" else "ledger")
    default_args = {"depth": "observe"} if by == "dag" else {}
    options = {"depth": "observe"} if by == "guard" else {}
    dag = paying(airflow, charge, default_args, **options)
    airflow.run(dag)
    airflow.run(dag)
    assert airflow.vendor.charges() == 2
    if by == "dag":
        guarded = paying(airflow, charge, default_args, depth="ledger")
        airflow.run(guarded)
        assert airflow.vendor.charges() == 2


def test_a_depth_that_does_not_exist_is_said_when_the_dag_is_parsed(airflow, charge):
    with pytest.raises(PlanningError, match="none of 'observe', 'ledger', 'lease', 'auto'"):
        paying(airflow, charge, {"depth": "observ"})


def test_a_batch_is_guarded_where_all_is_observed_and_says_so_where_it_asks_for_it(airflow, charge):
    from airflow_runguard import guarded_batch_task

    with pytest.raises(PlanningError, match="cannot be observed only"):

        @guarded_batch_task(item_key="id", depth="observe")
        def wrong(item: dict[str, Any]) -> Any: ...

    with airflow.dag(default_args={"depth": "observe"}) as dag:

        @guarded_batch_task(key="invoices", item_key="id", on_doubt="ask")
        def pay(item: dict[str, Any]) -> Any:
            return charge(customer=item["id"])["id"]

        pay([{"id": "a"}, {"id": "b"}])
    assert airflow.run(dag).state == "success"
    assert airflow.run(dag).state == "success"
    assert airflow.vendor.charges() == 2
