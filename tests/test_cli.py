"""The command line through ``python -m airflow_runguard``: what each command does, says, and refuses to do."""

from __future__ import annotations

import getpass
import json
import shlex
import subprocess
import sys
import urllib.parse
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
import requests

from airflow_runguard import codec
from airflow_runguard.cli import COMMANDS, main
from airflow_runguard.core import keys
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Outcome, Result, Settlement, State, Verdict
from airflow_runguard.core.work import Done, InDoubt
from airflow_runguard.refusals import SENTENCES
from demo.servers import create_database, drop_database
from tests.core import batches, books, engine
from tests.core.batches import Counting
from tests.core.test_batch import answered

SQL = psycopg.Connection[Any]
NOBODY = "postgresql://postgres@127.0.0.1:1/nothing"


@dataclass(frozen=True)
class Said:
    code: int
    out: str
    err: str

    @property
    def data(self) -> dict[str, Any]:
        """The one JSON object on stdout."""
        value = json.loads(self.out)
        assert isinstance(value, dict)
        return value


Type = Callable[..., Said]
DENIED = ("--did-not-happen", "--as-of", "NOW")
"""By whoever has just looked: the ledger's own time stands for ``NOW``."""


@pytest.fixture
def run(ledger_url: str, capsys: pytest.CaptureFixture[str]) -> Type:
    """Types a command at the ledger of this test; nothing but the answer is printed."""

    def typed(*words: str, dsn: str = ledger_url, deployment: str = engine.DEPLOYMENT) -> Said:
        if "NOW" in words:
            with psycopg.connect(ledger_url) as connection:
                (now,) = connection.execute("select clock_timestamp()").fetchone() or ("",)
            words = tuple(str(now) if word == "NOW" else word for word in words)
        cut = words.index("--") if "--" in words else len(words)
        code = main([*words[:cut], "--dsn", dsn, "--deployment", deployment, *words[cut:]])
        return Said(code, *capsys.readouterr())

    return typed


@pytest.fixture
def ask(run: Type) -> Type:
    """The same with JSON as the answer."""

    def asked(*words: str, **where: str) -> Said:
        cut = words.index("--") if "--" in words else len(words)
        return run(*words[:cut], "--output", "json", *words[cut:], **where)

    return asked


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    with closing(engine.open_ledger(ledger_url)) as ledger:
        yield ledger


@pytest.fixture
def sql(ledger_url: str) -> Iterator[SQL]:
    with psycopg.connect(ledger_url, autocommit=True) as connection:
        yield connection


def doubt(ledger: Ledger, key: str = "inv-7", *calls: str, **rules: Any) -> books.Held:
    """In doubt, with the named calls (or the body) open."""
    held = books.enter(ledger, engine.order(key, calls="explicit" if calls else "body", **rules))
    for call in calls:
        assert held.intent(call) == "run"
    assert ledger.release(held.id, actor="test", reason="its worker is gone") == "ok"
    return held


def break_line(sql: SQL, record_id: int) -> None:
    """Somebody changes money's truth behind the ledger's back."""
    sql.execute("update runguard.record set payload_digest = 'x' where id = %s", [record_id])


# -- both forms of every answer ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", [command.name for command in COMMANDS])
def test_every_command_answers_with_one_json_object_also_when_the_ledger_is_out_of_reach(
    ask: Type, command: str
) -> None:
    arguments = {
        "rename": ["a", "b"],
        "resolve": ["a", "--happened"],
        "db acknowledge-restore": ["--nothing-lost"],
        "bypass": ["a", "--namespace", "n"],
        "classify": ["--status", "429"],
        "freeze": ["--all"],
        "thaw": ["--all"],
        "quota close": ["g", "--for", "30m"],
        "quota rate": ["g", "--default"],
        "preview": ["--dag-id", "d"],
        "baseline": ["--dag-id", "d", "--before", "2026-10-01T00:00:00Z"],
    }
    keyed = {
        "show",
        "items",
        "explain",
        "reopen",
        "release",
        "repair",
        "accept-payload",
        "resume",
        "quota show",
        "quota open",
    }
    words = [*command.split(), *arguments.get(command, ["a"] if command in keyed else [])]
    words += ["--reason", "r"] if next(c.changes for c in COMMANDS if c.name == command) else []
    said = ask(*words, dsn=NOBODY)
    assert said.err == ""
    if command == "doctor":
        assert (said.code, said.data["failed"]) == (1, ["ledger"])
    elif command == "classify":  # it asks no ledger
        assert (said.code, said.data["failure_class"]) == (0, "quota")
    elif command in ("preview", "baseline", "candidates", "reconcile"):  # they read Airflow's DAGs
        assert said.code == 2
        assert f"`airflow runguard {command}" in said.data["remedy"]
    else:
        assert said.code == 3
        assert set(said.data) == {"error", "remedy"}


# -- batches -----------------------------------------------------------------------------------------------------------


