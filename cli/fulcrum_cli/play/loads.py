"""The three shapes of load of `fulcrum play`, sized for eight instances of the `laptop` profile.

One such instance prefills about 3,000 tokens a second, and within 50 ms a token it decodes 15 requests of
335 tokens (300 tokens a second). Lengths are those of the published traces, scaled; rates are chosen here.

* moving: 12 prompts of 1,200 tokens a second need 5 of 8 instances for prefill, at 4 they queue; then 14
  answers of 107 tokens a second need 5 to 6 of 8 for decode, at 4 they miss the TPOT objective.
* steady: 4 and 4 instances are right all the time: inter-token latency is half of its objective, and
  prompts rarely wait.
* bursty: bursts that need nearly all instances for prefill, and pauses.
"""

from collections.abc import Callable
from types import MappingProxyType

from fulcrum_simulator.workload import (
    CHAT,
    CODE,
    DECODE_HEAVY,
    PREFILL_HEAVY,
    GeneratedWorkload,
    MixPeriod,
    TrafficMix,
    generate_bursty,
    generate_moving,
    generate_steady,
)

UNLIMITED_DURATION_S = 24 * 3600.0
"""Duration of a load without --for, in seconds."""

PHASE_DURATION_S = 15.0

CHAT_PROMPT_TOKENS_MAX = 2048
"""Longest prompt of a chat; answers have at most a quarter. The longest recorded ones outlast a short run."""


def _moving(duration_s: float, seed: int) -> GeneratedWorkload:
    periods = (
        MixPeriod(PREFILL_HEAVY.scaled(input=0.5, output=0.12), rate_rps=12.0, duration_s=PHASE_DURATION_S),
        MixPeriod(DECODE_HEAVY.scaled(output=0.25), rate_rps=14.0, duration_s=PHASE_DURATION_S),
    )
    return generate_moving(periods=periods, duration_s=duration_s, seed=seed)


def _steady(duration_s: float, seed: int) -> GeneratedWorkload:
    chat = CHAT.scaled(input=0.6, output=0.2)
    mix = TrafficMix(
        chat.name,
        chat.input.at_most(CHAT_PROMPT_TOKENS_MAX),
        chat.output.at_most(CHAT_PROMPT_TOKENS_MAX // 4),
    )
    return generate_steady(rate_rps=8.0, duration_s=duration_s, seed=seed, mix=mix)


def _bursty(duration_s: float, seed: int) -> GeneratedWorkload:
    return generate_bursty(
        rate_rps=6.0, duration_s=duration_s, seed=seed, mix=CODE.scaled(input=0.5), compression=12.0
    )


LOAD_SHAPES: MappingProxyType[str, Callable[[float, int], GeneratedWorkload]] = MappingProxyType(
    {"moving": _moving, "steady": _steady, "bursty": _bursty}
)


def make_load(shape: str, *, duration_s: float | None, seed: int) -> GeneratedWorkload:
    """Return the load of a shape; without a duration it lasts `UNLIMITED_DURATION_S`."""
    return LOAD_SHAPES[shape](UNLIMITED_DURATION_S if duration_s is None else duration_s, seed)
