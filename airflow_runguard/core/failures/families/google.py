"""Google: REST errors with reasons, gRPC codes, Gemini, BigQuery and Google Ads.

The status alone tells little: a rate limit and a missing permission are both 403. A reason or an ``ErrorInfo`` tells.
Quota ids (``…PerDay…``) are read as part of the message.
"""

from airflow_runguard.core.failures.rule import Family, cap, daily, open_end, prose, rate, refused, undone, words
from airflow_runguard.core.record import FailureClass

FAMILY = Family(
    "Google",
    "https://cloud.google.com/apis/design/errors",
    packages=frozenset({"google", "googleapiclient"}),
    hosts=(".googleapis.com", ".google.com"),
    headers=("x-goog-", "x-google-"),
    codes=words("usageLimits googleapis.com RESOURCE_EXHAUSTED"),
    rules=(
        cap(
            "google-billing",
            "billing is off, or the project was suspended",
            codes=words(
                "billingNotEnabled BILLING_DISABLED accountDisabled CONSUMER_SUSPENDED projectSuspended "
                "paymentRequired USER_PROJECT_ACCOUNT_PROBLEM accountDelinquent billingDisabled"
            ),
        ),
        cap(
            "google-full",
            "a limit on what may exist is reached; something must be removed or the limit raised",
            codes=words(
                "storageQuotaExceeded teamDriveFileLimitExceeded activeItemCreationLimitExceeded "
                "numChildrenInNonRootLimitExceeded accountQuotaExceeded"
            ),
        ),
        refused(
            "google-refused",
            "the API is not enabled or the caller may not do this; no quota is at fault",
            codes=words(
                "accessNotConfigured SERVICE_DISABLED insufficientPermissions forbidden ipRefererBlocked keyInvalid "
                "keyExpired API_KEY_INVALID API_KEY_SERVICE_BLOCKED API_KEY_HTTP_REFERRER_BLOCKED "
                "ACCESS_TOKEN_SCOPE_INSUFFICIENT IAM_PERMISSION_DENIED SERVICE_NOT_AVAILABLE_IN_LOCATION "
                "accessDenied domainPolicy quotaerrorACCESSPROHIBITED"
            ),
        ),
        daily(
            "google-daily-limit",
            "the allowance of the day is used up; it is reset once a day",
            codes=words("dailyLimitExceeded dailyLimitExceededUnreg quotaExceeded DAILY_LIMIT_EXCEEDED"),
        ),
        daily(
            "google-quota-per-day",
            "the quota that is used up is one per day, whatever delay the answer names",
            codes=words("RESOURCE_EXHAUSTED RATE_LIMIT_EXCEEDED rateLimitExceeded userRateLimitExceeded"),
            text=prose(r"per[ _-]?day\b|perday|/d/|daily limit"),
        ),
        daily(
            "google-ads-operations",
            "the developer token's operations of the day are used up",
            codes=words("quotaerrorRESOURCEEXHAUSTED"),
            anywhere=True,
        ),
        rate(
            "google-rate-limit",
            "too many requests for this moment",
            codes=words(
                "rateLimitExceeded userRateLimitExceeded RATE_LIMIT_EXCEEDED sharingRateLimitExceeded "
                "concurrentLimitExceeded jobRateLimitExceeded servingLimitExceeded variableTermLimitExceeded "
                "tableUnavailable quotaerrorRESOURCETEMPORARILYEXHAUSTED RESOURCE_TEMPORARILY_EXHAUSTED "
                "quotaerrorEXCESSIVESHORTTERMQUERYRESOURCECONSUMPTION"
            ),
            statuses=frozenset({400, 403, 429}),
        ),
        undone(
            "google-message-too-big",
            "the client refused to send a message of this size",
            failure_class=FailureClass.VALIDATION,
            needs_person=True,
            types=frozenset({"grpc.RpcError"}),
            text=prose(r"sent message larger than max"),
            anywhere=True,
        ),
        rate(
            "google-exhausted",
            "a quota is used up for this moment",
            codes=words("RESOURCE_EXHAUSTED"),
            statuses=frozenset({403, 429}),
        ),
        open_end(
            "google-retried-until-the-deadline",
            "the client repeated the request until its deadline and tells of the last attempt only",
            types=frozenset({"google.RetryError"}),
            failure_class=FailureClass.TIMEOUT,
        ),
    ),
)
