"""What the classifier says of errors that real client libraries raise against a real server."""

import asyncio
import itertools
import socket
import ssl
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import aiohttp_retry
import anthropic
import boto3
import elasticsearch
import github
import googleapiclient.errors
import googleapiclient.http
import httplib2
import httpx
import openai
import opensearchpy
import pytest
import requests
import slack_sdk.http_retry
import snowflake.connector.time_util
import stripe
import tenacity
import urllib3
from airflow.providers.http.hooks.http import HttpHook
from airflow.sdk import Connection
from botocore.config import Config
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from requests.adapters import HTTPAdapter
from snowflake.connector.errors import Error as SnowflakeError
from snowflake.connector.network import SnowflakeRestful

from airflow_runguard.core.failures import classify
from airflow_runguard.core.record import Effect, Failure, FailureClass
from demo.vendor import Vendor
from demo.vendor_control import VendorControl

NOT_APPLIED, UNKNOWN = Effect.NOT_APPLIED, Effect.UNKNOWN
PROCESSING, QUOTA, TIMEOUT = FailureClass.PROCESSING, FailureClass.QUOTA, FailureClass.TIMEOUT
VALIDATION = FailureClass.VALIDATION
PATIENCE = 0.4  # seconds that a client waits for a vendor that stalls

Post = Callable[[str], object]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")


@pytest.fixture
def closed_port() -> Iterator[str]:
    """A port that refuses, and that nobody else can take meanwhile: bound, but not listening."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{holder.getsockname()[1]}"


@pytest.fixture
def half_answer() -> Iterator[str]:
    """A server that reads one request, promises 100 bytes, sends 5 and hangs up."""
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)
                connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf!")

        thread = threading.Thread(target=answer)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(10)
        assert not thread.is_alive()


def with_requests(url: str) -> None:
    with requests.Session() as session:
        session.post(url, json={}, timeout=PATIENCE).raise_for_status()


def with_requests_retrying(url: str, total: int = 2, methods: Any = None, method: str = "POST") -> None:
    retry = urllib3.Retry(total, status_forcelist=[429], allowed_methods=methods, raise_on_status=False)
    with requests.Session() as session:
        session.mount("http://", HTTPAdapter(max_retries=retry))
        session.request(method, url, json={}, timeout=PATIENCE).raise_for_status()


def with_httpx(url: str) -> None:
    httpx.post(url, json={}, timeout=PATIENCE).raise_for_status()


def with_urllib3(url: str) -> None:
    """urllib3 as it comes: three retries of connection errors."""
    with urllib3.PoolManager() as pool:
        pool.request("POST", url, body=b"{}", timeout=PATIENCE)


def with_aiohttp(url: str, method: str = "POST") -> None:
    async def call() -> None:
        timeout = aiohttp.ClientTimeout(sock_read=PATIENCE, sock_connect=PATIENCE)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.request(method, url, json={}) as answer:
            await answer.read()
            answer.raise_for_status()

    asyncio.run(call())


def with_urllib(url: str) -> None:
    urllib.request.urlopen(urllib.request.Request(url, b"{}"), timeout=PATIENCE).close()


def with_openai(url: str, **options: Any) -> None:
    with openai.OpenAI(api_key="x", base_url=url, timeout=PATIENCE, **options) as client:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "hi"}])


def with_anthropic(url: str, **options: Any) -> None:
    with anthropic.Anthropic(api_key="x", base_url=url, timeout=PATIENCE, **options) as client:
        client.messages.create(model="m", max_tokens=1, messages=[{"role": "user", "content": "hi"}])


def with_boto3(url: str, **options: Any) -> None:
    client = boto3.client(
        "lambda",
        endpoint_url=url,
        region_name="eu-west-1",
        aws_access_key_id="x",
        aws_secret_access_key="x",
        config=Config(read_timeout=PATIENCE, connect_timeout=PATIENCE, **options),
    )
    try:
        client.invoke(FunctionName="f", Payload=b"{}")
    finally:
        client.close()


CLIENTS: list[Post] = [with_requests, with_httpx, with_urllib3, with_aiohttp, with_urllib]
STATUS_CLIENTS: list[Post] = [with_requests, with_httpx, with_aiohttp, with_urllib]


def failure_of(call: Callable[..., object], *args: Any, kind: str = "write", **options: Any) -> Failure:
    with pytest.raises(Exception) as caught:  # noqa: PT011 - which one is what the classifier is asked
        call(*args, **options)
    answer = classify(caught.value, effect_kind=kind)
    if isinstance(caught.value, urllib.error.HTTPError):
        caught.value.close()
    return answer


@pytest.mark.parametrize("post", CLIENTS)
def test_p03_a_refused_connection_is_not_applied(post: Post, closed_port: str) -> None:
    failure = failure_of(post, closed_port)
    assert (failure.failure_class, failure.effect, failure.final) == (PROCESSING, NOT_APPLIED, False), failure


@pytest.mark.parametrize("post", CLIENTS)
def test_p03_a_name_that_does_not_resolve_is_not_applied(post: Post) -> None:
    failure = failure_of(post, "http://nosuch.invalid/")
    assert (failure.failure_class, failure.effect) == (PROCESSING, NOT_APPLIED), failure


@pytest.mark.parametrize("post", CLIENTS)
def test_p03_no_answer_after_the_charge_is_unknown(post: Post, vendor: Vendor, vendor_control: VendorControl) -> None:
    vendor_control.script("stall", seconds=30)
    failure = failure_of(post, vendor.url + "/charges")
    assert (failure.failure_class, failure.effect, failure.pausable) == (TIMEOUT, UNKNOWN, False), failure
    assert vendor_control.charges() == 1


@pytest.mark.parametrize("post", CLIENTS)
def test_p03_a_connection_dropped_after_the_charge_is_unknown(
    post: Post, vendor: Vendor, vendor_control: VendorControl
) -> None:
    vendor_control.script("drop")
    failure = failure_of(post, vendor.url + "/charges")
    assert (failure.failure_class, failure.effect) == (PROCESSING, UNKNOWN), failure
    assert vendor_control.charges() == 1


@pytest.mark.parametrize("post", [with_requests, with_httpx, with_urllib3, with_aiohttp])
def test_p03_half_an_answer_is_unknown(post: Post, half_answer: str) -> None:
    failure = failure_of(post, half_answer)
    assert (failure.failure_class, failure.effect) == (PROCESSING, UNKNOWN), failure


@pytest.mark.parametrize("post", [with_requests, with_httpx, with_aiohttp])
def test_p03_a_connection_that_is_not_established_in_time_is_not_applied(post: Post) -> None:
    """A listener whose queue is full: the kernel drops further connection attempts."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        fillers = [socket.socket() for _ in range(4)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(listener.getsockname())
        try:
            failure = failure_of(post, f"http://127.0.0.1:{listener.getsockname()[1]}/")
        finally:
            for filler in fillers:
                filler.close()
    assert (failure.failure_class, failure.effect) == (TIMEOUT, NOT_APPLIED), failure


