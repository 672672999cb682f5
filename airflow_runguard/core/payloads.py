"""Orders: the canonical form of a payload, and what people read of it.

Pure like :mod:`~airflow_runguard.core.keys`: equal data gives equal bytes in every process, under any
``PYTHONHASHSEED`` and order of a dict; different data gives different bytes; what can be neither is refused before any
call, with the path of the field.

A change of the canonical form is a new :data:`CANONICAL_VERSION`: a record is compared under the version that it was
booked with, since otherwise a release would refuse the whole past.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
import re
from collections.abc import Iterable, Mapping
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from json.encoder import encode_basestring_ascii as _ascii
from pathlib import PurePath
from typing import Any
from uuid import UUID

from airflow_runguard.core.errors import PlanningError
from airflow_runguard.core.keys import moment_text, number_text, type_name
from airflow_runguard.core.record import Payload

CANONICAL_VERSION = 1
"""The version of :func:`canonical` that new records are booked with."""

MAX_DEPTH = 100
"""Levels of nesting in a payload. A structure that contains itself ends here as well."""

MAX_PAYLOAD = 1_000_000
"""Characters of a payload's canonical form. An order is not a data set: name the fields that identify it."""

MAX_INT_BITS = 4_096
"""Python refuses to print longer integers at a limit that each process may set for itself."""

READABLE_TEXT = 200
"""Characters of one text in the readable rendition; longer ones are cut, with a note."""

READABLE_TOTAL = 8_000
"""Characters of the whole readable rendition as JSON; fields that no longer fit are named, not shown."""

PLAIN_DATA = (
    "Name the fields that are the order with payload=…, or turn this one into plain data first "
    "(str, int, Decimal, datetime, list, dict, dataclass); no call was made."
)


def canonical(value: Any) -> bytes:
    """Equal data gives equal bytes, in every process; different data gives different bytes.

    The form is JSON without white space, with a word before the text of every type that JSON does not have
    (``decimal"9.5"``, ``datetime"2026-10-01T00:00:00Z"``). The rules of version 1:

    - Types differ: ``1``, ``1.0``, ``"1"``, ``True`` and ``Decimal(1)`` are five values; a ``None`` is not a
      missing field.
    - Equal values of one type are equal: ``Decimal("1.0")`` and ``Decimal("1.00")``; ``0.0`` and ``-0.0``; aware
      datetimes of one moment in any zone. A naive datetime equals no aware one.
    - Texts are compared code point by code point; nothing is folded, so ``é`` in two spellings is two texts.
    - A tuple is a list. A set has no order. A mapping has none either; its keys may be any scalar.
    - A name of a class is no part of an order: an enum member is its value, a dataclass or a model (anything with
      ``model_dump``) is the mapping of its fields, so that moving a class between releases changes nothing.

    :raises PlanningError: the value cannot be canonical (NaN, infinity, an object of another type, a lone surrogate, a
        time of day with a zone, two keys that become one), or is too deep or too large; the message names the path.
    """
    text = _flat(value) if type(value) is dict else None
    return (text or _Encoder().encode(value, "payload", 0)).encode("ascii")


def payload(fields: Mapping[str, Any]) -> Payload:
    """The order in canonical form: a digest of the whole, one for each field, and a readable rendition for people.

    The rendition never holds a value whose name looks secret (password, token, card number, …), at any level; it is
    cut at :data:`READABLE_TEXT` and :data:`READABLE_TOTAL` and takes no part in any comparison.

    :param fields: by name; an empty mapping is an order without fields.
    :raises PlanningError: as :func:`canonical`.
    """
    encoder = _Encoder()
    parts: dict[str, str] = {}
    for name, value in fields.items():
        if not isinstance(name, str):
            raise PlanningError(f"The payload has a field named by a {type_name(name)}.", PLAIN_DATA)
        encoder.encode(name, "the name of a payload field", 1)
        parts[name] = encoder.encode(value, name, 1)
    whole = _object((json.dumps(name), text) for name, text in parts.items())
    return Payload(
        version=CANONICAL_VERSION,
        digest=_sha256(whole),
        fields={name: _sha256(text) for name, text in sorted(parts.items())},
        readable=_rendition(fields),
    )


