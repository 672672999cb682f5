"""What people may change in the book. Each answers one word; anything but ``ok`` changed nothing."""

from __future__ import annotations

from datetime import datetime

from airflow_runguard.core.record import Identity
from airflow_runguard.core.seam import Seam


class People(Seam):
    """Statements of ``people.sql``: who, when and why are booked in the same transaction (P13)."""

    def resolve(
        self,
        record_id: int,
        answer: str,
        *,
        actor: str,
        reason: str,
        call: str | None = None,
        result: bytes | None = None,
        reference: str | None = None,
        force: bool = False,
        seen_fence: int | None = None,
        known_by: datetime | None = None,
    ) -> str:
        """Say what happened to a record in doubt: ``happened``, ``did_not_happen`` or ``failed``.

        :param known_by: when the vendor was asked, or the form was made: it speaks of no doubt that is younger.
            ``None``: of the newest line, so only for who knows that nothing can have been reported since it looked.
        """
        return self._word(
            "resolve",
            record_id=record_id,
            answer=answer,
            call=call,
            result=result,
            reference=reference,
            actor=actor,
            reason=reason,
            force=force,
            seen_fence=seen_fence,
            known_by=known_by,
        )

    def reopen(
        self,
        record_id: int,
        *,
        seen_generation: int,
        actor: str,
        reason: str,
        again_although_applied: bool = False,
        seen_fence: int | None = None,
    ) -> str:
        """Order finished work anew, as the next generation."""
        return self._word(
            "reopen",
            record_id=record_id,
            seen_generation=seen_generation,
            seen_fence=seen_fence,
            again_although_applied=again_although_applied,
            actor=actor,
            reason=reason,
        )

    def release(self, record_id: int, *, actor: str, reason: str, seen_fence: int | None = None) -> str:
        """Take a record from its holder: to ``pending``, or to ``in_doubt`` where a call is open."""
        return self._word("release", record_id=record_id, seen_fence=seen_fence, actor=actor, reason=reason)

    def repair(self, record_id: int, *, seen: str, state: str | None, actor: str, reason: str) -> str:
        """Accept a broken line as it stands (``state`` = ``None``) or give it a state."""
        return self._word("repair", record_id=record_id, seen=seen, state=state, actor=actor, reason=reason)

    def accept_payload(self, record_id: int, *, actor: str, reason: str) -> str:
        """Let the next claim bring another payload."""
        return self._word("accept_payload", record_id=record_id, actor=actor, reason=reason)

    def rename(self, record_id: int, *, namespace: str, key: str, actor: str, reason: str) -> str:
        """Give a finished or untouched record another name. The old one stays behind and leads to it: it gives the
        result of what is done back, and refuses all else, until a person reopens it for other work."""
        return self._word("rename", record_id=record_id, namespace=namespace, key=key, actor=actor, reason=reason)

    def bypass(
        self, identity: Identity, *, result: bytes | None, reference: str | None, actor: str, reason: str
    ) -> str:
        """Book work that was done by hand. Answers ``ok``, or the state that the record is in instead."""
        return self._word(
            "bypass",
            deployment=identity.deployment,
            namespace=identity.namespace,
            key=identity.key,
            result=result,
            reference=reference,
            actor=actor,
            reason=reason,
        )

    def resume_now(self, record_id: int, *, actor: str, reason: str, seen_fence: int | None = None) -> str:
        """Let one paused record go on at once, if its gate lets it."""
        return self._word("resume_now", record_id=record_id, seen_fence=seen_fence, actor=actor, reason=reason)
