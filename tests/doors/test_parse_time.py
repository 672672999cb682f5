"""What is refused while the DAG is parsed, with the reason; and that parsing opens nothing and is always the same."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from airflow.providers.http.operators.http import HttpOperator
from airflow.providers.standard.operators.bash import BashOperator
from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.providers.standard.operators.python import PythonOperator
from airflow.providers.standard.operators.trigger_dagrun import TriggerDagRunOperator
from airflow.sdk import DAG, BaseOperator, task

from airflow_runguard import (
    Guard,
    GuardContext,
    GuardedPythonOperator,
    PlanningError,
    guarded,
    guarded_batch_task,
    guarded_task,
)

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def dag():
    with DAG("d", schedule=None, start_date=datetime(2026, 1, 1, tzinfo=UTC)) as dag:
        yield dag


class FromTrigger(BaseOperator):
    start_from_trigger = True

    def execute(self, context: Any) -> None: ...


def of_a_guarded_class(name: str) -> type:
    """What an author writes who derives an operator from a guarded one, and does more in it."""
    return type("Pays", (guarded(PythonOperator),), {name: lambda self, *how: None})


def provider_operator(path: str) -> type:
    """As a provider that is not installed here has it."""
    module, _, name = path.rpartition(".")
    return type(name, (BaseOperator,), {"__module__": module, "__qualname__": name, "execute": lambda self, c: None})


GRAPH = "airflow.providers.microsoft.azure.operators.msgraph.MSGraphAsyncOperator"


class Async(BaseOperator):
    async def execute(self, context: Any) -> None: ...


def pay(amount: int = 5) -> None: ...


def misnamed(context: GuardContext, amount: int) -> None: ...


def explicit(guard: GuardContext, amount: int = 5) -> None: ...


ASK = Guard(on_doubt="ask")


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda: guarded(EmptyOperator), "EmptyOperator cannot be guarded: the scheduler marks it successful"),
        (lambda: guarded(TriggerDagRunOperator), "TriggerDagRunOperator cannot be guarded: .* trigger_run_id"),
        (lambda: guarded(provider_operator(GRAPH)), "MSGraphAsyncOperator cannot be guarded: it sends from the trigg"),
        (lambda: guarded(EmptyOperator(task_id="t")), "the scheduler marks it successful"),
        (lambda: guarded(FromTrigger)(task_id="t", guard=ASK), "start_from_trigger begins in the triggerer"),
        (lambda: guarded(FromTrigger(task_id="t"), ASK), "start_from_trigger begins in the triggerer"),
        (lambda: guarded(FromTrigger).partial(task_id="t", guard=Guard(key="k")), "begins in the triggerer"),
        (lambda: guarded(FromTrigger.partial(task_id="t").expand(doc=["o"]), Guard(key="k")), "begins in the trig"),
        (lambda: of_a_guarded_class("execute"), r"has its own execute, .* guarded\(Pays\)"),
        (lambda: of_a_guarded_class("resume_execution"), "has its own resume_execution"),
        (lambda: guarded(Async), r"Async.execute is `async def`"),
        (lambda: guarded(Path), "Path is not an operator"),
        (lambda: guarded("pay"), "'pay' is neither an operator nor a task"),
        (lambda: guarded(BashOperator)(task_id="t", bash_command="x"), "does not say on_doubt"),
        (lambda: guarded(BashOperator(task_id="t", bash_command="x")), "does not say on_doubt"),
        (lambda: guarded(BashOperator)(task_id="t", bash_command="x", guard={"key": "k"}), "is not a Guard"),
        (lambda: GuardedPythonOperator(task_id="t", python_callable=pay, guard="k"), "is not a Guard"),
        (lambda: guarded_task(pay)(), "does not say on_doubt"),
        (lambda: task.guarded(pay)(), "does not say on_doubt"),
        (lambda: GuardedPythonOperator(task_id="t", python_callable=pay), "does not say on_doubt"),
        (lambda: guarded_task(on_doubt="ask", calls="body")(lambda guard: None)(), "takes `guard` to make its calls"),
        (lambda: guarded_task(lambda amount, guard: None), r"\(amount, guard\) takes the guard where it is not filled"),
        (lambda: guarded_task(lambda *, guard: None), "Make it the first parameter, named `guard`, and not behind"),
        (lambda: guarded_task(misnamed), "Make it the first parameter, named `guard`"),
        (lambda: GuardedPythonOperator(task_id="t", python_callable=misnamed), "Make it the first parameter"),
        (lambda: guarded_task(key="k")(explicit).override(keys="k"), "an option 'keys'. Did you mean 'key'"),
        (lambda: guarded_task(key="k")(explicit).override(on_busy="x"), "on_busy='x' is none of"),
        (lambda: guarded_batch_task(item_key="id")(pay).override(key="k"), "A batch's guard cannot be overridden"),
        (lambda: guarded_task(explicit).expand(amount=[1]), "A mapped @task.guarded has no key of its own"),
        (lambda: guarded_task(on_doubt="ask")(pay).expand(amount=[1]), "map_index is a position"),
        (lambda: task.guarded(on_doubt="ask")(pay).expand(amount=[1]), "map_index is a position"),
        (lambda: task.guarded(on_doubt="ask")(pay).expand_kwargs([{"amount": 1}]), "map_index is a position"),
        (
            lambda: guarded(PythonOperator).partial(task_id="t", python_callable=pay, guard=ASK),
            "map_index is a position",
        ),
        (lambda: guarded(PythonOperator).partial(task_id="t", python_callable=pay), "map_index is a position"),
        (
            lambda: guarded(PythonOperator.partial(task_id="t", python_callable=pay).expand(op_args=[[1]]), ASK),
            "map_index is a position",
        ),
        (lambda: guarded(task(pay).expand(amount=[1]), ASK), "map_index is a position"),
    ],
)
def test_what_cannot_be_guarded_is_refused_with_the_reason(write, said):
    with pytest.raises(PlanningError, match=said):
        write()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"keys": "k"}, "no option 'keys'. Did you mean 'key'?"),
        ({"on_dobut": "ask"}, "Did you mean 'on_doubt'?"),
        ({"colour": "red"}, "There are: key, namespace"),
        ({"key": ""}, "key='' is neither"),
        ({"key": 7}, "key=7 is neither"),
        ({"on_doubt": "retry"}, "on_doubt='retry' is neither"),
        ({"on_doubt": 1}, "on_doubt=1 is neither"),
        ({"on_busy": "x"}, "on_busy='x' is none of 'wait', 'fail', 'skip'"),
        ({"calls": "some"}, "calls='some' is none of"),
        ({"store_result": "some"}, "store_result='some' is none of"),
        ({"depth": "deep"}, "depth='deep' is none of"),
        ({"payload": "amount"}, "payload is one text"),
        ({"lease": 0}, "lease=0 must be positive"),
        ({"lease": timedelta(0)}, "must be positive"),
        ({"lease": "30"}, "lease='30' must be positive"),
        ({"lease": True}, "lease=True must be positive"),
        ({"max_hold": -1}, "max_hold=-1 must be positive"),
        ({"max_call_time": float("nan")}, "max_call_time=nan must be positive"),
        ({"key_lifetime": float("inf")}, "key_lifetime=inf must be positive"),
        ({"max_claims": 1.5}, "max_claims=1.5 is not a whole number"),
        ({"namespace": ""}, "namespace='' is no name"),
    ],
)
def test_a_wrong_option_or_value_is_refused_by_its_name(options, said):
    with pytest.raises(PlanningError, match=re.escape(said)):
        Guard(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"key_lifetime": 300, "max_call_time": timedelta(minutes=5)},
        {"key_lifetime": 600},  # [runguard] max_call_time is 600
        {"max_call_time": timedelta(days=1)},  # [runguard] key_lifetime is 86400
    ],
)
def test_p03_replay_that_could_never_send_again_is_refused_when_the_dag_is_parsed(options):
    with pytest.raises(PlanningError, match=r"could send nothing again.* max_call_time below key_lifetime"):
        Guard(on_doubt="replay", **options)
    assert Guard(on_doubt="ask", **options).on_doubt == "ask", "nothing depends on it"


def test_an_option_of_runguard_that_cannot_be_read_is_said_by_the_task_and_not_by_the_parsing(monkeypatch):
    monkeypatch.setenv("AIRFLOW__RUNGUARD__LEASE_TTL", "soon")
    assert Guard(on_doubt="replay", key_lifetime=600).key_lifetime == 600


def test_an_unknown_option_of_the_decorator_is_refused_when_the_dag_is_parsed():
    with pytest.raises(TypeError, match="colour"):
        guarded_task(on_doubt="ask", colour="red")(pay)()


def test_a_deferrable_request_is_made_by_the_worker():
    operator = guarded(HttpOperator)(task_id="t", endpoint="/", deferrable=True, guard=Guard())
    assert operator.deferrable is False


@pytest.mark.parametrize("kind", ["BeamRunPythonPipelineOperator", "BeamRunJavaPipelineOperator"])
def test_p03_a_pipeline_that_a_trigger_would_start_is_started_by_the_worker(kind):
    """Airflow starts a trigger anew when a triggerer dies: a second pipeline, behind the guard's back."""
    beam = provider_operator(f"airflow.providers.apache.beam.operators.beam.{kind}")
    beam.deferrable = True
    operator = guarded(beam)(task_id="t", guard=ASK)
    assert operator.deferrable is False


