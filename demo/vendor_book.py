"""What the fake vendor knows and how it behaves; no HTTP in here.

The rule of this room: an *effect* is counted at the moment of charging, under one lock, whatever becomes of the
answer; what the caller got to hear is counted apart, as *request*.

Idempotency keys, as Stripe has them, if ``honour_keys``: the same key gets the first charge again, or the saved
decline; with other parameters 400; while the first request has not charged yet 409. A scripted behaviour goes first.
"""

from __future__ import annotations

import math
import threading
import time
from dataclasses import asdict, dataclass, field, replace
from typing import Any

LONGEST_WAIT = 180.0  # seconds after which a closed gate opens by itself: a forgotten one must not hang a test for ever


@dataclass(frozen=True)
class Effect:
    """One charge that happened."""

    id: str
    customer: str
    amount: int | None
    currency: str | None
    key: str | None
    at: float


@dataclass
class Request:
    """One charge request that arrived. ``status``: None while it is open, 0 if the connection was dropped."""

    order: int
    method: str
    path: str
    customer: str
    key: str | None
    headers: dict[str, str]
    status: int | None = None


@dataclass(frozen=True)
class Behaviour:
    """What happens to ``times`` requests of ``customer`` (None: of anybody; ``batch/*``: of all whose name begins so).

    ``then``: ``ok`` · ``slow`` (wait ``seconds``, then charge) · ``stall`` (charge, then wait ``seconds``) · ``status``
    (answer ``status``, ``headers``, ``body``; having ``charged`` or not) · ``drop`` (charge, then close the connection
    without an answer) · ``drop_before`` (close it without charging) · ``wall`` (for ``seconds`` from the first
    request on, answer each with 429 and how long is left; then as if it had never been there; one wall for all of
    ``batch/*``). ``gate_before`` names a gate that holds the request before it charges, ``gate`` one that holds the
    answer; ``{"release": name}`` opens them. ``saved``: whether a ``status`` answer is kept under the idempotency key;
    default: 402 is.
    """

    then: str = "ok"
    customer: str | None = None
    times: int = 1
    seconds: float = 0.0
    status: int = 500
    charged: bool = False
    saved: bool | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: Any = None
    gate: str | None = None
    gate_before: str | None = None

    def __post_init__(self) -> None:
        if self.then not in ("ok", "slow", "stall", "status", "drop", "drop_before", "wall"):
            raise ValueError(f"unknown behaviour {self.then!r}")

    @property
    def charges(self) -> bool:
        return self.charged if self.then == "status" else self.then not in ("drop_before", "wall")

    @property
    def is_saved(self) -> bool:
        return self.then == "status" and (self.status == 402 if self.saved is None else self.saved)


@dataclass(frozen=True)
class Answer:
    """``status`` 0 means: close the connection without an answer."""

    status: int
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class _UnderKey:
    """What the vendor remembers under one idempotency key."""

    parameters: Any
    answer: Answer | None = None  # None while the first request has not charged yet


def meets(wanted: str | None, customer: str) -> bool:
    """Whether a customer is meant by a name, by ``batch/*`` (all whose name begins so) or by None (anybody)."""
    if wanted is not None and wanted.endswith("*"):
        return customer.startswith(wanted[:-1])
    return wanted in (None, customer)


class _Dropped(Exception):
    """The request was held when the vendor was reset or closed."""


