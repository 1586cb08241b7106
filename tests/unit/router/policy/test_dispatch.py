"""Every branch of the choice of a prefill and of a decode instance (Arrow's Algorithm 1)."""

import math

import pytest

from fulcrum_core.latency import DecodeModel, PrefillModel
from fulcrum_core.values import Role
from fulcrum_router.policy import (
    Candidates,
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
from fulcrum_router.policy.instance_record import InstanceRecord
from tests.unit.router.builders import OTHER_MODEL, SLO, instance, work

FLIPS = FlipProposalRules(enabled=True, max_decode_load=0.5, to_decode_cooldown_until_s=100.0)
LATE = 3.0
"""Seconds of queued prefill with which the TTFT objective cannot be met."""


def within(name: str, cost: tuple[float, float]) -> Dispatch:
    return Dispatch(name, DispatchReason.WITHIN_SLO, cost)


def least(name: str, cost: tuple[float, float]) -> Dispatch:
    return Dispatch(name, DispatchReason.LEAST_COST, cost)


def rounded(decision: DispatchDecision) -> DispatchDecision:
    """The decision with its costs rounded."""
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
        id="of the instances within the SLO, the one with the shortest queue",
    ),
    pytest.param(
        [instance("p1", decoding=10), instance("p2", queued_s=0.8), instance("d1")],
        within("p2", (0, 0.9)),
        id="an instance without decode work before one with a shorter queue",
    ),
    pytest.param(
        [instance("p1", decoding=10), instance("p2", queued_s=0.95), instance("d1")],
        within("p1", (0.0101, 0.1)),
        id="an instance with decode work if the others miss the SLO",
    ),
    pytest.param(
        [instance("p2"), instance("p1"), instance("d1")],
        within("p1", (0, 0.1)),
        id="of equal costs, the first by name",
    ),
    pytest.param(
        [instance("p1", serving=False), instance("p2", queued_s=0.5), instance("d1")],
        within("p2", (0, 0.6)),
        id="never an instance that does not serve",
    ),
    pytest.param(
        [instance("x", role=Role.BOTH)],
        within("x", (0, 0.1)),
        id="a single instance that serves both roles",
    ),
    pytest.param(
        [instance("d1"), instance("d2")],
        NoInstance("no serving prefill instance whose KV a decode instance can read"),
        id="no instance if none has the prefill role",
    ),
    pytest.param(
        [instance("p1", identity=OTHER_MODEL), instance("p2", queued_s=0.5), instance("d1")],
        within("p2", (0, 0.6)),
        id="only instances whose KV a decode instance can read",
    ),
    pytest.param(
        [instance("p1", identity=None), instance("d1")],
        within("p1", (0, 0.1)),
        id="an instance of unknown identity, which counts as compatible",
    ),
    pytest.param(
        [instance("p1", identity=OTHER_MODEL)],
        within("p1", (0, 0.1)),
        id="an instance of any identity if there is no decode instance",
    ),
    pytest.param(
        [instance("p1", queued_s=LATE), instance("p2", queued_s=LATE + 1), instance("d1"), instance("d2")],
        FlipProposal(
            Role.PREFILL,
            least("p1", (0, LATE + 0.1)),
            "the best of 2 prefill instances predicts a TTFT of 3.11 s; decode load 0.00 is below 0.5",
        ),
        id="a flip is proposed if no instance meets the SLO and decode is idle",
    ),
    pytest.param(
        [instance("p1", queued_s=LATE), instance("d1"), instance("d2", decoding=5, itl_s=0.06)],
        least("p1", (0, LATE + 0.1)),
        id="no flip while decode is loaded",
    ),
    pytest.param(
        [instance("p1", queued_s=LATE), instance("d1"), instance("d2", decoding=5)],
        least("p1", (0, LATE + 0.1)),
        id="no flip while the decode load is unknown",
    ),
    pytest.param(
        [instance("p1", queued_s=LATE), instance("d1")],
        least("p1", (0, LATE + 0.1)),
        id="no flip of the last decode instance",
    ),
]


