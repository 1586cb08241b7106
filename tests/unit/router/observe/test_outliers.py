"""Instances that are far slower than others of their pool are ejected, and start anew."""

from fulcrum_core.latency import DecodeModel, PrefillModel
from fulcrum_core.values import Role
from fulcrum_router.observe.outliers import INTERVAL_S, LATENCY, MIN_SAMPLES
from fulcrum_router.observe.outliers import OutlierDetector as Detector
from fulcrum_router.router import Router
from tests.unit.router.builders import make_serving


def make_router(*pools: str) -> Router:
    """A router with prefill instances p0, p1, … in these pools."""
    router = Router()
    for number, pool in enumerate(pools):
        router.fleet.add(make_serving(f"p{number}", Role.PREFILL, pool=pool))
    return router


def measure(router: Router, name: str, prefill_s: float, count: int = MIN_SAMPLES) -> None:
    for _ in range(count):
        router.fleet[name].record_prefill(tokens=1000, cached_tokens=0, computed_for_s=prefill_s)


def judge(router: Router) -> list[str]:
    """Names of the instances that serve after one judgement."""
    Detector(router.fleet, on_ejection=router.record_ejection).tick(INTERVAL_S)
    return [instance.name for instance in router.fleet.instances if instance.serving]


def test_an_instance_far_slower_than_its_pool_is_ejected_and_starts_from_the_others() -> None:
    router = make_router("a", "a", "a")
    for name, prefill_s in (("p0", 0.1), ("p1", 0.12), ("p2", 2.0)):
        measure(router, name, prefill_s)
    assert judge(router) == ["p0", "p1"]
    slow = router.fleet["p2"]
    assert (router.counters.ejections, slow.samples) == ({LATENCY: 1}, (0, 0))
    assert slow.prefill_model == router.fleet["p1"].prefill_model, "else its past would eject it again"


def test_pools_of_different_hardware_are_not_compared() -> None:
    router = make_router("fast", "fast", "slow")
    for name, prefill_s in (("p0", 0.1), ("p1", 0.1), ("p2", 2.0)):
        measure(router, name, prefill_s)
    assert judge(router) == ["p0", "p1", "p2"]


def test_an_instance_that_was_hardly_measured_is_not_judged() -> None:
    router = make_router("a", "a", "a")
    for name, prefill_s, count in (("p0", 0.1, 8), ("p1", 0.1, 8), ("p2", 2.0, 7)):
        measure(router, name, prefill_s, count)
    assert judge(router) == ["p0", "p1", "p2"]


def test_decode_instances_are_compared_by_their_steps() -> None:
    router = make_router("a", "a", "a")
    for instance, itl_s in zip(router.fleet.instances, (0.02, 0.02, 0.2), strict=True):
        instance.set_role(Role.DECODE)
        instance.start_from(PrefillModel(0.01, 1e-4, 0.0), DecodeModel(0.02, 0.0))
        for _ in range(MIN_SAMPLES):
            instance.learn_decode(tokens=10_000, itl_s=itl_s)
    assert judge(router) == ["p0", "p1"]