def differing(a: Mapping[str, str], b: Mapping[str, str]) -> tuple[str, ...]:
    """The names of the fields that were added, removed or changed between two payloads' field digests, sorted."""
    return tuple(sorted(name for name in a.keys() | b.keys() if a.get(name) != b.get(name)))


# --- the canonical form -----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class _Tagged:
    """A value of a type that JSON does not have: ``word"text"``; ``shown`` is what people read."""

    word: str
    text: str
    shown: float | str


@dataclasses.dataclass(frozen=True, slots=True)
class _Unordered:
    members: Iterable[Any]


FLAT_FIELDS = 64
"""Fields of a mapping that is taken the short way at most: shapes of so many names are kept."""


def _flat(value: dict[Any, Any]) -> str | None:
    """The canonical form of what most items of a batch are, several times as fast: a mapping of plain names to texts,
    whole numbers and truths. ``None`` = it is more than that (or refused), and takes the long way."""
    names = _shape(tuple(value)) if len(value) <= FLAT_FIELDS and {*map(type, value)} <= {str} else None
    if names is None:
        return None
    parts = []
    for name, quoted in names:
        part = value[name]
        kind = type(part)
        if kind is str:
            parts.append(quoted + _ascii(part))
        elif kind is int and -_SHORT_INT < part < _SHORT_INT:
            parts.append(quoted + int.__repr__(part))
        elif part is None:
            parts.append(quoted + "null")
        elif kind is bool:
            parts.append(quoted + ("true" if part else "false"))
        else:
            return None
    text = "{" + ",".join(parts) + "}"
    return None if len(text) > MAX_PAYLOAD or "\\ud" in text else text  # perhaps a lone surrogate


@functools.lru_cache(256)
def _shape(names: tuple[Any, ...]) -> tuple[tuple[str, str], ...] | None:
    """A mapping's names in canonical order, each also as it is written; ``None`` where one is more than plain."""
    if not all(map(_is_plain, names)):
        return None
    return tuple((name, f'"{name}":') for name in sorted(names))


_SHORT_INT = 10**18


class _Encoder:
    """One walk over one payload; counts what it writes, so that shared parts cannot multiply without bound."""

    def __init__(self) -> None:
        self.left = MAX_PAYLOAD

    def encode(self, value: Any, path: str, depth: int) -> str:
        match _reduce(value, path, depth):
            case None:
                return self._spend("null", path)
            case bool(flag):
                return self._spend("true" if flag else "false", path)
            case int(number):
                return self._spend(int.__repr__(number), path)
            case str(text):
                return self._spend(_quote(text, path, self.left), path)
            case _Tagged(word, text):
                return self._spend(f"{word}{_quote(text, path, self.left)}", path)
            case list(members):
                self._spend("[]", path)
                return f"[{','.join(self.encode(item, f'{path}[{i}]', depth + 1) for i, item in enumerate(members))}]"
            case _Unordered(members):
                self._spend("set[]", path)
                return f"set[{','.join(sorted(self.encode(item, f'{path}{{}}', depth + 1) for item in members))}]"
            case dict(items):
                self._spend("{}", path)
                return self._mapping(items, path, depth)
        raise AssertionError("_reduce returns nothing else")

    def _mapping(self, items: dict[Any, Any], path: str, depth: int) -> str:
        parts: dict[str, str] = {}
        for key, value in items.items():
            if isinstance(_reduce(key, f"a key of {path}", depth), list | dict | _Unordered):
                raise PlanningError(f"The payload's {path} has a key that is a {type_name(key)}.", PLAIN_DATA)
            name = self.encode(key, f"a key of {path}", depth + 1)
            if name in parts:
                raise PlanningError(f"The payload's {path} has two keys that are the same data ({name}).", PLAIN_DATA)
            parts[name] = self.encode(value, f"{path}.{key}", depth + 1)
        return _object(parts.items())

    def _spend(self, text: str, path: str) -> str:
        self.left -= len(text)
        if self.left < 0:
            raise PlanningError(f"The payload has over {MAX_PAYLOAD} characters (reached at {path}).", PLAIN_DATA)
        return text


_AS_THEY_ARE = frozenset({type(None), bool, str, list, dict})


