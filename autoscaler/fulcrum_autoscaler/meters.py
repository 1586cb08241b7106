"""What Prometheus reads of the autoscaler."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from fulcrum_autoscaler.policy import Action, Decision, Loads, Observation
from fulcrum_core.values import Role

_NOT_KNOWN = float("nan")


_OF = ["namespace", "service"]


class Families:
    """The metrics of one process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.load = Gauge(
            "fulcrum_autoscaler_load_ratio",
            "Load of a role as a ratio to its objective, at least; NaN: unknown.",
            [*_OF, "role"],
            registry=self.registry,
        )
        self.wanted = Gauge(
            "fulcrum_autoscaler_wanted_instances",
            "Instances assigned to a role.",
            [*_OF, "role"],
            registry=self.registry,
        )
        self.state_age = Gauge(
            "fulcrum_autoscaler_state_age_seconds",
            "Age of the router's state when last read; NaN: no answer.",
            _OF,
            registry=self.registry,
        )
        self.decisions = Counter(
            "fulcrum_autoscaler_decisions",
            "Decisions by what was done and what woke them.",
            [*_OF, "action", "trigger"],
            registry=self.registry,
        )
        self.flips = Counter(
            "fulcrum_autoscaler_flips",
            "Flips written, by the role taken and what woke them.",
            [*_OF, "to", "trigger"],
            registry=self.registry,
        )
        self.conflicts = Counter(
            "fulcrum_autoscaler_conflicts",
            "Writes that found the assignment changed and were decided anew.",
            _OF,
            registry=self.registry,
        )

    def forget(self, labels: dict[str, str]) -> None:
        """Drop all series with these labels."""
        for family in (self.load, self.wanted, self.state_age, self.decisions, self.flips, self.conflicts):
            family.remove_by_labels(labels)


class Meters:
    """The metrics of one service."""

    def __init__(self, families: Families | None = None, *, namespace: str = "", service: str = "") -> None:
        self._all = families or Families()
        self._of = {"namespace": namespace, "service": service}
        self.conflicts = self._all.conflicts.labels(**self._of)

    def observe(self, seen: Observation, *, now_s: float) -> None:
        """Show what a decision starts from."""
        age_s = now_s - seen.router.at_s if seen.router else _NOT_KNOWN
        self._all.state_age.labels(**self._of).set(age_s)
        for role in (Role.PREFILL, Role.DECODE):
            count = sum(entry.role is role for entry in seen.assignment.roles.values())
            self._all.wanted.labels(**self._of, role=role).set(count)

    def count(self, decision: Decision) -> None:
        """Count one decision and show its loads."""
        trigger = decision.trigger
        self._all.decisions.labels(**self._of, action=decision.action, trigger=trigger).inc()
        if decision.action is Action.FLIP and decision.to is not None:
            self._all.flips.labels(**self._of, to=decision.to, trigger=trigger).inc()
        loads = decision.loads or Loads(prefill=None, decode=None)
        for role, load in ((Role.PREFILL, loads.prefill), (Role.DECODE, loads.decode)):
            self._all.load.labels(**self._of, role=role).set(load.low if load else _NOT_KNOWN)

    def close(self) -> None:
        """The service is gone, and its series with it."""
        self._all.forget(self._of)
