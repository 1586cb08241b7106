"""Arrow's Algorithm 2, and the handling of flip requests: every branch, with its action and its reason."""

from dataclasses import replace
from typing import Any

import pytest

from fulcrum_autoscaler.policy import (
    AutoscalingRules,
    DecisionAction,
    FlipDecision,
    MonitorState,
    Observation,
    propose_assignment,
)
from fulcrum_autoscaler.policy.arrow import decide_on_flip_request, decide_on_tick
from fulcrum_core.assignment import AssignmentRules
from fulcrum_core.values import Actor, AutoscalingMode, Role
from tests.unit.autoscaler.builders import (
    NOW_S,
    assignment,
    decode,
    entry,
    make_flip_request,
    make_observation,
    make_router_state,
    make_rules,
    prefill,
)

BUSY_PREFILL = (prefill("p-0", 0.9), prefill("p-1", 0.8))
QUIET_PREFILL = (prefill("p-0", 0.2), prefill("p-1", 0.3))
IDLE_DECODE = decode("d-0", tokens=0, decode_legs=0)


def tick(observation: Observation, autoscaling_rules: AutoscalingRules | None = None) -> FlipDecision:
    return decide_on_tick(MonitorState(), observation, autoscaling_rules or make_rules(), now_s=NOW_S)[1]


@pytest.mark.parametrize(
    ("instances", "expected"),
    [
        pytest.param(
            (*BUSY_PREFILL, decode("d-0", 0.1)),
            DecisionAction.FLIP,
            id="decode load at the objective flips an instance",
        ),
        pytest.param(
            (*BUSY_PREFILL, decode("d-0", 0.099)),
            DecisionAction.HOLD,
            id="decode load just below the objective does not, while prefill is busy",
        ),
        pytest.param(
            (*QUIET_PREFILL, decode("d-0", 0.05)),
            DecisionAction.FLIP,
            id="low prefill load flips unless decode load is low too",
        ),
        pytest.param(
            (*QUIET_PREFILL, decode("d-0", 0.049)),
            DecisionAction.HOLD,
            id="low prefill and decode load flip nothing",
        ),
        pytest.param(
            (prefill("p-0", 0.5), prefill("p-1", 0.5), decode("d-0", 0.06)),
            DecisionAction.FLIP,
            id="prefill load at shrink is low",
        ),
        pytest.param(
            (prefill("p-0", 0.5), prefill("p-1", 0.51), decode("d-0", 0.06)),
            DecisionAction.HOLD,
            id="prefill load above shrink is not low",
        ),
        pytest.param(
            (*BUSY_PREFILL, decode("d-0", 0.3), decode("d-1", 0.0, 0, decode_legs=0)),
            DecisionAction.FLIP,
            id="the mean counts: 3.0 and 0.0 give 1.5",
        ),
        pytest.param(
            (*BUSY_PREFILL, decode("d-0", 0.18), IDLE_DECODE.model_copy(update={"name": "d-1"})),
            DecisionAction.HOLD,
            id="an idle instance halves the mean",
        ),
        pytest.param((*QUIET_PREFILL, IDLE_DECODE), DecisionAction.HOLD, id="idle decode needs no instance"),
        pytest.param(
            (prefill("p-0"), decode("d-0", 0.5)), DecisionAction.REFUSE, id="the last prefill instance stays"
        ),
        pytest.param(
            (decode("d-0", 0.5), decode("d-1", 0.5)),
            DecisionAction.REFUSE,
            id="no prefill instance could flip",
        ),
        pytest.param(
            BUSY_PREFILL, DecisionAction.HOLD, id="no decode instance serves, so its load is unknown"
        ),
        pytest.param((), DecisionAction.HOLD, id="no instance serves"),
        pytest.param(
            (*QUIET_PREFILL, decode("d-0", None)),
            DecisionAction.HOLD,
            id="decoding without a latency is unknown",
        ),
        pytest.param((*QUIET_PREFILL, decode("d-0", float("nan"))), DecisionAction.HOLD, id="NaN is unknown"),
        pytest.param(
            (*QUIET_PREFILL, decode("d-0", float("inf"))), DecisionAction.HOLD, id="infinity is unknown"
        ),
        pytest.param(
            (*QUIET_PREFILL, decode("d-0", -1.0)), DecisionAction.HOLD, id="a negative latency is unknown"
        ),
        pytest.param(
            (*QUIET_PREFILL, decode("d-0", 0.08), decode("d-1", None)),
            DecisionAction.HOLD,
            id="half unknown counts as 0 against the flip",
        ),
        pytest.param(
            (*QUIET_PREFILL, decode("d-0", 0.2), decode("d-1", None)),
            DecisionAction.FLIP,
            id="half unknown: the known half alone gives 1.0",
        ),
        pytest.param(
            (prefill("p-0"), prefill("p-1", float("nan")), decode("d-0", 0.06)),
            DecisionAction.FLIP,
            id="one unknown prefill instance of two counts as 1: mean 0.5",
        ),
        pytest.param(
            (prefill("p-0", 0.1), prefill("p-1", float("nan")), decode("d-0", 0.06)),
            DecisionAction.HOLD,
            id="an unknown prefill load argues against the flip",
        ),
    ],
)
def test_monitor_flips_to_decode_exactly_at_its_thresholds(
    instances: tuple[Any, ...], expected: DecisionAction
) -> None:
    assert tick(make_observation(*instances)).action is expected


