"""What pages and scripts read of a whole ledger: lists, numbers, one record with what hangs on it.

Every list is read by key (what comes after the last one seen), never by offset, and looks at a bounded number of lines
for each answer, however large the ledger is; numbers come from the roll-up, not from counting. What a reader may not
see is left out by the statement itself. The SQL is ``sql/board.sql``.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any

import psycopg
from psycopg.rows import DictRow

from airflow_runguard.core.errors import PlanningError
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import State
from airflow_runguard.core.seam import queries

FIRST, BUDGET = 500, 5_000
"""Lines that one statement may look at: the first of an answer, and each further one while too few fit."""
PATIENCE = 0.06
"""Seconds after which an answer says how far it came, instead of looking further."""
LEAST = 64
"""Lines of each branch (a DAG, a state, a namespace) that one answer looks at in any case."""
MANY = 10_000
"""Beyond it, what has no roll-up is not counted further: "more than"."""
SKEW = 1_000
"""Numbers by which two records that begin at the same moment may be out of the order of their times."""
FOLD_AT = 1_000
"""Changes not added up yet, from which on reading the numbers adds them up."""
FAR = 2**62

WAITING = (State.PAUSED.value, State.IN_DOUBT.value)
UNFINISHED = tuple(state.value for state in State if state is not State.DONE)
DIRECTIONS = {
    "newest": {"cmp": "<", "edge": "min", "far": "max", "dir": "desc"},
    "oldest": {"cmp": ">", "edge": "max", "far": "min", "dir": "asc"},
}
SORTS = ("newest", "oldest", "name")

Readable = Collection[str] | None
"""The DAGs whose records a reader may see; ``None`` = all records, also those of no DAG."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Filter:
    """Which records are wanted; ``None`` = whichever.

    :param failure_class: ``none`` = those without one. :param prefix: of the key.
    :param holder: the host, the run or the id of the task instance that has or had it.
    :param prevented: ``replay`` or ``doubt``: a plain retry would have had its effect twice, in the last 30 days.
    :param waiting: has a turn at a gate: paused, or in doubt and about to be sent again.
    :param since, until: when the record began.
    """

    states: tuple[str, ...] | None = None
    failure_class: str | None = None
    dag_id: str | None = None
    task_id: str | None = None
    run_id: str | None = None
    map_index: int | None = None
    namespace: str | None = None
    prefix: str | None = None
    partition: str | None = None
    gate: str | None = None
    currency: str | None = None
    holder: str | None = None
    needs_person: bool = False
    waiting: bool = False
    prevented: str | None = None
    since: datetime | None = None
    until: datetime | None = None


@dataclass(frozen=True, slots=True)
class Page:
    """:param after: where the next one goes on; ``None`` = there is no more. Rows may be fewer than asked for, even
    none, although there is more: then the lines looked at had no others that fit."""

    rows: Sequence[Mapping[str, Any]]
    after: str | None
    now: datetime | None


Look = Callable[[str | None, int, int], Page]
"""One statement: where it goes on, how many are wanted, how many lines it may look at."""


@cache
def statements() -> Mapping[str, str]:
    """The blocks of ``board.sql``, each ``@name`` filled in; those with a direction once for each."""
    blocks = queries("board.sql")

    def filled(text: str) -> str:
        return re.sub(r"@(\w+)", lambda found: filled(blocks[found[1]].rstrip()), text)

    whole: dict[str, str] = {}
    for name, text in blocks.items():
        text = filled(text)
        if "{cmp}" not in text:
            whole[name] = text
            continue
        for direction, words in DIRECTIONS.items():
            whole[f"{name}_{direction}"] = re.sub(r"\{(\w+)\}", lambda found, words=words: words[found[1]], text)  # type: ignore[misc]
    return whole


