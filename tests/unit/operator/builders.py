"""Builders of the operator's objects and observations, so that a test names only the fields it is about.

All objects belong to the service `chat` in one namespace; `settled` combines them into an `Observed`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from fulcrum_core.api import (
    EngineIdentitySpec,
    Floors,
    PDAssignment,
    PDAssignmentSpec,
    PDInstance,
    PDPool,
    PDService,
    QoSTier,
    RoleAssignment,
)
from fulcrum_core.ports import EngineObservation, EngineState
from fulcrum_core.router_state import RouterState
from fulcrum_core.values import Actor, FlipStrategy, Phase, Role
from fulcrum_operator.manifests.names import InstallationSettings, ServiceAccount
from fulcrum_operator.plan import Observed
from fulcrum_operator.plan.observed import EngineFacts
from fulcrum_operator.plan.status.assignment import assignment_status
from tests.unit.core.router_states import instance_state, router_state

NOW_S = 1_800_000_000.0
SETTINGS = InstallationSettings(
    image="localhost/fulcrum:1",
    operator=ServiceAccount("fulcrum", "fulcrum-operator"),
    autoscaler=ServiceAccount("fulcrum", "fulcrum-autoscaler"),
)
P, D = Role.PREFILL, Role.DECODE
RUNNING, STARTING, EXITED = EngineState.RUNNING, EngineState.STARTING, EngineState.EXITED
ENGINE_FACTS = EngineFacts(
    EngineIdentitySpec(model="m", engine="simulated", kv_dtype="auto", block_size=16, tensor_parallel=1),
    FlipStrategy.RELABEL,
    startup_s=7.0,
)


def service(**spec: Any) -> PDService:
    """The service `chat` with the model `m` and these fields in its spec."""
    meta = {"name": "chat", "uid": "u-service", "generation": 1}
    return PDService.model_validate(
        {
            "metadata": meta,
            "kind": "PDService",
            "spec": {"model": "m", "engine": {"type": "Simulated"}, **spec},
        }
    )


def tier(name: str) -> QoSTier:
    """A QoSTier with only a name."""
    return QoSTier.model_validate({"metadata": {"name": name}})


def pool(name: str = "chat-flex", *, replicas: int, role: str = "Flexible", bounds: Any = None) -> PDPool:
    """A PDPool of `chat`; `bounds` are the (min, max) of its instances, by default (`replicas`, none)."""
    low, high = bounds or (replicas, replicas)
    meta = {"name": name, "uid": f"u-{name}", "labels": {"fulcrum.dev/service": "chat"}}
    owner = {"kind": "PDService", "name": "chat", "uid": "u-service", "controller": True}
    spec = {
        "service": "chat",
        "model": "m",
        "engine": {"type": "Simulated"},
        "role": role,
        "replicas": replicas,
        "instances": {"min": low, "max": high} if bounds else {"min": low},
    }
    return PDPool.model_validate({"metadata": {**meta, "ownerReferences": [owner]}, "spec": spec})


def instance(
    name: str, phase: Phase = Phase.SERVING, *, pool: str = "chat-flex", **status: Any
) -> PDInstance:
    """A PDInstance of `chat` that entered this phase ten seconds ago, with these other status fields."""
    spec = {"service": "chat", "pool": pool, "model": "m", "engine": {"type": "Simulated"}}
    observed = {"phase": phase, "phase_since": NOW_S - 10, **status}
    return PDInstance.model_validate({"metadata": {"name": name}, "spec": spec, "status": observed})


def entry(role: Role, by: Actor = Actor.OPERATOR, **fields: Any) -> RoleAssignment:
    """An entry of the assignment that is a hundred seconds old."""
    return RoleAssignment.model_validate({"role": role, "since": NOW_S - 100, "by": by, **fields})


def assignment_spec(
    roles: Mapping[str, RoleAssignment], *, floors: Floors | None = None, **fields: Any
) -> PDAssignmentSpec:
    """The spec of the assignment, with these entries by instance."""
    return PDAssignmentSpec(service="chat", roles=dict(roles), floors=floors or Floors(), **fields)


def assignment(spec: PDAssignmentSpec, generation: int = 1) -> PDAssignment:
    """The assignment of `chat`, with its status."""
    stored = PDAssignment.model_validate(
        {"metadata": {"name": "chat", "generation": generation}, "spec": spec.model_dump()}
    )
    return stored.replace(status=assignment_status(stored.spec))


def engine(name: str, state: EngineState = RUNNING, **fields: Any) -> EngineObservation:
    """An engine as the runtime observes it; the number at the end of `name` gives its port."""
    endpoint = f"127.0.0.1:{9000 + int(name.rpartition('-')[2])}" if state is RUNNING else None
    return EngineObservation(**{"name": name, "state": state, "restarts": 0, "endpoint": endpoint, **fields})


def router(
    generation: int = 1, legs: Mapping[str, int] | None = None, **pending_transfers: int
) -> RouterState:
    """The state of a router that has acknowledged this generation.

    `legs` are by instance, `pending_transfers` too, with `_` for `-` in the name.
    """
    states = tuple(
        instance_state(name, legs=count, pending_transfers=pending_transfers.get(name.replace("-", "_"), 0))
        for name, count in (legs or {}).items()
    )
    return router_state(*states, generation=generation, acknowledged_at_s=NOW_S, at_s=NOW_S)


def settled(roles: Mapping[str, Role], *, spec: Mapping[str, Any] | None = None, **fields: Any) -> Observed:
    """The observation of a service whose instances all serve in the given roles, with no change pending."""
    names = tuple(roles)
    rolespec = assignment_spec({name: entry(role) for name, role in roles.items()})
    instances = tuple(
        instance(
            name,
            role=role,
            endpoint=engine(name).endpoint,
            identity=ENGINE_FACTS.identity.model_dump(),
            flip_strategy=ENGINE_FACTS.flip_strategy,
        )
        for name, role in roles.items()
    )
    given = {
        "service": service(**(spec or {"instances": len(names)})),
        "now_s": NOW_S,
        "pools": (pool(replicas=len(names)),),
        "instances": instances,
        "assignment": assignment(rolespec),
        "engines": engines(names),
        "engine_facts": dict.fromkeys(names, ENGINE_FACTS),
        "endpoint": "http://127.0.0.1:8000",
        "accepted_assignment": rolespec,
    }
    return Observed(**{**given, **fields})


def engines(names: Iterable[str], **states: EngineState) -> dict[str, EngineObservation]:
    """Running engines with these names; `states` overrides states, by name with `_` for `-`."""
    return {name: engine(name, states.get(name.replace("-", "_"), RUNNING)) for name in names}
