"""Meta: Graph and Marketing API, Instagram, WhatsApp. Status 400 for nearly everything; the number tells."""

from airflow_runguard.core.failures.rule import Family, cap, daily, open_end, rate, refused, words


def _numbers(*numbers: int) -> frozenset[str]:
    return frozenset(f"code={number}" for number in numbers)


FAMILY = Family(
    "Meta",
    "https://developers.facebook.com/docs/graph-api/overview/rate-limiting",
    packages=frozenset({"facebook_business", "facebook"}),
    hosts=("graph.facebook.com", "graph.instagram.com", "graph.threads.net", "graph-video.facebook.com"),
    headers=("x-fb-", "facebook-api-", "x-app-usage", "x-business-use-case-usage", "x-ad-account-usage"),
    codes=words("OAuthException GraphMethodException"),
    rules=(
        cap(
            "meta-account",
            "the account is blocked, restricted or not paid",
            codes=_numbers(368, 131031, 131042, 131045, 1487390, 2635),
        ),
        daily(
            "meta-messages-of-the-day",
            "the messages that this number may send in 24 hours are used up, or held back as spam",
            codes=_numbers(131048, 80008),
        ),
        rate(
            "meta-rate-limit",
            "too many calls of this app, user, page or account for this hour",
            codes=_numbers(4, 17, 32, 341, 613, 130429, 131056, 133016, *range(80_000, 80_015)),
            floor=60.0,
        ),
        open_end("meta-broke-down", "Meta does not say what happened", codes=_numbers(1, 2, 131000, 131016)),
        refused(
            "meta-refused",
            "Meta refused the call as it stands",
            codes=_numbers(3, 10, 100, 102, 190, 506, *range(200, 300)),
            statuses=range(400, 500),
        ),
    ),
)
