"""Microsoft Graph, Azure Resource Manager, Cosmos DB and the other Azure clients."""

from airflow_runguard.core.failures.rule import Family, cap, open_end, prose, rate, words
from airflow_runguard.core.record import FailureClass

FAMILY = Family(
    "Microsoft Graph, Azure",
    "https://learn.microsoft.com/en-us/graph/errors",
    packages=frozenset({"msgraph", "msgraph_core", "kiota_abstractions", "azure", "O365"}),
    hosts=("graph.microsoft.com", ".azure.com", ".windows.net", ".azure.net", ".dynamics.com", ".sharepoint.com"),
    headers=("x-ms-", "client-request-id"),
    rules=(
        cap(
            "microsoft-subscription",
            "the subscription is switched off or has no credit left",
            codes=words(
                "SubscriptionNotRegistered DisabledSubscription ReadOnlyDisabledSubscription SubscriptionDisabled "
                "InsufficientCredits AccountIsDisabled"
            ),
        ),
        cap(
            "microsoft-full",
            "a quota of capacity or storage is reached; something must be removed or the quota raised",
            codes=words(
                "quotaLimitReached QuotaExceeded ErrorQuotaExceeded InsufficientQuota ResourceQuotaExceeded "
                "insufficientStorage AccountQuotaExceeded"
            ),
        ),
        cap(
            "microsoft-cores",
            "the approved cores of the subscription are used up",
            codes=words("OperationNotAllowed"),
            text=prose(r"exceeding approved .{0,60}quota"),
        ),
        cap("microsoft-storage", "the storage is full", statuses=frozenset({507})),
        rate(
            "microsoft-throttled",
            "too many requests for this moment",
            codes=words(
                """TooManyRequests activityLimitReached ApplicationThrottled MailboxConcurrency ErrorServerBusy
                ErrorMailboxStoreUnavailable SubscriptionRequestsThrottled OperationThrottled ServerBusy
                RequestThrottled tooManyRetries resourceRequestsThrottled"""
            ),
            statuses=frozenset({400, 403, 429, 503}),
        ),
        rate("microsoft-bandwidth", "the app's bandwidth is used up for this moment", statuses=frozenset({509})),
        open_end(
            "microsoft-timeout",
            "no answer in time; the service may have done the work",
            failure_class=FailureClass.TIMEOUT,
            codes=words("OperationTimedOut GatewayTimeout"),
        ),
    ),
)
