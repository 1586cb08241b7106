"""What follows from the observed facts for one instance: is its engine lost, is it ready, how does it flip?

The rest of `plan/` calls these functions; `Observed` itself holds facts only. Also the numbers and the order
of instances, and two corrections of what was observed (`mark_…`).
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace

from fulcrum_core.api import PDInstance, conditions
from fulcrum_core.ports import EngineObservation, EngineState
from fulcrum_core.values import FlipStrategy, Phase, Role
from fulcrum_operator.plan.observed import Observed

WORKING_PHASES = (Phase.SERVING, Phase.DRAINING)
"""Phases in which an instance has requests."""


def ready_instances(observed: Observed) -> frozenset[str]:
    """Names of the instances in phase Serving whose engine runs and is not terminating."""
    return frozenset(
        i.metadata.name for i in observed.instances if i.is_serving and engine_runs(observed, i.metadata.name)
    )


def engine_runs(observed: Observed, name: str) -> bool:
    """Whether an instance has an engine that runs and is not terminating."""
    engine = observed.engines.get(name)
    return engine is not None and engine.state is EngineState.RUNNING and not engine.terminating


def active_instances(observed: Observed) -> tuple[PDInstance, ...]:
    """Instances that count as members of their pool: not terminating, and their engine is not lost."""
    return tuple(
        i
        for i in observed.instances
        if i.status.phase is not Phase.TERMINATING and not engine_lost(observed, i)
    )


def active_names(observed: Observed) -> frozenset[str]:
    """Names of the active instances."""
    return frozenset(i.metadata.name for i in active_instances(observed))


def engine_lost(observed: Observed, instance: PDInstance) -> bool:
    """Whether the instance's engine is gone for good and the operator did not stop it.

    The phase shows who stopped the engine, because the operator writes the phase before it stops an engine.
    """
    engine, phase = observed.engines.get(instance.metadata.name), instance.status.phase
    if phase is Phase.TERMINATING:
        return False
    if engine is not None and engine.state is EngineState.LOST:
        return True
    if phase in (Phase.SWITCHING, Phase.VERIFYING):
        return False
    if phase is Phase.DRAINING and _needs_restart_to_flip(observed, instance):
        return False
    if engine is None:
        return phase in (Phase.FAILED, Phase.DRAINING)
    return engine.terminating


def _needs_restart_to_flip(observed: Observed, instance: PDInstance) -> bool:
    """Whether the engine must be restarted before the instance can play its assigned role."""
    entry = observed.assignment.spec.roles.get(instance.metadata.name) if observed.assignment else None
    current = current_role(instance)
    restart = flip_strategy(observed, instance) is FlipStrategy.RESTART
    return restart and entry is not None and current is not None and entry.role is not current


def flip_strategy(observed: Observed, instance: PDInstance) -> FlipStrategy:
    """How the instance flips: Restart if its engine was started for one role, else as the probe found.

    Relabel until the probe has a result.
    """
    if instance.spec.role_fixed_at_start or instance.spec.role:
        return FlipStrategy.RESTART
    facts = observed.engine_facts.get(instance.metadata.name)
    return (facts and facts.flip_strategy) or instance.status.flip_strategy or FlipStrategy.RELABEL


def startup_s(observed: Observed, instance: PDInstance) -> float:
    """Seconds from the start of the instance's engine until it serves; 0 if not known."""
    facts = observed.engine_facts.get(instance.metadata.name)
    return facts.startup_s if facts else 0.0


def current_role(instance: PDInstance) -> Role | None:
    """Role that the instance plays, or the role before, while its engine restarts to flip; None if it plays
    both or none yet."""
    switching = instance.status.phase in (Phase.SWITCHING, Phase.VERIFYING)
    known = None if switching else instance.spec.role
    role = known or instance.status.role
    return role if role in (Role.PREFILL, Role.DECODE) else None


def ever_served(instance: PDInstance) -> bool:
    """Whether the instance has served at least once, in any run of its engine.

    Its flip strategy is written into the status when it first serves.
    """
    return instance.status.flip_strategy is not None


def lost_node_endpoints(observed: Observed) -> dict[str, str]:
    """Endpoints by name of the working instances whose nodes are reported lost."""
    return {
        i.metadata.name: i.status.endpoint
        for i in observed.instances
        if i.status.phase in WORKING_PHASES and i.status.endpoint
        if (engine := observed.engines.get(i.metadata.name)) is not None and engine.node_lost
    }


def mark_reachable_engines_running(observed: Observed) -> Observed:
    """`observed` with every engine that the router reaches in state Running, even on a node reported lost.

    While the API server is down no node can report, and for a moment after its return all nodes look lost.
    Replacing every instance then would stop a healthy service.
    """
    reached = {s.name for s in observed.router.instances if not s.missed_probes} if observed.router else set()
    running = {
        name: replace(observed.engines[name], state=EngineState.RUNNING, endpoint=endpoint, node_lost=False)
        for name, endpoint in lost_node_endpoints(observed).items()
        if name in reached
    }
    return replace(observed, engines={**observed.engines, **running}, node_loss_disputed=bool(running))


def mark_invalid_engines(observed: Observed, invalid: Mapping[str, str]) -> Observed:
    """`observed` with an engine that cannot start for each instance whose engine settings are invalid.

    `invalid` are the errors by instance. An engine that runs is left as it is.
    """
    phases = {i.metadata.name: i.status.phase for i in observed.instances}
    refused = {
        name: EngineObservation(
            name, EngineState.STARTING, restarts=0, reason=conditions.ENGINE_START_FAILED, message=error
        )
        for name, error in invalid.items()
        if name not in observed.engines and phases[name] is not Phase.TERMINATING
    }
    return replace(observed, engines={**observed.engines, **refused})


def instance_number(service: str, name: str) -> int | None:
    """The number in an instance's name `<service>-<n>`; None for a name that is not of that form."""
    head, _, tail = name.rpartition("-")
    return int(tail) if head == service and tail.isascii() and tail.isdigit() else None


def instance_order(name: str) -> tuple[int, str]:
    """Sort key of instance names: chat-2 comes before chat-10."""
    tail = name.rpartition("-")[2]
    return (int(tail) if tail.isascii() and tail.isdigit() else -1, name)


def sort_instances(instances: Iterable[PDInstance]) -> tuple[PDInstance, ...]:
    """The instances by their number."""
    return tuple(sorted(instances, key=lambda instance: instance_order(instance.metadata.name)))


def revision_of(instance: PDInstance) -> str:
    """The revision that the instance was started with."""
    return instance.spec.revision or instance.spec.launch_revision


def members_of(instances: Iterable[PDInstance], pool: str) -> tuple[PDInstance, ...]:
    """The instances that belong to the pool, in the order of their numbers."""
    return sort_instances(i for i in instances if i.spec.pool == pool)
