"""The input of the engine model: a request, its part in a KV transfer, and the hashes of its prompt blocks.

The engine server makes it from a client's body, the simulated fleet from its workload; `engine` runs it.
`request_run` has what changes meanwhile.
"""

import hashlib
from dataclasses import dataclass

from fulcrum_core.errors import InvalidInput


@dataclass(frozen=True, slots=True)
class NoKvTransfer:
    """The request is prefilled and decoded on this engine."""


@dataclass(frozen=True, slots=True)
class KvExportRequest:
    """A prefill leg (`do_remote_decode`): only the prompt is computed, and its blocks are pinned for a decode
    instance.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class KvImportRequest:
    """A decode leg (`do_remote_prefill`): the prompt's blocks are pulled from the prefill instance, then
    decoded.

    The fields are the KV transfer parameters as received. As on the real engine, parameters without
    `block_ids` (None) or with fewer blocks than the prompt needs kill the engine. Without `request_id` (None)
    the request hangs, and the engine dies when the client disconnects.
    """

    engine_id: str
    request_id: str | None
    block_ids: tuple[int, ...] | None
    host: str = ""
    port: int = 0


KvTransfer = NoKvTransfer | KvExportRequest | KvImportRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """A request as the scheduler receives it.

    `arrival_s` is its arrival at this engine; it orders the queue, and latencies count from it. `digest`
    identifies the whole prompt, `block_hashes` each of its full blocks; without hashes nothing is cached. A
    lower `priority` runs earlier. Output ends with reason "length" after `max_tokens` tokens, or with "stop"
    after `stop_after` if that is lower.
    """

    id: str
    arrival_s: float
    prompt_tokens: int
    max_tokens: int
    digest: bytes
    block_hashes: tuple[bytes, ...] = ()
    priority: int = 0
    kv_transfer: KvTransfer = NoKvTransfer()
    stop_after: int | None = None


def check_runnable(request: EngineRequest, *, capacity_tokens: int) -> None:
    """Check that an engine with a KV cache of `capacity_tokens` can run the request.

    Raises:
        InvalidInput: if the request is empty or too long for the KV cache.
    """
    limits = {"prompt_tokens": request.prompt_tokens, "max_tokens": request.max_tokens}
    if request.stop_after is not None:
        limits["stop_after"] = request.stop_after
    for path, tokens in limits.items():
        if tokens < 1:
            raise InvalidInput(path, tokens, "must be at least 1")
    if request.prompt_tokens + request.max_tokens > capacity_tokens:
        rule = f"and max_tokens ({request.max_tokens}) exceed the KV cache of {capacity_tokens} tokens"
        raise InvalidInput("prompt_tokens", request.prompt_tokens, rule)


def block_hashes(prompt: bytes, *, block_bytes: int, salt: bytes = b"") -> tuple[bytes, ...]:
    """Return the chained hashes of the prompt's full blocks; equal at i only if salt and all blocks up to i
    are equal.

    `block_bytes` is the block size in bytes of prompt: tokens per block × bytes per token.
    """
    hashes = []
    parent = hashlib.blake2b(salt, digest_size=16).digest()
    for start in range(0, len(prompt) - block_bytes + 1, block_bytes):
        parent = hashlib.blake2b(prompt[start : start + block_bytes], digest_size=16, key=parent).digest()
        hashes.append(parent)
    return tuple(hashes)


def pulled_digest(blocks: tuple[bytes, ...], *, own_digest: bytes) -> bytes:
    """Return the digest of the prompt that the output continues after these blocks were pulled.

    `blocks` are the digests read from the blocks. One block of another prompt is enough to change the text,
    as on a real engine.
    """
    return next((digest for digest in blocks if digest != own_digest), own_digest)
