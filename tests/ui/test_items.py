"""Items of a batch, as people order them anew through the API."""

from __future__ import annotations

from typing import Any

import pytest
import requests

from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Record, State
from tests.core import batches, engine
from tests.core.batches import Counting, invoices
from tests.ui.conftest import Api


def declined() -> Exception:
    response = requests.models.Response()
    response.status_code = 422
    return requests.HTTPError("422", response=response)


def run(ledger: Ledger, pay: Counting, *ids: str) -> Record:
    batches.run(ledger, invoices(*ids), pay, work={"holder": engine.holder(dag_id="bill")})
    return batches.record(ledger)


@pytest.fixture
def pay() -> Counting:
    return Counting(b=declined(), c=declined())


def body(record: Record, **more: Any) -> dict[str, Any]:
    return {"fence": record.fence, "generation": record.generation, "reason": "corrected", **more}


def test_p13_only_the_chosen_items_are_called_again_each_under_a_new_vendor_key(
    api: Api, ledger: Ledger, pay: Counting
) -> None:
    record = run(ledger, pay, "a", "b", "c")
    assert record.state is State.FAILED
    before = dict(pay.keys)
    ann = api.as_("ann")
    answer = ann.post(f"records/{record.id}/items/reopen", body(record, items=["b"]))
    assert answer.status_code == 200, answer.text
    assert (answer.json()["items"], answer.json()["left"]) == (1, 0)
    event = ann.see(f"records/{record.id}")["events"][0]
    assert (event["kind"], event["actor"], event["reason"]) == ("items_reopened", "person:ann", "corrected")
    assert batches.states(ledger) == {"a": "done", "b": "pending", "c": "failed"}
    pay._does.clear()
    run(ledger, pay, "a", "b", "c")
    assert pay.calls == ["a", "b", "c", "b"]
    assert pay.keys["b"] != before["b"]


def test_all_items_of_a_state_are_ordered_anew_and_what_happened_is_left_unless_that_is_said(
    api: Api, ledger: Ledger, pay: Counting
) -> None:
    record = run(ledger, pay, "a", "b", "c")
    where, ann = f"records/{record.id}/items/reopen", api.as_("ann")
    refused = ann.post(where, body(record, state="done"))
    assert refused.status_code == 409
    assert "second charge" in refused.json()["detail"]
    assert ann.post(where, body(record, items=["a", "b"])).json()["left"] == 1
    answer = ann.post(where, body(record, state="failed", failure_class="validation"))
    assert (answer.status_code, answer.json()["items"]) == (200, 1)
    assert batches.states(ledger) == {"a": "done", "b": "pending", "c": "pending"}
    assert ann.post(where, body(record, items=["a"], again_although_applied=True)).json()["items"] == 1
    nothing = ann.post(where, body(record, items=["z"]))
    assert nothing.status_code == 409
    assert "no item left" in nothing.json()["detail"]


def test_items_of_a_batch_that_went_on_after_it_was_looked_at_are_refused(
    api: Api, ledger: Ledger, pay: Counting
) -> None:
    record = run(ledger, pay, "a", "b", "c")
    run(ledger, pay, "a", "b", "c", "d")
    answer = api.as_("ann").post(f"records/{record.id}/items/reopen", body(record, items=["b"]))
    assert answer.status_code == 409
    assert "Nothing was changed" in answer.json()["detail"]
    assert batches.states(ledger)["b"] == "failed"


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {"items": ["b"], "state": "failed"},
        {"items": []},
        {"items": ["b"], "failure_class": "validation"},
        {"state": "in_doubt"},
        {"items": ["b"], "reason": " "},
        {"items": ["x" * 513]},
        {"items": ["b"] * 1_001},
    ],
)
def test_what_names_no_items_or_gives_no_reason_is_refused_before_the_ledger_is_asked(
    api: Api, ledger: Ledger, pay: Counting, wrong: dict[str, Any]
) -> None:
    record = run(ledger, pay, "b")
    answer = api.as_("ann").post(f"records/{record.id}/items/reopen", body(record, **wrong))
    assert answer.status_code == 422, answer.text
    assert batches.states(ledger) == {"b": "failed"}
