"""The instances that this router knows: where they are, what they play, how they fare.

Roles come from the PDAssignment and endpoints from the PDInstances, by way of `watches`; health and
latencies are the router's own. Dispatch reads an instance through `policy.InstanceView`.
"""

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

from fulcrum_core.latency import DecodeModel, PrefillModel
from fulcrum_core.values import KV_LEASE_S, EngineIdentity, Role
from fulcrum_router.fleet.health import Health
from fulcrum_router.fleet.pending_transfers import PendingTransfers
from fulcrum_router.http1.upstream import ConnectionPool, Failure, LegFailed
from fulcrum_router.policy.estimate import DEFAULT_DECODE, DEFAULT_PREFILL, DecodePredictor, PrefillPredictor
from fulcrum_router.policy.ledger import Ledger

if TYPE_CHECKING:
    from fulcrum_router.kv_transfer.verification import KvTransfer

UNRESPONSIVE_STREAM_TIMEOUT_S = 10.0
"""A stream of an instance that hangs ends if nothing of it comes for so long."""


class Instance:
    """One engine instance."""

    __slots__ = (
        "_decode_predictor",
        "_prefill_predictor",
        "assigned",
        "cache_salt",
        "connection_pool",
        "decode_header",
        "decode_model",
        "engine_read_at_s",
        "engine_requests",
        "expired_transfers",
        "former_pools",
        "health",
        "identity",
        "incoming_transfers",
        "itl_s",
        "kv_lease_s",
        "kv_usage",
        "ledger",
        "missed_probes",
        "name",
        "prefill_header",
        "prefill_model",
        "reported_block_size",
        "reports_cached_tokens",
        "role",
        "serving",
        "starting",
    )

    def __init__(
        self,
        name: str,
        *,
        prefill: PrefillModel = DEFAULT_PREFILL,
        decode: DecodeModel = DEFAULT_DECODE,
    ) -> None:
        self.name = name
        self.prefill_header = b"x-fulcrum-prefill: %b\r\n" % name.encode()
        self.decode_header = b"x-fulcrum-decode: %b\r\n" % name.encode()
        self.role = Role.DECODE
        self.assigned = False
        self.serving = False
        self.starting = False
        """Whether it will serve soon: its engine runs and is looked at."""
        self.identity: EngineIdentity | None = None
        self.reported_block_size: int | None = None
        """Tokens in its KV blocks by the engine's own word; None: it has not said."""
        self.kv_lease_s = KV_LEASE_S
        """For how long it keeps a hand-off that nobody fetches: what its engine was started with."""
        self.incoming_transfers: PendingTransfers[KvTransfer] = PendingTransfers()
        self.ledger = Ledger()
        self.health = Health()
        self.connection_pool: ConnectionPool | None = None
        self.former_pools: list[ConnectionPool] = []
        """Where it was before, as long as legs are there."""
        self.itl_s: float | None = None
        self.kv_usage: float | None = None
        self.expired_transfers: float | None = None
        """Hand-offs that it let expire, as last read."""
        self.engine_requests: int | None = None
        """Requests in it by its own count, whoever sent them; None: it does not say."""
        self.engine_read_at_s = 0.0
        """Unix time at which it was asked for that."""
        self.cache_salt = ""
        """Goes into every prompt's cache_salt: what the engine has cached under another one is not used."""
        self.reports_cached_tokens = False
        """Whether it was seen to say how many tokens of a prompt it did not compute."""
        self.missed_probes = 0
        self._prefill_predictor, self._decode_predictor = PrefillPredictor(prefill), DecodePredictor(decode)
        self.prefill_model, self.decode_model = prefill, decode

    def set_endpoint(self, host: str, port: int) -> None:
        """It listens there. Another address than before is another engine process: no connection is kept."""
        pool = self.connection_pool
        if pool is not None and (pool.host, pool.port) == (host, port):
            return
        self.clear_endpoint()
        self.connection_pool = ConnectionPool(host, port)
        self.health = Health()
        self.missed_probes = 0
        self.itl_s = self.kv_usage = self.expired_transfers = None
        self.reports_cached_tokens, self.cache_salt, self.reported_block_size = False, "", None
        self.incoming_transfers = PendingTransfers()
        self.update_serving()

    def set_identity(self, identity: EngineIdentity) -> None:
        """Who it is by its PDInstance; of its block size the engine's own word counts.

        vLLM does not compare them when engines shake hands: what decode makes of smaller blocks than its own
        is status 200 and wrong tokens, and its usage says that it was given all.
        """
        if self.reported_block_size not in (None, identity.block_size):
            identity = replace(identity, block_size=self.reported_block_size)
        self.identity, self.kv_lease_s = identity, identity.kv_lease_s

    def clear_endpoint(self) -> None:
        """It is not there any more: keep no connection; what is busy may end."""
        pool, self.connection_pool = self.connection_pool, None
        self.engine_requests = None
        if pool is not None:
            pool.close()
            self.former_pools.append(pool)

    def enforce_timeouts(self, now_s: float) -> None:
        """Fail the legs that waited too long, and move on those that wait in vain."""
        pool, unresponsive_since_s = self.connection_pool, self.health.unresponsive_since_s
        if pool is not None:
            if unresponsive_since_s is not None:
                pool.shorten_deadlines(unresponsive_since_s + UNRESPONSIVE_STREAM_TIMEOUT_S)
            pool.enforce_timeouts(now_s)
        if self.former_pools:
            for pool in self.former_pools:
                pool.shorten_deadlines(math.inf)
                pool.enforce_timeouts(now_s)
            self.former_pools = [pool for pool in self.former_pools if pool.busy]

    def assign(self, role: Role | None) -> None:
        """It plays this role and gets work; None: no new work."""
        if role is not None:
            self.role = role
        self.assigned = role is not None
        self.update_serving()

    def update_serving(self) -> None:
        """Draw the conclusion whether new work may be sent."""
        self.serving = self.assigned and self.connection_pool is not None and not self.health.ejected

    @property
    def is_warming_up(self) -> bool:
        """Whether it gets no work yet, and its engine answers: canaries may."""
        idle = self.starting and not self.serving
        return idle and self.engine_requests is not None and not self.health.ejected

    def learn_prefill(self, *, tokens: int, duration_s: float) -> None:
        """A prompt that had the instance to itself took this long."""
        self._prefill_predictor.learn(tokens=tokens, duration_s=duration_s)
        self.prefill_model = self._prefill_predictor.model

    def learn_decode(self, *, tokens: int, itl_s: float) -> None:
        """A second's mean step with this much KV in the batch."""
        self._decode_predictor.learn(tokens=tokens, itl_s=itl_s)
        self.decode_model = self._decode_predictor.model


