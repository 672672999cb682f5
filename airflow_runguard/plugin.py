"""What Airflow learns of the pages and of the caretaker: the entry point ``airflow.plugins``.

Every task process loads this, so that whatever costs time is a property. Each view has a ``url_route`` of its own:
Airflow drops a view whose route another one has, and all of a plugin whose view it does not understand.
"""

from __future__ import annotations

from typing import Any

from airflow.sdk.plugins_manager import AirflowPlugin

_ICONS = {"icon": "runguard/static/ledger.svg", "icon_dark_mode": "runguard/static/ledger-dark.svg"}
_WHERE = {
    "dag": "dag_id={DAG_ID}",
    "dag_run": "dag_id={DAG_ID}&run_id={RUN_ID}",
    "task": "dag_id={DAG_ID}&task_id={TASK_ID}",
    "task_instance": "dag_id={DAG_ID}&run_id={RUN_ID}&task_id={TASK_ID}&map_index={MAP_INDEX}",
}
_ROUTES = {
    "dag": "runguard-dag",
    "dag_run": "runguard-run",
    "task": "runguard-task",
    "task_instance": "runguard-ti",
}


class RunguardPlugin(AirflowPlugin):
    """The page in the navigation, a tab on DAGs, runs, tasks and task instances, and the application behind them."""

    name = "runguard"
    external_views = [  # noqa: RUF012 - Airflow's own form
        {
            "name": "Ledger",
            "href": "runguard/ui/",
            "destination": "nav",
            "url_route": "runguard",
            "nav_top_level": True,
            **_ICONS,
        },
        *(
            {
                "name": "Ledger",
                "href": f"runguard/ui/?view=records&tab={place}&{where}",
                "destination": place,
                "url_route": _ROUTES[place],
                **_ICONS,
            }
            for place, where in _WHERE.items()
        ),
    ]

    @property
    def fastapi_apps(self) -> list[Any]:  # type: ignore[override]
        from airflow_runguard.ui.app import create_app

        return [{"app": create_app(), "url_prefix": "/runguard", "name": "runguard"}]

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
