"""Snowflake's drivers and SQL API.

625 (SQLSTATE 57014, "the number of waiters for this lock exceeds …") aborts the statement that came last. 630 (57014,
too) is one that ran out of its time; the SQL API says 408:
https://docs.snowflake.com/developer-guide/sql-api/handling-errors.
"""

from airflow_runguard.core.failures.rule import Family, cap, open_end, prose, rate, refused, undone, words
from airflow_runguard.core.record import FailureClass

FAMILY = Family(
    "Snowflake",
    "https://docs.snowflake.com/en/user-guide/resource-monitors",
    packages=frozenset({"snowflake"}),
    hosts=(".snowflakecomputing.com", ".snowflakecomputing.cn"),
    rules=(
        cap(
            "snowflake-credits",
            "a resource monitor stopped the warehouse, or the account is suspended",
            text=prose(
                r"resource monitor .{0,200}exceeded its quota|exceeded its quota"
                r"|account (is|has been|was) (suspended|locked)|lack of (a )?payment|free trial has ended"
            ),
        ),
        rate(
            "snowflake-busy",
            "too many requests or waiting statements for this moment",
            # 290000 and the status: what the driver makes of an HTTP answer. The status alone stands in older ones.
            codes=words("errno=290429 errno=429"),
        ),
        open_end(
            "snowflake-unavailable",
            "the service is unavailable, which does not say what happened to the statement",
            codes=words("errno=390503 code=390503 errno=290503"),
        ),
        open_end(
            # Said of any request, also of one that was sent: no answer, a broken connection, retries spent.
            "snowflake-request-failed",
            "the driver gave up on the request and does not say in which phase",
            codes=words("errno=250003 errno=250005"),
        ),
        rate("snowflake-too-many", "too many requests for this moment", types=frozenset({"snowflake.TooManyRequests"})),
        undone(
            "snowflake-not-connected",
            "no connection was established, so the statement never left",
            codes=words("errno=250001"),
        ),
        undone(
            "snowflake-locked",
            "another statement holds the table, so that this one was rolled back",
            codes=words("errno=625 errno=635"),
        ),
        open_end(
            "snowflake-cancelled",
            "the statement was cancelled or ran out of time",
            failure_class=FailureClass.TIMEOUT,
            codes=words("errno=604 errno=630"),
        ),
        refused(
            "snowflake-refused",
            "Snowflake refused the statement or the login",
            codes=words(
                "errno=1003 errno=2003 errno=2043 errno=904 errno=606 errno=3001 errno=390100 errno=390101 "
                "errno=390102 errno=390144 errno=390189 errno=390201"
            ),
        ),
    ),
)
