"""What the classifier promises of any exception at all, and of shapes that were reported from the field."""

import http.client
import pickle
import statistics
import timeit
from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from types import SimpleNamespace
from typing import Any

import aiohttp
import grpc
import httpx
import pytest
import requests
import tenacity
import urllib3.exceptions
from airflow.exceptions import AirflowNotFoundException
from airflow.sdk.exceptions import AirflowException
from botocore.exceptions import ClientError, ConnectTimeoutError, ParamValidationError
from hypothesis import given
from hypothesis import strategies as st

from airflow_runguard.core.errors import NotApplied
from airflow_runguard.core.failures import classify
from airflow_runguard.core.failures.families import RULES
from airflow_runguard.core.record import Effect, FailureClass

NOT_APPLIED, UNKNOWN = Effect.NOT_APPLIED, Effect.UNKNOWN
NOW = datetime(2026, 3, 10, 12, tzinfo=UTC)


def http_error(status: int, headers: dict[str, str] | None = None, body: bytes = b"") -> requests.HTTPError:
    response = requests.Response()
    response.status_code = status
    response.headers.update(headers or {})
    response._content = body
    return requests.HTTPError("refused", response=response)


def chained(outer: BaseException, *, cause: BaseException | None = None, context: BaseException | None = None) -> Any:
    outer.__cause__, outer.__context__ = cause, context
    return outer


def wrapped(reason: Exception) -> requests.ConnectionError:
    return requests.ConnectionError(urllib3.exceptions.MaxRetryError(None, "/x", reason))  # type: ignore[arg-type]


def given_up(error: BaseException, attempts: int = 1) -> tenacity.RetryError:
    last = tenacity.Future(attempts)
    last.set_exception(error)
    return tenacity.RetryError(last)


class RpcError(grpc.RpcError):
    def __init__(self, code: grpc.StatusCode, details: str = "") -> None:
        self.code, self.details = lambda: code, lambda: details


# --- shapes from the field -------------------------------------------------------------------------------------------

