"""An exhaustive walk of the small model: every order of every step, on the real functions of the ledger.

Two holders, one person, and each holder may freeze or die before any step. A node is the whole state of record, calls,
holders and vendor; each is visited once. No path pays twice without a person's false word, and none ends where nobody
can move on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest
from psycopg.rows import tuple_row

from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import State
from tests.core.engine import DEPLOYMENT, order
from tests.core.world import World

CALL_COLUMNS = "state, attempt, fence, final, first_unknown_at is null, outcome_at is null, same_again, effect"
RECORD_COLUMNS = (
    "state, effect, needs_person, fence, generation, open_calls, late_applied, lease_until < clock_timestamp(),"
    " first_unknown_at is null, first_intent_at is null, no_later_than is null"
)

ENDLESS = dict.fromkeys(("lease", "max_hold", "max_call_time", "key_lifetime"), 10**8)
"""Seconds: time passes only where the walk says so."""


class Walk:
    """Depth first over distinct states; savepoints bring the ledger back for each other way."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self.connection = connection
        self.seen: set[Any] = set()
        self.steps = 0

    def go(self, world: World) -> None:
        node = self.node(world)
        self.seen.add(node)
        moves = False
        place = f"s{len(world.path)}"
        for action in world.actions():
            self.connection.execute(f"savepoint {place}")
            way = world.fork()
            way.do(action)
            self.steps += 1
            there = self.node(way)
            moves = moves or (there != node and action[0] != "die")
            if there not in self.seen:
                self.go(way)
            self.connection.execute(f"rollback to savepoint {place}; release savepoint {place}")
        bounded = not world.may_claim or not world.may_answer
        assert moves or bounded or world.state is State.DONE, f"nobody moves on from {world.path}"

    def node(self, world: World) -> Any:
        cursor = self.connection.cursor(row_factory=tuple_row)
        record = cursor.execute(f"select {RECORD_COLUMNS} from runguard.record").fetchall()
        calls = cursor.execute(f"select {CALL_COLUMNS} from runguard.call order by generation, name").fetchall()
        workers = sorted(
            (w.generation, w.fence, *((n, s.attempt, s.sticky, s.truth) for n, s in sorted(w.under_way.items())))
            for w in world.workers.values()
        )
        vendor = tuple(sorted(world.effects)), tuple(sorted(world.excused))
        return (*record, *calls, *workers, *vendor, world.may_claim, world.may_answer, world.told, world.refusal)


@pytest.fixture
def connection(ledger_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(ledger_url) as opened:
        yield opened


@pytest.mark.parametrize("on_doubt", ["ask", "replay"])
@pytest.mark.parametrize(("calls", "at_least"), [("body", 1_000), ("explicit", 1_000)])
def test_p01_p03_p05_every_path_of_the_small_model_pays_once_and_has_a_way_on(
    calls: str, at_least: int, on_doubt: str, connection: psycopg.Connection[Any]
) -> None:
    ledger = Ledger(lambda: connection, deployment=DEPLOYMENT)
    ledger.check()
    world = World(
        ledger,
        connection,
        order("k", calls=calls, on_doubt=on_doubt, **ENDLESS),
        names=("body",) if calls == "body" else ("pay",),
        may_claim=2,
        may_answer=1,
    )
    connection.execute("begin")
    walk = Walk(connection)
    walk.go(world)
    connection.execute("rollback")
    print(f"{calls}, {on_doubt}: {len(walk.seen)} states, {walk.steps} steps")
    assert len(walk.seen) > at_least
