"""The waiting room: order, limits, and which requests wait for which instances."""

import math
import weakref
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import cast

import pytest

from fulcrum_core.values import Role
from fulcrum_router.policy import TransferPairs
from fulcrum_router.policy.demand import DEFAULT_OUTPUT_TOKENS
from fulcrum_router.policy.dispatch import NO_FLIP_PROPOSALS, FlipProposalRules
from fulcrum_router.policy.faults.failures import Failure
from fulcrum_router.policy.instance_record import InstanceRecord
from fulcrum_router.policy.journey import (
    Action,
    Journey,
    JourneyContext,
    LocalPrefillReason,
    State,
    StopReason,
)
from fulcrum_router.policy.journey.context import SHED_BACKOFF_S
from fulcrum_router.policy.ledger import Ledger
from fulcrum_router.policy.tiers.token_account import Tokens
from fulcrum_router.policy.tiers.token_counters import MAX_IDLE_TENANTS
from fulcrum_router.policy.waiting.leaving_round import MAX_HELD_LINES, MAX_LATE
from fulcrum_router.policy.waiting.level import AGEING_FACTOR, MAX_HOLD_S
from fulcrum_router.policy.waiting.line import LATE_EVERY
from fulcrum_router.policy.waiting.waiter import LeaveResult
from fulcrum_router.policy.waiting.waiting_room import (
    MAX_EXCLUSIONS,
    MAX_GIVE_UPS,
    WaitingRoom,
)
from tests.unit.router.builders import SLO, FakeFleet, instance, open_account, work


@dataclass(eq=False)
class FakeWaiter:
    """A request that leaves while `places` lasts."""

    room: WaitingRoom
    arrival_s: float
    places: list[int]
    left: list[float]
    exclusion: Hashable = None
    fits: bool = True
    held: bool = False
    deadline_s: float = 0.0
    reserved: bool = False
    priority: int = 0
    tenant: str = ""
    tier: str = ""
    asked: int = 0
    raises: bool = False
    too_long: bool = False
    prefill_full: bool = False
    """All prefill instances have enough work, and decode instances have time to spare."""
    due: bool | None = None

    def give_up(self, now_s: float) -> None:
        assert now_s >= self.deadline_s
        self.left.append(self.arrival_s)
        self.room.leave(self)

    def give_way(self) -> None:
        self.left.append(-self.arrival_s)
        self.room.leave(self)

    def try_to_leave(
        self, now_s: float, *, late: bool, held_for_long: bool, due: bool, only_deflected: bool
    ) -> LeaveResult:
        self.asked += 1
        self.due = due
        if self.raises:
            raise RuntimeError
        if self.too_long and not late:
            return LeaveResult.LATE
        if not self.fits or not self.places[0]:
            return LeaveResult.BLOCKED
        if not late and now_s > self.deadline_s:
            return LeaveResult.LATE
        if only_deflected and not self.prefill_full:
            return LeaveResult.BLOCKED
        if self.prefill_full and late:
            return LeaveResult.LATE_BLOCKED
        if self.reserved:
            return LeaveResult.RESERVED
        if self.held and not held_for_long:
            return LeaveResult.HELD
        self.places[0] -= 1
        self.left.append(self.arrival_s)
        self.room.leave(self)
        self.room.charge(open_account(10), priority=self.priority, tenant=self.tenant, tier=self.tier)
        return LeaveResult.DEFLECTED if self.prefill_full else LeaveResult.LEFT


@dataclass
class Crowd:
    """Requests in one room, and the arrival times of those that have left."""

    room: WaitingRoom = field(default_factory=WaitingRoom)
    places: list[int] = field(default_factory=lambda: [0])
    left: list[float] = field(default_factory=list)

    def join(
        self,
        arrival_s: float,
        *,
        excludes: Hashable = None,
        fits: bool = True,
        slo_s: float = 10.0,
        priority: int = 0,
        tenant: str = "",
        tier: str = "",
        gives_up: bool = False,
        too_long: bool = False,
    ) -> FakeWaiter:
        waiter = FakeWaiter(
            self.room,
            arrival_s,
            self.places,
            self.left,
            excludes,
            fits,
            deadline_s=arrival_s + slo_s,
            priority=priority,
            tenant=tenant,
            tier=tier,
            too_long=too_long,
        )
        give_up_at_s = waiter.deadline_s if gives_up else math.inf
        assert self.room.join(waiter, prefill_s=0.5, give_up_at_s=give_up_at_s)
        return waiter

    def open(self, places: int, now_s: float = 0.0) -> list[float]:
        """Let this many leave; return the arrival times of those that did."""
        self.left.clear()
        self.places[0] = places
        self.room.reconsider(now_s)
        return list(self.left)


def test_a_level_that_waits_for_decode_lets_higher_ones_pass() -> None:
    crowd = Crowd()
    low = crowd.join(1.0)
    low.held = True
    crowd.open(1)
    for arrival_s in (2.0, 3.0):
        crowd.join(arrival_s, priority=1)
    assert (crowd.open(3), crowd.room.waits_for_decode, crowd.room.is_held(0)) == ([2.0, 3.0], True, True)
    low.held = False
    assert (crowd.open(1), crowd.room.waits_for_decode) == ([1.0], False)


