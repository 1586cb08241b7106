"""What the checks look at: one picture of a target, taken by the shell. None: it could not be read."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fulcrum_cli.doctor.permissions import AccessReview
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.router_state import RouterState

Body = Mapping[str, Any]
Bodies = Sequence[Body]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAccountFacts:
    """A component's ServiceAccount, and what the API server says of its rights."""

    component: str
    account: str
    access_reviews: tuple[AccessReview, ...]
    service: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """What stands around the services in a cluster. Bodies are Kubernetes objects as they are."""

    crds: Mapping[str, Body | None] | None
    """The CustomResourceDefinitions by name; of one that is not there None."""
    user_access: tuple[AccessReview, ...]
    service_accounts: tuple[ServiceAccountFacts, ...]
    operator_deployments: Bodies | None
    """Deployments of the operator."""
    autoscaler_deployments: Bodies | None
    component_pods: Mapping[str, Bodies | None]
    """Pods of operator and autoscaler, by component."""
    operator_lease: Body | None
    """The operator's Lease."""
    leases_readable: bool
    nodes: Bodies | None
    engine_pods: Mapping[str, Bodies] | None
    """By service."""
    router_pods: Mapping[str, Bodies] | None
    router_deployments: Mapping[str, Bodies] | None
    """Deployments of routers by service."""
    router_leases: Mapping[str, Body | None] | None
    endpoint_slices: Mapping[str, Body | None] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFacts:
    """What stands around the service of a local run."""

    state: RouterState | None
    autoscaler_error: str
    """Why the autoscaler does not answer; "" if it does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFacts:
    """One namespace at one time."""

    now_s: float
    namespace: str
    services: tuple[PDService, ...]
    instances: tuple[PDInstance, ...]
    assignments: Mapping[str, PDAssignment]
    tiers: frozenset[str]
    cluster: ClusterFacts | None = None
    local: LocalFacts | None = None

    def instances_of(self, service: str) -> tuple[PDInstance, ...]:
        """The instances of one service."""
        return tuple(instance for instance in self.instances if instance.spec.service == service)
