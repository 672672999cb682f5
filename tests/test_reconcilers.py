"""The ready-made look-ups, each asked about a real record in doubt, at a fake of its vendor that answers for real."""

from __future__ import annotations

import asyncio
import json
import socketserver
import sqlite3
import threading
import urllib.parse
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import replace
from datetime import timedelta
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import asyncssh
import psycopg
import pytest

from airflow_runguard import Guard
from airflow_runguard.core import payloads
from airflow_runguard.core.errors import NotApplied
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.reconcile import Finding, doubts, settle
from airflow_runguard.core.record import CallState, Result, State
from airflow_runguard.core.work import Applied, Doubt, StillUnknown
from airflow_runguard.reconcilers import FileLookup, HttpLookup, SftpLookup, SqlLookup, StripeLookup
from tests.core import engine
from tests.core.books import DECLINED, UNKNOWN, enter, long_ago, said

Answer = tuple[int, Any, dict[str, str]]


@pytest.fixture
def sql(ledger_url: str) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(ledger_url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def ledger(ledger_url: str) -> Iterator[Ledger]:
    with closing(engine.open_ledger(ledger_url)) as opened:
        yield opened


@pytest.fixture
def doubt(ledger: Ledger, sql: psycopg.Connection[Any]) -> Doubt:
    """A call that was sent with these arguments and never answered; it can no longer arrive."""
    held = enter(ledger, engine.order("invoice/7", calls="explicit", on_doubt="reconcile"))
    held.write(intents=[("charge", json.dumps({"invoice": "7 & co", "empty": None}))])
    held.write(outcomes=[said("charge", UNKNOWN)])
    held.settle(State.IN_DOUBT, UNKNOWN)
    long_ago(sql, held.id)
    return the_doubt(ledger)


def the_doubt(ledger: Ledger) -> Doubt:
    (record,) = ledger.list(state="in_doubt")
    (found,) = doubts(ledger, record)
    return found


@contextmanager
def serving(answer: Callable[[str, Mapping[str, str], Mapping[str, str]], Answer]) -> Iterator[str]:
    """A vendor's ``GET``: (path, query, headers) -> (status, JSON, headers). Gives its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urllib.parse.urlsplit(self.path)
            status, body, headers = answer(parts.path, dict(urllib.parse.parse_qsl(parts.query)), dict(self.headers))
            payload = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(payload)))
            self.end_headers()
            self.wfile.write(payload)

        def log_message(self, *_: object) -> None:
            pass

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield f"http://sk_test_1:@127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


# -- HTTP --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Answer]]:
    """What the vendor answers, by path; anything else 404. ``asked`` is under the key ''."""
    known: dict[str, Any] = {"": []}

    def answer(path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> Answer:
        known[""].append((path, query))
        return known.get(path, (404, {"error": "no such charge"}, {}))

    with serving(answer) as url:
        monkeypatch.setenv("AIRFLOW_CONN_VENDOR", url)
        yield known


def test_http_a_find_is_applied_with_what_the_author_takes_from_it(doubt: Doubt, answers: dict[str, Any]) -> None:
    answers[f"/charges/{doubt.vendor_key}"] = (200, {"data": [{"id": "ch_1"}]}, {})
    find = HttpLookup("vendor", "charges/{vendor_key}", found=lambda body, _: body["data"][0]["id"])
    assert find(doubt) == Applied("ch_1")


def test_http_what_is_filled_in_is_one_part_of_the_address(doubt: Doubt, answers: dict[str, Any]) -> None:
    assert isinstance(HttpLookup("vendor", "charges/{key}?of={intent[invoice]}")(doubt), NotApplied)
    assert answers[""] == [("/charges/invoice%2F7", {"of": "7 & co"})]


@pytest.mark.parametrize("template", ["charges/{external_id}", "charges/{intent[empty]}", "charges/{intent[missing]}"])
def test_p03_http_without_what_it_asks_by_nothing_is_asked(
    doubt: Doubt, answers: dict[str, Any], template: str
) -> None:
    """``charges/`` would list everybody's: a find for certain, and never this call's."""
    answers["/charges/"] = (200, {"data": ["of all customers"]}, {})
    assert isinstance(HttpLookup("vendor", template)(doubt), StillUnknown)
    assert answers[""] == []


NO_FINDS = (
    *({}, [], [{"id": "ch_1"}], {"error": "quota"}, "text", b"<html>maintenance</html>", 7),
    *({"object": "list", "data": [], "has_more": False}, {"id": "ch_1", "status": "failed"}, {"id": "ch_1"}),
)


def test_p09_http_an_answer_that_nobody_reads_is_no_find(doubt: Doubt, answers: dict[str, Any]) -> None:
    look_up = HttpLookup("vendor", "charges/{key}")
    for body in NO_FINDS:
        answers["/charges/invoice%2F7"] = (200, body, {})
        assert isinstance(look_up(doubt), StillUnknown), body


def test_p09_http_what_is_no_result_is_no_find(doubt: Doubt, answers: dict[str, Any]) -> None:
    """``found`` is asked for the result. "Yes" is none, and "no" may mean that the author looked in the wrong place."""
    answers["/charges"] = (200, {"data": []}, {})
    for no_result in (False, True, [], {}, "", 0, ValueError("no charge")):
        said_by = HttpLookup("vendor", "charges?key={vendor_key}", found=lambda body, _, said=no_result: said)
        assert isinstance(said_by(doubt), StillUnknown), no_result
    for answer in (Applied("ch_1"), NotApplied("it was voided"), StillUnknown("it is pending")):
        said_by = HttpLookup("vendor", "charges?key={vendor_key}", found=lambda body, _, said=answer: said)
        assert said_by(doubt) == answer


def test_http_an_answer_without_it_is_not_found_and_may_come_late(doubt: Doubt, answers: dict[str, Any]) -> None:
    answers["/charges"] = (200, {"data": []}, {})
    first = {"found": lambda body, _: next(iter(body["data"]), None)}
    assert isinstance(HttpLookup("vendor", "charges?key={vendor_key}", **first)(doubt), NotApplied)
    late = HttpLookup("vendor", "charges?key={vendor_key}", grace=60, **first)(doubt)
    assert isinstance(late, StillUnknown)
    assert 0 < (late.seconds or 0) <= 60


@pytest.mark.parametrize(
    ("status", "headers", "word", "seconds"),
    [
        (429, {"Retry-After": "30"}, "wait", 30.0),
        (500, {}, "error", None),
        (401, {}, "error", None),
        (302, {"Location": "/charges/found"}, "error", None),
    ],
)
def test_p06_http_errors_of_the_look_up_are_classified_and_prove_nothing(
    doubt: Doubt, ledger: Ledger, answers: dict[str, Any], status: int, headers: dict[str, str], word: str, seconds: Any
) -> None:
    answers["/charges/invoice%2F7"] = (status, {}, headers)
    answers["/charges/found"] = (200, {"id": "of somebody else"}, {})
    (finding,) = asked(ledger, HttpLookup("vendor", "charges/{key}"))
    assert (finding.word, finding.seconds) == (word, seconds)
    assert the_doubt(ledger).record.state is State.IN_DOUBT


def asked(ledger: Ledger, look_up: Callable[[Doubt], Any]) -> list[Finding]:
    (record,) = ledger.list(state="in_doubt")
    return settle(ledger, record, look_up, lambda value: Result(json.dumps(value).encode()), skip=set())


def test_p03_not_found_counts_only_if_it_was_asked_for_after_the_call_can_no_longer_arrive(
    doubt: Doubt, ledger: Ledger, sql: psycopg.Connection[Any], answers: dict[str, Any]
) -> None:
    """The look began too early and ended late enough: what it did not see may have arrived in between."""

    def slow(doubt: Doubt) -> Any:
        answer = HttpLookup("vendor", "charges/{key}")(doubt)
        long_ago(sql, doubt.record.id)
        return answer

    with sql.transaction():
        sql.execute("select runguard.open_for_writing()")
        sql.execute("update runguard.record set no_later_than = clock_timestamp() + interval '1 h'")
    (finding,) = asked(ledger, slow)
    assert finding.word == "too_early"
    assert the_doubt(ledger).call.state is CallState.IN_DOUBT
    (finding,) = asked(ledger, HttpLookup("vendor", "charges/{key}"))
    assert finding.word == "did_not_happen"


# -- what it may be asked by -------------------------------------------------------------------------------------------


def in_doubt(ledger: Ledger, sql: psycopg.Connection[Any], key: str, intent: Any = None, **order: Any) -> Doubt:
    """A call ``charge`` under ``key`` (``intent=None``: a body) that was never answered and can no longer arrive."""
    calls = "body" if intent is None else "explicit"
    held = enter(ledger, engine.order(key, calls=calls, on_doubt="reconcile", **order))
    if intent is not None:
        held.write(intents=[("charge", json.dumps(payloads.readable(intent)))])
        held.write(outcomes=[said("charge", UNKNOWN)])
    held.settle(State.IN_DOUBT, UNKNOWN)
    long_ago(sql, held.id)
    record = ledger.get(held.order.identity)
    assert record is not None
    (found,) = doubts(ledger, record)
    return found


SENT = {
    "account_number": "DE89370400440532013000",
    "memo": "x" * 300,
    "order": {"iban": "DE89370400440532013000", "id": "o-7"},
    "seen": "https://me:hush@vendor.example/7",
    "client": object(),
    "raw": b"7",
    "two": "7\x008",
}


NOT_AS_SENT = (
    *("{intent[account_number]}", "{intent[memo]}", "{intent[memo]:.100}", "{intent[memo][0]}", "{intent[memo]!r}"),
    *("{intent[order][iban]}", "{intent[seen]}", "{intent[client]}", "{intent[raw]}", "{intent[two]}"),
    *("{payload[iban]}", "{payload[note]}"),
)


def test_p03_nobody_is_asked_by_what_is_masked_or_cut_in_the_ledger(
    ledger: Ledger, sql: psycopg.Connection[Any], answers: dict[str, Any]
) -> None:
    """The vendor knows nothing of ``***``, which would be taken for a proof that the call did not happen."""
    doubt = in_doubt(ledger, sql, "masked", SENT, payload={"iban": "DE89370400440532013000", "note": "use ***"})
    for template in NOT_AS_SENT:
        assert isinstance(HttpLookup("vendor", f"charges?of={template}")(doubt), StillUnknown), template
        assert answers[""] == []
    assert isinstance(HttpLookup("vendor", "charges?of={intent[order][id]}")(doubt), NotApplied)
    assert answers[""] == [("/charges", {"of": "o-7"})]


def test_p03_what_was_done_for_an_earlier_order_under_the_key_is_no_find(
    ledger: Ledger, sql: psycopg.Connection[Any], answers: dict[str, Any]
) -> None:
    """Reopened, and then in doubt: found by its key is what the first order did, and the second would never be done.
    The same after an attempt that the vendor refused: its charge is there, too, and it failed."""
    by_key, by_vendor_key = HttpLookup("vendor", "charges/{key}"), HttpLookup("vendor", "charges/{vendor_key}")
    by_external_id = HttpLookup("vendor", "charges/{external_id}")
    answers["/charges/reopened"] = answers["/charges/refused"] = (200, {"id": "of the first"}, {})

    first = enter(ledger, engine.order("reopened", on_doubt="reconcile"))
    first.settle(State.DONE)
    ledger.reopen(first.id, seen_generation=1, again_although_applied=True, actor="ann", reason="once more")
    reopened = in_doubt(ledger, sql, "reopened")
    enter(ledger, engine.order("refused", on_doubt="reconcile")).settle(State.FAILED, DECLINED)
    refused = in_doubt(ledger, sql, "refused")

    assert (reopened.call.generation, refused.call.attempt) == (2, 2)
    for doubt in (reopened, refused):
        assert isinstance(by_key(doubt), StillUnknown)
        assert isinstance(SqlLookup("vendor", "select 1", ("{key}",))(doubt), StillUnknown)
        assert answers[""] == []
        assert isinstance(by_vendor_key(doubt), NotApplied)
        assert answers[""].pop()[0] == f"/charges/{doubt.vendor_key}"
    named = replace(reopened, call=replace(reopened.call, external_id="ch_2"))
    assert isinstance(by_external_id(named), NotApplied)
    stale = replace(refused, call=replace(refused.call, external_id="ch_1"))
    assert isinstance(by_external_id(stale), StillUnknown)


def test_p03_what_another_call_of_the_same_order_did_is_no_find(
    ledger: Ledger, sql: psycopg.Connection[Any], answers: dict[str, Any], tmp_path: Path
) -> None:
    """By the order's key or payload the first call is found where the second was asked about; and of a batch's items
    nothing is found, where one was done."""
    answers["/orders/two"] = (200, {"id": "of the first"}, {})
    held = enter(ledger, engine.order("two", payload={"id": "o-7"}, calls="explicit", on_doubt="reconcile"))
    for name, failure in (("order", None), ("mail", UNKNOWN)):
        held.write(intents=[(name, json.dumps({"to": "ann"}))])
        held.write(outcomes=[said(name, failure)])
    held.settle(State.IN_DOUBT, UNKNOWN)
    long_ago(sql, held.id)
    record = ledger.get(held.order.identity)
    assert record is not None
    (mail,) = doubts(ledger, record)
    assert (mail.call.name, mail.alone) == ("mail", False)
    for template in ("{key}", "{namespace}", "{payload[id]}"):
        assert isinstance(
            HttpLookup("vendor", f"orders/{template}", found=lambda body, _: body["id"])(mail), StillUnknown
        )
    assert answers[""] == []
    for template in ("{vendor_key}", "{call}", "{intent[to]}"):
        assert isinstance(HttpLookup("vendor", f"orders/two/{template}")(mail), NotApplied)
    assert ("/orders/two/mail", {}) in answers[""]
    (tmp_path / "mail").mkdir()
    assert isinstance(FileLookup(f"file://{tmp_path}/{{call}}")(mail), StillUnknown), "a folder"
    outside = replace(mail, call=replace(mail.call, name="../mail"))
    assert isinstance(FileLookup(f"file://{tmp_path}/x/{{call}}")(outside), StillUnknown)


def test_p03_not_found_counts_from_when_the_call_could_last_arrive(doubt: Doubt, answers: dict[str, Any]) -> None:
    """Of a batch's item only its own line knows it, once the batch waits for something else."""
    look_up = HttpLookup("vendor", "charges?key={vendor_key}", found=lambda body, _: body["data"], grace=60)
    answers["/charges"] = (200, {"data": None}, {})
    last = doubt.now + timedelta(seconds=600)
    waits = replace(
        doubt, record=replace(doubt.record, no_later_than=None), call=replace(doubt.call, no_later_than=last)
    )
    answer = look_up(waits)
    assert isinstance(answer, StillUnknown)
    assert answer.seconds == 660


# -- Stripe ------------------------------------------------------------------------------------------------------------


class Stripe:
    """As much of Stripe as a look-up sees: lists, newest first, in pages of two; events that know their request."""

    def __init__(self) -> None:
        self.intents: list[dict[str, Any]] = []
        self.events: list[dict[str, Any]] = []
        self.refuses = 0

    def make(self, doubt: Doubt, key: str, *, late: float = 1.0, **fields: Any) -> str:
        assert doubt.call.intent_at is not None
        created = int((doubt.call.intent_at + timedelta(seconds=late)).timestamp())
        made = {
            "id": f"pi_{len(self.intents) + 1}",
            "created": created,
            "status": "succeeded",
            "metadata": {},
            **fields,
        }
        self.intents.insert(0, made)
        event = {
            "id": f"evt_{len(self.events) + 1}",
            "created": created,
            "type": "payment_intent.created",
            "request": {"id": "req_1", "idempotency_key": key},
            "data": {"object": {**made, "status": "requires_confirmation"}},
        }
        self.events.insert(0, event)
        return str(made["id"])

    def answer(self, path: str, query: Mapping[str, str], headers: Mapping[str, str]) -> Answer:
        if "Authorization" not in headers:
            return 401, {"error": {"message": "You did not provide an API key."}}, {}
        if self.refuses:
            self.refuses -= 1
            return 429, {"error": {"type": "invalid_request_error", "code": "lock_timeout"}}, {"Retry-After": "2"}
        match path.strip("/").split("/"):
            case ["v1", "payment_intents", name]:
                found = [made for made in self.intents if made["id"] == name]
                return (200, found[0], {}) if found else (404, {"error": {}}, {})
            case ["v1", "payment_intents"]:
                return self._page(self.intents, query)
            case ["v1", "events"]:
                assert query["type"] == "payment_intent.*"
                return self._page(self.events, query)
        return 404, {"error": {"message": "Unrecognized request URL"}}, {}

    def _page(self, things: list[dict[str, Any]], query: Mapping[str, str]) -> Answer:
        inside = [t for t in things if int(query["created[gte]"]) <= t["created"] <= int(query["created[lte]"])]
        names = [thing["id"] for thing in inside]
        begin = names.index(query["starting_after"]) + 1 if "starting_after" in query else 0
        return 200, {"object": "list", "data": inside[begin : begin + 2], "has_more": len(inside) > begin + 2}, {}


@pytest.fixture
def stripe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Stripe]:
    fake = Stripe()
    with serving(fake.answer) as url:
        monkeypatch.setenv("AIRFLOW_CONN_STRIPE", url)
        yield fake