@pytest.mark.parametrize("now_s", [0.0, 60.0], ids=["in time", "late"])
def test_a_held_request_does_not_stop_other_tenants_of_its_level(now_s: float) -> None:
    crowd = Crowd()
    crowd.join(1.0, tenant="long prompts").held = True
    for arrival_s in (2.0, 3.0):
        crowd.join(arrival_s, tenant="short ones")
    assert (crowd.open(5, now_s), crowd.room.is_held(0)) == ([2.0, 3.0], now_s == 0)


def test_a_held_request_does_not_hide_the_work_of_other_tenants_of_its_level() -> None:
    """The autoscaler gives prefill instances to those who do not wait for decode."""
    crowd = Crowd()
    crowd.join(1.0, tenant="long prompts").held = True
    for arrival_s in (2.0, 3.0):
        crowd.join(arrival_s, tenant="short ones", fits=False)
    crowd.open(5)
    assert (crowd.room.waits_for_decode, crowd.room.find_useful_prefill_s(8)) == (True, 1.0)


def test_a_held_level_sends_one_request_in_its_time_whatever_comes() -> None:
    crowd = Crowd()
    for arrival_s in (1.0, 2.0, 3.0):
        crowd.join(arrival_s, slo_s=60.0, tenant=f"held {arrival_s}").held = True
    left = []
    for tick in range(14):
        crowd.join(10.0 + tick, slo_s=60.0, priority=1)
        crowd.join(100.0 + tick, slo_s=60.0, tenant="short prompts")
        left += [(tick, arrival_s) for arrival_s in crowd.open(9, now_s=float(tick)) if arrival_s < 10]
    assert left == [(MAX_HOLD_S, 1.0), (2 * MAX_HOLD_S, 2.0)]


def test_few_of_many_held_tenants_are_asked() -> None:
    crowd = Crowd()
    for n in range(MAX_HELD_LINES):
        crowd.join(float(n), tenant=str(n)).held = True
    crowd.join(90.0, tenant="not asked")
    crowd.join(91.0, priority=-1)
    assert crowd.open(5) == [91.0]


def test_a_request_that_raises_keeps_no_other_from_leaving_later() -> None:
    crowd = Crowd()
    held, broken = crowd.join(1.0, tenant="held"), crowd.join(2.0, tenant="broken")
    held.held, broken.raises = True, True
    with pytest.raises(RuntimeError):
        crowd.open(5)
    held.held = broken.raises = False
    assert sorted(crowd.open(5)) == [1.0, 2.0]


@pytest.mark.parametrize("blocked_by", ["held", "reserved"])
def test_tenants_of_one_tier_do_not_hide_another_tier_of_their_priority(blocked_by: str) -> None:
    crowd = Crowd()
    for n in range(2 * MAX_HELD_LINES):
        setattr(crowd.join(float(n), tenant=str(n), tier="free"), blocked_by, True)
    crowd.join(90.0, tenant="customer", tier="gold")
    assert crowd.open(5) == [90.0]


def test_a_tick_refuses_a_bounded_number_of_requests() -> None:
    crowd = Crowd()
    for n in range(MAX_GIVE_UPS + 1):
        crowd.join(float(n), slo_s=10.0 - n, gives_up=True)
    counts = []
    for _ in range(3):
        crowd.room.tick(10.0)
        counts.append(len(crowd.left))
    assert counts == [MAX_GIVE_UPS, MAX_GIVE_UPS + 1, MAX_GIVE_UPS + 1]


@pytest.mark.parametrize("late", [False, True], ids=["in time", "late"])
def test_requests_that_have_left_take_no_memory_behind_one_that_waits(late: bool) -> None:
    """A waiter has the body of its request."""
    crowd = Crowd()
    crowd.join(0.0, slo_s=1.0, tenant="a", gives_up=True)
    waiters = [weakref.ref(crowd.join(1.0 + n, slo_s=2.0, tenant="a", gives_up=True)) for n in range(1_000)]
    if late:
        crowd.places[0] = 1
        crowd.room.reconsider(5_000.0)
        crowd.join(0.5, slo_s=1.0, tenant="a", gives_up=True)
    for waiter in waiters:
        present = waiter()
        assert present is not None
        crowd.room.leave(present)
    del present
    assert sum(waiter() is not None for waiter in waiters) < 200


@pytest.mark.parametrize(
    ("joined", "useful_s"),
    [
        pytest.param([(1, 3), (0, 4)], 3.5, id="all that can be in time"),
        pytest.param([(1, 3), (0, 40)], 20.0, id="of the lower level as much as ends in time"),
        pytest.param([(1, 60), (0, 4)], 20.0, id="nothing of it behind too much of the higher one"),
    ],
)
def test_useful_work_is_what_ends_within_the_objectives(
    joined: list[tuple[int, int]], useful_s: float
) -> None:
    crowd = Crowd()
    for priority, count in joined:
        for n in range(count):
            crowd.join(float(n), priority=priority)
    assert crowd.room.find_useful_prefill_s(2) == useful_s


