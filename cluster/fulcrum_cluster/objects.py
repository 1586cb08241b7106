"""Kubernetes objects as dictionaries: their kinds, and `ObjectApi`, the port to access them.

`client.RestObjects` implements the port, and tests have a fake. Our own kinds have a typed store
(`fulcrum_core.ports`).
"""

from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from fulcrum_core.api.meta import Resource
from fulcrum_core.api.registry import KINDS
from fulcrum_core.errors import InvalidInput
from fulcrum_core.ports import EventType

Object = dict[str, Any]
ObjectList = tuple[list[Object], str]


@dataclass(frozen=True, slots=True)
class ObjectKind:
    """API version, plural and kind of objects: `v1`, `pods`, `Pod`."""

    api_version: str
    plural: str
    kind: str
    namespaced: bool = True

    def path(self, namespace: str, name: str | None = None, subresource: str = "") -> str:
        """URL path of the collection, an object or its subresource; namespace "" means all."""
        root = "api" if "/" not in self.api_version else "apis"
        within = ["namespaces", namespace] if self.namespaced and namespace else []
        parts = [root, self.api_version, *within, self.plural, name, subresource]
        return "/" + "/".join(part for part in parts if part)


POD = ObjectKind("v1", "pods", "Pod")
SERVICE = ObjectKind("v1", "services", "Service")
CONFIG_MAP = ObjectKind("v1", "configmaps", "ConfigMap")
SECRET = ObjectKind("v1", "secrets", "Secret")
SERVICE_ACCOUNT = ObjectKind("v1", "serviceaccounts", "ServiceAccount")
NODE = ObjectKind("v1", "nodes", "Node", namespaced=False)
NAMESPACE = ObjectKind("v1", "namespaces", "Namespace", namespaced=False)
EVENT = ObjectKind("v1", "events", "Event")
DEPLOYMENT = ObjectKind("apps/v1", "deployments", "Deployment")
REPLICA_SET = ObjectKind("apps/v1", "replicasets", "ReplicaSet")
LEASE = ObjectKind("coordination.k8s.io/v1", "leases", "Lease")
ENDPOINT_SLICE = ObjectKind("discovery.k8s.io/v1", "endpointslices", "EndpointSlice")
PDB = ObjectKind("policy/v1", "poddisruptionbudgets", "PodDisruptionBudget")
NETWORK_POLICY = ObjectKind("networking.k8s.io/v1", "networkpolicies", "NetworkPolicy")
ROLE = ObjectKind("rbac.authorization.k8s.io/v1", "roles", "Role")
ROLE_BINDING = ObjectKind("rbac.authorization.k8s.io/v1", "rolebindings", "RoleBinding")
CLUSTER_ROLE = ObjectKind("rbac.authorization.k8s.io/v1", "clusterroles", "ClusterRole", namespaced=False)
CLUSTER_ROLE_BINDING = ObjectKind(
    "rbac.authorization.k8s.io/v1", "clusterrolebindings", "ClusterRoleBinding", namespaced=False
)
CRD = ObjectKind(
    "apiextensions.k8s.io/v1", "customresourcedefinitions", "CustomResourceDefinition", namespaced=False
)
SELF_SUBJECT_ACCESS_REVIEW = ObjectKind(
    "authorization.k8s.io/v1", "selfsubjectaccessreviews", "SelfSubjectAccessReview", namespaced=False
)


def kind_of_resource(resource: type[Resource]) -> ObjectKind:
    """The `ObjectKind` of one of our own kinds."""
    version = str(resource.model_fields["api_version"].default)
    return ObjectKind(version, resource.plural, resource.kind_name())


_KINDS_BY_NAME = {
    (kind.api_version, kind.kind): kind
    for kind in (
        *(POD, SERVICE, CONFIG_MAP, SECRET, SERVICE_ACCOUNT, NODE, NAMESPACE, EVENT, DEPLOYMENT, REPLICA_SET),
        *(LEASE, ENDPOINT_SLICE, PDB, NETWORK_POLICY, ROLE, ROLE_BINDING, CLUSTER_ROLE, CLUSTER_ROLE_BINDING),
        *(CRD, SELF_SUBJECT_ACCESS_REVIEW),
        *(kind_of_resource(resource) for resource in KINDS),
    )
}


def kind_of_body(body: Mapping[str, Any]) -> ObjectKind:
    """The kind of an object, from its apiVersion and kind; `InvalidInput` if unknown."""
    kind = _KINDS_BY_NAME.get((body.get("apiVersion", ""), body.get("kind", "")))
    if kind is None:
        raise InvalidInput("kind", f"{body.get('apiVersion')} {body.get('kind')}", "is not known here")
    return kind


class ObjectApi(Protocol):
    """Read, watch and write any Kubernetes object. Errors are those of `fulcrum_core.ports.Store`.

    Writes are validated strictly: a field that the kind does not have is `InvalidInput`. The
    namespace is ignored for cluster-scoped kinds.
    """

    async def get(self, kind: ObjectKind, name: str, *, namespace: str) -> Object:
        """The object, or `NotFound`."""
        ...

    async def list(
        self,
        kind: ObjectKind,
        *,
        namespace: str,
        labels: str = "",
        fields: str = "",
        keep: Callable[[Object], Object] | None = None,
    ) -> ObjectList:
        """All selected objects in the namespace ("": in all), and the version to watch from.

        `keep`: returns what is kept of an object. At most a page of whole objects is in memory then.
        """
        ...

    def watch(
        self, kind: ObjectKind, *, namespace: str, since: str, labels: str = "", fields: str = ""
    ) -> AsyncGenerator[tuple[EventType, Object], None]:
        """Every change after `since` until caller or server end it; `Gone` if that is too old.

        A BOOKMARK's object holds a resourceVersion and nothing else.
        """
        ...

    async def create(
        self, kind: ObjectKind, body: Mapping[str, Any], *, namespace: str, dry_run: bool = False
    ) -> Object:
        """The stored object, or `AlreadyExists`."""
        ...

    async def apply(
        self, body: Mapping[str, Any], *, manager: str, force: bool = False, dry_run: bool = False
    ) -> Object:
        """Server-side apply of the body; `Conflict` if another manager owns a field, unless forced."""
        ...

    async def patch(
        self,
        kind: ObjectKind,
        name: str,
        patch: Mapping[str, Any],
        *,
        namespace: str,
        resource_version: str | None = None,
        subresource: str = "",
    ) -> Object:
        """JSON merge patch; `Conflict` if `resource_version` is given and not current."""
        ...

    async def replace(self, body: Mapping[str, Any]) -> Object:
        """Replace the whole object; `Conflict` if its metadata.resourceVersion is not current."""
        ...

    async def delete(
        self,
        kind: ObjectKind,
        name: str,
        *,
        namespace: str,
        grace_s: float | None = None,
        uid: str | None = None,
    ) -> None:
        """Delete the object and later its dependents; `Conflict` if `uid` is given and differs."""
        ...

    async def get_raw(self, path: str) -> Any:
        """The server's response at a path: parsed JSON, anything else as text."""
        ...
