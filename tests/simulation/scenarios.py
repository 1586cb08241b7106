"""Inputs of the control loop on virtual time: loads and faults drawn from a seed, and the service.

`control_loop.simulate` runs them; only tests of this folder use them.
"""

import random
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from fulcrum_simulator.workload import (
    CHAT,
    DECODE_HEAVY,
    PREFILL_HEAVY,
    MixPeriod,
    WorkloadRequest,
    generate_moving,
    generate_steady,
)
from tests.simulation.control_loop import Scenario, ScheduledFault

LOAD_START_S = 1.0
"""The load starts now; the engines are up by then."""
FAULTS_END_S = 18.0
"""Time after which no fault is active."""
_INSTANT_FAULTS = ("kill", "fail transfers", "expire leases", "person flips")
_LASTING_FAULTS = (
    "hang",
    "store unavailable",
    "router state unavailable",
    "router clock wrong",
    "autoscaler stalls",
)

_LONG_PROMPTS = PREFILL_HEAVY.scaled(input=0.4, output=0.1)
_LONG_ANSWERS = DECODE_HEAVY.scaled(input=0.2, output=0.4)
_LIGHT_CHAT = CHAT.scaled(input=0.2, output=0.3)


def service_spec(
    mode: str = "Auto", *, floor: int = 1, dispatch: str = "Queue", policy: str = "arrow"
) -> dict[str, Any]:
    """Return the spec of a service of eight laptop engines, with thresholds that fit their minimum step time
    of 18 ms.
    """
    return {
        "model": "m",
        "instances": 8,
        "engine": {"type": "Simulated", "profile": "laptop"},
        "slo": {"ttft": "1s", "tpot": "50ms"},
        "router": {"dispatch": {"mode": dispatch}},
        "roles": {"prefill": {"min": floor}, "decode": {"min": floor}},
        "autoscaling": {
            "mode": mode,
            "policy": policy,
            "arrow": {"expand": 0.9, "shrink": 0.6, "consecutiveTicks": 2, "interval": "500ms"},
            "flip": {"prefillToDecodeCooldown": "1s"},
        },
    }


def moving_scenario(seed: int, mode: str, dispatch: str = "Queue", policy: str = "arrow") -> Scenario:
    """Long prompts and long outputs alternate every 12 s; each overloads half of the instances."""
    periods = (MixPeriod(_LONG_PROMPTS, 15, 12), MixPeriod(_LONG_ANSWERS, 13, 12))
    load = _shift_arrivals(generate_moving(periods=periods, duration_s=48, seed=seed), LOAD_START_S)
    return Scenario(seed=seed, load=load, end_s=50, spec=service_spec(mode, dispatch=dispatch, policy=policy))


def steady_scenario(seed: int) -> Scenario:
    """A constant mix that the split of roles with which the operator starts can serve."""
    load = _shift_arrivals(
        generate_steady(rate_rps=9, duration_s=40, seed=seed, mix=_LIGHT_CHAT), LOAD_START_S
    )
    return Scenario(seed=seed, load=load, end_s=42, spec=service_spec())


def faulty_scenario(seed: int, dispatch: str = "Queue", policy: str = "arrow") -> Scenario:
    """A dozen faults in the first `FAULTS_END_S` seconds under a moving load, then a steady load without
    faults.
    """
    rng = random.Random(seed)
    periods = (MixPeriod(_LONG_PROMPTS, 12, 6), MixPeriod(_LONG_ANSWERS, 9, 6))
    heavy = generate_moving(periods=periods, duration_s=FAULTS_END_S - LOAD_START_S, seed=seed)
    light = generate_steady(rate_rps=6, duration_s=14, seed=seed, mix=_LIGHT_CHAT)
    return Scenario(
        seed=seed,
        load=(*_shift_arrivals(heavy, LOAD_START_S), *_shift_arrivals(light, FAULTS_END_S)),
        end_s=FAULTS_END_S + 15,
        spec=service_spec(floor=2, dispatch=dispatch, policy=policy),
        faults=tuple(_draw_fault(rng) for _ in range(12)),
    )


def _draw_fault(rng: random.Random) -> ScheduledFault:
    at_s = rng.uniform(LOAD_START_S + 1, FAULTS_END_S - 4)
    instance = rng.randrange(8)
    if rng.random() < 0.5:
        return ScheduledFault(at_s, rng.choice(_INSTANT_FAULTS), instance)
    return ScheduledFault(at_s, rng.choice(_LASTING_FAULTS), instance, rng.uniform(0.5, 3.0))


def _shift_arrivals(load: Iterable[WorkloadRequest], by_s: float) -> tuple[WorkloadRequest, ...]:
    return tuple(replace(request, arrival_s=request.arrival_s + by_s) for request in load)