def test_requests_leave_in_the_order_of_their_arrival() -> None:
    crowd = Crowd()
    for arrival_s in (3.0, 1.0, 2.0):  # a retried request joins late and keeps its place
        crowd.join(arrival_s)
    assert (crowd.open(2), crowd.open(2)) == ([1.0, 2.0], [3.0])


def test_the_earliest_deadline_leaves_first() -> None:
    crowd = Crowd()
    crowd.join(1.0, slo_s=10.0)
    crowd.join(2.0, slo_s=3.0)
    assert crowd.open(2) == [2.0, 1.0]


def test_late_requests_let_the_others_pass_and_leave_in_the_order_of_arrival() -> None:
    crowd = Crowd()
    for arrival_s, slo_s in ((1.0, 3.0), (2.0, 1.0), (20.0, 10.0)):
        crowd.join(arrival_s, slo_s=slo_s)
    assert (crowd.open(1, now_s=20.0), crowd.open(5, now_s=20.0)) == ([20.0], [1.0, 2.0])


def test_a_late_request_leaves_after_a_bounded_number_of_others() -> None:
    crowd = Crowd()
    crowd.join(1.0, slo_s=1.0)
    for n in range(LATE_EVERY + 1):
        crowd.join(10.0 + n)
    left = crowd.open(LATE_EVERY + 1, now_s=10.0)
    assert left.index(1.0) == LATE_EVERY - 1


def test_others_of_the_tenant_are_deflected_past_a_late_request_at_its_turn() -> None:
    crowd = Crowd()
    crowd.join(1.0, slo_s=1.0)
    for n in range(LATE_EVERY - 1):
        crowd.join(10.0 + n)
    assert 1.0 not in crowd.open(LATE_EVERY - 1, now_s=10.0), "now it is the turn of the late one"
    for waiter in crowd.room.members:
        cast(FakeWaiter, waiter).prefill_full = True
    for n in range(2 * LATE_EVERY):
        crowd.join(50.0 + n).prefill_full = True
    assert len(crowd.open(3 * LATE_EVERY, now_s=50.0)) == 2 * LATE_EVERY


def test_a_deflected_request_is_no_turn_of_the_others_before_a_late_one() -> None:
    crowd = Crowd()
    late = crowd.join(1.0, slo_s=1.0)
    for n in range(LATE_EVERY):
        crowd.join(10.0 + n).prefill_full = True
    crowd.open(LATE_EVERY, now_s=10.0)
    for n in range(LATE_EVERY):
        crowd.join(50.0 + n)
    assert not late.prefill_full
    assert crowd.open(LATE_EVERY, now_s=50.0).index(1.0) == LATE_EVERY - 1


def test_late_requests_of_many_tenants_let_another_one_be_deflected() -> None:
    crowd = Crowd()
    late = [crowd.join(1.0 + n, slo_s=1.0, tenant=f"late {n}") for n in range(4 * MAX_HELD_LINES)]
    for waiter in late:
        waiter.prefill_full = True
    crowd.open(1, now_s=90.0)  # here they become late
    asked = sum(waiter.asked for waiter in late)
    crowd.join(90.0, tenant="in time").prefill_full = True
    left = crowd.open(1, now_s=91.0)
    assert (left, sum(waiter.asked for waiter in late) - asked) == ([90.0], 1), "one says it for all"
    assert not crowd.room.waits_for_decode


def test_only_deflected_requests_pass_a_late_one_that_waits_for_prefill() -> None:
    """Else prompts that fit an instance which is full for others could keep it full."""
    crowd = Crowd()
    crowd.join(1.0, slo_s=1.0, tenant="late").prefill_full = True
    crowd.join(89.0, tenant="cached")
    assert crowd.open(2, now_s=90.0) == []


def test_a_late_request_that_excludes_instances_stops_only_late_ones_with_its_exclusion() -> None:
    crowd = Crowd()
    crowd.join(1.0, slo_s=1.0, excludes="p1", priority=1).prefill_full = True
    crowd.join(88.0, excludes="p1")
    crowd.join(89.0)
    assert crowd.open(2, now_s=90.0) == [88.0, 89.0]


def test_a_round_moves_a_bounded_number_of_requests_to_the_late_ones_before_their_deadline() -> None:
    """Each asks all instances: thousands at once would stop the router for seconds."""
    crowd = Crowd()
    waiters = [crowd.join(1.0 + n / 1_000, too_long=True) for n in range(2 * MAX_LATE)]
    asked = []
    for _ in range(3):
        crowd.open(0, now_s=2.0)
        asked.append(sum(waiter.asked for waiter in waiters))
    assert asked == [MAX_LATE, 2 * MAX_LATE, 2 * MAX_LATE + 1]


