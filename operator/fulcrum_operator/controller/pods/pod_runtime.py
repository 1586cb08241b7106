"""`EngineRuntime` over pods: one for each PDInstance, under its name."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, replace

import structlog

from fulcrum_cluster.objects import POD, Object, ObjectApi
from fulcrum_core.api import PDInstance, PDService
from fulcrum_core.api.labels import INSTANCE_LABEL, ROLE_LABEL, SERVICE_LABEL
from fulcrum_core.errors import AlreadyExists, Conflict, Forbidden, InvalidInput, NotFound, StoreError
from fulcrum_core.ports import EngineObservation, EngineState, InstanceKey, instance_key
from fulcrum_core.values import FlipStrategy, Phase
from fulcrum_operator.controller.cache import Cache
from fulcrum_operator.controller.cached_store import check_leading
from fulcrum_operator.controller.pods.observation import observation_of
from fulcrum_operator.controller.pods.role_probe import Life, Probes
from fulcrum_operator.controller.reconcile import ServiceKey
from fulcrum_operator.manifests.engine_pod import pod_of
from fulcrum_operator.manifests.names import ClusterSettings

RETRY_S = 10.0
"""A pod that the API server refused (a quota, a template that breaks a rule) is tried again after so long."""
DRAINED_GRACE_S = 5.0
"""From deletion to SIGKILL, preStop included, for an engine on which nothing is left.

