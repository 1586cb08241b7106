"""The leading operator of a cluster: wires watches, object cache, work queue and reconcile.

`program.Candidate` creates it once the process holds the Lease; a standby has none.
"""

import asyncio
import contextlib
import functools
import math
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import httpx
import structlog

from fulcrum_cluster.client import ClusterClient
from fulcrum_cluster.clock import SystemClock
from fulcrum_cluster.objects import SERVICE, SERVICE_ACCOUNT
from fulcrum_core.api import KINDS, EngineIdentitySpec, PDInstance, PDPool, PDService
from fulcrum_core.api.meta import API_VERSION
from fulcrum_core.errors import Conflict, FulcrumError, NotFound
from fulcrum_core.models import Fit
from fulcrum_core.ports import NodeDeparture, instance_key
from fulcrum_core.profiles import load_shipped_profile
from fulcrum_core.values import FlipStrategy
from fulcrum_operator.controller.bounded_concurrency import run_bounded
from fulcrum_operator.controller.cache import ObjectCache
from fulcrum_operator.controller.cached_store import CachedStore
from fulcrum_operator.controller.children import Children, check_not_deleted
from fulcrum_operator.controller.context import Problems, ReconcileContext, ServiceKey
from fulcrum_operator.controller.crd_changes import CrdChanges
from fulcrum_operator.controller.departing_nodes import DepartingNodes
from fulcrum_operator.controller.events import (
    EventRecorder,
    Reported,
    derive_events,
    reconcile_failed,
    remember_reported,
)
from fulcrum_operator.controller.kopf_feed import WATCHED_KINDS, KopfFeed, label_selector
from fulcrum_operator.controller.metrics import Metrics
from fulcrum_operator.controller.pods.model_reader_pods import ModelReaderPods
from fulcrum_operator.controller.pods.pod_runtime import PodRuntime
from fulcrum_operator.controller.pods.pod_status import short_digest
from fulcrum_operator.controller.pods.role_probe import RoleProbes, probe_roles
from fulcrum_operator.controller.pods.router_pods import find_router_failures
from fulcrum_operator.controller.reconcile import reconcile
from fulcrum_operator.controller.router_view import STATE_URL_TEMPLATE, ClusterRouterView
from fulcrum_operator.controller.service_metrics import ServiceCollector
from fulcrum_operator.controller.unreadable_objects import UnreadableObjects
from fulcrum_operator.controller.work_queue import WorkQueue
from fulcrum_operator.engines import simulated, vllm
from fulcrum_operator.engines.images import EngineImages
from fulcrum_operator.manifests.engine_container import judge_instance_fit, vllm_launch_request
from fulcrum_operator.manifests.names import InstallationSettings, engine_account_name
from fulcrum_operator.plan import Observed, Plan
from fulcrum_operator.plan.drains import list_drain_times
from fulcrum_operator.plan.observed import EngineFacts, FailureCause

RESYNC_S = 60.0
"""Longest time between two reconciles of a service, in seconds."""
RELIST_S = 300.0
"""Time between two lists of all kinds, in seconds; a list finds deletions that no watch reported."""
RELIST_AFTER_GAP_S = 1.0
"""Delay of a list after a watch restarted, in seconds: the watch does not report deletions in the gap."""
_LIST_RETRY_S = 1.0

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorOptions:
    """Options of an installation's operator."""

    settings: InstallationSettings
    namespace: str = ""
    """The only namespace to reconcile; "": all."""
    token_file: Path = field(default_factory=Path)
    """Token for the routers' state ports."""
    router_state: str = STATE_URL_TEMPLATE
    state_ca: Path | None = None
    """Authorities of state ports with TLS, as PEM; None: their certificates are not accepted."""