def test_p03_a_client_pool_without_a_free_connection_is_not_applied(
    vendor: Vendor, vendor_control: VendorControl
) -> None:
    vendor_control.script("ok", gate="answer")
    limits = httpx.Limits(max_connections=1)
    with httpx.Client(limits=limits, timeout=httpx.Timeout(20, pool=0.2)) as client:
        holder = threading.Thread(target=client.post, args=(vendor.url + "/charges",), kwargs={"json": {}})
        holder.start()
        vendor_control.wait(charged=1)
        failure = failure_of(client.post, vendor.url + "/charges", json={})
        vendor_control.release("answer")
        holder.join(20)
    assert (failure.failure_class, failure.effect) == (PROCESSING, NOT_APPLIED), failure
    assert vendor_control.charges() == 1


@pytest.fixture
def untrusted(tmp_path: Path) -> Iterator[str]:
    """An HTTPS server whose certificate nobody signed but itself."""
    secret = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    certificate = x509.CertificateBuilder(name, name, secret.public_key(), x509.random_serial_number())
    certificate = (
        certificate.not_valid_before(now).not_valid_after(now + timedelta(days=1)).sign(secret, hashes.SHA256())
    )
    pem = tmp_path / "untrusted.pem"
    pem.write_bytes(
        secret.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()) + certificate.public_bytes(Encoding.PEM)
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pem)
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def shake_hands() -> None:
            connection, _ = listener.accept()
            with connection, suppress(OSError), context.wrap_socket(connection, server_side=True) as secure:
                secure.recv(1)

        thread = threading.Thread(target=shake_hands)
        thread.start()
        yield f"https://localhost:{listener.getsockname()[1]}/"
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize("post", [with_requests, with_httpx, with_aiohttp, with_urllib])
def test_p03_a_certificate_that_is_not_trusted_is_not_applied(post: Post, untrusted: str) -> None:
    failure = failure_of(post, untrusted)
    assert (failure.failure_class, failure.effect) == (PROCESSING, NOT_APPLIED), failure


