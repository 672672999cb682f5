"""Everything at once: PostgreSQL with a ledger, Redis, the fake vendor and an Airflow that knows them.

``make up`` shows it to a person, ``make demo`` drives accidents on it. The rule of this room: whatever happens while it
is set up or used, Ctrl-C included, all of it is ended before the caller goes on.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Self

import psycopg

from demo.servers import Postgres, Redis
from demo.stack import AirflowStack
from demo.vendor import Vendor
from demo.vendor_control import VendorControl

ROOT = Path(__file__).parent.parent
DEPLOYMENT = "demo"


class Ground:
    """A fresh stage; what an earlier one left in ``home`` is removed first.

    :param home: directory for all data and logs.
    :param dags_folder: what Airflow runs; its tasks find the vendor's address in ``RUNGUARD_VENDOR_URL``.
    :param say: hears what is being done, line by line.
    :param port: of Airflow's web page; default: a free one.
    :param env: further environment variables of Airflow.
    :param with_redis: ``False`` = there is no ``redis``, and no Connection to one.
    """

    def __init__(
        self,
        home: Path,
        dags_folder: Path,
        say: Callable[[str], None],
        port: int | None = None,
        env: Mapping[str, str] | None = None,
        with_redis: bool = True,
    ) -> None:
        self.home, self.dags_folder, self.say, self.port = home.resolve(), dags_folder, say, port
        self.env, self.with_redis = dict(env or {}), with_redis
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            shutil.rmtree(self.home, ignore_errors=True)
            self.say("PostgreSQL, Redis and the fake vendor ...")
            self.postgres = stack.enter_context(Postgres(self.home / "postgres"))
            lease = {}
            if self.with_redis:
                self.redis = stack.enter_context(Redis(self.home / "redis"))
                lease = {"AIRFLOW_CONN_RUNGUARD_REDIS": self.redis.url}
            self.vendor = stack.enter_context(Vendor())
            self.control = VendorControl(self.vendor.url)
            self.ledger_url = self.postgres.create_database("ledger")
            shop = self.postgres.create_database("shop")  # what the examples' SQL changes
            with psycopg.connect(shop) as connection:
                connection.execute("create table account (customer text primary key, balance bigint not null)")
                connection.execute("insert into account values ('cust-7', 10000)")
            run_guard("db", "upgrade", "--dsn", self.ledger_url, "--deployment", DEPLOYMENT)
            self.say("Airflow: metadata, scheduler, api-server, dag-processor, triggerer ...")
            environment = {
                "AIRFLOW_CONN_RUNGUARD_LEDGER": self.ledger_url,
                **lease,
                "AIRFLOW__RUNGUARD__DEPLOYMENT": DEPLOYMENT,
                "RUNGUARD_VENDOR_URL": self.vendor.url,
                "AIRFLOW_CONN_RUNGUARD_VENDOR": self.vendor.url,
                "AIRFLOW_CONN_SHOP_DB": shop,
                **self.env,
            }
            self.airflow = AirflowStack(self.home / "airflow", self.dags_folder, self.port, environment)
            stack.enter_context(self.airflow)
            self.airflow.wait_healthy(progress=lambda name: self.say(f"  {name} is healthy"))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def run_guard(*arguments: str) -> str:
    """``python -m airflow_runguard …``; its output.

    :raises RuntimeError: it exited with an error; carries what it said.
    """
    command = [sys.executable, "-m", "airflow_runguard", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"airflow_runguard {arguments[0]} failed:\n{done.stderr.strip() or done.stdout.strip()}")
    return done.stdout
