"""Decide in which role each instance gets work, from the assignment and the instances' own status.

The router's store watcher (`observe.objects`) applies the result to the fleet. Health, cordons and the choice
for a single request are not decided here.
"""

from collections.abc import Collection, Mapping

from fulcrum_core.api.pdassignment import RoleAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.assignment import (
    awaits_restart,
    find_restarted_by_flip,
    group_by_compatibility,
    resolve_effective_roles,
)
from fulcrum_core.values import Phase, Role


def phase_precedes_work(instance: PDInstance) -> bool:
    """Whether the phase precedes `PDInstance.phase_takes_work`: the engine starts or is being verified."""
    return instance.status.phase in (Phase.STARTING, Phase.VERIFYING)


def resolve_working_roles(
    assigned: Mapping[str, RoleAssignment], instances: Collection[PDInstance], ready: Collection[str]
) -> dict[str, Role]:
    """Resolve the role of every instance that gets new work.

    Left out are instances that are not `ready`, not assigned or cordoned, and those whose engine has yet to
    restart for its new role: it refuses the work of that role.
    """
    awaiting_restart = {
        instance.metadata.name
        for instance in instances
        if (entry := assigned.get(instance.metadata.name)) is not None and awaits_restart(instance, entry)
    }
    effective = resolve_effective_roles(
        assigned,
        set(ready) - awaiting_restart,
        group_by_compatibility(instances),
        restarted_by_flip=find_restarted_by_flip(instances),
    )
    return {name: role for name, role in effective.items() if not assigned[name].cordoned}
