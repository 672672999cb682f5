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
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from enum import StrEnum
from functools import cache
from importlib.resources import files
from typing import Any, TypeVar

import psycopg
from psycopg import IsolationLevel
from psycopg.abc import Buffer
from psycopg.rows import DictRow, dict_row
from psycopg.types.datetime import TimestamptzBinaryLoader

from airflow_runguard.core.errors import LedgerNotReady, LedgerUnavailable, PlanningError
from airflow_runguard.core.record import (
    SCHEMA_VERSION,
    Call,
    CallState,
    Claim,
    Completeness,
    Effect,
    Event,
    Failure,
    FailureClass,
    Grant,
    Holder,
    Identity,
    IntentAnswer,
    Order,
    Outcome,
    Payload,
    Record,
    Result,
    Settlement,
    State,
    Verdict,
    Witness,
    Written,
)

log = logging.getLogger("airflow_runguard")

Connect = Callable[[], "psycopg.Connection[Any]"]

UPGRADE = "Run `airflow runguard db upgrade`."
GRANTS = "Grant it what docs/operations.md lists for a worker."
REPEATED = {"40001", "40P01"}  # serialization_failure, deadlock_detected: nothing happened
UNPREPARED = {"26000", "42P05"}  # prepared statement is not there, or there already: nothing happened
NOT_READY = {"42P01", "3F000", "42883", "42703"}  # undefined table, schema, function, column
ATTEMPTS = 20
DEFAULT_PAUSE = 60.0
"""Seconds to pause where the vendor asks for a pause but does not say how long."""


@cache
def queries() -> Mapping[str, str]:
    text = files("airflow_runguard.core").joinpath("sql", "queries.sql").read_text(encoding="utf-8")
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
        done = self._all("replay", _replay_parameters(order))
        if done:
            return _replay(order.identity, done[0])
        row = self._one("claim", _claim_parameters(order, holder))
        if row["verdict"] == Verdict.REPLAY:
            return _replay(order.identity, row)
        differing: tuple[str, ...] = ()
        if row["payload_fields"] is not None:
            before, after = _json(row["payload_fields"]), order.payload.fields
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
            until=row["until"],
            holder=row["holder"] or "",
            differing=differing,
        )

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
            "i_name": [name for name, _ in intents],
            "i_intent": [clean(intent) for _, intent in intents],
            "hand_over": hand_over,
        }
        parameters.update(_outcome_parameters(outcomes))
        parameters.update(_settlement_parameters(settlement))
        answers: dict[str, IntentAnswer] = {}
        rows = self._all("write", parameters)
        for row in rows[:-1]:
            result = _stored(row, order.store_result) if row["verdict"] == "replay" else None
            answers[row["name"]] = IntentAnswer(
                row["verdict"], row["attempt"] or 0, row["until"], result, row["error"] or ""
            )
        last = rows[-1]
        state = _word_of(State, last["state"])
        return Written(last["verdict"], state, last["at"], last["until"], answers, last["event_id"] or 0)

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
        return _record(rows[0]) if rows else None

    def find(self, name: str) -> list[Record]:
        """Records by ``key`` or ``namespace/key`` (as people type it)."""
        return [_record(row) for row in self._all("find_key", {"deployment": self.deployment, "name": name})]

    def list(
        self,
        *,
        state: str | None = None,
        dag_id: str | None = None,
        namespace: str | None = None,
        prefix: str | None = None,
        needs_person: bool = False,
        after: int = 0,
        limit: int = 100,
    ) -> list[Record]:
        """A page of records in order of ``id``; go on with ``after=`` the last one's id."""
        parameters = {
            "deployment": self.deployment,
            "state": state,
            "dag_id": dag_id,
            "namespace": namespace,
            "prefix": prefix,
            "needs_person": needs_person,
            "after": after,
            "limit": limit,
        }
        return [_record(row) for row in self._all("list", parameters)]

    def calls(self, record_id: int) -> Sequence[Call]:
        return [_call(row) for row in self._all("calls", {"record_id": record_id})]

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

    def _word(self, name: str, **parameters: Any) -> str:
        return str(self._one(name, parameters)["verdict"])

    def _one(self, name: str, parameters: Mapping[str, Any]) -> DictRow:
        return self._all(name, parameters)[0]

    def _all(self, name: str, parameters: Mapping[str, Any]) -> Sequence[DictRow]:
        """Run one statement; repeat it where that is safe and useful."""
        sent = reconnected = False
        for _ in range(ATTEMPTS):
            asked = False
            try:
                connection = self._open()
                asked = True
                if self._explicit:
                    with connection.transaction():
                        return connection.execute(queries()[name], parameters, binary=True).fetchall()
                return connection.execute(queries()[name], parameters, binary=True).fetchall()
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


