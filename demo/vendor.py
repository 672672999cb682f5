"""A fake vendor: an HTTP server that charges, counts exactly, and misbehaves as it is told.

``POST /charges`` charges a customer; ``POST`` on any other path is an effect for the "customer" of that path, so that
real SDK clients can be pointed here. ``GET /charges?customer=…&idempotency_key=…`` and ``GET /charges/ID`` are the
look-up. For tests: ``POST /_control`` scripts what happens next, ``GET /_wait`` waits for requests, ``GET /_report``
tells all, ``POST /reset`` forgets all; :mod:`demo.vendor_control` is the client, :mod:`demo.vendor_book` the memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import socket
import socketserver
import threading
import urllib.parse
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler
from typing import Any, Self

from demo.vendor_book import Answer, Book, refusal

_HEADERS = ("idempotency-key", "x-stainless-retry-count", "amz-sdk-request", "amz-sdk-invocation-id")


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # an answer leaves in one packet
    server: _Server

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        raw = self.rfile.read(length)
        if len(raw) < length:  # its sender died in the middle: half an order is none
            self.close_connection = True
            return
        try:
            body = json.loads(raw or b"{}")
        except ValueError:
            body = raw.decode("latin-1")  # forms and AWS's binary bodies: an effect all the same
        book = self.server.book
        if self.path == "/reset":
            book.reset()
            self._answer(Answer(200, {}))
        elif self.path == "/_control":
            try:
                book.control(body)
                self._answer(Answer(200, {}))
            except (TypeError, ValueError) as error:
                self._answer(Answer(400, {"error": str(error)}))
        else:
            headers = {name: self.headers[name] for name in _HEADERS if name in self.headers}
            request, answer = book.handle(urllib.parse.urlsplit(self.path).path, headers, body)
            book.answered(request, answer.status)  # before sending: whoever got the answer finds it in the report
            self._answer(answer)

    def do_GET(self) -> None:
        parts = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(parts.query))
        book = self.server.book
        match parts.path.strip("/").split("/"):
            case ["charges"]:
                customer, key = query.get("customer"), query.get("idempotency_key")
                found = [e for e in book.effects() if customer in (None, e.customer) and key in (None, e.key)]
                self._answer(Answer(200, {"data": [asdict(effect) for effect in found]}))
            case ["charges", identifier]:
                found = [effect for effect in book.effects() if effect.id == identifier]
                self._answer(Answer(200, asdict(found[0])) if found else refusal(404, "missing", "No such charge."))
            case ["_report"]:
                self._answer(Answer(200, book.report(query.get("customer"))))
            case ["_wait"]:
                arrived, charged, answered = (int(query.get(name, 0)) for name in ("arrived", "charged", "answered"))
                timeout = float(query.get("timeout", 10))
                self._answer(Answer(200, book.wait(query.get("customer"), arrived, charged, answered, timeout)))
            case _:
                self._answer(refusal(404, "missing", "No such page."))

    def _answer(self, answer: Answer) -> None:
        if answer.status == 0:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        payload = json.dumps(answer.body if answer.body is not None else {}).encode()
        self.send_response(answer.status)
        for name, value in {"Content-Type": "application/json", **answer.headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, *_: object) -> None:
        """Nothing: :meth:`Book.report` says it all."""


class _Server(socketserver.ThreadingTCPServer):
    # Not http.server's class: that one looks up the machine's name in DNS when it starts.
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 256

    def __init__(self, port: int, book: Book) -> None:
        self.book = book
        self._connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Nothing: a client that went away is what this server is for."""

    def hang_up(self) -> None:
        for connection in list(self._connections):
            with contextlib.suppress(OSError):  # the client was faster
                connection.shutdown(socket.SHUT_RDWR)


class Vendor:
    """The vendor inside this process; ``url`` answers from :meth:`start` until :meth:`stop`."""

    def __init__(self, port: int = 0) -> None:
        self._server = _Server(port, Book())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), name="vendor", daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def start(self) -> Self:
        self._thread.start()
        return self

    def stop(self) -> None:
        """No request is held any more, all connections are closed, the port is free."""
        self._server.book.close()
        self._server.shutdown()
        self._server.hang_up()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m demo.vendor", description="A fake vendor that counts charges.")
    parser.add_argument("--port", type=int, required=True)
    options = parser.parse_args()
    with _Server(options.port, Book()) as server:
        print(f"vendor on http://127.0.0.1:{options.port}", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()


if __name__ == "__main__":
    main()
