"""Which PDInstances to create, under which names, and which to remove.

`service` calls it; the floors that limit removals are checked by `assignment`.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

from fulcrum_core.api import ObjectMeta, PDInstance, PDInstanceSpec, PDService
from fulcrum_core.api.labels import POOL_LABEL, SERVICE_LABEL
from fulcrum_operator.plan.instance_state import (
    WORKING_PHASES,
    active_instances,
    engine_runs,
    instance_number,
    instance_order,
    members_of,
    revision_of,
)
from fulcrum_operator.plan.model import choose_model_facts, waits_for_model
from fulcrum_operator.plan.observed import Observed
from fulcrum_operator.plan.rollout import PoolView


@dataclass(frozen=True, slots=True)
class Removal:
    """Remove `count` of the candidates, in order, as far as the floors allow."""

    pool: str
    candidates: tuple[str, ...]
    """Names, the cheapest to remove first."""
    count: int
    reason: str
    may_flip_another: bool = False
    """Whether a remaining instance may change its role if a floor blocks a removal."""


def plan_new_instances(observed: Observed, views: tuple[PoolView, ...]) -> tuple[PDInstance, ...]:
    """The instances to create now, with the lowest numbers that no instance and no engine has.

    A pool whose model is still to be read creates none; `PoolView.count_to_create` limits the others.
    """
    names = _free_names(observed)
    surge = observed.service.spec.rollout.max_surge
    return tuple(
        _instance(observed.service, view, name, choose_model_facts(observed, views, view))
        for view in views
        if not waits_for_model(observed, views, view)
        for name in islice(names, view.count_to_create(surge=surge))
    )


def plan_removals(observed: Observed, views: tuple[PoolView, ...]) -> tuple[Removal, ...]:
    """The removals of each pool. A pool that the spec no longer names loses all its instances."""
    named = {view.name for view in views}
    dropped = sorted({i.spec.pool for i in active_instances(observed)} - named)
    unnamed = tuple(_remove_whole_pool(observed, pool) for pool in dropped)
    requested = (removal for view in views for removal in _pool_removals(observed, view))
    return (*unnamed, *(removal for removal in requested if removal.count > 0))


def _remove_whole_pool(observed: Observed, pool: str) -> Removal:
    found = members_of(active_instances(observed), pool)
    return Removal(pool, removal_order(observed, found), len(found), "the service no longer has its pool")


def _pool_removals(observed: Observed, view: PoolView) -> Iterable[Removal]:
    if not view.rolling_out:
        yield from _surplus_removals(observed, view)
        return
    idle = [member for member in view.outdated if not member.is_serving]
    serving = sum(member.is_serving for member in view.members)
    max_unavailable = max(observed.service.spec.rollout.max_unavailable, int(view.in_place))
    spare = serving - (view.desired_replicas - max_unavailable)
    leaving = len(idle) + max(0, min(spare, len(view.outdated) - len(idle)))
    may_flip = view.enough_serving_in(view.updated) or _waits_for_removals(observed, view)
    yield Removal(
        view.name,
        removal_order(observed, view.outdated),
        leaving,
        f"revision {view.revision} replaces it",
        may_flip_another=may_flip,
    )
    remaining = view.off_departing_nodes(view.updated)
    excess = len(remaining) - view.desired_replicas
    yield Removal(view.name, removal_order(observed, remaining), excess, "more instances than desired")


def _waits_for_removals(observed: Observed, view: PoolView) -> bool:
    """Whether a roll-out has created all that it may, and all of that serves: only removals let it go on.

    Its new instances may all have one role, while the floors keep every old instance of the other role.
    """
    surge = observed.service.spec.rollout.max_surge
    all_serve = bool(view.updated) and all(member.is_serving for member in view.updated)
    return all_serve and not view.count_to_create(surge=surge)


def _surplus_removals(observed: Observed, view: PoolView) -> Iterable[Removal]:
    """Removals without a roll-out: of more instances than desired, and of those that others have replaced.

    Of the instances on departing nodes as many leave as serve beyond the desired number, and those that serve
    nothing.
    """
    remaining = view.off_departing_nodes(view.members)
    excess = len(remaining) - view.desired_replicas
    yield Removal(view.name, removal_order(observed, remaining), excess, "more instances than desired")
    moving = view.departing
    serving = sum(instance.is_serving for instance in moving)
    spare = sum(member.is_serving for member in view.members) - view.desired_replicas
    replaced = min(serving, max(0, spare - max(0, excess)))
    reason, count = "its node is about to be drained", len(moving) - serving + replaced
    yield Removal(view.name, removal_order(observed, moving), count, reason, may_flip_another=spare > 0)


def removal_order(observed: Observed, candidates: tuple[PDInstance, ...]) -> tuple[str, ...]:
    """Names of the candidates, the cheapest to remove first.

    In this order: instances that do not work; those already cordoned, so that the choice does not change;
    those whose engines do not run, since the others will serve soon; those that are not the last of their
    role in their revision, so that the rest can serve on; those with the fewest legs in the router's last
    report; those with the highest number.
    """
    legs = {state.name: state.legs for state in observed.router.instances} if observed.router else {}
    entries = observed.assignment.spec.roles if observed.assignment else {}
    last = _last_of_role(observed)

    def cost(instance: PDInstance) -> tuple[bool, bool, bool, bool, int, int]:
        name = instance.metadata.name
        cordoned = name in entries and entries[name].cordoned
        working = instance.status.phase in WORKING_PHASES
        runs = engine_runs(observed, name)
        return working, not cordoned, runs, name in last, legs.get(name, 0), -instance_order(name)[0]

    return tuple(instance.metadata.name for instance in sorted(candidates, key=cost))


def _last_of_role(observed: Observed) -> frozenset[str]:
    """Instances whose removal leaves the serving instances of their revision with only one role."""
    entries = observed.assignment.spec.roles if observed.assignment else {}
    serving = [
        (revision_of(i), entries[i.metadata.name].role, i.metadata.name)
        for i in active_instances(observed)
        if i.is_serving and i.metadata.name in entries and not entries[i.metadata.name].cordoned
    ]
    revisions = [revision for revision, _, _ in serving]
    roles = [(revision, role) for revision, role, _ in serving]
    return frozenset(
        name
        for revision, role, name in serving
        if roles.count((revision, role)) == 1 and revisions.count(revision) > 2
    )


def _free_names(observed: Observed) -> Iterator[str]:
    service = observed.service.metadata.name
    own = {instance.metadata.name for instance in observed.instances}
    names = own | set(observed.engines) | observed.taken_names
    taken = {instance_number(service, name) for name in names}
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
        start["config_excerpt"] = facts
    spec = PDInstanceSpec(service=service.metadata.name, pool=view.name, revision=view.revision, **start)
    return PDInstance(metadata=meta, spec=spec)
