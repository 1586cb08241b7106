"""The phases of one instance: next phase and engine action for every situation."""

from dataclasses import replace
from typing import Any

import pytest

from fulcrum_core.api.pdinstance import DRAINED
from fulcrum_core.values import FlipStrategy, Phase
from fulcrum_operator.plan.phases import (
    CORDON_RECHECK_S,
    SWITCH_TIMEOUT_MIN_S,
    EngineAction,
    InstanceFacts,
    PhaseTransition,
    plan_transition,
)
from tests.unit.operator.builders import EXITED, NOW_S, RUNNING, STARTING, D, P, engine

KEEP, START, STOP = EngineAction.KEEP, EngineAction.START, EngineAction.STOP
STOP_DRAINED = EngineAction.STOP_DRAINED
RUNNING_ENGINE, STARTING_ENGINE, EXITED_ENGINE = (
    engine("chat-0"),
    engine("chat-0", STARTING),
    engine("chat-0", EXITED, exit_reason="signal SIGKILL"),
)
DRAIN_S = 120.0


def facts(phase: Phase, **given: Any) -> InstanceFacts:
    """An instance ten seconds in its phase, with a running engine."""
    about = {
        "phase_since_s": NOW_S - 10,
        "now_s": NOW_S,
        "drain_timeout_s": DRAIN_S,
        "engine": RUNNING_ENGINE,
        "assigned_role": P,
        "current_role": P,
    }
    return InstanceFacts(phase=phase, **{**about, **given})


@pytest.mark.parametrize(
    ("before", "transition"),
    [
        pytest.param(
            facts(Phase.PENDING, engine=None),
            PhaseTransition(Phase.PENDING, START, ""),
            id="an instance without an engine starts one",
        ),
        pytest.param(
            facts(Phase.PENDING, engine=STARTING_ENGINE),
            PhaseTransition(Phase.STARTING, START, "its engine is starting"),
            id="an instance is Starting while its engine starts",
        ),
        pytest.param(
            facts(Phase.STARTING), PhaseTransition(Phase.SERVING, START, ""), id="a ready engine serves"
        ),
        pytest.param(
            facts(Phase.SERVING, engine=EXITED_ENGINE),
            PhaseTransition(Phase.FAILED, START, "its engine ended: signal SIGKILL; restarting it"),
            id="an exited engine makes its instance Failed",
        ),
        pytest.param(
            facts(Phase.SERVING, engine=replace(STARTING_ENGINE, exit_reason="exit code 1")),
            PhaseTransition(Phase.STARTING, START, "its engine restarts after: exit code 1"),
            id="an engine that restarted before it was observed",
        ),
        pytest.param(
            facts(Phase.FAILED),
            PhaseTransition(Phase.SERVING, START, ""),
            id="a restarted engine serves again",
        ),
        pytest.param(
            facts(Phase.SERVING, assigned_role=D),
            PhaseTransition(Phase.SERVING, START, ""),
            id="a flip by Relabel does not change the phase",
        ),
    ],
)
def test_phase_follows_the_state_of_the_engine(before: InstanceFacts, transition: PhaseTransition) -> None:
    assert plan_transition(before) == transition


@pytest.mark.parametrize(
    ("before", "transition"),
    [
        pytest.param(
            facts(Phase.SERVING, leaving=True, open_requests=3, drained=True),
            PhaseTransition(Phase.DRAINING, START, "waiting for its requests to end", NOW_S + DRAIN_S),
            id="a removed instance drains first, even if it was idle before the cordon",
        ),
        pytest.param(
            facts(Phase.DRAINING, leaving=True),
            PhaseTransition(Phase.DRAINING, START, "waiting for its requests to end", NOW_S - 10 + DRAIN_S),
            id="the deadline counts from the start of the drain",
        ),
        pytest.param(
            facts(Phase.DRAINING, leaving=True, drained=True),
            PhaseTransition(Phase.TERMINATING, STOP_DRAINED, "drained", reason=DRAINED),
            id="drained, its engine ends",
        ),
        pytest.param(
            facts(Phase.DRAINING, leaving=True, open_requests=2, phase_since_s=NOW_S - DRAIN_S),
            PhaseTransition(
                Phase.TERMINATING, STOP, "interrupted 2 requests after the drain timeout of 120 s"
            ),
            id="at the deadline a removal continues and reports interrupted requests",
        ),
        pytest.param(
            facts(Phase.DRAINING),
            PhaseTransition(Phase.SERVING, START, ""),
            id="a withdrawn change leads back to Serving",
        ),
        pytest.param(
            facts(Phase.SERVING, cordoned=True),
            PhaseTransition(Phase.DRAINING, START, "cordoned", deadline_s=NOW_S + CORDON_RECHECK_S),
            id="a cordoned instance drains without a deadline",
        ),
        pytest.param(
            facts(Phase.DRAINING, cordoned=True, drained=True),
            PhaseTransition(Phase.DRAINING, START, "cordoned, drained", reason=DRAINED),
            id="a cordoned idle instance stays and reports Drained",
        ),
        pytest.param(
            facts(Phase.STARTING, leaving=True, engine=STARTING_ENGINE),
            PhaseTransition(Phase.TERMINATING, STOP, "no longer needed"),
            id="an instance without requests terminates at once",
        ),
        pytest.param(
            facts(Phase.DRAINING, leaving=True, engine=EXITED_ENGINE),
            PhaseTransition(Phase.TERMINATING, STOP, "no longer needed"),
            id="an engine that exits during its drain is not restarted",
        ),
        pytest.param(
            facts(Phase.TERMINATING),
            PhaseTransition(Phase.TERMINATING, STOP, "no longer needed"),
            id="a terminating instance stays terminating",
        ),
        pytest.param(
            facts(Phase.TERMINATING, engine=None),
            PhaseTransition(Phase.TERMINATING, STOP, "no longer needed", deletable=True),
            id="a terminating instance without an engine is deletable",
        ),
    ],
)
def test_instance_being_removed_drains_before_its_engine_ends(
    before: InstanceFacts, transition: PhaseTransition
) -> None:
    assert plan_transition(before) == transition


