"""What an author may say about one guarded task: :class:`Guard`, the settings object.

Checked when the DAG is parsed, so that a wrong word is an import error and not a surprise at night. Unset times come
from ``[runguard]``. Imports nothing heavy and opens nothing.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import timedelta
from typing import Any, Literal, TypedDict

from airflow_runguard.core.errors import PlanningError

Seconds = float | timedelta

ON_DOUBT = (
    "This task is one body in which any error may come after the effect, so it must say what then: "
    "on_doubt='ask' (the task fails and a person decides), on_doubt='replay' (repeat it under the same vendor key), "
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
    single_request: bool
    allow_no_call: bool
    depth: Literal["auto", "ledger", "lease"] | None
    lease: Seconds | None
    max_hold: Seconds | None
    max_call_time: Seconds | None
    max_claims: int | None
    key_lifetime: Seconds | None
    quota: str | None
    max_pause: Seconds | None
    max_pauses: int | None
    amount: str | Callable[[Any], Any] | None
    currency: str | None
    ask_timeout: Seconds | None


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
        function ``(doubt) -> Applied(result) | NotApplied() | StillUnknown(reason)`` that asks the vendor.
    :param on_busy: while another holder works on it: ``wait`` without a worker slot, ``fail``, or ``skip``.
    :param store_result: ``all``; ``digest`` or ``none`` for results that must not be kept (a replay then fails with
        ``ResultNotStored``, or gives ``None``).
    :param single_request: the body makes exactly one request, so that its error speaks for it.
    :param allow_no_call: an explicit body may return without any call.
    :param depth: ``ledger``, ``lease`` (ledger and Redis), ``auto``.
    :param lease, max_hold, max_call_time, key_lifetime: seconds or timedelta; see ``[runguard]``.
    :param max_claims: so many claims without any outcome are poison.
    :param quota: the vendor allowance that all tasks naming it share (``stripe``); a template may name the account.
        When the vendor says "too many", its gate closes for all of them.
    :param max_pause, max_pauses: how long in all, and how often, it waits for a quota without progress; then a person.
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
    single_request: bool = False
    allow_no_call: bool = False
    depth: Literal["auto", "ledger", "lease"] | None = None
    lease: Seconds | None = None
    max_hold: Seconds | None = None
    max_call_time: Seconds | None = None
    max_claims: int | None = None
    key_lifetime: Seconds | None = None
    quota: str | None = None
    max_pause: Seconds | None = None
    max_pauses: int | None = None
    amount: str | Callable[[Any], Any] | None = None
    currency: str | None = None
    ask_timeout: Seconds | None = None

    def __new__(cls, *_: Any, **options: Any) -> Guard:
        known = [option.name for option in fields(cls)]
        for name in options:
            if name not in known:
                near = difflib.get_close_matches(name, known, 1)
                hint = f"Did you mean {near[0]!r}?" if near else f"There are: {', '.join(known)}."
                raise PlanningError(f"A guard has no option {name!r}.", hint)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        words = {
            "calls": (None, "body", "explicit"),
            "on_busy": ("wait", "fail", "skip"),
            "store_result": ("all", "digest", "none"),
            "depth": (None, "auto", "ledger", "lease"),
        }
        for name, allowed in words.items():
            if getattr(self, name) not in allowed:
                shown = ", ".join(repr(word) for word in allowed if word)
                raise PlanningError(f"{name}={getattr(self, name)!r} is none of {shown}.")
        if not (self.on_doubt in (None, "ask", "replay") or callable(self.on_doubt)):
            raise PlanningError(f"on_doubt={self.on_doubt!r} is neither 'ask', 'replay' nor a function.")
        if inspect.iscoroutinefunction(self.on_doubt):
            raise PlanningError("on_doubt is an async function.", "Write it as `def`.")
        if self.key is not None and not callable(self.key) and not (isinstance(self.key, str) and self.key):
            raise PlanningError(f"key={self.key!r} is neither a template nor a function.")
        if self.namespace is not None and not (isinstance(self.namespace, str) and self.namespace):
            raise PlanningError(f"namespace={self.namespace!r} is no name.")
        if isinstance(self.payload, str):
            raise PlanningError("payload is one text.", "Give a list of names: payload=['…'].")
        for name in ("quota", "currency"):
            if getattr(self, name) is not None and not (isinstance(getattr(self, name), str) and getattr(self, name)):
                raise PlanningError(f"{name}={getattr(self, name)!r} is neither a name nor a template of one.")
        if self.amount is not None and not callable(self.amount) and not (isinstance(self.amount, str) and self.amount):
            raise PlanningError(f"amount={self.amount!r} is neither a template nor a function.")
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

    def __repr__(self) -> str:
        """The same in every process: Airflow compares it to notice that a DAG changed."""
        said = {option.name: getattr(self, option.name) for option in fields(self)}
        shown = (
            f"{name}={getattr(value, '__qualname__', None) or repr(value)}"
            for name, value in said.items()
            if value != type(self).__dataclass_fields__[name].default
        )
        return f"Guard({', '.join(shown)})"


def seconds(value: Seconds | None, default: float) -> float:
    if value is None:
        return default
    return value.total_seconds() if isinstance(value, timedelta) else float(value)


def check_mapped(guard: Guard | None, cls: type) -> None:
    if guard is None or guard.key is None:
        raise PlanningError(
            f"A mapped {cls.__name__} has no key of its own: map_index is a position, which another run gives to other "
            "work.",
            "Name the work by its content: guard=Guard(key='invoice/{{ args.invoice.id }}').",
        )
