"""An existing task, booked without a change of its code: by callbacks.

It is observed, not guarded: it runs as before, its runs are in the ledger, and ``airflow runguard audit`` says when the
same work was done twice. For whole DAGs there is ``[runguard] observe_dags``, which needs no change at all.
"""

import pendulum
from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import dag

from airflow_runguard import ledger_callbacks


@dag(schedule="@daily", start_date=pendulum.datetime(2026, 1, 1, tz="UTC"), catchup=False)
def callbacks_on_a_task():
    BashOperator(
        task_id="export",
        bash_command="echo exported {{ ds }}",
        **ledger_callbacks(key="export/{{ ds }}", namespace="exports"),
    )


callbacks_on_a_task()
