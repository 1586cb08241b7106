"""The settings of one simulated run: service, policy, and the delays, errors and failures to simulate.

`fulcrum simulate`, `fulcrum regret` and `bench` make them for `run.simulate`. The workload is not part of
them: see `load`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from fulcrum_core.api.meta import format_duration, parse_duration
from fulcrum_core.api.pdservice import PDServiceSpec
from fulcrum_core.api.router import DispatchSpec
from fulcrum_core.errors import InvalidInput
from fulcrum_core.profiles import EngineProfile
from fulcrum_core.validation_rules import shorten_value
from fulcrum_core.values import AdmissionMode, DispatchMode, OverloadAction, Slo
from fulcrum_router.policy.tiers.admission import DEFAULT_TIER_ADMISSION, TierAdmission
from fulcrum_router.policy.tiers.tier_reserve import Reserve
from fulcrum_simulator.fleet.stepped_engine import LOOKAHEAD_STEPS

BEST_STATIC = "static:best"
"""All fixed splits are run, and the one with the highest figure counts."""


class PolicyName(StrEnum):
    """The policies that a run can use."""

    ARROW = "arrow"
    """Arrow's flip policy, as shipped."""
    CLAIRVOYANT = "clairvoyant"
    """The split of each interval was computed from all arrivals."""
    DYNAMO = "dynamo-like"
    NARWHAL = "narwhal-like"
    """Planners of published systems, as far as they concern roles: see `planners`."""
    BALANCED = "balanced"
    """The default flip policy."""
    COLD = "cold"
    """`arrow`, but each flip takes the instance out of service, as a restart does."""
    STATIC = "static"
    """A fixed split; requests go to the instance with the least work, by the shipped dispatch."""
    COLOCATED = "colocated"
    """Every instance computes prompts and decodes them, with chunked prefill and without KV transfers."""
    ROUND_ROBIN = "round-robin"
    XLLM = "xllm"
    """Dispatch of published systems: see `published_dispatch`."""


PLANNED = frozenset({PolicyName.CLAIRVOYANT, PolicyName.DYNAMO, PolicyName.NARWHAL})
"""Policies with a `SplitPlanner`; the router asks for no flips."""
RESPLIT_S = 30.0
"""Interval of the clairvoyant split, if its name has none."""
CHOSEN_ON_ARRIVAL = PolicyName.ROUND_ROBIN, PolicyName.XLLM
"""Policies that choose both instances of a request on arrival, without the shipped dispatch."""
FLIPPING = frozenset({PolicyName.ARROW, PolicyName.BALANCED, PolicyName.COLD})


_DEFAULT = DispatchSpec()


@dataclass(frozen=True, slots=True)
class Policy:
    """A policy and the split that it starts with.

    `flip_downtime_s` is how long a flipped instance serves nothing; `token_budget` replaces the profile's.
    `dispatch` says where requests wait for prefill, `deflects` lets decode instances compute prompts in their
    spare time; both are those of a PDService that names neither. `admission` and `tier_admission` (of all
    tiers) say what is done about requests that would be late. `resplit_s` is the interval of the clairvoyant
    split. With `prefix_aware`, dispatch counts only what an instance has not cached of a prompt.
    """

    name: PolicyName
    prefill: int
    decode: int
    flip_downtime_s: float = 0.0
    token_budget: int | None = None
    dispatch: DispatchMode = _DEFAULT.mode
    admission: AdmissionMode = AdmissionMode.OFF
    tier_admission: TierAdmission = DEFAULT_TIER_ADMISSION
    resplit_s: float = RESPLIT_S
    deflects: bool = _DEFAULT.deflect
    prefix_aware: bool = False

    def __str__(self) -> str:
        direct = _DIRECT if self.dispatch is DispatchMode.DIRECT else ""
        no_deflect = "" if self.deflects else _NO_DEFLECT
        prefix = _PREFIX if self.prefix_aware else ""
        return self._name_policy() + direct + no_deflect + prefix + self._name_admission()

    def _name_admission(self) -> str:
        tier = self.tier_admission
        if self.admission is not AdmissionMode.ENFORCE:
            return ""
        return f"+degrade:{tier.max_output_tokens}" if tier.max_output_tokens else _ENFORCE

    def _name_policy(self) -> str:
        if self.name is PolicyName.COLD:
            return f"{self.name}:{format_duration(self.flip_downtime_s)}"
        if self.name is PolicyName.CLAIRVOYANT:
            return f"{self.name}:{format_duration(self.resplit_s)}"
        if self.name in PLANNED:
            return str(self.name)
        if self.name is PolicyName.COLOCATED:
            return self.name if self.token_budget is None else f"{self.name}:{self.token_budget}"
        return f"{self.name}:{self.prefill}P{self.decode}D"


