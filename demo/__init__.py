"""What the demo, the tests and the benchmarks run against: real servers, a fake vendor, a real Airflow.

``processes`` starts and ends processes, ``servers`` holds PostgreSQL, Redis and PgBouncer, ``vendor`` the HTTP server
that counts charges, ``stack`` Airflow, ``airflow_api`` its REST API. Plain tooling: nothing here knows the engine.
"""
