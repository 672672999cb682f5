"""What Airflow loads of us in every process: kept cheap, since each task pays for it."""

from __future__ import annotations

from typing import Any

from airflow.plugins_manager import AirflowPlugin


class RunguardPlugin(AirflowPlugin):
    name = "runguard"

    @property
    def listeners(self) -> list[Any]:  # type: ignore[override]
        """The caretaker; only a triggerer has one."""
        import sys

        if "triggerer" not in sys.argv[1:2]:
            return []
        from airflow_runguard import listener

        return [listener]
