"""``kill -9`` of a real process at each step between claim and release, and what the next tries make of it (P3, P4).

Each scenario is one piece of work; a child of ``crash_worker.py`` dies in the middle of it, then further tries are
made until the work is done, with a person's or the vendor's answer in between where the design asks for one. What
happened is counted at the vendor. Each is played without Redis and with a real one, which at the death keeps the dead
holder's lease, forgets it and the witness, says that it is somebody else's, or dies too (P10).
"""

from __future__ import annotations

import functools
import json
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import pytest

from airflow_runguard.core import guard
from airflow_runguard.core.leases import Leases
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import State
from demo.servers import Redis as RedisServer
from demo.vendor_control import VendorControl
from tests.core.accidents import attempt, charge, look_up, record_of, redis_of, until
from tests.core.crash_worker import CALLS
from tests.core.engine import open_ledger, order

LEASE = 2.0
"""Seconds of the lease, and of max_call_time, of the process that dies."""

AROUND_A_CALL = (
    "before intent",
    "after intent",
    "before sending",
    "after charge",
    "after answer",
    "before outcome",
    "after outcome",
)
AT_THE_EDGES = ("before claim", "after claim", "before settle", "after settle", "before release", "after release")
BODY_STEPS = (*AT_THE_EDGES, "before sending", "after charge", "after answer")
EXPLICIT_STEPS = (*((step, "") for step in AT_THE_EDGES), *((step, call) for call in CALLS for step in AROUND_A_CALL))


@dataclass(frozen=True)
class Scenario:
    """One accident, and what the design says of the moment of death."""

    calls: str
    on_doubt: str
    step: str
    call: str = ""
    redis: str = ""
    """What becomes of the Redis that holds its lease, when it has died; '' = it has none."""

    @property
    def key(self) -> str:
        return "-".join((self.calls, self.on_doubt, self.call, self.step, self.redis)).replace(" ", "_")

    @property
    def order_of_calls(self) -> tuple[str, ...]:
        return ("body",) if self.calls == "body" else CALLS

    @property
    def done_at_death(self) -> bool:
        return self.step in ("after settle", "before release", "after release")

    @property
    def open_at_death(self) -> str:
        """The call whose intent was committed and whose outcome was not."""
        if self.calls == "body":  # claim and intent are one statement, outcome and settlement another
            return "" if self.step == "before claim" or self.done_at_death else "body"
        return self.call if self.step not in ("before intent", "after outcome") else ""

    @property
    def charged_at_death(self) -> list[str]:
        """The calls for which money had moved."""
        charged = ("after charge", "after answer", "before outcome", "after outcome", "before settle")
        if self.step in charged or self.done_at_death:
            last = self.order_of_calls.index(self.call) if self.call else len(self.order_of_calls) - 1
            return list(self.order_of_calls[: last + 1])
        return list(self.order_of_calls[: self.order_of_calls.index(self.call)]) if self.call else []


REDIS = ("stays", "forgets", "lies", "dies")
"""What becomes of the Redis that holds the leases when all have died."""

DOUBTS = ("ask", "replay", "reconcile")


def scenarios_of(on_doubt: str, *, with_redis: bool) -> Iterator[Scenario]:
    """Each step without Redis and with two of the ends of one; with the other two under the next ``on_doubt``."""
    body, explicit = [("body", step, "") for step in BODY_STEPS], [("explicit", *step) for step in EXPLICIT_STEPS]
    for number, (calls, step, call) in enumerate(body + explicit):
        ends = REDIS[(number + DOUBTS.index(on_doubt)) % 2 :: 2] if with_redis else ()
        for redis in ("", *ends):
            yield Scenario(calls, on_doubt, step, call, redis)


class Redises:
    """A Redis for each of the ends: databases of one server that lives on, and a server that does not."""

    def __init__(self, lives: str, dies: RedisServer) -> None:
        self._dies = dies
        self.urls = {"dies": dies.url, **{end: f"{lives[:-1]}{n}" for n, end in enumerate(REDIS[:-1])}}

    def strike(self, leases: list[str]) -> None:
        """What becomes of each. ``leases`` are the keys of all scenarios' leases."""
        self._dies.kill()
        with redis_of(self.urls["forgets"]) as client:
            client.command("FLUSHDB")
        with redis_of(self.urls["lies"]) as client:
            for lease in leases:
                client.command("SET", lease, "somebody else")

    def check(self, leases: list[str], ledger: Ledger) -> None:
        """They hold no lease but those that are somebody else's, and remember what the ledger still has."""
        for end in self.urls.keys() - {"dies"}:
            with redis_of(self.urls[end]) as client:
                left = {b"somebody else" if end == "lies" else None}
                until(lambda: {client.command("GET", lease) for lease in leases}, left.__eq__, what=f"for {end}")
                witness = Leases(client, ledger.installation).witness()
                assert witness is not None
                assert ledger.confront(witness)


@pytest.fixture
def redises(empty_redis: str | None, server_directory: Path) -> Iterator[Redises | None]:
    """They know of nothing yet. ``None`` in a run without Redis."""
    if empty_redis is None:
        yield None
        return
    with RedisServer(server_directory) as dies:
        yield Redises(empty_redis, dies)