def test_a_person_settles_and_reopens_selections_of_a_batchs_items(run: Type, ask: Type, ledger: Ledger) -> None:
    pay = Counting(b=answered(422), c=requests.ReadTimeout("no answer"), d=requests.ReadTimeout("no answer"))
    assert isinstance(batches.run(ledger, batches.invoices(*"abcd"), pay), InDoubt)
    shown = run("items", "invoices")
    assert (shown.code, shown.err) == (0, "")
    assert "1 done, 1 failed:validation, 2 in_doubt" in shown.out.replace(":unknown", "").replace(":timeout", "")
    assert [item["name"] for item in ask("items", "invoices", "--state", "failed:validation").data["items"]] == ["b"]
    first = ask("items", "invoices", "--limit", "3")
    assert (len(first.data["items"]), first.data["next"]) == (3, "c")
    assert [i["name"] for i in ask("items", "invoices", "--limit", "3", "--after-item", "c").data["items"]] == ["d"]
    assert "--items=in_doubt" in run("explain", "invoices").out

    said = ask("resolve", "invoices", "--items", "in_doubt", *DENIED, "--reason", "none")
    assert (said.code, said.data["error"][:12]) == (1, "It is too ea")
    said = run("resolve", "invoices", "--items", "key=c", "--happened", "--result", '"ch_1"', "--reason", "found")
    assert (said.code, said.out[:16]) == (0, "1 item(s) settle"), said
    said = run("resolve", "invoices", "--items", "in_doubt", *DENIED, "--force", "--reason", "none")
    assert said.code == 0
    assert batches.record(ledger).state is State.PENDING
    said = run("reopen", "invoices", "--items", "done", "--reason", "again")
    assert said.code == 1
    assert "--again-although-applied" in said.err
    assert run("reopen", "invoices", "--items", "failed:validation", "--reason", "corrected").code == 0
    assert run("reopen", "invoices", "--items", "failed:validation", "--reason", "corrected").code == 1
    assert run("reopen", "invoices", "--items", "wrong", "--reason", "x").code == 2
    history = run("explain", "invoices").out
    assert "said of 1 item(s) (c): they happened" in history
    assert "ordered 1 item(s) anew (b)" in history

    pay._does.clear()
    assert isinstance(batches.run(ledger, batches.invoices(*"abcd"), pay), Done)
    assert pay.calls == ["a", "b", "c", "d", "b", "d"]
    assert "Every item of its list happened" in run("explain", "invoices").out


def test_a_batch_that_is_done_in_part_says_so_and_one_that_is_done_in_full_says_that(run: Type, ledger: Ledger) -> None:
    pay = Counting(b=answered(422))
    batches.run(ledger, batches.invoices(*"ab"), pay, what=batches.order("part"), allow_partial=True)
    batches.run(ledger, batches.invoices("a"), pay, what=batches.order("full"), allow_partial=True)
    said = run("explain", "part").out
    assert "Not every item happened, which its author allows" in said
    assert "1 of 2 items are done (0 of them before), 1 failed (validation 1)" in said
    assert "Every item of its list happened" in run("explain", "full").out
    assert "partial" in run("show", "part").out
    assert "partial" not in run("show", "full").out


def test_p11_a_person_accepts_another_payload_of_items_only_where_the_old_ones_effect_is_known(
    run: Type, ask: Type, ledger: Ledger
) -> None:
    changed = [{"id": name, "cents": 1} for name in "abc"]
    assert isinstance(batches.run(ledger, batches.invoices(*"abc"), Counting(c=TimeoutError("no answer"))), InDoubt)
    how = batches.run(ledger, changed, Counting())
    assert isinstance(how, InDoubt)
    assert "accept-payload 'billing/invoices' --items key=ITEM" in how.message
    said = ask("accept-payload", "invoices", "--items", "key=c", "--reason", "new price")
    assert said.code == 1
    assert "Nobody knows yet whether the old payload of these items" in said.data["error"]
    assert "resolve billing/invoices --items=in_doubt" in said.data["remedy"]
    said = ask("accept-payload", "invoices", "--items", "key=a", "--reason", "new price")
    assert (said.code, said.data["items"], said.data["left"]) == (0, 1, 0)
    assert "lets the next list bring another payload for 1 item(s) (a): new price" in run("explain", "invoices").out
    paid = Counting()
    assert batches.run(ledger, changed, paid).value["refused"] == 2
    assert paid.calls == []
    assert ask("accept-payload", "invoices", "--reason", "new price").code == 1  # of the whole record: some is unknown


def test_what_is_no_batch_has_no_items(run: Type, ledger: Ledger) -> None:
    books.bring(ledger, State.DONE, engine.order("inv-7"))
    for words in (["items", "inv-7"], ["reopen", "inv-7", "--items", "failed", "--reason", "x"]):
        said = run(*words)
        assert said.code == 1
        assert "is no batch" in said.err


