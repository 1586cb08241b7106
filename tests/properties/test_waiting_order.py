"""The order of the waiting room: nobody starves, and tenants that wait get equal service."""

from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fulcrum_router.policy.ledger import Ledger
from fulcrum_router.policy.tiers import token_counters
from fulcrum_router.policy.tiers.token_account import TokenAccount, Tokens
from fulcrum_router.policy.tiers.token_counters import INPUT_WEIGHT, OUTPUT_WEIGHT, TokenCounters
from fulcrum_router.policy.waiting import waiting_room
from fulcrum_router.policy.waiting.level import AGEING_FACTOR, Level
from fulcrum_router.policy.waiting.waiter import LeaveResult
from fulcrum_router.policy.waiting.waiting_room import Charge, WaitingRoom
from tests.unit.router.builders import open_account


@dataclass(eq=False)
class Request:
    """A request that leaves if it is the first that is asked, and is then charged."""

    hall: "Hall"
    priority: int = 0
    tenant: str = ""
    prompt_tokens: int = 1
    predicted: int = 0
    output: int = 0
    prefill_s: float = 1.0
    arrival_s: float = 0.0
    deadline_s: float = 0.0
    exclusion: Hashable = None
    tier: str = ""
    account: TokenAccount = field(init=False)

    def try_to_leave(self, now_s: float, *, late: bool, **_: bool) -> LeaveResult:  # noqa: ARG002  # the port's signature
        hall = self.hall
        if hall.left is not None:
            return LeaveResult.BLOCKED
        hall.left = self
        hall.room.leave(self)
        self.account = open_account(self.prompt_tokens, output_tokens=self.predicted)
        charge = hall.room.charge(self.account, priority=self.priority, tenant=self.tenant, tier=self.tier)
        hall.in_flight.append((charge, self))
        return LeaveResult.LEFT

    def give_up(self, now_s: float) -> None:
        raise AssertionError(f"nobody gives up, also not at {now_s}")

    def give_way(self) -> None:
        self.hall.room.leave(self)

    @property
    def cost(self) -> float:
        """The service that the request gets."""
        return INPUT_WEIGHT * self.prompt_tokens + OUTPUT_WEIGHT * self.output

    @property
    def largest_charge(self) -> float:
        return INPUT_WEIGHT * self.prompt_tokens + OUTPUT_WEIGHT * max(self.output, self.predicted)


@dataclass
class Hall:
    """A room from which one request leaves at a time."""

    room: WaitingRoom = field(default_factory=WaitingRoom)
    in_flight: list[tuple[Charge, Request]] = field(default_factory=list)
    left: Request | None = None

    def join(self, request: Request) -> None:
        assert self.room.join(request, prefill_s=request.prefill_s)

    def release_one(self) -> Request | None:
        self.left = None
        self.room.reconsider(0.0)
        return self.left


TOKENS = st.integers(1, 5_000)
SIZES = st.tuples(st.sampled_from("ab"), TOKENS, TOKENS, TOKENS)
MAX_IN_FLIGHT = 3


@given(sizes=st.lists(SIZES, min_size=2, max_size=40))
def test_two_tenants_that_wait_all_the_time_get_the_same_service_but_for_bounded_charges(
    sizes: list[tuple[str, int, int, int]],
) -> None:
    """By the largest charge, and by the corrections of the requests in flight."""
    hall, waiting = Hall(), defaultdict[str, int](int)
    requests = [
        Request(hall, tenant=tenant, prompt_tokens=prompt, predicted=predicted, output=output)
        for tenant, prompt, predicted, output in sizes
    ]
    for request in requests:
        hall.join(request)
        waiting[request.tenant] += 1
    bound = (MAX_IN_FLIGHT + 1) * max(request.largest_charge for request in requests)
    service = {"a": 0.0, "b": 0.0}
    while all(waiting[tenant] for tenant in service):
        left = hall.release_one()
        assert left is not None
        waiting[left.tenant] -= 1
        service[left.tenant] += left.cost
        if len(hall.in_flight) > MAX_IN_FLIGHT:
            charge, ended = hall.in_flight.pop(0)
            entry = Ledger().add_decode(tokens=ended.prompt_tokens)
            entry.add_tokens(ended.output)
            ended.account.follow(entry)
            used = ended.account.settle(served=True)
            assert used is not None
            assert used == (ended.prompt_tokens, ended.output)
            hall.room.close_charge(charge, used)
        assert abs(service["a"] - service["b"]) <= bound


