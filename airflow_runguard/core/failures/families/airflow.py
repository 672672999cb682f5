"""Airflow's own errors around a vendor's: the HTTP hook's, and the task's timeout.

The status that ``AirflowException`` itself has is what Airflow's API would answer, and never read; that in its text is
the vendor's (``HttpHook``: "429:Too Many Requests") and falls under the general rules.
"""

from airflow_runguard.core.failures.rule import Family, open_end, refused
from airflow_runguard.core.record import FailureClass

FAMILY = Family(
    "Airflow",
    "https://airflow.apache.org/docs/apache-airflow-providers-http/stable/operators.html",
    packages=frozenset({"airflow"}),
    rules=(
        open_end(
            "airflow-task-timeout",
            "the task's execution_timeout struck; the vendor may have done the work",
            failure_class=FailureClass.TIMEOUT,
            types=frozenset({"airflow.AirflowTaskTimeout", "airflow.AirflowSensorTimeout"}),
        ),
        refused(
            "airflow-http-method",
            "the hook refused the request before sending it",
            types=frozenset({"airflow.HttpMethodException"}),
        ),
    ),
)
