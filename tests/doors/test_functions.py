"""The doors for functions through a real ``dag.test()``: one effect whatever is run again, and the same answer."""

from __future__ import annotations

import itertools
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest
import requests
from airflow.providers.standard.operators.python import PythonOperator
from airflow.sdk import task
from airflow.sdk.exceptions import AirflowSkipException

from airflow_runguard import Guard, GuardedPythonOperator, NotApplied, current_guard, guarded, guarded_task
from airflow_runguard.core.record import Effect, FailureClass, State

AGAIN = {"retries": 2, "retry_delay": timedelta(0)}


def body(charge):
    @task.guarded(on_doubt="ask")
    def pay(amount: int = 500) -> Any:
        return charge(amount=amount)["id"]

    pay()


def explicit(charge):
    @task.guarded
    def pay(guard, amount: int = 500) -> Any:
        return guard.call("charge", charge, amount=amount, vendor_key_as="key")["id"]

    pay()


def async_body(charge):
    @task.guarded(on_doubt="ask")
    async def pay(amount: int = 500) -> Any:
        return charge(amount=amount)["id"]

    pay()


def async_explicit(charge):
    async def call(amount: int, key: str) -> Any:
        return charge(amount=amount, key=key)

    @guarded_task
    async def pay(guard, amount: int = 500) -> Any:
        return (await guard.acall("charge", call, amount=amount, vendor_key_as="key"))["id"]

    pay()


def typed_twin(charge):
    @guarded_task(key="invoice/{{ args.invoice.id }}", namespace="billing")
    def pay(guard, invoice: dict[str, Any]) -> Any:
        return guard.call("charge", charge, amount=invoice["cents"], vendor_key_as="key")["id"]

    pay({"id": 7, "cents": 500})


def classic_operator(charge):
    GuardedPythonOperator(task_id="pay", guard=Guard(on_doubt="ask"), python_callable=lambda: charge()["id"])


def classic_operator_explicit(charge):
    def pay(guard, amount: int) -> Any:
        return guard.call("charge", charge, amount=amount)["id"]

    GuardedPythonOperator(task_id="pay", python_callable=pay, op_args=[500])


@pytest.mark.parametrize(
    "door", [body, explicit, async_body, async_explicit, typed_twin, classic_operator, classic_operator_explicit]
)
def test_p02_each_door_has_its_effect_once_and_a_clear_gives_the_same_answer(airflow, charge, door):
    with airflow.dag() as dag:
        door(charge)
    first, second = airflow.run(dag), airflow.run(dag)
    assert (first.state, second.state) == ("success", "success")
    assert airflow.vendor.charges() == 1
    assert second.result("pay") == first.result("pay") == airflow.vendor.effects()[0].id
    assert airflow.record().state is State.DONE
    assert "Done before" in second.log


def test_r46_a_failure_after_the_effect_is_replayed_by_the_retry(airflow, charge):
    """The try died between the ledger's commit and Airflow's success; the next one answers with the stored result."""

    first = iter([True])

    def fails_once(context, result) -> None:
        if next(first, False):
            raise RuntimeError("the success report was lost")

    with airflow.dag() as dag:

        @task.guarded(on_doubt="ask", post_execute=fails_once, **AGAIN)
        def pay() -> Any:
            return charge()["id"]

        pay()
    run = airflow.run(dag)
    assert (run.state, run.tries) == ("success", {"pay": 2})
    assert run.result("pay") == airflow.vendor.effects()[0].id
    assert airflow.vendor.charges() == 1


def test_r41_mapped_work_is_named_by_its_content_and_not_by_its_place(airflow, charge):
    items = ["a", "b", "c"]
    with airflow.dag() as dag:

        @task
        def work() -> list[str]:
            return items

        @guarded_task(key="item/{{ args.item }}", on_doubt="ask")
        def pay(item: str) -> Any:
            return charge(customer=item)["id"]

        pay.expand(item=work())
    airflow.run(dag)
    items[:] = ["z", "a", "b", "c"]
    second = airflow.run(dag)
    assert second.state == "success"
    assert sorted(effect.customer for effect in airflow.vendor.effects()) == ["a", "b", "c", "z"]
    by_customer = {effect.customer: effect.id for effect in airflow.vendor.effects()}
    assert [second.result("pay", map_index=i) for i in range(4)] == [by_customer[item] for item in items]