@pytest.mark.parametrize(("instances", "expected"), PREFILL_CASES)
def test_prefill_goes_to_the_cheapest_instance_within_the_slo(
    instances: list[InstanceRecord], expected: DispatchDecision
) -> None:
    assert rounded(choose_prefill(Candidates(instances), work(100), now_s=0.0, rules=FLIPS)) == expected


@pytest.mark.parametrize(
    ("now_s", "reason"),
    [
        pytest.param(0.8, DispatchReason.WITHIN_SLO, id="0.2 s are left, and 0.1 s are needed"),
        pytest.param(0.95, DispatchReason.LEAST_COST, id="0.05 s are left"),
    ],
)
def test_time_since_arrival_counts_against_the_ttft_objective(now_s: float, reason: DispatchReason) -> None:
    decision = choose_prefill(Candidates([instance("p1"), instance("d1")]), work(100), now_s=now_s)
    assert rounded(decision) == Dispatch("p1", reason, (0, 0.1))


def test_cached_prompt_tokens_cost_no_prefill_time() -> None:
    fleet = [instance("p1"), instance("p2", queued_s=0.02), instance("d1")]
    decision = choose_prefill(Candidates(fleet), work(100, cached_tokens={"p2": 64}), now_s=0.0)
    assert rounded(decision) == within("p2", (0, 0.056))


def test_no_flip_is_proposed_when_flips_are_disabled() -> None:
    late = [instance("p1", queued_s=LATE), instance("d1"), instance("d2")]
    assert rounded(choose_prefill(Candidates(late), work(100), now_s=0.0)) == least("p1", (0, LATE + 0.1))


def test_a_prompt_too_long_for_the_slo_on_any_instance_proposes_no_flip() -> None:
    late = [instance("p1", queued_s=LATE), instance("d1"), instance("d2")]
    assert rounded(choose_prefill(Candidates(late), work(1500), now_s=0.0, rules=FLIPS)) == least(
        "p1", (0, LATE + 1.5)
    )


@pytest.mark.parametrize(
    ("tokens", "kind"),
    [
        pytest.param(1000, FlipProposal, id="1.0 s of prefill meets 1 s on an idle instance"),
        pytest.param(1001, Dispatch, id="a longer prefill would miss the SLO there, too"),
    ],
)
def test_prefill_proposes_a_flip_only_if_an_idle_instance_meets_the_slo(tokens: int, kind: type) -> None:
    fleet = [instance("p1", queued_s=LATE), instance("d1"), instance("d2")]
    assert isinstance(choose_prefill(Candidates(fleet), work(tokens), now_s=0.0, rules=FLIPS), kind)


def test_one_instance_that_is_fast_enough_suffices_to_propose_a_flip() -> None:
    fast = instance("d2", prefill=PrefillModel(c0=0.0, c1=1e-4, c2=0.0))
    fleet = [instance("p1", queued_s=LATE), instance("d1"), fast]
    assert isinstance(choose_prefill(Candidates(fleet), work(5000), now_s=0.0, rules=FLIPS), FlipProposal)


def test_an_excluded_prefill_instance_is_not_chosen() -> None:
    fleet = [instance("p1"), instance("p2", queued_s=0.5), instance("d1")]
    assert rounded(choose_prefill(Candidates(fleet), work(100), now_s=0.0, exclude=("p1",))) == within(
        "p2", (0, 0.6)
    )


