"""Ready-made answers to a doubt: ``Guard(on_doubt=HttpLookup(…))``. Each looks up at one kind of vendor, through
Airflow's hooks and Connections, whether a call happened.

They fail closed: what cannot be asked for, several finds, and answers that were not foreseen are *still unknown*, and
an error is raised, to be classified like any other. "Not found" is said only where the vendor would show what happened;
the ledger takes it as proof only if it was asked for after the call can no longer arrive (``max_call_time``).

Templates are filled with ``{key}``, ``{namespace}``, ``{call}`` (the name of the call, or of the batch's item),
``{vendor_key}``, ``{external_id}``, ``{intent[name]}`` (the call's arguments; of a body, the order's fields) and
``{payload[name]}``. One that names what the call does not have, or what is masked or cut in the ledger (``***``, a text
over 200 characters), asks nothing: that nothing is found under it would prove nothing. Nor does one that would find
something else: what an earlier order or attempt did (after ``reopen`` only ``{vendor_key}`` and ``{external_id}`` tell,
after an attempt that the vendor refused only ``{vendor_key}``), or, of a batch's item and of one call among several,
what the others did (``{key}``, ``{namespace}`` and ``{payload[name]}`` are the same for all of them).
"""

from __future__ import annotations

import re
import stat
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timedelta
from typing import Any
from urllib.parse import quote

from airflow_runguard.core import payloads
from airflow_runguard.core.errors import NotApplied, PlanningError
from airflow_runguard.core.work import Applied, Doubt, StillUnknown

Said = Applied | NotApplied | StillUnknown

REQUEST_TIMEOUT = 60.0
"""Seconds to wait for an answer of the look-up."""


class _NotThere(Exception):
    """A template names something that this call does not have."""


def _refuse(*_: object) -> Any:
    raise _NotThere("a part of its template is masked or cut in the ledger")


class _Hidden:
    """What is masked or cut in the ledger: nobody can be asked by it, nor by a part of it."""

    __getitem__ = __format__ = __str__ = __repr__ = _refuse


def _as_sent(value: Any) -> Any:
    """What is readable, with what was not sent so taken out."""
    if isinstance(value, Mapping):
        return {name: _as_sent(part) for name, part in value.items()}
    if isinstance(value, list):
        return [_as_sent(part) for part in value]
    return value if payloads.as_sent(value) else _Hidden()


class _Template(string.Formatter):
    def __init__(self, quoted: Callable[[str], str]) -> None:
        self._quoted = quoted

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            return super().get_field(field_name, args, kwargs)
        except (KeyError, IndexError, AttributeError, TypeError) as error:
            raise _NotThere(f"this call has no {{{field_name}}}") from error

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is None or value == "" or isinstance(value, Mapping | list):
            raise _NotThere(f"a part of its template came to {value!r}")
        return self._quoted(str(super().format_field(value, format_spec)))


def _filled(template: str, doubt: Doubt, quoted: Callable[[str], str] = str) -> str:
    """:raises _NotThere: it would ask for something else than this call."""
    return _Template(quoted).format(
        template,
        key=doubt.record.identity.key,
        namespace=doubt.record.identity.namespace,
        call=doubt.call.name,
        vendor_key=doubt.vendor_key,
        external_id=doubt.external_id,
        intent=_as_sent(doubt.intent),
        payload=_as_sent(doubt.record.payload.readable),
    )


def _not_found(doubt: Doubt, what: str, grace: float) -> Said:
    """Nothing is there. :param grace: seconds by which the vendor may show late what happened."""
    arrives = [at for at in (doubt.record.no_later_than, doubt.call.no_later_than) if at is not None]
    last = max(arrives) if arrives else doubt.call.intent_at or doubt.now
    left = (last + timedelta(seconds=grace) - doubt.now).total_seconds() if grace else 0.0
    if left > 0:
        return StillUnknown(f"{what}, but it may show late", seconds=left)
    return NotApplied(what)


def _tell_apart(doubt: Doubt, templates: Sequence[str]) -> None:
    """:raises _NotThere: another call may answer as well: of this record, of the order before it was reopened, or an
    attempt that was refused."""
    call = doubt.call
    named = {
        re.split(r"[.\[]", part[1])[0]
        for template in templates
        for part in string.Formatter().parse(template)
        if part[1]
    }
    if not doubt.alone and named.isdisjoint(("vendor_key", "external_id", "call", "intent")):
        raise _NotThere(
            f"it is one call of several, and only {{vendor_key}} or {{call}} (here {call.name!r}) tells which"
        )
    # What guard.remember kept goes with the call over its attempts.
    told = call.attempt == 1 and "external_id" in named
    if (call.generation > 1 or call.attempt > 1) and not told and "vendor_key" not in named:
        which = f"attempt {call.attempt}" if call.attempt > 1 else f"generation {call.generation}"
        raise _NotThere(f"it is {which} of this call, which only {{vendor_key}} tells from the earlier one")


