"""The Prometheus metrics of the autoscaler, and the spans of its flips.

`loop` records metrics and spans, `server` exposes the metrics, and `supervisor` makes and removes the series
of each service. Nothing is decided here.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics

from fulcrum_autoscaler.policy import (
    AutoscalingRules,
    DecisionAction,
    FlipDecision,
    Loads,
    Observation,
    Rates,
    Trigger,
)
from fulcrum_cluster.tracing import RootSpans
from fulcrum_core.values import FlipPolicy, Role

# Else each counter of a service has one series more, since when it counts.
disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has no types here
_UNKNOWN = float("nan")
_SERVICE_LABELS = ["namespace", "service"]


class AutoscalerMetrics:
    """The metric families of one autoscaler process, in a registry of their own.

    Args:
        spans: Takes a span of each flip; None: none are sent.
    """

    def __init__(self, spans: RootSpans | None = None) -> None:
        self.spans = spans
        self.registry = CollectorRegistry()
        self.load = Gauge(
            "fulcrum_autoscaler_load_ratio",
            "Load of a role as a ratio to its objective (lower bound); NaN if unknown.",
            [*_SERVICE_LABELS, "role"],
            registry=self.registry,
        )
        self.assigned_instances = Gauge(
            "fulcrum_autoscaler_assigned_instances",
            "Instances assigned to a role.",
            [*_SERVICE_LABELS, "role"],
            registry=self.registry,
        )
        self.threshold = Gauge(
            "fulcrum_autoscaler_threshold_ratio",
            "Load of decode from which policy arrow flips: expand, above it to decode; shrink, below it to "
            "prefill. NaN with another policy.",
            [*_SERVICE_LABELS, "threshold"],
            registry=self.registry,
        )
        self.forecast_prefill = Gauge(
            "fulcrum_autoscaler_forecast_prefill_instances",
            "Prefill work that policy balanced expects to arrive each second, in seconds: the prefill "
            "instances that it keeps busy. NaN: not known, or another policy.",
            _SERVICE_LABELS,
            registry=self.registry,
        )
        self.forecast_output_tokens = Gauge(
            "fulcrum_autoscaler_forecast_output_tokens_per_second",
            "Output tokens of the requests that policy balanced expects to arrive each second. NaN: not "
            "known, or another policy.",
            _SERVICE_LABELS,
            registry=self.registry,
        )
        self.router_state_age = Gauge(
            "fulcrum_autoscaler_router_state_age_seconds",
            "Age of the router's state when last read; NaN if the router did not respond.",
            _SERVICE_LABELS,
            registry=self.registry,
        )
        self.decisions = Counter(
            "fulcrum_autoscaler_decisions",
            "Decisions, by action and trigger.",
            [*_SERVICE_LABELS, "action", "trigger"],
            registry=self.registry,
        )
        self.flips = Counter(
            "fulcrum_autoscaler_flips",
            "Flips written, by new role and trigger.",
            [*_SERVICE_LABELS, "to", "trigger"],
            registry=self.registry,
        )
        self.write_conflicts = Counter(
            "fulcrum_autoscaler_write_conflicts",
            "Writes rejected because the assignment had changed; each was decided again.",
            _SERVICE_LABELS,
            registry=self.registry,
        )

    def remove_series(self, labels: dict[str, str]) -> None:
        """Remove all series with these label values."""
        for family in (
            self.load,
            self.assigned_instances,
            self.threshold,
            self.forecast_prefill,
            self.forecast_output_tokens,
            self.router_state_age,
            self.decisions,
            self.flips,
            self.write_conflicts,
        ):
            family.remove_by_labels(labels)


class ServiceMetrics:
    """The series of one service."""

    def __init__(
        self, autoscaler_metrics: AutoscalerMetrics | None = None, *, namespace: str = "", service: str = ""
    ) -> None:
        self._families = autoscaler_metrics or AutoscalerMetrics()
        self._labels = {"namespace": namespace, "service": service}
        self.write_conflicts = self._families.write_conflicts.labels(**self._labels)

    def record_rules(self, rules: AutoscalingRules) -> None:
        """Set the gauges of the thresholds; NaN with another policy than arrow."""
        arrow = rules.policy is FlipPolicy.ARROW
        for name, value in (("expand", rules.expand), ("shrink", rules.shrink)):
            self._families.threshold.labels(**self._labels, threshold=name).set(value if arrow else _UNKNOWN)

    def record_observation(self, observation: Observation, *, now_s: float) -> None:
        """Set the gauges that describe an observation. `now_s` is unix time."""
        age_s = now_s - observation.router.at_s if observation.router else _UNKNOWN
        self._families.router_state_age.labels(**self._labels).set(age_s)
        for role in (Role.PREFILL, Role.DECODE):
            count = sum(entry.role is role for entry in observation.assignment.roles.values())
            self._families.assigned_instances.labels(**self._labels, role=role.lower()).set(count)

    def record_decision(self, decision: FlipDecision) -> None:
        """Count a decision and its flips; set the gauges of loads and, only at ticks, of the forecast."""
        trigger = decision.trigger
        self._families.decisions.labels(**self._labels, action=decision.action, trigger=trigger).inc()
        if decision.action is DecisionAction.FLIP and decision.to is not None:
            self._families.flips.labels(**self._labels, to=decision.to.lower(), trigger=trigger).inc(
                1 + len(decision.further_instances)
            )
        loads = decision.loads or Loads(prefill=None, decode=None)
        for role, load in ((Role.PREFILL, loads.prefill), (Role.DECODE, loads.decode)):
            self._families.load.labels(**self._labels, role=role.lower()).set(load.low if load else _UNKNOWN)

        if trigger is Trigger.TICK:
            self._record_forecast(decision.forecast)

    def _record_forecast(self, rates: Rates | None) -> None:
        prefill, tokens = (rates.prefill, rates.output_tokens) if rates else (_UNKNOWN, _UNKNOWN)
        self._families.forecast_prefill.labels(**self._labels).set(prefill)
        self._families.forecast_output_tokens.labels(**self._labels).set(tokens)

    def trace_flip(self, decision: FlipDecision, *, began_s: float, now_s: float) -> None:
        """Send a span of a flip, from the beginning of its decision to the write. Times are unix time."""
        spans = self._families.spans
        if spans is None or decision.action is not DecisionAction.FLIP or decision.to is None:
            return
        names = ",".join((decision.instance or "", *decision.further_instances))
        attributes = {
            "fulcrum.namespace": self._labels["namespace"],
            "fulcrum.service": self._labels["service"],
            "fulcrum.instances": names,
            "fulcrum.to": decision.to.lower(),
            "fulcrum.trigger": str(decision.trigger),
            "fulcrum.reason": decision.reason,
        }
        spans.send("fulcrum.flip", start_s=began_s, end_s=now_s, attributes=attributes)

    def remove(self) -> None:
        """Remove the series of the service, when its loop ends."""
        self._families.remove_series(self._labels)
