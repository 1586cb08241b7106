"""KV transfer settings of a vLLM engine: connector, flip strategy, lease, buffer and cache tiers.

`launch` puts them into `--kv-transfer-config` and the engine's identity; `choices` explains them to users.
No engine id is set: if an id survived a restart, peers would use the memory map of the old process.
A decode instance recomputes KV that it cannot load, because the prefill instance may be flipped or killed.
"""

import math
import shlex
from typing import Any

from fulcrum_core.api.engine import Connector, KvCacheSpec
from fulcrum_core.hardware import Vendor
from fulcrum_core.models import kv_bytes
from fulcrum_core.values import KV_LEASE_S, FlipStrategy, Role
from fulcrum_operator.engines.launch import EnginePlacement, compact_json
from fulcrum_operator.engines.launch_request import LaunchRequest
from fulcrum_operator.engines.vllm.user_args import user_kv_lease_s

GIB = 2**30
_CHUNK_BLOCKS = 2
"""LMCache chunk in blocks: large enough to transfer well, small enough that prompts share chunks."""
_CACHE_BYTES, _CPU_CACHE_BYTES = 8 * GIB, GIB // 4
"""Default sizes in bytes of an LMCache server's memory tier, next to an engine on GPUs and on CPUs."""
_PORTS_PER_RANK = 2
"""Ports of an LMCache receiver for each rank: one for the handshake, one for memory allocation."""
_PROXY_PORT = 7500
"""Port of the router to which LMCache senders report the end of a prefill."""


def flip_strategy(connector: Connector) -> FlipStrategy:
    """Return the flip strategy of an instance with this connector."""
    return FlipStrategy.RESTART if connector is Connector.LMCACHE else FlipStrategy.RELABEL


def kv_transfer_config(
    request: LaunchRequest, placement: EnginePlacement, *, block_size: int
) -> dict[str, Any]:
    """Return the value of `--kv-transfer-config`."""
    connector = request.kv_transfer.connector
    if connector is Connector.NIXL:
        return _nixl(request)
    if connector is Connector.LMCACHE:
        return _lmcache_in_process(request, placement, block_size)
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {
            "connectors": [_nixl(request), _lmcache_server(request, placement, block_size)]
        },
    }


def kv_lease_s(request: LaunchRequest) -> float:
    """Seconds for which a prefill instance keeps KV that no decode instance has fetched.

    The user's argument wins. The default is twice the sum of the TTFT objective and the time to transfer
    the longest prompt, at least `KV_LEASE_S`. Twice, because the router drops a KV transfer at half the
    lease: by then a decode instance must have been chosen and have the KV.
    """
    user_lease_s = user_kv_lease_s(request.args)
    return _default_kv_lease_s(request) if user_lease_s is None else user_lease_s


def _default_kv_lease_s(request: LaunchRequest) -> int:
    return math.ceil(max(KV_LEASE_S, 2 * (request.slo.ttft_s + longest_transfer_s(request))))


def longest_transfer_s(request: LaunchRequest) -> float:
    """Seconds of the KV transfer of the longest prompt; 0 if model or prompt length is not known."""
    if request.facts is None or request.longest_prompt_tokens is None:
        return 0.0
    size = kv_bytes(request.facts, request.longest_prompt_tokens, request.quantization.kv_cache)
    return size / request.hardware.fabric.bytes_per_s


def transfer_s_per_1k_tokens(request: LaunchRequest) -> float:
    """Return the seconds in which the declared fabric should transfer the KV of 1,000 tokens, at the slowest.

    0 if the model is not known, or if no fabric faster than TCP is declared. With latent attention the
    KV is transferred once for each rank.
    """
    rate, facts = request.hardware.fabric.min_bytes_per_s, request.facts
    if facts is None or not rate:
        return 0.0
    copies = request.layout.tensor if facts.latent else 1
    return copies * kv_bytes(facts, 1_000, request.quantization.kv_cache) / rate


def leftover_files(request: LaunchRequest, placement: EnginePlacement) -> tuple[str, ...]:
    """Return the shared memory files that a killed LMCache server leaves behind."""
    if request.kv_transfer.connector is not Connector.NIXL_WITH_LMCACHE:
        return ()
    return (f"/dev/shm/lmcache_l1_pool_{_shared_memory_name(placement)}",)


def _shared_memory_name(placement: EnginePlacement) -> str:
    return f"lmcache_{placement.cache_port}"


def peer_ports(tensor: int, placement: EnginePlacement) -> tuple[list[int], list[int]]:
    """Return the handshake ports and the allocation ports of an LMCache receiver, one of each per rank."""
    ports = [placement.cache_port + _PORTS_PER_RANK * rank for rank in range(tensor)]
    return ports, [port + 1 for port in ports]


def _nixl(request: LaunchRequest) -> dict[str, Any]:
    return {
        "kv_connector": "NixlConnector",
        # NIXL does not enforce the role; only kv_both keeps the checks that a decode instance needs.
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"backends": ["UCX"], "kv_lease_duration": _default_kv_lease_s(request)},
    }


