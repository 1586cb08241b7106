"""Every branch of Arrow's Algorithm 1."""

import math

import pytest

from fulcrum_core.latency import DecodeModel
from fulcrum_core.values import Role
from fulcrum_router.policy import (
    Dispatch,
    DispatchDecision,
    DispatchReason,
    FlipProposal,
    FlipProposalRules,
    NoInstance,
    choose_decode,
    choose_prefill,
    compute_decode_load,
)
from tests.unit.router.builders import OTHER_MODEL, SLO, FakeInstance, instance

FLIPS = FlipProposalRules(enabled=True, max_decode_load=0.5, to_decode_cooldown_until_s=100.0)
LATE = 3.0
"""Seconds of queue that no prefill SLO bears."""


def within(name: str, cost: tuple[float, float]) -> Dispatch:
    return Dispatch(name, DispatchReason.WITHIN_SLO, cost)


def least(name: str, cost: tuple[float, float]) -> Dispatch:
    return Dispatch(name, DispatchReason.LEAST_COST, cost)


def rounded(decision: DispatchDecision) -> DispatchDecision:
    """Without the float dust in its costs."""
    if isinstance(decision, FlipProposal):
        fallback = rounded(decision.fallback)
        assert isinstance(fallback, Dispatch)
        return decision._replace(fallback=fallback)
    if isinstance(decision, Dispatch):
        first, second = decision.cost
        return decision._replace(cost=(round(first, 6), round(second, 6)))
    return decision


PREFILL_CASES = [
    pytest.param(
        [instance("p1", queued_s=0.5), instance("p2", queued_s=0.2), instance("d1")],
        within("p2", (0, 0.3)),
        id="the shortest queue of those within the SLO takes it",
    ),
    pytest.param(
        [instance("p1", decoding=10), instance("p2", queued_s=0.8), instance("d1")],
        within("p2", (0, 0.9)),
        id="an instance clean of decode work goes before a shorter queue",
    ),
    pytest.param(
        [instance("p1", decoding=10), instance("p2", queued_s=0.95), instance("d1")],
        within("p1", (10, 0.1)),
        id="but not where it would miss the SLO",
    ),
    pytest.param(
        [instance("p2"), instance("p1"), instance("d1")],
        within("p1", (0, 0.1)),
        id="equal costs go to the first by name",
    ),
    pytest.param(
        [instance("p1", serving=False), instance("p2", queued_s=0.5), instance("d1")],
        within("p2", (0, 0.6)),
        id="an instance that does not serve gets nothing",
    ),
    pytest.param(
        [instance("x", role=Role.BOTH)],
        within("x", (0, 0.1)),
        id="a single instance serves both",
    ),
    pytest.param(
        [instance("d1"), instance("d2")],
        NoInstance("no serving prefill instance whose KV a decode instance can read"),
        id="without a prefill instance nobody prefills",
    ),
    pytest.param(
        [instance("p1", identity=OTHER_MODEL), instance("p2", queued_s=0.5), instance("d1")],
        within("p2", (0, 0.6)),
        id="KV that no decode instance can read is of no use",
    ),
    pytest.param(
        [instance("p1", identity=None), instance("d1")],
        within("p1", (0, 0.1)),
        id="an identity that is not known is not held against anybody",
    ),
    pytest.param(
        [instance("p1", identity=OTHER_MODEL)],
        within("p1", (0, 0.1)),
        id="with no decode instance at all the prefill instance decodes, too",
    ),
    pytest.param(
        [instance("p1", queued_s=LATE), instance("p2", queued_s=LATE + 1), instance("d1"), instance("d2")],
        FlipProposal(
            Role.PREFILL,
            least("p1", (0, LATE + 0.1)),
            "2 prefill instances, best TTFT 3.100 s; decode load 0.00 is below 0.5",
        ),
        id="when nobody meets the SLO and decode is idle a flip is wanted",
    ),
    pytest.param(
        [instance("p1", queued_s=LATE), instance("d1"), instance("d2", decoding=5, itl_s=0.06)],
        least("p1", (0, LATE + 0.1)),
        id="no flip while decode is loaded",
    ),
    pytest.param(
        [instance("p1", queued_s=LATE), instance("d1"), instance("d2", decoding=5)],
        least("p1", (0, LATE + 0.1)),
        id="no flip while the decode load cannot be told",
    ),
    pytest.param(
        [instance("p1", queued_s=LATE), instance("d1")],
        least("p1", (0, LATE + 0.1)),
        id="the last decode instance is not asked for",
    ),
]


@pytest.mark.parametrize(("instances", "expected"), PREFILL_CASES)
def test_prefill_goes_to_the_cheapest_instance_within_the_slo(
    instances: list[FakeInstance], expected: DispatchDecision
) -> None:
    assert rounded(choose_prefill(instances, 100, SLO, rules=FLIPS)) == expected


def test_no_flip_is_proposed_when_flips_are_disabled() -> None:
    late = [instance("p1", queued_s=LATE), instance("d1"), instance("d2")]
    assert rounded(choose_prefill(late, 100, SLO)) == least("p1", (0, LATE + 0.1))


def test_a_prompt_too_long_for_the_slo_on_any_instance_proposes_no_flip() -> None:
    late = [instance("p1", queued_s=LATE), instance("d1"), instance("d2")]
    assert rounded(choose_prefill(late, 1500, SLO, rules=FLIPS)) == least("p1", (0, LATE + 1.5))


