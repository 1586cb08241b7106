"""Properties of the flip policy: order of instances, repetition, monotony, floors, missing numbers."""

import math
from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from fulcrum_autoscaler.policy import (
    AutoscalingRules,
    DecisionAction,
    MonitorState,
    Observation,
    measure_loads,
    propose_assignment,
)
from fulcrum_autoscaler.policy.arrow import decide_on_flip_request, decide_on_tick
from fulcrum_core.api.pdassignment import Floors, PDAssignmentSpec, Refusal, RoleAssignment
from fulcrum_core.assignment import AssignmentRules, list_assigned, may_apply
from fulcrum_core.router_state import FlipRequest, InstanceState
from fulcrum_core.values import Actor, AutoscalingMode, FlipPolicy, Role, Slo
from tests.unit.core.router_states import router_state

NOW_S = 1_000_000.0
ROLES = st.sampled_from([Role.PREFILL, Role.DECODE])
PHASES = st.sampled_from([Role.PREFILL, Role.DECODE])
NEAR = st.floats(NOW_S - 30, NOW_S + 30)
SECONDS = st.one_of(st.floats(0, 5), st.just(math.nan))
LATENCY = st.one_of(st.none(), st.floats(0, 0.5), st.just(math.nan), st.just(math.inf))


@st.composite
def instance_states(draw: st.DrawFn, name: str, role: Role) -> InstanceState:
    requests = draw(st.integers(0, 3))
    return InstanceState(
        name=name,
        role=role,
        serving=draw(st.sampled_from([True, True, True, False])),
        prefill_queued_s=draw(SECONDS),
        prefill_tokens=draw(st.integers(0, 2)) * 100,
        decode_tokens=draw(st.integers(0, 5)) * 100 if requests else 0,
        decode_legs=requests,
        legs=requests,
        pending_transfers=0,
        itl_s=draw(LATENCY),
    )


@st.composite
def entries(draw: st.DrawFn, role: Role) -> RoleAssignment:
    refused = Refusal(role=role.other, reason="did not verify", until=draw(NEAR))
    return RoleAssignment(
        role=role,
        since=NOW_S - 1000,
        by=draw(st.sampled_from(Actor)),
        pinned_until=draw(st.one_of(st.none(), st.none(), NEAR)),
        cordoned=draw(st.sampled_from([False, False, False, True])),
        refused=draw(st.sampled_from([None, None, refused])),
    )


@st.composite
def observations(draw: st.DrawFn) -> Observation:
    roles = {f"chat-{n}": draw(ROLES) for n in range(draw(st.integers(0, 6)))}
    spec = PDAssignmentSpec(
        service="chat",
        roles={name: draw(entries(role)) for name, role in roles.items()},
        floors=Floors(prefill=draw(st.integers(0, 3)), decode=draw(st.integers(0, 3))),
        last_prefill_to_decode=draw(st.one_of(st.none(), st.floats(NOW_S - 30, NOW_S))),
    )
    state = router_state(
        *(draw(instance_states(name, role)) for name, role in roles.items()),
        generation=draw(st.sampled_from([7, 7, 7, 6])),
        acknowledged_at_s=NOW_S - 5,
        at_s=NOW_S - draw(st.sampled_from([0.0, 1.0, 10.0])),
    )
    serving = frozenset(name for name in roles if draw(st.sampled_from([True, True, True, False])))
    return Observation(
        assignment=spec,
        generation=7,
        serving_by_phase=serving,
        router=draw(st.sampled_from([state, state, state, None])),
    )


@st.composite
def autoscaling_rules(draw: st.DrawFn) -> AutoscalingRules:
    shrink = draw(st.floats(0, 1))
    return AutoscalingRules(
        mode=draw(st.sampled_from(AutoscalingMode)),
        policy=FlipPolicy.ARROW,
        paused=draw(st.sampled_from([False, False, True])),
        slo=Slo(ttft_s=1.0, tpot_s=0.1),
        expand=shrink + draw(st.floats(0.01, 2)),
        shrink=shrink,
        consecutive_ticks=draw(st.integers(1, 3)),
        interval_s=1.0,
        assignment_rules=AssignmentRules(draw(st.sampled_from([0.0, 10.0]))),
        deflects=False,
    )


