"""Metrics of the leader about each service, from the object cache: no series outlives its service."""

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


class ServiceCollector(Collector):
    """Builds the families from the cached services and instances."""

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

    def _list_instances(self, services: Iterable[PDService]) -> Iterator[tuple[PDService, list[PDInstance]]]:
        for service in services:
            name, namespace = service.metadata.name, service.metadata.namespace
            cached = self._cache.list_resources(PDInstance, namespace)
            yield service, [instance for instance in cached if instance.spec.service == name]


def _labels(service: PDService) -> list[str]:
    return [service.metadata.namespace, service.metadata.name]


def _build_conditions(services: Iterable[PDService]) -> Metric:
    family = GaugeMetricFamily(
        "fulcrum_operator_service_condition",
        "Status of a condition of the service with its current reason: 1 True, 0 False, -1 Unknown.",
        labels=[*_SERVICE_LABELS, "condition", "reason"],
    )
    for service in services:
        for condition in service.status.conditions:
            value = _STATUS_VALUES.get(condition.status, -1.0)
            family.add_metric([*_labels(service), condition.type, condition.reason], value)
    return family


def _build_objectives(services: Iterable[PDService]) -> Metric:
    family = GaugeMetricFamily(
        "fulcrum_operator_slo_objective_ratio",
        "Share of requests that must meet their objectives (spec.slo.attainment), 0 to 1.",
        labels=_SERVICE_LABELS,
    )
    for service in services:
        family.add_metric(_labels(service), service.spec.slo.attainment / 100)
    return family


def _build_instances(found: Iterable[tuple[PDService, list[PDInstance]]]) -> Metric:
    family = GaugeMetricFamily(
        "fulcrum_operator_instances", "Instances by phase.", labels=[*_SERVICE_LABELS, "phase"]
    )
    for service, instances in found:
        phases = [instance.status.phase for instance in instances]
        for phase in Phase:
            family.add_metric([*_labels(service), phase], phases.count(phase))
    return family


def _build_devices(found: Iterable[tuple[PDService, list[PDInstance]]]) -> Metric:
    family = GaugeMetricFamily(
        "fulcrum_operator_devices",
        "Devices that the instances of a pool request; 1 for an instance that names no hardware.",
        labels=[*_SERVICE_LABELS, "pool"],
    )
    for service, instances in found:
        devices: Counter[str] = Counter()
        for instance in instances:
            hardware = instance.spec.hardware
            devices[instance.spec.pool] += 1 if hardware is None else hardware.count
        for pool, count in sorted(devices.items()):
            family.add_metric([*_labels(service), pool], count)
    return family


def _build_generations(assignments: Iterable[PDAssignment]) -> Metric:
    family = GaugeMetricFamily(
        "fulcrum_operator_assignment_generation",
        "Generation of the PDAssignment as the operator knows it.",
        labels=_SERVICE_LABELS,
    )
    for assignment in assignments:
        metadata = assignment.metadata
        family.add_metric([metadata.namespace, metadata.name], metadata.generation)
    return family


def _build_phase_times(found: Iterable[tuple[PDService, list[PDInstance]]], *, now_s: float) -> Metric:
    family = GaugeMetricFamily(
        "fulcrum_operator_longest_phase_seconds",
        "For how long an instance has been in the phase, the longest one, in seconds; 0: none is. Instances "
        "that are drained and stay so are not counted.",
        labels=[*_SERVICE_LABELS, "phase"],
    )
    for service, instances in found:
        for phase in _LASTING:
            since_s = [i.status.phase_since for i in instances if _is_in(i, phase)]
            longest_s = max((now_s - s for s in since_s if s is not None), default=0.0)
            family.add_metric([*_labels(service), phase], max(0.0, longest_s))
    return family


def _is_in(instance: PDInstance, phase: Phase) -> bool:
    return instance.status.phase is phase and instance.status.reason != DRAINED