class Board(Ledger):
    """A ledger with the reading that pages need. One connection, used by one thread."""

    def __enter__(self) -> Board:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- lists -------------------------------------------------------------------------------------------------------

    def page(
        self,
        wanted: Filter,
        *,
        readable: Readable = None,
        sort: str | None = None,
        after: str | None = None,
        limit: int = 50,
    ) -> Page:
        """A page of records.

        :param sort: ``newest``, ``oldest`` or ``name``; by default ``name`` where a prefix is given, else ``newest``.
        :raises PlanningError: ``after`` is not what an earlier page gave.
        """
        sort = sort or ("name" if wanted.prefix else "newest")
        look = self._by_name(wanted, readable) if sort == "name" else self._by_number(wanted, readable, sort)
        rows: list[Mapping[str, Any]] = []
        budget, end = FIRST, time.monotonic() + PATIENCE
        while True:
            page = look(after, limit - len(rows), budget)
            rows += page.rows
            after, budget = page.after, BUDGET
            if after is None or len(rows) == limit or time.monotonic() > end:
                return Page(rows, after, page.now)

    def whole(
        self, wanted: Filter, *, readable: Readable = None, sort: str | None = None
    ) -> Iterator[Mapping[str, Any]]:
        """All records that fit, one page in memory at a time."""
        after: str | None = None
        while True:
            page = self.page(wanted, readable=readable, sort=sort, after=after, limit=500)
            yield from page.rows
            after = page.after
            if after is None:
                return

    def some(self, ids: Sequence[int], *, readable: Readable = None) -> Sequence[Mapping[str, Any]]:
        """These records as a list has them; those that may not be seen are missing."""
        return self._all("page_ids", {"ids": list(ids), "deployment": self.deployment, "dags": _listed(readable)})

    def namespaces(self, limit: int = 5_000) -> list[str]:
        return [row["namespace"] for row in self._all("namespaces", {"deployment": self.deployment, "limit": limit})]

    def _source(self, wanted: Filter, readable: Readable) -> tuple[str, Sequence[str]]:
        """The index that leads to these records, and the branches of it."""
        if wanted.needs_person:
            return "person", ()
        if wanted.run_id is not None:
            return "run", ()
        states = self._states(wanted)
        if states is not None and State.DONE not in states:
            return "state", states
        if wanted.prevented is not None:
            return "prevented", ()
        if wanted.dag_id is not None:
            return "dag", (wanted.dag_id,)
        if readable is not None:
            return "dag", sorted(readable)
        return "all", ()

    def _states(self, wanted: Filter) -> Sequence[str] | None:
        """Only what is not done has a failure class, and only what is paused or in doubt waits at a gate."""
        if wanted.states is not None:
            return wanted.states
        if wanted.waiting:
            return WAITING
        return UNFINISHED if wanted.failure_class not in (None, "none") else None

    def _matching(self, wanted: Filter, readable: Readable) -> dict[str, Any]:
        states = self._states(wanted)
        return {
            "deployment": self.deployment,
            "dags": _listed(readable),
            **{name: getattr(wanted, name) for name in Filter.__slots__},
            "states": None if states is None else list(states),
        }

    def _by_number(self, wanted: Filter, readable: Readable, sort: str) -> Look:
        source, branches = self._source(wanted, readable)
        parameters = {
            **self._matching(wanted, readable),
            "branches": list(branches),
            "low": 0 if wanted.since is None else self._id_at(wanted.since) - SKEW,
            "high": FAR if wanted.until is None else self._id_at(wanted.until) + SKEW,
        }
        begin = FAR if sort == "newest" else -FAR
        share = max(len(branches), 1)

        def look(after: str | None, limit: int, budget: int) -> Page:
            rows = self._all(
                f"page_{source}_{sort}",
                {
                    **parameters,
                    "after": _number(after) if after else begin,
                    "limit": limit + 1,
                    "budget": max(LEAST, budget // share),
                },
            )
            if not rows:
                return Page((), None, None)
            found = [row for row in rows if row["id"] is not None]
            searched = found[limit - 1]["id"] if len(found) > limit else rows[0]["searched_to"]
            return Page(found[:limit], None if searched is None else str(searched), rows[0]["now"])

        return look

    def _by_name(self, wanted: Filter, readable: Readable) -> Look:
        parameters = {**self._matching(wanted, readable), "beyond": beyond(wanted.prefix)}
        namespaces = [wanted.namespace] if wanted.namespace is not None else self.namespaces()
        if not self.installation:
            self.check()

        def look(after: str | None, limit: int, budget: int) -> Page:
            namespace, key = self._named(after) if after else ("", "")
            branches = [name for name in namespaces if name >= namespace]
            rows = self._all(
                "page_name",
                {
                    **parameters,
                    "branches": branches,
                    "after_namespace": namespace,
                    "after_key": key,
                    "limit": limit + 1,
                    "budget": max(LEAST, budget // max(len(branches), 1)),
                },
            )
            found = [row for row in rows if row["id"] is not None]
            searched = rows[0]["searched_id"], rows[0]["searched_namespace"], rows[0]["searched_key"]
            if len(found) > limit:
                searched = tuple(found[limit - 1][name] for name in ("id", "namespace", "key"))
            return Page(found[:limit], None if searched[0] is None else self._token(*searched), rows[0]["now"])

        return look

    def _token(self, record_id: int, namespace: str, key: str) -> str:
        """Where a list by name goes on. The record that was looked at last may be one that the reader may not see: its
        number is no secret, its name is. Sealed, so that nobody learns where the names of other numbers stand."""
        about = "\x1f".join((str(record_id), namespace, key)).encode()
        return f"{record_id}.{hmac.new(f'page {self.installation}'.encode(), about, hashlib.sha256).hexdigest()[:32]}"

    def _named(self, after: str) -> tuple[str, str]:
        """:raises PlanningError: this ledger did not give it, or the record has another name since."""
        number = re.fullmatch(r"([0-9]{1,18})\.[0-9a-f]{32}", after)
        for row in self._all("name_of", {"id": int(number[1]), "deployment": self.deployment}) if number else ():
            if hmac.compare_digest(self._token(row["id"], row["namespace"], row["key"]), after):
                return row["namespace"], row["key"]
        raise _no_page(after)

    def _id_at(self, moment: datetime) -> int:
        """The first number whose record began at ``moment`` or later, by halves: numbers and times rise together."""
        return int(self._one("id_at", {"moment": moment})["id"])

    # -- numbers -----------------------------------------------------------------------------------------------------

    def tallied(self, readable: Readable = None) -> Sequence[Mapping[str, Any]]:
        """How many records stand where, with what is at stake: all states but ``running``."""
        waiting = self._one("unfolded", {"limit": FOLD_AT})["n"]
        if waiting >= FOLD_AT:
            self._one("fold", {})
        return self._all("tallied", {"deployment": self.deployment, "dags": _listed(readable)})

    def pulses(self, span: str, since: datetime, readable: Readable = None) -> Sequence[Mapping[str, Any]]:
        """How many of the records that began in each ``hour`` or ``day`` (of UTC) stand where: all states but
        ``running``."""
        return self._all(
            "pulses", {"deployment": self.deployment, "dags": _listed(readable), "span": span, "since": since}
        )

    def running(self, readable: Readable = None) -> int:
        """Up to :data:`MANY`."""
        row = self._one("running", {"deployment": self.deployment, "dags": _listed(readable), "limit": MANY})
        return int(row["n"])

    def prevented(self, kind: str, readable: Readable = None) -> tuple[int, bool]:
        """How many records :attr:`Filter.prevented` finds, and whether there are more: it looks at :data:`MANY`."""
        parameters = {"deployment": self.deployment, "dags": _listed(readable), "prevented": kind, "limit": MANY}
        row = self._one("prevented", parameters)
        return row["n"], row["looked_at"] >= MANY

    # -- gates, freezes, the ledger itself -----------------------------------------------------------------------------

    def board_gates(self, readable: Readable = None, *, name: str | None = None) -> Sequence[Mapping[str, Any]]:
        """All gates, or those at which records wait that the reader may see, or the one of a name; closed ones first.

        Who may not see all records is told how many of theirs wait, and why a person closed it; but neither who did,
        nor what a vendor answered, which may be to a task that they may not see.
        """
        parameters = {"deployment": self.deployment, "dags": _listed(readable), "name": name}
        return self._all("board_gates", parameters)

    def board_freezes(self, readable: Readable = None, *, limit: int = 100) -> Sequence[Mapping[str, Any]]:
        """Those in force first, then those that were."""
        return self._all("board_freezes", {"deployment": self.deployment, "dags": _listed(readable), "limit": limit})

    def ledger_events(self, *, before: int = FAR, limit: int = 100) -> Sequence[Mapping[str, Any]]:
        """What happened to no single record: gates, freezes, lost time. Newest first."""
        return self._all("ledger_events", {"before": before, "limit": limit})

    # -- one record ----------------------------------------------------------------------------------------------------

    def line_of(self, record_id: int, readable: Readable = None) -> Mapping[str, Any] | None:
        """The whole line of one record, if there is one that may be seen."""
        rows = self._all("record", {"id": record_id, "deployment": self.deployment, "dags": _listed(readable)})
        return rows[0] if rows else None

    def calls_of(
        self, record_id: int, generation: int, *, state: str | None = None, after: str = "", limit: int = 100
    ) -> Page:
        """Calls (items) of one generation, in order of their names."""
        rows = self._all(
            "calls_of",
            {
                "id": record_id,
                "generation": generation,
                "state": state,
                "after": after,
                "limit": limit + 1,
                "budget": 4 * BUDGET if state else limit + 1,
            },
        )
        found = [row for row in rows if row["name"] is not None]
        if len(found) > limit:
            return Page(found[:limit], found[limit - 1]["name"], None)
        return Page(found, rows[0]["searched_to"], None)

    def events_of(self, record_id: int, *, before: int = FAR, limit: int = 100) -> Sequence[Mapping[str, Any]]:
        """Newest first."""
        return self._all("events_of", {"id": record_id, "before": before, "limit": limit})

    def generations_of(self, record_id: int, *, limit: int = 50) -> Sequence[Mapping[str, Any]]:
        """When it was ordered anew, by whom and why, and what the generation before had come to. Newest first."""
        return self._all("generations_of", {"id": record_id, "limit": limit})

    def questions_of(self, record_id: int) -> Sequence[Mapping[str, Any]]:
        """The task instances that are parked in Airflow with a form about it."""
        return self._all("questions_of", {"id": record_id})

    def replays_of(self, record_id: int) -> Sequence[Mapping[str, Any]]:
        """How often its stored result was given back instead of calling again, and when last; empty = never."""
        return self._all("replays_of", {"id": record_id})

    def names_of(self, record_id: int) -> Sequence[Mapping[str, Any]]:
        """When it was renamed."""
        return self._all("names_of", {"id": record_id})

    # -- the seam ------------------------------------------------------------------------------------------------------

    def _statement(self, name: str) -> str:
        return statements().get(name) or super()._statement(name)

    def _open(self) -> psycopg.Connection[DictRow]:
        """Plans are made for the values at hand: most conditions of a page fall away with them."""
        connection = super()._open()
        connection.prepare_threshold = None
        return connection


def beyond(prefix: str | None) -> str | None:
    """The first text behind all that begin with ``prefix``, in the order of their code points; ``None`` = no end."""
    for end in range(len(prefix or ""), 0, -1):
        assert prefix is not None
        following = ord(prefix[end - 1]) + 1
        if following == 0xD800:  # halves of surrogate pairs are no text
            following = 0xE000
        if following <= 0x10FFFF:
            return prefix[: end - 1] + chr(following)
    return None


def _listed(readable: Readable) -> list[str] | None:
    return None if readable is None else sorted(readable)


def _number(after: str) -> int:
    if not re.fullmatch(r"\d{1,18}", after):
        raise _no_page(after)
    return int(after)


def _no_page(after: str) -> PlanningError:
    return PlanningError(f"after={after[:80]!r} is not what an earlier page gave.", "Begin with the first page.")
