"""The attempts that a client library made by itself before the one that an error speaks of.

Clients repeat requests without saying so, and an error tells of the last attempt only. This room collects what their
answers, headers and frames know of the earlier ones, as facts; the rules judge them. What should tell of attempts and
does not is reported as unproven, never left out.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from functools import lru_cache
from types import TracebackType
from typing import Any

from airflow_runguard.core.failures.reading import (
    errors,
    integer,
    is_mapping,
    item,
    read,
    response_status,
    sequence,
    text,
    type_key,
)

MAX_FRAMES = 2_000

# How each client's own retries are switched off; said wherever they spoil the evidence.
SWITCHES: Mapping[str, str] = {
    "aiohttp": "send the order by POST, since aiohttp repeats PUT and DELETE on a broken connection",
    "aiohttp-retry": "use a plain aiohttp.ClientSession",
    "anthropic": "set max_retries=0",
    "botocore": "set Config(retries={'total_max_attempts': 1})",
    "openai": "set max_retries=0",
    "azure": "set retry_total=0",
    "databricks": "set Config(retry_timeout_seconds=0) and repeat nothing else",
    "elasticsearch": "set max_retries=0",
    "github": "set Github(retry=None)",
    "google": "set retry=None",
    "googleapiclient": "set num_retries=0",
    "kiota_http": "give the request RetryHandlerOption(max_retries=0)",
    "opensearchpy": "set max_retries=0",
    "redirect": "set allow_redirects=False (requests, aiohttp), follow_redirects=False (httpx) or redirect=False",
    "slack_sdk": "set retry_handlers=[]",
    "snowflake": "the driver has no switch; set a short network_timeout, and look the statement up",
    "stripe": "set max_network_retries=0",
    "tenacity": "use stop_after_attempt(1) or take the decorator away",
    "urllib3": "set retries=False (requests: max_retries=0)",
}

# Clients that repeat requests unless they are told not to, and whose errors do not say whether they did. What their
# frames say of the setting counts; where the frames say nothing, nothing is proven. Package of the frames → client.
_BY_THEMSELVES: Mapping[str, str] = {
    "azure": "azure",
    "databricks": "databricks",
    "elastic_transport": "elasticsearch",
    "elasticsearch": "elasticsearch",
    "github": "github",
    "kiota_abstractions": "kiota_http",
    "kiota_http": "kiota_http",
    "msgraph": "kiota_http",
    "opensearchpy": "opensearchpy",
    "slack_sdk": "slack_sdk",
    "stripe": "stripe",
}
# What a process pool leaves of a traceback: its text. An error with this cause came from a real client, elsewhere.
_LOST_FRAMES = frozenset({"concurrent._RemoteTraceback", "multiprocessing.RemoteTraceback"})


@dataclass(slots=True)
class Attempts:
    """What is known about the attempts before the one that an error speaks of."""

    errors: list[BaseException] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    unproven: list[str] = field(default_factory=list)
    counted: list[str] = field(default_factory=list)
    """Of those, what is no mere possibility: requests were repeated, and the client says how many."""

    def count(self, retries: object, client: str) -> None:
        """Take in a bare number of retries, which proves nothing about any of them."""
        number = integer(retries)
        if number is None:
            self.unproven.append(f"how often {client} repeated the request cannot be read: {SWITCHES[client]}")
        elif number > 0:
            plural = "y" if number == 1 else "ies"
            self.counted.append(
                f"{client} made {number} hidden retr{plural}, which nothing proves harmless: {SWITCHES[client]}"
            )
            self.unproven.append(self.counted[-1])

    def allowed(self, retries: object, client: str) -> None:
        """Take in how many retries a client was allowed, where it does not say how many it made."""
        if integer(retries) != 0:
            self.unproven.append(
                f"{client} repeats requests by itself and does not say whether it did: {SWITCHES[client]}"
            )

    def history(self, entries: object, client: str) -> None:
        """Take in a client's list of earlier answers and errors."""
        for entry in sequence(entries):
            error = read(entry, "error")
            status = response_status(entry) or response_status(read(entry, "http_response"))
            if isinstance(error, BaseException):
                self.errors.append(error)
            elif status is not None:
                self.statuses.append(status)
            else:
                self.unproven.append(f"{client} keeps an earlier attempt without its outcome: {SWITCHES[client]}")


