"""What an item's function gives back, and what its list gives: work that may not have run is no result (P9), and an
item is what its key says (P6)."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import copy
import json
import pickle
import signal
import threading
import types
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, ClassVar

import pytest

from airflow_runguard.core import guard, keys, spool
from airflow_runguard.core.batch import ItemContext
from airflow_runguard.core.leases import Leases
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import State
from tests.core import batches, engine


async def charged() -> str:
    return "paid"


def yields() -> Iterator[str]:
    yield "paid"


class Shy:
    """A response that cannot even be shown."""

    status_code = 500

    def __repr__(self) -> str:
        raise ValueError("no")


UNFINISHED: dict[str, Callable[[], Any]] = {
    "a future": concurrent.futures.Future,
    "futures": lambda: [concurrent.futures.Future()],
    "a generator": yields,
    "a lazy map": lambda: map(str, [1]),
}


def test_p09_work_that_may_not_have_run_is_in_doubt(ledger: Ledger) -> None:
    def bulk(_: ItemContext, items: dict[str, Any]) -> dict[str, Any]:
        return {name: UNFINISHED.get(name, lambda: "paid")() for name in items}

    async def forgotten(*_: Any) -> Any:
        return charged()

    ids = [*UNFINISHED, "paid"]
    batches.run(ledger, batches.invoices(*ids), bulk, bulk=10)
    assert batches.states(ledger) == {**dict.fromkeys(UNFINISHED, "in_doubt"), "paid": "done"}
    other = batches.order("async")
    batches.run(ledger, batches.invoices(1), forgotten, asynchronous=True, what=other)
    assert batches.states(ledger, other) == {"1": "in_doubt"}


LAZY: dict[str, Callable[[list[str]], Any]] = {
    **{name: lambda _, make=make: make() for name, make in UNFINISHED.items()},
    "a generator of what came": lambda rows: (row for row in rows),
    "a coroutine": lambda _: charged(),
    "an async generator": lambda rows: _streamed(rows),
}
"""What a function gives back after it has sent its request."""


async def _streamed(rows: list[str]) -> AsyncIterator[str]:
    for row in rows:
        yield row


def test_p03_what_is_left_of_a_request_that_was_sent_does_not_say_that_it_was_not(ledger: Ledger) -> None:
    """`return (row for row in post(…).json())`: nothing of the generator has run, and all that stands before it."""
    for name, lazy in LAZY.items():
        sent: list[str] = []

        def post(*_: Any, lazy: Callable[[list[str]], Any] = lazy, sent: list[str] = sent) -> Any:
            sent.append("request")
            return lazy(["paid"])

        async def forgot_to_wait(post: Callable[[], Any] = post) -> Any:
            return post()

        async def acall(context: guard.GuardContext, call: Callable[[], Any] = forgot_to_wait) -> Any:
            return await context.acall("charge", call)

        bodies: dict[str, tuple[str, Callable[[guard.GuardContext], Any]]] = {
            "body": ("body", post),
            "call": ("explicit", lambda context, post=post: context.call("charge", post)),  # type: ignore[misc]
            "acall": ("explicit", lambda context, acall=acall: asyncio.run(acall(context))),  # type: ignore[misc]
        }
        for kind, (calls, body) in bodies.items():
            what = engine.order(f"{name}, {kind}", calls=calls)
            for single_request in (True, False):  # the second try is a refusal
                work = engine.work(what, body, single_request=single_request)
                how = guard.run(ledger, Leases(None, ledger.installation), work)
                assert isinstance(how, guard.InDoubt), what.identity
            found = ledger.get(what.identity)
            assert found is not None
            assert (found.state, sent) == (State.IN_DOUBT, ["request"]), what.identity
            assert "may still come" in found.error
            sent.clear()
        what = batches.order(name)
        for _ in range(2):
            batches.run(ledger, batches.invoices(1), post, what=what)
        assert (batches.states(ledger, what), sent) == ({"1": "in_doubt"}, ["request"]), name


@pytest.mark.parametrize(
    "empty", [None, "", "  \n", b"", [], {}, collections.deque(), collections.UserDict()], ids=repr
)
def test_p09_what_is_empty_is_no_result(ledger: Ledger, empty: Any) -> None:
    batches.run(ledger, batches.invoices(1), lambda *_: empty)
    assert batches.states(ledger) == {"1": "in_doubt"}


def test_p09_a_value_that_cannot_be_read_leaves_its_neighbours_theirs(ledger: Ledger) -> None:
    def bulk(_: ItemContext, items: dict[str, Any]) -> dict[str, Any]:
        return {name: Shy() if name == "3" else "paid" for name in items}

    batches.run(ledger, batches.invoices(*range(6)), bulk, bulk=6)
    assert batches.states(ledger) == {name: "in_doubt" if name == "3" else "done" for name in map(str, range(6))}


def test_p06_a_list_that_fills_one_object_anew_is_refused_before_any_call(ledger: Ledger) -> None:
    def rows() -> Iterator[dict[str, Any]]:
        row: dict[str, Any] = {}
        for number in range(5):
            row.update(id=f"inv-{number}", cents=number)
            yield row

    called: list[str] = []
    how = batches.run(ledger, rows, lambda context, _: called.append(context.key))
    assert isinstance(how, guard.Ended)
    assert "dict(row)" in str(how)
    assert called == []
    assert batches.record(ledger).state is State.FAILED


def test_the_vendor_keys_of_a_call_are_like_a_dict_of_them(ledger: Ledger) -> None:
    seen: list[ItemContext] = []
    batches.run(ledger, batches.invoices(1, 2), lambda context, _: seen.append(context) or "paid", bulk=None)
    for context in seen:
        made = context.idempotency_keys
        key = keys.vendor_key(ledger.installation, batches.order().identity, context.key, 1, 1)
        assert made == {context.key: key}
        assert repr(made) == repr({context.key: key})
        assert pickle.loads(pickle.dumps(context)) == copy.deepcopy(context) == context  # for a process pool
        assert json.loads(json.dumps(dict(made))) == made


def test_p05_items_that_wait_in_a_file_are_not_read_where_the_lease_is_renewed(
    ledger: Ledger, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unpickling a chunk may take as long as it likes."""
    monkeypatch.setattr(spool, "IN_MEMORY", 0)
    read_by: set[str] = set()
    monkeypatch.setattr(spool, "pickle", types.SimpleNamespace(**vars(pickle)))
    monkeypatch.setattr(
        spool.pickle, "load", lambda file: read_by.add(threading.current_thread().name) or pickle.load(file)
    )
    batches.run(ledger, batches.invoices(*range(4_100)), lambda *_: "paid", concurrency=4)
    assert set(batches.states(ledger).values()) == {"done"}
    assert read_by
    assert all(name.startswith("runguard-item-") for name in read_by)


