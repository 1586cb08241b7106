"""The pod that runs the program `model_reader`, with an engine's access to the model and nothing else.

`controller` creates the pod and reads its result; `plan/model` decides when.
"""

from typing import Any

from fulcrum_core.api import LaunchSpec, PDService
from fulcrum_core.api.engine import ModelSourceSpec
from fulcrum_core.api.labels import SERVICE_LABEL
from fulcrum_operator.engines.launch import LaunchEnvVar, Volume
from fulcrum_operator.engines.vllm import POD_PLACEMENT, model_folder, model_volume
from fulcrum_operator.manifests.engine_container import (
    env_var,
    hub_endpoint_env,
    pod_volume,
    volume_mount,
)
from fulcrum_operator.manifests.names import (
    InstallationSettings,
    container_security_context,
    device_tolerations,
    engine_account_name,
    image_pull_secrets,
    owner_references,
    pod_security_context,
    recommended_labels,
)
from fulcrum_operator.manifests.pod_template import apply_template, keep_tolerations
from fulcrum_operator.plan.model import READ_TIMEOUT_S, ModelReadRequest, hub_env, model_revision

MODEL_KEY_ANNOTATION = "fulcrum.dev/model-key"
ATTEMPT_ANNOTATION = "fulcrum.dev/attempt"
"""Annotations with the key of the model and the attempt number."""

READER_MODULE = "fulcrum_operator.model_reader"
_RESOURCES = {
    "requests": {"cpu": "50m", "memory": "64Mi", "ephemeral-storage": "64Mi"},
    "limits": {"memory": "256Mi"},
}
_PLACEMENT_FIELDS = ("nodeSelector", "affinity", "tolerations", "schedulerName", "securityContext")
"""Fields of a pool's template that decide on which nodes and as which user engines run."""


def model_reader_pod_name(service: str) -> str:
    """Name of the reader pod of a service; no instance can have it."""
    return f"{service}-model"


def model_reader_pod(
    request: ModelReadRequest, service: PDService, settings: InstallationSettings
) -> dict[str, Any]:
    """The manifest of the pod that reads this model.

    It has no API token and serves nothing. It may run on the same nodes as the engines, including nodes
    reserved for their devices: a model in a host path exists only there.

    Args:
        request: The model to read.
        service: The owner of the pod.
        settings: Settings of the installation, the same for all services.

    Raises:
        InvalidInput: if the template has an unknown directive.
    """
    name = service.metadata.name
    labels = {**recommended_labels(name, "fulcrum-model-reader"), SERVICE_LABEL: name}
    volume = model_volume(request.launch_spec.model_source or ModelSourceSpec(), POD_PLACEMENT)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": model_reader_pod_name(name),
            "namespace": service.metadata.namespace,
            "labels": labels,
            "annotations": {MODEL_KEY_ANNOTATION: request.key, ATTEMPT_ANNOTATION: str(request.attempt)},
            "ownerReferences": owner_references(service),
        },
        "spec": {
            "serviceAccountName": engine_account_name(name),
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "restartPolicy": "Never",
            "activeDeadlineSeconds": int(READ_TIMEOUT_S),
            "terminationGracePeriodSeconds": 1,
            **image_pull_secrets(settings),
            **_placement(request.launch_spec),
            "containers": [_container(request.launch_spec, volume, settings)],
            **({"volumes": [pod_volume(volume)]} if volume else {}),
        },
    }


def _placement(launch_spec: LaunchSpec) -> dict[str, Any]:
    """The template's fields merged into ours; an invalid value is passed on for the API server to refuse."""
    template_spec = (launch_spec.template or {}).get("spec")
    given = template_spec if isinstance(template_spec, dict) else {}
    placement = {key: given[key] for key in _PLACEMENT_FIELDS if key in given}
    merged = apply_template({"securityContext": pod_security_context()}, placement)
    keep_tolerations(merged, device_tolerations(launch_spec).get("tolerations", []))
    return merged


def _container(
    launch_spec: LaunchSpec, volume: Volume | None, settings: InstallationSettings
) -> dict[str, Any]:
    return {
        "name": "reader",
        "image": settings.image,
        "command": ["python", "-m", READER_MODULE],
        "args": _arguments(launch_spec),
        "env": [] if volume else _hub_variables(launch_spec, settings),
        "resources": _RESOURCES,
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "securityContext": container_security_context(),
        "volumeMounts": [volume_mount(volume)] if volume else [],
    }


def _arguments(launch_spec: LaunchSpec) -> list[str]:
    source = launch_spec.model_source or ModelSourceSpec()
    if (folder := model_folder(source, POD_PLACEMENT)) is not None:
        return ["--folder", folder]
    revision = model_revision(launch_spec)
    return ["--model", launch_spec.model, *(["--revision", revision] if revision else [])]


def _hub_variables(launch_spec: LaunchSpec, settings: InstallationSettings) -> list[dict[str, Any]]:
    hub_variables = hub_env(launch_spec)
    token = LaunchEnvVar.hub_token(launch_spec.model_source or ModelSourceSpec())
    variables = list(map(LaunchEnvVar.from_user, hub_variables))
    if token is not None and "HF_TOKEN" not in {variable.name for variable in hub_variables}:
        variables.append(token)
    variables += hub_endpoint_env(launch_spec, settings.hub_endpoint)
    return [env_var(variable) for variable in variables]
