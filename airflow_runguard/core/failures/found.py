"""What a result was found to hold: the things that went wrong in it, and how much of it was done.

The nouns and the small readings that ``results.py`` (one answer) and ``bulks.py`` (many items) share. No form of any
vendor stands here, and nothing of what a fault means.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from airflow_runguard.core.failures.answer import Answer, answer_of
from airflow_runguard.core.failures.reading import item, names, read, response_status, type_keys
from airflow_runguard.core.failures.rule import Rule, open_end, refused
from airflow_runguard.core.record import FailureClass

ENVELOPE = open_end("result-says-error", "the answer says by itself that it is an error, and not what was done")
REFUSED = refused("result-refused", "the vendor took the request and refused what is in it")
REFUSED_UNDER_WAY = open_end(
    "result-refused-under-way",
    "a part of the query was refused while it was carried out",
    failure_class=FailureClass.VALIDATION,
)

# Families whose forms are known here, by their names.
ANTHROPIC, AWS, ELASTIC, GOOGLE = "Anthropic", "AWS", "Elasticsearch, OpenSearch", "Google"
GRAPH, META, OPENAI = "Microsoft Graph, Azure", "Meta", "OpenAI, Azure OpenAI"
SALESFORCE, SHOPIFY, SLACK = "Salesforce", "Shopify", "Slack"


class Unchecked(Exception):
    """The error that a client would have raised of a response, had anybody asked it to."""

    def __init__(self, response: Any) -> None:
        super().__init__(f"a response with HTTP status {response_status(response)}, which nobody checked")
        self.response = response


@dataclass(slots=True)
class Fault:
    """One thing that went wrong.

    :param otherwise: what it means where no vendor's rule knows it; believed, since it goes by the form.
    :param never: it costs more than there will ever be.
    :param answered: it stands in a response, whose host and headers say whose it is.
    """

    answer: Answer = field(default_factory=Answer)
    otherwise: Rule = ENVELOPE
    label: str = "the result"
    error: BaseException | None = None
    never: bool = False
    answered: bool = False


@dataclass(slots=True)
class Found:
    """:param done: items that were done. :param partial: why a part of it may have been done, where none is counted."""

    faults: list[Fault] = field(default_factory=list)
    done: int = 0
    partial: str = ""


_RESPONSES = names("""
    requests.Response httpx.Response httpx2.Response aiohttp.ClientResponse urllib3.BaseHTTPResponse
    urllib3.HTTPResponse http.HTTPResponse urllib.addinfourl httplib2.Response niquests.Response curl_cffi.Response
    tornado.HTTPResponse
""")


def unchecked(value: object) -> Fault | None:
    """A client's response with an error status is judged as the error it did not raise; another object with such a
    number may be anything.
    """
    status = None if type(value) is dict else response_status(value)
    if status is None or status < 400:
        return None
    cls: Any = type(value)
    if not _RESPONSES.isdisjoint(type_keys(cls)):
        return Fault(error=Unchecked(value))
    return Fault(answer_of(value, frozenset(), {"response": value}), label=f"HTTP {status} in an object")


# How classes list their fields: data classes, pydantic, attrs, named tuples, and clients made by the OpenAPI generator.
_LISTINGS = ("__dataclass_fields__", "model_fields", "__attrs_attrs__", "_fields", "openapi_types", "swagger_types")


def fields_of(value: object) -> Any:
    """A data class, a named tuple or a client's model as a mapping; anything else as it is."""
    if isinstance(value, Mapping | list | str | bytes | int | float) or type(value) is tuple or value is None:
        return value
    cls = type(value)
    for listing in _LISTINGS:
        listed = read(cls, listing)
        if isinstance(listed, Mapping | tuple) and listed:
            named = (one if isinstance(one, str) else read(one, "name") for one in listed)
            return {name: read(value, name) for name in named if isinstance(name, str)}
    return value


def plain(value: object, depth: int = 4) -> Any:
    """:func:`fields_of`, of what is inside as well."""
    value = fields_of(value)
    if depth and isinstance(value, Mapping):
        return {name: plain(one, depth - 1) for name, one in value.items()}
    if depth and isinstance(value, list | tuple):
        return [plain(one, depth - 1) for one in value[:50]]
    return value


def only(document: Any, allowed: frozenset[str]) -> bool:
    """A documented form: a mapping that has no other fields than these."""
    return isinstance(document, Mapping) and document.keys() <= allowed


def count(document: Any, *listed: str) -> int:
    """The first of these fields that has a number above zero; 0 where none has."""
    found = (item(document, name) for name in listed)
    return next((number for number in found if isinstance(number, int) and number > 0), 0)
