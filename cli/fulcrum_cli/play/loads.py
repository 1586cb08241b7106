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
    GeneratedLoad,
    Mix,
    Turn,
    bursty,
    moving,
    steady,
)

ENDLESS_S = 24 * 3600.0
"""How long a load lasts if nobody says."""

TURN_S = 15.0

LONGEST_TOKENS = 2048
"""Of a chat's prompt, and four times that of its answer: a short run cannot wait for the longest recorded."""


def _moving(duration_s: float, seed: int) -> GeneratedLoad:
    turns = (
        Turn(PREFILL_HEAVY.scaled(input=0.5, output=0.12), rate_rps=12.0, lasts_s=TURN_S),
        Turn(DECODE_HEAVY.scaled(output=0.25), rate_rps=14.0, lasts_s=TURN_S),
    )
    return moving(turns=turns, duration_s=duration_s, seed=seed)


def _steady(duration_s: float, seed: int) -> GeneratedLoad:
    chat = CHAT.scaled(input=0.6, output=0.2)
    mix = Mix(chat.name, chat.input.at_most(LONGEST_TOKENS), chat.output.at_most(LONGEST_TOKENS // 4))
    return steady(rate_rps=8.0, duration_s=duration_s, seed=seed, mix=mix)


def _bursty(duration_s: float, seed: int) -> GeneratedLoad:
    return bursty(
        rate_rps=6.0, duration_s=duration_s, seed=seed, mix=CODE.scaled(input=0.5), compression=12.0
    )


SHAPES: MappingProxyType[str, Callable[[float, int], GeneratedLoad]] = MappingProxyType(
    {"moving": _moving, "steady": _steady, "bursty": _bursty}
)


def make_load(shape: str, *, duration_s: float | None, seed: int) -> GeneratedLoad:
    """The load of that shape."""
    return SHAPES[shape](ENDLESS_S if duration_s is None else duration_s, seed)
