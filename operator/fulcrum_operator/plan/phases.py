"""The phases of one instance as a state machine: from facts to the next phase and an action on its engine.

    Pending → Starting → Serving ⇄ Draining → Switching → Verifying → Serving
    any but Serving, Draining → Terminating (removed while it does not serve)
    Draining → Terminating → deleted (removed once it is drained or the drain timed out)
    Pending, Starting, Serving, Draining → Failed (its engine exited) → Starting
    Starting, Serving → Pending (its engine no longer exists and is created again)
    any → Draining or Failed → deleted (its engine is lost; a new instance replaces it)
    Switching, Verifying → Starting (back in the old role: the flip was withdrawn or rolled back)

Under Relabel a flip never leaves Serving: the engine keeps running and only the effective role changes.
Under Restart the engine is drained, stopped and started again, and the router has to reach it before the
instance plays the new role. A flip that misses its deadline is rolled back. Each step can be repeated after
a crash: the old engine is stopped before the phase becomes Switching, so an engine that runs in Switching is
always the new one.

`service` gathers the facts, calls `plan_transition` for each instance and puts the actions into the plan;
nothing here starts or stops an engine.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from fulcrum_core.api.pdinstance import DRAINED
from fulcrum_core.formatting import format_count
from fulcrum_core.ports import EngineObservation, EngineState
from fulcrum_core.values import FlipStrategy, Phase, Role

_ENDED_BY_OTHERS = "its engine was stopped by someone else"

CORDON_RECHECK_S = 1.0
SWITCH_TIMEOUT_MIN_S = 60.0
SWITCH_TIMEOUT_FACTOR = 3
"""An engine has a minute plus three times its start-up time to restart in its new role and respond."""


class EngineAction(StrEnum):
    """Action on an instance's engine."""

    KEEP = "Keep"
    """Neither create nor stop the engine."""
    START = "Start"
    """Create the engine unless it exists; the runtime itself restarts an engine that exited."""
    STOP = "Stop"
    """Stop the engine if it exists."""
    STOP_DRAINED = "StopDrained"
    """Stop an engine that has no open request and no pending KV transfer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceFacts:
    """Everything that the next phase of an instance depends on."""

    phase: Phase
    phase_since_s: float
    now_s: float
    drain_timeout_s: float
    engine: EngineObservation | None
    assigned_role: Role | None = None
    """Role in the assignment; None before there is an entry."""
    current_role: Role | None = None
    """Role that the instance plays; while its engine restarts to flip, the role before. None if it plays both
    or none yet."""
    flip_strategy: FlipStrategy = FlipStrategy.RELABEL
    cordoned: bool = False
    leaving: bool = False
    """Whether the instance is to be removed."""
    drained: bool = False
    """Whether the router acknowledged the cordon, and no request or KV transfer can be open."""
    reachable: bool = False
    """Whether the router's last probe of the engine succeeded."""
    open_requests: int | None = None
    """Open requests: the larger of the last counts of router and engine; None if not known."""
    startup_s: float = 0.0
    """Seconds from the start of the engine until it serves; 0 if not known."""
    engine_lost: bool = False
    """Whether the engine is gone for good and the operator did not stop it."""
    show_failed_until_s: float = 0.0
    """Time until which a lost instance is shown as Failed, in unix seconds; then it is deleted."""

    @property
    def switch_timeout_s(self) -> float:
        """Seconds in which the engine must restart in its new role and respond."""
        return SWITCH_TIMEOUT_MIN_S + SWITCH_TIMEOUT_FACTOR * self.startup_s

    @property
    def needs_restart_to_flip(self) -> bool:
        """Whether the engine must be restarted before the instance can play its assigned role."""
        return (
            self.flip_strategy is FlipStrategy.RESTART
            and not self.leaving
            and self.assigned_role is not None
            and self.current_role in (Role.PREFILL, Role.DECODE)
            and self.assigned_role is not self.current_role
        )

    @property
    def stopping_message(self) -> str:
        """Message while the engine stops for a flip."""
        return f"drained; its engine is being stopped, to serve {self.assigned_role}"


