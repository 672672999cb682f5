"""How long the pages' answers take at the API, with a full ledger: `make bench-ledger`, ``benchmarks/board.json``.

95th percentiles in milliseconds of what people ask: the overview; lists with every kind of filter, from both ends and
from the middle; one record that has as many items as there are records. Everything that a request pays is in it
(token, rights, JSON) but the network. ``--rows`` says how full; several sizes (``--rows 1000000 10000000``) lie on one
server and are asked by turns, so that how they grow can be told from what else the machine does. The figures of other
sizes stay in the file. The ledger is filled as a restore would: the rules of its lines hold (the
trigger that checks a line and seals it works), indexes and the roll-up are made afterwards, as one.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg

from airflow_runguard.core.migrations import upgrade
from demo.servers import Postgres

DEPLOYMENT = "bench"
STEP = 250_000
LIMITS = {"overview_ms": 300.0, "list_ms": 150.0, "record_ms": 100.0}
"""With 1,000,000 records. Ten times as many may take longer by the logarithm: seven digits become eight."""
QUICKLY = {"fsync": "off", "full_page_writes": "off", "max_wal_size": "8GB", "maintenance_work_mem": "512MB"}
"""Settings of the server that only writing feels."""

FILL = """
    insert into runguard.record (deployment, namespace, key, state, fence, failure_class, effect, completeness,
        needs_person, first_unknown_at, resume_at, finished_at, lease_until, nonce, calls, on_doubt, payload_version,
        payload_digest, payload_fields, payload_readable, store_result, result, result_digest, digest, dag_id, task_id,
        run_id, try_number, map_index, host, ti_id, gate, partition, amount, currency, error, created_at, claimed_at)
    select %(deployment)s, 'dag_' || d || '.charge', 'invoice/' || lpad(n::text, 9, '0'), s.state, 1,
        case s.state when 'failed' then (array['validation', 'processing', 'quota'])[1 + n %% 3]
                     when 'in_doubt' then (array['timeout', 'unknown'])[1 + n %% 2] when 'paused' then 'quota' end,
        case s.state when 'done' then 'applied' when 'in_doubt' then 'unknown' when 'failed' then 'not_applied'
                     when 'paused' then 'not_applied' end,
        case s.state when 'done' then 'full' else 'none' end,
        s.state = 'failed' and n %% 10 = 0 or s.state = 'in_doubt',
        case s.state when 'in_doubt' then b.at end,
        case s.state when 'paused' then clock_timestamp() + interval '1 h' end,
        case s.state when 'done' then b.at end,
        case s.state when 'running' then clock_timestamp() + interval '1 h' end,
        md5(n::text), 'body', 'ask', 1, md5(n::text) || md5(n::text), '{"amount": "x"}', '{"amount": 500}', 'all',
        case s.state when 'done' then '{"v":1,"value":1}'::bytea end,
        case s.state when 'done' then sha256('{"v":1,"value":1}'::bytea) end, '', 'dag_' || d, 'charge',
        'scheduled__' || n / 1000, 1, -1, 'worker-' || n %% 50, md5('ti' || n),
        case when n %% 4 = 0 then 'stripe' end, to_char(b.at, 'YYYY-MM-DD'), 4900, 'EUR',
        case s.state when 'failed' then 'HTTP 402 from api.example' when 'in_doubt' then 'read timeout' else '' end,
        b.at, b.at
      from generate_series(%(low)s::int, %(high)s::int) n
     cross join lateral (select case when n %% 20 = 0 then 1 + n / 20 %% 40 else n %% 8 + 1 end as d) d
     cross join lateral (select clock_timestamp() - make_interval(secs => (%(rows)s - n) * 2.5e6 / %(rows)s) as at) b
     cross join lateral (select case when n %% 1000 < 12 then 'paused' when n %% 1000 < 22 then 'failed'
                when n %% 1000 < 25 then 'in_doubt' when n %% 1000 < 30 then 'pending'
                when n >= %(rows)s - 40 then 'running' else 'done' end as state) s
"""
EVENTS = """
    insert into runguard.event (at, record_id, generation, fence, kind, actor)
    select r.created_at, r.id, 1, 1, k.kind, 'bench' from runguard.record r
     cross join (values ('claimed'), ('answered'), ('done')) k (kind) where r.id between %(low)s and %(high)s
