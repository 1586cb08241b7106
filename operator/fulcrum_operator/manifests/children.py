"""Manifests of a service's objects besides its pods: router, Service, policies, budgets and RBAC.

All are owned by the PDService; `controller/children` applies them. The operator creates the Lease and the
EndpointSlice empty and never updates them: the active router writes its identity and address into them.
"""

import math
from collections.abc import Iterator
from typing import Any

from fulcrum_core.api import PDService
from fulcrum_core.api.labels import ROUTER_LABEL, SERVICE_LABEL
from fulcrum_core.api.meta import GROUP
from fulcrum_core.router_state import ROUTER_HANDOVER_TIMEOUT_S
from fulcrum_operator.manifests.names import (
    ENGINE_PART,
    EVICTION_ANNOTATIONS,
    HTTP_PORT,
    ROUTER_METRICS_PORT,
    ROUTER_PART,
    SIDE_CHANNEL_PORT,
    STATE_PORT,
    InstallationSettings,
    component_labels,
    container_security_context,
    engine_selector,
    env_from_field,
    image_pull_secrets,
    owner_references,
    pod_security_context,
    recommended_labels,
    router_selector,
    service_port,
)
from fulcrum_operator.manifests.pod_template import apply_template, keep_account_and_program, require_map

CREATE_ONLY_KINDS = frozenset({"Lease", "EndpointSlice"})
"""Kinds that are created if missing and never updated."""
_NEEDED_KINDS = {
    "RoleBinding": ("ServiceAccount", "Role"),
    "EndpointSlice": ("Service",),
    "Deployment": ("ServiceAccount", "Role", "RoleBinding", "Lease", "EndpointSlice"),
}
"""Kinds of a router's children that another one of its children refers to by name."""
TLS_VOLUME, TLS_FOLDER = "tls", "/var/run/secrets/fulcrum.dev/tls"
STATE_TLS_VOLUME, STATE_TLS_FOLDER = "state-tls", "/var/run/secrets/fulcrum.dev/state-tls"
API_KEYS_VOLUME, API_KEYS_FOLDER = "api-keys", "/var/run/secrets/fulcrum.dev/api-keys"
"""Volume and folder of the Secret with the router's certificate."""
TLS_OPTION = "--tls-certificate"
"""Option of a router that serves TLS."""
STATE_TLS_OPTION = "--state-tls-certificate"
"""Option of a router whose state port serves TLS."""
ROUTER_TEARDOWN_S = 10
"""Seconds from the end of the router's drain to the exit of its process."""

_READ_VERBS = ["list", "watch"]
_WRITE_VERBS = ["get", "patch"]


_ROUTER_ANNOTATIONS = {
    "prometheus.io/scrape": "true",
    "prometheus.io/port": str(ROUTER_METRICS_PORT),
    **EVICTION_ANNOTATIONS,
}
"""Annotations of router pods. By the first two a Prometheus that discovers pods finds their metrics."""


def service_children(
    service: PDService, settings: InstallationSettings, *, min_available: int, serves_tls: bool = False
) -> Iterator[dict[str, Any]]:
    """Yield all objects that the service needs besides its instances, in the order of creation.

    Args:
        service: The owner of the objects.
        settings: Settings of the installation, the same for all services.
        min_available: Least number of instances that evictions leave.
        serves_tls: Whether clients reach the active router by TLS.

    Raises:
        InvalidInput: instead of the Deployment, the last one, if the template of the router is invalid.
    """
    yield _service_account(service, "engine")
    yield _service_account(service, "router")
    yield _role(service)
    yield _role_binding(service)
    yield _lease(service)
    yield _service(service, serves_tls=serves_tls)
    yield _endpoint_slice(service)
    yield _router_policy(service, settings)
    yield _engine_policy(service, settings)
    yield _router_budget(service)
    yield _engine_budget(service, min_available)
    yield _deployment(service, settings)