@dataclass(frozen=True, slots=True)
class PhaseTransition:
    """Next phase of an instance, action on its engine, and the reason."""

    phase: Phase
    action: EngineAction
    message: str
    deadline_s: float | None = None
    """Time of the next check without an event, in unix seconds; None if events suffice."""
    rollback_reason: str | None = None
    """Why the flip is rolled back; None if it is not."""
    reason: str = ""
    """Constant for programs: `DRAINED`, or empty."""
    deletable: bool = False
    """Whether the PDInstance may be deleted: its engine is stopped or lost."""


def plan_transition(facts: InstanceFacts) -> PhaseTransition:
    """Decide the next phase of an instance and the action on its engine."""
    if facts.engine_lost:
        return _lost(facts)
    if facts.phase is Phase.TERMINATING or (facts.leaving and not _is_working(facts)):
        return _terminating(facts, "no longer needed")
    if facts.phase in (Phase.SWITCHING, Phase.VERIFYING):
        return _switching(facts)
    if facts.engine is None:
        return _without_engine(facts)
    if facts.phase is Phase.DRAINING and facts.engine.terminating:
        return PhaseTransition(Phase.DRAINING, EngineAction.KEEP, facts.stopping_message)
    if facts.engine.state is EngineState.EXITED:
        return _failed(facts.engine)
    if facts.engine.state is EngineState.STARTING:
        return _starting(facts.engine)
    if facts.leaving or facts.cordoned or facts.needs_restart_to_flip:
        return _draining(facts)
    return PhaseTransition(Phase.SERVING, EngineAction.START, "")


def _is_working(facts: InstanceFacts) -> bool:
    running = facts.engine is not None and facts.engine.state is EngineState.RUNNING
    return running and facts.phase in (Phase.SERVING, Phase.DRAINING)


def _lost(facts: InstanceFacts) -> PhaseTransition:
    """Drain while the engine still serves; then show Failed until `show_failed_until_s`."""
    engine = facts.engine
    if engine is None:
        return PhaseTransition(Phase.TERMINATING, EngineAction.KEEP, "its engine is lost", deletable=True)
    if engine.state is EngineState.RUNNING:
        return PhaseTransition(
            Phase.DRAINING,
            EngineAction.KEEP,
            f"{engine.message or _ENDED_BY_OTHERS}; a new instance replaces it",
        )
    message = f"{engine.message or engine.exit_reason or _ENDED_BY_OTHERS}; a new instance replaces it"
    if facts.phase is Phase.FAILED and facts.now_s >= facts.show_failed_until_s:
        return PhaseTransition(Phase.TERMINATING, EngineAction.STOP, message, deletable=True)
    return PhaseTransition(Phase.FAILED, EngineAction.KEEP, message, deadline_s=facts.show_failed_until_s)


def _terminating(
    facts: InstanceFacts, reason: str, action: EngineAction = EngineAction.STOP
) -> PhaseTransition:
    return PhaseTransition(Phase.TERMINATING, action, reason, deletable=facts.engine is None)


def _without_engine(facts: InstanceFacts) -> PhaseTransition:
    if facts.phase is Phase.DRAINING and facts.needs_restart_to_flip:
        return PhaseTransition(
            Phase.SWITCHING, EngineAction.START, f"its engine restarts to serve {facts.assigned_role}"
        )
    return PhaseTransition(Phase.PENDING, EngineAction.START, "")


def _failed(engine: EngineObservation) -> PhaseTransition:
    return PhaseTransition(
        Phase.FAILED, EngineAction.START, f"its engine ended: {engine.exit_reason}; restarting it"
    )


def _starting(engine: EngineObservation) -> PhaseTransition:
    reason = f": {engine.message}" if engine.message else ""
    restarting = f"its engine restarts after: {engine.exit_reason}{reason and f'; {engine.message}'}"
    return PhaseTransition(
        Phase.STARTING,
        EngineAction.START,
        restarting if engine.exit_reason else f"its engine is starting{reason}",
    )


