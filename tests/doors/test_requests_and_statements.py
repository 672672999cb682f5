"""The operators that have adapters: a request and a statement, and what their errors mean for the effect."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import requests
from airflow.providers.common.sql.operators.sql import SQLExecuteQueryOperator
from airflow.providers.http.operators.http import HttpOperator

from airflow_runguard import Guard, guarded
from airflow_runguard.adapters import adapter_for
from airflow_runguard.core.record import Effect, State
from demo.processes import free_port

HEADERS = {"Content-Type": "application/json", "Idempotency-Key": "{{ guard.idempotency_key }}"}
AGAIN = {"retries": 2, "retry_delay": timedelta(0)}


def pay(airflow, amount: int = 500, **options: Any) -> Any:
    with airflow.dag() as dag:
        guarded(HttpOperator)(
            task_id="pay",
            http_conn_id="vendor",
            endpoint="/charges",
            data=json.dumps({"customer": "cust", "amount": amount}),
            response_filter=lambda response: response.json()["id"],
            **{"guard": Guard(key="payout"), "headers": HEADERS, **AGAIN, **options},
        )
    return dag


def test_p02_a_request_is_sent_once_with_its_vendor_key(airflow):
    dag = pay(airflow)
    first, second = airflow.run(dag), airflow.run(dag)
    (effect,) = airflow.vendor.effects()
    assert first.result("pay") == second.result("pay") == effect.id
    assert (effect.key or "").startswith("rg1-")


@pytest.mark.parametrize("expression", ["guard.idempotency_key | upper", "guard.idempotency_key[:20]"])
def test_p03_a_vendor_key_that_cannot_be_filled_in_is_refused_before_anything_is_sent(airflow, expression):
    """It would go out as it stands: the same key for every customer."""
    run = airflow.run(pay(airflow, headers={"Idempotency-Key": f"{{{{ {expression} }}}}"}))
    assert (run.state, run.tries) == ("failed", {"pay": 1})
    assert "was changed by a filter" in run.log
    assert (airflow.vendor.charges(), airflow.records()) == (0, [])


def test_a_deferrable_request_is_sent_by_the_worker_once(airflow):
    """From the triggerer it would be sent again after the triggerer's restart."""
    dag = pay(airflow, deferrable=True)
    run = airflow.run(dag)
    assert run.state == "success"
    assert "Pausing task as DEFERRED" not in run.log
    assert airflow.vendor.charges() == 1


def test_p03_a_500_is_in_doubt_and_spends_no_further_try(airflow):
    airflow.vendor.script("status", status=500, charged=True)
    run = airflow.run(pay(airflow))
    assert (run.state, run.tries) == ("failed", {"pay": 1})
    assert airflow.record().state is State.IN_DOUBT
    assert "airflow runguard resolve" in run.log
    assert "--did-not-happen --as-of TIME --reason" in run.log
    assert len(airflow.vendor.requests()) == 1


def test_p03_an_answer_that_the_author_refuses_came_after_the_effect(airflow):
    run = airflow.run(pay(airflow, response_check=lambda response: False))
    assert (run.state, run.tries) == ("failed", {"pay": 1})
    assert airflow.record().state is State.IN_DOUBT
    assert airflow.vendor.charges() == 1


def refuses(status: int) -> Callable[..., Any]:
    """What an author's check or filter does that asks the vendor once more and is refused (0: nobody listens)."""

    def look(response: Any, **_: Any) -> Any:
        if status == 0:
            return requests.get(f"http://127.0.0.1:{free_port()}/status", timeout=10)
        refused = requests.Response()
        refused.status_code, refused.url = status, "http://vendor/status/1"
        refused.headers["Retry-After"] = "1"
        refused.request = requests.Request("GET", refused.url).prepare()
        return refused.raise_for_status()

    return look