def test_default_args_reach_a_guarded_task():
    defaults = {"retries": 3, "owner": "billing", "guard": Guard(on_doubt="ask", key="k")}
    with DAG("e", schedule=None, start_date=datetime(2026, 1, 1, tzinfo=UTC), default_args=defaults):
        classic = guarded(BashOperator)(task_id="classic", bash_command="x")
        function = GuardedPythonOperator(task_id="function", python_callable=pay)
        mapped = guarded(BashOperator).partial(task_id="mapped", guard=defaults["guard"]).expand(bash_command=["x"])
    for operator in (classic, function, mapped):
        assert (operator.retries, operator.owner) == (3, "billing")
    assert classic.guard.key == function.guard.key == "k"


def test_a_guarded_class_is_made_once_and_keeps_its_name():
    made = guarded(BashOperator)
    assert made is guarded(BashOperator) is guarded(made)
    assert (made.__name__, made.__qualname__, made.__module__) == (
        "BashOperator",
        "BashOperator",
        BashOperator.__module__,
    )
    assert made(task_id="t", bash_command="x", guard=ASK).task_type == "BashOperator"
    assert issubclass(made, BashOperator)


def test_a_guard_is_shown_without_addresses():
    def find(doubt: Any) -> Any: ...

    shown = repr(Guard(key=lambda args: "k", on_doubt=find, payload=["a"], lease=timedelta(seconds=5)))
    assert " at 0x" not in shown
    assert "find" in shown
    assert eval(repr(Guard(key="k", max_claims=2))) == Guard(key="k", max_claims=2)


