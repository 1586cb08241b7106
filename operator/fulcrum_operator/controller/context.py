"""What a reconcile works with: its ports, and what one reconcile leaves for the next.

A cluster and a local run share `reconcile`; what differs between them is in `ReconcileContext`.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from fulcrum_core.api import PDAssignmentSpec, PDInstance, PDService
from fulcrum_core.ports import Clock, EngineRuntime, Store
from fulcrum_core.router_state import RouterState
from fulcrum_operator.engines.images import EngineImages
from fulcrum_operator.plan import Observed, Plan
from fulcrum_operator.plan.observed import EngineFacts, FailureCause, ModelReadAttempt
from fulcrum_operator.plan.slo_window import SloWindow

STATUS_INTERVAL_S = 10.0
"""Shortest time between two writes of a service's status in which no condition changed, in seconds."""


class ServiceKey(NamedTuple):
    """Namespace and name of a PDService: the key of the work queue."""

    namespace: str
    name: str

    def __str__(self) -> str:
        return f"{self.namespace}/{self.name}"


class RouterView(Protocol):
    """Port to the active router of each service."""

    def endpoint(self, key: ServiceKey) -> str | None:
        """URL for the service's clients; None while no router is active."""
        ...

    async def read_state(self, key: ServiceKey) -> RouterState | None:
        """Instances and counters as the router reports them; None if it does not respond."""
        ...


class ModelReader(Protocol):
    """Port to what reads a model's config.json where the operator has no access to the file."""

    def reading(self, key: ServiceKey) -> ModelReadAttempt | None:
        """The latest attempt to read the service's model; None if none was started."""
        ...


@dataclass(frozen=True, slots=True)
class Problems:
    """What a reconcile could not do, and the seconds until that is tried again; None: not before an event."""

    causes: tuple[FailureCause, ...] = ()
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class ReconcileMemory:
    """What one reconcile leaves for the next. A restart loses it; the stored objects suffice."""

    accepted: PDAssignmentSpec | None = None
    """Last accepted assignment."""
    status_written_s: float | None = None
    """Time of the last write of the service's status, unix seconds."""
    router_polled_s: float = -math.inf
    """Time of the last poll of the router, unix seconds."""
    state_request: asyncio.Task[RouterState | None] | None = None
    """Open request to the router that took longer than `STATE_WAIT_S`."""
    window: SloWindow = field(default_factory=SloWindow)
    """Recent counters of the router, for SLO attainment."""
    problems: tuple[FailureCause, ...] = ()
    """What the last reconcile could not do; the next reconcile reports it in the status."""
    failures: int = 0
    """Number of reconciles since the last one without a failure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileContext:
    """The ports and the memory that a reconcile uses, in a cluster or in a local run."""

    store: Store
    runtime: EngineRuntime
    clock: Clock
    engine_facts: Callable[[PDInstance], EngineFacts]
    """Identity, start-up time and fit of an instance's engine."""
    router: RouterView | None = None
    router_failures: Callable[[ServiceKey], Problems] = lambda _key: Problems()
    """Why routers of the service cannot start, or their state cannot be read."""
    state_tls: Callable[[ServiceKey], bool] = lambda _key: False
    """Whether the state port of the service's active router serves TLS."""
    installation_problems: Callable[[], tuple[FailureCause, ...]] = tuple
    """What the installation lacks: fields of the CRDs, the permission to watch nodes."""
    models: ModelReader | None = None
    has_engine_account: Callable[[ServiceKey], bool] = lambda _key: True
    """Whether the ServiceAccount of the service's engines is its own: no engine runs as somebody else's."""
    check_not_deleted: Callable[[PDService], Awaitable[None]] | None = None
    """Raises `Conflict` if the service is deleted by now; None: the store knows the latest state."""
    engine_images: Callable[[], EngineImages | None] = lambda: None
    """Default images of engines; None if engines are processes, or if the CRDs cannot store an image."""
    sees_nodes: Callable[[], bool] = lambda: True
    """Whether observations show which engines are on departing nodes."""
    after_apply: Callable[[Observed, Plan], Awaitable[Problems]] | None = None
    """Runs after a plan was applied: children, role labels, model reader pod, Events."""
    on_failure: Callable[[PDService, FailureCause], Awaitable[None]] | None = None
    """Runs after the status reports a new failure of a reconcile."""
    status_interval_s: float = STATUS_INTERVAL_S
    memory: MutableMapping[ServiceKey, ReconcileMemory] = field(default_factory=dict)
    """Memory by service. The work queue runs a key at most once at a time, so no lock guards an entry."""