def test_rounds_in_which_nobody_leaves_take_no_memory() -> None:
    crowd = Crowd()
    crowd.places[0] = 5
    for tenant in ("a", "b"):
        crowd.join(1.0, slo_s=math.inf, tenant=tenant, excludes="x", fits=False)
    crowd.join(1.0, slo_s=math.inf, tenant="b").reserved = True
    sizes = []
    for _ in range(2):
        for _ in range(1_000):
            crowd.room.reconsider(2.0)
        sizes.append(sum(map(len, crowd.room._find_level(0)._heaps.values())))
    assert sizes[1] <= sizes[0] < 200


def test_prefill_work_of_late_requests_is_not_in_front_of_a_newcomer() -> None:
    crowd = Crowd()
    crowd.join(1.0, slo_s=1.0)
    crowd.join(10.0, fits=False)
    assert crowd.open(1, now_s=10.0) == []
    assert (crowd.room.prefill_s, crowd.room.in_time_prefill_s) == (1.0, 0.5)


def test_nobody_passes_a_request_that_any_instance_could_take() -> None:
    crowd = Crowd()
    first = crowd.join(1.0, fits=False)
    crowd.join(2.0)
    assert crowd.open(1) == []
    first.fits = True
    assert crowd.open(2) == [1.0, 2.0]


def test_others_pass_a_request_that_has_failed_on_the_free_instance() -> None:
    crowd = Crowd()
    first = crowd.join(1.0, excludes="p1", fits=False)
    crowd.join(2.0)
    assert crowd.open(1) == [2.0]
    first.fits = True
    assert crowd.open(1) == [1.0], "it keeps its place"


@pytest.mark.parametrize("tenants", [1, 500])
@pytest.mark.parametrize("exclusions", [1, 500])
@pytest.mark.parametrize("late", [False, True], ids=["in time", "late"])
def test_few_of_many_requests_that_exclude_instances_are_asked(
    tenants: int, exclusions: int, *, late: bool
) -> None:
    """Asking 10,000 would stop the router for 0.15 s, ten times a second."""
    crowd = Crowd()
    waiters = [
        crowd.join(float(n), slo_s=600.0, tenant=f"t{n % tenants}", excludes=f"p{n % exclusions}")
        for n in range(500)
    ]
    if late:
        crowd.places[0] = 1
        crowd.open(1, now_s=2_000.0)
    ordinary = crowd.join(600.0, slo_s=2_000.0, tenant="t0", fits=False)
    for waiter in waiters:
        waiter.asked = 0
    assert (crowd.open(0, now_s=2_000.0), ordinary.asked) == ([], 1)
    assert sum(waiter.asked for waiter in waiters) <= MAX_EXCLUSIONS + 1


def test_blocked_requests_keep_nobody_from_leaving_who_can() -> None:
    crowd = Crowd()
    for n in range(100):
        crowd.join(float(n), tenant=f"t{n % 7}", excludes="p1", fits=False)
    crowd.join(100.0, tenant="t0", excludes="p2")
    crowd.join(101.0, tenant="t1", priority=-1, excludes="p2")
    crowd.join(102.0, tenant="t2")
    assert sorted(crowd.open(9)) == [100.0, 101.0, 102.0]


def test_a_level_of_blocked_requests_is_not_held() -> None:
    crowd = Crowd()
    crowd.join(1.0, excludes="p1").held = True
    crowd.open(1)
    before = crowd.room.waits_for_decode
    crowd.join(2.0, priority=1, excludes="p1")
    crowd.open(0)
    assert (before, crowd.room.waits_for_decode) == (True, False)


def test_more_exclusions_than_are_told_apart_are_blocked_together() -> None:
    crowd = Crowd()
    for n in range(MAX_EXCLUSIONS):
        crowd.join(float(n), excludes=n, fits=False)
    first = crowd.join(50.0, excludes="p1", fits=False)
    crowd.join(51.0, excludes="p2")
    blocked = crowd.open(9)
    crowd.room.leave(first)
    assert (blocked, crowd.open(9)) == ([], [51.0])


def test_a_tier_of_higher_priority_goes_first_whatever_the_deadlines() -> None:
    crowd = Crowd()
    for arrival_s, priority in ((1.0, -5), (2.0, 0), (3.0, 5), (4.0, 5)):
        crowd.join(arrival_s, priority=priority)
    assert crowd.open(4) == [3.0, 4.0, 2.0, 1.0]


def test_tenants_of_one_priority_take_turns_and_each_has_its_own_deadlines() -> None:
    crowd = Crowd()
    for arrival_s, tenant, slo_s in ((1.0, "a", 9.0), (2.0, "a", 1.0), (3.0, "a", 9.0), (4.0, "b", 20.0)):
        crowd.join(arrival_s, tenant=tenant, slo_s=slo_s)
    assert crowd.open(4) == [2.0, 4.0, 1.0, 3.0]


def test_a_tenant_that_comes_back_has_saved_up_nothing() -> None:
    crowd = Crowd()
    for n in range(6):
        crowd.join(float(n), tenant="busy")
    crowd.open(4)
    crowd.join(6.0, tenant="back"), crowd.join(7.0, tenant="back")
    assert crowd.open(4) == [4.0, 6.0, 5.0, 7.0]


