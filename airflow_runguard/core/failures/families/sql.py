"""SQL drivers: PostgreSQL (psycopg, psycopg2, asyncpg), MySQL and MariaDB, SQLAlchemy, and DB-API classes in general.

A server that reports an error has rolled the statement back, which is what ``not_applied`` says of it; several
statements that were committed one by one are several calls. A connection that broke says nothing. SQLSTATEs are those
of PostgreSQL's appendix, numbers those of https://dev.mysql.com/doc/mysql-errors/8.4/en/server-error-reference.html.
"""

import re

from airflow_runguard.core.failures.reading import names
from airflow_runguard.core.failures.rule import Family, cap, daily, open_end, prose, rate, refused, undone
from airflow_runguard.core.record import FailureClass

DRIVERS = names("""
    psycopg psycopg2 asyncpg pg8000 pymysql MySQLdb mysql aiomysql sqlite3 oracledb cx_Oracle pyodbc pymssql snowflake
    duckdb trino prestodb redshift_connector
""")


def _classes(*classes: str) -> frozenset[str]:
    return frozenset(f"{driver}.{name}" for driver in DRIVERS for name in classes)


ANY_ERROR = _classes("Error", "PostgresError", "MySQLError")
MYSQL = frozenset({"pymysql.Error", "MySQLdb.Error", "mysql.Error", "pymysql.MySQLError", "MySQLdb.MySQLError"})


def _states(*begin: str) -> re.Pattern[str]:
    """SQLSTATEs that begin like these; one that has digits only is read as a number under its field's name."""
    return prose(rf"^((sqlstate|pgcode)=)?({'|'.join(b + '[0-9a-z]' * (5 - len(b)) for b in begin)})$")


def _mysql(*numbers: int) -> frozenset[str]:
    return frozenset(f"errno={number}" for number in numbers)


FAMILY = Family(
    "SQL drivers",
    "https://www.postgresql.org/docs/current/errcodes-appendix.html",
    packages=frozenset({*DRIVERS, "sqlalchemy", "psycopg_pool"}),
    rules=(
        undone(
            "sql-pool",
            "no connection of the client's pool became free, so the statement never left",
            types=frozenset({"psycopg_pool.PoolTimeout", "psycopg2.PoolError", "sqlalchemy.TimeoutError"}),
            names_phase=True,
        ),
        open_end(
            "sql-completion-unknown",
            "the database itself does not know whether the statement was carried out",
            code_like=_states("40003", "08007"),
        ),
        rate(
            "sql-too-many-connections",
            "the server takes no more connections for this moment, so the statement never left",
            code_like=_states("53300", "57p03"),
        ),
        rate(
            "mysql-too-many-connections",
            "the server takes no more connections for this moment, so the statement never left",
            types=MYSQL,
            codes=_mysql(1040, 1203),
        ),
        daily(
            "mysql-statements-of-the-hour",
            "the statements or connections that this user may have in an hour are used up",
            types=MYSQL,
            codes=_mysql(1226),
            floor=60.0,
        ),
        cap(
            "sql-full",
            "the disk or a configured limit is full; somebody must make room",
            code_like=_states("53100", "53400", "54"),
        ),
        cap(
            "mysql-full",
            "the disk or a table is full; somebody must make room",
            types=MYSQL,
            codes=_mysql(1021, 1114),
        ),
        undone(
            "sql-rolled-back",
            "the statement was rolled back, since it collided with another one",
            code_like=_states("40", "55p03", "55006", "53200"),
        ),
        undone(
            "mysql-rolled-back",
            "the statement was rolled back, since it collided with another one",
            types=MYSQL,
            codes=_mysql(1205, 1213),
        ),
        undone(
            "sql-cancelled",
            "the server cancelled the statement and rolled it back",
            failure_class=FailureClass.TIMEOUT,
            code_like=_states("57014", "25p03", "57p05"),
            types=_classes("QueryCanceled", "QueryCanceledError", "OperationalError", "PostgresError"),
        ),
        undone(
            "mysql-cancelled",
            "the server stopped the statement and rolled it back",
            failure_class=FailureClass.TIMEOUT,
            types=MYSQL,
            codes=_mysql(1317, 3024, 1028, 1969),
        ),
        undone(
            "sql-not-connected",
            "no connection was established, so the statement never left",
            code_like=_states("08001", "08004"),
        ),
        undone(
            "mysql-not-connected",
            "no connection was established, so the statement never left",
            types=MYSQL,
            codes=_mysql(2002, 2003, 2005),
        ),
        undone(
            "sql-not-connected-in-words",
            "no connection was established, so the statement never left",
            types=_classes("OperationalError", "InterfaceError", "ConnectionTimeout"),
            # libpq's own sentences for a connection that it could not make; a lost one begins otherwise.
            text=prose(
                r"^\s*(connection (to server .{1,200} )?failed:|connection is bad|could not connect to server"
                r"|could not translate host name|connection timeout expired|\[errno -?\d+\] name or service)"
            ),
        ),
        open_end(
            "sql-connection-broke",
            "the connection broke while the statement was under way; the server may have carried it out",
            code_like=_states("08", "57p01", "57p02", "57p04", "58", "f0", "xx"),
        ),
        open_end(
            "mysql-connection-broke",
            "the connection broke while the statement was under way; the server may have carried it out",
            types=MYSQL,
            codes=_mysql(2006, 2013, 2014, 2055),
        ),
        refused(
            "sql-refused",
            "the database refused the statement as it stands",
            code_like=_states(
                "0a", "0l", "0p", "21", "22", "23", "25006", "28", "2b", "2f", "3d", "3f", "42", "44", "p0"
            ),
        ),
        refused(
            "mysql-login-refused",
            "the database refused the login or the right",
            types=MYSQL,
            codes=_mysql(1044, 1045, 1049, 1142, 1227, 1290),
        ),
        refused(
            "sql-refused-by-class",
            "the database refused the statement as it stands",
            types=_classes(
                "IntegrityError",
                "ProgrammingError",
                "DataError",
                "NotSupportedError",
                "IntegrityConstraintViolationError",
            ),
        ),
        open_end(
            "sql-broke-down",
            "the driver does not say in which phase it failed",
            types=ANY_ERROR,
        ),
        open_end(
            "sql-wrapper",
            "the statement failed and SQLAlchemy does not say in which phase",
            types=frozenset({"sqlalchemy.SQLAlchemyError"}),
            wrapper=True,
        ),
    ),
)
