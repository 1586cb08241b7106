"""The objects of one service as the watches last told them; they stand while the store is away."""

import asyncio
import random
from collections.abc import Iterable

from fulcrum_cluster.watching import Mirror
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdpool import PDPool
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.ports import Store


class WatchedService:
    """`loop.Desired` kept current by four watches; `rng` spreads their retries."""

    def __init__(
        self, store: Store, *, service: str, namespace: str, rng: random.Random | None = None
    ) -> None:
        self._name = service
        self._services = Mirror(store, PDService, namespace=namespace, rng=rng)
        self._assignments = Mirror(store, PDAssignment, namespace=namespace, rng=rng)
        self._instances = Mirror(store, PDInstance, namespace=namespace, rng=rng)
        self._pools = Mirror(store, PDPool, namespace=namespace, rng=rng)

    async def run(self) -> None:
        """Follow the store until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for mirror in (self._services, self._assignments, self._instances, self._pools):
                tasks.create_task(mirror.run())

    def service(self) -> PDService | None:
        """What the user wrote."""
        return self._services.objects.get(self._name)

    def assignment(self) -> PDAssignment | None:
        """Who shall play which role."""
        return self._assignments.objects.get(self._name)

    def instances(self) -> Iterable[PDInstance]:
        """The service's instances."""
        return (i for i in self._instances.objects.values() if i.spec.service == self._name)

    def pools(self) -> Iterable[PDPool]:
        """The service's pools."""
        return (pool for pool in self._pools.objects.values() if pool.spec.service == self._name)
