"""The only code that reads or writes records. Each method is one statement of ``sql/queries.sql``.

Holds one connection (``seam.py``), used by one thread. Decisions are the database's; this room only carries them. What
people change is in ``people.py``, what stands beside the records in ``waits.py``; a :class:`Ledger` is all of it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, cast

import psycopg

from airflow_runguard.core.errors import LedgerNotReady
from airflow_runguard.core.people import People
from airflow_runguard.core.record import (
    SCHEMA_VERSION,
    Call,
    Claim,
    Event,
    Failure,
    Grant,
    Holder,
    Identity,
    IntentAnswer,
    Observed,
    Order,
    Outcome,
    Record,
    Result,
    Settlement,
    State,
    Verdict,
    Witness,
    Written,
)
from airflow_runguard.core.rows import (
    SETTLED,
    before_of,
    call_of,
    claim_parameters,
    clean,
    item_parameters,
    object_of,
    observe_parameters,
    outcome_parameters,
    pause_parameters,
    place_parameters,
    record_of,
    replay_of,
    replay_parameters,
    result_of,
    settlement_parameters,
    speaks_for_body,
    waiting_parameters,
    word_of,
)
from airflow_runguard.core.seam import NEWER, UPGRADE, queries
from airflow_runguard.core.sending import Sending
from airflow_runguard.core.series import Before, Place
from airflow_runguard.core.waits import Waits

log = logging.getLogger("airflow_runguard")


class Ledger(People, Waits):
    """The book: what a holder changes, what is read, and the ledger itself."""

    # -- entering and holding ------------------------------------------------------------------------------------

    def claim(self, order: Order, holder: Holder) -> Claim:
        """Be allowed to work on a record, or be told why not; exactly one of any number of racing claims is (P1)."""
        # A batch that is done is entered all the same: only its list says whether there is more.
        done = self._all("replay", replay_parameters(order)) if order.calls != "batch" else ()
        if done:
            return replay_of(order.identity, done[0])
        if order.place is None:
            row: Mapping[str, Any] = self._one("claim", claim_parameters(order, holder))
        else:
            row = self._carried(lambda send: _claim_in_turn(send, order, holder), whole=True)
        if row["verdict"] == Verdict.REPLAY:
            return replay_of(order.identity, row)
        if row["verdict"] == Verdict.PREVIOUS:
            stands = before_of(row)
            return Claim(Verdict.PREVIOUS, order.identity, stands.now, until=stands.until, before=stands)
        differing: tuple[str, ...] = ()
        if row["payload_fields"] is not None:
            before, after = object_of(row["payload_fields"]), order.payload.fields
            differing = tuple(sorted(k for k in before.keys() | after.keys() if before.get(k) != after.get(k)))
        return Claim(
            verdict=Verdict(row["verdict"]),
            identity=order.identity,
            now=row["now"],
            reason=row["reason"] or "",
            record_id=row["record_id"] or 0,
            generation=row["generation"] or 0,
            fence=row["fence"] or 0,
            attempt=row["attempt"] or 0,
            reentered=bool(row["reentered"]),
            until=row["until"],
            holder=row["holder"] or "",
            differing=differing,
        )

    def before(self, place: Place) -> Before:
        """What stands before a place of a series: whether a run there may begin."""
        parameters = {"deployment": self.deployment, **_of_places([place])}
        return before_of(self._one("before", parameters))

    def due_places(self, places: Sequence[Place]) -> set[Place]:
        """At which of these places a run may begin, or never will (it is refused or skipped)."""
        rows = self._all("due_places", {"deployment": self.deployment, **_of_places(places)})
        return {places[row["n"] - 1] for row in rows}

    def write(
        self,
        grant: Grant,
        *,
        holder: Holder,
        order: Order,
        outcomes: Sequence[Outcome] = (),
        intents: Sequence[tuple[str, str]] = (),
        settlement: Settlement | None = None,
        hand_over: float | None = None,
        told: Failure | None = None,
        error: str = "",
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Written:
        """Everything that a holder changes: renew, book outcomes, book intents, settle, hand over.

        :param intents: (name, readable arguments as JSON).
        :param hand_over: seconds for which the holder waits in Airflow (deferral) and may re-enter.
        :param told: the quota that it waits for; the seconds count from its slot.
        :param error: what told of that quota; without one, why it hands over again without having gone on.
        :param meanwhile: done while the ledger writes items; does not raise.
        """
        held: dict[str, Any] = {
            "record_id": grant.record_id,
            "generation": grant.generation,
            "fence": grant.fence,
            "actor": str(holder),
            "nonce": holder.nonce,
        }
        left = settlement_parameters(settlement)
        if speaks_for_body(settlement, outcomes):
            for row in self._all("settle_body", {**held, **{name: left[name] for name in SETTLED}}):
                return Written("ok", State.DONE, row["at"], None, {}, row["event_id"])
        held |= {"lease": order.lease, "max_call_time": order.max_call_time}
        answers: dict[str, IntentAnswer] = {}
        plain = item_parameters(outcomes, intents, order.store_result)
        if order.calls == "batch" and settlement is None and (plain["done"] or plain["calls"]):
            for row in self._all("write_items", {**held, **plain}, meanwhile):
                until, answered = row["at"] + timedelta(seconds=order.max_call_time), row["answered"] or ()
                for name, attempt in zip(row["called"] or (), row["attempts"] or (), strict=True):
                    answers[name] = IntentAnswer("run", attempt, until, None, "")
                outcomes = [outcome for outcome in outcomes if outcome.call not in answered]
                intents = [intent for intent in intents if intent[0] not in answers]
                if not outcomes and not intents:
                    return Written("ok", State.RUNNING, row["at"], row["until"], answers, row["event_id"])
        parameters: dict[str, Any] = {
            **held,
            "key_lifetime": order.resent_within,
            "i_name": [name for name, _ in intents] or None,
            "i_intent": [clean(intent) for _, intent in intents] or None,
            "hand_over": hand_over,
            **pause_parameters(order),
            **outcome_parameters(outcomes),
            **left,
            **waiting_parameters(told, error),
        }
        rows = self._all("write", parameters)
        for row in rows[:-1]:
            result = result_of(row, order.store_result) if row["verdict"] == "replay" else None
            answers[row["name"]] = IntentAnswer(
                row["verdict"], row["attempt"] or 0, row["until"], result, row["error"] or ""
            )
        last = rows[-1]
        state = word_of(State, last["state"])
        until, waits = last["until"], state is State.PAUSED or told is not None
        return Written(
            last["verdict"],
            state,
            last["at"],
            None if waits else until,
            answers,
            last["event_id"] or 0,
            until if waits else None,
        )

    def take_place(self, place: Place, record: Record) -> bool:
        """Note where a record stands in its series; it takes no turn. ``False`` = that place is another record's."""
        parameters = place_parameters(place, record.identity, "") | {"record_id": record.id, "waits": False}
        return bool(self._one("take_place", parameters)["mine"])

    def observe(
        self,
        order: Order | Identity,
        holder: Holder,
        what: str,
        *,
        failure: Failure | None = None,
        error: str = "",
        result: Result | None = None,
        max_hold: float | None = None,
        partition: str | None = None,
    ) -> Observed:
        """Book what a task does that nothing holds up: it ``started``, or ended ``done``, ``failed`` or ``skipped``.

        :param order: or only its name, where the observer does not know the payload.
        :param max_hold: seconds after which one that was not heard of again counts as dead (default: the order's).
        """
        known = order if isinstance(order, Order) else None
        row = self._one(
            "observe",
            observe_parameters(
                known.identity if known else cast(Identity, order),
                holder,
                what,
                order=known,
                max_hold=max_hold or (known.max_hold if known else 21_600.0),
                partition=known.partition if known else partition,
                failure=failure,
                error=error,
                result=result,
            ),
        )
        return Observed(row["verdict"], row["said"] or "")

    def airflow_was_told(
        self, identity: Identity, holder: Holder, word: str, *, actor: str, **detail: Any
    ) -> str | None:
        """Keep beside a record what a person told Airflow of its task (``success``, ``failed``, ``skipped``): nothing
        of the record changes. Answers its state; ``None`` = there is no record."""
        parameters = {
            "deployment": identity.deployment,
            "namespace": identity.namespace,
            "key": identity.key,
            "ti_id": holder.ti_id,
            "word": word,
            "actor": actor,
            "detail": json.dumps({"run_id": holder.run_id, "try": holder.try_number, **detail}),
        }
        state = self._one("airflow_was_told", parameters)["state"]
        return None if state is None else str(state)

    def remember(self, grant: Grant, holder: Holder, call: str, external_id: str, *, submitted: bool) -> str:
        """Keep the vendor's own name for what a call set going. ``ok``, or ``lost``: kept as evidence only.

        :param submitted: a later holder attaches to it by this name.
        """
        return self._word(
            "remember",
            record_id=grant.record_id,
            generation=grant.generation,
            fence=grant.fence,
            actor=str(holder),
            call=call,
            external_id=clean(external_id),
            submitted=submitted,
        )

    def adopt(self, record_id: int, *, call: str, external_id: str, seen_fence: int, actor: str) -> str:
        """A doubtful call turned out to be this job: a later holder attaches to it."""
        return self._word(
            "adopt", record_id=record_id, call=call, external_id=clean(external_id), seen_fence=seen_fence, actor=actor
        )

    def lines(
        self, begin: datetime, end: datetime, *, namespace: str | None = None, dag_id: str | None = None
    ) -> Sequence[tuple[int, Identity, Call]]:
        """The calls that were under way in a span of time, each with its record's id and name."""
        where = {"deployment": self.deployment, "namespace": namespace, "dag_id": dag_id}
        rows = self._all("lines", {"begin": begin, "end": end, **where})
        return [
            (row["record_id"], Identity(self.deployment, row["namespace"], row["key"]), call_of(row)) for row in rows
        ]

    def note_difference(
        self, record_id: int | None, generation: int | None, kind: str, *, actor: str, reason: str, detail: str
    ) -> bool:
        """Book where the ledger and the vendor's list differ; whether it was not booked before."""
        row = self._one(
            "note_difference",
            {
                "record_id": record_id,
                "generation": generation,
                "kind": kind,
                "actor": actor,
                "reason": clean(reason),
                "detail": clean(detail),
            },
        )
        return bool(row["new"])

    def sweep(self, actor: str, limit: int = 1000) -> list[tuple[Identity, State]]:
        """Settle what died: an open call goes to ``in_doubt``, a record that never called to ``pending``."""
        rows = self._all("sweep", {"actor": actor, "limit": limit})
        return [(Identity(self.deployment, row["namespace"], row["key"]), State(row["state"])) for row in rows]

    def dags_to_ask(self, idle: float) -> list[str]:
        """DAGs with something in doubt that their functions may settle, and that nobody moved for so many seconds."""
        return [row["dag_id"] for row in self._all("dags_to_ask", {"deployment": self.deployment, "idle": idle})]

    # -- audit and measures -------------------------------------------------------------------------------------------

    def audit(self, what: str, **rules: Any) -> Sequence[Mapping[str, Any]]:
        """The rows of one question of the audit: ``twice``, ``slow``, ``bursts``, ``stuck``, ``told``, ``recent``."""
        return self._all(f"audit_{what}", {"deployment": self.deployment, **rules})

    def standing(self) -> Sequence[Mapping[str, Any]]:
        """How many records are not done, by state and failure class, and the age of the oldest in seconds."""
        return self._all("standing", {"deployment": self.deployment})

    # -- the ledger itself -------------------------------------------------------------------------------------------

    def check(self) -> Mapping[str, Any]:
        """What ``meta`` and the server say of themselves.

        :raises LedgerNotReady: no schema, another version, or another deployment's ledger.
        """
        if not self._one("schema_exists", {})["there"]:
            raise LedgerNotReady("The ledger's database has no runguard schema.", UPGRADE)
        meta = self._one("meta", {})
        if meta["schema_version"] != SCHEMA_VERSION:
            raise LedgerNotReady(
                f"The ledger has schema version {meta['schema_version']}, this code needs {SCHEMA_VERSION}.",
                UPGRADE if meta["schema_version"] < SCHEMA_VERSION else NEWER,
            )
        if not belongs(self.deployment, meta["deployment"]):
            raise LedgerNotReady(
                f"This ledger belongs to deployment {meta['deployment']!r}; this installation is {self.deployment!r}.",
                "Correct [runguard] deployment or the Connection of the ledger.",
            )
        self.installation = str(meta["installation"])
        self.epoch = meta["epoch"]
        return meta

    def acknowledge_restore(self, *, lost_since: datetime | None, actor: str, reason: str) -> int:
        """Use a ledger that lost time again. Returns the new epoch."""
        row = self._one("acknowledge_restore", {"lost_since": lost_since, "actor": actor, "reason": reason})
        return int(row["epoch"])

    def confront(self, witness: Witness) -> bool:
        """Whether a remembered event is still there; if not, the ledger says from now on that it lost time."""
        row = self._one("confront", {"epoch": witness.epoch, "event_id": witness.event_id, "mark": witness.mark})
        return bool(row["kept"])

    def lose(self, why: str) -> None:
        """Say that this ledger lost time: no claim is granted until a person acknowledges it."""
        self._one("lose", {"why": why})

    # -- reading -----------------------------------------------------------------------------------------------------

    def get(self, identity: Identity) -> Record | None:
        rows = self._all(
            "find", {"deployment": identity.deployment, "namespace": identity.namespace, "key": identity.key}
        )
        return record_of(rows[0]) if rows else None

    def find(self, name: str) -> list[Record]:
        """Records by ``key`` or ``namespace/key`` (as people type it)."""
        return [record_of(row) for row in self._all("find_key", {"deployment": self.deployment, "name": name})]

    def list(
        self,
        *,
        state: str | None = None,
        dag_id: str | None = None,
        namespace: str | None = None,
        prefix: str | None = None,
        needs_person: bool = False,
        by_marker: bool = False,
        after: int = 0,
        limit: int = 100,
    ) -> list[Record]:
        """A page of records in order of ``id``; go on with ``after=`` the last one's id.

        :param by_marker: only those with a call of ``guard.sql`` in doubt, about which the target's marker is asked.
        """
        parameters = {
            "deployment": self.deployment,
            "state": state,
            "dag_id": dag_id,
            "namespace": namespace,
            "prefix": prefix,
            "needs_person": needs_person,
            "by_marker": by_marker,
            "after": after,
            "limit": limit,
        }
        return [record_of(row) for row in self._all("list", parameters)]

    def waiting(self, gate: str, *, limit: int) -> Sequence[Record]:
        """The first of those that have a turn at a gate: paused, keeping their place, or in doubt and about to be sent
        again."""
        parameters = {"deployment": self.deployment, "gate": gate, "limit": limit}
        return [record_of(row) for row in self._all("waiting", parameters)]

    def calls(self, record_id: int) -> Sequence[Call]:
        return [call_of(row) for row in self._all("calls", {"record_id": record_id})]

    def events(self, record_id: int) -> Sequence[Event]:
        return self._told("events", record_id)

    def renamed(self, record_id: int) -> Sequence[Event]:
        """What :func:`~airflow_runguard.core.keys.sent_under` needs."""
        return self._told("renamed", record_id)

    def _told(self, statement: str, record_id: int) -> Sequence[Event]:
        return [
            Event(
                row["id"],
                row["at"],
                row["kind"],
                row["generation"] or 0,
                row["fence"] or 0,
                row["actor"],
                row["reason"],
                json.loads(row["detail"]),
            )
            for row in self._all(statement, {"record_id": record_id})
        ]


