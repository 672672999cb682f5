"""An Airflow of the tests' own: a throw-away AIRFLOW_HOME, said before anything imports Airflow.

Whatever Airflow the developer has is neither read nor written. Importing this room is what does it; the metadata are
made by the tests that need them (``doors/conftest.py``).
"""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

HOME = Path(tempfile.mkdtemp(prefix="runguard-airflow-"))
atexit.register(shutil.rmtree, HOME, ignore_errors=True)
(HOME / "dags").mkdir()

for name in [name for name in os.environ if name.startswith("AIRFLOW_")]:
    del os.environ[name]
os.environ.update(
    AIRFLOW_HOME=str(HOME),
    AIRFLOW__CORE__DAGS_FOLDER=str(HOME / "dags"),
    AIRFLOW__CORE__LOAD_EXAMPLES="False",
    AIRFLOW__CORE__UNIT_TEST_MODE="False",
    AIRFLOW__DATABASE__LOAD_DEFAULT_CONNECTIONS="False",
    AIRFLOW__API_AUTH__JWT_SECRET="of the tests, and long enough for HMAC with SHA-512, which wants sixty-four bytes",
    AIRFLOW__LOGGING__COLORED_CONSOLE_LOG="False",
    AIRFLOW__USAGE_DATA_COLLECTION__ENABLED="False",
)
