"""The leader lists all kinds after a watch restarted and from time to time, and reports refused children."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from fulcrum_cluster.objects import EVENT, NODE, POD, SERVICE, Object, ObjectKind, ObjectList
from fulcrum_core.api import KINDS
from fulcrum_core.errors import Forbidden, NotFound, StoreUnavailable
from fulcrum_operator.controller.context import Problems
from fulcrum_operator.controller.kopf_feed import WATCHED_KINDS
from fulcrum_operator.controller.leader import RELIST_AFTER_GAP_S, RELIST_S, Leader, OperatorOptions
from fulcrum_operator.controller.metrics import Metrics
from fulcrum_operator.plan import Observed, Plan
from fulcrum_operator.plan.model import ModelReadRequest
from fulcrum_operator.plan.observed import FailureCause
from fulcrum_operator.plan.pools import desired_pools
from tests.unit.operator.builders import SETTINGS, service
from tests.waiting import advance

pytestmark = pytest.mark.looptime

OPTIONS = OperatorOptions(settings=SETTINGS)


class EmptyCluster:
    """A leader of an empty cluster whose feed reports restarted watches only."""

    def __init__(self) -> None:
        self.lists, self.failures = 0, list[Exception]()
        self.refusal = Forbidden("exceeded quota: services")
        self.events, self.created = list[Object](), list[Object]()
        self.store: Any = None
        self.objects: Any = self
        self.stop = asyncio.Event()
        self.restart_watch: Callable[[], None] = self.stop.clear
        connection: Any = self
        self.leader = Leader(connection, lambda _cache: self.feed(), OPTIONS, Metrics(), lambda: True)

    def feed(self) -> Any:
        return self

    async def run(
        self, stop: asyncio.Event, *, on_started: Callable[[], None], on_object_listed: Callable[[], None]
    ) -> None:
        self.restart_watch = on_object_listed
        on_started()
        await stop.wait()

    async def get_raw(self, path: str) -> Object:
        assert path == "/apis/fulcrum.dev/v1alpha1"
        return {"resources": [{"name": kind.plural} for kind in KINDS]}

    async def watch(self, kind: ObjectKind, *, namespace: str, since: str) -> AsyncIterator[Any]:
        del kind, namespace, since
        await self.stop.wait()
        yield

    async def list(self, kind: ObjectKind, *, namespace: str, labels: str = "") -> ObjectList:
        del namespace, labels
        if self.failures and kind != NODE:
            raise self.failures.pop()
        self.lists += kind == POD
        return [], "1"

    async def get(self, _kind: ObjectKind, name: str, *, namespace: str) -> Object:
        raise NotFound(f"{namespace}/{name}")

    async def create(self, kind: ObjectKind, body: Object, *, namespace: str) -> Object:
        assert namespace == "default"
        if kind == SERVICE:
            raise self.refusal
        (self.events if kind == EVENT else self.created).append(body)
        return {**body, "metadata": {"resourceVersion": "1", **body["metadata"]}}

    async def after_apply(self, read: ModelReadRequest | None = None) -> Problems:
        """Run what follows the applied plan."""
        return await self.leader._after_apply(Observed(service=service(), now_s=0.0), Plan(model_read=read))

    def start(self) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(
            self.leader.run(self.stop, on_started=lambda: None), name="leader"
        )

    async def end(self, work: asyncio.Task[None]) -> None:
        self.stop.set()
        await work
        await self.leader.aclose()


async def test_restarted_watches_cause_one_relist_soon_and_otherwise_relists_are_rare() -> None:
    cluster = EmptyCluster()
    work = cluster.start()
    await advance(RELIST_S / 2)
    at_start = cluster.lists
    for _ in WATCHED_KINDS:
        cluster.restart_watch()
    await advance(2 * RELIST_AFTER_GAP_S)
    after_gap = cluster.lists
    await advance(RELIST_S * 0.9)
    before_period = cluster.lists
    await advance(RELIST_S * 0.2)
    # At the start: once before the watches, and once for what was deleted before they listed.
    assert (at_start, after_gap, before_period, cluster.lists) == (2, 3, 3, 4)
    await cluster.end(work)


async def test_a_failed_list_is_retried() -> None:
    cluster = EmptyCluster()
    cluster.failures = [StoreUnavailable("no response")] * 3
    work = cluster.start()
    await advance(2)
    before = cluster.leader.synced
    await advance(2)
    assert (before, cluster.leader.synced) == (False, True)
    await cluster.end(work)


async def test_an_unexpected_error_in_a_list_ends_the_leader() -> None:
    cluster = EmptyCluster()
    cluster.failures = [KeyError("metadata")]
    with pytest.raises(KeyError):
        await cluster.start()
    assert cluster.stop.is_set()
    await cluster.leader.aclose()


async def test_a_refused_child_stops_no_other_child_and_delays_no_model_read() -> None:
    cluster = EmptyCluster()
    launch = desired_pools(service(), ())[0].spec.launch_spec
    problems = await cluster.after_apply(ModelReadRequest(launch, "k", 1))
    assert problems.causes == (FailureCause("ChildRefused", "Service chat: exceeded quota: services"),)
    created = [f"{body['kind']} {body['metadata']['name']}" for body in cluster.created]
    assert len(created) == 11  # the EndpointSlice waits for the Service, whose address decides its family
    assert {"Deployment chat-router", "NetworkPolicy chat-engines", "Pod chat-model"} <= set(created)
    await cluster.leader.aclose()
