"""Who may see and do what on the ledger's pages; the guard against forged requests; Airflow's audit log.

Airflow's own rights count, asked anew for each request: a record belongs to the DAG that stands on its line, whatever
the request says. What belongs to no DAG that Airflow knows is for those who may see all DAGs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.resource_details import DagAccessEntity, DagDetails
from airflow.api_fastapi.core_api.security import GetUserDep
from fastapi import Depends, HTTPException, Request

from airflow_runguard.core.board import Readable

SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
HEADER = "X-Runguard-Request"


def not_forged(request: Request) -> None:
    """A change that is authorised by the cookie alone must come from our own page: other sites can make a browser send
    the cookie, but neither this header nor a same-origin ``Sec-Fetch-Site``. Scripts with a token are not asked.

    :raises HTTPException: 403.
    """
    if request.method in SAFE or request.headers.get("authorization"):
        return
    origin = request.headers.get("sec-fetch-site", "none")
    if request.headers.get(HEADER) != "1" or origin not in ("same-origin", "none"):
        raise HTTPException(403, f"A change needs the header {HEADER}: 1 and must come from Airflow's own page.")


@dataclass
class Reader:
    """The user of one request, with what Airflow allows."""

    user: Any
    dags: Readable
    """The DAGs that may be read; ``None`` = all, deleted ones too."""
    _writable: dict[str | None, bool] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.user.get_name())

    @property
    def actor(self) -> str:
        return f"person:{self.name}"

    def may_change(self, dag_id: str | None) -> bool:
        """Whether the task instances of this DAG may be changed; ``None`` = those of all."""
        if dag_id not in self._writable:
            from airflow.models.dag import DagModel

            details = DagDetails(id=dag_id, team_name=DagModel.get_team_name(dag_id)) if dag_id else None
            self._writable[dag_id] = get_auth_manager().is_authorized_dag(
                method="PUT", access_entity=DagAccessEntity.TASK_INSTANCE, details=details, user=self.user
            )
        return self._writable[dag_id]

    def must_change(self, dag_id: str | None) -> None:
        """:raises HTTPException: 403."""
        if not self.may_change(dag_id):
            which = f"DAG {dag_id!r}" if dag_id else "all DAGs"
            raise HTTPException(403, f"You may not change task instances of {which}. Nothing was changed.")

    def may_see_settings(self) -> bool:
        return bool(get_auth_manager().is_authorized_configuration(method="GET", user=self.user))


def reader(user: GetUserDep) -> Reader:
    auth = get_auth_manager()
    if auth.is_authorized_dag(method="GET", details=None, user=user):
        return Reader(user, None)
    return Reader(user, frozenset(auth.get_authorized_dag_ids(user=user, method="GET")))


ReaderDep = Annotated[Reader, Depends(reader)]


def audit(who: Reader, action: str, line: Mapping[str, Any] | None, **extra: Any) -> None:
    """A line in Airflow's audit log about what was done. The ledger's own event is the record of it; this one is for
    those who look there."""
    from airflow.models.log import Log
    from airflow.utils.session import create_session

    about = {name: line[name] for name in ("dag_id", "task_id", "run_id", "map_index", "try_number")} if line else {}
    if line:
        extra |= {"record": line["id"], "namespace": line["namespace"], "key": line["key"]}
    with create_session() as session:
        session.add(
            Log(
                event=f"runguard_{action}",
                owner=who.name,
                owner_display_name=who.name,
                extra=json.dumps(extra, default=str),
                **about,
            )
        )