BY_METADATA = StripeLookup("stripe", metadata="runguard")
BY_KEY = StripeLookup("stripe", grace=0.0)


@pytest.mark.parametrize("look_up", [BY_METADATA, BY_KEY], ids=["metadata", "idempotency_key"])
def test_stripe_finds_the_one_among_many_pages(doubt: Doubt, stripe: Stripe, look_up: StripeLookup) -> None:
    for other in range(5):
        stripe.make(doubt, f"key of {other}", metadata={"runguard": f"key of {other}"})
    assert isinstance(look_up(doubt), NotApplied)
    mine = stripe.make(doubt, doubt.vendor_key, metadata={"runguard": doubt.vendor_key})
    stripe.make(doubt, "later", metadata=None)
    assert look_up(doubt) == Applied(mine, reference=mine)
    assert StripeLookup("stripe", metadata="runguard", result=lambda made: made["status"])(doubt).result == "succeeded"


@pytest.mark.parametrize("look_up", [BY_METADATA, BY_KEY], ids=["metadata", "idempotency_key"])
def test_p03_stripe_what_stands_unpaid_or_twice_is_a_persons(
    doubt: Doubt, stripe: Stripe, look_up: StripeLookup
) -> None:
    mine = {"runguard": doubt.vendor_key}
    stripe.make(doubt, doubt.vendor_key, metadata=mine, status="requires_payment_method")
    unpaid = look_up(doubt)
    assert isinstance(unpaid, StillUnknown)
    assert "requires_payment_method" in unpaid.reason
    stripe.make(doubt, doubt.vendor_key, metadata=mine)
    twice = look_up(doubt)
    assert isinstance(twice, StillUnknown)
    assert "2 payment_intents under one key: pi_1, pi_2" in twice.reason


