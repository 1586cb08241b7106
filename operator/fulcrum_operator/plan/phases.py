"""The phases of one instance as a state machine: facts in, next phase and what to do with its engine out.

    Pending → Starting → Serving ⇄ Draining → Switching → Verifying → Serving
    Draining → Terminating
    Starting, Serving, Draining → Failed (its engine died) → Starting
    any → Draining or Failed → gone (its engine was taken away by somebody, or its node; another replaces it)
    Switching, Verifying → Starting (old role back, the wish refused)

Under Relabel a flip never leaves Serving: the engine is untouched and only the effective role changes.
Under Restart the engine is drained, ended, started again and seen to answer before it plays the new role;
what does not get there by its deadline is rolled back. Each step is safe to repeat after a crash: an engine
is ended before the phase says that it switches, so a running engine in Switching is always the new one.
"""

from dataclasses import dataclass, replace
from enum import StrEnum

from fulcrum_core.api.pdinstance import DRAINED
from fulcrum_core.formatting import format_count
from fulcrum_core.ports import EngineObservation, EngineState
from fulcrum_core.values import FlipStrategy, Phase, Role

_ENDED_BY_OTHERS = "its engine was told to end by somebody else"

CORDON_RECHECK_S = 1.0
SWITCH_TIMEOUT_MIN_S = 60.0
SWITCH_TIMEOUT_FACTOR = 3
"""An engine has a minute and three times its start-up to come back in its new role and answer."""


class EngineAction(StrEnum):
    """What shall become of the engine. A start of one that runs and a stop of one that is gone do nothing."""

    KEEP = "Keep"
    START = "Start"
    STOP = "Stop"
    STOP_DRAINED = "StopDrained"
    """Nothing is left on it that anybody waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceFacts:
    """What the next phase depends on."""

    phase: Phase
    phase_since_s: float
    now_s: float
    drain_timeout_s: float
    engine: EngineObservation | None
    assigned_role: Role | None = None
    """The role that is wished; None before there is an assignment."""
    current_role: Role | None = None
    """The role that the engine was started for or plays; None before it first served."""
    flip_strategy: FlipStrategy = FlipStrategy.RELABEL
    cordoned: bool = False
    leaving: bool = False
    """It shall go for good."""
    drained: bool = False
    """The router has acknowledged the cordon and nothing is open on it, by its word and by the engine's."""
    reachable: bool = False
    """The router reached the engine that runs now."""
    open_requests: int | None = None
    """Requests on it as the router and the engine last said; None: not known."""
    startup_s: float = 0.0
    """From its engine's start to serving, as far as that is known."""
    engine_lost: bool = False
    """Its engine was taken away by somebody else and does not come back."""
    show_failed_until_s: float = 0.0
    """Until when a lost instance is shown as failed."""

    @property
    def switch_timeout_s(self) -> float:
        """Longest time in which its engine comes back in a new role."""
        return SWITCH_TIMEOUT_MIN_S + SWITCH_TIMEOUT_FACTOR * self.startup_s

    @property
    def needs_restart_to_flip(self) -> bool:
        """Whether its engine must be started anew for the role wished."""
        wanted, current_role = self.assigned_role, self.current_role
        restart = self.flip_strategy is FlipStrategy.RESTART and not self.leaving
        return (
            restart
            and wanted is not None
            and current_role in (Role.PREFILL, Role.DECODE)
            and wanted is not current_role
        )

    @property
    def ending_message(self) -> str:
        """What is said while its engine ends for a flip."""
        return f"drained; its engine ends to serve {self.assigned_role}"


@dataclass(frozen=True, slots=True)
class PhaseTransition:
    """The phase that follows, what to do with the engine, and why."""

    phase: Phase
    action: EngineAction
    message: str
    deadline_s: float | None = None
    """When to look again even if nothing happens."""
    rollback_reason: str | None = None
    """Why the wished role is rolled back."""
    reason: str = ""
    """Constant for programs: `DRAINED`, or empty."""
    deletable: bool = False
    """Nothing of the instance is left: its object may be deleted."""


def plan_transition(facts: InstanceFacts) -> PhaseTransition:
    """The next step of an instance."""
    if facts.engine_lost:
        return _lost(facts)
    if facts.phase is Phase.TERMINATING or (facts.leaving and not _is_working(facts)):
        return _terminating(facts, "wanted no more")
    if facts.phase in (Phase.SWITCHING, Phase.VERIFYING):
        return _switching(facts)
    if facts.engine is None:
        return _without_engine(facts)
    if facts.phase is Phase.DRAINING and facts.engine.terminating:
        return PhaseTransition(Phase.DRAINING, EngineAction.KEEP, facts.ending_message)
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
    """While it serves it drains; then it is shown as failed for a while, unless nobody misses it."""
    engine = facts.engine
    if engine is None:
        return PhaseTransition(
            Phase.TERMINATING, EngineAction.KEEP, "its engine was taken away", deletable=True
        )
    if engine.state is EngineState.RUNNING:
        return PhaseTransition(
            Phase.DRAINING, EngineAction.KEEP, f"{engine.message or _ENDED_BY_OTHERS}; another replaces it"
        )
    message = f"{engine.message or engine.exit_reason or _ENDED_BY_OTHERS}; another replaces it"
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
            Phase.SWITCHING, EngineAction.START, f"its engine starts to serve {facts.assigned_role}"
        )
    return PhaseTransition(Phase.PENDING, EngineAction.START, "")