def needed_children(child: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    """Kind and name of each other child that this one refers to.

    If such an object is somebody else's, the child would direct traffic to the router of this service, or
    give permissions or an identity to pods, which that person did not ask for.
    """
    service = child["metadata"]["labels"][SERVICE_LABEL]
    return tuple(
        (kind, service if kind == "Service" else f"{service}-router")
        for kind in _NEEDED_KINDS.get(child["kind"], ())
    )


def _child(service: PDService, api_version: str, kind: str, suffix: str, **fields: Any) -> dict[str, Any]:
    meta = service.metadata
    part = ENGINE_PART if suffix in ("engine", "engines") else ROUTER_PART
    metadata = {
        "name": f"{meta.name}-{suffix}" if suffix else meta.name,
        "namespace": meta.namespace,
        "labels": {**recommended_labels(meta.name, part), SERVICE_LABEL: meta.name},
        "ownerReferences": owner_references(service),
    }
    return {"apiVersion": api_version, "kind": kind, "metadata": metadata, **fields}


def _service_account(service: PDService, suffix: str) -> dict[str, Any]:
    """Build the ServiceAccount; no token is mounted by default, only into pods that request one."""
    return _child(service, "v1", "ServiceAccount", suffix, automountServiceAccountToken=False)


def _role(service: PDService) -> dict[str, Any]:
    name = [f"{service.metadata.name}-router"]
    kinds = ["pdassignments", "pdinstances", "pdpools", "pdservices", "qostiers"]
    rules = [
        {"apiGroups": [GROUP], "resources": kinds, "verbs": _READ_VERBS},
        {"apiGroups": [""], "resources": ["pods"], "verbs": _READ_VERBS},
        _named_resource_rule("coordination.k8s.io", "leases", name),
        _named_resource_rule("discovery.k8s.io", "endpointslices", name),
    ]
    return _child(service, "rbac.authorization.k8s.io/v1", "Role", "router", rules=rules)


def _named_resource_rule(group: str, resource: str, names: list[str]) -> dict[str, Any]:
    return {"apiGroups": [group], "resources": [resource], "resourceNames": names, "verbs": _WRITE_VERBS}


def _role_binding(service: PDService) -> dict[str, Any]:
    name, namespace = f"{service.metadata.name}-router", service.metadata.namespace
    return _child(
        service,
        "rbac.authorization.k8s.io/v1",
        "RoleBinding",
        "router",
        roleRef={"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": name},
        subjects=[{"kind": "ServiceAccount", "name": name, "namespace": namespace}],
    )


def _lease(service: PDService) -> dict[str, Any]:
    return _child(service, "coordination.k8s.io/v1", "Lease", "router", spec={})


def _service(service: PDService, *, serves_tls: bool) -> dict[str, Any]:
    """Build the Service, without a selector: only the active router gets traffic, not every ready one.

    The port's name is the same with TLS, because the EndpointSlice names its ports by it.
    """
    clients_port = service_port(serves_tls=serves_tls)
    port = {"name": "http", "port": clients_port, "targetPort": HTTP_PORT, "protocol": "TCP"}
    ports = [
        {**port, "appProtocol": "https"} if serves_tls else port,
        {"name": "state", "port": STATE_PORT, "targetPort": STATE_PORT, "protocol": "TCP"},
    ]
    return _child(service, "v1", "Service", "", spec={"type": "ClusterIP", "ports": ports})


def _endpoint_slice(service: PDService) -> dict[str, Any]:
    """Build the EndpointSlice. Its ports are named as those of the Service, by which kube-proxy matches them.

    The family of its addresses is that of the Service; it is replaced when the slice is created.
    """
    made = _child(service, "discovery.k8s.io/v1", "EndpointSlice", "router", addressType="IPv4", endpoints=[])
    made["metadata"]["labels"] |= {
        "kubernetes.io/service-name": service.metadata.name,
        "endpointslice.kubernetes.io/managed-by": "fulcrum-router",
    }
    made["ports"] = [
        {"name": "http", "port": HTTP_PORT, "protocol": "TCP"},
        {"name": "state", "port": STATE_PORT, "protocol": "TCP"},
    ]
    return made


def _router_policy(service: PDService, settings: InstallationSettings) -> dict[str, Any]:
    """Anyone may reach HTTP and metrics; only operator and autoscaler may reach the state port."""
    callers = [_operator_pods(settings), _autoscaler_pods(settings)]
    ingress = [_ingress([], HTTP_PORT), _ingress([], ROUTER_METRICS_PORT), _ingress(callers, STATE_PORT)]
    return _network_policy(service, "router", router_selector(service), ingress)


def _engine_policy(service: PDService, settings: InstallationSettings) -> dict[str, Any]:
    """Only engines of the same service may reach the KV transfer ports, which have no authentication.

    A real engine's transport listens on ports that the kernel chooses: its peers may reach all ports.
    """
    callers = [
        _pod_selector(router_selector(service)),
        _operator_pods(settings),
        *settings.metrics_callers,
    ]
    peers = [_pod_selector(engine_selector(service))]
    simulated = service.spec.engine.is_simulated
    peer_rule = _ingress(peers, SIDE_CHANNEL_PORT) if simulated else {"from": peers}
    ingress = [_ingress(callers, HTTP_PORT), peer_rule]
    return _network_policy(service, "engines", engine_selector(service), ingress)


def _network_policy(
    service: PDService, suffix: str, selector: dict[str, str], ingress: list[dict[str, Any]]
) -> dict[str, Any]:
    spec = {"podSelector": {"matchLabels": selector}, "policyTypes": ["Ingress"], "ingress": ingress}
    return _child(service, "networking.k8s.io/v1", "NetworkPolicy", suffix, spec=spec)


def _ingress(callers: list[dict[str, Any]], port: int) -> dict[str, Any]:
    ports = [{"port": port, "protocol": "TCP"}]
    return {"from": callers, "ports": ports} if callers else {"ports": ports}


def _pod_selector(labels: dict[str, str]) -> dict[str, Any]:
    return {"podSelector": {"matchLabels": labels}}


def _operator_pods(settings: InstallationSettings) -> dict[str, Any]:
    return _component_pods("operator", settings.operator.namespace)


def _autoscaler_pods(settings: InstallationSettings) -> dict[str, Any]:
    return _component_pods("autoscaler", settings.autoscaler.namespace)


def _component_pods(name: str, namespace: str) -> dict[str, Any]:
    namespace_selector = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    return namespace_selector | _pod_selector(component_labels(name))


def _router_budget(service: PDService) -> dict[str, Any]:
    """Allow one eviction at a time: the Deployment replaces the router, and the active one hands over."""
    return _disruption_budget(service, "router", router_selector(service), {"maxUnavailable": 1})


def _engine_budget(service: PDService, min_available: int) -> dict[str, Any]:
    """`minAvailable` is a number: other forms need an owner with /scale, which a PDInstance does not have."""
    limit = {"minAvailable": min_available}
    return _disruption_budget(service, "engines", engine_selector(service), limit)


def _disruption_budget(
    service: PDService, suffix: str, selector: dict[str, str], limit: dict[str, int]
) -> dict[str, Any]:
    spec = {
        **limit,
        "selector": {"matchLabels": selector},
        "unhealthyPodEvictionPolicy": "AlwaysAllow",
    }
    return _child(service, "policy/v1", "PodDisruptionBudget", suffix, spec=spec)


def _deployment(service: PDService, settings: InstallationSettings) -> dict[str, Any]:
    """One router remains until a new one is ready: new ones may lack a Secret, an image or room."""
    selector = router_selector(service)
    max_unavailable = min(1, settings.router_replicas - 1)
    spec = {
        "replicas": settings.router_replicas,
        "revisionHistoryLimit": 3,
        "strategy": {
            "type": "RollingUpdate",
            "rollingUpdate": {"maxUnavailable": max_unavailable, "maxSurge": 1},
        },
        "selector": {"matchLabels": selector},
        "template": _router_pod_template(service, settings),
    }
    return _child(service, "apps/v1", "Deployment", "router", spec=spec)


def _router_pod_template(service: PDService, settings: InstallationSettings) -> dict[str, Any]:
    """The template of the Deployment, with those of the installation and of the service merged into it.

    They cannot change the labels by which the operator finds its pods, nor the ServiceAccount.
    """
    labels = {
        **recommended_labels(service.metadata.name, ROUTER_PART),
        ROUTER_LABEL: service.metadata.name,
    }
    template: dict[str, Any] = {
        "metadata": {"labels": labels, "annotations": _ROUTER_ANNOTATIONS},
        "spec": _router_pod(service, settings),
    }
    ours = template["spec"]
    for patch in (settings.router_template, service.spec.router.template or {}):
        template = apply_template(template, patch)
    template["spec"] = keep_account_and_program(template.get("spec"), ours)
    metadata = require_map(template.get("metadata"), "metadata")
    all_labels = {**require_map(metadata.get("labels"), "metadata.labels"), **labels}
    template["metadata"] = {**metadata, "labels": all_labels}
    return template


def _router_pod(service: PDService, settings: InstallationSettings) -> dict[str, Any]:
    """The router's pod, the only one with an API token: it watches objects and writes its Lease."""
    anti_affinity_term = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": router_selector(service)},
    }
    preferred = [{"weight": 100, "podAffinityTerm": anti_affinity_term}]
    return {
        "serviceAccountName": f"{service.metadata.name}-router",
        "automountServiceAccountToken": True,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": ROUTER_HANDOVER_TIMEOUT_S
        + math.ceil(service.spec.drain.timeout)
        + ROUTER_TEARDOWN_S,
        "securityContext": pod_security_context(),
        **image_pull_secrets(settings),
        "affinity": {"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": preferred}},
        "containers": [_router_container(service, settings)],
        "volumes": [{"name": "tmp", "emptyDir": {}}, *_secret_volumes(service)],
    }


