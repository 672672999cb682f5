"""What a door says about a batch, what an item's function sees, and what the rooms of a batch share.

A batch is many calls (its items) under one record. ``conduct.py`` plans and leaves, ``calling.py`` makes the calls,
``spool.py`` keeps what waits for its call. Nothing holds all items.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from airflow_runguard.core import keys
from airflow_runguard.core.context import GuardContext
from airflow_runguard.core.errors import PlanningError
from airflow_runguard.core.items import Items, Selection
from airflow_runguard.core.record import CallState, Claim, Grant, Identity
from airflow_runguard.core.work import Ended, Waiting, Work
from airflow_runguard.core.writer import Writer

NAMED = 20
"""Keys that a message names at most."""


@dataclass(frozen=True, slots=True)
class Pause:
    """The vendor said "too many" for this item, which did not happen: it may be sent again after so many seconds."""

    seconds: float
    reason: str = "the vendor asked to wait"


@dataclass(frozen=True, slots=True)
class ItemContext:
    """The guard at run time for one item, or for the items of one bulk call.

    :param batch: the key of the batch's record.
    :param idempotency_keys: the vendor key of each item of this call, by its key.
    """

    batch: str
    idempotency_keys: Mapping[str, str]

    @property
    def key(self) -> str:
        """The item's key.

        :raises PlanningError: this is a bulk call of several.
        """
        return self._only()[0]

    @property
    def idempotency_key(self) -> str:
        """The item's vendor key: the same for every repetition of this attempt, of no other item.

        :raises PlanningError: this is a bulk call of several.
        """
        return self._only()[1]

    def _only(self) -> tuple[str, str]:
        if len(self.idempotency_keys) != 1:
            raise PlanningError("A bulk call has no key of its own.", "Use guard.idempotency_keys[item's key].")
        return next(iter(self.idempotency_keys.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a door says about one batch. Times are seconds.

    :param items: the list, read once: a function, so that a generator can be begun anew by each entry.
    :param key_of: the item's key, by its content.
    :param payload_of: what of an item is its order, in plain data.
    :param call: given ``(guard, item)``, or with ``bulk`` ``(guard, {key: item})``; makes one request.
    :param asynchronous: ``call`` is a coroutine function.
    :param concurrency: so many calls at once at most.
    :param bulk: so many items go into one call, which answers with a mapping key → outcome; ``None`` = one by one.
    :param accept: says whether a result is one: raises, or returns ``False``, where not.
    :param allow_empty: ``None`` and what is empty may be results.
    :param stop_after, stop_after_share: so many failed or doubtful items (of all) end the batch.
    :param allow_partial: ends as done (partially) although some items failed or are in doubt.
    :param reconcile_chunks: the reconcile function takes a list of doubts and answers with a mapping key → answer.
    """

    items: Callable[[], Iterable[Any]]
    key_of: Callable[[Any], Any]
    call: Callable[[ItemContext, Any], Any]
    payload_of: Callable[[Any], Any] = lambda item: item
    asynchronous: bool = False
    concurrency: int = 1
    bulk: int | None = None
    accept: Callable[[Any], Any] | None = None
    allow_empty: bool = False
    stop_after: int | None = None
    stop_after_share: float | None = None
    allow_partial: bool = False
    reconcile_chunks: bool = False


@dataclass(slots=True)
class Halt:
    """Why no further item starts.

    :param how: how the try ends for it; ``None`` = what the ledger counts decides.
    """

    why: str
    how: Waiting | Ended | None = None
    pause: bool = False
    money: bool = False
    error: BaseException | None = None


@dataclass(slots=True)
class Holding:
    """A batch and the record that it holds. The guard of the body and this are two halves of one room: what the body
    sees, and what makes many calls for it."""

    batch: Batch
    guard: GuardContext
    halt: Halt | None = None

    @property
    def writer(self) -> Writer:
        return self.guard._writer

    @property
    def work(self) -> Work:
        return self.guard._work

    @property
    def claim(self) -> Claim:
        return self.guard._claim

    @property
    def items(self) -> Items:
        return Items(self.writer.ledger)

    @property
    def grant(self) -> Grant:
        claim = self.claim
        return Grant(claim.identity, claim.record_id, claim.generation, claim.fence)

    def ask(self, run: Callable[[Grant], Any]) -> Any:
        return self.writer.do(lambda: run(self.grant)).result()

    def named(self, state: CallState) -> str:
        """The first keys of that state, for a message."""
        calls = self.ask(
            lambda grant: self.items.page(
                grant.record_id, grant.generation, Selection(state), planned=grant.fence, limit=NAMED + 1
            )
        )
        return few([call.name for call in calls])

    def lost(self) -> Halt:
        why = f"This process was told to stop, or is no longer the holder of {self.claim.identity}"
        return Halt(why, Ended(f"{why}. Items that were not begun are not called.", retry=True))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class VendorKeys(Mapping[str, str]):
    """The vendor key of each item of one call, made when it is asked for. Otherwise like a dict of them.

    :param attempts: the items' attempts, by their keys. :param generation: the record's.
    """

    installation: str
    identity: Identity
    generation: int
    attempts: Mapping[str, int]

    def __getitem__(self, name: str) -> str:
        return keys.vendor_key(self.installation, self.identity, name, self.generation, self.attempts[name])

    def __repr__(self) -> str:
        return repr(dict(self))

    def __iter__(self) -> Iterator[str]:
        return iter(self.attempts)

    def __len__(self) -> int:
        return len(self.attempts)


def few(names: Sequence[str]) -> str:
    shown = ", ".join(names[:NAMED])
    return f"{shown}, …" if len(names) > NAMED else shown
