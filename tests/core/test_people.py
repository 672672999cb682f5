"""People leave a trace (P13): what they may change, what they are refused, and the event beside each change."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from typing import Any

import psycopg
import pytest

from airflow_runguard import explain
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import TRANSITIONS, Outcome, Record, Result, State, Verdict
from tests.core import books, engine
from tests.core.books import Held, bring, enter, kinds, line, state_of

SQL = psycopg.Connection[Any]
WORDS = {"actor": "ann", "reason": "looked it up"}
fresh = partial(next, (f"people/{n}" for n in itertools.count()))


@pytest.fixture(scope="module")
def ledger_url(postgres: str, ledger_template: str) -> Iterator[str]:
    with books.fresh_ledger(postgres, ledger_template) as url:
        yield url


def in_state(ledger: Ledger, state: State, **rules: Any) -> Held:
    return bring(ledger, state, engine.order(fresh(), **rules))


def doubtful(ledger: Ledger, sql: SQL, *calls: str) -> Held:
    """A holder that died with these calls open, and whose requests can no longer be on their way."""
    held = enter(ledger, engine.order(fresh(), calls="explicit"))
    for call in calls:
        assert held.intent(call) == "run"
    books.expire(sql, held.id)
    assert ledger.claim(held.order, engine.holder()).verdict is Verdict.IN_DOUBT
    books.long_ago(sql, held.id)
    return held


def record_of(ledger: Ledger, held: Held) -> Record:
    record = ledger.get(held.order.identity)
    assert record is not None
    return record


def traced(ledger: Ledger, held: Held, kind: str, **detail: Any) -> bool:
    event = ledger.events(held.id)[-1]
    said = {name: event.detail.get(name) for name in detail}
    return (event.kind, event.actor, event.reason, said) == (kind, "ann", "looked it up", detail)


# -- resolve -----------------------------------------------------------------------------------------------------------


def test_p13_it_happened_with_this_result_is_replayed(ledger: Ledger) -> None:
    held = in_state(ledger, State.IN_DOUBT)
    assert ledger.resolve(held.id, "happened", result=b'"ch_1"', reference="ch_1", **WORDS) == "ok"
    claim = ledger.claim(held.order, engine.holder())
    assert (claim.verdict, claim.result) == (Verdict.REPLAY, Result(b'"ch_1"'))
    assert traced(ledger, held, "resolved", answer="happened", reference="ch_1")


def test_p13_it_happened_without_a_result_is_done_and_says_that_there_is_none(ledger: Ledger) -> None:
    held = in_state(ledger, State.IN_DOUBT)
    assert ledger.resolve(held.id, "happened", **WORDS) == "ok"
    claim = ledger.claim(held.order, engine.holder())
    assert claim.verdict is Verdict.REPLAY
    assert claim.result == Result(None, "resolved by hand without a result")


def test_p13_it_did_not_happen_runs_again_under_the_same_vendor_key(ledger: Ledger, sql: SQL) -> None:
    held = in_state(ledger, State.IN_DOUBT)
    books.long_ago(sql, held.id)
    assert ledger.resolve(held.id, "did_not_happen", **WORDS) == "ok"
    assert state_of(ledger, held.order) is State.PENDING
    assert traced(ledger, held, "resolved", answer="did_not_happen", forced=False)
    assert enter(ledger, held.order).claim.attempt == held.claim.attempt


def test_p05_it_did_not_happen_is_too_early_while_the_call_may_still_arrive(ledger: Ledger, sql: SQL) -> None:
    held = in_state(ledger, State.IN_DOUBT)
    before = line(sql, held.id)[0]
    assert ledger.resolve(held.id, "did_not_happen", **WORDS) == "too_early"
    assert line(sql, held.id)[0] == before
    assert ledger.resolve(held.id, "did_not_happen", force=True, **WORDS) == "ok"
    assert traced(ledger, held, "resolved", forced=True)


def test_p13_a_record_that_a_person_gave_up_is_not_run_but_may_have_happened_after_all(ledger: Ledger) -> None:
    held = in_state(ledger, State.IN_DOUBT)
    assert ledger.resolve(held.id, "failed", **WORDS) == "ok"
    claim = ledger.claim(held.order, engine.holder())
    assert (claim.verdict, claim.reason) == (Verdict.REFUSED, "failed")
    assert ledger.resolve(held.id, "happened", result=b"1", **WORDS) == "ok"
    assert ledger.claim(held.order, engine.holder()).verdict is Verdict.REPLAY


def test_p13_calls_are_resolved_one_by_one_and_the_next_run_goes_on_after_them(ledger: Ledger, sql: SQL) -> None:
    held = doubtful(ledger, sql, "charge", "email", "book")
    assert ledger.resolve(held.id, "happened", call="charge", result=b'"ch_1"', **WORDS) == "ok"
    assert ledger.resolve(held.id, "did_not_happen", call="email", **WORDS) == "ok"
    assert record_of(ledger, held).open_calls == 1
    assert state_of(ledger, held.order) is State.IN_DOUBT
    assert ledger.resolve(held.id, "failed", call="book", **WORDS) == "ok"
    assert state_of(ledger, held.order) is State.FAILED
    assert ledger.resolve(held.id, "happened", call="book", **WORDS) == "ok"
    after = enter(ledger, held.order)
    answers = after.write(intents=[("charge", "{}"), ("email", "{}"), ("book", "{}")]).intents
    assert [answer.verdict for answer in answers.values()] == ["replay", "run", "replay"]
    assert answers["charge"].result == Result(b'"ch_1"')
    assert answers["book"].result == Result(None, "resolved by hand without a result")


def test_p02_a_person_says_later_what_a_call_gave_back_and_is_told_to(ledger: Ledger, sql: SQL) -> None:
    held = doubtful(ledger, sql, "charge", "it's booked")
    for call in ("charge", "it's booked"):
        assert ledger.resolve(held.id, "happened", call=call, **WORDS) == "ok"
    stands = explain.standing(record_of(ledger, held), ledger.calls(held.id), ledger.check()["now"])
    assert stands.why.startswith(
        "Part of it happened and is not called again: charge, it's booked. But nobody has said"
    )
    (command, _) = stands.commands.values()
    assert "--call=charge --happened --result=JSON" in command
    assert ledger.resolve(held.id, "happened", call="charge", **WORDS) == "not_in_doubt"
    assert ledger.resolve(held.id, "happened", call="charge", result=b'"ch_1"', **WORDS) == "ok"
    assert ledger.resolve(held.id, "happened", call="charge", result=b'"ch_2"', **WORDS) == "not_in_doubt"
    assert ledger.resolve(held.id, "happened", call="it's booked", result=b"2", **WORDS) == "ok"
    assert traced(ledger, held, "resolved", answer="the missing result", call="it's booked")
    stands = explain.standing(record_of(ledger, held), ledger.calls(held.id), ledger.check()["now"])
    assert stands.why.startswith(
        "Part of it happened and is not called again: charge, it's booked. The rest is still to be done"
    )
    answers = enter(ledger, held.order).write(intents=[("charge", "{}"), ("it's booked", "{}")]).intents
    assert [answer.result for answer in answers.values()] == [Result(b'"ch_1"'), Result(b"2")]


@pytest.mark.parametrize("others", [0, 1])
def test_p05_a_late_outcome_of_a_call_that_a_person_denied_is_doubt_also_while_others_are_in_doubt(
    ledger: Ledger, sql: SQL, others: int
) -> None:
    held = doubtful(ledger, sql, "charge", *["email"][:others])
    assert ledger.resolve(held.id, "did_not_happen", call="charge", **WORDS) == "ok"
    held.outcome("charge")
    assert "a stale holder reports that it was applied" in record_of(ledger, held).error
    for _ in range(others):
        assert ledger.resolve(held.id, "happened", call="email", **WORDS) == "ok"
    assert state_of(ledger, held.order) is State.IN_DOUBT
    assert ledger.claim(held.order, engine.holder()).verdict is Verdict.IN_DOUBT
    assert ledger.resolve(held.id, "happened", call="charge", result=b'"ch_1"', **WORDS) == "ok"
    answer = enter(ledger, held.order).write(intents=[("charge", "{}")]).intents["charge"]
    assert answer.result == Result(b'"ch_1"')


@pytest.mark.parametrize("kept", ["digest", "none"])
def test_p02_what_a_person_says_of_one_call_is_stored_no_further_than_its_author_allowed(
    ledger: Ledger, sql: SQL, kept: str
) -> None:
    held = enter(ledger, engine.order(fresh(), calls="explicit", store_result=kept))
    assert held.intent("charge") == "run"
    books.expire(sql, held.id)
    assert ledger.claim(held.order, engine.holder()).verdict is Verdict.IN_DOUBT
    assert ledger.resolve(held.id, "happened", call="charge", result=b'"secret"', **WORDS) == "ok"
    held.write(outcomes=[Outcome("charge", result=Result(b'"secret, and late"'))])
    rows = sql.execute("select result, result_digest from runguard.call where record_id = %s", [held.id]).fetchall()
    assert rows == [(None, hashlib.sha256(b'"secret"').digest() if kept == "digest" else None)]
    assert ("late_outcome" in kinds(ledger, held.id)) is (kept == "digest"), "without a digest it is the same answer"
    assert not any("secret" in str(event.detail) for event in ledger.events(held.id))
    answer = enter(ledger, held.order).write(intents=[("charge", "{}")]).intents["charge"]
    assert (answer.verdict, answer.result is not None and answer.result.data) == ("replay", None)


def test_p13_a_body_named_as_a_call_is_the_whole_record(ledger: Ledger) -> None:
    held = in_state(ledger, State.IN_DOUBT)
    assert ledger.resolve(held.id, "happened", call="body", result=b"1", **WORDS) == "ok"
    assert ledger.claim(held.order, engine.holder()).result == Result(b"1")


@pytest.mark.parametrize("state", [State.PENDING, State.RUNNING, State.DONE, State.PAUSED])
def test_p13_only_a_doubt_is_resolved(ledger: Ledger, sql: SQL, state: State) -> None:
    held = in_state(ledger, state)
    before = line(sql, held.id)[0]
    for answer in ("happened", "did_not_happen", "failed"):
        assert ledger.resolve(held.id, answer, force=True, **WORDS) == "not_in_doubt"
    assert line(sql, held.id)[0] == before


def test_p13_the_second_of_two_answers_finds_no_doubt(ledger: Ledger) -> None:
    held = in_state(ledger, State.IN_DOUBT)
    assert ledger.resolve(held.id, "happened", **WORDS) == "ok"
    assert ledger.resolve(held.id, "did_not_happen", force=True, **WORDS) == "not_in_doubt"


def test_p13_an_answer_to_an_older_holder_s_doubt_is_refused(ledger: Ledger) -> None:
    held = in_state(ledger, State.IN_DOUBT)
    assert ledger.resolve(held.id, "happened", seen_fence=held.claim.fence - 1, **WORDS) == "moved"
    assert ledger.resolve(held.id, "happened", seen_fence=held.claim.fence, **WORDS) == "ok"


def test_p13_what_is_no_answer_changes_nothing(ledger: Ledger, sql: SQL) -> None:
    held = doubtful(ledger, sql, "charge")
    before = line(sql, held.id)[0]
    assert ledger.resolve(held.id, "happened", call="refund", **WORDS) == "no_such_call"
    assert ledger.resolve(held.id + 10**6, "happened", **WORDS) == "missing"
    with pytest.raises(psycopg.errors.RaiseException, match="did_not_hapen"):
        ledger.resolve(held.id, "did_not_hapen", **WORDS)
    assert line(sql, held.id)[0] == before


# -- reopen, release, rename -------------------------------------------------------------------------------------------


def test_p13_reopen_makes_a_new_generation_with_a_new_vendor_key_and_keeps_the_old_result(ledger: Ledger) -> None:
    held = in_state(ledger, State.DONE)
    reopen = partial(ledger.reopen, held.id, seen_generation=1, **WORDS)
    assert reopen() == "applied"
    assert reopen(again_although_applied=True) == "ok"
    assert traced(ledger, held, "reopened", state="done", result='"ok"')
    again = enter(ledger, held.order)
    assert (again.claim.generation, again.claim.fence) == (2, held.claim.fence + 1)
    assert [(call.generation, call.state) for call in ledger.calls(held.id)] == [(1, "done"), (2, "started")]
    assert held.settle(State.DONE).verdict == "lost"


def test_p13_reopen_of_what_had_no_effect_needs_no_further_word(ledger: Ledger) -> None:
    held = in_state(ledger, State.FAILED)
    assert ledger.reopen(held.id, seen_generation=1, **WORDS) == "ok"


def test_p13_reopen_asks_although_only_an_earlier_call_was_applied(ledger: Ledger) -> None:
    held = enter(ledger, engine.order(fresh(), calls="explicit"))
    held.write(intents=[("charge", "{}"), ("email", "{}")])
    held.write(outcomes=[books.said("charge"), books.said("email", books.DECLINED)])
    held.settle(State.FAILED, books.DECLINED)
    assert ledger.reopen(held.id, seen_generation=1, **WORDS) == "applied"


@pytest.mark.parametrize("state", [State.PENDING, State.RUNNING, State.PAUSED, State.IN_DOUBT])
def test_p13_only_finished_work_is_reopened(ledger: Ledger, state: State) -> None:
    held = in_state(ledger, state)
    reopened = ledger.reopen(held.id, seen_generation=1, again_although_applied=True, **WORDS)
    assert reopened == "not_finished"


def test_p13_a_released_holder_that_called_nothing_leaves_the_record_free(ledger: Ledger) -> None:
    held = enter(ledger, engine.order(fresh(), calls="explicit"))
    assert ledger.release(held.id, seen_fence=held.claim.fence + 1, **WORDS) == "moved"
    assert ledger.release(held.id, **WORDS) == "ok"
    assert traced(ledger, held, "released")
    assert held.intent("charge") == "lost"
    assert ledger.release(held.id, **WORDS) == "not_running"


def test_p13_a_released_holder_with_an_open_call_leaves_doubt_that_it_may_still_settle(ledger: Ledger) -> None:
    held = in_state(ledger, State.RUNNING)
    assert ledger.release(held.id, **WORDS) == "ok"
    assert ledger.claim(held.order, engine.holder()).verdict is Verdict.IN_DOUBT
    assert held.settle(State.DONE).state is State.DONE


def test_p13_a_renamed_record_answers_to_its_new_name(ledger: Ledger) -> None:
    held, name = in_state(ledger, State.DONE), fresh()
    assert ledger.rename(held.id, namespace="billing", key=name, **WORDS) == "ok"
    assert traced(ledger, held, "renamed", **{"from": ["billing", held.order.identity.key]})
    assert ledger.claim(engine.order(name), engine.holder()).verdict is Verdict.REPLAY


def test_p13_a_name_that_is_taken_or_work_under_way_is_not_renamed(ledger: Ledger, sql: SQL) -> None:
    other = in_state(ledger, State.DONE).order.identity
    for state in State:
        held = in_state(ledger, state)
        before = line(sql, held.id)[0]
        word = ledger.rename(held.id, namespace="billing", key=other.key, **WORDS)
        assert word == ("taken" if state in {State.PENDING, State.DONE, State.FAILED} else "under_way")
        assert line(sql, held.id)[0] == before


# -- the trace ---------------------------------------------------------------------------------------------------------

CHANGES: list[tuple[State, str, Callable[[Ledger, int], str]]] = [
    (State.IN_DOUBT, "resolved", lambda ledger, n: ledger.resolve(n, "happened", **WORDS)),
    (State.FAILED, "reopened", lambda ledger, n: ledger.reopen(n, seen_generation=1, **WORDS)),
    (State.RUNNING, "in_doubt", lambda ledger, n: ledger.release(n, **WORDS)),
    (State.DONE, "payload_accepted", lambda ledger, n: ledger.accept_payload(n, **WORDS)),
    (State.DONE, "renamed", lambda ledger, n: ledger.rename(n, namespace="billing", key=fresh(), **WORDS)),
]


@pytest.mark.parametrize(("state", "kind", "change"), CHANGES, ids=[kind for _, kind, _ in CHANGES])
def test_p13_a_change_and_its_event_are_one_transaction(
    ledger: Ledger, ledger_url: str, sql: SQL, state: State, kind: str, change: Callable[[Ledger, int], str]
) -> None:
    held = in_state(ledger, state)
    before, events = line(sql, held.id)[0], kinds(ledger, held.id)
    with closing(psycopg.connect(ledger_url)) as connection:
        person = Ledger(lambda: connection, deployment=engine.DEPLOYMENT)
        person.check()
        connection.execute("begin")
        assert change(person, held.id) == "ok"
        assert kinds(person, held.id) == [*events, kind]
        connection.execute("rollback")
    assert (line(sql, held.id)[0], kinds(ledger, held.id)) == (before, events)


@pytest.mark.parametrize(
    "statement",
    ["update runguard.event set reason = 'nothing'", "delete from runguard.event", "truncate runguard.event"],
)
def test_p13_events_are_never_changed(ledger: Ledger, sql: SQL, statement: str) -> None:
    in_state(ledger, State.DONE)
    with pytest.raises(psycopg.errors.RaiseException, match="append-only"):
        sql.execute(statement)


@pytest.mark.parametrize("statement", ["delete from runguard.record", "truncate runguard.record"])
def test_p08_records_are_never_deleted(ledger: Ledger, sql: SQL, statement: str) -> None:
    in_state(ledger, State.DONE)
    with pytest.raises(psycopg.errors.RaiseException, match="refused"):
        sql.execute(statement)


# -- the arrows --------------------------------------------------------------------------------------------------------

TO = """
update runguard.record set state = %(to)s, fence = fence + 1, generation = generation + (%(to)s = 'pending')::int,
       lease_until = case when %(to)s = 'running' then clock_timestamp() + interval '1 h' end,
       finished_at = case when %(to)s = 'done' then clock_timestamp() end,
       completeness = case when %(to)s = 'done' then 'full' else 'none' end, result = null, result_digest = null,
       result_missing = case when %(to)s = 'done' then 'a test' end, open_calls = 0, needs_person = false,
       failure_class = case when %(to)s in ('failed', 'in_doubt') then 'unknown' end,
       effect = case %(to)s when 'done' then 'applied' when 'in_doubt' then 'unknown' when 'failed' then 'unknown' end,
       resume_at = case when %(to)s = 'paused' then clock_timestamp() end,
       first_unknown_at = case when %(to)s = 'in_doubt' then clock_timestamp() end
 where id = %(id)s
