"""The objects of services as the watches last told them; they stand while the store is away."""

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
    """All services of a namespace, or of all: four watches, however many services there are.

    Args:
        store: Where the objects are.
        namespace: Where; "" is every namespace.
        rng: Spreads the retries of the watches.
        on_service_change: Called with a service before and after each change; None where there is none.
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
        """Whether all was listed once."""
        return all(informer.synced.is_set() for informer in self._informers)

    def for_service(self, namespace: str, name: str) -> "WatchedService":
        """One service of them."""
        return WatchedService(self, namespace, name)

    async def run(self) -> None:
        """Follow the store until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            for informer in self._informers:
                tasks.create_task(informer.run())


class WatchedService:
    """`loop.ServiceObjects`: what belongs to one service."""

    def __init__(self, watched: WatchedObjects, namespace: str, name: str) -> None:
        self._watched, self._namespace, self._name = watched, namespace, name

    def service(self) -> PDService | None:
        """What the user wrote."""
        return self._watched.services.find(self._namespace, self._name)

    def assignment(self) -> PDAssignment | None:
        """Who shall play which role."""
        return self._watched.assignments.find(self._namespace, self._name)

    def instances(self) -> Iterable[PDInstance]:
        """The service's instances."""
        known = self._watched.instances.objects.values()
        return (i for i in known if (i.metadata.namespace, i.spec.service) == (self._namespace, self._name))

    def pools(self) -> Iterable[PDPool]:
        """The service's pools."""
        known = self._watched.pools.objects.values()
        return (p for p in known if (p.metadata.namespace, p.spec.service) == (self._namespace, self._name))
