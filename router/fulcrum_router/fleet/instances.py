"""The router's record of each instance: endpoint, role, health, latency models, load.

`observe.objects` sets roles (from the PDAssignment) and endpoints (from the PDInstances), `observe.engines`
what engines report, the data path health and load. Policies read only
the attributes of `policy.InstanceRecord`.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from typing import Protocol

from fulcrum_core.latency import DecodeModel, PrefillModel
from fulcrum_core.values import EngineIdentity, Role
from fulcrum_router.fleet.health import Health
from fulcrum_router.fleet.incoming_transfers import IncomingTransfers, LeasedTransfer
from fulcrum_router.http1.failures import Failure, LegFailed
from fulcrum_router.http1.upstream import ConnectionPool
from fulcrum_router.policy.candidates import Candidates
from fulcrum_router.policy.faults.outliers import may_eject
from fulcrum_router.policy.predictions.estimate import DEFAULT_DECODE, DEFAULT_PREFILL
from fulcrum_router.policy.predictions.latency_parts import WaitCauses
from fulcrum_router.policy.predictions.learning import LearningInstance

SIMULATED_HEADER = b"x-fulcrum-simulated: true\r\n"
"""Header line on every response of a simulated engine, whose text is made up."""
UNRESPONSIVE_STREAM_TIMEOUT_S = 10.0
"""Longest silence of a stream from an unresponsive instance, in seconds; then the stream fails."""


class IncomingTransfer(LeasedTransfer, Protocol):
    """A pending KV transfer with what a lease check needs; `kv_transfer.verification.KvTransfer` is one."""

    @property
    def source(self) -> "Instance":
        """The prefill instance."""

    @property
    def expired_before(self) -> float | None:
        """`source.expired_transfers` when the prefill leg was sent; None: the engine does not report it."""


class _Changes:
    """Counts the changes of instances that decide which of them can take work."""

    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0


class Instance(LearningInstance):
    """One engine instance: assignment, endpoint, health, load and reported values.

    Set its role, `serving` and identity by its methods only: an assignment to the attribute would leave the
    fleet's candidates as they were.
    """

    __slots__ = (
        "_changes",
        "answered_at_s",
        "assigned",
        "cache_salt",
        "connection_pool",
        "decode_header",
        "engine_requests",
        "expired_transfers",
        "former_pools",
        "health",
        "incoming_transfers",
        "missed_probes",
        "prefill_header",
        "progress_at_s",
        "reported_block_size",
        "reports_cached_tokens",
        "starting",
        "tokens_computed",
        "wait_causes",
    )

    answered_at_s: float | None
    """When the last probe that was answered was sent, in monotonic seconds; None: none was answered."""

    def __init__(
        self,
        name: str,
        *,
        pool: str = "",
        prefill: PrefillModel = DEFAULT_PREFILL,
        decode: DecodeModel = DEFAULT_DECODE,
        simulated: bool = False,
    ) -> None:
        super().__init__(name, prefill, decode)
        self.pool = pool
        self.prefill_header = b"x-fulcrum-prefill: %b\r\n" % name.encode()
        self.decode_header = b"x-fulcrum-decode: %b\r\n%b" % (
            name.encode(),
            SIMULATED_HEADER if simulated else b"",
        )
        self._changes = _Changes()
        self.assigned = False
        """Whether the PDAssignment gives the instance a role."""
        self.starting = False
        """Whether the instance will serve soon: its engine runs and is being verified."""
        self.reported_block_size: int | None = None
        """Tokens per KV block as the engine reports it; None until it was read."""
        self.incoming_transfers: IncomingTransfers[IncomingTransfer] = IncomingTransfers()
        """Transfers that the instance was sent as decode instance and has not responded to."""
        self.health = Health()
        self.connection_pool: ConnectionPool | None = None
        self.former_pools: list[ConnectionPool] = []  # of earlier endpoints, with legs in flight
        self.engine_requests: int | None = None
        """Running and waiting requests as the engine reports them, whoever sent them; None: not reported."""
        self.wait_causes = WaitCauses()
        """What the requests that wait in the engine wait for."""
        self.expired_transfers: float | None = None
        """Transfers that expired on the engine since its start, as last read."""
        self.tokens_computed: float | None = None
        """Prompt and output tokens that the engine has computed since its start; None: not reported."""
        self.progress_at_s = 0.0
        """When the engine was last known to make progress, in monotonic seconds; see `record_progress`."""
        self.cache_salt = ""
        """Part of every prompt's cache_salt: prefix-cache entries with another salt are not used."""
        self.reports_cached_tokens = False
        """Whether the engine has ever reported cached tokens: then a missing count means zero."""
        self.missed_probes, self.answered_at_s = 0, None

    def report_changes_to(self, changes: _Changes) -> None:
        """From now on, add to `changes.count` when role, `serving` or identity changes."""
        self._changes = changes

    def set_endpoint(self, host: str, port: int) -> bool:
        """Set the endpoint; return whether it is a new one.

        A new address is a new engine process: reset connections and reported values.
        """
        pool = self.connection_pool
        if pool is not None and (pool.host, pool.port) == (host, port):
            return False
        self.clear_endpoint()
        self.connection_pool = ConnectionPool(host, port)
        self.health = Health()
        self.error_share = 0.0
        self.missed_probes = 0
        self.itl_s = self.kv_usage = self.expired_transfers = None
        self.engine_running = self.engine_waiting = None
        self.kv_capacity_tokens = self.context_tokens = None
        self.reports_cached_tokens, self.cache_salt, self.reported_block_size = False, "", None
        self.incoming_transfers = IncomingTransfers()
        self.tokens_computed, self.progress_at_s, self.answered_at_s = None, 0.0, None
        self.wait_causes = WaitCauses()
        self.update_serving()
        return True

    def set_identity(self, identity: EngineIdentity) -> None:
        """Set identity and lease; a block size that the engine reported overrides the declared one.

        vLLM does not compare block sizes in its handshake: a decode engine with larger blocks than the
        prefill engine's returns status 200, wrong tokens and a usage that counts all tokens as fetched.
        """
        if self.reported_block_size not in (None, identity.block_size):
            identity = replace(identity, block_size=self.reported_block_size)
        self._changes.count += identity is not self.identity
        self.identity, self.kv_lease_s = identity, identity.kv_lease_s

    def clear_endpoint(self) -> None:
        """Remove the endpoint: close idle connections; legs in flight may finish."""
        pool, self.connection_pool = self.connection_pool, None
        self.engine_requests = None
        if pool is not None:
            pool.close()
            self.former_pools.append(pool)

    def enforce_timeouts(self, now_s: float) -> None:
        """Fail legs whose deadline has passed, and retryable ones of an unresponsive or removed engine."""
        pool, unresponsive_since_s = self.connection_pool, self.health.unresponsive_since_s
        if pool is not None:
            if unresponsive_since_s is not None:
                pool.fail_retryable_legs(
                    Failure.EJECTED, others_deadline_s=unresponsive_since_s + UNRESPONSIVE_STREAM_TIMEOUT_S
                )
            pool.enforce_timeouts(now_s)
        if self.former_pools:
            for pool in self.former_pools:
                pool.fail_retryable_legs(Failure.REMOVED, others_deadline_s=math.inf)
                pool.enforce_timeouts(now_s)
            self.former_pools = [pool for pool in self.former_pools if pool.busy]

    def record_progress(self, tokens_computed: float | None, *, now_s: float) -> None:
        """Record the engine's count of computed tokens, from a probe at `now_s`.

        An engine whose count changes makes progress; of one that does not report it, each probe is taken as
        progress.
        """
        if tokens_computed is None or tokens_computed != self.tokens_computed:
            self.tokens_computed, self.progress_at_s = tokens_computed, now_s

    def assign(self, role: Role | None) -> None:
        """Set the role; None: keep the role and send no new requests."""
        if role is not None:
            self.set_role(role)
        self.assigned = role is not None
        self.update_serving()

    def set_role(self, role: Role) -> None:
        """Set only the role; `assign` also decides whether the instance gets new requests."""
        self._changes.count += role is not self.role
        self.role = role

    def update_serving(self) -> None:
        """Recompute `serving` after a change of assignment, endpoint or health."""
        serving = self.assigned and self.connection_pool is not None and not self.health.ejected
        self._changes.count += serving is not self.serving
        self.serving = serving

    def update_error_share(self) -> None:
        """Copy `Health.error_share` after a change of health, for dispatch."""
        self.error_share = self.health.error_share

    @property
    def answers_probes(self) -> bool:
        """Whether the engine has answered its last probe: then a late leg waits in its queue."""
        return not self.missed_probes and self.health.unresponsive_since_s is None

    @property
    def is_warming_up(self) -> bool:
        """Whether the instance gets no requests yet but its engine responds, so that canaries may be sent."""
        idle = self.starting and not self.serving
        return idle and self.engine_requests is not None and not self.health.ejected

    def require_connection_pool(self) -> ConnectionPool:
        """The pool of the current endpoint.

        Raises:
            LegFailed: if the endpoint is not known or was removed.
        """
        if self.connection_pool is None:
            raise LegFailed(Failure.REFUSED, "the instance has no endpoint", may_have_started=False)
        return self.connection_pool


