"""The balanced policy: what it forecasts, how it scores a split, and when it flips how many instances."""

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulcrum_autoscaler.policy import (
    AutoscalingRules,
    DecisionAction,
    FlipDecision,
    Observation,
    PolicyState,
    decide_on_flip_request,
    decide_on_tick,
    propose_assignment,
)
from fulcrum_autoscaler.policy.balanced import find_target
from fulcrum_autoscaler.policy.forecast import DemandSample, Rates, add_sample, compute_rates
from fulcrum_autoscaler.policy.split_score import Need, measure_need, measure_slowdown, score_split
from fulcrum_core.api.pdassignment import Floors
from fulcrum_core.api.pdservice import PDServiceSpec
from fulcrum_core.assignment import AssignmentRules
from fulcrum_core.router_state import DemandState, DemandSums, InstanceState
from fulcrum_core.values import AutoscalingMode, FlipPolicy, Role, Slo
from tests.unit.autoscaler.builders import (
    NOW_S,
    decode,
    make_flip_request,
    make_observation,
    make_router_state,
    make_rules,
    prefill,
)

MODELS: dict[str, Any] = {"itl_intercept_s": 0.02, "itl_slope_s": 1e-6, "kv_capacity_tokens": 100_000}
IDLE: dict[str, Any] = {"tokens": 0, "decode_legs": 0}


def make_demand(seconds: float, *, prefill: float = 0.0, steps: float = 0.0) -> DemandState:
    """The sums after a time with 10 requests/s, `prefill` seconds and `steps` token-steps each second."""
    requests = round(10 * seconds)
    return DemandState(
        requests=requests,
        prefill_s=prefill * seconds,
        output_tokens=100.0 * requests,
        token_steps=steps * seconds,
    )


def observe(seconds: float, *instances: InstanceState, **rates: float) -> Observation:
    """What is observed after a time, at rates that have not changed."""
    state = make_router_state(*instances, at_s=NOW_S + seconds, demand=make_demand(seconds, **rates))
    return replace(make_observation(*instances), router=state)


def four_and_four(queued_s: float = 0.0) -> tuple[InstanceState, ...]:
    """Four prefill instances with work queued, and four idle decode instances."""
    return (
        *(prefill(f"p-{n}", queued_s, **MODELS) for n in range(4)),
        *(decode(f"d-{n}", **IDLE, **MODELS) for n in range(4)),
    )


def balanced_rules(**fields: Any) -> AutoscalingRules:
    return make_rules(**{"policy": FlipPolicy.BALANCED, **fields})


def run_ticks(*observations: Observation, rules: AutoscalingRules | None = None) -> list[FlipDecision]:
    """The decisions of one tick for each observation, at the time of its state."""
    state, decisions = PolicyState(), []
    for observation in observations:
        assert observation.router is not None
        state, decision = decide_on_tick(
            state, observation, rules or balanced_rules(), now_s=observation.router.at_s
        )
        decisions.append(decision)
    return decisions


def test_rates_are_those_of_the_last_arrivals() -> None:
    sums = [(0.0, 0, 0.0), (10.0, 100, 10.0), (14.0, 140, 50.0)]
    samples = tuple(
        DemandSample(at_s, DemandState(requests=n, prefill_s=s, output_tokens=n, token_steps=2 * n))
        for at_s, n, s in sums
    )
    assert compute_rates(samples) == Rates(requests=10, prefill=10, output_tokens=10, token_steps=20)


