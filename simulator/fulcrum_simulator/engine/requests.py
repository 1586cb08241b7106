"""What is asked of a simulated engine: a request, its part in a hand-off, the hashes of its blocks."""

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class NoKvTransfer:
    """Prefill and decode both happen here."""


@dataclass(frozen=True, slots=True)
class KvExportRequest:
    """Only the prompt is computed here (`do_remote_decode`): its blocks stay pinned for a peer to pull."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvImportRequest:
    """A peer computed the prompt (`do_remote_prefill`): pull its blocks, then decode.

    The fields are the peer's answer as it came. As on the real engine, an answer without `block_ids` (None)
    or with fewer blocks than the prompt needs kills this engine, and one without `request_id` (None) hangs
    until the client gives up, which then kills it.
    """

    engine_id: str
    request_id: str | None
    block_ids: tuple[int, ...] | None
    host: str = ""
    port: int = 0


KvTransfer = NoKvTransfer | KvExportRequest | KvImportRequest


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRequest:
    """One request as the scheduler sees it.

    `arrival_s` is when it reached this engine; it orders the queue and starts the latencies. `digest`
    stands for the whole prompt, `block_hashes` for each of its full blocks (see `block_hashes`); without
    hashes nothing is cached. Lower `priority` runs earlier. Output ends with reason "length" after
    `max_tokens`, or with "stop" after `stop_after` tokens where that comes first.
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


def block_hashes(prompt: bytes, *, block_bytes: int, salt: bytes = b"") -> tuple[bytes, ...]:
    """Chained hashes of the full blocks of `prompt`: equal at i only if salt and all up to block i are equal.

    `block_bytes` is the block size in bytes of prompt: tokens a block × bytes a token.
    """
    hashes = []
    parent = hashlib.blake2b(salt, digest_size=16).digest()
    for start in range(0, len(prompt) - block_bytes + 1, block_bytes):
        parent = hashlib.blake2b(prompt[start : start + block_bytes], digest_size=16, key=parent).digest()
        hashes.append(parent)
    return tuple(hashes)


def pulled_digest(blocks: tuple[bytes, ...], *, own_digest: bytes) -> bytes:
    """The prompt that a taker with the prompt `own_digest` continues after reading blocks that hold these
    digests.

    One block of another prompt is enough to make the text another's, as it would be on a real engine.
    """
    return next((digest for digest in blocks if digest != own_digest), own_digest)
