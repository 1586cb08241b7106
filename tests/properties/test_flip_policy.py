"""What holds for every observation: order, repetition, monotony, floors, and silence on missing numbers."""

import math
from dataclasses import replace
from random import Random

from hypothesis import given
from hypothesis import strategies as st

from fulcrum_autoscaler.policy import (
    Action,
    FlipRules,
    Memory,
    Observation,
    answer,
    measure_loads,
    monitor,
    proposal,
)
from fulcrum_core.api.pdassignment import Floors, PDAssignmentSpec, Refusal, RoleAssignment
from fulcrum_core.assignment import AssignmentRules, may_apply, serving
from fulcrum_core.state import FlipWanted, InstanceState
from fulcrum_core.values import Actor, AutoscalingMode, Role, Slo
from tests.unit.core.states import router_state

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
        decode_requests=requests,
        legs=requests,
        open_handoffs=0,
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
    ready = frozenset(name for name in roles if draw(st.sampled_from([True, True, True, False])))
    return Observation(
        assignment=spec, generation=7, ready=ready, router=draw(st.sampled_from([state, state, state, None]))
    )


@st.composite
def flip_rules(draw: st.DrawFn) -> FlipRules:
    shrink = draw(st.floats(0, 1))
    return FlipRules(
        mode=draw(st.sampled_from(AutoscalingMode)),
        paused=draw(st.sampled_from([False, False, True])),
        slo=Slo(ttft_s=1.0, tpot_s=0.1),
        expand=shrink + draw(st.floats(0.01, 2)),
        shrink=shrink,
        passes=draw(st.integers(1, 3)),
        interval_s=1.0,
        assignment=AssignmentRules(draw(st.sampled_from([0.0, 10.0]))),
    )


def auto(rules: FlipRules) -> FlipRules:
    return replace(rules, mode=AutoscalingMode.AUTO, paused=False)


def wanted(role: Role) -> FlipWanted:
    return FlipWanted(seq=1, role=role, reason="no instance within the SLO")


@given(observations(), flip_rules(), st.integers(0, 3), PHASES, st.randoms(use_true_random=False))
def test_order_of_instances_does_not_matter(
    seen: Observation, rules: FlipRules, passes: int, role: Role, rng: Random
) -> None:
    names = list(seen.assignment.roles)
    rng.shuffle(names)
    shuffled = replace(
        seen,
        assignment=seen.assignment.model_copy(
            update={"roles": {name: seen.assignment.roles[name] for name in names}}
        ),
        router=seen.router
        and seen.router.model_copy(
            update={"instances": tuple(sorted(seen.router.instances, key=lambda s: names.index(s.name)))}
        ),
    )
    memory = Memory(passes)
    assert monitor(memory, shuffled, rules, now_s=NOW_S) == monitor(memory, seen, rules, now_s=NOW_S)
    asked = wanted(role)
    assert answer(asked, shuffled, rules, now_s=NOW_S) == answer(asked, seen, rules, now_s=NOW_S)


@given(observations(), flip_rules(), st.integers(0, 3), PHASES)
def test_every_flip_is_one_that_every_reader_would_allow(
    seen: Observation, rules: FlipRules, passes: int, role: Role
) -> None:
    decisions = (
        monitor(Memory(passes), seen, rules, now_s=NOW_S)[1],
        answer(wanted(role), seen, rules, now_s=NOW_S),
    )
    for decision in decisions:
        assert decision.reason
        if decision.action is not Action.FLIP:
            continue
        after = proposal(seen.assignment, decision)
        assert may_apply(seen.assignment, after, seen.ready, rules.assignment, now_s=NOW_S).allowed
        assert decision.to is not None
        assert decision.instance is not None
        source = decision.to.other
        kept = serving(after.roles, seen.usable, source)
        assert len(kept) >= max(1, seen.assignment.floors.of(source))
        assert not seen.assignment.roles[decision.instance].cordoned


@given(observations(), flip_rules(), st.integers(0, 3), PHASES)
def test_nothing_flips_on_missing_or_stale_numbers(
    seen: Observation, rules: FlipRules, passes: int, role: Role
) -> None:
    unusable = (
        seen.router is None or NOW_S - seen.router.at_s > 3 * rules.interval_s or seen.router.generation < 7
    )
    blind = unusable or rules.mode is AutoscalingMode.OFF or rules.paused
    memory, ticked = monitor(Memory(passes), seen, rules, now_s=NOW_S)
    asked = answer(wanted(role), seen, rules, now_s=NOW_S)
    if blind:
        assert (memory, ticked.action, asked.action) == (Memory(), Action.HOLD, Action.HOLD)


