"""The attempts that a client library made by itself before the one that an error speaks of.

Clients repeat requests without saying so, and an error tells of the last attempt only. This room collects what their
answers, headers and frames know of the earlier ones, as facts; the rules judge them. What should tell of attempts and
does not is reported as unproven, never left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from types import TracebackType
from typing import Any

from airflow_runguard.core.failures.reading import integer, item, read, response_status, sequence, text

MAX_FRAMES = 2_000

# How each client's own retries are switched off; said wherever they spoil the evidence.
SWITCHES: Mapping[str, str] = {
    "aiohttp": "send the order by POST, since aiohttp repeats PUT and DELETE on a broken connection",
    "aiohttp-retry": "use a plain aiohttp.ClientSession",
    "anthropic": "set max_retries=0",
    "botocore": "set Config(retries={'total_max_attempts': 1})",
    "openai": "set max_retries=0",
    "redirect": "set allow_redirects=False (requests, aiohttp), follow_redirects=False (httpx) or redirect=False",
    "tenacity": "use stop_after_attempt(1) or take the decorator away",
    "urllib3": "set retries=False (requests: max_retries=0)",
}

# Clients that repeat requests by themselves and leave no trace that is read here.
_UNREAD_RETRIES: Mapping[str, str] = {
    "azure": "set retry_total=0",
    "google": "set retry=None",
    "googleapiclient": "set num_retries=0",
}


@dataclass(slots=True)
class Attempts:
    """What is known about the attempts before the one that an error speaks of."""

    errors: list[BaseException] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)

    def count(self, retries: object, client: str) -> None:
        """Take in a bare number of retries, which proves nothing about any of them."""
        number = integer(retries)
        if number is None:
            self.unproven.append(f"how often {client} repeated the request cannot be read: {SWITCHES[client]}")
        elif number > 0:
            plural = "y" if number == 1 else "ies"
            self.unproven.append(
                f"{client} made {number} hidden retr{plural}, which nothing proves harmless: {SWITCHES[client]}"
            )

    def history(self, entries: object, client: str) -> None:
        """Take in a client's list of earlier answers and errors."""
        for entry in sequence(entries):
            error = read(entry, "error")
            status = response_status(entry)
            if isinstance(error, BaseException):
                self.errors.append(error)
            elif status is not None:
                self.statuses.append(status)
            else:
                self.unproven.append(f"{client} keeps an earlier attempt without its outcome: {SWITCHES[client]}")


def attempts_before(error: BaseException, types: frozenset[str], *, answered: bool, made_by_hand: bool) -> Attempts:
    """Everything that tells of attempts before this one, and what should tell of them but is not there.

    :param types: the error's class and bases, as the rules name them.
    :param answered: the error carries a status.
    :param made_by_hand: it was put together without a request, as no client does it: there were no other attempts.
    """
    attempts = Attempts()
    witnesses = _witnesses(error, attempts)
    response = read(error, "response")
    if response is not None:
        attempts.history(read(response, "history"), "redirect")
        for retries in (read(response, "raw", "retries"), read(response, "retries")):
            attempts.history(read(retries, "history"), "urllib3")
        retried = item(item(response, "ResponseMetadata"), "RetryAttempts")
        if retried is not None:
            attempts.count(retried, "botocore")
    retried = item(read(response, "request", "headers"), "x-stainless-retry-count") or item(
        read(error, "request", "headers"), "x-stainless-retry-count"
    )
    if retried is not None:
        attempts.count(retried, "anthropic" if any(name.startswith("anthropic.") for name in types) else "openai")
    if "tenacity.RetryError" in types:
        number = integer(read(error, "last_attempt", "attempt_number"))
        attempts.count(None if number is None else number - 1, "tenacity")
    if "aiohttp.ClientResponseError" in types:
        attempts.history(read(error, "history"), "redirect")
        if "aiohttp" not in witnesses and text(read(error, "request_info", "method")) in ("PUT", "DELETE"):
            attempts.count(None, "aiohttp")
    if "urllib3.MaxRetryError" in types and "urllib3" not in witnesses and not made_by_hand:
        attempts.count(None, "urllib3")
    if "botocore.ConnectionError" in types and "botocore" not in witnesses:
        attempts.count(None, "botocore")
    if answered:
        attempts.unproven.extend(_unread_retries(types))
    return attempts


