"""Process specs and facts of the engines of a local run, by engine type.

`run` and `program_commands` ask; the processes are started in `runtime`. The adapters in
`fulcrum_operator.engines` know a real engine's options. This module adds the machine: the engine environment,
free ports, local model folders, and that there are CPUs only.
"""

import dataclasses
import functools
import itertools
import secrets
import socket
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import fulcrum_simulator.server as engine_server
from fulcrum_cli.local import exec_with_parent
from fulcrum_cli.local.engine_environment import find_engine_environment, find_local_model, read_model_config
from fulcrum_cli.local.supervised_process import ProcessSpec
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
"""Shortest ready timeout of a real engine: it imports for 20 s on an idle machine, and for minutes on a busy
one."""
STOP_GRACE_S = 10.0
"""Time of a real engine from SIGTERM to SIGKILL, in seconds."""

_ENGINE_PORTS = range(20_000, 32_000)
"""Below the kernel's ports for outgoing connections, one of which an engine could otherwise find taken."""
_PORTS_PER_ENGINE = 8
"""Distance between the ports of two engines: further ranks of an engine bind the ports that follow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineContext:
    """What an engine's process spec needs besides the PDInstance."""

    service: PDService
    host: str
    folder: Path
    """Folder of the run."""


def build_process_spec(instance: PDInstance, context: EngineContext) -> ProcessSpec:
    """Build what the instance's engine is started with next, on free ports.

    Raises:
        InvalidInput: if the engine cannot run as the service specifies.
    """
    if instance.spec.engine.is_simulated:
        return ProcessSpec(command=simulated_engine_command(instance, host=context.host))
    placement = _choose_placement(instance.metadata.name, context)
    return _vllm_process_spec(
        vllm.build_launch(_instance_request(instance, context.service), placement), placement
    )


def simulated_engine_command(instance: PDInstance, *, host: str) -> tuple[str, ...]:
    """Command line of the engine server for an instance, on free ports of `host`."""
    return (sys.executable, "-m", engine_server.__name__, *simulated.arguments(instance, host=host))


def engine_facts(instance: PDInstance, context: EngineContext) -> EngineFacts:
    """Identity, flip strategy, start-up time and fit of an instance's engine, whether it runs or not."""
    if instance.spec.engine.is_simulated:
        profile = _load_profile_cached(instance.spec.engine.profile)
        return EngineFacts(
            simulated.identity(instance.spec, profile), simulated.FLIP_STRATEGY, profile.startup_s
        )
    request = _instance_request(instance, context.service)
    launch = vllm.build_launch(request, _PLACEHOLDER_PLACEMENT)
    return EngineFacts(launch.identity, launch.flip_strategy, launch.startup_s, request.fit)


def check_engines(service: PDService) -> None:
    """Check that this machine can run the service's engines.

    Raises:
        InvalidInput: for the first rule broken.
    """
    if service.spec.engine.is_simulated:
        load_profile(service.spec.engine.profile)
        return
    find_engine_environment()
    for pool in desired_pools(service, ()):
        hardware, source = pool.spec.hardware, pool.spec.model_source
        if hardware is not None and hardware.resource != "cpu":
            raise InvalidInput(
                "hardware.resource", hardware.resource, "is not available to a local run; write cpu"
            )
        for field, value in (("pvc", source.pvc), ("image", source.image)) if source else ():
            if value is not None:
                rule = "exists in a cluster only; write hostPath"
                raise InvalidInput(f"modelSource.{field}", value, rule)
        vllm.build_launch(_engine_request(pool.spec, pool.spec.role, service), _PLACEHOLDER_PLACEMENT)


def expected_startup_s(service: PDService) -> float:
    """Seconds from an engine's start until it serves, if nothing fails; of the first pool's engines."""
    if service.spec.engine.is_simulated:
        return load_profile(service.spec.engine.profile).startup_s
    pool = desired_pools(service, ())[0]
    return vllm.build_launch(
        _engine_request(pool.spec, pool.spec.role, service), _PLACEHOLDER_PLACEMENT
    ).startup_s