class _Lookup:
    """What they share: a doubt that lacks what the look-up asks by, or that it cannot tell from an earlier attempt, is
    still unknown."""

    @property
    def asks_by(self) -> Sequence[str]:
        """Its templates."""
        raise NotImplementedError

    def __call__(self, doubt: Doubt) -> Said:
        try:
            _tell_apart(doubt, self.asks_by)
            return self.look(doubt)
        except _NotThere as missing:
            return StillUnknown(f"nothing was asked: {missing}")

    def look(self, doubt: Doubt) -> Said:
        raise NotImplementedError

    def __repr__(self) -> str:
        """The same in every process: Airflow compares it to notice that a DAG changed."""
        options: Any = self
        said = {option.name: getattr(self, option.name) for option in fields(options)}
        shown = (f"{name}={getattr(value, '__qualname__', None) or repr(value)}" for name, value in said.items())
        return f"{type(self).__name__}({', '.join(shown)})"


@dataclass(frozen=True, repr=False)
class HttpLookup(_Lookup):
    """``GET`` something that is there if the call happened.

    :param conn_id: a Connection of type http.
    :param endpoint: template; what is filled in is percent-encoded: ``charges/{external_id}``,
        ``charges?key={vendor_key}``.
    :param found: ``(body as JSON, doubt) -> the call's result``, or ``None`` where the answer shows that it is not
        there, or one of the three answers itself. A truth value, an empty list and the like are neither: still unknown.
        Without it nothing is a find, since an object may also say that it failed, or that nothing is there.
    :param absent: statuses that mean "not there". Others than these and 2xx are errors.
    :param grace: seconds by which the vendor may show late what happened.
    """

    conn_id: str
    endpoint: str
    found: Callable[[Any, Doubt], Any] | None = None
    absent: tuple[int, ...] = (404,)
    grace: float = 0.0
    headers: Mapping[str, str] | None = None

    @property
    def asks_by(self) -> Sequence[str]:
        return (self.endpoint,)

    def look(self, doubt: Doubt) -> Said:
        endpoint = _filled(self.endpoint, doubt, lambda text: quote(text, safe=""))
        status, body = _get(self.conn_id, endpoint, {}, self.headers, allowed=self.absent)
        if status in self.absent:
            return _not_found(doubt, f"GET {endpoint} answers {status}", self.grace)
        if body is None:
            return StillUnknown(f"GET {endpoint} answers {status} and no JSON")
        if self.found is not None:
            result = self.found(body, doubt)
            if result is None:
                return _not_found(doubt, f"GET {endpoint} does not show it", self.grace)
            if isinstance(result, Said):
                return result
            if isinstance(result, bool | BaseException) or not result:
                return StillUnknown(f"found= gave back {result!r}, which is neither a result nor None (not there)")
            return Applied(result)
        return StillUnknown(f"GET {endpoint} answers {status}, and only found= can say what that means")


