"""A small world around one record: holders that may freeze and die, a vendor, a person, and what is really true.

:class:`World` keeps a plain model of the design beside the real ledger. Every action is done to both; then the
ledger's answer and state must be the model's, and the laws must hold (:meth:`World.check`). With a Redis, holders keep
their lease there too, and it may forget or lie. ``test_state_machine.py`` walks it at random, ``test_small_model.py``
exhaustively.
"""

from __future__ import annotations

import copy
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import psycopg

from airflow_runguard.core import sending
from airflow_runguard.core.leases import Leases
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import (
    Effect,
    Failure,
    FailureClass,
    Grant,
    Holder,
    Order,
    Outcome,
    Result,
    Settlement,
    State,
    Verdict,
    Witness,
    Written,
)
from airflow_runguard.core.resp import Redis
from tests.core.engine import holder

Action = tuple[Any, ...]

ENDLESS = {**dict.fromkeys(("lease", "max_hold", "max_call_time"), 10**8), "key_lifetime": 5 * 10**8}
"""Rules of an order, in seconds: time passes only where the world says so."""

LOOK = """
select r.*, runguard.broken(r) as broken, lease_until < clock_timestamp() as expired,
       (select count(*) from runguard.event e where e.record_id = r.id) as events,
       (select coalesce(json_agg(c order by c.name), '[]') from runguard.call c
         where c.record_id = r.id and c.generation = r.generation) as calls
  from runguard.record r where r.key = %(key)s
"""

ELSEWHERE = {"send", "die", "forget", "lie"}
"""Actions that happen away from the ledger: it is not asked, and its lines stay."""

SOMEBODY_ELSE = "somebody else"
"""Whose lease it is in a Redis that lies."""

SIGNS_OF_LIFE = ("lease_until", "expired", "no_later_than", "updated_at", "digest")
"""What a renewal moves, which is no event: a holder that lives, with a call open, may still send."""

FAILURES = {
    "unknown": Failure(FailureClass.TIMEOUT, Effect.UNKNOWN),
    "refused": Failure(FailureClass.PROCESSING, Effect.NOT_APPLIED),
    "declined": Failure(FailureClass.PROCESSING, Effect.NOT_APPLIED, final=True),
    "quota": Failure(FailureClass.QUOTA, Effect.NOT_APPLIED, pausable=True, resume_after=0.0),
}
LEFT_AS = {"applied": State.DONE, "unknown": State.IN_DOUBT, "quota": State.PAUSED}
"""The state that a holder asks for after this outcome; FAILED after any other."""


@dataclass
class Sending:
    """A call that was granted to a holder, which has not told its outcome yet."""

    attempt: int
    sticky: bool
    """An earlier attempt under the same key was unknown."""
    truth: str = "unsent"
    """``unsent``, ``charged`` or ``nothing`` (it was sent and had no effect)."""


@dataclass
class Worker:
    """One entry into the record; frozen for as long as it does nothing, dead when it is gone."""

    who: Holder
    generation: int
    fence: int
    under_way: dict[str, Sending] = field(default_factory=dict)
    last_event: int = 0


