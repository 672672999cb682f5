"""How a statement is sent: the rows that a cursor of the driver gives, its errors, and what is heard meanwhile."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.rows import dict_row

from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.sending import Sending, numbered
from tests.core import books

ECHO = """
    select %(text)s::text as text, %(number)s::bigint as number, %(share)s::float8 as share,
           %(truth)s::boolean as truth, %(data)s::bytea as data, %(at)s::timestamptz as at,
           %(many)s::text[] as many, %(amount)s::numeric as amount, %(text)s::text as again,
           7 %% 4 as rest, make_interval(secs => %(share)s::float8) as wait
"""
PREPARED = "select count(*) from pg_prepared_statements"


@pytest.fixture
def connection(ledger_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(ledger_url, autocommit=True) as opened:
        yield opened


def test_a_parameter_is_numbered_once_however_often_it_is_named() -> None:
    assert numbered("select %(b)s, %(a)s, %(b)s, 5 %% 2") == (b"select $1, $2, $1, 5 % 2", ("b", "a"))


TEXT = st.text(st.characters(exclude_characters="\x00", exclude_categories=["Cs"]), max_size=20)


@settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
@given(
    st.fixed_dictionaries(
        {
            "text": st.none() | TEXT,
            "number": st.none() | st.integers(-(2**63), 2**63 - 1),
            "share": st.none() | st.floats(0, 10**6),
            "truth": st.none() | st.booleans(),
            "data": st.none() | st.binary(max_size=20),
            "at": st.none() | st.datetimes(datetime(1, 1, 2), datetime(9999, 12, 30), timezones=st.just(UTC)),  # noqa: DTZ001
            "many": st.none() | st.lists(st.none() | TEXT, max_size=4),
            "amount": st.none() | st.decimals(-(10**9), 10**9, places=2),
        }
    )
)
def test_the_rows_are_those_that_a_cursor_gives(connection: psycopg.Connection[Any], values: dict[str, Any]) -> None:
    send = Sending(connection)
    cursor = connection.cursor(row_factory=dict_row)
    rows = cursor.execute(ECHO, values, binary=True).fetchall()
    assert send(ECHO, values) == rows
    assert send(ECHO, values) == rows, "prepared"
    assert rows[0]["rest"] == 3


def test_a_statement_is_prepared_at_its_second_use_under_a_name_of_ours(connection: psycopg.Connection[Any]) -> None:
    send, other = Sending(connection), Sending(connection)
    for sending, count in ((send, 0), (send, 1), (send, 1), (other, 1), (other, 2)):
        assert sending("select %(n)s::bigint as n", {"n": 5}) == [{"n": 5}]
        assert connection.execute(PREPARED).fetchone() == (count,)
    assert send("select %(n)s::bigint as n", {"n": 2**40}) == [{"n": 2**40}], "of another type: another statement"
    connection.prepare_threshold = None  # a pooler keeps none
    connection.execute("deallocate all")
    assert send("select %(n)s::bigint as n", {"n": 5}) == [{"n": 5}]


def test_a_refusal_is_the_drivers_error_and_the_connection_goes_on(connection: psycopg.Connection[Any]) -> None:
    send = Sending(connection)
    with pytest.raises(psycopg.errors.DivisionByZero, match="division by zero"):
        send("select 1 / %(n)s::int", {"n": 0})
    with pytest.raises(psycopg.errors.RaiseException) as ours:
        send("do $$ begin raise exception 'no' using errcode = 'P0001'; end $$", {})
    assert ours.value.sqlstate == "P0001"
    with pytest.raises(psycopg.DataError):  # what cannot be sent is not sent
        send("select %(text)s::text as text", {"text": "a\x00b"})
    assert send("select %(text)s::text as text", {"text": "ab"}) == [{"text": "ab"}]


def test_a_server_that_goes_says_why(connection: psycopg.Connection[Any], sql: psycopg.Connection[Any]) -> None:
    send = Sending(connection)
    with pytest.raises(psycopg.OperationalError, match="terminating connection"):
        send("select pg_terminate_backend(pg_backend_pid())", {})
    with pytest.raises(psycopg.OperationalError):
        send("select 1", {})
    assert connection.broken or connection.closed


def test_what_comes_meanwhile_is_heard_and_done(
    connection: psycopg.Connection[Any], sql: psycopg.Connection[Any]
) -> None:
    send = Sending(connection)
    connection.execute("listen somebody")
    sql.execute("notify somebody, 'came before the answer'")
    done: list[str] = []
    assert send("select pg_sleep(0.01) is null as slept", {}, lambda: done.append("meanwhile")) == [{"slept": False}]
    assert done == ["meanwhile"]
    heard = [notice.payload for notice in connection.notifies(timeout=60, stop_after=1)]
    assert heard == ["came before the answer"]


def test_threads_take_turns(connection: psycopg.Connection[Any]) -> None:
    send = Sending(connection)
    wrong: list[Any] = []

    def ask(n: int) -> None:
        for _ in range(50):
            if (rows := send("select %(n)s::int as n, clock_timestamp() as at", {"n": n}))[0]["n"] != n:
                wrong.append(rows)

    threads = [threading.Thread(target=ask, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_a_time_that_python_cannot_hold_hides_no_other_column(connection: psycopg.Connection[Any]) -> None:
    send = Sending(connection)
    asked = "select 'infinity'::timestamptz as never, %(at)s::timestamptz as at, %(amount)s::numeric as amount"
    at = datetime(2026, 11, 30, tzinfo=UTC)
    (row,) = send(asked, {"at": at, "amount": Decimal("9.50")})
    assert (row["never"], row["at"] - at, row["amount"]) == (None, timedelta(0), Decimal("9.50"))


class Torn:
    """A server between "it went well" and "it is done": the commit may yet be undone when it goes there."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._server = connection.pgconn
        self._answered = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._server, name)

    def get_result(self) -> Any:
        if self._answered:
            raise psycopg.OperationalError("server closed the connection unexpectedly")
        self._answered = True
        return self._server.get_result()