DECODE_CASES = [
    pytest.param(
        [instance("p1"), instance("d1", decoding=500), instance("d2", decoding=200)],
        within("d2", (0, -0.037)),
        id="of the instances within the SLO, the one with the smallest batch",
    ),
    pytest.param(
        [instance("d1", prefilling=50, queued_s=0.1), instance("d2", decoding=3000)],
        within("d2", (0, -0.009)),
        id="an instance without prefill work before one with a smaller batch",
    ),
    pytest.param(
        [instance("d1", prefilling=50, queued_s=0.1), instance("d2", decoding=3950)],
        within("d1", (0.1, -0.039)),
        id="an instance with prefill work if the others miss the SLO",
    ),
    pytest.param(
        [instance("p1"), instance("p2", decoding=5)],
        Dispatch("p1", DispatchReason.OTHER_ROLE, (0, -0.039)),
        id="the prefill instance with the smallest batch if no decode instance serves",
    ),
    pytest.param([], NoInstance("no serving instance"), id="no instance if none serves"),
    pytest.param(
        [instance("p1"), instance("p2"), instance("d1", decoding=9000), instance("d2", decoding=8000)],
        FlipProposal(
            Role.DECODE,
            least("d2", (0, 0.041)),
            "the best of 2 decode instances predicts an ITL of 91 ms; "
            "2 prefill instances serve, and the cooldown has ended",
        ),
        id="a flip is proposed if every batch is too large",
    ),
    pytest.param(
        [instance("p1"), instance("d1", decoding=9000)],
        least("d1", (0, 0.051)),
        id="no flip of the last prefill instance",
    ),
]


@pytest.mark.parametrize(("instances", "expected"), DECODE_CASES)
def test_decode_goes_to_the_cheapest_instance_within_the_slo(
    instances: list[InstanceRecord], expected: DispatchDecision
) -> None:
    assert rounded(choose_decode(Candidates(instances), work(100), rules=FLIPS, now_s=100.0)) == expected


@pytest.mark.parametrize(
    ("tokens", "kind"),
    [
        pytest.param(3999, FlipProposal, id="the context fits an idle instance within 50 ms"),
        pytest.param(4001, Dispatch, id="the context is too long for any batch"),
    ],
)
def test_decode_proposes_a_flip_only_if_an_idle_instance_fits_the_context(tokens: int, kind: type) -> None:
    fleet = [instance("p1"), instance("p2"), instance("d1", decoding=3999)]
    assert isinstance(choose_decode(Candidates(fleet), work(tokens), rules=FLIPS, now_s=100.0), kind)


def test_no_flip_to_decode_is_proposed_during_the_cooldown() -> None:
    fleet = [instance("p1"), instance("p2"), instance("d1", decoding=9000)]
    assert rounded(choose_decode(Candidates(fleet), work(100), rules=FLIPS, now_s=99.9)) == least(
        "d1", (0, 0.051)
    )


def test_each_choice_of_a_request_counts_in_the_steps_of_decode() -> None:
    candidates = Candidates([instance("d1")])
    reasons = [
        getattr(choose_decode(candidates, work(1_000, choices=n), now_s=0.0), "reason", None) for n in (1, 8)
    ]
    assert reasons == [DispatchReason.WITHIN_SLO, DispatchReason.LEAST_COST]


def test_decode_stays_on_a_prefill_instance_that_has_become_a_decode_instance() -> None:
    flipped = instance("p1", role=Role.DECODE, decoding=9000)
    chosen = choose_decode(Candidates([flipped, instance("d1")]), work(100), now_s=0.0, prefilled_on=flipped)
    assert rounded(chosen) == Dispatch("p1", DispatchReason.PREFILLED_HERE, (0, 0.051))


@pytest.mark.parametrize(
    ("flipped", "exclude"),
    [
        pytest.param(instance("p1", role=Role.DECODE, serving=False), (), id="that no longer serves"),
        pytest.param(instance("p1", role=Role.DECODE), ("p1",), id="that has failed the request"),
        pytest.param(instance("p1"), (), id="that still has the prefill role"),
    ],
)
def test_decode_leaves_a_prefill_instance_that_cannot_decode_now(
    flipped: InstanceRecord, exclude: tuple[str, ...]
) -> None:
    chosen = choose_decode(
        Candidates([flipped, instance("d1")]), work(100), now_s=0.0, prefilled_on=flipped, exclude=exclude
    )
    assert rounded(chosen) == within("d1", (0, -0.039))


