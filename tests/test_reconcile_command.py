"""``airflow runguard reconcile`` in a real process: the functions come from the DAG's file, or it says why not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psycopg
import pytest

from airflow_runguard import Applied, config
from airflow_runguard.core import guard
from airflow_runguard.core.leases import Leases
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import CallState, State
from airflow_runguard.core.work import Doubt
from airflow_runguard.listener import Caretaker
from airflow_runguard.reconcile import settle_all
from airflow_runguard.upkeep import SweepOperator
from tests.core import engine
from tests.core.books import enter, expire, long_ago

AIRFLOW = Path(sys.executable).with_name("airflow")
DAG = """
from airflow.sdk import DAG, task
from airflow_runguard import Applied, Guard, GuardedPythonOperator, NotApplied, StillUnknown
from airflow_runguard.core.failures.rule import rate

HOT = rate("acme-hot", "the anvil is hot", types=frozenset({"builtins.RuntimeError"}))

async def find(doubt):
    match doubt.record.identity.key:
        case "found":
            return Applied("ch_1", reference="ch_1")
        case "own rules":
            raise RuntimeError("the anvil is hot")
        case "absent":
            return NotApplied("no such charge")
        case "broken vendor":
            raise ConnectionError("no answer")
    return StillUnknown("the search is down")

with DAG("bill", schedule=None):
    GuardedPythonOperator(task_id="charge", guard=Guard(key="x", on_doubt=find), python_callable=print)
    GuardedPythonOperator.partial(
        task_id="mapped", guard=Guard(key="x", on_doubt=find), python_callable=print
    ).expand(op_args=[[1]])
    GuardedPythonOperator(task_id="ruled", guard=Guard(key="x", on_doubt=find, rules=[HOT]), python_callable=print)
    GuardedPythonOperator(task_id="asks", guard=Guard(key="x", on_doubt="ask"), python_callable=print)

    @task
    def plain(): ...

    plain()
"""


def here(home: Path) -> dict[str, str]:
    return {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__RUNGUARD__DEPLOYMENT": engine.DEPLOYMENT,
    }


def typed(home: Path, *words: str, **extra: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "_AIRFLOW"))}
    return subprocess.run(
        [str(AIRFLOW), *words],
        env={**clean, **here(home), **extra},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("airflow")
    (home / "dags").mkdir()
    (home / "dags" / "bill.py").write_text(DAG)
    (home / "dags" / "gone.py").write_text(DAG.replace('"bill"', '"gone"'))
    for command in (["db", "migrate"], ["dags", "reserialize"]):
        done = typed(home, *command)
        assert done.returncode == 0, done.stderr
    (home / "dags" / "gone.py").write_text("raise RuntimeError('under repair')")
    return home


def test_p03_reconcile_asks_by_the_dags_functions_and_says_of_each_what_came_of_it(
    home: Path, ledger_url: str, tmp_path: Path
) -> None:
    with closing(engine.open_ledger(ledger_url)) as ledger, psycopg.connect(ledger_url, autocommit=True) as sql:
        for key, dag_id, task_id in (
            ("found", "bill", "charge"),
            ("absent", "bill", "mapped"),
            ("broken vendor", "bill", "charge"),
            ("cannot say", "bill", "charge"),
            ("own rules", "bill", "ruled"),
            ("a person's", "bill", "asks"),
            ("not guarded", "bill", "plain"),
            ("renamed", "bill", "was_there"),
            ("file broken", "gone", "charge"),
            ("no dag", "never_was", "charge"),
        ):
            in_doubt(ledger, sql, key, dag_id, task_id)
        done = typed(home, "runguard", "reconcile", "-o", "json", AIRFLOW_CONN_RUNGUARD_LEDGER=ledger_url)
        assert done.returncode == 0, done.stderr
        asked = {line["record"].partition("/")[2]: line for line in json.loads(done.stdout)["asked"]}
        assert {key: line["outcome"] for key, line in asked.items()} == {
            "found": "happened",
            "absent": "did_not_happen",
            "broken vendor": "error",
            "cannot say": "still_unknown",
            "own rules": "wait",
            "a person's": "nobody",
            "not guarded": "nobody",
            "renamed": "nobody",
            "file broken": "nobody",
            "no dag": "nobody",
        }
        for key, why in {
            "broken vendor": "ConnectionError: no answer",
            "cannot say": "the search is down",
            "own rules": "the look-up was told to wait: RuntimeError: the anvil is hot",
            "a person's": "on_doubt='ask': a person is asked",
            "not guarded": "bill.plain is not guarded any more",
            "renamed": "has no task 'was_there' any more",
            "file broken": "RuntimeError: under repair",
            "no dag": "Airflow has no DAG 'never_was'",
        }.items():
            assert why in asked[key]["why"], asked[key]
        states = {record.identity.key: record.state for record in ledger.list()}
        assert [states.pop(key) for key in ("found", "absent")] == [State.PENDING] * 2, "the next try runs the rest"
        assert set(states.values()) == {State.IN_DOUBT}
        (found,), (absent,) = (ledger.calls(ledger.get(engine.identity(key)).id) for key in ("found", "absent"))
        assert (found.state, found.external_id, absent.state) == (CallState.DONE, "ch_1", CallState.PENDING)
        nothing = typed(home, "runguard", "reconcile", "--dag-id", "other", AIRFLOW_CONN_RUNGUARD_LEDGER=ledger_url)
        assert (nothing.returncode, nothing.stdout.strip()) == (0, "Nothing is in doubt.")

        what = replace(engine.order("found", calls="explicit"), identity=engine.identity("found", "dead"))
        held = enter(ledger, what, engine.holder(dag_id="bill", task_id="charge"))
        held.intent("charge")
        expire(sql, held.id)
        long_ago(sql, held.id)
        done = typed(home, "runguard", "sweep", "-o", "json", AIRFLOW_CONN_RUNGUARD_LEDGER=ledger_url)
        assert done.returncode == 0, done.stderr
        swept = json.loads(done.stdout)
        assert swept["in_doubt"] == ["dead/found"]
        (line,) = [line for line in swept["asked"] if line["record"] == "dead/found"]
        assert line["outcome"] == "happened", "a sweep asks the vendor about what it finds"
        assert ledger.calls(held.id)[0].state is CallState.DONE


def test_p03_the_caretaker_asks_by_the_dags_functions_for_what_no_task_comes_back_for(
    home: Path, ledger_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once in a while for each DAG, in a process of its own; what its functions cannot say stays in doubt."""
    for name in list(os.environ):
        if name.startswith(("AIRFLOW", "_AIRFLOW")):
            monkeypatch.delenv(name)
    for name, value in {**here(home), "AIRFLOW_CONN_RUNGUARD_LEDGER": ledger_url}.items():
        monkeypatch.setenv(name, value)
    options = config.settings()
    with closing(engine.open_ledger(ledger_url)) as ledger, psycopg.connect(ledger_url, autocommit=True) as sql:
        for key in ("found", "absent", "cannot say"):
            in_doubt(ledger, sql, key, "bill", "charge")
        caretaker = Caretaker()
        caretaker.ask_functions(options)  # their tasks may still come back for them
        assert {record.state for record in ledger.list()} == {State.IN_DOUBT}
        with sql.transaction():
            sql.execute("set local session_replication_role = replica")  # as if nobody had moved them for long
            sql.execute("update runguard.record set updated_at = clock_timestamp() - interval '61 seconds'")
        assert ledger.dags_to_ask(60.0) == ["bill"]
        caretaker.ask_functions(options)
        states = {record.identity.key: record.state for record in ledger.list()}
        assert states == {"found": State.PENDING, "absent": State.PENDING, "cannot say": State.IN_DOUBT}
        found = ledger.get(engine.identity("found"))
        assert found is not None
        (said,) = [event.actor for event in ledger.events(found.id) if event.kind == "resolved"]
        assert said == f"reconcile, started by {caretaker.name}"
        began = time.monotonic()
        caretaker.ask_functions(options)  # it was asked for a moment ago: no process is started
        assert time.monotonic() - began < 1


