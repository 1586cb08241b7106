"""The settings of one simulated run: service, policy, and how far control is from ideal."""

import re
from dataclasses import dataclass
from enum import StrEnum

from fulcrum_core.errors import InvalidInput
from fulcrum_core.profiles import EngineProfile
from fulcrum_core.values import KV_LEASE_S, Slo
from fulcrum_simulator.fleet.stepped_engine import LOOKAHEAD_STEPS

BEST_STATIC = "static:best"
"""All fixed splits are run, and the one with the highest figure counts."""


class PolicyName(StrEnum):
    """The policies that a run can use."""

    ARROW = "arrow"
    """The shipped flip policy."""
    STATIC = "static"
    """A fixed split; requests go to the instance with the least work, by the shipped dispatch."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy and the split that it starts with."""

    name: PolicyName
    prefill: int
    decode: int

    def __str__(self) -> str:
        return f"{self.name}:{self.prefill}P{self.decode}D"


_POLICY = re.compile(r"(arrow|static):(\d+)P(\d+)D", re.IGNORECASE)


def parse_policy(text: str, *, instances: int) -> Policy:
    """Return the policy named `static:xPyD`, `arrow:xPyD` or `arrow`, which starts with an even split.

    Raises:
        InvalidInput: for another text, or a split that does not have `instances` instances or lacks a role.
    """
    if text.lower() == PolicyName.ARROW:
        return Policy(PolicyName.ARROW, instances // 2, instances - instances // 2)
    match = _POLICY.fullmatch(text)
    if match is None:
        raise InvalidInput("--policy", text, "is not arrow, arrow:xPyD or static:xPyD, as static:5P3D")
    prefill, decode = int(match[2]), int(match[3])
    if prefill + decode != instances or not prefill or not decode:
        rule = f"must have at least one instance of each role and {instances} in all"
        raise InvalidInput("--policy", text, rule)
    return Policy(PolicyName(match[1].lower()), prefill, decode)


def list_splits(instances: int) -> list[Policy]:
    """Return all fixed splits of this many instances."""
    return [Policy(PolicyName.STATIC, prefill, instances - prefill) for prefill in range(1, instances)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlOptions:
    """How far control is from ideal. Times are seconds.

    Attributes:
        hop_s: From the router to an engine, and back.
        state_age_s: Age of the router's state when the autoscaler decides.
        flip_latency_s: From a written flip to its use by the router.
        model_error: Largest relative error of the coefficients of the models that the router starts with.
        step_noise: A step takes up to this share more or less than its model says.
        failures_per_hour: Engine failures per instance and hour; the engine starts again in `startup_s`.
    """

    hop_s: float = 0.002
    state_age_s: float = 0.1
    flip_latency_s: float = 0.05
    model_error: float = 0.2
    step_noise: float = 0.05
    failures_per_hour: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """One run.

    Attributes:
        unscored_share: Share of the time of arrivals, from its start, whose requests are not scored.
        drain_s: Longest time after the last arrival; what runs then is unfinished.
        lookahead_steps: Most engine steps skipped together; 1 executes each, with the same result.
    """

    profile: EngineProfile
    instances: int
    policy: Policy
    slo: Slo
    seed: int = 1
    control: ControlOptions = ControlOptions()
    lease_s: float = KV_LEASE_S
    unscored_share: float = 0.1
    drain_s: float = 600.0
    lookahead_steps: int = LOOKAHEAD_STEPS
