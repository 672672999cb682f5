"""The measurements. Each gives seconds per operation, one round at a time, so that rounds of all can be interleaved.

The bare bound is what anybody pays who takes a Redis lock and writes two rows: ``SET NX PX``, one ``INSERT``, one
``UPDATE`` (autocommit, prepared, psycopg 3), Lua release. Everything is durable: neither side turns ``fsync`` or
``synchronous_commit`` off.
"""

from __future__ import annotations

import json
import statistics
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import psycopg

from airflow_runguard.core import guard, keys, payloads
from airflow_runguard.core.leases import Leases
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.migrations import upgrade
from airflow_runguard.core.record import Holder, Order, Verdict
from airflow_runguard.core.resp import Redis
from airflow_runguard.core.rows import claim_parameters
from airflow_runguard.core.seam import queries
from airflow_runguard.core.sending import Sending
from benchmarks import least

DEPLOYMENT = "bench"
RELEASE = "if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end return 0"

FILL = """
    insert into runguard.record (deployment, namespace, key, state, fence, effect, completeness, finished_at, calls,
        on_doubt, payload_version, payload_digest, payload_fields, payload_readable, store_result, result,
        result_digest,
        digest, nonce, dag_id, task_id, run_id)
    select 'bench', 'filled', 'invoice/' || n, 'done', 1, 'applied', 'full', clock_timestamp(), 'body', 'ask', 1,
        md5(n::text) || md5(n::text), '{"amount": "x"}', '{"amount": 500}', 'all', '{"v":1,"value":1}'::bytea,
        sha256('{"v":1,"value":1}'::bytea), '', md5(n::text), 'bill', 'charge', 'run-' || n / 1000
      from generate_series(%(low)s::int, %(high)s::int) n
"""


