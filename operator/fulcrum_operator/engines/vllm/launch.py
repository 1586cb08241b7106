"""vLLM: from what is asked of an instance to the process that serves it.

Written for vLLM 0.32 with NIXL 1.5 and LMCache 0.5.6. The same launch serves both roles unless the connector
fixes the role at start: instances of a flexible pool differ in nothing but addresses.
"""

import math
from collections.abc import Iterator

from fulcrum_core.api import IdentitySpec
from fulcrum_core.api.engine import Connector, ModelSourceSpec
from fulcrum_core.errors import InvalidInput
from fulcrum_core.hardware import Vendor
from fulcrum_core.models import GPU_UTILIZATION, KvPrecision, WeightPrecision, weight_bytes
from fulcrum_core.values import Role
from fulcrum_operator.engines.launch import (
    EngineLaunch,
    EnginePlan,
    EnvVar,
    Place,
    Port,
    Volume,
    compact_json,
)
from fulcrum_operator.engines.request import EngineRequest
from fulcrum_operator.engines.vllm import connectors
from fulcrum_operator.engines.vllm.reasons import layout_choices, precision_choices
from fulcrum_operator.engines.vllm.settings import Settings, choose_settings
from fulcrum_operator.engines.vllm.ucx import ucx_environment
from fulcrum_operator.engines.vllm.unsupported import refusals
from fulcrum_operator.engines.vllm.user_args import identity_written

VERSION = "0.32.0"
"""What the flags are written for; an image with another version is a matter of `args`."""
IMAGE = f"vllm/vllm-openai:v{VERSION}"
"""vLLM's own image, for NVIDIA's devices."""
POD = Place(host="$(POD_IP)", port=8000, side_channel_port=5600, cache_port=5555, cache_http_port=8080)
"""A pod of its own: the ports are always the same."""

HEALTH_PATH = "/health"
_LOAD_BYTES_S = 2e9
"""Weights are read so fast: a local disk."""
_STARTUP_S = 60.0
"""Imports, graphs and compilation."""
_UNKNOWN_STARTUP_S = 180.0
"""The same, with weights of a model that is not known."""
_SHARED_MEMORY = 8 * 2**30
_KV_DTYPES = {KvPrecision.FP8: "fp8", KvPrecision.FP4: "nvfp4"}

