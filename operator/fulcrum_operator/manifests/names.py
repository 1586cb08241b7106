"""Labels, selectors, accounts, ports and security contexts that several manifests have in common.

The operator's controller and `fulcrum web` find pods, ports and accounts by them. Also the settings of the
installation, which the manifests and the controller read.
"""

from dataclasses import dataclass, field
from typing import Any

from fulcrum_core.api import LaunchSpec, PDService
from fulcrum_core.api.labels import ROUTER_LABEL, SERVICE_LABEL
from fulcrum_core.api.meta import Resource
from fulcrum_operator.engines.from_spec import DEFAULT_HARDWARE
from fulcrum_operator.engines.images import EngineImages
from fulcrum_operator.engines.vllm import POD_PLACEMENT

HTTP_PORT = POD_PLACEMENT.port
STATE_PORT = 9091
ROUTER_METRICS_PORT = 9094
SIDE_CHANNEL_PORT = POD_PLACEMENT.side_channel_port
SERVICE_PORT, SERVICE_TLS_PORT = 80, 443
ENGINE_PART, ROUTER_PART = "fulcrum-engine", "fulcrum-router"
"""Values of the label app.kubernetes.io/name for the parts of a service."""
ENGINE_ACCOUNT_SUFFIX = "-engine"
EVICTION_ANNOTATIONS = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "true"}
"""Annotations of engine and router pods. Without them cluster-autoscaler removes no node with a pod of a
custom controller or with an emptyDir. With them it still respects PodDisruptionBudgets."""
RUN_AS_UID = 65532
"""User id of every pod: not root, and unlikely to be a user of a node."""


@dataclass(frozen=True, slots=True)
class ServiceAccount:
    """A ServiceAccount of the installation."""

    namespace: str
    name: str

    @property
    def subject(self) -> str:
        """User name of the account in its tokens."""
        return f"system:serviceaccount:{self.namespace}:{self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallationSettings:
    """Settings of one installation, the same for all services.

    The accounts `operator` and `autoscaler` may call the state ports of routers; their pods are selected by
    `component_labels` in the namespaces of the accounts.
    """

    image: str
    """Image of routers and of the pods that read models."""
    operator: ServiceAccount
    autoscaler: ServiceAccount
    image_pull_secrets: tuple[str, ...] = ()
    engine_images: EngineImages = field(default_factory=EngineImages)
    """Images of engines whose manifest names none."""
    hub_endpoint: str = ""
    """HF_ENDPOINT of engines and model readers; empty: the hub itself."""
    metrics_callers: tuple[dict[str, Any], ...] = ()
    """Peers of a NetworkPolicy that may scrape engines, such as Prometheus; empty: only our own pods."""
    router_replicas: int = 2
    log_level: str = "info"
    """Lowest level that routers log."""
    router_resources: dict[str, Any] = field(default_factory=dict)
    router_template: dict[str, Any] = field(default_factory=dict)
    """Strategic merge patch of the pods of all routers; that of a service is merged after it."""


def recommended_labels(service: str, name: str) -> dict[str, str]:
    """Kubernetes' recommended labels of an object of a service; `name` is the part (`fulcrum-engine`, …)."""
    return {
        "app.kubernetes.io/name": name,
        "app.kubernetes.io/instance": service,
        "app.kubernetes.io/part-of": "fulcrum",
        "app.kubernetes.io/managed-by": "fulcrum-operator",
    }


def engine_account_name(service: str) -> str:
    """Name of the ServiceAccount of a service's engines and model reader."""
    return service + ENGINE_ACCOUNT_SUFFIX


def engine_selector(service: PDService) -> dict[str, str]:
    """Labels that select the engine pods of a service."""
    return {"app.kubernetes.io/name": ENGINE_PART, SERVICE_LABEL: service.metadata.name}


def router_selector(service: PDService) -> dict[str, str]:
    """Labels that select the router pods of a service."""
    return {"app.kubernetes.io/name": ROUTER_PART, ROUTER_LABEL: service.metadata.name}


def component_labels(component: str) -> dict[str, str]:
    """Labels that select the operator's or the autoscaler's pods; the chart sets them in every release."""
    return {"app.kubernetes.io/part-of": "fulcrum", "app.kubernetes.io/component": component}


def owner_references(owner: Resource) -> list[dict[str, Any]]:
    """Owner references of an object that is to be deleted with `owner`."""
    return [owner.owner_reference().dump()]


def image_pull_secrets(settings: InstallationSettings) -> dict[str, Any]:
    """The field `imagePullSecrets` for a pod with one of our images; empty if no secret is needed."""
    names = settings.image_pull_secrets
    return {"imagePullSecrets": [{"name": name} for name in names]} if names else {}


def service_port(*, serves_tls: bool) -> int:
    """Port of the Service for clients."""
    return SERVICE_TLS_PORT if serves_tls else SERVICE_PORT


def service_url(service: PDService, *, serves_tls: bool) -> str:
    """URL of the Service for clients in the cluster."""
    scheme = "https" if serves_tls else "http"
    return f"{scheme}://{service.metadata.name}.{service.metadata.namespace}.svc"


def device_tolerations(launch_spec: LaunchSpec) -> dict[str, Any]:
    """The field `tolerations` for a pod that has to run on nodes with the engine's devices; empty for none.

    Nodes are often reserved for their devices with a taint whose key is the extended resource.
    """
    hardware = launch_spec.hardware or (None if launch_spec.engine.is_simulated else DEFAULT_HARDWARE)
    if hardware is None or "/" not in hardware.resource:
        return {}
    return {"tolerations": [{"key": hardware.resource, "operator": "Exists"}]}


def pod_security_context() -> dict[str, Any]:
    """Pod fields that the Pod Security Standard `restricted` requires."""
    return {
        "runAsNonRoot": True,
        "runAsUser": RUN_AS_UID,
        "runAsGroup": RUN_AS_UID,
        "fsGroup": RUN_AS_UID,
        "seccompProfile": {"type": "RuntimeDefault"},
    }


def container_security_context() -> dict[str, Any]:
    """Container fields that `restricted` requires, and a read-only root filesystem."""
    return {
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "readOnlyRootFilesystem": True,
        "runAsNonRoot": True,
    }


def env_from_field(name: str, path: str) -> dict[str, Any]:
    """An environment variable with the value of a pod field; `$(NAME)` in arguments is replaced with it."""
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}
