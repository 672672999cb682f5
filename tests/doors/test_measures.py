"""What guarded tasks count, time and trace, through Airflow's own metrics and OpenTelemetry's tracer."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from airflow.observability import stats as of_triggerer
from airflow.sdk._shared.observability.metrics.base_stats_logger import NoStatsLogger
from airflow.sdk.observability import stats as of_tasks

from airflow_runguard import guarded_task, measures
from airflow_runguard.core.record import State
from tests.core import engine
from tests.core.books import bring
from tests.doors.conftest import DAY


class Recorder(NoStatsLogger):
    """Stands where Airflow has its StatsD or OpenTelemetry client."""

    def __init__(self) -> None:
        self.counted: list[str] = []
        self.timed: list[str] = []
        self.gauges: dict[tuple[str, str], float] = {}
        self.tags: list[dict[str, str]] = []

    def incr(self, stat: str, count: int = 1, rate: float = 1, *, tags: Any = None) -> None:
        if stat.startswith("runguard."):
            self.counted.append(stat.removeprefix("runguard."))
            self.tags.append(tags)

    def timing(self, stat: str, dt: float, *, tags: Any = None) -> None:
        if stat.startswith("runguard."):
            assert 0 < dt < 60_000
            self.timed.append(stat.removeprefix("runguard."))

    def gauge(self, stat: str, value: float, rate: float = 1, delta: bool = False, *, tags: Any = None) -> None:
        self.gauges[stat, tags["state"]] = value


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    recorder = Recorder()
    for stats in (of_tasks, of_triggerer):
        stats.initialize(factory=lambda: recorder, export_legacy_names=False)
    yield recorder
    for stats in (of_tasks, of_triggerer):
        stats.initialize(factory=NoStatsLogger, export_legacy_names=False)


def paying(airflow, charge, **options: Any) -> Any:
    with airflow.dag() as dag:

        @guarded_task(key="invoice/7", retry_delay=timedelta(0), **options)
        def pay(guard) -> Any:
            return guard.call("charge", charge)["id"]

        pay()
    return dag


def test_what_a_task_does_is_counted_and_timed(airflow, charge, recorder):
    dag = paying(airflow, charge)
    airflow.run(dag)
    assert recorder.counted == ["executed"]
    assert recorder.timed == ["claim", "settle"]
    assert recorder.tags == [{"dag_id": dag.dag_id, "task_id": "pay"}]
    airflow.run(dag)
    assert recorder.counted == ["executed", "replayed", "duplicate_prevented"]


def test_p06_paused_is_never_counted_as_failed(airflow, charge, recorder):
    airflow.vendor.script("status", status=429, headers={"Retry-After": "3600"})
    run = airflow.once(paying(airflow, charge, quota="stripe"), logical_date=DAY, data_interval=(DAY, DAY))
    assert airflow.record().state is State.PAUSED, run.log
    assert recorder.counted == ["paused"]


def test_a_doubt_is_counted_as_one(airflow, charge, recorder):
    airflow.vendor.script("drop")
    airflow.run(paying(airflow, charge))
    assert recorder.counted == ["in_doubt"]


def test_the_caretaker_says_how_many_are_not_done_and_how_old_the_oldest_is(ledger_url, recorder):
    ledger = engine.open_ledger(ledger_url)
    bring(ledger, State.IN_DOUBT, engine.order("a"))
    bring(ledger, State.PAUSED, engine.order("b"))
    bring(ledger, State.DONE, engine.order("c"))
    measures.gauge(ledger)
    ledger.close()
    assert recorder.gauges["runguard.records", "in_doubt"] == 1
    assert recorder.gauges["runguard.records", "paused"] == 1
    assert recorder.gauges["runguard.records", "pending"] == 0, "an alarm ends when there is none left"
    assert recorder.gauges["runguard.oldest_seconds", "in_doubt"] >= 0


def test_each_claim_call_and_settlement_is_a_span(airflow, charge):
    from opentelemetry import trace
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    spans = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(spans))
    trace.set_tracer_provider(provider)
    airflow.run(paying(airflow, charge))
    names = [span.name for span in spans.get_finished_spans() if span.name.startswith("runguard.")]
    assert names == ["runguard.claim", "runguard.call charge", "runguard.settle"]
