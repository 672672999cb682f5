"""Names: the identity of a piece of work, what a run is about, and the key under which a vendor knows a call.

Everything here is pure: no I/O, no clock, no ``hash()``, no locale. Nothing that names work is ever folded or cut.
The order itself, its payload, is :mod:`~airflow_runguard.core.payloads`; rendering a key's template belongs to the
doors (``rendering.py``).
"""

from __future__ import annotations

import base64
import functools
import hmac
import re
import unicodedata
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any, cast

from airflow_runguard.core.errors import PlanningError
from airflow_runguard.core.record import MAX_KEY_LENGTH, Call, Event, Identity

MAX_IDENTITY_BYTES = 2_500
"""UTF-8 bytes of deployment, namespace and key together: PostgreSQL indexes no row over 2,704 bytes."""

MAX_PLAIN_EXPONENT = 30
"""Decimals beyond it are written with an E, since ``Decimal("1E1000000")`` is a short text for a long one."""


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
        return f"is a {type_name(text)} and not a text"
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

    :returns: ``pd:…``, else ``pk:…``, else ``ld:…`` (dates in UTC); ``pd:…/pk:…`` where the partition's key says more
        than its date; ``None`` where the run has none of the three, and only an explicit key can name its work.
    :raises PlanningError: a date has no time zone; or a partition whose key tells of a time has no date.
    """
    if partition_date is not None:
        date = f"pd:{_aware('partition date', partition_date)}"
        return date if not partition_key or _writes(partition_key, partition_date) else f"{date}/pk:{partition_key}"
    if partition_key and _YEAR.search(partition_key):
        raise PlanningError(
            f"The partition {partition_key!r} has no date in this run. Airflow may give it one in a run that it makes "
            "by itself, so the two would be two pieces of work.",
            "Name the work by what both have: guard=Guard(key='{{ dag_run.partition_key }}').",
        )
    if partition_key:
        return f"pk:{partition_key}"
    if logical_date is not None:
        return f"ld:{_aware('logical date', logical_date)}"
    return None


_DATE = re.compile(
    r"(\d{4})(?:([-/.]?)(\d\d)(?:\2(\d\d)(?:[T ]?(\d\d)(?::?(\d\d)(?::?(\d\d)(?:\.0+)?)?)?)?)?)?(?:Z|[+-]\d\d:?\d\d)?"
)
_YEAR = re.compile(r"(?<!\d)(?:19|20)\d\d(?!\d)|(?<!\d)(?:19|20)\d{6}")
_ZONES = [timedelta(minutes=15 * quarter) for quarter in range(-14 * 4, 14 * 4 + 1)]


def _writes(label: str, moment: datetime) -> bool:
    """Whether a partition's key is only its date, written in whatever way and time zone. One that says more
    (``eu|2026-10-01``) names a partition of its own: several have that date."""
    found = _DATE.fullmatch(label)
    if found is None:
        return False
    digits = "".join(part for part in found.group(1, 3, 4, 5, 6, 7) if part)
    return any((moment + zone).strftime("%Y%m%d%H%M%S").startswith(digits) for zone in _ZONES)


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


def type_name(value: object) -> str:
    kind = type(value)
    return kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