def test_r41_two_equal_items_of_one_list_are_one_piece_of_work(airflow, charge):
    with airflow.dag() as dag:

        @guarded_task(key="item/{{ args.item }}", on_doubt="ask")
        def pay(item: str) -> Any:
            return charge(customer=item)["id"]

        pay.expand(item=["a", "a"])
    run = airflow.run(dag)
    assert run.result("pay", map_index=0) == run.result("pay", map_index=1)
    assert airflow.vendor.charges() == 1


def test_code_deeper_down_reaches_the_guard(airflow, charge):
    def deep() -> Any:
        return current_guard().call("charge", charge)["id"]

    with airflow.dag() as dag:

        @guarded_task(calls="explicit")
        def pay() -> Any:
            return deep()

        pay()
    first, second = airflow.run(dag), airflow.run(dag)
    assert first.result("pay") == second.result("pay")
    assert airflow.vendor.charges() == 1


def test_a_body_that_is_one_call_has_no_guard_to_make_calls_with(airflow, charge):
    with airflow.dag() as dag:

        @guarded_task(on_doubt="ask", **AGAIN)
        def pay() -> Any:
            return current_guard().call("charge", charge)

        pay()
    run = airflow.run(dag)
    assert run.state == "failed"
    assert "calls='explicit'" in run.log
    assert airflow.vendor.charges() == 0


VALUES = {
    "zero": 0,
    "empty_list": [],
    "false": False,
    "none": None,
    "empty_text": "",
    "empty_dict": {},
    "negative_zero": -0.0,
    "text": "é\u2028",
    "big": 2**62,
    "tuple": (1, "a"),
    "tuples": [(1, 2)],
    "nested": {"a": [None, {"b": (1,)}]},
    "decimal": Decimal("1.50"),
    "date": date(2026, 10, 1),
    "moment": datetime(2026, 10, 1, 12, tzinfo=UTC),
    "span": timedelta(seconds=3),
}


def test_p02_the_replay_gives_what_the_first_time_gave_whatever_its_type(airflow):
    calls: list[str] = []

    def work(name: str) -> Any:
        calls.append(name)
        return VALUES[name]

    with airflow.dag() as dag:
        for name in VALUES:
            GuardedPythonOperator(task_id=name, guard=Guard(on_doubt="ask"), python_callable=work, op_args=[name])
    first, second = airflow.run(dag), airflow.run(dag)
    assert sorted(calls) == sorted(VALUES)
    assert set(second.states.values()) == {"success"}
    given, again = ({task: value for (task, _, _), value in run.xcoms.items()} for run in (first, second))
    assert repr(sorted(again.items())) == repr(sorted(given.items()))
    assert again == {name: value for name, value in VALUES.items() if value is not None}  # Airflow pushes no None
    types = {name: type(VALUES[name]) for name in again if name != "negative_zero"}  # Airflow's XCom makes 0 of -0.0
    assert {name: type(again[name]) for name in types} == types


def test_p02_a_value_that_looks_like_airflows_own_envelope_is_never_given_back_as_another(airflow):
    """Airflow cannot hand such a value on; the replay must not make one up."""
    with airflow.dag() as dag:
        disguised = {"__classname__": "not.a.Class", "__version__": 1, "__data__": 5}
        GuardedPythonOperator(task_id="work", guard=Guard(on_doubt="ask"), python_callable=lambda: disguised)
    runs = [airflow.run(dag), airflow.run(dag)]
    assert [run.state for run in runs] == ["failed", "failed"]
    assert [run.xcoms for run in runs] == [{}, {}]


