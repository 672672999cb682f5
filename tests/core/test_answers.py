"""Every way of answering a doubt, in every order with a late outcome and a retry: never a second effect unless somebody
said that the first had not happened, and nothing that is known is lost (P3, P5, P10)."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from itertools import permutations

import pytest

from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Order, Outcome, State, Verdict
from tests.core import engine
from tests.core.books import NEVER_SENT, Held, enter, said


@dataclass
class Story:
    """One record in doubt, and what has been done about it. :param effects: that the vendor has had."""

    ledger: Ledger
    what: Order
    first: Held
    effects: int
    denied: bool = False
    """Whether anybody, or the first caller itself, said that it did not happen."""
    done: list[str] = field(default_factory=list)

    def record_state(self) -> State | None:
        record = self.ledger.get(self.what.identity)
        assert record is not None
        assert record.broken == "", (self.done, record.broken)
        return record.state


Step = Callable[[Story], None]


def resolve(story: Story, answer: str, call: str | None) -> None:
    result = b'"said"' if answer == "happened" else None
    verdict = story.ledger.resolve(
        story.first.id, answer, call=call, result=result, actor="person:ann", reason="asked", force=True
    )
    story.denied |= verdict == "ok" and answer == "did_not_happen"


def form_happened(story: Story) -> None:
    resolve(story, "happened", "pay")


def command_happened(story: Story) -> None:
    resolve(story, "happened", None)


def did_not_happen(story: Story) -> None:
    resolve(story, "did_not_happen", "pay")


def leave_failed(story: Story) -> None:
    resolve(story, "failed", None)


def nobody_answered(story: Story) -> None:
    record = story.ledger.get(story.what.identity)
    assert record is not None
    story.ledger.give_up_asking(record.id, seen_fence=record.fence, actor="task", reason="timeout")


def late_outcome(story: Story) -> None:
    """The first caller hears of its call after all, and tells the truth."""
    if story.effects and story.done.count("retry_called") == 0:
        story.first.write(outcomes=[said("pay")])
    elif not story.effects:
        story.first.write(outcomes=[Outcome("pay", failure=NEVER_SENT)])
        story.denied = True


def retry(story: Story) -> None:
    """Airflow runs the task again: it claims, calls if it may, settles."""
    claim = story.ledger.claim(story.what, who := engine.holder())
    if claim.verdict is not Verdict.RUN:
        return
    held = Held(story.ledger, story.what, claim, who)
    if held.intent("pay") == "run":
        assert story.denied, f"a second call although nobody said that the first had not happened: {story.done}"
        story.effects += 1
        story.done.append("retry_called")
        held.outcome("pay")
    held.write(settlement=engine_settlement())


def engine_settlement() -> object:
    from airflow_runguard.core.record import Result, Settlement

    return Settlement(State.DONE, result=Result(b'"done"'))


STEPS: tuple[Step, ...] = (
    form_happened,
    command_happened,
    did_not_happen,
    leave_failed,
    nobody_answered,
    late_outcome,
    retry,
)


@pytest.mark.parametrize("happened", [True, False], ids=["it had happened", "it had not"])
def test_p03_every_order_of_answers_late_outcome_and_retry(ledger_url: str, happened: bool) -> None:
    with closing(engine.open_ledger(ledger_url)) as ledger:
        for number, steps in enumerate(permutations(STEPS, 3)):
            what = engine.order(f"k{number}", calls="explicit")
            first = enter(ledger, what)
            assert first.intent("pay") == "run"
            assert ledger.release(first.id, actor="sweep", reason="it is silent") == "ok"
            story = Story(ledger, what, first, effects=int(happened))
            assert story.record_state() is State.IN_DOUBT
            for step in (*steps, retry, retry):
                step(story)
                story.done.append(step.__name__)
                story.record_state()
            if happened and not story.denied:
                assert story.effects == 1, story.done
            assert story.effects <= 2, story.done
            if story.record_state() is State.DONE:
                before = story.effects
                retry(story)
                assert story.effects == before, story.done