def _of_places(places: Sequence[Place]) -> dict[str, list[Any]]:
    columns = ("series", "place", "expected", "min_gap", "partial", "on_failed", "on_absent")
    return {name: [getattr(place, name) for place in places] for name in columns}


def _claim_in_turn(send: Sending, order: Order, holder: Holder) -> Mapping[str, Any]:
    """The claim of a record of a series, and its turn and place there, in the transaction that the caller ends."""
    assert order.place is not None
    place = place_parameters(order.place, order.identity, str(holder))
    while True:
        may_run = True
        if order.place.waits:
            (turn,) = send(queries()["take_turn"], place)
            if turn["verdict"] != "go":
                return {**turn, "verdict": Verdict.PREVIOUS, "so": turn["verdict"]}
            may_run = turn["standing"] != "replay"
        refused = ""
        with send.connection.transaction():  # of its own: undone where it may not stand
            (row,) = send(queries()["claim"], claim_parameters(order, holder))
            runs = row["verdict"] == Verdict.RUN
            if not row["record_id"]:
                return row
            elif runs and not may_run:  # it was done, and a person reopened it since: look again
                refused = "again"
                raise psycopg.Rollback
            (taken,) = send(
                queries()["take_place"],
                {**place, "record_id": row["record_id"], "waits": order.place.waits and runs},
            )
            if taken["mine"]:
                return row
            refused = "place"
            raise psycopg.Rollback
        if refused == "place":
            return {**row, "verdict": Verdict.REFUSED, "reason": "place"}


def belongs(deployment: str, bound: str) -> bool:
    """Whether a deployment may write to a ledger bound to ``bound``: its own or its tests' (``bound~…``)."""
    return deployment == bound or deployment.startswith(bound + "~")