def test_a_lower_tier_leaves_after_a_bounded_amount_of_work_of_others() -> None:
    crowd = Crowd()
    crowd.join(0.0, priority=-1)
    for n in range(1, 40):
        crowd.join(float(n), priority=1)
    assert crowd.open(40).index(0.0) == AGEING_FACTOR


def test_a_lower_tier_that_brings_no_work_for_prefill_instances_has_no_larger_share() -> None:
    crowd = Crowd()
    for n in range(3):
        waiter = FakeWaiter(crowd.room, -1.0 - n, crowd.places, crowd.left, priority=-1)
        crowd.room.join(waiter, prefill_s=0.0, work_s=0.5)
    for n in range(20):
        crowd.join(float(n), priority=1)
    assert [n for n, arrival_s in enumerate(crowd.open(20)) if arrival_s < 0] == [15]


def test_others_pass_the_only_request_of_a_tenant_that_no_free_instance_can_take() -> None:
    crowd = Crowd()
    stuck = crowd.join(1.0, priority=9, tenant="a", excludes="p1", fits=False)
    crowd.join(2.0, priority=9, tenant="b")
    crowd.join(3.0)
    assert crowd.open(3) == [2.0, 3.0]
    stuck.fits = True
    assert crowd.open(1) == [1.0]


def test_work_of_lower_tiers_is_not_in_front_of_a_newcomer() -> None:
    crowd = Crowd()
    for priority in (-1, 0, 0, 7):
        crowd.join(1.0, priority=priority)
    assert [crowd.room.find_backlog_s(priority) for priority in (7, 0, -1)] == [0.5, 1.5, 2.0]


@pytest.mark.parametrize(
    ("tenant", "tier", "own_s", "before_s"),
    [
        pytest.param("mallory", "free", 0.1, 9.0, id="the tenant that has most is behind all"),
        pytest.param("new", "free", 0.1, 0.2 + 0.9, id="a newcomer waits for as much of each tenant"),
        pytest.param("b", "free", 0.25, 0.5 + 0.75 + 3.5, id="and for no more than they have"),
        pytest.param("new", "paid", 0.3, 0.3 + 0.2, id="for less of a tier of less weight"),
        pytest.param("acme", "new", 0.3, 0.3 + 0.9, id="a tier of which nobody waits"),
    ],
)
def test_a_tenant_is_behind_as_much_work_of_the_others_as_it_has_itself(
    tenant: str, tier: str, own_s: float, before_s: float
) -> None:
    """In the tier free mallory has ten requests of 0.5 s and b has one; paid, of weight 3, has seven."""
    crowd = Crowd()
    crowd.room.set_weights({"paid": 3})
    for _ in range(10):
        crowd.join(1.0, tenant="mallory", tier="free")
    crowd.join(1.0, tenant="b", tier="free")
    for _ in range(7):
        crowd.join(1.0, tenant="acme", tier="paid")
    assert crowd.room.find_backlog_before_s(0, tenant, tier, own_s) == pytest.approx(before_s)
    assert crowd.room.find_backlog_before_s(-1, tenant, tier, own_s) == pytest.approx(9.0)


def test_output_beyond_the_prediction_is_charged_as_it_appears_and_the_rest_given_back() -> None:
    room, ledger = WaitingRoom(), Ledger()
    room.join(FakeWaiter(room, 0.0, [0], [], tenant="other", fits=False), prefill_s=1.0)
    account = open_account(5, output_tokens=10)
    charge = room.charge(account, priority=0, tenant="a", tier="")
    counters = room.find_counters(0, "")
    seen = [counters["a"]]
    entry = ledger.add_decode(tokens=5)
    account.follow(entry)
    for tokens in (4, 10):
        entry.add_tokens(tokens)
        room.tick(0.0)
        seen.append(counters["a"])
    used = account.settle(served=True)
    assert used is not None
    room.close_charge(charge, used)
    room.close_charge(
        room.charge(open_account(5, output_tokens=10), priority=0, tenant="b", tier=""), Tokens(5, 0)
    )
    assert (seen, counters["a"], counters["b"], room.open_charges) == ([25.0, 25.0, 33.0], 33.0, 5.0, {})


@pytest.mark.parametrize(
    ("weights", "gold"),
    [
        pytest.param({}, 6, id="equal weights: half of it, though one tenant shares with three"),
        pytest.param({"gold": 2}, 8, id="twice the weight: two thirds"),
        pytest.param({"silver": 2}, 4, id="half of the weight: a third"),
    ],
)
def test_tiers_of_one_priority_share_by_their_weights(weights: dict[str, int], gold: int) -> None:
    crowd = Crowd()
    crowd.room.set_weights(weights)
    for n in range(12):
        crowd.join(float(n), tenant="a", tier="gold")
        crowd.join(100.0 + n, tenant=f"t{n % 3}", tier="silver")
    left = [crowd.open(1)[0] for _ in range(12)]
    assert sum(arrival_s < 100.0 for arrival_s in left) == gold


