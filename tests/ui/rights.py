"""An auth manager with what SimpleAuthManager lacks: users who may see and change some DAGs only."""

from __future__ import annotations

from typing import Any

from airflow.api_fastapi.auth.managers.simple.simple_auth_manager import SimpleAuthManager

ROLES = {"ann": "ADMIN", "otto": "OP", "uma": "USER", "vic": "VIEWER", "dora": "USER", "reed": "VIEWER"}
ONLY = {"dora": {"bill", "gone"}, "reed": {"bill"}}
"""Whoever is not named may see all DAGs."""


class TeamRights(SimpleAuthManager):
    def is_authorized_dag(self, *, method: Any, user: Any, access_entity: Any = None, details: Any = None) -> bool:
        only = ONLY.get(user.get_name())
        if only is not None and (details is None or details.id not in only):
            return False
        return super().is_authorized_dag(method=method, user=user, access_entity=access_entity, details=details)
