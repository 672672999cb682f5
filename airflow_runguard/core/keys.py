"""Names and orders: the identity of a piece of work, the canonical form of its payload, and the vendor key.

Everything here is pure: no I/O, no clock, no ``hash()``, no locale. Equal data gives equal bytes in every process,
under any ``PYTHONHASHSEED`` and order of a dict; different data gives different bytes; what can be neither is refused
before any call, with the path of the field. Rendering a key's template belongs to the doors (``rendering.py``).

A change of the canonical form is a new :data:`CANONICAL_VERSION`: a record is compared under the version that it was
booked with, since otherwise a release would refuse the whole past.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
import hmac
import json
import math
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from json.encoder import encode_basestring_ascii as _ascii
from pathlib import PurePath
from typing import Any, cast
from uuid import UUID

from airflow_runguard.core.errors import PlanningError
from airflow_runguard.core.record import MAX_KEY_LENGTH, Call, Event, Identity, Payload

CANONICAL_VERSION = 1
"""The version of :func:`canonical` that new records are booked with."""

MAX_IDENTITY_BYTES = 2_500
"""UTF-8 bytes of deployment, namespace and key together: PostgreSQL indexes no row over 2,704 bytes."""

MAX_DEPTH = 100
"""Levels of nesting in a payload. A structure that contains itself ends here as well."""

MAX_PAYLOAD = 1_000_000
"""Characters of a payload's canonical form. An order is not a data set: name the fields that identify it."""

MAX_INT_BITS = 4_096
"""Python refuses to print longer integers at a limit that each process may set for itself."""

MAX_PLAIN_EXPONENT = 30
"""Decimals beyond it are written with an E, since ``Decimal("1E1000000")`` is a short text for a long one."""

READABLE_TEXT = 200
"""Characters of one text in the readable rendition; longer ones are cut, with a note."""

READABLE_TOTAL = 8_000
"""Characters of the whole readable rendition as JSON; fields that no longer fit are named, not shown."""

PLAIN_DATA = (
    "Name the fields that are the order with payload=…, or turn this one into plain data first "
    "(str, int, Decimal, datetime, list, dict, dataclass); no call was made."
)


def identity(deployment: str, namespace: str, key: str) -> Identity:
    """The full name of a piece of work, which is safe to store, index, print and compare byte by byte.

    Nothing is stripped, folded or cut: two keys that differ stay two, and one that cannot be kept is refused.

    :raises PlanningError: a part is empty, too long, has white space at an end, or control characters in it.
    """
    parts = {"deployment": deployment, "namespace": namespace, "key": key}
    for name, text in parts.items():
        if fault := _fault(text):
            shown = repr(text) if len(repr(text)) <= 80 else f"{repr(text)[:80]}…"
            raise PlanningError(f"The {name} {shown} {fault}, so it cannot name a piece of work; no call was made.")
    size = sum(len(text.encode()) for text in parts.values())
    if size > MAX_IDENTITY_BYTES:
        raise PlanningError(
            f"Deployment, namespace and key take {size} bytes together; the ledger keeps {MAX_IDENTITY_BYTES}.",
            "Shorten the key, for example by its hash; no call was made.",
        )
    return Identity(deployment, namespace, key)


def item_name(key: Any) -> str:
    """The name of an item of a batch by its key: a text, or a whole number as text.

    :raises PlanningError: it names nothing (``None``, empty), is no such value, or cannot be kept.
    """
    name = str(key) if type(key) is int else key
    fault = _fault(name) or ("is the name of a body" if name == "body" else "")
    if fault:
        raise PlanningError(f"The item key {key!r:.80} {fault}, so it names no item; no call was made.")
    return cast(str, name)


def gate_name(text: str) -> str:
    """The name of a vendor's allowance.

    :raises PlanningError: as for a key.
    """
    if fault := _fault(text):
        raise PlanningError(f"The gate's name {text!r:.80} {fault}, so it cannot name an allowance; no call was made.")
    return text


def _fault(text: object) -> str:
    """Why a part of an identity is refused ('' = it is fine)."""
    if not isinstance(text, str):
        return f"is a {_type_name(text)} and not a text"
    if text.isascii() and text.isprintable() and 0 < len(text) <= MAX_KEY_LENGTH and text[0] != " " != text[-1]:
        return ""
    if not text.strip():
        return "is empty"
    if len(text) > MAX_KEY_LENGTH:
        return f"has {len(text)} characters; {MAX_KEY_LENGTH} are allowed, and it is never cut"
    if text != text.strip():
        return "has white space at its start or end"
    # Cc: control characters and NUL. Cs: lone surrogates. Zl, Zp: line breaks. PostgreSQL or a log would garble them.
    bad = next((char for char in text if unicodedata.category(char) in {"Cc", "Cs", "Zl", "Zp"}), None)
    return "" if bad is None else f"contains the character U+{ord(bad):04X}"


