"""What one call was given: whether a second call of its name, in the same body, is the same piece of work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from airflow_runguard.core.errors import PlanningError
from airflow_runguard.core.keys import type_name
from airflow_runguard.core.payloads import canonical

PLAIN = {str, bytes, int, float, bool, type(None)}


def likeness(function: object, args: Sequence[Any], arguments: Mapping[str, Any]) -> int:
    """The same for equal work, in this process. What has no canonical form (a client, a session) counts by its type; of
    a function, what it carries along counts too (``lambda: charge(invoice)``), but no list or set, which may only
    collect results."""
    return hash(
        (_of_function(function), *map(_of_value, args), *((name, _of_value(arguments[name])) for name in arguments))
    )


def _of_function(function: object) -> Any:
    if isinstance(function, partial):
        return _of_function(function.func), likeness(None, function.args, function.keywords)
    if isinstance(function, MethodType):
        return _of_function(function.__func__), _of_value(function.__self__)
    if not isinstance(function, FunctionType):
        return type_name(function), getattr(function, "__name__", "")
    carried = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    for cell in function.__closure__ or ():
        try:
            carried.append(cell.cell_contents)
        except ValueError:  # not set yet
            carried.append(None)
    return function.__module__, function.__code__, *(_of_value(it) for it in carried if not isinstance(it, list | set))


def _of_value(value: object) -> Any:
    if type(value) in PLAIN:
        return type(value), value
    if isinstance(value, FunctionType):  # which may carry itself along
        return value.__module__, value.__qualname__
    try:
        return canonical(value)
    except PlanningError:
        return type_name(value)