def _lmcache_server(request: LaunchRequest, placement: EnginePlacement, block_size: int) -> dict[str, Any]:
    """Config of the LMCache server. The engine starts the server, so that it can use the engine's devices."""
    return {
        "kv_connector": "LMCacheMPConnector",
        "kv_role": "kv_both",  # kv_consumer would never store KV
        "kv_connector_extra_config": {
            "lmcache.mp.host": "tcp://127.0.0.1",
            "lmcache.mp.port": placement.cache_port,
            "lmcache.mp.autostart": True,
            "lmcache.mp.autostart.server_args": shlex.join(_server_args(request, placement, block_size)),
        },
    }


def memory_tier_bytes(request: LaunchRequest) -> int:
    """Memory of the node that LMCache takes for KV, in bytes."""
    if request.kv_cache.cpu:
        return request.kv_cache.cpu
    if request.kv_transfer.connector is not Connector.NIXL_WITH_LMCACHE:
        return 0
    return _CPU_CACHE_BYTES if request.hardware.vendor is Vendor.CPU else _CACHE_BYTES


def _server_args(request: LaunchRequest, placement: EnginePlacement, block_size: int) -> tuple[str, ...]:
    cpu = request.hardware.vendor is Vendor.CPU
    return (
        *("--chunk-size", str(_CHUNK_BLOCKS * block_size)),
        *("--l1-size-gb", f"{memory_tier_bytes(request) / GIB:g}", "--eviction-policy", "LRU"),
        *(("--supported-transfer-mode", "engine_driven") if cpu else ()),
        *("--shm-name", _shared_memory_name(placement)),
        *("--http-port", str(placement.cache_http_port)),
        *(
            part
            for tier in _disk_and_remote_tiers(request.kv_cache, placement)
            for part in ("--l2-adapter", compact_json(tier))
        ),
    )


def _disk_and_remote_tiers(spec: KvCacheSpec, placement: EnginePlacement) -> list[dict[str, Any]]:
    tiers: list[dict[str, Any]] = []
    if spec.disk is not None:
        eviction = {"eviction_policy": "LRU"}  # without eviction the capacity is not enforced
        capacity = spec.disk / GIB
        tiers.append(
            {
                "type": "fs_native",
                "base_path": placement.cache_folder,
                "max_capacity_gb": capacity,
                "eviction": eviction,
            }
        )
    if spec.remote is not None:
        host, _, port = spec.remote.partition("://")[2].rpartition(":")
        tiers.append({"type": "resp", "host": host, "port": int(port)})
    return tiers


def _lmcache_in_process(
    request: LaunchRequest, placement: EnginePlacement, block_size: int
) -> dict[str, Any]:
    """Config of LMCache inside the engine: a sender (prefill) pushes KV to a receiver (decode)."""
    sender = request.role is Role.PREFILL
    keys: dict[str, Any] = {
        "chunk_size": _CHUNK_BLOCKS * block_size,
        "enable_pd": True,
        "transfer_channel": "nixl",
        "nixl_backends": ["UCX"],
        "pd_role": "sender" if sender else "receiver",
        "pd_buffer_size": request.buffer_bytes,
        "pd_buffer_device": "cuda",
        "save_unfull_chunk": True,
        **(_sender_keys(request, placement) if sender else _receiver_keys(request, placement)),
    }
    return {
        "kv_connector": "LMCacheConnectorV1",
        "kv_role": "kv_producer" if sender else "kv_consumer",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {f"lmcache.{key}": value for key, value in keys.items()},
    }


def _sender_keys(request: LaunchRequest, placement: EnginePlacement) -> dict[str, Any]:
    return {
        "pd_proxy_host": request.proxy_host,
        "pd_proxy_port": _PROXY_PORT,
        **_in_process_tiers(request.kv_cache, placement, ranks=request.tensor),
    }


def _receiver_keys(request: LaunchRequest, placement: EnginePlacement) -> dict[str, Any]:
    init_ports, alloc_ports = peer_ports(request.layout.tensor, placement)
    return {
        "pd_peer_host": placement.host,
        "pd_peer_init_port": init_ports,
        "pd_peer_alloc_port": alloc_ports,
        # A receiver reads only from PDBackend, so it has no tiers: they would never be read.
        "retrieve_locations": ["PDBackend"],
        "local_cpu": False,
    }


def _in_process_tiers(spec: KvCacheSpec, placement: EnginePlacement, *, ranks: int) -> dict[str, Any]:
    """The tiers of a sender; each rank has its share."""
    keys: dict[str, Any] = {"local_cpu": spec.cpu is not None}
    if spec.cpu is not None:
        keys["max_local_cpu_size"] = spec.cpu / GIB / ranks
    if spec.disk is not None:
        keys |= {
            "local_disk": f"file://{placement.cache_folder}",
            "max_local_disk_size": spec.disk / GIB / ranks,
        }
    if spec.remote is not None:
        keys["remote_url"] = spec.remote
    return keys