class Leader:
    """The control loop of all services of a cluster. The owner calls `aclose`.

    Args:
        connection: The cluster, for writes and lists.
        feed: Creates the watches that feed a cache.
        options: Options of the installation.
        metrics: Metrics of the reconciles.
        is_leader: Returns whether this process may write now.
    """

    def __init__(
        self,
        connection: ClusterClient,
        feed: Callable[[ObjectCache], KopfFeed],
        options: OperatorOptions,
        metrics: Metrics,
        is_leader: Callable[[], bool],
    ) -> None:
        self._connection, self._options, self._metrics = connection, options, metrics
        self.synced = False
        """Whether all kinds were listed and can be watched."""
        self._listed, self._watching, self._unlisted_reason = asyncio.Event(), False, ""
        self._watch_restarted = asyncio.Event()
        """Set when a watch has restarted, which calls for a list."""
        self._reported: dict[ServiceKey, Reported] = {}
        self._client = httpx.AsyncClient(trust_env=False, verify=False)  # plain HTTP: no certificates to load
        self._probes = RoleProbes(self._probe_roles)
        self._queue = WorkQueue[ServiceKey](self._reconcile_service, resync_s=RESYNC_S)
        self._cache = ObjectCache(self._enqueue)
        self._feed = feed(self._cache)
        objects, settings, clock = connection.objects, options.settings, SystemClock()
        self._clock = clock
        metrics.registry.register(ServiceCollector(self._cache, clock))
        self._children = Children(objects, self._cache, settings, clock, is_leader=is_leader)
        self._recorder = EventRecorder(objects, clock, is_leader=is_leader)
        self._unreadable = UnreadableObjects(
            self._cache, self._recorder.record, objects, clock, is_leader=is_leader
        )
        self._nodes = None if options.namespace else DepartingNodes(objects, clock, self._reconcile_all)
        self._runtime = PodRuntime(
            objects,
            self._cache,
            self._probes,
            settings,
            is_leader=is_leader,
            departure_of=self._departure_of,
            on_change=self._enqueue,
        )
        self._router_view = ClusterRouterView(
            self._cache,
            token_file=options.token_file,
            is_own_service=lambda key: self._children.is_own(SERVICE, key.name, self._service(key)),
            state_url=options.router_state,
            ca_file=options.state_ca,
        )
        self._model_reader = ModelReaderPods(
            objects, self._cache, settings, clock, is_leader=is_leader, on_change=self._enqueue
        )
        self._store = CachedStore(connection.store, self._cache, is_leader, objects=objects)
        self._crd_changes = CrdChanges(self._store.missing_fields, objects, self._reconcile_all)
        self._context = self._make_context()

    def _make_context(self) -> ReconcileContext:
        return ReconcileContext(
            store=self._store,
            runtime=self._runtime,
            clock=self._clock,
            engine_facts=self._engine_facts,
            router=self._router_view,
            router_failures=self._find_router_failures,
            state_tls=self._router_view.serves_state_tls,
            installation_problems=self._installation_problems,
            models=self._model_reader,
            check_not_deleted=lambda service: check_not_deleted(service, self._connection.objects),
            has_engine_account=lambda key: self._has_engine_account(self._service(key)),
            engine_images=self._engine_images,
            sees_nodes=lambda: self._nodes is not None and self._nodes.allowed,
            after_apply=self._after_apply,
            on_failure=self._record_failure,
        )

    def _find_router_failures(self, key: ServiceKey) -> Problems:
        found = find_router_failures(self._cache, key, now_s=self._clock.now_s())
        return replace(found, causes=(*found.causes, *self._router_view.problems(key)))

    def unready_reason(self) -> str | None:
        """Why not all objects are listed and watched; None if they are."""
        if not self.synced:
            return self._unlisted_reason or "the first list of all objects is not complete"
        return None if self._watching else "the watches have not started"

    async def run(self, stop: asyncio.Event, *, on_started: Callable[[], None]) -> None:
        """Reconcile every service until `stop` is set."""
        list_task = asyncio.get_running_loop().create_task(self._relist_forever())
        list_task.add_done_callback(lambda _: stop.set())  # it ends only by an error
        others = [
            asyncio.get_running_loop().create_task(task)
            for task in (self._follow_nodes(), self._crd_changes.run())
        ]
        try:
            if await self._wait_until_listed(stop):
                await self._watch(stop, on_started)
        finally:
            for task in (list_task, *others):
                task.cancel()
            await asyncio.wait([list_task, *others])
        if not list_task.cancelled():
            list_task.result()

    async def _wait_until_listed(self, stop: asyncio.Event) -> bool:
        """Wait until all kinds could be listed; False if `stop` is set first.

        The feed finds out only at its start which kinds the API server has: a kind whose CRD is applied later
        would never be watched.
        """
        loop = asyncio.get_running_loop()
        waits = [loop.create_task(event.wait()) for event in (self._listed, stop)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        return not stop.is_set()

    async def _watch(self, stop: asyncio.Event, on_started: Callable[[], None]) -> None:
        """Watch all kinds until `stop` is set; raises if a watch fails for good: its CRD was deleted."""

        def start() -> None:
            on_started()
            self._watching = True
            self._watch_restarted.set()  # what was deleted between list and watch is found by another list

        try:
            await self._feed.run(stop, on_started=start, on_object_listed=self._watch_restarted.set)
        finally:
            self._watching = False

    async def aclose(self) -> None:
        """Cancel all reconciles; nothing is written afterwards."""
        await self._queue.aclose()
        await self._probes.aclose()
        await asyncio.gather(self._client.aclose(), self._router_view.aclose())

    async def _follow_nodes(self) -> None:
        """Follow nodes until cancelled; an operator of a single namespace cannot be allowed to."""
        if self._nodes is not None:
            await self._nodes.run()

    def _departure_of(self, node: str) -> NodeDeparture | None:
        return None if self._nodes is None else self._nodes.departures.get(node)

    def _installation_problems(self) -> tuple[FailureCause, ...]:
        nodes = () if self._nodes is None else self._nodes.causes()
        return (*self._store.missing_fields.causes(), *nodes)

    def _enqueue(self, key: ServiceKey) -> None:
        if self.synced:  # before the first full list, a reconcile would recreate existing objects
            self._queue.add(key)

    def _reconcile_all(self) -> None:
        for key in self._cache.list_services():
            self._enqueue(key)

    async def _relist_forever(self) -> None:
        while True:
            self._watch_restarted.clear()
            try:
                if not self.synced:
                    await self._check_kinds_served()
                await self._relist()
            except FulcrumError as error:
                self._unlisted_reason = str(error)
                _log.warning("cannot list objects, retrying", retry_s=_LIST_RETRY_S, error=str(error))
                await asyncio.sleep(_LIST_RETRY_S)
                continue
            if not self.synced:
                self.synced = True
                self._listed.set()
                _log.info("initial list complete", services=len(self._cache.list_services()))
                for key in self._cache.list_services():
                    self._queue.add(key)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(RELIST_S):
                    await self._watch_restarted.wait()
                    await asyncio.sleep(RELIST_AFTER_GAP_S)

    async def _check_kinds_served(self) -> None:
        """Raise `NotFound` unless the API server announces all kinds, by which the feed finds them."""
        try:
            response = await self._connection.objects.get_raw(f"/apis/{API_VERSION}")
        except NotFound:
            response = {}
        served = {resource.get("name") for resource in response.get("resources", ())}
        missing = [kind.plural for kind in KINDS if kind.plural not in served]
        if missing:
            raise NotFound(f"the API server does not serve {', '.join(missing)}: apply the CRDs")

    async def _relist(self) -> None:
        namespace = self._options.namespace
        for kind in WATCHED_KINDS:
            found, version = await self._connection.objects.list(
                kind, namespace=namespace, labels=label_selector(kind)
            )
            self._cache.replace_all(kind, namespace, found, version)
        self._children.recheck_all()
        self._store.missing_fields.retry_all()

    async def _reconcile_service(self, key: ServiceKey) -> float | None:
        began_s, outcome = time.perf_counter(), "error"
        self._metrics.active_reconciles.set(self._queue.running_count)
        try:
            if await self._unreadable.blocks_reconcile(key):
                outcome = "unreadable"
                return None
            requeue_after_s = await reconcile(key, self._context)
            outcome = "ok"
            if requeue_after_s == math.inf:
                self._forget(key)
            return requeue_after_s
        except Conflict:
            outcome = "conflict"
            raise
        finally:
            took_s = time.perf_counter() - began_s
            self._metrics.record_reconcile(key.namespace, key.name, outcome, took_s=took_s)
            self._metrics.active_reconciles.set(self._queue.running_count - 1)

    def _forget(self, key: ServiceKey) -> None:
        """Drop what is stored about a service that was deleted."""
        self._reported.pop(key, None)
        self._model_reader.forget(key)
        if all(other.namespace != key.namespace for other in self._cache.list_services()):
            self._runtime.forget_namespace(key.namespace)

    async def _after_apply(self, observed: Observed, plan: Plan) -> Problems:
        service = observed.service
        key = ServiceKey(service.metadata.namespace, service.metadata.name)
        for drain_s in list_drain_times(observed, plan):
            self._metrics.drain_seconds.observe(drain_s)
        problems = await self._children.sync(service, min_available=plan.min_available)
        await self._model_reader.sync(service, plan.model_read if self._has_engine_account(service) else None)
        instances = (obj for obj in plan.objects if isinstance(obj, PDInstance))
        await run_bounded(self._runtime.sync_role_label(instance) for instance in instances)
        events = derive_events(observed, plan, self._reported.get(key, Reported()))
        await self._recorder.record(service.metadata, events, observed.instances)
        self._reported[key] = remember_reported(observed)
        return problems

    def _engine_images(self) -> EngineImages | None:
        """None if the CRDs lack the field of a pool's default image: it would be computed anew each time."""
        lacks = self._store.missing_fields.lacks(PDPool, ("spec", "defaultImage"))
        return None if lacks else self._options.settings.engine_images

    def _service(self, key: ServiceKey) -> PDService | None:
        return self._cache.get_resource(PDService, key.namespace, key.name)

    def _has_engine_account(self, service: PDService | None) -> bool:
        name = service.metadata.name if service else ""
        return self._children.is_own(SERVICE_ACCOUNT, engine_account_name(name), service)

    async def _record_failure(self, service: PDService, cause: FailureCause) -> None:
        await self._recorder.record(service.metadata, [reconcile_failed(cause)])
        key = ServiceKey(service.metadata.namespace, service.metadata.name)
        last = self._reported.get(key, Reported())
        self._reported[key] = replace(last, causes=last.causes | {cause.identity})

    def _engine_facts(self, instance: PDInstance) -> EngineFacts:
        key = instance_key(instance)
        identity, startup_s, fit = self._derive_facts(instance)
        image = self._runtime.image(key)
        if image is not None:  # engines of different images may be unable to read each other's KV
            identity = identity.model_copy(update={"engine": f"{identity.engine}@{short_digest(image)}"})
        return EngineFacts(identity, self._runtime.strategy(key), startup_s, fit)

    def _derive_facts(self, instance: PDInstance) -> tuple[EngineIdentitySpec, float, Fit | None]:
        """Identity, start-up time and fit of an instance's engine, from its spec."""
        if instance.spec.engine.is_simulated:
            profile = _profile(instance.spec.engine.profile)
            return simulated.identity(instance.spec, profile), profile.startup_s, None
        service = self._cache.get_resource(PDService, instance.metadata.namespace, instance.spec.service)
        if service is None:
            raise NotFound(f"PDService {instance.spec.service} was deleted")
        request = vllm_launch_request(instance, service)
        return *vllm.expected_identity_and_startup_s(request, vllm.POD_PLACEMENT), judge_instance_fit(
            request, instance, service
        )

    async def _probe_roles(self, endpoint: str, model: str) -> FlipStrategy | None:
        return await probe_roles(self._client, endpoint, model=model, salt=secrets.token_hex(8))


_profile = functools.cache(load_shipped_profile)