class LooksItUp(HttpOperator):
    """Sends, and then asks for what it has sent."""

    def execute(self, context: Any) -> Any:
        sent = self.hook.run(self.endpoint, self.data, self.headers)
        return refuses(404)(sent)


def test_p03_an_error_after_the_answer_says_nothing_about_what_was_sent(airflow):
    """The charge is made; then the author's own code asks the vendor for it and is refused, which is not the refusal of
    the charge: sent again (and under a new vendor key, where a refusal is final) it would be paid twice."""
    ways: dict[str, Any] = {
        "check_429": {"response_check": refuses(429)},
        "filter_402": {"response_filter": refuses(402)},
        "check_nobody": {"response_check": refuses(0)},
        "filter_422_vouched": {"response_filter": refuses(422), "guard": Guard(key="vouched", single_request=True)},
        "subclass_404": {},
    }
    with airflow.dag() as dag:
        for name, how in ways.items():
            guarded(LooksItUp if name == "subclass_404" else HttpOperator)(
                task_id=name,
                http_conn_id="vendor",
                endpoint="/charges",
                data=json.dumps({"customer": name, "amount": 500}),
                headers=HEADERS,
                **{"guard": Guard(key=name), **AGAIN, **how},
            )
    assert set(airflow.once(dag).states.values()) == {"failed"}, "no further try, and no pause"
    assert {record.state for record in airflow.records()} == {State.IN_DOUBT}
    assert set(airflow.run(dag).states.values()) == {"failed"}
    assert [airflow.vendor.charges(name) for name in ways] == [1] * len(ways)
    assert airflow.record("check_429").evidence.endswith("so it says nothing about what was sent")


def test_p09_an_answer_that_nobody_checked_is_read_and_an_error_is_never_done(airflow):
    """``check_response`` switches the client's own check off, and an error may stand inside an answer of 200; where the
    author says which answers are a success, that is believed."""
    throttled = {"errors": [{"message": "Throttled", "extensions": {"code": "THROTTLED"}}]}
    answers: dict[str, tuple[dict[str, Any], State]] = {
        "server": ({"status": 500}, State.IN_DOUBT),
        "declined": ({"status": 402}, State.FAILED),
        "too_many": ({"status": 429}, State.PAUSED),
        "throttled": ({"status": 200, "body": throttled}, State.PAUSED),
        "checked": ({"status": 409, "charged": True}, State.DONE),
    }
    with airflow.dag() as dag:
        for name, (answer, _) in answers.items():
            airflow.vendor.script("status", customer=name, **answer)
            guarded(HttpOperator)(
                task_id=name,
                http_conn_id="vendor",
                endpoint="/charges",
                data=json.dumps({"customer": name, "amount": 500}),
                extra_options={"check_response": False},
                response_check=(lambda response: response.status_code == 409) if name == "checked" else None,
                guard=Guard(key=name),
            )
    airflow.once(dag)
    assert {record.identity.key: record.state for record in airflow.records()} == {
        name: state for name, (_, state) in answers.items()
    }


def test_p02_each_request_of_a_mapped_task_has_a_vendor_key_of_its_own(airflow):
    orders = [json.dumps({"customer": name, "amount": 500}) for name in ("a", "b")]
    with airflow.dag() as dag:
        guarded(HttpOperator).partial(
            task_id="pay",
            http_conn_id="vendor",
            endpoint="/charges",
            headers=HEADERS,
            guard=Guard(key="{{ (args.data | from_json).customer }}"),
        ).expand(data=orders)
        dag.user_defined_filters = {"from_json": json.loads}
    assert airflow.run(dag).state == "success"
    keys = {effect.customer: effect.key or "" for effect in airflow.vendor.effects()}
    assert sorted(keys) == ["a", "b"]
    assert len(set(keys.values())) == 2
    assert all(key.startswith("rg1-") for key in keys.values())


