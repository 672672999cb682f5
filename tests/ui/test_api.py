"""The API on a real ledger: what it shows, what it refuses, and what it never lets out."""

from __future__ import annotations

import csv
import io
import json
from decimal import Decimal
from typing import Any

import psycopg
import pytest

from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import State
from airflow_runguard.explain import standing
from tests.core import books, engine
from tests.core.books import Held, said
from tests.ui.conftest import Api, order, put

SQL = psycopg.connection.Connection[Any]
HOSTILE = "<img src=x onerror=alert(1)>'\"&{{ 7*7 }}\u202e\x1b[31m"


def body(held: Held, **more: Any) -> dict[str, Any]:
    return {"fence": held.claim.fence, "generation": held.claim.generation, "reason": "looked it up", **more}


# -- what is shown -----------------------------------------------------------------------------------------------------


def test_the_overview_counts_paused_as_paused_doubt_by_itself_and_says_what_is_at_stake(
    api: Api, ledger: Ledger
) -> None:
    for number, state in enumerate((State.PAUSED, State.PAUSED, State.FAILED, State.IN_DOUBT, State.DONE, State.DONE)):
        put(ledger, f"invoice/{number}", state, amount=Decimal("12.50"), currency="EUR")
    books.enter(ledger, order("invoice/running"), engine.holder(dag_id="bill"))
    for number in (4, 4, 5):
        ledger.count_replay(order(f"invoice/{number}").identity)
    seen = api.as_("vic").see("overview")
    assert seen["prevented"] == {"replay": {"n": 2, "more": False}, "doubt": {"n": 1, "more": False}}
    lists = {kind: api.as_("vic").keys(prevented=kind) for kind in seen["prevented"]}
    assert lists == {"replay": ["invoice/5", "invoice/4"], "doubt": ["invoice/3"]}
    listed = api.as_("vic").see("records", prevented="replay", sort="oldest")["records"]
    replays = [api.as_("vic").see(f"records/{record['id']}")["replays"] for record in listed]
    assert [each["times"] for each in replays] == [2, 1]
    counted = {(c["state"], c["failure_class"]): (c["n"], c.get("currency"), c.get("amount")) for c in seen["counts"]}
    assert counted == {
        ("paused", "quota"): (2, "EUR", "25.00"),
        ("failed", "processing"): (1, "EUR", "12.50"),
        ("in_doubt", "timeout"): (1, "EUR", "12.50"),
        ("done", ""): (2, "EUR", "25.00"),
    }
    assert seen["running"] == {"n": 1, "more": False}
    assert [r["key"] for r in seen["needs_person"]] == ["invoice/3"]
    assert [r["key"] for r in seen["running_now"]] == ["invoice/running"]
    (last,) = [slot for slot in api.as_("vic").see("pulse")["slots"] if len(slot) > 1]
    assert {name: n for name, n in last.items() if name != "at"} == {"paused": 2, "failed": 1, "in_doubt": 1, "done": 2}


def test_a_record_stands_where_the_command_line_says_it_stands(api: Api, ledger: Ledger) -> None:
    held = put(ledger, "invoice/1", State.IN_DOUBT)
    shown = api.as_("vic").see(f"records/{held.id}")
    record = ledger.get(held.order.identity)
    assert record is not None
    stands = standing(record, ledger.calls(held.id), ledger.check()["now"])
    assert (shown["record"]["who"], shown["record"]["commands"]) == (stands.who, dict(stands.commands))
    assert shown["record"]["why"].startswith("Nobody knows whether it happened")
    assert shown["may_change"] is False
    assert [e["kind"] for e in shown["events"]] == ["in_doubt", "claimed"]
    assert all(e["sentence"] for e in shown["events"])