"""
ITEMS = """
    insert into runguard.call (record_id, generation, name, state, fence, intent, intent_at, no_later_than,
        first_intent_at, first_unknown_at, outcome_at, effect)
    select %(id)s, 1, 'item-' || lpad(n::text, 9, '0'),
        case when n %% (%(rows)s / 10) = 7 then 'in_doubt' else 'done' end, 1,
        '{"n": 1}', clock_timestamp(), clock_timestamp(), clock_timestamp(),
        case when n %% (%(rows)s / 10) = 7 then clock_timestamp() end, clock_timestamp(), 'applied'
      from generate_series(%(low)s::int, %(high)s::int) n
"""


TALLY = """
    insert into runguard.tally (deployment, dag_id, state, failure_class, needs_person, currency, gate, n, amount)
    select deployment, dag_id, state, coalesce(failure_class, ''), needs_person, currency,
           case when resume_at is null then '' else coalesce(gate, '') end, count(*), sum(amount)
      from runguard.record where state <> 'running' group by 1, 2, 3, 4, 5, 6, 7
"""
PULSE = """
    insert into runguard.pulse (deployment, span, at, dag_id, state, n)
    select r.deployment, s.span, date_trunc(s.span, r.created_at, 'UTC'), r.dag_id, r.state, count(*)
      from runguard.record r join (values ('hour', 3), ('day', 365)) s (span, days)
        on r.created_at > clock_timestamp() - make_interval(days => s.days)
     where r.state <> 'running' group by 1, 2, 3, 4, 5
"""
PREVENTED = """
    insert into runguard.prevented (record_id, deployment, kind, at)
    select id, deployment, 'replay', created_at from runguard.record where id % 20 = 0
     union all select id, deployment, 'doubt', first_unknown_at from runguard.record where state = 'in_doubt'
"""
LATER = """
    select format('drop index %I.%I', schemaname, indexname), indexdef from pg_indexes
     where schemaname = 'runguard' and tablename in ('record', 'event')
       and indexname not in (select conname from pg_constraint)
"""
QUIET = """
    alter table runguard.record disable trigger count_new; alter table runguard.event disable trigger note
"""
LOUD = """
    alter table runguard.record enable trigger count_new; alter table runguard.event enable trigger note
