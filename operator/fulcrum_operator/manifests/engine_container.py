"""The parts of an engine's pod that depend on the engine type: program, environment, ports and volumes.

`engine_pod` uses it. The command line itself comes from the adapters in `engines`. `leader` asks with the
same functions whether an instance's engine can run.
"""

from dataclasses import dataclass, field, replace
from typing import Any

from fulcrum_core.api import LaunchSpec, PDInstance, PDService
from fulcrum_core.api.engine import ModelSourceSpec
from fulcrum_core.api.env import EnvVar
from fulcrum_core.api.quantity import format_byte_quantity
from fulcrum_core.errors import InvalidInput
from fulcrum_core.models import Fit
from fulcrum_operator.engines import simulated, vllm
from fulcrum_operator.engines.from_spec import build_launch_request
from fulcrum_operator.engines.launch import EngineLaunch, EngineResources, LaunchEnvVar, Volume
from fulcrum_operator.engines.launch_request import LaunchRequest
from fulcrum_operator.manifests.names import (
    HTTP_PORT,
    SIDE_CHANNEL_PORT,
    InstallationSettings,
    env_from_field,
)
from fulcrum_operator.plan.model import model_key, parse_model_facts
from fulcrum_operator.plan.pools import pool_role

HUB_ENDPOINT = "HF_ENDPOINT"
"""Variable with the address of the hub."""
_HOME_ENV = {"HOME": "/tmp", "USER": "engine"}
"""The pod's user has no home directory: engines put their caches into /tmp, which is writable."""


@dataclass(frozen=True, slots=True)
class EngineContainer:
    """Parts of one engine's pod, in the form of the Kubernetes API.

    `startup_s` is None if the caller has to pass it;
    `resources` is None for a simulated engine.
    """

    image: str
    command: list[str]
    args: list[str]
    env: list[dict[str, Any]]
    ports: list[dict[str, Any]]
    mounts: list[dict[str, Any]] = field(default_factory=list)
    volumes: list[dict[str, Any]] = field(default_factory=list)
    startup_s: float | None = None
    resources: EngineResources | None = None


def engine_container(
    instance: PDInstance, service: PDService, settings: InstallationSettings
) -> EngineContainer:
    """The parts of the instance's pod that depend on its engine.

    Raises:
        InvalidInput: if the engine cannot be started with the service's settings.
    """
    image = instance.spec.engine.image or instance.spec.default_image
    image = image or settings.engine_images.default_for(instance.spec)
    if instance.spec.engine.is_simulated:
        return _simulated(instance, service, image or settings.image)
    return _vllm(instance, service, image, settings.hub_endpoint)


def _simulated(instance: PDInstance, service: PDService, image: str) -> EngineContainer:
    made = simulated.arguments(
        instance,
        host="$(POD_IP)",
        port=HTTP_PORT,
        side_channel_port=SIDE_CHANNEL_PORT,
        shutdown_timeout_s=service.spec.drain.timeout,
    )
    return EngineContainer(
        image=image,
        command=["python", "-m", simulated.SERVER_MODULE],
        args=[*made, *instance.spec.engine.args],
        env=[env_from_field("POD_IP", "status.podIP"), *map(user_env_var, instance.spec.engine.env)],
        ports=[_port("http", HTTP_PORT), _port("side-channel", SIDE_CHANNEL_PORT)],
    )


def _vllm(instance: PDInstance, service: PDService, image: str | None, hub_endpoint: str) -> EngineContainer:
    request = vllm_launch_request(instance, service)
    if image is None:
        rule = f"is needed: there is no default for {request.hardware.name}"
        raise InvalidInput("spec.engine.image", "missing", rule)
    container = _from_launch(vllm.build_launch(request, vllm.POD_PLACEMENT), image)
    endpoint = hub_endpoint_env(instance.spec, hub_endpoint)
    return replace(container, env=[*map(env_var, endpoint), *container.env])


def hub_endpoint_env(launch_spec: LaunchSpec, endpoint: str) -> tuple[LaunchEnvVar, ...]:
    """The installation's HF_ENDPOINT, unless the user sets one or the model is not at the hub."""
    source = launch_spec.model_source or ModelSourceSpec()
    named = any(variable.name == HUB_ENDPOINT for variable in launch_spec.engine.env)
    return () if named or not endpoint or not source.is_at_hub else (LaunchEnvVar(HUB_ENDPOINT, endpoint),)


def vllm_launch_request(instance: PDInstance, service: PDService) -> LaunchRequest:
    """The launch request for an instance with a real engine in a pod.

    If the model was not read before the instance was created, the engine chooses what depends on it.
    """
    return build_launch_request(
        service,
        instance.spec,
        pool_role=pool_role(instance, service),
        role=instance.spec.role,
        facts=parse_model_facts(instance.spec.config_excerpt),
    )


def judge_instance_fit(request: LaunchRequest, instance: PDInstance, service: PDService) -> Fit:
    """Whether the model fits the instance's hardware, even if it was read after the instance started."""
    known = service.status.model
    if request.facts is None and known is not None and known.key == model_key(instance.spec):
        return replace(request, facts=parse_model_facts(known.config_excerpt)).fit
    return request.fit


def _from_launch(launch: EngineLaunch, image: str) -> EngineContainer:
    home = [{"name": name, "value": value} for name, value in _HOME_ENV.items()]
    return EngineContainer(
        image=image,
        command=list(launch.command[:2]),
        args=list(launch.command[2:]),
        env=[*home, *(env_var(variable) for variable in launch.env)],
        ports=[_port(port.name, port.number) for port in launch.ports],
        mounts=[volume_mount(volume) for volume in launch.volumes],
        volumes=[pod_volume(volume) for volume in launch.volumes],
        startup_s=launch.startup_s,
        resources=launch.resources,
    )


def _port(name: str, number: int) -> dict[str, Any]:
    return {"name": name, "containerPort": number, "protocol": "TCP"}


def env_var(variable: LaunchEnvVar) -> dict[str, Any]:
    """The environment variable in a container's manifest."""
    if variable.pod_field:
        return env_from_field(variable.name, variable.pod_field)
    if variable.secret:
        key = {"name": variable.secret, "key": variable.secret_key}
        return {"name": variable.name, "valueFrom": {"secretKeyRef": key}}
    if variable.source is not None:
        return {"name": variable.name, "valueFrom": variable.source.dump()}
    return {"name": variable.name, "value": variable.value}


def user_env_var(variable: EnvVar) -> dict[str, Any]:
    """The user's variable in a container's manifest."""
    return env_var(LaunchEnvVar.from_user(variable))


def volume_mount(volume: Volume) -> dict[str, Any]:
    """The mount of the volume in a container's manifest."""
    mount = {"name": volume.name, "mountPath": volume.mount}
    return {**mount, "readOnly": True} if volume.read_only else mount


def pod_volume(volume: Volume) -> dict[str, Any]:
    """The volume in a pod's manifest."""
    return {"name": volume.name, **_volume_source(volume)}


def _volume_source(volume: Volume) -> dict[str, Any]:
    if volume.kind == "claim":
        return {"persistentVolumeClaim": {"claimName": volume.source, "readOnly": volume.read_only}}
    if volume.kind == "image":
        return {"image": {"reference": volume.source, "pullPolicy": "IfNotPresent"}}
    if volume.kind == "path":
        return {"hostPath": {"path": volume.source, "type": "Directory"}}
    memory = {"medium": "Memory"} if volume.kind == "memory" else {}
    size = {} if volume.size_bytes is None else {"sizeLimit": format_byte_quantity(volume.size_bytes)}
    return {"emptyDir": {**memory, **size}}
