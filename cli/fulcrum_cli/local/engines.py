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

from fulcrum_cli.local.environment import engine_environment, local_model
from fulcrum_cli.local.life import Life
from fulcrum_cli.local.models import read_model
from fulcrum_core.api import PDInstance, PDService
from fulcrum_core.api.pdpool import PoolRole, StartSpec
from fulcrum_core.errors import InvalidInput
from fulcrum_core.hardware import CPU
from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Role
from fulcrum_operator.engines import simulated, vllm
from fulcrum_operator.engines.from_spec import engine_request
from fulcrum_operator.engines.launch import EngineLaunch, EnvVar, Place
from fulcrum_operator.engines.request import EngineRequest
from fulcrum_operator.plan.observed import EngineFacts
from fulcrum_operator.plan.pools import desired_pools, pool_role

PATIENCE_S = 300.0
"""A real engine may take so long to start: it imports for 20 s where it is alone, and many times that on a
machine that is busy."""
STOP_GRACE_S = 10.0
"""A real engine gets so long from SIGTERM to SIGKILL."""

_PORTS = range(20_000, 32_000)
"""Below those that a kernel gives to connections: an engine binds some of its ports late."""
_RANK_PORTS = 8
"""Ports that are kept free after each one, for an engine's further ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Around:
    """What an engine's start depends on besides its instance."""

    service: PDService
    host: str
    folder: Path
    """Of the run."""


def engine_life(instance: PDInstance, around: Around) -> Life:
    """The next life of an instance's engine.

    Raises:
        InvalidInput: if it cannot be started as the service asks.
    """
    if instance.spec.engine.type == "Simulated":
        return Life(command=simulated.command(instance, python=sys.executable, host=around.host))
    place = _place(instance.metadata.name, around)
    return _life(vllm.launch_engine(_instance_request(instance, around.service), place), place)


def engine_facts(instance: PDInstance, around: Around) -> EngineFacts:
    """What the instance's engine is to its peers, whether it runs or not."""
    if instance.spec.engine.type == "Simulated":
        profile = _profile(instance.spec.engine.profile)
        return EngineFacts(simulated.identity(instance.spec, profile), simulated.STRATEGY, profile.startup_s)
    request = _instance_request(instance, around.service)
    launch = vllm.launch_engine(request, _SOMEWHERE)
    return EngineFacts(launch.identity, launch.strategy, launch.startup_s, request.fit)


def check_engines(service: PDService) -> None:
    """Refuse what engines of this machine cannot do, before anything is started.

    Raises:
        InvalidInput: for the first rule broken.
    """
    if service.spec.engine.type == "Simulated":
        load_profile(service.spec.engine.profile)
        return
    engine_environment()
    for pool in desired_pools(service, ()):
        hardware, source = pool.spec.hardware, pool.spec.model_source
        if hardware is not None and hardware.resource != "cpu":
            raise InvalidInput("hardware.resource", hardware.resource, "does not run locally: write cpu")
        if source is not None and source.pvc is not None:
            raise InvalidInput("modelSource.pvc", source.pvc, "is of a cluster: write hostPath")
        vllm.launch_engine(_request(pool.spec, pool.spec.role, service), _SOMEWHERE)


def startup_s(service: PDService) -> float:
    """From an engine's start to serving, all going well."""
    if service.spec.engine.type == "Simulated":
        return load_profile(service.spec.engine.profile).startup_s
    pool = desired_pools(service, ())[0]
    return vllm.launch_engine(_request(pool.spec, pool.spec.role, service), _SOMEWHERE).startup_s


def _instance_request(instance: PDInstance, service: PDService) -> EngineRequest:
    return _request(instance.spec, pool_role(instance, service), service, instance.spec.role)


def _request(
    start: StartSpec, pool_role: PoolRole, service: PDService, role: Role | None = None
) -> EngineRequest:
    """What is asked for, on this machine: its CPUs, and a model of the environment by its name there."""
    said = start.hardware and start.hardware.memory
    hardware = dataclasses.replace(CPU, memory_bytes=said or 0)
    asked = engine_request(service, start, pool_role=pool_role, role=role, hardware=hardware)
    written = vllm.model_folder(asked.source, _SOMEWHERE)
    folder = Path(written) if written is not None else local_model(start.model)
    if folder is None:
        return asked
    source = asked.source.model_copy(update={"host_path": str(folder), "path": ""})
    return dataclasses.replace(asked, source=source, facts=read_model(folder))


def _life(launch: EngineLaunch, place: Place) -> Life:
    return Life(
        command=(sys.executable, "-m", "fulcrum_cli.local.die_with_parent", *launch.command),
        env={variable.name: variable.value for variable in launch.env if _said(variable)},
        ports={"port": place.port, "side_channel_port": place.side_channel_port},
        health_url=f"http://{place.host}:{place.port}{launch.health_path}",
        patience_s=max(PATIENCE_S, launch.startup_s),
        stop_grace_s=STOP_GRACE_S,
        leaves=tuple(Path(path) for path in launch.leaves),
    )


def _said(variable: EnvVar) -> bool:
    """Whether its value is known; a token for the hub is in this user's own environment, or nowhere."""
    return not variable.secret and not variable.field


_SOMEWHERE = Place(
    host="127.0.0.1",
    port=0,
    side_channel_port=0,
    cache_port=0,
    cache_http_port=0,
    model_folder="",
    loopback=True,
)
"""For what does not depend on ports."""


def _place(name: str, around: Around) -> Place:
    port, side_channel, cache, cache_http = free_ports(around.host, 4)
    return dataclasses.replace(
        _SOMEWHERE,
        host=around.host,
        port=port,
        side_channel_port=side_channel,
        cache_port=cache,
        cache_http_port=cache_http,
        program=(str(engine_environment() / "bin" / "vllm"),),
        cache_folder=str(around.folder / f"{name}.kv"),
    )


def free_ports(host: str, count: int) -> tuple[int, ...]:
    """Ports that nobody listens on now, each with the ones after it that further ranks take."""
    return tuple(port for port, _ in zip(_free_ports(host), range(count), strict=False))


def _free_ports(host: str) -> Iterator[int]:
    slots = len(_PORTS) // _RANK_PORTS
    first = secrets.randbelow(slots)
    for slot in range(slots):
        port = _PORTS[(first + slot) % slots * _RANK_PORTS]
        if _is_free(host, port):
            yield port


def _is_free(host: str, port: int) -> bool:
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


_profile = functools.cache(load_profile)
