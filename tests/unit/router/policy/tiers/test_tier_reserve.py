"""The reserve of a tier: instances that are kept ready for it, and when others may use them."""

from dataclasses import replace

import pytest

from fulcrum_core.values import Role
from fulcrum_router.policy.instance_record import InstanceRecord
from fulcrum_router.policy.journey import Action, Journey, JourneyContext
from fulcrum_router.policy.kv_pairs.pairs import TransferPairs
from fulcrum_router.policy.tiers.tier_reserve import IDLE_S, Reserve, TierReserve
from fulcrum_router.policy.waiting.waiter import LeaveResult
from tests.unit.router.builders import PREFILL, FakeFleet, instance, work

LONG, SHORT = 500, 50
"""Tokens of prompts that take 0.5 and 0.05 s."""


def four_instances(*queued_s: float) -> list[InstanceRecord]:
    return [
        instance(f"p{number}", role=Role.PREFILL, queued_s=seconds) for number, seconds in enumerate(queued_s)
    ]


def reserve_of(**fractions: float) -> TierReserve:
    reserve = TierReserve()
    reserve.set_reserves({tier: Reserve(fraction) for tier, fraction in fractions.items()})
    for tier in fractions:
        reserve.record_arrival(tier, 0.0)
    return reserve


@pytest.mark.parametrize(
    ("reserve", "queued_s", "tier", "tokens", "kept"),
    [
        pytest.param(reserve_of(gold=0.25), (0, 0, 2, 2), "free", LONG, (), id="one is spare besides"),
        pytest.param(reserve_of(gold=0.25), (0, 2, 2, 2), "free", LONG, ("p0",), id="the last spare one"),
        pytest.param(reserve_of(gold=0.25), (0, 2, 2, 2), "free", SHORT, (), id="short prompts are lent to"),
        pytest.param(
            reserve_of(gold=0.25), (2, 2, 2, 2), "free", LONG, ("p0", "p1", "p2", "p3"), id="none is spare"
        ),
        pytest.param(reserve_of(gold=0.3), (0, 0, 2, 2), "free", LONG, ("p0", "p1"), id="rounded up"),
        pytest.param(reserve_of(gold=1.0), (0, 0, 0, 0), "free", LONG, (), id="one is for everybody"),
        pytest.param(reserve_of(gold=0.25), (0, 2, 2, 2), "gold", LONG, (), id="its own tier"),
        pytest.param(
            reserve_of(gold=0.25, silver=0.25),
            (0, 0, 2, 2),
            "gold",
            LONG,
            (),
            id="two tiers, one may use one",
        ),
        pytest.param(
            reserve_of(gold=0.25, silver=0.25), (0, 0, 2, 2), "free", LONG, ("p0", "p1"), id="two tiers"
        ),
        pytest.param(
            reserve_of(gold=1.5, silver=1.5), (0, 0, 0, 2), "gold", LONG, (), id="above 1: in proportion"
        ),
    ],
)
def test_prompts_leave_as_many_instances_ready_as_other_tiers_have_reserved(
    reserve: TierReserve, queued_s: tuple[float, ...], tier: str, tokens: int, kept: tuple[str, ...]
) -> None:
    assert reserve.list_kept(four_instances(*queued_s), tier, tokens=tokens, now_s=0.0) == kept


def test_the_reserve_of_a_tier_without_requests_is_lent_and_is_back_with_the_next_one() -> None:
    reserve, instances = reserve_of(gold=0.25), four_instances(0, 2, 2, 2)
    found = [
        reserve.list_kept(instances, "free", tokens=LONG, now_s=now_s) for now_s in (IDLE_S, IDLE_S + 1.0)
    ]
    reserve.record_arrival("gold", IDLE_S + 1.0)
    found.append(reserve.list_kept(instances, "free", tokens=LONG, now_s=IDLE_S + 1.0))
    assert found == [("p0",), (), ("p0",)]