def _name_statements_apart(connection: psycopg.Connection[Any]) -> None:
    """Number this connection's prepared statements from a random start. Behind a pooler, another client's ``_pg3_0``
    may be a different statement; under a name of our own it is ours or not there. psycopg has no setting for it: where its
    counter is not found, nothing is prepared.
    """
    manager: Any = getattr(connection, "_prepared", None)
    if isinstance(getattr(manager, "_prepared_idx", None), int):
        manager._prepared_idx = secrets.randbits(60)
    else:
        connection.prepare_threshold = None


def belongs(deployment: str, bound: str) -> bool:
    """Whether a deployment may write to a ledger bound to ``bound``: its own or its tests' (``bound~…``)."""
    return deployment == bound or deployment.startswith(bound + "~")


def clean(text: str | None) -> str | None:
    """Text that PostgreSQL takes: no NUL, no lone surrogates. Data must never tear an outcome (P4)."""
    if text is None:
        return None
    return text.replace("\x00", "\\x00").encode("utf-8", "backslashreplace").decode("utf-8")


def outcome_state(failure: Failure | None) -> CallState:
    """What a call ends in. An error is never a result (P9); what is not proven is in doubt (P3)."""
    if failure is None:
        return CallState.DONE
    if failure.effect is Effect.UNKNOWN:
        return CallState.IN_DOUBT
    if failure.effect is Effect.NOT_APPLIED and failure.pausable and not failure.needs_person:
        return CallState.PAUSED
    return CallState.FAILED


def _replay_parameters(order: Order) -> dict[str, Any]:
    return {
        "deployment": order.identity.deployment,
        "namespace": order.identity.namespace,
        "key": order.identity.key,
        "payload_version": order.payload.version,
        "payload_digest": order.payload.digest,
    }


def _claim_parameters(order: Order, holder: Holder) -> dict[str, Any]:
    return {
        **_replay_parameters(order),
        "payload_fields": json.dumps(dict(order.payload.fields), sort_keys=True),
        "payload_readable": clean(json.dumps(dict(order.payload.readable), sort_keys=True, default=str)),
        "calls": order.calls,
        "store_result": order.store_result,
        "on_doubt": order.on_doubt,
        "nonce": holder.nonce,
        "ti_id": holder.ti_id,
        "dag_id": holder.dag_id,
        "task_id": holder.task_id,
        "run_id": holder.run_id,
        "try_number": holder.try_number,
        "map_index": holder.map_index,
        "host": holder.host,
        "pid": holder.pid,
        "actor": str(holder),
        "run_at": order.run_at,
        "lease": order.lease,
        "max_hold": order.max_hold,
        "max_claims": order.max_claims,
        "max_call_time": order.max_call_time,
        "key_lifetime": order.key_lifetime if order.on_doubt == "replay" else None,
    }


def _outcome_parameters(outcomes: Iterable[Outcome]) -> dict[str, list[Any]]:
    columns = ("name", "state", "class", "effect", "final", "resume_after", "error", "evidence", "result", "missing")
    values: dict[str, list[Any]] = {f"o_{column}": [] for column in columns}
    for outcome in outcomes:
        failure, result = outcome.failure, outcome.result
        row = (
            outcome.call,
            outcome_state(failure).value,
            failure.failure_class.value if failure else None,
            failure.effect.value if failure else Effect.APPLIED.value,
            failure.final if failure else False,
            _wait(failure),
            clean(outcome.error),
            clean(failure.evidence) if failure else "",
            result.data if result else None,
            clean(result.missing) or None if result else None,
        )
        for column, value in zip(columns, row, strict=True):
            values[f"o_{column}"].append(value)
    return values


