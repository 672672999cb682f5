"""Items of a batch as the ledger has them: planning, counting, pages, and what people say of a selection.

The statements of ``sql/batch.sql``, over one :class:`~airflow_runguard.core.ledger.Ledger`, and the nouns that they
speak in. An item is a call; its name is the item's key.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from airflow_runguard.core.errors import PlanningError
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Call, CallState, Grant, Holder, Order, Result
from airflow_runguard.core.rows import SEPARATOR, call_of, clean, result_of

PAGE = 1_000
NAMES = 50_000
"""Names of a kept list that are asked for at once: each asking reads all of it."""


@dataclass(frozen=True, slots=True)
class Selection:
    """Which items of a batch: all of one state (and failure class), or those named.

    Written ``failed``, ``failed:validation``, ``in_doubt``, ``done``, or ``key=inv-7``.
    """

    state: str | None = None
    failure_class: str | None = None
    names: tuple[str, ...] | None = None

    @classmethod
    def parse(cls, text: str) -> Selection:
        """:raises PlanningError: it selects nothing that there is."""
        if text.startswith("key=") and len(text) > 4:
            return cls(names=(text[4:],))
        state, _, failure_class = text.partition(":")
        if state not in list(CallState):
            raise PlanningError(
                f"{text!r} selects no items. Nothing was changed.",
                "Write a state (failed, in_doubt, done, paused, pending), with a class where wanted "
                "(failed:validation), or key=ITEM.",
            )
        return cls(state, failure_class or None)

    def __str__(self) -> str:
        if self.names is not None:
            return f"key={','.join(self.names)}"
        return f"{self.state}:{self.failure_class}" if self.failure_class else str(self.state)


@dataclass(frozen=True, slots=True)
class Planned:
    """The ledger's answer to one planned chunk.

    :param said: a word for each item, in order; ``None`` = not the holder any more.
    """

    said: Sequence[str] | None
    now: datetime
    until: datetime | None


@dataclass(frozen=True, slots=True)
class Count:
    """So many items stand in one state; ``resume_after``: seconds until the last of them may go on."""

    state: str
    failure_class: str | None
    items: int
    resume_after: float


@dataclass(frozen=True, slots=True)
class DoneOfList:
    """Items of a record that are done.

    :param named: so many of them the list of one entry named.
    :param kept: what that list named of earlier done items is known; of entries before the last it is not.
    """

    done: int
    named: int
    kept: bool


@dataclass(frozen=True, slots=True)
class Changed:
    """What a change of a selection came to. Without ``ok`` nothing was changed.

    :param left: items that were left as they are (too early to say, or their effect happened or may have).
    """

    verdict: str
    items: int
    left: int


class Items:
    """The items of the ledger's batches."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    # -- a holder's ------------------------------------------------------------------------------------------------

    def begin(self, grant: Grant, holder: Holder) -> bool:
        """Put what an earlier entry left open into doubt. Whether this one holds the record."""
        return bool(self._ledger._one("begin_batch", _held(grant, holder))["held"])

    def plan(self, grant: Grant, holder: Holder, order: Order, names: Sequence[str], digests: Sequence[str]) -> Planned:
        """Write a chunk of items down before anything is called, and hear which may be. Renews the lease."""
        row = self._ledger._one(
            "plan",
            {
                **_held(grant, holder),
                "actor": str(holder),
                "lease": order.lease,
                "max_claims": order.max_claims,
                "key_lifetime": order.resent_within,
                "names": SEPARATOR.join(names),
                "digests": SEPARATOR.join(digests),
            },
        )
        said = row["said"].split(SEPARATOR) if row["verdict"] == "ok" else None
        return Planned(said, row["at"], row["until"])

    def progress(self, grant: Grant, holder: Holder, how_far: Mapping[str, Any]) -> None:
        """Show on the record how far the batch is. It decides nothing."""
        self._ledger._all("progress", {**_held(grant, holder), "progress": json.dumps(dict(how_far))})

    # -- reading ---------------------------------------------------------------------------------------------------

    def count(self, record_id: int, generation: int, planned: int | None = None) -> Sequence[Count]:
        """:param planned: only what the list of this entry (its fence) named."""
        rows = self._ledger._all("count_items", {"record_id": record_id, "generation": generation, "planned": planned})
        return [Count(row["state"], row["failure_class"], row["items"], row["resume_after"] or 0.0) for row in rows]

    def page(
        self,
        record_id: int,
        generation: int,
        chosen: Selection | None = None,
        *,
        planned: int | None = None,
        after: str = "",
        limit: int = PAGE,
    ) -> list[Call]:
        """Items in order of their keys; go on with ``after=`` the last one's.

        :param planned: only those that the list of this entry (its fence) named, and that were not done before it.
        """
        return [call_of(row) for row in self._rows(record_id, generation, chosen, planned, after, limit)]

    def done_of_list(self, record_id: int, generation: int, planned: int) -> DoneOfList:
        """:param planned: the entry (its fence) whose list is meant."""
        where = {"record_id": record_id, "generation": generation, "planned": planned}
        row = self._ledger._one("done_of_list", where)
        return DoneOfList(row["done"], row["named"], row["kept"])

    def results(
        self, record_id: int, generation: int, store_result: str, planned: int | None = None
    ) -> Iterator[tuple[str, Result]]:
        """Key and stored result of every item that is done, a page at a time.

        :param planned: only what the list of this entry (its fence) named.
        """
        pages = self._done(record_id, generation) if planned is None else self._listed(record_id, generation, planned)
        for rows in pages:
            yield from ((row["name"], result_of(row, store_result)) for row in rows)

    def _done(self, record_id: int, generation: int) -> Iterator[Sequence[Mapping[str, Any]]]:
        after = ""
        while rows := self._rows(record_id, generation, Selection("done"), None, after, PAGE):
            yield rows
            after = rows[-1]["name"]

    def _listed(self, record_id: int, generation: int, planned: int) -> Iterator[Sequence[Mapping[str, Any]]]:
        where = {"record_id": record_id, "generation": generation}
        after = ""
        while found := self._ledger._all(
            "names_of_list", {**where, "planned": planned, "after": after, "limit": NAMES}
        ):
            names = list(dict.fromkeys(row["name"] for row in found))
            for begin in range(0, len(names), PAGE):
                yield self._ledger._all("done_items", {**where, "names": names[begin : begin + PAGE]})
            after = names[-1]

    def result(self, record_id: int, generation: int, key: str, store_result: str) -> Result | None:
        """The stored result of one item; ``None`` where it is not done."""
        where = {"record_id": record_id, "generation": generation}
        rows = self._ledger._all("done_items", {**where, "names": [clean(key)]})
        return result_of(rows[0], store_result) if rows else None

    def _rows(
        self, record_id: int, generation: int, chosen: Selection | None, planned: int | None, after: str, limit: int
    ) -> Sequence[Mapping[str, Any]]:
        chosen = chosen or Selection()
        return self._ledger._all(
            "items",
            {
                "record_id": record_id,
                "generation": generation,
                **_selected(chosen),
                "planned": planned,
                "after": after,
                "limit": limit,
            },
        )

    # -- people and reconcilers (P13) ------------------------------------------------------------------------------

    def resolve(
        self,
        record_id: int,
        answer: str,
        chosen: Selection,
        *,
        actor: str,
        reason: str,
        results: Sequence[bytes | None] | None = None,
        reference: str | None = None,
        force: bool = False,
        seen_fence: int | None = None,
        nonce: str | None = None,
        known_by: datetime | None = None,
    ) -> Changed:
        """Say what became of items in doubt (``happened`` also of failed ones).

        :param results: one for each of ``chosen.names``.
        :param nonce: of the holder, whose reconciler says it while the batch runs.
        :param known_by: what came into doubt later is not spoken of, and is left as it is.
        """
        return self._changed(
            "resolve_items",
            record_id=record_id,
            answer=answer,
            **_selected(chosen),
            results=results,
            reference=reference,
            actor=actor,
            reason=reason,
            force=force,
            seen_fence=seen_fence,
            nonce=nonce,
            known_by=known_by,
        )

    def reopen(
        self,
        record_id: int,
        chosen: Selection,
        *,
        seen_generation: int,
        actor: str,
        reason: str,
        again_although_applied: bool = False,
        seen_fence: int | None = None,
    ) -> Changed:
        """Order finished items anew, each under a new vendor key and with the payload that the next list has."""
        return self._changed(
            "reopen_items",
            record_id=record_id,
            seen_generation=seen_generation,
            seen_fence=seen_fence,
            **_selected(chosen),
            again_although_applied=again_although_applied,
            actor=actor,
            reason=reason,
        )

    def accept_payload(
        self, record_id: int, chosen: Selection, *, actor: str, reason: str, seen_fence: int | None = None
    ) -> Changed:
        """Let the next list bring another payload: what is done answers to it, what did not happen is called so."""
        return self._changed(
            "accept_items",
            record_id=record_id,
            seen_fence=seen_fence,
            **_selected(chosen),
            actor=actor,
            reason=reason,
        )

    def _changed(self, statement: str, **parameters: Any) -> Changed:
        row = self._ledger._one(statement, parameters)
        return Changed(row["verdict"], row["items"] or 0, row["early"] or 0)


def _held(grant: Grant, holder: Holder) -> dict[str, Any]:
    return {
        "record_id": grant.record_id,
        "generation": grant.generation,
        "fence": grant.fence,
        "nonce": holder.nonce,
    }


def _selected(chosen: Selection) -> dict[str, Any]:
    names = None if chosen.names is None else [clean(name) for name in chosen.names]
    return {"state": chosen.state, "class": chosen.failure_class, "names": names}
