"""The one classifier: what an error means, and what it says about the effect.

Nothing else in this package looks for a status code, the word "quota" or a vendor's code. ``rule.py`` is the form of a
rule and ``http.py`` the general family; a vendor's family is one more file of rules in :data:`FAMILIES`, before the
general one. ``evidence.py`` reads exceptions, ``attempts.py`` what the client did before, ``reading.py`` is how. Kept
here: the law that combines what single errors say. Of a write, ``not_applied`` is said only if every attempt that the
client made is proven not to have had an effect.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from functools import lru_cache

from airflow_runguard.core.failures import evidence, http
from airflow_runguard.core.failures.evidence import Sighting, Via
from airflow_runguard.core.failures.reading import type_key
from airflow_runguard.core.failures.rule import Rule
from airflow_runguard.core.record import Effect, Failure, FailureClass

__all__ = ["classify"]

# In the order in which they are asked; the general family last.
FAMILIES: tuple[tuple[Rule, ...], ...] = (http.RULES,)
RULES: tuple[Rule, ...] = tuple(rule for family in FAMILIES for rule in family)

_MAX_EVIDENCE = 1_000
_CONTEXT_ONLY = (
    "it was only being handled when the outer error was raised, which may have come later: write `raise … from error`"
)


def classify(error: BaseException, *, effect_kind: str = "write", now: datetime | None = None) -> Failure:
    """Say what an error means. Never raises, calls nobody, changes nothing.

    The answer's ``effect`` covers every attempt that the client library made and every error around this one. Where
    anything stays unproven it is ``unknown``, and then the failure is neither pausable nor final, whatever else is
    known. A read has no effect, so whatever happened to it is ``not_applied``.

    :param error: what the call raised.
    :param effect_kind: ``"read"`` where repeating the call is harmless by nature; anything else is a write.
    :param now: the time to count a vendor's date against where the response has no ``Date`` of its own.
    """
    writes = effect_kind != "read"
    try:
        return _classify(error, writes, now)
    except Exception as trouble:
        return Failure(
            FailureClass.UNKNOWN,
            Effect.UNKNOWN if writes else Effect.NOT_APPLIED,
            evidence=f"the error could not be read ({type_key(type(trouble))} while reading it)",
        )


def _classify(error: BaseException, writes: bool, now: datetime | None) -> Failure:
    sightings, complete = evidence.walk(error)
    rules = _rules(sightings)
    outermost = sightings[0]
    voice = _voice(sightings, rules)
    rule = rules[voice] if voice else None
    if rule is None or voice is None:
        return Failure(
            FailureClass.UNKNOWN,
            Effect.UNKNOWN if writes else Effect.NOT_APPLIED,
            evidence=_line(f"no rule knows {outermost.label} (rule unrecognised)", ()),
        )

    said = f"{voice.label}: {rule.says} (rule {rule.name})"
    doubts: list[str] = []
    # The author who raises NotApplied vouches for everything before it; found further in, it is one voice of several.
    if not (voice is outermost and "airflow_runguard.NotApplied" in outermost.types):
        doubts = _doubts(sightings, rules, voice, complete)
    proven = rule.effect is Effect.NOT_APPLIED and not doubts
    wait = _wait(sightings, voice, now) if rule.pausable else None
    harmless = proven or not writes
    return Failure(
        rule.failure_class,
        Effect.NOT_APPLIED if harmless else Effect.UNKNOWN,
        pausable=rule.pausable and harmless and (wait is not None or not rule.when_told),
        resume_after=wait,
        needs_person=rule.needs_person and harmless,
        final=rule.final and proven,
        evidence=_line(said, doubts if writes else ()),
    )


@lru_cache(maxsize=4_096)
def _first_rule(types: frozenset[str], status: int | None) -> Rule | None:
    return next((rule for rule in RULES if rule.matches(types, status)), None)


def _rules(sightings: list[Sighting]) -> dict[Sighting, Rule]:
    """Which rule each error falls under; errors that another one explains are left out."""
    rules: dict[Sighting, Rule] = {}
    covered: set[Sighting] = set()
    speaking: set[Sighting] = set()
    for sighting in sightings:
        parent = sighting.parent
        if parent is not None and sighting.via in (Via.CAUSE, Via.MEMBER) and sighting.is_operating_system:
            above = rules.get(parent)
            if parent in covered or (above is not None and above.names_phase):
                covered.add(sighting)
                continue
        rule = _first_rule(sighting.types, sighting.status)
        if rule is not None:
            rules[sighting] = rule
    # Inside out: a wrapper's word is dropped where something beneath it has spoken.
    for sighting in reversed(sightings):
        rule_here = rules.get(sighting)
        if rule_here is not None and rule_here.wrapper and sighting in speaking:
            del rules[sighting]
        if (
            (rule_here is not None or sighting in speaking)
            and sighting.parent
            and sighting.via in (Via.CAUSE, Via.MEMBER)
        ):
            speaking.add(sighting.parent)
    return rules


def _voice(sightings: list[Sighting], rules: dict[Sighting, Rule]) -> Sighting | None:
    """The error whose rule names the failure: the outermost that speaks for the whole, else the outermost at all."""
    speaking = [sighting for sighting in sightings if sighting in rules]
    return next((sighting for sighting in speaking if sighting.spoken_for), speaking[0] if speaking else None)


def _doubts(sightings: list[Sighting], rules: dict[Sighting, Rule], voice: Sighting, complete: bool) -> list[str]:
    """Every reason why the voice's word does not hold for the whole call."""
    doubts = [] if voice.spoken_for else [_CONTEXT_ONLY]
    if not complete:
        doubts.append(f"there are more than {evidence.MAX_ERRORS} errors around it, not all were read")
    silent = _silent(sightings, rules)
    for sighting in sightings:
        rule = rules.get(sighting)
        if sighting is not voice and rule is not None and rule.effect is not Effect.NOT_APPLIED:
            doubts.append(f"{_PLACE[sighting.via]} {sighting.label}: {rule.says} (rule {rule.name})")
        if sighting in silent:
            doubts.append(f"{_PLACE[sighting.via]} {sighting.label}, which no rule knows")
        doubts.extend(sighting.attempts.unproven)
        for status in sighting.attempts.statuses:
            answered = _first_rule(frozenset(), status)
            if answered is None or answered.effect is not Effect.NOT_APPLIED:
                doubts.append(f"an earlier attempt or redirect was answered with HTTP {status}")
    return list(dict.fromkeys(doubts))