def test_a_tier_saves_nothing_up_while_none_of_its_requests_waits() -> None:
    crowd = Crowd()
    for n in range(9):
        crowd.join(float(n), tenant="a", tier="gold")
    crowd.open(5)
    for n in range(3):
        crowd.join(100.0 + n, tenant="b", tier="silver")
    assert [crowd.open(1)[0] >= 100.0 for _ in range(4)] in (
        [False, True, False, True],
        [True, False, True, False],
    )


def test_a_tenant_of_two_tiers_has_a_counter_in_each() -> None:
    crowd = Crowd()
    for n in range(4):
        crowd.join(float(n), tenant="a", tier="gold")
        crowd.join(100.0 + n, tenant="a", tier="silver")
    left = [crowd.open(1)[0] for _ in range(4)]
    assert (sum(arrival_s < 100.0 for arrival_s in left), len(crowd.room)) == (2, 4)


def test_tenants_that_rotate_names_take_a_bounded_memory() -> None:
    room = WaitingRoom()
    for n in range(MAX_IDLE_TENANTS + 50):
        room.charge(open_account(1), priority=0, tenant=f"t{n}", tier="")
    assert len(room.find_counters(0, "")) == MAX_IDLE_TENANTS


def test_the_room_counts_requests_and_seconds() -> None:
    crowd = Crowd()
    waiters = [crowd.join(1.0), crowd.join(2.0)]
    assert (len(crowd.room), crowd.room.prefill_s, crowd.room.in_time_prefill_s) == (2, 1.0, 1.0)
    for waiter in waiters:
        crowd.room.leave(waiter)
    crowd.room.leave(waiters[0])
    assert (len(crowd.room), crowd.room.prefill_s, crowd.room.in_time_prefill_s) == (0, 0.0, 0.0)
    assert crowd.open(5) == []


def test_a_room_with_too_many_requests_refuses_the_next() -> None:
    crowd = Crowd(WaitingRoom(max_requests=1))
    crowd.join(1.0)
    assert not crowd.room.join(FakeWaiter(crowd.room, 2.0, [0], []), prefill_s=0.5)


@pytest.mark.parametrize(
    ("newcomer", "expected"),
    [
        pytest.param((5, "new"), (True, [-3.0]), id="a higher tier displaces the longest line of the lowest"),
        pytest.param((0, "small"), (True, [-3.0]), id="a tenant with fewer requests"),
        pytest.param((0, "big"), (False, []), id="the tenant that has most"),
        pytest.param((-1, "new"), (False, []), id="a lower tier"),
    ],
)
def test_in_a_full_room_the_longest_line_of_the_lowest_tier_gives_way(
    newcomer: tuple[int, str], expected: tuple[bool, list[float]]
) -> None:
    crowd = Crowd(WaitingRoom(max_requests=4))
    for arrival_s, tenant in ((1.0, "big"), (2.0, "big"), (3.0, "big"), (4.0, "small")):
        crowd.join(arrival_s, tenant=tenant)
    priority, tenant = newcomer
    waiter = FakeWaiter(crowd.room, 9.0, [0], [], priority=priority, tenant=tenant)
    assert (crowd.room.join(waiter, prefill_s=0.5), crowd.left, len(crowd.room)) == (*expected, 4)


# --- journeys that wait --------------------------------------------------------------------------------

TOKENS = 400
"""0.4 s on the instances of the builder."""


def make_context(*names: str, max_requests: int = 100) -> JourneyContext[InstanceRecord]:
    """Instances that get no more work from half a second of it."""
    fleet = FakeFleet(instance(name) for name in names or ("p1", "p2", "d1"))
    context = JourneyContext(fleet, TransferPairs())
    context.waiting_room = WaitingRoom(prefill_ahead_s=0.5, max_requests=max_requests)
    return context


def begin(
    context: JourneyContext[InstanceRecord], now_s: float = 0.0, reason: LocalPrefillReason | None = None
) -> tuple[Journey[InstanceRecord], list[Action]]:
    """Begin a request; return it with its actions, those after it has waited included."""
    timed_work = work(TOKENS)._replace(deadline_s=now_s + SLO.ttft_s)
    journey = Journey(context, timed_work, local_prefill_reason=reason)
    actions: list[Action] = []
    journey.on_moved = actions.append
    actions.append(journey.begin(now_s))
    return journey, actions


def test_an_instance_gets_no_more_than_half_a_second_of_work_before_others_wait() -> None:
    context = make_context()
    started = [begin(context)[1] for _ in range(6)]
    assert started == [[Action.SEND_PREFILL]] * 4 + [[Action.WAIT]] * 2
    assert [context.fleet[name].ledger.prefill_legs for name in ("p1", "p2")] == [2, 2]
    assert len(context.waiting_room) == 2