def test_p03_stripe_events_come_late_so_nothing_there_is_no_proof_for_an_hour(doubt: Doubt, stripe: Stripe) -> None:
    nothing = StripeLookup("stripe")(doubt)
    assert isinstance(nothing, StillUnknown)
    assert 3500 < (nothing.seconds or 0) <= 3600


def test_p06_stripe_told_to_wait_waits_and_an_unknown_list_is_an_error(
    doubt: Doubt, ledger: Ledger, stripe: Stripe
) -> None:
    stripe.refuses = 1
    (finding,) = asked(ledger, BY_METADATA)
    assert finding.word == "wait"
    (finding,) = asked(ledger, StripeLookup("stripe", kind="charges", metadata="runguard"))
    assert finding.word == "error"
    (finding,) = asked(ledger, BY_METADATA)
    assert finding.word == "did_not_happen"


# -- SQL ---------------------------------------------------------------------------------------------------------------


def test_sql_a_row_is_a_find_in_sqlite_and_in_postgresql(
    doubt: Doubt, ledger_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "orders.db"
    monkeypatch.setenv("AIRFLOW_CONN_LITE", json.dumps({"conn_type": "sqlite", "host": str(file)}))
    monkeypatch.setenv("AIRFLOW_CONN_PG", ledger_url)
    table, row = "create table orders (id integer, of varchar(100))", (41, doubt.vendor_key)
    lite = SqlLookup("lite", "select id from orders where of = ?")
    post = SqlLookup("pg", "select id, of from orders where of = %s", result=lambda found: list(found))
    with closing(sqlite3.connect(file)) as orders, psycopg.connect(ledger_url, autocommit=True) as book:
        orders.execute(table)
        book.execute(table)
        assert isinstance(lite(doubt), NotApplied)
        assert isinstance(post(doubt), NotApplied)
        orders.execute("insert into orders values (?, ?)", row)
        orders.commit()
        book.execute("insert into orders values (%s, %s)", row)
    assert lite(doubt) == Applied(41)
    assert post(doubt) == Applied([41, doubt.vendor_key])


def test_p09_sql_an_aggregate_of_nothing_and_several_rows_are_no_find(
    doubt: Doubt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "orders.db"
    monkeypatch.setenv("AIRFLOW_CONN_LITE", json.dumps({"conn_type": "sqlite", "host": str(file)}))
    with closing(sqlite3.connect(file)) as orders:
        orders.execute("create table orders (id integer, of varchar(100))")
        for column in ("max(id)", "count(*)", "sum(id)"):
            answer = SqlLookup("lite", f"select {column} from orders where of = ?", result=lambda row: "result")(doubt)
            assert isinstance(answer, StillUnknown), column
        orders.executemany("insert into orders values (?, ?)", [(1, doubt.vendor_key), (2, doubt.vendor_key)])
        orders.commit()
    assert isinstance(SqlLookup("lite", "select id from orders where of = ?")(doubt), StillUnknown)


# -- files -------------------------------------------------------------------------------------------------------------


def test_p03_a_file_that_is_there_whole_is_a_find_and_a_half_one_is_not(doubt: Doubt, tmp_path: Path) -> None:
    look_up = FileLookup(f"file://{tmp_path}/{{intent[invoice]}}.xml", size=lambda _: 5)
    assert isinstance(look_up(doubt), NotApplied)
    (tmp_path / "7 & co.xml").write_bytes(b"<in")
    half = look_up(doubt)
    assert isinstance(half, StillUnknown)
    assert "3 bytes, not 5" in half.reason
    (tmp_path / "7 & co.xml").write_bytes(b"<inv>")
    whole = look_up(doubt)
    assert isinstance(whole, Applied)
    assert whole.result == f"file://{tmp_path}/7 & co.xml"


@contextmanager
def sftp_server(root: Path) -> Iterator[int]:
    """A real SFTP server on a directory. Gives its port."""
    started: threading.Event = threading.Event()
    ports: list[int] = []
    loop = asyncio.new_event_loop()

    connections: list[asyncssh.SSHServerConnection] = []

    class Partner(asyncssh.SSHServer):
        def connection_made(self, conn: asyncssh.SSHServerConnection) -> None:
            connections.append(conn)

        def password_auth_supported(self) -> bool:
            return True

        def validate_password(self, username: str, password: str) -> bool:
            return (username, password) == ("me", "secret")

    async def serve() -> None:
        server = await asyncssh.listen(
            "127.0.0.1",
            0,
            server_factory=Partner,
            server_host_keys=[asyncssh.generate_private_key("ssh-ed25519")],
            sftp_factory=lambda chan: asyncssh.SFTPServer(chan, chroot=str(root)),
        )
        ports.append(server.get_port())
        started.set()
        await stop.wait()
        server.close()
        await server.wait_closed()
        for connection in connections:  # a client that is gone may leave its side open
            connection.abort()
            await connection.wait_closed()

    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    assert started.wait(30)
    try:
        yield ports[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


@pytest.mark.filterwarnings("ignore")  # the SSH provider's own
def test_p03_sftp_a_file_that_is_there_whole_is_a_find_and_a_half_one_is_not(
    doubt: Doubt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_up = SftpLookup("partner", "/inbox/{intent[invoice]}.xml", size=lambda _: 5)
    (tmp_path / "inbox").mkdir()
    with sftp_server(tmp_path) as port:
        monkeypatch.setenv(
            "AIRFLOW_CONN_PARTNER", f"sftp://me:secret@127.0.0.1:{port}?no_host_key_check=true&look_for_keys=false"
        )
        assert isinstance(look_up(doubt), NotApplied)
        (tmp_path / "inbox" / "7 & co.xml").write_bytes(b"<in")
        assert isinstance(look_up(doubt), StillUnknown)
        (tmp_path / "inbox" / "7 & co.xml").write_bytes(b"<inv>")
        assert look_up(doubt) == Applied("/inbox/7 & co.xml", reference="/inbox/7 & co.xml")


def test_a_look_up_is_shown_the_same_in_every_process() -> None:
    """Airflow compares the text to notice that a DAG changed; a function's address would change it each time."""

    def take(made: Mapping[str, Any]) -> Any:
        return made

    shown = repr(Guard(on_doubt=StripeLookup("stripe", result=take)))
    assert "0x" not in shown
    assert "take" in shown