def auto(rules: AutoscalingRules) -> AutoscalingRules:
    return replace(rules, mode=AutoscalingMode.AUTO, paused=False)


def make_flip_request(role: Role) -> FlipRequest:
    return FlipRequest(seq=1, role=role, reason="no instance within the SLO")


@given(observations(), autoscaling_rules(), st.integers(0, 3), PHASES, st.randoms(use_true_random=False))
def test_order_of_instances_does_not_matter(
    observation: Observation, rules: AutoscalingRules, consecutive_ticks: int, role: Role, rng: Random
) -> None:
    names = list(observation.assignment.roles)
    rng.shuffle(names)
    shuffled = replace(
        observation,
        assignment=observation.assignment.model_copy(
            update={"roles": {name: observation.assignment.roles[name] for name in names}}
        ),
        router=observation.router
        and observation.router.model_copy(
            update={
                "instances": tuple(sorted(observation.router.instances, key=lambda s: names.index(s.name)))
            }
        ),
    )
    monitor_state = MonitorState(consecutive_ticks)
    assert decide_on_tick(monitor_state, shuffled, rules, now_s=NOW_S) == decide_on_tick(
        monitor_state, observation, rules, now_s=NOW_S
    )
    request = make_flip_request(role)
    assert decide_on_flip_request(request, shuffled, rules, now_s=NOW_S) == decide_on_flip_request(
        request, observation, rules, now_s=NOW_S
    )


@given(observations(), autoscaling_rules(), st.integers(0, 3), PHASES)
def test_every_flip_passes_may_apply(
    observation: Observation, rules: AutoscalingRules, consecutive_ticks: int, role: Role
) -> None:
    decisions = (
        decide_on_tick(MonitorState(consecutive_ticks), observation, rules, now_s=NOW_S)[1],
        decide_on_flip_request(make_flip_request(role), observation, rules, now_s=NOW_S),
    )
    for decision in decisions:
        assert decision.reason
        if decision.action is not DecisionAction.FLIP:
            continue
        after = propose_assignment(observation.assignment, decision)
        assert may_apply(
            observation.assignment, after, observation.serving_by_phase, rules.assignment_rules, now_s=NOW_S
        ).allowed
        assert decision.to is not None
        assert decision.instance is not None
        source = decision.to.other
        kept = list_assigned(after.roles, observation.confirmed_serving, source)
        assert len(kept) >= max(1, observation.assignment.floors.for_role(source))
        assert not observation.assignment.roles[decision.instance].cordoned


@given(observations(), autoscaling_rules(), st.integers(0, 3), PHASES)
def test_nothing_flips_on_missing_or_stale_numbers(
    observation: Observation, rules: AutoscalingRules, consecutive_ticks: int, role: Role
) -> None:
    unusable = (
        observation.router is None
        or NOW_S - observation.router.at_s > 3 * rules.interval_s
        or observation.router.generation < 7
    )
    without_numbers = unusable or rules.mode is AutoscalingMode.OFF or rules.paused
    monitor_state, ticked = decide_on_tick(MonitorState(consecutive_ticks), observation, rules, now_s=NOW_S)
    requested = decide_on_flip_request(make_flip_request(role), observation, rules, now_s=NOW_S)
    if without_numbers:
        assert (monitor_state, ticked.action, requested.action) == (
            MonitorState(),
            DecisionAction.HOLD,
            DecisionAction.HOLD,
        )


@given(observations(), autoscaling_rules(), st.integers(1, 3))
def test_without_any_latency_no_tick_flips(
    observation: Observation, rules: AutoscalingRules, consecutive_ticks: int
) -> None:
    if observation.router is None:
        return
    without_latency = tuple(
        state.model_copy(update={"itl_s": None, "decode_legs": 1}) for state in observation.router.instances
    )
    without_numbers = replace(
        observation, router=observation.router.model_copy(update={"instances": without_latency})
    )
    assert (
        decide_on_tick(MonitorState(consecutive_ticks), without_numbers, auto(rules), now_s=NOW_S)[1].action
        is DecisionAction.HOLD
    )