@dataclass(frozen=True, repr=False)
class StripeLookup(_Lookup):
    """Ask Stripe whether it made an object under the call's idempotency key.

    Stripe's search may be an hour behind, so it is not used. With ``metadata`` the objects of that time are listed,
    which shows them at once. Without it the events of that time are read for the request's own ``idempotency_key``:
    nothing needs to be sent along, but events come a little later (``grace``) and are kept for 30 days.

    :param conn_id: a Connection of type http with host ``https://api.stripe.com`` and the secret key as login.
    :param kind: what was made, as in the API's path: ``payment_intents``, ``charges``, ``refunds``, ``transfers``, …
    :param metadata: the name under which the call put its vendor key into the object's metadata.
    :param result: ``object -> the call's result``; default: the object's id.
    :param grace: seconds by which a find may come late; default: none with ``metadata``, else an hour.
    :param account: the connected account in whose name the call was made (``Stripe-Account``).
    """

    conn_id: str
    kind: str = "payment_intents"
    metadata: str | None = None
    result: Callable[[Mapping[str, Any]], Any] | None = None
    grace: float | None = None
    account: str | None = None

    @property
    def asks_by(self) -> Sequence[str]:
        return ("{vendor_key}",)

    def look(self, doubt: Doubt) -> Said:
        begin = doubt.call.first_intent_at or doubt.call.intent_at
        end = doubt.record.no_later_than or doubt.now
        if begin is None:
            return StillUnknown("nothing was asked: the call has no time")
        if self.metadata is None and doubt.now - begin > STRIPE_KEEPS_EVENTS:
            return StillUnknown("Stripe keeps events for 30 days, and this call is older")
        made = self._made(doubt.vendor_key, begin - STRIPE_SLACK, max(end, begin) + STRIPE_SLACK)
        if not made:
            grace = self.grace if self.grace is not None else (0.0 if self.metadata else STRIPE_EVENTS_LATE)
            return _not_found(doubt, f"Stripe has no {self.kind} under this key", grace)
        names = sorted({str(found["id"]) for found in made})
        if len(names) > 1:
            return StillUnknown(f"Stripe has {len(names)} {self.kind} under one key: {', '.join(names)}")
        status = made[0].get("status")
        if status is not None and status not in STRIPE_HAPPENED:
            return StillUnknown(f"Stripe has {names[0]}, but its status is {status!r}: a person decides")
        return Applied(self.result(made[0]) if self.result else names[0], reference=names[0])

    def _made(self, vendor_key: str, begin: datetime, end: datetime) -> list[Mapping[str, Any]]:
        window = {"limit": 100, "created[gte]": int(begin.timestamp()), "created[lte]": int(end.timestamp()) + 1}
        if self.metadata is not None:
            listed = self._pages(f"v1/{self.kind}", window)
            return [made for made in listed if (made.get("metadata") or {}).get(self.metadata) == vendor_key]
        events = self._pages("v1/events", {**window, "type": f"{_singular(self.kind)}.*"})
        made = [event for event in events if (event.get("request") or {}).get("idempotency_key") == vendor_key]
        # An event shows the object as it was; what counts is how it stands now.
        return [self._now(name) for name in sorted({str(event["data"]["object"]["id"]) for event in made})]

    def _now(self, name: str) -> Mapping[str, Any]:
        _, made = _get(self.conn_id, f"v1/{self.kind}/{quote(name, safe='')}", {}, self._headers)
        if not isinstance(made, dict) or made.get("id") != name:
            raise ValueError(f"Stripe answers something else than {name}")
        return made

    @property
    def _headers(self) -> Mapping[str, str]:
        return {"Stripe-Account": self.account} if self.account else {}

    def _pages(self, path: str, query: Mapping[str, Any]) -> list[Mapping[str, Any]]:
        listed: list[Mapping[str, Any]] = []
        more = True
        while more:
            after = {"starting_after": listed[-1]["id"]} if listed else {}
            _, page = _get(self.conn_id, path, {**query, **after}, self._headers)
            if not isinstance(page, dict) or not isinstance(page.get("data"), list):
                raise ValueError(f"GET {path} answers something that is no list of Stripe's")
            listed += page["data"]
            more = bool(page.get("has_more")) and bool(page["data"])
        return listed


STRIPE_SLACK = timedelta(minutes=5)
"""By which Stripe's clock and the ledger's may differ."""
STRIPE_EVENTS_LATE = 3600.0
STRIPE_KEEPS_EVENTS = timedelta(days=30) - STRIPE_SLACK
STRIPE_HAPPENED = ("succeeded", "processing", "requires_capture", "pending", "paid", "in_transit")
"""Statuses that mean: money moves or has moved, or is held."""


def _singular(kind: str) -> str:
    return kind.removesuffix("s")


@dataclass(frozen=True, repr=False)
class SqlLookup(_Lookup):
    """Select the row that is there if the call happened: the row itself, no ``count(*)`` or ``max(…)``, which give one
    although nothing is there. Several rows, and one whose first column is NULL, 0 or empty, are still unknown.

    A transaction that is still open shows nothing: that is why its time (``max_call_time``) must have passed. Ask the
    primary, not a replica. For effects that are SQL themselves ``guard.sql`` leaves no doubt at all.

    :param conn_id: a Connection whose hook is a ``DbApiHook``.
    :param sql: with the database's own placeholders.
    :param parameters: templates, in the order of the placeholders.
    :param result: ``row -> the call's result``; default: its first column.
    """

    conn_id: str
    sql: str
    parameters: tuple[str, ...] = ("{vendor_key}",)
    result: Callable[[Sequence[Any]], Any] | None = None
    grace: float = 0.0

    @property
    def asks_by(self) -> Sequence[str]:
        return self.parameters

    def look(self, doubt: Doubt) -> Said:
        from airflow.sdk import BaseHook

        values = tuple(_filled(template, doubt) for template in self.parameters)
        hook: Any = BaseHook.get_hook(self.conn_id)
        rows = hook.run(self.sql, parameters=values, handler=lambda cursor: cursor.fetchmany(2))
        if not rows:
            return _not_found(doubt, f"{self.conn_id} has no such row", self.grace)
        row = rows[0]
        if len(rows) > 1:
            return StillUnknown(f"{self.conn_id} has several such rows")
        if not row[0]:
            return StillUnknown(f"{self.conn_id} has a row that begins with {row[0]!r}: an aggregate? Select the row")
        return Applied(self.result(row) if self.result else row[0])


