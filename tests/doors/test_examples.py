"""Each example DAG does what its first lines say, through a real ``dag.test()``."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from airflow_runguard import BatchResults
from airflow_runguard.core.record import State
from tests.test_reconcilers import sftp_server

FOLDER = Path(__file__).parents[2] / "dags_examples"


def example(name: str) -> Any:
    """The DAG of a file, parsed as Airflow parses it."""
    from airflow.dag_processing.dagbag import DagBag

    bag = DagBag(FOLDER / f"{name}.py", collect_dags=True)
    assert bag.import_errors == {}
    return bag.dags[name]


@pytest.fixture(autouse=True)
def connections(vendor, ledger_url, monkeypatch) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_RUNGUARD_VENDOR", vendor.url)
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_DB", ledger_url)


def test_every_example_is_here():
    written = {path.stem for path in FOLDER.glob("*.py")}
    tested = {name.removeprefix("test_the_example_") for name in globals() if name.startswith("test_the_example_")}
    assert written == tested


def test_the_example_billing_guarded(airflow):
    dag = example("billing_guarded")
    first, second = airflow.run(dag), airflow.run(dag, day=None)
    assert (first.state, second.state) == ("success", "success")
    assert first.result("charge") == second.result("charge")
    (effect,) = airflow.vendor.effects()
    assert (effect.customer, effect.amount) == ("cust-7", 4900)
    assert (effect.key or "").startswith("rg1-")
    assert str(airflow.record().identity) == "billing/invoice/2026-10/cust-7"


def test_the_example_payout_http_operator(airflow, monkeypatch):
    """The answer is lost after the money moved; the next try asks the vendor and sends nothing."""
    dag = example("payout_http_operator")
    dag.task_dict["pay_out"].retry_delay *= 0
    airflow.vendor.script("drop")
    run = airflow.run(dag)
    assert (run.state, run.tries) == ("success", {"pay_out": 2})
    (effect,) = airflow.vendor.effects("shop-1")
    assert run.result("pay_out") == effect.id
    assert len(airflow.vendor.requests("shop-1")) == 1
    assert airflow.record().state is State.DONE


def test_the_example_mapped_invoices(airflow):
    dag = example("mapped_invoices")
    airflow.run(dag)
    second = airflow.run(dag, run_conf={"customers": ["dora", "ben", "anna"]})
    assert second.state == "success"
    assert sorted(effect.customer for effect in airflow.vendor.effects()) == ["anna", "ben", "cleo", "dora"]


def test_the_example_one_body(airflow):
    dag = example("one_body")
    airflow.vendor.script("drop")
    run = airflow.run(dag)
    assert (run.state, run.tries) == ("failed", {"order_paper": 1})
    assert "resolve 'one_body.order_paper/ld:2026-10-01T00:00:00Z' --deployment='test~test' --happened" in run.log
    assert airflow.vendor.charges() == 1


def test_the_example_sql_effect(airflow):
    airflow.sql.execute("create table account (customer text primary key, balance bigint not null)")
    airflow.sql.execute("insert into account values ('cust-7', 1000)")
    dag = example("sql_effect")
    first, second = airflow.run(dag), airflow.run(dag)
    assert (first.state, second.state) == ("success", "success")
    assert first.result("credit_bonus") == second.result("credit_bonus")
    assert airflow.sql.execute("select balance from account").fetchone() == (1500,)


def test_the_example_batch_invoices(airflow):
    dag = example("batch_invoices")
    first = airflow.run(dag)
    second = airflow.run(dag, run_conf={"customers": ["dora", "ben", "anna", "cleo"]})
    assert (first.state, second.state) == ("success", "success")
    assert sorted(effect.customer for effect in airflow.vendor.effects()) == ["anna", "ben", "cleo", "dora"]
    assert (first.result("report"), second.result("report")) == (4500, 6000)
    assert second.result("charge")["replayed"] == 3


def test_the_example_stripe_invoices(airflow, monkeypatch):
    """An answer is lost; the next try repeats that one invoice under its key, and Stripe charges nothing twice."""
    monkeypatch.setenv("STRIPE_API_KEY", "sk_test_1")
    monkeypatch.setenv("STRIPE_API_BASE", airflow.vendor.url)
    dag = example("stripe_invoices")
    dag.task_dict["pay"].retry_delay *= 0
    airflow.vendor.script("drop", customer="/v1/invoices/in_2/pay")
    run = airflow.run(dag)
    assert run.state == "success"
    paid = [f"/v1/invoices/in_{number}/pay" for number in (1, 2, 3)]
    assert sorted(effect.customer for effect in airflow.vendor.effects()) == paid
    assert len(airflow.vendor.requests()) == 4


def test_the_example_model_over_prompts(airflow, monkeypatch, tmp_path):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-test")
    monkeypatch.setenv("OPENAI_BASE_URL", airflow.vendor.url)
    dag = example("model_over_prompts")
    file = tmp_path / "prompts.jsonl"
    monkeypatch.setitem(dag.task_dict["answer"].op_args[0].__globals__, "PROMPTS", file)
    said = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
    choice = {"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Certainly."}}
    airflow.vendor.script(customer="/chat/completions", times=3, body=said | {"choices": [choice]})
    file.write_text('{"id": "a", "prompt": "one"}\n{"id": "b", "prompt": "two"}\n')
    assert airflow.run(dag).state == "success"
    file.write_text('{"id": "c", "prompt": "three"}\n' + file.read_text())
    assert airflow.run(dag).state == "success"
    assert airflow.vendor.charges() == 3


def test_the_example_sql_insert(airflow):
    airflow.sql.execute('create table "order" (id serial primary key, customer text, cents bigint)')
    dag = example("sql_insert")
    first, second = airflow.run(dag), airflow.run(dag)
    assert (first.result("book"), second.result("book")) == (1, 1)
    assert airflow.sql.execute('select customer, cents from "order"').fetchall() == [("cust-7", 500)]


def test_the_example_mail_without_keys(airflow):
    dag = example("mail_without_keys")
    airflow.vendor.honour_keys(False)
    airflow.vendor.script("drop", customer="ben@example.test")
    first, second = airflow.run(dag), airflow.run(dag)
    assert (first.states["send"], second.states["send"]) == ("failed", "failed")
    assert "Nobody knows whether these happened: ben@example.test" in second.log
    assert sorted(effect.customer.partition("@")[0] for effect in airflow.vendor.effects()) == ["anna", "ben", "cleo"]


def test_the_example_points_accrual(airflow):
    dag = example("points_accrual")
    answers = [{"order": "o-anna", "ok": True, "balance": 90}, {"order": "o-ben", "ok": False, "reason": "closed"}]
    airflow.vendor.script(customer="/accruals", body={"accruals": answers})
    run = airflow.run(dag)
    summary = run.result("accrue")
    assert (summary["done"], sum(summary["failed"].values()), summary["in_doubt"]) == (1, 1, 1)
    assert BatchResults(summary)["o-anna"] == 90
    assert "Nobody knows whether these happened: o-cleo" in run.log


def test_the_example_master_data_sync(airflow):
    dag = example("master_data_sync")
    airflow.run(dag)
    second = airflow.run(dag, run_conf={"versions": {"ben": 2, "anna": 1}})
    assert second.state == "success"
    assert sorted(effect.customer for effect in airflow.vendor.effects()) == ["anna/v1", "ben/v1", "ben/v2"]


@pytest.mark.filterwarnings("ignore")  # the SSH provider's own
def test_the_example_sftp_upload(airflow, monkeypatch, tmp_path):
    inbox = tmp_path / "inbox"
    inbox.mkdir()
    with sftp_server(tmp_path) as port:
        uri = f"sftp://me:secret@127.0.0.1:{port}?no_host_key_check=true&look_for_keys=false"
        monkeypatch.setenv("AIRFLOW_CONN_PARTNER", uri)
        dag = example("sftp_upload")
        first = airflow.run(dag)
        assert first.state == "success", first.log[-3000:]
        (inbox / "2026-10-01-orders.csv").unlink()  # the partner has fetched it
        assert airflow.run(dag).state == "success"
    assert {file.name: file.read_text() for file in inbox.iterdir()} == {
        "2026-10-01-returns.csv": "returns;2026-10-01\n"
    }


def test_the_example_payout_in_series(airflow, monkeypatch):
    dag = example("payout_in_series")
    monkeypatch.setattr(dag.task_dict["previous_done"], "deferrable", False)
    monkeypatch.setattr(dag.task_dict["previous_done"], "timeout", 0)
    first, early = airflow.run(dag, day=day(1)), airflow.run(dag, day=day(2))
    assert first.state == "success"
    assert "Nothing comes before this one" in first.log
    assert early.states == {"previous_done": "failed", "pay_out": "upstream_failed"}
    assert "min_gap is over at" in early.log
    with airflow.sql.transaction():
        airflow.sql.execute("select runguard.open_for_writing()")
        airflow.sql.execute("update runguard.record set finished_at = finished_at - interval '1 hour'")
    assert airflow.run(dag, day=day(2)).state == "success"


def test_the_example_master_data_one_at_a_time(airflow):
    dag = example("master_data_one_at_a_time")
    airflow.vendor.script("drop_before")
    first = airflow.run(dag, day=day(1))
    assert first.state == "failed"
    assert airflow.run(dag, day=day(2)).states == {"push": "skipped"}
    assert len(airflow.vendor.requests()) == 1


def test_the_example_observed_first(airflow, monkeypatch):
    dag = example("observed_first")
    first, second = airflow.run(dag), airflow.run(dag, day=None)
    assert "This would have been a duplicate of" in second.log
    assert airflow.vendor.charges() == 2
    monkeypatch.setenv("OBSERVED_FIRST_DEPTH", "ledger")
    guarded = airflow.run(example("observed_first"))
    assert guarded.result("charge") == first.result("charge")
    assert airflow.vendor.charges() == 2


def test_the_example_callbacks_on_a_task(airflow):
    dag = example("callbacks_on_a_task")
    first, second = airflow.run(dag), airflow.run(dag)
    assert (first.state, second.state) == ("success", "success")
    assert str(airflow.record().identity) == "exports/export/2026-10-01"
    assert airflow.kinds() == ["observed_started", "observed_done", "observed_again", "observed_again"]


def test_the_example_ledger_audit(airflow):
    assert airflow.run(example("ledger_audit")).state == "success"
    observed = example("observed_first")
    airflow.run(observed)
    airflow.run(observed, day=None)
    run = airflow.run(example("ledger_audit"))
    assert run.state == "failed"
    assert "observed/invoice/2026-10/cust-9 was done again by run" in run.log


def day(number: int) -> datetime:
    return datetime(2026, 10, number, tzinfo=UTC)