"""


def fill(url: str, rows: int) -> None:
    """``rows`` records as a month of work leaves them, one of them with as many items (:func:`bulky_one`), ten of which
    are in doubt, however many there are: what an answer holds grows with none of them."""
    with psycopg.connect(url, autocommit=True) as connection:
        indexes = connection.execute(LATER).fetchall()
        for drop, _ in indexes:
            connection.execute(drop)
        connection.execute(QUIET)
        for low in range(0, rows, STEP):
            with connection.transaction():
                connection.execute("select set_config('runguard.writing', 'on', true)")
                window = {"low": low, "high": min(low + STEP, rows) - 1}
                connection.execute(FILL, {**window, "rows": rows, "deployment": DEPLOYMENT})
        bulky = bulky_one(connection)
        for low in range(0, rows, STEP):
            window = {"low": low, "high": min(low + STEP, rows) - 1}
            connection.execute(ITEMS, {**window, "id": bulky, "rows": rows})
            connection.execute(EVENTS, {"low": low + 1, "high": min(low + STEP, rows)})
        for statement in (*(create for _, create in indexes), LOUD, TALLY, PULSE, PREVENTED):
            connection.execute(statement)
        connection.execute(
            "insert into runguard.gate (deployment, name, closed_until, why) "
            "values (%s, 'stripe', clock_timestamp() + interval '1 h', '429')",
            [DEPLOYMENT],
        )
        connection.execute("vacuum analyze")


def bulky_one(connection: psycopg.Connection[Any]) -> int:
    """The record with the items."""
    row = connection.execute("select min(id) from runguard.record where state = 'in_doubt'").fetchone()
    assert row is not None
    return int(row[0])


def questions(bulky: int, rows: int) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """What is asked for each figure: path and query."""
    now = datetime.now(UTC)
    at = lambda days: (now - timedelta(days=days)).isoformat()  # noqa: E731
    lists: list[dict[str, Any]] = [
        {},
        {"sort": "oldest"},
        {"sort": "name"},
        {"after": str(rows // 2)},
        {"state": "done"},
        {"state": ["in_doubt", "failed"]},
        {"state": "paused", "gate": "stripe"},
        {"gate": "stripe", "waiting": True},
        {"failure_class": "validation"},
        {"needs_person": True, "sort": "oldest"},
        {"dag_id": "dag_3"},
        {"dag_id": "dag_33", "sort": "oldest"},
        {"dag_id": "dag_3", "task_id": "charge", "run_id": "scheduled__77"},
        {"namespace": "dag_3.charge"},
        {"key_prefix": f"invoice/{rows // 3:09}"[:14]},
        {"key_prefix": "there is none"},
        {"partition": f"{now - timedelta(days=12):%Y-%m-%d}"},
        {"holder": "worker-7"},
        {"prevented": "replay"},
        {"prevented": "doubt", "sort": "oldest"},
        {"holder": "there is none"},
        {"since": at(10), "until": at(9)},
    ]
    one = f"/api/records/{bulky}"
    return {
        "overview_ms": [("/api/overview", {}), ("/api/overview", {}), ("/api/pulse", {"window": "30d"})],
        "list_ms": [("/api/records", query) for query in lists],
        "record_ms": [
            (one, {}),
            (f"{one}/calls", {}),
            (f"{one}/calls", {"after": f"item-{rows // 2:09}", "limit": 200}),
            (f"{one}/calls", {"state": "in_doubt"}),
            (f"{one}/calls", {"state": "failed"}),
            (f"{one}/events", {"before": 2**60}),
        ],
    }


Ask = Callable[[str, dict[str, Any]], None]


def client() -> Callable[[str], Ask]:
    """Asks the application in this process about one ledger or another, as a user with a token."""
    home = tempfile.mkdtemp(prefix="runguard-bench-airflow-")
    os.environ.update(
        AIRFLOW_HOME=home,
        AIRFLOW__CORE__LOAD_EXAMPLES="False",
        AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS="ann:admin",
        AIRFLOW__API_AUTH__JWT_SECRET="of the benchmark and long enough for HMAC with SHA-512: sixty-four bytes",
        AIRFLOW__RUNGUARD__DEPLOYMENT=DEPLOYMENT,
    )
    import logging

    from airflow.api_fastapi.app import create_auth_manager
    from airflow.utils.db import initdb

    initdb()
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
    from starlette.testclient import TestClient

    from airflow_runguard.ui.app import create_app
    from airflow_runguard.ui.lending import Lender

    logging.getLogger("httpx").setLevel(logging.WARNING)
    logging.getLogger("httpx2").setLevel(logging.WARNING)
    token = create_auth_manager().generate_jwt(SimpleAuthManagerUser(username="ann", role="ADMIN"))
    app = create_app()
    asked = TestClient(app)

    def of(url: str) -> Ask:
        lender = Lender()

        def ask(path: str, query: dict[str, Any]) -> None:
            os.environ["AIRFLOW_CONN_RUNGUARD_LEDGER"], app.state.lender = url, lender
            answer = asked.get(path, params=query, headers={"Authorization": f"Bearer {token}"})
            if answer.status_code != 200:
                raise RuntimeError(f"{path} {query}: {answer.status_code} {answer.text[:300]}")

        return ask

    return of


@dataclass
class Measured:
    """The answers' times of one ledger, by question."""

    rows: int
    ask: Ask
    questions: dict[str, list[tuple[str, dict[str, Any]]]]
    seconds: dict[str, list[list[float]]] = field(default_factory=dict)

    def once(self, name: str, number: int) -> None:
        path, query = self.questions[name][number]
        begun = time.perf_counter()
        self.ask(path, query)
        several = self.seconds.setdefault(name, [[] for _ in self.questions[name]])
        several[number].append(time.perf_counter() - begun)

    def p95(self, name: str) -> float:
        whole = sorted(one for several in self.seconds[name] for one in several)
        return whole[int(len(whole) * 0.95)] * 1_000

    def medians(self, name: str) -> list[float]:
        return [statistics.median(several) * 1_000 for several in self.seconds[name]]


