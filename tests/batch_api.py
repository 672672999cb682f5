"""A fake batch API that counts submissions, and a process that submits there and waits until it is killed.

``POST /jobs`` submits, ``GET /jobs/ID`` tells, ``GET /jobs?key=…`` looks up. The test holds the server: it scripts what
comes next, and says how a job stands.
"""

from __future__ import annotations

import json
import socketserver
import sys
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler
from typing import Any, Self

import requests

from airflow_runguard.core import guard
from airflow_runguard.core.jobs import FailedForGood, JobState, NotFound, Running, Succeeded
from tests.core import engine
from tests.core.accidents import attempt


class BatchApi:
    """:param jobs: by name: how each stands. :param keys: the vendor key of each submission that was accepted."""

    def __init__(self) -> None:
        self.jobs: dict[str, str] = {}
        self.keys: list[str] = []
        self.looks = 0
        self.refuse_submits = self.refuse_looks = 0
        self.break_looks = 0
        self.holds_answer = threading.Event()
        self.holds_answer.set()
        self.next_state = "running"
        self._changed = threading.Condition()
        api = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                self.rfile.read(int(self.headers.get("content-length") or 0))
                with api._changed:
                    if api.refuse_submits:
                        api.refuse_submits -= 1
                        return self._answer(429, {}, {"Retry-After": "1"})
                    name = f"job-{len(api.keys) + 1}"
                    api.keys.append(self.headers["idempotency-key"])
                    api.jobs[name] = api.next_state
                    api._changed.notify_all()
                api.holds_answer.wait(60)
                return self._answer(200, {"id": name})

            def do_GET(self) -> None:
                parts = urllib.parse.urlsplit(self.path)
                with api._changed:
                    if parts.query:
                        key = urllib.parse.parse_qs(parts.query)["key"][0]
                        found = [f"job-{n + 1}" for n, known in enumerate(api.keys) if known == key]
                        return self._answer(200, {"jobs": found})
                    api.looks += 1
                    api._changed.notify_all()
                    if api.refuse_looks:
                        api.refuse_looks -= 1
                        return self._answer(429, {}, {"Retry-After": "1"})
                    if api.break_looks:
                        api.break_looks -= 1
                        return self._answer(503, {})
                    name = parts.path.rpartition("/")[2]
                    return self._answer(200, {"state": api.jobs.get(name, "unknown"), "result": f"model of {name}"})

            def _answer(self, status: int, body: Any, headers: dict[str, str] | None = None) -> None:
                payload = json.dumps(body).encode()
                self.send_response(status)
                for header, value in (headers or {}).items():
                    self.send_header(header, value)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *_: object) -> None:
                pass

        class Server(socketserver.ThreadingTCPServer):
            daemon_threads = True

            def handle_error(self, request: Any, client_address: Any) -> None:
                """A client that was killed is what this server is for."""

        self._server = Server(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def wait(self, *, submits: int = 0, looks: int = 0) -> None:
        with self._changed:
            came = self._changed.wait_for(lambda: len(self.keys) >= submits and self.looks >= looks, timeout=60)
            assert came, (self.keys, self.looks)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.holds_answer.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def _session() -> requests.Session:
    session = requests.Session()
    session.trust_env = False
    return session


def submit(url: str, key: str, size: int = 1) -> str:
    with _session() as session:
        answer = session.post(f"{url}/jobs", json={"size": size}, headers={"Idempotency-Key": key}, timeout=60)
    answer.raise_for_status()
    return str(answer.json()["id"])


def attach(url: str, job: str) -> JobState:
    with _session() as session:
        answer = session.get(f"{url}/jobs/{job}", timeout=60)
    answer.raise_for_status()
    said = answer.json()
    return {
        "running": Running(),
        "succeeded": Succeeded(said["result"]),
        "failed": FailedForGood("out of memory"),
    }.get(said["state"], NotFound("no such job"))


def training(url: str) -> Any:
    """The author's body: one job, and what is done with its result."""

    def body(context: guard.GuardContext) -> str:
        model = context.submit(
            "train",
            lambda size, key: submit(url, key, size),
            lambda job: attach(url, job),
            poll=0.02,
            vendor_key_as="key",
            size=3,
        )
        return str(context.call("publish", lambda: f"published {model}"))

    return body


def order(key: str = "model", **rules: Any) -> Any:
    return engine.order(key, **{"calls": "explicit", "lease": 1.0, **rules})


def main() -> None:
    plan = json.loads(sys.argv[1])
    attempt(plan["ledger"], order(), training(plan["url"]))


if __name__ == "__main__":
    main()