@pytest.mark.parametrize("state", list(State))
@pytest.mark.parametrize("command", ["list", "show", "explain"])
def test_a_record_in_every_state_can_be_looked_at_in_both_forms(
    run: Type, ask: Type, ledger: Ledger, command: str, state: State
) -> None:
    books.bring(ledger, state, engine.order("inv-7"))
    key = [] if command == "list" else ["inv-7"]
    assert ask(command, *key).code == 0
    shown = run(command, *key)
    assert (shown.code, shown.err) == (0, "")
    assert "inv-7" in shown.out
    assert state in shown.out
    assert not {"None", "Traceback", "datetime"} & set(shown.out.split())


def test_times_are_utc_and_say_how_long_ago(run: Type, ledger: Ledger) -> None:
    books.bring(ledger, State.DONE, engine.order("inv-7"))
    said = run("explain", "inv-7").out
    assert f"{datetime.now(UTC):%Y-%m-%dT}" in said
    assert "Z (now)" in said or "s ago)" in said


# -- looking -----------------------------------------------------------------------------------------------------------


def test_list_filters_and_goes_on_page_by_page(ask: Type, ledger: Ledger) -> None:
    for key in ("a/1", "a/2", "b/1"):
        books.bring(ledger, State.DONE, engine.order(key))
    doubt(ledger, "a/3")
    page = ask("list", "--key-prefix", "a/", "--limit", "2").data
    assert [r["key"] for r in page["records"]] == ["a/1", "a/2"]
    rest = ask("list", "--key-prefix", "a/", "--limit", "2", "--after", str(page["next"])).data
    assert ([r["key"] for r in rest["records"]], rest["next"]) == (["a/3"], None)
    assert [r["key"] for r in ask("list", "--needs-person").data["records"]] == ["a/3"]
    assert [r["key"] for r in ask("list", "--state", "done", "--dag-id", "bill").data["records"]] == [
        "a/1",
        "a/2",
        "b/1",
    ]
    assert ask("list", "--namespace", "other").data["records"] == []


def test_show_gives_the_stored_value_and_the_order(ask: Type, ledger: Ledger) -> None:
    held = books.enter(ledger, engine.order("inv-7", {"amount": 500}))
    held.settle(State.DONE, data=codec.dump({"id": "ch_1"}))
    shown = ask("show", "billing/inv-7").data
    assert shown["result"] == {"stored": True, "value": {"id": "ch_1"}}
    assert shown["payload"] == {"amount": 500}
    assert shown["state"] == "done"


def test_a_result_that_is_no_plain_data_is_shown_as_it_is_stored(ask: Type, ledger: Ledger) -> None:
    held = books.enter(ledger, engine.order("inv-7"))
    held.settle(State.DONE, data=b"\xff not json")
    assert ask("show", "inv-7").data["result"]["stored"] is True


def test_explain_names_the_vendor_key_the_vendors_id_and_the_commands(run: Type, ask: Type, ledger: Ledger) -> None:
    held = doubt(ledger, "inv-7", "charge")
    key = keys.vendor_key(ledger.installation, held.order.identity, "charge", 1, 1)
    told = ask("explain", "inv-7").data
    assert [call["vendor_key"] for call in told["calls"]] == [key]
    assert [event["kind"] for event in told["timeline"]] == books.kinds(ledger, held.id)
    said = run("explain", "inv-7").out
    for words in (key, "airflow runguard resolve billing/inv-7 --happened --call=charge", "too early", "last sent"):
        assert words in said


def test_explain_gives_the_vendor_key_of_the_name_that_the_call_was_sent_under(ask: Type, ledger: Ledger) -> None:
    held = books.bring(ledger, State.DONE, engine.order("old"))
    key = keys.vendor_key(ledger.installation, held.order.identity, "body", 1, 1)
    assert ask("rename", "old", "new", "--reason", "the DAG was renamed").code == 0
    told = ask("explain", "new").data
    assert [call["vendor_key"] for call in told["calls"]] == [key]
    assert "before it was billing/old" in told["timeline"][-1]["sentence"]


def test_explain_tells_a_life_with_every_kind_of_event_in_sentences(ask: Type, ledger: Ledger, sql: SQL) -> None:
    held = doubt(ledger, "inv-7", "charge")
    assert ask("resolve", "inv-7", *DENIED, "--force", "--reason", "the vendor has nothing").code == 0
    held.outcome("charge")  # the process that was thought dead reports that it was charged after all
    assert ask("resolve", "inv-7", "--happened", "--reference", "ch_1", "--reason", "seen at the vendor").code == 0
    assert ask("reopen", "inv-7", "--again-although-applied", "--reason", "refunded").code == 0
    assert ask("accept-payload", "inv-7", "--reason", "new price").code == 0
    break_line(sql, held.id)
    token = ask("repair", "inv-7").data["seen"]
    assert ask("repair", "inv-7", "--accept", "--seen", token, "--reason", "checked").code == 0
    told = ask("explain", "inv-7").data["timeline"]
    told_kinds = {event["kind"] for event in told}
    assert {"claimed", "called", "in_doubt", "resolved", "late_outcome", "reopened", "repaired"} <= told_kinds
    assert all(event["sentence"].endswith(".") and "{" not in event["sentence"] for event in told)
    sentences = " ".join(event["sentence"] for event in told)
    assert "forced although it was too early to know" in sentences
    assert "vendor's reference ch_1" in sentences
    assert "reported late" in sentences


