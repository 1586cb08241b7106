"""One consistent picture of a service and all that was made for it."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from fulcrum_core.api import EngineIdentitySpec, PDAssignment, PDAssignmentSpec, PDInstance, PDPool, PDService
from fulcrum_core.api.pdservice import ModelStatus
from fulcrum_core.models import Fit
from fulcrum_core.ports import EngineObservation, EngineState
from fulcrum_core.router_state import RouterState
from fulcrum_core.values import FlipStrategy, Phase, Role
from fulcrum_operator.plan.status.slo_met import SloReport


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

    @property
    def lost_node_endpoints(self) -> dict[str, str]:
        """The endpoints of instances at work whose nodes are said not to answer, by name."""
        return {
            i.metadata.name: i.status.endpoint
            for i in self.instances
            if i.status.phase in (Phase.SERVING, Phase.DRAINING) and i.status.endpoint
            if (engine := self.engines.get(i.metadata.name)) is not None and engine.node_lost
        }

    @property
    def ready_instances(self) -> frozenset[str]:
        """Names of the instances that serve, and whose engines still do."""
        return frozenset(
            i.metadata.name for i in self.instances if i.is_serving and self._engine_runs(i.metadata.name)
        )

    def _engine_runs(self, name: str) -> bool:
        engine = self.engines.get(name)
        return engine is not None and engine.state is EngineState.RUNNING and not engine.terminating

    @property
    def active_instances(self) -> tuple[PDInstance, ...]:
        """The instances that count: not those on their way out, nor those whose engine was taken away."""
        return tuple(
            i for i in self.instances if i.status.phase is not Phase.TERMINATING and not self.engine_lost(i)
        )

    @property
    def active_names(self) -> frozenset[str]:
        """Names of the instances that count."""
        return frozenset(i.metadata.name for i in self.active_instances)

    def with_model(self, known: ModelStatus | None) -> "Observed":
        """The same, with what is known of the model by now."""
        status = self.service.status
        if status.model == known:
            return self
        return replace(self, service=self.service.replace(status=status.model_copy(update={"model": known})))

    def startup_s(self, instance: PDInstance) -> float:
        """How long its engine needs from its start to serving, as far as that is known."""
        facts = self.engine_facts.get(instance.metadata.name)
        return facts.startup_s if facts else 0.0

    def flip_strategy(self, instance: PDInstance) -> FlipStrategy:
        """How it flips: by a restart where its engine was started for a role, else as it was probed."""
        if instance.spec.role_fixed_at_start or instance.spec.role:
            return FlipStrategy.RESTART
        facts = self.engine_facts.get(instance.metadata.name)
        return (facts and facts.flip_strategy) or instance.status.flip_strategy or FlipStrategy.RELABEL

    def needs_restart_to_flip(self, instance: PDInstance) -> bool:
        """Whether its engine has to be started anew for the role that is wished."""
        entry = self.assignment.spec.roles.get(instance.metadata.name) if self.assignment else None
        current = current_role(instance)
        restart = self.flip_strategy(instance) is FlipStrategy.RESTART
        return restart and entry is not None and current is not None and entry.role is not current

    def engine_lost(self, instance: PDInstance) -> bool:
        """Whether its engine was taken away for good, and not by us.

        It was lost, or somebody asked for its end. Whose wish an end is, the phase says: ours is written
        before the engine is told.
        """
        engine, phase = self.engines.get(instance.metadata.name), instance.status.phase
        if phase is Phase.TERMINATING:
            return False
        if engine is not None and engine.state is EngineState.LOST:
            return True
        if phase in (Phase.SWITCHING, Phase.VERIFYING):
            return False
        if phase is Phase.DRAINING and self.needs_restart_to_flip(instance):
            return False
        if engine is None:
            return phase in (Phase.FAILED, Phase.DRAINING)
        return engine.terminating


def mark_reachable_engines_running(observed: Observed) -> Observed:
    """`observed`, in which an engine that the router reaches runs, whatever is said of its node.

    While an API server is away no node can be heard, and for a moment after its return all are taken for
    lost. To replace every instance then would end a service that lacks nothing.
    """
    reached = {s.name for s in observed.router.instances if not s.missed_probes} if observed.router else set()
    running = {
        name: replace(observed.engines[name], state=EngineState.RUNNING, endpoint=endpoint, node_lost=False)
        for name, endpoint in observed.lost_node_endpoints.items()
        if name in reached
    }
    return replace(observed, engines={**observed.engines, **running}, node_loss_disputed=bool(running))


def current_role(instance: PDInstance) -> Role | None:
    """The role that an instance plays, or played until it switched; None before it first served."""
    switching = instance.status.phase in (Phase.SWITCHING, Phase.VERIFYING)
    known = None if switching else instance.spec.role
    role = known or instance.status.role
    return role if role in (Role.PREFILL, Role.DECODE) else None


def ever_served(instance: PDInstance) -> bool:
    """Whether it served in any life of its engine: how it flips is noted when it first does."""
    return instance.status.flip_strategy is not None


def instance_number(service: str, name: str) -> int | None:
    """The number in an instance's name `<service>-<n>`; None for a name that is not of that form."""
    head, _, tail = name.rpartition("-")
    return int(tail) if head == service and tail.isascii() and tail.isdigit() else None


def instance_order(name: str) -> tuple[int, str]:
    """Sort key of instance names: chat-2 comes before chat-10."""
    tail = name.rpartition("-")[2]
    return (int(tail) if tail.isascii() and tail.isdigit() else -1, name)