class Bench:
    """One empty ledger, one with ``rows`` records, one bare table, on one PostgreSQL and one Redis."""

    def __init__(self, bare_url: str, empty_url: str, full_url: str, redis_url: str, rows: int) -> None:
        self.client = Redis.from_url(redis_url)
        self.bare_connection = psycopg.connect(bare_url, autocommit=True, prepare_threshold=0)
        self.bare_connection.execute("create table work (key text primary key, state text not null, result text)")
        self.empty, self.full = self._ledger(empty_url), self._ledger(full_url)
        self.leases = Leases(self.client, self.empty.installation)
        self._least = least.writer(empty_url)
        self._plain = psycopg.connect(empty_url, autocommit=True)
        self._fill(full_url, rows)
        self._serial = 0

    def _ledger(self, url: str) -> Ledger:
        upgrade(url, deployment=DEPLOYMENT)
        ledger = Ledger(lambda: psycopg.connect(url), deployment=DEPLOYMENT)
        ledger.check()
        return ledger

    def _fill(self, url: str, rows: int) -> None:
        """By two connections, since it is the server that has to work; nothing of it is measured."""
        step = 50_000

        def fill(low: int) -> int:
            with psycopg.connect(url) as connection:
                connection.execute("select set_config('runguard.writing', 'on', true)")
                connection.execute(FILL, {"low": low, "high": min(low + step, rows) - 1})
            return low

        with ThreadPoolExecutor(2) as two:
            for low in two.map(fill, range(0, rows, step)):
                print(f"{min(low + step, rows):,} of {rows:,} records …", flush=True)
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("vacuum analyze runguard.record")

    # -- one round each: seconds per operation ---------------------------------------------------------------

    def bare(self, calls: int) -> float:
        connection, token = self.bare_connection, uuid.uuid4().hex

        def one(key: str) -> None:
            self.client.command("SET", key, token, "NX", "PX", 30_000)
            connection.execute("insert into work (key, state) values (%s, 'running')", (key,))
            connection.execute("update work set state = 'done', result = %s where key = %s", ('{"id": 1}', key))
            self.client.command("EVAL", RELEASE, 1, key, token)

        return self._timed(calls, one)

    def least(self, calls: int) -> float:
        """The bare work's lease, and the lines that :meth:`first` must leave behind (see ``least.py``)."""
        token = uuid.uuid4().hex

        def one(key: str) -> None:
            self.client.command("SET", key, token, "NX", "PX", 30_000)
            self._least(key)
            self.client.command("EVAL", RELEASE, 1, key, token)

        return self._timed(calls, one)

    def statements(self, calls: int) -> float:
        """The bare work's lease, and the two statements by which :meth:`first` writes: of ours only the ledger."""
        token, send = uuid.uuid4().hex, Sending(self._plain)
        entering = claim_parameters(self._order("any"), self._holder())
        leaving = {
            "generation": 1,
            "nonce": token,
            "actor": "bench",
            "completeness": "full",
            "error": "",
            "missing": None,
        }

        def one(key: str) -> None:
            self.client.command("SET", key, token, "NX", "PX", 30_000)
            (entry,) = send(queries()["claim"], {**entering, "key": key, "nonce": token})
            held = {"record_id": entry["record_id"], "fence": entry["fence"], "result": b'{"id": 1}'}
            if not send(queries()["settle_body"], {**leaving, **held}):
                raise RuntimeError("the measured record was not settled")
            self.client.command("EVAL", RELEASE, 1, key, token)

        return self._timed(calls, one)

    def first(self, calls: int) -> float:
        """A guarded task with one call, from entering to having left: lease, claim, intent, outcome, settle, events."""
        return self._timed(calls, lambda key: self._run(self.empty, self.leases, key))

    def replay(self, calls: int) -> float:
        """The ledger's answer to a claim on a record that is done."""
        name = f"replayed/{uuid.uuid4().hex}"
        self._run(self.empty, self.leases, name)
        order, holder = self._order(name), self._holder()

        def one(_: str) -> None:
            if self.empty.claim(order, holder).verdict is not Verdict.REPLAY:
                raise RuntimeError("the measured replay was none")

        return self._timed(calls, one)

    def replay_whole(self, calls: int) -> float:
        """The same through everything: canonical payload, Redis lease taken and given back, the result read."""
        name = f"replayed/{uuid.uuid4().hex}"
        self._run(self.empty, self.leases, name)
        return self._timed(calls, lambda _: self._run(self.empty, self.leases, name))

    def select(self, calls: int) -> float:
        connection = self.bare_connection
        connection.execute("insert into work values ('selected', 'done', '{}') on conflict do nothing")
        statement = "select key, state, result from work where key = %s"
        return self._timed(calls, lambda _: connection.execute(statement, ("selected",)).fetchone())

    def claim_empty(self, calls: int) -> float:
        return self._timed(calls, lambda key: self._claim(self.empty, key))

    def claim_full(self, calls: int) -> float:
        return self._timed(calls, lambda key: self._claim(self.full, key))

    def gate_vs_redis(self, calls: int = 1_000) -> float:
        """What a claim costs more that asks a gate, in bare round trips to Redis: medians over calls side by side.

        It is the small difference of two large times, so that it takes many, and turns that alternate; where the noise
        is larger, it is below zero. The gate is one that was closed before and is open: its row is looked at.
        """
        self.empty.set_rate("stripe", rate=None, default=5.0, actor="benchmark", reason="its row is to be there")
        more: list[float] = []
        trips: list[float] = []
        for number in range(calls):
            gates = [None, "stripe"] if number % 2 else ["stripe", None]
            took = {gate: self._timed(1, lambda key, gate=gate: self._claim(self.empty, key, gate)) for gate in gates}  # type: ignore[misc]
            more.append(took["stripe"] - took[None])
            trips.append(self._timed(1, lambda key: self.client.command("GET", key)))
        return statistics.median(more) / statistics.median(trips)

    # -- the work --------------------------------------------------------------------------------------------

    def _timed(self, calls: int, one: Callable[[str], object]) -> float:
        names = [f"invoice/new/{self._serial + i}" for i in range(calls)]
        self._serial += calls
        begun = time.perf_counter()
        for name in names:
            one(name)
        return (time.perf_counter() - begun) / calls

    def _order(self, key: str, gate: str | None = None) -> Order:
        name = keys.identity(DEPLOYMENT, "billing", key)
        return Order(identity=name, payload=payloads.payload({"amount": 500}), gate=gate)

    def _holder(self) -> Holder:
        return Holder(uuid.uuid4().hex, "ti", "bill", "charge", "run", 1, -1, "host", 1)

    def _run(self, ledger: Ledger, leases: Leases, key: str) -> None:
        how = guard.run(
            ledger,
            leases,
            guard.Work(
                order=self._order(key),
                holder=self._holder(),
                body=lambda _: {"id": 1},
                dump=lambda value: json.dumps(value).encode(),
                load=json.loads,
            ),
        )
        if not isinstance(how, guard.Done):
            raise RuntimeError(f"the measured work did not end done: {how}")

    def _claim(self, ledger: Ledger, key: str, gate: str | None = None) -> None:
        if ledger.claim(self._order(key, gate), self._holder()).verdict is not Verdict.RUN:
            raise RuntimeError("the measured claim was refused")