@pytest.mark.parametrize(
    ("instances", "expected"),
    [
        pytest.param(
            (prefill("p-0", 0.0), IDLE_DECODE), "neither prefill nor decode has any load", id="no load at all"
        ),
        pytest.param(
            (*BUSY_PREFILL, decode("d-0", 0.05)),
            "prefill load 0.85, decode load 0.50: decode gets an instance at a decode load of 1.00, "
            "or of 0.50 while prefill load is at most 0.50",
            id="loads and thresholds",
        ),
    ],
)
def test_a_tick_that_holds_reports_the_loads_and_thresholds(
    instances: tuple[Any, ...], expected: str
) -> None:
    assert tick(make_observation(*instances)).reason == expected


def test_a_decision_reports_loads_reason_and_rejected_instances() -> None:
    observation = make_observation(prefill("p-0", 0.9), prefill("p-1", 0.8), decode("d-0", 0.12))
    decision = tick(observation)
    assert decision.dump() == {
        "at_s": NOW_S,
        "action": "flip",
        "trigger": "tick",
        "reason": "decode load 1.20 has reached 1.00, for 1 tick; "
        "cheapest to flip: p-1 (0.80 s of prefill queued)",
        "instance": "p-1",
        "further_instances": (),
        "to": "Decode",
        "loads": {
            "prefill": {
                "low": pytest.approx(0.85),
                "high": pytest.approx(0.85),
                "instances": 2,
                "unknown": 0,
            },
            "decode": {"low": pytest.approx(1.2), "high": pytest.approx(1.2), "instances": 1, "unknown": 0},
        },
        "forecast": None,
        "consecutive_ticks": 1,
        "split": "2:1",
        "generation": 1,
        "rejected": ({"instance": "p-0", "reason": "0.90 s of prefill queued"},),
    }


