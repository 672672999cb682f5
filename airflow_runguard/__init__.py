"""Airflow tasks that charge, pay out, send or order have their effect once, whatever Airflow does.

The public names, loaded when first used: importing this package imports nothing heavy and opens nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from airflow_runguard.batches import BatchResults, GuardedBatchOperator, guarded_batch_task
    from airflow_runguard.core.batch import ItemContext, Pause
    from airflow_runguard.core.errors import NotApplied, PlanningError, ResultIsError, ResultNotStored, RunGuardError
    from airflow_runguard.core.guard import Applied, Doubt, GuardContext, StillUnknown, Submitted, current_guard
    from airflow_runguard.core.jobs import FailedForGood, JobFailed, NotFound, Running, Succeeded
    from airflow_runguard.decorators import guarded_task
    from airflow_runguard.notices import RunGuardNotifier
    from airflow_runguard.onlooker import ledger_callbacks
    from airflow_runguard.operators import GuardedPythonOperator, guarded
    from airflow_runguard.options import BatchGuard, Guard
    from airflow_runguard.reconcile import ReconcileOperator, VendorEffect
    from airflow_runguard.reconcilers import FileLookup, HttpLookup, SftpLookup, SqlLookup, StripeLookup
    from airflow_runguard.retry import GuardRetryPolicy
    from airflow_runguard.sensors import PreviousRunSensor
    from airflow_runguard.series import Previous, Series
    from airflow_runguard.upkeep import LedgerAuditOperator, SweepOperator

_ROOMS = {
    "Applied": "core.guard",
    "BatchGuard": "options",
    "BatchResults": "batches",
    "Doubt": "core.guard",
    "FailedForGood": "core.jobs",
    "FileLookup": "reconcilers",
    "Guard": "options",
    "GuardContext": "core.guard",
    "GuardedBatchOperator": "batches",
    "GuardRetryPolicy": "retry",
    "GuardedPythonOperator": "operators",
    "HttpLookup": "reconcilers",
    "JobFailed": "core.jobs",
    "LedgerAuditOperator": "upkeep",
    "NotApplied": "core.errors",
    "NotFound": "core.jobs",
    "ItemContext": "core.batch",
    "Pause": "core.batch",
    "PlanningError": "core.errors",
    "Previous": "series",
    "PreviousRunSensor": "sensors",
    "ReconcileOperator": "reconcile",
    "ResultIsError": "core.errors",
    "ResultNotStored": "core.errors",
    "RunGuardError": "core.errors",
    "RunGuardNotifier": "notices",
    "Running": "core.jobs",
    "Series": "series",
    "SftpLookup": "reconcilers",
    "SqlLookup": "reconcilers",
    "StillUnknown": "core.guard",
    "SweepOperator": "upkeep",
    "StripeLookup": "reconcilers",
    "Submitted": "core.guard",
    "Succeeded": "core.jobs",
    "VendorEffect": "reconcile",
    "current_guard": "core.guard",
    "guarded": "operators",
    "guarded_batch_task": "batches",
    "guarded_task": "decorators",
    "ledger_callbacks": "onlooker",
}

__all__ = [
    "Applied",
    "BatchGuard",
    "BatchResults",
    "Doubt",
    "FailedForGood",
    "FileLookup",
    "Guard",
    "GuardContext",
    "GuardRetryPolicy",
    "GuardedBatchOperator",
    "GuardedPythonOperator",
    "HttpLookup",
    "ItemContext",
    "JobFailed",
    "LedgerAuditOperator",
    "NotApplied",
    "NotFound",
    "Pause",
    "PlanningError",
    "Previous",
    "PreviousRunSensor",
    "ReconcileOperator",
    "ResultIsError",
    "ResultNotStored",
    "RunGuardError",
    "RunGuardNotifier",
    "Running",
    "Series",
    "SftpLookup",
    "SqlLookup",
    "StillUnknown",
    "StripeLookup",
    "Submitted",
    "Succeeded",
    "SweepOperator",
    "VendorEffect",
    "current_guard",
    "guarded",
    "guarded_batch_task",
    "guarded_task",
    "ledger_callbacks",
]


def __getattr__(name: str) -> Any:
    if name not in _ROOMS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_ROOMS[name]}"), name)
