"""What an author may say about one guarded task: :class:`Guard`, the settings object.

Checked when the DAG is parsed, so that a wrong word is an import error and not a surprise at night. Unset times come
from ``[runguard]``. Imports nothing heavy and opens nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, ClassVar, Literal, Self, TypedDict

from airflow_runguard.config import settings
from airflow_runguard.core.errors import PlanningError
from airflow_runguard.core.failures import Family, Rule
from airflow_runguard.core.record import resent_within
from airflow_runguard.series import Previous, Series

Seconds = float | timedelta
DEPTHS = ("observe", "ledger", "lease", "auto")

ON_DOUBT = (
    "This task is one body in which any error may come after the effect, so it must say what then: "
    "on_doubt='ask' (the task parks and a person is asked), on_doubt='replay' (repeat it; hand the vendor its key, "
    "{{ guard.idempotency_key }}, so that twice is once), "
    "or on_doubt=a function that asks the vendor. Or make the calls explicit: take `guard` as the first parameter and "
    "wrap the request in guard.call."
)


class GuardOptions(TypedDict, total=False):
    """The options of :class:`Guard` as keyword arguments of the decorator."""

    key: str | Callable[[Any], str] | None
    namespace: str | None
    payload: Sequence[str] | Callable[[Any], Mapping[str, Any]] | None
    calls: Literal["body", "explicit"] | None
    on_doubt: Literal["ask", "replay"] | Callable[[Any], Any] | None
    on_busy: Literal["wait", "fail", "skip"]
    store_result: Literal["all", "digest", "none"]
    single_request: bool | str
    allow_no_call: bool
    depth: Literal["observe", "auto", "ledger", "lease"] | None
    lease: Seconds | None
    max_hold: Seconds | None
    max_call_time: Seconds | None
    max_claims: int | None
    key_lifetime: Seconds | None
    quota: str | None
    max_pause: Seconds | None
    max_pauses: int | None
    rules: Sequence[Rule | Family]
    amount: str | Callable[[Any], Any] | None
    currency: str | None
    ask_timeout: Seconds | None
    series: str | Series | None
    wait_for_previous: bool | Previous


@dataclass(frozen=True, repr=False)
class Guard:
    """How one task is guarded.

    :param key: names the piece of business work: a template in which the task's arguments are ``args``, or a function
        of them. Default: the run's partition or logical date. Mapped tasks must say it.
    :param namespace: default ``<dag_id>.<task_id>``; naming one shares records between tasks on purpose.
    :param payload: which arguments (or fields) are the order, or a function of them. Default: all arguments.
    :param calls: ``body`` = the function is one call; ``explicit`` = it makes its calls with ``guard.call``. Default:
        ``explicit`` for a function whose first parameter is ``guard``.
    :param on_doubt: who settles what nobody knows: ``ask`` a person, ``replay`` under the same vendor key, or a
        function ``(doubt) -> Applied(result) | NotApplied() | StillUnknown(reason)``, sync or async, that asks the
        vendor (ready-made ones: ``reconcilers.py``).
    :param on_busy: while another holder works on it: ``wait`` without a worker slot, ``fail``, or ``skip``.
    :param store_result: ``all``; ``digest`` or ``none`` for results that must not be kept (a replay then fails with
        ``ResultNotStored``, or gives ``None``).
    :param single_request: the body makes exactly one request, so that its error speaks for it. Of a body that defers:
        the name of the resume method that makes it, where nothing is sent before.
    :param allow_no_call: an explicit body may return without any call.
    :param depth: ``observe`` (book, warn, block nothing), ``ledger``, ``lease`` (ledger and Redis), ``auto``. Default:
        the DAG's ``default_args={"depth": …}``, else ``[runguard] depth``.
    :param lease, max_hold, max_call_time, key_lifetime: seconds or timedelta; see ``[runguard]``.
    :param max_claims: so many claims without any outcome are poison.
    :param quota: the vendor allowance that all tasks naming it share (``stripe``); a template may name the account.
        When the vendor says "too many", its gate closes for all of them.
    :param max_pause, max_pauses: how long in all, and how often, it waits for a quota without progress; then a person.
    :param rules: rules or families of one's own (``core/failures/rule.py``), asked before all others about what this
        task's calls end in.
    :param series: the recurring job that this is a run of: a name, or a :class:`Series` with its order. Default: this
        task, ordered by partition or logical date.
    :param wait_for_previous: begin only when the previous run of the series is complete, and no other of it is at work:
        ``True``, or a :class:`Previous` that says what is wanted of it.
    :param ask_timeout: how long a person is waited for before the task fails (the question stays open in the ledger).
    :param amount: what is at stake, for people who look at doubts: a template or a function of the arguments that gives
        a number. ``currency`` is its unit (``EUR``), likewise a template.
    """

    key: str | Callable[[Any], str] | None = None
    namespace: str | None = None
    payload: Sequence[str] | Callable[[Any], Mapping[str, Any]] | None = None
    calls: Literal["body", "explicit"] | None = None
    on_doubt: Literal["ask", "replay"] | Callable[[Any], Any] | None = None
    on_busy: Literal["wait", "fail", "skip"] = "wait"
    store_result: Literal["all", "digest", "none"] = "all"
    single_request: bool | str = False
    allow_no_call: bool = False
    depth: Literal["observe", "auto", "ledger", "lease"] | None = None
    lease: Seconds | None = None
    max_hold: Seconds | None = None
    max_call_time: Seconds | None = None
    max_claims: int | None = None
    key_lifetime: Seconds | None = None
    quota: str | None = None
    max_pause: Seconds | None = None
    max_pauses: int | None = None
    rules: Sequence[Rule | Family] = ()
    amount: str | Callable[[Any], Any] | None = None
    currency: str | None = None
    ask_timeout: Seconds | None = None
    series: str | Series | None = None
    wait_for_previous: bool | Previous = False

    _CALLS: ClassVar[tuple[str | None, ...]] = (None, "body", "explicit")

    def __new__(cls, *_: Any, **options: Any) -> Self:
        known = [option.name for option in fields(cls)]
        for name in options:
            if name not in known:
                import difflib  # only a slip needs it

                near = difflib.get_close_matches(name, known, 1)
                hint = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(known)}."
                raise PlanningError(f"A guard has no option {name!r}.", hint)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        words = {
            "calls": self._CALLS,
            "on_busy": ("wait", "fail", "skip"),
            "store_result": ("all", "digest", "none"),
            "depth": (None, *DEPTHS),
        }
        for name, allowed in words.items():
            if getattr(self, name) not in allowed:
                shown = ", ".join(repr(word) for word in allowed if word)
                raise PlanningError(f"{name}={getattr(self, name)!r} is none of {shown}.")
        if not (self.on_doubt in (None, "ask", "replay") or callable(self.on_doubt)):
            raise PlanningError(f"on_doubt={self.on_doubt!r} is neither 'ask', 'replay' nor a function.")
        if self.key is not None and not callable(self.key) and not (isinstance(self.key, str) and self.key):
            raise PlanningError(f"key={self.key!r} is neither a template nor a function.")
        if self.namespace is not None and not (isinstance(self.namespace, str) and self.namespace):
            raise PlanningError(f"namespace={self.namespace!r} is no name.")
        if isinstance(self.payload, str):
            raise PlanningError("payload is one text.", "Give a list of names: payload=['…'].")
        for name in ("quota", "currency"):
            if getattr(self, name) is not None and not (isinstance(getattr(self, name), str) and getattr(self, name)):
                raise PlanningError(f"{name}={getattr(self, name)!r} is neither a name nor a template of one.")
        object.__setattr__(self, "rules", checked_rules(self.rules))
        if not isinstance(self.single_request, bool | str) or self.single_request == "":
            raise PlanningError(
                f"single_request={self.single_request!r} is neither True, False nor the name of a resume method."
            )
        if self.amount is not None and not callable(self.amount) and not (isinstance(self.amount, str) and self.amount):
            raise PlanningError(f"amount={self.amount!r} is neither a template nor a function.")
        if not (
            self.series is None or isinstance(self.series, Series) or (isinstance(self.series, str) and self.series)
        ):
            raise PlanningError(f"series={self.series!r} is neither a name nor a Series.")
        if not isinstance(self.wait_for_previous, bool | Previous):
            raise PlanningError(f"wait_for_previous={self.wait_for_previous!r} is neither True, False nor a Previous.")
        for name in ("max_claims", "max_pauses"):
            if getattr(self, name) is not None and type(getattr(self, name)) is not int:
                raise PlanningError(f"{name}={getattr(self, name)!r} is not a whole number.")
        for name in (
            "lease",
            "max_hold",
            "max_call_time",
            "key_lifetime",
            "max_claims",
            "max_pause",
            "max_pauses",
            "ask_timeout",
        ):
            value = getattr(self, name)
            number = value.total_seconds() if isinstance(value, timedelta) else value
            if number is None:
                continue
            if isinstance(number, bool) or not isinstance(number, int | float) or not 0 < number < 10**9:
                raise PlanningError(
                    f"{name}={value!r} must be positive and below 10^9 (seconds or a timedelta; a number)."
                )
        if self.on_doubt == "replay" and (self.key_lifetime or self.max_call_time):
            self._check_resending()

    def _check_resending(self) -> None:
        """What ``[runguard]`` alone says is judged when the task runs, as all of it is."""
        try:
            options = settings()
        except PlanningError:
            return
        resent_within(
            seconds(self.key_lifetime, options.key_lifetime), seconds(self.max_call_time, options.max_call_time)
        )

    def __repr__(self) -> str:
        """The same in every process: Airflow compares it to notice that a DAG changed."""
        said = {option.name: getattr(self, option.name) for option in fields(self)}
        shown = (
            f"{name}={getattr(value, '__qualname__', None) or repr(value)}"
            for name, value in {**said, "rules": tuple(rule.name for rule in self.rules)}.items()
            if value != type(self).__dataclass_fields__[name].default
        )
        return f"{type(self).__name__}({', '.join(shown)})"


class BatchOptions(GuardOptions, total=False):
    """The options of :class:`BatchGuard` as keyword arguments of the decorator."""

    item_key: str | Callable[[Any], Any] | None
    concurrency: int
    bulk: int | None
    accept: Any
    allow_empty: bool
    stop_after: int | None
    stop_after_share: float | None
    allow_partial: bool


@dataclass(frozen=True, repr=False)
class BatchGuard(Guard):
    """How a batch is guarded: a task whose function is called for each item of a list.

    What :class:`Guard` says of a task holds for the batch as a whole; these are the item's. An item's function makes
    one request, so that its error speaks for the item.

    :param item_key: names an item by its content: a field (``"id"``), a template (``"{{ item.id }}/{{ item.month }}"``)
        or a function of the item. Never its position.
    :param payload: which fields of an item are its order, or a function of it. Default: all of it.
    :param concurrency: so many calls at once at most (threads; for an async function coroutines).
    :param bulk: the function gets a dict of up to so many items by key, and returns a dict of outcomes by key.
    :param accept: a function of a result that raises or returns ``False`` where it is none, or a pydantic model.
    :param allow_empty: ``None`` and empty values may be results.
    :param stop_after, stop_after_share: after so many failed or doubtful items (of all) no other is begun.
    :param allow_partial: the task ends as success, marked partial, although some items failed or are in doubt.
    :param on_doubt: ``ask`` (default), ``replay``, or a function of one doubt; a function whose parameter is named
        ``doubts`` is given a list of them and returns answers by ``doubt.call.name``.
    :param allow_no_call: an empty list is work done; otherwise it is an error.
    """

    calls: Any = "batch"
    item_key: str | Callable[[Any], Any] | None = None
    concurrency: int = 1
    bulk: int | None = None
    accept: Any = None
    allow_empty: bool = False
    stop_after: int | None = None
    stop_after_share: float | None = None
    allow_partial: bool = False

    _CALLS: ClassVar[tuple[str | None, ...]] = ("batch",)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (callable(self.item_key) or (isinstance(self.item_key, str) and self.item_key)):
            raise PlanningError(
                "The batch does not say item_key, so nothing names its items.",
                "Name the field that identifies an item (item_key='id'), or give a template or a function of the item.",
            )
        for name in ("concurrency", "bulk", "stop_after"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or not 0 < value <= 10_000):
                raise PlanningError(f"{name}={value!r} is not a whole number from 1 to 10000.")
        share = self.stop_after_share
        if share is not None and (isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1):
            raise PlanningError(f"stop_after_share={share!r} is no share of the items (0 to 1).")
        if self.accept is not None and not callable(self.accept):
            raise PlanningError(f"accept={self.accept!r} is neither a function nor a model.")
        if self.single_request:
            raise PlanningError("single_request is always so of an item.", "Leave it out.")


def checked_rules(rules: Any) -> tuple[Rule | Family, ...]:
    """:raises PlanningError: something of it is no rule, or cannot be looked up by its content."""
    given = tuple(rules) if isinstance(rules, Sequence) and not isinstance(rules, str) else (rules,)
    for rule in given:
        if not isinstance(rule, Rule | Family):
            raise PlanningError(
                f"rules has {rule!r}, which is neither a Rule nor a Family.",
                "Write rules=[…] with the words of airflow_runguard.core.failures.rule (docs/classifier.md).",
            )
        try:
            hash(rule)
        except TypeError as error:
            raise PlanningError(f"The rule {rule.name!r} cannot be looked up: {error}.", "Use frozenset().") from error
    return given


def seconds(value: Seconds | None, default: float) -> float:
    if value is None:
        return default
    return value.total_seconds() if isinstance(value, timedelta) else float(value)


def check_mapped(guard: Guard | None, cls: type) -> None:
    if guard is None or guard.key is None:
        raise PlanningError(
            f"A mapped {getattr(cls, 'custom_operator_name', cls.__name__)} has no key of its own: map_index is a "
            "position, which another run gives to other work.",
            "Name the work by its content: key='invoice/{{ args.invoice.id }}' (of an operator: guard=Guard(key=…)).",
        )
