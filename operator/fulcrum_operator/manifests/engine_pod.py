"""The pod of one instance: engine, probes, termination and placement.

`controller/pods/pod_runtime` creates one pod for each PDInstance, under its name. The pod does not depend on
the role: the current role is a label that is patched, and nothing selects by it.
"""

import math
from typing import Any

from fulcrum_core.api import PDInstance, PDService
from fulcrum_core.api.labels import INSTANCE_LABEL, POOL_LABEL, REVISION_LABEL, SERVICE_LABEL
from fulcrum_core.api.quantity import format_byte_quantity
from fulcrum_operator.engines.from_spec import DEFAULT_HARDWARE
from fulcrum_operator.manifests.engine_container import EngineContainer, engine_container
from fulcrum_operator.manifests.names import (
    ENGINE_PART,
    EVICTION_ANNOTATIONS,
    InstallationSettings,
    container_security_context,
    device_tolerations,
    engine_account_name,
    engine_selector,
    image_pull_secrets,
    owner_references,
    pod_security_context,
    recommended_labels,
)
from fulcrum_operator.manifests.pod_template import (
    apply_template,
    keep_account_and_program,
    keep_tolerations,
    require_map,
)

ENGINE_CONTAINER = "engine"
"""Name of the engine's container; a pool's template uses it to change the container."""

PRE_STOP_S = 2
"""Seconds from the deletion of a pod to its SIGTERM, in which routers stop sending requests."""
TEARDOWN_S = 10
"""Seconds from the last request to the exit of the process."""
STARTUP_BUDGET_FACTOR = 10
"""Multiple of the expected start-up time that a start may take: a slow disk is no failure."""
STARTUP_BUDGET_MIN_S = 60
REAL_STARTUP_BUDGET_MIN_S = 1800
"""A real engine may compile kernels and read weights over a busy network."""
READINESS_PERIOD_S = 2
"""Seconds between readiness probes: the delay until a serving engine is observed."""
LIVENESS_PERIOD_MIN_S, LIVENESS_PERIOD_MAX_S = 2, 5
"""Bounds of the time between two liveness probes, and of the time until one fails.

Both are equal, so that an engine that refuses connections gets as many seconds as one that does not respond.
"""
LIVENESS_FAILURES = 6
"""Number of failed probes in the silence of a hung engine, if the bounds allow."""
HUNG_AFTER_MIN_S, HUNG_AFTER_MAX_S = 6.0, 30.0
"""Bounds of the silence after which an engine is killed, in seconds; between them it is the start-up time.

A false alarm costs a restart, and waiting longer than a restart takes gains nothing.
"""
HUNG_GRACE_S = 1
"""Grace period of a hung engine: it does not drain. The kubelet adds two seconds to a preStop hook."""

SIMULATED_REQUESTS = {"cpu": "100m", "memory": "64Mi", "ephemeral-storage": "64Mi"}
"""Resource requests of a simulated engine: without them it would starve on a busy node."""


def engine_pod(
    instance: PDInstance, service: PDService, settings: InstallationSettings, *, startup_s: float
) -> dict[str, Any]:
    """The manifest of the pod that runs the instance, with its pool's template merged into it.

    The template cannot change name, owner and Fulcrum's labels, by which the operator finds its pods, nor the
    ServiceAccount.

    Args:
        instance: Engine, hardware and template of the pod.
        service: The instance's service; its drain timeout sets the grace period.
        settings: Settings of the installation, the same for all services.
        startup_s: Expected seconds from the start of the engine's process until it serves.

    Raises:
        InvalidInput: if the engine cannot be started with these settings, or the template is invalid.
    """
    manifest: dict[str, Any] = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": _metadata(instance),
        "spec": _spec(instance, service, settings, startup_s),
    }
    pod = apply_template(manifest, instance.spec.template or {})
    pod["spec"] = keep_account_and_program(pod.get("spec"), manifest["spec"])
    keep_tolerations(pod["spec"], manifest["spec"].get("tolerations", []))
    metadata = require_map(pod.get("metadata"), "metadata")
    labels = {**require_map(metadata.get("labels"), "metadata.labels"), **manifest["metadata"]["labels"]}
    annotations = {**EVICTION_ANNOTATIONS, **require_map(metadata.get("annotations"), "metadata.annotations")}
    pod["metadata"] = {**metadata, **manifest["metadata"], "labels": labels, "annotations": annotations}
    return pod


def grace_period_s(service: PDService) -> int:
    """Termination grace period of the service's engine pods, in seconds: preStop, drain and teardown."""
    return PRE_STOP_S + math.ceil(service.spec.drain.timeout) + TEARDOWN_S


def _metadata(instance: PDInstance) -> dict[str, Any]:
    spec, meta = instance.spec, instance.metadata
    labels = {
        **recommended_labels(spec.service, ENGINE_PART),
        SERVICE_LABEL: spec.service,
        POOL_LABEL: spec.pool,
        INSTANCE_LABEL: meta.name,
    }
    if spec.revision:
        labels[REVISION_LABEL] = spec.revision
    return {
        "name": meta.name,
        "namespace": meta.namespace,
        "labels": labels,
        "ownerReferences": owner_references(instance),
    }