@pytest.mark.parametrize(
    ("status", "failure_class", "effect", "needs_person", "final"),
    [
        (400, VALIDATION, NOT_APPLIED, True, True),
        (401, VALIDATION, NOT_APPLIED, True, True),
        (402, VALIDATION, NOT_APPLIED, True, True),
        (403, VALIDATION, NOT_APPLIED, True, True),
        (404, VALIDATION, NOT_APPLIED, True, True),
        (405, VALIDATION, NOT_APPLIED, True, True),
        (408, TIMEOUT, UNKNOWN, False, False),
        (409, PROCESSING, UNKNOWN, False, False),
        (410, VALIDATION, NOT_APPLIED, True, True),
        (413, VALIDATION, NOT_APPLIED, True, True),
        (415, VALIDATION, NOT_APPLIED, True, True),
        (422, VALIDATION, NOT_APPLIED, True, True),
        (423, PROCESSING, UNKNOWN, False, False),
        (425, PROCESSING, UNKNOWN, False, False),
        (429, QUOTA, NOT_APPLIED, False, False),
        (499, TIMEOUT, UNKNOWN, False, False),
        (500, PROCESSING, UNKNOWN, False, False),
        (501, VALIDATION, NOT_APPLIED, True, False),
        (502, PROCESSING, UNKNOWN, False, False),
        (503, PROCESSING, UNKNOWN, False, False),
        (504, TIMEOUT, UNKNOWN, False, False),
        (505, VALIDATION, NOT_APPLIED, True, False),
        (529, PROCESSING, UNKNOWN, False, False),
    ],
)
@pytest.mark.parametrize("post", STATUS_CLIENTS)
def test_p07_each_status_means_the_same_whichever_client_reports_it(
    post: Post,
    status: int,
    failure_class: FailureClass,
    effect: Effect,
    needs_person: bool,
    final: bool,
    vendor: Vendor,
    vendor_control: VendorControl,
) -> None:
    vendor_control.script("status", status=status)
    failure = failure_of(post, vendor.url + "/charges")
    assert (failure.failure_class, failure.effect) == (failure_class, effect), failure
    assert (failure.needs_person, failure.final, failure.pausable) == (needs_person, final, status == 429), failure
    assert f"HTTP {status} " in failure.evidence
    assert "\n" not in failure.evidence


@pytest.mark.parametrize("post", STATUS_CLIENTS)
def test_p06_a_quota_answer_pauses_for_as_long_as_the_vendor_says(
    post: Post, vendor: Vendor, vendor_control: VendorControl
) -> None:
    vendor_control.script("status", status=429, headers={"Retry-After": "12"})
    failure = failure_of(post, vendor.url + "/charges")
    assert (failure.pausable, failure.resume_after, failure.effect) == (True, 12.0, NOT_APPLIED), failure


@pytest.mark.parametrize("status", [408, 409, 500, 502, 503, 504])
def test_p03_a_read_has_no_effect_to_doubt(status: int, vendor: Vendor, vendor_control: VendorControl) -> None:
    vendor_control.script("status", status=status)
    assert failure_of(with_httpx, vendor.url + "/charges", kind="read").effect is NOT_APPLIED


# --- the client's own retries --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "switch"),
    [
        (with_openai, "max_retries=0"),
        (with_anthropic, "max_retries=0"),
        (with_boto3, "total_max_attempts"),
        (with_requests_retrying, "an earlier attempt of the client ended with urllib3.ReadTimeoutError"),
    ],
)
def test_p03_a_429_after_a_hidden_attempt_that_charged_is_unknown(
    call: Callable[..., object], switch: str, vendor: Vendor, vendor_control: VendorControl
) -> None:
    """Default retries: the first attempt charges and stalls, the next are told 429, and only that is raised."""
    vendor_control.script("stall", seconds=30)
    vendor_control.script("status", status=429, times=20, headers={"Retry-After": "0"})
    failure = failure_of(call, vendor.url)
    assert len(vendor_control.requests()) > 1
    assert vendor_control.charges() == 1
    assert (failure.failure_class, failure.effect) == (QUOTA, UNKNOWN), failure
    assert (failure.pausable, failure.final) == (False, False)
    assert switch in failure.evidence