def measure(ledgers: dict[int, str], rounds: int) -> list[Measured]:
    """Question by question, each asked of all ledgers one after the other: what else the machine does is shared."""
    of = client()
    all_of_them = []
    for rows, url in sorted(ledgers.items()):
        with psycopg.connect(url) as connection:
            all_of_them.append(Measured(rows, of(url), questions(bulky_one(connection), rows)))
    for warm in (True, *[False] * rounds):
        for name, asked in all_of_them[0].questions.items():
            for number in range(len(asked)):
                for one in all_of_them:
                    one.once(name, number)
        if warm:
            for one in all_of_them:
                one.seconds.clear()
    return all_of_them


def told(all_of_them: list[Measured]) -> None:
    """Each figure; of more than one size also what grew most, beside what it may."""
    for name in LIMITS:
        for one in all_of_them:
            medians = one.medians(name)
            path, query = one.questions[name][medians.index(max(medians))]
            said = f"{one.p95(name):7.1f} of {limit(name, one.rows):.0f}; slowest: {path} {query}"
            print(f"{name:<12} {size(one.rows):>4} {said}", flush=True)
        first, last = all_of_them[0], all_of_them[-1]
        if first is last:
            continue
        pairs = list(zip(first.medians(name), last.medians(name), strict=True))
        number = max(range(len(pairs)), key=lambda n: pairs[n][1] / pairs[n][0])
        (before, after), (path, query) = pairs[number], last.questions[name][number]
        whole = sum(after for _, after in pairs) / sum(before for before, _ in pairs)
        print(
            f"{'':<12} grew by {whole:.2f} (the logarithm by {growth(first.rows, last.rows):.2f}); most, from "
            f"{before:.1f} to {after:.1f}: {path} {query}",
            flush=True,
        )


def growth(rows: int, more: int) -> float:
    return math.log(more) / math.log(rows)


def limit(name: str, rows: int) -> float:
    return LIMITS[name] * max(1.0, growth(1_000_000, rows))


def size(rows: int) -> str:
    for unit, letter in ((1_000_000, "m"), (1_000, "k")):
        if rows % unit == 0:
            return f"{rows // unit}{letter}"
    return str(rows)


def keep(target: Path, all_of_them: list[Measured], rounds: int) -> None:
    """The figures of these sizes take the place of those that were measured before with as many records."""
    kept = json.loads(target.read_text()) if target.exists() else {}
    how = kept.pop("how", {})
    for one in all_of_them:
        for name in LIMITS:
            kept[name.replace("_ms", f"_{size(one.rows)}_ms")] = round(one.p95(name), 1)
        how[size(one.rows)] = {
            "rows": one.rows,
            "rounds": rounds,
            "limits": {name: round(limit(name, one.rows), 1) for name in LIMITS},
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "cores": os.cpu_count(),
            "asked_by_turns_with": [size(other.rows) for other in all_of_them if other is not one],
        }
    target.write_text(json.dumps({**kept, "how": how}, indent=2) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.board", description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, nargs="+", default=[1_000_000])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--url", nargs="+", help="ledgers that were filled before, one for each of --rows")
    given = parser.parse_args()
    if given.url:
        measured = measure(dict(zip(given.rows, given.url, strict=True)), given.rounds)
    else:
        with (
            tempfile.TemporaryDirectory(prefix="runguard-bench-") as directory,
            Postgres(Path(directory), settings=QUICKLY) as postgres,
        ):
            ledgers = {rows: postgres.create_database(f"full_{rows}") for rows in given.rows}
            for rows, url in ledgers.items():
                upgrade(url, deployment=DEPLOYMENT)
                print(f"Filling a ledger with {rows:,} records …", flush=True)
                begun = time.monotonic()
                fill(url, rows)
                print(f"Filled in {time.monotonic() - begun:.0f} s.", flush=True)
            measured = measure(ledgers, given.rounds)
    told(measured)
    target = Path(__file__).with_name("board.json")
    keep(target, measured, given.rounds)
    print(f"Written to benchmarks/{target.name}.")
    return int(any(one.p95(name) > limit(name, one.rows) for one in measured for name in LIMITS))


if __name__ == "__main__":
    sys.exit(main())
