"""What a function gave back, where that is no result: an error, work that never began, work that may still come."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Generator
from functools import partial
from types import FunctionType, MethodType

from airflow_runguard.core.errors import NotApplied, PlanningError

ASYNC_CALL = "For an async function use `await guard.acall(…)`."
WAIT_FOR_IT = "Wait for it inside the function that guard.call is given, so that its outcome can be booked."


def runs_nothing(function: object) -> bool:
    """Whether Python begins nothing of a function that is called, but only makes a coroutine or a generator of it. Of
    what another function gave back that is no proof: it may have sent a request before."""
    while isinstance(function, partial | MethodType):
        function = function.func if isinstance(function, partial) else function.__func__
    lazy = inspect.CO_COROUTINE | inspect.CO_GENERATOR | inspect.CO_ASYNC_GENERATOR
    return isinstance(function, FunctionType) and bool(function.__code__.co_flags & lazy)


def called(what: str, function: object) -> None:
    """What a call was given can be called.

    :raises TypeError: it cannot. Mostly it is what the request came back with, sent before the guard knew of it: so
        this is doubt, and no reason to send it again.
    """
    if not callable(function):
        raise TypeError(
            f"{what} was given a {type(function).__name__} and not a function. If that is what a request came back "
            f"with, it was sent outside the guard. Hand over the function and its arguments: {what[:-1]}, send, order)."
        )


def closed(value: object) -> bool:
    """Whether a value is a coroutine or a generator. It will never run (any further)."""
    if inspect.iscoroutine(value) or inspect.isgenerator(value):
        value.close()
        return True
    return inspect.isasyncgen(value)


LAZY = (Awaitable, Generator, AsyncGenerator, map, filter, zip)


def unfinished(value: object) -> bool:
    """Whether work may hide in a value that did not run, or that may still come: a future, a coroutine, what yields, or
    a list of such."""
    if isinstance(value, list | tuple):
        return any(map(unfinished, value[:1]))
    return isinstance(value, LAZY) or hasattr(value, "add_done_callback")


def accept(what: str, function: object, value: object) -> None:
    """What a call gave back is a result.

    :param function: what was called. :param value: what it gave back.
    :raises NotApplied: nothing of it ran. :raises PlanningError: its work may still come.
    :raises BaseException: it is an error that was given back.
    """
    if isinstance(value, BaseException):
        raise value
    if closed(value) and runs_nothing(function):
        raise NotApplied(f"What {what} was given is async or yields: nothing ran.", ASYNC_CALL)
    if unfinished(value):
        raise PlanningError(f"{what} got a {type(value).__name__}, whose work may still come.", WAIT_FOR_IT)


def chain(error: BaseException) -> list[BaseException]:
    """The error and those that it stems from."""
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in links:
        links.append(link)
        link = link.__cause__ or link.__context__
    return links
