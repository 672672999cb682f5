"""The form of a rule: what it recognises, and what that means for the work.

A vendor's family is one file of data: a :class:`Family` says how its answers are told from others (the client's
package, the host, headers of its own) and holds an ordered tuple of rules. ``families/__init__`` puts the families in
order, the general one last. A rule speaks of one answer to one attempt. Whether its word holds for the whole call
(other attempts, other errors around it) is decided in one place, ``failures/__init__``, never in a rule.
"""

from __future__ import annotations

import re
from collections.abc import Container
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from airflow_runguard.core.record import Effect, FailureClass

DAY = 3_600.0
"""Seconds below which no wait for a daily allowance may fall: it ends some time today, the vendor does not say when."""


OPEN = frozenset({408, 423, 425, 499, 500, 502, 504})
"""Statuses that leave open what happened. No code or sentence takes that back; a rule would have to name the status."""
CONFLICT = 409


@lru_cache(maxsize=8_192)
def fold(word: str) -> str:
    """A code as the rules compare it: ``RateLimitExceeded``, ``rate_limit_exceeded`` and ``RATE-LIMIT-EXCEEDED``."""
    return re.sub(r"[^a-z0-9=]+", "", word.lower())


def words(text: str) -> frozenset[str]:
    """Codes, separated by spaces, as a rule takes them."""
    return frozenset(map(fold, text.split()))


def prose(pattern: str) -> re.Pattern[str]:
    """Words of a message, in lower case, which is how rules are shown it (and searched twice as fast as in any case).
    Vendors change their sentences: for what no code tells, and nothing else.
    """
    return re.compile(pattern)


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of knowledge about answers and errors. Everything that it names must be there.

    :param name: what evidence, docs and tests call it.
    :param says: what it means, as the end of the sentence "I saw X: …".
    :param source: where the rule comes from: a public specification or manual. A family's rules have the family's.
    :param effect: what is known about a *write* after this one attempt.
    :param types: recognises an exception class by ``<top package>.<class name>``, anywhere in its MRO.
    :param statuses: recognises an HTTP status.
    :param codes: recognises any of these codes, folded by :func:`words`. A number's code is ``<field>=<number>``.
    :param also: … and one of these as well.
    :param code_like: recognises a folded code by its form.
    :param text: recognises words of the vendor's message, which is in lower case.
    :param told: only where the vendor says when to come back; ``False``: only where it does not.
    :param anywhere: holds for every vendor, not only where the answer is seen to be the family's.
    :param pausable: waiting will mend it.
    :param when_told: … but only where the vendor says for how long.
    :param floor: seconds below which a sensible wait may not fall, whatever the vendor says.
    :param needs_person: neither waiting nor retrying mends it.
    :param final: a refusal for good, which the vendor may save under the vendor key.
    :param names_phase: the client names the phase in which it failed; the operating system's error beneath says less.
    :param wrapper: the class only says that something beneath it failed; it counts where nothing beneath speaks.
    """

    name: str
    says: str
    failure_class: FailureClass
    effect: Effect
    source: str = ""
    types: frozenset[str] = frozenset()
    statuses: Container[int] = ()
    codes: frozenset[str] = frozenset()
    also: frozenset[str] = frozenset()
    code_like: re.Pattern[str] | None = None
    text: re.Pattern[str] | None = None
    told: bool | None = None
    anywhere: bool = False
    pausable: bool = False
    when_told: bool = False
    floor: float | None = None
    needs_person: bool = False
    final: bool = False
    names_phase: bool = False
    wrapper: bool = False

    def __post_init__(self) -> None:
        for name in ("types", "statuses", "codes", "also"):  # rules are looked up by their content
            if isinstance(getattr(self, name), set | list):
                object.__setattr__(self, name, frozenset(getattr(self, name)))
        for pattern in (self.text, self.code_like):
            if pattern and not pattern.flags & re.IGNORECASE and re.search(r"(?<!\\)[A-Z]", pattern.pattern):
                raise ValueError(f"Rule {self.name} would never match: write {pattern.pattern!r} in lower case.")

    def _is_open(self, status: int | None) -> bool:
        """409 may collide with an earlier attempt of this very work, or be a vendor's word for a limit."""
        return status in OPEN or (status == CONFLICT and self.failure_class is not FailureClass.QUOTA)

    def matches(self, types: frozenset[str], status: int | None, codes: frozenset[str]) -> bool:
        """Everything but the prose and the wait. A rule that names nothing recognises nothing."""
        if self.effect is Effect.NOT_APPLIED and not self.types and self._is_open(status):
            named = isinstance(self.statuses, frozenset) and status in self.statuses
            if not named and (self.codes or self.code_like or self.text):
                return False
        return (
            (not self.types or not self.types.isdisjoint(types))
            and (not self.statuses or (status is not None and status in self.statuses))
            and (not self.codes or not self.codes.isdisjoint(codes))
            and (not self.also or not self.also.isdisjoint(codes))
            and (self.code_like is None or any(map(self.code_like.search, codes)))
            and bool(self.types or self.statuses or self.codes or self.code_like or self.text)
        )