@pytest.mark.parametrize(
    ("changes", "autoscaling_rules", "reason"),
    [
        pytest.param({}, make_rules(mode=AutoscalingMode.OFF), "autoscaling is off", id="mode off"),
        pytest.param({}, make_rules(paused=True), "flips are paused", id="flips paused"),
        pytest.param(
            {"router": None},
            make_rules(),
            "cannot decide: the router did not respond",
            id="router does not respond",
        ),
        pytest.param(
            {"router": make_router_state(*BUSY_PREFILL, decode("d-0", 0.5), at_s=NOW_S - 3.1)},
            make_rules(),
            "cannot decide: the router's state is 3.1 s old; the limit is 3.0 s",
            id="state older than three ticks",
        ),
        pytest.param(
            {"router": make_router_state(*BUSY_PREFILL, decode("d-0", 0.5), at_s=NOW_S + 4)},
            make_rules(),
            "cannot decide: the router's state is dated 4.0 s ahead; the limit is 3.0 s",
            id="state from the future",
        ),
        pytest.param(
            {"router": make_router_state(*BUSY_PREFILL, decode("d-0", 0.5), at_s=float("nan"))},
            make_rules(),
            "cannot decide: the router's state is dated nan s ahead; the limit is 3.0 s",
            id="state without a time",
        ),
        pytest.param(
            {"generation": 2},
            make_rules(),
            "cannot decide: the router has applied generation 1 of the assignment, not yet 2",
            id="router behind the assignment",
        ),
    ],
)
def test_nothing_flips_while_off_paused_or_without_current_router_state(
    changes: dict[str, Any], autoscaling_rules: AutoscalingRules, reason: str
) -> None:
    observation = replace(make_observation(*BUSY_PREFILL, decode("d-0", 0.5)), **changes)
    monitor_state, ticked = decide_on_tick(MonitorState(2), observation, autoscaling_rules, now_s=NOW_S)
    requested = decide_on_flip_request(
        make_flip_request(Role.DECODE), observation, autoscaling_rules, now_s=NOW_S
    )
    assert (monitor_state, ticked.action, ticked.reason) == (MonitorState(), DecisionAction.HOLD, reason)
    assert (requested.action, requested.reason) == (DecisionAction.HOLD, reason)


def test_a_flip_needs_its_condition_on_consecutive_ticks() -> None:
    overloaded, idle = (
        make_observation(*BUSY_PREFILL, decode("d-0", 0.2)),
        make_observation(*BUSY_PREFILL, decode("d-0", 0.01)),
    )
    monitor_state, actions = MonitorState(), []
    for observation in (overloaded, overloaded, idle, overloaded, overloaded, overloaded, overloaded):
        monitor_state, decision = decide_on_tick(
            monitor_state, observation, make_rules(consecutive_ticks=3), now_s=NOW_S
        )
        actions.append((decision.action, monitor_state.consecutive_ticks))
    assert actions == [
        (DecisionAction.HOLD, 1),
        (DecisionAction.HOLD, 2),
        (DecisionAction.HOLD, 0),
        (DecisionAction.HOLD, 1),
        (DecisionAction.HOLD, 2),
        (DecisionAction.FLIP, 0),
        (DecisionAction.HOLD, 1),
    ]


def test_a_tick_without_router_state_resets_the_count_of_ticks() -> None:
    overloaded = make_observation(*BUSY_PREFILL, decode("d-0", 0.2))
    monitor_state, _ = decide_on_tick(
        MonitorState(2), replace(overloaded, router=None), make_rules(consecutive_ticks=3), now_s=NOW_S
    )
    assert (
        decide_on_tick(monitor_state, overloaded, make_rules(consecutive_ticks=3), now_s=NOW_S)[1].action
        is DecisionAction.HOLD
    )


def test_a_flip_refused_by_the_cooldown_is_made_on_the_first_tick_after_it() -> None:
    overloaded = make_observation(*BUSY_PREFILL, decode("d-0", 0.2))
    cooling = replace(overloaded, assignment=with_last_flip_at(overloaded, NOW_S - 9))
    monitor_state, decision = decide_on_tick(
        MonitorState(2), cooling, make_rules(consecutive_ticks=3), now_s=NOW_S
    )
    assert (decision.action, monitor_state) == (DecisionAction.REFUSE, MonitorState(3))
    assert "the cooldown is 10s" in decision.reason
    router_later = make_router_state(*BUSY_PREFILL, decode("d-0", 0.2), at_s=NOW_S + 1)
    later = replace(cooling, router=router_later)
    assert (
        decide_on_tick(monitor_state, later, make_rules(consecutive_ticks=3), now_s=NOW_S + 1)[1].action
        is DecisionAction.FLIP
    )


