"""The engine: plain Python, psycopg and hiredis. Never imports Airflow."""
