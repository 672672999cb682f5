"""Through a running Airflow: a batch that is told to stop, marked failed, or timed out while three calls are under way.

Of eight items two are done then, three are charged and wait for the vendor's answer, three are not begun. The vendor
ignores idempotency keys. The scenarios run side by side with those of asking.
"""

from __future__ import annotations

import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from airflow_runguard.core.record import State
from demo.drive import PATIENCE, TASK
from demo.ground import Ground
from demo.processes import alive, wait_for
from tests.scheduler.test_asking import HAPPENED, Asked

pytestmark = [pytest.mark.scheduler, pytest.mark.timeout(900)]

ITEMS = 8


class Interrupted(Asked):
    def __init__(self, ground: Ground, name: str) -> None:
        super().__init__(ground, name, "interrupted")
        self.all = f"{self.dag_id}/{self.invoice}/*"

    def begin(self) -> str:
        """Return when the vendor has charged five items and holds back the answers of three."""
        self.vendor.script(customer=self.all, times=2)
        self.vendor.script(customer=self.all, times=3, gate=self.all)
        run_id = self.start()
        self.vendor.wait(self.all, charged=5, timeout=PATIENCE)
        self.process = self.processes(run_id).task
        return run_id

    def until_gone(self) -> None:
        wait_for(lambda: not alive(self.process), PATIENCE, f"the first process of {self.invoice} has ended", pause=0.2)

    def end(self, run_id: str) -> dict[str, Any]:
        end, record = super().end(run_id), self.record().id
        events = self.on_ledger(lambda ledger: ledger.events(record))
        called: dict[int, list[str]] = {}
        for event in events:
            if event.kind in ("items_called", "called"):
                names = event.detail.get("names") or [event.detail["call"]]
                called.setdefault(event.fence, []).extend(name.rpartition("/")[2] for name in names)
        return {
            **end,
            "items": self.items(),
            "called": [sorted(names) for _, names in sorted(called.items())],
            "charged": Counter(effect.customer for effect in self.vendor.effects(self.all)),
            "each once": {f"{self.dag_id}/{self.invoice}/{number}": 1 for number in range(ITEMS)},
        }

    def settled_by_a_person(self, run_id: str) -> dict[str, Any]:
        """The next try has called what was left, and asks about the rest, whose answers nobody hears any more."""
        self.vendor.release(self.all)
        self.until_parked(run_id)
        parked, form = self.items(), self.api.form(self.dag_id, run_id, TASK)
        self.answer(run_id, HAPPENED, reason="seen in the portal")
        return {"parked": parked, "form": form["subject"], **self.end(run_id)}


def told_to_stop(ground: Ground) -> Any:
    drive = Interrupted(ground, "batch-stopped")
    run_id = drive.begin()
    drive.process.terminate()
    drive.vendor.wait(f"{drive.dag_id}/told/{drive.invoice}", charged=1, timeout=PATIENCE)
    drive.vendor.release(drive.all)
    drive.until_gone()
    return drive.end(run_id)


def marked_failed(ground: Ground) -> Any:
    drive = Interrupted(ground, "batch-marked")
    run_id = drive.begin()
    drive.mark_failed(run_id)
    drive.until_gone()
    wait_for(lambda: drive.record().state is State.IN_DOUBT, PATIENCE, "its lease is over", pause=0.5)
    ended = drive.items()
    drive.clear(run_id)
    return {"ended": ended, **drive.settled_by_a_person(run_id)}


def timed_out(ground: Ground) -> Any:
    drive = Interrupted(ground, "batch-timed-out")
    run_id = drive.begin()
    drive.process.send_signal(signal.SIGALRM)
    drive.until_gone()
    return {"ended": drive.items(), **drive.settled_by_a_person(run_id)}


SCENARIOS = (told_to_stop, marked_failed, timed_out)
Scenario = Callable[[Ground], Any]
After = Callable[[Scenario], Any]


def test_r44_a_batch_that_is_told_to_stop_settles_what_is_under_way_and_the_next_try_calls_the_rest(
    after: After,
) -> None:
    end = after(told_to_stop)
    assert (end["run"], end["tries"], end["record"], end["items"]) == ("success", 2, "done", {"done": ITEMS})
    assert end["charged"] == end["each once"]
    first, second = end["called"]
    assert (len(first), sorted(first + second)) == (5, [str(number) for number in range(ITEMS)])
    assert (end["result"]["done"], end["result"]["replayed"]) == (ITEMS, 5)


@pytest.mark.parametrize("interrupted", [marked_failed, timed_out])
def test_r44_a_batch_that_is_ended_with_calls_under_way_has_them_in_doubt_and_calls_only_the_rest_later(
    interrupted: Scenario, after: After
) -> None:
    """Its process is gone while the vendor still keeps the answers back, so no thread of it is waited for. Timed out,
    it asks at once, and goes on when it has its answer; marked failed, it cannot, and the next try asks in the end."""
    end = after(interrupted)
    ended = {"done": 2, "in_doubt": 3, "pending": 3}
    assert end["ended"] == ended
    assert end["parked"] == (ended if interrupted is timed_out else {"done": 5, "in_doubt": 3})
    assert end["form"].startswith("Did these 3 items of asking/invoice/")
    assert (end["run"], end["record"], end["items"]) == ("success", "done", {"done": ITEMS})
    assert end["charged"] == end["each once"]
    first, second = end["called"]
    assert (len(first), sorted(first + second)) == (5, [str(number) for number in range(ITEMS)])
