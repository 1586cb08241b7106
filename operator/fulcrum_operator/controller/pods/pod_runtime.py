"""Runs engines in a cluster: one pod for each PDInstance, with the instance's name.

`plan/` decides which engines to start and stop. `pod_status` derives the observation from a pod. It is the
`EngineRuntime` of a cluster; a local run has `fulcrum_cli.local.runtime`.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from fulcrum_cluster.objects import POD, Object, ObjectApi
from fulcrum_core.api import PDInstance, PDService, conditions
from fulcrum_core.api.labels import INSTANCE_LABEL, ROLE_LABEL, SERVICE_LABEL
from fulcrum_core.errors import AlreadyExists, Conflict, Forbidden, InvalidInput, NotFound, StoreError
from fulcrum_core.ports import EngineObservation, EngineState, InstanceKey, NodeDeparture, instance_key
from fulcrum_core.values import FlipStrategy
from fulcrum_operator.controller.cache import ObjectCache
from fulcrum_operator.controller.cached_store import check_is_leader
from fulcrum_operator.controller.context import ServiceKey
from fulcrum_operator.controller.pods.pod_status import observe_pod
from fulcrum_operator.controller.pods.role_probe import ContainerRun, RoleProbes
from fulcrum_operator.manifests.engine_pod import engine_pod
from fulcrum_operator.manifests.names import InstallationSettings
from fulcrum_operator.plan.instance_state import WORKING_PHASES
from fulcrum_operator.plan.ownership import parse_metadata

RETRY_S = 10.0
"""Delay before the next attempt to create a refused pod (a quota, an invalid template), in seconds."""
DRAINED_GRACE_S = 5.0
"""Time of a drained engine from deletion to SIGKILL, preStop hook included, in seconds.

The role probe leaves KV under a lease in the engine. With the pod's own grace period, the engine would wait
half a minute for the end of that lease, at each flip by restart and at each scale-down.
"""
_QUOTA_EXCEEDED = "exceeded quota"
"""Text in the API server's refusal of a pod that exceeds a ResourceQuota."""
PROBING = "the role probe has no result yet"

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _KnownPod:
    """A cached pod and what was derived from it.

    The cache replaces a changed pod by a new object, so `is` shows whether this one is current.
    """

    pod: Object
    is_engine: bool
    engine: EngineObservation

    @property
    def run(self) -> ContainerRun:
        """Current run of the engine's container; restarts of sidecars do not count."""
        return ContainerRun(self.pod["metadata"]["uid"], self.engine.restarts)


@dataclass(frozen=True, slots=True)
class _RefusedPod:
    reason: str
    error: str
    timer: asyncio.TimerHandle


