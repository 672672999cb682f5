"""Reading an exception: everything that it and the errors around it can tell, and nothing of what that means.

Holds the walk through causes, contexts, wrapped and grouped errors. Duck typing only: no vendor SDK and no HTTP library
is imported, and every read survives attributes, mappings and ``__str__`` that raise. Not here: any judgement (see the
rules), what one answer says (``answer.py``), how long it asks to wait (``waits.py``), and what the client did before
(``attempts.py``).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from airflow_runguard.core.failures.answer import ERROR, RESPONSE, Answer, answer_of
from airflow_runguard.core.failures.attempts import Attempts, attempts_before
from airflow_runguard.core.failures.reading import errors, gather, read, sequence, type_key, type_keys

MAX_ERRORS = 64

_OPERATING_SYSTEM = frozenset({"builtins", "ssl", "socket"})


class Via(StrEnum):
    """How the walk came to an error, and so what its word is worth."""

    ITSELF = "itself"
    CAUSE = "cause"
    """Named as the reason by who raised it (``__cause__``, ``args``, ``reason``, …): speaks for the outer error."""
    MEMBER = "member"
    """One of a group: each must be proven by itself."""
    ATTEMPT = "attempt"
    """An earlier attempt of the client: must be proven by itself."""
    CONTEXT = "context"
    """Was being handled when the other was raised. May be an unrelated earlier error: can add doubt, never take it."""


# Looking up a member of an enumeration costs ten times what a name of the module does, and an error needs dozens.
ITSELF, CAUSE, MEMBER, ATTEMPT, CONTEXT = Via
NAMED = (CAUSE, MEMBER)
SPEAKING = (ITSELF, CAUSE, MEMBER)


@dataclass(slots=True, eq=False)
class Sighting:
    """One exception that the walk came by.

    :param have: its attributes that may tell something.
    :param spoken_for: reached only by causes and members, so that its word counts for the outermost error.
    """

    error: BaseException
    via: Via
    parent: Sighting | None
    spoken_for: bool
    types: frozenset[str]
    have: Mapping[str, Any]
    answer: Answer
    attempts: Attempts

    @property
    def status(self) -> int | None:
        return self.answer.status

    @property
    def label(self) -> str:
        if self.status is not None:
            return f"HTTP {self.status} from the vendor"
        return type_key(type(self.error))

    @property
    def is_operating_system(self) -> bool:
        """A bare socket error, or a group of them as connecting to several addresses ends in."""
        kind = isinstance(self.error, (OSError, BaseExceptionGroup))
        return kind and read(type(self.error), "__module__") in _OPERATING_SYSTEM


def walk(error: BaseException) -> tuple[list[Sighting], bool]:
    """List the error and every error around it, parents first, contexts last; and whether the list is complete."""
    found: list[Sighting] = []
    seen: set[int] = set()
    named: list[tuple[BaseException, Via, Sighting | None]] = [(error, ITSELF, None)]
    contexts: list[tuple[BaseException, Via, Sighting | None]] = []
    while named or contexts:
        current, via, parent = (named or contexts).pop(0)
        if id(current) in seen:
            continue
        if len(found) == MAX_ERRORS:
            return found, False
        seen.add(id(current))
        sighting = _sight(current, via, parent)
        found.append(sighting)
        have = sighting.have
        for inner in _causes(have):
            named.append((inner, CAUSE, sighting))
        if "exceptions" in have and isinstance(current, BaseExceptionGroup):
            for inner in errors(have["exceptions"]):
                named.append((inner, MEMBER, sighting))
        for inner in sighting.attempts.errors:
            named.append((inner, ATTEMPT, sighting))
        context = have.get("__context__")
        if isinstance(context, BaseException):
            contexts.append((context, CONTEXT, sighting))
    return found, True


def _sight(error: BaseException, via: Via, parent: Sighting | None) -> Sighting:
    cls: Any = type(error)
    types = type_keys(cls)
    lineage = via in SPEAKING and (parent is None or parent.spoken_for)
    have = gather(error, ERROR)
    response = have.get("response")
    there = gather(response, RESPONSE) if response is not None else {}
    answer = answer_of(error, types, have, there)
    # A requests error without its request never came from a session. One that lost its traceback only (sent between
    # processes, say) still has it.
    by_hand = parent is not None and "requests.RequestException" in parent.types and "request" not in parent.have
    attempts = attempts_before(types, have, there, answered=answer.status is not None, made_by_hand=by_hand)
    return Sighting(error, via, parent, lineage, types, have, answer, attempts)


# Where clients keep the error beneath: urllib3 (reason), aiohttp (os_error), google.api_core (cause), SQLAlchemy
# (orig), Google Ads (error), azure-core (inner_exception).
_CAUSES = ("__cause__", "reason", "os_error", "cause", "orig", "error", "inner_exception")
_CAUSE_NAMES = frozenset(_CAUSES)


def _causes(have: Mapping[str, Any]) -> list[BaseException]:
    """The errors that an error itself names as its reason, by what it has."""
    named = [] if _CAUSE_NAMES.isdisjoint(have) else [have[name] for name in _CAUSES if name in have]
    if "last_attempt" in have:  # tenacity; the method exception() would wait for an unfinished attempt
        named.append(read(have["last_attempt"], "_exception"))
    named += sequence(have.get("args"))
    return errors(named) if named else []
