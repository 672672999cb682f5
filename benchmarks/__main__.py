"""`make bench`: a table, and ``benchmarks/latest.json``. Ratios of medians over interleaved rounds; lower is better.

``--short`` is for CI: fewer calls and a smaller ledger, the same servers and statements; it says so in the file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from airflow_runguard.core.migrations import upgrade
from benchmarks import batch, previous
from benchmarks.classifier import classify_us
from benchmarks.speed import DEPLOYMENT, Bench
from benchmarks.waiting import measure
from demo.servers import Postgres, Redis

LIMITS = {
    "first_vs_bare": 1.6,
    "replay_vs_select": 2.0,
    "claim_1m_vs_empty": 1.15,
    "task_rss_mb": 15.0,
    "gate_vs_redis": 1.5,
    "resume_s": 1.0,
    "tick_ms": 5.0,
    "classify_us": 100.0,
    "sensor_wakeup_s": 1.0,
    "sensors_1000_connections": 1.0,
    "observe_ms": 5.0,
    "item_vs_pair": 0.5,
    "plan_100k_s": 5.0,
    "resume_100k_s": 2.0,
    "stream_rss_mb": 20.0,
}
ROUNDS = ("bare", "least", "statements", "first", "select", "replay", "replay_whole", "claim_empty", "claim_full")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.splitlines()[0])
    parser.add_argument("--short", action="store_true", help="fewer calls and a smaller ledger, for CI")
    short = parser.parse_args().short
    calls, rounds, rows = (100, 2, 30_000) if short else (2000, 5, 1_000_000)
    with tempfile.TemporaryDirectory(prefix="runguard-bench-") as directory:
        here = Path(directory)
        with Postgres(here / "postgres") as postgres, Redis(here / "redis") as redis:
            print(f"Filling a ledger with {rows:,} records …", flush=True)
            urls = [postgres.create_database(name) for name in ("bare", "empty", "full")]
            bench = Bench(*urls, redis.url, rows)
            seconds: dict[str, list[float]] = {name: [] for name in ROUNDS}
            for number in range(rounds):
                for name in ROUNDS:
                    seconds[name].append(getattr(bench, name)(calls))
                print(f"Round {number + 1} of {rounds} done ({calls:,} calls each).", flush=True)
            gate = bench.gate_vs_redis()
            print("Memory of task processes …", flush=True)
            memory = resident_mb(urls[1], redis.url)
            print("Batches: items, 100,000 planned and resumed, a stream …", flush=True)
            many = 100_000 if short else 1_000_000
            of_batches = batch.figures(urls[1], bench.bare_connection, rounds=rounds, items=calls, many=many)
            waits = 500 if short else 5000
            print(f"Waiting: {waits:,} tasks at one gate …", flush=True)
            resume, tick = measure(urls[1], waits, 5 if short else 15)
            print("Waiting: 1,000 sensors for their previous runs …", flush=True)
            sensors = postgres.create_database("sensors")
            upgrade(sensors, deployment=DEPLOYMENT)
            wakeup, connections = previous.measure(sensors, 1000, 5 if short else 15)
            observed = previous.observe_ms(urls[1], 50 if short else 300)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    figures = {
        "first_vs_bare": medians["first"] / medians["bare"],
        "least_vs_bare": medians["least"] / medians["bare"],
        "statements_vs_bare": medians["statements"] / medians["bare"],
        "replay_vs_select": medians["replay"] / medians["select"],
        "claim_1m_vs_empty": medians["claim_full"] / medians["claim_empty"],
        "task_rss_mb": memory,
        **of_batches,
        "gate_vs_redis": gate,
        "resume_s": resume,
        "tick_ms": tick,
        "classify_us": classify_us(),
        "sensor_wakeup_s": wakeup,
        "sensors_1000_connections": connections,
        "observe_ms": observed,
    }
    report(figures, medians, {"calls": calls, "rounds": rounds, "rows": rows, "short": short})
    return 0


def resident_mb(ledger_url: str, redis_url: str) -> float:
    """Median of three pairs of processes."""
    connections = {
        "AIRFLOW_CONN_RUNGUARD_LEDGER": ledger_url,
        "AIRFLOW_CONN_RUNGUARD_REDIS": redis_url,
        "AIRFLOW__RUNGUARD__DEPLOYMENT": DEPLOYMENT,
        "_AIRFLOW_PROCESS_CONTEXT": "client",
    }
    command = [sys.executable, "-m", "benchmarks.memory"]

    def after(kind: str) -> float:
        done = subprocess.run(
            [*command, kind], env={**os.environ, **connections}, capture_output=True, text=True, check=True
        )
        return float(json.loads(done.stdout.strip().splitlines()[-1])["after"])

    return statistics.median(after("guarded") - after("plain") for _ in range(3))


def report(figures: dict[str, float], medians: dict[str, float], how: dict[str, object]) -> None:
    print(f"\n{'figure':<20} {'measured':>9} {'limit':>7}")
    for name, value in figures.items():
        limit = LIMITS.get(name)
        verdict = "" if limit is None else f"{limit:>7.2f}  {'ok' if value <= limit else 'OVER'}"
        print(f"{name:<20} {value:>9.2f} {verdict}")
    print("\nµs per operation: " + ", ".join(f"{name} {value * 1e6:.0f}" for name, value in medians.items()))
    latest = {
        **{name: round(value, 3) for name, value in figures.items()},
        "limits": LIMITS,
        "us": {name: round(value * 1e6, 1) for name, value in medians.items()},
        "how": how,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }
    target = Path(__file__).with_name("latest.json")
    target.write_text(json.dumps(latest, indent=2) + "\n")
    print(f"Written to benchmarks/{target.name}.")


if __name__ == "__main__":
    sys.exit(main())