def test_a_vendors_words_can_neither_steer_the_terminal_nor_look_like_lines_of_ours(
    run: Type, ask: Type, ledger: Ledger
) -> None:
    words = "declined\x1b[2J\nWho moves it on: Nobody."
    held = books.enter(ledger, engine.order("inv-7"))
    outcome = Outcome("body", failure=books.DECLINED, error=words)
    held.write(settlement=Settlement(State.FAILED, failure=books.DECLINED, error=words), outcomes=[outcome])
    for command in (
        ["list"],
        ["show", "inv-7"],
        ["explain", "inv-7"],
        ["resolve", "inv-7", "--failed", "--reason", "r"],
    ):
        said = run(*command)
        assert "\x1b" not in said.out + said.err
        assert not [line for line in said.out.splitlines() if line.strip() == "Who moves it on: Nobody."]
    assert ask("show", "inv-7").data["error"] == words


# -- which record ------------------------------------------------------------------------------------------------------


def test_an_unknown_key_is_refused_with_where_to_look(run: Type) -> None:
    said = run("show", "nobody")
    assert said.code == 1
    assert "'nobody'" in said.err
    assert "airflow runguard list" in said.err


def test_a_key_that_names_several_records_is_refused_and_lists_them(ask: Type, ledger: Ledger) -> None:
    for namespace in ("billing", "payouts"):
        order = engine.order("inv-7")
        order = type(order)(identity=engine.identity("inv-7", namespace), payload=order.payload)
        books.bring(ledger, State.DONE, order)
    said = ask("reopen", "inv-7", "--again-although-applied", "--reason", "r")
    assert said.code == 1
    assert "--namespace=billing inv-7; --namespace=payouts inv-7" in said.data["error"]
    assert ask("show", "payouts/inv-7").data["namespace"] == "payouts"
    assert ask("show", "inv-7", "--namespace", "payouts").data["namespace"] == "payouts"


def test_a_key_that_begins_with_a_dash_comes_after_two_dashes(ask: Type, ledger: Ledger) -> None:
    books.bring(ledger, State.DONE, engine.order("-x"))
    assert ask("show", "--", "-x").data["key"] == "-x"


def test_the_records_of_a_test_deployment_are_seen_under_its_name(ask: Type, ledger_url: str) -> None:
    with closing(Ledger(lambda: psycopg.connect(ledger_url), deployment="test~dag")) as ledger:
        order = engine.order("inv-7")
        identity = keys.identity("test~dag", "billing", "inv-7")
        books.bring(ledger, State.DONE, type(order)(identity=identity, payload=order.payload))
    assert ask("show", "inv-7").code == 1
    assert ask("show", "inv-7", deployment="test~dag").data["deployment"] == "test~dag"


def test_p13_no_command_of_a_test_s_record_names_the_airflow_s_own_one(run: Type, ask: Type, ledger_url: str) -> None:
    """Pasted as it is, `reopen billing/inv-7` would order the real one anew."""
    assert "dag.test() did: --deployment=test~test" in run("list").out
    assert "NAME~test" in run("show", "inv-7").err
    with closing(Ledger(lambda: psycopg.connect(ledger_url), deployment="test~test")) as ledger:
        order = engine.order("inv-7")
        identity = keys.identity("test~test", "billing", "inv-7")
        books.bring(ledger, State.DONE, type(order)(identity=identity, payload=order.payload))
    said = ask("explain", "inv-7", deployment="test~test").data
    assert said["commands"]
    assert all("--deployment='test~test'" in typed for typed in said["commands"].values())
    assert (
        run("list", "--state", "failed", deployment="test~test").out.strip() == "No record of deployment 'test~test'."
    )


# -- people's changes --------------------------------------------------------------------------------------------------


def test_p13_a_change_without_a_reason_is_refused_and_says_why_one_is_kept(run: Type, ledger: Ledger) -> None:
    held = doubt(ledger)
    for words in (
        ["resolve", "inv-7", "--happened"],
        ["release", "inv-7"],
        ["resolve", "inv-7", "--failed", "--reason", " "],
    ):
        said = run(*words)
        assert said.code == 2
        assert "--reason" in said.err
        assert "why money moved" in said.err
    assert books.state_of(ledger, held.order) is State.IN_DOUBT


