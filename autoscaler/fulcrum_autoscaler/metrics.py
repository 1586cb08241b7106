"""What Prometheus reads of the autoscaler."""

from prometheus_client import CollectorRegistry, Counter, Gauge

from fulcrum_autoscaler.policy import Action, FlipDecision, Loads, Observation
from fulcrum_core.values import Role

_UNKNOWN = float("nan")


_SERVICE_LABELS = ["namespace", "service"]


class AutoscalerMetrics:
    """The metrics of one process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.load = Gauge(
            "fulcrum_autoscaler_load_ratio",
            "Load of a role as a ratio to its objective, at least; NaN: unknown.",
            [*_SERVICE_LABELS, "role"],
            registry=self.registry,
        )
        self.assigned_instances = Gauge(
            "fulcrum_autoscaler_assigned_instances",
            "Instances assigned to a role.",
            [*_SERVICE_LABELS, "role"],
            registry=self.registry,
        )
        self.router_state_age = Gauge(
            "fulcrum_autoscaler_router_state_age_seconds",
            "Age of the router's state when last read; NaN: no answer.",
            _SERVICE_LABELS,
            registry=self.registry,
        )
        self.decisions = Counter(
            "fulcrum_autoscaler_decisions",
            "Decisions by what was done and what woke them.",
            [*_SERVICE_LABELS, "action", "trigger"],
            registry=self.registry,
        )
        self.flips = Counter(
            "fulcrum_autoscaler_flips",
            "Flips written, by the role taken and what woke them.",
            [*_SERVICE_LABELS, "to", "trigger"],
            registry=self.registry,
        )
        self.write_conflicts = Counter(
            "fulcrum_autoscaler_write_conflicts",
            "Writes that found the assignment changed and were decided anew.",
            _SERVICE_LABELS,
            registry=self.registry,
        )

    def remove_series(self, labels: dict[str, str]) -> None:
        """Drop all series with these labels."""
        for family in (
            self.load,
            self.assigned_instances,
            self.router_state_age,
            self.decisions,
            self.flips,
            self.write_conflicts,
        ):
            family.remove_by_labels(labels)


class ServiceMetrics:
    """The metrics of one service."""

    def __init__(
        self, autoscaler_metrics: AutoscalerMetrics | None = None, *, namespace: str = "", service: str = ""
    ) -> None:
        self._families = autoscaler_metrics or AutoscalerMetrics()
        self._labels = {"namespace": namespace, "service": service}
        self.write_conflicts = self._families.write_conflicts.labels(**self._labels)

    def record_observation(self, observation: Observation, *, now_s: float) -> None:
        """Show what a decision starts from."""
        age_s = now_s - observation.router.at_s if observation.router else _UNKNOWN
        self._families.router_state_age.labels(**self._labels).set(age_s)
        for role in (Role.PREFILL, Role.DECODE):
            count = sum(entry.role is role for entry in observation.assignment.roles.values())
            self._families.assigned_instances.labels(**self._labels, role=role).set(count)

    def record_decision(self, decision: FlipDecision) -> None:
        """Count one decision and show its loads."""
        trigger = decision.trigger
        self._families.decisions.labels(**self._labels, action=decision.action, trigger=trigger).inc()
        if decision.action is Action.FLIP and decision.to is not None:
            self._families.flips.labels(**self._labels, to=decision.to, trigger=trigger).inc()
        loads = decision.loads or Loads(prefill=None, decode=None)
        for role, load in ((Role.PREFILL, loads.prefill), (Role.DECODE, loads.decode)):
            self._families.load.labels(**self._labels, role=role).set(load.low if load else _UNKNOWN)

    def remove(self) -> None:
        """The service is gone, and its series with it."""
        self._families.remove_series(self._labels)
