"""Composed workloads: two traffic mixes that alternate, blend into each other or keep their shares.

They measure what flips gain. Of the first pair, one mix is nearly all prefill work and the other nearly all
decode work. At factor 1, each needs about half of eight `l70-h100-tp4` instances (W_P + W_D of bound B1): the
best split changes, and the total work hardly does. The workloads `code-chat-…` use a second pair, code
completion and chat. The lengths of both pairs are 2 to 6 times those of the recorded traffic: fewer requests
for the same work. The lengths of three more pairs are our own choice: `documents-reasoning-…`, long documents
with short answers and short questions with long ones; `agents-writing-…`, contexts of agents that answer
with a call of a tool, and texts that are written on demand; `summaries-translation-…`, which differ less.

The workloads `tiers…` measure admission. Tenants of three tiers send code and chat. In `tiers-flood` and
`tiers-prompt-flood`, one more tenant of the lowest tier overloads the service in the middle third. `fulcrum
simulate` and `bench` choose them by name.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from fulcrum_simulator.workload.generated import (
    CHAT,
    CODE,
    DECODE_HEAVY,
    PREFILL_HEAVY,
    LengthDistribution,
    MixPeriod,
    TrafficMix,
    generate_moving,
)
from fulcrum_simulator.workload.requests import WorkloadRequest

Share = Callable[[float], float]
"""Gives the share of the first mix, 0 to 1, at a time in seconds."""

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
    """Two Poisson processes; each arrival is kept with the share that its mix has at that time."""

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
    """A triangle wave: from 1 to 0 and back in each period."""
    return lambda at_s: abs(1.0 - 2.0 * ((at_s / period_s) % 1.0))


def mix_tiers(
    flood: Sequence[tuple[TrafficMix, float]], *, duration_s: float = 900.0
) -> Callable[[float, int], list[WorkloadRequest]]:
    """Code and chat from tenants of three tiers: at factor 1, half of the load that the fleet can serve.

    In the middle third, one more tenant of the lowest tier sends each mix of `flood` at five times its rate.
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


def _mix(name: str, *lengths: tuple[float, float, int]) -> TrafficMix:
    """Make a mix from mean, sigma and maximum of its prompts, and those of its answers."""
    prompts, answers = (
        LengthDistribution.with_mean(mean, sigma=sigma, max_tokens=most) for mean, sigma, most in lengths
    )
    return TrafficMix(name, prompts, answers)


_PROMPTS_AND_ANSWERS = (_LONG_PROMPTS, _LONG_PROMPTS_RPS), (_LONG_ANSWERS, _LONG_ANSWERS_RPS)
_CODE_AND_CHAT = (_CODE, _CODE_RPS), (_CHAT, _CHAT_RPS)
_DOCUMENTS_AND_REASONING = (
    (_mix("documents", (8000, 0.6, 32768), (400, 0.7, 4096)), 4.2),
    (_mix("reasoning", (800, 0.8, 8192), (2500, 0.7, 16384)), 5.7),
)
_AGENTS_AND_WRITING = (
    (_mix("agents", (6000, 0.6, 20000), (150, 0.9, 2048)), 7.2),
    (_mix("writing", (400, 0.9, 4096), (2000, 0.5, 8192)), 11.0),
)
_SUMMARIES_AND_TRANSLATION = (
    (_mix("summaries", (5000, 0.5, 16384), (350, 0.5, 2048)), 7.1),
    (_mix("translation", (1000, 0.7, 8192), (1100, 0.6, 8192)), 14.7),
)
_ALWAYS = (0.0, 1.0)
_TENANTS = (
    ("premium", 10, "acme", 0.1, _ALWAYS),
    ("standard", 0, "globex", 0.15, _ALWAYS),
    ("standard", 0, "initech", 0.15, _ALWAYS),
    ("free", -10, "hobby", 0.1, _ALWAYS),
)
_FLOOD = ("free", -10, "flood", 5.0, (1 / 3, 2 / 3))
"""Tier, priority, tenant, factor of the rates of its mixes, start and end as shares of the duration."""

FLOODS: Mapping[str, Sequence[tuple[TrafficMix, float]]] = MappingProxyType(
    {
        "tiers": (),
        "tiers-flood": _CODE_AND_CHAT,
        "tiers-prompt-flood": ((_LONG_PROMPTS, 2 * _LONG_PROMPTS_RPS),),
    }
)
"""By workload name: mixes and rates that the flooding tenant sends; empty: no flood."""

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
        "documents-reasoning-phases-240s": _alternate(
            *_DOCUMENTS_AND_REASONING, phase_s=240.0, duration_s=1440.0
        ),
        "documents-reasoning-drift": _blend(*_DOCUMENTS_AND_REASONING, _triangle(800.0), duration_s=1200.0),
        "documents-reasoning-stationary": _blend(
            *_DOCUMENTS_AND_REASONING, lambda _at_s: 0.5, duration_s=900.0
        ),
        "agents-writing-phases-150s": _alternate(*_AGENTS_AND_WRITING, phase_s=150.0, duration_s=1200.0),
        "agents-writing-drift": _blend(*_AGENTS_AND_WRITING, _triangle(1000.0), duration_s=1000.0),
        "agents-writing-stationary": _blend(*_AGENTS_AND_WRITING, lambda _at_s: 0.5, duration_s=700.0),
        "summaries-translation-phases-120s": _alternate(
            *_SUMMARIES_AND_TRANSLATION, phase_s=120.0, duration_s=960.0
        ),
        "summaries-translation-drift": _blend(
            *_SUMMARIES_AND_TRANSLATION, _triangle(600.0), duration_s=900.0
        ),
        "summaries-translation-stationary": _blend(
            *_SUMMARIES_AND_TRANSLATION, lambda _at_s: 0.5, duration_s=600.0
        ),
    }
)
"""Generators by workload name. Called with a rate factor and a seed; returns requests in order of arrival."""
