"""One entry of one task instance into the guard: Airflow's context in, Airflow's exceptions out.

Only this room knows what Airflow's control-flow exceptions mean to a record, and which of them a refusal becomes. The
guard itself is ``core/guard.py``.
"""

from __future__ import annotations

import logging
import os
import random
import socket
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast

from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowRescheduleException,
    AirflowSkipException,
    AirflowTaskTimeout,
    DownstreamTasksSkipped,
    TaskAwaitingInput,
    TaskDeferred,
)

from airflow_runguard import codec, deferrals, human, jobs, measures, sqlguard
from airflow_runguard.config import Settings, connect_ledger, redis_client, settings
from airflow_runguard.core import guard as core
from airflow_runguard.core import observe, payloads
from airflow_runguard.core.errors import LedgerUnavailable, NotApplied, PlanningError, RunGuardError
from airflow_runguard.core.ledger import Ledger
from airflow_runguard.core.record import Holder, Identity, Order, Record, State
from airflow_runguard.masking import Hide, hider
from airflow_runguard.options import DEPTHS, Guard, seconds
from airflow_runguard.ordering import VENDOR_KEY, Ordering, deployment_of, hiding, is_test

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.definitions.context import Context

SHORTEST_WAIT = 15.0
"""Seconds. A task that comes back within about 6 s can be failed by the scheduler although it runs (3.3.2)."""
LONGEST_LOOK = 60.0
"""Seconds after which a busy record is looked at again, whatever its lease says."""
JITTER = 5.0
OBSERVE_TIMEOUT = 0.5
"""Seconds that an observed task waits for the ledger in all, where ``[runguard] observe_timeout`` cannot be read."""
WATCHED = 30.0
"""Seconds for which a triggerer's sign of life counts."""
HAND_OVER_MARGIN = 600.0
"""Seconds beyond the deadline of a deferral within which the same task instance may still come back."""


PUT_OFF = "_guard_put_off"
"""The method with which a deferred operator comes back that the guard made wait before it could go on."""


