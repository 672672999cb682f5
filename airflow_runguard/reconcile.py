"""Asking about everything that is in doubt, and comparing the ledger with what a vendor has, both ways.

The functions that ask are in the DAGs' code. :class:`Functions` loads a DAG's file as Airflow has it now; where that
fails, the record says so and stays in doubt. What ``guard.sql`` did needs no DAG: its marker answers.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowFailException

from airflow_runguard import codec, sqlguard
from airflow_runguard.config import connect_ledger, settings
from airflow_runguard.core import keys
from airflow_runguard.core import reconcile as core
from airflow_runguard.core.errors import PlanningError
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Call, CallState, Effect, Identity, Record, Result
from airflow_runguard.core.work import IN_SQL, Doubt, Reconcile, StillUnknown, said, stored
from airflow_runguard.options import Guard
from airflow_runguard.ordering import hiding, is_test

if TYPE_CHECKING:
    from airflow.sdk.definitions.context import Context

log = logging.getLogger("airflow_runguard")

Data = dict[str, Any]
Who = Callable[[Record], "Guard | Callable[[Any], Any] | str"]
"""Who is asked about a record: its task's guard (by its ``rules``, too) or a function; or why there is nobody."""

LISTED = 100
"""Differences of one kind that a report names; it counts all."""


# -- who is asked ------------------------------------------------------------------------------------------------------


class Functions:
    """The guards with ``on_doubt`` functions of the DAGs, each file loaded once, as Airflow's bundles have it now."""

    def __init__(self) -> None:
        self._dags: dict[str, Any] = {}

    def __call__(self, record: Record) -> Guard | str:
        dag_id, task_id = record.holder.dag_id, record.holder.task_id
        if not dag_id:
            return "no DAG ever worked on it"
        if dag_id not in self._dags:
            self._dags[dag_id] = self._loaded(dag_id)
        dag = self._dags[dag_id]
        if isinstance(dag, str):
            return dag
        task = dag.task_dict.get(task_id)
        if task is None:
            return f"DAG {dag_id!r} has no task {task_id!r} any more"
        guard = getattr(task, "guard", None) or getattr(task, "partial_kwargs", {}).get("guard")
        if not isinstance(guard, Guard):
            return f"task {dag_id}.{task_id} is not guarded any more"
        if not callable(guard.on_doubt):
            return f"task {dag_id}.{task_id} says on_doubt={guard.on_doubt!r}: a person is asked, not the vendor"
        return guard

    @staticmethod
    def _loaded(dag_id: str) -> Any:
        """The DAG, or why it cannot be had."""
        from airflow.dag_processing.bundles.manager import DagBundlesManager
        from airflow.dag_processing.dagbag import BundleDagBag
        from airflow.models.dag import DagModel
        from airflow.utils.session import create_session

        try:
            with create_session() as session:
                model = session.get(DagModel, dag_id)
                where = (model.bundle_name, model.relative_fileloc) if model is not None else None
            if where is None or where[1] is None:
                return f"Airflow has no DAG {dag_id!r}"
            bundle = DagBundlesManager().get_bundle(where[0])  # type: ignore[no-untyped-call]
            bundle.initialize()
            bag = BundleDagBag(
                dag_folder=bundle.path / where[1],
                bundle_path=bundle.path,
                bundle_name=bundle.name,
                safe_mode=False,  # it did define the DAG: one that is cut down to an error is not to be passed over
            )
        except Exception as error:  # whatever a bundle or an import does: nobody can be asked
            log.warning("DAG %r cannot be loaded.", dag_id, exc_info=True)
            return f"DAG {dag_id!r} cannot be loaded: {type(error).__name__}: {error}"
        if bag.import_errors:
            said = str(next(iter(bag.import_errors.values()))).strip().splitlines()
            return f"the file of DAG {dag_id!r} has an import error: {said[-1] if said else ''}"
        return bag.dags.get(dag_id) or f"the file of DAG {dag_id!r} does not define it any more"


class _Target(sqlguard.SqlTransaction):
    """A target that many markers are looked up in."""

    away = ""
    """Why it cannot be reached."""

    def _open(self) -> Any:
        try:
            return super()._open()
        except Exception as error:
            self.away = said(error)
            raise


class _Targets:
    """The targets of one round: one that cannot be reached is tried once, not once for each of its markers."""

    def __init__(self) -> None:
        self._known: dict[str, _Target] = {}

    def answers(self, on_doubt: object) -> Reconcile:
        ask = sqlguard.answers(on_doubt, lambda conn_id: self._known.setdefault(conn_id, _Target(conn_id)))

        def answer(doubt: Doubt) -> Any:
            conn_id = str(doubt.call.intent.get(IN_SQL))
            away = self._known[conn_id].away if conn_id in self._known else ""
            if away:
                return StillUnknown(f"not asked, since {conn_id!r} cannot be reached ({away})")
            return core.of_one(ask)(doubt)

        return answer


def settle_markers(ledger: Ledger, *, actor: str) -> Data:
    """Settle every doubt about a call of ``guard.sql`` by its marker, without a DAG. Answers as settle_all does."""
    return settle_all(ledger, lambda record: "only markers are asked here", actor=actor, by_marker=True)