class Model:
    """Whose fields are fetched when they are asked for, which may take as long as it likes."""

    read_by: ClassVar[set[str]] = set()

    def __init__(self, number: int) -> None:
        self.id = str(number)

    def model_dump(self) -> dict[str, Any]:
        self.read_by.add(threading.current_thread().name.rstrip("0123456789"))
        return {"id": self.id}


def test_p05_an_items_own_code_does_not_run_where_the_lease_is_renewed(ledger: Ledger) -> None:
    models = [Model(number) for number in range(40)]
    batches.run(ledger, models, lambda *_: "paid", key_of=lambda model: model.id, concurrency=4)
    assert set(batches.states(ledger).values()) == {"done"}
    assert Model.read_by == {"MainThread", "runguard-item-"}
    assert batches.items(ledger)["7"].intent == {"item": {"id": "7"}}


class Stopped(BaseException):
    """What a signal raises."""


def test_p04_a_coroutine_under_way_may_still_say_how_it_ended(ledger: Ledger) -> None:
    """The task is ended while four requests are out: as with threads, their answers are booked."""
    main = threading.main_thread().ident
    out = []

    async def charge(*_: Any) -> str:
        out.append(1)
        if len(out) == 4:
            assert main is not None
            signal.pthread_kill(main, signal.SIGUSR1)
        await asyncio.sleep(0.3)
        return "paid"

    def stop(*_: object) -> None:
        raise Stopped

    before = signal.signal(signal.SIGUSR1, stop)
    try:
        how: Any = batches.run(ledger, batches.invoices(*range(8)), charge, concurrency=4, asynchronous=True)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert isinstance(how.error, Stopped)
    assert sorted(batches.states(ledger).values()) == ["done"] * 4 + ["pending"] * 4
