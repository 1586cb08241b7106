"""CPU, memory and storage that a vLLM instance takes from its node besides its devices.

A pod that requests only devices is the first to be evicted, is refused where a quota counts memory, and gets
whatever limit a LimitRange has. A pool's template overrides every value. `vllm/launch` calls it;
`launch_request` has the devices.
"""

import math

from fulcrum_core.hardware import Vendor
from fulcrum_core.models import format_gib, weight_bytes
from fulcrum_core.models.sizes import GIB
from fulcrum_operator.engines.launch import Choice, EngineResources
from fulcrum_operator.engines.launch_request import LaunchRequest
from fulcrum_operator.engines.vllm.connectors import memory_tier_bytes
from fulcrum_operator.engines.vllm.settings import VllmSettings
from fulcrum_operator.engines.vllm.user_args import (
    user_host_bytes,
    user_kv_cache_bytes,
    user_lmcache_bytes,
)

SHARED_MEMORY_BYTES = 8 * GIB
"""Room in /dev/shm for the queues between the engine's processes, besides LMCache's memory tier."""

_PROCESS_CORES = 2
"""Cores of the API server and the scheduler; each rank takes one more, which its process polls on."""
_CPU_LIMIT_FACTOR = 4
"""Compiling and tokenizing use more cores for moments."""
_BASE_BYTES = 4 * GIB
"""API server and scheduler with their libraries, in bytes."""
_RANK_BYTES = 4 * GIB
"""Process of one rank: libraries, CUDA context, pinned buffers. Weights that are read are page cache."""
_CPU_BASE_BYTES = 2 * GIB
"""An engine on CPUs, one process without CUDA."""
_CACHE_REQUEST_BYTES, _CACHE_LIMIT_BYTES = 5 * GIB, 20 * GIB
"""Compiled kernels and graphs in /tmp."""
_CPU_CACHE_BYTES = GIB
_DOWNLOAD_FACTOR = 1.1
"""A checkpoint on disk, with tokenizer and partial files, relative to its weights."""
_LOG_BYTES = 2 * GIB


def choose_resources(
    request: LaunchRequest, settings: VllmSettings
) -> tuple[EngineResources, tuple[Choice, ...]]:
    """The resources of one instance, and a row with value and reason for each."""
    cores, cores_why = _choose_cores(request)
    tiers = memory_tier_bytes(request)
    host, host_why = _choose_host_bytes(request, settings)
    shared = SHARED_MEMORY_BYTES + tiers
    temporary, temporary_limit, temporary_why = _choose_temporary_bytes(request)
    disk = request.kv_cache.disk or 0
    resources = EngineResources(
        cpu=cores,
        cpu_limit=_CPU_LIMIT_FACTOR * cores,
        memory_bytes=_round_up(host + tiers),
        memory_limit_bytes=_round_up(2 * host + shared),
        shared_memory_bytes=shared,
        storage_bytes=_round_up(temporary + disk),
        storage_limit_bytes=None
        if temporary_limit is None
        else _round_up(temporary_limit + disk + _LOG_BYTES),
        temporary_limit_bytes=None if temporary_limit is None else _round_up(temporary_limit),
    )
    return resources, (
        Choice("cpu", f"{cores}, at most {resources.cpu_limit}", cores_why),
        Choice("memory", _range(resources.memory_bytes, resources.memory_limit_bytes), host_why),
        Choice("sharedMemory", f"at most {format_gib(shared)}", _tier_reason(request, tiers)),
        Choice(
            "ephemeralStorage", _range(resources.storage_bytes, resources.storage_limit_bytes), temporary_why
        ),
    )


def _choose_cores(request: LaunchRequest) -> tuple[int, str]:
    if request.hardware.vendor is Vendor.CPU:
        return request.cores or 1, "hardware.count"
    ranks, data = request.layout.devices_needed, request.layout.data
    schedulers = data if data > 1 else 0
    return (
        _PROCESS_CORES + ranks + schedulers,
        "a core for each rank, each scheduler and the API server",
    )


def _choose_host_bytes(request: LaunchRequest, settings: VllmSettings) -> tuple[int, str]:
    """Memory of the engine's processes in bytes, without LMCache's tier."""
    host, why = _choose_process_bytes(request, settings)
    ranks = request.layout.devices_needed
    by_args = user_host_bytes(request.args, ranks=ranks)
    by_env, _ = user_lmcache_bytes(request.env, ranks=ranks)
    if by_args:
        why = f"{why}; {format_gib(by_args)} by engine.args"
    if by_env:
        why = f"{why}; {format_gib(by_env)} by engine.env"
    return host + by_args + by_env, why


def _choose_process_bytes(request: LaunchRequest, settings: VllmSettings) -> tuple[int, str]:
    weights = 0 if request.facts is None else weight_bytes(request.facts, request.quantization.weights)
    if request.hardware.vendor is Vendor.CPU:
        given = user_kv_cache_bytes(request.args, request.env)
        kv = settings.kv_cache_bytes or 0 if given is None else given
        return _CPU_BASE_BYTES + weights + kv, "the process, the weights and the KV cache"
    host = _BASE_BYTES + _RANK_BYTES * request.layout.devices_needed
    if request.settings.sleep_mode:
        return host + weights, "the processes, and the weights while the engine sleeps"
    tiers = memory_tier_bytes(request)
    return host, f"the processes; {format_gib(tiers)} for KV are added" if tiers else "the processes"


def _choose_temporary_bytes(request: LaunchRequest) -> tuple[int, int | None, str]:
    """Expected and largest size of /tmp in bytes; no largest size if the size of a download is not known."""
    on_cpu = request.hardware.vendor is Vendor.CPU
    _, kv = user_lmcache_bytes(request.env, ranks=request.layout.devices_needed)
    cache = kv + (_CPU_CACHE_BYTES if on_cpu else _CACHE_REQUEST_BYTES)
    limit = kv + (_CPU_CACHE_BYTES if on_cpu else _CACHE_LIMIT_BYTES)
    if not request.model_source.is_at_hub:
        return cache, limit, "caches; the model is mounted"
    if request.model_source.downloads is not None:
        return cache, limit, "caches; the model is downloaded to modelSource.downloads"
    if request.facts is None:
        return cache, None, "caches; no limit, because the size of the model to download is not known"
    download = math.ceil(weight_bytes(request.facts) * _DOWNLOAD_FACTOR)
    return cache + download, limit + download, f"caches, and a download of {format_gib(download)}"


def _tier_reason(request: LaunchRequest, tiers: int) -> str:
    base = f"{format_gib(SHARED_MEMORY_BYTES)} for queues between processes"
    if not tiers:
        return base
    return f"{base}, and kvCache.cpu" if request.kv_cache.cpu else f"{base}, and {format_gib(tiers)} for KV"


def _range(low: int, high: int | None) -> str:
    return format_gib(low) if high is None else f"{format_gib(low)}, at most {format_gib(high)}"


def _round_up(size: int) -> int:
    """Round up to whole GiB."""
    return math.ceil(size / GIB) * GIB