@pytest.mark.parametrize(
    ("withdrawn", "rate"),
    [
        pytest.param((0, 0, 900), 10.0, id="what left in the same second as it came"),
        pytest.param((0, 300, 900), 10.0, id="what left a second later: the rates are of the time of both"),
        pytest.param((0, 0, 990), 0.0, id="what came before the first sample makes no rate negative"),
    ],
)
def test_work_that_was_withdrawn_is_no_demand(withdrawn: tuple[int, ...], rate: float) -> None:
    """Beside ten requests a second, 300 and 600 come in the second and the third second."""
    samples = tuple(
        DemandSample(
            at_s,
            DemandState(requests=n, prefill_s=n, withdrawn=DemandSums(requests=left, prefill_s=left)),
        )
        for at_s, n, left in zip((0.0, 1.0, 2.0), (0, 310, 920), withdrawn, strict=True)
    )
    rates = compute_rates(samples)
    assert rates is not None
    assert (rates.requests, rates.prefill) == (rate, rate)


def test_sums_from_before_a_restart_of_the_router_are_dropped() -> None:
    before = (DemandSample(NOW_S - 1, make_demand(50)),)
    state = make_router_state(at_s=NOW_S, demand=make_demand(1))
    assert add_sample(before, state) == (DemandSample(NOW_S, make_demand(1)),)


@pytest.mark.parametrize(
    ("itl_s", "expected"),
    [
        pytest.param(None, (0.02, 1e-6, 80_000), id="not measured"),
        pytest.param(0.01, (0.02, 1e-6, 80_000), id="shorter than the model says"),
        pytest.param(0.05, (0.025, 1.25e-6, 60_000), id="longer"),
        pytest.param(1.0, (0.03, 1.5e-6, 140_000 / 3), id="far longer: not by the batch alone"),
    ],
)
def test_the_model_of_a_step_is_scaled_up_to_what_engines_measure(
    itl_s: float | None, expected: tuple[float, ...]
) -> None:
    """Else a split counts as good while its decodes miss their objective."""
    busy = decode("d", tokens=20_000, decode_legs=4, itl_s=itl_s, **MODELS)
    rates = Rates(requests=0, prefill=0, output_tokens=0, token_steps=0)
    observation = make_observation(prefill("p", 0.0, **MODELS), busy)
    slowdown = measure_slowdown(observation)
    need = measure_need(observation, rates, Slo(1.0, 0.1), slowdown=slowdown)
    assert need is not None
    found = need.itl_intercept_s, need.itl_slope_s, need.max_tokens
    assert found == pytest.approx(expected)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        pytest.param((None, None), math.inf, id="not known"),
        pytest.param((256, None), math.inf, id="not known of all"),
        pytest.param((256, 64), 160, id="of two pools"),
    ],
)
def test_the_batches_of_a_split_hold_what_the_router_has_found(
    limits: tuple[int | None, int | None], expected: float
) -> None:
    states = [decode(f"d{number}", **MODELS, max_seqs=limit) for number, limit in enumerate(limits)]
    rates = Rates(requests=0, prefill=0, output_tokens=0, token_steps=0)
    need = measure_need(make_observation(prefill("p"), *states), rates, Slo(1.0, 0.1), slowdown=1.0)
    assert need is not None
    assert need.max_seqs == expected


def test_models_of_prefill_instances_do_not_count() -> None:
    """They may never have decoded, and then have the model of another engine."""
    idle = prefill("p", 0.0, itl_intercept_s=0.001, itl_slope_s=1e-9, kv_capacity_tokens=100_000)
    observation = make_observation(idle, decode("d", **MODELS))
    rates = Rates(requests=0, prefill=0, output_tokens=0, token_steps=0)
    need = measure_need(observation, rates, Slo(1.0, 0.1), slowdown=1.0)
    assert need is not None
    assert (need.itl_intercept_s, need.itl_slope_s) == (0.02, 1e-6)


def test_models_count_by_the_decode_legs_of_their_instances() -> None:
    learned = decode("d-0", tokens=20_000, decode_legs=9, **MODELS)
    flipped = decode("d-1", tokens=0, decode_legs=1, itl_intercept_s=0.01, itl_slope_s=0.0)
    observation = make_observation(prefill("p"), learned, flipped)
    rates = Rates(requests=0, prefill=0, output_tokens=0, token_steps=0)
    need = measure_need(observation, rates, Slo(1.0, 0.1), slowdown=1.0)
    assert need is not None
    assert need.itl_intercept_s == pytest.approx(0.019)
    assert need.itl_slope_s == pytest.approx(0.9e-6)