class PodRuntime:
    """Engines as pods; implements `fulcrum_core.ports.EngineRuntime`.

    `observe` reads the cache, and starts the role probe of each engine whose pod is ready. An engine is
    observed as starting until the probe of its container run has a result. An engine that serves or drains
    according to its PDInstance is observed as running, also after a restart of the operator.

    `start` does not raise if the API server refuses the pod, or if a pod of somebody else has its name.
    `observe` then reports the reason, and `RETRY_S` later the pod is tried again, unless `stop` is called.

    Args:
        objects: API to create and delete pods with.
        cache: Last known pods, instances and services.
        probes: Role probes of the engines.
        settings: Settings of the installation.
        is_leader: Returns whether this process may write now; if not, writes raise `NotLeader`.
        on_change: Called with a service when `observe` may return something else for its engines.
        departure_of: Returns the departure of a node, or None if the node is not departing.
    """

    def __init__(
        self,
        objects: ObjectApi,
        cache: ObjectCache,
        probes: RoleProbes,
        settings: InstallationSettings,
        *,
        is_leader: Callable[[], bool],
        on_change: Callable[[ServiceKey], None],
        departure_of: Callable[[str], NodeDeparture | None] = lambda _node: None,
    ) -> None:
        self._departure_of = departure_of
        self._objects, self._cache, self._probes = objects, cache, probes
        self._settings, self._is_leader, self._on_change = settings, is_leader, on_change
        self._stopped_uids: dict[InstanceKey, str] = {}
        """Uids of the pods that were deleted by `stop`."""
        self._pod_uids: dict[InstanceKey, str] = {}
        self._known_pods: dict[InstanceKey, _KnownPod] = {}
        """What was derived from each pod, so that a reconcile derives only what changed in its namespace."""
        self._refused_pods: dict[InstanceKey, _RefusedPod] = {}
        self._retries: set[asyncio.Task[None]] = set()
        """References to the running tasks; asyncio itself keeps only weak ones."""

    async def start(self, instance: PDInstance, *, startup_s: float) -> None:
        """See `EngineRuntime`."""
        key = instance_key(instance)
        if self._pod(key) is None and key not in self._refused_pods:
            await self._create_pod(key, instance, startup_s)

    async def _create_pod(self, key: InstanceKey, instance: PDInstance, startup_s: float) -> None:
        service = self._cache.get_resource(PDService, key.namespace, instance.spec.service)
        if service is None:
            return  # the service was deleted, and garbage collection deletes the instance
        check_is_leader(self._is_leader)
        try:
            body = engine_pod(instance, service, self._settings, startup_s=startup_s)
            self._cache.put_object(POD, await self._objects.create(POD, body, namespace=key.namespace))
            _log.info("pod created", pod=key.name, namespace=key.namespace)
        except AlreadyExists:
            pod = await self._refresh(key)
            if pod is not None and not self._known_pod(key, pod).is_engine:
                error = f"NameTaken: a pod {key.name} exists that Fulcrum did not create"
                self._record_refusal(key, instance, startup_s, (conditions.NAME_TAKEN, error))
        except (InvalidInput, Forbidden) as error:
            refusal = (conditions.ENGINE_START_FAILED, f"PodRefused: {error}")
            self._record_refusal(key, instance, startup_s, refusal)

    async def stop(self, key: InstanceKey, *, drained: bool = False) -> None:
        """See `EngineRuntime`. An engine that is not drained gets the pod's own grace period."""
        refused = self._refused_pods.pop(key, None)
        if refused is not None:
            refused.timer.cancel()
        pod = self._pod(key)
        if pod is None or "deletionTimestamp" in pod["metadata"] or self._is_stop_requested(key, pod):
            return
        check_is_leader(self._is_leader)
        uid, grace_s = pod["metadata"]["uid"], DRAINED_GRACE_S if drained else None
        try:
            await self._objects.delete(POD, key.name, namespace=key.namespace, uid=uid, grace_s=grace_s)
        except (NotFound, Conflict):
            await self._refresh(key)
            return
        self._stopped_uids[key] = uid
        _log.info("pod deleted", pod=key.name, namespace=key.namespace)

    def observe(self, namespace: str) -> tuple[EngineObservation, ...]:
        """See `EngineRuntime`."""
        listed = {pod["metadata"]["name"]: pod for pod in self._cache.list_objects(POD, namespace)}
        pods = {
            name: pod
            for name, pod in listed.items()
            if self._known_pod(InstanceKey(namespace, name), pod).is_engine
        }
        self._forget_deleted_pods(namespace, pods)
        for key in [key for key in self._known_pods if key.namespace == namespace and key.name not in listed]:
            del self._known_pods[key]
        engines = {
            name: self._observe_engine(InstanceKey(namespace, name), pod) for name, pod in pods.items()
        }
        for key, refused in self._refused_pods.items():
            if key.namespace == namespace and key.name not in engines:
                engines[key.name] = EngineObservation(
                    key.name,
                    EngineState.STARTING,
                    restarts=0,
                    reason=refused.reason,
                    message=refused.error,
                    lacks_room=_QUOTA_EXCEEDED in refused.error,
                )
        return tuple(engines[name] for name in sorted(engines))

    def forget_namespace(self, namespace: str) -> None:
        """Forget the pods of a namespace that has no service any more."""
        self._forget_deleted_pods(namespace, {})
        for key in [key for key in self._known_pods if key.namespace == namespace]:
            del self._known_pods[key]

    def strategy(self, key: InstanceKey) -> FlipStrategy | None:
        """Flip strategy that the role probe found; None if there is no result."""
        pod = self._pod(key)
        return self._probes.result(self._known_pod(key, pod).run) if pod is not None else None

    def image(self, key: InstanceKey) -> str | None:
        """Image of the engine by digest; None if it does not run."""
        pod = self._pod(key)
        return self._known_pod(key, pod).engine.image if pod is not None else None

    async def sync_role_label(self, instance: PDInstance) -> None:
        """Write the instance's role into the pod's label, for people; nothing selects by the label."""
        key, role = instance_key(instance), instance.status.role
        pod = self._pod(key)
        if pod is None or "deletionTimestamp" in pod["metadata"] or self._is_stop_requested(key, pod):
            return
        if pod["metadata"].get("labels", {}).get(ROLE_LABEL) == (str(role) if role else None):
            return
        check_is_leader(self._is_leader)
        patch = {"metadata": {"labels": {ROLE_LABEL: str(role) if role else None}}}
        try:
            patched = await self._objects.patch(POD, key.name, patch, namespace=key.namespace)
        except NotFound:
            self._cache.remove(POD, key.namespace, key.name)
            return
        self._cache.put_object(POD, patched)

    def _observe_engine(self, key: InstanceKey, pod: Object) -> EngineObservation:
        stopped = self._is_stop_requested(key, pod)
        engine = observe_pod(pod, stopped=True) if stopped else self._known_pod(key, pod).engine
        if (departure := self._departure_of(engine.node)) is not None:
            engine = replace(engine, node_departure=departure)
        if engine.state is not EngineState.RUNNING or engine.terminating or self._is_probed(key, pod):
            return engine
        instance = self._cache.get_resource(PDInstance, key.namespace, key.name)
        if instance is not None and engine.endpoint is not None:
            service = ServiceKey(key.namespace, instance.spec.service)
            self._probes.start(
                self._known_pod(key, pod).run,
                engine.endpoint,
                instance.spec.model,
                on_result=lambda: self._on_change(service),
            )
        if _is_working_run(instance, self._known_pod(key, pod).run):
            return engine  # an earlier operator probed it, but the CRDs had no field for the result
        return replace(engine, state=EngineState.STARTING, message=PROBING)

    def _is_probed(self, key: InstanceKey, pod: Object) -> bool:
        """Whether the role probe of this container run has a result.

        A result that an earlier operator wrote into the PDInstance's status is adopted.
        """
        run = self._known_pod(key, pod).run
        if self._probes.result(run) is not None:
            return True
        instance = self._cache.get_resource(PDInstance, key.namespace, key.name)
        if instance is None or instance.status.flip_strategy is None or not _is_working_run(instance, run):
            return False
        self._probes.adopt(run, instance.status.flip_strategy)
        return True

    def _pod(self, key: InstanceKey) -> Object | None:
        pod = self._cache.get_object(POD, key.namespace, key.name)
        return pod if pod is not None and self._known_pod(key, pod).is_engine else None

    def _known_pod(self, key: InstanceKey, pod: Object) -> _KnownPod:
        known = self._known_pods.get(key)
        if known is None or known.pod is not pod:
            known = _KnownPod(pod, _is_engine_pod(pod), observe_pod(pod))
            self._known_pods[key] = known
        return known

    def _is_stop_requested(self, key: InstanceKey, pod: Object) -> bool:
        return bool(self._stopped_uids.get(key) == pod["metadata"]["uid"])

    def _forget_deleted_pods(self, namespace: str, pods: dict[str, Object]) -> None:
        """Forget pods that were deleted or recreated; `pods` are the engine pods that exist."""
        now = {InstanceKey(namespace, name): pod["metadata"]["uid"] for name, pod in pods.items()}
        for key, uid in [item for item in self._pod_uids.items() if item[0].namespace == namespace]:
            if now.get(key) != uid:
                self._probes.forget(uid)
                if self._stopped_uids.get(key) == uid:
                    del self._stopped_uids[key]
                del self._pod_uids[key]
        self._pod_uids.update(now)

    async def _refresh(self, key: InstanceKey) -> Object | None:
        try:
            pod = await self._objects.get(POD, key.name, namespace=key.namespace)
        except NotFound:
            self._cache.remove(POD, key.namespace, key.name)
            return None
        if self._known_pod(key, pod).is_engine:
            self._cache.put_object(POD, pod)
        return pod

    def _record_refusal(
        self, key: InstanceKey, instance: PDInstance, startup_s: float, refusal: tuple[str, str]
    ) -> None:
        """Report why there is no pod (reason and error), and try to create it again after `RETRY_S`."""
        known = self._refused_pods.get(key)
        loop = asyncio.get_running_loop()

        def retry() -> None:
            task = loop.create_task(self._retry(key, instance, startup_s, refusal))
            self._retries.add(task)
            task.add_done_callback(self._retries.discard)

        reason, error = refusal
        self._refused_pods[key] = _RefusedPod(reason, error, loop.call_later(RETRY_S, retry))
        if known is not None and known.error == error:
            return
        _log.warning("pod refused", pod=key.name, namespace=key.namespace, error=error)
        self._on_change(ServiceKey(key.namespace, instance.spec.service))

    async def _retry(
        self, key: InstanceKey, instance: PDInstance, startup_s: float, refusal: tuple[str, str]
    ) -> None:
        tried = self._refused_pods.get(key)
        if tried is None:
            return
        current = self._cache.get_resource(PDInstance, key.namespace, key.name)
        if current is not None:
            try:
                await self._create_pod(key, current, startup_s)
            except StoreError:
                self._record_refusal(key, instance, startup_s, refusal)
        if self._refused_pods.get(key) is tried:
            del self._refused_pods[key]


def _is_working_run(instance: PDInstance | None, run: ContainerRun) -> bool:
    """Whether this run serves or drains by the instance's status; if so, an operator has probed it."""
    if instance is None or instance.status.phase not in WORKING_PHASES:
        return False
    return instance.status.restarts == run.restarts


def _is_engine_pod(pod: Object) -> bool:
    """Whether the operator created the pod, by its labels and its owner.

    An orphaned pod has no owner any more and counts, too.
    """
    meta = pod["metadata"]
    labels, owner = meta.get("labels", {}), parse_metadata(pod).controller
    made_by_us = owner is None or owner.kind == PDInstance.kind_name()
    return made_by_us and SERVICE_LABEL in labels and labels.get(INSTANCE_LABEL) == meta["name"]