def test_p02_a_result_that_cannot_be_stored_makes_its_replay_fail_and_is_never_another_value(airflow, charge):
    class Receipt:
        pass

    with airflow.dag() as dag:

        @guarded_task(on_doubt="ask", do_xcom_push=False, **AGAIN)
        def pay() -> Any:
            charge()
            return Receipt()

        pay()
    first, second = airflow.run(dag), airflow.run(dag)
    assert (first.state, second.state) == ("success", "failed")
    assert "its result was not stored" in second.log
    assert "--happened --result JSON" in second.log
    assert second.tries == {"pay": 1}
    # One of a class that is not found any more: what is advised must not end in a second charge.
    gone = b'{"v":1,"value":{"__classname__":"gone.Receipt","__version__":1,"__data__":{}}}'
    assert airflow.resolve("happened", result=gone) == "ok"
    third = airflow.run(dag)
    assert "its stored result cannot be read" in third.log
    assert "Ordering it anew would make the call again" in third.log
    assert airflow.vendor.charges() == 1


def test_p02_a_result_that_nobody_reads_is_replayed_as_none(airflow, charge):
    with airflow.dag() as dag:

        @guarded_task(on_doubt="ask", store_result="none")
        def pay() -> Any:
            return charge()["id"]

        pay()
    airflow.run(dag)
    second = airflow.run(dag)
    assert second.state == "success"
    assert ("pay", "return_value", -1) not in second.xcoms
    assert airflow.vendor.charges() == 1


def test_p02_the_tasks_own_xcoms_come_back_with_the_replay(airflow, charge):
    with airflow.dag() as dag:

        @guarded_task(on_doubt="ask", multiple_outputs=True)
        def pay(ti=None) -> Any:
            ti.xcom_push(key="receipt", value=("r", charge()["id"]))
            ti.xcom_push("nothing", None)
            return {"a": 1, "b": [2]}

        pay()
    first, second = airflow.run(dag), airflow.run(dag)
    assert first.result("pay", "receipt")
    assert second.xcoms == first.xcoms
    assert airflow.vendor.charges() == 1


def test_p02_a_skip_is_an_answer_and_is_raised_again(airflow, charge):
    with airflow.dag() as dag:

        @guarded_task(on_doubt="ask")
        def pay() -> Any:
            charge()
            raise AirflowSkipException("nothing more to do")

        pay()
    first, second = airflow.run(dag), airflow.run(dag)
    assert first.states == second.states == {"pay": "skipped"}
    assert airflow.vendor.charges() == 1


def test_p06_a_body_that_swallows_too_many_is_not_done_where_it_did_nothing_in_its_place(airflow, charge):
    """A record that is done is never run again: the charge that the vendor put off would never be made."""
    with airflow.dag() as dag:
        for how in ("nothing", "skip", "another"):
            airflow.vendor.script("status", customer=how, status=429)

            @guarded_task(task_id=how, key=how)
            def pay(guard, how: str = how) -> Any:
                try:
                    return guard.call("charge", charge, customer=how)["id"]
                except requests.HTTPError:
                    if how == "another":
                        return guard.call("elsewhere", charge, customer="elsewhere")["id"]
                    if how == "skip":
                        raise AirflowSkipException("another day") from None
                return None

            pay()
    airflow.once(dag)
    states = {record.identity.key: record.state for record in airflow.records()}
    assert states == {"nothing": State.PAUSED, "skip": State.PAUSED, "another": State.DONE}


def test_p02_what_mapped_tasks_gave_is_an_order_like_any_list(airflow, charge):
    with airflow.dag() as dag:

        @task
        def customer(name: str) -> str:
            return name

        @guarded_task(key="all", on_doubt="ask")
        def pay(customers, others) -> Any:
            return [charge(customer=name)["id"] for name in [*customers, *others]]

        named = customer.expand(name=["a", "b"])
        pay(named, others=named.map(str.upper))
    first, second = airflow.run(dag), airflow.run(dag)
    assert first.result("pay") == second.result("pay")
    assert sorted(effect.customer for effect in airflow.vendor.effects()) == ["A", "B", "a", "b"]
    assert dict(airflow.record().payload.readable) == {"customers": ["a", "b"], "others": ["A", "B"]}


