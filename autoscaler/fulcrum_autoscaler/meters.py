"""What Prometheus reads of the autoscaler."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from fulcrum_autoscaler.policy import Action, Decision, Loads, Observation
from fulcrum_core.values import Role

_NOT_KNOWN = float("nan")


class Meters:
    """The metrics of one process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._load = Gauge(
            "fulcrum_autoscaler_load_ratio",
            "Load of a role as a ratio to its objective, at least; NaN: unknown.",
            ["role"],
            registry=self.registry,
        )
        self._wanted = Gauge(
            "fulcrum_autoscaler_wanted_instances",
            "Instances assigned to a role.",
            ["role"],
            registry=self.registry,
        )
        self._state_age = Gauge(
            "fulcrum_autoscaler_state_age_seconds",
            "Age of the router's state when last read; NaN: no answer.",
            registry=self.registry,
        )
        self._decisions = Counter(
            "fulcrum_autoscaler_decisions",
            "Decisions by what was done and what woke them.",
            ["action", "trigger"],
            registry=self.registry,
        )
        self._flips = Counter(
            "fulcrum_autoscaler_flips",
            "Flips written, by the role taken and what woke them.",
            ["to", "trigger"],
            registry=self.registry,
        )
        self.conflicts = Counter(
            "fulcrum_autoscaler_conflicts",
            "Writes that found the assignment changed and were decided anew.",
            registry=self.registry,
        )

    def observe(self, seen: Observation, *, now_s: float) -> None:
        """Show what a decision starts from."""
        self._state_age.set(now_s - seen.router.at_s if seen.router else _NOT_KNOWN)
        for role in (Role.PREFILL, Role.DECODE):
            count = sum(entry.role is role for entry in seen.assignment.roles.values())
            self._wanted.labels(role).set(count)

    def count(self, decision: Decision) -> None:
        """Count one decision and show its loads."""
        self._decisions.labels(decision.action, decision.trigger).inc()
        if decision.action is Action.FLIP and decision.to is not None:
            self._flips.labels(decision.to, decision.trigger).inc()
        loads = decision.loads or Loads(prefill=None, decode=None)
        for role, load in ((Role.PREFILL, loads.prefill), (Role.DECODE, loads.decode)):
            self._load.labels(role).set(load.low if load else _NOT_KNOWN)