_DIRECT, _NO_DEFLECT, _PREFIX, _ENFORCE = "+direct", "+nodeflect", "+prefix", "+enforce"
_DEGRADE = re.compile(r"\+degrade:([1-9]\d{0,6})", re.ASCII)
_SPLIT = re.compile(r"(arrow|balanced|static|round-robin|xllm):(\d{1,4})p(\d{1,4})d", re.ASCII)
_BUDGET = re.compile(r"colocated(?::(\d{1,7}))?", re.ASCII)
_TIMED = re.compile(r"(cold|clairvoyant):(\w+)", re.ASCII)
_KNOWN = (
    "arrow, arrow:xPyD, balanced, balanced:xPyD, static:xPyD, static:best, colocated, colocated:TOKENS, "
    "cold:TIME, clairvoyant, clairvoyant:TIME, dynamo-like, narwhal-like, "
    "round-robin:xPyD, xllm, xllm:xPyD"
)


def parse_policy(text: str, *, instances: int) -> Policy:
    """Return the policy of this name; the error message lists all names or parts.

    Without a split, flips start from an even one. With "+direct" behind it, requests wait in the engines and
    not in the router; with "+nodeflect", decode instances compute no prompts; with "+prefix", dispatch
    counts only what an instance has not cached of a prompt; with "+enforce", requests that would miss their
    objectives are refused; with "+degrade:TOKENS", answers are limited before that, while decode is nearly
    full.

    Raises:
        InvalidInput: for another text, or a split that does not have `instances` instances or lacks a role.
            `BEST_STATIC` is such a text: it stands for several runs, which the caller makes of `list_splits`.
    """
    base, *parts = text.lower().split("+")
    if base.startswith(CHOSEN_ON_ARRIVAL) and parts:
        raise _make_error(text, "takes nothing with +: it does not use the shipped dispatch")
    if len({part.partition(":")[0] for part in parts}) < len(parts):
        raise _make_error(text, "must name each part with + once")
    policy = _parse_base(text, base, instances)
    for part in parts:
        policy = _add_part(text, policy, f"+{part}")
    return policy


def _parse_base(text: str, base: str, instances: int) -> Policy:
    even = instances // 2, instances - instances // 2
    if base in (PolicyName.ARROW, PolicyName.BALANCED, PolicyName.XLLM):
        return Policy(PolicyName(base), *even)
    if found := _SPLIT.fullmatch(base):
        return _parse_split(text, PolicyName(found[1]), int(found[2]), int(found[3]), instances)
    if found := _BUDGET.fullmatch(base):
        token_budget = int(found[1]) if found[1] else None
        if token_budget == 0:
            raise _make_error(text, "must have a token budget above 0")
        return Policy(PolicyName.COLOCATED, *even, token_budget=token_budget)
    if base in (PolicyName.CLAIRVOYANT, PolicyName.DYNAMO, PolicyName.NARWHAL):
        return Policy(PolicyName(base), *even)
    if found := _TIMED.fullmatch(base):
        return _parse_timed(text, PolicyName(found[1]), found[2], even)
    raise _make_error(text, f"is not one of {_KNOWN}")