def attempts_before(
    types: frozenset[str],
    have: Mapping[str, Any],
    there: Mapping[str, Any],
    *,
    answered: bool,
    made_by_hand: bool = False,
) -> Attempts:
    """Everything that tells of attempts before this one, and what should tell of them but is not there.

    :param types: the error's class and bases, as the rules name them.
    :param have: what the error has that may tell something. :param there: what its response has.
    :param answered: the error carries a status.
    :param made_by_hand: it was put together without a request, as no client does it: there were no other attempts.
    """
    attempts = Attempts()
    by_themselves = _by_themselves(types)
    witnesses: Set[str] = frozenset()
    if "__traceback__" in have:
        witnesses = _witnesses(have["__traceback__"], attempts, by_themselves)
    response = have.get("response")
    if is_mapping(response):
        retried = item(item(response, "ResponseMetadata"), "RetryAttempts")
        if retried is not None and not text(have.get("operation_name")).startswith(_AWS_READS):
            attempts.count(retried, "botocore")
    if "history" in there:
        attempts.history(there["history"], "redirect")
    if "raw" in there:
        attempts.history(read(there["raw"], "retries", "history"), "urllib3")
    if "retries" in there:
        attempts.history(read(there["retries"], "history"), "urllib3")
    request = there["request"] if "request" in there else have.get("request")
    if request is not None:
        retried = item(read(request, "headers"), "x-stainless-retry-count")
        if retried is not None:
            attempts.count(retried, "anthropic" if any(name.startswith("anthropic.") for name in types) else "openai")
    if "errors" in have:
        attempts.errors.extend(errors(have["errors"]))  # elastic_transport: the attempts before, oldest first
    if answered and by_themselves and type_key(type(have.get("__cause__"))) in _LOST_FRAMES:
        for package in sorted(by_themselves):
            attempts.allowed(None, _BY_THEMSELVES[package])
    if types.isdisjoint(_ASKED):
        return attempts
    if "tenacity.RetryError" in types:
        number = integer(read(have.get("last_attempt"), "attempt_number"))
        attempts.count(None if number is None else number - 1, "tenacity")
    if "aiohttp.ClientResponseError" in types:
        attempts.history(have.get("history"), "redirect")
        if "aiohttp" not in witnesses and text(read(have.get("request_info"), "method")) in ("PUT", "DELETE"):
            attempts.count(None, "aiohttp")
    if "urllib3.MaxRetryError" in types and "urllib3" not in witnesses and not made_by_hand:
        attempts.count(None, "urllib3")
    if "botocore.ConnectionError" in types and "botocore" not in witnesses:
        attempts.count(None, "botocore")
    return attempts


# Errors that themselves should tell of attempts.
_ASKED = frozenset(
    {"tenacity.RetryError", "aiohttp.ClientResponseError", "urllib3.MaxRetryError", "botocore.ConnectionError"}
)


@lru_cache(maxsize=1_024)
def _by_themselves(types: frozenset[str]) -> frozenset[str]:
    clients = {_BY_THEMSELVES.get(name.partition(".")[0]) for name in types}
    return frozenset(package for package, client in _BY_THEMSELVES.items() if client in clients)


# AWS names its operations so; none of these changes anything, so that repeating it left nothing behind.
_AWS_READS = ("Describe", "List", "Head")


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


def _google_retry(local: Mapping[str, Any], attempts: Attempts) -> None:
    failed = errors(local.get("error_list"))
    attempts.errors.extend(failed[:-1])


def _googleapiclient(local: Mapping[str, Any], attempts: Attempts) -> None:
    attempts.allowed(local.get("num_retries"), "googleapiclient")


def _azure(local: Mapping[str, Any], attempts: Attempts) -> None:
    """An operation's frame: what the pipeline's retry policy noted of earlier attempts."""
    attempts.history(item(read(local.get("pipeline_response"), "context"), "history"), "azure")


def _cosmos(local: Mapping[str, Any], attempts: Attempts) -> None:
    """Cosmos DB repeats after a throttle, which is harmless, and after much else."""
    for name, policy in local.items():
        if name.endswith("_policy") and not name.startswith("resourceThrottle") and name != "retry_policy":
            for counter in ("current_retry_attempt_count", "retry_count", "failover_retry_count"):
                made = read(policy, counter)
                if isinstance(made, int) and made > 0:
                    attempts.count(made, "azure")


def _elasticsearch(local: Mapping[str, Any], attempts: Attempts) -> None:
    client = local.get("self")
    own = integer(read(client, "_max_retries"))
    attempts.allowed(read(client, "_transport", "max_retries") if own is None else own, "elasticsearch")


def _opensearch(local: Mapping[str, Any], attempts: Attempts) -> None:
    """The transport's frame; its connection's has the same name and makes one request."""
    if "attempt" in local:
        attempts.count(local["attempt"], "opensearchpy")


