"""Counters, gauges and samples of one engine model, from which `server.metrics` renders vLLM's metrics.

Samples are kept in lists until the caller takes them. `engine` counts; nothing is decided from the counts.
"""

from dataclasses import dataclass, field

from fulcrum_simulator.engine.outputs import FinishReason


@dataclass(slots=True)
class Samples:
    """Values since the last `take_samples`, in order. Latencies in seconds; `iteration_tokens` per step."""

    ttft_s: list[float] = field(default_factory=list)
    itl_s: list[float] = field(default_factory=list)
    iteration_tokens: list[int] = field(default_factory=list)


def _no_finishes() -> dict[FinishReason, int]:
    return dict.fromkeys(FinishReason, 0)


@dataclass(slots=True)
class EngineStats:
    """Counters since the engine's start.

    `prefix_*`, `external_*`, `prompt_*` and `generation_*` count tokens. `prefix_*` is the engine's own
    cache, `external_*` what KV transfers brought. A prompt's tokens are counted by source at its first output
    token; a prompt computed again after a preemption is not counted again.
    """

    prefix_queries: int = 0
    prefix_hits: int = 0
    external_queries: int = 0
    external_hits: int = 0
    prompt_local_compute: int = 0
    prompt_local_cache_hit: int = 0
    prompt_external: int = 0
    generation_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    finished: dict[FinishReason, int] = field(default_factory=_no_finishes)
    expired_leases: int = 0
    notifications_after_expiry: int = 0
    failed_transfers: int = 0
    samples: Samples = field(default_factory=Samples)

    @property
    def prompt_tokens(self) -> int:
        """All prompt tokens, pulled ones included."""
        return self.prompt_local_compute + self.prompt_local_cache_hit + self.prompt_external

    def record_steps(self, count: int, *, tokens: int) -> None:
        """Count steps of `tokens` tokens each."""
        self.steps += count
        self.samples.iteration_tokens.extend([tokens] * count)

    def take_samples(self) -> Samples:
        """Return the samples so far and start new lists."""
        taken, self.samples = self.samples, Samples()
        return taken


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineGauges:
    """Current queue lengths and KV cache usage.

    `waiting_capacity` requests wait for blocks or a place in the batch, `waiting_deferred` requests for their
    KV fetch. The `fetch_*` gauges split the imports by stage. `kv_usage` (0 to 1) includes blocks pinned by
    leases.
    """

    running: int
    waiting_capacity: int
    waiting_deferred: int
    fetch_waiting_to_start: int
    fetch_in_progress: int
    fetch_completed_waiting: int
    kv_usage: float
    leases: int

    @property
    def waiting(self) -> int:
        """All requests that do not run yet."""
        return self.waiting_capacity + self.waiting_deferred