@given(flood=st.lists(TOKENS, min_size=5, max_size=30), modest=st.lists(TOKENS, min_size=1, max_size=5))
def test_a_flood_takes_no_more_than_the_largest_charge_from_a_tenant_that_waits(
    flood: list[int], modest: list[int]
) -> None:
    hall = Hall()
    for prompt in flood:
        hall.join(Request(hall, tenant="flood", prompt_tokens=prompt))
    for prompt in modest:
        hall.join(Request(hall, tenant="modest", prompt_tokens=prompt))
    taken, left_of_modest = {"flood": 0, "modest": 0}, len(modest)
    while left_of_modest:
        left = hall.release_one()
        assert left is not None
        left_of_modest -= left.tenant == "modest"
        assert taken["flood"] <= taken["modest"] + max(flood)
        taken[left.tenant] += left.prompt_tokens


PRIORITIES = (5, 0, -5)
WORK = st.floats(0.01, 10.0)


@given(
    lower=st.lists(st.tuples(st.sampled_from(PRIORITIES[1:]), WORK), min_size=1, max_size=8),
    higher=st.lists(WORK, min_size=40, max_size=80),
)
def test_no_tier_waits_for_more_than_a_bounded_amount_of_work_of_others(
    lower: list[tuple[int, float]], higher: list[float]
) -> None:
    """The highest tier sends without end."""
    hall, waiting = Hall(), defaultdict[int, int](int)
    reference, passed = dict.fromkeys(PRIORITIES, 0.0), dict.fromkeys(PRIORITIES, 0.0)
    for priority, prefill_s in lower:
        hall.join(Request(hall, priority=priority, prefill_s=prefill_s))
        waiting[priority] += 1
        reference[priority] = reference[priority] or prefill_s
    longest = max(*higher, *(prefill_s for _, prefill_s in lower))
    for prefill_s in higher:
        hall.join(Request(hall, priority=PRIORITIES[0], prefill_s=prefill_s))
        left = hall.release_one()
        assert left is not None
        for priority in PRIORITIES[1:]:
            if priority == left.priority:
                passed[priority], reference[priority] = 0.0, left.prefill_s
                waiting[priority] -= 1
            elif waiting[priority]:
                passed[priority] += left.prefill_s
                bound = AGEING_FACTOR * reference[priority] + longest * (len(PRIORITIES) - 1)
                assert passed[priority] <= bound + 1e-6


@given(order=st.permutations(range(6)))
def test_higher_tiers_go_first_in_whatever_order_requests_join(order: list[int]) -> None:
    hall = Hall()
    for n in order:
        hall.join(Request(hall, priority=n % 3, tenant=str(n), deadline_s=float(n), prefill_s=100.0))
    left = [hall.release_one() for _ in order]
    assert [request.priority for request in left if request is not None] == [2, 2, 1, 1, 0, 0]


@dataclass
class FullHall(Hall):
    """A room for few requests, those that wait in it by arrival, and all that have become late."""

    room: WaitingRoom = field(default_factory=lambda: WaitingRoom(max_requests=MAX_REQUESTS))
    waiting: list[Request] = field(default_factory=list)
    late: set[Request] = field(default_factory=set)

    def find_victim(self, newcomer: Request) -> Request | None:
        """The request that gives way, found by looking at all; None: the newcomer is refused."""
        lowest = min(request.priority for request in self.waiting)
        counts = Counter(request.tenant for request in self.waiting if request.priority == lowest)
        tenant = max(counts, key=lambda name: (counts[name], name))
        same = lowest == newcomer.priority
        if lowest > newcomer.priority or (same and counts[tenant] <= 1 + counts[newcomer.tenant]):
            return None
        line = [request for request in self.waiting if (request.priority, request.tenant) == (lowest, tenant)]
        late = [request for request in line if request in self.late]
        if late:
            return max(late, key=lambda request: request.arrival_s)
        return max(line, key=lambda request: (request.deadline_s, request.arrival_s))


@dataclass(eq=False)
class LateRequest(Request):
    """A request that is late once its deadline is over, and is blocked then."""

    def try_to_leave(self, now_s: float, *, late: bool, **_: bool) -> LeaveResult:
        hall = self.hall
        assert isinstance(hall, FullHall)
        if late or now_s <= self.deadline_s:
            return LeaveResult.BLOCKED
        hall.late.add(self)
        return LeaveResult.LATE

    def give_way(self) -> None:
        super().give_way()
        hall = self.hall
        assert isinstance(hall, FullHall)
        hall.waiting.remove(self)


MAX_REQUESTS = 8
NEWCOMERS = st.tuples(
    st.sampled_from((0, 0, 1)), st.sampled_from("abc"), st.integers(0, 9), st.sampled_from((None, "p1", "p2"))
)