_COMMON_ENV = {
    "PYTHONHASHSEED": "0",  # LMCache and KV events compare hashes between processes
    "LMCACHE_TRACK_USAGE": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
_CPU_ENV = {
    # The model runs inside the engine's core: the default executor's shared-memory queue spins on every core.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the default pins every instance to the same core
    "OMP_NUM_THREADS": "1",
}


def plan_engine(request: EngineRequest, place: Place) -> EnginePlan:
    """What is started for one instance, how it fits, what was chosen; no launch where that is forbidden."""
    fit = request.fit
    settings, choices = choose_settings(request, fit)
    against = refusals(request, settings)
    launch = None if against else _launch(request, place, settings)
    return EnginePlan(
        launch=launch,
        fit=fit,
        choices=(
            *layout_choices(request),
            *precision_choices(request),
            *choices,
            *connectors.transfer_choices(request),
        ),
        refusals=against,
    )


def launch_engine(request: EngineRequest, place: Place) -> EngineLaunch:
    """How one instance is started.

    Raises:
        InvalidInput: if that is forbidden.
    """
    plan = plan_engine(request, place)
    if plan.launch is None:
        raise InvalidInput("spec.engine", "vLLM", f"cannot be started: {'; '.join(plan.refusals)}")
    return plan.launch


def known_of(request: EngineRequest, place: Place) -> tuple[IdentitySpec, float]:
    """What an engine started so is to its peers, and how long its start may take."""
    settings, _ = choose_settings(request, request.fit)
    return _identity(request, place, settings), _startup_s(request)


def _identity(request: EngineRequest, place: Place, settings: Settings) -> IdentitySpec:
    """What it is to its peers. What is left to the engine is the same on the same device."""
    facts = request.facts
    made = IdentitySpec(
        model=_model(request, place),
        engine=f"vllm {request.version}",
        kv_dtype=_KV_DTYPES.get(request.quantization.kv_cache, "auto"),
        block_size=settings.block_size,
        tensor_parallel=request.layout.tensor,
        pipeline_parallel=request.layout.pipeline,
        revision=request.source.revision or "",
        dtype=facts.dtype if facts else "auto",
        attention=settings.attention or f"auto on {request.hardware.name}",
        connector=request.kv_transfer.connector.value,
        latent=bool(facts and facts.latent),
        kv_heads=facts.kv_heads if facts else 0,
        kv_lease=connectors.lease_s(request),
        kv_wire=connectors.wire_s(request),
    )
    return made.model_copy(update=identity_written(request.args))


def _launch(request: EngineRequest, place: Place, settings: Settings) -> EngineLaunch:
    return EngineLaunch(
        command=(*place.program, "serve", *_arguments(request, place, settings), *request.args),
        env=tuple(_environment(request, place)),
        ports=tuple(_ports(request, place)),
        volumes=tuple(_volumes(request, place)),
        health_path=HEALTH_PATH,
        startup_s=_startup_s(request),
        shutdown_s=request.drain_s,
        identity=_identity(request, place, settings),
        strategy=connectors.strategy(request.kv_transfer.connector),
        leaves=connectors.leaves(request, place),
    )


def _model(request: EngineRequest, place: Place) -> str:
    """The model as the command line spells it: in every instance alike, or handshakes are refused."""
    return model_folder(request.source, place) or request.model


def model_folder(source: ModelSourceSpec, place: Place) -> str | None:
    """Where an engine finds a model that is on a claim or a path; None for one of the hub."""
    if source.host_path is None and source.pvc is None:
        return None
    return "/".join(filter(None, (place.model_folder or source.host_path, source.path)))


def model_volume(source: ModelSourceSpec, place: Place) -> Volume | None:
    """What is mounted for that; None where nothing is."""
    mount = place.model_folder
    if source.pvc is not None:
        return Volume(name="model", mount=mount, kind="claim", source=source.pvc, read_only=True)
    if source.host_path is not None and mount:
        return Volume(name="model", mount=mount, kind="path", source=source.host_path, read_only=True)
    return None


def _arguments(request: EngineRequest, place: Place, settings: Settings) -> Iterator[str]:
    yield _model(request, place)
    yield from ("--served-model-name", request.source.served_name or request.model)
    if request.source.revision and _model(request, place) == request.model:
        yield from ("--revision", request.source.revision)
    yield from ("--host", place.host, "--port", str(place.port))
    yield from _size_arguments(request, settings)
    yield from _layout_arguments(request, settings)
    yield from _precision_arguments(request)
    # A request carries its priority, and its usage tells how much of the prompt was not computed.
    yield from ("--scheduling-policy", "priority", "--enable-prompt-tokens-details")
    yield from ("--prefix-caching-hash-algo", "sha256_cbor")  # equal in all processes, unlike the default
    yield from ("--shutdown-timeout", str(math.ceil(request.drain_s)))
    config = connectors.kv_transfer_config(request, place, block_size=settings.block_size)
    yield from ("--kv-transfer-config", compact_json(config))


def _size_arguments(request: EngineRequest, settings: Settings) -> Iterator[str]:
    if request.source.max_length is not None:
        yield from ("--max-model-len", str(request.source.max_length))
    yield from ("--block-size", str(settings.block_size))
    yield from ("--max-num-seqs", str(settings.sequences))
    if settings.batched_tokens is not None:
        yield from ("--max-num-batched-tokens", str(settings.batched_tokens))
    if settings.kv_bytes is not None:
        yield from ("--kv-cache-memory-bytes", str(settings.kv_bytes))
    else:
        yield from ("--gpu-memory-utilization", f"{_utilization(request):.2f}")


def _utilization(request: EngineRequest) -> float:
    """What the engine may take of a device: a transfer buffer comes on top of it."""
    if not request.hardware.known:
        return GPU_UTILIZATION
    return max(0.0, GPU_UTILIZATION - request.layout.buffer_bytes / request.hardware.memory_bytes)


def _layout_arguments(request: EngineRequest, settings: Settings) -> Iterator[str]:
    layout = request.layout
    if layout.tensor > 1:
        yield from ("--tensor-parallel-size", str(layout.tensor))
    if layout.pipeline > 1:
        yield from ("--pipeline-parallel-size", str(layout.pipeline))
    if layout.data > 1:
        yield from ("--data-parallel-size", str(layout.data))
    if layout.expert:
        yield "--enable-expert-parallel"
    if settings.all2all is not None:
        yield from ("--all2all-backend", settings.all2all)
    if settings.micro_batching:
        yield "--enable-dbo"
    if settings.attention is not None:
        yield from ("--attention-backend", settings.attention)
    yield "--async-scheduling" if settings.async_scheduling else "--no-async-scheduling"
    if settings.sleep_mode:
        yield "--enable-sleep-mode"
    if request.hardware.vendor is Vendor.CPU:
        yield "--enforce-eager"  # compiling costs minutes and gains little there


def _precision_arguments(request: EngineRequest) -> Iterator[str]:
    facts, spec = request.facts, request.quantization
    if facts is not None and facts.dtype == "float32":
        yield from ("--dtype", "float32")  # else it would be served in 16 bits
    if spec.weights is WeightPrecision.FP8 and not (facts and facts.quantization):
        yield from ("--quantization", "fp8")
    if spec.kv_cache is not KvPrecision.AUTO:
        yield from ("--kv-cache-dtype", _KV_DTYPES[spec.kv_cache])


def _environment(request: EngineRequest, place: Place) -> Iterator[EnvVar]:
    written = dict(request.env)
    made = [EnvVar(name, value) for name, value in _COMMON_ENV.items()]
    if place.host == POD.host:
        made.insert(0, EnvVar("POD_IP", field="status.podIP"))
    made.append(EnvVar("VLLM_HOST_IP", place.host))
    if request.kv_transfer.connector is not Connector.LMCACHE:
        made.append(EnvVar("VLLM_NIXL_SIDE_CHANNEL_HOST", place.host))
        made.append(EnvVar("VLLM_NIXL_SIDE_CHANNEL_PORT", str(place.side_channel_port)))
    made += ucx_environment(request.hardware, devices=request.kv_transfer.devices, loopback=place.loopback)
    if place.loopback:
        made.append(EnvVar("VLLM_LOOPBACK_IP", place.host))
    if request.hardware.vendor is Vendor.CPU:
        made += [EnvVar(name, value) for name, value in _CPU_ENV.items()]
    if request.facts is not None and request.facts.state_layers:
        made.append(EnvVar("VLLM_SSM_CONV_STATE_LAYOUT", "DS"))  # what NIXL can hand over
    if request.settings.sleep_mode:
        made.append(EnvVar("VLLM_SERVER_DEV_MODE", "1"))  # /sleep and /wake_up are served nowhere else
    if request.source.token_secret is not None:
        made.append(EnvVar("HF_TOKEN", secret=request.source.token_secret))
    elif _model(request, place) != request.model:
        made.append(EnvVar("HF_HUB_OFFLINE", "1"))
    yield from (variable for variable in made if variable.name not in written)
    yield from (EnvVar(name, value) for name, value in written.items())


def _ports(request: EngineRequest, place: Place) -> Iterator[Port]:
    yield Port("http", place.port)
    connector = request.kv_transfer.connector
    if connector is not Connector.LMCACHE:
        for rank in range(request.layout.data):
            yield Port(f"kv-{rank}", place.side_channel_port + rank)
    elif request.role is Role.DECODE:
        for rank, ports in enumerate(zip(*connectors.peer_ports(request.layout.tensor, place), strict=True)):
            yield Port(f"kv-init-{rank}", ports[0])
            yield Port(f"kv-alloc-{rank}", ports[1])


def _volumes(request: EngineRequest, place: Place) -> Iterator[Volume]:
    cache = request.kv_cache
    if (model := model_volume(request.source, place)) is not None:
        yield model
    shared = _SHARED_MEMORY + (cache.cpu or 0)
    yield Volume(name="shared-memory", mount="/dev/shm", kind="memory", size_bytes=shared)
    if cache.disk is not None:
        yield Volume(name="kv-disk", mount=place.cache_folder, kind="scratch", size_bytes=cache.disk)


def _startup_s(request: EngineRequest) -> float:
    if request.facts is None:
        return _UNKNOWN_STARTUP_S
    return _STARTUP_S + math.ceil(weight_bytes(request.facts, request.quantization.weights) / _LOAD_BYTES_S)
