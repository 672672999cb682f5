"""Safe reads of objects that may do anything when they are looked at; no exception leaves this room.

Only ``Exception`` is caught: a kill or a task's timeout that strikes in here belongs to the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any


def read(thing: object, *path: str) -> Any:
    """``thing.a.b.c``, or ``None`` wherever that does not work."""
    try:
        for name in path:
            if thing is None:
                return None
            thing = getattr(thing, name, None)
    except Exception:
        return None
    return thing


def gather(thing: object, wanted: frozenset[str]) -> dict[str, Any]:
    """Those of the wanted attributes that the thing has, by its class or by itself, and that can be read.

    Most of a hundred names are on no error; asking for each would be most of the work.
    """
    cls: Any = type(thing)
    listed = _by_class(cls, wanted)
    try:
        own = wanted.intersection(vars(thing))
    except Exception:  # it has no names of its own, or does not tell them
        own = frozenset()
    listed = listed.union(own)
    found = {}
    for name in listed:
        try:
            value = getattr(thing, name)
        except Exception:  # noqa: S112 - what cannot be read is not there
            continue
        if value is not None:
            found[name] = value
    return found


@lru_cache(maxsize=4_096)
def _by_class(cls: Any, wanted: frozenset[str]) -> frozenset[str]:
    """The wanted names that the class has; all of them where it makes names up."""
    known = {name for base in cls.__mro__[:-1] for name in vars(base) if isinstance(name, str)}
    return wanted if "__getattr__" in known else wanted & known


def item(mapping: object, key: str) -> Any:
    if mapping is None:
        return None
    if type(mapping) is dict:
        return mapping.get(key)
    try:
        return mapping[key]  # type: ignore[index]
    except Exception:
        return None


def text(thing: object) -> str:
    try:
        return str.__str__(str(thing))
    except Exception:
        return ""


def names(listed: str) -> frozenset[str]:
    """The words of a list in a source file."""
    return frozenset(listed.split())


# Reading class names is most of the work, and the same few classes come again and again.
@lru_cache(maxsize=4_096)
def type_keys(cls: Any) -> frozenset[str]:
    """The class and its bases as the rules name them."""
    return frozenset(map(type_key, cls.__mro__))


def type_key(cls: type) -> str:
    """The class as the rules name it: ``<top package>.<class name>``."""
    module, name = read(cls, "__module__"), read(cls, "__name__")
    if not isinstance(module, str) or not isinstance(name, str):
        return "unreadable.type"
    return f"{module.partition('.')[0]}.{name}"


def response_status(response: object) -> int | None:
    for name in ("status_code", "status"):
        number = http_status(read(response, name))
        if number is not None:
            return number
    return None


def is_mapping(thing: object) -> bool:
    cls: Any = type(thing)
    return cls is dict or _is_mapping_class(cls)


@lru_cache(maxsize=4_096)
def _is_mapping_class(cls: Any) -> bool:
    """Asked of the class and remembered: Python asks the abstract class anew for every object."""
    return issubclass(cls, Mapping)


_SEQUENCES = (list, tuple)


def errors(values: object) -> list[BaseException]:
    listed = sequence(values)
    return [value for value in listed if isinstance(value, BaseException)] if listed else []


def sequence(value: object) -> Iterable[Any]:
    """A list or tuple, and nothing that computes, streams or never ends."""
    return value if isinstance(value, _SEQUENCES) else ()


# Tuples where it is asked often: ``int | str`` is put together anew each time.
_NUMBERS = (int, str)


def integer(value: object) -> int | None:
    if isinstance(value, bool) or not isinstance(value, _NUMBERS):
        return None
    try:
        return int(value)
    except Exception:
        return None


def http_status(value: object) -> int | None:
    number = value if type(value) is int else integer(value) if isinstance(value, int) else None
    return number if number is not None and 100 <= number <= 599 else None
