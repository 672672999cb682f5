"""The only code that reads or writes records. Each method is one statement of ``sql/queries.sql``.

Holds one connection, used by one thread. Foreign errors are mapped here, once: out of reach is
:class:`LedgerUnavailable`, not usable is :class:`LedgerNotReady`. Serialisation failures, deadlocks and lost answers
are repeated, which is safe: a claim is recognised by its nonce, a write by its fence. Decisions are the database's;
this room only carries them.
"""

from __future__ import annotations

import json
import logging
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar, cast

import psycopg
from psycopg import IsolationLevel
from psycopg.abc import Buffer
from psycopg.rows import DictRow, dict_row
from psycopg.types.datetime import TimestamptzBinaryLoader

from airflow_runguard.core.errors import LedgerNotReady, LedgerUnavailable, PlanningError
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
    before_of,
    call_of,
    claim_parameters,
    clean,
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
    word_of,
)
from airflow_runguard.core.series import Before, Place

log = logging.getLogger("airflow_runguard")

T = TypeVar("T")
Connect = Callable[[], "psycopg.Connection[Any]"]

UPGRADE = "Run `airflow runguard db upgrade`."
GRANTS = "Grant it what docs/operations.md lists for a worker."
REPEATED = {"40001", "40P01"}  # serialization_failure, deadlock_detected: nothing happened
UNPREPARED = {"26000", "42P05", "0A000"}  # prepared statement is gone, taken or outdated: nothing happened
NOT_READY = {"42P01", "3F000", "42883", "42703"}  # undefined table, schema, function, column
ATTEMPTS = 20


@cache
def queries(name: str = "queries.sql") -> Mapping[str, str]:
    """The blocks of one file of statements, by their names."""
    text = files("airflow_runguard.core").joinpath("sql", name).read_text(encoding="utf-8")
    blocks = re.split(r"^-- name: (\w+)\n", text, flags=re.MULTILINE)[1:]
    return dict(zip(blocks[::2], blocks[1::2], strict=True))


class _Times(TimestamptzBinaryLoader):
    """Times in binary, so that no DateStyle matters. ``None`` for one that Python cannot hold: only a damaged line has
    it, and must not hide the others."""

    def load(self, data: Buffer) -> datetime | None:  # type: ignore[override]
        try:
            return super().load(data)
        except psycopg.DataError:
            return None


