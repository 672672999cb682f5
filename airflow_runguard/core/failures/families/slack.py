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
        refused(
            # Of a value that nobody raised, only the word tells that it is Slack's.
            "slack-refused-by-word",
            "Slack refused the call as it stands",
            codes=words(
                """channel_not_found not_in_channel is_archived user_not_found users_not_found no_text msg_too_long
                too_many_attachments invalid_blocks invalid_arguments invalid_arg_name invalid_array_arg
                invalid_charset invalid_form_data invalid_json invalid_post_type missing_post_type missing_charset
                json_not_object missing_argument unknown_method method_deprecated deprecated_endpoint invalid_auth
                not_authed access_denied no_permission missing_scope not_allowed_token_type token_expired
                token_revoked ekm_access_denied enterprise_is_restricted org_login_required restricted_action
                restricted_action_read_only_channel restricted_action_thread_only_channel
                restricted_action_non_threadable_channel restricted_action_thread_locked cannot_reply_to_message
                duplicate_channel_not_found duplicate_message_not_found as_user_not_supported message_not_found
                cant_update_message cant_delete_message edit_window_closed name_taken invalid_name
                two_factor_setup_required accesslimited not_in_team cannot_dm_bot time_in_past time_too_far"""
            ),
        ),
    ),
)
