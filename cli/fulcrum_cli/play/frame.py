"""One picture of a run: plain values, so that the view can be drawn from recorded or made-up ones."""

from dataclasses import dataclass, field

from fulcrum_cli.play.recorder import HistoryCell
from fulcrum_core.values import Phase, Role, Slo
from fulcrum_simulator.client import Latencies


@dataclass(frozen=True, slots=True)
class InstanceRow:
    """One instance now, and its band: one cell a second, oldest first; `flip_marks` are the cells with a
    flip."""

    name: str
    role: Role | None
    phase: Phase
    role_history: tuple[HistoryCell, ...]
    flip_marks: frozenset[int] = frozenset()
    prefill_queued_s: float = 0.0
    decode_tokens: int = 0
    decode_legs: int = 0
    kv_usage: float | None = None
    restarts: int = 0
    missed_probes: int = 0


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Requests so far."""

    offered: int = 0
    ok: int = 0
    failed: int = 0
    broken: int = 0
    wrong: int = 0
    in_flight: int = 0


@dataclass(frozen=True, slots=True)
class DecisionLine:
    """A flip, or a word of the autoscaler, at a second of the run."""

    at_s: float
    text: str
    to: Role | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """All that the view shows. Times count from the load's start; shares 0 to 1; None: nothing is known."""

    service: str
    model: str
    endpoint: str
    mode: str
    seed: int
    elapsed_s: float
    duration_s: float | None
    load: str
    load_phase: str
    rate_rps: float | None
    slo: Slo
    instances: tuple[InstanceRow, ...]
    selected: int = 0
    counts: RequestCounts = field(default_factory=RequestCounts)
    recent: Latencies = field(default_factory=lambda: Latencies(None, None, None, None))
    attainment: float | None = None
    attainment_recent: float | None = None
    desired_split: tuple[int, int] = (0, 0)
    actual_split: tuple[int, int] = (0, 0)
    flips_to_prefill: int = 0
    flips_to_decode: int = 0
    ack_p99_ms: float | None = None
    lateness_p99_ms: float | None = None
    decisions: tuple[DecisionLine, ...] = ()
    notice: str = ""
    unavailable: tuple[str, ...] = ()
    """Parts of the service that do not answer: what they tell is old."""

    @property
    def prefill_queued_s(self) -> float:
        """Predicted prefill work that waits or runs, over all instances."""
        return sum(row.prefill_queued_s for row in self.instances)

    @property
    def decode_tokens(self) -> int:
        """KV tokens of all requests in decode."""
        return sum(row.decode_tokens for row in self.instances)

    @property
    def decode_legs(self) -> int:
        """Requests in decode."""
        return sum(row.decode_legs for row in self.instances)