def test_one_slow_engine_hardly_counts_in_the_slowdown_of_all() -> None:
    sound = [decode(f"d-{n}", 0.04, tokens=20_000, decode_legs=33, **MODELS) for n in range(3)]
    sick = decode("d-3", 2.0, tokens=0, decode_legs=1, **MODELS)
    assert measure_slowdown(make_observation(prefill("p"), *sound, sick)) == pytest.approx(1.0, abs=0.01)


def test_the_slowdown_is_forgotten_while_nothing_decodes() -> None:
    state = PolicyState()
    for t in range(1, 61):
        slow = decode("d", 0.08, tokens=20_000, decode_legs=4 if t < 20 else 0, **MODELS)
        observation = observe(float(t), prefill("p", 0.0, **MODELS), slow, prefill=0.1)
        state, _ = decide_on_tick(state, observation, balanced_rules(), now_s=NOW_S + t)
    assert state.balance.slowdown == pytest.approx(1.0, abs=0.01)


def test_the_slowdown_of_decode_is_averaged_over_some_seconds() -> None:
    """On real engines, a second may have steps of twice the usual time."""
    state, slowdowns = PolicyState(), []
    for t in range(1, 22):
        busy = decode("d", tokens=20_000, decode_legs=4, itl_s=0.08, **MODELS)
        observation = observe(float(t), prefill("p", 0.0, **MODELS), busy, prefill=0.1)
        state, _ = decide_on_tick(state, observation, balanced_rules(), now_s=NOW_S + t)
        slowdowns.append(state.balance.slowdown)
    assert slowdowns[0] == 1.0
    assert 1.05 < slowdowns[1] < 1.1
    assert slowdowns[-1] == pytest.approx(1.5, abs=0.01)


def make_need(**values: Any) -> Need:
    """80,000 tokens of 40 requests in decode, on instances whose step takes 0.02 s and 1 us a token."""
    usual: dict[str, Any] = {
        "rates": Rates(requests=1, prefill=1, output_tokens=0, token_steps=0),
        "queued_s": 0.0,
        "tokens": 80_000,
        "reserved_tokens": 0,
        "legs": 40,
        "max_tokens": 50_000,
        "itl_intercept_s": 0.02,
        "itl_slope_s": 1e-6,
        "itl_s": 0.02,
        "kv_capacity_tokens": 100_000,
        "max_seqs": 20,
    }
    return Need(**usual | values)


def test_each_ratio_of_a_split_compares_what_it_needs_with_what_it_has() -> None:
    rates = Rates(requests=10, prefill=3, output_tokens=1e9, token_steps=0)
    need = make_need(rates=rates, queued_s=4.0, tokens=72_000, legs=12, full_decode_instances=1)
    score = score_split(2, 2, need, Slo(1.0, 0.1), horizon_s=0.0)
    expected = {"prefill": 1.5, "TTFT": 2.3, "TPOT": 0.9, "KV cache": 0.4, "sequences": 0.3, "held": 0.5}
    assert score.ratios == pytest.approx(expected)


def test_prompts_of_a_long_queue_need_decode_only_when_they_are_computed() -> None:
    need = make_need(
        rates=Rates(requests=1, prefill=1, output_tokens=1e9, token_steps=0),
        queued_s=100.0,
        reserved_tokens=1_000_000,
        max_tokens=1e9,
        max_seqs=math.inf,
    )
    score = score_split(2, 2, need, Slo(1.0, 0.1), horizon_s=5.0)
    assert score.ratios["KV cache"] == pytest.approx((80_000 + 0.1 * 1_000_000) / 2 / 90_000)


