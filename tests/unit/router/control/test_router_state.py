"""What the router reports of its instances."""

import pytest

from fulcrum_core.latency import DecodeModel, PrefillModel
from fulcrum_core.values import Role
from fulcrum_router.control.state_port import build_router_state
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.policy.predictions.learned_models import PoolModels
from fulcrum_router.router import Router


def test_all_instances_of_a_pool_suit_prefill_alike_as_far_as_the_pool_was_measured() -> None:
    """One that has never computed a prompt has only an assumed speed of its own."""
    router = Router()
    for name, pool in (("a0", "a"), ("a1", "a"), ("b0", "b"), ("none", "")):
        instance = Instance(name, pool=pool)
        instance.assign(Role.DECODE)
        router.fleet.add(instance)
    router.learned_models = {"a": PoolModels(PrefillModel(0.0, 1e-4, 0.0), DecodeModel(0.02, 0.0))}
    state = build_router_state(router, now_s=0.0)
    found = {instance.name: instance.suits_prefill for instance in state.instances}
    assert found == {"a0": pytest.approx(0.2), "a1": pytest.approx(0.2), "b0": None, "none": None}