FIELD: list[tuple[str, BaseException, set[str], bool, float | None, Effect]] = [
    ("read timeout", requests.ReadTimeout("Read timed out."), {"timeout"}, False, None, UNKNOWN),
    ("connect timeout", requests.ConnectTimeout("timed out"), {"timeout"}, False, None, NOT_APPLIED),
    (
        "connection error that hides a read timeout",
        wrapped(urllib3.exceptions.ReadTimeoutError(None, "/x", "Read timed out.")),  # type: ignore[arg-type]
        {"timeout"},
        False,
        None,
        UNKNOWN,
    ),
    (
        "connection refused",
        wrapped(urllib3.exceptions.NewConnectionError(None, "refused")),  # type: ignore[arg-type]
        {"processing"},
        False,
        None,
        NOT_APPLIED,
    ),
    ("gateway timeout", http_error(504), {"timeout"}, False, None, UNKNOWN),
    ("conflict with an earlier attempt", http_error(409), {"processing"}, False, None, UNKNOWN),
    ("decline", http_error(402), {"validation"}, False, None, NOT_APPLIED),
    ("unavailable without a hint", http_error(503), {"processing"}, False, None, UNKNOWN),
    ("unavailable with a hint", http_error(503, {"Retry-After": "120"}), {"processing"}, True, 120, UNKNOWN),
    (
        "date against the vendor's clock",
        http_error(429, {"Retry-After": "Tue, 10 Mar 2026 12:12:30 GMT", "Date": "Tue, 10 Mar 2026 12:10:00 GMT"}),
        {"quota"},
        True,
        150,
        NOT_APPLIED,
    ),
    (
        "date in the past",
        http_error(429, {"Retry-After": "Tue, 10 Mar 2026 11:00:00 GMT"}),
        {"quota"},
        True,
        0,
        NOT_APPLIED,
    ),
    (
        "fraction and a page",
        http_error(429, {"Retry-After": "0.493"}, b"<!doctype html>"),
        {"quota"},
        True,
        0.493,
        NOT_APPLIED,
    ),
    ("negative wait", http_error(429, {"Retry-After": "-5"}), {"quota"}, True, None, NOT_APPLIED),
    ("wait in words", http_error(429, {"Retry-After": "soon"}), {"quota"}, True, None, NOT_APPLIED),
    ("body that is not text", http_error(429, body=b"\xff\xfe"), {"quota"}, True, None, NOT_APPLIED),
    (
        "words on a missing page",
        http_error(404, body=b"our rate limit policy"),
        {"validation"},
        False,
        None,
        NOT_APPLIED,
    ),
    (
        "hook's text around the error",
        chained(AirflowException("429:Too Many Requests"), context=http_error(429, {"Retry-After": "12"})),
        {"quota"},
        True,
        12,
        NOT_APPLIED,
    ),
    ("hook's text alone", AirflowException("429:Too Many Requests"), {"quota"}, True, None, NOT_APPLIED),
    (
        "tenacity with one attempt",
        given_up(http_error(429, {"Retry-After": "12"})),
        {"quota"},
        True,
        12,
        NOT_APPLIED,
    ),
    ("a number in business text", ValueError("row 429: amount must be positive"), {"unknown"}, False, None, UNKNOWN),
    (
        "AWS refusal",
        ClientError({"Error": {"Code": "X"}, "ResponseMetadata": {"HTTPStatusCode": 400, "RetryAttempts": 0}}, "Op"),
        {"validation"},
        False,
        None,
        NOT_APPLIED,
    ),
    (
        "AWS refusal after hidden retries",
        ClientError({"Error": {"Code": "X"}, "ResponseMetadata": {"HTTPStatusCode": 400, "RetryAttempts": 4}}, "Op"),
        {"validation"},
        False,
        None,
        UNKNOWN,
    ),
    ("AWS connect timeout, attempts unseen", ConnectTimeoutError(endpoint_url="u"), {"timeout"}, False, None, UNKNOWN),
    ("AWS parameters", ParamValidationError(report="missing"), {"validation"}, False, None, NOT_APPLIED),
    ("gRPC exhausted", RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED), {"quota"}, True, None, NOT_APPLIED),
    (
        "gRPC answer too big for the client",
        RpcError(grpc.StatusCode.RESOURCE_EXHAUSTED, "CLIENT: Received message larger than max (9 vs. 4)"),
        {"unknown"},
        False,
        None,
        UNKNOWN,
    ),
    ("gRPC deadline", RpcError(grpc.StatusCode.DEADLINE_EXCEEDED), {"timeout"}, False, None, UNKNOWN),
    ("exit status that looks like an HTTP status", SystemExit(404), {"unknown"}, False, None, UNKNOWN),
    ("Airflow's own 404", AirflowNotFoundException("no such Connection"), {"unknown"}, False, None, UNKNOWN),
    ("author's word", NotApplied("nothing sent"), {"processing"}, False, None, NOT_APPLIED),
    (
        "author's word against an earlier timeout",
        chained(NotApplied("the vendor has no such charge"), cause=httpx.ReadTimeout("x")),
        {"processing"},
        False,
        None,
        NOT_APPLIED,
    ),
    ("not an exception at all", None, {"unknown"}, False, None, UNKNOWN),  # type: ignore[list-item]
]


@pytest.mark.parametrize(
    ("error", "classes", "pausable", "wait", "effect"), [pytest.param(*case[1:], id=case[0]) for case in FIELD]
)
def test_p07_shapes_from_the_field(
    error: BaseException, classes: set[str], pausable: bool, wait: float | None, effect: Effect
) -> None:
    failure = classify(error, now=NOW)
    assert failure.failure_class in classes, failure
    assert (failure.effect, failure.pausable, failure.resume_after) == (effect, pausable, wait), failure
    assert failure.evidence


def test_p07_a_read_that_is_unavailable_pauses_only_where_the_vendor_says_for_how_long() -> None:
    told = classify(http_error(503, {"Retry-After": "120"}), effect_kind="read")
    assert (told.effect, told.pausable, told.resume_after) == (NOT_APPLIED, True, 120.0)
    assert not classify(http_error(503), effect_kind="read").pausable