def _reduce(
    value: Any, path: str, depth: int
) -> bool | int | str | _Tagged | _Unordered | list[Any] | dict[Any, Any] | None:
    """One level of a value as one of a few shapes: the only list of the types that a payload may hold."""
    if depth > MAX_DEPTH:
        raise PlanningError(f"The payload is nested over {MAX_DEPTH} levels, or contains itself.", PLAIN_DATA)
    # The true type, never ``__class__``: a lazy proxy claims to be what it has not fetched yet.
    kind = type(value)
    if kind in _AS_THEY_ARE:
        return value  # type: ignore[no-any-return]  # mypy does not narrow by ``kind``
    if issubclass(kind, Enum):
        return _reduce(value.value, path, depth + 1)
    if issubclass(kind, str):
        return str.__str__(value)
    if issubclass(kind, int):
        if value.bit_length() > MAX_INT_BITS:
            raise PlanningError(f"The payload's {path} is an integer of {value.bit_length()} bits.", PLAIN_DATA)
        return int(value)
    if issubclass(kind, float):
        if not math.isfinite(value):
            raise PlanningError(f"The payload's {path} is {value}, which is no amount of anything.", PLAIN_DATA)
        number = float(value) + 0.0  # -0.0 becomes 0.0
        return _Tagged("float", float.__repr__(number), number)
    if issubclass(kind, Decimal):
        if not value.is_finite():
            raise PlanningError(f"The payload's {path} is {value}, which is no amount of anything.", PLAIN_DATA)
        return _Tagged("decimal", number_text(value), str(value))
    if issubclass(kind, date | time | timedelta):
        return _reduce_time(value, path)
    if issubclass(kind, UUID | PurePath):
        word = "uuid" if issubclass(kind, UUID) else "path"
        return _Tagged(word, str(value), str(value))
    if issubclass(kind, bytes | bytearray):
        return _Tagged("bytes", value.hex(), f"{len(value)} bytes, sha256 {hashlib.sha256(value).hexdigest()}")
    if issubclass(kind, list | tuple):
        return list(value)
    if issubclass(kind, set | frozenset):
        return _Unordered(value)
    if issubclass(kind, Mapping) or dataclasses.is_dataclass(kind) or callable(getattr(kind, "model_dump", None)):
        return _reduce(_fields_of(value, path), path, depth + 1)
    raise PlanningError(f"The payload's {path} is a {type_name(value)}, which has no canonical form.", PLAIN_DATA)


def _fields_of(value: Any, path: str) -> Any:
    """What a mapping, dataclass or model holds. Its own code runs here, and may raise what it likes."""
    try:
        if isinstance(value, Mapping):
            return {key: value[key] for key in value}
        if dataclasses.is_dataclass(value):
            return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
        return value.model_dump()
    except Exception as exc:
        what = f"The payload's {path}, a {type_name(value)}, cannot be read: {type(exc).__name__}: {exc}."
        raise PlanningError(what, PLAIN_DATA) from exc


def _reduce_time(value: date | time | timedelta, path: str) -> _Tagged:
    if isinstance(value, datetime):
        try:
            text = moment_text(value)
        except OverflowError as exc:
            raise PlanningError(f"The payload's {path}, {value}, has no moment in UTC.", PLAIN_DATA) from exc
        return _Tagged("datetime", text, text)
    if isinstance(value, date):
        text = date.isoformat(value)
        return _Tagged("date", text, text)
    if isinstance(value, time):
        if value.tzinfo is not None:
            raise PlanningError(f"The payload's {path} is a time of day with a zone, but without a date.", PLAIN_DATA)
        text = time.isoformat(value)
        return _Tagged("time", text, text)
    if getattr(value, "years", 0) or getattr(value, "months", 0):  # pendulum's Duration counts a month as 30 days
        raise PlanningError(f"The payload's {path} is a span of months, which have no fixed length.", PLAIN_DATA)
    text = f"{timedelta.__floordiv__(value, timedelta(microseconds=1))}us"
    return _Tagged("timedelta", text, text)


def _quote(text: str, path: str, limit: int) -> str:
    if len(text) > limit:  # before the copy is made
        raise PlanningError(f"The payload has over {MAX_PAYLOAD} characters (reached at {path}).", PLAIN_DATA)
    try:
        text.encode()
    except UnicodeEncodeError as exc:
        raise PlanningError(
            f"The payload's {path} holds half of a surrogate pair, so it is no text.", PLAIN_DATA
        ) from exc
    return json.dumps(text)


