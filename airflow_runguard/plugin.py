"""What Airflow loads of us in every process: kept cheap, since each task pays for it."""

from __future__ import annotations

from typing import Any

from airflow.plugins_manager import AirflowPlugin


class RunguardPlugin(AirflowPlugin):
    name = "runguard"

    @property
    def listeners(self) -> list[Any]:  # type: ignore[override]
        """The caretaker, which only a triggerer has; the onlooker, where ``[runguard] observe_dags`` names a DAG."""
        import sys

        from airflow.configuration import conf

        found: list[Any] = []
        if "triggerer" in sys.argv[1:2]:
            from airflow_runguard import listener

            found.append(listener)
        if conf.get("runguard", "observe_dags", fallback="").strip():
            from airflow_runguard import onlooker

            found.append(onlooker)
        return found