def test_results_orders_and_arguments_are_shown_only_where_the_settings_say_so_and_masked(
    api: Api, ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = engine.order("invoice/1", {"customer": "cust-7", "email": "a@example.org"}, calls="explicit")
    held = books.enter(ledger, what, engine.holder(dag_id="bill"))
    held.write(intents=[("charge", json.dumps({"to": "cust-7", "iban": "DE00"}))])
    held.outcome("charge")
    data = b'{"v": 1, "value": {"id": "ch_1", "email": "a@example.org"}}'
    held.settle(State.DONE, data=data)
    ann = api.as_("ann")
    hidden = ann.get(f"records/{held.id}").text + ann.get(f"records/{held.id}/calls").text + ann.get("records").text
    assert not [word for word in ("cust-7", "DE00", "ch_1", "a@example.org") if word in hidden]
    monkeypatch.setenv("AIRFLOW__RUNGUARD__SHOW_RESULTS", "true")
    monkeypatch.setenv("AIRFLOW__RUNGUARD__MASK_FIELDS", "email, iban")
    shown = ann.see(f"records/{held.id}")["record"]
    assert shown["payload"] == {"customer": "cust-7", "email": "***"}
    assert ann.see(f"records/{held.id}/calls")["calls"][0]["intent"] == {"to": "cust-7", "iban": "***"}
    assert "a@example.org" not in json.dumps(shown)
    assert "ch_1" in json.dumps(shown["result"])


def test_hostile_names_and_errors_come_as_json_text_and_never_as_markup(api: Api, ledger: Ledger) -> None:
    hostile = HOSTILE.replace("\x1b[31m", "").replace("\u202e", "")
    held = put(ledger, f"invoice/{hostile}", State.IN_DOUBT)
    ann = api.as_("ann")
    asked = (("records", {}), ("overview", {}), (f"records/{held.id}", {}), ("records/export", {"format": "json"}))
    for path, query in asked:
        answer = ann.get(path, **query)
        assert answer.headers["content-type"].startswith("application/json")
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert ann.see("records", key_prefix=f"invoice/{hostile[:10]}")["records"][0]["key"] == f"invoice/{hostile}"


# -- lists -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sort", ["newest", "oldest", "name"])
def test_pages_by_key_miss_nothing_and_repeat_nothing_while_others_write(api: Api, ledger: Ledger, sort: str) -> None:
    before = [f"invoice/{n:03}" for n in range(120)]
    for key in before:
        put(ledger, key)
    ann, found, after = api.as_("ann"), [], None
    number = 0
    while True:
        page = ann.see("records", sort=sort, limit=13, **({"after": after} if after else {}))
        found += [record["key"] for record in page["records"]]
        after = page["next"]
        if after is None:
            break
        put(ledger, f"between/{number}")
        put(ledger, f"invoice/{number:03}-between")
        number += 1
    assert len(found) == len(set(found))
    assert set(before) <= set(found)
    old = [key for key in found if key in set(before)]
    assert old == (before[::-1] if sort == "newest" else before)


@pytest.mark.parametrize(
    ("query", "keys"),
    [
        ({"state": ["paused", "in_doubt"]}, ["ship/4", "bill/3", "bill/2"]),
        ({"state": "done"}, ["bill/1"]),
        ({"failure_class": "quota"}, ["bill/2"]),
        ({"dag_id": "ship"}, ["ship/4"]),
        ({"needs_person": True}, ["ship/4", "bill/3"]),
        ({"key_prefix": "bill/"}, ["bill/1", "bill/2", "bill/3"]),
        ({"key_prefix": "bill/", "sort": "newest"}, ["bill/3", "bill/2", "bill/1"]),
        ({"namespace": "billing", "sort": "oldest"}, ["bill/1", "bill/2", "bill/3", "ship/4"]),
        ({"partition": "2026-10-01"}, ["bill/1"]),
        ({"gate": "stripe"}, ["bill/2", "bill/1"]),
        ({"gate": "stripe", "waiting": True}, ["bill/2"]),
        ({"currency": "EUR"}, ["bill/1"]),
        ({"run_id": "r1", "task_id": "charge", "map_index": -1, "dag_id": "ship"}, ["ship/4"]),
        ({"holder": "testhost"}, ["ship/4", "bill/3", "bill/2", "bill/1"]),
        ({"holder": "nobody"}, []),
        ({"since": "2020-01-01T00:00:00Z", "until": "2020-01-02T00:00:00Z"}, []),
        ({"since": "2020-01-01T00:00:00Z", "until": "2100-01-01T00:00:00Z", "dag_id": "ship"}, ["ship/4"]),
    ],
    ids=str,
)
def test_every_filter_leads_to_its_records(api: Api, ledger: Ledger, query: dict[str, Any], keys: list[str]) -> None:
    put(ledger, "bill/1", State.DONE, partition="2026-10-01", amount=Decimal(5), currency="EUR", gate="stripe")
    put(ledger, "bill/2", State.PAUSED, gate="stripe")
    put(ledger, "bill/3", State.IN_DOUBT)
    put(ledger, "ship/4", State.IN_DOUBT, dag_id="ship")
    assert api.as_("ann").keys(**query) == keys


@pytest.mark.parametrize(
    "query",
    [
        {"after": "nonsense"},
        {"after": "nonsense", "sort": "name"},
        {"after": "1." + 32 * "0", "sort": "name"},
        {"state": "unheard of"},
        {"limit": 0},
        {"limit": 10_000},
        {"since": "yesterday"},
        {"since": "2026-10-01T00:00:00"},
        {"namespace": "a\x00b"},
        {"colour": "red"},
    ],
    ids=str,
)
def test_a_question_that_cannot_be_meant_is_refused_in_words(api: Api, query: dict[str, Any]) -> None:
    answer = api.as_("ann").get("records", **query)
    assert answer.status_code == 422, answer.text
    assert answer.json()["detail"]
    assert answer.json()["remedy"]


def test_an_export_is_streamed_whole_and_is_no_formula_to_a_spreadsheet(api: Api, ledger: Ledger, sql: SQL) -> None:
    for number in range(30):
        put(ledger, f"=cmd/{number}", State.IN_DOUBT if number % 3 == 0 else State.DONE)
    copied = """
        insert into runguard.record (deployment, namespace, key, state, fence, effect, completeness, finished_at, calls,
            on_doubt, payload_version, payload_digest, payload_fields, payload_readable, store_result, digest, dag_id)
        select 'test', 'many', 'k' || n, 'done', 1, 'applied', 'full', clock_timestamp(), 'body', 'ask', 1, '', '{}',
               '{}', 'none', '', 'bill' from generate_series(1, 3000) n"""
    with sql.transaction():
        sql.execute("select runguard.open_for_writing()")
        sql.execute(copied)
    ann = api.as_("ann")
    rows = list(csv.DictReader(io.StringIO(ann.get("records/export", format="csv").text)))
    assert len(rows) == 3030
    assert {row["key"][:5] for row in rows if "cmd" in row["key"]} == {"'=cmd"}
    answer = ann.get("records/export", format="json", state="in_doubt")
    assert [r["key"] for r in answer.json()] == [f"=cmd/{n}" for n in range(27, -1, -3)]
    assert 'filename="ledger-' in answer.headers["content-disposition"]
    with ann.client.stream("GET", "/api/records/export?format=csv", headers=ann.headers) as stream:
        assert "content-length" not in stream.headers
        assert sum(1 for _ in stream.iter_raw()) > 10


def test_calls_come_by_name_with_the_key_that_each_was_sent_under(api: Api, ledger: Ledger) -> None:
    held = books.enter(ledger, order("batch/1", calls="explicit"), engine.holder(dag_id="bill"))
    names = [f"item-{number:03}" for number in range(150)]
    held.write(intents=[(name, "{}") for name in names])
    held.write(outcomes=[said(name) for name in names[:100]])
    ann, found, after = api.as_("ann"), [], ""
    while after is not None:
        page = ann.see(f"records/{held.id}/calls", limit=40, after=after)
        found += page["calls"]
        after = page["next"]
    assert [call["name"] for call in found] == names
    assert len({call["vendor_key"] for call in found}) == 150
    open_ones = ann.see(f"records/{held.id}/calls", state="started")
    assert [call["name"] for call in open_ones["calls"]] == names[100:]


# -- changes -----------------------------------------------------------------------------------------------------------


def test_p13_a_resolution_is_in_the_timeline_and_in_airflows_audit_log(api: Api, ledger: Ledger) -> None:
    from airflow.models.log import Log
    from airflow.utils.session import create_session

    held = put(ledger, "invoice/audited", State.IN_DOUBT)
    given = body(held, answer="happened", result={"id": "ch_7"}, reference="ch_7", reason="seen in the dashboard")
    answer = api.as_("uma").post(f"records/{held.id}/resolve", given)
    assert answer.status_code == 200, answer.text
    assert "in_doubt → done" in answer.json()["said"]
    shown = api.as_("vic").see(f"records/{held.id}")
    assert shown["record"]["state"] == "done"
    assert shown["events"][0]["actor"] == "person:uma"
    assert "seen in the dashboard" in shown["events"][0]["sentence"]
    record = ledger.get(held.order.identity)
    assert record is not None
    assert record.result is not None
    assert json.loads(record.result.data or b"")  # what a task would have stored
    with create_session() as session:
        (line,) = session.query(Log).filter(Log.event == "runguard_resolve", Log.owner == "uma").all()
        assert (line.dag_id, line.task_id, line.run_id) == ("bill", "charge", "r1")
        assert json.loads(line.extra)["key"] == "invoice/audited"
        assert "ch_7" not in json.dumps(json.loads(line.extra).get("result", ""))


def test_p03_what_a_stale_holder_reports_while_somebody_looks_it_up_is_not_denied(api: Api, ledger: Ledger) -> None:
    """The page shows a doubt; before its reader answers, an earlier holder says that it was applied. Denied, it would
    be sent again, and the fence is the same."""
    first = put(ledger, "invoice/late", State.IN_DOUBT)
    ledger.resolve(first.id, "did_not_happen", actor="x", reason="not in the list", force=True)
    second = books.enter(ledger, first.order, engine.holder(dag_id="bill"))
    second.settle(State.IN_DOUBT, books.UNKNOWN)
    ann = api.as_("ann")
    shown = ann.see(f"records/{first.id}")["record"]
    denied = body(second, answer="did_not_happen", force=True, as_of=shown["as_of"])
    assert ann.post(f"records/{first.id}/resolve", {**denied, "as_of": None}).status_code == 422
    first.write(outcomes=[books.said("body")])
    refused = ann.post(f"records/{first.id}/resolve", denied)
    assert refused.status_code == 409, refused.text
    assert "changed after you looked at it" in refused.json()["detail"]
    told = ann.see(f"records/{first.id}")
    assert "a stale holder reports that it was applied" in told["record"]["error"]
    assert told["record"]["fence"] == shown["fence"]
    answer = ann.post(f"records/{first.id}/resolve", {**denied, "as_of": told["record"]["as_of"]})
    assert answer.status_code == 200, "who knows of it may still deny it"


@pytest.mark.parametrize(
    ("state", "action", "more"),
    [
        (State.IN_DOUBT, "resolve", {"answer": "happened"}),
        (State.PAUSED, "resume", {}),
        (State.DONE, "reopen", {"again_although_applied": True}),
    ],
    ids=["resolve", "resume", "reopen"],
)
def test_what_moved_after_it_was_looked_at_is_refused_and_untouched(
    api: Api, ledger: Ledger, sql: SQL, state: State, action: str, more: dict[str, Any]
) -> None:
    held = put(ledger, "invoice/1", state)
    seen = body(held, **more)
    if state is State.DONE:
        ledger.reopen(held.id, seen_generation=1, actor="x", reason="x", again_although_applied=True)
    else:
        if state is State.PAUSED:
            books.come_due(sql, held.id)
        else:
            ledger.resolve(held.id, "did_not_happen", actor="x", reason="x", force=True)
        books.enter(ledger, held.order, engine.holder(dag_id="bill")).settle(
            state, books.UNKNOWN if state is State.IN_DOUBT else books.QUOTA
        )
    before = books.line(sql, held.id)[0]
    answer = api.as_("ann").post(f"records/{held.id}/{action}", seen)
    assert answer.status_code == 409, answer.text
    assert "Nothing was changed" in answer.json()["detail"]
    assert answer.json()["remedy"]
    assert books.line(sql, held.id)[0] == before


def test_a_running_record_is_released_by_the_fence_that_was_seen(api: Api, ledger: Ledger) -> None:
    held = books.enter(ledger, order("invoice/1"), engine.holder(dag_id="bill"))
    ann = api.as_("ann")
    assert ann.post(f"records/{held.id}/release", body(held, fence=7)).status_code == 409
    answer = ann.post(f"records/{held.id}/release", body(held))
    assert answer.status_code == 200
    assert "running → in_doubt" in answer.json()["said"]  # its body was open


def test_a_broken_line_is_repaired_as_it_was_looked_at(api: Api, ledger: Ledger, sql: SQL) -> None:
    held = put(ledger, "invoice/1", State.DONE)
    sql.execute("update runguard.record set payload_digest = 'other' where id = %s", [held.id])
    ann = api.as_("ann")
    shown = ann.see(f"records/{held.id}")["record"]
    assert shown["state"] == "broken"
    repair = {"reason": "asked the vendor", "state": "in_doubt", "seen": shown["seen"]}
    sql.execute("update runguard.record set payload_digest = 'yet another' where id = %s", [held.id])
    assert ann.post(f"records/{held.id}/repair", repair).status_code == 409
    repair["seen"] = ann.see(f"records/{held.id}")["record"]["seen"]
    assert ann.post(f"records/{held.id}/repair", repair).status_code == 200
    assert ann.see(f"records/{held.id}")["record"]["state"] == "in_doubt"


@pytest.mark.parametrize(
    "wrong",
    [
        {"reason": ""},
        {"reason": "   "},
        {"reason": "a\x00b"},
        {"reason": "\ud800"},
        {"answer": "perhaps"},
        {"fence": -1},
        {"more": 1},
        {"answer": "failed", "result": 1},
        {"result": float("nan")},
    ],
    ids=str,
)
def test_a_change_that_cannot_be_meant_is_refused_without_repeating_it(
    api: Api, ledger: Ledger, sql: SQL, wrong: dict[str, Any]
) -> None:
    held = put(ledger, "invoice/1", State.IN_DOUBT)
    before = books.line(sql, held.id)[0]
    ann = api.as_("ann")
    text = json.dumps(body(held, **{"answer": "happened", **wrong}))
    answer = ann.client.post(
        f"/api/records/{held.id}/resolve", content=text, headers={**ann.headers, "Content-Type": "application/json"}
    )
    assert answer.status_code == 422, answer.text
    assert answer.json()["detail"]
    assert books.line(sql, held.id)[0] == before


def test_a_body_that_is_too_large_is_refused_whatever_its_length_says(api: Api, ledger: Ledger) -> None:
    held = put(ledger, "invoice/1", State.IN_DOUBT)
    ann = api.as_("ann")
    large = json.dumps(body(held, answer="happened", result="x" * 300_000)).encode()
    path, headers = f"/api/records/{held.id}/resolve", {**ann.headers, "Content-Type": "application/json"}
    assert ann.client.post(path, content=large, headers=headers).status_code == 413
    chunks = (large[at : at + 10_000] for at in range(0, len(large), 10_000))
    assert ann.client.post(path, content=chunks, headers=headers).status_code == 413


def test_gates_close_open_and_are_paced_with_a_reason_that_stays(api: Api, ledger: Ledger) -> None:
    put(ledger, "invoice/1", State.PAUSED, gate="stripe")
    ann = api.as_("ann")
    reason = {"reason": "the vendor said so", "gate": "stripe"}
    assert ann.post("gates/close", {**reason, "until": "2020-01-01T00:00:00Z"}).status_code == 409
    assert ann.post("gates/close", {**reason, "until": "2999-01-01T00:00:00Z"}).status_code == 422
    assert ann.post("gates/close", {**reason, "until": "2030-01-01T00:00:00Z"}).status_code == 200
    (gate,) = ann.see("gates")["gates"]
    assert (gate["closed"], gate["closed_until"], gate["waiting"]) == (True, "2030-01-01T00:00:00Z", 1)
    assert ann.post("gates/rate", {**reason, "rate": 0.5}).status_code == 200
    assert ann.post("gates/open", {**reason, "epoch": gate["epoch"]}).status_code == 200
    assert ann.post("gates/open", {**reason, "epoch": gate["epoch"]}).status_code == 409
    assert ann.post("gates/open", {"reason": "?", "gate": "unheard of"}).status_code == 409
    seen = ann.see("gates")
    assert (seen["gates"][0]["closed"], seen["gates"][0]["rate"]) == (False, 0.5)
    kinds = ["gate_opened", "gate_rate", "gate_closed"]
    mine = [one for one in seen["history"] if one["actor"] == "person:ann"]
    assert [(one["kind"], one["gate"], one["reason"]) for one in mine] == [
        (kind, "stripe", "the vendor said so") for kind in kinds
    ]


def test_a_freeze_stops_new_calls_until_it_is_thawed(api: Api, ledger: Ledger) -> None:
    ann = api.as_("ann")
    everything = {"reason": "the vendor is down", "scope": "all"}
    assert ann.post("freezes", everything).status_code == 200
    assert ann.post("freezes", everything).status_code == 409
    assert ann.post("freezes", {**everything, "value": "x"}).status_code == 422
    assert ledger.claim(order("invoice/1"), engine.holder()).verdict == "frozen"
    assert [one["reason"] for one in ann.see("overview")["freezes"]] == ["the vendor is down"]
    assert ann.post("freezes/thaw", {**everything, "reason": "up again"}).status_code == 200
    assert ann.post("freezes/thaw", everything).status_code == 409
    assert ledger.claim(order("invoice/1"), engine.holder()).verdict == "run"
    (past,) = ann.see("gates")["freezes"]
    assert (past["thawed_by"], past["thaw_reason"]) == ("person:ann", "up again")


# -- trouble -----------------------------------------------------------------------------------------------------------


def test_a_ledger_out_of_reach_is_said_with_what_to_do_and_health_still_answers(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_RUNGUARD_LEDGER", "postgresql://nobody:s3cr3t-word@127.0.0.1:1/nowhere")
    ann = api.as_("ann")
    answer = ann.get("overview")
    assert answer.status_code == 503
    assert "out of reach" in answer.json()["detail"]
    assert "doctor" in answer.json()["remedy"]
    health = ann.see("health")
    assert health["ledger"] is None
    assert {check["name"]: check["status"] for check in health["checks"]}["ledger"] == "fail"
    assert "s3cr3t-word" not in json.dumps(health) + answer.text


def test_health_says_what_a_report_needs(api: Api, ledger: Ledger) -> None:
    seen = api.as_("vic").see("health")
    assert seen["ledger"]["deployment"] == "test"
    assert seen["ledger"]["epoch"] == ledger.epoch
    assert seen["settings"]["busy_wait_limit"]
    assert {"python", "apache-airflow", "airflow-runguard", "psycopg"} <= set(seen["versions"])
    assert {"ledger", "schema", "clock", "redis"} <= {check["name"] for check in seen["checks"]}


def test_the_description_of_the_api_needs_a_user_and_names_every_route(api: Api) -> None:
    assert api.nobody().get("openapi.json").status_code == 401
    described = api.as_("vic").see("openapi.json")
    assert len(described["paths"]) > 15
    for methods in described["paths"].values():
        for one in methods.values():
            assert one["summary"]
