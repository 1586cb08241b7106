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

from dataclasses import dataclass
from enum import StrEnum

from fulcrum_core.api.pdinstance import DRAINED, STARTS
from fulcrum_core.ports import EngineObservation, EngineState
from fulcrum_core.spelling import format_count
from fulcrum_core.values import FlipStrategy, Phase, Role

DELETED = "its engine was told to end by somebody else"

LOOK_AGAIN_S = 1.0
SWITCH_LEAST_S = 60.0
SWITCH_FACTOR = 3
"""An engine has a minute and three times its start-up to come back in its new role and answer."""


class EngineAction(StrEnum):
    """What shall become of the engine. A start of one that runs and a stop of one that is gone do nothing."""

    KEEP = "Keep"
    START = "Start"
    STOP = "Stop"
    STOP_DRAINED = "StopDrained"
    """Nothing is left on it that anybody waits for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What the next phase depends on."""

    phase: Phase
    since_s: float
    now_s: float
    drain_timeout_s: float
    engine: EngineObservation | None
    assigned: Role | None = None
    """The role that is wished; None before there is an assignment."""
    played: Role | None = None
    """The role that the engine was started for or plays; None before it first served."""
    strategy: FlipStrategy = FlipStrategy.RELABEL
    cordoned: bool = False
    leaving: bool = False
    """It shall go for good."""
    drained: bool = False
    """The router has acknowledged the cordon and nothing is open on it, by its word and by the engine's."""
    answers: bool = False
    """The router reached the engine that runs now."""
    legs: int | None = None
    """Requests on it as the router and the engine last said; None: not known."""
    startup_s: float = 0.0
    """From its engine's start to serving, as far as that is known."""
    taken: bool = False
    """Its engine was taken away by somebody else and does not come back."""
    shown_until_s: float = 0.0
    """Until when a lost instance is shown as failed."""

    @property
    def switch_timeout_s(self) -> float:
        """Longest time in which its engine comes back in a new role."""
        return SWITCH_LEAST_S + SWITCH_FACTOR * self.startup_s

    @property
    def flips(self) -> bool:
        """Whether its engine must be started anew for the role wished."""
        wanted, played = self.assigned, self.played
        restart = self.strategy is FlipStrategy.RESTART and not self.leaving
        return (
            restart and wanted is not None and played in (Role.PREFILL, Role.DECODE) and wanted is not played
        )

    @property
    def ends(self) -> str:
        """What is said while its engine ends for a flip."""
        return f"{DRAINED}; its engine ends to serve {self.assigned}"


@dataclass(frozen=True, slots=True)
class Step:
    """The phase that follows, what to do with the engine, and why."""

    phase: Phase
    action: EngineAction
    message: str
    deadline_s: float | None = None
    """When to look again even if nothing happens."""
    refused: str | None = None
    """Why the wished role is rolled back."""
    done: bool = False
    """Nothing of the instance is left: its object may be deleted."""


def advance(facts: Facts) -> Step:
    """The next step of an instance."""
    if facts.taken:
        return _taken(facts)
    if facts.phase is Phase.TERMINATING or (facts.leaving and not _at_work(facts)):
        return _terminating(facts, "wanted no more")
    if facts.phase in (Phase.SWITCHING, Phase.VERIFYING):
        return _switching(facts)
    if facts.engine is None:
        return _without_engine(facts)
    if facts.phase is Phase.DRAINING and facts.engine.ending:
        return Step(Phase.DRAINING, EngineAction.KEEP, facts.ends)
    if facts.engine.state is EngineState.EXITED:
        return _failed(facts.engine)
    if facts.engine.state is EngineState.STARTING:
        return _starting(facts.engine)
    if facts.leaving or facts.cordoned or facts.flips:
        return _draining(facts)
    return Step(Phase.SERVING, EngineAction.START, "")


def _at_work(facts: Facts) -> bool:
    running = facts.engine is not None and facts.engine.state is EngineState.RUNNING
    return running and facts.phase in (Phase.SERVING, Phase.DRAINING)


def _taken(facts: Facts) -> Step:
    """While it serves it drains; then it is shown as failed for a while, unless nobody misses it."""
    engine = facts.engine
    if engine is None:
        return Step(Phase.TERMINATING, EngineAction.KEEP, "its engine was taken away", done=True)
    if engine.state is EngineState.RUNNING:
        return Step(Phase.DRAINING, EngineAction.KEEP, f"{engine.message or DELETED}; another replaces it")
    message = f"{engine.message or engine.exit_reason or DELETED}; another replaces it"
    if facts.phase is Phase.FAILED and facts.now_s >= facts.shown_until_s:
        return Step(Phase.TERMINATING, EngineAction.STOP, message, done=True)
    return Step(Phase.FAILED, EngineAction.KEEP, message, deadline_s=facts.shown_until_s)


