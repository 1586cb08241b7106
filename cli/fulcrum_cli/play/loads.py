"""The shapes of load of `fulcrum play`, sized for eight instances of the `laptop` profile.

One such instance prefills about 3,000 tokens a second, and within 50 ms a token it decodes 15 requests of
335 tokens (300 tokens a second). Lengths are those of the published traces, scaled; rates are chosen here.

* moving: 12 prompts of 1,200 tokens a second need 5 of 8 instances for prefill, at 4 they queue; then 14
  answers of 107 tokens a second need 5 to 6 of 8 for decode, at 4 they miss the TPOT objective.
* steady: 4 and 4 instances are right all the time: inter-token latency is half of its objective, and
  prompts rarely wait.
* bursty: bursts that need nearly all instances for prefill, and pauses.
* tiers: code and chat of tenants of three tiers, half of what the service can serve (`CAPACITY_RPS`).
* tiers-flood: the same requests, and one more tenant of the lowest tier sends five times what it can serve;
  at the start of a run 10 s later, when the router has seen what requests cost.

`session` makes the load of a key or button; recorded workloads are read in `options`.
"""

import heapq
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from types import MappingProxyType

from fulcrum_simulator.workload import (
    CHAT,
    CODE,
    DECODE_HEAVY,
    PREFILL_HEAVY,
    GeneratedWorkload,
    MixPeriod,
    TrafficMix,
    WorkloadPhase,
    WorkloadRequest,
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
    mix = _shorten(CHAT.scaled(input=0.6, output=0.2))
    return generate_steady(rate_rps=8.0, duration_s=duration_s, seed=seed, mix=mix)


def _bursty(duration_s: float, seed: int) -> GeneratedWorkload:
    return generate_bursty(
        rate_rps=6.0, duration_s=duration_s, seed=seed, mix=CODE.scaled(input=0.5), compression=12.0
    )


def _shorten(chat: TrafficMix) -> TrafficMix:
    return TrafficMix(
        chat.name,
        chat.input.at_most(CHAT_PROMPT_TOKENS_MAX),
        chat.output.at_most(CHAT_PROMPT_TOKENS_MAX // 4),
    )


CAPACITY_RPS = 13.0
"""Half code and half chat of these lengths: simulated, 9 of 10 meet their objectives at this rate."""
_CODE_AND_CHAT = _shorten(CODE.scaled(input=0.5)), _shorten(CHAT.scaled(input=0.6, output=0.3))
_TENANTS = (
    ("premium", "acme", 0.1),
    ("standard", "globex", 0.15),
    ("standard", "initech", 0.15),
    ("free", "hobby", 0.1),
)
"""Tier, tenant and share of the capacity that it sends."""
_FLOOD = ("free", "flood", 5.0)
FLOOD_AFTER_S = 10.0


@dataclass(frozen=True)
class TierLoad(GeneratedWorkload):
    """Poisson arrivals of several tenants in one phase; what one sends does not depend on the others."""

    senders: tuple[tuple[str, str, float], ...]
    flood_after_s: float = 0.0

    def __iter__(self) -> Iterator[WorkloadRequest]:
        streams = (
            self._send(tier, tenant, mix, share * CAPACITY_RPS / len(_CODE_AND_CHAT))
            for tier, tenant, share in self.senders
            for mix in _CODE_AND_CHAT
        )
        return heapq.merge(*streams, key=attrgetter("arrival_s"))

    def _send(self, tier: str, tenant: str, mix: TrafficMix, rate_rps: float) -> Iterator[WorkloadRequest]:
        rng = random.Random(f"{self.seed}/{tenant}/{mix.name}")
        at_s = rng.expovariate(rate_rps) + (self.flood_after_s if tenant == _FLOOD[1] else 0.0)
        while at_s < self.phases[-1].end_s:
            yield WorkloadRequest(at_s, mix.input.draw(rng), mix.output.draw(rng), tenant=tenant, tier=tier)
            at_s += rng.expovariate(rate_rps)


def _make_tier_load(
    name: str, senders: tuple[tuple[str, str, float], ...]
) -> Callable[[float, int], GeneratedWorkload]:
    rate_rps = CAPACITY_RPS * sum(share for _tier, _tenant, share in senders)

    def generate(duration_s: float, seed: int) -> GeneratedWorkload:
        phase = WorkloadPhase(name, 0.0, duration_s, rate_rps, _CODE_AND_CHAT[0])
        return TierLoad((phase,), seed, senders)

    return generate


TIERS, TIERS_FLOOD = "tiers", "tiers-flood"
LOAD_SHAPES: MappingProxyType[str, Callable[[float, int], GeneratedWorkload]] = MappingProxyType(
    {
        "moving": _moving,
        "steady": _steady,
        "bursty": _bursty,
        TIERS: _make_tier_load("three tiers", _TENANTS),
        TIERS_FLOOD: _make_tier_load("three tiers and a flood", (*_TENANTS, _FLOOD)),
    }
)
TIER_NAMES = frozenset(tier for tier, _tenant, _share in _TENANTS)


def list_shapes(qos_tiers: Sequence[str]) -> list[str]:
    """The shapes that a service with these tiers can get."""
    return [
        shape for shape in LOAD_SHAPES if shape not in (TIERS, TIERS_FLOOD) or set(qos_tiers) >= TIER_NAMES
    ]


def make_load(
    shape: str, *, duration_s: float | None, seed: int, flood_after_s: float = 0.0
) -> GeneratedWorkload:
    """Return the load of a shape; without a duration it lasts `UNLIMITED_DURATION_S`.

    A flood begins `flood_after_s` later than the rest.
    """
    load = LOAD_SHAPES[shape](UNLIMITED_DURATION_S if duration_s is None else duration_s, seed)
    return replace(load, flood_after_s=flood_after_s) if isinstance(load, TierLoad) else load
