"""OpenAI, Azure OpenAI, and the many that speak their form of error."""

from airflow_runguard.core.failures.rule import Family, cap, prose, rate, words

FAMILY = Family(
    "OpenAI, Azure OpenAI",
    "https://platform.openai.com/docs/guides/error-codes/api-errors",
    packages=frozenset({"openai"}),
    hosts=("api.openai.com", ".openai.azure.com", ".cognitiveservices.azure.com", ".services.ai.azure.com"),
    headers=("openai-",),
    rules=(
        cap(
            "openai-out-of-credit",
            "the account has no credit left or has reached its spending limit; waiting does not bring it back",
            codes=words("insufficient_quota billing_hard_limit_reached billing_not_active billing_error"),
            anywhere=True,
        ),
        cap(
            "openai-suspended",
            "the account, organisation or project was switched off",
            codes=words("account_deactivated access_terminated organization_deactivated project_archived"),
            anywhere=True,
        ),
        rate(
            "openai-rate-limit",
            "too many requests or tokens for this moment",
            codes=words("rate_limit_exceeded rate_limit_error tokens requests code=429"),
            statuses=frozenset({429}),
        ),
        rate(
            "openai-overloaded",
            "the service is overloaded and did not take the request",
            codes=words("slow_down server_overloaded engine_overloaded"),
            statuses=frozenset({429, 503}),
        ),
        cap(
            "openai-out-of-credit-in-words",
            "the account has no credit left; only the sentence says so, since the code was lost",
            text=prose(r"exceeded your current quota|check your plan and billing|billing hard limit"),
            statuses=frozenset({429}),
        ),
    ),
)
