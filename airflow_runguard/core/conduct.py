"""What a batch does as the body of ``guard.run``: reconcile → plan → call → leave.

The whole list is written down before anything is called, in chunks; what may be called is kept aside meanwhile, so that
a list is read once and its size does not matter. The last thing asked is the ledger: what it counts decides how the
record is left.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from functools import partial
from itertools import islice
from typing import Any

from airflow_runguard.core import keys, payloads
from airflow_runguard.core.batch import Batch, Holding, few
from airflow_runguard.core.calling import Calling
from airflow_runguard.core.context import GuardContext
from airflow_runguard.core.errors import NotApplied, PlanningError
from airflow_runguard.core.items import PAGE, Count, Planned, Selection
from airflow_runguard.core.reconcile import ask, awaited, believed
from airflow_runguard.core.record import (
    Call,
    CallState,
    Completeness,
    Effect,
    Failure,
    FailureClass,
    Grant,
    Settlement,
    State,
)
from airflow_runguard.core.spool import Chosen, Spool
from airflow_runguard.core.work import Applied, Done, Doubt, Ended, InDoubt, Leave, Waiting, dumped
from airflow_runguard.core.writer import Answer

log = logging.getLogger("airflow_runguard")

CHUNK = 2_000
"""Items that are planned in one statement."""

SOON = 30.0
"""Seconds after which the vendor is asked again about items in doubt."""

SAME_OBJECT = "it is the object of an item before it, with other content by now."
ANOTHER_OBJECT = "Give an object of its own for each item (a generator that fills one dict anew: yield dict(row))."

PLAIN_LIST = "Give a list, or a function that returns an iterable of items."


def conduct(batch: Batch, guard: GuardContext) -> None:
    """Run the batch as the body of its record. Always ends by :class:`~airflow_runguard.core.work.Leave`, or by the
    signal or control-flow exception that ended it."""
    _Conductor(batch, guard).conduct()


@dataclass(slots=True)
class _Conductor(Holding):
    _spool: Spool = field(default_factory=Spool)
    _seen: int = 0
    """Lines of the list, equal ones counted again."""
    _standing: dict[str, int] = field(default_factory=dict)
    """What planning found, by its word."""
    _refused: dict[str, None] = field(default_factory=dict)
    """Their keys, in the order of the list: one that two chunks name is one."""
    _conflicts: dict[str, None] = field(default_factory=dict)
    _done: int = 0

    def conduct(self) -> None:
        try:
            if not self.ask(lambda grant: self.items.begin(grant, self.work.holder)):
                self.halt = self.lost()
            elif self.work.reconcile is not None:
                self._reconcile()
            if self.halt is None:
                self._plan()
            if self.halt is None and self._spool.length:
                total, before = self._totals()
                calling = Calling(self.batch, self.guard, spool=self._spool, total=total, before=before)
                calling.run()
                self.halt, self._done = calling.halt, calling.done
            self._leave()
        finally:
            self._spool.close()

    # -- reconcile -------------------------------------------------------------------------------------------------

    def _reconcile(self) -> None:
        """Ask the vendor once about each item in doubt, a page at a time."""
        record = self.ask(lambda grant: self.writer.ledger.get(grant.identity))
        renamed = self.ask(lambda grant: self.writer.ledger.renamed(grant.record_id))
        after = ""
        while True:
            now: datetime = self.ask(lambda grant: self.writer.ledger.time_of_question(grant.identity))
            page: list[Call] = self.ask(partial(self._doubtful, after))
            if not page:
                return
            after = page[-1].name
            sent_under = partial(keys.sent_under, self.writer.ledger.installation, self.claim.identity, renamed)
            doubts = [Doubt(record, call, sent_under(call), call.intent, now, alone=False) for call in page]
            answers = self._answers(doubts)
            for call in page:  # looked for when it could still arrive: what is not there may come after the look
                early = call.no_later_than is not None and call.no_later_than > now
                if early and isinstance(answers.get(call.name), NotApplied):
                    del answers[call.name]
            self._book_answers(answers, now)

    def _doubtful(self, after: str, grant: Grant) -> list[Call]:
        chosen = Selection(CallState.IN_DOUBT)
        return self.items.page(grant.record_id, grant.generation, chosen, after=after, limit=PAGE)

    def _answers(self, doubts: list[Doubt]) -> dict[str, Any]:
        reconcile: Any = self.work.reconcile
        if self.batch.reconcile_chunks:
            try:
                answers = reconcile(doubts)
                answers = dict(asyncio.run(awaited(answers)) if inspect.isawaitable(answers) else answers)
                return {doubt.call.name: believed(answers.get(doubt.call.name), doubt) for doubt in doubts}
            except Exception as error:
                log.warning("The reconcile function failed; these items stay in doubt: %s", error, exc_info=True)
                return {}
        return {doubt.call.name: ask(reconcile, doubt) for doubt in doubts}

    def _book_answers(self, answers: Mapping[str, Any], asked_at: datetime) -> None:
        happened = {key: answer for key, answer in answers.items() if isinstance(answer, Applied)}
        not_applied = [key for key, answer in answers.items() if isinstance(answer, NotApplied)]
        results = [dumped(self.work, answer.result).data for answer in happened.values()]
        self._settle("happened", [*happened], results, asked_at)
        self._settle("did_not_happen", not_applied, None, asked_at)

    def _settle(self, answer: str, names: list[str], results: list[bytes | None] | None, asked_at: datetime) -> None:
        if not names:
            return
        changed = self.ask(
            lambda grant: self.items.resolve(
                grant.record_id,
                answer,
                Selection(names=tuple(names)),
                results=results,
                actor="reconcile",
                reason="the vendor was asked",
                nonce=self.work.holder.nonce,
                known_by=asked_at,
            )
        )
        if changed.left:
            log.info("The vendor has nothing of %d item(s) yet; their calls may still arrive.", changed.left)

    # -- plan ------------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """Write the whole list down, one chunk in the ledger while the next is made ready.

        :raises Leave: it cannot be worked on; nothing was called.
        """
        try:
            asked: tuple[dict[str, tuple[str, Any]], Answer[Planned]] | None = None
            for chunk in self._chunks():
                names, digests = [*chunk], [digest for digest, _ in chunk.values()]
                order, holder = self.work.order, self.work.holder
                answer = self.writer.held(
                    partial(self.items.plan, holder=holder, order=order, names=names, digests=digests)
                )
                if asked and not self._planned(*asked):
                    return
                asked = chunk, answer
            if asked and not self._planned(*asked):
                return
            if self._conflicts:
                raise PlanningError(
                    f"The list names {len(self._conflicts)} item(s) more than once, with different payloads: "
                    f"{few([*self._conflicts])}.",
                    "Give each item a key of its own, or make equal ones equal; no call was made.",
                )
            if not self._seen and not self.work.allow_no_call:
                raise PlanningError(
                    "The list of items is empty, which may be an error upstream.",
                    "Say allow_no_call=True where an empty list is work done; no call was made.",
                )
        except PlanningError as error:
            failure = Failure(FailureClass.PLANNING, Effect.NOT_APPLIED, needs_person=True, evidence=error.what)
            settlement = Settlement(State.FAILED, failure=failure, error=error.what)
            raise Leave(settlement, Ended(str(error), retry=False, error=error)) from error

    def _chunks(self) -> Iterator[dict[str, tuple[str, Any]]]:
        """Key → (digest of the payload, item), so many at a time."""
        source = self.batch.items()
        if source is None or isinstance(source, str | bytes | Mapping) or not isinstance(source, Iterable):
            raise PlanningError(f"The items are a {type(source).__name__}, which is no list of them.", PLAIN_LIST)
        lines = iter(source)
        while True:
            chunk: dict[str, tuple[str, Any]] = {}
            kept: dict[int, str] = {}
            for item in islice(lines, CHUNK):  # identified before the next is asked for, which may change this one
                self._seen += 1
                key, digest = self._identified(item)
                if kept.get(id(item), key) != key:
                    raise PlanningError(f"Item {self._seen} of the list ({key}): {SAME_OBJECT}", ANOTHER_OBJECT)
                if key not in chunk:
                    chunk[key], kept[id(item)] = (digest, item), key
                elif chunk[key][0] != digest:
                    self._conflicts[key] = None
            if not chunk:
                return
            yield chunk

    def _identified(self, item: Any) -> tuple[str, str]:
        try:
            key = keys.item_name(self.batch.key_of(item))
            return key, hashlib.sha256(payloads.canonical(self.batch.payload_of(item))).hexdigest()
        except PlanningError as error:
            raise PlanningError(f"Item {self._seen} of the list: {error.what}", error.remedy) from error

    def _planned(self, chunk: dict[str, tuple[str, Any]], answer: Answer[Planned]) -> bool:
        """Keep aside what may be called. Whether this process still holds the record."""
        words = answer.result().said
        if words is None:
            self.halt = self.lost()
            return False
        may: Chosen = []
        for (key, (_, item)), word in zip(chunk.items(), words, strict=True):
            self._standing[word] = self._standing.get(word, 0) + 1
            if word == "work":
                may.append((key, item))
            elif word == "conflict":
                self._conflicts[key] = None
            elif word == "changed":
                self._refused[key] = None
        self._spool.add(may)
        return True

    def _totals(self) -> tuple[int, int]:
        """How many items the list names, and how many of them are done. An item that two chunks name is one."""
        if self._seen <= CHUNK:
            return sum(self._standing.values()), self._standing.get("done", 0)
        counts = self._count()
        return sum(count.items for count in counts), sum(c.items for c in counts if c.state == CallState.DONE)

    # -- leave -------------------------------------------------------------------------------------------------------

    def _count(self) -> list[Count]:
        return list(self.ask(lambda grant: self.items.count(grant.record_id, grant.generation, self.claim.fence)))

    def _leave(self) -> None:
        """Settle the record by what the ledger counts.

        :raises Leave: always.
        """
        counts = self._count()
        by_state = {state: sum(c.items for c in counts if c.state == state) for state in CallState}
        failed: dict[str, int] = {}
        for count in counts:
            if count.state == CallState.FAILED:
                failed[str(count.failure_class)] = failed.get(str(count.failure_class), 0) + count.items
        done, doubtful = by_state[CallState.DONE], by_state[CallState.IN_DOUBT] + by_state[CallState.STARTED]
        paused, pending = by_state[CallState.PAUSED], by_state[CallState.PENDING]
        refused = len(self._refused)
        identity, halt = self.claim.identity, self.halt
        complete = done == sum(by_state.values()) and not refused
        summary = {
            "deployment": identity.deployment,
            "namespace": identity.namespace,
            "key": identity.key,
            "record_id": self.claim.record_id,
            "generation": self.claim.generation,
            "fence": self.claim.fence,
            "store_result": self.work.order.store_result,
            "items": sum(by_state.values()),
            "done": done,
            "replayed": max(0, done - self._done),
            "failed": failed,
            "refused": refused,
            "paused": paused,
            "in_doubt": doubtful,
            "pending": pending,
            "complete": complete,
        }
        self.writer.do(lambda: self.items.progress(self.grant, self.work.holder, _how_far(summary)))
        said_of = self._said(summary)
        log.info("RunGuard: %s", said_of)
        why = f"{said_of} {halt.why}." if halt else said_of
        troubled = bool(failed or doubtful or refused)

        if halt is not None and halt.how is not None:
            self._end(State.PENDING, why, halt.how, summary)
        if halt is not None and halt.money:
            failure = Failure(FailureClass.QUOTA, Effect.NOT_APPLIED, needs_person=True, evidence=halt.why)
            mend = "Raise the allowance at the vendor, then clear the task: the items that are not done go on."
            self._end(State.FAILED, why, Ended(f"{why} {mend}", retry=False), summary, failure)
        if paused if halt is None else halt.pause:
            wait = max((count.resume_after for count in counts if count.state == CallState.PAUSED), default=0.0)
            waits = Failure(
                FailureClass.QUOTA, Effect.NOT_APPLIED, pausable=True, resume_after=max(0.0, wait), evidence=why
            )
            self._end(State.PAUSED, why, Waiting(why), summary, waits)
        if complete:
            raise Leave(Settlement(State.DONE), Done(summary, replayed=False), summary)
        if self.batch.allow_partial and halt is None and not pending and done and troubled:
            partial = Settlement(State.DONE, completeness=Completeness.PARTIAL, error=why)
            raise Leave(partial, Done(summary, replayed=False), summary)
        if doubtful:
            failure = Failure(FailureClass.UNKNOWN, Effect.UNKNOWN, evidence=why)
            self._end(State.IN_DOUBT, why, self._ended_with_trouble(why, summary), summary, failure)
        if troubled:
            worst = max(failed, key=lambda name: failed[name], default=FailureClass.PLANNING.value)
            known = FailureClass(worst) if worst in list(FailureClass) else FailureClass.UNKNOWN
            failure = Failure(known, Effect.NOT_APPLIED, needs_person=not self._mends(summary), evidence=why)
            self._end(State.FAILED, why, self._ended_with_trouble(why, summary), summary, failure)
        # Nothing stopped it, and yet not all is done: a person released items in doubt while the others were called.
        named = self.named(CallState.PENDING)
        self._end(State.PENDING, why, Ended(f"{why} Without an outcome: {named}.", retry=True), summary)

    def _end(
        self, state: State, why: str, how: Waiting | Ended, summary: dict[str, Any], failure: Failure | None = None
    ) -> None:
        ended = replace(how, value=summary) if isinstance(how, Ended) else how
        raise Leave(Settlement(state, failure=failure, error=why[:2000]), ended)

    def _mends(self, summary: dict[str, Any]) -> bool:
        """Whether another try may do better by itself."""
        again = sum(n for name, n in summary["failed"].items() if name not in ("validation", "planning"))
        asks = bool(summary["in_doubt"]) and self.work.order.on_doubt != "ask"
        return bool(again or asks or summary["pending"])

    def _ended_with_trouble(self, why: str, summary: dict[str, Any]) -> Ended:
        name = self.claim.identity.typed
        parts = [why]
        if summary["in_doubt"]:
            parts.append(
                f"Nobody knows whether these happened: {self.named(CallState.IN_DOUBT)}. They are not sent again "
                f"blindly. Look them up at the vendor, then run `airflow runguard resolve {name} --items in_doubt "
                "--happened --reason …` or `… --did-not-happen --as-of TIME --reason …` (one item: --items key=ITEM)."
            )
        if summary["failed"]:
            parts.append(
                f"Failed: {self.named(CallState.FAILED)}. What is wrong with an item itself (validation) is not sent "
                f"again until a person says so: `airflow runguard reopen {name} --items failed:validation --reason …`."
            )
        if self._refused:
            parts.append(
                f"Begun with another payload, so they were not called: {few([*self._refused])}. Give other work "
                "another key, or name the fields that are the order with payload=[…]. Where the change is meant, run "
                f"`airflow runguard accept-payload {name} --items key=ITEM --reason …`."
            )
        message, retry = " ".join(parts), self._mends(summary)
        if not summary["in_doubt"]:
            return Ended(message, retry=retry)
        return InDoubt(message, retry=retry, who=self.work.order.on_doubt, seconds=SOON)

    def _said(self, summary: dict[str, Any]) -> str:
        failed = ", ".join(f"{name} {count}" for name, count in sorted(summary["failed"].items()))
        told = [
            f"{summary['done']} of {summary['items']} items are done ({summary['replayed']} of them before)",
            f"{sum(summary['failed'].values())} failed ({failed})" if failed else "",
            f"{summary['refused']} refused" if summary["refused"] else "",
            f"{summary['in_doubt']} in doubt" if summary["in_doubt"] else "",
            f"{summary['paused']} paused" if summary["paused"] else "",
            f"{summary['pending']} not begun" if summary["pending"] else "",
        ]
        return f"{self.claim.identity}: {', '.join(filter(None, told))}."


def _how_far(summary: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "total": summary["items"],
        "done": summary["done"],
        "replayed": summary["replayed"],
        "troubled": sum(summary["failed"].values()) + summary["in_doubt"] + summary["refused"],
        "left": summary["pending"] + summary["paused"],
        "rate": 0,
        "eta": None,
    }
