"""How many series a service has: a bound that each new metric is weighed against."""

from prometheus_client.core import Metric

from fulcrum_core.values import Role
from fulcrum_router.control.metrics import build_registry
from fulcrum_router.counters import DECODE, PREFILL
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.policy import PairKey, TransferOutcome
from fulcrum_router.policy.dispatch import DispatchReason
from fulcrum_router.policy.faults.failures import Failure
from fulcrum_router.router import Router

SERIES_MAX, SERIES_PER_INSTANCE_MAX = 400, 150
AUTOSCALER_AND_OPERATOR = 48
"""Series of one service of three pools in both, by the last column of docs/reference/metrics.md."""
TIERS, INSTANCES = 3, 32


def make_busy_router(instances: int) -> Router:
    """A router of three tiers after every choice and some failures, whose pairs have all transferred."""
    router = Router()
    for number in range(TIERS):
        router.counters.get_tier(f"tier-{number}")
    for phase in (PREFILL, DECODE):
        router.counters.legs[phase, "ok"] += 1
        for reason in DispatchReason:
            router.counters.dispatches[phase, reason] += 1
        for failure in (Failure.REFUSED, Failure.TIMEOUT, Failure.CLOSED, Failure.STATUS):
            router.counters.legs[phase, failure] += 1
            router.counters.retries[phase, failure] += 1
            router.counters.leg_failures[phase, str(failure)] += 1
    for number in range(instances):
        instance = Instance(f"i{number}")
        instance.assign(Role.PREFILL if number % 2 else Role.DECODE)
        router.fleet.add(instance)
    names = [instance.name for instance in router.fleet.instances]
    for prefill in names[1::2]:
        for decode in names[::2]:
            router.pairs[PairKey(prefill, decode)].record(TransferOutcome.VERIFIED, now_s=0.0)
    return router


def count_series(router: Router) -> int:
    families: list[Metric] = list(build_registry(router).collect())
    return sum(len(family.samples) for family in families)


def test_a_service_and_an_instance_have_no_more_series_than_is_weighed() -> None:
    service = count_series(make_busy_router(0)) + AUTOSCALER_AND_OPERATOR
    of_instances = count_series(make_busy_router(INSTANCES)) + AUTOSCALER_AND_OPERATOR - service
    assert (service <= SERIES_MAX, of_instances / INSTANCES <= SERIES_PER_INSTANCE_MAX) == (True, True), (
        f"{service} of a service, {of_instances / INSTANCES} of an instance"
    )