def _object(parts: Iterable[tuple[str, str]]) -> str:
    return f"{{{','.join(f'{name}:{text}' for name, text in sorted(parts))}}}"


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode("ascii")).hexdigest()


# --- what people read -------------------------------------------------------------------------------------------------

_SECRET = re.compile(
    "passw|passphrase|pwd|token|secret|authorization|apikey|privatekey|accesskey|credential|cookie|bearer|cardnumber|"
    "cardno|cvc|cvv|iban|accountnumber|^(auth|pan|pin|ssn)$"
)


@functools.lru_cache(1024)
def _is_secret(name: str) -> bool:
    return bool(_SECRET.search(re.sub(r"[^a-z0-9]", "", name.lower())))


_URL_PASSWORD = re.compile(r"(?<=://)[^/\s@]+(?=@)")


def readable(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A call's arguments as JSON for people and look-ups: secrets masked, cut to size. It refuses nothing: what has no
    canonical form (a client, a session, a whole data set) is shown by its type."""
    if (shown := _flatly(arguments)) is not None:
        return shown
    return _rendition(
        {name: value if _has_form(value) else f"<{type_name(value)}>" for name, value in arguments.items()}
    )


def _flatly(arguments: Mapping[Any, Any]) -> dict[str, Any] | None:
    """What most calls are given, several times as fast: plain names of short ASCII texts, whole numbers and truths.
    ``None`` = it is more than that."""
    if type(arguments) is not dict:
        return None
    shown: dict[str, Any] = {}
    size = 0  # of its JSON at most: a character takes six there, a number or a field's marks less than thirty
    for name, part in arguments.items():
        kind = type(part)
        if not _is_plain(name):
            return None
        if kind is str:
            if len(part) > READABLE_TEXT or not part.isascii():
                return None
            size += 6 * len(part)
            part = _text(part)
        elif part is not None and kind is not bool and not (kind is int and -_SHORT_INT < part < _SHORT_INT):
            return None
        size += len(name) + 30
        if size > READABLE_TOTAL:
            return None
        shown[name] = "***" if _is_secret(name) else part
    return shown


@functools.lru_cache(1024)
def _is_plain(name: Any) -> bool:
    return type(name) is str and len(name) <= READABLE_TEXT and name.isascii() and name.isidentifier()


def _has_form(value: Any) -> bool:
    try:
        _Encoder().encode(value, "", 1)
    except PlanningError:
        return False
    return True


def _rendition(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields, known to be canonical and so of bounded depth and size, as JSON that PostgreSQL takes."""
    shown: dict[str, Any] = {}
    left = READABLE_TOTAL
    for name, value in fields.items():
        entry = _show(value, name)
        size = len(json.dumps({_text(name): entry}))
        if size > left:
            entry = f"… ({size} characters, not shown)"
            size = len(json.dumps({_text(name): entry}))
        if size > left:
            shown["…"] = f"{len(fields) - len(shown)} more fields"
            break
        shown[_text(name)] = entry
        left -= size
    return shown


def _show(value: Any, name: str) -> Any:
    """One value for people; ``name`` is the nearest name above it, which decides whether it is a secret."""
    if _is_secret(name):
        return "***"
    match _reduce(value, name, 0):
        case _Tagged(shown=str(text)) | str(text):
            return _text(text)
        case _Tagged(shown=number):
            return number
        case list(members) | _Unordered(members):
            return [_show(item, name) for item in members]
        case dict(items):
            return {_text(str(_show(key, ""))): _show(item, str(key)) for key, item in items.items()}
        case plain:
            return plain


_NOT_AS_SENT = re.compile(r"\*\*\*|… \(\d+ characters|\\x00|^<[\w.<>]+>$|^\d+ bytes, sha256 ")


def as_sent(value: object) -> bool:
    """Whether a value of a readable rendition is what was sent, or only stands for it: masked (here, by ``mask_fields``
    or by Airflow), cut, described. A true text that looks like one of these counts as not sent, too."""
    return not (isinstance(value, str) and _NOT_AS_SENT.search(value))


def _text(text: str) -> str:
    safe = (_URL_PASSWORD.sub("***", text) if "://" in text else text).replace("\x00", "\\x00")  # jsonb refuses NUL
    return safe if len(safe) <= READABLE_TEXT else f"{safe[:READABLE_TEXT]}… ({len(safe)} characters)"