@pytest.mark.parametrize(
    ("call", "options"),
    [
        (with_openai, {"max_retries": 0}),
        (with_anthropic, {"max_retries": 0}),
        (with_boto3, {"retries": {"total_max_attempts": 1}}),
        (with_requests_retrying, {"total": 0}),
    ],
)
def test_p06_with_the_clients_retries_off_a_429_pauses(
    call: Callable[..., object], options: dict[str, Any], vendor: Vendor, vendor_control: VendorControl
) -> None:
    vendor_control.script("status", status=429, headers={"Retry-After": "7"})
    failure = failure_of(call, vendor.url, **options)
    assert (failure.failure_class, failure.effect, failure.pausable) == (QUOTA, NOT_APPLIED, True), failure
    assert failure.resume_after == 7.0


@pytest.mark.parametrize(
    ("call", "off", "on"),
    [
        (with_openai, {"max_retries": 0}, {"max_retries": 1}),
        (with_anthropic, {"max_retries": 0}, {"max_retries": 1}),
        (with_boto3, {"retries": {"total_max_attempts": 1}}, {"retries": {"total_max_attempts": 2}}),
    ],
)
def test_p03_a_refused_connection_after_hidden_retries_is_unknown(
    call: Callable[..., object], off: dict[str, Any], on: dict[str, Any], closed_port: str
) -> None:
    assert failure_of(call, closed_port, **off).effect is NOT_APPLIED
    failure = failure_of(call, closed_port, **on)
    assert failure.effect is UNKNOWN
    assert "1 hidden retry" in failure.evidence


def test_p06_a_history_in_which_every_attempt_is_proven_is_not_applied(
    vendor: Vendor, vendor_control: VendorControl
) -> None:
    vendor_control.script("status", status=429, times=3)
    assert failure_of(with_requests_retrying, vendor.url + "/charges").effect is NOT_APPLIED
    assert len(vendor_control.requests()) == 3


def test_p06_a_client_that_raises_its_last_status_is_read_through(
    vendor: Vendor, vendor_control: VendorControl
) -> None:
    def post(url: str) -> None:
        with urllib3.PoolManager(retries=urllib3.Retry(1, status_forcelist=[429], allowed_methods=None)) as pool:
            pool.request("POST", url, body=b"{}")

    vendor_control.script("status", status=429, times=2)
    failure = failure_of(post, vendor.url + "/charges")
    assert (failure.failure_class, failure.effect, failure.pausable) == (QUOTA, NOT_APPLIED, True), failure


@pytest.fixture
def charges_and_closes() -> Iterator[str]:
    """A server that reads one request, hangs up without an answer and refuses from then on."""
    listener = socket.create_server(("127.0.0.1", 0))
    address = listener.getsockname()

    def serve() -> None:
        connection, _ = listener.accept()
        listener.close()
        with connection:
            connection.recv(65_536)

    thread = threading.Thread(target=serve)
    thread.start()
    yield f"http://127.0.0.1:{address[1]}/"
    thread.join(10)
    assert not thread.is_alive()


def test_p03_a_retry_that_is_refused_does_not_hide_the_attempt_before_it(charges_and_closes: str) -> None:
    """urllib3 drops its history when it gives up; only the last attempt stands in MaxRetryError."""
    failure = failure_of(with_requests_retrying, charges_and_closes)
    assert failure.effect is UNKNOWN
    assert "an earlier attempt of the client ended with urllib3.ProtocolError" in failure.evidence


def test_p03_aiohttps_silent_repetition_of_a_put_does_not_hide_the_attempt_before_it(charges_and_closes: str) -> None:
    failure = failure_of(with_aiohttp, charges_and_closes, "PUT")
    assert failure.effect is UNKNOWN
    assert "aiohttp" in failure.evidence


def test_p03_a_status_that_aiohttp_reports_for_a_put_may_be_its_second_attempt(
    vendor: Vendor, vendor_control: VendorControl
) -> None:
    async def put() -> None:
        async with aiohttp.ClientSession() as session, session.put(vendor.url + "/charges") as answer:
            answer.raise_for_status()

    # The fake vendor serves no PUT and says 501.
    failure = failure_of(lambda: asyncio.run(put()))
    assert failure.effect is UNKNOWN
    assert "POST" in failure.evidence