def _settlement_parameters(settlement: Settlement | None) -> dict[str, Any]:
    failure = settlement.failure if settlement else None
    result = settlement.result if settlement else None
    return {
        "to": settlement.state.value if settlement else None,
        "class": failure.failure_class.value if failure else None,
        "effect": failure.effect.value if failure else None,
        "needs_person": failure.needs_person if failure else False,
        "resume_after": _wait(failure),
        "result": result.data if result else None,
        "missing": (clean(result.missing) or None) if result else None,
        "completeness": settlement.completeness.value if settlement else None,
        "error": clean(settlement.error) if settlement else None,
        "evidence": clean(failure.evidence) if failure else None,
    }


def _wait(failure: Failure | None) -> float | None:
    if failure is None or not failure.pausable:
        return None
    return max(DEFAULT_PAUSE if failure.resume_after is None else failure.resume_after, failure.floor or 0.0)


E = TypeVar("E", bound=StrEnum)


def _word_of(kind: type[E], text: str | None) -> E | None:
    """A word of ours; ``None`` for none and for one that a damaged line has instead."""
    return kind(text) if text in list(kind) else None


def _json(text: str) -> Mapping[str, Any]:
    """An object of ours; an empty one for what a damaged line has instead."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}


def _replay(identity: Identity, row: Mapping[str, Any]) -> Claim:
    return Claim(
        Verdict.REPLAY,
        identity,
        row["now"],
        record_id=row["record_id"],
        generation=row["generation"],
        fence=row["fence"],
        result=_stored(row, row["store_result"]),
    )


def _stored(row: Mapping[str, Any], store_result: str) -> Result:
    """The result of what is done. One that is not there is an empty one only where nobody reads it."""
    missing = row["result_missing"] or ""
    if row["result"] is None and not missing and store_result != "none":
        missing = "the task said store_result='digest' or 'none' when it was done"
    return Result(row["result"], missing)


def _record(row: Mapping[str, Any]) -> Record:
    """A line as a value; a broken one too (its readable parts, and ``broken`` says why it cannot be trusted)."""
    state = _word_of(State, row["state"])
    result = Result(row["result"], row["result_missing"] or "") if row["state"] == State.DONE else None
    return Record(
        id=row["id"],
        identity=Identity(row["deployment"], row["namespace"], row["key"]),
        generation=row["generation"],
        state=state,
        failure_class=_word_of(FailureClass, row["failure_class"]),
        effect=_word_of(Effect, row["effect"]),
        completeness=_word_of(Completeness, row["completeness"]) or Completeness.NONE,
        needs_person=row["needs_person"],
        fence=row["fence"],
        claims=row["claims"],
        open_calls=row["open_calls"],
        lease_until=row["lease_until"],
        no_later_than=row["no_later_than"],
        resume_at=row["resume_at"],
        first_intent_at=row["first_intent_at"],
        first_unknown_at=row["first_unknown_at"],
        holder=Holder(
            nonce=row["nonce"] or "",
            ti_id=row["ti_id"] or "",
            dag_id=row["dag_id"] or "",
            task_id=row["task_id"] or "",
            run_id=row["run_id"] or "",
            try_number=row["try_number"] or 0,
            map_index=row["map_index"] if row["map_index"] is not None else -1,
            host=row["host"] or "",
            pid=row["pid"] or 0,
        ),
        calls=row["calls"],
        on_doubt=row["on_doubt"],
        payload=Payload(
            row["payload_version"],
            row["payload_digest"],
            _json(row["payload_fields"]),
            _json(row["payload_readable"]),
        ),
        store_result=row["store_result"],
        result=result,
        error=row["error"],
        evidence=row["evidence"],
        created_at=row["created_at"],
        updated_at=row["updated_at"],
        finished_at=row["finished_at"],
        broken=row["broken"],
        seen=row["seen"],
    )


def _call(row: Mapping[str, Any]) -> Call:
    return Call(
        name=row["name"],
        generation=row["generation"],
        state=_word_of(CallState, row["state"]),
        attempt=row["attempt"],
        fence=row["fence"],
        intent_at=row["intent_at"],
        no_later_than=row["no_later_than"],
        first_intent_at=row["first_intent_at"],
        first_unknown_at=row["first_unknown_at"],
        outcome_at=row["outcome_at"],
        effect=_word_of(Effect, row["effect"]),
        failure_class=_word_of(FailureClass, row["failure_class"]),
        error=row["error"],
        evidence=row["evidence"],
        external_id=row["external_id"] or "",
        intent=_json(row["intent"] or "{}"),
    )
