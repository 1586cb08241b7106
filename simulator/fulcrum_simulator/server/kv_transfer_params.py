"""Parses and builds `kv_transfer_params`, the JSON object that connects prefill leg and decode leg.

Parsing is as lenient as in the real engine, which reads few fields. Depending on them, a request is a KV
transfer, a plain request, a request that hangs, or one that kills the engine. A control plane under test must
handle all four. `app` calls both; the blocks themselves go over the side channel.
"""

from collections.abc import Mapping
from typing import Any

from fulcrum_simulator.engine import ExportedKv, KvExportRequest, KvImportRequest, KvTransfer, NoKvTransfer

CACHED_TOKENS_KEY = "remote_prefill_cached_tokens"
"""Prompt tokens that the prefill instance had in its prefix cache."""
_SOURCE_FIELDS = ("remote_engine_id", "remote_request_id", "remote_host", "remote_port")


def parse_kv_transfer_params(params: Mapping[str, Any] | None) -> KvTransfer:
    """Return the part that a request plays in a KV transfer; unknown keys and `{}` mean none."""
    if params and params.get("do_remote_prefill"):
        return _parse_import(params)
    if params and params.get("do_remote_decode"):
        return KvExportRequest()
    return NoKvTransfer()


def _parse_import(params: Mapping[str, Any]) -> KvImportRequest:
    """Parse the parameters of a decode leg.

    Without all four source fields the real engine never starts the pull.
    """
    complete = all(field in params for field in _SOURCE_FIELDS)
    return KvImportRequest(
        engine_id=str(params.get("remote_engine_id")),
        request_id=str(params["remote_request_id"]) if complete else None,
        block_ids=_parse_block_ids(params.get("remote_block_ids")),
        host=str(params.get("remote_host")),
        port=_parse_port(params.get("remote_port")),
    )


def _parse_block_ids(groups: object) -> tuple[int, ...] | None:
    """Return the blocks of the one KV cache group; None for input that fails the real engine's assertions."""
    if not isinstance(groups, list) or len(groups) != 1 or not isinstance(groups[0], list) or not groups[0]:
        return None
    ids = groups[0]
    return tuple(ids) if all(type(item) is int and item >= 0 for item in ids) else None


def _parse_port(value: object) -> int:
    """Return a usable port, or 0, on which no engine listens."""
    return value if type(value) is int and 0 < value < 65536 else 0


def build_kv_transfer_params(
    export: ExportedKv, *, engine_id: str, host: str, port: int, tensor_parallel: int, cached_tokens: int
) -> dict[str, Any]:
    """Build the parameters that a prefill leg returns: all that the decode instance needs to pull the
    blocks.
    """
    return {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [list(export.block_ids)],
        "remote_engine_id": engine_id,
        "remote_request_id": export.request_id,
        "remote_host": host,
        "remote_port": port,
        "tp_size": tensor_parallel,
        "dcp_size": 1,
        "pp_size": 1,
        "remote_num_tokens": export.tokens,
        "remote_blocks_expiry_time": None,
        "transfer_mode": "pull",
        CACHED_TOKENS_KEY: cached_tokens,
    }
