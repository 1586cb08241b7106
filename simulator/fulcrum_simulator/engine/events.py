"""What a simulated engine reports: steps, tokens, ends of requests, KV cache to fetch or to hand over."""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from fulcrum_simulator.engine.requests import KvImportRequest


class EngineDead(Exception):
    """The engine's process would be gone: an assertion of the real engine failed on what it was sent."""


class FinishReason(StrEnum):
    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedKv:
    """Blocks pinned for a peer until `expires_s`, unless extended: what a prefill leg hands over."""

    request_id: str
    block_ids: tuple[int, ...]
    tokens: int
    expires_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFetch:
    """The scheduler took an import and holds blocks for it: pull `remote_block_ids` (`kv_bytes` in all) now.

    Only blocks that the engine's own prefix cache lacks are listed. Answer with `complete_kv_fetch` or
    `fail_kv_fetch`; until then send the peer a heartbeat every `Engine.heartbeat_interval_s`.
    """

    request_id: str
    source: KvImportRequest
    remote_block_ids: tuple[int, ...]
    tokens: int
    kv_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """A step under way: it ends `duration_s` after its start; call `finish_step` then."""

    duration_s: float
    prefill_tokens: int
    decodes: int
    context_tokens: int


class OutputToken(NamedTuple):
    """The `index`-th output token (from 0) of a request; `digest` is the prompt whose KV it follows from."""

    request_id: str
    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody asks of a token
    digest: bytes


class Preempted(NamedTuple):
    """The request lost its blocks and waits again; its output goes on later where it stopped."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """A request's end, once per request, with what its usage and the engine's histograms need.

    computed + cached + external tokens = prompt tokens, or all 0 if it ended before its prompt was done.
    Times in seconds; 0 where the request did not get that far. `queue_s` runs from arrival to first
    scheduling (a KV fetch counts as queueing), `prefill_s` on to the first token, `decode_s` on to the
    last; `tpot_s` is decode_s per token after the first and 0 for a single token.
    """

    request_id: str
    reason: FinishReason
    export: ExportedKv | None
    prompt_tokens: int
    output_tokens: int
    max_tokens: int
    computed_tokens: int
    cached_tokens: int
    external_tokens: int
    preemptions: int
    e2e_s: float
    queue_s: float
    prefill_s: float
    decode_s: float
    tpot_s: float

    @property
    def inference_s(self) -> float:
        """From first scheduling to the last token."""
        return self.prefill_s + self.decode_s


Event = OutputToken | Preempted | Finished
