"""The `minAvailable` of a service's budget for evictions.

By default one instance may be evicted at a time, and none below the floors. `disruption.maxUnavailable`
replaces both, but once the deletion of a node with instances is announced, the floors hold again until
replacements serve. If none can start, one may be evicted in any case, so that each node can be drained.
"""

from typing import Any

import pytest

from fulcrum_operator.plan.disruption_budget import plan_min_available
from tests.unit.operator.builders import service


@pytest.mark.parametrize(
    ("desired", "floors", "fields", "least"),
    [
        pytest.param(8, (1, 1), {}, 7, id="one of many may be evicted"),
        pytest.param(2, (1, 1), {}, 2, id="each of two is the last of its role"),
        pytest.param(8, (3, 5), {}, 8, id="none below the floors"),
        pytest.param(1, (1, 1), {}, 1, id="a single instance is replaced first"),
        pytest.param(0, (1, 1), {}, 0, id="no instance"),
        pytest.param(2, (1, 1), {"sees_nodes": False}, 1, id="an operator that does not see nodes"),
        pytest.param(
            1,
            (1, 1),
            {"sees_nodes": False},
            0,
            id="an operator that does not see nodes, with a single instance",
        ),
        pytest.param(8, (3, 5), {"can_replace_departing": False}, 7, id="no replacement can start"),
        pytest.param(
            8,
            (1, 1),
            {"can_replace_departing": False, "serving": 6},
            5,
            id="no replacement can start, one was evicted before",
        ),
        pytest.param(
            1, (1, 1), {"can_replace_departing": False}, 0, id="no replacement for a single instance"
        ),
    ],
)
def test_evictions_leave_the_floors_unless_that_would_block_a_drain(
    desired: int, floors: tuple[int, int], fields: dict[str, Any], least: int
) -> None:
    chat = service(instances=8, roles={"prefill": {"min": floors[0]}, "decode": {"min": floors[1]}})
    given = {"serving": desired, "can_replace_departing": True, "sees_nodes": True, **fields}
    assert plan_min_available(chat, desired=desired, **given) == least


@pytest.mark.parametrize(("max_unavailable", "least"), [(1, 7), (3, 5), (9, 0)])
def test_max_unavailable_replaces_the_floors(max_unavailable: int, least: int) -> None:
    chat = service(
        instances=8,
        roles={"prefill": {"min": 4}, "decode": {"min": 4}},
        disruption={"maxUnavailable": max_unavailable},
    )
    assert (
        plan_min_available(chat, desired=8, serving=8, can_replace_departing=True, sees_nodes=True) == least
    )


@pytest.mark.parametrize(
    ("desired", "announced", "can_replace_departing", "least"),
    [
        pytest.param(2, False, True, 1, id="two instances, nothing announced"),
        pytest.param(2, True, True, 2, id="two instances, both stay until a replacement serves"),
        pytest.param(2, True, False, 1, id="two instances, no replacement can start"),
        pytest.param(1, False, True, 0, id="a single instance, nothing announced"),
        pytest.param(1, True, True, 1, id="a single instance is replaced first"),
        pytest.param(8, True, True, 7, id="many instances, one may be evicted"),
    ],
)
def test_with_max_unavailable_the_floors_hold_again_once_the_deletion_of_a_node_is_announced(
    desired: int, announced: bool, can_replace_departing: bool, least: int
) -> None:
    chat = service(instances=desired, disruption={"maxUnavailable": 1})
    found = plan_min_available(
        chat,
        desired=desired,
        serving=desired,
        can_replace_departing=can_replace_departing,
        sees_nodes=True,
        deletion_announced=announced,
    )
    assert found == least