def die_all(scenarios: list[Scenario], ledger_url: str, vendor_url: str, redises: Mapping[str, str]) -> None:
    """Every scenario's process has been killed at its step; none got past it."""
    plan = {
        "ledger": ledger_url,
        "vendor": vendor_url,
        "signal": signal.SIGKILL,
        "rules": {"lease": LEASE, "max_call_time": LEASE},
        "scenarios": [{**asdict(s), "key": s.key, "redis": redises.get(s.redis)} for s in scenarios],
    }
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.core.crash_worker"]
    worker = subprocess.run(command, input=json.dumps(plan), capture_output=True, text=True, cwd=root, timeout=120)
    assert worker.returncode == 0, worker.stderr
    assert json.loads(worker.stdout) == {s.key: signal.SIGKILL for s in scenarios}, worker.stderr


def live_on(scenario: Scenario, ledger_url: str, vendor: VendorControl, honours: bool, redis_url: str | None) -> None:
    """Try again until the work is done; check every step of the way against the design."""
    what = order(scenario.key, calls=scenario.calls, on_doubt=scenario.on_doubt)
    customers = {call: f"{scenario.key} {call}" for call in scenario.order_of_calls}
    assert [call for call in customers if vendor.charges(customers[call])] == scenario.charged_at_death

    def body(context: guard.GuardContext) -> list[str]:
        if scenario.calls == "body":
            return [charge(vendor.url, customers["body"], context.idempotency_key)]
        return [
            context.call(call, functools.partial(charge, vendor.url, customers[call]), vendor_key_as="key")
            for call in CALLS
        ]

    def reconcile(doubt: guard.Doubt) -> object:
        return look_up(vendor, customers[doubt.call.name])

    rules = {"reconcile": reconcile} if scenario.on_doubt == "reconcile" else {}
    again = functools.partial(attempt, ledger_url, what, body, redis_url=redis_url, **rules)
    how = until(again, lambda how: not isinstance(how, guard.Waiting), what=scenario.key)
    ledger = open_ledger(ledger_url)
    try:
        if not scenario.open_at_death or scenario.on_doubt == "replay":
            assert isinstance(how, guard.Done), (scenario, how)
        elif scenario.on_doubt == "ask":
            assert isinstance(how, guard.Ended), (scenario, how)
            assert not how.retry
            in_doubt = record_of(ledger, what)
            assert (in_doubt.state, in_doubt.needs_person) == (State.IN_DOUBT, True)
            answer = look_up(vendor, customers[scenario.open_at_death])
            resolve = functools.partial(
                ledger.resolve,
                in_doubt.id,
                "happened" if isinstance(answer, guard.Applied) else "did_not_happen",
                call=scenario.open_at_death if scenario.calls == "explicit" else None,
                result=json.dumps(answer.result if scenario.calls == "explicit" else [answer.result]).encode()
                if isinstance(answer, guard.Applied)
                else None,
                actor="the person on call",
                reason="looked it up at the vendor",
            )
            assert until(resolve, lambda word: word != "too_early") == "ok"
            how = again()
        elif not isinstance(how, guard.Done):  # "it did not happen" was too early for a while
            how = until(again, lambda how: isinstance(how, guard.Done), what=scenario.key)
        assert isinstance(how, guard.Done), (scenario, how)
        told = scenario.on_doubt != "replay" and scenario.calls == "body" and scenario.open_at_death != ""
        assert how.replayed == (scenario.done_at_death or (told and scenario.charged_at_death != [])), (scenario, how)
        assert record_of(ledger, what).state is State.DONE
        assert again() == guard.Done(how.value, replayed=True)
    finally:
        ledger.close()

    for call, customer in customers.items():
        resent = scenario.on_doubt == "replay" and call == scenario.open_at_death and call in scenario.charged_at_death
        # Whoever says "replay" of a vendor that forgets keys pays twice: it is that word which was false.
        assert vendor.charges(customer) == (2 if resent and not honours else 1), (scenario, call)
        requests = vendor.requests(customer)
        assert len(requests) == (2 if resent else 1), (scenario, call)
        assert len({request.key for request in requests}) == 1, (scenario, call)


@pytest.mark.parametrize(
    ("on_doubt", "honours"), [("ask", False), ("replay", False), ("reconcile", False), ("replay", True)]
)
def test_p04_a_process_killed_at_any_step_leaves_work_that_is_done_once(
    on_doubt: str,
    honours: bool,
    ledger: Ledger,
    ledger_url: str,
    vendor_control: VendorControl,
    redises: Redises | None,
) -> None:
    vendor_control.honour_keys(honours)
    scenarios = list(scenarios_of(on_doubt, with_redis=redises is not None and not honours))
    urls = redises.urls if redises else {}
    die_all(scenarios, ledger_url, vendor_control.url, urls)
    leases = [Leases(None, ledger.installation)._key(order(s.key).identity) for s in scenarios]
    if redises:
        redises.strike(leases)
    with ThreadPoolExecutor(4) as pool:
        for lived in [
            pool.submit(live_on, s, ledger_url, vendor_control, honours, urls.get(s.redis)) for s in scenarios
        ]:
            lived.result()
    if redises and not honours:
        redises.check(leases, ledger)
