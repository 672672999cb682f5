"""What an operator deferred to, kept so that it can be started anew where its trigger came back with the quota.

Airflow itself starts a trigger anew whenever a triggerer dies, so none may have an effect of its own.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from importlib import import_module
from typing import Any

from airflow.sdk.exceptions import AirflowException, TaskDeferred

from airflow_runguard import codec
from airflow_runguard.core.returned import chain
from airflow_runguard.masking import Hide

log = logging.getLogger("airflow_runguard")

NOTE = "_guard_trigger"
"""The argument with which :func:`noted` comes back to the operator; :func:`taken` takes it out again."""


def noted(deferral: TaskDeferred, hide: Hide) -> None:
    """Have the trigger come back to its operator as a note. Airflow keeps such arguments readable, and a trigger's own
    encrypted: so one that has anything to hide is not noted, and neither is one that no text can hold.
    """
    try:
        classpath, arguments = deferral.trigger.serialize()
        timeout = deferral.timeout
        seconds = timeout.total_seconds() if isinstance(timeout, timedelta) else timeout
        text = codec.dump([classpath, arguments, seconds]).decode()
        plain = json.loads(text)
        if hide(plain) == plain:
            deferral.kwargs = {**(deferral.kwargs or {}), NOTE: text}
    except Exception as error:
        log.info("The trigger cannot be started anew by the guard: %s", error)


def taken(arguments: dict[str, Any] | None) -> tuple[dict[str, Any] | None, str]:
    """The arguments without the note, and the note ('' = there is none)."""
    left = dict(arguments or {})
    note = left.pop(NOTE, "")
    return (left if note else arguments), note


def anew(note: str, method: str, arguments: dict[str, Any] | None) -> TaskDeferred:
    """The same deferral once more.

    :param arguments: with which the operator came back from it, its event among them.
    """
    classpath, parameters, seconds = codec.load(note.encode())
    module, _, name = classpath.rpartition(".")
    trigger = getattr(import_module(module), name)(**parameters)
    given = {name: value for name, value in (arguments or {}).items() if name != "event"}
    timeout = None if seconds is None else timedelta(seconds=seconds)
    return TaskDeferred(trigger=trigger, method_name=method, kwargs=given, timeout=timeout)


def tells(event: Any, error: BaseException, is_quota: Callable[[Exception], object]) -> bool:
    """Whether ``error`` was made of what an event says, and that by itself is the quota."""
    said = " ".join(str(link) for link in chain(error))
    texts = [text for text in _texts(event) if text and (text in said or repr(text)[1:-1] in said)]
    return any(is_quota(AirflowException(text)) for text in texts)


def _texts(value: Any) -> Iterator[str]:
    """Every text in an event, and every part of it that has more than one as the text that Python makes of it."""
    if isinstance(value, str):
        yield value
        return
    if isinstance(value, Mapping):
        for item in value.values():
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)
    yield str(value)