@pytest.mark.parametrize(
    ("queued_s", "waiting", "tier", "tokens", "kept"),
    [
        pytest.param((2, 2, 2, 2), "", "free", LONG, (), id="one may wait: three others have none"),
        pytest.param((2, 2, 2, 2), "p0 p1 p2", "free", LONG, ("p3",), id="the last one without"),
        pytest.param((2, 2, 2, 0.1), "p0 p1 p2", "free", LONG, (), id="the last one is nearly idle"),
        pytest.param((2, 2, 2, 2), "p0 p1 p2", "free", SHORT, (), id="short prompts may wait"),
        pytest.param((2, 2, 2, 2), "p0 p1 p2", "gold", LONG, (), id="its own tier"),
        pytest.param((2, 2, 2, 2), "p0 p1 p2 p3", "free", LONG, ("p0", "p1", "p2", "p3"), id="none without"),
    ],
)
def test_no_prompt_waits_in_as_many_instances_as_lend_an_idle_reserve(
    queued_s: tuple[float, ...], waiting: str, tier: str, tokens: int, kept: tuple[str, ...]
) -> None:
    reserve, instances = reserve_of(gold=0.25), four_instances(*queued_s)
    for one in instances:
        if one.name in waiting.split():
            one.ledger.add_prefill(tokens=LONG, predicted_s=0.5, now_s=IDLE_S + 1.0)
    assert reserve.list_lent(instances, tier, tokens=tokens, now_s=IDLE_S + 1.0) == kept


@pytest.mark.parametrize(
    ("tier", "stay_s", "held", "now_s", "kept"),
    [
        pytest.param("free", 1.0, 0.0, 0.0, 0.75, id="the tiers send requests: all is kept"),
        pytest.param("free", 8.0, 1.0, 100.0, 0.0, id="idle: lent to an answer that ends in time"),
        pytest.param("free", 9.0, 0.7, 100.0, 0.0, id="idle: lent to a longer one while others end in time"),
        pytest.param("free", 9.0, 0.8, 100.0, 0.25, id="idle: not lent if too much is still used by then"),
        pytest.param("free", 1e6, 0.8, 100.0, 0.25, id="without a time to reclaim it is lent to any answer"),
        pytest.param("gold", 9.0, 0.8, 100.0, 0.0, id="its own tier"),
    ],
)
def test_the_idle_reserve_of_decode_is_lent_as_far_as_it_is_free_again_in_time(
    tier: str, stay_s: float, held: float, now_s: float, kept: float
) -> None:
    reserve = TierReserve()
    reserve.set_reserves({"gold": Reserve(0.25, reclaim_within_s=8.0), "silver": Reserve(0.5)})
    for name in ("gold", "silver"):
        reserve.record_arrival(name, 0.0)
    assert (
        reserve.find_kept_decode(tier, stay_s=stay_s, now_s=now_s, predict_kv_in_use=lambda _after_s: held)
        == kept
    )


@pytest.mark.parametrize(
    ("reclaim_within_s", "output_limit", "kept"),
    [
        pytest.param(2.1, 0, 0.0, id="twice the 100 tokens that are expected take 2 s"),
        pytest.param(1.9, 0, 0.5, id="that is too long"),
        pytest.param(1.9, 150, 0.0, id="it may not have as many"),
    ],
)
def test_an_answer_may_last_twice_as_long_as_expected(
    reclaim_within_s: float, output_limit: int, kept: float
) -> None:
    fleet = FakeFleet([*four_instances(0, 0, 0, 0), instance("d", role=Role.DECODE)])
    context: JourneyContext[InstanceRecord] = JourneyContext(fleet, TransferPairs())
    context.tier_reserve.set_reserves({"gold": Reserve(0.5, reclaim_within_s)})
    request = work(10, tier="free", output_limit=output_limit)
    assert context.find_kept_decode(request, 100.0, 0.0) == kept


@pytest.mark.parametrize(
    ("queued_s", "tier", "tokens", "left"),
    [
        pytest.param(
            (0, 0, 2, 3), "free", LONG, ["p1", "p2", "p3"], id="the one with the least work is kept"
        ),
        pytest.param((0, 0, 2, 3), "free", SHORT, ["p0", "p1", "p2", "p3"], id="a short prompt may use all"),
        pytest.param((0, 0, 2, 3), "gold", LONG, ["p0", "p1", "p2", "p3"], id="its own tier"),
    ],
)
def test_admission_sees_the_instances_that_the_reserves_of_others_leave(
    queued_s: tuple[float, ...], tier: str, tokens: int, left: list[str]
) -> None:
    found = reserve_of(gold=0.25).list_left(tuple(four_instances(*queued_s)), tier, tokens=tokens, now_s=0.0)
    assert sorted(one.name for one in found) == left


def test_for_admission_an_instance_that_computes_for_the_tier_is_its_reserve() -> None:
    reserve, instances = reserve_of(gold=0.25), four_instances(0, 2, 2, 2)
    reserve.begin("gold", "p3")
    found = reserve.list_left(tuple(instances), "free", tokens=LONG, now_s=0.0)
    assert sorted(one.name for one in found) == ["p0", "p1", "p2"]


