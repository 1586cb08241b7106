"""A child that the API server refuses is tried again with growing delays. Level 3 tests the rest."""

from typing import Any

import pytest

from fulcrum_cluster.objects import SERVICE, Object, ObjectKind
from fulcrum_core.errors import Forbidden, NotFound
from fulcrum_operator.controller.cache import ObjectCache
from fulcrum_operator.controller.children import Children
from tests.clocks import ManualClock
from tests.unit.operator.builders import NOW_S, SETTINGS, service


class QuotaOnServices:
    """An API server whose quota allows no Service, with another text for each try; it counts the tries."""

    def __init__(self) -> None:
        self.tries = 0

    async def get(self, _kind: ObjectKind, name: str, *, namespace: str) -> Object:
        raise NotFound(f"{namespace}/{name}")

    async def create(self, kind: ObjectKind, body: Object, *, namespace: str) -> Object:
        del namespace
        if kind == SERVICE:
            self.tries += 1
            raise Forbidden(f"exceeded quota: services (request {self.tries})")
        return {**body, "metadata": {"resourceVersion": "1", **body["metadata"]}}


async def test_a_refused_child_is_tried_again_with_a_growing_delay() -> None:
    clock, objects = ManualClock(NOW_S), QuotaOnServices()
    api: Any = objects
    children = Children(api, ObjectCache(lambda _key: None), SETTINGS, clock, is_leader=lambda: True)
    delays_s = []
    for tries in range(1, 5):
        problems = await children.sync(service(), min_available=1)
        delay_s = problems.retry_after_s or 0.0
        clock.at_s += delay_s - 0.1
        early = await children.sync(service(), min_available=1)
        assert objects.tries == tries
        assert early.retry_after_s == pytest.approx(0.1)
        clock.at_s += 0.2
        delays_s.append(delay_s)
    assert delays_s == [0.5, 1.0, 2.0, 4.0]


async def test_a_refused_child_is_tried_again_at_once_when_its_manifest_changes() -> None:
    clock, objects = ManualClock(NOW_S), QuotaOnServices()
    api: Any = objects
    children = Children(api, ObjectCache(lambda _key: None), SETTINGS, clock, is_leader=lambda: True)
    await children.sync(service(), min_available=1)
    renamed = service().replace(metadata=service().metadata.model_copy(update={"uid": "u-another"}))
    await children.sync(renamed, min_available=1)
    assert objects.tries == 2