@dataclass(frozen=True, repr=False)
class FileLookup(_Lookup):
    """Whether a file is there: in an object store, or wherever ``ObjectStoragePath`` reaches.

    :param path: template: ``s3://bucket/orders/{key}/{call}.xml``.
    :param conn_id: its Connection, where it needs one.
    :param size: ``doubt -> bytes`` that the whole file has; say it where a half-written file can be seen under its name
        (local disks do, object stores do not). Another size is still unknown.
    """

    path: str
    conn_id: str | None = None
    size: Callable[[Doubt], int] | None = None

    @property
    def asks_by(self) -> Sequence[str]:
        return (self.path,)

    def look(self, doubt: Doubt) -> Said:
        from airflow.sdk import ObjectStoragePath

        name = _path(self.path, doubt)
        path = ObjectStoragePath(name, conn_id=self.conn_id)
        if path.is_dir():
            return StillUnknown(f"{name} is a folder")
        if not path.exists():
            return _not_found(doubt, f"there is no {name}", 0.0)
        return _whole(doubt, name, path.stat().st_size, self.size)


@dataclass(frozen=True, repr=False)
class SftpLookup(_Lookup):
    """Whether a file is there, by SFTP.

    :param conn_id: a Connection of type sftp.
    :param path: template of the absolute path.
    :param size: as in :class:`FileLookup`; leave it out only if the file is written under another name and renamed.
    """

    conn_id: str
    path: str
    size: Callable[[Doubt], int] | None = None

    @property
    def asks_by(self) -> Sequence[str]:
        return (self.path,)

    def look(self, doubt: Doubt) -> Said:
        from airflow.providers.sftp.hooks.sftp import SFTPHook

        name = _path(self.path, doubt)
        with SFTPHook(ssh_conn_id=self.conn_id).get_managed_conn() as sftp:
            try:
                found = sftp.stat(name)
            except FileNotFoundError:
                return _not_found(doubt, f"there is no {name}", 0.0)
        if stat.S_ISDIR(found.st_mode or 0):
            return StillUnknown(f"{name} is a folder")
        return _whole(doubt, name, found.st_size, self.size)


def _path(template: str, doubt: Doubt) -> str:
    """:raises _NotThere: what is filled in leads out of the folder."""
    name = _filled(template, doubt)
    if ".." in name.split("/") and ".." not in template.split("/"):
        raise _NotThere(f"{name} leads out of its folder")
    return name


def _whole(doubt: Doubt, name: str, size: int | None, wanted: Callable[[Doubt], int] | None) -> Said:
    if wanted is not None and size != (whole := wanted(doubt)):
        return StillUnknown(f"{name} is there with {size} bytes, not {whole}: it may be half-written")
    return Applied(name, reference=name)


def _get(
    conn_id: str,
    endpoint: str,
    query: Mapping[str, Any],
    headers: Mapping[str, str] | None,
    allowed: tuple[int, ...] = (),
) -> tuple[int, Any]:
    """Status and JSON (``None``: it is none). :raises requests.HTTPError: neither 2xx nor one of ``allowed``."""
    try:
        from airflow.providers.http.hooks.http import HttpHook
    except ImportError as error:
        raise PlanningError("This look-up needs apache-airflow-providers-http.", "Install it.") from error
    hook = HttpHook(method="GET", http_conn_id=conn_id)
    options = {"check_response": False, "allow_redirects": False, "timeout": REQUEST_TIMEOUT}
    answer = hook.run(endpoint, data=dict(query), headers=dict(headers or {}), extra_options=options)
    status = int(answer.status_code)
    if status in allowed:
        return status, None
    answer.raise_for_status()
    if not 200 <= status < 300:
        raise ValueError(f"GET {endpoint} answers {status}, which says nothing about the call")
    try:
        return status, answer.json()
    except ValueError:
        return status, None