class Behind:
    """A connection whose server is :class:`Torn`."""

    def __init__(self, connection: psycopg.Connection[Any]) -> None:
        self._connection, self.pgconn = connection, Torn(connection)
        self.lock, self.adapters = connection.lock, connection.adapters

    def __getattr__(self, name: str) -> Any:
        return getattr(self._connection, name)


def test_p03_what_went_well_is_no_answer_before_the_server_is_done(connection: psycopg.Connection[Any]) -> None:
    """As when a fast shutdown ends a server that waits for its standby: it answered, and no commit is sure."""
    torn: Any = Behind(connection)
    send = Sending(connection)
    send.connection = torn
    with pytest.raises(psycopg.OperationalError, match="closed the connection"):
        send("select 1 as one", {})


def test_ctrl_c_takes_back_what_a_person_asked_for(ledger_url: str, sql: psycopg.Connection[Any]) -> None:
    """A process waits for a row that another session holds; interrupted, it does not change it later."""
    sql.execute("create table turn (n int)")
    sql.execute("insert into turn values (1)")
    program = f"""
import psycopg
from airflow_runguard.core.sending import Sending
with psycopg.connect({ledger_url!r}, autocommit=True, application_name="person") as connection:
    try:
        Sending(connection)("update turn set n = 2 returning n", {{}})
    except KeyboardInterrupt:
        print("interrupted", flush=True)
"""
    waiting = "select 1 from pg_stat_activity where application_name = 'person' and wait_event_type = 'Lock'"
    gone = "select 1 where not exists (select from pg_stat_activity where application_name = 'person')"
    with psycopg.connect(ledger_url) as holder:
        holder.execute("select * from turn for update")
        person = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
        books.wait_until(lambda: sql.execute(waiting).fetchone(), "it waits for the row")
        person.send_signal(signal.SIGINT)
        assert person.communicate(timeout=60)[0] == "interrupted\n"
        books.wait_until(lambda: sql.execute(gone).fetchone(), "the server process has ended, the row still locked")
    assert sql.execute("select n from turn").fetchone() == (1,)


def test_a_connection_whose_closing_was_torn_is_opened_anew(ledger: Ledger) -> None:
    ledger.check()
    torn = ledger._connection
    assert torn is not None
    torn.pgconn.send_query(b"select 1")  # as after a signal in the statement, and another in the closing
    ledger.check()
    assert ledger._connection is not torn
