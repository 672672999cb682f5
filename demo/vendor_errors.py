"""Errors as vendors' clients raise them, put together from the real exception classes."""

from __future__ import annotations

import json
from typing import Any

import anthropic
import httplib2
import httpx2
import openai
import requests
import slack_sdk.errors
import stripe
import tenacity
import urllib3.exceptions
from azure.cosmos.exceptions import CosmosHttpResponseError
from botocore.exceptions import ClientError
from elastic_transport import ApiResponseMeta, HttpHeaders, NodeConfig
from elasticsearch import ApiError
from google.api_core.exceptions import GoogleAPICallError, ResourceExhausted
from googleapiclient.errors import HttpError
from simple_salesforce.exceptions import SalesforceRefusedRequest
from slack_sdk.web import SlackResponse

Body = Any
Headers = dict[str, str]


def _bytes(body: Body) -> bytes:
    if body is None:
        return b""
    return body if isinstance(body, bytes) else body.encode() if isinstance(body, str) else json.dumps(body).encode()


def http(
    status: int, body: Body = None, headers: Headers | None = None, url: str = "https://api.example.test/v1"
) -> Any:
    response = requests.Response()
    response.status_code, response.url, response._content = status, url, _bytes(body)
    response.headers.update(headers or {})
    return requests.HTTPError("refused", response=response)


def _httpx(status: int, body: Body, headers: Headers | None) -> Any:
    request = httpx2.Request("POST", "https://api.example.test/v1")
    return httpx2.Response(status, headers=headers or {}, content=_bytes(body), request=request)


def of_openai(status: int, body: Body = None, headers: Headers | None = None) -> Any:
    kind: Any = openai.RateLimitError if status == 429 else openai.APIStatusError
    inner = body.get("error", body) if isinstance(body, dict) else body
    return kind("refused", response=_httpx(status, body, headers), body=inner)


def of_anthropic(status: int, body: Body = None, headers: Headers | None = None) -> Any:
    kind: Any = anthropic.RateLimitError if status == 429 else anthropic.APIStatusError
    return kind("refused", response=_httpx(status, body, headers), body=body)


def of_google(status: int, body: Body = None, headers: Headers | None = None) -> Any:
    return HttpError(httplib2.Response({"status": str(status), **(headers or {})}), _bytes(body), uri="u")


def of_grpc(
    details: list[Any] | None = None, message: str = "quota", kind: type[GoogleAPICallError] = ResourceExhausted
) -> Any:
    return kind(message, details=details or [])


def of_aws(code: str, status: int = 400, *, operation: str = "PutItem", message: str = "", **more: Any) -> Any:
    metadata = {"HTTPStatusCode": status, **more.pop("metadata", {})}
    response: Any = {"Error": {"Code": code, "Message": message}, "ResponseMetadata": metadata, **more}
    return ClientError(response, operation)


def of_stripe(kind: Any, status: int, error: dict[str, Any], headers: Headers | None = None) -> Any:
    body = {"error": error}
    how = {"http_body": json.dumps(body), "http_status": status, "json_body": body, "headers": headers or {}}
    return kind("refused", None, error.get("code"), **how) if kind is stripe.CardError else kind("refused", **how)


def of_slack(status: int, body: dict[str, Any], headers: Headers | None = None) -> Any:
    return slack_sdk.errors.SlackApiError(
        "refused",
        SlackResponse(  # type: ignore[no-untyped-call]
            client=None,
            http_verb="POST",
            api_url="u",
            req_args={},
            data=body,
            headers=headers or {},
            status_code=status,
        ),
    )


def of_salesforce(status: int, body: list[dict[str, str]]) -> Any:
    return SalesforceRefusedRequest("https://x.example.test/query", status, "query", body)


def of_cosmos(status: int, headers: Headers | None = None, message: str = "") -> Any:
    error: Any = CosmosHttpResponseError(status_code=status, message=message)
    error.headers = headers or {}
    return error


def of_elastic(status: int, body: Body, headers: Headers | None = None) -> Any:
    meta = ApiResponseMeta(
        status=status,
        http_version="1.1",
        headers=HttpHeaders(headers or {}),
        duration=1.0,
        node=NodeConfig("http", "localhost", 9200),
    )
    return ApiError("refused", meta, body)


def given_up(error: BaseException, attempts: int = 1) -> Any:
    last = tenacity.Future(attempts)
    last.set_exception(error)
    return tenacity.RetryError(last)


def unreachable(reason: Exception) -> Any:
    return requests.ConnectionError(urllib3.exceptions.MaxRetryError(None, "/x", reason))  # type: ignore[arg-type]