def test_p03_aiohttp_retry_is_seen_through(closed_port: str) -> None:
    async def post(attempts: int) -> None:
        options = aiohttp_retry.ExponentialRetry(
            attempts=attempts, start_timeout=0.01, exceptions={aiohttp.ClientError}
        )
        async with aiohttp_retry.RetryClient(retry_options=options) as client, client.post(closed_port):
            raise AssertionError("not reached")

    assert failure_of(lambda: asyncio.run(post(1))).effect is NOT_APPLIED
    failure = failure_of(lambda: asyncio.run(post(2)))
    assert failure.effect is UNKNOWN
    assert "aiohttp-retry made 1 hidden retry" in failure.evidence


@pytest.mark.parametrize("reraise", [True, False])
def test_p03_tenacity_hides_attempts_with_and_without_its_own_error(reraise: bool, closed_port: str) -> None:
    def post(attempts: int) -> None:
        tenacity.Retrying(stop=tenacity.stop_after_attempt(attempts), reraise=reraise)(with_httpx, closed_port)

    assert failure_of(post, 1).effect is NOT_APPLIED
    failure = failure_of(post, 3)
    assert failure.effect is UNKNOWN
    assert "tenacity made 2 hidden retries" in failure.evidence


class Clients:
    """Clients that repeat requests unless told not to, and whose errors do not say whether they did."""

    @staticmethod
    def stripe(url: str, retries: int) -> None:
        with requests.Session() as session:
            client = stripe.StripeClient(
                "sk_test_x",
                base_addresses={"api": url},
                max_network_retries=retries,
                http_client=stripe.RequestsClient(session=session),
            )
            client.v1.charges.create({"amount": 1, "currency": "eur"})

    @staticmethod
    def slack(url: str, retries: int) -> None:
        handlers = slack_sdk.http_retry.default_retry_handlers() if retries else []
        slack_sdk.WebClient("x", base_url=url + "/", retry_handlers=handlers).chat_postMessage(channel="c", text="t")

    @staticmethod
    def elasticsearch(url: str, retries: int) -> None:
        with elasticsearch.Elasticsearch(url, max_retries=retries) as client:
            client.index(index="i", document={})

    @staticmethod
    def pygithub(url: str, retries: int) -> None:
        retry = github.GithubRetry(retries, backoff_factor=0) if retries else None
        token = github.Auth.Token("x")
        with closing(github.Github(base_url=url, retry=retry, auth=token, seconds_between_writes=None)) as client:
            client.get_user().create_repo("r")

    @staticmethod
    def googleapiclient(url: str, retries: int) -> None:
        def postproc(response: Any, content: bytes) -> Any:
            raise googleapiclient.errors.HttpError(response, content)

        with closing(httplib2.Http()) as connections:
            request = googleapiclient.http.HttpRequest(connections, postproc, url + "/charges", "POST", "{}")
            request.execute(num_retries=retries)


@pytest.mark.parametrize("name", ["stripe", "slack", "elasticsearch", "googleapiclient", "pygithub"])
def test_p03_a_client_that_may_have_repeated_the_request_is_told_to_stop_it(
    name: str, vendor: Vendor, vendor_control: VendorControl
) -> None:
    call = getattr(Clients, name)
    vendor_control.script("status", status=429, times=20, body={"error": {"code": "x"}})
    failure = failure_of(call, vendor.url, 0)
    assert (failure.failure_class, failure.effect, failure.pausable) == (QUOTA, NOT_APPLIED, True), failure
    failure = failure_of(call, vendor.url, 1)
    assert (failure.failure_class, failure.effect, failure.pausable) == (QUOTA, UNKNOWN, False), failure
    assert "does not say whether it did: set " in failure.evidence


def with_opensearch(url: str, retries: int) -> None:
    with closing(opensearchpy.OpenSearch(url, max_retries=retries)) as client:
        client.index(index="i", body={})


