"""Names in a cluster: selectors, accounts and ports that pods and policies must agree on."""

from dataclasses import dataclass, field
from typing import Any

from fulcrum_core.api import PDService
from fulcrum_core.api.labels import ROUTER_LABEL, SERVICE_LABEL
from fulcrum_core.api.meta import API_VERSION, OwnerReference, Resource

HTTP_PORT = 8000
STATE_PORT = 9091
SIDE_CHANNEL_PORT = 5600
SERVICE_PORT = 80
RUN_AS_UID = 65532
"""The user of every pod, if its image has no better one: not root, and no user of any node."""


@dataclass(frozen=True, slots=True)
class ServiceAccount:
    """A ServiceAccount."""

    namespace: str
    name: str

    @property
    def subject(self) -> str:
        """As the API server calls it in tokens."""
        return f"system:serviceaccount:{self.namespace}:{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallationSettings:
    """What an installation decides for all services.

    `operator` and `autoscaler` are the accounts of these two, who may call routers' state ports; their pods
    are found by `component_labels` in the accounts' namespaces.
    """

    image: str
    operator: ServiceAccount
    autoscaler: ServiceAccount
    image_pull_secrets: tuple[str, ...] = ()
    router_replicas: int = 2
    router_resources: dict[str, Any] = field(default_factory=dict)


def recommended_labels(service: str, name: str) -> dict[str, str]:
    """The usual labels of what is made for a service; `name` says what it is (`fulcrum-engine` …)."""
    return {
        "app.kubernetes.io/name": name,
        "app.kubernetes.io/instance": service,
        "app.kubernetes.io/part-of": "fulcrum",
        "app.kubernetes.io/managed-by": "fulcrum-operator",
    }


def engine_selector(service: PDService) -> dict[str, str]:
    """The labels that all engine pods of a service have, and nothing else has."""
    return {"app.kubernetes.io/name": "fulcrum-engine", SERVICE_LABEL: service.metadata.name}


def router_selector(service: PDService) -> dict[str, str]:
    """The labels that all router pods of a service have, and nothing else has."""
    return {"app.kubernetes.io/name": "fulcrum-router", ROUTER_LABEL: service.metadata.name}


def component_labels(component: str) -> dict[str, str]:
    """The labels of the operator's or the autoscaler's pods: the chart sets them in every release."""
    return {"app.kubernetes.io/part-of": "fulcrum", "app.kubernetes.io/component": component}


def owner_references(owner: Resource) -> list[dict[str, Any]]:
    """Owner references for an object that is deleted with `owner`."""
    meta = owner.metadata
    reference = OwnerReference(api_version=API_VERSION, kind=owner.kind, name=meta.name, uid=meta.uid)
    return [reference.dump()]


def image_pull_secrets(settings: InstallationSettings) -> dict[str, Any]:
    """What a pod of one of our images asks its registry with; nothing where none is needed."""
    names = settings.image_pull_secrets
    return {"imagePullSecrets": [{"name": name} for name in names]} if names else {}


def pod_security_context() -> dict[str, Any]:
    """The pod's half of what the `restricted` Pod Security Standard asks for."""
    return {
        "runAsNonRoot": True,
        "runAsUser": RUN_AS_UID,
        "runAsGroup": RUN_AS_UID,
        "fsGroup": RUN_AS_UID,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security_context() -> dict[str, Any]:
    """The container's half, and a root filesystem that cannot be written."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
    }


def env_from_field(name: str, path: str) -> dict[str, Any]:
    """An environment variable with a fact about the pod; `$(NAME)` in its arguments is replaced with it."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
