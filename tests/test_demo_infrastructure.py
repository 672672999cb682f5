"""The ground that the other tests stand on: the vendor counts exactly, the servers lose and keep what they should."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.parse
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import psycopg
import pytest
import redis

from demo.processes import alive, wait_for
from demo.servers import PgBouncer, Postgres, Redis, create_database, drop_database
from demo.vendor import Vendor
from demo.vendor_control import VendorControl

ROOT = Path(__file__).parent.parent


def charge(vendor: Vendor, customer: str = "c1", key: str | None = None, amount: int = 500) -> tuple[int, Any]:
    """Charge without any retry; status and body."""
    body = json.dumps({"customer": customer, "amount": amount, "currency": "eur"}).encode()
    headers = {"Content-Type": "application/json"} | ({"Idempotency-Key": key} if key else {})
    try:
        with urllib.request.urlopen(
            urllib.request.Request(f"{vendor.url}/charges", body, headers), timeout=20
        ) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


# --- the vendor -------------------------------------------------------------------------------------------------------


def test_a_key_that_is_honoured_charges_once(vendor: Vendor, vendor_control: VendorControl) -> None:
    first, second = charge(vendor, key="k"), charge(vendor, key="k")
    assert first == second
    assert first[0] == 200
    assert vendor_control.charges() == 1
    assert [request.key for request in vendor_control.requests()] == ["k", "k"]


def test_a_key_that_is_ignored_charges_each_time(vendor: Vendor, vendor_control: VendorControl) -> None:
    vendor_control.honour_keys(False)
    assert charge(vendor, key="k")[1]["id"] != charge(vendor, key="k")[1]["id"]
    assert vendor_control.charges("c1") == 2


def test_a_key_with_other_parameters_is_refused(vendor: Vendor, vendor_control: VendorControl) -> None:
    charge(vendor, key="k", amount=500)
    status, body = charge(vendor, key="k", amount=501)
    assert (status, body["error"]["type"]) == (400, "idempotency_error")
    assert vendor_control.charges() == 1


def test_a_request_whose_sender_died_before_its_last_byte_is_none(
    vendor: Vendor, vendor_control: VendorControl
) -> None:
    where = urllib.parse.urlsplit(vendor.url)
    with socket.create_connection((where.hostname, where.port)) as dying:
        dying.sendall(b"POST /charges HTTP/1.1\r\nIdempotency-Key: k\r\nContent-Length: 20\r\n\r\n{")
        dying.shutdown(socket.SHUT_WR)
        assert dying.recv(1) == b""  # it has been read, and nothing is answered
    assert vendor_control.requests() == []
    assert charge(vendor, key="k")[0] == 200


def test_a_decline_is_saved_under_its_key(vendor: Vendor, vendor_control: VendorControl) -> None:
    vendor_control.script("status", status=402, body={"error": {"code": "card_declined"}})
    declined = charge(vendor, key="k")
    assert declined[0] == 402
    assert charge(vendor, key="k") == declined
    assert vendor_control.charges() == 0
    assert charge(vendor, key="other")[0] == 200


def test_an_error_that_is_not_saved_leaves_the_key_free(vendor: Vendor, vendor_control: VendorControl) -> None:
    vendor_control.script("status", status=429, headers={"Retry-After": "7"})
    vendor_control.script("status", status=500)
    assert [charge(vendor, key="k")[0] for _ in range(3)] == [429, 500, 200]
    assert vendor_control.charges() == 1


def test_an_error_after_charging_counts_as_an_effect(vendor: Vendor, vendor_control: VendorControl) -> None:
    vendor_control.script("status", status=500, charged=True)
    assert charge(vendor, key="k")[0] == 500
    assert vendor_control.charges() == 1
    status, body = charge(vendor, key="k")
    assert (status, body["id"]) == (200, vendor_control.effects()[0].id)


@pytest.mark.parametrize(("then", "charges"), [("drop", 1), ("drop_before", 0)])
def test_a_dropped_connection_gives_no_answer(
    vendor: Vendor, vendor_control: VendorControl, then: str, charges: int
) -> None:
    vendor_control.script(then)
    with pytest.raises(http.client.RemoteDisconnected):
        charge(vendor)
    assert vendor_control.charges() == charges
    assert vendor_control.requests()[0].status == 0


def test_a_behaviour_waits_for_its_customer(vendor: Vendor, vendor_control: VendorControl) -> None:
    vendor_control.script("status", customer="c2", status=500, times=2)
    assert charge(vendor, "c1")[0] == 200
    assert [charge(vendor, "c2")[0] for _ in range(3)] == [500, 500, 200]


def test_a_behaviour_may_be_that_of_all_whose_name_begins_so(vendor: Vendor, vendor_control: VendorControl) -> None:
    vendor_control.script("status", customer="batch/*", status=500, times=2)
    vendor_control.script("wall", customer="batch/*", seconds=3600)
    assert [charge(vendor, name)[0] for name in ("batch/1", "other", "batch/2")] == [500, 200, 500]
    assert [charge(vendor, name)[0] for name in ("batch/1", "batch/3", "batches")] == [429, 429, 200]
    vendor_control.wait("batch/*", arrived=4, answered=4)
    assert len(vendor_control.requests("batch/*")) == 4
    assert vendor_control.charges("batch/*") == 0
    assert vendor_control.charges() == 2


def test_a_gate_holds_the_answer_of_a_charge_that_happened(vendor: Vendor, vendor_control: VendorControl) -> None:
    vendor_control.script(gate="g")
    with ThreadPoolExecutor() as pool:
        held = pool.submit(charge, vendor, "c1", "k")
        vendor_control.wait("c1", charged=1)
        assert charge(vendor, "c1", "k")[0] == 200  # the same charge again, while the first caller still waits
        assert not held.done()
        vendor_control.release("g")
        assert held.result(20)[0] == 200
    assert vendor_control.charges() == 1


def test_a_gate_before_charging_holds_the_charge(vendor: Vendor, vendor_control: VendorControl) -> None:
    vendor_control.script(gate_before="g")
    with ThreadPoolExecutor() as pool:
        held = pool.submit(charge, vendor, "c1", "k")
        vendor_control.wait("c1", arrived=1)
        assert vendor_control.charges() == 0
        assert charge(vendor, "c1", "k")[0] == 409  # the same key is under way
        vendor_control.release("g")
        assert held.result(20)[0] == 200
    assert vendor_control.charges() == 1


def test_a_limit_told_under_a_held_key_does_not_free_the_key(vendor: Vendor, vendor_control: VendorControl) -> None:
    vendor_control.script(gate_before="g")
    vendor_control.script("status", status=429)
    with ThreadPoolExecutor() as pool:
        held = pool.submit(charge, vendor, "c1", "k")
        vendor_control.wait("c1", arrived=1)
        assert charge(vendor, "c1", "k")[0] == 429
        vendor_control.release("g")
        first = held.result(20)
    assert charge(vendor, "c1", "k") == first
    assert vendor_control.charges() == 1


def test_a_reset_drops_what_is_held_and_forgets_all(vendor: Vendor, vendor_control: VendorControl) -> None:
    vendor_control.script(gate_before="never")
    with ThreadPoolExecutor() as pool:
        held = pool.submit(charge, vendor)
        vendor_control.wait(arrived=1)
        vendor_control.reset()
        with pytest.raises(http.client.RemoteDisconnected):
            held.result(20)
    assert vendor_control.charges() == 0
    assert vendor_control.requests() == []


def test_stopping_lets_held_callers_go_without_charging() -> None:
    vendor = Vendor().start()
    control = VendorControl(vendor.url)
    control.script(gate_before="never")
    with ThreadPoolExecutor() as pool:
        held = pool.submit(charge, vendor)
        control.wait(arrived=1)
        vendor.stop()
        with pytest.raises(http.client.RemoteDisconnected):
            held.result(20)
    with pytest.raises(urllib.error.URLError):
        charge(vendor)


@pytest.mark.parametrize(("honour", "effects"), [(True, 10), (False, 50)])
def test_fifty_threads_are_counted_exactly(
    vendor: Vendor, vendor_control: VendorControl, honour: bool, effects: int
) -> None:
    vendor_control.honour_keys(honour)
    barrier = threading.Barrier(50)

    def one(number: int) -> int:
        barrier.wait(20)
        return charge(vendor, f"c{number % 10}", f"k{number % 10}")[0]

    with ThreadPoolExecutor(50) as pool:
        assert set(pool.map(one, range(50))) == {200}
    assert vendor_control.charges() == effects
    assert len(vendor_control.requests()) == 50
    assert vendor_control.charges("c3") == effects // 10


def test_waiting_in_vain_names_the_numbers(vendor_control: VendorControl) -> None:
    with pytest.raises(TimeoutError, match="'charged': 0"):
        vendor_control.wait("nobody", charged=1, timeout=0.05)


def test_the_look_up_finds_by_customer_key_and_id(vendor: Vendor, vendor_control: VendorControl) -> None:
    made = charge(vendor, "c1", "k1")[1]
    charge(vendor, "c2", "k2")
    assert [item["id"] for item in vendor_control.find(customer="c1")] == [made["id"]]
    assert [item["id"] for item in vendor_control.find(key="k1")] == [made["id"]]
    assert vendor_control.find(key="k3") == []
    with urllib.request.urlopen(f"{vendor.url}/charges/{made['id']}", timeout=10) as answer:
        assert json.load(answer)["customer"] == "c1"


def test_any_other_path_is_an_effect_of_its_own(vendor: Vendor, vendor_control: VendorControl) -> None:
    vendor_control.script("ok", customer="/v1/messages", body={"content": []})
    for path, data in (("/v1/messages", b'{"model": "m"}'), ("/2015-03-31/functions/f/invocations", b"\x00\xff")):
        urllib.request.urlopen(urllib.request.Request(vendor.url + path, data, method="POST"), timeout=10).close()
    assert [e.customer for e in vendor_control.effects()] == ["/v1/messages", "/2015-03-31/functions/f/invocations"]


# --- the servers ------------------------------------------------------------------------------------------------------


def values(url: str) -> list[int]:
    with psycopg.connect(url) as connection:
        return [row[0] for row in connection.execute("SELECT a FROM t ORDER BY a")]


def insert(url: str, value: int) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("CREATE TABLE IF NOT EXISTS t (a int)")
        connection.execute("INSERT INTO t VALUES (%s)", (value,))


def test_postgres_keeps_what_was_committed_over_restart_and_kill(tmp_path: Path) -> None:
    with Postgres(tmp_path, settings={"default_transaction_isolation": "serializable"}) as server:
        insert(server.url, 1)
        url = server.url
        server.restart()
        insert(server.url, 2)
        family = server.service.family()
        assert len(family) > 3  # the postmaster is not alone
        server.kill()
        assert not any(map(alive, family))
        with pytest.raises(psycopg.OperationalError):
            psycopg.connect(server.url)
        server.start()
        assert server.url == url
        assert values(server.url) == [1, 2]
        with psycopg.connect(server.url) as connection:
            settings = [connection.execute(f"SHOW {name}").fetchone() for name in ("fsync", "transaction_isolation")]
        assert settings == [("on",), ("serializable",)]
        family = server.service.family()
    assert not any(map(alive, family))


def test_a_restored_base_backup_goes_back_in_time(tmp_path: Path) -> None:
    with Postgres(tmp_path / "server") as server:
        insert(server.url, 1)
        server.base_backup(tmp_path / "backup")
        insert(server.url, 2)
        server.restore(tmp_path / "backup")
        assert values(server.url) == [1]
        insert(server.url, 3)
        server.restore(tmp_path / "backup")
        assert values(server.url) == [1]


def test_a_database_is_cloned_from_a_template_and_dropped_under_its_users(postgres: str) -> None:
    original, copy = f"runguard_test_o{os.getpid()}", f"runguard_test_c{os.getpid()}"
    try:
        insert(create_database(postgres, original), 7)
        url = create_database(postgres, copy, original)
        assert values(url) == [7]
        with psycopg.connect(url) as connection:
            drop_database(postgres, copy)
            with pytest.raises(psycopg.OperationalError):
                connection.execute("SELECT 1")
    finally:
        drop_database(postgres, copy)
        drop_database(postgres, original)


@pytest.mark.usefixtures("needs_redis")
def test_a_restarted_redis_is_empty(tmp_path: Path) -> None:
    with Redis(tmp_path) as server:
        for end in (server.stop, server.kill):
            with redis.Redis.from_url(server.url) as client:
                client.set("a", "1")
                end()
                with pytest.raises(redis.ConnectionError):
                    client.get("a")
            server.start()
            with redis.Redis.from_url(server.url) as client:
                assert client.get("a") is None


@pytest.mark.skipif(not PgBouncer.available(), reason="PgBouncer is missing: apt-get install pgbouncer")
def test_pgbouncer_shares_one_server_connection_between_transactions(postgres: str, tmp_path: Path) -> None:
    with PgBouncer(tmp_path, postgres) as bouncer:
        with psycopg.connect(bouncer.url, autocommit=True) as one, psycopg.connect(bouncer.url, autocommit=True) as two:
            pids = [c.execute("SELECT pg_backend_pid()", prepare=False).fetchone() for c in (one, two, one)]
        assert pids[0] == pids[1] == pids[2]


STARTER = """
import sys, threading
from pathlib import Path
from demo.servers import Postgres, Redis
directory = Path(sys.argv[1])
with Postgres(directory / "p") as postgres, Redis(directory / "r") as redis:
    threading.Thread(target=redis.restart).start()   # a server outlives the thread that started it
    print(postgres.service.pid, redis.url, flush=True)
    threading.Event().wait()
"""


@pytest.mark.usefixtures("needs_redis")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_nothing_is_left_when_the_starter_ends(tmp_path: Path, number: signal.Signals) -> None:
    command = [sys.executable, "-c", STARTER, str(tmp_path)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as starter:
        assert starter.stdout is not None
        assert starter.stdout.readline(), starter.communicate(timeout=20)
        family = psutil.Process(starter.pid).children(recursive=True)
        assert len(family) > 4
        starter.send_signal(number)
        starter.communicate(timeout=30)
    wait_for(lambda: not any(map(alive, family)), 20, "all servers are gone")


def test_a_server_that_cannot_start_says_why(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="no_such_setting"):
        Postgres(tmp_path, settings={"no_such_setting": "1"}).start()


FORKER = """
import os, sys
from pathlib import Path
from demo.servers import Postgres
with Postgres(Path(sys.argv[1])) as server:
    child = os.fork()
    if child == 0:
        sys.exit()   # runs the exit handlers that it inherited
    os.waitpid(child, 0)
    server.restart()
"""


def test_a_forked_child_that_exits_leaves_the_servers_alone(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKER, tmp_path], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