def _instance_request(instance: PDInstance, service: PDService) -> LaunchRequest:
    return _engine_request(instance.spec, pool_role(instance, service), service, instance.spec.role)


def _engine_request(
    launch_spec: LaunchSpec, pool_role: PoolRole, service: PDService, role: Role | None = None
) -> LaunchRequest:
    """Launch request on this machine's CPUs, with the model's local folder if there is one."""
    memory_bytes = launch_spec.hardware and launch_spec.hardware.memory
    hardware = dataclasses.replace(CPU, memory_bytes=memory_bytes or 0)
    request = build_launch_request(service, launch_spec, pool_role=pool_role, role=role, hardware=hardware)
    named = vllm.model_folder(request.model_source, _PLACEHOLDER_PLACEMENT)
    folder = Path(named) if named is not None else find_local_model(launch_spec.model)
    if folder is None:
        return request
    source = request.model_source.model_copy(update={"host_path": str(folder), "path": ""})
    return dataclasses.replace(request, model_source=source, facts=read_model_config(folder))


def _vllm_process_spec(launch: EngineLaunch, placement: EnginePlacement) -> ProcessSpec:
    return ProcessSpec(
        command=(sys.executable, "-m", exec_with_parent.__name__, *launch.command),
        env={variable.name: variable.value for variable in launch.env if _has_value(variable)},
        ports={"port": placement.port, "side_channel_port": placement.side_channel_port},
        health_url=f"http://{placement.host}:{placement.port}{launch.health_path}",
        ready_timeout_s=READY_TIMEOUT_S,
        stop_grace_s=STOP_GRACE_S,
        leftover_files=tuple(Path(path) for path in launch.leftover_files),
        binds_cores=True,
    )


def _has_value(variable: LaunchEnvVar) -> bool:
    """Whether the value is known here; a secret, such as the hub's token, is inherited from the user."""
    return not variable.secret and not variable.pod_field and variable.source is None


_PLACEHOLDER_PLACEMENT = EnginePlacement(
    host="127.0.0.1",
    port=0,
    side_channel_port=0,
    cache_port=0,
    cache_http_port=0,
    model_folder="",
    download_folder="",
    loopback=True,
)
"""Stands in for ports and folders where a result does not depend on them."""


def _choose_placement(name: str, context: EngineContext) -> EnginePlacement:
    port, side_channel, cache, cache_http = find_free_ports(context.host, 4)
    return dataclasses.replace(
        _PLACEHOLDER_PLACEMENT,
        host=context.host,
        port=port,
        side_channel_port=side_channel,
        cache_port=cache,
        cache_http_port=cache_http,
        program=(str(find_engine_environment() / "bin" / "vllm"),),
        cache_folder=str(context.folder / f"{name}.kv"),
    )


def find_free_ports(host: str, count: int) -> tuple[int, ...]:
    """Return `count` ports that are free now, each far enough from the next for an engine's further ranks.

    Raises:
        InvalidInput: if fewer are free.
    """
    ports = tuple(itertools.islice(_iter_free_ports(host), count))
    if len(ports) < count:
        ends = f"{_ENGINE_PORTS.start} to {_ENGINE_PORTS.stop - 1}"
        raise InvalidInput("ports", count, f"is more than {len(ports)}, the number of free ones from {ends}")
    return ports


def _iter_free_ports(host: str) -> Iterator[int]:
    slots = len(_ENGINE_PORTS) // _PORTS_PER_ENGINE
    first = secrets.randbelow(slots)
    for slot in range(slots):
        port = _ENGINE_PORTS[(first + slot) % slots * _PORTS_PER_ENGINE]
        try:
            check_port_is_free(host, port)
        except OSError:
            continue
        yield port


def check_port_is_free(host: str, port: int) -> None:
    """Check that a TCP port is free, by binding it for a moment.

    Raises:
        OSError: if the port cannot be bound.
        OverflowError: if there is no such port.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as bound:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind((host, port))


_load_profile_cached = functools.cache(load_profile)