@given(observations(), autoscaling_rules(), st.floats(0, 1))
def test_more_decode_load_never_turns_a_refusal_of_prefill_into_a_flip(
    observation: Observation, rules: AutoscalingRules, more_s: float
) -> None:
    if observation.router is None:
        return
    heavier = tuple(
        state.model_copy(update={"itl_s": None if state.itl_s is None else state.itl_s + more_s})
        for state in observation.router.instances
    )
    loaded = replace(observation, router=observation.router.model_copy(update={"instances": heavier}))
    before = decide_on_flip_request(make_flip_request(Role.PREFILL), observation, auto(rules), now_s=NOW_S)
    after = decide_on_flip_request(make_flip_request(Role.PREFILL), loaded, auto(rules), now_s=NOW_S)
    assert not (before.action is not DecisionAction.FLIP and after.action is DecisionAction.FLIP)


@given(observations(), autoscaling_rules())
def test_with_shrink_at_half_of_expand_or_less_decode_load_is_judged_by_shrink_alone(
    observation: Observation, rules: AutoscalingRules
) -> None:
    """So with Arrow's own thresholds, 1.0 and 0.5, the policy equals Arrow's."""
    arrow_rules = replace(auto(rules), expand=max(rules.expand, 2 * rules.shrink))
    decision = decide_on_flip_request(make_flip_request(Role.PREFILL), observation, arrow_rules, now_s=NOW_S)
    load = decision.loads.decode if decision.loads else None
    if load is not None and load.instances > 1 and load.high < arrow_rules.shrink:
        cause = "the router requests an instance for Prefill: no instance within the SLO"
        assert not decision.reason.startswith(f"{cause}; decode gives up no instance")


@given(observations(), autoscaling_rules())
def test_the_monitor_never_flips_to_prefill(observation: Observation, rules: AutoscalingRules) -> None:
    decision = decide_on_tick(MonitorState(rules.consecutive_ticks), observation, auto(rules), now_s=NOW_S)[1]
    assert decision.to in (None, Role.DECODE)


@given(observations(), autoscaling_rules(), PHASES)
def test_advise_reports_the_decision_of_auto(
    observation: Observation, rules: AutoscalingRules, role: Role
) -> None:
    acting, advising = auto(rules), replace(auto(rules), mode=AutoscalingMode.ADVISE)
    acted = decide_on_flip_request(make_flip_request(role), observation, acting, now_s=NOW_S)
    advised = decide_on_flip_request(make_flip_request(role), observation, advising, now_s=NOW_S)
    expected = replace(acted, action=DecisionAction.ADVISE) if acted.action is DecisionAction.FLIP else acted
    assert advised == expected


@given(observations(), autoscaling_rules(), st.integers(0, 3))
def test_a_second_tick_right_after_a_flip_to_decode_does_not_flip(
    observation: Observation, rules: AutoscalingRules, consecutive_ticks: int
) -> None:
    """However high the load is, there is one flip to Decode per cooldown."""
    cooling_rules = replace(auto(rules), consecutive_ticks=1, assignment_rules=AssignmentRules(10.0))
    monitor_state, decision = decide_on_tick(
        MonitorState(consecutive_ticks), observation, cooling_rules, now_s=NOW_S
    )
    if decision.action is not DecisionAction.FLIP:
        return
    after = replace(observation, assignment=propose_assignment(observation.assignment, decision))
    assert (
        decide_on_tick(monitor_state, after, cooling_rules, now_s=NOW_S)[1].action is not DecisionAction.FLIP
    )


@given(observations())
def test_a_load_lies_between_its_bounds(observation: Observation) -> None:
    loads = measure_loads(observation, Slo(ttft_s=1.0, tpot_s=0.1))
    for load in (loads.prefill, loads.decode):
        if load is not None:
            assert 0 <= load.low <= load.high < math.inf
            assert (load.low == load.high) == (load.unknown == 0)
