"""Rows written by a function, with the proof in the same transaction: nobody ever has to ask whether they are there.

``guard.sql`` commits a marker together with the rows; a try that was killed finds it and gives the result back. Reads
the Connection ``shop_db``.
"""

import pendulum
from airflow.sdk import dag

from airflow_runguard import GuardContext, guarded_task


def insert_order(connection, customer: str, cents: int) -> int:
    """No commit in here: the guard commits the row and its proof as one."""
    with connection.cursor() as cursor:
        cursor.execute('insert into "order" (customer, cents) values (%s, %s) returning id', [customer, cents])
        return cursor.fetchone()[0]


@dag(schedule="@daily", start_date=pendulum.datetime(2026, 1, 1, tz="UTC"), catchup=False)
def sql_insert():
    @guarded_task(key="order/{{ ds }}/{{ args.customer }}")
    def book(guard: GuardContext, customer: str, cents: int) -> int:
        return guard.sql("book", "shop_db", insert_order, customer, cents)

    book("cust-7", 500)


sql_insert()
