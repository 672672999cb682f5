"""SQL effects without doubt: the effect and its proof commit together, in the target's own transaction.

``guard.sql`` first *reserves* a line of ``runguard_marker`` in the target database, under the call's vendor key, for
this one attempt (its nonce). Then it runs the author's function in a transaction that ends by turning that line to
``done``. Whoever wants to know afterwards *voids* the line: if it is done, the effect happened, and the line has its
result; if it can be voided, the effect did not happen and never will, since no attempt up to that fence can turn it.

    A: reserves (fence 4, nonce a) … inserts the order …        B: voids up to fence 4, commits
    A: sets done where nonce = a and state = open → no line → rolls back, whenever it wakes up
    A: has set done and not committed yet                       B: waits for the line's lock; reads done, or voids

So it is decided at once, without waiting for ``max_call_time``. What cannot be decided (the target is away, the
author's function ended the transaction itself) stays in doubt. The transaction therefore begins with a line under its
own nonce and ends by deleting it: where that line is there, a part of the function's work was committed without proof,
whoever looks and whatever became of the process. PostgreSQL, MySQL and MariaDB (InnoDB), SQLite.
"""

from __future__ import annotations

import base64
import contextlib
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar, cast

from airflow_runguard import codec
from airflow_runguard.core.errors import PlanningError, ResultNotStored
from airflow_runguard.core.failures import Family, Rule, classify
from airflow_runguard.core.reconcile import takes_many
from airflow_runguard.core.record import Effect, Failure, FailureClass, Result
from airflow_runguard.core.work import IN_SQL, NOT_STORED, Applied, Doubt, Fenced, Marker, Reconcile, StillUnknown

T = TypeVar("T")

LOCK_WAIT = 10
"""Seconds to wait for another transaction that has the marker's line."""

DDL = """create table if not exists runguard_marker (
    marker varchar(64) not null primary key,
    fence  bigint      not null,
    nonce  varchar(32) not null,
    state  varchar(4)  not null,
    result {text},
    at     timestamp   not null default current_timestamp
){engine}"""


@dataclass(frozen=True)
class _Dialect:
    begin: tuple[str, ...]
    patience: tuple[str, ...] = ()
    """How long to wait for a lock; by default PostgreSQL and MySQL wait for ever, or for long, and SQLite for 5 s."""
    text: str = "text"
    engine: str = ""
    undone: Callable[[BaseException], bool] = lambda error: False
    """Whether an error says that the server itself has rolled the whole transaction back."""

    @property
    def ddl(self) -> str:
        return DDL.format(text=self.text, engine=self.engine)


def _deadlock(error: BaseException) -> bool:
    return bool(error.args) and error.args[0] == 1213


DIALECTS = {
    "postgresql": _Dialect(
        # A commit that the target may forget is no proof.
        begin=("set local synchronous_commit = on",),
        patience=(f"set local lock_timeout = '{LOCK_WAIT}s'",),
    ),
    "mysql": _Dialect(
        begin=("start transaction",),
        patience=(f"set session innodb_lock_wait_timeout = {LOCK_WAIT}",),
        text="longtext",
        engine=" engine = InnoDB",
        undone=_deadlock,
    ),
    "sqlite": _Dialect(begin=("begin",), patience=(f"pragma busy_timeout = {LOCK_WAIT * 1000}",)),
}


class TransactionEnded(PlanningError):
    """The function ended the guard's transaction itself, so a part of its effect may stand without its proof."""

    remedy = (
        "Take out the COMMIT or ROLLBACK (in MySQL every DDL statement commits, in sqlite3 executescript does), look "
        "at what it did, and say so: `airflow runguard resolve KEY …`."
    )


class Superseded(Exception):
    """Another attempt has taken or voided the marker: this one may not commit."""


