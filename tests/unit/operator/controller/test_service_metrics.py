"""The leader's metrics about services follow its object cache: no series of a service that is gone."""

from typing import Any

from prometheus_client import CollectorRegistry

from fulcrum_core.api import PDInstance, PDService
from fulcrum_core.values import Phase
from fulcrum_operator.controller.cache import ObjectCache
from fulcrum_operator.controller.service_metrics import ServiceCollector
from fulcrum_operator.plan.status.condition import make_condition
from tests.clocks import ManualClock
from tests.unit.operator.builders import NOW_S, D, P, settled

Samples = dict[tuple[str, str], float]


def samples(cache: ObjectCache) -> Samples:
    """Values other than 0, by metric and by what distinguishes its series."""
    registry = CollectorRegistry()
    registry.register(ServiceCollector(cache, ManualClock(NOW_S)))
    return {
        (s.name.removeprefix("fulcrum_operator_"), ".".join(list(s.labels.values())[2:])): s.value
        for family in registry.collect()
        for s in family.samples
        if s.value
    }


def put(cache: ObjectCache, obj: PDService | PDInstance, **status: Any) -> None:
    metadata = obj.metadata.model_copy(update={"resource_version": "1"})
    cache.put_resource(obj.replace(metadata=metadata, status=obj.status.model_copy(update=status)))


def test_a_service_is_shown_by_conditions_objective_and_phases() -> None:
    cache = ObjectCache(lambda _: None)
    observed = settled({"chat-0": P, "chat-1": D, "chat-2": D})
    chat = observed.service
    conditions = (
        make_condition(chat, "Ready", "True", "InstancesServing", ""),
        make_condition(chat, "SLOMet", "Unknown", "NoTraffic", ""),
    )
    put(cache, chat, conditions=conditions)
    for number, instance in enumerate(observed.instances):
        draining = {"phase": Phase.DRAINING, "phase_since": NOW_S - 60.0 * number}
        put(cache, instance, **draining if number else {})
    assert samples(cache) == {
        ("service_condition", "Ready.InstancesServing"): 1.0,
        ("service_condition", "SLOMet.NoTraffic"): -1.0,
        ("slo_objective_ratio", ""): 0.99,
        ("instances", "Serving"): 1.0,
        ("instances", "Draining"): 2.0,
        ("devices", "chat-flex"): 3.0,
        ("longest_phase_seconds", "Draining"): 120.0,
    }


def test_no_series_outlives_its_service() -> None:
    assert samples(ObjectCache(lambda _: None)) == {}
