"""HubSpot: the policy's name tells the limit of the day from that of ten seconds."""

from airflow_runguard.core.failures.rule import Family, daily, prose, rate, words

FAMILY = Family(
    "HubSpot",
    "https://developers.hubspot.com/docs/api/usage-details",
    packages=frozenset({"hubspot"}),
    hosts=("api.hubapi.com", "api.hubspot.com", "api.hsforms.com"),
    headers=("x-hubspot-",),
    codes=words("policyName=DAILY policyName=TEN_SECONDLY_ROLLING policyName=SECONDLY category=RATE_LIMITS"),
    rules=(
        daily(
            "hubspot-day",
            "the requests of the day are used up",
            codes=words("DAILY DAILY_LIMIT"),
            statuses=frozenset({429}),
        ),
        daily(
            "hubspot-day-in-words",
            "the requests of the day are used up",
            text=prose(r"\bdaily limit"),
            statuses=frozenset({429}),
        ),
        rate(
            "hubspot-rate-limit",
            "too many requests for this moment",
            codes=words("TEN_SECONDLY_ROLLING SECONDLY RATE_LIMITS RATE_LIMIT"),
            statuses=frozenset({429}),
        ),
        rate(
            "hubspot-migration",
            "the account is being moved to another data centre and takes nothing meanwhile",
            statuses=frozenset({477}),
        ),
    ),
)
