"""The one classifier: what an error or an answer means, and what it says about the effect.

Nothing else in this package looks for a status code, the word "quota" or a vendor's code. ``rule.py`` is the form of a
rule, ``families/`` holds the rules as data, a file a vendor, and ``book.py`` finds the one that counts.
``evidence.py`` walks exceptions, ``answer.py`` reads one answer, ``document.py`` its body, ``waits.py`` how long it
asks to wait, ``attempts.py`` what the client did before. ``results.py`` reads values that look like a success,
``bulks.py`` and ``items.py`` those about many items, and ``found.py`` has what they find.

Kept here: the law that combines what single errors say. Of a write, ``not_applied`` is said only if every attempt that
the client made is proven not to have had an effect.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime

from airflow_runguard.core.failures import evidence, results
from airflow_runguard.core.failures.answer import RESPONSE, Answer
from airflow_runguard.core.failures.attempts import SWITCHES, attempts_before
from airflow_runguard.core.failures.book import Book, installed, with_rules
from airflow_runguard.core.failures.evidence import ATTEMPT, CAUSE, CONTEXT, ITSELF, MEMBER, NAMED, Sighting
from airflow_runguard.core.failures.found import Fault, Found
from airflow_runguard.core.failures.reading import gather, type_key
from airflow_runguard.core.failures.rule import Family, Rule
from airflow_runguard.core.failures.waits import is_exhausted, wait_seconds
from airflow_runguard.core.record import Effect, Failure, FailureClass

__all__ = [
    "SWITCHES",
    "Decision",
    "Failure",
    "Family",
    "Rule",
    "classify",
    "classify_result",
    "decide",
    "hidden_retries",
]

NOT_APPLIED, UNKNOWN = Effect.NOT_APPLIED, Effect.UNKNOWN

MIN_FLOOR = 1.0
"""Seconds. A vendor's wait that is shorter, or over already, would only storm it."""
LONG_WAIT = 7 * 86_400.0
_MAX_EVIDENCE = 1_000
_CONTEXT_ONLY = (
    "it was only being handled when the outer error was raised, which may have come later: write `raise … from error`"
)


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided, and by which rule; ``rule`` is ``None`` where none knows the error."""

    failure: Failure
    rule: Rule | None = None


def classify(
    error: BaseException,
    *,
    effect_kind: str = "write",
    now: datetime | None = None,
    rules: Iterable[Rule | Family] = (),
    one_request: bool = False,
) -> Failure:
    """Say what an error means. Never raises, calls nobody, changes nothing.

    The answer's ``effect`` covers every attempt that the client library made and every error around this one. Where
    anything stays unproven it is ``unknown``, whatever else is known, and then nothing may be sent again by itself. A
    read has no effect, so whatever happened to it is ``not_applied``.

    :param error: what the call raised.
    :param effect_kind: ``"read"`` where repeating the call is harmless by nature; anything else is a write.
    :param now: the time to count a vendor's date against where the response has no ``Date`` of its own.
    :param rules: rules or families of one's own, asked before all others.
    :param one_request: what raised it asks the vendor once by its contract (a hook's submit). Then an
        ``AirflowException`` that was raised while handling the answer only tells it again, also without ``from``.
    """
    return decide(error, effect_kind=effect_kind, now=now, rules=rules, one_request=one_request).failure


def classify_result(
    value: object,
    *,
    effect_kind: str = "write",
    now: datetime | None = None,
    may_be_empty: bool = False,
    rules: Iterable[Rule | Family] = (),
) -> Failure | None:
    """Say what is wrong with a value that came back like a success; ``None`` where nothing is. Never raises.

    Finds errors inside HTTP 200 (GraphQL, bulk answers, ``$batch``, unprocessed items), a response that was not
    checked, an exception that was returned, and an empty result. Of a bulk answer of which a part was done, the effect
    is ``unknown`` for the whole; ask it of each item to settle them one by one.

    A function that returned may have had its effect and tell of something else that was refused. So of a write,
    ``not_applied`` is said only of a client's response or exception, which is judged as if it had been raised, and of a
    value that has a vendor's own documented form.

    :param effect_kind: as in :func:`classify`.
    :param may_be_empty: ``None``, ``""``, ``[]`` and ``{}`` are results as good as others; ``0`` and ``False`` always
        are.
    """
    writes = effect_kind != "read"
    try:
        book = with_rules(tuple(rules)) if rules else installed()
        found = results.read_result(value, may_be_empty=may_be_empty)
        if found is None:
            return None
        repeated = hidden_retries(value)
        judged = [_of_fault(fault, book, now, repeated, writes) for fault in found.faults]
        return judged[0] if len(judged) == 1 and not (found.done or found.partial) else _worst(judged, found, writes)
    except Exception as trouble:
        return _unreadable("result", trouble, writes=writes).failure


def decide(
    error: BaseException,
    *,
    effect_kind: str = "write",
    now: datetime | None = None,
    rules: Iterable[Rule | Family] = (),
    one_request: bool = False,
) -> Decision:
    """:func:`classify`, with the rule that decided."""
    writes = effect_kind != "read"
    try:
        book = with_rules(tuple(rules)) if rules else installed()
        return _Case(error, book, now, one_request).decide(writes)
    except Exception as trouble:
        return _unreadable("error", trouble, writes=writes)


_PLAIN = frozenset({type(None), bool, int, float, str, bytes, list, tuple})


def hidden_retries(value: object) -> str:
    """What a call's result or error tells of requests that its client repeated, and the switch that ends it; '' for
    nothing.

    Of results, responses and botocore's answers keep count; of errors, those whose client, response or traceback does
    (docs/classifier.md). A client that tells nobody is not seen. Attempts that never reached the vendor do not count.
    Never raises.
    """
    if type(value) in _PLAIN or (type(value) is dict and "ResponseMetadata" not in value):
        return ""  # what most functions return: data, and no client's response
    try:
        if isinstance(value, BaseException):
            found = [sighting.attempts for sighting in evidence.walk(value)[0]]
            told = [line for made in found for line in made.counted]
        else:
            found = [attempts_before(frozenset(), {"response": value}, gather(value, RESPONSE), answered=False)]
            told = [*found[0].unproven]
        for made in found:
            left = [error for error in made.errors if classify(error).effect is UNKNOWN]
            told += [f"a request before it ended with {type_key(type(error))}" for error in left]
            told += [f"a request before it was answered with HTTP {status}" for status in made.statuses]
        return "; ".join(dict.fromkeys(told))[:_MAX_EVIDENCE]
    except Exception:
        return ""


def _unreadable(what: str, trouble: Exception, *, writes: bool) -> Decision:
    effect = UNKNOWN if writes else NOT_APPLIED
    said = f"the {what} could not be read ({type_key(type(trouble))} while reading it)"
    return Decision(Failure(FailureClass.UNKNOWN, effect, evidence=said))


class _Case:
    """One error with all that is around it, while it is judged."""

    def __init__(self, error: BaseException, book: Book, now: datetime | None, one_request: bool = False) -> None:
        self.book, self.one_request = book, one_request
        self.sightings, self.complete = evidence.walk(error)
        self.now = now
        self.waits: dict[Sighting, float | None] = {}
        self.rules = self._rules()
        self.voice = self._voice()

    def decide(self, writes: bool) -> Decision:
        outermost, voice = self.sightings[0], self.voice
        if voice is None:
            return Decision(
                Failure(
                    FailureClass.UNKNOWN,
                    UNKNOWN if writes else NOT_APPLIED,
                    evidence=_line(f"no rule knows {outermost.label} (rule unrecognised)", ()),
                )
            )
        rule = self.rules[voice]
        doubts: list[str] = []
        # The author who raises NotApplied vouches for everything before it; further in, it is one voice of several.
        if not (voice is outermost and "airflow_runguard.NotApplied" in outermost.types):
            doubts = self._doubts(voice)
        wait = self._wait(voice) if rule.pausable else None
        return Decision(_judge(rule, voice.label, wait, doubts, writes), rule)

    def _first(self, sighting: Sighting) -> Rule | None:
        def told() -> bool:
            return self._waits(sighting) is not None or is_exhausted(sighting.answer.headers)

        return self.book.first(sighting.types, sighting.answer, told)

    def _waits(self, sighting: Sighting) -> float | None:
        if sighting not in self.waits:
            self.waits[sighting] = wait_seconds(sighting.answer, sighting.have, self.now)
        return self.waits[sighting]

    def _rules(self) -> dict[Sighting, Rule]:
        """Which rule each error falls under; errors that another one explains are left out."""
        rules: dict[Sighting, Rule] = {}
        covered: set[Sighting] = set()
        speaking: set[Sighting] = set()
        for sighting in self.sightings:
            parent = sighting.parent
            if parent is not None and sighting.via in NAMED and sighting.is_operating_system:
                above = rules.get(parent)
                if parent in covered or (above is not None and above.names_phase):
                    covered.add(sighting)
                    continue
            rule = self._first(sighting)
            if rule is not None:
                rules[sighting] = rule
        # Inside out: a wrapper's word is dropped where something beneath it has spoken.
        if len(self.sightings) == 1:
            return rules
        for sighting in reversed(self.sightings):
            here = rules.get(sighting)
            if here is not None and here.wrapper and sighting in speaking:
                del rules[sighting]
            heard = here is not None or sighting in speaking
            if heard and sighting.parent and sighting.via in NAMED:
                speaking.add(sighting.parent)
        return rules

    def _voice(self) -> Sighting | None:
        """The error whose rule names the failure: the outermost that speaks for the whole, else the outermost."""
        speaking = [sighting for sighting in self.sightings if sighting in self.rules]
        first = speaking[0] if speaking else None
        return next((sighting for sighting in speaking if sighting.spoken_for), first)

    def _doubts(self, voice: Sighting) -> list[str]:
        """Every reason why the voice's word does not hold for the whole call."""
        doubts = [] if voice.spoken_for or self._is_retold(voice) else [_CONTEXT_ONLY]
        if not self.complete:
            doubts.append(f"there are more than {evidence.MAX_ERRORS} errors around it, not all were read")
        silent = self._silent() if len(self.sightings) > 1 else ()
        for sighting in self.sightings:
            rule = self.rules.get(sighting)
            if sighting is not voice and rule is not None and rule.effect is not NOT_APPLIED:
                doubts.append(f"{_PLACE[sighting.via]} {sighting.label}: {rule.says} (rule {rule.name})")
            if sighting in silent:
                doubts.append(f"{_PLACE[sighting.via]} {sighting.label}, which no rule knows")
            doubts.extend(sighting.attempts.unproven)
            for status in sighting.attempts.statuses:
                answered = self.book.first(frozenset(), Answer(status))
                if answered is None or answered.effect is not NOT_APPLIED:
                    doubts.append(f"an earlier attempt or redirect was answered with HTTP {status}")
        return list(dict.fromkeys(doubts)) if doubts else doubts

    def _is_retold(self, voice: Sighting) -> bool:
        """Whether the error around this one only tells it again in a hook's words, and nothing was asked in between."""
        outermost = self.sightings[0]
        told = type_key(type(outermost.error)) == "airflow.AirflowException" and voice.parent is outermost
        return self.one_request and told

    def _silent(self) -> set[Sighting]:
        """Grouped errors and earlier attempts of which neither they nor their causes say anything."""
        heard: set[Sighting] = set()
        silent: set[Sighting] = set()
        for sighting in reversed(self.sightings):
            if sighting in self.rules or sighting in heard or self._explained(sighting):
                if sighting.parent is not None and sighting.via in NAMED:
                    heard.add(sighting.parent)
            elif sighting.via in (MEMBER, ATTEMPT):
                silent.add(sighting)
        return silent

    def _explained(self, sighting: Sighting) -> bool:
        """Whether an error further out names the phase, so that this operating system error need not speak."""
        step: Sighting | None = sighting
        while step is not None and step.is_operating_system and step.via in NAMED:
            step = step.parent
            if step is not None and step in self.rules and self.rules[step].names_phase:
                return True
        return False

    def _wait(self, voice: Sighting) -> float | None:
        """The vendor's wait: from the voice itself, else from an error around it that carries the same answer."""
        wait = self._waits(voice)
        for other in self.sightings if wait is None else ():
            if wait is None and other.status == voice.status and other is not voice:
                wait = self._waits(other)
        return wait


_PLACE = {
    ITSELF: "it is itself",
    CAUSE: "it was caused by",
    MEMBER: "one of the grouped errors is",
    ATTEMPT: "an earlier attempt of the client ended with",
    CONTEXT: "it was raised while handling",
}


def _judge(rule: Rule, label: str, wait: float | None, doubts: list[str], writes: bool) -> Failure:
    """One rule's word, and what the doubts leave of it."""
    proven = rule.effect is NOT_APPLIED and not doubts
    harmless = proven or not writes
    # A vendor that leaves the effect open and still says when to come back has said that waiting mends it. Whoever acts
    # on it looks at the effect first; a doubt about other attempts is nothing that waiting mends.
    waits = rule.pausable and (wait is not None or not rule.when_told)
    pausable = waits and (harmless or (rule.effect is UNKNOWN and not doubts))
    said = f"{label}: {rule.says} (rule {rule.name})"
    notes = list(doubts) if writes else []
    if pausable and wait is not None and wait > LONG_WAIT:
        notes.append(f"it asks for a wait of {wait / 86_400:,.0f} days, which the longest pause allowed cuts short")
    return Failure(
        rule.failure_class,
        NOT_APPLIED if harmless else UNKNOWN,
        pausable=pausable,
        resume_after=wait,
        floor=max(rule.floor or 0.0, MIN_FLOOR) if pausable else None,
        needs_person=rule.needs_person and harmless,
        final=rule.final and proven,
        evidence=_line(said, notes),
    )


_WORDS_ONLY = (
    "the function returned it and may have done its work: it is nobody's documented form of an answer, and such words "
    "prove nothing about the effect (raise NotApplied where nothing was done)"
)


def _of_fault(fault: Fault, book: Book, now: datetime | None, repeated: str, writes: bool) -> Failure:
    if fault.error is not None:
        return _Case(fault.error, book, now).decide(writes).failure
    answer = fault.answer
    wait = wait_seconds(answer, {}, now)
    rule = book.first(frozenset(), answer, lambda: wait is not None or is_exhausted(answer.headers))
    if rule is None or (rule.statuses and rule.effect is UNKNOWN and (answer.status or 0) < 400):
        rule = fault.otherwise
    if rule.pausable and fault.never:
        rule = results.NEVER
    doubts = [repeated] if repeated else []
    believed = answer.vendor or rule is fault.otherwise or (fault.answered and book.is_own(rule, answer))
    if rule.effect is NOT_APPLIED and not believed:
        doubts.append(_WORDS_ONLY)
    return _judge(rule, fault.label, wait if rule.pausable else None, doubts, writes)


def _worst(judged: list[Failure], found: Found, writes: bool) -> Failure:
    """Of what stands in a result: doubt before waiting, waiting before a refusal."""
    order = (FailureClass.QUOTA, FailureClass.TIMEOUT, FailureClass.UNKNOWN, FailureClass.PROCESSING)
    part = found.done > 0 or bool(found.partial)
    unknown = writes and (part or any(failure.effect is not NOT_APPLIED for failure in judged))
    pausing = [failure for failure in judged if failure.pausable]
    classes = [failure.failure_class for failure in pausing or judged]
    first = next((kind for kind in order if kind in classes), classes[0])
    chosen = next(failure for failure in pausing or judged if failure.failure_class is first)
    waits = [failure.resume_after for failure in pausing if failure.resume_after is not None]
    floors = [failure.floor for failure in pausing if failure.floor is not None]
    notes = []
    if len(judged) > 1 or found.done:
        notes.append(f"of {len(judged) + found.done} items {found.done} were done and {len(judged)} were not")
    if found.partial:
        notes.append(found.partial)
    return Failure(
        chosen.failure_class,
        UNKNOWN if unknown else NOT_APPLIED,
        pausable=bool(pausing),
        resume_after=max(waits, default=None),
        floor=max(floors, default=None),
        needs_person=not (unknown or pausing) and any(failure.needs_person for failure in judged),
        final=not unknown and all(failure.final for failure in judged),
        evidence=_line(chosen.evidence, notes),
    )


def _line(said: str, doubts: Iterable[str]) -> str:
    line = "; but ".join((said, *doubts))
    if not line.isprintable():
        line = " ".join(line.split())
    return line if len(line) <= _MAX_EVIDENCE else line[: _MAX_EVIDENCE - 1] + "…"
