"""PDInstances: how many, under which names, and who goes when there are too many."""

from collections.abc import Iterable, Iterator
from itertools import count, islice

from fulcrum_core.api import ObjectMeta, PDInstance, PDInstanceSpec, PDPool, PDService
from fulcrum_core.values import Phase
from fulcrum_operator.plan.assignment import Surplus
from fulcrum_operator.plan.observed import Observed, by_number, number_of
from fulcrum_operator.plan.pools import POOL_LABEL, SERVICE_LABEL, wanted_replicas

_AT_WORK = (Phase.SERVING, Phase.DRAINING)


def members(instances: Iterable[PDInstance], pool: str) -> tuple[PDInstance, ...]:
    """The instances of one pool, by number."""
    return tuple(
        sorted((i for i in instances if i.spec.pool == pool), key=lambda i: by_number(i.metadata.name))
    )


def new_instances(seen: Observed, pools: tuple[PDPool, ...]) -> tuple[PDInstance, ...]:
    """The instances still missing, under the lowest numbers that no instance and no engine has."""
    names = _free_names(seen)
    return tuple(
        _instance(seen.service, pool, name)
        for pool in pools
        for name in islice(
            names, max(0, wanted_replicas(pool) - len(members(seen.instances, pool.metadata.name)))
        )
    )


def surplus(seen: Observed, pools: tuple[PDPool, ...]) -> Surplus:
    """For each pool with too many instances: its members, cheapest to reclaim first, and how many must go.

    A pool that the spec no longer names has to let all of them go.
    """
    wanted = {pool.metadata.name: wanted_replicas(pool) for pool in pools}
    return tuple(
        (reclaim_order(seen, found), excess)
        for name in sorted({instance.spec.pool for instance in seen.instances})
        if (excess := len(found := members(seen.instances, name)) - wanted.get(name, 0)) > 0
    )


def reclaim_order(seen: Observed, candidates: tuple[PDInstance, ...]) -> tuple[str, ...]:
    """Names by what it costs to take the instance away.

    Those without work go first, then those that drain already (so that the choice stays made), then
    those with the fewest legs as the router last said, then the highest number.
    """
    legs = {state.name: state.legs for state in seen.router.instances} if seen.router else {}
    entries = seen.assignment.spec.roles if seen.assignment else {}

    def cost(instance: PDInstance) -> tuple[bool, bool, int, int]:
        name = instance.metadata.name
        cordoned = name in entries and entries[name].cordoned
        return instance.status.phase in _AT_WORK, not cordoned, legs.get(name, 0), -by_number(name)[0]

    return tuple(instance.metadata.name for instance in sorted(candidates, key=cost))


def _free_names(seen: Observed) -> Iterator[str]:
    service = seen.service.metadata.name
    names = {instance.metadata.name for instance in seen.instances} | set(seen.engines)
    taken = {number_of(service, name) for name in names}
    return (f"{service}-{number}" for number in count() if number not in taken)


def _instance(service: PDService, pool: PDPool, name: str) -> PDInstance:
    meta = ObjectMeta(
        name=name,
        namespace=service.metadata.namespace,
        labels={SERVICE_LABEL: service.metadata.name, POOL_LABEL: pool.metadata.name},
        owner_references=(pool.owner_reference(),),
    )
    spec = PDInstanceSpec(
        service=service.metadata.name, pool=pool.metadata.name, model=pool.spec.model, engine=pool.spec.engine
    )
    return PDInstance(metadata=meta, spec=spec)
