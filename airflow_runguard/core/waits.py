"""What stands beside the records: who waits and for what, who is asked, who is told."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import psycopg

from airflow_runguard.core.record import Holder, Identity, Record
from airflow_runguard.core.rows import clean
from airflow_runguard.core.seam import Seam


class Waits(Seam):
    """Statements of ``watch.sql`` and ``gates.sql``."""

    _listening: psycopg.Connection[Any] | None = None
    """The connection that hears of changes by hand."""

    # -- what waits, who is asked, who is told ------------------------------------------------------------------------

    def due(self, ids: Sequence[int]) -> set[int]:
        """Which of these records a waiting task may look at again."""
        # As a text: a list would be packed in Python, and keep a triggerer's loop waiting.
        many = "{" + ",".join(map(str, ids)) + "}"
        return {row["id"] for row in self._all("due", {"ids": many})}

    def listen(self) -> bool:
        """Hear at once of changes by hand, from now on. Behind a pooler nobody can: there it is ``False``."""
        connection = self._open()
        if self._listening is not connection:
            (here,) = connection.execute("select pg_backend_pid() as pid", prepare=False).fetchall()
            if here["pid"] != connection.info.backend_pid:
                return False
            connection.execute("listen runguard", prepare=False)
            self._listening = connection
        return True

    def rest(self, seconds: float) -> None:
        """Return when something was changed by hand (resolved, opened, thawed …), or after so many seconds.

        :raises psycopg.Error: the connection is lost.
        """
        if self.listen():
            for _ in self._open().notifies(timeout=seconds, stop_after=1):
                return
        else:
            time.sleep(seconds)

    def watching(self, name: str, waits: int) -> None:
        """Say that a process watches this ledger, and for how many waiting tasks."""
        self._one("watching", {"name": name, "waits": waits})

    def watched(self, fresh: float) -> int | None:
        """For how many tasks triggerers wait here; ``None`` where none was heard of for so many seconds."""
        row = self._one("watched", {"fresh": fresh})
        return int(row["waits"]) if row["watched"] else None

    def time_of_question(self, identity: Identity) -> datetime:
        """The time from which somebody is asked about a record (``known_by`` of the answer), to be read before what the
        question tells. Reports that are being written are waited for, so that none is younger than it looks."""
        name = {"deployment": identity.deployment, "namespace": identity.namespace, "key": identity.key}
        at: datetime = self._one("time_of_question", name)["at"]
        return at

    def ask(self, record: Record, holder: Holder, at: datetime) -> None:
        """Book that this task instance is parked with a form about the record, as it was at that time."""
        self._one(
            "ask",
            {
                "record_id": record.id,
                "generation": record.generation,
                "fence": record.fence,
                "ti_id": holder.ti_id,
                "dag_id": holder.dag_id,
                "task_id": holder.task_id,
                "run_id": holder.run_id,
                "map_index": holder.map_index,
                "at": at,
                "actor": str(holder),
            },
        )

    def give_up_asking(self, record_id: int, *, seen_fence: int, actor: str, reason: str) -> str:
        """Nobody answered in time: ``failed``, needs a person."""
        return self._word("give_up_asking", record_id=record_id, seen_fence=seen_fence, actor=actor, reason=reason)

    def questions(self, record_id: int | None = None) -> Sequence[Mapping[str, Any]]:
        """The open forms, oldest first, each with its record's state now, and whether the question ``stands``."""
        return self._all("questions", {"deployment": self.deployment, "record_id": record_id})

    def close_question(self, ti_id: str) -> None:
        self._all("close_question", {"ti_id": ti_id})

    def tell(self, record_id: int, generation: int, kind: str, reason: str, *, occasion: str = "") -> None:
        """Book something that people are to be told, that no event tells of; once per record, generation, kind and
        occasion. What is broken is told anew after each repair, and lost time after each acknowledgement."""
        self._one(
            "tell",
            {
                "deployment": self.deployment,
                "record_id": record_id,
                "generation": generation,
                "kind": kind,
                "reason": reason,
                "occasion": occasion,
            },
        )

    def take_notices(self, actor: str, limit: int = 20) -> Sequence[Mapping[str, Any]]:
        """What is to be told and nobody else is telling."""
        return self._all("take_notices", {"deployment": self.deployment, "actor": actor, "limit": limit})

    def notice_sent(self, notice_id: int, error: str | None = None) -> None:
        self._one("notice_sent", {"id": notice_id, "error": clean(error)})

    def count_replay(self, identity: Identity) -> None:
        """Note that a stored result was given back instead of a call."""
        self._one("count_replay", {"deployment": self.deployment, "namespace": identity.namespace, "key": identity.key})

    # -- gates and freezes -------------------------------------------------------------------------------------------

    def close_gate(self, gate: str, *, until: datetime, rate: float, actor: str, reason: str) -> str:
        """:param rate: slots a second for those that wait, where the gate has no rate of its own."""
        return self._word(
            "close_gate", deployment=self.deployment, gate=gate, until=until, rate=rate, actor=actor, reason=reason
        )

    def open_gate(self, gate: str, *, rate: float, actor: str, reason: str) -> str:
        """Those that wait go on from now, paced; an answer from before this closes the gate no more."""
        return self._word(
            "open_gate", deployment=self.deployment, gate=gate, default_rate=rate, actor=actor, reason=reason
        )

    def set_rate(self, gate: str, *, rate: float | None, default: float, actor: str, reason: str) -> str:
        """:param rate: slots a second; ``None`` = the default again."""
        return self._word(
            "set_rate",
            deployment=self.deployment,
            gate=gate,
            rate=rate,
            default_rate=default,
            actor=actor,
            reason=reason,
        )

    def gates(self, gate: str | None = None) -> Sequence[Mapping[str, Any]]:
        return self._all("gates", {"deployment": self.deployment, "gate": gate})

    def freeze(self, scope: str, value: str = "", *, actor: str, reason: str) -> str:
        """No new call starts: scope ``all``, ``dag_id``, ``namespace`` or ``key_prefix``."""
        return self._word("freeze", deployment=self.deployment, scope=scope, value=value, actor=actor, reason=reason)

    def thaw(self, scope: str, value: str = "", *, actor: str, reason: str) -> str:
        return self._word("thaw", deployment=self.deployment, scope=scope, value=value, actor=actor, reason=reason)

    def freezes(self, *, thawed: bool = False) -> Sequence[Mapping[str, Any]]:
        """Those in force; with ``thawed`` also those that were."""
        return self._all("freezes", {"deployment": self.deployment, "all": thawed})
