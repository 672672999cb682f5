"""A batch through the engine: each item once, whatever is run again, and each with a state and a reason."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
import requests

from airflow_runguard.core import calling, conduct, items
from airflow_runguard.core.batch import Pause
from airflow_runguard.core.errors import NotApplied
from airflow_runguard.core.failures.book import installed
from airflow_runguard.core.items import Changed, Items, Selection
from airflow_runguard.core.record import Completeness, State
from airflow_runguard.core.work import Applied, Done, Ended, InDoubt, StillUnknown, Waiting
from demo import vendor_errors as v
from tests.core import batches, books
from tests.core.batches import Counting, invoices


def answered(status: int, **headers: str) -> Exception:
    response = requests.models.Response()
    response.status_code = status
    response.headers.update(headers)
    return requests.HTTPError(f"{status}", response=response)


def of_list(ledger, monkeypatch, pay):
    """The results of a list of old and new items, some of them named by two of its chunks; read in many small pages."""
    monkeypatch.setattr(conduct, "CHUNK", 3)
    monkeypatch.setattr(items, "NAMES", 4)
    monkeypatch.setattr(items, "PAGE", 3)
    named = [*range(5, 15), *range(7, 12), *range(100, 105)]
    assert isinstance(batches.run(ledger, invoices(*named), pay), Done)
    line = batches.record(ledger)
    found = items.Items(ledger).done_of_list(line.id, line.generation, line.fence)
    assert (found.done, found.named, found.kept) == (25, 15, True)
    results = items.Items(ledger).results(line.id, line.generation, "all", line.fence)
    assert [key for key, _ in results] == sorted(map(str, set(named)))


def test_p02_a_batch_has_each_effect_once_and_a_rerun_replays_them(ledger, monkeypatch):
    pay = Counting()
    first = batches.run(ledger, invoices(*range(20)), pay, concurrency=4)
    assert isinstance(first, Done)
    assert (first.value["items"], first.value["done"], first.value["replayed"]) == (20, 20, 0)
    second = batches.run(ledger, invoices(*range(20)), pay)
    assert isinstance(second, Done)
    assert (second.value["items"], second.value["done"], second.value["replayed"]) == (20, 20, 20)
    assert sorted(pay.calls, key=int) == [str(n) for n in range(20)]
    assert batches.record(ledger).state is State.DONE
    assert batches.record(ledger).completeness is Completeness.FULL
    assert len(set(pay.keys.values())) == 20
    of_list(ledger, monkeypatch, pay)


def test_p04_no_outcome_waits_for_the_classifiers_rules_to_be_read(ledger):
    """It takes a tenth of a second, in which a kill would leave a call in doubt that is known to be done."""
    installed.cache_clear()
    read = []
    batches.run(ledger, invoices("a"), lambda context, item: read.append(installed.cache_info().currsize) or "paid")
    assert read == [1]


def test_r41_items_are_named_by_content_not_by_place(ledger):
    pay = Counting()
    batches.run(ledger, invoices("a", "b", "c"), pay)
    batches.run(ledger, invoices("c", "b", "a"), pay)
    how = batches.run(ledger, invoices("z", "a", "b", "c"), pay)
    assert isinstance(how, Done)
    assert pay.calls == ["a", "b", "c", "z"]
    assert isinstance(batches.run(ledger, invoices("a"), pay), Done)
    assert pay.calls == ["a", "b", "c", "z"]
    assert batches.states(ledger) == dict.fromkeys("abcz", "done")


def test_p11_equal_keys_with_equal_payload_are_one_item_and_with_another_a_planning_failure(ledger):
    pay = Counting()
    how = batches.run(ledger, [*invoices("a", "b"), {"id": "a", "cents": 501}], pay)
    assert isinstance(how, Ended)
    assert not how.retry
    assert "a" in how.message
    assert pay.calls == []
    assert batches.record(ledger).state is State.FAILED
    twice = [*invoices(*range(1_100)), *invoices(*range(1_100))]
    how = batches.run(ledger, twice, pay, what=batches.order("twice"))
    assert isinstance(how, Done)
    assert how.value["items"] == len(pay.calls) == 1_100
    far_apart = [*invoices(*range(1_100)), {"id": "0", "cents": 501}]
    how = batches.run(ledger, far_apart, pay, what=batches.order("far apart"))
    assert isinstance(how, Ended)
    assert len(pay.calls) == 1_100


def test_p02_a_text_that_reads_like_a_vendors_error_is_data_and_is_paid_for_once(ledger):
    said = '{"error": {"code": "rate_limit_exceeded", "message": "slow down"}}'
    pay = Counting(a=said)
    how = batches.run(ledger, invoices("a", "b"), pay)
    assert isinstance(how, Done)
    assert batches.states(ledger) == {"a": "done", "b": "done"}
    assert pay.calls == ["a", "b"]


@pytest.mark.parametrize("bulk", [None, 2])
def test_p01_an_item_that_the_list_names_twice_is_called_once_also_while_it_is_under_way(ledger, monkeypatch, bulk):
    monkeypatch.setattr(conduct, "CHUNK", 2)
    called, others_went_on = [], threading.Event()

    def pay(context, given):
        names = list(given) if bulk else [given["id"]]
        called.extend(names)
        if "z" in names:
            others_went_on.set()
        if "b" in names:
            assert others_went_on.wait(60)
        return dict.fromkeys(names, "paid") if bulk else "paid"

    how = batches.run(
        ledger, [*invoices("a", "b"), *invoices("b", "c"), *invoices("y", "z")], pay, concurrency=3, bulk=bulk
    )
    assert isinstance(how, Done)
    assert sorted(called) == ["a", "b", "c", "y", "z"]
    assert (how.value["items"], how.value["complete"]) == (5, True)


@pytest.mark.parametrize("bulk", [None, 2])
def test_the_twin_of_an_item_without_success_is_not_called_by_the_same_run_and_the_others_go_on(
    ledger, monkeypatch, bulk
):
    monkeypatch.setattr(conduct, "CHUNK", 3)
    ends = {"a": NotApplied("closed today"), "b": StillUnknown("no answer"), "c": answered(402)}
    called: list[str] = []

    def pay(context, given):
        called.extend(given if bulk else [given["id"]])
        if bulk:
            return {key: ends.get(key, "paid") for key in given}
        if isinstance(ends.get(given["id"]), Exception):
            raise ends[given["id"]]
        return ends.get(given["id"], "paid")

    twice = [*invoices(*"abc"), *invoices(*"ade"), *invoices(*"bcf")]
    assert isinstance(batches.run(ledger, twice, pay, bulk=bulk), InDoubt)
    assert called == list("abcdef")
    assert batches.states(ledger) == {"a": "failed", "b": "in_doubt", "c": "failed", **dict.fromkeys("def", "done")}
    ends.clear()
    assert isinstance(batches.run(ledger, twice, pay, bulk=bulk), InDoubt)
    assert called == list("abcdefa")
    assert batches.states(ledger) == {"b": "in_doubt", "c": "failed", **dict.fromkeys("adef", "done")}


def test_p11_an_item_begun_with_another_payload_is_refused_and_the_others_go_on(ledger):
    pay = Counting()
    batches.run(ledger, invoices("a"), pay)
    how = batches.run(ledger, [{"id": "a", "cents": 1}, *invoices("b")], pay)
    assert isinstance(how, Ended)
    assert not how.retry
    assert pay.calls == ["a", "b"]
    assert "Begun with another payload, so they were not called: a." in how.message
    assert batches.states(ledger) == {"a": "done", "b": "done"}


def test_p11_an_item_that_two_chunks_name_is_refused_once_in_what_is_said(ledger, monkeypatch):
    monkeypatch.setattr(conduct, "CHUNK", 2)
    pay = Counting(b=answered(422))
    batches.run(ledger, invoices("a", "b"), pay)
    changed = [{"id": name, "cents": 1} for name in "abcdabaa"]
    how = batches.run(ledger, changed, pay)
    assert isinstance(how, Ended)
    assert {name: how.value[name] for name in ("items", "done", "failed", "refused")} == {
        "items": 4, "done": 3, "failed": {"validation": 1}, "refused": 2,
    }  # fmt: skip
    assert "so they were not called: a, b." in how.message
    twice = [{"id": name, "cents": cents} for name in "xyxz" for cents in (1, 2)]
    assert (
        "names 3 item(s) more than once, with different payloads: x, y, z." in batches.run(ledger, twice, pay).message
    )
    assert pay.calls == [*"abcd"]


def test_p11_a_person_accepts_another_payload_what_is_done_answers_to_it_and_the_rest_is_called_with_it(
    ledger, sql, monkeypatch
):
    pay = Counting(b=answered(422), c=NotApplied("declined"), d=requests.ReadTimeout("no answer"))
    batches.run(ledger, invoices(*"abcd"), pay)
    sent = dict(pay.keys)
    pay._does.clear()
    changed = [{"id": name, "cents": 1} for name in "abcd"]
    assert batches.run(ledger, changed, pay).value["refused"] == 4
    line = batches.record(ledger)
    who: dict[str, Any] = {"actor": "person:ann", "reason": "a field was added"}

    def accept(*names: str, state: str | None = None) -> Changed:
        chosen = Selection(state, names=names or None)
        return Items(ledger).accept_payload(line.id, chosen, seen_fence=batches.record(ledger).fence, **who)

    before = books.line(sql, line.id)[0], batches.items(ledger)
    assert accept("d") == Changed("unknown_effect", 0, 1)
    assert accept("z").verdict == "no_such_call"
    assert Items(ledger).accept_payload(line.id, Selection("done"), seen_fence=1, **who).verdict == "moved"
    assert (books.line(sql, line.id)[0], batches.items(ledger)) == before
    assert accept(*"bcd") == Changed("ok", 2, 1)
    assert accept(state="done") == Changed("ok", 1, 0)
    with monkeypatch.context() as small:
        small.setattr(conduct, "CHUNK", 1)
        how = batches.run(ledger, [{"id": "b", "cents": 1}, {"id": "b", "cents": 2}], pay)
        assert "more than once, with different payloads: b." in how.message
    assert pay.calls == [*"abcd"]
    assert accept("b").items == 1
    assert [event.kind for event in ledger.events(line.id)][-1] == "items_accepted"

    how = batches.run(ledger, changed, pay)
    assert (how.value["done"], how.value["refused"], how.value["replayed"]) == (3, 1, 1)
    assert pay.calls == [*"abcd", *"bc"]
    assert pay.keys["b"] != sent["b"]
    assert pay.keys["c"] != sent["c"]
    assert batches.run(ledger, changed, pay).value["refused"] == 1  # what was accepted is bound now, and the old is not
    assert batches.run(ledger, invoices(*"abcd"), pay).value["refused"] == 3
    assert pay.calls == [*"abcd", *"bc"]


def test_p11_what_is_paused_keeps_its_wait_when_its_new_payload_is_accepted_and_what_runs_is_left(ledger, sql):
    pay = Counting(a=answered(429, **{"Retry-After": "3600"}))
    batches.run(ledger, invoices("a"), pay)
    sent = dict(pay.keys)
    line = batches.record(ledger)
    who: dict[str, Any] = {"actor": "person:ann", "reason": "the amount was wrong"}
    assert Items(ledger).accept_payload(line.id, Selection(names=("a",)), **who).items == 1
    assert batches.states(ledger) == {"a": "paused"}
    assert isinstance(batches.run(ledger, [{"id": "a", "cents": 1}], pay), Waiting)
    books.come_due(sql, line.id)
    pay._does.clear()

    def pay_and_try_to_accept(context, item):
        said = Items(ledger).accept_payload(line.id, Selection(names=("a",)), **who)
        assert said.verdict == "unknown_effect"
        return pay(context, item)

    assert isinstance(batches.run(ledger, [{"id": "a", "cents": 1}], pay_and_try_to_accept), Done)
    assert pay.keys["a"] != sent["a"]


def test_an_empty_list_is_no_success_unless_it_is_said_to_be(ledger):
    assert isinstance(batches.run(ledger, [], Counting()), Ended)
    assert isinstance(batches.run(ledger, [], Counting(), work={"allow_no_call": True}), Done)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_r42_each_result_is_settled_on_its_own_item(ledger, sql, asynchronous):
    pay = Counting(b=answered(422), c=answered(429, **{"Retry-After": "60"}), d=requests.ReadTimeout("no answer"))

    async def pay_async(context, item):
        return pay(context, item)

    call: Any = pay_async if asynchronous else pay
    rules: dict[str, Any] = {"asynchronous": asynchronous, "concurrency": 1}
    how = batches.run(ledger, invoices("a", "b", "d", "c", "e"), call, **rules)
    assert isinstance(how, Waiting)
    assert 50 < (how.seconds or 0) <= 61
    assert batches.states(ledger) == {"a": "done", "b": "failed", "c": "paused", "d": "in_doubt", "e": "pending"}
    assert batches.record(ledger).state is State.PAUSED
    assert isinstance(batches.run(ledger, invoices(*"abcde"), call, **rules), Waiting)  # not before its time
    books.come_due(sql, batches.record(ledger).id)
    pay._does["c"] = "paid at last"
    how = batches.run(ledger, invoices(*"abcde"), call, **rules)
    assert sorted(pay.calls) == ["a", "b", "c", "c", "d", "e"]
    assert isinstance(how, Ended)
    assert batches.record(ledger).state is State.IN_DOUBT
    assert how.value["failed"] == {"validation": 1}
    assert (how.value["done"], how.value["in_doubt"]) == (3, 1)


def test_r48_a_bulk_answer_is_settled_item_by_item(ledger, sql):
    calls: list[list[str]] = []

    def index(context, items):
        calls.append(sorted(items))
        answers = {
            "a": {"status": 201},
            "b": Pause(60, "es_rejected_execution_exception"),
            "c": answered(400),
            "d": NotApplied("closed index"),
            "e": StillUnknown("shard failed"),
            "f": Applied({"status": 200}),
            "g": None,
        }
        return {key: answers[key] for key in items if key != "missing"}

    how = batches.run(ledger, invoices(*"abcdefg", "missing"), index, bulk=50)
    assert isinstance(how, Waiting)
    assert batches.states(ledger) == {
        "a": "done",
        "b": "paused",
        "c": "failed",
        "d": "failed",
        "e": "in_doubt",
        "f": "done",
        "g": "in_doubt",
        "missing": "in_doubt",
    }
    assert "missing in the answer" in batches.items(ledger)["missing"].evidence
    books.come_due(sql, batches.record(ledger).id)
    batches.run(ledger, invoices(*"abcdefg", "missing"), index, bulk=50)
    assert calls[1] == ["b", "d"]  # d: not applied and not its own fault


def test_p09_what_is_no_result_is_never_done(ledger):
    pay = Counting(a=None, b=lambda: ValueError("given back"), c=[], d={"id": 0}, e=0, f=False)
    how = batches.run(ledger, invoices(*"abcdef"), pay, accept=lambda value: value != {"id": 0})
    assert isinstance(how, Ended)
    states = batches.states(ledger)
    assert {states[key] for key in "ef"} == {"done"}
    assert all(states[key] != "done" for key in "abcd")
    refused = batches.items(ledger)["d"]
    assert (refused.state, refused.effect, refused.failure_class) == ("failed", "applied", "validation")
    how = batches.run(ledger, invoices("x"), Counting(x=None), what=batches.order("empty"), allow_empty=True)
    assert isinstance(how, Done)


def test_p09_an_error_inside_an_answer_of_success_is_its_item_s_error(ledger):
    wall = {"errors": [{"message": "slow down", "extensions": {"code": "THROTTLED"}}], "data": None}
    broken = {"errors": [{"message": "went wrong on the way"}], "data": None}
    pay = Counting(a={"data": {"charge": 1}}, b=broken, c=Applied(broken), d=wall)
    how = batches.run(ledger, invoices(*"abcde"), pay)
    assert isinstance(how, Waiting)
    assert batches.states(ledger) == {"a": "done", "b": "in_doubt", "c": "done", "d": "paused", "e": "pending"}
    assert "errors" in batches.items(ledger)["b"].error


def test_p06_the_first_money_cap_stops_the_batch_and_burns_no_other_item(ledger):
    broke = v.of_openai(429, {"error": {"type": "insufficient_quota", "code": "insufficient_quota"}})
    pay = Counting(b=broke)
    how = batches.run(ledger, invoices(*"abcd"), pay)
    assert isinstance(how, Ended)
    assert not how.retry
    assert pay.calls == ["a", "b"]
    assert batches.states(ledger) == {"a": "done", "b": "failed", "c": "pending", "d": "pending"}
    line = batches.record(ledger)
    assert (line.state, line.failure_class, line.needs_person) == (State.FAILED, "quota", True)
    pay._does.clear()
    assert isinstance(batches.run(ledger, invoices(*"abcd"), pay), Done)
    assert pay.calls == ["a", "b", "b", "c", "d"]


def test_p12_a_freeze_begins_no_other_item_and_the_batch_waits(ledger, open_ledger):
    def stop() -> str:
        assert open_ledger().freeze("all", actor="ann", reason="stop") == "ok"
        return "paid"

    pay = Counting(b=stop)
    assert isinstance(batches.run(ledger, invoices(*"abcd"), pay), Waiting)
    assert batches.states(ledger) == {"a": "done", "b": "done", "c": "pending", "d": "pending"}
    assert ledger.thaw("all", actor="ann", reason="go on") == "ok"
    assert isinstance(batches.run(ledger, invoices(*"abcd"), pay), Done)
    assert pay.calls == ["a", "b", "c", "d"]


def test_p06_a_closed_gate_begins_no_item_and_one_item_s_quota_closes_it_for_all(ledger, sql):
    what = batches.order(gate="stripe")
    pay = Counting(b=Pause(600, "too many"))
    how = batches.run(ledger, invoices(*"abc"), pay, what=what)
    assert isinstance(how, Waiting)
    assert 590 < (how.seconds or 0) < 610
    other = batches.order("others", gate="stripe")
    assert isinstance(batches.run(ledger, invoices("x"), pay, what=other), Waiting)
    assert pay.calls == ["a", "b"]


def test_p06_a_quota_awaits_what_is_under_way_and_waits_for_the_latest_of_the_waits(ledger, open_ledger):
    together, looking = threading.Barrier(3), open_ledger()

    def pay(context, item):
        together.wait(60)
        if item["id"] == "a":
            return Pause(600, "far too many")
        with lock:
            books.wait_until(lambda: batches.states(looking)["a"] == "paused", "the first wait is booked")
        return Pause(60, "too many") if item["id"] == "b" else "paid"

    lock = threading.Lock()
    how = batches.run(ledger, invoices(*"abcdef"), pay, concurrency=3)
    assert isinstance(how, Waiting)
    assert 590 < (how.seconds or 0) < 610
    assert batches.states(ledger) == {
        "a": "paused", "b": "paused", "c": "done", "d": "pending", "e": "pending", "f": "pending",
    }  # fmt: skip


def test_how_far_a_batch_is_stands_in_the_log_and_on_the_record_while_it_runs(ledger, sql, monkeypatch, caplog):
    monkeypatch.setattr(calling, "TELL_EVERY", 0.01)
    monkeypatch.setattr(conduct, "CHUNK", 2)
    caplog.set_level("INFO")

    def so_far() -> dict[str, Any]:
        row = sql.execute("select progress from runguard.record").fetchone()
        return json.loads(row[0]) if row and row[0] else {}

    def pay(context, item):
        if item["id"] == "c":
            books.wait_until(lambda: so_far().get("left") == 2, "it is told how far the batch is")
        return NotApplied("declined") if item["id"] == "b" else "paid"

    how = batches.run(ledger, invoices(*"ababcd"), pay)  # what two chunks of the list name is one item
    assert isinstance(how, Ended)
    line = "1 of 4 items done (0 of them before), 1 failed or in doubt, "
    assert any(line in told and told.endswith(" s to go.") for told in caplog.messages)
    assert {name: so_far()[name] for name in ("total", "done", "troubled", "left")} == {
        "total": 4, "done": 3, "troubled": 1, "left": 0,
    }  # fmt: skip


def test_stop_after_ends_the_batch_and_the_rest_is_not_burned(ledger, monkeypatch):
    pay = Counting(**{str(n): answered(422) for n in range(10)})
    assert isinstance(batches.run(ledger, invoices(*range(10)), pay, stop_after=3), Ended)
    assert len(pay.calls) == 3
    monkeypatch.setattr(conduct, "CHUNK", 10)
    twice = invoices(*range(10)) * 2
    how = batches.run(ledger, twice, pay, what=batches.order("share"), stop_after_share=0.45)
    assert isinstance(how, Ended)
    assert len(pay.calls) == 3 + 5


def test_a_partial_success_is_marked_and_may_be_completed(ledger):
    pay = Counting(b=answered(422))
    how = batches.run(ledger, invoices(*"abc"), pay, allow_partial=True)
    assert isinstance(how, Done)
    assert not how.value["complete"]
    line = batches.record(ledger)
    assert (line.state, line.completeness) == (State.DONE, Completeness.PARTIAL)
    pay._does.clear()
    changed = Items(ledger).reopen(
        line.id, Selection.parse("failed:validation"), seen_generation=line.generation, actor="ann", reason="corrected"
    )
    assert (changed.verdict, changed.items) == ("ok", 1)
    first_key = pay.keys["b"]
    how = batches.run(ledger, [*invoices("a", "c"), {"id": "b", "cents": 9}], pay, allow_partial=True)
    assert isinstance(how, Done)
    assert how.value["complete"]
    assert pay.keys["b"] != first_key
    assert batches.record(ledger).completeness is Completeness.FULL
    nothing = batches.run(
        ledger, invoices("x"), Counting(x=answered(422)), what=batches.order("none"), allow_partial=True
    )
    assert isinstance(nothing, Ended)  # 0 of N is no partial success
