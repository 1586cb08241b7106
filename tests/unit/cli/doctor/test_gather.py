"""That doctor reads its facts with bounded concurrency, measured in virtual time."""

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from fulcrum_cli.doctor.bounded_objects import CONCURRENCY_MAX
from fulcrum_cli.doctor.gather import gather_facts
from fulcrum_cli.target.connection import TargetConnection
from fulcrum_cluster.clock import SystemClock
from fulcrum_cluster.memory_store import MemoryStore
from fulcrum_cluster.objects import Object, ObjectKind
from tests.waiting import advance

pytestmark = pytest.mark.looptime

REQUEST_S = 0.1
"""Time that the API server takes for each request."""


class SlowObjects:
    """An API server with one Deployment of the operator, which takes `REQUEST_S` for each request."""

    def __init__(self) -> None:
        self.requests, self.open, self.open_max = 0, 0, 0

    async def _respond(self) -> None:
        self.requests, self.open = self.requests + 1, self.open + 1
        self.open_max = max(self.open_max, self.open)
        await advance(REQUEST_S)
        self.open -= 1

    async def get(self, _kind: ObjectKind, name: str, *, namespace: str) -> Object:
        await self._respond()
        return {"metadata": {"name": name, "namespace": namespace}}

    async def list(self, kind: ObjectKind, *, labels: str, **_: str) -> tuple[list[Object], str]:
        await self._respond()
        metadata = {"name": "fulcrum-operator", "namespace": "fulcrum"}
        spec: Object = {"selector": {"matchLabels": {}}, "template": {"spec": {}}}
        deployed = kind.kind == "Deployment" and labels.endswith("component=operator")
        return ([{"metadata": metadata, "spec": spec}] if deployed else []), "1"

    async def create(self, _kind: ObjectKind, body: Mapping[str, Any], **_: str) -> Object:
        await self._respond()
        return {**body, "status": {"allowed": True}}


async def test_requests_are_sent_eight_at_a_time_and_do_not_wait_for_one_another() -> None:
    slow = SlowObjects()
    objects: Any = slow
    connection = TargetConnection(
        store=MemoryStore(SystemClock()), namespace="team", description="a cluster", objects=objects
    )
    began_s = asyncio.get_running_loop().time()
    facts = await gather_facts(connection)
    rounds = round((asyncio.get_running_loop().time() - began_s) / REQUEST_S)
    assert facts.cluster is not None
    assert slow.open_max == CONCURRENCY_MAX
    assert (
        rounds <= -(-slow.requests // CONCURRENCY_MAX) + 2
    )  # the second half waits for the operator's Deployment
