"""Facts that doctor's checks examine: a target at one time.

A field that is None could not be read. `crds` has an entry for each of our kinds, None for a missing one. A
mapping by service has no entry for a service without such objects. Deployments are those that manage the
namespace; None: there may be one that cannot be read. In `component_pods`, None: the pods could not be
read; empty: there are none, or no Deployment is known. `operator_lease` is None if there is none or it
could not be read: `leases_readable` tells them apart, but only if `operator_deployments` is not empty.
Services, instances, assignments and tiers are empty if they could not be read. `DoctorFacts.cluster` is
None for a local run, `DoctorFacts.local` is None for a cluster.

`gather` fills them; the checks read nothing else.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fulcrum_cli.doctor.findings import Component
from fulcrum_cli.doctor.permissions import AccessReview
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.router_state import RouterState

Body = Mapping[str, Any]
Bodies = Sequence[Body]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceAccountFacts:
    """A component's ServiceAccount and the API server's reviews of its permissions."""

    component: Component
    account: str
    access_reviews: tuple[AccessReview, ...]
    service: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterFacts:
    """Cluster objects besides the services. Bodies are Kubernetes objects as the API server returns them."""

    crds: Mapping[str, Body | None] | None
    """CustomResourceDefinitions by name; None for a missing one."""
    user_access: tuple[AccessReview, ...]
    service_accounts: tuple[ServiceAccountFacts, ...]
    operator_deployments: Bodies | None
    """Deployments of the operator."""
    autoscaler_deployments: Bodies | None
    component_pods: Mapping[Component, Bodies | None]
    """Pods of operator and autoscaler, by component."""
    operator_lease: Body | None
    """The operator's Lease."""
    leases_readable: bool
    nodes: Bodies | None
    engine_pods: Mapping[str, Bodies] | None
    """Engine pods by service."""
    router_pods: Mapping[str, Bodies] | None
    router_deployments: Mapping[str, Bodies] | None
    """Deployments of routers by service."""
    router_leases: Mapping[str, Body] | None
    endpoint_slices: Mapping[str, Body] | None


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalFacts:
    """Router and autoscaler of a local run."""

    state: RouterState | None
    autoscaler_error: str
    """Error of the autoscaler's last response; "" if it responds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFacts:
    """One namespace, or one local run, at one time."""

    now_s: float
    namespace: str
    services: tuple[PDService, ...]
    instances: tuple[PDInstance, ...]
    assignments: Mapping[str, PDAssignment]
    tiers: frozenset[str]
    cluster: ClusterFacts | None = None
    local: LocalFacts | None = None

    def instances_of(self, service: str) -> tuple[PDInstance, ...]:
        """Return the instances of one service."""
        return tuple(instance for instance in self.instances if instance.spec.service == service)
