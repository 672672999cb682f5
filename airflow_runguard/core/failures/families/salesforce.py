"""Salesforce. One code for two limits: that of the day, and that of requests at once; the message tells them apart."""

from airflow_runguard.core.failures.rule import Family, cap, daily, open_end, prose, rate, refused, undone, words
from airflow_runguard.core.record import FailureClass

FAMILY = Family(
    "Salesforce",
    "https://developer.salesforce.com/docs/atlas.en-us.api_rest.meta/api_rest/errorcodes.htm",
    packages=frozenset({"simple_salesforce", "salesforce_bulk"}),
    hosts=(".salesforce.com", ".force.com"),
    headers=("sforce-",),
    codes=words("REQUEST_LIMIT_EXCEEDED UNABLE_TO_LOCK_ROW API_DISABLED_FOR_ORG"),
    rules=(
        rate(
            "salesforce-concurrent",
            "too many long requests at once",
            codes=words("REQUEST_LIMIT_EXCEEDED"),
            text=prose(r"concurrent"),
        ),
        daily(
            "salesforce-day",
            "the API requests of the last 24 hours are used up",
            codes=words("REQUEST_LIMIT_EXCEEDED API_LIMIT_EXCEEDED"),
        ),
        daily(
            "salesforce-mails-of-the-day",
            "the e-mails of the day are used up",
            codes=words("SINGLE_EMAIL_LIMIT_EXCEEDED MASS_MAIL_LIMIT_EXCEEDED"),
        ),
        daily("salesforce-logins", "too many logins within the hour", codes=words("LOGIN_RATE_EXCEEDED")),
        cap(
            "salesforce-full",
            "a limit on what may exist, or the organisation's licence, is reached",
            codes=words(
                "STORAGE_LIMIT_EXCEEDED LIMIT_EXCEEDED LICENSE_LIMIT_EXCEEDED TRIAL_EXPIRED ORG_LOCKED "
                "MAXIMUM_SIZE_OF_ATTACHMENT INSUFFICIENT_CREDITS"
            ),
        ),
        undone(
            "salesforce-row-locked",
            "another request holds the record, so that this one was rolled back",
            codes=words("UNABLE_TO_LOCK_ROW"),
        ),
        open_end(
            "salesforce-ran-too-long",
            "the request ran too long and was stopped; what it did until then is not said",
            failure_class=FailureClass.TIMEOUT,
            codes=words("REQUEST_RUNNING_TOO_LONG QUERY_TIMEOUT UNKNOWN_EXCEPTION SERVER_UNAVAILABLE"),
        ),
        refused(
            "salesforce-refused",
            "Salesforce refused the request as it stands",
            types=frozenset({"simple_salesforce.SalesforceAuthenticationFailed"}),
        ),
    ),
)
