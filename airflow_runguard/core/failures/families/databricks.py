"""Databricks: the SDK keeps a status in the class and the wait in ``retry_after_secs``.

RESOURCE_EXHAUSTED and REQUEST_LIMIT_EXCEEDED are kinds of TooManyRequests in the SDK (``errors/platform.py`` of
databricks-sdk), whatever the status; the error object is that of https://docs.databricks.com/api/account/errors.
"""

from airflow_runguard.core.failures.rule import Family, cap, rate, refused, undone, words

FAMILY = Family(
    "Databricks",
    "https://docs.databricks.com/aws/en/resources/limits",
    packages=frozenset({"databricks"}),
    hosts=(".cloud.databricks.com", ".azuredatabricks.net", ".gcp.databricks.com"),
    headers=("x-databricks-",),
    rules=(
        cap(
            "databricks-limit",
            "a limit on what may exist, or the account's budget, is reached",
            codes=words(
                "RESOURCE_LIMIT_EXCEEDED QUOTA_EXCEEDED MAX_LIST_SIZE_EXCEEDED CUSTOMER_UNAUTHORIZED "
                "WORKSPACE_SUSPENDED BUDGET_EXCEEDED"
            ),
        ),
        rate(
            "databricks-throttled",
            "too many requests for this moment",
            codes=words("REQUEST_LIMIT_EXCEEDED RESOURCE_EXHAUSTED RATE_LIMIT_EXCEEDED TOO_MANY_REQUESTS"),
            statuses=frozenset({400, 403, 429}),
        ),
        undone(
            "databricks-retry-later",
            "the cluster or the object was not in a state to take it",
            codes=words("INVALID_STATE_TRANSITION_RETRY"),
        ),
        refused(
            "databricks-refused",
            "Databricks refused the request as it stands",
            codes=words("FEATURE_DISABLED INVALID_PARAMETER_VALUE PERMISSION_DENIED MALFORMED_REQUEST"),
            statuses=range(400, 500),
        ),
    ),
)
