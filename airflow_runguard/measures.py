"""What is counted and timed, through Airflow's own metrics (StatsD, OpenTelemetry, Datadog), and the spans.

Paused is never counted as failed. Nothing here may end a task: a metrics server that is away is Airflow's to report.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from airflow.sdk.observability import stats

from airflow_runguard.core import guard as core
from airflow_runguard.core.ledger import Ledger

COUNTERS = ("executed", "replayed", "busy", "paused", "in_doubt", "broken", "fenced", "failed", "duplicate_prevented")
"""``runguard.<name>``, with the tags ``dag_id`` and ``task_id``."""
TIMERS = ("claim", "settle")
"""``runguard.<name>``, in milliseconds."""
GAUGES = ("records", "oldest_seconds")
"""``runguard.records`` by ``state`` and ``failure_class``, ``runguard.oldest_seconds`` by ``state``."""


def count(how: core.How, tags: dict[str, str]) -> None:
    """Count how one entry ended, once."""
    for name in counted(how):
        with suppress(Exception):
            stats.incr(f"runguard.{name}", tags=tags)


def counted(how: core.How) -> tuple[str, ...]:
    """The counters that an entry adds to."""
    match how:
        case core.Done(replayed=True):
            return ("replayed", "duplicate_prevented")
        case core.Done():
            return ("executed",)
        case core.Passed():
            return ()
        case core.Waiting(busy=True):
            return ("busy",)
        case core.Waiting(tells="broken") | core.Ended(tells="broken"):
            return ("broken",)
        case core.Waiting(record_id=record_id, limited=limited):
            return ("paused",) if record_id and not limited else ()
        case core.InDoubt():
            return ("in_doubt",)
        case core.Ended(tells="stale_writer"):
            return ("fenced",)
        case core.Ended(skip=True):
            return ()
    return ("failed",)


@contextmanager
def watch(what: str) -> Iterator[None]:
    """Time the claim and the settlement; a span around each of them and each call, where OpenTelemetry is on."""
    from opentelemetry import trace

    began = time.perf_counter()
    with trace.get_tracer("airflow_runguard").start_as_current_span(f"runguard.{what}"):
        try:
            yield
        finally:
            if what in TIMERS:
                with suppress(Exception):
                    stats.timing(f"runguard.{what}", (time.perf_counter() - began) * 1000)


def gauge(ledger: Ledger) -> None:
    """What the ledger has that is not done, by state; a state without a record says 0, so that an alarm ends."""
    from airflow.observability import stats as triggerer_stats

    standing = ledger.standing()
    oldest = dict.fromkeys(("pending", "running", "failed", "paused", "in_doubt"), 0.0)
    records = {(state, ""): 0 for state in oldest}
    for row in standing:
        records[row["state"], row["failure_class"]] = row["records"]
        oldest[row["state"]] = max(oldest.get(row["state"], 0.0), row["oldest"])
    for (state, failure_class), number in records.items():
        tags = {"state": state, "failure_class": failure_class or "none"}
        triggerer_stats.gauge("runguard.records", number, tags=tags)
    for state, seconds in oldest.items():
        triggerer_stats.gauge("runguard.oldest_seconds", round(seconds, 1), tags={"state": state})
