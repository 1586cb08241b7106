"""Decides which engines can exchange KV blocks, and groups instances by it (compatibility groups).

Router, operator and the rules of the PDAssignment ask, by the identities that the operator has found. No
transfer is tried here.
"""

from collections.abc import Mapping
from functools import lru_cache

from fulcrum_core.formatting import format_count
from fulcrum_core.values import EngineIdentity
from fulcrum_core.verdict import Verdict

_MUST_BE_EQUAL = {
    "model": "model",
    "revision": "model revision",
    "engine": "engine",
    "connector": "connector",
    "dtype": "data type",
    "kv_dtype": "KV data type",
    "attention": "attention back end",
    "block_size": "block size",
    "latent": "latent attention",
}


@lru_cache(maxsize=4096)  # engines are few kinds, and dispatch and planning ask for every pair of them
def can_transfer(prefill: EngineIdentity, decode: EngineIdentity) -> Verdict:
    """Whether `decode` can read the KV blocks that `prefill` wrote.

    Engines refuse a handshake unless model spelling, version, data types, attention back end and block size
    agree. They do not compare the model's revision, so it is compared here. A decode instance can read KV
    only into one pipeline stage.
    """
    for name, description in _MUST_BE_EQUAL.items():
        of_prefill, of_decode = getattr(prefill, name), getattr(decode, name)
        if of_prefill != of_decode:
            values = f"prefill has {_display(of_prefill)}, decode has {_display(of_decode)}"
            return Verdict(False, f"{description} differs: {values}")
    if (reason := _refuse_tensor_parallel(prefill, decode)) is not None:
        return Verdict(False, reason)
    if decode.pipeline_parallel > 1:
        return Verdict(
            False, f"decode has {decode.pipeline_parallel} pipeline stages and reads KV into one only"
        )
    return Verdict(True, "same model, engine, KV data type and block size")


def _refuse_tensor_parallel(prefill: EngineIdentity, decode: EngineIdentity) -> str | None:
    """Why decode's tensor-parallel ranks cannot read the KV of prefill's ranks; None if they can.

    A decode rank reads its heads from one or several prefill ranks. It cannot if prefill has more ranks than
    KV heads, because some ranks then hold copies. Under latent attention every rank holds a copy, and decode
    reads one. LMCache transfers only between ranks of the same number.
    """
    prefill_ranks, decode_ranks = prefill.tensor_parallel, decode.tensor_parallel
    sizes = f"prefill has {format_count(prefill_ranks, 'tensor-parallel rank')}, decode has {decode_ranks}"
    if prefill_ranks == decode_ranks:
        return None
    if decode.connector == "LMCache":
        return f"{sizes}: LMCache transfers KV only between ranks of the same number"
    if max(prefill_ranks, decode_ranks) % min(prefill_ranks, decode_ranks):
        return f"{sizes}: neither divides the other"
    if prefill_ranks > decode_ranks and not decode.latent and 0 < prefill.kv_heads < prefill_ranks:
        return f"{sizes}: of {prefill.kv_heads} KV heads prefill holds copies, which fewer ranks cannot read"
    return None


def _display(value: object) -> object:
    return "none" if value == "" else value


def assign_compatibility_groups(identities: Mapping[str, EngineIdentity | None]) -> dict[str, int]:
    """Number the compatibility groups: instances are in one group if KV can be transferred either way.

    Instances of unknown identity are in group 0, so that nothing is separated by a guess.
    """
    found: list[EngineIdentity] = []
    return {name: _find_group(identities[name], found) for name in sorted(identities)}


def _find_group(identity: EngineIdentity | None, found: list[EngineIdentity]) -> int:
    if identity is None:
        return 0
    for number, other in enumerate(found):
        if can_transfer(identity, other).allowed or can_transfer(other, identity).allowed:
            return number
    found.append(identity)
    return len(found) - 1