def test_p06_a_429_waits_without_spending_a_try(airflow):
    airflow.vendor.script("status", status=429, headers={"Retry-After": "120"})
    run = airflow.once(pay(airflow))
    assert (run.states, run.tries) == ({"pay": "up_for_reschedule"}, {"pay": 1})
    record = airflow.record()
    assert (record.state, record.effect) == (State.PAUSED, Effect.NOT_APPLIED)
    assert record.resume_at is not None
    assert 100 < (record.resume_at - record.updated_at).total_seconds() < 140
    assert airflow.vendor.charges() == 0


def test_p03_a_refused_connection_is_tried_again_by_airflow(airflow, vendor, monkeypatch):
    dag = pay(airflow, on_retry_callback=lambda context: monkeypatch.setenv("AIRFLOW_CONN_VENDOR", vendor.url))
    monkeypatch.setenv("AIRFLOW_CONN_VENDOR", f"http://127.0.0.1:{free_port()}")
    run = airflow.run(dag)
    assert (run.state, run.tries) == ("success", {"pay": 2})
    assert airflow.vendor.charges() == 1


def test_p03_a_402_had_no_effect_and_the_next_try_is_a_new_request_to_the_vendor(airflow):
    """A decline is saved by vendors under its key, so the next attempt carries another one."""
    airflow.vendor.script("status", status=402)
    dag = pay(airflow)
    airflow.run(dag)
    run = airflow.run(dag)
    assert run.state == "success"
    keys = {request.key for request in airflow.vendor.requests()}
    assert len(keys) == len(airflow.vendor.requests()) > 1
    assert airflow.vendor.charges() == 1


def test_p11_what_is_handed_on_to_the_client_is_part_of_the_order(airflow):
    def ordered(amount: int) -> dict[str, Any]:
        body = {"json": {"customer": "cust", "amount": amount}}
        operator = guarded(HttpOperator)(task_id="t", endpoint="/charges", guard=Guard(key="k"), request_kwargs=body)
        return dict(adapter_for(type(operator)).arguments(operator))

    with airflow.dag():
        assert ordered(500)["json"] == {"customer": "cust", "amount": 500}


def test_p11_another_payload_under_the_same_key_is_refused_by_its_field(airflow):
    airflow.run(pay(airflow))
    second = pay(airflow, amount=900)
    second.task_dict["pay"].guard = Guard(key="payout", namespace=airflow.record().identity.namespace)
    run = airflow.run(second)
    assert (run.state, run.tries) == ("failed", {"pay": 1})
    assert "these differ: data" in run.log
    assert [effect.amount for effect in airflow.vendor.effects()] == [500]


# -- SQL ---------------------------------------------------------------------------------------------------------------


@pytest.fixture
def account(airflow, ledger_url, monkeypatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_DB", ledger_url)
    airflow.sql.execute("create table account (customer text primary key, balance bigint not null)")
    airflow.sql.execute("insert into account values ('cust', 1000)")


def credit(airflow, sql: str, **options: Any) -> Any:
    with airflow.dag() as dag:
        guarded(SQLExecuteQueryOperator)(
            task_id="credit",
            conn_id="shop_db",
            sql=sql,
            parameters={"cents": 500},
            **{"guard": Guard(), **AGAIN, **options},
        )
    return dag


def test_p02_a_statement_runs_once_and_its_rows_come_back(airflow, account):
    dag = credit(airflow, "update account set balance = balance + %(cents)s returning customer, balance")
    first, second = airflow.run(dag), airflow.run(dag)
    assert (first.state, second.state) == ("success", "success")
    assert first.result("credit") == second.result("credit")
    assert airflow.sql.execute("select balance from account").fetchone() == (1500,)


def test_p03_a_statement_that_failed_is_in_doubt_since_it_may_be_one_of_several(airflow, account):
    dag = credit(airflow, "update account set balance = balance + %(cents)s; select 1/0", autocommit=True)
    run = airflow.run(dag)
    assert (run.state, run.tries) == ("failed", {"credit": 1})
    assert airflow.record().state is State.IN_DOUBT
