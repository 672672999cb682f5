"""The engine: plain Python, psycopg and redis. Never imports Airflow."""