"""


def test_every_pair_of_states_is_allowed_or_refused_as_the_transitions_say(ledger: Ledger, sql: SQL) -> None:
    allowed = set()
    for source, target in itertools.product(State, State):
        held = in_state(ledger, source)
        refused = False
        try:
            with sql.transaction():
                sql.execute("select runguard.open_for_writing()")
                sql.execute(TO, {"to": target, "id": held.id})
        except psycopg.errors.RaiseException as error:
            refused = f"no transition from {source} to {target}" in str(error)
            if "only a batch, whose list may have grown, goes on after done" in str(error):  # test_batch.py shows it
                allowed.add((source, target))
                continue
        assert record_of(ledger, held).broken == ""
        if not refused:
            assert state_of(ledger, held.order) is target
            allowed.add((source, target))
    assert allowed == {(arrow.source, arrow.target) for arrow in TRANSITIONS}


@pytest.mark.parametrize(
    ("state", "change", "refusal"),
    [
        (State.FAILED, "state = 'running', lease_until = now()", "raises the fence"),
        (State.FAILED, "state = 'pending', failure_class = null, effect = null", "new generation"),
        (State.DONE, "state = 'pending', finished_at = null, completeness = 'none'", "new generation"),
        (State.DONE, "fence = fence - 1", "never fall"),
        (State.DONE, "generation = generation - 1", "never fall"),
    ],
)
def test_p05_the_database_itself_refuses_what_would_undo_a_fence(
    ledger: Ledger, sql: SQL, state: State, change: str, refusal: str
) -> None:
    held = in_state(ledger, state)
    with pytest.raises(psycopg.errors.RaiseException, match=refusal):
        sql.execute(f"update runguard.record set {change} where id = %s", [held.id])


def test_p04_the_same_outcome_sent_again_changes_nothing(ledger: Ledger, sql: SQL) -> None:
    held = enter(ledger, engine.order(fresh(), calls="explicit"))
    held.intent("charge")
    for outcome in (books.said("charge", books.UNKNOWN), Outcome("charge", result=Result(b"1"))):
        held.write(outcomes=[outcome])
        events, calls = kinds(ledger, held.id), ledger.calls(held.id)
        for _ in range(2):
            held.write(outcomes=[outcome])
        assert (kinds(ledger, held.id), ledger.calls(held.id)) == (events, calls)