def _secrets(service: PDService) -> list[tuple[str, str, str]]:
    """Secrets that the router reads: name of the volume, name of the Secret, folder."""
    tls, state_tls, auth = service.spec.router.tls, service.spec.router.state_tls, service.spec.router.auth
    keys = auth.api_keys if auth else None
    return [
        *([(TLS_VOLUME, tls.secret_name, TLS_FOLDER)] if tls else ()),
        *([(STATE_TLS_VOLUME, state_tls.secret_name, STATE_TLS_FOLDER)] if state_tls else ()),
        *([(API_KEYS_VOLUME, keys.secret_name, API_KEYS_FOLDER)] if keys else ()),
    ]


def _secret_volumes(service: PDService) -> list[dict[str, Any]]:
    return [{"name": volume, "secret": {"secretName": secret}} for volume, secret, _ in _secrets(service)]


def _secret_mounts(service: PDService) -> list[dict[str, Any]]:
    return [
        {"name": volume, "mountPath": folder, "readOnly": True} for volume, _, folder in _secrets(service)
    ]


def _router_container(service: PDService, settings: InstallationSettings) -> dict[str, Any]:
    tls = service.spec.router.tls
    scheme = {"scheme": "HTTPS"} if tls else {}
    ready = {"path": "/ready", "port": "http", **scheme}
    readiness = {"httpGet": ready, "periodSeconds": 1, "timeoutSeconds": 2}
    # Not on the clients' port: clients that use all of its connections would have the router restarted.
    liveness = {"httpGet": {"path": "/health", "port": "metrics"}, "periodSeconds": 5, "timeoutSeconds": 5}
    return {
        "name": "router",
        "image": settings.image,
        "command": ["python", "-m", "fulcrum_router"],
        "args": _router_arguments(service, settings),
        "env": [env_from_field("POD_NAME", "metadata.name"), env_from_field("POD_IP", "status.podIP")],
        "ports": [
            {"name": "http", "containerPort": HTTP_PORT, "protocol": "TCP"},
            {"name": "state", "containerPort": STATE_PORT, "protocol": "TCP"},
            {"name": "metrics", "containerPort": ROUTER_METRICS_PORT, "protocol": "TCP"},
        ],
        "resources": settings.router_resources,
        "readinessProbe": readiness | {"failureThreshold": 3},
        "livenessProbe": liveness
        | {"failureThreshold": 6, "initialDelaySeconds": 10, "terminationGracePeriodSeconds": 5},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": container_security_context(),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, *_secret_mounts(service)],
    }


