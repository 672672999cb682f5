"""The general HTTP family: what transport errors and status codes mean for any vendor.

Data only, first match wins, general last. Transport rules stand before status rules, since an exception that carries
both (a proxy's refusal of a tunnel) is told apart by its class. A write is ``not_applied`` only where the request
provably never left, or where the vendor answered that it did not do it; everything that may have left is ``unknown``.
"""

from __future__ import annotations

from airflow_runguard.core.failures.rule import Rule
from airflow_runguard.core.record import Effect, FailureClass

RFC9110 = "https://www.rfc-editor.org/rfc/rfc9110"
HTTPX = "https://www.python-httpx.org/exceptions/"
REQUESTS = "https://requests.readthedocs.io/en/latest/api/#exceptions"


def _httpx(*names: str) -> frozenset[str]:
    """httpx, the httpcore below it, and the renamed copies that the openai and anthropic clients bring along."""
    return frozenset(f"{package}.{name}" for package in ("httpx", "httpx2", "httpcore", "httpcore2") for name in names)


NEVER_LEFT: tuple[Rule, ...] = (
    Rule(
        name="not-applied-by-author",
        source="airflow_runguard.NotApplied",
        says="the author of the function says that the effect has not happened",
        failure_class=FailureClass.PROCESSING,
        effect=Effect.NOT_APPLIED,
        types=frozenset({"airflow_runguard.NotApplied"}),
    ),
    Rule(
        name="refused-by-the-client",
        source="https://docs.aws.amazon.com/boto3/latest/guide/error-handling.html; " + REQUESTS,
        says="the client library refused the request before sending it",
        failure_class=FailureClass.VALIDATION,
        effect=Effect.NOT_APPLIED,
        # requests' InvalidURL and InvalidSchema are left out on purpose: a redirect's target raises them too.
        types=frozenset(
            {
                "requests.MissingSchema",
                "botocore.ParamValidationError",
                "botocore.NoCredentialsError",
                "botocore.PartialCredentialsError",
                "botocore.NoRegionError",
            }
        ),
        needs_person=True,
    ),
    Rule(
        name="pool-timeout",
        source=HTTPX + "; https://urllib3.readthedocs.io/en/stable/reference/urllib3.exceptions.html",
        says="no connection of the client's pool became free, so the request never left",
        failure_class=FailureClass.PROCESSING,
        effect=Effect.NOT_APPLIED,
        types=_httpx("PoolTimeout") | {"urllib3.EmptyPoolError"},
        names_phase=True,
    ),
    Rule(
        name="dns-failure",
        source="https://docs.python.org/3/library/socket.html#socket.gaierror",
        says="the vendor's name was not resolved, so the request never left",
        failure_class=FailureClass.PROCESSING,
        effect=Effect.NOT_APPLIED,
        types=frozenset({"socket.gaierror", "urllib3.NameResolutionError", "aiohttp.ClientConnectorDNSError"}),
        names_phase=True,
    ),
    Rule(
        name="tls-certificate",
        source="https://docs.python.org/3/library/ssl.html#ssl.SSLCertVerificationError",
        says="the vendor's certificate was not accepted, which ends the handshake before any request",
        failure_class=FailureClass.PROCESSING,
        effect=Effect.NOT_APPLIED,
        types=frozenset({"ssl.SSLCertVerificationError"}),
    ),
    Rule(
        name="connection-not-established",
        source="https://man7.org/linux/man-pages/man2/connect.2.html; " + HTTPX,
        says="no connection was established, so the request never left",
        failure_class=FailureClass.PROCESSING,
        effect=Effect.NOT_APPLIED,
        # urllib3.ProxyError is left out: its 1.26 line wraps errors after sending as well.
        types=_httpx("ConnectError", "ProxyError")
        | {
            "builtins.ConnectionRefusedError",
            "urllib3.NewConnectionError",
            "aiohttp.ClientConnectorError",
            "aiohttp.ClientHttpProxyError",
            "botocore.EndpointConnectionError",
            "botocore.ProxyConnectionError",
        },
        names_phase=True,
    ),
    Rule(
        name="connect-timeout",
        source=REQUESTS + "; " + HTTPX,
        says="the connection was not established in time, so the request never left",
        failure_class=FailureClass.TIMEOUT,
        effect=Effect.NOT_APPLIED,
        types=_httpx("ConnectTimeout")
        | {
            "requests.ConnectTimeout",
            "urllib3.ConnectTimeoutError",
            "aiohttp.ConnectionTimeoutError",
            "botocore.ConnectTimeoutError",
        },
        names_phase=True,
    ),
)

MAY_HAVE_LEFT: tuple[Rule, ...] = (
    Rule(
        name="no-answer-in-time",
        source=RFC9110 + "#section-9.2.2",
        says="no answer in time; the vendor may have done the work",
        failure_class=FailureClass.TIMEOUT,
        effect=Effect.UNKNOWN,
        types=_httpx("ReadTimeout", "WriteTimeout", "TimeoutException")
        | {
            "builtins.TimeoutError",
            "requests.Timeout",
            "urllib3.TimeoutError",
            "aiohttp.ServerTimeoutError",
            "botocore.ReadTimeoutError",
        },
    ),
    Rule(
        name="connection-broke",
        source=RFC9110 + "#section-9.2.2",
        says="the connection broke after it was established; the vendor may have done the work",
        failure_class=FailureClass.PROCESSING,
        effect=Effect.UNKNOWN,
        types=_httpx("ReadError", "WriteError", "CloseError", "RemoteProtocolError", "DecodingError")
        | {
            "builtins.ConnectionResetError",
            "builtins.ConnectionAbortedError",
            "builtins.BrokenPipeError",
            "ssl.SSLError",
            "http.BadStatusLine",
            "http.IncompleteRead",
            "urllib3.ProtocolError",
            "urllib3.IncompleteRead",
            "urllib3.DecodeError",
            "requests.ChunkedEncodingError",
            "requests.ContentDecodingError",
            "aiohttp.ServerDisconnectedError",
            "aiohttp.ClientOSError",
            "aiohttp.ClientPayloadError",
            "botocore.HTTPClientError",
        },
    ),
)

