"""What is hidden from people is hidden before it is stored, and takes no part in what is compared or sent."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from airflow_runguard import GuardContext, ItemContext, NotApplied, guarded_batch_task, guarded_task
from airflow_runguard.core.work import StillUnknown
from airflow_runguard.masking import hider
from airflow_runguard.reconcile import settle_all
from tests.doors.conftest import Airflow


def test_masked_fields_and_airflows_secrets_are_never_stored_and_the_call_gets_them_all_the_same(
    airflow: Airflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.sdk.log import mask_secret

    monkeypatch.setenv("AIRFLOW__RUNGUARD__MASK_FIELDS", "email, Street")
    mask_secret("hunter2-the-vendor-key")
    sent: list[dict[str, Any]] = []

    @guarded_task(key="order/1")
    def charge(guard: GuardContext, order: dict[str, Any]) -> str:
        return guard.call("charge", lambda **arguments: sent.append(arguments) or "ok", **order)

    order = {
        "customer": "cust-7",
        "email": "a@example.org",
        "address": {"street": "Long Street 1", "city": "Ghent"},
        "note": "use hunter2-the-vendor-key",
    }
    with airflow.dag() as dag:
        charge(order)
    assert airflow.run(dag).state == "success"
    assert sent == [order]
    record = airflow.record("order/1")
    (call,) = airflow.ledger.calls(record.id)
    for stored in (record.payload.readable["order"], call.intent):
        assert stored["customer"] == "cust-7"
        assert stored["email"] == stored["address"]["street"] == "***"
        assert stored["address"]["city"] == "Ghent"
        assert "hunter2" not in stored["note"]


def test_a_name_is_masked_at_any_depth_and_in_any_case() -> None:
    hide = hider("IBAN,e_mail", lambda value: value)
    assert hide({"a": [{"iban": 1}, {"E_Mail": {"x": 2}}], "b": "iban"}) == {
        "a": [{"iban": "***"}, {"E_Mail": "***"}],
        "b": "iban",
    }


def test_what_the_items_of_a_batch_hold_and_what_was_said_of_them_is_masked_before_it_is_stored(
    airflow: Airflow, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.sdk.log import mask_secret

    monkeypatch.setenv("AIRFLOW__RUNGUARD__MASK_FIELDS", "email")
    mask_secret("hunter2-the-vendor-key")
    sent: list[dict[str, Any]] = []

    @guarded_batch_task(key="mails", item_key="id", accept=lambda answer: answer["fine"], allow_partial=True)
    def mail(guard: ItemContext, item: dict[str, Any]) -> dict[str, Any]:
        sent.append(item)
        if item["id"] == "raises":
            raise NotApplied(f"no such mailbox {item['note']}")
        return {"fine": item["id"] == "done", "email": item["email"], "note": item["note"]}

    items = [
        {"id": n, "email": f"{n}@x.org", "note": "use hunter2-the-vendor-key"} for n in ("done", "raises", "refused")
    ]
    with airflow.dag() as dag:
        mail(items)
    airflow.run(dag)
    assert sent == items
    stored = {call.name: call for call in airflow.ledger.calls(airflow.record("mails").id)}
    assert {name: call.state for name, call in stored.items()} == {
        "done": "done",
        "raises": "failed",
        "refused": "failed",
    }
    assert all(call.intent["email"] == "***" for call in stored.values())
    assert "no such mailbox use ***" in stored["raises"].error
    assert "'note': 'use ***'" in stored["refused"].error
    assert "@x.org" not in all_but_results(airflow)
    assert "hunter2" not in all_but_results(airflow)


def all_but_results(airflow: Airflow) -> str:
    """The ledger's lines as text."""
    tables = (("record", "{result}"), ("call", "{result}"), ("event", "{}"), ("notice", "{}"))
    queries = [f"select (to_jsonb(t) - '{but}'::text[])::text from runguard.{table} t" for table, but in tables]
    return "\n".join(line for query in queries for (line,) in airflow.sql.execute(query).fetchall())


def test_what_a_look_up_said_is_masked_before_it_is_stored_whoever_asks(airflow: Airflow) -> None:
    """A vendor's address with the token in it, say, and in the answers of the task, of the command and of the sweep."""
    from airflow.sdk.log import mask_secret

    mask_secret("hunter2-the-vendor-key")
    answers: list[Any] = [
        NotApplied("GET /pay?token=hunter2-the-vendor-key answers 404"),
        StillUnknown("GET /pay?token=hunter2-the-vendor-key answers 202"),
        NotApplied("GET /pay?token=hunter2-the-vendor-key answers 404"),
    ]
    sent: list[str] = []

    again = {"retries": 1, "retry_delay": timedelta(0)}

    @guarded_task(key="order/1", on_doubt=lambda doubt: answers.pop(0), max_call_time=0.001, **again)
    def charge(guard: GuardContext) -> str:
        def send() -> str:
            sent.append("")
            if len(sent) < 3:
                raise TimeoutError("no answer")
            return "ok"

        return guard.call("charge", send)

    with airflow.dag() as dag:
        charge()
    assert airflow.run(dag).tries == {"charge": 2}
    told = settle_all(airflow.ledger, lambda record: lambda doubt: answers.pop(0), actor="reconcile")
    assert [line["outcome"] for line in told["asked"]] == ["still_unknown"]
    assert "hunter2" not in str(told)
    settle_all(airflow.ledger, lambda record: lambda doubt: answers.pop(0), actor="reconcile")
    assert airflow.run(dag).state == "success"
    assert (len(sent), answers) == (3, [])
    stored = all_but_results(airflow)
    assert stored.count("asked: GET /pay?token=*** answers 404") >= 2  # by the task, and by whoever sweeps
    assert "hunter2" not in stored
