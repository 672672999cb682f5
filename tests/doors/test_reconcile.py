"""The nightly comparison through ``dag.test()``: the ledger against the fake vendor's list, both ways."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Any

import pytest

from airflow_runguard import Applied, ReconcileOperator, VendorEffect, guarded_task
from airflow_runguard.core.record import State
from airflow_runguard.reconcile import compare
from tests.core.books import kinds


def paid(airflow, charge, *customers: str) -> None:
    """One guarded task for each customer, each charged under its vendor key."""
    with airflow.dag() as dag:

        @guarded_task(key="{{ args.customer }}", namespace="billing")
        def pay(guard, customer: str) -> Any:
            return guard.call("charge", charge, customer, vendor_key_as="key")["id"]

        for customer in customers:
            pay.override(task_id=f"pay_{customer}")(customer)
    airflow.run(dag)


def nightly(airflow, **options: Any) -> Any:
    def listing(begin: datetime, end: datetime) -> list[VendorEffect]:
        assert begin < end
        return [VendorEffect(key=made.key or "", reference=made.id) for made in airflow.vendor.effects()]

    with airflow.dag() as dag:
        ReconcileOperator(task_id="compare", listing=listing, namespace="billing", **options)
    return dag


@pytest.fixture(autouse=True)
def calls_are_over_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__RUNGUARD__MAX_CALL_TIME", "1")


def moved_back(airflow) -> None:
    """All calls were made an hour ago."""
    airflow.sql.execute(
        "update runguard.call set intent_at = intent_at - interval '1 h', first_intent_at = first_intent_at - "
        "interval '1 h'"
    )


def test_books_that_agree_are_green(airflow, charge):
    paid(airflow, charge, "a", "b")
    moved_back(airflow)
    run = airflow.run(nightly(airflow))
    assert run.state == "success"
    assert set(run.result("compare", "report")["counts"].values()) == {0}


def test_each_kind_of_difference_is_found_named_and_booked_once(airflow, charge):
    paid(airflow, charge, "a", "b", "c", "d")
    moved_back(airflow)
    c = airflow.vendor.effects()[2]
    by_key = {made.customer: made.key for made in airflow.vendor.effects()}
    airflow.sql.execute("update runguard.call c set state = 'pending', effect = 'not_applied' from runguard.record r "
                        "where r.id = c.record_id and r.key = 'c'")  # fmt: skip

    def listing(begin: datetime, end: datetime) -> list[VendorEffect]:
        return [  # nothing of b; c although the ledger denies it; d twice; one that nobody here made
            VendorEffect(key=by_key["a"]),
            VendorEffect(key=by_key["c"], reference=c.id),
            VendorEffect(key=by_key["d"], reference="ch_4"),
            VendorEffect(key=by_key["d"], reference="ch_4_again"),
            VendorEffect(reference="ch_by_hand"),
            VendorEffect(reference="ch_long_before", at=begin),
        ]

    with airflow.dag() as dag:
        ReconcileOperator(task_id="compare", listing=listing, namespace="billing")
    for _ in range(2):
        run = airflow.run(dag)
        assert run.state == "failed"
        report = run.result("compare", "report")
        assert {kind: [line.get("record", line["vendor"]) for line in report[kind]] for kind in report["counts"]} == {
            "effect_missing": ["billing/b"],
            "effect_denied": ["billing/c"],
            "effect_twice": ["billing/d"],
            "effect_without_line": [["ch_by_hand"]],
            "in_doubt": [],
        }
    for record in airflow.records():
        booked = [kind for kind in kinds(airflow.ledger, record.id) if kind.startswith("effect_")]
        assert len(booked) == (record.identity.key != "a")
    (notice,) = airflow.sql.execute("select kind, reason from runguard.notice where kind = 'vendor_differs'").fetchall()
    assert "1 × the vendor has it; the ledger has nothing" in notice[1]


def test_what_is_in_doubt_is_asked_about_first_and_is_no_difference(airflow, charge):
    airflow.vendor.script("drop", customer="a")
    airflow.vendor.script("drop", customer="b")
    paid(airflow, charge, "a", "b")
    moved_back(airflow)

    def find(doubt: Any) -> Any:
        found = airflow.vendor.find(customer=doubt.record.identity.key)
        return Applied(found[0]["id"]) if doubt.record.identity.key == "a" else None

    run = airflow.run(nightly(airflow, on_doubt=find))
    assert run.state == "success"
    report = run.result("compare", "report")
    assert [line["record"] for line in report["in_doubt"]] == ["billing/b"]
    assert {line["record"]: line["outcome"] for line in report["asked"]} == {
        "billing/a": "happened",
        "billing/b": "nobody",
    }
    assert airflow.record("b").state is State.IN_DOUBT


def test_calls_that_may_still_be_under_way_are_not_judged(airflow, charge, monkeypatch):
    paid(airflow, charge, "a")
    now = airflow.ledger.check()["now"]
    early = compare(airflow.ledger, [], now - timedelta(hours=2), now - timedelta(hours=1))
    assert not any(early.values())
    assert compare(airflow.ledger, [], now - timedelta(hours=2), now)["effect_missing"]
