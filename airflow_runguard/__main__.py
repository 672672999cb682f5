"""``python -m airflow_runguard … --dsn URL``: every command without Airflow, for where its own CLI is out of reach."""

import sys

from airflow_runguard.cli import main

if __name__ == "__main__":
    sys.exit(main())
