"""The pod that reads a model's config.json: it finds the model as an engine does, and can do nothing else."""

from typing import Any

from fulcrum_core.api import PDService, StartSpec
from fulcrum_core.api.engine import ModelSourceSpec
from fulcrum_core.api.labels import SERVICE_LABEL
from fulcrum_operator.engines.from_spec import DEVICE
from fulcrum_operator.engines.launch import EnvVar, Volume
from fulcrum_operator.engines.vllm import POD, model_folder, model_volume
from fulcrum_operator.manifests.engine_container import mount_of, variable_of, volume_of
from fulcrum_operator.manifests.names import (
    ClusterSettings,
    container_security,
    image_pull_secrets,
    owned_by,
    pod_security,
    usual_labels,
)
from fulcrum_operator.plan.model import PATIENCE_S, Read, hub_env

KEY = "fulcrum.dev/model-key"
ATTEMPT = "fulcrum.dev/attempt"
"""Annotations: which model is read, and the how-manieth try it is."""

PROGRAM = "fulcrum_operator.model_reader"
_RESOURCES = {"requests": {"cpu": "50m", "memory": "64Mi"}, "limits": {"memory": "256Mi"}}
_PLACEMENT = ("nodeSelector", "affinity", "tolerations", "schedulerName", "securityContext")
"""What a pool's template says of where engines run, and as whom they read what is mounted."""


def reader_name(service: str) -> str:
    """Of the pod, by the service's name. No instance is called so."""
    return f"{service}-model"


def reader_pod(read: Read, service: PDService, settings: ClusterSettings) -> dict[str, Any]:
    """The pod that reads this model.

    It has no token for the API and serves nothing. It runs where the pool's template has its engines run,
    and on nodes that are kept for their devices, too: a folder of the node is only there.

    Args:
        read: What is to be read.
        service: Whom it belongs to.
        settings: What holds for all services.
    """
    name = service.metadata.name
    labels = {**usual_labels(name, "fulcrum-model-reader"), SERVICE_LABEL: name}
    volume = model_volume(read.start.model_source or ModelSourceSpec(), POD)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": reader_name(name),
            "namespace": service.metadata.namespace,
            "labels": labels,
            "annotations": {KEY: read.key, ATTEMPT: str(read.attempt)},
            "ownerReferences": owned_by(service),
        },
        "spec": {
            "serviceAccountName": f"{name}-engine",
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "restartPolicy": "Never",
            "activeDeadlineSeconds": int(PATIENCE_S),
            "terminationGracePeriodSeconds": 1,
            **image_pull_secrets(settings),
            **_placement(read.start),
            "containers": [_container(read.start, volume, settings)],
            **({"volumes": [volume_of(volume)]} if volume else {}),
        },
    }


def _placement(start: StartSpec) -> dict[str, Any]:
    said = (start.template or {}).get("spec")
    placed = {key: said[key] for key in _PLACEMENT if key in said} if isinstance(said, dict) else {}
    resource = (start.hardware or DEVICE).resource
    device = [{"key": resource, "operator": "Exists"}] if "/" in resource else []
    tolerated = _joined(device, placed.get("tolerations"))
    return {
        **placed,
        "securityContext": _joined(pod_security(), placed.get("securityContext")),
        **({"tolerations": tolerated} if tolerated else {}),
    }


def _joined(ours: Any, said: Any) -> Any:
    """Ours and what the template says; what is of another shape is for the API server to refuse."""
    if isinstance(ours, dict) and isinstance(said, dict):
        return {**ours, **said}
    if isinstance(ours, list) and isinstance(said, list):
        return [*ours, *said]
    return said or ours


def _container(start: StartSpec, volume: Volume | None, settings: ClusterSettings) -> dict[str, Any]:
    return {
        "name": "reader",
        "image": settings.image,
        "command": ["python", "-m", PROGRAM],
        "args": _arguments(start),
        "env": [] if volume else _env(start),
        "resources": _RESOURCES,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": container_security(),
        "volumeMounts": [mount_of(volume)] if volume else [],
    }


def _arguments(start: StartSpec) -> list[str]:
    source = start.model_source or ModelSourceSpec()
    if (folder := model_folder(source, POD)) is not None:
        return ["--folder", folder]
    revision = ["--revision", source.revision] if source.revision else []
    return ["--model", start.model, *revision]


def _env(start: StartSpec) -> list[dict[str, Any]]:
    said = hub_env(start)
    secret = start.model_source.token_secret if start.model_source else None
    variables = [EnvVar(name, value) for name, value in said.items()]
    if secret is not None and "HF_TOKEN" not in said:
        variables.append(EnvVar("HF_TOKEN", secret=secret))
    return [variable_of(variable) for variable in variables]