def settle_all(ledger: Ledger, who: Who, *, actor: str, **scope: str | bool | None) -> Data:
    """Ask about everything in doubt and book the answers.

    :param scope: ``dag_id``, ``namespace``, ``prefix``; ``None`` = all. ``by_marker``: only what has a marker.
    :returns: what came of each doubtful call, and a summary.
    """
    asked: list[Data] = []
    told_to_wait: dict[tuple[str, str], str] = {}
    targets, hide = _Targets(), hiding(settings())
    for record in _in_doubt(ledger, scope):
        task = (record.holder.dag_id, record.holder.task_id)
        found = who(record)
        if record.broken:
            findings = [core.Finding("", "nobody", f"its line cannot be read: {record.broken}")]
        elif task in told_to_wait:
            findings = [core.Finding("", "wait", f"not asked, since another of its task was: {told_to_wait[task]}")]
        else:
            asks, rules = (found.on_doubt, tuple(found.rules)) if isinstance(found, Guard) else (found, ())
            answer = targets.answers(None if isinstance(asks, str) else asks)
            findings = core.settle(
                ledger, record, answer, _dump(record), skip=set(), hide=hide, actor=actor, rules=rules
            )
        for finding in findings or [core.Finding("", "nobody", "none of its calls is known to the ledger")]:
            why = found if finding.word == "nobody" and finding.call and isinstance(found, str) else finding.why
            if finding.word == "wait":
                told_to_wait.setdefault(task, why)
            asked.append({"record": str(record.identity), "call": finding.call, "outcome": finding.word, "why": why})
    settled = sum(line["outcome"] in ("happened", "did_not_happen", "submitted") for line in asked)
    lines = [f"{line['record']} {line['call']}: {line['outcome']} ({line['why']})" for line in asked]
    said = f"{len(asked)} in doubt, {settled} settled." if asked else "Nothing is in doubt."
    return {"said": "\n".join((said, *lines)), "asked": asked, "settled": settled}


def _in_doubt(ledger: Ledger, scope: Mapping[str, str | bool | None]) -> Iterator[Record]:
    after = 0
    while page := ledger.list(state="in_doubt", after=after, **scope):  # type: ignore[arg-type]
        yield from page
        after = page[-1].id


def _dump(record: Record) -> Callable[[Any], Result]:
    return lambda value: stored(codec.dump, value) if record.store_result == "all" else Result(None)


# -- comparing ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class VendorEffect:
    """One effect as the vendor lists it. It has a ``key``, a ``reference``, or both.

    :param key: the idempotency key that it was made under.
    :param reference: the vendor's own name for it.
    :param at: when, by the vendor's clock; ``None`` = within the time that was asked for.
    """

    key: str = ""
    reference: str = ""
    at: datetime | None = None

    def __str__(self) -> str:
        return self.reference or self.key


SLACK = timedelta(hours=1)
"""By which the vendor's list is taken wider than the ledger's span: clocks differ, and a call takes its time."""


def compare(
    ledger: Ledger,
    effects: Iterable[VendorEffect],
    begin: datetime,
    end: datetime,
    *,
    namespace: str | None = None,
    dag_id: str | None = None,
) -> dict[str, list[Data]]:
    """Where the ledger's calls in a span of time and the vendor's effects differ, by kind:

    ``effect_missing`` the ledger says done, the vendor has nothing · ``effect_denied`` the ledger says that it did not
    happen, the vendor has it · ``effect_twice`` the vendor has more than one · ``effect_without_line`` the vendor has
    it, the ledger nothing · ``in_doubt`` nobody knows yet, with what the vendor has.

    :param effects: of the span, and of :data:`SLACK` before and after it.
    """
    listed = list(effects)
    by_name: dict[tuple[str, str], list[int]] = defaultdict(list)
    for number, effect in enumerate(listed):
        if not effect.key and not effect.reference:
            raise PlanningError("The listing gave an effect with neither key nor reference, which nothing can match.")
        for kind, name in (("key", effect.key), ("reference", effect.reference)):
            if name:
                by_name[kind, name].append(number)
    known: set[int] = set()
    report: dict[str, list[Data]] = {kind: [] for kind in KINDS}
    for record_id, identity, call in ledger.lines(
        begin - 2 * SLACK, end + 2 * SLACK, namespace=namespace, dag_id=dag_id
    ):
        found = sorted({number for name in _names(ledger, identity, call) for number in by_name[name]})
        known.update(found)
        kind = _kind(call, len(found))
        judged = call.intent_at is not None and begin <= call.intent_at < end
        if kind and judged:
            line = {"record_id": record_id, "record": str(identity), "generation": call.generation, "call": call.name}
            report[kind].append({**line, "vendor": [str(listed[number]) for number in found]})
    for number, effect in enumerate(listed):
        if number not in known and (effect.at is None or begin <= effect.at < end):
            report["effect_without_line"].append({"vendor": [str(effect)], **_shown(effect)})
    return report