def test_p04_an_error_of_airflows_log_after_the_function_returned_is_no_doubt(airflow, charge):
    """What a task sees whose supervisor was killed: its log is a broken pipe, and Airflow logs what was returned."""

    class Orphan(PythonOperator):
        def execute(self, context) -> Any:
            super().execute(context)
            raise BrokenPipeError("the supervisor is gone")

    with airflow.dag() as dag:
        guarded(Orphan)(task_id="pay", guard=Guard(on_doubt="ask"), python_callable=lambda: charge(amount=500)["id"])
    first, second = airflow.run(dag), airflow.run(dag)
    assert (set(first.states.values()), set(second.states.values())) == ({"success"}, {"success"})
    assert first.xcoms == second.xcoms
    assert airflow.vendor.charges() == 1


def test_p09_an_exception_given_back_is_an_error_and_never_done(airflow, charge):
    with airflow.dag() as dag:

        @guarded_task(on_doubt="ask", **AGAIN)
        def pay() -> Any:
            charge()
            return ValueError("the client gives its errors back")

        pay()
    run = airflow.run(dag)
    assert (run.state, run.tries) == ("failed", {"pay": 1})
    assert airflow.record().state is State.IN_DOUBT


def test_p03_not_applied_is_the_authors_word_and_the_next_try_runs_it(airflow, charge):
    first = iter([True])
    with airflow.dag() as dag:

        @guarded_task(on_doubt="ask", **AGAIN)
        def pay() -> Any:
            if next(first, False):
                raise NotApplied("the file was not there yet")
            return charge()["id"]

        pay()
    run = airflow.run(dag)
    assert (run.state, run.tries) == ("success", {"pay": 2})
    assert airflow.vendor.charges() == 1


@pytest.mark.parametrize("option", ["key", "payload"])
def test_a_name_or_an_order_that_changes_between_two_renderings_is_refused(airflow, charge, option):
    numbers = itertools.count()
    changing = {"key": lambda args: f"n/{next(numbers)}", "payload": lambda args: {"n": next(numbers)}}[option]
    with airflow.dag() as dag:

        @guarded_task(on_doubt="ask", **{option: changing}, **AGAIN)
        def pay() -> Any:
            return charge()

        pay()
    run = airflow.run(dag)
    assert (run.state, run.tries) == ("failed", {"pay": 1})
    assert "came out differently" in run.log
    assert (airflow.vendor.charges(), airflow.records()) == (0, [])


def test_p03_a_call_that_is_given_an_answer_and_no_function_is_in_doubt_and_says_why(airflow, charge):
    """What Python works out before guard.call begins is sent outside of it; a retry would send it again."""
    with airflow.dag() as dag:

        @guarded_task(**AGAIN)
        def pay(guard) -> Any:
            return guard.call("charge", charge("a"))

        pay()
    runs = [airflow.run(dag), airflow.run(dag)]
    assert [run.state for run in runs] == ["failed", "failed"]
    assert airflow.vendor.charges() == 1
    assert airflow.record().state is State.IN_DOUBT
    assert "was given a dict and not a function" in runs[0].log
    assert "--deployment='test~test'" in runs[0].log  # where the commands of its log mean this record


def test_p09_an_explicit_body_that_made_no_call_is_not_done(airflow):
    with airflow.dag() as dag:

        @guarded_task(**AGAIN)
        def pay(guard, invoices: list[int]) -> None:
            for invoice in invoices:
                guard.call(f"charge {invoice}", int, invoice)

        pay([])
    run = airflow.run(dag)
    assert (run.state, run.tries) == ("failed", {"pay": 1})
    assert "made no guard.call" in run.log
    assert "look at the vendor before you clear the task" in run.log
    record = airflow.record()
    assert (record.state, record.failure_class, record.effect) == (
        State.FAILED,
        FailureClass.PLANNING,
        Effect.NOT_APPLIED,
    )


def test_an_explicit_body_may_make_no_call_where_it_says_so(airflow):
    with airflow.dag() as dag:

        @guarded_task(allow_no_call=True)
        def pay(guard) -> str:
            return "nothing was due"

        pay()
    assert airflow.run(dag).result("pay") == airflow.run(dag).result("pay") == "nothing was due"
