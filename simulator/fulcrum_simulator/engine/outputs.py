"""Values that the engine model returns to its caller.

`Step` and `DecodeRun` are steps to wait for, `KvFetch` is a KV transfer to carry out. `EngineEvent` is what a
finished step did to a request: an output token, a preemption or the end, with the KV that a prefill leg
exports. `EngineDead` is raised where the real engine would crash. `server.runner` and `fleet.stepped_engine`
act on them.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from fulcrum_simulator.engine.requests import KvImportRequest


class EngineDead(Exception):
    """The engine's process would have ended: input violated an assertion of the real engine."""


class FinishReason(StrEnum):
    """Why a request ended; the values are those of vLLM's `finish_reason`."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportedKv:
    """The result of a prefill leg: blocks pinned for a decode instance until `expires_s`, unless the lease is
    extended.
    """

    request_id: str
    block_ids: tuple[int, ...]
    tokens: int
    expires_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KvFetch:
    """A KV transfer to start now: the scheduler admitted an import and allocated blocks for it.

    `remote_block_ids` lists only the blocks that the own prefix cache lacks, `kv_bytes` in all. The caller
    pulls them and reports `complete_kv_fetch` or `fail_kv_fetch`; until then it sends the prefill instance a
    heartbeat every `Engine.heartbeat_interval_s`.
    """

    request_id: str
    source: KvImportRequest
    remote_block_ids: tuple[int, ...]
    tokens: int
    kv_bytes: int


class Step(NamedTuple):
    """A step that has started. Call `finish_step` when `duration_s` seconds have passed."""

    duration_s: float
    prefill_tokens: int
    decodes: int
    context_tokens: int


class DecodeRun(NamedTuple):
    """The step under way and identical ones after it: each gives one more token to the same requests."""

    ends_s: list[float]
    request_ids: list[str]


class OutputToken(NamedTuple):
    """The `index`-th output token (from 0) of a request; `digest` is the prompt whose KV cache it
    continues.
    """

    request_id: str
    index: int  # type: ignore[assignment]  # replaces tuple.index, which is not used on tokens
    digest: bytes


class Preempted(NamedTuple):
    """The request lost its blocks and is queued again; its output continues where it stopped."""

    request_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """The end of a request, with the figures for its usage and the engine's histograms.

    computed + cached + external tokens = prompt tokens, or all 0 if the request ended during its prefill.
    Times are in seconds, and 0 for stages that were not reached. `queue_s` lasts from arrival to first
    scheduling (a KV fetch counts as queueing), `prefill_s` from there to the first token, `decode_s` from
    there to the last; `tpot_s` is decode_s per token after the first, and 0 for a single token.
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
        """Seconds from first scheduling to the last token."""
        return self.prefill_s + self.decode_s


EngineEvent = OutputToken | Preempted | Finished