@pytest.mark.parametrize("kind", ["write", "wriet", "", None])
def test_p03_whatever_is_not_called_a_read_is_a_write(kind: Any) -> None:
    assert classify(httpx.ReadTimeout("x"), effect_kind=kind).effect is UNKNOWN


def test_p07_the_answer_is_the_same_after_pickling() -> None:
    error = http_error(429, {"Retry-After": "12"})
    assert classify(pickle.loads(pickle.dumps(error))) == classify(error)


def test_p07_a_429_seen_through_the_clients_own_wrapper_names_rule_and_remedy() -> None:
    error = http_error(429)
    error.response.request = SimpleNamespace(headers={"x-stainless-retry-count": "2"})  # type: ignore[union-attr]
    assert classify(error).evidence == (
        "HTTP 429 from the vendor: too many requests; the vendor did not take this one (rule http-429); but openai "
        "made 2 hidden retries, which nothing proves harmless: set max_retries=0"
    )


def test_p03_a_value_error_may_come_from_reading_the_answer_to_a_charge() -> None:
    """So that no text of its own proves that it came before the request (decision 0014, R13.3)."""
    with pytest.raises(ValueError) as read:  # noqa: PT011 - as a client raises it of an answer that is no JSON
        http_error(200, body=b"row 429: amount must be positive").response.json()  # type: ignore[union-attr]
    for error in (read.value, ValueError("row 429: amount must be positive")):
        failure = classify(error, now=NOW)
        assert (failure.effect, failure.pausable, failure.needs_person) == (UNKNOWN, False, False), failure


def test_p03_a_get_that_timed_out_is_harmless_where_its_author_says_that_it_reads() -> None:
    """Its method does not say it: gateways send messages by GET (decision 0014, R14.5)."""
    error = httpx.ReadTimeout("timed out", request=httpx.Request("GET", "https://sms.example/send?to=1"))
    assert classify(error).effect is UNKNOWN
    read = classify(error, effect_kind="read")
    assert (read.failure_class, read.effect, read.pausable) == (FailureClass.TIMEOUT, NOT_APPLIED, False)


# --- around the error ------------------------------------------------------------------------------------------------


def test_p03_a_timeout_that_was_being_handled_makes_a_429_unknown() -> None:
    assert classify(chained(http_error(429), context=httpx.ReadTimeout("x"))).effect is UNKNOWN


def test_p03_an_error_that_was_only_being_handled_proves_nothing_about_the_one_raised_later() -> None:
    """``except HTTPError: charge_elsewhere(); answer["id"]``: the KeyError came after another request."""
    failure = classify(chained(KeyError("id"), context=http_error(400)))
    assert (failure.failure_class, failure.effect) == (FailureClass.VALIDATION, UNKNOWN)
    assert "raise … from error" in failure.evidence


def test_p03_an_error_that_the_author_names_as_the_cause_speaks() -> None:
    assert classify(chained(RuntimeError("no charge"), cause=http_error(400))).effect is NOT_APPLIED


def test_p03_every_error_of_a_group_must_be_proven() -> None:
    refused = httpx.ConnectError("refused")
    assert classify(ExceptionGroup("two", [refused, http_error(400)])).effect is NOT_APPLIED
    assert classify(ExceptionGroup("two", [refused, http_error(500)])).effect is UNKNOWN
    assert classify(ExceptionGroup("two", [refused, ValueError("?")])).effect is UNKNOWN
    assert classify(chained(RuntimeError(), cause=ExceptionGroup("two", [refused, ValueError()]))).effect is UNKNOWN


def test_p03_the_operating_systems_timeout_beneath_a_connect_timeout_is_no_doubt() -> None:
    below = chained(TimeoutError("timed out"))
    assert classify(chained(httpx.ConnectTimeout("x"), cause=below)).effect is NOT_APPLIED
    assert classify(chained(httpx.ConnectTimeout("x"), context=TimeoutError("another request"))).effect is UNKNOWN


def test_p03_a_real_clients_error_that_lost_its_traceback_is_unknown() -> None:
    error = wrapped(urllib3.exceptions.NewConnectionError(None, "refused"))  # type: ignore[arg-type]
    error.request = requests.Request("POST", "http://vendor.invalid/").prepare()
    assert classify(error).effect is UNKNOWN