KINDS = {
    "effect_missing": "the ledger says that it happened; the vendor has nothing of it",
    "effect_denied": "the ledger says that it did not happen; the vendor has it",
    "effect_twice": "the vendor has more than one",
    "effect_without_line": "the vendor has it; the ledger has nothing",
    "in_doubt": "nobody knows yet",
}


def _names(ledger: Ledger, identity: Identity, call: Call) -> list[tuple[str, str]]:
    """By what the vendor may list it: the keys of all its attempts, and the vendor's own name."""
    names = [
        ("key", keys.vendor_key(ledger.installation, identity, call.name, call.generation, attempt))
        for attempt in range(1, call.attempt + 1)
    ]
    return [*names, ("reference", call.external_id)] if call.external_id else names


def _kind(call: Call, found: int) -> str:
    if call.state in core.DOUBTFUL:
        return "in_doubt"
    if found > 1:
        return "effect_twice"
    if call.state is CallState.DONE or call.effect is Effect.APPLIED:
        return "" if found else "effect_missing"
    return "effect_denied" if found else ""


def _shown(effect: VendorEffect) -> Data:
    return {name: value.isoformat() if isinstance(value, datetime) else value for name, value in asdict(effect).items()}


Listing = Callable[[datetime, datetime], Iterable[VendorEffect]]


class ReconcileOperator(BaseOperator):
    """Compare the ledger with a vendor's list, both ways; first ask about what is in doubt.

    Meant for a DAG of its own, nightly. The report is the task's result and its XCom ``report``; every difference is
    booked once in the ledger (an event of its record), and people are told. Nothing is changed by a difference: a
    person looks at it (`airflow runguard explain`).

    :param listing: ``(begin, end) -> the vendor's effects`` of that time, as :class:`VendorEffect`; all of them.
    :param namespace, guarded_dag_id: only what is kept under this namespace, or was last worked on by this DAG. The
        listing must give the same part of the vendor's effects.
    :param look_back: how far back it looks. It stops ``max_call_time`` ago, since later calls may still be under way.
    :param on_doubt: a function that asks the vendor about what is in doubt there.
    :param on_difference: ``fail`` the task where there is any, or only ``report`` it.
    """

    def __init__(
        self,
        *,
        listing: Listing,
        namespace: str | None = None,
        guarded_dag_id: str | None = None,
        look_back: timedelta = timedelta(hours=26),
        on_doubt: Callable[[Any], Any] | None = None,
        on_difference: Literal["fail", "report"] = "fail",
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        if on_difference not in ("fail", "report"):
            raise PlanningError(f"on_difference={on_difference!r} is neither 'fail' nor 'report'.")
        self.listing, self.namespace, self.guarded_dag_id = listing, namespace, guarded_dag_id
        self.look_back, self.on_doubt, self.on_difference = look_back, on_doubt, on_difference

    def execute(self, context: Context) -> Data:
        options = settings()
        deployment = options.test_deployment if is_test() else options.deployment
        ledger = Ledger(connect_ledger(options), deployment=deployment)
        try:
            now: datetime = ledger.check()["now"]
            end = now - timedelta(seconds=options.max_call_time)
            begin = now - self.look_back
            asked: Data = {}
            actor = f"reconcile {self.dag_id}.{self.task_id}"
            if self.on_doubt is not None:
                where = {"namespace": self.namespace, "dag_id": self.guarded_dag_id}
                on_doubt = self.on_doubt
                asked = settle_all(ledger, lambda record: on_doubt, actor=actor, **where)
            found = compare(
                ledger,
                self.listing(begin - SLACK, end + SLACK),
                begin,
                end,
                namespace=self.namespace,
                dag_id=self.guarded_dag_id,
            )
            _book(ledger, found, actor)
            counts = {kind: len(lines) for kind, lines in found.items()}
            wrong = {kind: count for kind, count in counts.items() if count and kind != "in_doubt"}
            said = "; ".join(f"{count} × {KINDS[kind]}" for kind, count in wrong.items())
            if wrong:  # once a day
                task = f"{self.dag_id}.{self.task_id}"
                ledger.tell(0, end.toordinal(), "vendor_differs", f"{task}: {said}", occasion=task)
        finally:
            ledger.close()
        report = {
            "begin": begin.isoformat(),
            "end": end.isoformat(),
            "asked": asked.get("asked", [])[:LISTED],
            "counts": counts,
            **{kind: lines[:LISTED] for kind, lines in found.items()},
        }
        context["ti"].xcom_push(key="report", value=report)
        for kind in wrong:
            for line in found[kind][:LISTED]:
                self.log.error("RunGuard: %s: %s", KINDS[kind], line)
        if wrong and self.on_difference == "fail":
            raise AirflowFailException(f"The ledger and the vendor differ: {said}. The XCom `report` names them.")
        return report


def _book(ledger: Ledger, found: Mapping[str, list[Data]], actor: str) -> None:
    for kind, lines in found.items():
        for line in lines if kind != "in_doubt" else ():
            record_id, generation = line.get("record_id"), line.get("generation")
            detail = json.dumps({"call": line.get("call"), "vendor": line["vendor"]}, sort_keys=True)
            ledger.note_difference(record_id, generation, kind, actor=actor, reason=KINDS[kind], detail=detail)
