"""The few words that a lease says to Redis, over ``hiredis``: one socket, one command at a time, short timeouts.

redis-py would cost each task process 20 MB and its import half a second (``docs/decisions/0003``); the lease needs
SET, GET and EVAL. Foreign errors are mapped here to :class:`RedisAway`.
"""

from __future__ import annotations

import socket
import ssl
import threading
from typing import Any, Self
from urllib.parse import unquote, urlsplit

import hiredis


class RedisAway(Exception):
    """Redis did not answer, refused, or answered with an error: its word is not there."""


class Redis:
    """A connection that is made when first used, and made again once when it was lost.

    :param timeout: seconds for connecting and for each answer.
    """

    def __init__(
        self,
        host: str = "localhost",
        port: int = 6379,
        *,
        username: str | None = None,
        password: str | None = None,
        database: int = 0,
        tls: bool = False,
        timeout: float = 1.0,
    ) -> None:
        self._address = (host, port)
        self._tls = tls
        self._timeout = timeout
        self._greeting: list[tuple[Any, ...]] = []
        if password:
            self._greeting.append(("AUTH", username, password) if username else ("AUTH", password))
        if database:
            self._greeting.append(("SELECT", database))
        self._socket: socket.socket | None = None
        self._owed = 0
        self._reader = hiredis.Reader()
        self._lock = threading.Lock()

    @classmethod
    def from_url(cls, url: str) -> Self:
        """``redis[s]://[user:password@]host[:port][/database]``"""
        parts = urlsplit(url)
        return cls(
            parts.hostname or "localhost",
            parts.port or 6379,
            username=unquote(parts.username) if parts.username else None,
            password=unquote(parts.password) if parts.password else None,
            database=int(parts.path.strip("/") or 0),
            tls=parts.scheme == "rediss",
        )

    def command(self, *words: str | bytes | int) -> Any:
        """One command, one answer (bytes, int, list or ``None``).

        :raises RedisAway: there is no answer. It may have been carried out all the same.
        """
        with self._lock:
            try:
                if self._socket is not None:
                    try:
                        return self._ask(words)
                    except (OSError, hiredis.ProtocolError):
                        self.close()  # perhaps only an idle connection that the server dropped
                self._connect()
                return self._ask(words)
            except (OSError, ValueError, hiredis.HiredisError) as error:  # ValueError: a host name that is none
                self.close()
                raise RedisAway(f"{type(error).__name__}: {error}") from error
            except BaseException:
                self.close()  # a signal tore the exchange: what comes next on this socket answers something else
                raise

    def send(self, *words: Any) -> None:
        """One command whose answer nobody needs: it is read, and dropped, with that of the next command.

        :raises RedisAway: it could not be sent. That it was sent does not say that it was carried out.
        """
        with self._lock:
            try:
                if self._socket is None:
                    self._connect()
                assert self._socket is not None
                self._owed += 1
                self._socket.sendall(hiredis.pack_command(words))
            except (OSError, ValueError, hiredis.HiredisError) as error:
                self.close()
                raise RedisAway(f"{type(error).__name__}: {error}") from error
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        self._owed = 0
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _connect(self) -> None:
        raw = socket.create_connection(self._address, self._timeout)
        raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls:
            raw = ssl.create_default_context().wrap_socket(raw, server_hostname=self._address[0])
        self._socket, self._reader = raw, hiredis.Reader()
        for words in self._greeting:
            self._ask(words)

    def _ask(self, words: tuple[Any, ...]) -> Any:
        assert self._socket is not None
        self._socket.sendall(hiredis.pack_command(words))
        while self._owed:
            self._answer()
            self._owed -= 1
        answer = self._answer()
        if isinstance(answer, hiredis.ReplyError):
            raise answer
        return answer

    def _answer(self) -> Any:
        assert self._socket is not None
        while (answer := self._reader.gets()) is False:
            data = self._socket.recv(65536)
            if not data:
                raise ConnectionResetError("the server closed the connection")
            self._reader.feed(data)
        return answer
