"""What a task does while nobody knows, while another one works, or while something is away: through ``dag.test()``."""

from __future__ import annotations

import asyncio
import uuid
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import requests
from airflow.sdk.exceptions import AirflowSkipException, AirflowTaskTimeout

from airflow_runguard import (
    Applied,
    GuardContext,
    NotApplied,
    NotFound,
    StillUnknown,
    Succeeded,
    codec,
    guarded_task,
)
from airflow_runguard.core import keys, payloads
from airflow_runguard.core.record import (
    CallState,
    Effect,
    FailureClass,
    Grant,
    Holder,
    Order,
    Settlement,
    State,
    Verdict,
)
from demo.processes import free_port
from tests.doors.conftest import DEPLOYMENT

AGAIN = {"retries": 2, "retry_delay": timedelta(0)}


def paying(airflow, charge, **options: Any) -> Any:
    """A DAG whose one task charges an invoice."""
    with airflow.dag() as dag:

        @guarded_task(**{"key": "invoice/7", "namespace": "billing", "on_doubt": "ask", **AGAIN, **options})
        def pay(amount: int = 500) -> Any:
            return charge(amount=amount)["id"]

        pay()
    return dag


def test_p03_replay_that_the_options_of_all_forbid_is_refused_before_any_call(airflow, charge, monkeypatch):
    monkeypatch.setenv("AIRFLOW__RUNGUARD__KEY_LIFETIME", "600")
    run = airflow.run(paying(airflow, charge, on_doubt="replay"))
    assert run.state == "failed"
    assert "on_doubt='replay' could send nothing again" in run.log
    assert airflow.vendor.charges() == 0
    assert airflow.records() == []


@contextmanager
def another_holder(airflow, amount: int = 500):
    """Somebody else works on the same invoice: a real claim in the same ledger, left as not begun."""
    identity = keys.identity(DEPLOYMENT, "billing", "invoice/7")
    order = Order(identity=identity, payload=payloads.payload({"amount": amount}), calls="explicit", lease=300)
    holder = Holder(nonce=uuid.uuid4().hex, dag_id="other", task_id="pay", run_id="r", try_number=1, host="h", pid=1)
    claim = airflow.ledger.claim(order, holder)
    assert claim.verdict is Verdict.RUN
    grant = Grant(identity, claim.record_id, claim.generation, claim.fence)
    yield lambda: airflow.ledger.write(grant, holder=holder, order=order, settlement=Settlement(State.PENDING))


# -- in doubt ----------------------------------------------------------------------------------------------------------


def in_doubt(airflow, charge, **options: Any) -> Any:
    """The vendor charged, and its answer was lost."""
    dag = paying(airflow, charge, **options)
    airflow.vendor.script("drop")
    run = airflow.run(dag)
    assert (run.state, run.tries) == ("failed", {"pay": 1})
    assert airflow.record().state is State.IN_DOUBT
    return dag, run


def test_p03_in_doubt_fails_without_further_tries_and_says_what_to_type(airflow, charge):
    _, run = in_doubt(airflow, charge)
    assert "airflow runguard resolve 'billing/invoice/7' --deployment='test~test' --happened [--result JSON]" in run.log
    assert "airflow runguard explain 'billing/invoice/7'" in run.log


def test_p03_a_clear_is_no_answer_to_a_doubt(airflow, charge):
    dag, _ = in_doubt(airflow, charge)
    assert airflow.run(dag).state == "failed"
    assert len(airflow.vendor.requests()) == 1


def test_r47_after_happened_a_clear_replays_the_given_result(airflow, charge):
    dag, _ = in_doubt(airflow, charge)
    assert airflow.resolve("happened", result=codec.dump("ch_by_hand")) == "ok"
    run = airflow.run(dag)
    assert (run.state, run.result("pay")) == ("success", "ch_by_hand")
    assert len(airflow.vendor.requests()) == 1


def test_p03_after_did_not_happen_a_clear_runs_it(airflow, charge):
    dag, _ = in_doubt(airflow, charge)
    assert airflow.resolve("did_not_happen") == "ok"
    run = airflow.run(dag)
    assert (run.state, run.result("pay")) == ("success", airflow.vendor.effects()[1].id)
    assert len(airflow.vendor.requests()) == 2


def test_p03_after_failed_a_clear_does_not_run_it_and_reopening_does(airflow, charge):
    dag, _ = in_doubt(airflow, charge)
    assert airflow.resolve("failed") == "ok"
    run = airflow.run(dag)
    assert (run.state, run.tries) == ("failed", {"pay": 1})
    assert "airflow runguard reopen 'billing/invoice/7'" in run.log
    reopened = airflow.ledger.reopen(
        airflow.record().id, seen_generation=1, actor="person:tester", reason="again", again_although_applied=True
    )
    assert reopened == "ok"
    assert airflow.run(dag).state == "success"
    assert (airflow.record().generation, len(airflow.vendor.requests())) == (2, 2)


