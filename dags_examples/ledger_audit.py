"""Every morning: does the ledger look right? The task fails, and the notifiers tell people, when it does not.

Work that was observed to be done twice, runs beyond their own history or an hour, bursts of errors, records that nobody
moves on. Comparing with what Airflow shows is ``airflow runguard audit``, which may read Airflow's metadata.
"""

import pendulum
from airflow.sdk import dag

from airflow_runguard import LedgerAuditOperator


@dag(schedule="0 6 * * *", start_date=pendulum.datetime(2026, 1, 1, tz="UTC"), catchup=False)
def ledger_audit():
    LedgerAuditOperator(task_id="audit", days=7, alarm_after=3600)


ledger_audit()