@given(newcomers=st.lists(NEWCOMERS, min_size=MAX_REQUESTS, max_size=40), ends=st.lists(st.integers(0, 99)))
def test_in_a_full_room_the_last_request_of_the_longest_line_gives_way(
    newcomers: list[tuple[int, str, int, str | None]], ends: list[int]
) -> None:
    hall = FullHall()
    for n, (priority, tenant, slo_s, exclusion) in enumerate(newcomers):
        request = LateRequest(
            hall,
            priority=priority,
            tenant=tenant,
            exclusion=exclusion,
            arrival_s=float(n),
            deadline_s=float(n + slo_s),
        )
        full, before = len(hall.room) == MAX_REQUESTS, list(hall.waiting)
        victim = hall.find_victim(request) if full else None
        joined = hall.room.join(request, prefill_s=1.0)
        if joined:
            hall.waiting.append(request)
        assert joined is (victim is not None or not full)
        assert [one for one in before if one not in hall.waiting] == ([] if victim is None else [victim])
        hall.room.reconsider(float(n))
        if n < len(ends) and ends[n] < len(hall.waiting):
            hall.room.leave(hall.waiting.pop(ends[n]))
        assert list(hall.room.members) == hall.waiting


class LevelWithoutShortPath(Level):
    """Takes no advantage of an empty level."""

    def serve(self, tenant: str, tier: str, tokens: float) -> None:
        if (tenant, tier) not in self.lines:
            self._raise_counters(tenant, tier)
        self.find_counters(tier).serve(tenant, tokens)
        self.tier_counters.serve(tier, tokens / self.weights.get(tier, 1))
        self._reorder(tenant, tier)

    def correct(self, tenant: str, tier: str, tokens: float) -> None:
        self.find_counters(tier).charge(tenant, tokens)
        self.tier_counters.charge(tier, tokens / self.weights.get(tier, 1))
        self._reorder(tenant, tier)


TENANTS, TIERS = st.sampled_from("abc"), st.sampled_from("xy")
STEPS = st.one_of(
    st.tuples(st.just("join"), TENANTS, TIERS, TOKENS),
    st.tuples(st.just("send"), TENANTS, TIERS, TOKENS),
    st.tuples(st.just("release"), TENANTS, TIERS, TOKENS),
    st.tuples(st.just("leave"), TENANTS, TIERS, TOKENS),
    st.tuples(st.just("end"), TENANTS, TIERS, TOKENS),
)


def follow_steps(steps: list[tuple[str, str, str, int]]) -> list[object]:
    """Who leaves, and the counters after each step."""
    hall, seen = Hall(), list[object]()
    hall.room.set_weights({"x": 3})
    requests = list[Request]()
    for number, (kind, tenant, tier, tokens) in enumerate(steps):
        request = Request(
            hall, tenant=tenant, tier=tier, prompt_tokens=tokens, predicted=7, arrival_s=float(number)
        )
        if kind == "join":
            requests.append(request)
            hall.join(request)
        elif kind == "send":  # without waiting
            account = open_account(tokens, output_tokens=7)
            charge = hall.room.charge(account, priority=0, tenant=tenant, tier=tier)
            hall.in_flight.append((charge, request))
        elif kind == "release":
            left = hall.release_one()
            seen.append(None if left is None else left.arrival_s)
        elif kind == "leave" and requests:  # the client has left
            hall.room.leave(requests.pop(tokens % len(requests)))
        elif kind == "end" and hall.in_flight:
            charge, _ = hall.in_flight.pop(tokens % len(hall.in_flight))
            hall.room.close_charge(charge, Tokens(tokens, tokens % 11))
        counters = [hall.room.find_counters(0, one) for one in "xy"]
        seen += [[counter[name] for name in "abc"] for counter in counters]
        seen += [hall.room.find_tier_counters(0)[one] for one in "xy"]
    return seen


@given(steps=st.lists(STEPS, max_size=60))
def test_counters_and_order_are_the_same_without_the_short_path_of_an_empty_level(
    steps: list[tuple[str, str, str, int]],
) -> None:
    seen = follow_steps(steps)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting_room, "Level", LevelWithoutShortPath)
        assert follow_steps(steps) == seen


@given(requests=st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 9)), max_size=40))
def test_a_request_that_nobody_waits_beside_is_charged_in_one_step_as_in_three(
    requests: list[tuple[str, int]],
) -> None:
    quick, slow = TokenCounters(), TokenCounters()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(token_counters, "MAX_IDLE_TENANTS", 3)
        for tenant, tokens in requests:
            quick.serve_alone(tenant, tokens)
            slow.raise_to_waiting(tenant, None)
            slow.serve(tenant, tokens)
            slow.forget_idle(())
            assert len(quick) == len(slow)
            assert [quick[name] for name in "abcdef"] == [slow[name] for name in "abcdef"]
