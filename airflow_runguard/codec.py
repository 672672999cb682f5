"""Results as bytes and back (P2): an envelope of JSON around Airflow's own serialisation.

``dump`` refuses what ``load`` would not give back as an equal value, so that a replay never answers with something
else. Plain JSON values need no Airflow. Besides the value the envelope keeps the XComs that the task pushed itself, and
a decision (skip, branch) that the task took instead of returning.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

VERSION = 1
PLAIN = (str, int, float, bool, type(None))


@dataclass(frozen=True, slots=True)
class Answer:
    """What a task gave: its value, its own XComs by key, or the decision that it raised.

    :param raised: ``skip`` or ``skip_downstream``, where ``value`` is what the exception carried; ``decided``, where it
        is what a branch or short circuit was told, and what is skipped follows from it.
    """

    value: Any
    xcoms: Mapping[str, Any] = field(default_factory=dict)
    raised: str = ""


def dump(value: Any) -> bytes:
    """The value, or an :class:`Answer`, as bytes.

    :raises TypeError: it cannot be serialised, or would come back unequal.
    """
    answer = value if isinstance(value, Answer) else Answer(value)
    envelope: dict[str, Any] = {"v": VERSION, "value": _flat(answer.value)}
    if answer.xcoms:
        envelope["xcoms"] = {key: _flat(item) for key, item in answer.xcoms.items()}
    if answer.raised:
        envelope["raised"] = answer.raised
    data = json.dumps(envelope, separators=(",", ":")).encode("ascii")
    if not _same(_full(json.loads(data)["value"]), answer.value):
        raise TypeError(f"a {type(answer.value).__name__} comes back from serialisation as something else")
    return data


def load(data: bytes) -> Any:
    """What :func:`dump` was given: a value, or more: an :class:`Answer`.

    :raises ValueError: these are not bytes that :func:`dump` wrote.
    """
    envelope = json.loads(data)
    if not isinstance(envelope, dict) or envelope.get("v") != VERSION or "value" not in envelope:
        raise ValueError("not a stored result of this version")
    value = _full(envelope["value"])
    xcoms = {key: _full(item) for key, item in envelope.get("xcoms", {}).items()}
    return Answer(value, xcoms, envelope.get("raised", "")) if len(envelope) > 2 else value


def _flat(value: Any) -> Any:
    if _is_plain(value):
        return value
    from airflow.sdk.serde import serialize

    return serialize(value)


def _full(value: Any) -> Any:
    if isinstance(value, PLAIN):
        return value
    if _is_plain(value):
        return value
    from airflow.sdk.serde import deserialize

    return deserialize(value)


def _is_plain(value: Any) -> bool:
    """Whether JSON itself gives an equal value back: exact types only, no dict that serde would claim."""
    if type(value) in PLAIN:
        return True
    if type(value) is list:
        return all(_is_plain(item) for item in value)
    if type(value) is dict:
        return all(type(key) is str and not key.startswith("__") and _is_plain(item) for key, item in value.items())
    return False


def _same(back: Any, value: Any) -> bool:
    """Equality where the type defines it; where it does not (or cannot answer), serde is trusted."""
    try:
        return bool(back == value) or value != value  # NaN is equal to nothing
    except Exception:
        return type(back) is type(value)
