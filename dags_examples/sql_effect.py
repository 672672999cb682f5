"""A database as the vendor: a statement that must not run twice.

``update … set balance = balance + 5`` is as little repeatable as a charge. The statement and its parameters are the
order: the same key with another amount is refused. Reads the Connection ``shop_db``.
"""

import pendulum
from airflow.providers.common.sql.operators.sql import SQLExecuteQueryOperator
from airflow.sdk import dag

from airflow_runguard import Guard, guarded


@dag(schedule="@daily", start_date=pendulum.datetime(2026, 1, 1, tz="UTC"), catchup=False)
def sql_effect():
    guarded(SQLExecuteQueryOperator)(
        task_id="credit_bonus",
        guard=Guard(key="bonus/{{ ds }}/cust-7"),
        conn_id="shop_db",
        sql="update account set balance = balance + %(cents)s where customer = %(customer)s returning balance",
        parameters={"customer": "cust-7", "cents": 500},
    )


sql_effect()