@dataclass
class World:
    ledger: Ledger
    sql: psycopg.Connection[Any]
    order: Order
    names: tuple[str, ...] = ("body",)
    slots: int = 2
    kinds: tuple[str, ...] = tuple(FAILURES)
    may_claim: int = 10**9
    may_call: int = 10**9
    may_answer: int = 10**9
    """How often the person may answer, release and reopen."""
    redis: Redis | None = None

    # What the design says should be so:
    state: State | None = None
    generation: int = 1
    fence: int = 0
    holding: bool = False
    expired: bool = False
    told: bool = False
    """A stale holder's "applied" was reported under the present holder."""
    refusal: bool = False
    """Failed, and the effect unknown: only a person goes on."""
    unresolved: dict[str, int] = field(default_factory=dict)
    """Calls that were granted and never answered, looked up or resolved, with the attempt in their vendor key."""
    reported: set[str] = field(default_factory=set)
    """Calls in doubt because a stale holder reported them as applied: the last caller cannot speak for that one."""
    barred: set[str] = field(default_factory=set)
    """Calls of which an earlier vendor key may be the one that was applied: a person speaks before it is sent again."""
    done: set[str] = field(default_factory=set)
    attempts: dict[str, int] = field(default_factory=dict)
    final: set[str] = field(default_factory=set)
    senders: dict[str, int] = field(default_factory=dict)
    """The fence under which each call was granted last."""
    workers: dict[int, Worker] = field(default_factory=dict)

    # What Redis should say:
    lease: str | None = None
    """Whose lease it is."""
    witness: Witness | None = None

    # What is so at the vendor:
    effects: list[tuple[int, str, int]] = field(default_factory=list)
    excused: set[tuple[int, str]] = field(default_factory=set)
    """Where a person's answer was false, or came too early and was forced."""
    seen: Mapping[str, Any] | None = None
    path: tuple[Action, ...] = ()

    def __post_init__(self) -> None:
        self.looking = sending.Sending(self.sql)  # what it prepares outlives a rollback
        self.leases = Leases(self.redis, self.ledger.installation)

    def fork(self) -> World:
        """The same world, to go another way; the ledger's side is the caller's to bring back."""
        twin = copy.copy(self)
        twin.unresolved, twin.done, twin.attempts = dict(self.unresolved), set(self.done), dict(self.attempts)
        twin.reported, twin.barred = set(self.reported), set(self.barred)
        twin.senders = dict(self.senders)
        twin.final, twin.effects, twin.excused = set(self.final), list(self.effects), set(self.excused)
        twin.workers = {
            slot: replace(worker, under_way={name: replace(sent) for name, sent in worker.under_way.items()})
            for slot, worker in self.workers.items()
        }
        return twin

    # -- what may happen next ------------------------------------------------------------------------------------

    def actions(self) -> list[Action]:
        explicit = self.order.calls == "explicit"
        able: list[Action] = []
        for slot in range(self.slots):
            worker = self.workers.get(slot)
            if worker is None:
                if self.may_claim:
                    able.append(("claim", slot))
                continue
            if len(self.workers) == self.slots:  # else: one that never moves again is a dead one
                able.append(("die", slot))
            for name in self.names:
                sending = worker.under_way.get(name)
                if sending is None:
                    able += [("intent", slot, name)] * (explicit and self.may_call > 0)
                elif sending.truth == "unsent":
                    able += [
                        ("send", slot, name, True),
                        ("send", slot, name, False),
                        ("outcome", slot, name, "refused"),
                    ]
                elif sending.truth == "charged":
                    able += [("outcome", slot, name, "applied")]
                    able += [("outcome", slot, name, "unknown")] * ("unknown" in self.kinds)
                else:
                    able += [("outcome", slot, name, kind) for kind in self.kinds]
            if explicit and not worker.under_way:
                able += [("settle", slot, State.DONE), ("settle", slot, State.PENDING)]
        if self.holding:
            able += [("expire",)] * (not self.expired) + [("release",)] * bool(self.may_answer)
        if self.expired:
            able.append(("sweep",))
        if self.redis is not None:
            able += [("forget",)] * bool(self.lease or self.witness) + [("lie",)] * (self.lease != SOMEBODY_ELSE)
        if self.may_answer:
            if self.state is State.IN_DOUBT:
                able += [("resolve", answer, None) for answer in ("happened", "did_not_happen", "failed")]
                if explicit:
                    able += [("resolve", a, name) for name in self.unresolved for a in ("happened", "did_not_happen")]
            if self.state in (State.DONE, State.FAILED):
                able.append(("reopen",))
        return able

    def do(self, action: Action) -> None:
        self.path = (*self.path, action)
        getattr(self, f"_{action[0]}")(*action[1:])
        self.check()

    # -- holders -------------------------------------------------------------------------------------------------

    def _claim(self, slot: int) -> None:
        if self.expired:
            self._found_dead(State.RUNNING)
        who = holder(ti_id=uuid.uuid4().hex)
        if (witness := self.leases.witness()) is not None:
            assert self.ledger.confront(witness), ("a witness denies what is there", self.path)
        self.leases.acquire(self.order.identity, who.nonce, self.order.lease)
        self.lease = self.lease or who.nonce
        claim = self.ledger.claim(self.order, who)
        assert claim.verdict is self._due(), (claim, self.path)
        if claim.verdict is Verdict.RUN:
            self.may_claim -= 1
            self.fence += 1
            self.state, self.holding, self.expired = State.RUNNING, True, False
            assert (claim.fence, claim.generation) == (self.fence, self.generation)
            self.workers[slot] = Worker(who, self.generation, self.fence)
            if self.order.calls == "body":
                self._granted(slot, "body", claim.attempt)
        else:
            self._leaves(who)

    def _due(self) -> Verdict:
        """What a claim must be answered."""
        if self.state is State.DONE:
            return Verdict.REPLAY
        if self.holding and not self.expired:
            return Verdict.BUSY
        if self.state is State.IN_DOUBT:
            replays = self.order.on_doubt == "replay" and self.unresolved and not self.barred & self.unresolved.keys()
            return Verdict.RUN if replays else Verdict.IN_DOUBT
        return Verdict.REFUSED if self.state is State.FAILED and self.refusal else Verdict.RUN

    def _granted(self, slot: int, name: str, attempt: int) -> None:
        before = self.unresolved.get(name)
        assert before is None or (before == attempt and self.order.on_doubt == "replay"), "sent again while unknown"
        self.may_call -= 1
        self.attempts[name] = self.attempts.get(name, 1) + (name in self.final)
        self.final.discard(name)
        assert attempt == self.attempts[name], "another vendor key than the design's"
        self.workers[slot].under_way[name] = Sending(attempt, sticky=before is not None)
        self.unresolved[name] = attempt
        self.senders[name] = self.fence
        self.reported.discard(name)

    def _mine(self, worker: Worker) -> bool:
        same = (worker.fence, worker.generation) == (self.fence, self.generation)
        return same and self.state in (State.RUNNING, State.IN_DOUBT)

    def _write(self, worker: Worker, **what: Any) -> Written:
        grant = Grant(self.order.identity, self._id(), worker.generation, worker.fence)
        written = self.ledger.write(grant, holder=worker.who, order=self.order, **what)
        worker.last_event = written.event_id or worker.last_event
        if self._mine(worker) and self.state is State.RUNNING:
            self.expired = False  # whoever writes in time is alive
        if written.held:
            self.leases.renew(self.order.identity, worker.who.nonce, self.order.lease)
            self.lease = self.lease or worker.who.nonce
        return written

    def _leaves(self, who: Holder, last_event: int = 0) -> None:
        witness = Witness(self.ledger.epoch, last_event, who.nonce) if last_event else None
        self.leases.release(self.order.identity, who.nonce, witness)
        if self.lease == who.nonce:
            self.lease = None
        if witness and (self.witness is None or witness.event_id >= self.witness.event_id):
            self.witness = witness

    def _intent(self, slot: int, name: str) -> None:
        worker = self.workers[slot]
        if not (self._mine(worker) and self.state is State.RUNNING):
            due = "lost"
        elif self.told or (name in self.unresolved and self.order.on_doubt != "replay"):
            due = "in_doubt"
        else:
            due = "replay" if name in self.done else "run"
        answer = self._write(worker, intents=[(name, "{}")]).intents[name]
        assert answer.verdict == due, (answer, due, self.path)
        if due == "run":
            self._granted(slot, name, answer.attempt)

    def _send(self, slot: int, name: str, charges: bool) -> None:
        worker = self.workers[slot]
        sending = worker.under_way[name]
        order = (worker.generation, name, sending.attempt)
        honoured = self.order.on_doubt == "replay" and order in self.effects
        sending.truth = "charged" if charges or honoured else "nothing"
        if sending.truth == "charged" and not honoured:
            self.effects.append(order)

    def _outcome(self, slot: int, name: str, kind: str) -> None:
        worker = self.workers[slot]
        sending = worker.under_way.pop(name)
        failure = FAILURES.get(kind)
        result = None if failure else Result(f"{worker.fence}".encode())
        outcome = Outcome(name, result=result, failure=failure, error=uuid.uuid4().hex if failure else "")
        left_as = LEFT_AS.get(kind, State.FAILED) if self.order.calls == "body" else None
        settlement = Settlement(left_as, result=result, failure=failure) if left_as else None
        mine, before = self._mine(worker), self.state
        if left_as:
            del self.workers[slot]
        self._write(worker, outcomes=[outcome], settlement=settlement)
        if left_as:
            self._leaves(worker.who, worker.last_event)
        if mine and name in self.unresolved and name not in self.reported:
            self._answered(name, kind, sending)
            if before is State.IN_DOUBT or left_as:
                self._left(left_as or State.PENDING)
        elif kind == "applied" and worker.generation == self.generation:
            self._reported(name, worker.fence)

    def _reported(self, name: str, fence: int) -> None:
        """A stale holder says that it was applied: whoever calls it now speaks for the newer attempt only."""
        if self.state is not State.DONE and name not in self.done:
            if self.attempts.get(name, 1) > 1 and self.senders[name] != fence:
                self.barred.add(name)
            for worker in self.workers.values():
                if self._mine(worker) and name in worker.under_way:
                    worker.under_way[name].sticky = True
            if name not in self.unresolved:
                self.unresolved[name] = self.attempts[name]
                self.reported.add(name)
            self.told = self.told or self.state is State.RUNNING
            self.state = State.RUNNING if self.state is State.RUNNING else State.IN_DOUBT

    def _answered(self, name: str, kind: str, sending: Sending) -> None:
        if kind == "applied":
            self.done.add(name)
        if kind == "applied" or (kind != "unknown" and not sending.sticky):
            self.unresolved.pop(name, None)
            if kind == "declined":
                self.final.add(name)

    def _left(self, state: State) -> None:
        """The record is left, or (in doubt) its last caller has spoken."""
        if self.unresolved or (self.told and state is not State.DONE):
            state = State.IN_DOUBT
        self.state, self.holding, self.expired, self.refusal = state, False, False, False

    def _settle(self, slot: int, state: State) -> None:
        worker = self.workers.pop(slot)
        mine = self._mine(worker)
        result = Result(b"all") if state is State.DONE else None
        written = self._write(worker, settlement=Settlement(state, result=result))
        self._leaves(worker.who, worker.last_event)
        if mine:
            self._left(state)
            assert (written.verdict, written.state) == ("ok", self.state)

    def _die(self, slot: int) -> None:
        del self.workers[slot]

    # -- Redis ---------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        self.lease = self.witness = None
        self.recall()

    def _lie(self) -> None:
        self.lease = SOMEBODY_ELSE
        self.recall()

    def recall(self) -> None:
        """Redis says again what it should, whatever was said to it since."""
        if self.redis is not None:
            self.redis.command("DEL", self.leases._key(self.order.identity), self.leases._prefix + "witness")
            if self.lease:
                self.leases.acquire(self.order.identity, self.lease, self.order.lease)
            if self.witness:
                self.leases.release(self.order.identity, "", self.witness)

    # -- time and people -----------------------------------------------------------------------------------------

    def _expire(self) -> None:
        self.expired = True
        self.sql.execute(
            "update runguard.record set lease_until = clock_timestamp() where key = %s", [self.order.identity.key]
        )

    def _found_dead(self, otherwise: State) -> None:
        self.expired = self.holding = False
        self.state = State.IN_DOUBT if self.unresolved or self.told else otherwise

    def _sweep(self) -> None:
        assert self.order.identity in dict(self.ledger.sweep("sweep"))
        self._found_dead(State.PENDING)

    def _person(self) -> dict[str, str]:
        self.may_answer -= 1
        return {"actor": "person", "reason": "looked it up"}

    def _release(self) -> None:
        assert self.ledger.release(self._id(), **self._person()) == "ok"
        self._found_dead(State.PENDING)

    def _resolve(self, answer: str, name: str | None) -> None:
        said = self.ledger.resolve(self._id(), answer, call=name, result=b"said", force=True, **self._person())
        assert said == "ok"
        about = [name] if name else list(self.names)
        if answer == "did_not_happen":
            for call in about:
                on_its_way = any(call in w.under_way and w.generation == self.generation for w in self.workers.values())
                if on_its_way or any(effect[:2] == (self.generation, call) for effect in self.effects):
                    self.excused.add((self.generation, call))
        for call in about:
            self.barred.discard(call)
            if self.unresolved.pop(call, None) and answer == "happened":
                self.done.add(call)
        if answer == "failed":
            self.state, self.refusal, self.told = State.FAILED, True, False
        elif answer == "happened" and name is None:
            self.state, self.told = State.DONE, False
        elif not self.unresolved:
            self.state, self.told = State.PENDING, False

    def _reopen(self) -> None:
        said = self.ledger.reopen(
            self._id(), seen_generation=self.generation, again_although_applied=True, **self._person()
        )
        assert said == "ok"
        self.generation += 1
        self.state, self.told, self.refusal = State.PENDING, False, False
        self.unresolved, self.done, self.attempts, self.final, self.barred = {}, set(), {}, set(), set()

    def _id(self) -> int:
        assert self.seen is not None
        return int(self.seen["id"])

    # -- the laws ------------------------------------------------------------------------------------------------

    def look(self) -> Mapping[str, Any] | None:
        """The line, its calls of this generation, and how many events it has."""
        return next(iter(self.looking(LOOK, {"key": self.order.identity.key})), None)

    def check(self) -> None:
        said, before = self.path, self.seen
        if self.redis is not None:
            token = self.redis.command("GET", self.leases._key(self.order.identity))
            assert token == (self.lease and self.lease.encode()), ("another's lease", said)
            assert self.leases.witness() == self.witness, said
        now = before if said and said[-1][0] in ELSEWHERE else self.look()
        self.seen = now
        assert (now is None) == (self.state is None), said
        if now is None:
            return
        assert now["broken"] == "", said
        assert (now["state"], now["generation"], now["fence"]) == (self.state, self.generation, self.fence), said

        doubtful = {c["name"]: c["attempt"] for c in now["calls"] if c["state"] in ("started", "in_doubt")}
        assert doubtful == self.unresolved, ("a doubt was forgotten, or invented", doubtful, said)
        unanswered = [c for c in now["calls"] if c["name"] in doubtful and c["outcome_at"] is None]
        assert now["open_calls"] == sum(c["fence"] == now["fence"] for c in unanswered), said

        live = [w for w in self.workers.values() if self._mine(w) and self.state is State.RUNNING]
        assert len({w.fence for w in live}) <= 1, said
        for generation, name, _ in self.effects:
            paid = sum(effect[:2] == (generation, name) for effect in self.effects)
            assert paid <= 1 or (generation, name) in self.excused, ("paid twice", said)
        if before is not None:
            stays = before["state"] == now["state"] == State.DONE and before["generation"] == now["generation"]
            assert not stays or before["result"] == now["result"], ("done has changed", said)
            changed = _without_signs_of_life(before) != _without_signs_of_life(now)
            assert not changed or now["events"] > before["events"], ("changed without an event", said)


def _without_signs_of_life(line: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name not in (*SIGNS_OF_LIFE, "events")}
