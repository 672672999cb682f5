"""The ledger against a plain model under random orders of everything that can happen (P1 to P5, P8, P10, P11, P13).

Hypothesis draws the steps of holders, accidents (in half of the examples Redis's, too) and people;
:class:`~tests.core.world.World` does each on the real ledger and on the model, and checks the laws after each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test

from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Verdict
from airflow_runguard.core.resp import Redis
from tests.core.accidents import redis_of
from tests.core.engine import holder, order
from tests.core.world import ENDLESS, World

HOLDERS = ("claim", "intent", "send", "outcome", "settle")
ACCIDENTS = ("expire", "die", "sweep", "forget", "lie")
PEOPLE = ("resolve", "release", "reopen")
MANY = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))


def machine(ledger: Ledger, sql: psycopg.Connection[Any], redis: Redis | None) -> Callable[[], RuleBasedStateMachine]:
    numbers = itertools.count()

    class Ledgers(RuleBasedStateMachine):
        world: World

        @initialize(
            calls=st.sampled_from(["body", "explicit"]),
            on_doubt=st.sampled_from(["ask", "replay"]),
            leased=st.booleans(),
        )
        def begin(self, calls: str, on_doubt: str, leased: bool) -> None:
            what = order(f"k{next(numbers)}", calls=calls, on_doubt=on_doubt, max_claims=10_000, **ENDLESS)
            names = ("body",) if calls == "body" else ("reserve", "pay")
            self.world = World(ledger, sql, what, names, slots=3, redis=redis if leased else None)
            self.world.recall()  # the witness is the last world's

        def able(self, kinds: tuple[str, ...]) -> list[tuple[Any, ...]]:
            return [action for action in self.world.actions() if action[0] in kinds]

        @rule(data=st.data())
        def a_holder_goes_on(self, data: st.DataObject) -> None:
            if able := self.able(HOLDERS):
                self.world.do(data.draw(st.sampled_from(able)))

        @precondition(lambda self: self.able(ACCIDENTS))
        @rule(data=st.data())
        def something_happens(self, data: st.DataObject) -> None:
            self.world.do(data.draw(st.sampled_from(self.able(ACCIDENTS))))

        @precondition(lambda self: self.able(PEOPLE))
        @rule(data=st.data())
        def a_person_speaks(self, data: st.DataObject) -> None:
            self.world.do(data.draw(st.sampled_from(self.able(PEOPLE))))

        @precondition(lambda self: self.world.seen and self.world.seen["first_intent_at"])
        @rule()
        def the_payload_changes(self) -> None:
            mine = self.world.order
            other = order(mine.identity.key, {"amount": 999}, calls=mine.calls, on_doubt=mine.on_doubt, **ENDLESS)
            claim = ledger.claim(other, holder())
            assert (claim.verdict, claim.differing) == (Verdict.REFUSED, ("amount",))
            assert self.world.look() == self.world.seen, "a refusal writes nothing"

    return Ledgers


@pytest.fixture
def client(empty_redis: str | None) -> Iterator[Redis | None]:
    with redis_of(empty_redis) as connected:
        yield connected


def test_p01_p03_p05_the_ledger_is_the_model_in_any_order_of_steps(
    ledger: Ledger, sql: psycopg.Connection[Any], client: Redis | None
) -> None:
    run_state_machine_as_test(
        machine(ledger, sql, client), settings=settings(MANY, max_examples=80, stateful_step_count=40, derandomize=True)
    )


FOUND = {
    "an answer about one call does not count as open what an earlier holder left": (
        [("claim", 1), ("intent", 1, "pay"), ("intent", 1, "reserve"), ("release",)],
        [("claim", 0), ("release",), ("resolve", "happened", "pay")],
    ),
    "its caller says that it was applied what a person denied, while another call is in doubt": (
        [("claim", 1), ("intent", 1, "reserve"), ("release",), ("claim", 2), ("intent", 2, "pay"), ("expire",)],
        [("send", 2, "pay", True), ("sweep",), ("resolve", "did_not_happen", "pay"), ("outcome", 2, "pay", "applied")],
        [("claim", 0), ("intent", 0, "pay"), ("send", 0, "pay", True), ("outcome", 0, "pay", "applied")],
    ),
}


@pytest.mark.parametrize("steps", FOUND.values(), ids=FOUND)
def test_p05_the_ledger_is_the_model_where_the_soak_once_found_it_was_not(
    steps: tuple[list[tuple[Any, ...]], ...], ledger: Ledger, sql: psycopg.Connection[Any]
) -> None:
    what = order("found", calls="explicit", on_doubt="replay", max_claims=10_000, **ENDLESS)
    world = World(ledger, sql, what, ("reserve", "pay"), slots=3)
    for step in itertools.chain(*steps):
        assert step in world.actions()
        world.do(step)


@pytest.mark.soak
@pytest.mark.timeout(7_200, method="thread")  # the signal's error would count as an example that fails only once
def test_p01_p03_p05_soak_of_the_model(ledger: Ledger, sql: psycopg.Connection[Any], client: Redis | None) -> None:
    machines = machine(ledger, sql, client)
    run_state_machine_as_test(machines, settings=settings(MANY, max_examples=2_000, stateful_step_count=80))
