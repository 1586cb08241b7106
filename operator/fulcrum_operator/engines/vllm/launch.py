"""Build the launch of a vLLM engine from a launch request.

Written for vLLM 0.32 with NIXL 1.5 and LMCache 0.5.6. The same launch serves both roles unless the connector
fixes the role at start: instances of a flexible pool differ only in their addresses. `manifests`, the local
run and `fulcrum plan` call it through the package.
"""

import math
from collections.abc import Iterator

from fulcrum_core.api import EngineIdentitySpec
from fulcrum_core.api.engine import Connector, ModelSourceSpec
from fulcrum_core.errors import InvalidInput
from fulcrum_core.hardware import Vendor
from fulcrum_core.models import GPU_UTILIZATION, KvPrecision, WeightPrecision, weight_bytes
from fulcrum_core.values import Role
from fulcrum_operator.engines.launch import (
    EngineLaunch,
    EnginePlacement,
    EnginePlan,
    EngineResources,
    LaunchEnvVar,
    Port,
    Volume,
    compact_json,
)
from fulcrum_operator.engines.launch_request import LaunchRequest
from fulcrum_operator.engines.vllm import connectors
from fulcrum_operator.engines.vllm.choices import explain_kv_transfer, explain_layout, explain_precision
from fulcrum_operator.engines.vllm.resources import choose_resources
from fulcrum_operator.engines.vllm.settings import VllmSettings, choose_settings
from fulcrum_operator.engines.vllm.ucx import ucx_environment
from fulcrum_operator.engines.vllm.unsupported import find_unsupported
from fulcrum_operator.engines.vllm.user_args import user_identity_fields

VERSION = "0.32.0"
"""vLLM version of the generated flags; an image with another version may need `engine.args`."""
IMAGE = f"docker.io/vllm/vllm-openai:v{VERSION}"
"""vLLM's own image, for NVIDIA devices."""
POD_PLACEMENT = EnginePlacement(
    host="$(POD_IP)",
    port=8000,
    side_channel_port=5600,
    cache_port=5555,
    cache_http_port=8080,
    in_pod=True,
)
"""Placement in a pod of its own, where the ports are always free."""

HEALTH_PATH = "/health"
_LOAD_BYTES_S = 2e9
"""Assumed rate of reading weights, in bytes a second: a local disk."""
_DOWNLOAD_BYTES_S = 2e8
"""Assumed rate of downloads from the hub, in bytes a second."""
_STARTUP_S = 60.0
"""Seconds of a start without reading weights: imports, graphs and compilation."""
_UNKNOWN_STARTUP_S = 180.0
"""Seconds of a start if the size of the weights is not known."""
_KV_DTYPES = {KvPrecision.FP8: "fp8", KvPrecision.FP4: "nvfp4"}