class Entry(Ordering):
    """One entry of one task instance into the guard: Airflow's context in, Airflow's exceptions out."""

    def __init__(
        self,
        operator: BaseOperator,
        guard: Guard,
        context: Context,
        resumes: tuple[str, Any] | None = None,
        waited_since: str | None = None,
        asked_since: str | None = None,
        asked: human.Asked | None = None,
        answer: human.Answer | None = None,
        starts_anew: bool = False,
    ) -> None:
        """
        :param resumes: the method and arguments with which a deferred operator goes on.
        :param waited_since: when the guard first made it wait (ISO 8601).
        :param asked_since: when a person was first asked about it (ISO 8601).
        :param asked: what its form told of.
        :param answer: what the person said in Airflow's form.
        :param starts_anew: it goes on by deferring to the trigger once more that came back with the quota.
        """
        super().__init__(operator, guard, context)
        self.resumes = resumes
        self.waited_since = datetime.fromisoformat(waited_since) if waited_since else None
        self.asked_since = datetime.fromisoformat(asked_since) if asked_since else None
        self.asked = asked
        self.given = answer
        self.starts_anew = starts_anew
        self.began = self.deferrable = False
        self.xcoms: dict[str, Any] = {}
        self.returned: list[Any] = []
        """What the function of a Python operator returned, before Airflow did anything else with it."""

    def run(self, start: Callable[[], Any], resume: Callable[[], Any] | None = None) -> Any:
        """
        :param start: the operator's work from its start.
        :param resume: how a deferred operator goes on.
        """
        if self._depth() == "observe":
            return self._observe(start, resume)
        try:
            options = settings()
            order = self.order(options)
        except PlanningError as error:
            self.say(logging.ERROR, str(error))
            raise AirflowFailException(str(error)) from error
        if not options.enabled:
            off = "[runguard] enabled = false here: nothing is called until it is true again, and nothing unguarded."
            return self.answer(core.Waiting(off, limited=False), options, start)
        try:
            with ExitStack() as opened:
                ledger = Ledger(connect_ledger(options), deployment=order.identity.deployment)
                opened.callback(ledger.close)
                client = redis_client(options, self._depth())
                if client is not None:
                    opened.callback(client.close)
                leases, work = core.ready(ledger, client), self.work(order, start, hiding(options), resume)
                early = self._take(ledger, order) == "too_early"
                how = self._aftermath(ledger, work, core.run(ledger, leases, work), options, early)
                self.deferrable = self._has_triggerer(ledger, options)
        except LedgerUnavailable as error:
            how = core.Waiting(f"{error.what} No call was made.")
        except RunGuardError as error:
            self.say(logging.ERROR, str(error))
            # A Connection may be missing only because the API server did not answer: Airflow's own retries apply.
            raise AirflowException(str(error)) from error
        measures.count(how, {"dag_id": self.ti.dag_id, "task_id": self.ti.task_id})
        return self.answer(how, options, start)

    # -- observing ---------------------------------------------------------------------------------------------------

    def _depth(self) -> str | None:
        """What the author said of this task, else of its DAG (``default_args={"depth": …}``), else of all."""
        return self.guard.depth or depth_of_dag(self.operator) or _configured_depth()

    def _observe(self, start: Callable[[], Any], resume: Callable[[], Any] | None) -> Any:
        """Depth ``observe``: whatever is wrong with the key, the options or the ledger, the body runs.

        :raises AirflowFailException: ``{{ guard.idempotency_key }}`` would go out as one key for every customer.
        """
        try:
            self._check_vendor_key()
        except PlanningError as error:
            raise AirflowFailException(str(error)) from error
        patience = OBSERVE_TIMEOUT
        try:
            options = settings()
            patience = options.observe_timeout
            order, hide = self.order(options), hiding(options)
            connect = connect_ledger(options)

            def ledger() -> Ledger:
                return Ledger(connect, deployment=order.identity.deployment)

        except RunGuardError as error:
            trouble = error
            order = Order(identity=Identity("observed", "unnamed", str(self.ti.id)), payload=payloads.payload({}))
            hide = hider("", lambda value: value)

            def ledger() -> Ledger:
                raise trouble

        bystander = observe.Bystander(ledger, patience)
        try:
            value = observe.run(self.work(order, start, hide, resume), bystander, self.say)
        finally:
            bystander.close()
        return value.value if isinstance(value, codec.Answer) else value

    # -- what the ledger and people hear of it -------------------------------------------------------------------

    def _take(self, ledger: Ledger, order: Order) -> str:
        """Book what a person said in the form of this task; the claim that follows acts on it."""
        if self.given is None or self.asked is None:
            return ""
        record = ledger.get(order.identity)
        verdict = "missing" if record is None else human.apply(ledger, record, self.given, self.asked)
        ledger.close_question(str(self.ti.id))
        if verdict == "ok":
            self.asked_since = None
            self.say(logging.INFO, f"{self.given.actor} answered: {self.given.word.replace('_', ' ')}.")
        elif verdict == "too_early":
            self.say(logging.WARNING, f"{order.identity} may still arrive at the vendor; asking again when it cannot.")
        elif verdict != "not_in_doubt":  # else somebody was first: the claim tells what they said
            self.say(logging.WARNING, f"The answer could not be taken ({verdict}). Asking again.")
        return verdict

    def _aftermath(self, ledger: Ledger, work: core.Work, how: core.How, options: Settings, early: bool) -> core.How:
        """What follows from how it ended, while the ledger is at hand: people are told, counted for, and asked."""
        with suppress(LedgerUnavailable):
            if isinstance(how, core.Done) and how.replayed:
                ledger.count_replay(work.order.identity)
            if isinstance(how, core.Ended | core.Waiting) and how.tells:
                self._tell(ledger, work, how)
        if not isinstance(how, core.InDoubt):
            return how
        goes_on = self._goes_on(ledger, work.order)
        if goes_on is not None or is_test():
            return goes_on or how
        if how.seconds is not None and (how.who == "reconcile" or early):
            return core.Waiting(how.message, how.seconds)
        return how if how.who == "replay" else self._ask(ledger, work, how, options)

    @staticmethod
    def _tell(ledger: Ledger, work: core.Work, how: core.Ended | core.Waiting) -> None:
        """Each entry that is refused as stale is an occasion of its own."""
        record, text = ledger.get(work.order.identity), how.message if isinstance(how, core.Ended) else how.reason
        if isinstance(how, core.Ended) and how.about:
            record = next((one for one in ledger.find(how.about) if str(one.identity) == how.about), record)
        record_id, generation = (record.id, record.generation) if record else (0, 0)
        occasion = work.holder.nonce if how.tells == "stale_writer" else ""
        ledger.tell(record_id, generation, how.tells, text, occasion=occasion)

    @staticmethod
    def _goes_on(ledger: Ledger, order: Order) -> core.Waiting | None:
        """Where all that is in doubt are jobs that the next claim attaches to, nobody has to be asked: come back."""
        record = ledger.get(order.identity)
        if record is None or record.state is not State.IN_DOUBT or record.broken or record.claims >= order.max_claims:
            return None
        if record.calls == "batch":  # an item is no job
            return None
        lost = ledger.check()["unknown_before"]
        if lost is not None and record.known_since < lost:  # nothing is attached to before a person has spoken
            return None
        calls = human.doubtful(ledger, record)
        if not calls or not all(call.attachable for call in calls):
            return None
        jobs = ", ".join(call.external_id for call in calls)
        what = (
            f"{order.identity} goes on at the vendor (job {jobs}). Nothing is sent again, this task comes back to it."
        )
        return core.Waiting(what, core.SOON, record_id=record.id)

    def _ask(self, ledger: Ledger, work: core.Work, how: core.InDoubt, options: Settings) -> core.How:
        """Park with a form about the record; give up where nobody answered for too long."""
        now = ledger.time_of_question(work.order.identity)
        record = ledger.get(work.order.identity)
        if record is None or record.state is not State.IN_DOUBT or record.broken:
            return core.Waiting(how.message, SHORTEST_WAIT)  # it was settled meanwhile: look again
        since = self.asked_since or now
        limit = seconds(self.guard.ask_timeout, options.ask_timeout)
        left = limit - (now - since).total_seconds()
        if left <= 0:
            reason = f"nobody answered within {limit:.0f} s; before that: {record.error}"
            ledger.give_up_asking(record.id, seen_fence=record.fence, actor=str(work.holder), reason=reason)
            return replace(how, message=f"Nobody answered within {limit:.0f} s. {how.message}", retry=False)
        if self._heard_late(ledger, work, record):
            return core.Waiting(f"{work.order.identity} was settled by an answer to an earlier try.", SHORTEST_WAIT)
        self.say(logging.WARNING, f"{how.message} Asking a person in Airflow (Required Actions).")
        human.present(self.ti, human.question(ledger, record, now))
        ledger.ask(record, work.holder, now)  # after it: from here on an answer counts, and there is no old one
        human.park(since, human.Asked(record.fence, now), timedelta(seconds=left))

    def _heard_late(self, ledger: Ledger, work: core.Work, record: Record) -> bool:
        """Whether a person had answered an earlier try of this task instance, which did not hear it."""
        mine = str(self.ti.id)
        standing = [asked for asked in ledger.questions(record.id) if asked["ti_id"] == mine and asked["stands"]]
        if self.given is not None or not standing:
            return False
        self.given = human.left_behind(self.ti)
        self.asked = human.Asked(standing[0]["fence"], standing[0]["at"])
        return self._take(ledger, work.order) in ("ok", "not_in_doubt")

    def _has_triggerer(self, ledger: Ledger, options: Settings) -> bool:
        """Whether a triggerer watches this ledger and has room for one more wait."""
        with suppress(LedgerUnavailable):
            waits = ledger.watched(WATCHED)
            return waits is not None and waits < options.max_triggers
        return False

    # -- the work --------------------------------------------------------------------------------------------------

    def work(
        self, order: Order, start: Callable[[], Any], hide: Hide, resume: Callable[[], Any] | None = None
    ) -> core.Work:
        ti = self.ti
        holder = Holder(
            nonce=uuid.uuid4().hex,
            ti_id=str(ti.id),
            dag_id=ti.dag_id,
            task_id=ti.task_id,
            run_id=ti.run_id,
            try_number=ti.try_number,
            map_index=-1 if ti.map_index is None else ti.map_index,
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        return core.Work(
            order=order,
            holder=holder,
            body=lambda guard: self._body(guard, start, resume),
            dump=codec.dump,
            load=codec.load,
            signal=self._signal,
            reconcile=sqlguard.answers(self.guard.on_doubt),
            transaction=lambda conn_id: sqlguard.SqlTransaction(conn_id, tuple(self.guard.rules)),
            hide=hide,
            rules=tuple(self.guard.rules),
            single_request=bool(self.guard.single_request),
            requests_here=self.resumes is not None and self.guard.single_request == self.resumes[0],
            allow_no_call=self.guard.allow_no_call,
            watch=measures.watch,
        )

    def _body(self, guard: core.GuardContext, start: Callable[[], Any], resume: Callable[[], Any] | None = None) -> Any:
        if guard.body_is_call:
            for name in self.operator.template_fields:
                rendered = getattr(self.operator, name, None)
                setattr(self.operator, name, _replaced(rendered, guard.idempotency_key))
        if self.resumes is not None and self.resumes[0] == "__fail__" and not guard.reentered:
            raise NotApplied("the trigger that it waited with failed before it began")
        # Under a new claim of a body nothing is under way that it could go on with: it is proven not to have happened,
        # may be repeated, or is a job that is attached to.
        observed = isinstance(guard, observe.ObservedContext)
        goes_on = resume is not None and (observed or guard.reentered or not guard.body_is_call)
        body = resume if resume is not None and goes_on else start
        self.began = True
        running = jobs.replaced(self.operator, "_guard_context", guard)  # to be stopped by it, and to render with
        with running, self._recorded_xcoms(), self._recorded_answer(guard), self._recorded_return():
            try:
                if self.adapter.job is not None and guard.body_is_call and goes_on:
                    with guard.jobs.following(guard.jobs.submitted()):
                        value = body()
                elif self.adapter.job is not None and guard.body_is_call:
                    value = jobs.run(self.adapter.job, self.operator, guard, self.context, body)
                else:
                    value = body()
            except BrokenPipeError:
                decides = getattr(self.operator, "inherits_from_skipmixin", False)  # and that comes after
                if not self.returned or decides:
                    raise
                # The supervisor is gone, and with it the pipe that Airflow logs "Done" to: the function had returned.
                value = self.returned[-1]
            except TaskDeferred as deferral:
                if getattr(deferral.trigger, "end_from_trigger", False) and not observed:
                    # The task would end without coming back, and nobody could book its outcome: it may not begin.
                    raise PlanningError(
                        "The operator deferred to a trigger that ends the task by itself (end_from_trigger).",
                        "Switch that off, or do not guard this operator.",
                    ) from None
                if self.guard.single_request and guard.body_is_call and not observed:
                    deferrals.noted(deferral, hiding(settings()))
                raise
            except Exception as error:
                if goes_on and self.resumes is not None and not observed:
                    arguments, note = deferrals.taken(self.resumes[1])
                    told = (arguments or {}).get("event")
                    self.starts_anew = bool(note) and deferrals.tells(told, error, guard.told_to_wait)
                raise
        return codec.Answer(value, self.xcoms) if self.xcoms and not isinstance(value, BaseException) else value

    @contextmanager
    def _recorded_return(self) -> Iterator[None]:
        """Note what the function of a Python operator returned."""
        run = getattr(self.operator, "execute_callable", None)
        if run is None:
            yield
            return

        def execute_callable() -> Any:
            self.returned.append(run())
            return self.returned[-1]

        with jobs.replaced(self.operator, "execute_callable", execute_callable):
            yield

    @contextmanager
    def _recorded_answer(self, guard: core.GuardContext) -> Iterator[None]:
        """Note when an operator that is one request has its answer."""
        name = self.adapter.takes_answer
        if not name:
            yield
            return
        take = getattr(self.operator, name)

        def taken(*args: Any, **kwargs: Any) -> Any:
            if not self.adapter.checks_answer(self.operator):
                guard.read(kwargs["response"] if "response" in kwargs else args[-1])
            guard.answered = True
            return take(*args, **kwargs)

        with jobs.replaced(self.operator, name, taken):
            yield

    @contextmanager
    def _recorded_xcoms(self) -> Iterator[None]:
        """Remember what the task pushes itself, for the replay: Airflow deletes a task's XComs when it runs again."""
        push = self.ti.xcom_push

        def xcom_push(key: str, value: Any, **kwargs: Any) -> None:
            push(key=key, value=value, **kwargs)
            self.xcoms[key] = value

        with jobs.replaced(self.ti, "xcom_push", xcom_push):
            yield

    # -- out -------------------------------------------------------------------------------------------------------

    def answer(self, how: core.How, options: Settings, start: Callable[[], Any]) -> Any:
        match how:
            case core.Done(value=value, replayed=replayed):
                answer = value if isinstance(value, codec.Answer) else codec.Answer(value)
                if replayed:
                    self.say(logging.INFO, "Done before: nothing was called, the stored result is given back.")
                    self._restore(answer)
                    return self._decided(answer, start)
                return answer.value
            case core.Waiting():
                self.wait(how, options)
            case core.Passed(signal=signal):
                raise signal
            case core.Ended():
                self.end(how)

    def _restore(self, answer: codec.Answer) -> None:
        """The rest of what the first time gave: its own XComs, and the decision that it raised."""
        for key, value in answer.xcoms.items():
            self.ti.xcom_push(key=key, value=value)
        if answer.raised == "skip":
            raise AirflowSkipException(answer.value)
        if answer.raised == "skip_downstream":
            tasks = [tuple(task) if isinstance(task, list) else task for task in answer.value]
            raise DownstreamTasksSkipped(tasks=tasks)  # type: ignore[no-untyped-call]

    def _decided(self, answer: codec.Answer, start: Callable[[], Any]) -> Any:
        """The stored value; of a branch or short circuit what follows from it, since a person may have given it."""
        if self._decides():
            with jobs.replaced(self.operator, "execute_callable", lambda: answer.value):
                return start()
        return answer.value

    def _decides(self) -> bool:
        """Whether it is a branch or short circuit that only asks its function and decides: all of it is Airflow's."""
        if not (
            getattr(self.operator, "inherits_from_skipmixin", False) and hasattr(self.operator, "execute_callable")
        ):
            return False
        own = (vars(kind)["execute"].__module__ for kind in type(self.operator).__mro__ if "execute" in vars(kind))
        return all(module.startswith(("airflow.", "airflow_runguard.")) for module in own)

    def wait(self, how: core.Waiting, options: Settings) -> None:
        """Come back later without a worker slot and without spending a retry."""
        if how.busy and self.guard.on_busy == "skip":
            raise AirflowSkipException(how.reason)
        if how.busy and self.guard.on_busy == "fail":
            raise AirflowFailException(how.reason)
        first = self.waited_since or self.ti.get_first_reschedule_date(self.context) or datetime.now(UTC)
        waited = (datetime.now(UTC) - first).total_seconds()
        if how.limited and waited > options.busy_wait_limit:
            raise AirflowFailException(
                f"{how.reason} Waited {waited:.0f} s, longer than [runguard] busy_wait_limit. No call was made; "
                "clear the task when the reason is gone."
            )
        jitter = random.uniform(0, JITTER)  # noqa: S311 - spreads load, keeps no secret
        delay = LONGEST_LOOK if how.seconds is None else how.seconds
        if how.busy or how.place is not None:
            delay = min(delay, LONGEST_LOOK)
        delay = max(delay, SHORTEST_WAIT) + (0 if how.record_id and not how.busy else jitter)
        now = datetime.now(UTC)
        until = now + timedelta(seconds=delay)
        if self.deferrable or self.resumes is not None:
            # Also where no triggerer was heard of: a reschedule would begin a deferred task's work from its start.
            from airflow_runguard.triggers import PreviousTrigger, ResumeTrigger

            not_before = (now + timedelta(seconds=SHORTEST_WAIT + jitter)).isoformat()
            self.say(logging.WARNING, f"{how.reason} Waiting in the triggerer, without a worker.")
            keeps = how.keeps_place or not self.began
            method, kwargs = self.resumes if self.resumes is not None and keeps else (None, None)
            raise TaskDeferred(
                trigger=PreviousTrigger(deployment_of(options), asdict(how.place), not_before)
                if how.place is not None
                else ResumeTrigger(
                    deployment_of(options),
                    how.record_id,
                    None if how.record_id and how.seconds is None else until.isoformat(),
                    not_before,
                ),
                method_name=PUT_OFF,
                kwargs={
                    "method": method,
                    "kwargs": kwargs,
                    "since": first.isoformat(),
                    "anew": method is not None and self.starts_anew,
                },
            )
        self.say(logging.WARNING, f"{how.reason} Waiting; looking again in {delay:.0f} s.")
        raise AirflowRescheduleException(until)  # type: ignore[no-untyped-call]

    def end(self, how: core.Ended) -> None:
        error = how.error
        if how.skip:
            raise AirflowSkipException(how.message)
        self.say(logging.ERROR, how.message)
        if error is not None and not isinstance(error, Exception | AirflowTaskTimeout):
            raise error
        if not how.retry:
            raise AirflowFailException(how.message) from error
        if error is not None and not isinstance(error, RunGuardError):
            raise error
        raise AirflowException(how.message) from error

    def say(self, level: int, what: str) -> None:
        with suppress(OSError):  # the pipe of a killed supervisor: what is booked is booked
            self.operator.log.log(level, "RunGuard: %s", what)

    def _signal(self, error: BaseException) -> core.HandOver | core.Decision | None:
        """What Airflow's control-flow exceptions mean to the record: the one table."""
        match error:
            case TaskDeferred():
                anew = "its trigger came back with the quota, and is started anew" if self.starts_anew else ""
                return core.HandOver(self._deadline(error.timeout), anew)
            case TaskAwaitingInput():
                return core.HandOver(self._deadline(getattr(error, "timeout", None)))
            case AirflowRescheduleException():
                return core.HandOver((error.reschedule_date - datetime.now(UTC)).total_seconds() + HAND_OVER_MARGIN)
            case AirflowSkipException():
                return core.Decision(codec.Answer(str(error), self.xcoms, raised="skip"))
            case DownstreamTasksSkipped():
                if self.returned and self._decides():
                    # What follows from it is asked anew: the DAG may have other tasks by then.
                    return core.Decision(codec.Answer(self.returned[-1], self.xcoms, raised="decided"))
                return core.Decision(codec.Answer(list(error.tasks), self.xcoms, raised="skip_downstream"))
        return None

    def _deadline(self, timeout: timedelta | float | None) -> float:
        """How long a deferred holder is waited for: its own timeout and a margin, else ``max_hold``."""
        limit = seconds(self.guard.max_hold, settings().max_hold)
        return limit if timeout is None else min(seconds(timeout, limit) + HAND_OVER_MARGIN, limit)


def _replaced(value: Any, key: str) -> Any:
    """The value with the vendor key in place of its stand-in, at any depth of plain containers."""
    if isinstance(value, str):
        return value.replace(VENDOR_KEY, key)
    if type(value) in (list, tuple):
        return type(value)(_replaced(item, key) for item in value)
    if type(value) is dict:
        return {name: _replaced(item, key) for name, item in value.items()}
    return value


def depth_of_dag(operator: Any) -> str | None:
    """The depth that a DAG's ``default_args`` give to its guarded tasks.

    :raises PlanningError: it is no depth.
    """
    depth = ((operator.dag.default_args if operator.has_dag() else None) or {}).get("depth")
    if depth not in (None, *DEPTHS):
        raise PlanningError(f"depth={depth!r} in default_args is none of {', '.join(map(repr, DEPTHS))}.")
    return cast("str | None", depth)


def _configured_depth() -> str | None:
    try:
        return settings().depth
    except PlanningError:
        return None  # said where the options are needed
