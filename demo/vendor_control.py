"""How tests and the demo talk to the fake vendor from outside: script it, wait for it, count what it did.

Typed, standard library only, and blind to proxies. What is said here goes over HTTP, so the vendor may run in another
process. The words are those of :mod:`demo.vendor_book`.
"""

from __future__ import annotations

import json
import urllib.parse
import urllib.request
from dataclasses import asdict
from typing import Any

from demo.vendor_book import Behaviour, Effect, Request

_open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open


class VendorControl:
    """The vendor at ``url``.

    :param timeout: seconds that a wait may take at most, unless it says otherwise.
    """

    def __init__(self, url: str, timeout: float = 20.0) -> None:
        self.url, self.timeout = url, timeout

    def script(self, then: str = "ok", **details: Any) -> None:
        """Append a behaviour for the next request or ``times`` requests: :class:`~demo.vendor_book.Behaviour`."""
        self._post("/_control", {"script": [asdict(Behaviour(then, **details))]})

    def honour_keys(self, honour: bool) -> None:
        """Whether the same idempotency key charges once only (as from the start) or each time."""
        self._post("/_control", {"honour_keys": honour})

    def release(self, gate: str) -> None:
        """Open a gate; it stays open, so it does not matter who comes first."""
        self._post("/_control", {"release": gate})

    def wait(
        self,
        customer: str | None = None,
        *,
        arrived: int = 0,
        charged: int = 0,
        answered: int = 0,
        timeout: float | None = None,
    ) -> None:
        """Return when so many requests of ``customer`` (``batch/*``: of all of them) arrived, charged, were answered.

        :raises TimeoutError: it did not come to that; names the numbers.
        """
        timeout = timeout or self.timeout
        query: dict[str, Any] = {"arrived": arrived, "charged": charged, "answered": answered, "timeout": timeout}
        if customer is not None:
            query["customer"] = customer
        counts = self._get("/_wait?" + urllib.parse.urlencode(query), timeout + 5)
        if not counts.pop("met"):
            raise TimeoutError(f"Waited {timeout:g} s for {customer or 'anybody'}: wanted {query}, have {counts}.")

    def effects(self, customer: str | None = None) -> list[Effect]:
        """Charges that happened, oldest first."""
        return [Effect(**item) for item in self._report(customer)["effects"]]

    def requests(self, customer: str | None = None) -> list[Request]:
        """Charge requests that arrived, in the order of arrival."""
        return [Request(**item) for item in self._report(customer)["requests"]]

    def charges(self, customer: str | None = None) -> int:
        """How often money moved."""
        return len(self.effects(customer))

    def find(self, *, customer: str | None = None, key: str | None = None) -> list[dict[str, Any]]:
        """The vendor's own look-up, as a reconciler uses it."""
        query = {name: value for name, value in (("customer", customer), ("idempotency_key", key)) if value is not None}
        found: list[dict[str, Any]] = self._get("/charges?" + urllib.parse.urlencode(query))["data"]
        return found

    def reset(self) -> None:
        """Everything forgotten: effects, requests, script, gates, keys. Held requests are dropped."""
        self._post("/reset", {})

    def _report(self, customer: str | None) -> dict[str, Any]:
        query = {} if customer is None else {"customer": customer}
        return self._get("/_report?" + urllib.parse.urlencode(query))

    def _get(self, path: str, timeout: float = 10.0) -> dict[str, Any]:
        with _open(self.url + path, timeout=timeout) as response:
            answer: dict[str, Any] = json.load(response)
            return answer

    def _post(self, path: str, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"}, method="POST")
        _open(request, timeout=10).close()