_COMMON_ENV = {
    "PYTHONHASHSEED": "0",  # LMCache and KV events compare hashes of different processes
    "LMCACHE_TRACK_USAGE": "false",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
_CPU_ENV = {
    # Run the model in the engine process: the queue of the default executor busy-waits on every core.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    # The default binds every instance to the same core. The NIXL connector does so anyway, which only a local
    # run can undo (`fulcrum_cli.local.cores`).
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}


def plan_engine(request: LaunchRequest, placement: EnginePlacement) -> EnginePlan:
    """Plan the launch of one instance, with fit and choices; no launch if anything is unsupported."""
    fit = request.fit
    settings, choices = choose_settings(request, fit)
    resources, resource_choices = choose_resources(request, settings)
    unsupported = find_unsupported(request, settings)
    launch = None if unsupported else _build_launch(request, placement, settings, resources)
    return EnginePlan(
        launch=launch,
        fit=fit,
        choices=(
            *explain_layout(request),
            *explain_precision(request),
            *choices,
            *explain_kv_transfer(request),
            *resource_choices,
        ),
        unsupported=unsupported,
    )


def build_launch(request: LaunchRequest, placement: EnginePlacement) -> EngineLaunch:
    """Build the launch of one instance.

    Raises:
        InvalidInput: if vLLM does not support the requested settings; the message has every reason.
    """
    plan = plan_engine(request, placement)
    if plan.launch is None:
        raise InvalidInput("spec.engine", "vLLM", f"cannot be started: {'; '.join(plan.unsupported)}")
    return plan.launch


def expected_identity_and_startup_s(
    request: LaunchRequest, placement: EnginePlacement
) -> tuple[EngineIdentitySpec, float]:
    """Identity of an engine launched by this request, and the expected seconds of its start."""
    settings, _ = choose_settings(request, request.fit)
    return _identity(request, placement, settings), _startup_s(request)


def _identity(
    request: LaunchRequest, placement: EnginePlacement, settings: VllmSettings
) -> EngineIdentitySpec:
    """Identity of the engine. Values that the engine chooses are equal on equal devices."""
    facts = request.facts
    identity = EngineIdentitySpec(
        model=_model_argument(request, placement),
        engine=f"vllm {request.version}",
        kv_dtype=_KV_DTYPES.get(request.quantization.kv_cache, "auto"),
        block_size=settings.block_size,
        tensor_parallel=request.layout.tensor,
        pipeline_parallel=request.layout.pipeline,
        revision=request.model_source.revision or "",
        dtype=facts.dtype if facts else "auto",
        attention=settings.attention_backend or f"auto on {request.hardware.name}",
        connector=request.kv_transfer.connector.value,
        latent=bool(facts and facts.latent),
        kv_heads=facts.kv_heads if facts else 0,
        kv_lease=connectors.kv_lease_s(request),
        kv_transfer_time_per_1k_tokens=connectors.transfer_s_per_1k_tokens(request),
    )
    return identity.model_copy(update=user_identity_fields(request.args))


def _build_launch(
    request: LaunchRequest, placement: EnginePlacement, settings: VllmSettings, resources: EngineResources
) -> EngineLaunch:
    return EngineLaunch(
        command=(*placement.program, "serve", *_arguments(request, placement, settings), *request.args),
        env=tuple(_environment(request, placement)),
        ports=tuple(_ports(request, placement)),
        volumes=tuple(_volumes(request, placement, resources)),
        resources=resources,
        health_path=HEALTH_PATH,
        startup_s=_startup_s(request),
        shutdown_s=request.drain_timeout_s,
        identity=_identity(request, placement, settings),
        flip_strategy=connectors.flip_strategy(request.kv_transfer.connector),
        leftover_files=connectors.leftover_files(request, placement),
    )


def _model_argument(request: LaunchRequest, placement: EnginePlacement) -> str:
    """The model argument, equal in all instances: NIXL refuses a handshake between different model names."""
    return model_folder(request.model_source, placement) or request.model


def model_folder(source: ModelSourceSpec, placement: EnginePlacement) -> str | None:
    """Folder of a model on a claim, on a path or in an image; None for a model at the hub."""
    if source.is_at_hub:
        return None
    return "/".join(filter(None, (placement.model_folder or source.host_path, source.path)))


def model_volume(source: ModelSourceSpec, placement: EnginePlacement) -> Volume | None:
    """Volume of a model on a claim, on a path or in an image; None if nothing is mounted."""
    mount = placement.model_folder
    if source.image is not None:
        return Volume(name="model", mount=mount, kind="image", source=source.image, read_only=True)
    if source.pvc is not None:
        return Volume(name="model", mount=mount, kind="claim", source=source.pvc, read_only=True)
    if source.host_path is not None and mount:
        return Volume(name="model", mount=mount, kind="path", source=source.host_path, read_only=True)
    return None


def _download_folder(source: ModelSourceSpec, placement: EnginePlacement) -> str | None:
    """Folder for downloads that engines share; None if each engine has its own, or downloads nothing."""
    if source.downloads is None or not source.is_at_hub:
        return None
    return placement.download_folder or source.downloads.host_path


def _download_volume(source: ModelSourceSpec, placement: EnginePlacement) -> Volume | None:
    """Volume of the folder for downloads; None if nothing is mounted."""
    mount, downloads = placement.download_folder, source.downloads
    if downloads is None or not mount:
        return None
    if downloads.pvc is not None:
        return Volume(name="downloads", mount=mount, kind="claim", source=downloads.pvc)
    return Volume(name="downloads", mount=mount, kind="path", source=downloads.host_path or "")


def _arguments(request: LaunchRequest, placement: EnginePlacement, settings: VllmSettings) -> Iterator[str]:
    yield _model_argument(request, placement)
    yield from ("--served-model-name", request.model_source.served_name or request.model)
    if request.model_source.revision and _model_argument(request, placement) == request.model:
        yield from ("--revision", request.model_source.revision)
    yield from ("--host", placement.host, "--port", str(placement.port))
    yield from _size_arguments(request, settings)
    yield from _layout_arguments(request, settings)
    yield from _precision_arguments(request)
    # The router sets a priority on requests and reads the cached prompt tokens from the usage of a response.
    yield from ("--scheduling-policy", "priority", "--enable-prompt-tokens-details")
    yield from ("--prefix-caching-hash-algo", "sha256_cbor")  # the default differs between processes
    yield from ("--shutdown-timeout", str(math.ceil(request.drain_timeout_s)))
    config = connectors.kv_transfer_config(request, placement, block_size=settings.block_size)
    yield from ("--kv-transfer-config", compact_json(config))


def _size_arguments(request: LaunchRequest, settings: VllmSettings) -> Iterator[str]:
    if request.model_source.max_length is not None:
        yield from ("--max-model-len", str(request.model_source.max_length))
    yield from ("--block-size", str(settings.block_size))
    yield from ("--max-num-seqs", str(settings.max_sequences))
    if settings.max_batched_tokens is not None:
        yield from ("--max-num-batched-tokens", str(settings.max_batched_tokens))
    if settings.kv_cache_bytes is not None:
        yield from ("--kv-cache-memory-bytes", str(settings.kv_cache_bytes))
    else:
        yield from ("--gpu-memory-utilization", f"{_utilization(request):.2f}")


def _utilization(request: LaunchRequest) -> float:
    """Share of device memory for the engine, without the transfer buffer, which is allocated in addition."""
    if not request.hardware.memory_known:
        return GPU_UTILIZATION
    return max(0.0, GPU_UTILIZATION - request.layout.buffer_bytes / request.hardware.memory_bytes)


def _layout_arguments(request: LaunchRequest, settings: VllmSettings) -> Iterator[str]:
    layout = request.layout
    if layout.tensor > 1:
        yield from ("--tensor-parallel-size", str(layout.tensor))
    if layout.pipeline > 1:
        yield from ("--pipeline-parallel-size", str(layout.pipeline))
    if layout.data > 1:
        yield from ("--data-parallel-size", str(layout.data))
    if layout.expert:
        yield "--enable-expert-parallel"
    if settings.all2all_backend is not None:
        yield from ("--all2all-backend", settings.all2all_backend)
    if settings.micro_batching:
        yield "--enable-dbo"
    if settings.attention_backend is not None:
        yield from ("--attention-backend", settings.attention_backend)
    yield "--async-scheduling" if settings.async_scheduling else "--no-async-scheduling"
    if settings.sleep_mode:
        yield "--enable-sleep-mode"
    if request.hardware.vendor is Vendor.CPU:
        yield "--enforce-eager"  # compiling takes minutes and gains little on a CPU


def _precision_arguments(request: LaunchRequest) -> Iterator[str]:
    facts, spec = request.facts, request.quantization
    if facts is not None and facts.dtype == "float32":
        yield from ("--dtype", "float32")  # vLLM would serve it in 16 bits
    if spec.weights is WeightPrecision.FP8 and not (facts and facts.quantization):
        yield from ("--quantization", "fp8")
    if spec.kv_cache is not KvPrecision.AUTO:
        yield from ("--kv-cache-dtype", _KV_DTYPES[spec.kv_cache])


def _environment(request: LaunchRequest, placement: EnginePlacement) -> Iterator[LaunchEnvVar]:
    user_names = {variable.name for variable in request.env}
    variables = [LaunchEnvVar(name, value) for name, value in _COMMON_ENV.items()]
    if placement.in_pod:
        variables.insert(0, LaunchEnvVar("POD_IP", pod_field="status.podIP"))
    variables.append(LaunchEnvVar("VLLM_HOST_IP", placement.host))
    if request.kv_transfer.connector is not Connector.LMCACHE:
        variables.append(LaunchEnvVar("VLLM_NIXL_SIDE_CHANNEL_HOST", placement.host))
        variables.append(LaunchEnvVar("VLLM_NIXL_SIDE_CHANNEL_PORT", str(placement.side_channel_port)))
    variables += ucx_environment(
        request.hardware, devices=request.kv_transfer.devices, loopback=placement.loopback
    )
    if placement.loopback:
        variables.append(LaunchEnvVar("VLLM_LOOPBACK_IP", placement.host))
    if request.hardware.vendor is Vendor.CPU:
        variables += [LaunchEnvVar(name, value) for name, value in _CPU_ENV.items()]
    if request.facts is not None and request.facts.state_layers:
        # NIXL transfers the state of Mamba and linear-attention layers only in this layout.
        variables.append(LaunchEnvVar("VLLM_SSM_CONV_STATE_LAYOUT", "DS"))
    if request.settings.sleep_mode:
        # The endpoints /sleep and /wake_up exist only in development mode.
        variables.append(LaunchEnvVar("VLLM_SERVER_DEV_MODE", "1"))
    if (folder := _download_folder(request.model_source, placement)) is not None:
        # The hub's library locks each file below this folder, so that one engine downloads the file.
        variables.append(LaunchEnvVar("HF_HUB_CACHE", folder))
    if (token := LaunchEnvVar.hub_token(request.model_source)) is not None:
        variables.append(token)
    elif _model_argument(request, placement) != request.model:
        variables.append(LaunchEnvVar("HF_HUB_OFFLINE", "1"))
    yield from (variable for variable in variables if variable.name not in user_names)
    yield from map(LaunchEnvVar.from_user, request.env)


def _ports(request: LaunchRequest, placement: EnginePlacement) -> Iterator[Port]:
    yield Port("http", placement.port)
    connector = request.kv_transfer.connector
    if connector is not Connector.LMCACHE:
        for rank in range(request.layout.data):
            yield Port(f"kv-{rank}", placement.side_channel_port + rank)
    elif request.role is Role.DECODE:
        for rank, ports in enumerate(
            zip(*connectors.peer_ports(request.layout.tensor, placement), strict=True)
        ):
            yield Port(f"kv-init-{rank}", ports[0])
            yield Port(f"kv-alloc-{rank}", ports[1])


def _volumes(
    request: LaunchRequest, placement: EnginePlacement, resources: EngineResources
) -> Iterator[Volume]:
    cache = request.kv_cache
    if (model := model_volume(request.model_source, placement)) is not None:
        yield model
    if (downloads := _download_volume(request.model_source, placement)) is not None:
        yield downloads
    yield Volume(
        name="shared-memory", mount="/dev/shm", kind="memory", size_bytes=resources.shared_memory_bytes
    )
    if cache.disk is not None:
        yield Volume(name="kv-disk", mount=placement.cache_folder, kind="scratch", size_bytes=cache.disk)


def _startup_s(request: LaunchRequest) -> float:
    if request.facts is None:
        return _UNKNOWN_STARTUP_S
    weights = weight_bytes(request.facts, request.quantization.weights)
    startup_s = _STARTUP_S + math.ceil(weights / _LOAD_BYTES_S)
    if not request.model_source.is_at_hub:
        return startup_s
    return startup_s + math.ceil(weight_bytes(request.facts) / _DOWNLOAD_BYTES_S)