@pytest.mark.parametrize(("actor", "booked"), [([], f"person:{getpass.getuser()}"), (["--actor", "ana"], "person:ana")])
def test_p13_who_and_why_are_booked_with_the_change(ask: Type, ledger: Ledger, actor: list[str], booked: str) -> None:
    held = doubt(ledger)
    assert ask("resolve", "inv-7", "--failed", "--reason", "wrote it off", *actor).code == 0
    last = ledger.events(held.id)[-1]
    assert (last.kind, last.actor, last.reason) == ("resolved", booked, "wrote it off")


@pytest.mark.parametrize("value", [{"id": "ch_1"}, "ch_1", 0, None, []])
def test_p02_what_a_person_gives_as_the_result_is_replayed_like_a_tasks_own(
    ask: Type, ledger: Ledger, value: object
) -> None:
    held = doubt(ledger)
    done = ask("resolve", "inv-7", "--happened", "--result", json.dumps(value), "--reason", "seen at the vendor")
    assert (done.code, done.data["record"]["state"]) == (0, "done")
    claim = ledger.claim(held.order, engine.holder())
    assert claim.verdict is Verdict.REPLAY
    assert claim.result == Result(codec.dump(value))


def test_p03_it_is_too_early_to_say_that_it_did_not_happen_while_it_may_still_arrive(ask: Type, ledger: Ledger) -> None:
    held = doubt(ledger)
    early = ask("resolve", "inv-7", *DENIED, "--reason", "not seen")
    assert early.code == 1
    assert "may still reach the vendor until" in early.data["error"]
    assert "--force" in early.data["remedy"]
    assert books.state_of(ledger, held.order) is State.IN_DOUBT
    assert ask("resolve", "inv-7", *DENIED, "--force", "--reason", "its host burnt down").code == 0
    assert books.state_of(ledger, held.order) is State.PENDING


def test_of_several_open_calls_each_is_resolved_by_its_name(ask: Type, ledger: Ledger) -> None:
    held = doubt(ledger, "inv-7", "charge", "mail")
    assert "--happened --call=mail" in ask("explain", "inv-7").data["commands"]["'mail' happened"]
    assert (
        ask("resolve", "inv-7", "--happened", "--call", "charge", "--reason", "r").data["record"]["state"] == "in_doubt"
    )
    assert ask("resolve", "inv-7", "--happened", "--call", "mail", "--reason", "r").data["record"]["state"] == "pending"
    assert [call.state for call in ledger.calls(held.id)] == ["done", "done"]


def test_the_body_of_a_task_that_is_one_call_is_all_of_it(ask: Type, ledger: Ledger) -> None:
    held = doubt(ledger)
    words = ["resolve", "inv-7", "--happened", "--call", "body", "--result", "1", "--reason", "r"]
    assert ask(*words).data["record"]["state"] == "done"
    assert ledger.claim(held.order, engine.holder()).result == Result(codec.dump(1))


def test_reopen_of_what_happened_is_refused_until_a_second_charge_is_said_to_be_meant(
    ask: Type, ledger: Ledger
) -> None:
    held = books.bring(ledger, State.DONE, engine.order("inv-7"))
    said = ask("reopen", "inv-7", "--reason", "again")
    assert said.code == 1
    assert "second charge" in said.data["error"]
    assert books.state_of(ledger, held.order) is State.DONE
    again = ask("reopen", "inv-7", "--again-although-applied", "--reason", "refunded")
    assert (again.code, again.data["record"]["generation"]) == (0, 2)


def test_release_takes_a_record_from_its_holder_and_sweep_settles_the_dead(ask: Type, ledger: Ledger, sql: SQL) -> None:
    books.enter(ledger, engine.order("a", calls="explicit"))
    assert ask("release", "a", "--reason", "its host is gone").data["record"]["state"] == "pending"
    books.expire(sql, books.enter(ledger, engine.order("b")).id)
    books.expire(sql, books.enter(ledger, engine.order("c", calls="explicit")).id)
    swept = ask("sweep").data
    assert (swept["in_doubt"], swept["pending"]) == (["billing/b"], ["billing/c"])
    assert "0 dead holder" in ask("sweep").data["said"]


def test_p08_a_broken_line_is_shown_first_and_then_repaired_as_it_was_seen(
    run: Type, ask: Type, ledger: Ledger, sql: SQL
) -> None:
    held = books.bring(ledger, State.DONE, engine.order("inv-7"))
    break_line(sql, held.id)
    assert ask("list").data["records"][0]["state"] == "broken"
    assert "repair billing/inv-7" in run("explain", "inv-7").out
    seen = ask("repair", "inv-7").data
    assert "digest" in seen["why"]
    assert seen["seen"] in run("repair", "inv-7").out
    before = books.line(sql, held.id)
    assert ask("repair", "inv-7", "--accept", "--reason", "r").code == 2
    assert ask("repair", "inv-7", "--accept", "--seen", "another", "--reason", "r").code == 1
    assert books.line(sql, held.id)[0] == before[0]
    mended = ask("repair", "inv-7", "--set-state", "in_doubt", "--seen", seen["seen"], "--reason", "nobody knows")
    assert (mended.code, mended.data["record"]["state"]) == (0, "in_doubt")


