"""Read the user's own engine arguments, so that identity and lease of the engine follow them.

The user's arguments come after the generated ones, and the last one wins. A value that cannot be parsed is
ignored here: the engine refuses to start with it.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

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