def _failed(engine: EngineObservation) -> PhaseTransition:
    return PhaseTransition(
        Phase.FAILED, EngineAction.START, f"its engine ended: {engine.exit_reason}; it is started again"
    )


def _starting(engine: EngineObservation) -> PhaseTransition:
    reason = f": {engine.message}" if engine.message else ""
    restarting = f"its engine starts again after: {engine.exit_reason}{reason and f'; {engine.message}'}"
    return PhaseTransition(
        Phase.STARTING, EngineAction.START, restarting if engine.exit_reason else f"its engine starts{reason}"
    )


def _draining(facts: InstanceFacts) -> PhaseTransition:
    phase_since_s = facts.phase_since_s if facts.phase is Phase.DRAINING else facts.now_s
    deadline_s = phase_since_s + facts.drain_timeout_s
    if not facts.leaving and not facts.needs_restart_to_flip:
        return _cordoned(facts)
    was_draining = facts.phase is Phase.DRAINING  # a pass that only now cordons cannot have been acknowledged
    if was_draining and facts.drained:
        return _drained(facts)
    if was_draining and facts.now_s >= deadline_s:
        return _drain_overdue(facts)
    # How many is the router's to say: a count here would be written with every request that ends.
    return PhaseTransition(
        Phase.DRAINING, EngineAction.START, "waits for its requests to end", deadline_s=deadline_s
    )


def _cordoned(facts: InstanceFacts) -> PhaseTransition:
    """It stays until the cordon is lifted; whoever cordoned it reads here when nothing is left on it."""
    if facts.phase is Phase.DRAINING and facts.drained:
        return PhaseTransition(Phase.DRAINING, EngineAction.START, "cordoned, drained", reason=DRAINED)
    return PhaseTransition(
        Phase.DRAINING, EngineAction.START, "cordoned", deadline_s=facts.now_s + CORDON_RECHECK_S
    )


def _drained(facts: InstanceFacts) -> PhaseTransition:
    if facts.leaving:
        return replace(_terminating(facts, "drained", EngineAction.STOP_DRAINED), reason=DRAINED)
    return PhaseTransition(Phase.DRAINING, EngineAction.STOP_DRAINED, facts.ending_message, reason=DRAINED)


def _drain_overdue(facts: InstanceFacts) -> PhaseTransition:
    """A deletion goes on and says what it cut; a flip is cancelled."""
    if facts.leaving:
        return _terminating(
            facts, f"cut {_format_requests(facts)} not ended after {facts.drain_timeout_s:g} s"
        )
    reason = f"not drained after {facts.drain_timeout_s:g} s, {_format_requests(facts)} left"
    return PhaseTransition(Phase.SERVING, EngineAction.START, reason, rollback_reason=reason)


def _format_requests(facts: InstanceFacts) -> str:
    if facts.open_requests is None:
        return "an unknown number of requests"
    return format_count(facts.open_requests, "request")


def _switching(facts: InstanceFacts) -> PhaseTransition:
    engine = facts.engine
    if (
        not facts.needs_restart_to_flip
    ):  # withdrawn or rolled back: the engine that was started for the other role ends first
        if engine is not None:
            return PhaseTransition(
                facts.phase, EngineAction.STOP, f"its engine ends to serve {facts.current_role} again"
            )
        return PhaseTransition(
            Phase.STARTING, EngineAction.START, f"its engine starts to serve {facts.current_role} again"
        )
    deadline_s = facts.phase_since_s + facts.switch_timeout_s
    if facts.now_s >= deadline_s:
        reason = f"did not serve {facts.assigned_role} within {facts.switch_timeout_s:g} s"
        return PhaseTransition(facts.phase, EngineAction.KEEP, reason, rollback_reason=reason)
    if engine is None or engine.state is not EngineState.RUNNING:
        return PhaseTransition(
            Phase.SWITCHING,
            EngineAction.START,
            f"its engine starts to serve {facts.assigned_role}",
            deadline_s,
        )
    if (
        facts.phase is Phase.SWITCHING or not facts.reachable
    ):  # what was known while it switched was the old engine's
        return PhaseTransition(
            Phase.VERIFYING, EngineAction.START, "waits for the router to reach it", deadline_s
        )
    return PhaseTransition(Phase.SERVING, EngineAction.START, "")
