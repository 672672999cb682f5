"""Anthropic, also behind other doors that pass its errors on."""

from airflow_runguard.core.failures.rule import Family, cap, prose, rate, words

FAMILY = Family(
    "Anthropic",
    "https://docs.anthropic.com/en/api/errors",
    packages=frozenset({"anthropic"}),
    hosts=("api.anthropic.com",),
    headers=("anthropic-",),
    rules=(
        cap(
            "anthropic-out-of-credit",
            "the account has no credit left or has reached its spending limit; waiting does not bring it back",
            # Said with status 400 and the code of an ordinary invalid request.
            text=prose(r"credit balance is too low|reached your specified (api )?usage limits|spend(ing)? limit"),
            statuses=frozenset({400, 402, 403, 429}),
        ),
        cap(
            "anthropic-suspended",
            "the organisation was switched off",
            text=prose(r"organization has been disabled"),
            statuses=frozenset({400, 401, 403}),
        ),
        rate(
            "anthropic-rate-limit",
            "too many requests or tokens for this moment",
            codes=words("rate_limit_error"),
            statuses=frozenset({429}),
        ),
        rate(
            # Within a stream that had begun (status 200) it is not this: tokens were made and paid.
            "anthropic-overloaded",
            "the service is overloaded and did not take the request",
            codes=words("overloaded_error"),
            statuses=frozenset({503, 529}),
            anywhere=True,
        ),
        rate(
            "anthropic-529",
            "the service is overloaded and did not take the request",
            statuses=frozenset({529}),
        ),
    ),
)