def _spec(
    instance: PDInstance, service: PDService, settings: InstallationSettings, startup_s: float
) -> dict[str, Any]:
    engine = engine_container(instance, service, settings)
    return {
        "serviceAccountName": engine_account_name(service.metadata.name),
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "restartPolicy": "Always",
        "terminationGracePeriodSeconds": grace_period_s(service),
        "securityContext": pod_security_context(),
        **image_pull_secrets(settings),
        **device_tolerations(instance.spec),
        "topologySpreadConstraints": [_topology_spread(service)],
        "containers": [_container(instance, engine, engine.startup_s or startup_s)],
        "volumes": [{"name": "tmp", "emptyDir": _temporary_folder(engine)}, *engine.volumes],
    }


def _topology_spread(service: PDService) -> dict[str, Any]:
    """Spread over nodes if possible, so that a lost node costs few instances."""
    return {
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": engine_selector(service)},
    }


def _container(instance: PDInstance, engine: EngineContainer, startup_s: float) -> dict[str, Any]:
    return {
        "name": ENGINE_CONTAINER,
        "image": engine.image,
        "command": engine.command,
        "args": engine.args,
        "env": engine.env,
        "ports": engine.ports,
        "resources": _resources(instance, engine),
        **_probes(startup_s, min_s=_startup_budget_min_s(engine)),
        "lifecycle": {"preStop": {"sleep": {"seconds": PRE_STOP_S}}},
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": container_security_context(),
        "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}, *engine.mounts],
    }


def _resources(instance: PDInstance, engine: EngineContainer) -> dict[str, Any]:
    """Requests and limits of the engine. An extended resource (`vendor/name`) needs an equal limit."""
    chosen = engine.resources
    hardware = instance.spec.hardware or (None if chosen is None else DEFAULT_HARDWARE)
    requested = {} if hardware is None else {hardware.resource: str(hardware.count)}
    limited = requested if hardware is not None and "/" in hardware.resource else {}
    if chosen is None:
        return {"requests": {**SIMULATED_REQUESTS, **requested}, **({"limits": limited} if limited else {})}
    storage_limit = chosen.storage_limit_bytes
    requests = {
        "cpu": str(chosen.cpu),
        "memory": format_byte_quantity(chosen.memory_bytes),
        "ephemeral-storage": format_byte_quantity(chosen.storage_bytes),
    }
    limits = {
        "cpu": str(chosen.cpu_limit),
        "memory": format_byte_quantity(chosen.memory_limit_bytes),
        **({} if storage_limit is None else {"ephemeral-storage": format_byte_quantity(storage_limit)}),
    }
    return {"requests": {**requests, **requested}, "limits": {**limits, **limited}}


def _temporary_folder(engine: EngineContainer) -> dict[str, str]:
    limit = None if engine.resources is None else engine.resources.temporary_limit_bytes
    return {} if limit is None else {"sizeLimit": format_byte_quantity(limit)}


def _startup_budget_min_s(engine: EngineContainer) -> int:
    return STARTUP_BUDGET_MIN_S if engine.resources is None else REAL_STARTUP_BUDGET_MIN_S


def _probes(startup_s: float, *, min_s: int) -> dict[str, Any]:
    health = {"httpGet": {"path": "/health", "port": "http"}}
    budget_s = max(min_s, STARTUP_BUDGET_FACTOR * startup_s)
    period_s = max(1, min(READINESS_PERIOD_S, round(startup_s / 20)))
    startup = {
        "periodSeconds": period_s,
        "timeoutSeconds": 2,
        "failureThreshold": math.ceil(budget_s / period_s),
    }
    readiness = {"periodSeconds": READINESS_PERIOD_S, "timeoutSeconds": 2, "failureThreshold": 3}
    return {
        "startupProbe": health | startup,
        "readinessProbe": health | readiness,
        "livenessProbe": health | _liveness(startup_s),
    }


def _liveness(startup_s: float) -> dict[str, Any]:
    """The probe that restarts a hung engine.

    With n failures of period p, silences shorter than n·p restart nothing, refused connections are tolerated
    for (n - 1)·p, and a hang is noticed within (n + 1)·p.
    """
    hung_after_s = min(HUNG_AFTER_MAX_S, max(HUNG_AFTER_MIN_S, startup_s))
    period_s = min(LIVENESS_PERIOD_MAX_S, max(LIVENESS_PERIOD_MIN_S, round(hung_after_s / LIVENESS_FAILURES)))
    return {
        "periodSeconds": period_s,
        "timeoutSeconds": period_s,
        "failureThreshold": math.ceil(hung_after_s / period_s),
        "terminationGracePeriodSeconds": HUNG_GRACE_S,
    }
