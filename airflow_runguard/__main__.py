"""``python -m airflow_runguard … --dsn URL``: the commands without Airflow, for where its own CLI is out of reach.

``preview``, ``candidates``, ``baseline`` and ``reconcile`` need Airflow and refuse here; ``sweep`` asks no vendor.
"""

import sys

from airflow_runguard.cli import main

if __name__ == "__main__":
    sys.exit(main())