@pytest.mark.parametrize("reverse", [False, True])
def test_for_admission_a_prompt_is_short_where_the_hardware_is_fast(*, reverse: bool) -> None:
    instances = four_instances(0, 0, 2, 3)
    instances[0].prefill_model = replace(PREFILL, c1=10 * PREFILL.c1)
    found = reserve_of(gold=0.5).list_left(
        tuple(instances[::-1] if reverse else instances), "free", tokens=SHORT, now_s=0.0
    )
    assert sorted(one.name for one in found) == ["p1", "p2", "p3"]


def test_an_instance_that_computes_for_the_tier_is_its_reserve() -> None:
    reserve, instances = reserve_of(gold=0.25), four_instances(0, 2, 2, 2)
    kept = [reserve.begin("free", "p1"), reserve.begin("gold", "p1")]
    kept.append(bool(reserve.list_kept(instances, "free", tokens=LONG, now_s=0.0)))
    reserve.end("p1")
    kept.append(bool(reserve.list_kept(instances, "free", tokens=LONG, now_s=0.0)))
    assert kept == [False, True, False, True]


def test_a_long_prompt_of_another_tier_waits_and_one_of_the_tier_does_not() -> None:
    fleet = FakeFleet([*four_instances(0, 2, 2, 2), instance("d", role=Role.DECODE)])
    context: JourneyContext[InstanceRecord] = JourneyContext(fleet, TransferPairs())
    context.waiting_room.prefill_ahead_s = 0.5
    context.tier_reserve.set_reserves({"gold": Reserve(0.25)})
    context.tier_reserve.record_arrival("gold", 0.0)
    free, gold = (
        Journey(context, work(LONG)._replace(tier=tier, priority=priority, tenant=tier))
        for tier, priority in (("free", 0), ("gold", 1))
    )
    began = free.begin(0.0), gold.begin(0.0)
    context.waiting_room.reconsider(0.0)
    assert (began, gold.prefill_instance and gold.prefill_instance.name) == (
        (Action.WAIT, Action.SEND_PREFILL),
        "p0",
    )


def test_a_long_prompt_that_waits_for_the_reserve_lets_short_ones_of_its_tier_pass() -> None:
    fleet = FakeFleet([*four_instances(0, 2, 2, 2), instance("d", role=Role.DECODE)])
    context: JourneyContext[InstanceRecord] = JourneyContext(fleet, TransferPairs())
    context.waiting_room.prefill_ahead_s = 0.5
    context.tier_reserve.set_reserves({"gold": Reserve(0.25)})
    context.tier_reserve.record_arrival("gold", 0.0)
    waiting = [
        Journey(context, work(tokens)._replace(tier="free", tenant=f"{tokens}")) for tokens in (LONG, SHORT)
    ]
    assert [journey.begin(0.0) for journey in waiting] == [Action.WAIT, Action.SEND_PREFILL]


@pytest.mark.parametrize("unusable", ["broken", "refuses"])
def test_an_instance_that_gets_no_prompts_lends_no_reserve(unusable: str) -> None:
    fleet = FakeFleet([*four_instances(0, 0.3, 0.3, 0.3), instance("d", role=Role.DECODE)])
    context: JourneyContext[InstanceRecord] = JourneyContext(fleet, TransferPairs())
    context.waiting_room.prefill_ahead_s = 0.5
    context.tier_reserve.set_reserves({"gold": Reserve(0.25)})
    if unusable == "broken":
        context.pairs.broken_prefill_instances = ("p0",)
    else:
        context.shed_until_s = {"p0": 10.0}
    began = [Journey(context, work(LONG)._replace(tier="free", tenant="a")).begin(0.0) for _ in range(3)]
    assert began == [Action.SEND_PREFILL, Action.SEND_PREFILL, Action.WAIT]


def test_a_prompt_that_waits_for_a_lent_reserve_ends_the_round() -> None:
    """All others are the same for it: to ask up to 16 lines of each tier would stop the router."""
    fleet = FakeFleet([*four_instances(0.3, 0.3), instance("d", role=Role.DECODE)])
    context: JourneyContext[InstanceRecord] = JourneyContext(fleet, TransferPairs())
    context.waiting_room.prefill_ahead_s = 0.5
    context.tier_reserve.set_reserves({"gold": Reserve(0.5)})
    first, second = (
        Journey(context, work(LONG)._replace(tier="free", tenant=tenant)) for tenant in ("a", "b")
    )
    assert (first.begin(0.0), second.begin(0.0)) == (Action.SEND_PREFILL, Action.WAIT)
    result = second.try_to_leave(0.0, late=False, held_for_long=False, due=False, only_deflected=False)
    assert result is LeaveResult.BLOCKED
