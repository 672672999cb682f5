"""The form of a rule: what it recognises, and what that means for the work.

A family of rules is a file that holds one ordered tuple of :class:`Rule` and nothing else; ``__init__`` puts the
families in order, the general one last. A rule speaks of one exception and of one attempt. Whether its word holds for
the whole call (other attempts, other errors around it) is decided in one place, ``__init__``, never in a rule.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from airflow_runguard.core.record import Effect, FailureClass


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of knowledge about errors.

    :param name: what evidence, docs and tests call it.
    :param source: where the rule comes from: a public specification or manual.
    :param says: what it means, as the end of the sentence "I saw X: …".
    :param effect: what is known about a *write* after this one attempt.
    :param types: recognises an exception class by ``<top package>.<class name>``, anywhere in its MRO.
    :param statuses: recognises an HTTP status; read only where ``types`` is empty.
    :param pausable: waiting will mend it.
    :param when_told: … but only where the vendor says for how long.
    :param names_phase: the client names the phase in which it failed; the operating system's error beneath says less.
    :param wrapper: the class only says that something beneath it failed; it counts where nothing beneath speaks.
    """

    name: str
    source: str
    says: str
    failure_class: FailureClass
    effect: Effect
    types: frozenset[str] = frozenset()
    statuses: Container[int] = ()
    pausable: bool = False
    when_told: bool = False
    needs_person: bool = False
    final: bool = False
    names_phase: bool = False
    wrapper: bool = False

    def matches(self, types: frozenset[str], status: int | None) -> bool:
        if self.types:
            return not self.types.isdisjoint(types)
        return status is not None and status in self.statuses
