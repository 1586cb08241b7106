"""The three shapes of load that `fulcrum play` knows, sized for eight instances of the `laptop` profile.

One such instance prefills about 3,000 tokens a second, and within 50 ms a token it decodes 15 requests of
335 tokens (300 tokens a second). Lengths are the recordings', scaled; rates are ours.

* moving: 12 prompts of 1,200 tokens a second need 5 of 8 instances for prefill, at 4 they queue; then 14
  answers of 107 tokens a second need 5 to 6 of 8 for decode, at 4 they miss the TPOT objective.
* steady: 4 and 4 are right and stay right: inter-token latency at half of its objective, prompts seldom wait.
* bursty: clumps that need nearly everything for prefill, and silences.
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
"""How long a load lasts if nobody says."""

PHASE_DURATION_S = 15.0

CHAT_PROMPT_TOKENS_MAX = 2048
"""Of a chat's prompt, and four times that of its answer: a short run cannot wait for the longest recorded."""


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
    """The load of that shape."""
    return LOAD_SHAPES[shape](UNLIMITED_DURATION_S if duration_s is None else duration_s, seed)