def test_the_end_of_a_prefill_lets_the_next_request_leave_to_the_free_instance() -> None:
    context = make_context()
    running = [begin(context)[0] for _ in range(4)]
    journey, actions = begin(context)
    second, _ = begin(context)
    running[1].prefill_responded(0.1, lease_from_s=0.1, has_params=True)
    assert actions == [Action.WAIT, Action.SEND_PREFILL]
    assert journey.prefill_instance is running[1].prefill_instance
    assert second.state is State.WAITING


def test_time_alone_lets_a_request_leave_before_the_engine_runs_out_of_work() -> None:
    context = make_context("p1", "d1")
    begin(context), begin(context)
    _, actions = begin(context)
    context.waiting_room.reconsider(0.2)
    assert actions == [Action.WAIT]
    context.waiting_room.reconsider(0.35)
    assert actions == [Action.WAIT, Action.SEND_PREFILL], "0.45 s of work are left"


def test_a_newcomer_does_not_pass_those_who_wait() -> None:
    context = make_context("p1", "d1")
    begin(context), begin(context)
    _, older_actions = begin(context)
    _, newcomer_actions = begin(context, 0.35)
    assert (older_actions, newcomer_actions) == ([Action.WAIT, Action.SEND_PREFILL], [Action.WAIT])


def test_requests_that_wait_use_an_instance_that_was_flipped() -> None:
    context = make_context("p1", "d1", "d2")
    begin(context), begin(context)
    journey, actions = begin(context)
    context.fleet["d1"].role = Role.PREFILL
    context.waiting_room.reconsider(0.0)
    assert (actions[-1], journey.prefill_instance) == (Action.SEND_PREFILL, context.fleet["d1"])


def test_requests_that_wait_are_decoded_with_a_local_prefill_when_no_prefill_instance_is_left() -> None:
    context = make_context("p1", "d1")
    begin(context), begin(context)
    journey, actions = begin(context)
    context.fleet["p1"].serving = False
    context.waiting_room.reconsider(0.0)
    assert (actions[-1], journey.local_prefill_reason) == (Action.SEND_DECODE, "no_prefill_instance")


def test_a_request_that_fails_again_waits_and_others_pass_it() -> None:
    context = make_context("p1", "p2", "d1")
    running = [begin(context)[0] for _ in range(4)]
    assert running[0].prefill_failed(0.1, Failure.TIMEOUT) is Action.WAIT
    _, actions = begin(context)
    assert actions == [Action.SEND_PREFILL], "on the instance that has failed the other request"


def test_an_instance_that_sheds_gets_nobody_who_waits_for_a_while() -> None:
    """It answers at once and has no work: else everybody would be sent there."""
    context = make_context("p1", "p2", "p3", "d1")
    running = [begin(context)[0] for _ in range(6)]
    _, actions = begin(context)
    shed = running[0]
    assert shed.prefill_instance is context.fleet["p1"]
    shed.prefill_failed(0.1, Failure.STATUS, status=503)
    assert (actions, context.fleet["p1"].ledger.prefill_legs) == ([Action.WAIT], 1)
    running[3].client_left(0.1)  # the other request on p1
    assert (actions, context.fleet["p1"].ledger.prefill_legs) == ([Action.WAIT], 0)
    context.waiting_room.reconsider(0.1 + SHED_BACKOFF_S)
    assert actions == [Action.WAIT, Action.SEND_PREFILL]


def test_requests_that_wait_do_not_reach_the_decode_instances_at_once_when_prefill_is_gone() -> None:
    context = make_context("p1", "d1")
    running = [begin(context)[0] for _ in range(2)]
    waiting = [begin(context)[1] for _ in range(6)]
    context.fleet["p1"].serving = False
    context.waiting_room.reconsider(0.1)
    assert [actions[-1] for actions in waiting].count(Action.SEND_DECODE) == 2
    for journey in running:
        journey.client_left(0.1)


SEVERAL = LocalPrefillReason.MULTIPLE_CHOICES


def test_a_request_with_several_choices_does_not_pass_those_who_wait() -> None:
    context = make_context("p1", "d1")
    running = [begin(context)[0] for _ in range(2)]
    _, older = begin(context)
    _, several = begin(context, reason=SEVERAL)
    assert (older, several) == ([Action.WAIT], [Action.WAIT])
    running[0].client_left(0.1)
    assert (older[-1], several[-1]) == (Action.SEND_PREFILL, Action.SEND_DECODE)


def test_requests_with_several_choices_wait_for_decode_instances_and_others_pass_them() -> None:
    context = make_context("p1", "d1")
    running = [begin(context, reason=SEVERAL) for _ in range(3)]
    assert [actions[-1] for _, actions in running] == [Action.SEND_DECODE, Action.SEND_DECODE, Action.WAIT]
    assert begin(context)[1] == [Action.SEND_PREFILL]
    running[0][0].first_byte(0.1)
    assert (running[2][1][-1], context.waiting_room.prefill_s) == (Action.SEND_DECODE, 0.0)


