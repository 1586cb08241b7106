"""The objects of services as the watches last told them; they stand while the store is away."""

import asyncio
import random
from collections.abc import Callable, Iterable

from fulcrum_cluster.watching import Mirror
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdpool import PDPool
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.ports import Store


class WatchedObjects:
    """All services of a namespace, or of all: four watches, however many services there are.

    Args:
        store: Where the objects are.
        namespace: Where; "" is every namespace.
        rng: Spreads the retries of the watches.
        on_service: Called with a service before and after each change; None where there is none.
    """

    def __init__(
        self,
        store: Store,
        *,
        namespace: str,
        rng: random.Random | None = None,
        on_service: Callable[[PDService | None, PDService | None], None] = lambda _old, _new: None,
    ) -> None:
        self.services = Mirror(store, PDService, namespace=namespace, on_change=on_service, rng=rng)
        self.assignments = Mirror(store, PDAssignment, namespace=namespace, rng=rng)
        self.instances = Mirror(store, PDInstance, namespace=namespace, rng=rng)
        self.pools = Mirror(store, PDPool, namespace=namespace, rng=rng)

    @property
    def _mirrors(self) -> tuple[Mirror[PDPool], Mirror[PDInstance], Mirror[PDAssignment], Mirror[PDService]]:
        return self.pools, self.instances, self.assignments, self.services

    @property
    def synced(self) -> bool:
        """Whether all was listed once."""
        return all(mirror.synced.is_set() for mirror in self._mirrors)

    def of(self, namespace: str, name: str) -> "SeenService":
        """One service of them."""
        return SeenService(self, namespace, name)

    async def run(self) -> None:
        """Follow the store until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for mirror in self._mirrors:
                tasks.create_task(mirror.run())


class SeenService:
    """`loop.Desired`: what belongs to one service."""

    def __init__(self, seen: WatchedObjects, namespace: str, name: str) -> None:
        self._seen, self._namespace, self._name = seen, namespace, name

    def service(self) -> PDService | None:
        """What the user wrote."""
        return self._seen.services.find(self._namespace, self._name)

    def assignment(self) -> PDAssignment | None:
        """Who shall play which role."""
        return self._seen.assignments.find(self._namespace, self._name)

    def instances(self) -> Iterable[PDInstance]:
        """The service's instances."""
        known = self._seen.instances.objects.values()
        return (i for i in known if (i.metadata.namespace, i.spec.service) == (self._namespace, self._name))

    def pools(self) -> Iterable[PDPool]:
        """The service's pools."""
        known = self._seen.pools.objects.values()
        return (p for p in known if (p.metadata.namespace, p.spec.service) == (self._namespace, self._name))
