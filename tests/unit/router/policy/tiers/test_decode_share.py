"""Which requests of lower tiers wait in the router, because decode is kept free for higher ones."""

import pytest

from fulcrum_router.policy.instance_record import InstanceRecord
from fulcrum_router.policy.tiers.decode_share import SENDS_FOR_S, DecodeShare
from tests.unit.router.builders import instance


def decode(tokens: int, *, capacity: int | None = None, reserved: int = 0) -> InstanceRecord:
    view = instance("d", decoding=tokens, reserved=reserved)
    view.kv_capacity_tokens = capacity
    return view


@pytest.mark.parametrize(
    ("instances", "waits"),
    [
        pytest.param([], False, id="without decode instances there is nothing to wait for"),
        pytest.param([decode(2_850)], False, id="three quarters of the tokens within the TPOT objective"),
        pytest.param([decode(2_950)], True, id="more of these tokens"),
        pytest.param([decode(2_950), decode(0)], False, id="one instance with room is enough"),
        pytest.param([decode(600, reserved=100, capacity=1_000)], False, id="four fifths of the KV cache"),
        pytest.param([decode(600, reserved=110, capacity=1_000)], True, id="more of the KV cache"),
        pytest.param([decode(0, capacity=50)], False, id="an empty instance takes any request"),
    ],
)
def test_lower_tiers_leave_room_in_decode(instances: list[InstanceRecord], waits: bool) -> None:
    share = DecodeShare()
    share.set_tiers({0, 10}, tpot_s=0.05)
    assert share.must_wait(instances, priority=0, tokens=100) is waits


@pytest.mark.parametrize(
    ("instance", "waits"),
    [
        pytest.param(decode(1_450), False, id="half of the tokens within the objective"),
        pytest.param(decode(1_550), True, id="fewer of these tokens"),
        pytest.param(decode(390, capacity=1_000), False, id="half of the KV cache's share"),
        pytest.param(decode(410, capacity=1_000), True, id="less of the KV cache's share"),
    ],
)
def test_a_long_prompt_needs_no_more_than_half_of_the_room(instance: InstanceRecord, waits: bool) -> None:
    share = DecodeShare()
    share.set_tiers({0, 10}, tpot_s=0.05)
    assert share.must_wait([instance], priority=0, tokens=100_000) is waits


@pytest.mark.parametrize(
    ("priorities", "priority"),
    [
        pytest.param({0, 10}, 10, id="the highest tier"),
        pytest.param({0}, 0, id="a service whose tiers have one priority"),
        pytest.param({-10}, 0, id="a priority above all configured ones"),
    ],
)
def test_nobody_of_the_highest_tier_waits_for_decode(priorities: set[int], priority: int) -> None:
    share = DecodeShare()
    share.set_tiers(priorities, tpot_s=0.05)
    assert not share.must_wait([decode(100_000)], priority=priority, tokens=1)


def test_an_objective_that_no_step_meets_holds_nobody() -> None:
    share = DecodeShare()
    share.set_tiers({0, 10}, tpot_s=0.005)
    assert not share.must_wait([decode(100_000)], priority=0, tokens=1)


@pytest.mark.parametrize(
    ("priorities", "arrivals", "is_used"),
    [
        pytest.param({0, 10}, {10: 0.0}, True, id="a higher tier sends requests"),
        pytest.param({0, 10}, {10: -SENDS_FOR_S - 1.0}, False, id="it has sent none for long"),
        pytest.param({0, -10}, {0: 0.0, -10: 0.0}, False, id="its own tier, and a lower one"),
        pytest.param({0}, {10: 0.0}, False, id="a service whose tiers have one priority"),
    ],
)
def test_decode_is_used_by_higher_tiers_while_they_send_requests(
    priorities: set[int], arrivals: dict[int, float], is_used: bool
) -> None:
    share = DecodeShare()
    share.set_tiers(priorities, tpot_s=0.05)
    for priority, at_s in arrivals.items():
        share.record_arrival(priority, at_s)
    assert share.is_used_by_higher(0, 0.0) is is_used


def test_a_tier_that_is_gone_uses_nothing() -> None:
    share = DecodeShare()
    share.set_tiers({0, 10}, tpot_s=0.05)
    share.record_arrival(10, 0.0)
    share.set_tiers({0, 5}, tpot_s=0.05)
    assert not share.is_used_by_higher(0, 0.0)
