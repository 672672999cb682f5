"""A real Airflow on this machine: scheduler (LocalExecutor), api-server, dag-processor, triggerer.

Each component is a process of its own with its own log, started and ended by its own pid. The metadata lie in a
PostgreSQL of the stack's own: on SQLite a backfill ends in "database is locked", and the ledger's server must be free
to have accidents. Limits are short, so that
accidents that take minutes in production are seen in seconds. What a person does in the UI is done by
:mod:`demo.airflow_api`; what befalls processes (``kill -9``) starts from :meth:`AirflowStack.task_processes`.
"""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import psutil

from demo.airflow_api import AirflowApi
from demo.processes import ProcessFailed, Service, free_port, wait_for
from demo.servers import Postgres

USER = PASSWORD = "admin"
VIEWER = "viewer"
"""Somebody who may look only; the password is the same word."""

_SETTINGS = {
    "CORE__EXECUTOR": "LocalExecutor",
    "CORE__PARALLELISM": "8",
    "CORE__LOAD_EXAMPLES": "False",
    "CORE__DAGBAG_IMPORT_TIMEOUT": "240",  # by the default of 30 s a task on a busy machine starts a minute later
    "CORE__SIMPLE_AUTH_MANAGER_USERS": f"{USER}:admin,{VIEWER}:viewer",
    "CORE__MIN_SERIALIZED_DAG_UPDATE_INTERVAL": "1",
    "DATABASE__LOAD_DEFAULT_CONNECTIONS": "False",
    "API__HOST": "127.0.0.1",
    "API__WORKERS": "1",
    "SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.3",
    "SCHEDULER__SCHEDULER_HEARTBEAT_SEC": "2",
    "SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "12",
    "SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "2",
    "SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "15",  # what a killed scheduler left behind
    "SCHEDULER__TRIGGER_TIMEOUT_CHECK_INTERVAL": "5",
    "WORKERS__MIN_HEARTBEAT_INTERVAL": "2",
    "WORKERS__EXECUTION_API_TIMEOUT": "60",  # after 5 s, a task of a busy machine fails before it begins
    "DAG_PROCESSOR__REFRESH_INTERVAL": "10",
    "DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "120",  # else parsing the same files again takes a quarter of a core
    "DAG_PROCESSOR__PARSING_PROCESSES": "2",
    "DAG_PROCESSOR__DAG_FILE_PROCESSOR_TIMEOUT": "250",
    "LOGGING__COLORED_CONSOLE_LOG": "False",
    "USAGE_DATA_COLLECTION__ENABLED": "False",
}

_COMPONENTS = {  # the log servers of scheduler and triggerer would occupy fixed ports; the api-server reads the files
    "api-server": ["api-server"],
    "scheduler": ["scheduler", "--skip-serve-logs"],
    "dag-processor": ["dag-processor"],
    "triggerer": ["triggerer", "--skip-serve-logs"],
}


@dataclass(frozen=True)
class TaskProcesses:
    """The two processes of a running task instance: ``task`` runs the author's code, ``supervisor`` reports for it."""

    task: psutil.Process
    supervisor: psutil.Process