@lru_cache(maxsize=1_024)
def _unread_retries(types: frozenset[str]) -> tuple[str, ...]:
    clients = sorted({name.partition(".")[0] for name in types} & _UNREAD_RETRIES.keys())
    return tuple(f"{client} clients retry by themselves, unseen: {_UNREAD_RETRIES[client]}" for client in clients)


# Frames of the error's own traceback that know of attempts which the exception does not mention: urllib3 drops its
# history when it gives up, botocore, tenacity and the redirect loops never attach theirs. Function name → the top
# package, the client, and what its local variables tell. Checked with urllib3 2.8, requests 2.34, httpx 0.28,
# aiohttp 3.14, botocore 1.44, tenacity 9.1; where a newer release renames them, MaxRetryError and botocore's
# connection errors become unproven and the tests of the others fail.
_Reader = Callable[[Mapping[str, Any], Attempts], None]


def _urlopen(local: Mapping[str, Any], attempts: Attempts) -> None:
    attempts.history(read(local.get("retries"), "history"), "urllib3")


def _resolve_redirects(local: Mapping[str, Any], attempts: Attempts) -> None:
    attempts.history(local.get("hist"), "redirect")


def _urllib_redirect(local: Mapping[str, Any], attempts: Attempts) -> None:
    status = integer(local.get("code"))
    if status is not None:
        attempts.statuses.append(status)


def _httpx_redirects(local: Mapping[str, Any], attempts: Attempts) -> None:
    attempts.history(local.get("history"), "redirect")


def _aiohttp_request(local: Mapping[str, Any], attempts: Attempts) -> None:
    attempts.history(local.get("history"), "redirect")
    if text(local.get("method")) in ("PUT", "DELETE") and local.get("retry_persistent_connection") is not True:
        attempts.count(1, "aiohttp")


def _botocore_request(local: Mapping[str, Any], attempts: Attempts) -> None:
    made = integer(local.get("attempts"))
    attempts.count(None if made is None else made - 1, "botocore")


def _tenacity_iter(local: Mapping[str, Any], attempts: Attempts) -> None:
    made = integer(read(local.get("retry_state"), "attempt_number"))
    attempts.count(None if made is None else made - 1, "tenacity")


def _aiohttp_retry(local: Mapping[str, Any], attempts: Attempts) -> None:
    made = integer(local.get("current_attempt"))
    attempts.count(None if made is None else made - 1, "aiohttp-retry")


def _stainless_request(client: str) -> _Reader:
    def reader(local: Mapping[str, Any], attempts: Attempts) -> None:
        if "retries_taken" in local:
            attempts.count(local["retries_taken"], client)

    return reader


_WITNESSES: Mapping[str, Mapping[str, _Reader]] = {
    "urlopen": {"urllib3": _urlopen},
    "resolve_redirects": {"requests": _resolve_redirects},
    "http_error_302": {"urllib": _urllib_redirect},
    "_send_handling_redirects": {"httpx": _httpx_redirects, "httpx2": _httpx_redirects},
    "_request": {"aiohttp": _aiohttp_request},
    "_send_request": {"botocore": _botocore_request},
    "iter": {"tenacity": _tenacity_iter},
    "_do_request": {"aiohttp_retry": _aiohttp_retry},
    "request": {"openai": _stainless_request("openai"), "anthropic": _stainless_request("anthropic")},
}


def _witnesses(error: BaseException, attempts: Attempts) -> set[str]:
    """Let the frames that know of attempts tell of them; the top packages whose frames were there."""
    witnesses: set[str] = set()
    traceback = read(error, "__traceback__")
    for _ in range(MAX_FRAMES):
        if not isinstance(traceback, TracebackType):
            return witnesses
        frame = traceback.tb_frame
        readers = _WITNESSES.get(frame.f_code.co_name)
        if readers:
            package = text(frame.f_globals.get("__name__")).partition(".")[0]
            reader = readers.get(package)
            if reader:
                witnesses.add(package)
                reader(frame.f_locals, attempts)
        traceback = traceback.tb_next
    attempts.unproven.append(f"the traceback has more than {MAX_FRAMES:,} frames and was not read to its end")
    return witnesses
