"""How an engine of this machine is started, by its type, and what it then is.

An adapter says everything of a real engine; what is added here is this machine: where the engine's
environment is, free ports, and that there are no accelerators.
"""

import dataclasses
import functools
import secrets
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fulcrum_cli.local.engine_environment import find_engine_environment, find_local_model
from fulcrum_cli.local.model_config import read_model_config
from fulcrum_cli.local.process_spec import ProcessSpec
from fulcrum_core.api import PDInstance, PDService
from fulcrum_core.api.pdpool import LaunchSpec, PoolRole
from fulcrum_core.errors import InvalidInput
from fulcrum_core.hardware import CPU
from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Role
from fulcrum_operator.engines import simulated, vllm
from fulcrum_operator.engines.from_spec import build_launch_request
from fulcrum_operator.engines.launch import EngineLaunch, EnginePlacement, LaunchEnvVar
from fulcrum_operator.engines.launch_request import LaunchRequest
from fulcrum_operator.plan.observed import EngineFacts
from fulcrum_operator.plan.pools import desired_pools, pool_role

READY_TIMEOUT_S = 300.0
"""A real engine may take so long to start: it imports for 20 s where it is alone, and many times that on a
machine that is busy."""
STOP_GRACE_S = 10.0
"""A real engine gets so long from SIGTERM to SIGKILL."""

_ENGINE_PORTS = range(20_000, 32_000)
"""Below those that a kernel gives to connections: an engine binds some of its ports late."""
_PORTS_PER_ENGINE = 8
"""Ports that are kept free after each one, for an engine's further ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """What an engine's start depends on besides its instance."""

    service: PDService
    host: str
    folder: Path
    """Of the run."""


def build_process_spec(instance: PDInstance, context: EngineContext) -> ProcessSpec:
    """The next life of an instance's engine.

    Raises:
        InvalidInput: if it cannot be started as the service asks.
    """
    if instance.spec.engine.type == "Simulated":
        return ProcessSpec(command=simulated.command(instance, python=sys.executable, host=context.host))
    place = _choose_place(instance.metadata.name, context)
    return _vllm_process_spec(vllm.build_launch(_instance_request(instance, context.service), place), place)


def engine_facts(instance: PDInstance, context: EngineContext) -> EngineFacts:
    """What the instance's engine is to its peers, whether it runs or not."""
    if instance.spec.engine.type == "Simulated":
        profile = _load_profile_cached(instance.spec.engine.profile)
        return EngineFacts(
            simulated.identity(instance.spec, profile), simulated.FLIP_STRATEGY, profile.startup_s
        )
    request = _instance_request(instance, context.service)
    launch = vllm.build_launch(request, _PLACEHOLDER_PLACE)
    return EngineFacts(launch.identity, launch.flip_strategy, launch.startup_s, request.fit)


def check_engines(service: PDService) -> None:
    """Refuse what engines of this machine cannot do, before anything is started.

    Raises:
        InvalidInput: for the first rule broken.
    """
    if service.spec.engine.type == "Simulated":
        load_profile(service.spec.engine.profile)
        return
    find_engine_environment()
    for pool in desired_pools(service, ()):
        hardware, source = pool.spec.hardware, pool.spec.model_source
        if hardware is not None and hardware.resource != "cpu":
            raise InvalidInput("hardware.resource", hardware.resource, "does not run locally: write cpu")
        if source is not None and source.pvc is not None:
            raise InvalidInput("modelSource.pvc", source.pvc, "is of a cluster: write hostPath")
        vllm.build_launch(_engine_request(pool.spec, pool.spec.role, service), _PLACEHOLDER_PLACE)


def expected_startup_s(service: PDService) -> float:
    """From an engine's start to serving, all going well."""
    if service.spec.engine.type == "Simulated":
        return load_profile(service.spec.engine.profile).startup_s
    pool = desired_pools(service, ())[0]
    return vllm.build_launch(
        _engine_request(pool.spec, pool.spec.role, service), _PLACEHOLDER_PLACE
    ).startup_s


def _instance_request(instance: PDInstance, service: PDService) -> LaunchRequest:
    return _engine_request(instance.spec, pool_role(instance, service), service, instance.spec.role)


def _engine_request(
    start: LaunchSpec, pool_role: PoolRole, service: PDService, role: Role | None = None
) -> LaunchRequest:
    """What is asked for, on this machine: its CPUs, and a model of the environment by its name there."""
    memory_bytes = start.hardware and start.hardware.memory
    hardware = dataclasses.replace(CPU, memory_bytes=memory_bytes or 0)
    request = build_launch_request(service, start, pool_role=pool_role, role=role, hardware=hardware)
    named = vllm.model_folder(request.model_source, _PLACEHOLDER_PLACE)
    folder = Path(named) if named is not None else find_local_model(start.model)
    if folder is None:
        return request
    source = request.model_source.model_copy(update={"host_path": str(folder), "path": ""})
    return dataclasses.replace(request, model_source=source, facts=read_model_config(folder))


def _vllm_process_spec(launch: EngineLaunch, place: EnginePlacement) -> ProcessSpec:
    return ProcessSpec(
        command=(sys.executable, "-m", "fulcrum_cli.local.die_with_parent", *launch.command),
        env={variable.name: variable.value for variable in launch.env if _has_value(variable)},
        ports={"port": place.port, "side_channel_port": place.side_channel_port},
        health_url=f"http://{place.host}:{place.port}{launch.health_path}",
        ready_timeout_s=max(READY_TIMEOUT_S, launch.startup_s),
        stop_grace_s=STOP_GRACE_S,
        leftover_files=tuple(Path(path) for path in launch.leftover_files),
    )


def _has_value(variable: LaunchEnvVar) -> bool:
    """Whether its value is known; a token for the hub is in this user's own environment, or nowhere."""
    return not variable.secret and not variable.pod_field


_PLACEHOLDER_PLACE = EnginePlacement(
    host="127.0.0.1",
    port=0,
    side_channel_port=0,
    cache_port=0,
    cache_http_port=0,
    model_folder="",
    loopback=True,
)
"""For what does not depend on ports."""


def _choose_place(name: str, context: EngineContext) -> EnginePlacement:
    port, side_channel, cache, cache_http = find_free_ports(context.host, 4)
    return dataclasses.replace(
        _PLACEHOLDER_PLACE,
        host=context.host,
        port=port,
        side_channel_port=side_channel,
        cache_port=cache,
        cache_http_port=cache_http,
        program=(str(find_engine_environment() / "bin" / "vllm"),),
        cache_folder=str(context.folder / f"{name}.kv"),
    )


def find_free_ports(host: str, count: int) -> tuple[int, ...]:
    """Ports that nobody listens on now, each with the ones after it that further ranks take."""
    return tuple(port for port, _ in zip(_iter_free_ports(host), range(count), strict=False))


def _iter_free_ports(host: str) -> Iterator[int]:
    slots = len(_ENGINE_PORTS) // _PORTS_PER_ENGINE
    first = secrets.randbelow(slots)
    for slot in range(slots):
        port = _ENGINE_PORTS[(first + slot) % slots * _PORTS_PER_ENGINE]
        if _is_port_free(host, port):
            yield port


def _is_port_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


_load_profile_cached = functools.cache(load_profile)
