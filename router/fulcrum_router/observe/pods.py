"""Watch which engine pods of a service are active: neither ended nor being deleted.

If an instance's pod is no longer active, the router immediately stops sending new work to the instance. It
does not wait until the operator updates the PDInstance, because another pod may soon get the address. A pod
has the name of its PDInstance. Readiness of pods is ignored: the router's own probes are faster, and they
work while the API server is unreachable. `objects` asks `is_active_at` for each instance with an endpoint.
Only routers in a cluster have a watcher.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from typing import Any

from fulcrum_cluster.informer import Reflector
from fulcrum_cluster.objects import POD, Object, ObjectApi
from fulcrum_core.api.labels import SERVICE_LABEL
from fulcrum_core.ports import EventType

_ENDED = frozenset({"Failed", "Succeeded"})


class PodWatcher(Reflector[tuple[EventType, Object]]):
    """The active engine pods of one service; the last known ones while the API server is unreachable.

    Args:
        objects: API to list and watch pods.
        service: Name of the PDService.
        namespace: Namespace of the pods.
        on_change: Called whenever a result of `is_active_at` may have changed.
        rng: Spreads the retries of several routers over time.
        sleep: Waits a number of seconds.
    """

    def __init__(
        self,
        objects: ObjectApi,
        *,
        service: str,
        namespace: str,
        on_change: Callable[[], None],
        rng: random.Random,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        super().__init__(POD.kind, rng=rng, sleep=sleep)
        self._objects, self._namespace = objects, namespace
        self._labels = f"{SERVICE_LABEL}={service}"
        self._on_change = on_change
        self._active_pods: dict[str, str | None] = {}
        """IP address by name of pod; None: not assigned yet."""

    def is_active_at(self, instance: str, host: str) -> bool:
        """Whether the pod of the instance is active and has the address `host`; True before the first list.

        False for a pod without an address: the PDInstance may still have the address of an earlier pod.
        """
        return not self.synced.is_set() or self._active_pods.get(instance) == host

    def _watch_changes(self, since: str) -> AsyncGenerator[tuple[EventType, Object], None]:
        return self._objects.watch(POD, namespace=self._namespace, since=since, labels=self._labels)

    async def _relist(self) -> str:
        pods, version = await self._objects.list(POD, namespace=self._namespace, labels=self._labels)
        self._active_pods = {_name(pod): _address(pod) for pod in pods if _is_active(pod)}
        self.synced.set()
        self._on_change()
        return version

    def _apply_event(self, event: tuple[EventType, Object]) -> str:
        change, pod = event
        if change is not EventType.BOOKMARK:
            self._update(pod, deleted=change is EventType.DELETED)
        return str(pod["metadata"]["resourceVersion"])

    def _update(self, pod: Object, *, deleted: bool) -> None:
        name, before = _name(pod), dict(self._active_pods)
        if deleted or not _is_active(pod):
            self._active_pods.pop(name, None)
        else:
            self._active_pods[name] = _address(pod)
        if self._active_pods != before:
            self._on_change()


def _name(pod: Mapping[str, Any]) -> str:
    return str(pod["metadata"]["name"])


def _is_active(pod: Mapping[str, Any]) -> bool:
    phase = (pod.get("status") or {}).get("phase")
    return pod["metadata"].get("deletionTimestamp") is None and phase not in _ENDED


def _address(pod: Mapping[str, Any]) -> str | None:
    return (pod.get("status") or {}).get("podIP")