def test_p03_a_function_of_many_doubts_answers_about_one(ledger_url: str) -> None:
    asked: list[list[str]] = []

    async def find(doubts: list[Doubt]) -> dict[str, Any]:
        asked.append([doubt.call.name for doubt in doubts])
        return {doubt.call.name: Applied("ch_1") for doubt in doubts}

    with closing(engine.open_ledger(ledger_url)) as ledger, psycopg.connect(ledger_url, autocommit=True) as sql:
        in_doubt(ledger, sql, "found", "bill", "charge")
        said = settle_all(ledger, lambda record: find, actor="reconcile")
        assert [line["outcome"] for line in said["asked"]] == ["happened"]
        assert asked == [["charge"]]


def test_p03_the_sweep_operator_asks_whom_it_is_given_for_a_task(
    ledger_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_RUNGUARD_LEDGER", ledger_url)
    monkeypatch.setenv("AIRFLOW__RUNGUARD__DEPLOYMENT", engine.DEPLOYMENT)
    with closing(engine.open_ledger(ledger_url)) as ledger, psycopg.connect(ledger_url, autocommit=True) as sql:
        in_doubt(ledger, sql, "found", "bill", "charge")
        in_doubt(ledger, sql, "other", "bill", "refund")
        sweep = SweepOperator(task_id="sweep", on_doubt={"bill.charge": lambda doubt: Applied("ch_1")})
        said = sweep.execute({})
        assert {line["record"]: (line["outcome"], line["why"]) for line in said["asked"]} == {
            "billing/found": ("happened", "it is there"),
            "billing/other": ("nobody", "this sweep asks nobody about task bill.refund"),
        }


def in_doubt(ledger: Ledger, sql: psycopg.Connection[Any], key: str, dag_id: str, task_id: str) -> None:
    def body(context: guard.GuardContext) -> None:
        context.call("charge", lose_the_answer)

    who = engine.holder(dag_id=dag_id, task_id=task_id)
    what = engine.order(key, calls="explicit", on_doubt="reconcile")

    how = guard.run(ledger, Leases(None, ledger.installation), engine.work(what, body, holder=who))
    assert isinstance(how, guard.InDoubt)
    record = ledger.get(what.identity)
    assert record is not None
    long_ago(sql, record.id)


def lose_the_answer() -> None:
    raise TimeoutError("no answer")


def test_reconcile_without_airflow_says_where_it_can_be_typed() -> None:
    words = [sys.executable, "-m", "airflow_runguard", "reconcile", "--dsn", "postgresql://nobody@127.0.0.1:1/x"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "which only Airflow can load. Nobody was asked." in done.stderr