def test_r47_clearing_done_work_does_nothing_and_reopening_it_does_it_once(airflow, charge):
    dag = paying(airflow, charge)
    first = airflow.run(dag)
    assert airflow.run(dag).result("pay") == first.result("pay")
    asked = [
        airflow.ledger.reopen(
            airflow.record().id, seen_generation=1, actor=f"person:{n}", reason="again", again_although_applied=True
        )
        for n in range(2)
    ]
    assert asked == ["ok", "moved"]
    again = airflow.run(dag)
    assert again.result("pay") != first.result("pay")
    assert airflow.run(dag).result("pay") == again.result("pay")
    assert (airflow.record().generation, airflow.vendor.charges()) == (2, 2)


@pytest.mark.parametrize("found", [True, False])
def test_p03_about_a_job_that_goes_on_nobody_is_asked(airflow, found):
    """The body swallowed that the job could not be looked at. Where the vendor does not know it, a person is asked."""
    looks: list[str] = []

    def look(job: str) -> Any:
        looks.append(job)
        if len(looks) <= 3:
            if found:
                raise ConnectionError("no answer")
            return NotFound("no such job")
        return Succeeded("a model")

    submitted: list[str] = []

    def submit() -> str:
        submitted.append("job-1")
        return "job-1"

    with airflow.dag() as dag:

        @guarded_task(key="model", on_doubt="ask", **AGAIN)
        def train(guard: GuardContext) -> Any:
            try:
                return guard.submit("train", submit, look, poll=0.01)
            except Exception:
                return "no model today"

        train()
    first = airflow.once(dag)
    assert airflow.record().state is State.IN_DOUBT
    if found:
        assert first.states == {"train": "up_for_reschedule"}, first.log
        assert "goes on at the vendor (job job-1)" in first.log
        again = airflow.run(dag)
        assert again.result("train") == "a model"
    else:
        assert first.states == {"train": "failed"}, first.log
        assert "A person decides" in first.log
    assert submitted == ["job-1"]


@pytest.mark.parametrize("answer", ["applied", "not_applied", "unknown", "error"])
def test_p03_a_reconcile_function_answers_for_the_vendor(airflow, charge, answer):
    """The first try's answer was lost; the second one asks before it sends."""
    asked: list[Any] = []

    def find(doubt):
        asked.append(doubt)
        if answer == "applied":
            return Applied(airflow.vendor.find(customer="cust")[0]["id"])
        if answer == "not_applied":
            return NotApplied("looked")
        if answer == "unknown":
            return StillUnknown("the vendor's search is down")
        raise ConnectionError("no answer")

    dag = paying(airflow, charge, on_doubt=find, max_call_time=0.001, **AGAIN)
    airflow.vendor.script("drop", times=1)
    run = airflow.run(dag)
    effects, requests = airflow.vendor.effects(), airflow.vendor.requests()
    assert asked[0].intent == {"amount": 500}
    match answer:
        case "applied":
            assert (run.state, run.result("pay"), len(requests)) == ("success", effects[0].id, 1)
        case "not_applied":
            assert (run.state, run.result("pay"), len(requests)) == ("success", effects[1].id, 2)
        case _:
            assert (run.state, len(requests)) == ("failed", 1)
            assert len(asked) == 2  # each further try asks again
            assert airflow.record().state is State.IN_DOUBT


def test_p03_a_vendor_that_has_nothing_yet_may_still_be_reached_by_the_request(airflow, charge):
    """ "It did not happen" does not count before the call can no longer be on its way: the task waits, then asks."""
    dag = paying(airflow, charge, on_doubt=lambda doubt: NotApplied("looked too early"))
    airflow.vendor.script("drop")
    airflow.once(dag)
    run = airflow.once(dag)
    assert (run.states, run.tries) == ({"pay": "up_for_reschedule"}, {"pay": 1})
    assert "looked too early; it may still arrive" in run.log
    assert airflow.record().state is State.IN_DOUBT
    assert len(airflow.vendor.requests()) == 1


def test_p06_a_look_up_that_is_told_to_wait_waits_and_sends_nothing(airflow, charge):
    def find(doubt):
        answer = requests.get(f"{airflow.vendor.url}/nothing-here", timeout=10)
        answer.status_code = 429
        answer.headers["Retry-After"] = "120"
        answer.raise_for_status()

    dag = paying(airflow, charge, on_doubt=find)
    airflow.vendor.script("drop")
    airflow.once(dag)
    run = airflow.once(dag)
    assert (run.states, run.tries) == ({"pay": "up_for_reschedule"}, {"pay": 1})
    assert "the look-up was told to wait" in run.log
    assert airflow.record().state is State.IN_DOUBT
    assert len(airflow.vendor.requests()) == 1