class Ledger:
    """One connection to the book.

    :param connect: opens a psycopg connection; called again after a lost one.
    :param deployment: whose records these are.
    :raises PlanningError: ``connect`` gives something that is not a psycopg 3 connection.
    """

    def __init__(self, connect: Connect, *, deployment: str) -> None:
        self._connect = connect
        self.deployment = deployment
        self._connection: psycopg.Connection[DictRow] | None = None
        self._explicit = False
        self.installation = ""
        self.epoch = 0

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
            row = self._carried(lambda connection: _claim_in_turn(connection, order, holder), whole=True)
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
    ) -> Written:
        """Everything that a holder changes: renew, book outcomes, book intents, settle, hand over.

        :param intents: (name, readable arguments as JSON).
        :param hand_over: seconds for which the holder waits in Airflow (deferral) and may re-enter.
        """
        parameters: dict[str, Any] = {
            "record_id": grant.record_id,
            "generation": grant.generation,
            "fence": grant.fence,
            "actor": str(holder),
            "nonce": holder.nonce,
            "lease": order.lease,
            "max_call_time": order.max_call_time,
            "key_lifetime": order.key_lifetime if order.on_doubt == "replay" else None,
            "i_name": [name for name, _ in intents] or None,
            "i_intent": [clean(intent) for _, intent in intents] or None,
            "hand_over": hand_over,
            **pause_parameters(order),
            "body_done": speaks_for_body(settlement, outcomes),
        }
        parameters.update(outcome_parameters(() if parameters["body_done"] else outcomes))
        parameters.update(settlement_parameters(settlement))
        answers: dict[str, IntentAnswer] = {}
        rows = self._all("write", parameters)
        for row in rows[:-1]:
            result = result_of(row, order.store_result) if row["verdict"] == "replay" else None
            answers[row["name"]] = IntentAnswer(
                row["verdict"], row["attempt"] or 0, row["until"], result, row["error"] or ""
            )
        last = rows[-1]
        state = word_of(State, last["state"])
        until = last["until"]
        return Written(
            last["verdict"],
            state,
            last["at"],
            None if state is State.PAUSED else until,
            answers,
            last["event_id"] or 0,
            until if state is State.PAUSED else None,
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

    # -- people (each answers one word; anything but "ok" changed nothing) -----------------------------------------

    def resolve(
        self,
        record_id: int,
        answer: str,
        *,
        actor: str,
        reason: str,
        call: str | None = None,
        result: bytes | None = None,
        reference: str | None = None,
        force: bool = False,
        seen_fence: int | None = None,
    ) -> str:
        """Say what happened to a record in doubt: ``happened``, ``did_not_happen`` or ``failed``."""
        return self._word(
            "resolve",
            record_id=record_id,
            answer=answer,
            call=call,
            result=result,
            reference=reference,
            actor=actor,
            reason=reason,
            force=force,
            seen_fence=seen_fence,
        )

    def reopen(
        self, record_id: int, *, seen_generation: int, actor: str, reason: str, again_although_applied: bool = False
    ) -> str:
        """Order finished work anew, as the next generation."""
        return self._word(
            "reopen",
            record_id=record_id,
            seen_generation=seen_generation,
            again_although_applied=again_although_applied,
            actor=actor,
            reason=reason,
        )

    def release(self, record_id: int, *, actor: str, reason: str, seen_fence: int | None = None) -> str:
        """Take a record from its holder: to ``pending``, or to ``in_doubt`` where a call is open."""
        return self._word("release", record_id=record_id, seen_fence=seen_fence, actor=actor, reason=reason)

    def repair(self, record_id: int, *, seen: str, state: str | None, actor: str, reason: str) -> str:
        """Accept a broken line as it stands (``state`` = ``None``) or give it a state."""
        return self._word("repair", record_id=record_id, seen=seen, state=state, actor=actor, reason=reason)

    def accept_payload(self, record_id: int, *, actor: str, reason: str) -> str:
        """Let the next claim bring another payload."""
        return self._word("accept_payload", record_id=record_id, actor=actor, reason=reason)

    def rename(self, record_id: int, *, namespace: str, key: str, actor: str, reason: str) -> str:
        """Give a finished or untouched record another name."""
        return self._word("rename", record_id=record_id, namespace=namespace, key=key, actor=actor, reason=reason)

    def bypass(
        self, identity: Identity, *, result: bytes | None, reference: str | None, actor: str, reason: str
    ) -> str:
        """Book work that was done by hand. Answers ``ok``, or the state that the record is in instead."""
        return self._word(
            "bypass",
            deployment=identity.deployment,
            namespace=identity.namespace,
            key=identity.key,
            result=result,
            reference=reference,
            actor=actor,
            reason=reason,
        )

    def resume_now(self, record_id: int, *, actor: str, reason: str, seen_fence: int | None = None) -> str:
        """Let one paused record go on at once, if its gate lets it."""
        return self._word("resume_now", record_id=record_id, seen_fence=seen_fence, actor=actor, reason=reason)

    # -- what waits, who is asked, who is told ------------------------------------------------------------------------

    def due(self, ids: Sequence[int]) -> set[int]:
        """Which of these records a waiting task may look at again."""
        return {row["id"] for row in self._all("due", {"ids": list(ids)})}

    def watching(self, name: str, waits: int) -> None:
        """Say that a process watches this ledger, and for how many waiting tasks."""
        self._one("watching", {"name": name, "waits": waits})

    def watched(self, fresh: float) -> int | None:
        """For how many tasks triggerers wait here; ``None`` where none was heard of for so many seconds."""
        row = self._one("watched", {"fresh": fresh})
        return int(row["waits"]) if row["watched"] else None

    def ask(self, record: Record, holder: Holder) -> None:
        """Book that this task instance is parked with a form about the record."""
        self._one(
            "ask",
            {
                "record_id": record.id,
                "generation": record.generation,
                "ti_id": holder.ti_id,
                "dag_id": holder.dag_id,
                "task_id": holder.task_id,
                "run_id": holder.run_id,
                "map_index": holder.map_index,
                "actor": str(holder),
            },
        )

    def give_up_asking(self, record_id: int, *, seen_fence: int, actor: str, reason: str) -> str:
        """Nobody answered in time: ``failed``, needs a person."""
        return self._word("give_up_asking", record_id=record_id, seen_fence=seen_fence, actor=actor, reason=reason)

    def questions(self, record_id: int | None = None) -> Sequence[Mapping[str, Any]]:
        """The forms that are open, oldest first, each with its record's state now."""
        return self._all("questions", {"deployment": self.deployment, "record_id": record_id})

    def close_question(self, ti_id: str) -> None:
        self._all("close_question", {"ti_id": ti_id})

    def tell(self, record_id: int, generation: int, kind: str, reason: str) -> None:
        """Book something that people are to be told; once per record, generation and kind."""
        self._one(
            "tell",
            {
                "deployment": self.deployment,
                "record_id": record_id,
                "generation": generation,
                "kind": kind,
                "reason": reason,
            },
        )

    def take_notices(self, actor: str, limit: int = 20) -> Sequence[Mapping[str, Any]]:
        """What is to be told and nobody else is telling."""
        return self._all("take_notices", {"deployment": self.deployment, "actor": actor, "limit": limit})

    def notice_sent(self, notice_id: int, error: str | None = None) -> None:
        self._one("notice_sent", {"id": notice_id, "error": clean(error)})

    def count_prevented(self, namespace: str) -> None:
        """Count that a stored result was given back instead of a call."""
        self._one("count_prevented", {"deployment": self.deployment, "namespace": namespace})

    def prevented(self, days: int) -> int:
        return int(self._one("prevented", {"deployment": self.deployment, "days": days})["times"])

    # -- audit and measures -------------------------------------------------------------------------------------------

    def audit(self, what: str, **rules: Any) -> Sequence[Mapping[str, Any]]:
        """The rows of one question of the audit: ``twice``, ``slow``, ``bursts``, ``stuck``, ``told``, ``recent``."""
        return self._all(f"audit_{what}", {"deployment": self.deployment, **rules})

    def standing(self) -> Sequence[Mapping[str, Any]]:
        """How many records are not done, by state and failure class, and the age of the oldest in seconds."""
        return self._all("standing", {"deployment": self.deployment})

    # -- gates and freezes -------------------------------------------------------------------------------------------

    def close_gate(self, gate: str, *, until: datetime, rate: float, actor: str, reason: str) -> str:
        """:param rate: slots a second for those that wait, where the gate has no rate of its own."""
        return self._word(
            "close_gate", deployment=self.deployment, gate=gate, until=until, rate=rate, actor=actor, reason=reason
        )

    def open_gate(self, gate: str, *, rate: float, actor: str, reason: str) -> str:
        """Those that wait go on from now, paced; an answer from before this closes the gate no more."""
        return self._word(
            "open_gate", deployment=self.deployment, gate=gate, default_rate=rate, actor=actor, reason=reason
        )

    def set_rate(self, gate: str, *, rate: float | None, default: float, actor: str, reason: str) -> str:
        """:param rate: slots a second; ``None`` = the default again."""
        return self._word(
            "set_rate",
            deployment=self.deployment,
            gate=gate,
            rate=rate,
            default_rate=default,
            actor=actor,
            reason=reason,
        )

    def gates(self, gate: str | None = None) -> Sequence[Mapping[str, Any]]:
        return self._all("gates", {"deployment": self.deployment, "gate": gate})

    def freeze(self, scope: str, value: str = "", *, actor: str, reason: str) -> str:
        """No new call starts: scope ``all``, ``dag_id``, ``namespace`` or ``key_prefix``."""
        return self._word("freeze", deployment=self.deployment, scope=scope, value=value, actor=actor, reason=reason)

    def thaw(self, scope: str, value: str = "", *, actor: str, reason: str) -> str:
        return self._word("thaw", deployment=self.deployment, scope=scope, value=value, actor=actor, reason=reason)

    def freezes(self, *, thawed: bool = False) -> Sequence[Mapping[str, Any]]:
        """Those in force; with ``thawed`` also those that were."""
        return self._all("freezes", {"deployment": self.deployment, "all": thawed})

    # -- the ledger itself -------------------------------------------------------------------------------------------

    def check(self) -> Mapping[str, Any]:
        """What ``meta`` and the server say of themselves.

        :raises LedgerNotReady: no schema, another version, or another deployment's ledger.
        """
        if not self._one("schema_exists", {})["there"]:
            raise LedgerNotReady("The ledger's database has no runguard schema. No call was made.", UPGRADE)
        meta = self._one("meta", {})
        if meta["schema_version"] != SCHEMA_VERSION:
            raise LedgerNotReady(
                f"The ledger has schema version {meta['schema_version']}, this code needs {SCHEMA_VERSION}. "
                "No call was made.",
                UPGRADE if meta["schema_version"] < SCHEMA_VERSION else "Run `pip install -U airflow-runguard` here.",
            )
        if not belongs(self.deployment, meta["deployment"]):
            raise LedgerNotReady(
                f"This ledger belongs to deployment {meta['deployment']!r}; this installation is {self.deployment!r}. "
                "No call was made.",
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

    def calls(self, record_id: int) -> Sequence[Call]:
        return [call_of(row) for row in self._all("calls", {"record_id": record_id})]

    def events(self, record_id: int) -> Sequence[Event]:
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
            for row in self._all("events", {"record_id": record_id})
        ]

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    # -- the seam ----------------------------------------------------------------------------------------------------

    def _statement(self, name: str) -> str:
        return queries()[name]

    def _word(self, name: str, **parameters: Any) -> str:
        return str(self._one(name, parameters)["verdict"])

    def _one(self, name: str, parameters: Mapping[str, Any]) -> DictRow:
        return self._all(name, parameters)[0]

    def _all(self, name: str, parameters: Mapping[str, Any]) -> Sequence[DictRow]:
        statement = self._statement(name)
        return self._carried(lambda connection: _sent(connection, statement, parameters))

    def _carried(self, send: Callable[[psycopg.Connection[DictRow]], T], *, whole: bool = False) -> T:
        """Send one statement, or (``whole``) several in one transaction; repeat it where that is safe and useful."""
        sent = reconnected = False
        for _ in range(ATTEMPTS):
            asked = False
            try:
                connection = self._open()
                asked = True
                if self._explicit or whole:
                    with connection.transaction():
                        return send(connection)
                return send(connection)
            except psycopg.Error as error:
                lost = self._connection is None or self._connection.broken or self._connection.closed
                if lost:
                    self.close()
                    sent = sent or asked  # an error that did arrive means that nothing was carried out
                if error.sqlstate == "RG001":
                    self._explicit = True  # the role's isolation is another: say it with each transaction from now on
                elif error.sqlstate in UNPREPARED and self._connection is not None:
                    self._connection.prepare_threshold = None  # a pooler keeps none: send statements whole from now on
                elif error.sqlstate in REPEATED:
                    pass
                elif lost and not reconnected and not isinstance(error, psycopg.errors.ConnectionTimeout):
                    reconnected = True
                else:
                    raise self._translated(error, sent) from error
            except BaseException:
                self.close()  # a signal tore the statement: the connection's state is unknown
                raise
        raise LedgerUnavailable(f"The ledger refused {ATTEMPTS} times for serialisation. No call was made.")

    def _open(self) -> psycopg.Connection[DictRow]:
        if self._connection is None:
            connection = self._connect()
            if not isinstance(connection, psycopg.Connection):
                raise PlanningError(
                    f"The ledger's Connection gives a {type(connection).__module__} connection, not a psycopg 3 one.",
                    "Install psycopg[binary]>=3.2, or set sqlalchemy_scheme=postgresql+psycopg in its extra.",
                )
            connection.rollback()
            connection.autocommit = True
            connection.isolation_level = IsolationLevel.READ_COMMITTED
            _name_statements_apart(connection)
            connection.row_factory = dict_row
            connection.adapters.register_loader("timestamptz", _Times)
            self._connection = connection
        return self._connection

    def _translated(self, error: psycopg.Error, sent: bool) -> Exception:
        said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if error.sqlstate in NOT_READY:
            return LedgerNotReady(f"The ledger cannot be used as it is: {said}. No call was made.", UPGRADE)
        if error.sqlstate == "42501":
            return LedgerNotReady(f"The ledger's role may not do this: {said}. No call was made.", GRANTS)
        if error.sqlstate == "RG002":
            return PlanningError(f"{said}. Nothing was changed.", "Say another state (`--set-state`).")
        if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError) or error.sqlstate == "25006":
            return LedgerUnavailable(f"The ledger is out of reach: {said}.", sent=sent)
        return error


