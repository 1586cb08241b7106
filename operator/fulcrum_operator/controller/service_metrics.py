"""Metrics of the leader about each service, from the object cache: no series outlives its service.

`leader` registers the collector; the metrics of the operator process itself are in `metrics`.
"""

from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fulcrum_core.api import PDAssignment, PDInstance, PDService
from fulcrum_core.api.pdinstance import DRAINED
from fulcrum_core.ports import Clock
from fulcrum_core.values import Phase
from fulcrum_operator.controller.cache import ObjectCache

_STATUS_VALUES = {"True": 1.0, "False": 0.0}
_LASTING = (Phase.STARTING, Phase.SWITCHING, Phase.VERIFYING, Phase.DRAINING, Phase.TERMINATING)
"""Phases that an instance is to leave soon."""
_SERVICE_LABELS = ["namespace", "service"]
_ServiceInstances = tuple[PDService, list[PDInstance]]
_Sample = tuple[list[str], float]
"""Values of the labels, and the value of the series."""


class ServiceCollector(Collector):
    """Builds the families from the cached services, instances and assignments at each scrape."""

    def __init__(self, cache: ObjectCache, clock: Clock) -> None:
        self._cache, self._clock = cache, clock

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registration does not collect."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """Build all families."""
        found = (self._cache.get_resource(PDService, *key) for key in self._cache.list_services())
        services = [service for service in found if service is not None]
        yield _build_conditions(services)
        yield _build_objectives(services)
        yield _build_instances(self._list_instances(services))
        yield _build_devices(self._list_instances(services))
        assignments = (self._cache.get_resource(PDAssignment, *key) for key in self._cache.list_services())
        yield _build_generations(found for found in assignments if found is not None)
        yield _build_phase_times(self._list_instances(services), now_s=self._clock.now_s())

    def _list_instances(self, services: Iterable[PDService]) -> Iterator[_ServiceInstances]:
        for service in services:
            name, namespace = service.metadata.name, service.metadata.namespace
            cached = self._cache.list_resources(PDInstance, namespace)
            yield service, [instance for instance in cached if instance.spec.service == name]


def _labels(service: PDService) -> list[str]:
    return [service.metadata.namespace, service.metadata.name]


def _build_gauge(name: str, text: str, *labels: str, samples: Iterable[_Sample]) -> Metric:
    """Build a family with the labels namespace, service and `labels`."""
    family = GaugeMetricFamily(name, text, labels=[*_SERVICE_LABELS, *labels])
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _build_conditions(services: Iterable[PDService]) -> Metric:
    return _build_gauge(
        "fulcrum_operator_service_condition",
        "Status of a condition of the service with its current reason: 1 True, 0 False, -1 Unknown.",
        *("condition", "reason"),
        samples=(
            (
                [*_labels(service), condition.type, condition.reason],
                _STATUS_VALUES.get(condition.status, -1.0),
            )
            for service in services
            for condition in service.status.conditions
        ),
    )


def _build_objectives(services: Iterable[PDService]) -> Metric:
    return _build_gauge(
        "fulcrum_operator_slo_objective_ratio",
        "Share of requests that must meet their objectives (spec.slo.attainment), 0 to 1.",
        samples=((_labels(service), service.spec.slo.attainment / 100) for service in services),
    )


def _build_instances(found: Iterable[_ServiceInstances]) -> Metric:
    return _build_gauge(
        "fulcrum_operator_instances",
        "Instances by phase.",
        "phase",
        samples=(
            ([*_labels(service), phase], sum(instance.status.phase is phase for instance in instances))
            for service, instances in found
            for phase in Phase
        ),
    )


def _build_devices(found: Iterable[_ServiceInstances]) -> Metric:
    return _build_gauge(
        "fulcrum_operator_devices",
        "Devices that the instances of a pool request; 1 for an instance that names no hardware.",
        "pool",
        samples=(
            ([*_labels(service), pool], count)
            for service, instances in found
            for pool, count in sorted(_count_devices(instances).items())
        ),
    )


def _count_devices(instances: Iterable[PDInstance]) -> Counter[str]:
    """Count the requested devices by pool."""
    devices: Counter[str] = Counter()
    for instance in instances:
        hardware = instance.spec.hardware
        devices[instance.spec.pool] += 1 if hardware is None else hardware.count
    return devices


def _build_generations(assignments: Iterable[PDAssignment]) -> Metric:
    found = (assignment.metadata for assignment in assignments)
    return _build_gauge(
        "fulcrum_operator_assignment_generation",
        "Generation of the PDAssignment as the operator knows it.",
        samples=(([metadata.namespace, metadata.name], metadata.generation) for metadata in found),
    )


def _build_phase_times(found: Iterable[_ServiceInstances], *, now_s: float) -> Metric:
    return _build_gauge(
        "fulcrum_operator_longest_phase_seconds",
        "For how long an instance has been in the phase, the longest one, in seconds; 0: none is. Instances "
        "that are drained and stay so are not counted.",
        "phase",
        samples=(
            ([*_labels(service), phase], _find_longest_s(instances, phase, now_s))
            for service, instances in found
            for phase in _LASTING
        ),
    )


def _find_longest_s(instances: Iterable[PDInstance], phase: Phase, now_s: float) -> float:
    """Longest time that one of the instances has been in the phase; 0 if none is."""
    since_s = [instance.status.phase_since for instance in instances if _is_in(instance, phase)]
    times_s = (now_s - start_s for start_s in since_s if start_s is not None)
    return max(0.0, max(times_s, default=0.0))


def _is_in(instance: PDInstance, phase: Phase) -> bool:
    return instance.status.phase is phase and instance.status.reason != DRAINED