def test_requests_in_flight_count_until_they_have_ended() -> None:
    need = make_need(rates=Rates(requests=1, prefill=0, output_tokens=100, token_steps=0))
    now, later = (score_split(2, 2, need, Slo(1.0, 0.1), horizon_s=horizon_s) for horizon_s in (0.0, 100.0))
    assert (now.cause, round(now.worst, 2), round(later.worst, 2)) == ("TPOT", 1.0, 0.05)


LONG_ANSWERS = Rates(requests=1, prefill=3, output_tokens=1e9, token_steps=0)
"""The requests in flight do not end within the horizon."""


def test_decode_in_its_spare_time_adds_to_prefill_and_takes_longer_for_a_step() -> None:
    need = make_need(rates=LONG_ANSWERS, tokens=10_000, max_tokens=80_000, max_seqs=math.inf)
    score = score_split(2, 2, need, Slo(100.0, 0.1), horizon_s=5.0, deflection=1.0)
    assert score.ratios["prefill"] == pytest.approx(3 / (2 + 0.5 * 2))
    assert score.ratios["TPOT"] == pytest.approx(5_000 / (0.8 * (0.5 * 0.1 - 0.02) / 1e-6))


def test_decode_without_spare_time_computes_no_prompts() -> None:
    need = make_need(
        rates=replace(LONG_ANSWERS, prefill=2.1), tokens=160_000, max_tokens=80_000, max_seqs=math.inf
    )
    need = replace(need, kv_capacity_tokens=1e6)
    alone, shared = (
        score_split(2, 2, need, Slo(100.0, 0.1), horizon_s=5.0, deflection=part) for part in (0.0, 1.0)
    )
    assert alone.cause == "TPOT"
    assert shared == alone


@given(
    rates=st.builds(
        Rates,
        requests=st.just(0.0) | st.floats(0.01, 1e3),
        prefill=st.floats(0, 100),
        output_tokens=st.floats(0, 1e6),
        token_steps=st.floats(0, 1e9),
    ),
    queued_s=st.floats(0, 1e4),
    tokens=st.integers(0, 10**7),
    split=st.tuples(st.integers(1, 50), st.integers(1, 50)),
    deflection=st.floats(0, 1),
    slope=st.sampled_from([0.0, 1e-6]),
)
def test_deflection_never_makes_a_split_look_worse(
    rates: Rates, queued_s: float, tokens: int, split: tuple[int, int], deflection: float, slope: float
) -> None:
    need = make_need(rates=rates, queued_s=queued_s, tokens=tokens, itl_slope_s=slope)
    alone, shared = (
        score_split(*split, need, Slo(1.0, 0.1), horizon_s=5.0, deflection=part) for part in (0.0, deflection)
    )
    assert shared.worst <= alone.worst < math.inf
    assert 0.0 <= shared.deflected_share <= 0.5


@pytest.mark.parametrize(
    ("token_steps", "output_tokens", "deflects", "target"),
    [
        pytest.param(2.3e6, 300, False, "5:3 (TPOT at 1.03)", id="one instance is missing somewhere"),
        pytest.param(
            2.3e6,
            300,
            True,
            "4:4 (prefill at 1.00, with 10 % of decode's time for prompts)",
            id="decode computes what is missing",
        ),
        pytest.param(2.3e6, 100, True, "5:3 (TPOT at 1.03)", id="too short answers for stalls of 44 ms"),
        pytest.param(1.0e6, 300, True, "6:2 (prefill at 0.73)", id="a split that needs no deflection"),
    ],
)
def test_deflection_counts_if_no_split_is_good_enough_without_it(
    token_steps: float, output_tokens: float, deflects: bool, target: str
) -> None:
    rates = Rates(requests=100, prefill=4.4, output_tokens=output_tokens, token_steps=token_steps)
    need = make_need(rates=rates, tokens=0, legs=0, max_tokens=80_000, max_seqs=math.inf)
    _, found = find_target(4, 4, need, balanced_rules(deflects=deflects))
    assert str(found) == target


