"""The phases of one instance: what follows from what."""

from dataclasses import replace
from typing import Any

import pytest

from fulcrum_core.values import FlipStrategy, Phase
from fulcrum_operator.plan.phases import LOOK_AGAIN_S, SWITCH_LEAST_S, EngineAction, Facts, Step, advance
from tests.unit.operator.builders import EXITED, NOW_S, RUNNING, STARTING, D, P, engine

KEEP, START, STOP = EngineAction.KEEP, EngineAction.START, EngineAction.STOP
STOP_DRAINED = EngineAction.STOP_DRAINED
UP, COMING, DOWN = (
    engine("chat-0"),
    engine("chat-0", STARTING),
    engine("chat-0", EXITED, exit_reason="signal SIGKILL"),
)
DRAIN_S = 120.0


def facts(phase: Phase, **given: Any) -> Facts:
    """An instance ten seconds in its phase, with a running engine."""
    about = {
        "since_s": NOW_S - 10,
        "now_s": NOW_S,
        "drain_timeout_s": DRAIN_S,
        "engine": UP,
        "assigned": P,
        "played": P,
    }
    return Facts(phase=phase, **{**about, **given})


@pytest.mark.parametrize(
    ("before", "step"),
    [
        pytest.param(
            facts(Phase.PENDING, engine=None),
            Step(Phase.PENDING, START, ""),
            id="without an engine it starts one",
        ),
        pytest.param(
            facts(Phase.PENDING, engine=COMING),
            Step(Phase.STARTING, START, "its engine starts"),
            id="while its engine starts it is starting",
        ),
        pytest.param(facts(Phase.STARTING), Step(Phase.SERVING, START, ""), id="a ready engine serves"),
        pytest.param(
            facts(Phase.SERVING, engine=DOWN),
            Step(Phase.FAILED, START, "its engine ended: signal SIGKILL; it is started again"),
            id="a dead engine is a failed instance",
        ),
        pytest.param(
            facts(Phase.SERVING, engine=replace(COMING, exit_reason="exit code 1")),
            Step(Phase.STARTING, START, "its engine starts again after: exit code 1"),
            id="an engine that was back before anybody looked",
        ),
        pytest.param(facts(Phase.FAILED), Step(Phase.SERVING, START, ""), id="a repaired one serves"),
        pytest.param(
            facts(Phase.SERVING, assigned=D),
            Step(Phase.SERVING, START, ""),
            id="Relabel: a flip leaves the phase alone",
        ),
    ],
)
def test_serving_and_failing(before: Facts, step: Step) -> None:
    assert advance(before) == step


@pytest.mark.parametrize(
    ("before", "step"),
    [
        pytest.param(
            facts(Phase.SERVING, leaving=True, legs=3, drained=True),
            Step(Phase.DRAINING, START, "waits for its requests to end", NOW_S + DRAIN_S),
            id="who shall leave drains first, whatever was known before the cordon",
        ),
        pytest.param(
            facts(Phase.DRAINING, leaving=True),
            Step(Phase.DRAINING, START, "waits for its requests to end", NOW_S - 10 + DRAIN_S),
            id="the deadline counts from the start of the drain",
        ),
        pytest.param(
            facts(Phase.DRAINING, leaving=True, drained=True),
            Step(Phase.TERMINATING, STOP_DRAINED, "drained"),
            id="drained, its engine ends",
        ),
        pytest.param(
            facts(Phase.DRAINING, leaving=True, legs=2, since_s=NOW_S - DRAIN_S),
            Step(Phase.TERMINATING, STOP, "cut 2 requests not ended after 120 s"),
            id="at the deadline a deletion goes on and says what it cut",
        ),
        pytest.param(
            facts(Phase.DRAINING), Step(Phase.SERVING, START, ""), id="a withdrawn wish leads back to serving"
        ),
        pytest.param(
            facts(Phase.SERVING, cordoned=True),
            Step(Phase.DRAINING, START, "cordoned", deadline_s=NOW_S + LOOK_AGAIN_S),
            id="cordoned without leaving: drains without a deadline",
        ),
        pytest.param(
            facts(Phase.DRAINING, cordoned=True, drained=True),
            Step(Phase.DRAINING, START, "cordoned, drained"),
            id="cordoned and empty: stays, and says so",
        ),
        pytest.param(
            facts(Phase.STARTING, leaving=True, engine=COMING),
            Step(Phase.TERMINATING, STOP, "wanted no more"),
            id="who has no work leaves at once",
        ),
        pytest.param(
            facts(Phase.DRAINING, leaving=True, engine=DOWN),
            Step(Phase.TERMINATING, STOP, "wanted no more"),
            id="an engine that dies while it drains is not repaired",
        ),
        pytest.param(
            facts(Phase.TERMINATING),
            Step(Phase.TERMINATING, STOP, "wanted no more"),
            id="terminating has no way back",
        ),
        pytest.param(
            facts(Phase.TERMINATING, engine=None),
            Step(Phase.TERMINATING, STOP, "wanted no more", done=True),
            id="without its engine nothing of it is left",
        ),
    ],
)
def test_leaving(before: Facts, step: Step) -> None:
    assert advance(before) == step