class Fleet:
    """All instances of the service, by name."""

    def __init__(self) -> None:
        self._by_name: dict[str, Instance] = {}
        self._removed: list[Instance] = []
        """Removed instances that still have legs in flight."""
        self.instances: tuple[Instance, ...] = ()
        """Sorted by name."""
        self.withheld_ejections: defaultdict[str, int] = defaultdict(int)
        """Ejections left out because too many instances of the role were ejected, by reason."""
        self._changes = _Changes()
        self._candidates: Candidates[Instance] = Candidates(())
        self._candidates_as_of = 0

    @property
    def candidates(self) -> Candidates[Instance]:
        """The instances that can take work now."""
        if self._candidates_as_of != self._changes.count:
            self._candidates_as_of = self._changes.count
            self._candidates = Candidates(self.instances)
        return self._candidates

    def get(self, name: str) -> Instance | None:
        """The instance with this name, or None."""
        return self._by_name.get(name)

    def __getitem__(self, name: str) -> Instance:
        return self._by_name[name]

    def add(self, instance: Instance) -> None:
        """Add an instance."""
        self._by_name[instance.name] = instance
        instance.report_changes_to(self._changes)
        self._sort()

    def keep_only(self, names: Iterable[str]) -> None:
        """Remove all other instances; their retryable legs move elsewhere, streams may finish."""
        kept = set(names)
        for name in self._by_name.keys() - kept:
            removed = self._by_name.pop(name)
            removed.assign(None)
            removed.clear_endpoint()
            self._removed.append(removed)
        self._sort()

    def eject_by_judgement(self, instance: Instance, reason: str, *, now_s: float) -> bool:
        """Eject an instance that answers, but badly; False if too many of its role are ejected already."""
        same_role = [i for i in self.instances if i.role is instance.role and i.assigned]
        ejected = sum(i.health.ejected for i in same_role)
        if instance.health.ejected or not may_eject(
            serving=sum(i.serving for i in same_role), ejected=ejected
        ):
            self.withheld_ejections[reason] += not instance.health.ejected
            return False
        return instance.health.eject(now_s=now_s, judged=True)

    def enforce_timeouts(self, now_s: float) -> None:
        """Fail every leg whose deadline has passed, on removed instances too."""
        for instance in self.instances:
            instance.enforce_timeouts(now_s)
        if self._removed:
            for instance in self._removed:
                instance.enforce_timeouts(now_s)
            self._removed = [instance for instance in self._removed if instance.former_pools]

    def _sort(self) -> None:
        self.instances = tuple(self._by_name[name] for name in sorted(self._by_name))
        self._changes.count += 1


def intern_identity(identities: Iterable[EngineIdentity], identity: EngineIdentity) -> EngineIdentity:
    """Return the equal identity among `identities`, else `identity`, so that dispatch can compare by `is`."""
    return next((known for known in identities if known == identity), identity)


def parse_endpoint(endpoint: str) -> tuple[str, int]:
    """Split `host:port`; the brackets of an IPv6 host are removed.

    Raises:
        ValueError: if `endpoint` has another form.
    """
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdigit():
        raise ValueError(f"endpoint {endpoint!r} is not host:port")
    return host.strip("[]"), int(port)