def with_last_flip_at(observation: Observation, at_s: float) -> Any:
    return observation.assignment.model_copy(update={"last_prefill_to_decode": at_s})


def test_advise_decides_the_same_flip_without_making_it() -> None:
    observation = make_observation(*BUSY_PREFILL, decode("d-0", 0.2))
    auto, advised = tick(observation), tick(observation, make_rules(mode=AutoscalingMode.ADVISE))
    assert advised == replace(auto, action=DecisionAction.ADVISE)


@pytest.mark.parametrize(
    ("decodes", "expected", "phrase"),
    [
        pytest.param(
            (decode("d-0", 0.049), decode("d-1", 0.049)),
            DecisionAction.FLIP,
            "decode load 0.49",
            id="low decode load",
        ),
        pytest.param(
            (decode("d-0", 0.05), decode("d-1", 0.05)),
            DecisionAction.REFUSE,
            "decode load 0.50 is not below 0.50",
            id="decode load at shrink is not low",
        ),
        pytest.param(
            (IDLE_DECODE, decode("d-1", 0.09)),
            DecisionAction.FLIP,
            "decode load 0.45",
            id="an idle instance counts as 0",
        ),
        pytest.param(
            (IDLE_DECODE, IDLE_DECODE.model_copy(update={"name": "d-1"})),
            DecisionAction.FLIP,
            "decode load 0.00",
            id="no decode work at all is low",
        ),
        pytest.param(
            (decode("d-0", None), decode("d-1", None)),
            DecisionAction.REFUSE,
            "decode load unknown",
            id="all unknown is not low",
        ),
        pytest.param(
            (decode("d-0", 0.01), decode("d-1", None)),
            DecisionAction.REFUSE,
            "decode load 0.05 to 0.55 (1 of 2 instances without a figure) is not below",
            id="half unknown is not low",
        ),
        pytest.param(
            (IDLE_DECODE, decode("d-1", 0.01)),
            DecisionAction.FLIP,
            "decode load 0.05",
            id="few tokens are low",
        ),
        pytest.param(
            (decode("d-0", 0.01),),
            DecisionAction.REFUSE,
            "Decode keeps its last instance: 1 serving",
            id="the last decode instance stays",
        ),
        pytest.param((), DecisionAction.REFUSE, "decode load unknown", id="no decode instance serves"),
    ],
)
def test_a_flip_request_for_prefill_is_granted_only_while_decode_load_is_low(
    decodes: tuple[Any, ...], expected: DecisionAction, phrase: str
) -> None:
    decision = decide_on_flip_request(
        make_flip_request(Role.PREFILL),
        make_observation(prefill("p-0", 2.0), *decodes),
        make_rules(),
        now_s=NOW_S,
    )
    assert decision.action is expected
    assert decision.reason.startswith("the router requests an instance for Prefill: predicted TTFT 1.4 s; ")
    assert phrase in f"{decision.reason}; {decision.loads}"


def test_the_reason_of_a_granted_flip_request_names_each_fact_once() -> None:
    why = "the best of 2 prefill instances predicts a TTFT of 1.40 s; decode load 0.10 is below 0.5"
    pair = decode("d-0", 0.01, 700), decode("d-1", 0.01)
    decision = decide_on_flip_request(
        make_flip_request(Role.PREFILL, why),
        make_observation(prefill("p-0", 2.0), *pair),
        make_rules(),
        now_s=NOW_S,
    )
    cause = f"the router requests an instance for Prefill: {why}"
    assert decision.reason == f"{cause}; cheapest to flip: d-0 (700 tokens in its KV cache)"