@dataclass(frozen=True, slots=True)
class Family:
    """A vendor: how its answers are told from others, and what they mean.

    :param name: what docs call it.
    :param source: the vendor's public page about its errors.
    :param packages: top packages of its Python clients.
    :param hosts: its API's host names; ``.example.com`` means any below it.
    :param headers: what the names of its own response headers begin with, lower case.
    :param codes: codes that only this vendor has, folded by :func:`words`.
    """

    name: str
    source: str
    rules: tuple[Rule, ...]
    packages: frozenset[str] = frozenset()
    hosts: tuple[str, ...] = ()
    headers: tuple[str, ...] = ()
    codes: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        for name in ("packages", "codes"):
            object.__setattr__(self, name, frozenset(getattr(self, name)))
        for name in ("hosts", "headers"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        sourced = tuple(rule if rule.source else replace(rule, source=self.source) for rule in self.rules)
        object.__setattr__(self, "rules", sourced)

    @property
    def is_general(self) -> bool:
        return not (self.packages or self.hosts or self.headers or self.codes)


# -- the meanings that come again and again; each takes a rule's name, its sentence and what it recognises -------------


def rate(name: str, says: str, **recognises: Any) -> Rule:
    """Too much at once: the vendor did not take this one, and waiting mends it."""
    return Rule(name, says, FailureClass.QUOTA, Effect.NOT_APPLIED, pausable=True, **recognises)


def daily(name: str, says: str, **recognises: Any) -> Rule:
    """The allowance of a day (or longer) is used up: waiting mends it, but not within the hour."""
    return Rule(name, says, FailureClass.QUOTA, Effect.NOT_APPLIED, pausable=True, **{"floor": DAY, **recognises})


def cap(name: str, says: str, **recognises: Any) -> Rule:
    """Out of credit, suspended, or a hard limit: the vendor did nothing, and only a person gets it going again."""
    return Rule(name, says, FailureClass.QUOTA, Effect.NOT_APPLIED, needs_person=True, **recognises)


def refused(name: str, says: str, **recognises: Any) -> Rule:
    """The vendor refused the request as it stands; the same one will be refused again."""
    return Rule(
        name, says, FailureClass.VALIDATION, Effect.NOT_APPLIED, needs_person=True, **{"final": True, **recognises}
    )


def undone(name: str, says: str, **recognises: Any) -> Rule:
    """It failed and left nothing behind; the next try may do it."""
    return Rule(name, says, effect=Effect.NOT_APPLIED, **{"failure_class": FailureClass.PROCESSING, **recognises})


def open_end(name: str, says: str, **recognises: Any) -> Rule:
    """Nobody can say whether it happened."""
    return Rule(name, says, effect=Effect.UNKNOWN, **{"failure_class": FailureClass.PROCESSING, **recognises})