def restart_flip(phase: Phase, **given: Any) -> InstanceFacts:
    """An instance that plays Prefill, is assigned to Decode and flips by a restart."""
    return facts(phase, flip_strategy=FlipStrategy.RESTART, **{"assigned_role": D, **given})


SWITCH_OVERDUE_SINCE_S = NOW_S - SWITCH_TIMEOUT_MIN_S
SWITCH_DEADLINE_S = NOW_S - 10 + SWITCH_TIMEOUT_MIN_S


@pytest.mark.parametrize(
    ("before", "transition"),
    [
        pytest.param(
            restart_flip(Phase.SERVING, open_requests=1),
            PhaseTransition(Phase.DRAINING, START, "waiting for its requests to end", NOW_S + DRAIN_S),
            id="the instance drains first",
        ),
        pytest.param(
            restart_flip(Phase.DRAINING, drained=True),
            PhaseTransition(
                Phase.DRAINING,
                STOP_DRAINED,
                "drained; its engine is being stopped, to serve Decode",
                reason=DRAINED,
            ),
            id="drained, its engine ends",
        ),
        pytest.param(
            restart_flip(Phase.DRAINING, engine=None),
            PhaseTransition(Phase.SWITCHING, START, "its engine restarts to serve Decode"),
            id="a stopped engine starts in the new role",
        ),
        pytest.param(
            restart_flip(Phase.SWITCHING, engine=STARTING_ENGINE),
            PhaseTransition(Phase.SWITCHING, START, "its engine restarts to serve Decode", SWITCH_DEADLINE_S),
            id="the restart to flip has a deadline",
        ),
        pytest.param(
            restart_flip(Phase.SWITCHING),
            PhaseTransition(Phase.VERIFYING, START, "waiting for the router to reach it", SWITCH_DEADLINE_S),
            id="a running engine is not yet verified",
        ),
        pytest.param(
            restart_flip(Phase.VERIFYING, reachable=True),
            PhaseTransition(Phase.SERVING, START, ""),
            id="an engine that the router reaches serves",
        ),
        pytest.param(
            restart_flip(Phase.DRAINING, phase_since_s=NOW_S - DRAIN_S, open_requests=4),
            PhaseTransition(
                Phase.SERVING,
                START,
                "not drained after 120 s, 4 requests left",
                rollback_reason="not drained after 120 s, 4 requests left",
            ),
            id="at the deadline of the drain the flip is cancelled",
        ),
        pytest.param(
            restart_flip(Phase.SWITCHING, phase_since_s=SWITCH_OVERDUE_SINCE_S, engine=EXITED_ENGINE),
            PhaseTransition(
                Phase.SWITCHING,
                KEEP,
                "did not serve Decode within 60 s",
                rollback_reason="did not serve Decode within 60 s",
            ),
            id="an engine that does not restart is rolled back",
        ),
        pytest.param(
            restart_flip(Phase.VERIFYING, phase_since_s=SWITCH_OVERDUE_SINCE_S),
            PhaseTransition(
                Phase.VERIFYING,
                KEEP,
                "did not serve Decode within 60 s",
                rollback_reason="did not serve Decode within 60 s",
            ),
            id="an engine that does not respond is rolled back",
        ),
        pytest.param(
            restart_flip(Phase.VERIFYING, assigned_role=P),
            PhaseTransition(Phase.VERIFYING, STOP, "its engine is being stopped, to serve Prefill again"),
            id="after a rollback the engine of the new role stops",
        ),
        pytest.param(
            restart_flip(Phase.SWITCHING, assigned_role=P, engine=None),
            PhaseTransition(Phase.STARTING, START, "its engine restarts to serve Prefill again"),
            id="after a rollback an engine of the old role starts",
        ),
    ],
)
def test_flip_by_restart_drains_restarts_verifies_or_rolls_back(
    before: InstanceFacts, transition: PhaseTransition
) -> None:
    assert plan_transition(before) == transition


def test_successful_flip_by_restart_goes_through_every_phase() -> None:
    phases, now = [Phase.SERVING], restart_flip(Phase.SERVING, drained=True, reachable=True)
    while len(phases) < 20:
        transition = plan_transition(now)
        if transition.phase is not now.phase:
            phases.append(transition.phase)
        if transition.phase is Phase.SERVING:
            break
        running = RUNNING_ENGINE if transition.action is START and now.engine is None else now.engine
        now = replace(
            now, phase=transition.phase, engine=None if transition.action is STOP_DRAINED else running
        )
    assert phases == [Phase.SERVING, Phase.DRAINING, Phase.SWITCHING, Phase.VERIFYING, Phase.SERVING]


def test_only_a_running_engine_serves() -> None:
    states = {
        state: plan_transition(facts(Phase.SERVING, engine=engine("chat-0", state))).phase
        for state in (RUNNING, STARTING, EXITED)
    }
    assert states == {RUNNING: Phase.SERVING, STARTING: Phase.STARTING, EXITED: Phase.FAILED}
