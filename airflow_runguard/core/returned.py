"""What a function gave back, where that is no result: an error, work that never began, work that may still come."""

from __future__ import annotations

import inspect
from collections.abc import AsyncGenerator, Awaitable, Generator

from airflow_runguard.core.errors import NotApplied, PlanningError

ASYNC_CALL = "For an async function use `await guard.acall(…)`."
WAIT_FOR_IT = "Wait for it inside the function that guard.call is given, so that its outcome can be booked."


def never_ran(value: object) -> bool:
    """Whether a returned value is a body that Python has not begun: a coroutine or a generator. It never will be."""
    if inspect.iscoroutine(value) or inspect.isgenerator(value):
        value.close()
        return True
    return inspect.isasyncgen(value)


LAZY = (Generator, AsyncGenerator, map, filter, zip)


def may_come(value: object) -> bool:
    """Whether it stands for work that may still come: a future of whatever library, or anything else to be awaited."""
    return isinstance(value, Awaitable) or hasattr(value, "add_done_callback")


def unfinished(value: object) -> bool:
    """Whether work may hide in what a body, or an item of a batch, gave back: it may still come, or runs when somebody
    iterates, also the first of a list.

    More than :func:`accept` refuses: such a value is only stored, so nobody would iterate. With what `guard.call` gives
    back the function goes on, and clients hand out lazy pages of a request that was made.
    """
    if isinstance(value, list | tuple):
        return any(map(unfinished, value[:1]))
    return isinstance(value, LAZY) or may_come(value)


def accept(what: str, value: object) -> None:
    """:raises NotApplied: nothing of it ran. :raises PlanningError: its work may still come.
    :raises BaseException: it is an error that was given back.
    """
    if isinstance(value, BaseException):
        raise value
    if never_ran(value):
        raise NotApplied(f"What {what} was given is async or yields: nothing ran.", ASYNC_CALL)
    if may_come(value):
        raise PlanningError(f"{what} got a {type(value).__name__}, whose work may still come.", WAIT_FOR_IT)


def chain(error: BaseException) -> list[BaseException]:
    """The error and those that it stems from."""
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in links:
        links.append(link)
        link = link.__cause__ or link.__context__
    return links
