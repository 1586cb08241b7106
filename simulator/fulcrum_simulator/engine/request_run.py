"""The mutable state of one request inside the engine, from submission to its end. Used by `engine` only."""

from dataclasses import dataclass, field
from enum import Enum, auto

from fulcrum_simulator.engine.blocks import PromptKey
from fulcrum_simulator.engine.outputs import ExportedKv, Finished, FinishReason
from fulcrum_simulator.engine.requests import EngineRequest, KvImportRequest

QueueOrder = tuple[int, float, int]  # priority, arrival, sequence


class RequestRunState(Enum):
    """WAITING → (FETCHING → READY →) PREFILLING → DECODING → ENDED; a preemption leads back to WAITING."""

    WAITING = auto()
    FETCHING = auto()  # has blocks; its KV transfer is under way
    READY = auto()  # has blocks; the fetch ended; runs at the next step with room
    PREFILLING = auto()
    DECODING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class RequestRun:
    """One request inside the engine.

    The KV of `computed_tokens` tokens is in `blocks`; the next output token needs that of all prompt and
    output tokens. `digest` is the prompt whose KV the blocks actually hold.
    """

    request: EngineRequest
    sequence: int
    id: str = field(init=False)
    prompt: PromptKey = field(init=False)
    digest: bytes = field(init=False)
    output_limit: int = field(init=False)
    pending_import: KvImportRequest | None = field(init=False)  # None once its fetch has started
    state: RequestRunState = RequestRunState.WAITING
    computed_tokens: int = 0
    output_tokens: int = 0
    blocks: list[int] = field(default_factory=list)
    room_tokens: int = 0  # tokens that `blocks` can hold
    cached_tokens: int = 0
    external_tokens: int = 0
    preemptions: int = 0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0

    def __post_init__(self) -> None:
        request = self.request
        self.id, self.digest = request.id, request.digest
        self.prompt = PromptKey(request.digest, request.block_hashes)
        self.output_limit = min(request.max_tokens, request.stop_after or request.max_tokens)
        self.pending_import = (
            request.kv_transfer if isinstance(request.kv_transfer, KvImportRequest) else None
        )

    @property
    def order(self) -> QueueOrder:
        """Sort key of the queue; the lowest key is served first and preempted last."""
        return (self.request.priority, self.request.arrival_s, self.sequence)

    @property
    def tokens_needed(self) -> int:
        """Tokens whose KV the next output token needs."""
        return self.request.prompt_tokens + self.output_tokens

    @property
    def end_reason(self) -> FinishReason:
        """Finish reason at the output limit."""
        return FinishReason.LENGTH if self.output_limit == self.request.max_tokens else FinishReason.STOP

    def build_finished(self, reason: FinishReason, export: ExportedKv | None, now_s: float) -> Finished:
        """Build the report of the end of this request."""
        started = self.first_token_s is not None
        scheduled_s = now_s if self.scheduled_s is None else self.scheduled_s
        first_s = self.first_token_s if self.first_token_s is not None else scheduled_s
        decode_s = self.last_token_s - first_s if started else 0.0
        prompt_tokens = self.request.prompt_tokens
        return Finished(
            request_id=self.id,
            reason=reason,
            export=export,
            prompt_tokens=prompt_tokens,
            output_tokens=self.output_tokens,
            max_tokens=self.request.max_tokens,
            computed_tokens=prompt_tokens - self.cached_tokens - self.external_tokens if started else 0,
            cached_tokens=self.cached_tokens if started else 0,
            external_tokens=self.external_tokens if started else 0,
            preemptions=self.preemptions,
            e2e_s=now_s - self.request.arrival_s,
            queue_s=scheduled_s - self.request.arrival_s,
            prefill_s=first_s - scheduled_s,
            decode_s=decode_s,
            tpot_s=decode_s / (self.output_tokens - 1) if self.output_tokens > 1 else 0.0,
        )