def test_p03_opensearchs_client_tells_which_attempt_it_was(vendor: Vendor, vendor_control: VendorControl) -> None:
    """It repeats after 502, 503 and 504 only, so that a 429 may well be its first attempt."""
    vendor_control.script("status", status=429)
    assert failure_of(with_opensearch, vendor.url, 3).pausable
    vendor_control.script("status", status=503, charged=True)
    vendor_control.script("status", status=429)
    failure = failure_of(with_opensearch, vendor.url, 3)
    assert vendor_control.charges() == 1
    assert (failure.failure_class, failure.effect, failure.pausable) == (QUOTA, UNKNOWN, False), failure
    assert "opensearchpy made 1 hidden retry" in failure.evidence


def test_p03_snowflakes_driver_repeats_by_itself_and_is_seen_through(
    vendor: Vendor, vendor_control: VendorControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own requests, with a connection that never logged in. It has no switch for its retries, only a timeout."""

    def statement(attempts: int) -> None:
        made = len(vendor_control.requests())
        late = lambda: 0 if len(vendor_control.requests()) < made + attempts else 5_000  # noqa: E731
        monkeypatch.setattr(snowflake.connector.time_util, "get_time_millis", late)
        driver: Any = SnowflakeRestful()
        driver._connection = SimpleNamespace(
            network_timeout=1,
            socket_timeout=PATIENCE,
            _backoff_generator=itertools.repeat(0),
            _enable_retry_reason_in_query_response=False,
            messages=[],
            errorhandler=SnowflakeError.default_errorhandler,
        )
        driver.fetch("POST", vendor.url + "/queries/v1/query-request", {})

    vendor_control.script("status", status=429)
    assert failure_of(statement, 1).pausable
    vendor_control.script("status", status=503, charged=True)
    vendor_control.script("status", status=429)
    failure = failure_of(statement, 2)
    assert vendor_control.charges() == 1
    assert (failure.failure_class, failure.effect, failure.pausable) == (QUOTA, UNKNOWN, False), failure
    assert "snowflake made 1 hidden retry" in failure.evidence


# --- redirects -----------------------------------------------------------------------------------------------------


def redirecting(client: str, url: str) -> None:
    async def call() -> None:
        async with aiohttp.ClientSession() as session, session.post(url, json={}) as answer:
            answer.raise_for_status()

    match client:
        case "requests":
            with_requests(url)
        case "httpx":
            httpx.post(url, json={}, follow_redirects=True).raise_for_status()
        case "aiohttp":
            asyncio.run(call())
        case "urllib3":
            with_urllib3(url)
        case "urllib":
            with_urllib(url)


@pytest.mark.parametrize("client", ["requests", "httpx", "aiohttp", "urllib3", "urllib"])
def test_p03_a_charge_that_answers_with_a_redirect_to_a_dead_address_is_unknown(
    client: str, closed_port: str, vendor: Vendor, vendor_control: VendorControl
) -> None:
    vendor_control.script("status", status=303, headers={"Location": closed_port + "/receipt"}, charged=True)
    failure = failure_of(redirecting, client, vendor.url + "/charges")
    assert vendor_control.charges() == 1
    assert failure.effect is UNKNOWN, failure
    assert "303" in failure.evidence


@pytest.mark.parametrize("client", ["requests", "httpx", "aiohttp", "urllib"])
def test_p03_a_charge_that_answers_with_a_redirect_to_a_missing_page_is_unknown(
    client: str, vendor: Vendor, vendor_control: VendorControl
) -> None:
    vendor_control.script("status", status=303, headers={"Location": "/receipt"}, charged=True)
    failure = failure_of(redirecting, client, vendor.url + "/charges")
    assert (failure.effect, failure.final) == (UNKNOWN, False), failure


# --- what authors and Airflow wrap around it ------------------------------------------------------------------------


def test_p06_airflows_http_hook_is_read_through(
    vendor: Vendor, vendor_control: VendorControl, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = vendor.url.removeprefix("http://")
    monkeypatch.setattr(
        HttpHook, "get_connection", classmethod(lambda cls, _: Connection(conn_id="c", conn_type="http", host=host))
    )
    vendor_control.script("status", status=429, headers={"Retry-After": "12"})
    failure = failure_of(HttpHook(method="POST").run, "charges", "{}")
    assert (failure.failure_class, failure.effect, failure.resume_after) == (QUOTA, NOT_APPLIED, 12.0), failure
    vendor_control.script("stall", seconds=30)
    failure = failure_of(HttpHook(method="POST").run, "charges", "{}", extra_options={"timeout": PATIENCE})
    assert failure.effect is UNKNOWN