def test_requests_with_several_choices_are_blocked_together() -> None:
    context = make_context("p1", "d1", max_requests=1_000)
    for _ in range(2):
        begin(context, reason=SEVERAL)
    waiting = [begin(context, reason=SEVERAL)[0] for _ in range(20)]
    assert {journey.exclusion for journey in waiting} == {(False, frozenset(), frozenset())}


def test_a_full_room_fails_the_request() -> None:
    context = make_context("p1", "d1", max_requests=1)
    begin(context), begin(context), begin(context)
    journey, actions = begin(context)
    assert (actions, journey.stop_reason) == ([Action.FAIL], StopReason.FULL)


def test_a_request_that_gives_way_fails_and_leaves_nothing_in_the_ledgers() -> None:
    context = make_context("p1", "d1", max_requests=1)
    running = [begin(context)[0], begin(context)[0]]
    displaced, actions = begin(context)
    premium = Journey(context, work(TOKENS, priority=1))
    assert premium.begin(0.0) is Action.WAIT
    assert (actions, displaced.stop_reason, displaced.state, len(context.waiting_room)) == (
        [Action.WAIT, Action.FAIL],
        StopReason.FULL,
        State.DONE,
        1,
    )
    for journey in (*running, premium):
        journey.client_left(0.1)
    assert [context.fleet[name].ledger.legs for name in ("p1", "d1")] == [0, 0]


def test_a_client_that_leaves_gives_up_its_place() -> None:
    context = make_context("p1", "d1")
    begin(context), begin(context)
    journey, _ = begin(context)
    assert journey.client_left(0.1) is Action.END
    assert len(context.waiting_room) == 0


@pytest.mark.parametrize(
    ("waiting", "action"),
    [
        pytest.param(0, Action.WAIT, id="in time"),
        pytest.param(3, Action.ASK_FOR_FLIP, id="in time with one prefill instance more"),
        pytest.param(6, Action.WAIT, id="late even then"),
    ],
)
def test_a_flip_is_asked_for_when_it_lets_the_request_be_in_time(waiting: int, action: Action) -> None:
    context = make_context("p1", "d1", "d2")
    for _ in range(2 + waiting):
        begin(context)
    for name in ("d1", "d2"):
        context.fleet[name].itl_s = 0.0
    context.flip_rules = FlipProposalRules(enabled=True)
    context.waiting_room.prefill_ahead_s = 0.1
    journey = Journey(context, work(10))
    assert journey.begin(0.0) is action


def test_demand_leaves_out_what_is_late_even_with_one_prefill_instance_more() -> None:
    context = make_context("p1", "d1")
    for _ in range(20):
        begin(context)
    counted = context.demand.snapshot().requests
    begin(context)
    assert (context.demand.snapshot().requests, counted < 20) == (counted, True)


def make_full_decode() -> JourneyContext[InstanceRecord]:
    """A fleet whose decode has room for a prompt of 100 tokens and its answer, of a lower tier."""
    context = make_context("p1", "d1")
    context.decode_share.set_tiers({0, 10}, tpot_s=0.05)
    context.fleet["d1"].ledger.add_decode(tokens=2_900 - int(DEFAULT_OUTPUT_TOKENS))
    return context


@pytest.mark.parametrize(
    ("tokens", "reason", "choices", "action"),
    [
        pytest.param(90, None, 1, Action.SEND_PREFILL, id="it fits"),
        pytest.param(110, None, 1, Action.WAIT, id="it does not"),
        pytest.param(110, LocalPrefillReason.PROMPT_LOGPROBS, 1, Action.WAIT, id="without a prefill leg"),
        pytest.param(60, LocalPrefillReason.MULTIPLE_CHOICES, 1, Action.SEND_DECODE, id="one choice of n"),
        pytest.param(60, LocalPrefillReason.MULTIPLE_CHOICES, 2, Action.WAIT, id="two choices"),
    ],
)
def test_requests_wait_for_room_in_decode(
    tokens: int, reason: LocalPrefillReason | None, choices: int, action: Action
) -> None:
    journey = Journey(make_full_decode(), work(tokens, choices=choices), local_prefill_reason=reason)
    assert journey.begin(0.0) is action


def test_a_newcomer_does_not_pass_a_held_request_of_its_level_at_once() -> None:
    context = make_full_decode()
    held = [Journey(context, work(110)).begin(0.0)]
    context.waiting_room.reconsider(0.1)
    assert (held, Journey(context, work(10)).begin(0.2)) == ([Action.WAIT], Action.WAIT)
    assert Journey(context, work(10, priority=10)).begin(0.2) is Action.SEND_PREFILL


def test_a_request_that_has_waited_for_a_flip_still_waits_for_room_in_decode() -> None:
    context = make_full_decode()
    journey = Journey(context, work(110))
    journey.state, journey.proposal = State.FLIP_REQUESTED, None
    assert journey._seek_prefill(0.0, NO_FLIP_PROPOSALS) is Action.WAIT


def test_without_a_bound_no_request_waits() -> None:
    context = make_context()
    context.waiting_room = WaitingRoom()
    assert {begin(context)[1][0] for _ in range(50)} == {Action.SEND_PREFILL}