def _pygithub(local: Mapping[str, Any], attempts: Attempts) -> None:
    """Its default repeats a POST ten times after 5xx; the history is lost with urllib3's answer."""
    own = read(local.get("self"), "__dict__")
    retry = item(own, "_Requester__retry")
    if own is not None and "_Requester__retry" in own and retry is None:
        retry = 0
    attempts.allowed(retry if isinstance(retry, int) else read(retry, "total"), "github")


def _kiota(local: Mapping[str, Any], attempts: Attempts) -> None:
    """Microsoft Graph: the middleware counts in a header of the request that was sent last."""
    headers = read(local.get("response"), "request", "headers")
    retried = item(headers, "retry-attempt")
    attempts.count(0 if retried is None and headers is not None else retried, "kiota_http")


def _snowflake(local: Mapping[str, Any], attempts: Attempts) -> None:
    attempts.count(read(local.get("retry_ctx"), "current_retry_count"), "snowflake")


def _stripe(local: Mapping[str, Any], attempts: Attempts) -> None:
    own = item(local.get("options"), "max_network_retries")
    attempts.allowed(read(local.get("self"), "_options", "max_network_retries") if own is None else own, "stripe")


def _stripe_connection(local: Mapping[str, Any], attempts: Attempts) -> None:
    attempts.count(local.get("num_retries"), "stripe")


def _slack(local: Mapping[str, Any], attempts: Attempts) -> None:
    handlers = read(local.get("self"), "retry_handlers")
    attempts.allowed(0 if isinstance(handlers, list) and not handlers else None, "slack_sdk")


def _databricks(local: Mapping[str, Any], attempts: Attempts) -> None:
    made = integer(local.get("attempt"))
    attempts.count(None if made is None else made - 1, "databricks")


_WITNESSES: Mapping[str, Mapping[str, _Reader]] = {
    "urlopen": {"urllib3": _urlopen},
    "resolve_redirects": {"requests": _resolve_redirects},
    "http_error_302": {"urllib": _urllib_redirect},
    "_send_handling_redirects": {"httpx": _httpx_redirects, "httpx2": _httpx_redirects},
    "_request": {"aiohttp": _aiohttp_request},
    "_send_request": {"botocore": _botocore_request},
    "iter": {"tenacity": _tenacity_iter},
    "_do_request": {"aiohttp_retry": _aiohttp_retry},
    "request": {
        "openai": _stainless_request("openai"),
        "anthropic": _stainless_request("anthropic"),
        "stripe": _stripe,
    },
    "request_async": {"stripe": _stripe},
    "_request_with_retries_internal": {"stripe": _stripe_connection},
    "request_with_retries_async": {"stripe": _stripe_connection},
    "retry_target": {"google": _google_retry},
    "execute": {"googleapiclient": _googleapiclient},
    "_perform_request": {"elasticsearch": _elasticsearch},
    "_urllib_api_call": {"slack_sdk": _slack},
    "requestJsonAndCheck": {"github": _pygithub},
    "throw_failed_responses": {"kiota_http": _kiota},
    "next_chunk": {"googleapiclient": _googleapiclient},
    "perform_request": {"opensearchpy": _opensearch},
    "_request_exec_wrapper": {"snowflake": _snowflake},
    "wrapper": {"databricks": _databricks},
    "Execute": {"azure": _cosmos},
    "ExecuteAsync": {"azure": _cosmos},
}


def _witnesses(traceback: object, attempts: Attempts, by_themselves: Set[str]) -> set[str]:
    """Let the frames that know of attempts tell of them; the top packages whose frames were there.

    :param by_themselves: packages of the error that repeat requests unless told not to. Frames of theirs without any
        that knows of attempts prove nothing.
    """
    witnesses: set[str] = set()
    clients: set[str] = set()
    for _ in range(MAX_FRAMES):
        if not isinstance(traceback, TracebackType):
            break
        frame = traceback.tb_frame
        readers = _WITNESSES.get(frame.f_code.co_name)
        if readers or by_themselves:
            package = text(frame.f_globals.get("__name__")).partition(".")[0]
            reader = readers.get(package) if readers else None
            if package in by_themselves:
                clients.add(_BY_THEMSELVES[package])
                if reader is None and package == "azure" and "pipeline_response" in frame.f_locals:
                    reader = _azure
            if reader:
                witnesses.add(package)
                reader(frame.f_locals, attempts)
        traceback = traceback.tb_next
    else:
        attempts.unproven.append(f"the traceback has more than {MAX_FRAMES:,} frames and was not read to its end")
    for client in sorted(clients - {_BY_THEMSELVES.get(package, package) for package in witnesses}):
        attempts.allowed(None, client)
    return witnesses
