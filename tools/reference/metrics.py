"""The page of the metrics: every family of the router, the autoscaler and the operator.

`__main__` writes it, with a bound on the series of each family. The help texts are those of the programs.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.core import Metric
from prometheus_client.metrics import MetricWrapperBase

from fulcrum_autoscaler.metrics import AutoscalerMetrics
from fulcrum_cluster.clock import SystemClock
from fulcrum_operator.controller.cache import ObjectCache
from fulcrum_operator.controller.metrics import ApiCallCollector, Metrics
from fulcrum_operator.controller.service_metrics import ServiceCollector
from fulcrum_router.control.metrics import RouterCollector
from fulcrum_router.router import Router
from tools.reference.markdown import code, table

_INTRODUCTION = """# Metrics

Names as Prometheus stores them; the unit is in the name (seconds, bytes, tokens, ratio). Which program serves
them at which port, and queries that answer common questions: [metrics](../metrics.md). Each program also
exports the metrics `process_*` of its process.

The last column bounds the series of one process: T tiers, I instances, P reported pairs (at most 256), S
services, N named tenants (`spec.router.namedTenants`, 6), F kinds of failures (about 30). Series of an
instance, pair or service end with it.

"""


@dataclass(frozen=True, slots=True)
class Family:
    """A metric family: `name` as Prometheus stores it, `type` as in the TYPE line."""

    name: str
    type: str
    labels: tuple[str, ...]
    meaning: str
    buckets: int = 0
    """Buckets of a histogram, the last one included."""

    @property
    def series_bound(self) -> str:
        """Most series that one process has of this family, as a product."""
        if "condition" in self.labels:
            return "S · 9"  # each condition has one reason at a time
        labels = [label for label in self.labels if (label, "instance" in self.labels) != ("role", True)]
        bounds = [_BOUNDS[label] for label in labels]
        factors = [b for i, b in enumerate(bounds) if b.isdigit() or b not in bounds[:i]]
        if self.buckets:
            factors.append(str(self.buckets + 2))
        return " · ".join(factors) or "1"


_BOUNDS = {
    **{"tier": "T", "instance": "I", "prefill": "P", "decode": "P", "namespace": "S", "service": "S"},
    **{"outcome": "F", "reason": "F", "cause": "5", "phase": "8", "part": "9", "path": "F", "task": "F"},
    **{"action": "3", "trigger": "2", "to": "2", "role": "2", "header": "2", "pool": "pools"},
    **{
        "mode": "2",
        "decision": "F",
        "tenant": "(N + 1)",
        "time": "2",
        "result": "4",
        "state": "2",
        "threshold": "2",
    },
    **{"method": "6", "status": "F"},
}
"""Most values of each label. Labels with the same letter name one thing; an instance has one role."""


def list_families() -> dict[str, list[Family]]:
    """List the metric families of each program."""
    router, services = Router(), ServiceCollector(ObjectCache(lambda _: None), SystemClock())
    router.counters.get_tier("default")  # a tier has histograms from its first request on
    return {
        "Router": [_make_family(f, _label_names(f)) for f in RouterCollector(router).collect()],
        "Autoscaler": list(_list_registered(vars(AutoscalerMetrics()).values())),
        "Operator": [
            *_list_registered(vars(Metrics()).values()),
            *(_make_family(f, _label_names(f)) for f in ApiCallCollector({("GET", 200): 0}).collect()),
            *(_make_family(f, _label_names(f)) for f in services.collect()),
        ],
    }


def render_page() -> str:
    """Return the page: a section for each program, with a table of its metric families."""
    sections = (f"## {program}\n\n{_render(found)}" for program, found in list_families().items())
    return _INTRODUCTION + "\n".join(sections)


def _list_registered(attributes: Iterable[object]) -> Iterator[Family]:
    for metric in attributes:
        if isinstance(metric, MetricWrapperBase):
            yield _make_family(next(iter(metric.collect())), _label_names(metric))


def _make_family(family: Metric, labels: tuple[str, ...]) -> Family:
    name = f"{family.name}_total" if family.type == "counter" else family.name
    buckets = {sample.labels["le"] for sample in family.samples if "le" in sample.labels}
    return Family(name, family.type, labels, family.documentation, len(buckets))


def _label_names(metric: object) -> tuple[str, ...]:
    return tuple(getattr(metric, "_labelnames", ()))


def _render(families: Iterable[Family]) -> str:
    rows = (
        (code(f.name), f.type, ", ".join(map(code, f.labels)), f.meaning, f.series_bound) for f in families
    )
    return table(("metric", "type", "labels", "meaning", "series"), rows)