@pytest.mark.parametrize(
    ("count", "expected"),
    [
        pytest.param(2, DecisionAction.REFUSE, id="0.55 on one of two would be 1.10"),
        pytest.param(3, DecisionAction.FLIP, id="0.55 on two of three would be 0.83"),
    ],
)
def test_decode_gives_up_no_instance_that_it_would_request_back_at_once(
    count: int, expected: DecisionAction
) -> None:
    decodes = [decode(f"d-{n}", 0.055) for n in range(count)]
    decision = decide_on_flip_request(
        make_flip_request(Role.PREFILL),
        make_observation(prefill("p-0", 2.0), *decodes),
        make_rules(shrink=0.6),
        now_s=NOW_S,
    )
    assert decision.action is expected


def test_a_flip_to_prefill_is_not_subject_to_the_cooldown() -> None:
    observation = make_observation(prefill("p-0", 2.0), decode("d-0", 0.01), decode("d-1", 0.01))
    just_flipped = replace(observation, assignment=with_last_flip_at(observation, NOW_S))
    assert (
        decide_on_flip_request(
            make_flip_request(Role.PREFILL), just_flipped, make_rules(), now_s=NOW_S
        ).action
        is DecisionAction.FLIP
    )


@pytest.mark.parametrize(
    ("last_s", "expected"),
    [
        pytest.param(None, DecisionAction.FLIP, id="the first flip"),
        pytest.param(NOW_S - 10, DecisionAction.FLIP, id="after the cooldown"),
        pytest.param(NOW_S - 9.9, DecisionAction.REFUSE, id="within the cooldown"),
    ],
)
def test_a_flip_request_for_decode_is_refused_only_during_the_cooldown(
    last_s: float | None, expected: DecisionAction
) -> None:
    observation = make_observation(*BUSY_PREFILL, decode("d-0", 0.001))
    cooling = replace(observation, assignment=with_last_flip_at(observation, last_s))  # type: ignore[arg-type]
    assert (
        decide_on_flip_request(make_flip_request(Role.DECODE), cooling, make_rules(), now_s=NOW_S).action
        is expected
    )


def test_a_proposed_assignment_records_actor_time_and_reason() -> None:
    observation = make_observation(*BUSY_PREFILL, decode("d-0", 0.12))
    decision = tick(observation)
    after = propose_assignment(observation.assignment, decision)
    assert after == assignment(
        {
            "p-0": entry(Role.PREFILL),
            "p-1": entry(Role.DECODE, since=NOW_S, by=Actor.AUTOSCALER, reason=decision.reason),
            "d-0": entry(Role.DECODE),
        },
        flips=1,
        last_prefill_to_decode=NOW_S,
    )


def test_a_decision_to_hold_proposes_nothing() -> None:
    observation = make_observation(*QUIET_PREFILL, IDLE_DECODE)
    with pytest.raises(ValueError, match="hold proposes no flip"):
        propose_assignment(observation.assignment, tick(observation))


def test_a_long_reason_is_cut_to_the_object_limit() -> None:
    observation = make_observation(prefill("p-0", 2.0), decode("d-0", 0.01), decode("d-1", 0.01))
    decision = decide_on_flip_request(
        make_flip_request(Role.PREFILL, "x" * 5000), observation, make_rules(), now_s=NOW_S
    )
    assert len(propose_assignment(observation.assignment, decision).roles["d-0"].reason) == 1024


def test_instances_of_a_fixed_pool_are_never_flipped() -> None:
    fixed = make_rules(assignment_rules=AssignmentRules(10.0, {"p-0": Role.PREFILL, "p-1": Role.PREFILL}))
    decision = tick(make_observation(*BUSY_PREFILL, decode("d-0", 0.5)), fixed)
    assert decision.action is DecisionAction.REFUSE
    assert [r.instance for r in decision.rejected] == ["p-1", "p-0"]