class AirflowStack:
    """An Airflow that lives from :meth:`start` to :meth:`stop`.

    :param home: AIRFLOW_HOME, with the logs of all processes.
    :param dags_folder: the DAG files.
    :param port: of the api-server on 127.0.0.1; default: a free one.
    :param env: further environment variables: Connections (``AIRFLOW_CONN_…``), options (``AIRFLOW__…``).
    """

    def __init__(
        self, home: Path, dags_folder: Path, port: int | None = None, env: Mapping[str, str] | None = None
    ) -> None:
        self.home = home.resolve()
        self.port = port or free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.api = AirflowApi(self.url, USER, PASSWORD)
        self.metadata = Postgres(self.home / "metadata", settings={"fsync": "off"})  # thrown away with the home
        self.env = self._environment(dags_folder.resolve()) | dict(env or {})
        self.services = {
            name: Service(
                f"airflow {name}",
                [sys.executable, "-m", "airflow", *arguments],
                log=self.home / f"{name}.log",
                env=self.env,
                patience=5.0,  # the scheduler would wait for running tasks for ever
            )
            for name, arguments in _COMPONENTS.items()
        }

    def start(self) -> Self:
        """Metadata are ready and all four processes started; see :meth:`wait_healthy`."""
        (self.home / "passwords.json").write_text(json.dumps({USER: PASSWORD, VIEWER: VIEWER}))
        self.metadata.start()
        self.run_cli("db", "migrate")  # each component looks for the schema as soon as it starts
        for service in self.services.values():
            service.start()
        return self

    def run_cli(self, *arguments: str) -> str:
        """``airflow …`` in the stack's environment; its output.

        :raises ProcessFailed: it exited with an error.
        """
        command = [sys.executable, "-m", "airflow", *arguments]
        done = subprocess.run(command, env=self.env, cwd="/", capture_output=True, text=True, check=False)
        if done.returncode:
            raise ProcessFailed(f"airflow {' '.join(arguments)} failed:\n{done.stderr[-2000:]}")
        return done.stdout

    def saw_it_park(self, dag_id: str, run_id: str, task_id: str) -> bool:
        """Whether the scheduler has seen the process end that parked the task. A form that is answered before that can
        fail the try (Airflow 3.3.2); no person reads so fast."""
        for log in self.home.glob("scheduler*.log"):
            parked = ended = -1
            for number, line in enumerate(log.read_text(errors="replace").splitlines()):
                if "Asking a person in Airflow" in line and f" dag_id={dag_id} " in line:
                    if f" run_id={run_id} task_id={task_id} " in line:
                        parked = number
                elif f"TaskInstance Finished: dag_id={dag_id}, task_id={task_id}, run_id={run_id}," in line:
                    ended = number
            if ended < parked:
                return False
        return True

    def wait_healthy(self, timeout: float = 300, progress: Callable[[str], None] = lambda _: None) -> None:
        """Return when all four components say that they are healthy; ``progress`` hears of each one once.

        :raises ProcessFailed: a component ended; with the end of its log.
        """
        reported: set[str] = set()

        def healthy() -> bool:
            for service in self.services.values():
                if not service.running:
                    raise ProcessFailed(f"{service.name} ended while starting.\n{service.log_tail(30)}")
            try:
                states = self.api.health()
            except OSError:
                return False  # the api-server does not listen yet
            for name, state in states.items():
                if state == "healthy" and name not in reported:
                    reported.add(name)
                    progress(name)
            return len(reported) == len(states)

        wait_for(healthy, timeout, "Airflow is healthy", pause=0.2)

    def stop(self) -> None:
        """All four are asked to end together; nothing of them or their tasks runs when this returns; repeatable."""
        with ThreadPoolExecutor(len(self.services)) as pool:
            list(pool.map(Service.stop, self.services.values()))
        self.metadata.close()

    def restart(self, component: str) -> None:
        """Stop and start one of the four."""
        self.services[component].stop()
        self.services[component].start()

    @contextmanager
    def another_api_server(self, prefix: str, env: Mapping[str, str] | None = None) -> Iterator[str]:
        """A second api-server beside the first, whose ``[api] base_url`` ends in ``prefix``; its URL, when it answers.

        :param env: further environment variables, of this one alone.
        """
        port = free_port()
        url = f"http://127.0.0.1:{port}{prefix}"
        second = Service(
            "airflow api-server 2",
            [sys.executable, "-m", "airflow", *_COMPONENTS["api-server"]],
            log=self.home / "api-server-2.log",
            env=self.env | {"AIRFLOW__API__BASE_URL": url, "AIRFLOW__API__PORT": str(port), **(env or {})},
            patience=5.0,
        )
        second.start()
        try:
            second.wait_ready(AirflowApi(url, USER, PASSWORD).health, timeout=300)
            yield url
        finally:
            second.stop()

    @contextmanager
    def another_scheduler(self) -> Iterator[None]:
        """A second scheduler beside the first, for as long as the context lasts."""
        second = Service(
            "airflow scheduler 2",
            [sys.executable, "-m", "airflow", *_COMPONENTS["scheduler"]],
            log=self.home / "scheduler-2.log",
            env=self.env,
            patience=5.0,
        )
        second.start()
        try:
            yield
        finally:
            second.stop()

    def task_processes(
        self, dag_id: str, run_id: str, task_id: str, map_index: int = -1, timeout: float = 30
    ) -> TaskProcesses:
        """The processes of the task instance's present try, as soon as they run.

        :raises TimeoutError: they do not run within ``timeout`` seconds.
        """

        def find() -> TaskProcesses | None:
            identifier = self.api.task(dag_id, run_id, task_id, map_index).id
            for process in self.services["scheduler"].family():
                try:
                    if " ".join(process.cmdline()).startswith(f"airflow worker -- {identifier}"):
                        supervisor = process.parent()
                        return None if supervisor is None else TaskProcesses(process, supervisor)
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
            return None

        return wait_for(find, timeout, f"{dag_id}.{task_id} of run {run_id} runs", pause=0.1)

    def __enter__(self) -> Self:
        try:
            return self.start()
        except BaseException:
            self.stop()
            raise

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _environment(self, dags_folder: Path) -> dict[str, str]:
        kept = {
            name: value
            for name, value in os.environ.items()
            if not name.upper().startswith("AIRFLOW") and not name.lower().endswith("_proxy")
        }
        settings = _SETTINGS | {
            "CORE__DAGS_FOLDER": str(dags_folder),
            "CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(self.home / "passwords.json"),
            "CORE__EXECUTION_API_SERVER_URL": f"{self.url}/execution/",
            "CORE__FERNET_KEY": "",
            "API__BASE_URL": self.url,
            "API__PORT": str(self.port),
            "API__SECRET_KEY": secrets.token_hex(16),
            "API_AUTH__JWT_SECRET": secrets.token_hex(32),
            "DATABASE__SQL_ALCHEMY_CONN": self.metadata.url.replace("postgresql:", "postgresql+psycopg2:"),
        }
        return kept | {
            "AIRFLOW_HOME": str(self.home),
            "NO_PROXY": "*",
            "SCARF_ANALYTICS": "false",
            "PYTHONUNBUFFERED": "1",
            **{f"AIRFLOW__{name}": value for name, value in settings.items()},
        }