def restart(phase: Phase, **given: Any) -> Facts:
    """An instance that plays Prefill, shall play Decode and has to be started anew for that."""
    return facts(phase, strategy=FlipStrategy.RESTART, **{"assigned": D, **given})


LATE_S = NOW_S - SWITCH_LEAST_S
DUE_S = NOW_S - 10 + SWITCH_LEAST_S


@pytest.mark.parametrize(
    ("before", "step"),
    [
        pytest.param(
            restart(Phase.SERVING, legs=1),
            Step(Phase.DRAINING, START, "waits for its requests to end", NOW_S + DRAIN_S),
            id="it drains first",
        ),
        pytest.param(
            restart(Phase.DRAINING, drained=True),
            Step(Phase.DRAINING, STOP_DRAINED, "drained; its engine ends to serve Decode"),
            id="drained, its engine ends",
        ),
        pytest.param(
            restart(Phase.DRAINING, engine=None),
            Step(Phase.SWITCHING, START, "its engine starts to serve Decode"),
            id="and starts anew",
        ),
        pytest.param(
            restart(Phase.SWITCHING, engine=COMING),
            Step(Phase.SWITCHING, START, "its engine starts to serve Decode", DUE_S),
            id="it has until a deadline",
        ),
        pytest.param(
            restart(Phase.SWITCHING),
            Step(Phase.VERIFYING, START, "waits for the router to reach it", DUE_S),
            id="ready is not yet verified",
        ),
        pytest.param(
            restart(Phase.VERIFYING, answers=True),
            Step(Phase.SERVING, START, ""),
            id="seen to answer, it serves",
        ),
        pytest.param(
            restart(Phase.DRAINING, since_s=NOW_S - DRAIN_S, legs=4),
            Step(
                Phase.SERVING,
                START,
                "not drained after 120 s, 4 requests left",
                refused="not drained after 120 s, 4 requests left",
            ),
            id="at the deadline of the drain the flip is cancelled",
        ),
        pytest.param(
            restart(Phase.SWITCHING, since_s=LATE_S, engine=DOWN),
            Step(
                Phase.SWITCHING,
                KEEP,
                "did not serve Decode within 60 s",
                refused="did not serve Decode within 60 s",
            ),
            id="an engine that does not come back is rolled back",
        ),
        pytest.param(
            restart(Phase.VERIFYING, since_s=LATE_S),
            Step(
                Phase.VERIFYING,
                KEEP,
                "did not serve Decode within 60 s",
                refused="did not serve Decode within 60 s",
            ),
            id="so is one that does not answer",
        ),
        pytest.param(
            restart(Phase.VERIFYING, assigned=P),
            Step(Phase.VERIFYING, STOP, "its engine ends to serve Prefill again"),
            id="rolled back, the engine of the new role ends",
        ),
        pytest.param(
            restart(Phase.SWITCHING, assigned=P, engine=None),
            Step(Phase.STARTING, START, "its engine starts to serve Prefill again"),
            id="and one of the old role starts",
        ),
    ],
)
def test_flip_by_restart(before: Facts, step: Step) -> None:
    assert advance(before) == step


def test_a_flip_by_restart_that_goes_well_takes_these_phases() -> None:
    phases, now = [Phase.SERVING], restart(Phase.SERVING, drained=True, answers=True)
    while len(phases) < 20:
        step = advance(now)
        if step.phase is not now.phase:
            phases.append(step.phase)
        if step.phase is Phase.SERVING:
            break
        running = UP if step.action is START and now.engine is None else now.engine
        now = replace(now, phase=step.phase, engine=None if step.action is STOP_DRAINED else running)
    assert phases == [Phase.SERVING, Phase.DRAINING, Phase.SWITCHING, Phase.VERIFYING, Phase.SERVING]


def test_running_is_the_only_state_that_serves() -> None:
    states = {
        state: advance(facts(Phase.SERVING, engine=engine("chat-0", state))).phase
        for state in (RUNNING, STARTING, EXITED)
    }
    assert states == {RUNNING: Phase.SERVING, STARTING: Phase.STARTING, EXITED: Phase.FAILED}