# -- in processes of their own -----------------------------------------------------------------------------------------

PARSE = """
import socket, sys

def refuse(*_):
    raise AssertionError("parsing a DAG opened a connection")

socket.socket.connect = socket.socket.connect_ex = refuse
import json
from airflow.dag_processing.dagbag import DagBag
from airflow.serialization.serialized_objects import DagSerialization

bag = DagBag(sys.argv[1])
assert not bag.import_errors, bag.import_errors
print(json.dumps({name: DagSerialization.to_dict(dag) for name, dag in sorted(bag.dags.items())}))
"""


def test_parsing_the_examples_opens_no_connection_and_gives_the_same_in_every_process():
    """What differs from parse to parse makes Airflow write a new version of the DAG each time."""

    def parsed(seed: str) -> Any:
        environment = os.environ | {
            "PYTHONHASHSEED": seed,
            "AIRFLOW_CONN_RUNGUARD_LEDGER": "postgresql://nobody@127.0.0.1:1/nothing",
        }
        command = [sys.executable, "-c", PARSE, str(ROOT / "dags_examples")]
        done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    first, second = parsed("1"), parsed("2")
    assert sorted(first) == sorted(path.stem for path in (ROOT / "dags_examples").glob("*.py"))
    assert first == second  # the order of keys is Airflow's own and does not count
    assert not re.search(r" at 0x[0-9a-f]+", json.dumps(first)), "an address, which differs in each process"


@pytest.mark.parametrize(("wrong", "right"), [("on_dobut", "on_doubt"), ("namespce", "namespace"), ("quotas", "quota")])
def test_a_misspelt_option_of_the_decorator_is_named_with_the_right_one(wrong: str, right: str) -> None:
    with pytest.raises(PlanningError, match=f"option {wrong!r}.*Did you mean {right!r}?"):
        guarded_task(**{wrong: "x"})


def test_an_override_changes_the_options_that_it_names_and_no_others() -> None:
    """Airflow's own has no words but the operator's."""
    task = guarded_task(key="k", namespace="n", retries=2)(explicit)
    operator = task.override(task_id="other", key="other", pool="p")(amount=1).operator
    assert (operator.task_id, operator.pool, operator.retries) == ("other", "p", 2)
    assert (operator.guard.key, operator.guard.namespace, operator.guard.calls) == ("other", "n", "explicit")
    assert task(amount=1).operator.guard.key == "k"


def test_an_operators_own_option_is_none_of_the_guards() -> None:
    guarded_task(key="k", pool="p", queue="q", retries=2, email="a@example.com")
