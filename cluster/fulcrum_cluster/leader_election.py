"""Leader election by a Lease, as client-go does it; used by routers and operators.

Clocks of different machines are never compared: a candidate takes over a record that it has itself observed
unchanged for the holder's whole lease duration. Time without a response from the store does not count: the
leader stays the same after a store outage. Two leaders are possible for a moment (a suspended process that
continues), so a leader's writes must be idempotent or conditional.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import structlog

from fulcrum_cluster.objects import LEASE, ObjectApi
from fulcrum_core.api.meta import format_time
from fulcrum_core.errors import AlreadyExists, Conflict, FulcrumError, NotFound
from fulcrum_core.ports import Clock

log = structlog.get_logger()

_MIN_PAUSE_S = 0.01


class StepDown(StrEnum):
    """When a leader that cannot renew its Lease steps down."""

    WHEN_REPLACED = "WhenReplaced"
    """When it observes another holder: for work that must continue and may be done twice."""
    AT_DEADLINE = "AtDeadline"
    """Before its record can expire: for work that only one process may do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseTiming:
    """Times in seconds. A candidate leads at most `duration + retry` after a leader's last renewal.

    `renew_deadline_s` (under AT_DEADLINE) must lie below `lease_duration_s` by more than a renewal may take.
    """

    lease_duration_s: float
    renew_interval_s: float
    retry_interval_s: float
    renew_deadline_s: float


ROUTER_TIMING = LeaseTiming(
    lease_duration_s=3.0, renew_interval_s=1.0, retry_interval_s=0.5, renew_deadline_s=2.0
)
OPERATOR_TIMING = LeaseTiming(
    lease_duration_s=10.0, renew_interval_s=2.0, retry_interval_s=1.0, renew_deadline_s=7.0
)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseRecord:
    """Content of a Lease. Times are the written texts, which are only compared for equality."""

    holder: str | None
    lease_duration_s: float
    acquired: str | None = None
    renewed: str | None = None
    transitions: int = 0


class LeaseStore(Protocol):
    """Storage of one Lease. Both calls may raise any `StoreError`."""

    async def read(self) -> tuple[LeaseRecord, str]:
        """The record and its version; `NotFound` if there is none."""
        ...

    async def write(self, record: LeaseRecord, *, version: str | None) -> str:
        """Write the record and return its new version. `version` None: create it.

        Raises:
            Conflict: if `version` is not current.
            AlreadyExists: if `version` is None and there is a record.
        """
        ...


class KubernetesLease:
    """A Lease object of a cluster. A Lease that another client has emptied counts as free."""

    def __init__(self, objects: ObjectApi, name: str, *, namespace: str) -> None:
        self._objects, self._name, self._namespace = objects, name, namespace

    async def read(self) -> tuple[LeaseRecord, str]:
        """See `LeaseStore`."""
        found = await self._objects.get(LEASE, self._name, namespace=self._namespace)
        spec = found.get("spec") or {}
        record = LeaseRecord(
            holder=spec.get("holderIdentity"),
            lease_duration_s=float(spec.get("leaseDurationSeconds") or 0),
            acquired=spec.get("acquireTime"),
            renewed=spec.get("renewTime"),
            transitions=spec.get("leaseTransitions") or 0,
        )
        return record, found["metadata"]["resourceVersion"]

    async def write(self, record: LeaseRecord, *, version: str | None) -> str:
        """See `LeaseStore`."""
        spec = {
            "holderIdentity": record.holder,
            "leaseDurationSeconds": max(1, round(record.lease_duration_s)),
            "acquireTime": record.acquired,
            "renewTime": record.renewed,
            "leaseTransitions": record.transitions,
        }
        if version is None:
            body = {
                "apiVersion": LEASE.api_version,
                "kind": LEASE.kind,
                "metadata": {"name": self._name, "namespace": self._namespace},
                "spec": {field: value for field, value in spec.items() if value is not None},
            }
            written = await self._objects.create(LEASE, body, namespace=self._namespace)
        else:
            written = await self._objects.patch(
                LEASE, self._name, {"spec": spec}, namespace=self._namespace, resource_version=version
            )
        return str(written["metadata"]["resourceVersion"])


