"""Does this task look as if it had an effect outside? Read from its class and its source; nothing of it is run.

A hint for people who decide what to guard, so it says what it saw. It is wrong both ways: a call hidden in a library is
not seen, and a POST that only searches is.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from typing import Any

CLASSES = re.compile(
    r"Email|Smtp|Slack|Teams|Discord|Telegram|Twilio|Pagerduty|Opsgenie|Sns|Sqs|Publish|Stripe|Payment|Charge|Refund"
    r"|Payout|OpenAI|Anthropic|Bedrock|Vertex|Cohere|Salesforce|Zendesk|Jira",
    re.IGNORECASE,
)
"""Names of operators that send, pay or buy."""
CHANGES_ROWS = re.compile(r"\b(insert|update|delete|merge|call|truncate)\b", re.IGNORECASE)
WRITING_METHODS = {"post", "put", "patch", "delete"}
CLIENTS = {"requests", "httpx", "session", "client", "http", "aiohttp"}
VENDORS = {"stripe", "paypalrestsdk", "braintree", "adyen", "smtplib", "twilio", "openai", "anthropic", "sendgrid"}
VERBS = re.compile(r"^(charge|refund|pay|payout|pay_out|transfer|invoice|send|publish|notify|order|purchase|book)(_|$)")
SENDS = re.compile(r"curl\b.*(-X\s*(POST|PUT|PATCH|DELETE)|--data|\s-d\s)|\b(sendmail|aws (sns|ses|sqs))\b", re.DOTALL)


def why_effect(task: Any) -> str:
    """What makes it look like an effect ('' = nothing does)."""
    cls = getattr(task, "operator_class", type(task))
    arguments = getattr(task, "partial_kwargs", None) or vars(task)
    method = str(arguments.get("method") or "").upper()
    if "http" in cls.__name__.lower() and method and method not in ("GET", "HEAD", "OPTIONS"):
        return f"{cls.__name__} sends {method}"
    if CLASSES.search(cls.__name__):
        return f"{cls.__name__} sends, pays or buys by its name"
    sql = arguments.get("sql")
    if isinstance(sql, str | list) and (found := CHANGES_ROWS.search(" ".join([sql] if isinstance(sql, str) else sql))):
        return f"its SQL says {found[0].lower()}"
    command = arguments.get("bash_command")
    if isinstance(command, str) and (found := SENDS.search(command)):
        return f"its command says {found[0].split()[0]}"
    function = arguments.get("python_callable")
    return "" if function is None else _in_source(function)


def _in_source(function: Any) -> str:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function))))
    except (OSError, TypeError, SyntaxError):
        return ""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and (name := _dotted(node.func)):
            *owner, last = name.split(".")
            if last in WRITING_METHODS and owner and owner[-1].lower().strip("_") in CLIENTS:
                return f"its function calls {name}"
            if owner and owner[0] in VENDORS:
                return f"its function calls {name}"
            if VERBS.match(last):
                return f"its function calls {name}"
    return ""


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        before = _dotted(node.value)
        return f"{before}.{node.attr}" if before else node.attr
    return ""
