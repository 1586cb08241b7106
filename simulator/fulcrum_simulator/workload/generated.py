"""Generated workloads: bursty code completion, steady chat, and traffic that alternates between two mixes.

A workload is a sequence of phases, each with a rate, a burstiness and distributions of the two lengths. The
same seed draws the same requests. The parameters are from published traces:

* code completion: Azure LLM inference trace 2023, code (Patel et al., "Splitwise", ISCA 2024);
* chat: one day of a large general model (Xiang et al., "ServeGen", arXiv 2505.09999, `m-large`, day 4);
* alternating mixes: the two clients of that day whose activity moves its ratio from 15 input tokens per
  output token to 1.4: on average 2,400 tokens in and 112 out, and 281 in and 430 out.

The recorded rates occupy a rack of accelerators; `TrafficMix.scaled` shortens the lengths for slower engines.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

from fulcrum_simulator.workload.requests import WorkloadRequest


@dataclass(frozen=True, slots=True)
class LengthDistribution:
    """Log-normal token counts: `median` · e^(`sigma` · z); a length above `max_tokens` is drawn again."""

    median: float
    sigma: float
    max_tokens: int

    @classmethod
    def with_mean(cls, mean: float, *, sigma: float, max_tokens: int) -> "LengthDistribution":
        """Return the distribution with this mean: median = mean / e^(sigma²/2), before the cut at
        `max_tokens`.
        """
        return cls(mean / math.exp(sigma**2 / 2), sigma, max_tokens)

    def scaled(self, factor: float) -> "LengthDistribution":
        """Return the same shape with every length multiplied by `factor`."""
        return LengthDistribution(self.median * factor, self.sigma, max(1, round(self.max_tokens * factor)))

    def at_most(self, max_tokens: int) -> "LengthDistribution":
        """Return the same shape with longer lengths drawn again."""
        return LengthDistribution(self.median, self.sigma, min(self.max_tokens, max_tokens))

    def draw(self, rng: random.Random) -> int:
        """Draw one length, at least 1."""
        while True:
            tokens = max(1, round(self.median * math.exp(self.sigma * rng.gauss(0.0, 1.0))))
            if tokens <= self.max_tokens:
                return tokens


@dataclass(frozen=True, slots=True)
class TrafficMix:
    """A kind of traffic.

    Input and output lengths are drawn independently (their recorded correlation is near 0).
    """

    name: str
    input: LengthDistribution
    output: LengthDistribution

    def scaled(self, *, input: float = 1.0, output: float = 1.0) -> "TrafficMix":  # noqa: A002 - the field's own name
        """Return the same kind of traffic with its lengths multiplied."""
        return TrafficMix(self.name, self.input.scaled(input), self.output.scaled(output))


# sigma = sqrt(2·ln(mean/median)); medians, means and maxima of the traces: in 1,469/2,048, out 13/28.
CODE = TrafficMix(
    "code completion", LengthDistribution(1469, 0.815, 7437), LengthDistribution(13, 1.24, 1899)
)
# in 449/743, out 137/241.
CHAT = TrafficMix("chat", LengthDistribution(449, 1.0, 24229), LengthDistribution(137, 1.06, 8192))
# Only the means of these two clients are published; sigma and the maxima are our choice.
PREFILL_HEAVY = TrafficMix(
    "prefill-heavy",
    LengthDistribution.with_mean(2400, sigma=0.5, max_tokens=8192),
    LengthDistribution.with_mean(112, sigma=0.5, max_tokens=1024),
)
DECODE_HEAVY = TrafficMix(
    "decode-heavy",
    LengthDistribution.with_mean(281, sigma=0.5, max_tokens=2048),
    LengthDistribution.with_mean(430, sigma=0.5, max_tokens=2048),
)


@dataclass(frozen=True, slots=True)
class WorkloadPhase:
    """A span of time with one mean rate and one mix.

    `gap_cv`: standard deviation over mean of the gaps between arrivals.
    """

    name: str
    start_s: float
    end_s: float
    rate_rps: float
    mix: TrafficMix
    gap_cv: float = 1.0

    def requests(self, rng: random.Random) -> Iterator[WorkloadRequest]:
        """Draw the arrivals of the phase: a renewal process with Gamma gaps (shape 1/cv²)."""
        if self.rate_rps <= 0:
            return
        shape = 1.0 / self.gap_cv**2
        at_s = self.start_s + rng.gammavariate(shape, 1.0 / (shape * self.rate_rps))
        while at_s < self.end_s:
            yield WorkloadRequest(at_s, self.mix.input.draw(rng), self.mix.output.draw(rng))
            at_s += rng.gammavariate(shape, 1.0 / (shape * self.rate_rps))


@dataclass(frozen=True, slots=True)
class GeneratedWorkload:
    """A workload drawn from phases. Every iteration yields the same requests."""

    phases: tuple[WorkloadPhase, ...]
    seed: int

    def __iter__(self) -> Iterator[WorkloadRequest]:
        rng = random.Random(self.seed)
        for phase in self.phases:
            yield from phase.requests(rng)

    def phase_at(self, at_s: float) -> WorkloadPhase | None:
        """Return the phase at time `at_s`; None after the end."""
        return next((phase for phase in self.phases if phase.start_s <= at_s < phase.end_s), None)


def generate_steady(
    *, rate_rps: float, duration_s: float, seed: int, mix: TrafficMix = CHAT
) -> GeneratedWorkload:
    """Generate Poisson arrivals of one mix: the ratio of prefill to decode work is constant."""
    return GeneratedWorkload((WorkloadPhase(f"steady {mix.name}", 0.0, duration_s, rate_rps, mix),), seed)


@dataclass(frozen=True, slots=True)
class MixPeriod:
    """One period of an alternating workload: its mix, rate and duration."""

    mix: TrafficMix
    rate_rps: float
    duration_s: float


def generate_moving(*, periods: tuple[MixPeriod, ...], duration_s: float, seed: int) -> GeneratedWorkload:
    """Generate Poisson arrivals whose mix cycles through `periods`, which moves the ratio of prefill to
    decode work.
    """
    phases: list[WorkloadPhase] = []
    start_s = 0.0
    while start_s < duration_s:
        period = periods[len(phases) % len(periods)]
        end_s = min(start_s + period.duration_s, duration_s)
        phases.append(WorkloadPhase(period.mix.name, start_s, end_s, period.rate_rps, period.mix))
        start_s = end_s
    return GeneratedWorkload(tuple(phases), seed)


BURST_S = (60.0, 240.0)  # Azure code: bursts of one to four minutes
# 217 s is the longest silence of the trace, to which longer ones are cut. About a third of the time is empty.
SILENCE_MEAN_S, SILENCE_MAX_S = 80.0, 217.0
BURST_GAP_CV = 2.0  # within a burst; 4.5 over the whole trace with gaps above 20 s left out


def generate_bursty(
    *, rate_rps: float, duration_s: float, seed: int, mix: TrafficMix = CODE, compression: float = 1.0
) -> GeneratedWorkload:
    """Generate bursts of uneven arrivals with silences between them; `rate_rps` is the mean over both.

    `compression` shortens bursts and silences, so that a short run contains several.
    """
    rng = random.Random(seed)
    burst_s = sum(BURST_S) / 2
    silence_s = SILENCE_MEAN_S * (1 - math.exp(-SILENCE_MAX_S / SILENCE_MEAN_S))  # the mean after the cut
    burst_rate_rps = rate_rps * (burst_s + silence_s) / burst_s
    phases: list[WorkloadPhase] = []
    start_s = 0.0
    while start_s < duration_s:
        for name, phase_s, rate_rps_in_phase in (
            ("burst", rng.uniform(*BURST_S), burst_rate_rps),
            ("silence", min(SILENCE_MAX_S, rng.expovariate(1.0 / SILENCE_MEAN_S)), 0.0),
        ):
            end_s = min(start_s + phase_s / compression, duration_s)
            phases.append(WorkloadPhase(name, start_s, end_s, rate_rps_in_phase, mix, BURST_GAP_CV))
            start_s = end_s
    return GeneratedWorkload(tuple(phases), seed)
