"""Which pods are on their way out: the router hears it from the API server, not by way of the operator.

An instance whose pod is being deleted, or is gone, gets no new work at once, and its address may be another
pod's by then. A pod that is not Ready is left to the router's own probes: they are faster, and go on
while the API server is away.
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
    """The engine pods of one service. What is known stands while the API server is away.

    Args:
        objects: Where the pods are.
        service: Whose.
        namespace: Where.
        on_change: Called whenever what `is_active_at` says may have changed.
        rng: Spreads the retries of many routers.
        sleep: Waits so many seconds.
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
        """Pods that nobody ends, with their address."""

    def is_active_at(self, name: str, host: str) -> bool:
        """Whether the pod of that name stays and has that address; True as long as no pod could be listed."""
        return not self.synced.is_set() or (
            name in self._active_pods and self._active_pods[name] in (None, host)
        )

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
            self._update(pod, gone=change is EventType.DELETED)
        return str(pod["metadata"]["resourceVersion"])

    def _update(self, pod: Object, *, gone: bool) -> None:
        name, before = _name(pod), dict(self._active_pods)
        if gone or not _is_active(pod):
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
