"""One consistent picture of a service and all that was made for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fulcrum_core.api import EngineIdentitySpec, PDAssignment, PDAssignmentSpec, PDInstance, PDPool, PDService
from fulcrum_core.models import Fit
from fulcrum_core.ports import EngineObservation
from fulcrum_core.router_state import RouterState
from fulcrum_core.values import FlipStrategy
from fulcrum_operator.plan.slo_window import SloReport


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What an engine of some instance is known to be, whether it runs or not."""

    identity: EngineIdentitySpec
    flip_strategy: FlipStrategy | None
    """As probed; None while it was not."""
    startup_s: float
    """From its start to serving."""
    fit: Fit | None = None
    """Whether its hardware holds the model; None for an engine that holds none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelReadAttempt:
    """What is seen of a try to read the model.

    Args:
        key: Of which model.
        attempt: The how-manieth try it is.
        started_s: When it began, unix seconds.
        facts: What was read.
        error: Why nothing was, or will be.
        start_failure: What keeps it from beginning.
    """

    key: str
    attempt: int
    started_s: float
    facts: dict[str, Any] | None = None
    error: str | None = None
    start_failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """What a plan is made from. Missing facts are None or absent, never guessed."""

    service: PDService
    now_s: float
    pools: tuple[PDPool, ...] = ()
    instances: tuple[PDInstance, ...] = ()
    assignment: PDAssignment | None = None
    tiers: frozenset[str] = frozenset()
    """Names of the QoSTiers that exist."""
    engines: Mapping[str, EngineObservation] = field(default_factory=dict)
    engine_facts: Mapping[str, EngineFacts] = field(default_factory=dict)
    """By instance."""
    router: RouterState | None = None
    """The router's ledger; None where it was not asked or does not answer."""
    endpoint: str | None = None
    """Where clients reach the router; None until it serves."""
    accepted_assignment: PDAssignmentSpec | None = None
    """The last wish that was judged and found right; None after a restart of the operator."""

    can_read_models: bool = False
    """Whether somebody can be told to read a model; a local run reads it itself."""
    model_read_attempt: ModelReadAttempt | None = None
    """What came of that so far."""

    slo_report: SloReport | None = None
    """What the router's counts came to; None: nothing new."""

    node_loss_disputed: bool = False
    """Whether a node is said to be lost whose engine the router reaches: it has to be asked again soon."""