def _add_part(text: str, policy: Policy, part: str) -> Policy:
    if part == _ENFORCE:
        return replace(policy, admission=AdmissionMode.ENFORCE)
    if found := _DEGRADE.fullmatch(part):
        tier = TierAdmission(action=OverloadAction.DEGRADE, max_output_tokens=int(found[1]))
        return replace(policy, admission=AdmissionMode.ENFORCE, tier_admission=tier)
    if part == _PREFIX:
        return replace(policy, prefix_aware=True)
    if part == _NO_DEFLECT:
        return replace(policy, deflects=False)
    if part == _DIRECT:
        return replace(policy, dispatch=DispatchMode.DIRECT)
    known = ", ".join((_DIRECT, _NO_DEFLECT, _PREFIX, _ENFORCE, "+degrade:TOKENS"))
    raise _make_error(text, f"has a part {shorten_value(part)} that is not one of {known}")


def _parse_timed(text: str, name: PolicyName, time: str, even: tuple[int, int]) -> Policy:
    try:
        seconds = parse_duration(time)
    except ValueError as error:
        raise _make_error(text, str(error)) from None
    if seconds <= 0:
        raise _make_error(text, "must have a time above 0s")
    if name is PolicyName.COLD:
        return Policy(name, *even, flip_downtime_s=seconds)
    return Policy(name, *even, resplit_s=seconds)


def _parse_split(text: str, name: PolicyName, prefill: int, decode: int, instances: int) -> Policy:
    if prefill + decode != instances or not prefill or not decode:
        raise _make_error(text, f"must have at least one instance of each role and {instances} in all")
    return Policy(name, prefill, decode)


def _make_error(text: str, rule: str) -> InvalidInput:
    return InvalidInput("--policy", shorten_value(text), rule)


def list_splits(instances: int) -> list[Policy]:
    """Return all fixed splits of this many instances."""
    return [Policy(PolicyName.STATIC, prefill, instances - prefill) for prefill in range(1, instances)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlOptions:
    """Delays, errors and failures by which a real service differs from an ideal one. Times are seconds.

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
class LateStart:
    """An instance that does not serve from the beginning of a run. Times are seconds of the run."""

    number: int
    """Of the instance."""
    begins_s: float
    """When its engine starts; the router knows from then on when it will serve."""
    serves_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """One run.

    Attributes:
        reserved: What is reserved, by tier.
        weights: Weights by tier, where they are not 1.
        unscored_share: Share of the time of arrivals, from its start, whose requests are not scored.
        drain_s: Longest time after the last arrival; what runs then is unfinished.
        service: Its floors, prefill ahead and autoscaling settings are used; None: the default ones. The
            shipped policies flip only in mode Auto. All else, such as the name of the policy, the objectives,
            dispatch mode, deflection and admission, comes from the other attributes.
        prefix_caches: Whether engines keep computed prompts for those that begin alike.
        other_profiles: Profiles of single instances by number, where their hardware is another one. Instances
            whose profiles have the same name are a pool.
        cpu_instances: Instances on CPUs besides, with the role Prefill (`policy.overflow`).
        cpu_slowness: How many times as long their steps take as those of the profile.
        unsheddable_tiers: Tiers whose requests admission never refuses.
        late_starts: Instances that join during the run, as in a scale-out; with a fixed split.
        unjudged: Numbers of requests, by arrival, that are served without admission. Unlike a tier of their
            own that cannot be shed, that changes neither their place nor that of others.
        lookahead_steps: Most engine steps skipped together; 1 executes each, with the same result.
    """

    profile: EngineProfile
    instances: int
    policy: Policy
    slo: Slo
    seed: int = 1
    control: ControlOptions = ControlOptions()
    reserved: Mapping[str, Reserve] = field(default_factory=dict)
    weights: Mapping[str, int] = field(default_factory=dict)
    unscored_share: float = 0.1
    drain_s: float = 600.0
    service: PDServiceSpec | None = None
    prefix_caches: bool = False
    other_profiles: Mapping[int, EngineProfile] = field(default_factory=dict)
    cpu_instances: int = 0
    cpu_slowness: float = 20.0
    unsheddable_tiers: frozenset[str] = frozenset()
    late_starts: tuple[LateStart, ...] = ()
    unjudged: frozenset[int] = frozenset()
    lookahead_steps: int = LOOKAHEAD_STEPS

    def compute_first_scored_s(self, first_s: float, last_s: float) -> float:
        """Return the time from which arriving requests are scored; the first and last one arrive at these."""
        return first_s + self.unscored_share * (last_s - first_s)
