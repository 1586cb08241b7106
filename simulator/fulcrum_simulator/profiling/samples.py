"""What was measured: one value for each point of a curve. Times are those of the client, in seconds.

`measure` makes the values and `fit` reads them.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefillMeasurement:
    """Time from sending a prompt of `tokens` to an idle engine to its first token."""

    tokens: int
    seconds: float

    @property
    def name(self) -> str:
        """Names the point of the curve."""
        return f"{self.tokens} tokens"


@dataclass(frozen=True, slots=True)
class DecodeMeasurement:
    """One step that only decodes `batch` requests, which have `context_tokens` tokens of KV together."""

    batch: int
    context_tokens: float
    seconds: float

    @property
    def name(self) -> str:
        """Names the point of the grid."""
        return f"{self.batch} requests, {self.context_tokens:.0f} tokens of KV"


@dataclass(frozen=True, slots=True)
class MixedMeasurement:
    """How much longer decode steps took together because a prompt of `tokens` was computed in them."""

    tokens: int
    seconds: float

    @property
    def name(self) -> str:
        """Names the point of the curve."""
        return f"{self.tokens} tokens"


@dataclass(frozen=True, slots=True)
class TransferMeasurement:
    """Time from sending a decode leg whose KV of `tokens` is on another engine to its first token."""

    tokens: int
    seconds: float

    @property
    def name(self) -> str:
        """Names the point of the curve."""
        return f"{self.tokens} tokens"
