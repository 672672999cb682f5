"""Slack: mostly HTTP 200 with ``ok: false`` and one word."""

from airflow_runguard.core.failures.rule import Family, cap, open_end, rate, refused, words

FAMILY = Family(
    "Slack",
    "https://api.slack.com/apis/rate-limits",
    packages=frozenset({"slack_sdk", "slack", "slack_bolt"}),
    hosts=("slack.com", ".slack.com"),
    headers=("x-slack-",),
    rules=(
        rate(
            "slack-rate-limit",
            "too many requests for this moment",
            codes=words("ratelimited rate_limited"),
        ),
        rate(
            "slack-too-many-messages",
            "too many messages for this moment",
            codes=words("message_limit_exceeded"),
            floor=60.0,
        ),
        open_end(
            "slack-broke-down",
            "Slack broke down while it worked; some of it may have happened, as its own documentation says",
            codes=words("fatal_error internal_error"),
        ),
        open_end(
            "slack-unavailable",
            "Slack was not able to answer",
            codes=words("service_unavailable request_timeout timeout"),
        ),
        cap(
            "slack-account",
            "the workspace, its plan or the user is inactive",
            codes=words("account_inactive paid_only paid_teams_only team_deactivated user_is_deactivated"),
        ),
        refused(
            "slack-refused",
            "Slack refused the call as it stands",
            types=frozenset({"slack_sdk.SlackApiError", "slack.SlackApiError"}),
            statuses=frozenset({200}),
        ),
    ),
)
