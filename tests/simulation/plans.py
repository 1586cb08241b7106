"""The runs: what is offered, what goes wrong, and for how long. All of it follows from the seed."""

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fulcrum_simulator.workload import (
    CHAT,
    DECODE_HEAVY,
    PREFILL_HEAVY,
    Turn,
    WorkloadRequest,
    moving,
    steady,
)
from tests.simulation.world import Fault, Plan

STARTS_S = 1.0
"""By then the engines serve."""
HEALED_S = 18.0
"""From then on nothing goes wrong any more."""
_INSTANT = ("kill", "fail transfers", "expire leases", "person flips")
_LASTING = ("hang", "store away", "router state away", "router clock wrong", "autoscaler stalls")

_LONG_PROMPTS = PREFILL_HEAVY.scaled(input=0.4, output=0.1)
_LONG_ANSWERS = DECODE_HEAVY.scaled(input=0.2, output=0.4)
_EASY_CHAT = CHAT.scaled(input=0.2, output=0.3)


def service(mode: str = "Auto", *, floor: int = 1) -> dict[str, Any]:
    """Eight laptop engines and thresholds that fit their 18 ms floor of a step."""
    return {
        "model": "m",
        "instances": 8,
        "engine": {"type": "Simulated", "profile": "laptop"},
        "slo": {"ttft": "1s", "tpot": "50ms"},
        "roles": {"prefill": {"min": floor}, "decode": {"min": floor}},
        "autoscaling": {
            "mode": mode,
            "arrow": {"expand": 0.9, "shrink": 0.6, "passes": 2, "interval": "500ms"},
            "flip": {"prefillToDecodeCooldown": "1s"},
        },
    }


def moving_mix(seed: int, mode: str) -> Plan:
    """Long prompts and long answers by turns of 12 s; either is too much for half of the instances."""
    turns = (Turn(_LONG_PROMPTS, 15, 12), Turn(_LONG_ANSWERS, 13, 12))
    load = _later(moving(turns=turns, duration_s=48, seed=seed), STARTS_S)
    return Plan(seed=seed, load=load, ends_s=50, spec=service(mode))


def steady_load(seed: int) -> Plan:
    """A mix that never moves and that the first split carries."""
    load = _later(steady(rate_rps=9, duration_s=40, seed=seed, mix=_EASY_CHAT), STARTS_S)
    return Plan(seed=seed, load=load, ends_s=42, spec=service())


def faulty(seed: int) -> Plan:
    """A dozen faults in the first `HEALED_S` seconds under a moving load, then calm under a steady one."""
    rng = random.Random(seed)
    turns = (Turn(_LONG_PROMPTS, 12, 6), Turn(_LONG_ANSWERS, 9, 6))
    hard = moving(turns=turns, duration_s=HEALED_S - STARTS_S, seed=seed)
    easy = steady(rate_rps=6, duration_s=14, seed=seed, mix=_EASY_CHAT)
    return Plan(
        seed=seed,
        load=(*_later(hard, STARTS_S), *_later(easy, HEALED_S)),
        ends_s=HEALED_S + 15,
        spec=service(floor=2),
        faults=tuple(_draw_fault(rng) for _ in range(12)),
    )


def _draw_fault(rng: random.Random) -> Fault:
    at_s = rng.uniform(STARTS_S + 1, HEALED_S - 4)
    instance = rng.randrange(8)
    if rng.random() < 0.5:
        return Fault(at_s, rng.choice(_INSTANT), instance)
    return Fault(at_s, rng.choice(_LASTING), instance, rng.uniform(0.5, 3.0))


def _later(load: Iterable[WorkloadRequest], by_s: float) -> tuple[WorkloadRequest, ...]:
    return tuple(replace(request, arrival_s=request.arrival_s + by_s) for request in load)