@pytest.mark.parametrize(("sent", "effect"), [({}, NOT_APPLIED), ({"retry-attempt": "1"}, UNKNOWN), (None, UNKNOWN)])
def test_p03_the_middleware_of_microsoft_graphs_client_counts_in_the_request(sent: Any, effect: Effect) -> None:
    """A frame as its adapter has it when it raises (kiota-http 1.16, ``httpx_request_adapter``)."""
    code = "def throw_failed_responses(response):\n    raise error"
    kind = type("APIError", (Exception,), {"__module__": "kiota_abstractions.api_error", "response_status_code": 429})
    adapter: dict[str, Any] = {"__name__": "kiota_http.httpx_request_adapter", "error": kind()}
    exec(code, adapter)
    request = None if sent is None else SimpleNamespace(headers=sent)
    with pytest.raises(kind) as caught:
        adapter["throw_failed_responses"](SimpleNamespace(request=request))
    assert classify(caught.value).effect is effect


# --- laws ------------------------------------------------------------------------------------------------------------


def hostile(*args: object) -> Any:
    raise RuntimeError("hostile")


class Hostile(Exception):
    """Raises on whatever it is asked."""

    __str__ = __repr__ = hostile
    __getattribute__ = hostile
    __eq__ = hostile
    __hash__ = None  # type: ignore[assignment]


class HostileMapping(dict[str, str]):
    get = __getitem__ = keys = items = hostile


class Endless(Exception):
    """A new cause whenever it is asked for one."""

    @property
    def __cause__(self) -> BaseException:  # type: ignore[override]
        return Endless()


# Each leaves open whether the request left, wherever in a chain it stands. (Bare socket errors are not among them:
# beneath a client's ConnectError they are the reason why the connection was not established.)
OPEN: list[Callable[[], BaseException]] = [
    lambda: httpx.ReadTimeout("x"),
    lambda: requests.ReadTimeout("x"),
    lambda: http.client.RemoteDisconnected("x"),
    lambda: aiohttp.ServerDisconnectedError(),
    lambda: requests.exceptions.ChunkedEncodingError("x"),
    lambda: http_error(500),
    lambda: http_error(409),
    lambda: http_error(200),
    lambda: given_up(http_error(429), attempts=3),
    lambda: ClientError({"ResponseMetadata": {"HTTPStatusCode": 429, "RetryAttempts": 1}}, "Op"),
]
PROVEN: list[Callable[[], BaseException]] = [
    lambda: httpx.ConnectError("x"),
    lambda: httpx.ConnectTimeout("x"),
    lambda: ConnectionRefusedError("x"),
    lambda: http_error(400),
    lambda: http_error(402),
    lambda: http_error(429),
    lambda: AirflowException("429:Too Many Requests"),
]
SILENT: list[Callable[[], BaseException]] = [
    lambda: ValueError("x"),
    lambda: KeyError("429"),
    lambda: requests.ConnectionError("x"),
]


def chains(leaves: list[Callable[[], BaseException]]) -> st.SearchStrategy[BaseException]:
    """Trees of exceptions over the leaves: caused, handled, carried as an argument, grouped, retried."""

    def joined(inner: st.SearchStrategy[BaseException]) -> st.SearchStrategy[BaseException]:
        outers = st.sampled_from(PROVEN + SILENT)
        return st.one_of(
            st.builds(lambda outer, error: chained(outer(), cause=error), outers, inner),
            st.builds(lambda outer, error: chained(outer(), context=error), outers, inner),
            st.builds(lambda error: RuntimeError("x", error), inner),
            st.builds(lambda error, other: BaseExceptionGroup("x", [error, other()]), inner, outers),
            st.builds(given_up, inner),
        )

    return st.recursive(st.sampled_from(leaves).map(lambda make: make()), joined, max_leaves=6)


@given(chains(OPEN))
def test_p03_a_request_that_may_have_left_is_never_called_not_applied(error: BaseException) -> None:
    failure = classify(error)
    assert failure.effect is UNKNOWN, failure
    assert not failure.pausable
    assert not failure.final


