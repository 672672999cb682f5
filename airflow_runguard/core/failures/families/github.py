"""GitHub. Its rate limits come as 403 or 429; what tells them from a missing permission are headers and words."""

from airflow_runguard.core.failures.rule import Family, cap, prose, rate, words

FAMILY = Family(
    "GitHub",
    "https://docs.github.com/en/rest/using-the-rest-api/rate-limits-for-the-rest-api",
    packages=frozenset({"github", "github3", "gidgethub", "ghapi"}),
    hosts=("api.github.com", "uploads.github.com"),
    headers=("x-github-",),
    rules=(
        cap(
            "github-account",
            "the account is suspended or its payments failed",
            text=prose(r"account (was|is|has been) suspended|payments have failed|spending limit"),
            statuses=frozenset({402, 403}),
        ),
        rate(
            "github-secondary-limit",
            "too much at once for one account; GitHub asks for a minute at least",
            text=prose(r"secondary rate limit|abuse detection|temporarily blocked from content creation"),
            statuses=frozenset({403, 429}),
            floor=60.0,
            anywhere=True,
        ),
        rate(
            "github-primary-limit",
            "the requests of this hour are used up",
            types=frozenset({"github.RateLimitExceededException", "gidgethub.RateLimitExceeded"}),
        ),
        rate(
            "github-told-to-wait",
            "a rate limit: GitHub says when to come back, which it does not for a missing permission",
            told=True,
            statuses=frozenset({403, 429}),
        ),
        rate(
            "github-rate-limit-in-words",
            "the requests of this hour are used up",
            text=prose(r"rate limit exceeded"),
            statuses=frozenset({403}),
        ),
        rate("github-graphql", "the points of this hour are used up", codes=words("RATE_LIMITED RATE_LIMIT")),
    ),
)