_PLACE = {
    Via.ITSELF: "it is itself",
    Via.CAUSE: "it was caused by",
    Via.MEMBER: "one of the grouped errors is",
    Via.ATTEMPT: "an earlier attempt of the client ended with",
    Via.CONTEXT: "it was raised while handling",
}


def _silent(sightings: list[Sighting], rules: dict[Sighting, Rule]) -> set[Sighting]:
    """Grouped errors and earlier attempts of which neither they nor their causes say anything."""
    heard: set[Sighting] = set()
    silent: set[Sighting] = set()
    for sighting in reversed(sightings):
        if sighting in rules or sighting in heard or _explained(sighting, rules):
            if sighting.parent is not None and sighting.via in (Via.CAUSE, Via.MEMBER):
                heard.add(sighting.parent)
        elif sighting.via in (Via.MEMBER, Via.ATTEMPT):
            silent.add(sighting)
    return silent


def _explained(sighting: Sighting, rules: dict[Sighting, Rule]) -> bool:
    """Whether an error further out names the phase, so that this operating system error need not speak."""
    step: Sighting | None = sighting
    while step is not None and step.is_operating_system and step.via in (Via.CAUSE, Via.MEMBER):
        step = step.parent
        if step is not None and step in rules and rules[step].names_phase:
            return True
    return False


def _wait(sightings: list[Sighting], voice: Sighting, now: datetime | None) -> float | None:
    """The vendor's wait: from the voice itself, else from an error around it that carries the same answer."""
    same = (other for other in sightings if other.status == voice.status and other is not voice)
    for sighting in (voice, *same):
        wait = evidence.wait_seconds(sighting.error, now)
        if wait is not None:
            return wait
    return None


def _line(said: str, doubts: Iterable[str]) -> str:
    line = " ".join("; but ".join((said, *doubts)).split())
    return line if len(line) <= _MAX_EVIDENCE else line[: _MAX_EVIDENCE - 1] + "…"