STATUSES: tuple[Rule, ...] = (
    Rule(
        name="http-429",
        source="https://www.rfc-editor.org/rfc/rfc6585#section-4",
        says="too many requests; the vendor did not take this one",
        failure_class=FailureClass.QUOTA,
        effect=Effect.NOT_APPLIED,
        statuses=frozenset({429}),
        pausable=True,
    ),
    Rule(
        name="http-402",
        source=RFC9110 + "#section-15.5.3; https://docs.stripe.com/error-handling",
        says="payment declined; waiting does not change a decline",
        failure_class=FailureClass.VALIDATION,
        effect=Effect.NOT_APPLIED,
        statuses=frozenset({402}),
        needs_person=True,
        final=True,
    ),
    Rule(
        name="http-401-403",
        source=RFC9110 + "#section-15.5.2",
        says="the vendor refused the credentials or the permission before doing anything; somebody must correct them",
        failure_class=FailureClass.VALIDATION,
        effect=Effect.NOT_APPLIED,
        statuses=frozenset({401, 403}),
        needs_person=True,
        final=True,
    ),
    Rule(
        name="http-408-499",
        source=RFC9110 + "#section-15.5.9; https://nginx.org/en/docs/http/ngx_http_core_module.html",
        says="the vendor or its gateway gave up on the exchange, which does not say what happened to the work",
        failure_class=FailureClass.TIMEOUT,
        effect=Effect.UNKNOWN,
        statuses=frozenset({408, 499}),
    ),
    Rule(
        name="http-409-423-425",
        source=RFC9110 + "#section-15.5.10; https://www.rfc-editor.org/rfc/rfc8470#section-5.2",
        says="it collides with another request, which may be an earlier attempt of this very work",
        failure_class=FailureClass.PROCESSING,
        effect=Effect.UNKNOWN,
        statuses=frozenset({409, 423, 425}),
    ),
    Rule(
        name="http-4xx",
        source=RFC9110 + "#section-15.5",
        says="the vendor refused the request as it stands; the same request will be refused again",
        failure_class=FailureClass.VALIDATION,
        effect=Effect.NOT_APPLIED,
        statuses=range(400, 500),
        needs_person=True,
        final=True,
    ),
    Rule(
        name="http-501-505",
        source=RFC9110 + "#section-15.6.2",
        says="the server does not support this method or protocol version, so it did nothing",
        failure_class=FailureClass.VALIDATION,
        effect=Effect.NOT_APPLIED,
        statuses=frozenset({501, 505}),
        needs_person=True,
    ),
    Rule(
        name="http-503",
        source=RFC9110 + "#section-15.6.4",
        says="unavailable; a gateway answers so as well for a request that it had already passed on",
        failure_class=FailureClass.PROCESSING,
        effect=Effect.UNKNOWN,
        statuses=frozenset({503}),
        pausable=True,
        when_told=True,
    ),
    Rule(
        name="http-504",
        source=RFC9110 + "#section-15.6.5",
        says="the gateway waited in vain for the server behind it, which may have done the work",
        failure_class=FailureClass.TIMEOUT,
        effect=Effect.UNKNOWN,
        statuses=frozenset({504}),
    ),
    Rule(
        name="http-5xx",
        source=RFC9110 + "#section-15.6",
        says="the server failed somewhere between receiving and answering",
        failure_class=FailureClass.PROCESSING,
        effect=Effect.UNKNOWN,
        statuses=range(500, 600),
    ),
    Rule(
        name="http-307-308",
        source=RFC9110 + "#section-15.4.8",
        says="the same request belongs to another address; this one did nothing",
        failure_class=FailureClass.VALIDATION,
        effect=Effect.NOT_APPLIED,
        statuses=frozenset({307, 308}),
        needs_person=True,
    ),
    Rule(
        name="http-answered-otherwise",
        source=RFC9110 + "#section-15.4.4",
        says="the vendor answered without an error status, so it may well have done the work",
        failure_class=FailureClass.PROCESSING,
        effect=Effect.UNKNOWN,
        statuses=range(100, 400),
    ),
)

WRAPPERS: tuple[Rule, ...] = (
    Rule(
        name="client-timeout",
        source="https://github.com/openai/openai-python#timeouts",
        says="the client gave up waiting and does not say in which phase",
        failure_class=FailureClass.TIMEOUT,
        effect=Effect.UNKNOWN,
        types=frozenset({"openai.APITimeoutError", "anthropic.APITimeoutError"}),
        wrapper=True,
    ),
    Rule(
        name="client-connection-error",
        source=REQUESTS,
        says="the connection failed and the client does not say in which phase",
        failure_class=FailureClass.PROCESSING,
        effect=Effect.UNKNOWN,
        types=_httpx("TransportError", "NetworkError", "ProtocolError")
        | {
            "builtins.ConnectionError",
            "requests.ConnectionError",
            "urllib3.HTTPError",
            "http.HTTPException",
            "urllib.URLError",
            "aiohttp.ClientError",
            "botocore.ConnectionError",
            "openai.APIConnectionError",
            "anthropic.APIConnectionError",
        },
        wrapper=True,
    ),
)

RULES: tuple[Rule, ...] = NEVER_LEFT + MAY_HAVE_LEFT + STATUSES + WRAPPERS
