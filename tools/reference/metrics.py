"""The page of the metrics: every family of the router, the autoscaler and the operator."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from prometheus_client.metrics import MetricWrapperBase

from fulcrum_autoscaler.metrics import AutoscalerMetrics
from fulcrum_operator.controller.metrics import Metrics
from fulcrum_router.control.metrics import RouterCollector
from fulcrum_router.router import Router
from tools.reference.markdown import code, table

_INTRODUCTION = """# Metrics

Names as Prometheus stores them. Which program serves them at which port, and queries that answer common
questions: [metrics](../metrics.md). Each program also exports the metrics `process_*` and
`python_*` of its process.

"""


@dataclass(frozen=True, slots=True)
class Family:
    """A metric family: `name` as Prometheus stores it, `type` as in the TYPE line."""

    name: str
    type: str
    labels: tuple[str, ...]
    meaning: str


def list_families() -> dict[str, list[Family]]:
    """List the metric families of each program."""
    router = RouterCollector(Router()).collect()
    return {
        "Router": [_make_family(f.name, f.type, _label_names(f), f.documentation) for f in router],
        "Autoscaler": list(_list_registered(vars(AutoscalerMetrics()).values())),
        "Operator": list(_list_registered(vars(Metrics()).values())),
    }


def render_page() -> str:
    """Return the page: a section for each program, with a table of its metric families."""
    sections = (f"## {program}\n\n{_render(found)}" for program, found in list_families().items())
    return _INTRODUCTION + "\n".join(sections)


def _list_registered(attributes: Iterable[object]) -> Iterator[Family]:
    for metric in attributes:
        if isinstance(metric, MetricWrapperBase):
            family = next(iter(metric.describe()))
            yield _make_family(family.name, family.type, _label_names(metric), family.documentation)


def _make_family(name: str, metric_type: str, labels: tuple[str, ...], meaning: str) -> Family:
    full_name = f"{name}_total" if metric_type == "counter" else name
    return Family(full_name, metric_type, labels, meaning)


def _label_names(metric: object) -> tuple[str, ...]:
    return tuple(getattr(metric, "_labelnames", ()))


def _render(families: Iterable[Family]) -> str:
    rows = ((code(f.name), f.type, ", ".join(map(code, f.labels)), f.meaning) for f in families)
    return table(("metric", "type", "labels", "meaning"), rows)
