"""What was measured: one value for each point of a curve. Times are those of the client, in seconds.

`measure` makes the values and `fit` reads them.
"""

from dataclasses import dataclass

from fulcrum_core.formatting import format_count


@dataclass(frozen=True, slots=True)
class _OneLength:
    """A point that is named by its prompt tokens."""

    tokens: int
    seconds: float

    @property
    def name(self) -> str:
        """The point as `fulcrum profile` prints it."""
        return format_count(self.tokens, "token")


@dataclass(frozen=True, slots=True)
class PrefillMeasurement(_OneLength):
    """Time from sending a prompt of `tokens` to an idle engine to its first token."""


@dataclass(frozen=True, slots=True)
class DecodeMeasurement:
    """One step that only decodes `batch` requests, which have `context_tokens` tokens of KV together."""

    batch: int
    context_tokens: float
    seconds: float

    @property
    def name(self) -> str:
        """The point as `fulcrum profile` prints it."""
        tokens = format_count(round(self.context_tokens), "token")
        return f"{format_count(self.batch, 'request')}, {tokens} of KV"


@dataclass(frozen=True, slots=True)
class MixedMeasurement(_OneLength):
    """One step that computes a prompt of `tokens` and decodes `batch` requests.

    These have `context_tokens` tokens of KV together. `seconds` is the mean step without the prompt plus the
    time that the prompt adds: to several steps, if one has no room for it.
    """

    batch: int
    context_tokens: float


@dataclass(frozen=True, slots=True)
class TransferMeasurement(_OneLength):
    """Time from sending a decode leg whose KV of `tokens` is on another engine to its first token."""


@dataclass(frozen=True, slots=True)
class FetchMeasurement(_OneLength):
    """Mean time by which fetching the KV of `tokens`, and the first step of its request, delay a batch.

    Noise may make it negative.
    """


@dataclass(frozen=True, slots=True)
class MeasuredCurves:
    """All that was measured.

    `first_transfer` was before any other contact of the two engines; None if only one was measured.
    `transfers` were to an idle engine, `fetches` to one that decoded.
    """

    prefill: list[PrefillMeasurement]
    decode: list[DecodeMeasurement]
    mixed: list[MixedMeasurement]
    first_transfer: TransferMeasurement | None
    transfers: list[TransferMeasurement]
    fetches: list[FetchMeasurement]