def test_p03_an_async_function_answers_for_the_vendor(airflow, charge):
    async def find(doubt):
        await asyncio.sleep(0)
        assert doubt.now >= doubt.call.intent_at
        return Applied("ch_found", reference="ch_1")

    dag = paying(airflow, charge, on_doubt=find)
    airflow.vendor.script("drop")
    run = airflow.run(dag)
    assert (run.state, run.result("pay"), len(airflow.vendor.requests())) == ("success", "ch_found", 1)
    (call,) = airflow.ledger.calls(airflow.record().id)
    assert call.external_id == "ch_1"


def test_p03_replay_repeats_under_the_same_vendor_key(airflow, charge):
    with airflow.dag() as dag:

        @guarded_task(key="invoice/7", on_doubt="replay", **AGAIN)
        def pay(guard) -> Any:
            return guard.call("charge", charge, vendor_key_as="key")["id"]

        pay()
    airflow.vendor.script("drop")
    run = airflow.run(dag)
    (effect,) = airflow.vendor.effects()
    assert (run.state, run.result("pay")) == ("success", effect.id)
    assert len({request.key for request in airflow.vendor.requests()}) == 1
    assert len(airflow.vendor.requests()) == 2
    assert "given no key" not in run.log


def test_p03_replay_without_a_vendor_key_is_warned_of(airflow, charge, caplog):
    with airflow.dag() as dag:

        @guarded_task(on_doubt="replay")
        def body() -> Any:
            return charge()["id"]

        @guarded_task(on_doubt="replay")
        def explicit(guard) -> Any:
            return guard.call("charge", charge)["id"]

        body() >> explicit()
    assert "Put {{ guard.idempotency_key }} where it is sent" in airflow.run(dag).log
    assert "the vendor is given no key" in caplog.text


# -- errors and signals around the call (R44) --------------------------------------------------------------------------


def test_r44_an_execution_timeout_during_the_call_is_a_doubt_and_ends_the_tries(airflow, charge):
    airflow.vendor.script("stall", gate="never")
    dag = paying(airflow, charge, execution_timeout=timedelta(seconds=1))
    run = airflow.run(dag)
    airflow.vendor.release("never")
    assert (run.state, run.tries) == ("failed", {"pay": 1})
    record = airflow.record()
    assert (record.state, record.effect) == (State.IN_DOUBT, Effect.UNKNOWN)
    assert airflow.vendor.charges() == 1


@pytest.mark.parametrize("error", [SystemExit(0), asyncio.CancelledError(), AirflowTaskTimeout("now")], ids=repr)
def test_r44_what_ends_a_call_from_outside_leaves_it_in_doubt_and_the_earlier_one_done(airflow, charge, error):
    def interrupted() -> None:
        charge("second")
        raise error

    with airflow.dag() as dag:

        @guarded_task(key="invoice/7", **AGAIN)
        def pay(guard) -> None:
            guard.call("first", charge, "first")
            guard.call("second", interrupted)
            guard.call("third", charge, "third")

        pay()
    run = airflow.run(dag)
    assert run.state == "failed"
    record = airflow.record()
    calls = {call.name: call.state for call in airflow.ledger.calls(record.id)}
    assert record.state is State.IN_DOUBT
    assert calls == {"first": CallState.DONE, "second": CallState.IN_DOUBT}
    assert [effect.customer for effect in airflow.vendor.effects()] == ["first", "second"]


def test_r44_an_error_between_the_calls_is_mended_by_the_next_try_which_repeats_no_call(airflow, charge):
    broken = iter([True])
    with airflow.dag() as dag:

        @guarded_task(key="invoice/7", **AGAIN)
        def pay(guard) -> None:
            guard.call("first", charge, "first")
            if next(broken, False):
                raise AirflowTaskTimeout("between the calls")
            guard.call("second", charge, "second")

        pay()
    run = airflow.run(dag)
    assert (run.state, run.tries) == ("success", {"pay": 2})
    assert [effect.customer for effect in airflow.vendor.effects()] == ["first", "second"]


def test_r44_a_skip_is_control_flow_and_never_a_failure(airflow, charge):
    with airflow.dag() as dag:

        @guarded_task(key="invoice/7", **AGAIN)
        def pay(guard) -> None:
            raise AirflowSkipException("nothing is due")

        pay()
    run = airflow.run(dag)
    assert run.states == {"pay": "skipped"}
    record = airflow.record()
    assert (record.state, record.failure_class, record.first_intent_at) == (State.PENDING, None, None)


