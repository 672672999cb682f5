"""The rules in the order in which they are asked, and which of them an answer falls under.

An answer is a family's if the client's package, the host or a header says so; only where none does, by a code that only
that vendor has. What is looked up again and again is remembered, since the same few answers come in crowds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import cache, lru_cache
from importlib.metadata import entry_points

from airflow_runguard.core.failures.answer import Answer, packages
from airflow_runguard.core.failures.rule import Family, Rule

GROUP = "airflow_runguard.failure_rules"
_log = logging.getLogger(__name__)


class Book:
    """:param families: in the order in which they are asked."""

    def __init__(self, families: tuple[Family, ...]) -> None:
        self.families = families
        self.candidates = lru_cache(maxsize=4_096)(self._candidates)
        self.strong = lru_cache(maxsize=4_096)(self._strong)

    @property
    def rules(self) -> tuple[Rule, ...]:
        return tuple(rule for family in self.families for rule in family.rules)

    def first(self, types: frozenset[str], answer: Answer, told: Callable[[], bool] = lambda: False) -> Rule | None:
        """The first rule that the answer falls under.

        :param told: whether the vendor says when to come back; asked only where a rule wants to know.
        """
        marks = self.marks(types, answer)
        for rule in self.candidates(types, answer.status, answer.codes, marks):
            said = rule.text is None or rule.text.search(answer.message)
            if said and (rule.told is None or rule.told is told()):
                return rule
        return None

    def marks(self, types: frozenset[str], answer: Answer) -> frozenset[str]:
        """The families whose answer it is by its client, host, headers or form."""
        told = self.strong(types, answer.host, frozenset(answer.headers))
        return told | {answer.vendor} if answer.vendor else told

    def is_own(self, rule: Rule, answer: Answer) -> bool:
        """Whether the rule is that of a family whose answer it is, and no word that anybody may use."""
        marks = self.marks(frozenset(), answer)
        return any(rule is one for family in self.families if family.name in marks for one in family.rules)

    def _candidates(
        self, types: frozenset[str], status: int | None, codes: frozenset[str], marks: frozenset[str]
    ) -> tuple[Rule, ...]:
        """The rules that only wait for the prose or the wait, up to the first one that needs neither."""
        if not marks:
            marks = frozenset(family.name for family in self.families if not family.codes.isdisjoint(codes))
        found = []
        for family in self.families:
            for rule in family.rules:
                ours = family.is_general or rule.anywhere or family.name in marks
                if ours and rule.matches(types, status, codes):
                    found.append(rule)
                    if rule.text is None and rule.told is None:
                        return tuple(found)
        return tuple(found)

    def _strong(self, types: frozenset[str], host: str, headers: frozenset[str]) -> frozenset[str]:
        of = packages(types)
        return frozenset(
            family.name
            for family in self.families
            if not family.packages.isdisjoint(of)
            or any(host == known or (known[0] == "." and host.endswith(known)) for known in family.hosts)
            or (family.headers and any(name.startswith(family.headers) for name in headers))
        )


def family_of(rules: Iterable[Rule | Family]) -> tuple[Family, ...]:
    """A user's rules as families: loose ones hold for every vendor."""
    return tuple(
        rule if isinstance(rule, Family) else Family("your rules", rule.source or "rules=", (rule,)) for rule in rules
    )


@cache
def installed() -> Book:
    """The built-in families, after those that installed packages bring along.

    A package whose rules cannot be loaded is left out, said once: what it would have told stays as the others tell it.
    They are read with the first value or error that is to be judged: a task that has none does not keep their thousand
    patterns in memory.
    """
    from airflow_runguard.core.failures.families import FAMILIES

    own: list[Family] = []
    for entry in entry_points(group=GROUP):
        try:
            loaded = entry.load()
            own += family_of([loaded] if isinstance(loaded, Rule | Family) else loaded)
        except Exception:
            _log.exception("The failure rules of %s cannot be loaded and are left out: %s", entry.name, entry.value)
    return Book((*own, *FAMILIES))


@lru_cache(maxsize=64)
def with_rules(rules: tuple[Rule | Family, ...]) -> Book:
    return Book((*family_of(rules), *installed().families))