@pytest.mark.parametrize(
    ("token_steps", "target"),
    [
        pytest.param(
            1.0e6, "6:2 (prefill at 0.77)", id="just above 0.75: an eighth of what is missing counts"
        ),
        pytest.param(2.3e6, "4:4 (prefill at 1.00, with 15 % of decode's time for prompts)", id="all counts"),
    ],
)
def test_deflection_counts_the_more_the_worse_the_best_split_is(token_steps: float, target: str) -> None:
    rates = Rates(requests=100, prefill=4.6, output_tokens=300, token_steps=token_steps)
    need = make_need(rates=rates, tokens=0, legs=0, max_tokens=80_000, max_seqs=math.inf)
    _, found = find_target(4, 4, need, balanced_rules(deflects=True))
    assert str(found) == target


@pytest.mark.parametrize("deflect", [True, False])
def test_deflection_counts_if_the_service_allows_it(deflect: bool) -> None:
    spec = PDServiceSpec.model_validate(
        {"model": "m", "instances": 8, "router": {"dispatch": {"deflect": deflect}}}
    )
    assert AutoscalingRules.from_spec(spec, assignment_rules=AssignmentRules(10.0)).deflects is deflect


def test_a_split_that_is_far_off_is_left_after_two_ticks_with_several_flips_in_one_write() -> None:
    observations = [observe(t, *four_and_four(queued_s=8.0), prefill=6.0) for t in (1.0, 2.0, 3.0)]
    *before, decision = run_ticks(*observations)
    assert {d.action for d in before} == {DecisionAction.HOLD}
    proposed = propose_assignment(observations[-1].assignment, decision)
    flipped = sorted(
        name
        for name, entry in proposed.roles.items()
        if entry.role is not observations[-1].assignment.roles[name].role
    )
    assert (decision.action, decision.to, flipped) == (
        DecisionAction.FLIP,
        Role.PREFILL,
        ["d-0", "d-1", "d-2"],
    )


@pytest.mark.parametrize(
    "work", [pytest.param(1.0, id="else good"), pytest.param(3.7, id="else nearly good")]
)
def test_what_a_single_tick_shows_moves_no_instance(work: float) -> None:
    """A queue that one tick saw, however long, and the next one does not."""
    queues = 0.0, 0.0, 8.0, 0.0
    observations = [
        observe(float(t), *four_and_four(queued_s=queued_s), prefill=work)
        for t, queued_s in enumerate(queues, start=1)
    ]
    assert {d.action for d in run_ticks(*observations)} == {DecisionAction.HOLD}


def test_a_split_that_is_slightly_off_is_left_when_the_regret_pays_for_the_flip() -> None:
    actions = [d.action for d in run_ticks(*(observe(t, *four_and_four(), prefill=4.4) for t in range(1, 6)))]
    hold, flip = DecisionAction.HOLD, DecisionAction.FLIP
    assert actions == [hold, hold, hold, flip, hold]


def test_the_time_in_which_flips_were_paused_is_no_regret() -> None:
    state, actions = PolicyState(), []
    for t in range(1, 14):
        observation = observe(t, *four_and_four(), prefill=4.4)
        rules = balanced_rules(paused=2 < t < 13)
        state, decision = decide_on_tick(state, observation, rules, now_s=NOW_S + t)
        actions.append(decision.action)
    assert set(actions) == {DecisionAction.HOLD}


def test_a_comfortable_split_stays_although_another_one_needs_less() -> None:
    *_, decision = run_ticks(*(observe(t, *four_and_four(), prefill=3.2) for t in range(1, 30)))
    assert (decision.action, decision.reason) == (
        DecisionAction.HOLD,
        "split 4:4 (prefill at 0.80): at most 0.85 is enough",
    )


