"""Read the user's own engine arguments, so that identity and lease of the engine follow them.

The user's arguments come after the generated ones, and the last one wins. A value that cannot be parsed is
ignored here: the engine refuses to start with it. The arguments themselves are passed on unchanged, by
`vllm/launch`.
"""

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from fulcrum_core.api.env import EnvVar
from fulcrum_core.models.sizes import GIB
from fulcrum_core.values import KV_LEASE_S

_IDENTITY_FIELDS = {
    "--block-size": "block_size",
    "--kv-cache-dtype": "kv_dtype",
    "--dtype": "dtype",
    "--attention-backend": "attention",
    "--revision": "revision",
    "--tensor-parallel-size": "tensor_parallel",
    "-tp": "tensor_parallel",
    "--pipeline-parallel-size": "pipeline_parallel",
    "-pp": "pipeline_parallel",
}
_NUMBER_FIELDS = frozenset({"block_size", "tensor_parallel", "pipeline_parallel"})
_HOST_GIB_PER_RANK = frozenset({"--cpu-offload-gb", "--swap-space"})
_HOST_GIB = "--kv-offloading-size"
"""Options that take memory of the node, in GiB: for each rank, and for all ranks together."""
_KV_CACHE_BYTES, _KV_CACHE_GIB_VARIABLE = "--kv-cache-memory-bytes", "VLLM_CPU_KVCACHE_SPACE"
"""Size of the KV cache, which on CPUs is memory of the node; the option goes before the variable."""
_LMCACHE_MEMORY_VARIABLE = "LMCACHE_MAX_LOCAL_CPU_SIZE"
_LMCACHE_DISK_VARIABLE, _LMCACHE_DISK_SIZE_VARIABLE = "LMCACHE_LOCAL_DISK", "LMCACHE_MAX_LOCAL_DISK_SIZE"
"""Sizes in GiB of the tiers of LMCache inside the engine, for each rank, and the folder of the disk tier."""
_HOST_GIB_MAX = 65_536.0
_DIGITS_MAX = 9
"""Longer numbers are invalid for the engine and for the fields of EngineIdentitySpec."""
_LEASE_MAX_S = 86_400.0


def parse_options(args: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield each option with its value; as in vLLM, `--a_b=c` is the same as `--a-b c`."""
    for number, arg in enumerate(args):
        name, given, value = arg.partition("=")
        if name.startswith("--"):
            name = name.replace("_", "-")
        if given:
            yield name, value
        elif name.startswith("-") and number + 1 < len(args):
            yield name, args[number + 1]


def user_identity_fields(args: Sequence[str]) -> dict[str, str | int]:
    """Fields of the engine identity that the arguments set."""
    found: dict[str, str | int] = {}
    for option, value in parse_options(args):
        field = _IDENTITY_FIELDS.get(option)
        if field in _NUMBER_FIELDS and value.isdecimal() and 0 < len(value.lstrip("0")) <= _DIGITS_MAX:
            found[field] = int(value)
        elif field is not None and field not in _NUMBER_FIELDS:
            found[field] = value
    return found


def user_host_bytes(args: Sequence[str], *, ranks: int) -> int:
    """Memory of the node that the arguments take for weights and KV of the devices, in bytes."""
    last = {
        option: size
        for option, value in parse_options(args)
        if (option in _HOST_GIB_PER_RANK or option == _HOST_GIB) and (size := _parse_size(value)) is not None
    }
    gib = sum(size * (1 if option == _HOST_GIB else ranks) for option, size in last.items())
    return math.ceil(gib * GIB)


def user_kv_cache_bytes(args: Sequence[str], env: Iterable[EnvVar]) -> int | None:
    """Size of the KV cache that the user sets, in bytes; None if he does not."""
    given = [value for option, value in parse_options(args) if option == _KV_CACHE_BYTES]
    if given and given[-1].isdecimal() and len(given[-1]) <= 16:
        return int(given[-1])
    values = [variable.value for variable in env if variable.name == _KV_CACHE_GIB_VARIABLE]
    size = _parse_size(values[-1]) if values else None
    return None if size is None else math.ceil(size * GIB)


def user_lmcache_bytes(env: Iterable[EnvVar], *, ranks: int) -> tuple[int, int]:
    """Bytes of memory and of /tmp that variables give to LMCache inside the engine, of all ranks together."""
    values = {variable.name: variable.value for variable in env}
    memory = _parse_size(values.get(_LMCACHE_MEMORY_VARIABLE, "")) or 0.0
    in_tmp = values.get(_LMCACHE_DISK_VARIABLE, "").removeprefix("file://").startswith("/tmp/")
    disk = _parse_size(values.get(_LMCACHE_DISK_SIZE_VARIABLE, "")) if in_tmp else None
    return math.ceil(memory * ranks * GIB), math.ceil((disk or 0.0) * ranks * GIB)


def _parse_size(text: str) -> float | None:
    """A number of GiB; None if the text is none, or one that no node has."""
    try:
        size = float(text)
    except ValueError:
        return None
    return size if 0 < size <= _HOST_GIB_MAX else None


def user_kv_lease_s(args: Sequence[str]) -> float | None:
    """Return the shortest KV lease of the last `--kv-transfer-config`, in seconds.

    None without a readable config; the default of the engine if the config contains no valid lease.
    """
    configs = [value for option, value in parse_options(args) if option == "--kv-transfer-config"]
    if not configs:
        return None
    try:
        found = list(_find_leases_s(json.loads(configs[-1])))
    except (ValueError, RecursionError):
        return None
    return min(found, default=KV_LEASE_S)


def _find_leases_s(config: Any) -> Iterator[float]:
    extra = config.get("kv_connector_extra_config") if isinstance(config, dict) else None
    if not isinstance(extra, dict):
        return
    lease = extra.get("kv_lease_duration")
    if isinstance(lease, int | float) and 0 < lease <= _LEASE_MAX_S:
        yield float(lease)
    children = extra.get("connectors")
    for child in children if isinstance(children, list) else ():
        yield from _find_leases_s(child)