def _sent(connection: psycopg.Connection[DictRow], statement: str, parameters: Mapping[str, Any]) -> Sequence[DictRow]:
    return connection.execute(statement, parameters, binary=True).fetchall()


def _of_places(places: Sequence[Place]) -> dict[str, list[Any]]:
    columns = ("series", "place", "expected", "min_gap", "partial", "on_failed", "on_absent")
    return {name: [getattr(place, name) for place in places] for name in columns}


def _claim_in_turn(connection: psycopg.Connection[DictRow], order: Order, holder: Holder) -> Mapping[str, Any]:
    """The claim of a record of a series, and its turn and place there, in the transaction that the caller ends."""
    assert order.place is not None
    place = place_parameters(order.place, order.identity, str(holder))
    while True:
        may_run = True
        if order.place.waits:
            (turn,) = _sent(connection, queries()["take_turn"], place)
            if turn["verdict"] != "go":
                return {**turn, "verdict": Verdict.PREVIOUS, "so": turn["verdict"]}
            may_run = turn["standing"] != "replay"
        refused = ""
        with connection.transaction():  # of its own: undone where it may not stand
            (row,) = _sent(connection, queries()["claim"], claim_parameters(order, holder))
            runs = row["verdict"] == Verdict.RUN
            if not row["record_id"]:
                return row
            elif runs and not may_run:  # it was done, and a person reopened it since: look again
                refused = "again"
                raise psycopg.Rollback
            (taken,) = _sent(
                connection,
                queries()["take_place"],
                {**place, "record_id": row["record_id"], "waits": order.place.waits and runs},
            )
            if taken["mine"]:
                return row
            refused = "place"
            raise psycopg.Rollback
        if refused == "place":
            return {**row, "verdict": Verdict.REFUSED, "reason": "place"}


def _name_statements_apart(connection: psycopg.Connection[Any]) -> None:
    """Number this connection's prepared statements from a random start. Behind a pooler, another client's ``_pg3_0``
    may be a different statement; under a name of our own it is ours or not there. psycopg has no setting for it: where
    its counter is not found, nothing is prepared.
    """
    manager: Any = getattr(connection, "_prepared", None)
    if isinstance(getattr(manager, "_prepared_idx", None), int):
        manager._prepared_idx = secrets.randbits(60)
    else:
        connection.prepare_threshold = None


def belongs(deployment: str, bound: str) -> bool:
    """Whether a deployment may write to a ledger bound to ``bound``: its own or its tests' (``bound~…``)."""
    return deployment == bound or deployment.startswith(bound + "~")