class _CountedName(str):
    """A name that counts how often it is compared with another one."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        _CountedName.compared += 1
        return str.__eq__(self, other)


def test_a_name_is_not_compared_with_those_of_all_excluded_instances() -> None:
    names = [_CountedName(f"p{number:03}") for number in range(400)]
    candidates = Candidates([*map(instance, names), instance("d1")])
    exclude = tuple(_CountedName(name) for name in names[:200])
    _CountedName.compared = 0
    decision = choose_prefill(candidates, work(100), now_s=0.0, exclude=exclude)
    assert isinstance(decision, Dispatch)
    assert decision.instance == "p200"
    assert _CountedName.compared < 4 * len(names)


def test_decode_goes_only_to_instances_that_can_fetch_the_kv() -> None:
    source, incompatible = instance("p1"), instance("d1", identity=OTHER_MODEL)
    fleet = [source, incompatible, instance("d2", decoding=3000)]
    assert rounded(choose_decode(Candidates(fleet), work(100), now_s=0.0, prefilled_on=source)) == within(
        "d2", (0, -0.009)
    )


def test_no_instance_that_can_fetch_the_kv_has_its_own_reason() -> None:
    source = instance("p1", serving=False)
    chosen = choose_decode(
        Candidates([instance("d1", identity=OTHER_MODEL)]), work(100), now_s=0.0, prefilled_on=source
    )
    assert rounded(chosen) == NoInstance("no serving instance that can read the source's KV")


def test_reserved_tokens_count_like_those_in_the_batch() -> None:
    reserved = instance("d1")
    reserved.ledger.reserve(tokens=300)
    chosen = choose_decode(Candidates([reserved, instance("d2", decoding=200)]), work(100), now_s=0.0)
    assert rounded(chosen) == within("d2", (0, -0.037))


def test_an_instance_whose_kv_cache_has_room_comes_first() -> None:
    full, free = instance("d1", decoding=300, reserved=100), instance("d2", decoding=450)
    full.kv_capacity_tokens, free.kv_capacity_tokens = 500, 1_000
    chosen = choose_decode(Candidates([full, free]), work(100), now_s=0.0)
    assert rounded(chosen) == within("d2", (0, -0.0345))


def test_a_request_waits_where_room_becomes_free_first() -> None:
    fuller, full = instance("d1", decoding=700), instance("d2", decoding=450, queued_s=0.1)
    fuller.kv_capacity_tokens = full.kv_capacity_tokens = 500
    chosen = choose_decode(Candidates([fuller, full]), work(100), now_s=0.0)
    assert rounded(chosen) == least("d2", (1.6, 1.5))


def decoding_short(name: str, *, legs: int, max_seqs: int | None = 3) -> InstanceRecord:
    """A decode instance with as many requests of one token, whose engine decodes `max_seqs` together."""
    record = instance(name)
    for _ in range(legs):
        record.ledger.add_decode(tokens=1)
    record.max_seqs = max_seqs
    return record


def test_an_instance_whose_batch_has_a_place_comes_first() -> None:
    full, free = decoding_short("d1", legs=3), instance("d2", decoding=450)
    free.max_seqs = 3
    chosen = choose_decode(Candidates([full, free]), work(100), now_s=0.0)
    assert rounded(chosen) == within("d2", (0, -0.0345))


def test_a_request_waits_where_fewest_wait_for_a_place() -> None:
    fleet = Candidates([decoding_short("d1", legs=6), decoding_short("d2", legs=5)])
    assert rounded(choose_decode(fleet, work(100), now_s=0.0)) == within("d2", (30.0, -0.03895))


def test_a_place_for_a_prompt_that_is_still_computed_is_taken() -> None:
    reserved = decoding_short("d1", legs=2)
    reserved.ledger.reserve(tokens=1)
    chosen = choose_decode(Candidates([reserved, instance("d2", decoding=450)]), work(100), now_s=0.0)
    assert rounded(chosen) == within("d2", (0, -0.0345))


def test_a_full_instance_is_better_than_one_that_fails_and_than_a_long_queue_of_prompts() -> None:
    full = decoding_short("d1", legs=64, max_seqs=64)
    failing, busy = instance("d2", error_share=1.0), instance("d3", queued_s=20.0)
    chosen = choose_decode(Candidates([full, failing, busy]), work(100), now_s=0.0)
    assert rounded(chosen) == within("d1", (0.46875, -0.03836))


@pytest.mark.parametrize(("legs", "error_share"), [(73, 1.0), (120, 1.0), (73, 0.5)])
def test_an_instance_that_fails_does_not_get_the_requests_that_are_too_many(
    legs: int, error_share: float
) -> None:
    full, failing = decoding_short("d1", legs=legs, max_seqs=64), instance("d2", error_share=error_share)
    failing.max_seqs = 64
    chosen = choose_decode(Candidates([full, failing]), work(100), now_s=0.0)
    assert isinstance(chosen, Dispatch)
    assert chosen.instance == "d1"


def test_an_instance_without_a_known_limit_of_its_batch_always_has_a_place() -> None:
    unknown = decoding_short("d1", legs=300, max_seqs=None)
    chosen = choose_decode(Candidates([unknown, instance("d2", decoding=450)]), work(100), now_s=0.0)
    assert rounded(chosen) == within("d1", (0, -0.036))


def test_reservations_propose_no_flip() -> None:
    reserved = instance("d1")
    reserved.ledger.reserve(tokens=4000)
    fleet = Candidates([reserved, instance("p1"), instance("p2")])
    chosen = choose_decode(fleet, work(100), rules=FLIPS, now_s=100.0)
    assert rounded(chosen) == least("d1", (0, 0.001))


@pytest.mark.parametrize("phase", ["p", "d"])
def test_an_engine_that_fails_fast_is_not_the_cheapest(phase: str) -> None:
    failing = instance(f"{phase}1", error_share=0.5)
    busy = instance(f"{phase}2", queued_s=0.1 if phase == "p" else 0.0, decoding=200 if phase == "d" else 0)
    other = instance("d9" if phase == "p" else "p9")
    choose = choose_prefill if phase == "p" else choose_decode
    chosen = choose(Candidates([failing, busy, other]), work(100), now_s=0.0)
    assert isinstance(chosen, Dispatch)
    assert chosen.instance == f"{phase}2"


def test_instances_on_different_hardware_compare_by_time() -> None:
    """The fast one has five times the work, and would still start the prompt and the output sooner."""
    fast_p = instance("p1", queued_s=0.05, prefill=PrefillModel(c0=0.0, c1=1e-4, c2=0.0))
    fast_d = instance("d1", decoding=1000, decode=DecodeModel(intercept=0.002, slope=1e-6))
    slow_p, slow_d = instance("p2", queued_s=0.01), instance("d2", decoding=200)
    candidates = Candidates([fast_p, slow_p, fast_d, slow_d])
    chosen = [choose(candidates, work(100), now_s=0.0) for choose in (choose_prefill, choose_decode)]
    assert [d.instance for d in chosen if isinstance(d, Dispatch)] == ["p1", "d1"]


def test_equal_costs_go_to_the_instance_with_the_fewest_requests() -> None:
    free = DecodeModel(intercept=0.01, slope=0.0)
    busy, idle = instance("d1", decoding=10), instance("d2")
    busy.decode_model = idle.decode_model = free
    assert rounded(choose_decode(Candidates([busy, idle]), work(100), now_s=0.0)) == Dispatch(
        "d2", DispatchReason.WITHIN_SLO, (0, -0.04)
    )


@pytest.mark.parametrize(
    ("decode_instances", "load"),
    [
        pytest.param([], None, id="unknown without a decode instance"),
        pytest.param([instance("d1")], 0.0, id="0 if idle"),
        pytest.param([instance("d1", decoding=5)], None, id="unknown if a busy instance was not measured"),
        pytest.param([instance("d1", decoding=5, itl_s=math.nan)], None, id="unknown if measured as NaN"),
        pytest.param([instance("d1", itl_s=0.05), instance("d2")], 0.5, id="the mean, divided by the SLO"),
    ],
)
def test_decode_load_is_the_mean_itl_over_the_slo(
    decode_instances: list[InstanceRecord], load: float | None
) -> None:
    assert compute_decode_load(decode_instances, SLO) == load
