"""The doors for batches through a real ``dag.test()``: each item once whatever is run again.

In this file RunGuard has no Redis in any run, so that in each run of the tests some doors stand on the ledger alone.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from airflow.sdk import task
from pydantic import BaseModel

from airflow_runguard import (
    Applied,
    BatchGuard,
    BatchResults,
    Doubt,
    GuardedBatchOperator,
    ItemContext,
    Pause,
    PlanningError,
    codec,
    commands,
    guarded_batch_task,
    human,
)
from airflow_runguard.core.items import Selection
from airflow_runguard.core.record import State

AGAIN = {"retries": 1, "retry_delay": timedelta(0)}
LIST = [{"id": f"inv-{n}", "cents": 500} for n in range(6)]


@pytest.fixture(scope="session")
def lease_url() -> None:
    return None


def decorated(charge):
    @task
    def invoices() -> list[dict[str, Any]]:
        return LIST

    @task.guarded_batch(item_key="id", concurrency=3)
    def pay(guard: ItemContext, invoice: dict[str, Any], currency: str = "eur") -> Any:
        assert currency == "chf"
        return charge(invoice["id"], invoice["cents"], guard.idempotency_key)["id"]

    pay(invoices(), currency="chf")


def typed_twin(charge):
    @guarded_batch_task(key="invoices/{{ ds }}", namespace="billing", item_key="{{ item.id }}")
    def pay(invoice: dict[str, Any]) -> Any:
        return charge(invoice["id"])["id"]

    pay(LIST)


def asynchronous(charge):
    @guarded_batch_task(item_key=lambda item: item["id"], concurrency=2)
    async def pay(guard: ItemContext, invoice: dict[str, Any]) -> Any:
        return charge(invoice["id"], key=guard.idempotency_key)["id"]

    pay(LIST)


def classic(charge):
    def lines():
        yield from LIST

    GuardedBatchOperator(
        task_id="pay",
        items=lines,
        guard=BatchGuard(item_key="id", payload=["id"]),
        python_callable=lambda item: charge(item["id"])["id"],
    )


def bulk(charge):
    def pay_all(guard: ItemContext, invoices: dict[str, Any]) -> dict[str, Any]:
        return {key: charge(key, key=guard.idempotency_keys[key])["id"] for key in invoices}

    GuardedBatchOperator(task_id="pay", items=LIST, guard=BatchGuard(item_key="id", bulk=4), python_callable=pay_all)


@pytest.mark.parametrize("door", [decorated, typed_twin, asynchronous, classic, bulk])
def test_p02_each_door_has_each_effect_once_and_a_clear_replays_it(airflow, charge, door):
    with airflow.dag() as dag:
        door(charge)
    first, second = airflow.run(dag), airflow.run(dag)
    assert (first.state, second.state) == ("success", "success"), first.log[-3000:]
    assert sorted(effect.customer for effect in airflow.vendor.effects()) == [item["id"] for item in LIST]
    assert (first.result("pay")["done"], first.result("pay")["replayed"]) == (6, 0)
    assert (second.result("pay")["done"], second.result("pay")["replayed"]) == (6, 6)
    assert airflow.record().state is State.DONE
    results = dict(BatchResults(second.result("pay")))
    assert results == {effect.customer: effect.id for effect in airflow.vendor.effects()}
    assert BatchResults(first.result("pay"))["inv-3"] == results["inv-3"]
    assert len(BatchResults(first.result("pay"))) == 6
    with pytest.raises(KeyError):
        BatchResults(first.result("pay"))["inv-99"]


def test_r41_mapped_batches_are_named_by_their_content_and_each_goes_on_by_itself(airflow, charge):
    airflow.vendor.script("status", customer="inv-4", status=422)
    with airflow.dag() as dag:

        @guarded_batch_task(key="invoices/{{ args.part }}", item_key="id")
        def pay(invoice: dict[str, Any], part: str) -> Any:
            return charge(invoice["id"])["id"]

        pay.expand_kwargs([{"invoice": LIST[:3], "part": "a"}, {"invoice": LIST[3:], "part": "b"}])
    airflow.run(dag)
    airflow.run(dag)
    assert sorted(effect.customer for effect in airflow.vendor.effects()) == [
        item["id"] for item in LIST if item["id"] != "inv-4"
    ]
    states = {record.identity.key: record.state for record in airflow.ledger.list(limit=10)}
    assert states == {"invoices/a": State.DONE, "invoices/b": State.FAILED}


def test_a_batch_with_failed_items_fails_gives_its_summary_and_a_retry_calls_only_what_may_mend(airflow, charge):
    airflow.vendor.script("status", customer="inv-2", status=422)
    airflow.vendor.script("status", customer="inv-4", status=503, charged=True)
    with airflow.dag() as dag:

        @task.guarded_batch(item_key="id", **AGAIN)
        def pay(invoice: dict[str, Any]) -> Any:
            return charge(invoice["id"])["id"]

        @task(trigger_rule="all_done")
        def after(summary: dict[str, Any]) -> int:
            return len(dict(BatchResults(summary)))

        after(pay(LIST))
    run = airflow.run(dag)
    assert run.states["pay"] == "failed"
    summary = run.result("pay")
    assert summary["done"] == run.result("after") == 4
    assert summary["failed"] == {"validation": 1}
    assert summary["in_doubt"] == 1
    assert len(airflow.vendor.requests("inv-2")) == len(airflow.vendor.requests("inv-4")) == 1
    assert airflow.record().state is State.IN_DOUBT
    assert "--items in_doubt" in run.log


def test_p03_a_form_asks_once_about_all_items_in_doubt_and_its_answer_settles_them(airflow, charge):
    airflow.vendor.script("drop", customer="inv-1")
    airflow.vendor.script("drop", customer="inv-4")
    with airflow.dag() as dag:

        @guarded_batch_task(item_key="id", key="asked")
        def pay(invoice: dict[str, Any]) -> Any:
            return charge(invoice["id"])["id"]

        pay(LIST)
    airflow.run(dag)
    record = airflow.record()
    form = human.Asked(record.fence, airflow.ledger.check()["now"])
    asked = human.question(airflow.ledger, record, record.first_unknown_at)
    assert asked.subject == f"Did these 2 items of {record.identity} happen?"
    assert "| item | vendor key |" in asked.body
    assert [name for name in ("inv-0", "inv-1", "inv-4") if f"| {name} |" in asked.body] == ["inv-1", "inv-4"]
    assert "**all 2 items**" in asked.body
    assert "result" not in asked.fields  # there is none that is both items'

    def answer(word: str, **given: Any) -> str:
        return human.apply(airflow.ledger, airflow.record(), human.Answer(word, "person:ann", "seen", **given), form)

    assert answer("did_not_happen") == "too_early"
    late = human.Answer("happened", "person:ann", "seen")  # to a form about what an earlier holder left in doubt
    earlier = human.Asked(record.fence - 1, form.at)
    assert human.apply(airflow.ledger, record, late, earlier).startswith("somebody worked on it")
    before = human.Asked(record.fence, record.first_unknown_at - timedelta(seconds=1))  # it came into doubt anew since
    assert human.apply(airflow.ledger, record, late, before) == human.ANEW
    assert airflow.record() == record
    commands.resolve_items(airflow.ledger, record, "happened", Selection.parse("key=inv-1"), actor="ann", reason="seen")
    asked = human.question(airflow.ledger, airflow.record(), record.first_unknown_at)
    assert asked.subject == f"Did item inv-4 of {record.identity} happen?"
    assert answer("happened", result=codec.dump("ch_4")) == "ok"
    again = airflow.run(dag)
    assert again.state == "success"
    summary = again.result("pay")
    assert (summary["done"], summary["replayed"], BatchResults(summary)["inv-4"]) == (6, 6, "ch_4")
    assert len(airflow.vendor.requests()) == 6


def test_p06_a_quota_pauses_the_task_and_the_rest_is_called_when_it_comes_back(airflow, charge):
    with airflow.dag() as dag:

        @guarded_batch_task(key="invoices", item_key="id")
        def pay(invoice: dict[str, Any]) -> Any:
            return charge(invoice["id"])["id"] if invoice["id"] != "inv-3" else Pause(3600, "too many")

        pay(LIST)
    run = airflow.once(dag)
    assert run.states == {"pay": "up_for_reschedule"}
    assert airflow.vendor.charges() == 3
    assert airflow.record().state is State.PAUSED


class Paid(BaseModel):
    id: str


def test_p09_a_model_says_what_a_result_is(airflow, charge):
    with airflow.dag() as dag:

        @guarded_batch_task(item_key="id", accept=Paid, allow_partial=True)
        def pay(invoice: dict[str, Any]) -> Any:
            answer = charge(invoice["id"])
            return {"state": "queued"} if invoice["id"] == "inv-0" else {"id": answer["id"]}

        pay(LIST)
    run = airflow.run(dag)
    assert run.state == "success"
    summary = run.result("pay")
    assert (summary["complete"], summary["done"], summary["failed"]) == (False, 5, {"validation": 1})
    assert airflow.record().completeness == "partial"


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({}, "item_key"),
        ({"item_key": "id", "concurrency": 0}, "concurrency"),
        ({"item_key": "id", "stop_after_share": 2}, "stop_after_share"),
        ({"item_key": "id", "accept": 3}, "accept"),
        ({"item_key": "id", "calls": "body"}, "calls"),
        ({"item_key": "id", "single_request": True}, "single_request"),
        ({"item_key": "id", "concurency": 2}, "concurrency"),
    ],
)
def test_what_makes_no_sense_is_refused_when_the_dag_is_parsed(wrong, says):
    with pytest.raises(PlanningError, match=says):
        BatchGuard(**wrong)


def test_a_function_without_an_item_is_refused_when_the_dag_is_parsed():
    with pytest.raises(PlanningError, match="takes no item"):

        @guarded_batch_task(item_key="id")
        def pay(guard: ItemContext) -> None: ...


def test_an_item_without_its_key_is_named_before_anything_is_called(airflow, charge):
    with airflow.dag() as dag:

        @guarded_batch_task(item_key="id")
        def pay(invoice: dict[str, Any]) -> Any:
            return charge()["id"]

        pay([*LIST, {"cents": 5}])
    run = airflow.run(dag)
    assert run.state == "failed"
    assert "Item 7 of the list" in run.log
    assert airflow.vendor.charges() == 0


def test_p03_a_batch_asks_the_vendor_about_many_items_at_once(airflow, charge):
    asked: list[list[str]] = []

    async def find(doubts: list[Doubt]) -> dict[str, Any]:
        asked.append([doubt.call.name for doubt in doubts])
        return {doubt.call.name: Applied(f"ch_{doubt.call.name}") for doubt in doubts}

    with airflow.dag() as dag:

        @guarded_batch_task(item_key="id", key="chunks", on_doubt=find)
        def pay(invoice: dict[str, Any]) -> Any:
            if invoice["id"] in ("inv-1", "inv-4"):
                raise TimeoutError("no answer")
            return charge(invoice["id"])["id"]

        pay(LIST)
    airflow.run(dag)
    again = airflow.run(dag)
    assert again.state == "success"
    assert asked == [["inv-1", "inv-4"]]
    assert BatchResults(again.result("pay"))["inv-4"] == "ch_inv-4"
    assert len(airflow.vendor.requests()) == 4


def test_results_are_those_of_the_items_that_the_summary_counts(airflow, charge):
    lists = [LIST, LIST[:2], [*LIST[:1], {"id": "inv-new"}]]
    summaries: list[Any] = []
    with airflow.dag() as dag:
        GuardedBatchOperator(
            task_id="pay",
            items=lambda: lists[len(summaries)],
            guard=BatchGuard(key="all", item_key="id"),
            python_callable=lambda item: charge(item["id"])["id"],
        )
    for listed in lists:
        summaries.append(airflow.run(dag).result("pay"))
        airflow.ledger.sweep("sweeper")
        assert [key for key, _ in BatchResults(summaries[-1])] == [item["id"] for item in listed]
        assert [key for key, _ in BatchResults(summaries[0])] == [item["id"] for item in LIST]
    before = BatchResults(summaries[1])
    assert (len(before), before["inv-4"][:3]) == (2, "ch_")  # gone from the list, and yet it was done
    with pytest.raises(PlanningError, match="A later run of this batch had another list"):
        dict(before)