def _terminating(facts: Facts, why: str, action: EngineAction = EngineAction.STOP) -> Step:
    return Step(Phase.TERMINATING, action, why, done=facts.engine is None)


def _without_engine(facts: Facts) -> Step:
    if facts.phase is Phase.DRAINING and facts.flips:
        return Step(Phase.SWITCHING, EngineAction.START, f"its engine starts to serve {facts.assigned}")
    return Step(Phase.PENDING, EngineAction.START, "")


def _failed(engine: EngineObservation) -> Step:
    return Step(
        Phase.FAILED, EngineAction.START, f"its engine ended: {engine.exit_reason}; it is started again"
    )


def _starting(engine: EngineObservation) -> Step:
    why = f": {engine.message}" if engine.message else ""
    again = f"its engine starts again after: {engine.exit_reason}{why and f'; {engine.message}'}"
    return Step(Phase.STARTING, EngineAction.START, again if engine.exit_reason else f"{STARTS}{why}")


def _draining(facts: Facts) -> Step:
    since_s = facts.since_s if facts.phase is Phase.DRAINING else facts.now_s
    deadline_s = since_s + facts.drain_timeout_s
    if not facts.leaving and not facts.flips:
        return _cordoned(facts)
    waited = facts.phase is Phase.DRAINING  # a pass that only now cordons cannot have been acknowledged
    if waited and facts.drained:
        return _drained(facts)
    if waited and facts.now_s >= deadline_s:
        return _overdue(facts)
    # How many is the router's to say: a count here would be written with every request that ends.
    return Step(Phase.DRAINING, EngineAction.START, "waits for its requests to end", deadline_s=deadline_s)


def _cordoned(facts: Facts) -> Step:
    """It stays until the cordon is lifted; whoever cordoned it reads here when nothing is left on it."""
    if facts.phase is Phase.DRAINING and facts.drained:
        return Step(Phase.DRAINING, EngineAction.START, f"cordoned, {DRAINED}")
    return Step(Phase.DRAINING, EngineAction.START, "cordoned", deadline_s=facts.now_s + LOOK_AGAIN_S)


def _drained(facts: Facts) -> Step:
    if facts.leaving:
        return _terminating(facts, DRAINED, EngineAction.STOP_DRAINED)
    return Step(Phase.DRAINING, EngineAction.STOP_DRAINED, facts.ends)


def _overdue(facts: Facts) -> Step:
    """A deletion goes on and says what it cut; a flip is cancelled."""
    if facts.leaving:
        return _terminating(facts, f"cut {_requests(facts)} not ended after {facts.drain_timeout_s:g} s")
    why = f"not drained after {facts.drain_timeout_s:g} s, {_requests(facts)} left"
    return Step(Phase.SERVING, EngineAction.START, why, refused=why)


def _requests(facts: Facts) -> str:
    if facts.legs is None:
        return "an unknown number of requests"
    return format_count(facts.legs, "request")


def _switching(facts: Facts) -> Step:
    engine = facts.engine
    if not facts.flips:  # withdrawn or rolled back: the engine that was started for the other role ends first
        if engine is not None:
            return Step(facts.phase, EngineAction.STOP, f"its engine ends to serve {facts.played} again")
        return Step(Phase.STARTING, EngineAction.START, f"its engine starts to serve {facts.played} again")
    deadline_s = facts.since_s + facts.switch_timeout_s
    if facts.now_s >= deadline_s:
        why = f"did not serve {facts.assigned} within {facts.switch_timeout_s:g} s"
        return Step(facts.phase, EngineAction.KEEP, why, refused=why)
    if engine is None or engine.state is not EngineState.RUNNING:
        return Step(
            Phase.SWITCHING, EngineAction.START, f"its engine starts to serve {facts.assigned}", deadline_s
        )
    if (
        facts.phase is Phase.SWITCHING or not facts.answers
    ):  # what was known while it switched was the old engine's
        return Step(Phase.VERIFYING, EngineAction.START, "waits for the router to reach it", deadline_s)
    return Step(Phase.SERVING, EngineAction.START, "")