class _Connection:
    """The target's connection as the function may use it: everything but ending the transaction."""

    def __init__(self, real: Any) -> None:
        object.__setattr__(self, "_real", real)

    def __getattr__(self, name: str) -> Any:
        if name in ("commit", "rollback", "close", "begin"):
            raise PlanningError(f"connection.{name}() belongs to guard.sql: it commits when the function returns.")
        return getattr(self._real, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("autocommit", "isolation_level"):
            raise PlanningError(f"connection.{name} belongs to guard.sql.")
        setattr(self._real, name, value)


class _Line(NamedTuple):
    """A line of the marker's table."""

    state: str
    fence: int
    result: str | None
    nonce: str

    def is_free_for(self, fence: int) -> bool:
        """What the statement ``RESERVE`` says."""
        return (self.state == "open" and self.fence <= fence) or (self.state == "void" and self.fence < fence)


@dataclass
class SqlTransaction:
    """One call's transaction in one target database.

    :param conn_id: a Connection whose hook is a ``DbApiHook`` for PostgreSQL, MySQL or SQLite.
    :param rules: the author's own, by which its errors are judged first.
    """

    conn_id: str
    rules: tuple[Rule | Family, ...] = ()
    _known: Failure | None = None
    _hook: Any = field(default=None, repr=False)

    def make(self, marker: Marker, fn: Callable[[Any], T], accept: Callable[[Any], None]) -> T:
        """Have the effect of ``fn`` once, whoever has tried before.

        :param accept: raises where what ``fn`` returned is no result; asked before the commit.
        :returns: what ``fn`` returned, now or in the attempt that committed.
        """
        nonce = uuid.uuid4().hex
        try:
            state, stored = self._reserve(marker, nonce)
        except BaseException as error:
            self._known = self._proven(error, "the marker was not reserved, so nothing was begun")
            raise
        if state == "done":
            return cast(T, self._given_back(marker, stored))
        if state != "open":
            raise self._shut_out(marker, state)
        connection = None
        committing = False
        try:
            connection, cursor = self._begun()
            self._run(cursor, INSERT, (nonce, marker.fence, nonce, "torn"))
            result = fn(_Connection(connection))
            accept(result)
            cursor.execute(f"release savepoint {SAVEPOINT}")  # fails where the transaction is not the one begun above
            cursor.execute(f"savepoint {SAVEPOINT}")  # so that an error of the statements below is not taken for that
            self._run(cursor, DONE, (_text(marker.dump(result)), marker.key, nonce))
            if cursor.rowcount != 1:
                raise Superseded(f"{self.conn_id}: another attempt took over the marker {marker.key}")
            self._run(cursor, DELETE, (nonce,))
            committing = True
            connection.commit()
            return result
        except BaseException as error:
            fenced = committing or isinstance(error, Superseded)
            end = "" if fenced else self._end_of(connection, error, nonce)
            self._drop(connection)
            if end == "torn":
                self._note_torn(marker.key, nonce)
                ended = TransactionEnded(f"The function given to guard.sql ended its transaction in {self.conn_id!r}.")
                self._known = self._unknown(error, str(ended))
                raise ended from error
            if end == "undone":
                self._known = self._proven(error, "its transaction was rolled back")
                raise
            if end == "unknown":
                self._known = self._unknown(error, "whether its transaction was rolled back could not be read")
                raise
            state, stored = self._void_quietly(marker)
            if state == "done":
                return cast(T, self._given_back(marker, stored))
            if state == "void" or not committing:
                self._known = self._proven(error, "its transaction did not commit and never will")
            else:
                self._known = self._unknown(error, "its marker could not be read")
            raise
        finally:
            self._drop(connection)

    def judge(self, error: BaseException) -> Failure:
        """What an error of :meth:`make` means."""
        return self._known or classify(error, rules=self.rules)

    def void(self, key: str, fence: int) -> tuple[str, str | None]:
        """See to it that no attempt up to this fence can commit any more. Answers ``done`` and the stored result where
        one has; ``void``; ``torn`` (nobody can say); ``under_way`` (its transaction is not over: its proof can commit
        no more, but a part of its work without it could); ``newer`` (an attempt with a higher fence is at work)."""
        found = self._voided(key, fence)
        if found.state != "void":
            return ("newer" if found.state == "open" else found.state), found.result
        return self._shut(key, found.nonce) if found.nonce else "void", None

    def _shut(self, key: str, nonce: str) -> str:
        """``void`` where the transaction of an attempt is over, and nothing of it can be committed; else ``torn`` or
        ``under_way``."""
        end = self._first_line(nonce)
        if end == "torn":
            self._note_torn(key, nonce)
        return {"undone": "void", "torn": "torn"}.get(end, "under_way")

    def _voided(self, key: str, fence: int) -> _Line:
        for last in (False, True):
            with self._own() as cursor:
                self._run(cursor, VOID, (fence, key, fence))  # first: a read would fix what MySQL's transaction sees
                if found := self._found(cursor, key):
                    return found
                try:
                    self._run(cursor, INSERT, (key, fence, "", "void"))
                    return _Line("void", fence, None, "")
                except Exception:
                    if last:
                        raise
        raise AssertionError("unreachable")

    # -- steps -------------------------------------------------------------------------------------------------------

    def _reserve(self, marker: Marker, nonce: str) -> tuple[str, str | None]:
        try:
            state, stored = self._reserved(marker, nonce)
        except Exception:
            if not self._made_table():
                raise
            state, stored = self._reserved(marker, nonce)
        if state == "earlier":
            earlier = str(stored)
            state, stored = self.void(marker.key, marker.fence - 1)
            if state == "newer":  # reserved under this very fence
                state = self._shut(marker.key, earlier)
            if state == "void":
                return self._reserved(marker, nonce, over=earlier)
        return state, stored

    def _reserved(self, marker: Marker, nonce: str, over: str = "") -> tuple[str, str | None]:
        """``open``; or ``earlier`` and the nonce of an attempt that is to be over first; or as :meth:`void`.

        :param over: the nonce of an attempt whose transaction is over.
        """
        for last in (False, True):
            with self._own() as cursor:
                # First a write, for the lock: a read would fix what MySQL's transaction sees.
                self._run(cursor, LOCK, (marker.key,))
                found = self._found(cursor, marker.key)
                if found is not None and found.is_free_for(marker.fence) and found.nonce not in ("", over):
                    return "earlier", found.nonce
                self._run(cursor, RESERVE, (marker.fence, nonce, marker.key, marker.fence, marker.fence))
                if cursor.rowcount == 1:
                    return "open", None
                if found is not None:
                    return ("newer" if found.state == "open" else found.state), found.result
                try:
                    self._run(cursor, INSERT, (marker.key, marker.fence, nonce, "open"))
                    return "open", None
                except Exception:  # another attempt was first: look at what it wrote
                    if last:
                        raise
        raise AssertionError("unreachable")

    def _made_table(self) -> bool:
        """Whether the marker's table was missing and is there now."""
        try:
            with self._own() as cursor:
                self._run(cursor, "select 1 from runguard_marker where 1 = 0", ())
        except Exception as missing:
            ddl = self._dialect.ddl
            try:
                with self._own() as cursor:
                    self._run(cursor, ddl, ())
            except Exception as refused:
                said = str(refused).strip().splitlines() or [type(refused).__name__]
                raise PlanningError(
                    f"guard.sql needs the table runguard_marker in {self.conn_id!r}, and may not create it: {said[0]}.",
                    f"Have it created there: {' '.join(ddl.split())}",
                ) from missing
            return True
        return False

    def _begun(self) -> tuple[Any, Any]:
        connection = self._open()
        cursor = connection.cursor()
        for statement in (*self._dialect.begin, f"savepoint {SAVEPOINT}"):
            cursor.execute(statement)
        return connection, cursor

    def _end_of(self, connection: Any, error: BaseException, nonce: str) -> str:
        """What became of the transaction after an error: ``undone``, ``torn`` (the function ended it) or ``unknown``.

        While it is the one that was begun it can be rolled back. Where the server ended it, or the connection broke,
        its own first line is asked for: the function may have committed before that.
        """
        if connection is None:
            return "undone"
        try:
            connection.cursor().execute(f"rollback to savepoint {SAVEPOINT}")
        except Exception:
            by_server = self._dialect.undone(error) or not self._alive(connection)
            self._drop(connection)
            return self._first_line(nonce) if by_server else "torn"
        with contextlib.suppress(Exception):
            connection.rollback()
        return "undone"

    def _first_line(self, nonce: str) -> str:
        """What became of the transaction of an attempt, as :meth:`_end_of` answers. Who can write its first line in its
        stead has waited for the end of a transaction that may still commit it, and it stays: an attempt that sleeps
        before its first line runs nothing when it wakes up."""
        with contextlib.suppress(Exception), self._own() as cursor:
            self._run(cursor, INSERT, (nonce, 0, nonce, "void"))
            return "undone"
        with contextlib.suppress(Exception), self._own() as cursor:
            if found := self._found(cursor, nonce):
                return "torn" if found.state == "torn" else "undone"
        return "unknown"

    def _alive(self, connection: Any) -> bool:
        try:
            connection.rollback()
            connection.cursor().execute("select 1")
        except Exception:
            return False
        return True

    def _note_torn(self, key: str, nonce: str) -> None:
        """So that a later attempt does not take the missing proof for a proof."""
        with contextlib.suppress(Exception), self._own() as cursor:
            self._run(cursor, TORN, (key, nonce))

    def _void_quietly(self, marker: Marker) -> tuple[str, str | None]:
        try:
            return self.void(marker.key, marker.fence)
        except Exception:
            return "unknown", None

    def _given_back(self, marker: Marker, stored: str | None) -> Any:
        if stored is None and marker.stores:
            self._known = Failure(
                FailureClass.PROCESSING,
                Effect.APPLIED,
                needs_person=True,
                evidence="its marker is done, without a result",
            )
            raise ResultNotStored(f"The transaction in {self.conn_id!r} is committed, but its result was not stored.")
        return marker.load(base64.b64decode(stored)) if stored is not None else None

    def _shut_out(self, marker: Marker, state: str) -> Exception:
        if state == "torn":
            error: Exception = TransactionEnded(f"An earlier attempt in {self.conn_id!r} ended its transaction itself.")
            self._known = self._unknown(error, "its marker says so")
        elif state == "under_way":
            error = Superseded(
                f"{self.conn_id}: the transaction of an earlier attempt is not over yet; nothing was begun"
            )
            self._known = self._unknown(error, "what the earlier attempt does in the end is not known")
        else:
            error = Superseded(f"{self.conn_id}: the marker {marker.key} is another attempt's")
            self._known = self._proven(error, "the marker is another attempt's, so nothing was begun")
        return error

    def _proven(self, error: BaseException, why: str) -> Failure:
        said = classify(error, effect_kind="read", rules=self.rules)
        return replace(said, effect=Effect.NOT_APPLIED, final=False, evidence=f"{said.evidence}; {why}")

    def _unknown(self, error: BaseException, why: str) -> Failure:
        said = classify(error, rules=self.rules)
        return replace(said, effect=Effect.UNKNOWN, pausable=False, final=False, evidence=f"{said.evidence}; {why}")

    # -- the target --------------------------------------------------------------------------------------------------

    @property
    def hook(self) -> Any:
        if self._hook is None:
            from airflow.sdk import BaseHook

            self._hook = BaseHook.get_hook(self.conn_id)
        return self._hook

    @property
    def _dialect(self) -> _Dialect:
        name = str(getattr(self.hook, "dialect_name", ""))
        if name not in DIALECTS:
            raise PlanningError(f"guard.sql knows {', '.join(DIALECTS)}; {self.conn_id!r} is {name or 'none of them'}.")
        return DIALECTS[name]

    def _open(self) -> Any:
        connection = self.hook.get_conn()
        if self._dialect is DIALECTS["sqlite"]:
            connection.isolation_level = None  # sqlite3 begins by itself, and not always: the guard says when
        else:
            self.hook.set_autocommit(connection, False)
        return connection

    @contextlib.contextmanager
    def _own(self) -> Iterator[Any]:
        """A short transaction of the guard's own."""
        connection = self._open()
        try:
            cursor = connection.cursor()
            for statement in (*self._dialect.begin, *self._dialect.patience):
                cursor.execute(statement)
            yield cursor
            connection.commit()
        finally:
            self._drop(connection)

    def _run(self, cursor: Any, statement: str, values: tuple[Any, ...]) -> None:
        cursor.execute(statement.replace("?", self.hook.placeholder), values)

    def _found(self, cursor: Any, key: str) -> _Line | None:
        self._run(cursor, FIND, (key,))
        row = cursor.fetchone()
        return _Line(str(row[0]), int(row[1]), row[2], str(row[3])) if row else None

    @staticmethod
    def _drop(connection: Any) -> None:
        """What was not committed is rolled back by the server."""
        with contextlib.suppress(Exception):
            if connection is not None:
                connection.close()


SAVEPOINT = "runguard_transaction"
RESERVE = (
    "update runguard_marker set fence = ?, nonce = ?, state = 'open' where marker = ? "
    "and (state = 'open' and fence <= ? or state = 'void' and fence < ?)"
)
LOCK = "update runguard_marker set marker = marker where marker = ?"
INSERT = "insert into runguard_marker (marker, fence, nonce, state) values (?, ?, ?, ?)"
DONE = "update runguard_marker set state = 'done', result = ? where marker = ? and nonce = ? and state = 'open'"
TORN = "update runguard_marker set state = 'torn' where marker = ? and nonce = ? and state in ('open', 'void')"
VOID = (
    "update runguard_marker set fence = ?, state = 'void' where marker = ? and state in ('open', 'void') and fence <= ?"
)
FIND = "select state, fence, result, nonce from runguard_marker where marker = ?"
DELETE = "delete from runguard_marker where marker = ?"


def _text(result: Result) -> str | None:
    return None if result.data is None else base64.b64encode(result.data).decode("ascii")


def answers(on_doubt: object, transaction: Callable[[str], SqlTransaction] = SqlTransaction) -> Reconcile:
    """Who is asked about a doubt: the marker for a call of ``guard.sql``, the author's function for any other. One that
    takes many doubts is a batch's, whose items have no markers."""
    if callable(on_doubt) and takes_many(on_doubt):
        return cast(Reconcile, on_doubt)

    def answer(doubt: Doubt) -> Any:
        if isinstance(doubt.call.intent.get(IN_SQL), str):
            return look(doubt, transaction)
        return on_doubt(doubt) if callable(on_doubt) else None

    return answer


def look(
    doubt: Doubt, transaction: Callable[[str], SqlTransaction] = SqlTransaction
) -> Applied | Fenced | StillUnknown:
    """What became of a call of ``guard.sql``; decided at once, whoever is still under way."""
    conn_id = str(doubt.call.intent[IN_SQL])
    state, stored = transaction(conn_id).void(doubt.vendor_key, max(doubt.record.fence, doubt.call.fence))
    match state:
        case "done":
            return Applied(NOT_STORED if stored is None else codec.load(base64.b64decode(stored)))
        case "void":
            return Fenced(f"its transaction in {conn_id!r} did not commit and never will")
        case "under_way":
            return StillUnknown(f"its transaction in {conn_id!r} is not over yet", seconds=LOCK_WAIT)
        case "newer":
            return StillUnknown(f"a later attempt is at work in {conn_id!r}")
    return StillUnknown(f"the function ended its transaction in {conn_id!r} itself: look at what it did")