class Book:
    """The vendor's memory: effects, requests, script and gates under one lock."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._closed = False
        self._epoch = 0
        self._clear()

    def _clear(self) -> None:
        self._effects: list[Effect] = []
        self._requests: list[Request] = []
        self._script: list[Behaviour] = []
        self._open_gates: set[str] = set()
        self._walls: dict[str, float] = {}
        self._keys: dict[str, _UnderKey] = {}
        self._honour_keys = True
        self._epoch += 1

    def reset(self) -> None:
        """As new. Requests that are still held are dropped and do not charge any more."""
        with self._changed:
            self._clear()
            self._changed.notify_all()

    def close(self) -> None:
        """Drop every request that is held, and hold none from now on."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def control(self, order: dict[str, Any]) -> None:
        """Any of ``honour_keys``, ``script`` (a list of behaviours, appended) and ``release`` (a gate's name)."""
        behaviours = [Behaviour(**item) for item in order.get("script", ())]
        with self._changed:
            self._honour_keys = bool(order.get("honour_keys", self._honour_keys))
            self._script += [behaviour for behaviour in behaviours for _ in range(behaviour.times)]
            if "release" in order:
                self._open_gates.add(order["release"])
            self._changed.notify_all()

    def handle(self, path: str, headers: dict[str, str], body: Any) -> tuple[Request, Answer]:
        """Take one charge request through to its answer. Blocks as long as the behaviour says."""
        fields = body if isinstance(body, dict) else {}
        customer = str(fields.get("customer", "")) if path == "/charges" else path
        key = headers.get("idempotency-key")
        with self._changed:
            request = Request(len(self._requests) + 1, "POST", path, customer, key, headers)
            self._requests.append(request)
            self._changed.notify_all()
            under_key, first = None, False
            if key is not None and self._honour_keys:
                first = key not in self._keys
                under_key = self._keys.setdefault(key, _UnderKey(parameters=[path, body]))
                if under_key.parameters != [path, body]:
                    return request, refusal(400, "idempotency_error", "This key was used with other parameters.")
                if not first and under_key.answer is None and self._next(customer, take=False) is None:
                    return request, refusal(409, "idempotency_key_in_use", "The first request is under way.")
            behaviour = self._next(customer, take=True) or Behaviour()
            try:
                return request, self._act(behaviour, request, fields, under_key)
            except _Dropped:
                return request, Answer(0)
            finally:
                if key is not None and under_key is not None and first and under_key.answer is None:
                    self._keys.pop(key, None)  # nothing came of it: the key is free again

    def _act(self, behaviour: Behaviour, request: Request, fields: Any, under_key: _UnderKey | None) -> Answer:
        self._hold(behaviour.gate_before, behaviour.seconds if behaviour.then == "slow" else 0.0)
        answer = Answer(behaviour.status, behaviour.body, behaviour.headers)
        if behaviour.charges:
            if under_key is not None and under_key.answer is not None:
                happened = under_key.answer
            else:
                happened = self._charge(request, fields)
                if under_key is not None:
                    under_key.answer = happened
            if behaviour.then != "status":
                answer = happened if behaviour.body is None else Answer(200, behaviour.body, behaviour.headers)
        if behaviour.is_saved and under_key is not None:
            under_key.answer = answer
        self._hold(behaviour.gate, behaviour.seconds if behaviour.then == "stall" else 0.0)
        if behaviour.then == "wall":
            return refusal(429, "rate_limited", "Too many requests.", behaviour.headers)
        return Answer(0) if behaviour.then in ("drop", "drop_before") else answer

    def _charge(self, request: Request, fields: Any) -> Answer:
        effect = Effect(
            id=f"ch_{len(self._effects) + 1}",
            customer=request.customer,
            amount=fields.get("amount"),
            currency=fields.get("currency"),
            key=request.key,
            at=time.time(),
        )
        self._effects.append(effect)
        self._changed.notify_all()
        return Answer(200, {"object": "charge", **asdict(effect)})

    def _next(self, customer: str, *, take: bool) -> Behaviour | None:
        for position, behaviour in enumerate(self._script):
            if meets(behaviour.customer, customer):
                if behaviour.then == "wall":
                    ends = self._walls.setdefault(behaviour.customer or customer, time.time() + behaviour.seconds)
                    left = ends - time.time()
                    if left > 0:
                        return replace(behaviour, status=429, headers={"Retry-After": str(math.ceil(left))})
                    self._script.pop(position)
                    return self._next(customer, take=take)
                return self._script.pop(position) if take else behaviour
        return None

    def _hold(self, gate: str | None, seconds: float) -> None:
        """Wait, with the lock set free, for ``seconds`` and until the gate is open.

        :raises _Dropped: the vendor was reset or closed meanwhile.
        """
        epoch = self._epoch

        def dropped() -> bool:
            return self._closed or self._epoch != epoch

        if seconds:
            self._changed.wait_for(dropped, seconds)
        if gate is not None:
            self._changed.wait_for(lambda: dropped() or gate in self._open_gates, LONGEST_WAIT)
        if dropped():
            raise _Dropped

    def answered(self, request: Request, status: int) -> None:
        with self._changed:
            request.status = status
            self._changed.notify_all()

    def effects(self) -> list[Effect]:
        with self._changed:
            return list(self._effects)

    def wait(self, customer: str | None, arrived: int, charged: int, answered: int, timeout: float) -> dict[str, Any]:
        """Block until so many requests arrived, charged and were answered; the numbers, and whether it came to that."""

        def counts() -> tuple[int, int, int]:
            requests = [request for request in self._requests if meets(customer, request.customer)]
            effects = [effect for effect in self._effects if meets(customer, effect.customer)]
            return len(requests), len(effects), sum(request.status is not None for request in requests)

        def reached() -> bool:
            return all(have >= want for have, want in zip(counts(), (arrived, charged, answered), strict=True))

        with self._changed:
            met = self._changed.wait_for(lambda: self._closed or reached(), timeout) and reached()
            return {"met": met, **dict(zip(("arrived", "charged", "answered"), counts(), strict=True))}

    def report(self, customer: str | None = None) -> dict[str, Any]:
        with self._changed:
            told = {"effects": self._effects, "requests": self._requests}
            return {name: [asdict(x) for x in seen if meets(customer, x.customer)] for name, seen in told.items()}


def refusal(status: int, code: str, message: str, headers: dict[str, str] | None = None) -> Answer:
    return Answer(status, {"error": {"type": code, "code": code, "message": message}}, headers or {})