def get_connection_pool(instance: Instance) -> ConnectionPool:
    """Where the instance listens.

    Raises:
        LegFailed: if that is not known (any more).
    """
    if instance.connection_pool is None:
        raise LegFailed(Failure.REFUSED, "the instance has no endpoint", may_have_started=False)
    return instance.connection_pool


class Fleet:
    """All instances of the service, by name."""

    def __init__(self) -> None:
        self._by_name: dict[str, Instance] = {}
        self._removed: list[Instance] = []
        """Forgotten ones with legs that have not ended."""
        self.instances: tuple[Instance, ...] = ()
        """In the order of their names."""

    def get(self, name: str) -> Instance | None:
        """The instance of that name."""
        return self._by_name.get(name)

    def __getitem__(self, name: str) -> Instance:
        return self._by_name[name]

    def add(self, instance: Instance) -> None:
        """Know one more."""
        self._by_name[instance.name] = instance
        self._sort()

    def keep_only(self, names: Iterable[str]) -> None:
        """Forget the others; what they stream ends where it is."""
        kept = set(names)
        for name in self._by_name.keys() - kept:
            removed = self._by_name.pop(name)
            removed.assign(None)
            removed.clear_endpoint()
            self._removed.append(removed)
        self._sort()

    def enforce_timeouts(self, now_s: float) -> None:
        """Fail every leg that waited too long."""
        for instance in self.instances:
            instance.enforce_timeouts(now_s)
        if self._removed:
            for instance in self._removed:
                instance.enforce_timeouts(now_s)
            self._removed = [instance for instance in self._removed if instance.former_pools]

    def _sort(self) -> None:
        self.instances = tuple(self._by_name[name] for name in sorted(self._by_name))


def intern_identity(identities: Iterable[EngineIdentity], identity: EngineIdentity) -> EngineIdentity:
    """The equal one among `identities`, so that dispatch can compare by `is`."""
    return next((known for known in identities if known == identity), identity)


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Host and port of `host:port`, brackets of an IPv6 host taken off.

    Raises:
        ValueError: if it is none.
    """
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"endpoint {endpoint!r} is not host:port")
    return host.strip("[]"), int(port)
