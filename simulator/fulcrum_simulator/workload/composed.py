"""Composed workloads: two mixes of traffic that take turns, drift into each other, or keep their shares.

With them the value of moving instances between the roles is measured. One mix is nearly all prefill work, the
other nearly all decode work, and at factor 1 each of them needs about half of eight `l70-h100-tp4` instances
(W_P + W_D of bound B1), so that the total work hardly moves while the best split does. The lengths are four
times those of the clients that the mixes are modelled on: the same work with a quarter of the requests.

The workloads `tiers…` measure admission instead: tenants of three tiers send code and chat, and in two of the
three a tenant of the lowest tier floods the service for a third of the time.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from fulcrum_simulator.workload.generated import (
    CHAT,
    CODE,
    DECODE_HEAVY,
    PREFILL_HEAVY,
    MixPeriod,
    TrafficMix,
    generate_moving,
)
from fulcrum_simulator.workload.requests import WorkloadRequest

Share = Callable[[float], float]
"""Share of the first mix at a time in seconds, 0 to 1."""

_LONG_PROMPTS = PREFILL_HEAVY.scaled(input=4.0, output=2.0)
_LONG_ANSWERS = DECODE_HEAVY.scaled(input=4.0, output=4.0)
_LONG_PROMPTS_RPS, _LONG_ANSWERS_RPS = 3.8, 8.7
_CODE, _CHAT = CODE.scaled(input=4.0, output=4.0), CHAT.scaled(input=2.0, output=6.0)
_CODE_RPS, _CHAT_RPS = 5.0, 6.0


def _alternate(
    first: tuple[TrafficMix, float], second: tuple[TrafficMix, float], *, phase_s: float, duration_s: float
) -> Callable[[float, int], list[WorkloadRequest]]:
    def generate(factor: float, seed: int) -> list[WorkloadRequest]:
        periods = tuple(MixPeriod(mix, rate_rps * factor, phase_s) for mix, rate_rps in (first, second))
        return list(generate_moving(periods=periods, duration_s=duration_s, seed=seed))

    return generate


def _blend(
    first: tuple[TrafficMix, float], second: tuple[TrafficMix, float], share: Share, *, duration_s: float
) -> Callable[[float, int], list[WorkloadRequest]]:
    """Two Poisson processes, each thinned by its share of the time."""

    def generate(factor: float, seed: int) -> list[WorkloadRequest]:
        rng = random.Random(seed)
        requests: list[WorkloadRequest] = []
        for (mix, rate_rps), is_first in ((first, True), (second, False)):
            at_s = rng.expovariate(rate_rps * factor)
            while at_s < duration_s:
                first_share = share(at_s)
                if rng.random() < (first_share if is_first else 1.0 - first_share):
                    requests.append(WorkloadRequest(at_s, mix.input.draw(rng), mix.output.draw(rng)))
                at_s += rng.expovariate(rate_rps * factor)
        return sorted(requests, key=lambda request: request.arrival_s)

    return generate


def _triangle(period_s: float) -> Share:
    """A wave from 1 to 0 and back, in straight lines."""
    return lambda at_s: abs(1.0 - 2.0 * ((at_s / period_s) % 1.0))


def mix_tiers(
    flood: Sequence[tuple[TrafficMix, float]], *, duration_s: float = 900.0
) -> Callable[[float, int], list[WorkloadRequest]]:
    """Three tiers; at factor 1 the fleet could serve code and chat at their rates together.

    In the middle third a tenant of the lowest tier sends `flood`, at five times the rate that is served.
    """

    def generate(factor: float, seed: int) -> list[WorkloadRequest]:
        rng = random.Random(seed)
        requests: list[WorkloadRequest] = []
        for tier, priority, tenant, share, (first, last) in (*_TENANTS, _FLOOD):
            from_s, to_s = first * duration_s, last * duration_s
            for mix, rate_rps in flood if tenant == "flood" else _CODE_AND_CHAT:
                at_s = from_s + rng.expovariate(rate_rps * share * factor)
                while at_s < to_s:
                    lengths = mix.input.draw(rng), mix.output.draw(rng)
                    requests.append(
                        WorkloadRequest(at_s, *lengths, tenant=tenant, tier=tier, priority=priority)
                    )
                    at_s += rng.expovariate(rate_rps * share * factor)
        return sorted(requests, key=lambda request: request.arrival_s)

    return generate


_PROMPTS_AND_ANSWERS = (_LONG_PROMPTS, _LONG_PROMPTS_RPS), (_LONG_ANSWERS, _LONG_ANSWERS_RPS)
_CODE_AND_CHAT = (_CODE, _CODE_RPS), (_CHAT, _CHAT_RPS)
_ALWAYS = (0.0, 1.0)
_TENANTS = (
    ("premium", 10, "acme", 0.1, _ALWAYS),
    ("standard", 0, "globex", 0.15, _ALWAYS),
    ("standard", 0, "initech", 0.15, _ALWAYS),
    ("free", -10, "hobby", 0.1, _ALWAYS),
)
_FLOOD = ("free", -10, "flood", 5.0, (1 / 3, 2 / 3))
"""Tier, priority, tenant, share of the rate that the fleet can serve, and part of the time that it sends."""

FLOODS: Mapping[str, Sequence[tuple[TrafficMix, float]]] = MappingProxyType(
    {
        "tiers": (),
        "tiers-flood": _CODE_AND_CHAT,
        "tiers-prompt-flood": ((_LONG_PROMPTS, 2 * _LONG_PROMPTS_RPS),),
    }
)
"""By name: what floods the workload with three tiers."""

COMPOSED: Mapping[str, Callable[[float, int], list[WorkloadRequest]]] = MappingProxyType(
    {
        "phases-200s": _alternate(*_PROMPTS_AND_ANSWERS, phase_s=200.0, duration_s=1200.0),
        "phases-600s": _alternate(*_PROMPTS_AND_ANSWERS, phase_s=600.0, duration_s=1800.0),
        "drift": _blend(*_PROMPTS_AND_ANSWERS, _triangle(1200.0), duration_s=1200.0),
        "stationary": _blend(*_PROMPTS_AND_ANSWERS, lambda _at_s: 0.5, duration_s=900.0),
        "code-chat-phases-300s": _alternate(*_CODE_AND_CHAT, phase_s=300.0, duration_s=1200.0),
        "code-chat-drift": _blend(*_CODE_AND_CHAT, _triangle(900.0), duration_s=900.0),
        **{name: mix_tiers(flood) for name, flood in FLOODS.items()},
        "code-chat-stationary": _blend(*_CODE_AND_CHAT, lambda _at_s: 0.5, duration_s=900.0),
    }
)
"""Generators by the name of the workload: a factor of the rate and a seed give requests by arrival."""
