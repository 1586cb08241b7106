"""The default image of engines is part of a pool's revision and stays until a roll-out."""

from dataclasses import replace
from typing import Any

from fulcrum_core.api import PDInstance, PDPool
from fulcrum_core.values import Phase
from fulcrum_operator.engines.images import EngineImages
from fulcrum_operator.plan import Observed, Plan, plan_service
from fulcrum_operator.plan.pools import desired_pools
from tests.unit.operator.builders import NOW_S, service

OLD, NEW = EngineImages(nvidia="vllm:old"), EngineImages(nvidia="vllm:new")
REAL: dict[str, Any] = {"instances": 2, "engine": {"type": "vLLM"}}


def pool_of_old_operator(**spec: Any) -> PDPool:
    """The pool as the operator with the old default created it."""
    (pool,) = desired_pools(service(**{**REAL, **spec}), (), images=OLD)
    meta = pool.metadata.model_copy(update={"uid": "u-pool"})
    return pool.replace(
        metadata=meta, status=pool.status.model_copy(update={"last_good": pool.spec.launch_spec})
    )


def instances(plan: Plan) -> list[PDInstance]:
    return [obj for obj in plan.objects if isinstance(obj, PDInstance)]


def test_a_new_pool_has_the_default_of_its_operator() -> None:
    assert [pool.spec.default_image for pool in desired_pools(service(**REAL), (), images=NEW)] == [
        "vllm:new"
    ]


def test_an_image_in_the_manifest_leaves_no_default() -> None:
    named = {**REAL, "engine": {"type": "vLLM", "image": "own:1"}}
    assert [pool.spec.default_image for pool in desired_pools(service(**named), (), images=NEW)] == [None]


def test_after_an_upgrade_replacements_get_the_image_of_their_peers_and_nothing_rolls_out() -> None:
    pool = pool_of_old_operator()
    observed = Observed(service=service(**REAL), now_s=NOW_S, pools=(pool,), engine_images=OLD)
    before = instances(plan_service(observed))
    (kept, lost) = (i.replace(status=i.status.model_copy(update={"phase": Phase.SERVING})) for i in before)
    after = plan_service(replace(observed, instances=(kept,), engine_images=NEW))
    assert [i.metadata.name for i in instances(after)] == [kept.metadata.name, lost.metadata.name]
    assert {i.spec.default_image for i in instances(after)} == {"vllm:old"}
    assert {i.spec.revision for i in instances(after)} == {kept.spec.revision}


def test_the_next_roll_out_takes_the_new_default_and_a_rollback_the_old_one() -> None:
    changed = {**REAL, "engine": {"type": "vLLM", "args": ["--seed", "1"]}}
    (pool,) = desired_pools(service(**changed), (pool_of_old_operator(),), images=NEW)
    assert pool.spec.default_image == "vllm:new"
    assert pool.status.last_good is not None
    assert pool.status.last_good.default_image == "vllm:old"


def test_a_pool_from_before_images_were_recorded_keeps_its_revision() -> None:
    (pool,) = desired_pools(service(**REAL), ())
    (again,) = desired_pools(service(**REAL), (pool,), images=NEW)
    assert again.spec.launch_revision == pool.spec.launch_revision