@given(chains(OPEN + PROVEN + SILENT))
def test_p03_the_axes_never_contradict_each_other(error: BaseException) -> None:
    failure = classify(error)
    if failure.final or failure.needs_person:
        assert failure.effect is NOT_APPLIED
    if failure.pausable:
        assert failure.failure_class is FailureClass.QUOTA
        assert not failure.needs_person
    assert classify(error, effect_kind="read").effect is NOT_APPLIED


anything: st.SearchStrategy[Any] = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=20),
    st.binary(max_size=20),
    st.sampled_from([429, 402, "429", "3"]),
    st.builds(HostileMapping),
    st.builds(Hostile),
)
NAMES = """
    response request status_code status http_status code headers reason os_error last_attempt attempt_number history raw
    retries request_info method error exceptions args __cause__ __context__ __traceback__ details _exception
    ResponseMetadata HTTPStatusCode RetryAttempts HTTPHeaders retry-after date x-stainless-retry-count
"""
names = st.sampled_from(NAMES.split())
objects = st.recursive(
    anything,
    lambda inner: st.one_of(
        st.dictionaries(names, inner, max_size=4),
        st.lists(inner, max_size=3),
        st.dictionaries(names, inner, max_size=4).map(lambda attributes: SimpleNamespace(**attributes)),
    ),
    max_leaves=10,
)
families = st.sampled_from(
    [
        ("", "Strange"),
        (None, "Strange"),
        ("airflow.x", "AirflowException"),
        ("aiohttp.x", "ClientResponseError"),
        ("azure.x", "HttpResponseError"),
        ("botocore.x", "ConnectionError"),
        ("grpc.x", "RpcError"),
        ("tenacity.x", "RetryError"),
        ("urllib.x", "HTTPError"),
        ("urllib3.x", "MaxRetryError"),
        ("urllib3.x", "ResponseError"),
    ]
)


@given(families, st.dictionaries(names, objects, max_size=6), st.integers() | st.none())
def test_p07_classify_never_raises_whatever_the_error_is_made_of(
    family: tuple[Any, str], attributes: dict[str, Any], now: Any
) -> None:
    error = type(family[1], (Exception,), {**attributes, "__module__": family[0]})()
    for kind in ("write", "read"):
        failure = classify(error, effect_kind=kind, now=now)
        assert failure.resume_after is None or failure.resume_after >= 0
        assert failure.evidence
        assert "\n" not in failure.evidence


@given(st.integers(100, 599), st.dictionaries(st.sampled_from(["Retry-After", "Date"]), st.text()), st.binary())
def test_p07_classify_never_raises_whatever_the_vendor_sends(status: int, headers: dict[str, str], body: bytes) -> None:
    assert classify(http_error(status, headers, body)).evidence.startswith(f"HTTP {status} ")


def test_p03_a_chain_without_end_is_unknown() -> None:
    """Ends after as many errors as are read, and then nothing is proven."""
    assert classify(chained(http_error(429), context=Endless())).effect is UNKNOWN
    ring, other = http_error(429), ValueError()
    ring.__context__, other.__context__ = other, ring
    assert classify(ring).effect is NOT_APPLIED
    assert classify(Hostile()).effect is UNKNOWN


def test_p07_an_interruption_while_reading_belongs_to_the_process() -> None:
    class Interrupted(Exception):
        @property
        def response(self) -> object:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        classify(Interrupted())


def test_p07_every_rule_has_one_name_and_a_public_source() -> None:
    assert len({rule.name for rule in RULES}) == len(RULES)
    for rule in RULES:
        assert rule.source.startswith("https://"), rule
        assert not (rule.final and rule.effect is not NOT_APPLIED), rule


def test_p07_classifying_costs_less_than_a_tenth_of_a_millisecond() -> None:
    """Median over the shapes; of each the best of many, which a busy machine does not blur."""
    best = [min(timeit.repeat(partial(classify, case[1], now=NOW), number=1, repeat=200)) for case in FIELD]
    assert statistics.median(best) < 100e-6
