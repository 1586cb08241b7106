"""A request's life inside the engine, from its submission to its end."""

from dataclasses import dataclass, field
from enum import Enum, auto

from fulcrum_simulator.engine.blocks import Prompt
from fulcrum_simulator.engine.events import Finished, FinishReason, KvExport
from fulcrum_simulator.engine.requests import EngineRequest, ImportKv

Order = tuple[int, float, int]  # priority, arrival, sequence


class RunState(Enum):
    """WAITING → (FETCHING → READY →) PREFILLING → DECODING → ENDED; preemption leads back."""

    WAITING = auto()
    FETCHING = auto()  # holds blocks, its KV is on the way
    READY = auto()  # holds blocks, the fetch ended; runs at the next step with room
    PREFILLING = auto()
    DECODING = auto()
    ENDED = auto()


@dataclass(slots=True, eq=False)
class Run:
    """Mutable state of one request.

    `computed` tokens have their KV in `blocks`; the next token can come when that is prompt + output.
    `digest` is the prompt whose KV is really held.
    """

    request: EngineRequest
    sequence: int
    id: str = field(init=False)
    prompt: Prompt = field(init=False)
    digest: bytes = field(init=False)
    limit: int = field(init=False)
    fetch: ImportKv | None = field(init=False)  # still to be started
    state: RunState = RunState.WAITING
    computed: int = 0
    output: int = 0
    blocks: list[int] = field(default_factory=list)
    room: int = 0  # tokens that `blocks` can hold
    cached: int = 0
    external: int = 0
    preemptions: int = 0
    scheduled_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float = 0.0

    def __post_init__(self) -> None:
        request = self.request
        self.id, self.digest = request.id, request.digest
        self.prompt = Prompt(request.digest, request.block_hashes)
        self.limit = min(request.max_tokens, request.stop_after or request.max_tokens)
        self.fetch = request.handoff if isinstance(request.handoff, ImportKv) else None

    @property
    def order(self) -> Order:
        """Earlier is served first, and preempted last."""
        return (self.request.priority, self.request.arrival_s, self.sequence)

    @property
    def target(self) -> int:
        """Tokens whose KV the next output token needs."""
        return self.request.prompt_tokens + self.output

    @property
    def end_reason(self) -> FinishReason:
        """Why it ends at its limit."""
        return FinishReason.LENGTH if self.limit == self.request.max_tokens else FinishReason.STOP

    def ended(self, reason: FinishReason, export: KvExport | None, now_s: float) -> Finished:
        """The report of its end."""
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
            output_tokens=self.output,
            max_tokens=self.request.max_tokens,
            computed_tokens=prompt_tokens - self.cached - self.external if started else 0,
            cached_tokens=self.cached if started else 0,
            external_tokens=self.external if started else 0,
            preemptions=self.preemptions,
            e2e_s=now_s - self.request.arrival_s,
            queue_s=scheduled_s - self.request.arrival_s,
            prefill_s=first_s - scheduled_s,
            decode_s=decode_s,
            tpot_s=decode_s / (self.output - 1) if self.output > 1 else 0.0,
        )
