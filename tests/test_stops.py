"""What people stop and let go, typed: gates, freezes, work done by hand (P6, P12, P13)."""

from __future__ import annotations

# ruff: noqa: F811 - a fixture's name is its parameter's
from airflow_runguard.core.record import State, Verdict
from tests.core import engine
from tests.core.books import QUOTA, enter
from tests.test_cli import Type, ask, run  # noqa: F401 - fixtures


def paused(url: str, key: str) -> None:
    """A record that waits for an hour at the gate."""
    ledger = engine.open_ledger(url)
    enter(ledger, engine.order(key, gate="stripe")).settle(State.PAUSED, QUOTA)
    ledger.close()


def claimed(url: str, key: str) -> Verdict:
    ledger = engine.open_ledger(url)
    verdict = ledger.claim(engine.order(key, gate="stripe"), engine.holder()).verdict
    ledger.close()
    return verdict


def test_p13_a_gate_is_closed_shown_and_opened_by_name(ask: Type, ledger_url: str) -> None:
    closed = ask("quota", "close", "stripe", "--for", "30m", "--reason", "over the budget", "--actor", "ann")
    assert closed.code == 0
    assert "is closed until" in closed.data["said"]
    assert claimed(ledger_url, "a") is Verdict.PAUSED
    [gate] = ask("quota", "list").data["gates"]
    assert (gate["open"], gate["waiting"], gate["why"], gate["by"]) == (False, 1, "over the budget", "person:ann")
    shown = ask("quota", "show", "stripe").data
    assert [one["record"] for one in shown["records"]] == ["billing/a"]
    assert ask("quota", "rate", "stripe", "2", "--reason", "slowly").code == 0
    opened = ask("quota", "open", "stripe", "--reason", "paid")
    assert "2 of them go on each second" in opened.data["said"]
    assert ask("quota", "list").data["gates"][0]["open"] is True


def test_p12_a_gate_is_not_closed_until_the_past_nor_opened_where_there_is_none(ask: Type) -> None:
    assert ask("quota", "close", "stripe", "--until", "2020-01-01T00:00:00Z", "--reason", "r").code == 1
    assert ask("quota", "close", "stripe", "--reason", "r").code == 2
    assert ask("quota", "open", "strip", "--reason", "r").code == 1
    assert "if it is misspelt" in ask("quota", "close", "strip", "--for", "1h", "--reason", "r").data["said"]
    assert "misspelt" not in ask("quota", "close", "strip", "--for", "2h", "--reason", "r").data["said"]
    assert ask("quota", "close", "stripe", "--for", "soon", "--reason", "r").code == 2
    assert [gate["gate"] for gate in ask("quota", "list").data["gates"]] == ["strip"]


def test_p12_a_freeze_is_typed_listed_and_thawed_with_the_same_words(ask: Type, ledger_url: str) -> None:
    assert ask("freeze", "--reason", "r").code == 2
    frozen = ask("freeze", "--namespace", "billing", "--reason", "something is wrong", "--actor", "ann")
    assert frozen.data["commands"] == {"To let it go on": "airflow runguard thaw --namespace=billing --reason=…"}
    assert claimed(ledger_url, "a") is Verdict.FROZEN
    assert ask("freeze", "--namespace", "billing", "--reason", "r").code == 1
    [row] = ask("freezes").data["freezes"]
    assert (row["scope"], row["value"], row["actor"]) == ("namespace", "billing", "person:ann")
    assert "no record there" in frozen.data["said"]  # a slip of the pen stops nothing
    assert ask("thaw", "--all", "--reason", "r").code == 1
    assert ask("thaw", "--namespace", "billing", "--reason", "found it").code == 0
    assert claimed(ledger_url, "a") is Verdict.RUN
    assert ask("freezes").data["freezes"] == []
    assert len(ask("freezes", "--thawed").data["freezes"]) == 1
    assert "no record there" not in ask("freeze", "--key-prefix", "a", "--reason", "r").data["said"]


def test_p13_work_done_by_hand_is_booked_and_refused_where_it_could_hide_an_effect(ask: Type, ledger_url: str) -> None:
    said = ask("bypass", "k", "--namespace", "billing", "--result", '"by hand"', "--reason", "in the portal")
    assert said.code == 0
    assert said.data["known"] is False
    assert "if it is misspelt, the task still calls" in said.data["said"]
    assert claimed(ledger_url, "k") is Verdict.REPLAY
    assert claimed(ledger_url, "other") is Verdict.RUN
    refused = ask("bypass", "other", "--namespace", "billing", "--reason", "r")
    assert refused.code == 1
    assert "is running" in refused.data["error"]


def test_p13_a_paused_record_is_let_go(ask: Type, ledger_url: str) -> None:
    paused(ledger_url, "k")
    assert claimed(ledger_url, "k") is Verdict.PAUSED
    assert ask("quota", "open", "stripe", "--reason", "r").code == 0
    assert ask("resume", "k", "--reason", "now").code == 0
    assert claimed(ledger_url, "k") is Verdict.RUN
    assert ask("resume", "k", "--reason", "again").code == 1


def test_what_is_stopped_is_shown_as_tables(run: Type, ledger_url: str) -> None:
    assert run("quota", "list").out == "No gate: nothing was ever paused.\n"
    assert run("freezes").out == "Nothing is frozen.\n"
    paused(ledger_url, "k")
    run("freeze", "--all", "--reason", "r")
    assert "stripe" in run("quota", "list").out
    assert "billing/k" in run("quota", "show", "stripe").out
    assert "all" in run("freezes").out
