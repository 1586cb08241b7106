"""The frame: plain values of a run at one time. `frame_builder` makes it, `view` draws it.

It holds no logic but sums over its instances.
"""

from dataclasses import dataclass, field

from fulcrum_cli.play.recorder import HistoryCell
from fulcrum_core.values import Phase, Role, Slo
from fulcrum_simulator.client import Latencies


@dataclass(frozen=True, slots=True)
class InstanceRow:
    """One instance now, and its role history: one cell a second, oldest first.

    `flip_marks` are the indices of the cells with a flip.
    """

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
    """Requests since the start of the load."""

    offered: int = 0
    ok: int = 0
    failed: int = 0
    broken: int = 0
    wrong: int = 0
    in_flight: int = 0
    refused: int = 0


@dataclass(frozen=True, slots=True)
class TierRow:
    """Requests of one tier since the start of the load."""

    name: str
    offered: int
    refused: int
    attainment: float | None
    attainment_recent: float | None


@dataclass(frozen=True, slots=True)
class DecisionLine:
    """A flip, or a decision of the autoscaler that changed nothing, with its time in the run."""

    at_s: float
    text: str
    to: Role | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """All values that the view shows. Times count from the start of the load; shares are 0 to 1.

    None means unknown.
    """

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
    has_tiers: bool = False
    """Whether the service has the tiers of the load `tiers`."""
    tiers: tuple[TierRow, ...] = ()
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
    """Components that do not respond, with the time since; their values are outdated."""

    @property
    def prefill_queued_s(self) -> float:
        """Predicted seconds of queued and running prefill work, over all instances."""
        return sum(row.prefill_queued_s for row in self.instances)

    @property
    def decode_tokens(self) -> int:
        """KV tokens of all requests in decode, over all instances."""
        return sum(row.decode_tokens for row in self.instances)

    @property
    def decode_legs(self) -> int:
        """Requests in decode, over all instances."""
        return sum(row.decode_legs for row in self.instances)