@given(observations(), flip_rules(), st.integers(1, 3))
def test_forgetting_every_latency_never_makes_a_tick_flip(
    seen: Observation, rules: FlipRules, passes: int
) -> None:
    if seen.router is None:
        return
    dumb = tuple(
        state.model_copy(update={"itl_s": None, "decode_requests": 1}) for state in seen.router.instances
    )
    blind = replace(seen, router=seen.router.model_copy(update={"instances": dumb}))
    assert monitor(Memory(passes), blind, auto(rules), now_s=NOW_S)[1].action is Action.HOLD


@given(observations(), flip_rules(), st.floats(0, 1))
def test_more_decode_load_never_turns_a_refusal_of_prefill_into_a_flip(
    seen: Observation, rules: FlipRules, more_s: float
) -> None:
    if seen.router is None:
        return
    heavier = tuple(
        state.model_copy(update={"itl_s": None if state.itl_s is None else state.itl_s + more_s})
        for state in seen.router.instances
    )
    loaded = replace(seen, router=seen.router.model_copy(update={"instances": heavier}))
    before = answer(wanted(Role.PREFILL), seen, auto(rules), now_s=NOW_S)
    after = answer(wanted(Role.PREFILL), loaded, auto(rules), now_s=NOW_S)
    assert not (before.action is not Action.FLIP and after.action is Action.FLIP)


@given(observations(), flip_rules())
def test_with_shrink_at_half_of_expand_or_less_decode_load_is_judged_by_shrink_alone(
    seen: Observation, rules: FlipRules
) -> None:
    """So at Arrow's own thresholds, 1.0 and 0.5, the policy is Arrow's."""
    arrows = replace(auto(rules), expand=max(rules.expand, 2 * rules.shrink))
    decision = answer(wanted(Role.PREFILL), seen, arrows, now_s=NOW_S)
    load = decision.loads.decode if decision.loads else None
    if load is not None and load.instances > 1 and load.high < arrows.shrink:
        assert not decision.reason.startswith(
            "the router wants Prefill: no instance within the SLO; decode can"
        )


@given(observations(), flip_rules())
def test_the_monitor_never_flips_to_prefill(seen: Observation, rules: FlipRules) -> None:
    decision = monitor(Memory(rules.passes), seen, auto(rules), now_s=NOW_S)[1]
    assert decision.to in (None, Role.DECODE)


@given(observations(), flip_rules(), PHASES)
def test_advise_says_what_auto_would_do(seen: Observation, rules: FlipRules, role: Role) -> None:
    acting, advising = auto(rules), replace(auto(rules), mode=AutoscalingMode.ADVISE)
    did = answer(wanted(role), seen, acting, now_s=NOW_S)
    said = answer(wanted(role), seen, advising, now_s=NOW_S)
    expected = replace(did, action=Action.ADVISE) if did.action is Action.FLIP else did
    assert said == expected


@given(observations(), flip_rules(), st.integers(0, 3))
def test_a_second_look_right_after_a_flip_to_decode_waits(
    seen: Observation, rules: FlipRules, passes: int
) -> None:
    """With a cooldown, and however hot it is: one flip per cooldown."""
    cooled = replace(auto(rules), passes=1, assignment=AssignmentRules(10.0))
    memory, decision = monitor(Memory(passes), seen, cooled, now_s=NOW_S)
    if decision.action is not Action.FLIP:
        return
    after = replace(seen, assignment=proposal(seen.assignment, decision))
    assert monitor(memory, after, cooled, now_s=NOW_S)[1].action is not Action.FLIP


@given(observations())
def test_a_load_lies_between_its_bounds(seen: Observation) -> None:
    loads = measure_loads(seen, Slo(ttft_s=1.0, tpot_s=0.1))
    for load in (loads.prefill, loads.decode):
        if load is not None:
            assert 0 <= load.low <= load.high < math.inf
            assert (load.low == load.high) == (load.unknown == 0)