def test_p11_another_payload_is_accepted_by_a_person_only_where_the_old_ones_effect_is_known(
    ask: Type, ledger: Ledger
) -> None:
    doubt(ledger, "open")
    books.bring(ledger, State.DONE, engine.order("closed"))
    assert ask("accept-payload", "open", "--reason", "r").code == 1
    accepted = ask("accept-payload", "closed", "--reason", "the price list changed")
    assert accepted.code == 0
    assert "nothing is sent for the new payload" in accepted.data["said"]


def test_rename_keeps_the_namespace_unless_another_is_said(ask: Type, ledger: Ledger) -> None:
    for key in ("a", "b"):
        books.bring(ledger, State.DONE, engine.order(key))
    taken = ask("rename", "a", "b", "--reason", "r")
    assert taken.code == 1
    assert "another record named billing/b" in taken.data["error"]
    assert ask("rename", "a", "c", "--reason", "r").code == 0
    assert ask("rename", "c", "d", "--new-namespace", "payouts", "--reason", "r").code == 0
    assert ask("show", "payouts/d").data["generation"] == 1
    assert ask("rename", "payouts/d", " ", "--reason", "r").code == 2


REFUSALS: dict[str, tuple[State, list[str]]] = {
    "not_in_doubt": (State.PAUSED, ["resolve", "x", "--happened"]),
    "no_such_call": (State.IN_DOUBT, ["resolve", "x", "--happened", "--call", "nothing"]),
    "too_early": (State.IN_DOUBT, ["resolve", "x", *DENIED]),
    "applied": (State.DONE, ["reopen", "x"]),
    "not_finished": (State.RUNNING, ["reopen", "x"]),
    "not_running": (State.DONE, ["release", "x"]),
    "not_broken": (State.DONE, ["repair", "x"]),
    "under_way": (State.PAUSED, ["rename", "x", "y"]),
    "unknown_effect": (State.IN_DOUBT, ["accept-payload", "x"]),
}


@pytest.mark.parametrize("word", REFUSALS)
def test_each_refusal_is_a_sentence_about_the_record_with_something_to_type(
    ask: Type, run: Type, ledger: Ledger, sql: SQL, word: str
) -> None:
    state, words = REFUSALS[word]
    held = books.bring(ledger, state, engine.order("x"))
    before = books.line(sql, held.id)[0]
    said = ask(*words, "--reason", "r")
    assert said.code == 1
    assert "billing/x" in said.data["error"]
    assert said.data["error"].endswith("Nothing was changed.")
    assert word not in f"{said.data['error']} {said.data['remedy']}".split()
    assert len(said.data["remedy"]) > 10
    text = run(*words, "--reason", "r")
    assert (text.code, text.out) == (1, "")
    assert text.err == f"{said.data['error']}\n{said.data['remedy']}\n"
    assert books.line(sql, held.id)[0] == before


@pytest.mark.parametrize("words", [["release", "x"], ["reopen", "x"], ["rename", "x", "y"], ["accept-payload", "x"]])
def test_p08_nothing_is_changed_on_a_broken_line(ask: Type, ledger: Ledger, sql: SQL, words: list[str]) -> None:
    held = books.bring(ledger, State.RUNNING, engine.order("x"))
    break_line(sql, held.id)
    said = ask(*words, "--reason", "r")
    assert said.code == 1
    assert "airflow runguard repair billing/x" in said.data["remedy"]


def test_the_ledger_has_no_word_without_a_sentence() -> None:
    people = Path(books.__file__).parents[2].joinpath("airflow_runguard/core/sql/people.sql").read_text()
    words = {line.split("'")[1] for line in people.splitlines() if line.strip().startswith("return '")}
    assert (words - {"ok", "taken"}) | {"no_batch"} == set(SENTENCES)  # the one word that only batch.sql has


def test_p03_the_command_that_explain_gives_denies_only_the_doubt_that_it_told_of(ask: Type, ledger: Ledger) -> None:
    """While a person looks it up, an earlier holder reports that it was applied: denied, it would be sent again."""
    first = doubt(ledger)
    assert ask("resolve", "inv-7", *DENIED, "--force", "--reason", "not in the list").code == 0
    books.enter(ledger, first.order).settle(State.IN_DOUBT, books.UNKNOWN)

    def shown() -> list[str]:
        (line,) = [line for line in ask("explain", "inv-7").data["commands"].values() if "--did-not-happen" in line]
        return shlex.split(line.replace("--reason=…", "--reason='nothing there' --force"))[2:]

    looked = shown()
    first.outcome("body")
    late = ask(*looked)
    assert late.code == 1, late.out
    assert "changed after you looked at it" in late.data["error"]
    assert books.state_of(ledger, first.order) is State.IN_DOUBT
    unread = ask("resolve", "inv-7", "--did-not-happen", "--force", "--reason", "nothing there")
    assert (unread.code, unread.data["remedy"][:35]) == (2, "Run `airflow runguard explain inv-7")
    early = ask("resolve", "inv-7", "--did-not-happen", "--as-of=2999-01-01T00:00:00Z", "--force", "--reason", "r")
    assert (early.code, early.data["error"][:13]) == (2, "Nobody looked")
    assert books.state_of(ledger, first.order) is State.IN_DOUBT
    assert f"--as-of={ask('show', 'inv-7').data['updated_at']}" in shown(), "for scripts, to the last digit"
    assert ask(*shown()).code == 0, "who knows of it may still deny it"


