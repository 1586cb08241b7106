"""The operator of a cluster, while it leads: what is fed, what is woken, what a pass reaches."""

import asyncio
import contextlib
import functools
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import structlog

from fulcrum_cluster.client import Cluster as Connection
from fulcrum_cluster.clock import SystemClock
from fulcrum_core.api import IdentitySpec, PDInstance, PDPool, PDService
from fulcrum_core.errors import Conflict, Forbidden, FulcrumError, InvalidInput, NotFound
from fulcrum_core.models import Fit
from fulcrum_core.ports import EngineObservation, instance_key
from fulcrum_core.profiles import load_profile
from fulcrum_core.values import FlipStrategy
from fulcrum_operator.controller.bounded_concurrency import side_by_side
from fulcrum_operator.controller.cache import Cache
from fulcrum_operator.controller.cached_store import CachedStore
from fulcrum_operator.controller.children import Children
from fulcrum_operator.controller.events import Recorder, child_refused, events_of
from fulcrum_operator.controller.kopf_feed import FOLLOWED, Feed, selector
from fulcrum_operator.controller.metrics import Meters
from fulcrum_operator.controller.pods.model_pods import ModelPods
from fulcrum_operator.controller.pods.observation import digest_of
from fulcrum_operator.controller.pods.pod_runtime import PodRuntime
from fulcrum_operator.controller.pods.role_probe import Probes, probe
from fulcrum_operator.controller.reconcile import Cluster, ServiceKey, reconcile
from fulcrum_operator.controller.router import STATE_URL, ClusterRouter
from fulcrum_operator.controller.unreadable_objects import Unread
from fulcrum_operator.controller.work_queue import KeyedQueue
from fulcrum_operator.engines import simulated, vllm
from fulcrum_operator.manifests.engine_container import fit_of, real_request
from fulcrum_operator.manifests.names import ClusterSettings
from fulcrum_operator.plan import Observed, Plan
from fulcrum_operator.plan.observed import EngineFacts
from fulcrum_operator.plan.pools import wanted_replicas

RESYNC_S = 60.0
"""Every service is looked at once in so long, even if nothing happened."""
RELIST_S = 300.0
"""Once in so long everything is listed, for a deletion that no watch told of."""
RELIST_SOON_S = 1.0
"""So long after a watch had to begin anew, since what was deleted meanwhile it does not tell."""
_RETRY_S = 1.0

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What an installation decides about its operator."""

    settings: ClusterSettings
    namespace: str = ""
    """Only this one; "": all."""
    token_file: Path = field(default_factory=Path)
    """What routers' state ports ask for."""
    router_state: str = STATE_URL