def _router_arguments(service: PDService, settings: InstallationSettings) -> list[str]:
    name, namespace, auth = service.metadata.name, service.metadata.namespace, service.spec.router.auth
    callers = ",".join((settings.operator.subject, settings.autoscaler.subject))
    files = (TLS_OPTION, f"{TLS_FOLDER}/tls.crt", "--tls-key", f"{TLS_FOLDER}/tls.key")
    state_key = ("--state-tls-key", f"{STATE_TLS_FOLDER}/tls.key")
    state_files = (STATE_TLS_OPTION, f"{STATE_TLS_FOLDER}/tls.crt", *state_key)
    return [
        *("--service", name, "--namespace", namespace, "--store", "in-cluster"),
        *("--host", "*", "--port", str(HTTP_PORT), "--state-port", str(STATE_PORT)),
        *("--metrics-port", str(ROUTER_METRICS_PORT)),
        *("--state-callers", callers, "--lease", f"{name}-router"),
        *("--identity", "$(POD_NAME)", "--advertise-address", "$(POD_IP)"),
        *("--log-level", settings.log_level),
        *(files if service.spec.router.tls else ()),
        *(state_files if service.spec.router.state_tls else ()),
        *(("--api-keys", API_KEYS_FOLDER) if auth and auth.api_keys else ()),
    ]