def _draining(facts: InstanceFacts) -> PhaseTransition:
    phase_since_s = facts.phase_since_s if facts.phase is Phase.DRAINING else facts.now_s
    deadline_s = phase_since_s + facts.drain_timeout_s
    if not facts.leaving and not facts.needs_restart_to_flip:
        return _cordoned(facts)
    # In the reconcile that sets the cordon, no router can have acknowledged it.
    was_draining = facts.phase is Phase.DRAINING
    if was_draining and facts.drained:
        return _drained(facts)
    if was_draining and facts.now_s >= deadline_s:
        return _drain_overdue(facts)
    # No request count in the message: the status would be written again with every request that ends.
    return PhaseTransition(
        Phase.DRAINING, EngineAction.START, "waiting for its requests to end", deadline_s=deadline_s
    )


def _cordoned(facts: InstanceFacts) -> PhaseTransition:
    """Drain without removal: the instance stays; the reason `DRAINED` reports that it is idle."""
    if facts.phase is Phase.DRAINING and facts.drained:
        return PhaseTransition(Phase.DRAINING, EngineAction.START, "cordoned, drained", reason=DRAINED)
    return PhaseTransition(
        Phase.DRAINING, EngineAction.START, "cordoned", deadline_s=facts.now_s + CORDON_RECHECK_S
    )


def _drained(facts: InstanceFacts) -> PhaseTransition:
    if facts.leaving:
        return replace(_terminating(facts, "drained", EngineAction.STOP_DRAINED), reason=DRAINED)
    return PhaseTransition(Phase.DRAINING, EngineAction.STOP_DRAINED, facts.stopping_message, reason=DRAINED)


def _drain_overdue(facts: InstanceFacts) -> PhaseTransition:
    """Continue a removal and report the requests that it interrupts; cancel a flip."""
    if facts.leaving:
        return _terminating(
            facts,
            f"interrupted {_format_requests(facts)} after the drain timeout of {facts.drain_timeout_s:g} s",
        )
    reason = f"not drained after {facts.drain_timeout_s:g} s, {_format_requests(facts)} left"
    return PhaseTransition(Phase.SERVING, EngineAction.START, reason, rollback_reason=reason)


def _format_requests(facts: InstanceFacts) -> str:
    if facts.open_requests is None:
        return "an unknown number of requests"
    return format_count(facts.open_requests, "request")


def _switching(facts: InstanceFacts) -> PhaseTransition:
    engine = facts.engine
    if not facts.needs_restart_to_flip:
        # The flip was withdrawn or rolled back: first stop the engine that was started for the new role.
        if engine is not None:
            return PhaseTransition(
                facts.phase,
                EngineAction.STOP,
                f"its engine is being stopped, to serve {facts.current_role} again",
            )
        return PhaseTransition(
            Phase.STARTING, EngineAction.START, f"its engine restarts to serve {facts.current_role} again"
        )
    deadline_s = facts.phase_since_s + facts.switch_timeout_s
    if facts.now_s >= deadline_s:
        reason = f"did not serve {facts.assigned_role} within {facts.switch_timeout_s:g} s"
        return PhaseTransition(facts.phase, EngineAction.KEEP, reason, rollback_reason=reason)
    if engine is None or engine.state is not EngineState.RUNNING:
        return PhaseTransition(
            Phase.SWITCHING,
            EngineAction.START,
            f"its engine restarts to serve {facts.assigned_role}",
            deadline_s,
        )
    # In phase Switching, the last probe result may be that of the old engine.
    if facts.phase is Phase.SWITCHING or not facts.reachable:
        return PhaseTransition(
            Phase.VERIFYING, EngineAction.START, "waiting for the router to reach it", deadline_s
        )
    return PhaseTransition(Phase.SERVING, EngineAction.START, "")