def test_decode_gets_an_instance_while_requests_wait_for_room_in_decode() -> None:
    """Else prefill instances would be idle: what is held in the router is no work of theirs."""
    instances = [state.model_copy(update={"decode_is_full": True}) for state in four_and_four()]
    decisions = run_ticks(*(observe(t, *instances, prefill=2.0) for t in range(1, 9)))
    flips = [(d.to, len(d.further_instances)) for d in decisions if d.action is DecisionAction.FLIP]
    assert flips[:1] == [(Role.DECODE, 0)]


def test_the_floor_of_a_role_is_kept() -> None:
    rules = balanced_rules(assignment_rules=AssignmentRules(10.0, floors=Floors(decode=3)))
    observations = [observe(t, *four_and_four(queued_s=8.0), prefill=6.0) for t in (1.0, 2.0, 3.0)]
    *_, decision = run_ticks(*observations, rules=rules)
    assert (decision.instance, decision.further_instances) == ("d-0", ())


@pytest.mark.parametrize(
    ("fields", "action"),
    [
        pytest.param({"mode": AutoscalingMode.ADVISE}, DecisionAction.ADVISE, id="Advise"),
        pytest.param({"mode": AutoscalingMode.OFF}, DecisionAction.HOLD, id="Off"),
        pytest.param({"paused": True}, DecisionAction.HOLD, id="paused"),
    ],
)
def test_balanced_flips_only_in_mode_auto_and_while_not_paused(
    fields: dict[str, Any], action: DecisionAction
) -> None:
    observations = [observe(t, *four_and_four(queued_s=8.0), prefill=6.0) for t in (1.0, 2.0, 3.0)]
    assert run_ticks(*observations, rules=balanced_rules(**fields))[-1].action is action


def test_nothing_flips_before_the_router_has_reported_the_demand() -> None:
    observation = make_observation(*four_and_four(queued_s=8.0))
    assert run_ticks(observation, observation)[-1].reason == "the demand is not known yet"


def test_a_flip_request_is_refused() -> None:
    _, decision = decide_on_flip_request(
        PolicyState(),
        make_flip_request(Role.PREFILL),
        make_observation(*four_and_four()),
        balanced_rules(),
        now_s=NOW_S,
    )
    assert (decision.action, decision.reason) == (
        DecisionAction.REFUSE,
        "the policy balanced decides at ticks, not on flip requests",
    )


def test_decode_that_fills_beyond_the_forecast_raises_it() -> None:
    """Answers are longer than predicted: nobody of their kind has ended yet."""

    def fill(seconds: float, tokens: int) -> Observation:
        instances = (
            prefill("p-0", 0.0, **MODELS),
            decode("d-0", **{**MODELS, "tokens": tokens, "decode_legs": 10}),
        )
        return observe(seconds, *instances, steps=100_000.0)

    forecasts = [decision.forecast for decision in run_ticks(fill(0, 0), fill(1, 10_000), fill(2, 40_000))]
    assert forecasts[1] is not None
    assert forecasts[2] is not None
    assert forecasts[2].output_tokens > 1.2 * forecasts[1].output_tokens
    assert forecasts[2].prefill == forecasts[1].prefill


def test_decode_that_fills_while_nobody_looks_does_not_raise_the_forecast() -> None:
    """The expected tokens are those of the last tick: after a pause they say nothing."""
    state, forecasts = PolicyState(), []
    for t, tokens, paused in ((0, 0, False), (1, 1_000, False), (2, 1_000, True), (4, 40_000, False)):
        instances = (
            prefill("p-0", 0.0, **MODELS),
            decode("d-0", **{**MODELS, "tokens": tokens, "decode_legs": 10}),
        )
        observation = observe(t, *instances, steps=100_000.0)
        state, decision = decide_on_tick(state, observation, balanced_rules(paused=paused), now_s=NOW_S + t)
        forecasts.append(decision.forecast)
    assert forecasts[1] is not None
    assert forecasts[3] is not None
    assert forecasts[3].output_tokens == pytest.approx(forecasts[1].output_tokens)