It would wait for the lease of KV that nobody fetches: each engine holds some for half a minute after its
roles were probed, and a flip by a restart, or a scale-down, would take as long.
"""
PROBED = "its roles are probed"

_AT_WORK = (Phase.SERVING, Phase.DRAINING)

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Refused:
    why: str
    timer: asyncio.TimerHandle


class PodRuntime:
    """Engines as pods; `fulcrum_core.ports.EngineRuntime`. What it shows of them comes from the cache.

    An engine counts as running once it is ready and has answered the canary in this life.

    Args:
        objects: Where pods are made and deleted.
        cache: Where pods, and what they are made from, are seen.
        probes: What engines answered.
        settings: What holds for all services.
        leads: Whether this process may write now.
        on_change: Called with a service whose engines may look different now.
    """

    def __init__(
        self,
        objects: ObjectApi,
        cache: Cache,
        probes: Probes,
        settings: ClusterSettings,
        *,
        leads: Callable[[], bool],
        on_change: Callable[[ServiceKey], None],
    ) -> None:
        self._objects, self._cache, self._probes = objects, cache, probes
        self._settings, self._leads, self._on_change = settings, leads, on_change
        self._stopped: dict[InstanceKey, str] = {}
        """Which pods were told to end, by their identity."""
        self._lives: dict[InstanceKey, str] = {}
        self._refused: dict[InstanceKey, _Refused] = {}
        self._trying: set[asyncio.Task[None]] = set()
        """Nothing else holds a task."""

    async def start(self, instance: PDInstance, *, startup_s: float) -> None:
        """See `EngineRuntime`."""
        key = instance_key(instance)
        if self._pod(key) is None and key not in self._refused:
            await self._make(key, instance, startup_s)

    async def _make(self, key: InstanceKey, instance: PDInstance, startup_s: float) -> None:
        service = self._cache.resource(PDService, key.namespace, instance.spec.service)
        if service is None:
            return  # it is being deleted, and the instance with it
        check_leading(self._leads)
        try:
            body = pod_of(instance, service, self._settings, startup_s=startup_s)
            self._cache.take(POD, await self._objects.create(POD, body, namespace=key.namespace))
            _log.info("pod made", pod=key.name, namespace=key.namespace)
        except AlreadyExists:
            pod = await self._catch_up(key)
            if pod is not None and not _is_engine(pod):
                why = f"NameTaken: there is a pod {key.name} that Fulcrum did not make"
                self._refuse(key, instance, startup_s, why)
        except (InvalidInput, Forbidden) as error:
            self._refuse(key, instance, startup_s, f"PodRefused: {error}")

    async def stop(self, key: InstanceKey, *, drained: bool = False) -> None:
        """See `EngineRuntime`. For one that is not drained the pod's own grace period holds."""
        refused = self._refused.pop(key, None)
        if refused is not None:
            refused.timer.cancel()
        pod = self._pod(key)
        if pod is None or "deletionTimestamp" in pod["metadata"] or self._asked(key, pod):
            return
        check_leading(self._leads)
        uid, grace_s = pod["metadata"]["uid"], DRAINED_GRACE_S if drained else None
        try:
            await self._objects.delete(POD, key.name, namespace=key.namespace, uid=uid, grace_s=grace_s)
        except (NotFound, Conflict):
            await self._catch_up(key)
            return
        self._stopped[key] = uid
        _log.info("pod ends", pod=key.name, namespace=key.namespace)

    def observe(self, namespace: str) -> tuple[EngineObservation, ...]:
        """See `EngineRuntime`."""
        pods = {
            pod["metadata"]["name"]: pod for pod in self._cache.objects(POD, namespace) if _is_engine(pod)
        }
        self._forget(namespace, pods)
        seen = {name: self._observed(InstanceKey(namespace, name), pod) for name, pod in pods.items()}
        for key, refused in self._refused.items():
            if key.namespace == namespace and key.name not in seen:
                seen[key.name] = EngineObservation(key.name, EngineState.STARTING, 0, message=refused.why)
        return tuple(seen[name] for name in sorted(seen))

    def strategy(self, key: InstanceKey) -> FlipStrategy | None:
        """What the engine answered the canary; None if it has not."""
        pod = self._pod(key)
        return self._probes.known(_life(pod)) if pod is not None else None

    def image(self, key: InstanceKey) -> str | None:
        """The image that the engine runs, by digest; None if it does not run."""
        pod = self._pod(key)
        return observation_of(pod).image if pod is not None else None

    async def show_role(self, instance: PDInstance) -> None:
        """Have the pod's label say which role the instance plays; nothing selects by it."""
        key, role = instance_key(instance), instance.status.role
        pod = self._pod(key)
        if pod is None or "deletionTimestamp" in pod["metadata"] or self._asked(key, pod):
            return
        if pod["metadata"].get("labels", {}).get(ROLE_LABEL) == (str(role) if role else None):
            return
        check_leading(self._leads)
        patch = {"metadata": {"labels": {ROLE_LABEL: str(role) if role else None}}}
        try:
            answer = await self._objects.patch(POD, key.name, patch, namespace=key.namespace)
        except NotFound:
            self._cache.drop(POD, key.namespace, key.name)
            return
        self._cache.take(POD, answer)

    def _observed(self, key: InstanceKey, pod: Object) -> EngineObservation:
        seen = observation_of(pod, stopped=self._asked(key, pod))
        if seen.state is not EngineState.RUNNING or seen.ending or self._probed(key, pod):
            return seen
        instance = self._cache.resource(PDInstance, key.namespace, key.name)
        if instance is not None and seen.endpoint is not None:
            service = ServiceKey(key.namespace, instance.spec.service)
            self._probes.want(
                _life(pod), seen.endpoint, instance.spec.model, then=lambda: self._on_change(service)
            )
        return replace(seen, state=EngineState.STARTING, message=PROBED)

    def _probed(self, key: InstanceKey, pod: Object) -> bool:
        """Whether the canary was answered in this life, to this operator or to the one before it."""
        life = _life(pod)
        if self._probes.known(life) is not None:
            return True
        instance = self._cache.resource(PDInstance, key.namespace, key.name)
        if instance is None or instance.status.strategy is None or instance.status.phase not in _AT_WORK:
            return False
        if instance.status.restarts != life.restarts:
            return False
        self._probes.adopt(life, instance.status.strategy)
        return True

    def _pod(self, key: InstanceKey) -> Object | None:
        return self._cache.object(POD, key.namespace, key.name)

    def _asked(self, key: InstanceKey, pod: Object) -> bool:
        return bool(self._stopped.get(key) == pod["metadata"]["uid"])

    def _forget(self, namespace: str, pods: dict[str, Object]) -> None:
        """Drop what is remembered of pods that are gone, or are another one by now."""
        now = {InstanceKey(namespace, name): pod["metadata"]["uid"] for name, pod in pods.items()}
        for key, uid in [item for item in self._lives.items() if item[0].namespace == namespace]:
            if now.get(key) != uid:
                self._probes.forget(uid)
                if self._stopped.get(key) == uid:
                    del self._stopped[key]
                del self._lives[key]
        self._lives.update(now)

    async def _catch_up(self, key: InstanceKey) -> Object | None:
        try:
            pod = await self._objects.get(POD, key.name, namespace=key.namespace)
        except NotFound:
            self._cache.drop(POD, key.namespace, key.name)
            return None
        if _is_engine(pod):
            self._cache.take(POD, pod)
        return pod

    def _refuse(self, key: InstanceKey, instance: PDInstance, startup_s: float, why: str) -> None:
        """Say why there is no pod, and try again later."""
        known = self._refused.get(key)
        loop = asyncio.get_running_loop()

        def again() -> None:
            task = loop.create_task(self._again(key, instance, startup_s, why))
            self._trying.add(task)
            task.add_done_callback(self._trying.discard)

        self._refused[key] = _Refused(why, loop.call_later(RETRY_S, again))
        if known is not None and known.why == why:
            return
        _log.warning("pod refused", pod=key.name, namespace=key.namespace, why=why)
        self._on_change(ServiceKey(key.namespace, instance.spec.service))

    async def _again(self, key: InstanceKey, instance: PDInstance, startup_s: float, why: str) -> None:
        tried = self._refused.get(key)
        if tried is None:
            return
        current = self._cache.resource(PDInstance, key.namespace, key.name)
        if current is not None:
            try:
                await self._make(key, current, startup_s)
            except StoreError:
                self._refuse(key, instance, startup_s, why)
        if self._refused.get(key) is tried:
            del self._refused[key]


def _is_engine(pod: Object) -> bool:
    labels = pod["metadata"].get("labels", {})
    return SERVICE_LABEL in labels and labels.get(INSTANCE_LABEL) == pod["metadata"]["name"]


def _life(pod: Object) -> Life:
    """Of the engine's own container: one beside it that starts again changes nothing."""
    return Life(pod["metadata"]["uid"], observation_of(pod).restarts)
