"""An exhaustive walk of the small model: every order of every step, on the real functions of the ledger.

Two holders, one person, and each holder may freeze or die before any step (dead is who never moves again). A node is
the whole state of record, calls, holders, vendor and (in one walk) Redis; each is visited once. No path pays twice
without a person's false word, and none ends where nobody can move on.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import psycopg
import pytest

from airflow_runguard.core.record import State
from tests.core.accidents import redis_of
from tests.core.engine import ledger_on, order
from tests.core.world import ELSEWHERE, ENDLESS, SOMEBODY_ELSE, World

COLUMNS = ("state", "effect", "needs_person", "fence", "generation", "open_calls", "late_applied", "expired")
TIMES = ("first_unknown_at", "first_intent_at", "no_later_than")
CALL_COLUMNS = ("state", "attempt", "fence", "final", "effect", "same_again", "late_applied", "earlier_key")
CALL_TIMES = ("first_unknown_at", "outcome_at")


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
        self.connection.execute(f"savepoint {place}")
        for action in world.actions():
            way = world.fork()
            way.do(action)
            self.steps += 1
            there = self.node(way)
            moves = moves or (there != node and action[0] != "die")
            if there not in self.seen:
                self.go(way)
            if action[0] not in ELSEWHERE:
                self.connection.execute(f"rollback to savepoint {place}")
            world.recall()
        self.connection.execute(f"release savepoint {place}")
        bounded = 0 in (world.may_claim, world.may_call, world.may_answer)
        assert moves or bounded or world.state is State.DONE, f"nobody moves on from {world.path}"

    @staticmethod
    def node(world: World) -> Any:
        """All that tells two places apart; of times only whether they are there."""
        record = world.seen or {"calls": []}
        line = [record.get(column) for column in COLUMNS] + [record.get(column) is None for column in TIMES]
        calls = [
            [call[column] for column in CALL_COLUMNS] + [call[t] is None for t in CALL_TIMES]
            for call in record["calls"]
        ]
        workers = [[w.generation, w.fence, sorted(w.under_way.items())] for w in world.workers.values()]
        vendor = sorted(world.effects), sorted(world.excused)
        tokens = {w.who.nonce: [w.generation, w.fence] for w in world.workers.values()}
        redis = world.redis and (tokens.get(world.lease, world.lease == SOMEBODY_ELSE), world.witness is None)
        return repr(
            (
                line,
                calls,
                sorted(map(repr, workers)),
                vendor,
                redis,
                world.may_claim,
                world.may_call,
                world.may_answer,
                world.told,
            )
        )


@pytest.fixture
def connection(ledger_url: str) -> Iterator[psycopg.Connection[Any]]:
    # No cursor prepares anything: psycopg would deallocate all that is prepared after each rollback to a savepoint.
    with psycopg.connect(ledger_url, prepare_threshold=10**9) as opened:
        yield opened


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("calls", "on_doubt", "may_claim", "kinds", "redis", "at_least"),
    [
        ("body", "ask", 3, ("unknown", "refused", "declined", "quota"), False, 900),
        ("body", "ask", 2, ("unknown",), True, 300),
        ("body", "replay", 2, ("unknown", "refused", "declined", "quota"), False, 400),
        ("explicit", "ask", 2, ("unknown", "refused"), False, 1_500),
        ("explicit", "replay", 2, ("refused",), False, 1_000),
    ],
)
def test_p01_p03_p05_every_path_of_the_small_model_pays_once_and_has_a_way_on(
    calls: str,
    on_doubt: str,
    may_claim: int,
    kinds: tuple[str, ...],
    redis: bool,
    at_least: int,
    connection: psycopg.Connection[Any],
    empty_redis: str | None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    ledger = ledger_on(connection)
    what = order("k", calls=calls, on_doubt=on_doubt, **ENDLESS)
    names = ("body",) if calls == "body" else ("pay",)
    if redis and empty_redis is None:
        pytest.skip("this walk has Redis in it, and this run has none")
    with redis_of(empty_redis if redis else None) as client:
        bounds = {"may_claim": may_claim, "may_call": may_claim, "may_answer": 1}
        world = World(ledger, connection, what, names, kinds=kinds, redis=client, **bounds)
        connection.execute("begin")
        walk = Walk(connection)
        walk.go(world)
        connection.execute("rollback")
    with capsys.disabled():
        print(f"\n{calls}, on_doubt={on_doubt}, redis={redis}: {len(walk.seen)} states, {walk.steps} steps")  # noqa: T201
    assert len(walk.seen) > at_least
