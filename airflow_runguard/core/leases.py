"""The Redis lease: proves liveness and thins out crowds. Safety is the ledger's fence, never this.

Nothing here raises for a Redis that is away, lies, restarted or was flushed: work goes on under the ledger's own lease,
and the log says so once. Also keeps the witness by which a ledger that went back in time is noticed (P14).
"""

from __future__ import annotations

import hashlib
import logging
import time
from typing import Any

from airflow_runguard.core.record import Identity, Witness
from airflow_runguard.core.resp import Redis, RedisAway

log = logging.getLogger("airflow_runguard")

AWAY = 10.0
"""Seconds for which a Redis that failed is not asked again: each question may cost a timeout, and calls wait for it."""

RENEW = """
-- KEYS[1] lease, ARGV[1] token, ARGV[2] milliseconds. 1 = ours; 0 = another token's. An absent one is taken again:
-- the ledger's fence stands, Redis merely forgot.
local token = redis.call('get', KEYS[1])
if token and token ~= ARGV[1] then return 0 end
redis.call('set', KEYS[1], ARGV[1], 'px', ARGV[2])
return 1
"""
RELEASE = """
-- KEYS[1] lease, KEYS[2] witness, ARGV[1] token, ARGV[2] witness or ''. Compare and delete; remembers the witness, but
-- none that is older than the one it has: who leaves late (it slept, it was replaced) knows less.
local function order(witness) return string.match(witness or '', '^(%d+) (%d+) ') end
local epoch, event = order(ARGV[2])
if epoch then
    local e, n = order(redis.call('get', KEYS[2]))
    local older = e and (tonumber(epoch) < tonumber(e) or epoch == e and tonumber(event) < tonumber(n))
    if not older then redis.call('set', KEYS[2], ARGV[2]) end
end
if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end
return 0
"""


class Leases:
    """Leases of one installation on one Redis (or Valkey).

    :param client: ``None`` = this deployment has no Redis.
    """

    def __init__(self, client: Redis | None, installation: str) -> None:
        self._client = client
        self._prefix = f"runguard:{installation}:"
        self._complained = False
        self._ask_again_at = 0.0

    def acquire(self, identity: Identity, token: str, seconds: float) -> None:
        """``SET NX``, without waiting for what Redis says: the ledger is asked in either case."""
        self._ask("SET", self._key(identity), token, "NX", "PX", int(seconds * 1000), wait=False)

    def renew(self, identity: Identity, token: str, seconds: float) -> None:
        """Keep or retake the lease of a holder that the ledger stands by."""
        self._ask("EVAL", RENEW, 1, self._key(identity), token, int(seconds * 1000))

    def release(self, identity: Identity, token: str, witness: Witness | None = None) -> None:
        """Give the lease back if it is still ours, and remember the ledger's last event."""
        said = f"{witness.epoch} {witness.event_id} {witness.mark}" if witness else ""
        self._ask("EVAL", RELEASE, 2, self._key(identity), self._prefix + "witness", token, said)

    def witness(self) -> Witness | None:
        """The event that the ledger must still have; ``None`` where Redis knows none (new, flushed, away)."""
        said = self._ask("GET", self._prefix + "witness")
        try:
            epoch, event_id, mark = said.decode().split(" ")
            return Witness(int(epoch), int(event_id), mark)
        except (AttributeError, ValueError):
            return None

    def _key(self, identity: Identity) -> str:
        parts = "\x00".join((identity.deployment, identity.namespace, identity.key))
        return self._prefix + "lease:" + hashlib.sha256(parts.encode()).hexdigest()

    def _ask(self, *words: str | int, wait: bool = True) -> Any:
        if self._client is None or time.monotonic() < self._ask_again_at:
            return None
        try:
            return self._client.command(*words) if wait else self._client.send(*words)
        except RedisAway as error:
            self._ask_again_at = time.monotonic() + AWAY
            if not self._complained:
                self._complained = True
                log.warning("Redis is out of reach (%s). Work goes on under the ledger's own lease, slower.", error)
            return None
