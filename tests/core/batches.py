"""What the tests of batches share: a batch run through the engine, and its items as the ledger has them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

from airflow_runguard.core import guard
from airflow_runguard.core.batch import Batch, ItemContext
from airflow_runguard.core.conduct import conduct
from airflow_runguard.core.items import Items
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Call, Order, Record
from tests.core import engine
from tests.core.accidents import redis_of


def invoices(*ids: Any) -> list[dict[str, Any]]:
    return [{"id": str(number), "cents": 500} for number in ids]


class Counting:
    """An item's function that counts its calls; what it does beyond that is told by item key."""

    def __init__(self, **does: Any) -> None:
        self.calls: list[str] = []
        self.keys: dict[str, str] = {}
        self._does = does
        self._lock = threading.Lock()

    def __call__(self, context: ItemContext, item: dict[str, Any]) -> Any:
        with self._lock:
            self.calls.append(item["id"])
            self.keys[item["id"]] = context.idempotency_key
        does = self._does.get(item["id"], f"paid {item['id']}")
        if callable(does):
            return does()
        if isinstance(does, BaseException):
            raise does
        return does


def order(key: str = "invoices", **rules: Any) -> Order:
    return engine.order(key, payload={}, calls="batch", **rules)


def run(
    ledger: Ledger,
    items: Iterable[Any] | Callable[[], Iterable[Any]],
    call: Any,
    *,
    what: Order | None = None,
    work: dict[str, Any] | None = None,
    redis_url: str | None = None,
    **rules: Any,
) -> guard.How:
    batch = Batch(
        items=items if callable(items) else lambda: items,
        key_of=rules.pop("key_of", lambda item: item["id"]),
        call=call,
        **rules,
    )
    what = what or order()
    todo = engine.work(what, lambda context: conduct(batch, context), **(work or {}))
    with redis_of(redis_url) as client:
        return guard.run(ledger, guard.ready(ledger, client), todo)


def record(ledger: Ledger, what: Order | None = None) -> Record:
    found = ledger.get((what or order()).identity)
    assert found is not None
    assert found.broken == ""
    return found


def items(ledger: Ledger, what: Order | None = None) -> dict[str, Call]:
    line = record(ledger, what)
    return {call.name: call for call in Items(ledger).page(line.id, line.generation, limit=100_000)}


def states(ledger: Ledger, what: Order | None = None) -> dict[str, str]:
    return {name: str(call.state) for name, call in items(ledger, what).items()}