class Leader:
    """Everything that the leader does. To be closed.

    Args:
        connection: The cluster, for writes and lists.
        feed: Makes what keeps a cache current.
        options: What the installation decides.
        meters: Where its passes are counted.
        leads: Whether this process may write now.
    """

    def __init__(
        self,
        connection: Connection,
        feed: Callable[[Cache], Feed],
        options: Options,
        meters: Meters,
        leads: Callable[[], bool],
    ) -> None:
        self._connection, self._options, self._meters = connection, options, meters
        self.synced = False
        self._unsure = asyncio.Event()
        """A watch began anew."""
        self._last: dict[ServiceKey, dict[str, EngineObservation]] = {}
        self._refused: dict[ServiceKey, str] = {}
        """Why what a service needs was refused, as last told."""
        self._client = httpx.AsyncClient(trust_env=False, verify=False)  # plain HTTP: no certificates to load
        self._probes = Probes(self._probe)
        self._queue = KeyedQueue[ServiceKey](self._pass, resync_s=RESYNC_S)
        self._cache = Cache(self._wake)
        self._feed = feed(self._cache)
        objects, settings, clock = connection.objects, options.settings, SystemClock()
        self._children = Children(objects, self._cache, settings, leads=leads)
        self._recorder = Recorder(objects, clock, leads=leads)
        self._unread = Unread(self._cache, self._recorder.tell)
        self._runtime = PodRuntime(
            objects, self._cache, self._probes, settings, leads=leads, on_change=self._wake
        )
        self._router = ClusterRouter(
            self._cache, token_file=options.token_file, state_url=options.router_state
        )
        self._models = ModelPods(objects, self._cache, settings, clock, leads=leads, on_change=self._wake)
        self._cluster = Cluster(
            store=CachedStore(connection.store, self._cache, leads),
            runtime=self._runtime,
            clock=clock,
            engine_facts=self._facts,
            router=self._router,
            models=self._models,
            tend=self._tend,
        )

    async def run(self, stop: asyncio.Event, *, on_started: Callable[[], None]) -> None:
        """Look after every service until `stop` is set."""
        listing = asyncio.get_running_loop().create_task(self._keep_listing())
        listing.add_done_callback(lambda _: stop.set())  # of itself it never ends
        try:
            await self._feed.run(stop, on_started=on_started, on_listed=self._unsure.set)
        finally:
            listing.cancel()
            await asyncio.wait([listing])
        if not listing.cancelled():
            listing.result()

    async def aclose(self) -> None:
        """End all passes; nothing is written afterwards."""
        await self._queue.aclose()
        await self._probes.aclose()
        await asyncio.gather(self._client.aclose(), self._router.aclose())

    def _wake(self, key: ServiceKey) -> None:
        if self.synced:  # half a picture would have passes make what is there already
            self._queue.add(key)

    async def _keep_listing(self) -> None:
        while True:
            self._unsure.clear()
            try:
                await self._list()
            except FulcrumError as error:
                _log.warning("cannot list", reason=str(error))
                await asyncio.sleep(_RETRY_S)
                continue
            if not self.synced:
                self.synced = True
                _log.info("everything is listed", services=len(self._cache.services()))
                for key in self._cache.services():
                    self._queue.add(key)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RELIST_S):
                    await self._unsure.wait()
                    await asyncio.sleep(RELIST_SOON_S)

    async def _list(self) -> None:
        namespace = self._options.namespace
        for kind in FOLLOWED:
            found, version = await self._connection.objects.list(
                kind, namespace=namespace, labels=selector(kind)
            )
            self._cache.relisted(kind, namespace, found, version)
        self._children.look_again()

    async def _pass(self, key: ServiceKey) -> float | None:
        began_s, outcome = time.perf_counter(), "error"
        self._meters.depth.set(self._queue.depth)
        try:
            if await self._unread.hides(key):
                outcome = "unreadable"
                return None
            wanted_s = await reconcile(key, self._cluster)
            outcome = "ok"
            if wanted_s == math.inf:
                self._last.pop(key, None)
                self._refused.pop(key, None)
                self._models.forget(key)
            return wanted_s
        except Conflict:
            outcome = "conflict"
            raise
        finally:
            self._meters.passes.labels(outcome).inc()
            self._meters.duration.observe(time.perf_counter() - began_s)
            self._meters.depth.set(self._queue.depth - 1)

    async def _tend(self, seen: Observed, plan: Plan) -> None:
        service = seen.service
        key = ServiceKey(service.metadata.namespace, service.metadata.name)
        pools = [obj for obj in plan.objects if isinstance(obj, PDPool)] or seen.pools
        try:
            await self._tend_children(key, service, sum(wanted_replicas(pool) for pool in pools))
        except (Forbidden, InvalidInput):
            await self._models.tend(service, plan.read)  # first engines wait for it, and for no other child
            raise
        await self._models.tend(service, plan.read)
        instances = (obj for obj in plan.objects if isinstance(obj, PDInstance))
        await side_by_side(self._runtime.show_role(instance) for instance in instances)
        await self._recorder.tell(service.metadata, events_of(seen, plan, self._last.get(key, {})))
        self._last[key] = dict(seen.engines)

    async def _tend_children(self, key: ServiceKey, service: PDService, wanted: int) -> None:
        try:
            await self._children.tend(service, wanted=wanted)
        except (Forbidden, InvalidInput) as error:
            if self._refused.get(key) != str(error):
                self._refused[key] = str(error)
                await self._recorder.tell(service.metadata, [child_refused(str(error))])
            raise
        self._refused.pop(key, None)

    def _facts(self, instance: PDInstance) -> EngineFacts:
        key = instance_key(instance)
        identity, startup_s, fit = self._known(instance)
        image = self._runtime.image(key)
        if image is not None:  # engines of two images are not known to read each other's KV
            identity = identity.model_copy(update={"engine": f"{identity.engine}@{digest_of(image)}"})
        return EngineFacts(identity, self._runtime.strategy(key), startup_s, fit)

    def _known(self, instance: PDInstance) -> tuple[IdentitySpec, float, Fit | None]:
        """What its type and its settings tell of an engine, how long it takes to start, and if it can."""
        if instance.spec.engine.type == "Simulated":
            profile = _profile(instance.spec.engine.profile)
            return simulated.identity(instance.spec, profile), profile.startup_s, None
        service = self._cache.resource(PDService, instance.metadata.namespace, instance.spec.service)
        if service is None:
            raise NotFound(f"PDService {instance.spec.service} is gone")
        request = real_request(instance, service)
        return *vllm.known_of(request, vllm.POD), fit_of(request, instance, service)

    async def _probe(self, endpoint: str, model: str) -> FlipStrategy | None:
        return await probe(self._client, endpoint, model=model, salt=secrets.token_hex(8))


_profile = functools.cache(load_profile)
