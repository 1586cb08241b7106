"""The API objects of all services, kept current by watches.

While the store is unavailable, the last known objects stay. `supervisor` runs the watches, and each loop
reads its own service as its `ServiceObjects`. Writes go to the store (`loop`).
"""

import asyncio
import random
from collections.abc import Callable, Iterable

from fulcrum_cluster.informer import Informer
from fulcrum_core.api.pdassignment import PDAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdpool import PDPool
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.ports import Store


class WatchedObjects:
    """The objects of all services of one namespace, or of all: four watches for any number of services.

    Args:
        store: The store of the API objects.
        namespace: Namespace to watch; "" is every namespace.
        rng: Spreads the retries of the watches.
        on_service_change: Called with a PDService before and after each change; None if absent.
    """

    def __init__(
        self,
        store: Store,
        *,
        namespace: str,
        rng: random.Random | None = None,
        on_service_change: Callable[[PDService | None, PDService | None], None] = lambda _old, _new: None,
    ) -> None:
        self.services = Informer(store, PDService, namespace=namespace, on_change=on_service_change, rng=rng)
        self.assignments = Informer(store, PDAssignment, namespace=namespace, rng=rng)
        self.instances = Informer(store, PDInstance, namespace=namespace, rng=rng)
        self.pools = Informer(store, PDPool, namespace=namespace, rng=rng)

    @property
    def _informers(
        self,
    ) -> tuple[Informer[PDPool], Informer[PDInstance], Informer[PDAssignment], Informer[PDService]]:
        return self.pools, self.instances, self.assignments, self.services

    @property
    def synced(self) -> bool:
        """Whether all four kinds have been listed once."""
        return all(informer.synced.is_set() for informer in self._informers)

    def for_service(self, namespace: str, name: str) -> "WatchedService":
        """Return the objects of one service."""
        return WatchedService(self, namespace, name)

    async def run(self) -> None:
        """Watch the store until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for informer in self._informers:
                tasks.create_task(informer.run())


class WatchedService:
    """The watched objects of one service; implements `loop.ServiceObjects`."""

    def __init__(self, watched: WatchedObjects, namespace: str, name: str) -> None:
        self._watched, self._namespace, self._name = watched, namespace, name

    def service(self) -> PDService | None:
        """Return the service's PDService; None if unknown."""
        return self._watched.services.find(self._namespace, self._name)

    def assignment(self) -> PDAssignment | None:
        """Return the service's PDAssignment; None if unknown."""
        return self._watched.assignments.find(self._namespace, self._name)

    def instances(self) -> Iterable[PDInstance]:
        """Return the service's PDInstances."""
        known = self._watched.instances.objects.values()
        return (i for i in known if (i.metadata.namespace, i.spec.service) == (self._namespace, self._name))

    def pools(self) -> Iterable[PDPool]:
        """Return the service's PDPools."""
        known = self._watched.pools.objects.values()
        return (p for p in known if (p.metadata.namespace, p.spec.service) == (self._namespace, self._name))