def test_an_excluded_prefill_instance_is_not_chosen() -> None:
    fleet = [instance("p1"), instance("p2", queued_s=0.5), instance("d1")]
    assert rounded(choose_prefill(fleet, 100, SLO, exclude=("p1",))) == within("p2", (0, 0.6))


DECODE_CASES = [
    pytest.param(
        [instance("p1"), instance("d1", decoding=500), instance("d2", decoding=200)],
        within("d2", (0, -3700)),
        id="the emptiest batch within the SLO takes it",
    ),
    pytest.param(
        [instance("d1", prefilling=50, queued_s=0.1), instance("d2", decoding=3000)],
        within("d2", (0, -900)),
        id="an instance clean of prefill work goes before an emptier batch",
    ),
    pytest.param(
        [instance("d1", prefilling=50, queued_s=0.1), instance("d2", decoding=3950)],
        within("d1", (50, -3900)),
        id="but not where it would miss the SLO",
    ),
    pytest.param(
        [instance("p1"), instance("p2", decoding=5)],
        Dispatch("p1", DispatchReason.OTHER_ROLE, (0, -3900)),
        id="if only prefill instances are left the emptiest of them decodes",
    ),
    pytest.param([], NoInstance("no serving instance"), id="nobody is nobody"),
    pytest.param(
        [instance("p1"), instance("p2"), instance("d1", decoding=9000), instance("d2", decoding=8000)],
        FlipProposal(
            Role.DECODE,
            least("d2", (0, 4100)),
            "2 decode instances, least over by 4100 tokens; 2 prefill instances, cooldown over",
        ),
        id="when every batch is too large a flip is wanted",
    ),
    pytest.param(
        [instance("p1"), instance("d1", decoding=9000)],
        least("d1", (0, 5100)),
        id="the last prefill instance is not asked for",
    ),
]


@pytest.mark.parametrize(("instances", "expected"), DECODE_CASES)
def test_decode_goes_to_the_cheapest_instance_within_the_slo(
    instances: list[FakeInstance], expected: DispatchDecision
) -> None:
    assert rounded(choose_decode(instances, 100, SLO, rules=FLIPS, now_s=100.0)) == expected


def test_no_flip_to_decode_is_proposed_during_the_cooldown() -> None:
    fleet = [instance("p1"), instance("p2"), instance("d1", decoding=9000)]
    assert rounded(choose_decode(fleet, 100, SLO, rules=FLIPS, now_s=99.9)) == least("d1", (0, 5100))


def test_decode_stays_on_a_prefill_instance_that_has_become_a_decode_instance() -> None:
    flipped = instance("p1", role=Role.DECODE, decoding=9000)
    chosen = choose_decode([flipped, instance("d1")], 100, SLO, prefilled_on=flipped)
    assert rounded(chosen) == Dispatch("p1", DispatchReason.PREFILLED_HERE, (0, 5100))


@pytest.mark.parametrize(
    ("flipped", "exclude"),
    [
        pytest.param(instance("p1", role=Role.DECODE, serving=False), (), id="it serves no more"),
        pytest.param(instance("p1", role=Role.DECODE), ("p1",), id="it has failed already"),
        pytest.param(instance("p1"), (), id="it still plays prefill"),
    ],
)
def test_decode_leaves_a_prefill_instance_that_cannot_decode_now(
    flipped: FakeInstance, exclude: tuple[str, ...]
) -> None:
    chosen = choose_decode([flipped, instance("d1")], 100, SLO, prefilled_on=flipped, exclude=exclude)
    assert rounded(chosen) == within("d1", (0, -3900))


def test_decode_goes_only_to_instances_that_can_read_the_kv() -> None:
    source, stranger = instance("p1"), instance("d1", identity=OTHER_MODEL)
    fleet = [source, stranger, instance("d2", decoding=3000)]
    assert rounded(choose_decode(fleet, 100, SLO, prefilled_on=source)) == within("d2", (0, -900))


def test_no_instance_that_can_read_the_kv_has_its_own_reason() -> None:
    source = instance("p1", serving=False)
    chosen = choose_decode([instance("d1", identity=OTHER_MODEL)], 100, SLO, prefilled_on=source)
    assert rounded(chosen) == NoInstance("no serving instance that can read the prefill's KV")


def test_equal_costs_go_to_the_instance_with_the_fewest_requests() -> None:
    free = DecodeModel(intercept=0.01, slope=0.0)
    busy, idle = instance("d1", decoding=10), instance("d2")
    busy.decode_model = idle.decode_model = free
    assert rounded(choose_decode([busy, idle], 100, SLO)) == Dispatch(
        "d2", DispatchReason.WITHIN_SLO, (0, -math.inf)
    )


@pytest.mark.parametrize(
    ("decode_instances", "load"),
    [
        pytest.param([], None, id="no decode instance: cannot tell"),
        pytest.param([instance("d1")], 0.0, id="idle is no load"),
        pytest.param([instance("d1", decoding=5)], None, id="busy without a measurement: cannot tell"),
        pytest.param([instance("d1", decoding=5, itl_s=math.nan)], None, id="NaN is no measurement"),
        pytest.param([instance("d1", itl_s=0.05), instance("d2")], 0.5, id="the mean over all, to the SLO"),
    ],
)
def test_decode_load_is_the_mean_itl_over_the_slo(
    decode_instances: list[FakeInstance], load: float | None
) -> None:
    assert compute_decode_load(decode_instances, SLO) == load
