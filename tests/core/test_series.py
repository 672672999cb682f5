"""Was the previous one finished? The line of keys of one recurring job, and the turn that one run of it has."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import psycopg
import pytest

from airflow_runguard.core import work
from airflow_runguard.core.errors import PlanningError
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Claim, Completeness, Order, Result, Settlement, State, Verdict
from airflow_runguard.core.series import Before, Place
from tests.core import books, engine
from tests.core.books import bring, enter, expire

OpenLedger = Callable[..., Ledger]
SQL = psycopg.Connection[Any]


def run(number: int, series: str = "payout", calls: str = "body", **wants: Any) -> Order:
    """The order of the run that stands at this number of its series, and knows which one comes before."""
    wants = {"expected": f"{number - 1:03}" if number > 1 else "", **wants}
    place = Place(series=series, place=f"{number:03}", **wants)
    return engine.order(f"{series}/{number}", calls=calls, place=place)


def before(ledger: Ledger, order: Order, **wants: Any) -> Before:
    assert order.place is not None
    place = replace(order.place, **wants)
    found = ledger.before(place)
    assert ledger.due_places([place]) == ({place} if found.verdict != "wait" else set()), (
        "the watcher wakes by the same rule"
    )
    return found


def claim(ledger: Ledger, order: Order) -> Claim:
    return ledger.claim(order, engine.holder())


def so(found: Before) -> tuple[str, str]:
    return found.verdict, found.standing


# -- what stands before ------------------------------------------------------------------------------------------------


def test_the_first_of_a_series_goes_and_says_so(ledger: Ledger) -> None:
    found = before(ledger, run(1))
    assert so(found) == ("go", "none")
    assert "Nothing comes before" in found.sentence("payout")


@pytest.mark.parametrize("wants", ["wait", "fail"])
def test_p08_one_that_should_be_there_and_is_not_is_no_reason_to_go(ledger: Ledger, wants: str) -> None:
    assert so(before(ledger, run(2), on_absent=wants)) == (wants, "absent")
    assert "baseline" in before(ledger, run(2)).sentence("payout")


def test_where_the_order_is_not_known_the_latest_earlier_one_counts(ledger: Ledger) -> None:
    assert so(before(ledger, run(9, expected=None))) == ("go", "none")
    bring(ledger, State.DONE, run(1))
    bring(ledger, State.FAILED, run(4, expected=None, on_failed="go"))
    found = before(ledger, run(9, expected=None))
    assert (so(found), found.name) == (("wait", "failed"), "billing/payout/4")


@pytest.mark.parametrize("state", [State.FAILED, State.IN_DOUBT, State.PAUSED])
@pytest.mark.parametrize("wants", ["wait", "fail", "skip", "go"])
def test_one_that_did_not_end_well_means_what_the_author_said(ledger: Ledger, state: State, wants: str) -> None:
    bring(ledger, state, run(1))
    assert so(before(ledger, run(2), on_failed=wants)) == (wants, state.value)
    assert "explain 'billing/payout/1'" in before(ledger, run(2)).sentence("payout")


def test_one_that_runs_is_waited_for_by_name_of_its_holder(ledger: Ledger) -> None:
    bring(ledger, State.RUNNING, run(1))
    found = before(ledger, run(2), on_failed="go")
    assert so(found) == ("wait", "running")
    assert "is being worked on by bill.charge run r1 try 1 on testhost:4711, since" in found.sentence("payout")


def test_one_that_is_done_in_part_is_enough_only_where_the_author_said_so(ledger: Ledger) -> None:
    held = enter(ledger, run(1, calls="explicit"))
    held.write(settlement=Settlement(State.DONE, result=Result(b"1"), completeness=Completeness.PARTIAL))
    assert so(before(ledger, run(2))) == ("wait", "partial")
    assert so(before(ledger, run(2), partial=True)) == ("go", "done")


def test_the_gap_counts_from_the_end_of_the_one_before(ledger: Ledger) -> None:
    bring(ledger, State.DONE, run(1))
    found = before(ledger, run(2), min_gap=3600.0)
    record = ledger.get(run(1).identity)
    assert so(found) == ("wait", "gap")
    assert record is not None
    assert found.until is not None
    assert record.finished_at is not None
    assert (found.until - record.finished_at).total_seconds() == 3600
    assert 3590 < (found.seconds or 0) <= 3600


@pytest.mark.parametrize("wants", ["wait", "fail", "skip", "go"])
def test_p08_nobody_ever_goes_on_from_a_broken_record(ledger: Ledger, sql: SQL, wants: str) -> None:
    held = bring(ledger, State.DONE, run(1))
    sql.execute("update runguard.record set payload_digest = 'another' where id = %s", [held.id])
    order = run(2, on_failed=wants)
    assert so(before(ledger, order)) == ("fail", "broken")
    refused = claim(ledger, order)
    assert refused.verdict is Verdict.PREVIOUS
    assert refused.before is not None
    assert so(refused.before) == ("fail", "broken")
    how = work.refusal(refused, engine.work(order, lambda guard: None))
    assert isinstance(how, work.Ended)
    assert (how.tells, how.about) == ("broken", str(held.order.identity)), "people are told of the one that is broken"


def test_p14_after_lost_time_absent_means_nothing(ledger: Ledger) -> None:
    ledger.lose("a test")
    assert so(before(ledger, run(1))) == ("wait", "lost_time")


def test_default_keys_are_places_of_the_task_s_own_series(ledger: Ledger) -> None:
    bring(ledger, State.DONE, replace(engine.order("ld:2026-10-01T00:00:00Z")))
    bring(ledger, State.FAILED, replace(engine.order("ld:2026-10-03T00:00:00Z")))
    bring(ledger, State.FAILED, replace(engine.order("invoice/7")))
    place = Place(series="billing", place="ld:2026-10-02T00:00:00Z")
    later = replace(place, place="ld:2026-10-04T00:00:00Z")
    known = replace(later, expected="ld:2026-10-01T00:00:00Z")
    assert [so(ledger.before(one)) for one in (place, later, known)] == [
        ("go", "done"),
        ("wait", "failed"),
        ("go", "done"),
    ]


def test_an_order_that_does_not_sort_is_refused() -> None:
    with pytest.raises(PlanningError, match="does not sort before"):
        Place(series="payout", place="10", expected="9")


# -- the turn ----------------------------------------------------------------------------------------------------------


def test_p01_of_200_races_for_the_turn_of_a_series_none_starts_two(open_ledger: OpenLedger) -> None:
    """The previous one is complete, and four later runs, each a record of its own, see that at the same moment."""
    rounds, runners = 200, 4
    first = open_ledger()
    for n in range(rounds):
        bring(first, State.DONE, run(1, series=f"race{n}"))
    barrier = threading.Barrier(runners)

    def race(number: int) -> list[Claim]:
        ledger, claims = open_ledger(), []
        for n in range(rounds):
            barrier.wait(timeout=books.DEADLINE)
            claims.append(claim(ledger, run(number, series=f"race{n}", expected="001")))
        return claims

    with ThreadPoolExecutor(runners) as pool:
        answers = list(zip(*pool.map(race, range(2, 2 + runners)), strict=True))
    counted = Counter(tuple(sorted(Counter(c.verdict.value for c in answer).items())) for answer in answers)
    assert counted == {(("previous", runners - 1), ("run", 1)): rounds}
    assert all(so(c.before) == ("wait", "running") for a in answers for c in a if c.before is not None)


def test_settling_frees_the_turn_for_the_next_one(ledger: Ledger) -> None:
    held = enter(ledger, run(1))
    assert claim(ledger, run(2)).verdict is Verdict.PREVIOUS
    held.settle(State.DONE)
    assert enter(ledger, run(2)).settle(State.DONE).state is State.DONE
    assert claim(ledger, run(1)).verdict is Verdict.REPLAY


@pytest.mark.parametrize(("calls", "standing"), [("body", "in_doubt"), ("explicit", "pending")])
def test_p05_a_dead_holder_is_swept_before_the_turn_passes_on(
    ledger: Ledger, sql: SQL, calls: str, standing: str
) -> None:
    held = enter(ledger, run(1, calls=calls))
    expire(sql, held.id)
    if calls == "body":  # its caller may still be about to send
        waits = claim(ledger, run(2))
        assert waits.before is not None
        assert so(waits.before) == ("wait", "running")
        books.long_ago(sql, held.id)
    waits = claim(ledger, run(2))
    assert waits.before is not None
    assert so(waits.before) == ("wait", standing)
    if calls == "explicit":
        assert held.intent("charge") == "lost"


def test_a_run_that_comes_back_to_its_own_turn_is_let_in(ledger: Ledger) -> None:
    order, who = run(1), engine.holder()
    first = enter(ledger, order, who)
    assert ledger.claim(order, who).fence == first.claim.fence  # its answer was lost
    first.write(hand_over=100.0)
    again = ledger.claim(order, engine.holder(ti_id=who.ti_id))
    assert (again.verdict, again.reentered) == (Verdict.RUN, True)


def test_two_records_at_one_place_are_refused_and_the_second_is_not_begun(ledger: Ledger) -> None:
    bring(ledger, State.DONE, run(1))
    other = replace(engine.order("other"), place=run(1).place)
    refused = claim(ledger, other)
    assert (refused.verdict, refused.reason) == (Verdict.REFUSED, "place")
    assert ledger.get(other.identity) is None


def test_one_that_only_stands_in_a_series_waits_for_nobody(ledger: Ledger) -> None:
    bring(ledger, State.RUNNING, run(1, waits=False))
    held = enter(ledger, run(2, waits=False))
    assert so(before(ledger, run(3))) == ("wait", "running")
    held.settle(State.DONE)
    assert so(before(ledger, run(3))) == ("go", "done")
