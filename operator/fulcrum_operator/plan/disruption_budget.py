"""The engines' disruption budget: the number of serving instances that evictions must leave.

By default evictions take one instance at a time and leave the floors; `disruption.maxUnavailable` replaces
both rules. But no node may be impossible to drain: if the instances of departing nodes cannot be replaced
first, one may be evicted in any case. `service` calls it; the budget itself is one of the
`manifests/children`.
"""

from fulcrum_core.api import PDService
from fulcrum_operator.plan.departing_nodes import cordons_move_instances


def plan_min_available(
    service: PDService,
    *,
    desired: int,
    serving: int,
    can_replace_departing: bool,
    sees_nodes: bool,
    deletion_announced: bool = False,
) -> int:
    """Least number of instances that evictions leave: `minAvailable` of the engines' disruption budget.

    By default one instance may be evicted at a time, and none below the floors, because new instances replace
    those on departing nodes first. Where that is impossible, one may be evicted in any case.

    Node autoscalers announce the deletion of a node only if the budget allows an eviction. So with
    `disruption.maxUnavailable` the floors hold from the announcement until replacements serve.

    Args:
        service: The floors, and `disruption`, which replaces them.
        desired: Desired instances of the service.
        serving: Serving instances of the service.
        can_replace_departing: Whether instances on departing nodes can be replaced first, or there are none.
        sees_nodes: Whether the operator may watch nodes.
        deletion_announced: Whether a node with instances will be deleted.
    """
    max_unavailable = service.spec.disruption.max_unavailable
    floors = service.spec.roles.to_floors()
    in_floors = floors.prefill + floors.decode
    if max_unavailable is None:
        least = max(in_floors, desired - 1)
    else:
        least = max(in_floors if deletion_announced else 0, desired - max_unavailable)
    if not (sees_nodes and cordons_move_instances(service)):
        least = min(least, desired - 1)
    if not can_replace_departing:
        least = min(least, serving - 1)
    return max(0, min(desired, least))
