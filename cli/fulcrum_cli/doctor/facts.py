"""What the checks look at: one picture of a target, taken by the shell. None: it could not be read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fulcrum_cli.doctor.rights import Answer
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.state import RouterState

Body = Mapping[str, Any]
Bodies = Sequence[Body]


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountFacts:
    """A part's ServiceAccount, and what the API server says of its rights."""

    part: str
    account: str
    answers: tuple[Answer, ...]
    service: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """What stands around the services in a cluster. Bodies are Kubernetes objects as they are."""

    kinds: Mapping[str, Body | None] | None
    """The CustomResourceDefinitions by name; of one that is not there None."""
    person: tuple[Answer, ...]
    accounts: tuple[AccountFacts, ...]
    operator: Bodies | None
    """Deployments of the operator."""
    autoscaler: Bodies | None
    program_pods: Mapping[str, Bodies | None]
    """Pods of operator and autoscaler, by part."""
    leader: Body | None
    """The operator's Lease."""
    leases_seen: bool
    nodes: Bodies | None
    engine_pods: Mapping[str, Bodies] | None
    """By service."""
    router_pods: Mapping[str, Bodies] | None
    routers: Mapping[str, Bodies] | None
    """Deployments of routers by service."""
    router_leases: Mapping[str, Body | None] | None
    slices: Mapping[str, Body | None] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFacts:
    """What stands around the service of a local run."""

    state: RouterState | None
    autoscaler_refusal: str
    """Why the autoscaler does not answer; "" if it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One namespace at one time."""

    now_s: float
    namespace: str
    services: tuple[PDService, ...]
    instances: tuple[PDInstance, ...]
    assignments: Mapping[str, PDAssignment]
    tiers: frozenset[str]
    cluster: ClusterFacts | None = None
    local: LocalFacts | None = None

    def of(self, service: str) -> tuple[PDInstance, ...]:
        """The instances of one service."""
        return tuple(instance for instance in self.instances if instance.spec.service == service)
