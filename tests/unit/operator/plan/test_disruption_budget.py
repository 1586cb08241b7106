"""How many instances evictions must leave: floors, `disruption`, and nodes that can always be drained."""

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
        pytest.param(1, (1, 1), {"sees_nodes": False}, 0, id="and has a single instance"),
        pytest.param(8, (3, 5), {"can_replace_departing": False}, 7, id="no replacement can start"),
        pytest.param(
            8, (1, 1), {"can_replace_departing": False, "serving": 6}, 5, id="and one was evicted before"
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
def test_disruption_in_the_manifest_replaces_the_floors(max_unavailable: int, least: int) -> None:
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
        pytest.param(2, False, True, 1, id="node autoscalers may choose the node"),
        pytest.param(2, True, True, 2, id="until a replacement serves both stay"),
        pytest.param(2, True, False, 1, id="unless none can start"),
        pytest.param(1, False, True, 0, id="also the node of a single instance"),
        pytest.param(1, True, True, 1, id="which is replaced first"),
        pytest.param(8, True, True, 7, id="and the floors of many are met"),
    ],
)
def test_floors_hold_from_the_announcement_of_a_deletion_on(
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