def test_two_people_who_looked_at_the_same_record_make_one_change(ask: Type, ledger: Ledger) -> None:
    from airflow_runguard import commands, refusals

    held = doubt(ledger)
    seen = commands.find(ledger, "inv-7")
    assert ask("resolve", "inv-7", *DENIED, "--force", "--reason", "first").code == 0
    books.enter(ledger, held.order)
    with pytest.raises(refusals.Refused, match="changed after you looked"):
        commands.resolve(ledger, seen, "happened", actor="person:b", reason="second")


# -- wrong usage -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["nonsense"],
        ["show"],
        ["list", "--state", "finished"],
        ["list", "--limit", "0"],
        ["list", "--limit", "-1"],
        ["list", "--after", "x"],
        ["list", "--output", "yaml"],
        ["resolve", "k", "--happened", *DENIED, "--reason", "r"],
        ["resolve", "k", "--reason", "r"],
        ["resolve", "k", "--failed", "--result", "1", "--reason", "r"],
        ["resolve", "k", "--happened", "--force", "--reason", "r"],
        ["resolve", "k", "--did-not-happen", "--reason", "r"],
        ["resolve", "k", "--items", "in_doubt", "--did-not-happen", "--reason", "r"],
        ["repair", "k", "--set-state", "running", "--reason", "r"],
        ["db", "acknowledge-restore", "--reason", "r"],
        ["db", "acknowledge-restore", "--lost-since", "yesterday", "--reason", "r"],
        ["db", "acknowledge-restore", "--lost-since", "2026-03-10T12:00:00", "--reason", "r"],
        ["db", "acknowledge-restore", "--lost-since", "2999-01-01T00:00:00Z", "--reason", "r"],
        ["show", "\udcff"],
    ],
)
def test_wrong_usage_is_two_and_says_what_to_type(
    run: Type, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    said = run(*words) if words else Said(main(words), *capsys.readouterr())
    assert (said.code, said.out) == (2, "")
    assert len(said.err.splitlines()) == 2


@pytest.mark.parametrize("result", ["ch_1", "{", "NaN", "[1,", ""])
def test_a_result_that_is_no_json_is_refused_before_anything_changes(ask: Type, ledger: Ledger, result: str) -> None:
    held = doubt(ledger)
    said = ask("resolve", "inv-7", "--happened", "--result", result, "--reason", "r")
    assert said.code == 2
    assert "JSON" in said.data["remedy"]
    assert books.state_of(ledger, held.order) is State.IN_DOUBT


def test_argparse_errors_are_json_too_where_json_is_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    for output in (["-o", "json"], ["-ojson"], ["--output=json"]):
        assert main(["show", *output]) == 2
        said = json.loads(capsys.readouterr().out)
        assert "KEY" in said["error"]
        assert "--help" in said["remedy"]


@pytest.mark.parametrize(
    "dsn",
    [
        "postgresql://u:hunter2@127.0.0.1:1/x",
        "postgresql://u:hunt%65r2@127.0.0.1:1/x",
        "postgresql://u:pw@hunter2@nowhere.invalid/x",
        "postgres//u:hunter2@host/x",
        "host=127.0.0.1 port=1 password=hunter2",
        "password=hunter2 nonsense",
    ],
)
@pytest.mark.parametrize("words", [["list"], ["doctor"], ["db", "upgrade"], ["list", "--output", "json"]])
def test_the_password_of_the_dsn_is_never_printed(run: Type, dsn: str, words: list[str]) -> None:
    said = run(*words, dsn=dsn)
    assert said.code in (1, 2, 3)
    assert "hunter2" not in said.out + said.err


# -- the ledger itself -------------------------------------------------------------------------------------------------


@pytest.fixture
def empty_database(postgres: str, request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"runguard_test_cli_{abs(hash(request.node.name)) % 10**8}"
    try:
        yield create_database(postgres, name)
    finally:
        drop_database(postgres, name)


def test_a_database_without_a_ledger_is_told_apart_upgraded_and_then_usable(ask: Type, empty_database: str) -> None:
    before = ask("list", dsn=empty_database)
    assert before.code == 3
    assert "db upgrade" in before.data["remedy"]
    assert ask("db", "upgrade", dsn=empty_database).code == 0
    assert ask("db", "upgrade", dsn=empty_database).code == 0
    assert ask("db", "check", dsn=empty_database).data["deployment"] == engine.DEPLOYMENT
    assert ask("list", dsn=empty_database).data["records"] == []


def test_another_deployments_ledger_is_refused_by_upgrade_and_by_everything_else(ask: Type) -> None:
    for words in (["db", "upgrade"], ["db", "check"], ["list"]):
        said = ask(*words, deployment="other")
        assert said.code == 3
        assert "'test'" in said.data["error"]


def test_a_newer_schema_is_refused(ask: Type, sql: SQL) -> None:
    sql.execute("update runguard.meta set schema_version = 99")
    said = ask("list")
    assert said.code == 3
    assert "99" in said.data["error"]
    assert "Install the newer version" in said.data["remedy"]


def test_the_statements_of_an_upgrade_are_printed_for_a_dba_and_make_a_ledger(
    run: Type, ask: Type, empty_database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["db", "upgrade", "--sql", "--deployment", "test"]) == 0
    statements = capsys.readouterr().out
    with psycopg.connect(empty_database, autocommit=True) as connection:
        connection.pgconn.exec_(statements.encode())
    assert ask("db", "check", dsn=empty_database).code == 0
    assert "create" in ask("db", "upgrade", "--sql").data["sql"]


def test_a_role_without_the_right_to_upgrade_is_told_who_has_it(ask: Type, empty_database: str) -> None:
    with psycopg.connect(empty_database, autocommit=True) as connection:
        connection.execute("create role runguard_test_guest login")
    try:
        guest = urllib.parse.urlsplit(empty_database)
        url = guest._replace(netloc=f"runguard_test_guest@{guest.hostname}:{guest.port}").geturl()
        said = ask("db", "upgrade", dsn=url)
    finally:
        with psycopg.connect(empty_database, autocommit=True) as connection:
            connection.execute("drop role runguard_test_guest")
    assert said.code == 3
    assert "--sql" in said.data["remedy"]


@pytest.mark.parametrize("lost", [["--nothing-lost"], ["--lost-since", "2026-03-10T12:00:00+01:00"]])
def test_p14_a_ledger_that_lost_time_is_used_again_only_after_a_person_says_what_was_lost(
    ask: Type, ledger: Ledger, lost: list[str]
) -> None:
    ledger.lose("restored from a backup")
    refused = ask("db", "check")
    assert refused.code == 3
    assert "acknowledge-restore" in refused.data["remedy"]
    run_at = datetime.now(UTC) - timedelta(hours=1)
    assert ledger.claim(engine.order("new", run_at=run_at), engine.holder()).verdict is Verdict.LOST_TIME
    assert ask("db", "acknowledge-restore", *lost, "--reason", "looked at the backup").code == 0
    assert ask("db", "check").code == 0
    after = ledger.claim(engine.order("new", run_at=run_at), engine.holder()).verdict
    assert after is (Verdict.RUN if lost == ["--nothing-lost"] else Verdict.IN_DOUBT)


# -- the door itself ---------------------------------------------------------------------------------------------------


def test_this_door_needs_no_airflow(ledger_url: str, ledger: Ledger) -> None:
    held = doubt(ledger)
    code = (
        "import sys; sys.modules['airflow'] = None\n"
        "from airflow_runguard.__main__ import main\n"
        "settle = ['resolve', 'inv-7', '--happened', '--result', '{\"id\": 1}', '--reason', 'r']\n"
        "for words in (['list'], ['explain', 'inv-7'], ['doctor'], settle, ['show', 'inv-7'], ['audit']):\n"
        f"    code = main([*words, '--dsn', {ledger_url!r}, '--deployment', 'test'])\n"
        "    assert code == 0 or (words, code) == (['doctor'], 1), words\n"  # it finds that the tests' server forgets
        "print(sorted(name for name in sys.modules if name.startswith('airflow.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "[]"
    assert books.state_of(ledger, held.order) is State.DONE


def test_the_module_runs_as_a_program_with_the_exit_codes_of_its_help(ledger_url: str) -> None:
    def program(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "airflow_runguard", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert "Exit codes: 0 done, 1 refused" in " ".join(program("--help").stdout.split())
    where = ["--dsn", ledger_url, "--deployment", "test"]
    assert program("list", *where).returncode == 0
    assert program("show", "nobody", *where).returncode == 1
    assert program("show", *where).returncode == 2
    assert program("list", "--dsn", NOBODY).returncode == 3


def test_a_reader_that_has_seen_enough_is_no_error(ledger_url: str, ledger: Ledger) -> None:
    for n in range(200):
        books.bring(ledger, State.DONE, engine.order(f"{'long ' * 60}{n}"))
    words = [
        sys.executable,
        "-m",
        "airflow_runguard",
        "list",
        "--limit",
        "200",
        "--dsn",
        ledger_url,
        "--deployment",
        "test",
    ]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait(timeout=60) == 0
