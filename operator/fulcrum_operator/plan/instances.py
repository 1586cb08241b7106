"""PDInstances: how many, under which names, and who goes when there are too many or they are old."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from fulcrum_core.api import ObjectMeta, PDInstance, PDInstanceSpec, PDService
from fulcrum_core.api.labels import POOL_LABEL, SERVICE_LABEL
from fulcrum_core.values import Phase
from fulcrum_operator.plan.model import awaits_model, facts_for
from fulcrum_operator.plan.observed import Observed, by_number, number_of
from fulcrum_operator.plan.rollout import PoolView, members_of, revision_of

_AT_WORK = (Phase.SERVING, Phase.DRAINING)


@dataclass(frozen=True, slots=True)
class Departure:
    """Some of these shall go, the first ones that the floors let go."""

    pool: str
    candidates: tuple[str, ...]
    """Cheapest to reclaim first."""
    count: int
    why: str
    by_flip: bool = False
    """Whether one of those that stay may change its role, if a floor holds up the rest."""


def new_instances(seen: Observed, views: tuple[PoolView, ...]) -> tuple[PDInstance, ...]:
    """The instances to make now, under the lowest numbers that no instance and no engine has."""
    names = _free_names(seen)
    surge = seen.service.spec.rollout.max_surge
    return tuple(
        _instance(seen.service, view, name, facts_for(seen, views, view))
        for view in views
        if not awaits_model(seen, views, view)
        for name in islice(names, view.births(surge=surge))
    )


def departures(seen: Observed, views: tuple[PoolView, ...]) -> tuple[Departure, ...]:
    """Who shall leave each pool. A pool that the spec no longer names has to let all of them go."""
    named = {view.name for view in views}
    dropped = sorted({i.spec.pool for i in seen.staying} - named)
    unnamed = tuple(_all_of(seen, pool) for pool in dropped)
    asked = (departure for view in views for departure in _departures(seen, view))
    return (*unnamed, *(departure for departure in asked if departure.count > 0))


def _all_of(seen: Observed, pool: str) -> Departure:
    found = members_of(seen.staying, pool)
    return Departure(pool, reclaim_order(seen, found), len(found), "its pool is wanted no more")


def _departures(seen: Observed, view: PoolView) -> Iterable[Departure]:
    if not view.rolls:
        excess = len(view.members) - view.wanted
        yield Departure(view.name, reclaim_order(seen, view.members), excess, "more instances than wanted")
        return
    idle = [member for member in view.old if member.status.phase is not Phase.SERVING]
    serve = sum(member.status.phase is Phase.SERVING for member in view.members)
    spare = serve - (view.wanted - seen.service.spec.rollout.max_unavailable)
    leaving = len(idle) + max(0, min(spare, len(view.old) - len(idle)))
    why, replaced = f"revision {view.revision} replaces it", view.whole_of(view.new)
    yield Departure(view.name, reclaim_order(seen, view.old), leaving, why, by_flip=replaced)
    excess = len(view.new) - view.wanted
    yield Departure(view.name, reclaim_order(seen, view.new), excess, "more instances than wanted")


def reclaim_order(seen: Observed, candidates: tuple[PDInstance, ...]) -> tuple[str, ...]:
    """Names by what it costs to take the instance away.

    Those without work go first, then those that drain already (so that the choice stays made), then those
    that are not the last of their role in their revision (who is left can serve on), then those with the
    fewest legs as the router last said, then the highest number.
    """
    legs = {state.name: state.legs for state in seen.router.instances} if seen.router else {}
    entries = seen.assignment.spec.roles if seen.assignment else {}
    last = _last_of_role(seen)

    def cost(instance: PDInstance) -> tuple[bool, bool, bool, int, int]:
        name = instance.metadata.name
        cordoned = name in entries and entries[name].cordoned
        at_work = instance.status.phase in _AT_WORK
        return at_work, not cordoned, name in last, legs.get(name, 0), -by_number(name)[0]

    return tuple(instance.metadata.name for instance in sorted(candidates, key=cost))


def _last_of_role(seen: Observed) -> frozenset[str]:
    """Instances without whom those of their revision that serve would have one role only."""
    entries = seen.assignment.spec.roles if seen.assignment else {}
    serving = [
        (revision_of(i), entries[i.metadata.name].role, i.metadata.name)
        for i in seen.staying
        if i.status.phase is Phase.SERVING
        and i.metadata.name in entries
        and not entries[i.metadata.name].cordoned
    ]
    revisions = [revision for revision, _, _ in serving]
    roles = [(revision, role) for revision, role, _ in serving]
    return frozenset(
        name
        for revision, role, name in serving
        if roles.count((revision, role)) == 1 and revisions.count(revision) > 2
    )


def _free_names(seen: Observed) -> Iterator[str]:
    service = seen.service.metadata.name
    names = {instance.metadata.name for instance in seen.instances} | set(seen.engines)
    taken = {number_of(service, name) for name in names}
    return (f"{service}-{number}" for number in count() if number not in taken)


def _instance(service: PDService, view: PoolView, name: str, facts: dict[str, Any] | None) -> PDInstance:
    meta = ObjectMeta(
        name=name,
        namespace=service.metadata.namespace,
        labels={SERVICE_LABEL: service.metadata.name, POOL_LABEL: view.name},
        owner_references=(view.pool.owner_reference(),),
    )
    start = {name: getattr(view.target, name) for name in view.target.model_fields_set}
    if facts is not None:
        start["model_facts"] = facts
    spec = PDInstanceSpec(service=service.metadata.name, pool=view.name, revision=view.revision, **start)
    return PDInstance(metadata=meta, spec=spec)
