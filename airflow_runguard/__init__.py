"""Airflow tasks that charge, pay out, send or order have their effect once, whatever Airflow does.

The public names, loaded when first used: importing this package imports nothing heavy and opens nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from airflow_runguard.core.errors import NotApplied, PlanningError, ResultNotStored, RunGuardError
    from airflow_runguard.core.guard import Applied, Doubt, GuardContext, StillUnknown, current_guard
    from airflow_runguard.decorators import guarded_task
    from airflow_runguard.notices import RunGuardNotifier
    from airflow_runguard.operators import GuardedPythonOperator, guarded
    from airflow_runguard.options import Guard
    from airflow_runguard.retry import GuardRetryPolicy
    from airflow_runguard.upkeep import SweepOperator

_ROOMS = {
    "Applied": "core.guard",
    "Doubt": "core.guard",
    "Guard": "options",
    "GuardContext": "core.guard",
    "GuardRetryPolicy": "retry",
    "GuardedPythonOperator": "operators",
    "NotApplied": "core.errors",
    "PlanningError": "core.errors",
    "ResultNotStored": "core.errors",
    "RunGuardError": "core.errors",
    "RunGuardNotifier": "notices",
    "StillUnknown": "core.guard",
    "SweepOperator": "upkeep",
    "current_guard": "core.guard",
    "guarded": "operators",
    "guarded_task": "decorators",
}

__all__ = [
    "Applied",
    "Doubt",
    "Guard",
    "GuardContext",
    "GuardRetryPolicy",
    "GuardedPythonOperator",
    "NotApplied",
    "PlanningError",
    "ResultNotStored",
    "RunGuardError",
    "RunGuardNotifier",
    "StillUnknown",
    "SweepOperator",
    "current_guard",
    "guarded",
    "guarded_task",
]


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)