def default_scope(
    partition_date: datetime | None, partition_key: str | None, logical_date: datetime | None
) -> str | None:
    """What a run is about, the same for its schedule, backfill, clear and manual repetition.

    Run id, run type, try number, map index and conf have no part in it: they differ between two runs of the same work.

    :returns: ``pd:…``, else ``pk:…``, else ``ld:…`` (dates in UTC); ``None`` where the run has none of the three, and
        only an explicit key can name its work.
    :raises PlanningError: a date has no time zone.
    """
    if partition_date is not None:
        return f"pd:{_aware('partition date', partition_date)}"
    if partition_key:
        return f"pk:{partition_key}"
    if logical_date is not None:
        return f"ld:{_aware('logical date', logical_date)}"
    return None


def _aware(name: str, moment: datetime) -> str:
    if moment.utcoffset() is None:
        raise PlanningError(f"The {name} {moment} has no time zone, so it names no moment; no call was made.")
    return moment_text(moment)


def moment_text(moment: datetime) -> str:
    """One text for one moment: aware ones in UTC (``2026-10-01T00:00:00Z``), naive ones as they stand, without the Z.

    :raises OverflowError: the moment leaves the calendar when it is turned into UTC.
    """
    # The methods of the base class, since pendulum and others override them.
    if moment.utcoffset() is None:
        return datetime.isoformat(moment.replace(tzinfo=None))
    return datetime.isoformat(datetime.astimezone(moment, UTC)).removesuffix("+00:00") + "Z"


def number_text(number: Decimal) -> str:
    """One text for one value: ``1``, ``1.0`` and ``1.00`` are equal; independent of the thread's decimal context."""
    sign, digits, exponent = number.as_tuple()
    assert isinstance(exponent, int), "finite"  # the callers refuse NaN and infinity
    written = "".join(map(str, digits)).lstrip("0")
    significant = written.rstrip("0")
    if not significant:
        return "0"
    exponent += len(written) - len(significant)
    if -MAX_PLAIN_EXPONENT <= exponent <= MAX_PLAIN_EXPONENT:
        return f"{Decimal((sign, tuple(map(int, significant)), exponent)):f}"
    return f"{'-' if sign else ''}{significant}E{exponent}"


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
            raise PlanningError(f"The payload has a field named by a {_type_name(name)}.", PLAIN_DATA)
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


def vendor_key(installation: bytes | str, identity: Identity, call: str, generation: int, attempt: int) -> str:
    """The idempotency key for the vendor: the same for every repetition of one attempt, another for anything else.

    Two installations, deployments (production and ``dag.test()``), namespaces, calls, generations or attempts never
    share one, so that nobody is handed another's charge as its own. 44 characters of ``A-Z a-z 0-9 _ -`` (the
    strictest vendor known takes 45), with 240 bits of the HMAC.

    :param installation: the ledger's installation id, made once by ``db upgrade``.
    :param attempt: rises only after a proven final refusal, never after anything unknown.
    """
    secret = installation.encode() if isinstance(installation, str) else installation
    if not secret:
        raise PlanningError("The ledger has no installation id, so vendor keys would not be its own.")
    keyed = _keyed(secret, identity).copy()
    keyed.update(_apart(call, str(generation), str(attempt)))
    return f"rg1-{base64.urlsafe_b64encode(keyed.digest()[:30]).decode()}"


def _apart(*parts: str) -> bytes:
    """Each part after its length: ("ab", "c") and ("a", "bc") must not meet."""
    return b"".join([len(part).to_bytes(4, "big") + part for part in map(str.encode, parts)])


@functools.lru_cache(8)
def _keyed(secret: bytes, identity: Identity) -> hmac.HMAC:
    """Kept, since setting it up takes longer than a digest. (``hmac.digest`` also lets go of the interpreter, which
    costs a batch with many threads a change of threads for each item.)"""
    return hmac.new(secret, _apart(identity.deployment, identity.namespace, identity.key), "sha256")


def sent_under(installation: bytes | str, identity: Identity, renamed: Sequence[Event], call: Call) -> str:
    """The vendor key that a call was sent under: made from the name that its record had then.

    :param identity: the record's name now. :param renamed: its events, or those of them that renamed it.
    """
    for event in renamed:
        if event.kind == "renamed" and call.first_intent_at is not None and event.at > call.first_intent_at:
            identity = Identity(identity.deployment, *event.detail["from"])
            break
    return vendor_key(installation, identity, call.name, call.generation, call.attempt)


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
                raise PlanningError(f"The payload's {path} has a key that is a {_type_name(key)}.", PLAIN_DATA)
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
    raise PlanningError(f"The payload's {path} is a {_type_name(value)}, which has no canonical form.", PLAIN_DATA)


def _fields_of(value: Any, path: str) -> Any:
    """What a mapping, dataclass or model holds. Its own code runs here, and may raise what it likes."""
    try:
        if isinstance(value, Mapping):
            return {key: value[key] for key in value}
        if dataclasses.is_dataclass(value):
            return {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
        return value.model_dump()
    except Exception as exc:
        what = f"The payload's {path}, a {_type_name(value)}, cannot be read: {type(exc).__name__}: {exc}."
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


def _type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


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
        {name: value if _has_form(value) else f"<{_type_name(value)}>" for name, value in arguments.items()}
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
