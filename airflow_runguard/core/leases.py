"""The Redis lease: proves liveness and thins out crowds. Safety is the ledger's fence, never this.

Nothing here raises for a Redis that is away, lies, restarted or was flushed: work goes on under the ledger's own lease,
and the log says so once. Also keeps the witness by which a ledger that went back in time is noticed (P14).
"""

from __future__ import annotations

import hashlib
import logging
from typing import Any

import redis

from airflow_runguard.core.record import Identity, Witness

log = logging.getLogger("airflow_runguard")

RENEW = """
-- KEYS[1] lease, ARGV[1] token, ARGV[2] milliseconds. 1 = ours; 0 = another token's. An absent one is taken again:
-- the ledger's fence stands, Redis merely forgot.
local token = redis.call('get', KEYS[1])
if token and token ~= ARGV[1] then return 0 end
redis.call('set', KEYS[1], ARGV[1], 'px', ARGV[2])
return 1
"""
RELEASE = """
-- KEYS[1] lease, KEYS[2] witness, ARGV[1] token, ARGV[2] witness or ''. Compare and delete; remembers the witness.
if ARGV[2] ~= '' then redis.call('set', KEYS[2], ARGV[2]) end
if redis.call('get', KEYS[1]) == ARGV[1] then return redis.call('del', KEYS[1]) end
return 0
"""


class Leases:
    """Leases of one installation on one Redis (or Valkey).

    :param client: a redis-py client with short socket timeouts; ``None`` = this deployment has no Redis.
    """

    def __init__(self, client: redis.Redis | None, installation: str) -> None:
        self._client = client
        self._prefix = f"runguard:{installation}:"
        self._complained = False
        if client is not None:
            self._renew = client.register_script(RENEW)
            self._release = client.register_script(RELEASE)

    def acquire(self, identity: Identity, token: str, seconds: float) -> bool:
        """``SET NX``. ``False`` = somebody holds it or Redis is away: the ledger is asked in either case."""
        client = self._client
        if client is None:
            return False
        return bool(self._safely(lambda: client.set(self._key(identity), token, nx=True, px=int(seconds * 1000))))

    def renew(self, identity: Identity, token: str, seconds: float) -> None:
        """Keep or retake the lease of a holder that the ledger stands by."""
        if self._client is not None:
            self._safely(lambda: self._renew(keys=[self._key(identity)], args=[token, int(seconds * 1000)]))

    def release(self, identity: Identity, token: str, witness: Witness | None = None) -> None:
        """Give the lease back if it is still ours, and remember the ledger's last event."""
        if self._client is not None:
            said = f"{witness.epoch} {witness.event_id} {witness.mark}" if witness else ""
            keys = [self._key(identity), self._prefix + "witness"]
            self._safely(lambda: self._release(keys=keys, args=[token, said]))

    def witness(self) -> Witness | None:
        """The event that the ledger must still have; ``None`` where Redis knows none (new, flushed, away)."""
        client = self._client
        if client is None:
            return None
        said = self._safely(lambda: client.get(self._prefix + "witness"))
        try:
            epoch, event_id, mark = (said.decode() if isinstance(said, bytes) else str(said)).split(" ")
            return Witness(int(epoch), int(event_id), mark)
        except ValueError:
            return None

    def _key(self, identity: Identity) -> str:
        parts = "\x00".join((identity.deployment, identity.namespace, identity.key))
        return self._prefix + "lease:" + hashlib.sha256(parts.encode()).hexdigest()

    def _safely(self, ask: Any) -> Any:
        try:
            return ask()
        except redis.RedisError as error:
            if not self._complained:
                self._complained = True
                log.warning("Redis is out of reach (%s). Work goes on under the ledger's own lease, slower.", error)
            return None