class LeaderElector:
    """One candidate of a leader election.

    Args:
        lease_store: The Lease.
        identity: Name of the candidate; a restarted process of the same name continues to lead.
        timing: Lease duration and intervals.
        step_down: When it steps down without a response from the store.
        clock: Wall clock for the record, monotonic clock for durations.
        rng: Spreads the candidates' retries.
        on_change: Called with True when it starts to lead and with False when it stops.
        able_to_lead: Returns whether the program can do a leader's work; if not, the Lease is neither renewed
            nor taken. A leader that no longer can stays leader until it is replaced or its deadline.
        sleep: Waits for a number of seconds.
    """

    def __init__(
        self,
        lease_store: LeaseStore,
        *,
        identity: str,
        timing: LeaseTiming,
        step_down: StepDown,
        clock: Clock,
        rng: random.Random,
        on_change: Callable[[bool], None] = lambda _leads: None,
        able_to_lead: Callable[[], bool] = lambda: True,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._lease_store, self._identity, self._timing = lease_store, identity, timing
        self._step_down, self._clock, self._rng = step_down, clock, rng
        self._on_change, self._able_to_lead, self._sleep = on_change, able_to_lead, sleep
        self._leading = False
        self._renewed_at_s = 0.0
        self._last_observed: tuple[str | None, str | None] | None = None
        """Holder and renewal as last observed; None: not observed since the store was unavailable."""
        self._unchanged_since_s = 0.0
        self._expires_at_s = 0.0
        self._store_available = True
        self.holder: str | None = None
        """Holder of the Lease when it was last observed."""

    @property
    def leading(self) -> bool:
        """Whether to act as the leader now. The deadline counts even if `run` was not scheduled in time."""
        return self._leading and not self._renewal_overdue(self._clock.monotonic_s())

    async def run(self) -> None:
        """Take part in the election until cancelled. Cancelling does not release the Lease: see `release`."""
        while True:
            await self.try_to_lead()
            await self._sleep(self._next_attempt_in_s())

    async def try_to_lead(self) -> None:
        """Read the Lease once, and renew it, take it over, or wait."""
        try:
            async with asyncio.timeout(self._attempt_timeout_s()):
                await self._read_and_take()
        except (FulcrumError, TimeoutError) as error:
            self._last_observed = None
            self._log_availability(error)
        else:
            self._log_availability(None)
        if self._leading and self._renewal_overdue(self._clock.monotonic_s()):
            self._set_leading(False)

    async def release(self) -> None:
        """Release the Lease, so that another candidate leads at once. If that fails, the Lease expires."""
        if not self._leading:
            return
        self._set_leading(False)
        try:
            async with asyncio.timeout(self._timing.retry_interval_s * 2):
                record, version = await self._lease_store.read()
                if record.holder == self._identity:
                    free = LeaseRecord(
                        holder=None, lease_duration_s=record.lease_duration_s, transitions=record.transitions
                    )
                    await self._lease_store.write(free, version=version)
        except (FulcrumError, TimeoutError) as error:
            log.warning("lease not released", reason=str(error) or type(error).__name__)

    async def _read_and_take(self) -> None:
        try:
            record, version = await self._lease_store.read()
        except NotFound:
            await self._acquire_or_renew(None, None)
            return
        self._note_record(record)
        if record.holder == self._identity or self._is_free(record):
            await self._acquire_or_renew(record, version)
        elif self._leading:
            self._set_leading(False)

    def _note_record(self, record: LeaseRecord) -> None:
        """Restart the wait for expiry if the record has changed."""
        self.holder = record.holder
        if self._last_observed != (record.holder, record.renewed):
            self._last_observed = record.holder, record.renewed
            self._unchanged_since_s = self._clock.monotonic_s()
        self._expires_at_s = self._unchanged_since_s + record.lease_duration_s

    def _is_free(self, record: LeaseRecord) -> bool:
        return not record.holder or self._clock.monotonic_s() >= self._expires_at_s

    async def _acquire_or_renew(self, old: LeaseRecord | None, version: str | None) -> None:
        """Renew or take over. After a conflicting write the next attempt reads the new holder."""
        if not self._able_to_lead():
            return
        now_s, now = self._clock.monotonic_s(), format_time(self._clock.now_s())
        own = old is not None and old.holder == self._identity
        record = LeaseRecord(
            holder=self._identity,
            lease_duration_s=self._timing.lease_duration_s,
            acquired=old.acquired if own and old else now,
            renewed=now,
            transitions=0 if old is None else old.transitions + (not own),
        )
        try:
            await self._lease_store.write(record, version=version)
        except (Conflict, AlreadyExists):
            return
        self._renewed_at_s, self.holder = (
            now_s,
            self._identity,
        )  # from before the write, so that the deadline is early rather than late
        if not self._leading:
            self._set_leading(True)

    def _set_leading(self, leads: bool) -> None:
        self._leading = leads
        log.info("leading" if leads else "no longer leading", identity=self._identity, holder=self.holder)
        self._on_change(leads)

    def _renewal_overdue(self, now_s: float) -> bool:
        at_deadline = self._step_down is StepDown.AT_DEADLINE
        return at_deadline and now_s >= self._renewed_at_s + self._timing.renew_deadline_s

    def _attempt_timeout_s(self) -> float:
        """Longest duration of one attempt; for a leader with a deadline, at most until that deadline."""
        longest = self._timing.lease_duration_s
        if not self._leading or self._step_down is StepDown.WHEN_REPLACED:
            return longest
        left_s = self._renewed_at_s + self._timing.renew_deadline_s - self._clock.monotonic_s()
        return max(0.0, min(longest, left_s))

    def _next_attempt_in_s(self) -> float:
        if self._leading and self._store_available:
            return self._timing.renew_interval_s
        pause_s = self._timing.retry_interval_s * self._rng.uniform(0.5, 1.0)
        until_s = self._expires_at_s - self._clock.monotonic_s()
        waits = not self._leading and self._last_observed is not None and until_s > 0
        return min(pause_s, max(_MIN_PAUSE_S, until_s)) if waits else pause_s

    def _log_availability(self, error: Exception | None) -> None:
        """Log the first of consecutive failures, and the recovery."""
        available = error is None
        if available is not self._store_available:
            reason = "" if available else str(error) or type(error).__name__
            log.warning(
                "lease store available again" if available else "lease store unavailable", reason=reason
            )
        self._store_available = available
