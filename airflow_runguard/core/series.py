"""Series: the ordered line of keys of one recurring job, and what the run before means to the next one.

The nouns and the sentences; no I/O. The rule itself is ``runguard.may_follow`` in ``sql/series.sql``, asked by the
sensor, by the watcher that wakes it, and (under the lock of the series' row) by a guard that waits for the one before.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from airflow_runguard.core.errors import PlanningError

ON_FAILED = ("wait", "fail", "skip", "go")
ON_ABSENT = ("wait", "fail")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where a run stands in its series, and what it wants of the one before.

    :param place: text that sorts, byte by byte, as the series is ordered.
    :param expected: the place of the one before, where the caller knows the order; ``""`` = there is none before;
        ``None`` = it does not know, and the latest earlier one that the ledger has counts.
    :param waits: it takes the turn of the series with its claim; else it only says where it stands.
    :param min_gap: seconds since the end of the one before.
    :param partial: one that is done in part is enough.
    :param on_failed: the one before is failed, in doubt or paused, or done only in part: ``wait``, ``fail``, ``skip``,
        ``go``.
    :param on_absent: there should be one before, and the ledger has none: ``wait`` or ``fail``.
    """

    series: str
    place: str
    expected: str | None = None
    waits: bool = True
    min_gap: float = 0.0
    partial: bool = False
    on_failed: str = "wait"
    on_absent: str = "wait"

    def __post_init__(self) -> None:
        for name in ("series", "place"):
            if not 0 < len(getattr(self, name)) <= 512:
                raise PlanningError(f"A {name} of a series has 1 to 512 characters, not {len(getattr(self, name))}.")
        if self.expected is not None and self.expected >= self.place:
            raise PlanningError(
                f"The place before {self.place!r} cannot be {self.expected!r}, which does not sort before it.",
                "Order a series by text that sorts (2026-10-01, or numbers given by a function).",
            )


@dataclass(frozen=True, slots=True)
class Before:
    """What stands before a place.

    :param verdict: ``go``, ``wait``, ``fail`` or ``skip``.
    :param standing: why: ``none``, ``absent``, ``done``, ``gap``, ``partial``, ``running``, ``pending``, ``failed``,
        ``in_doubt``, ``paused``, ``broken``, ``lost_time``.
    :param name: of the record before (or only its place, where it is absent).
    :param until: when ``min_gap`` is over.
    """

    verdict: str
    standing: str
    name: str
    holder: str
    why: str
    until: datetime | None
    now: datetime

    @property
    def seconds(self) -> float | None:
        return None if self.until is None else (self.until - self.now).total_seconds()

    def sentence(self, series: str) -> str:
        """What is so, and what a person can type where somebody must."""
        name = self.name
        explain = f"`airflow runguard explain '{name}'` says what moves it on."
        match self.standing:
            case "none":
                return f"Nothing comes before this one in series {series!r}."
            case "absent":
                return (
                    f"Before this one, series {series!r} should have {name!r}, and the ledger has no record of it: "
                    "nobody can say that it was finished. If it was, book it with `airflow runguard baseline`."
                )
            case "lost_time":
                return (
                    f"The ledger lost time ({self.why}), so it cannot say whether the previous one of {series!r} was "
                    "finished. When you know: `airflow runguard db acknowledge-restore --lost-since TIME --reason …`."
                )
            case "broken":
                return (
                    f"The previous one of series {series!r}, {name}, is in the ledger but cannot be read: {self.why}. "
                    f"Nothing goes on from there. Run `airflow runguard repair '{name}'`."
                )
            case "running":
                return f"The previous one of series {series!r}, {name}, is being worked on by {self.holder}."
            case "gap":
                until = f"{self.until:%Y-%m-%d %H:%M:%S %Z}" if self.until else "later"
                return f"The previous one of series {series!r}, {name}, is finished; min_gap is over at {until}."
            case "done":
                return f"The previous one of series {series!r}, {name}, is finished."
            case "partial":
                return f"The previous one of series {series!r}, {name}, is done only in part. {explain}"
        said = f" ({self.why})" if self.why else ""
        return f"The previous one of series {series!r}, {name}, is {self.standing.replace('_', ' ')}{said}. {explain}"
