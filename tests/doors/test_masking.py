"""What is hidden from people is hidden before it is stored, and takes no part in what is compared or sent."""

from __future__ import annotations

from typing import Any

import pytest

from airflow_runguard import GuardContext, ItemContext, NotApplied, guarded_batch_task, guarded_task
from airflow_runguard.masking import hider
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

    @guarded_batch_task(key="mails", item_key="id", accept=lambda answer: answer["ok"], allow_partial=True)
    def mail(guard: ItemContext, item: dict[str, Any]) -> dict[str, Any]:
        sent.append(item)
        if item["id"] == "raises":
            raise NotApplied(f"no such mailbox {item['note']}")
        return {"ok": item["id"] == "done", "email": item["email"], "note": item["note"]}

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
    with airflow.ledger._open() as connection:
        for table, but in (("record", "{result}"), ("call", "{result}"), ("event", "{}")):
            for line in connection.execute(
                f"select (to_jsonb(t) - '{but}'::text[])::text as line from runguard.{table} t"
            ):
                assert "hunter2" not in line["line"]
                assert "@x.org" not in line["line"]
