"""`Observed`: everything that a plan is made from, as the controller read it in one reconcile.

Facts only. What follows from them for one instance is in `instance_state`. `controller/reconcile` builds it,
and everything in `plan/` reads it.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fulcrum_core.api import (
    EngineIdentitySpec,
    PDAssignment,
    PDAssignmentSpec,
    PDInstance,
    PDPool,
    PDService,
    QoSTier,
)
from fulcrum_core.models import Fit
from fulcrum_core.ports import EngineObservation
from fulcrum_core.router_state import RouterState
from fulcrum_core.values import FlipStrategy
from fulcrum_operator.engines.images import EngineImages
from fulcrum_operator.plan.slo_window import SloReport


class FailureCause(NamedTuple):
    """Something that is broken: a reason of the condition Degraded, and a message for people."""

    reason: str
    message: str
    key: str = ""
    """Identity of a cause whose message changes while it lasts; empty if the message does not."""

    @property
    def identity(self) -> str:
        """Causes with the same identity are one cause."""
        return self.key or self.message


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Properties of an instance's engine, known from its spec or its probe even while it does not run."""

    identity: EngineIdentitySpec
    flip_strategy: FlipStrategy | None
    """Strategy that the probe found; None before the probe."""
    startup_s: float
    """Seconds from the start of the engine until it serves."""
    fit: Fit | None = None
    """Whether the model fits the engine's hardware; None for a simulated engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReadAttempt:
    """One attempt to read a model's config.json.

    Args:
        key: Key of the model (`model_key`).
        attempt: Attempt number, from 1.
        started_s: Start of the attempt, in unix seconds.
        facts: The excerpt that was read; None until then.
        error: Why the attempt failed; None if it has not.
        start_failure: Why the reader pod cannot start; empty if nothing prevents its start.
    """

    key: str
    attempt: int
    started_s: float
    facts: dict[str, Any] | None = None
    error: str | None = None
    start_failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """The input of `plan_service`. Facts that are not known are None or absent, never guessed."""

    service: PDService
    now_s: float
    pools: tuple[PDPool, ...] = ()
    instances: tuple[PDInstance, ...] = ()
    assignment: PDAssignment | None = None
    tiers: tuple[QoSTier, ...] = ()
    """The QoSTiers in the service's namespace."""
    engines: Mapping[str, EngineObservation] = field(default_factory=dict)
    engine_facts: Mapping[str, EngineFacts] = field(default_factory=dict)
    """Properties of each engine by the name of its instance, known even while it does not run."""
    router: RouterState | None = None
    """State of the active router; None if it was not queried or did not respond."""
    endpoint: str | None = None
    """URL at which clients reach the router; None until the router serves."""
    state_tls: bool = False
    """Whether the state port of the active router serves TLS."""
    accepted_assignment: PDAssignmentSpec | None = None
    """Last assignment that was checked and allowed; None after a restart of the operator."""

    sees_nodes: bool = True
    """Whether `engines` shows which nodes depart; False if the operator may not watch nodes."""
    engine_images: EngineImages | None = None
    """Default images of engines; None in a local run, where engines are processes."""
    can_read_models: bool = False
    """Whether a pod can read the model's config.json; False in a local run, which reads the file itself."""
    model_read_attempt: ModelReadAttempt | None = None
    """Latest attempt to read the model; None if there was none."""

    slo_report: SloReport | None = None
    """SLO attainment from the router's counters; None if there is nothing new to report."""

    taken_pools: Mapping[str, str] = field(default_factory=dict)
    """PDPools that are not the service's, by name: whose they are, in one line."""

    taken_names: frozenset[str] = frozenset()
    """Names of the PDInstances that are not the service's."""

    problems: tuple[FailureCause, ...] = ()
    """What the last reconcile could not do."""

    router_failures: tuple[FailureCause, ...] = ()
    """Why routers cannot start, or their state cannot be read."""

    node_loss_disputed: bool = False
    """Whether a node is reported lost although the router reaches its engine: query the router again soon."""
