"""Who may hand KV blocks to whom."""

from fulcrum_core.decisions import Verdict
from fulcrum_core.values import Identity

KV_LEASE_S = 30.0
"""For how long an engine keeps the blocks of a hand-off that nobody fetches (vLLM's kv_lease_duration)."""

_EQUAL = ("model", "engine", "kv_dtype", "block_size")


def can_transfer(prefill: Identity, decode: Identity) -> Verdict:
    """Whether `decode` can read the KV blocks that `prefill` wrote.

    Engines refuse a handshake unless model spelling, version, KV data type and block size agree. The
    tensor-parallel size may differ in one direction only: decode's must not be the smaller one.
    """
    for name in _EQUAL:
        ours, theirs = getattr(prefill, name), getattr(decode, name)
        if ours != theirs:
            what = name.replace("_", " ")
            return Verdict(False, f"{what} differs: prefill has {ours}, decode has {theirs}")
    if decode.tensor_parallel < prefill.tensor_parallel:
        return Verdict(
            False,
            f"decode's tensor-parallel size ({decode.tensor_parallel}) is smaller than "
            f"prefill's ({prefill.tensor_parallel})",
        )
    return Verdict(True, "same model, engine, KV data type and block size")