# -- another holder ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("lease_url", [None])
def test_p01_p12_with_no_redis_connection_busy_work_waits_runs_once_and_is_replayed(airflow, charge):
    """The wait is Airflow's own (``up_for_reschedule``), spends no try, and is over when the other one is."""
    dag = paying(airflow, charge, on_busy="wait")
    with another_holder(airflow) as leave:
        waiting = airflow.once(dag)
        assert waiting.states == {"pay": "up_for_reschedule"}
        assert "is being worked on by other.pay run r try 1 on h:1" in waiting.log
        assert waiting.tries == {"pay": 1}
        leave()
    first, second = airflow.run(dag), airflow.run(dag)
    assert (first.state, second.state, airflow.vendor.charges()) == ("success", "success", 1)
    assert second.result("pay") == first.result("pay")
    assert "Redis" not in waiting.log + first.log + second.log, "who has none is not told that it is away"


@pytest.mark.parametrize(("on_busy", "state"), [("fail", "failed"), ("skip", "skipped")])
def test_p01_busy_work_fails_or_skips_where_the_author_says_so(airflow, charge, on_busy, state):
    dag = paying(airflow, charge, on_busy=on_busy)
    with another_holder(airflow):
        run = airflow.run(dag)
    assert (run.states, run.tries) == ({"pay": state}, {"pay": 1})
    assert airflow.vendor.charges() == 0


# -- what is away or wrong ---------------------------------------------------------------------------------------------


def test_p12_a_ledger_out_of_reach_means_waiting_and_no_call(airflow, charge, monkeypatch):
    url = f"postgresql://postgres@127.0.0.1:{free_port()}/nothing"
    monkeypatch.setenv("AIRFLOW_CONN_RUNGUARD_LEDGER", url)
    run = airflow.once(paying(airflow, charge))
    assert run.states == {"pay": "up_for_reschedule"}
    assert "No call was made" in run.log
    assert airflow.vendor.charges() == 0


def test_p12_a_redis_out_of_reach_is_said_once_and_work_goes_on(airflow, charge, monkeypatch):
    monkeypatch.setenv("AIRFLOW_CONN_RUNGUARD_REDIS", f"redis://127.0.0.1:{free_port()}/0")
    run = airflow.run(paying(airflow, charge))
    assert run.state == "success"
    assert airflow.vendor.charges() == 1


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("AIRFLOW_CONN_RUNGUARD_LEDGER", None, "'runguard_ledger' is not defined"),
        ("AIRFLOW_CONN_RUNGUARD_LEDGER", "mysql://u@h/d", "is of type 'mysql', not postgres"),
        ("AIRFLOW_CONN_RUNGUARD_LEDGER", "{not json", "'runguard_ledger' is not defined"),  # Airflow says no more
        ("AIRFLOW__RUNGUARD__LEASE_TTL", "0", "[runguard] lease_ttl = '0'"),
        ("AIRFLOW__RUNGUARD__DEPTH", "deep", "[runguard] depth = 'deep'"),
        ("AIRFLOW__RUNGUARD__DEPLOYMENT", "other", "belongs to deployment 'test'"),
    ],
)
def test_p12_a_wrong_connection_or_option_is_said_before_any_call(airflow, charge, monkeypatch, name, value, said):
    if value is None:
        monkeypatch.delenv(name)
    else:
        monkeypatch.setenv(name, value)
    run = airflow.run(paying(airflow, charge, retries=0))
    assert run.state == "failed"
    assert said in run.log
    assert (airflow.vendor.charges(), airflow.records()) == (0, [])


def test_p11_a_changed_payload_is_refused_by_its_field_and_the_record_is_as_it_was(airflow, charge):
    with airflow.dag() as dag:

        @guarded_task(key="invoice/7", namespace="billing", on_doubt="ask", **AGAIN)
        def pay(amount: int, currency: str = "eur") -> Any:
            return charge(amount=amount)["id"]

        pay(500)
    airflow.run(dag)
    before = airflow.record()
    dag.task_dict["pay"].op_args = [900]
    run = airflow.run(dag)
    assert (run.state, run.tries) == ("failed", {"pay": 1})
    assert "these differ: amount." in run.log
    assert airflow.record() == before
    assert airflow.vendor.charges() == 1


def test_a_failed_validation_asks_for_a_person_and_a_clear_runs_it_corrected(airflow, charge):
    airflow.vendor.script("status", status=422)
    with airflow.dag() as dag:

        @guarded_task(key="invoice/7", **AGAIN)
        def pay(guard) -> Any:
            return guard.call("charge", charge)["id"]

        pay()
    run = airflow.run(dag)
    record = airflow.record()
    assert (run.state, run.tries) == ("failed", {"pay": 1})
    assert (record.failure_class, record.effect, record.needs_person) == (
        FailureClass.VALIDATION,
        Effect.NOT_APPLIED,
        True,
    )
    assert airflow.run(dag).state == "success"
