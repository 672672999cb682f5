"""The general HTTP family: what transport errors, status codes and the usual codes mean for any vendor.

Data only, first match wins, general last. Transport rules stand before status rules, since an exception that carries
both (a proxy's refusal of a tunnel) is told apart by its class. A write is ``not_applied`` only where the request
provably never left, or where the vendor answered that it did not do it; everything that may have left is ``unknown``.
"""

from __future__ import annotations

from airflow_runguard.core.failures.rule import Family, Rule, cap, daily, prose, rate, refused, words
from airflow_runguard.core.record import Effect, FailureClass

RFC9110 = "https://www.rfc-editor.org/rfc/rfc9110"
HTTPX = "https://www.python-httpx.org/exceptions/"
REQUESTS = "https://requests.readthedocs.io/en/latest/api/#exceptions"


def _httpx(*names: str) -> frozenset[str]:
    """httpx, the httpcore below it, and the renamed copies that the openai and anthropic clients bring along."""
    return frozenset(f"{package}.{name}" for package in ("httpx", "httpx2", "httpcore", "httpcore2") for name in names)


NEVER_LEFT: tuple[Rule, ...] = (
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

# Codes and sentences that mean the same wherever they stand in an error's own fields; "quota exceeded" alone is none.
# Asked before the vendors': many doors speak the form of another (OpenAI's above all), and a word for too many requests
# stands beside the sentence that the credit or the day is used up.
MONEY_AND_DAYS: tuple[Rule, ...] = (
    refused(
        "http-card-declined",
        "payment declined; waiting does not change a decline",
        source="https://docs.stripe.com/declines/codes",
        statuses=range(400, 500),
        codes=words(
            """card_declined card_error do_not_honor payment_declined transaction_declined processor_declined
            insufficient_funds instrument_declined payment_method_declined issuer_declined"""
        ),
    ),
    cap(
        "http-out-of-credit",
        "the account has no credit left or has reached its spending limit; waiting does not bring it back",
        source="https://openrouter.ai/docs/api-reference/errors; https://api-docs.deepseek.com/quick_start/error_codes",
        statuses=range(400, 500),
        codes=words(
            """insufficient_quota insufficient_credits insufficient_credit insufficient_balance not_enough_credits
            out_of_credits no_credits credits_exhausted credit_limit_exceeded credit_limit_reached balance_too_low
            credit_balance_too_low billing_hard_limit_reached billing_limit_reached billing_not_active billing_error
            billing_required billing_disabled payment_required payment_overdue spend_limit_exceeded
            spending_limit_reached spending_limit_exceeded budget_exceeded account_overdue arrearage
            subscription_expired subscription_inactive subscription_required trial_expired plan_limit_reached
            plan_limit_exceeded usage_limit_reached"""
        ),
    ),
    cap(
        "http-account-suspended",
        "the account was suspended or switched off",
        source=RFC9110 + "#section-15.5.4",
        statuses=range(400, 500),
        codes=words(
            """account_suspended account_deactivated account_disabled account_locked account_closed account_inactive
            user_suspended organization_suspended tenant_suspended subscription_suspended"""
        ),
    ),
    refused(
        "http-card-declined-in-words",
        "payment declined; it is the payer's money that is missing, not ours, and only the sentence says so",
        source="https://docs.stripe.com/declines/codes",
        text=prose(
            r"\b(card|cardholder|payer|buyer|issuer|issuing bank|payment method)\b.{0,60}"
            r"\b(declined|refused|(insufficient|not enough)\W+(\w+\W+){0,2}(funds|balance|credit)\b)"
            r"|\b(insufficient|not enough)\W+(\w+\W+){0,2}(funds|balance|credit)\W+(on|in|of|with)\b.{0,30}"
            r"\b(card|cardholder|payer|buyer)\b"
            r"|\bdeclined by\b"
        ),
        statuses=frozenset({402}),
    ),
    cap(
        "http-out-of-credit-in-words",
        "the account has no credit left or was suspended; only the sentence says so",
        source=RFC9110 + "#section-15.5.3",
        text=prose(
            r"(insufficient|not enough|out of|no( more)?|low|exhausted)\W+(\w+\W+){0,2}(credits?|balance)\b"
            r"|(credits?|balance)\W+(\w+\W+){0,3}(exhausted|used up|too low|depleted|insufficient)"
            r"|(spend(ing)?|billing|budget) (hard )?limit|payment (is )?(overdue|past due)"
            r"|account (is |has been |was )?(temporarily )?(suspended|deactivated|disabled|past due)"
        ),
        statuses=frozenset({402, 403, 429}),
    ),
    cap(
        "http-payment-required-in-words",
        "the account must pay first; only the sentence says so",
        source=RFC9110 + "#section-15.5.3",
        text=prose(r"payment (is )?required"),
        # Not 402: there every client writes "Payment Required" itself, of a declined card as well.
        statuses=frozenset({403, 429}),
    ),
    daily(
        "http-daily-limit",
        "the allowance of the day (or longer) is used up",
        source="https://www.rfc-editor.org/rfc/rfc6585#section-4",
        statuses=range(400, 500),
        codes=words(
            """daily_limit_exceeded daily_limit_reached daily_quota_exceeded daily_rate_limit_exceeded
            dailylimitexceeded monthly_limit_exceeded monthly_quota_exceeded"""
        ),
    ),
    daily(
        "http-daily-limit-in-words",
        "the allowance of the day (or longer) is used up; only the sentence says so",
        source="https://www.rfc-editor.org/rfc/rfc6585#section-4",
        text=prose(
            r"\b(daily|monthly|per[ -]day|per[ -]month|24[ -]hours?)\b.{0,40}\b(limit|quota|cap|allowance|requests)\b"
            r"|\b(limit|quota|cap|allowance|requests)\b.{0,60}\b(daily|monthly|per[ -]day|per[ -]month|24[ -]hours?)\b"
        ),
        statuses=frozenset({429}),
        told=False,
    ),
)

THROTTLED = words(
    """rate_limit_exceeded rate_limit_error rate_limit_reached rate_limited ratelimited ratelimit
            rate_limit_hit too_many_requests too_many_requests_error throttled throttling throttle
            request_throttled requests_throttled throttling_exception request_limit_exceeded
            request_rate_limit_exceeded api_rate_limit_exceeded quota_rate_limit slow_down
            rate_limit_exceeded_error user_rate_limit_exceeded concurrency_limit_exceeded
            concurrent_limit_exceeded too_many_concurrent_requests"""
)
WORDS: tuple[Rule, ...] = (
    rate(
        "http-throttled-by-code",
        "too many requests for this moment; the code says so, whatever the status",
        source="https://www.rfc-editor.org/rfc/rfc6585#section-4",
        codes=THROTTLED,
        statuses=frozenset({400, 403, 420, 429, 503}),
    ),
    rate(
        "http-throttled-inside",
        "too many requests for this moment; said by a code inside an answer that looks like a success",
        source="https://shopify.dev/docs/api/usage/limits",
        codes=THROTTLED,
        also=words("inside"),
    ),
    rate(
        "http-403-told-to-wait",
        "refused for now: the vendor says when to come back, which it does not for a missing permission",
        source="https://www.rfc-editor.org/rfc/rfc9110#section-10.2.3",
        told=True,
        statuses=frozenset({403, 420}),
    ),
    rate(
        "http-403-in-words",
        "too many requests for this moment; only the sentence says so",
        source="https://www.rfc-editor.org/rfc/rfc6585#section-4",
        text=prose(r"(rate|request|api) limit (was |has been )?(exceeded|reached)|too many requests|throttled"),
        statuses=frozenset({403, 420}),
    ),
    cap(
        "http-429-never-again",
        "too many requests, and the vendor says that repeating it will not help",
        source="https://github.com/openai/openai-python",
        codes=words("x-should-retry=false"),
        statuses=frozenset({429}),
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
            "stripe.APIConnectionError",
        },
        wrapper=True,
    ),
)

FIRST = Family("money and days, whoever says so", RFC9110, MONEY_AND_DAYS)
FAMILY = Family("HTTP in general", RFC9110, NEVER_LEFT + MAY_HAVE_LEFT + WORDS + STATUSES + WRAPPERS)
