"""Rate limits: tokens a minute for each tenant of a tier."""

import pytest

from fulcrum_core.values import AdmissionMode
from fulcrum_router.policy import TransferPairs
from fulcrum_router.policy.instance_record import InstanceRecord
from fulcrum_router.policy.journey import Action, Journey, JourneyContext, StopReason
from fulcrum_router.policy.tiers.admission import RefusalReason
from fulcrum_router.policy.tiers.rate_limits import MAX_TENANTS, RateLimits, TokenBuckets
from tests.unit.router.builders import FakeFleet, instance, work


def test_a_tenant_gets_its_tokens_in_a_minute_and_no_more() -> None:
    buckets = TokenBuckets(6_000)
    waits = [buckets.take("acme", 2_000, now_s) for now_s in (0.0, 0.0, 0.0, 0.0, 5.0, 20.0)]
    assert waits == [0.0, 0.0, 0.0, 20.0, 15.0, 0.0]


def test_tenants_do_not_share_their_tokens() -> None:
    buckets = TokenBuckets(1_000)
    assert [buckets.take(tenant, 1_000, 0.0) for tenant in ("acme", "globex", "acme")] == [0.0, 0.0, 60.0]


def test_a_request_larger_than_the_limit_passes_once_the_bucket_is_full_and_is_paid_off() -> None:
    buckets = TokenBuckets(1_000)
    assert buckets.take("acme", 3_000, 0.0) == 0.0
    assert buckets.take("acme", 1_000, 0.0) == pytest.approx(180.0)
    assert buckets.take("acme", 3_000, 179.0) == pytest.approx(1.0)
    assert buckets.take("acme", 3_000, 180.0) == 0.0


def test_unused_tokens_are_given_back_up_to_the_limit() -> None:
    buckets = TokenBuckets(1_000)
    buckets.take("acme", 800, 0.0)
    buckets.give_back("acme", 300, 0.0)
    assert buckets.take("acme", 500, 0.0) == 0.0
    buckets.give_back("acme", 5_000, 0.0)
    assert (buckets.take("acme", 1_000, 0.0), buckets.take("acme", 60, 0.0) > 0) == (0.0, True)


def test_a_clock_that_stands_still_or_runs_back_gives_nothing() -> None:
    buckets = TokenBuckets(1_000)
    buckets.take("acme", 1_000, 10.0)
    assert buckets.take("acme", 100, 5.0) == pytest.approx(6.0)


def test_no_second_fills_a_bucket_twice() -> None:
    buckets = TokenBuckets(1_000)
    buckets.take("acme", 500, 60.0)
    buckets.take("acme", 500, 0.0)
    buckets.give_back("acme", 0, 30.0)
    assert buckets.take("acme", 1_000, 60.0) == pytest.approx(60.0)


def test_no_more_tenants_are_remembered_than_the_limit() -> None:
    buckets = TokenBuckets(1_000)
    for number in range(MAX_TENANTS + 10):
        buckets.take(f"tenant {number}", 1_000, 0.0)
    assert len(buckets) == MAX_TENANTS
    assert buckets.take(f"tenant {MAX_TENANTS}", 1_000, 0.0) == 60.0, "the last ones are remembered"


def test_a_tenant_whose_requests_are_refused_is_remembered() -> None:
    buckets = TokenBuckets(1_000)
    for tenant in ("flood", *map(str, range(MAX_TENANTS - 1)), "flood", "newcomer"):
        buckets.take(tenant, 1_000, 0.0)
    assert buckets.take("flood", 1_000, 0.0) == 60.0


def test_a_change_of_the_limit_keeps_the_buckets() -> None:
    limits = RateLimits()
    limits.set_limits({"free": 1_000, "paid": 1_000})
    limits.by_tier["free"].take("acme", 1_000, 0.0)
    limits.set_limits({"free": 2_000})
    assert (set(limits.by_tier), limits.by_tier["free"].take("acme", 1_000, 0.0)) == ({"free"}, 30.0)


def make_context(tokens_per_minute: int) -> JourneyContext[InstanceRecord]:
    context = JourneyContext(FakeFleet((instance("p1"), instance("d1"))), TransferPairs())
    context.rate_limits.set_limits({"free": tokens_per_minute})
    return context


def begin(context: JourneyContext[InstanceRecord], **fields: int) -> tuple[Journey[InstanceRecord], Action]:
    journey = Journey(context, work(900, tier="free", tenant="acme", **fields))
    return journey, journey.begin(0.0)


def test_a_request_over_the_limit_is_refused_whatever_the_mode_of_admission() -> None:
    context = make_context(1_000)
    assert begin(context)[1] is Action.SEND_PREFILL
    journey, action = begin(context)
    refusal = journey.refusal
    assert (action, journey.stop_reason, refusal and (refusal.reason, refusal.retry_after_s)) == (
        Action.FAIL,
        StopReason.REFUSED,
        (RefusalReason.RATE_LIMIT, 60),
    )
    counts = context.admission.counts[AdmissionMode.ENFORCE, "free"]
    assert counts.refusals[RefusalReason.RATE_LIMIT] == 1
    assert context.demand.snapshot().requests == 1, "a refused request is no demand"


def test_no_client_is_asked_to_wait_for_more_than_an_hour() -> None:
    context = make_context(1_000)
    begin(context, choices=10_000)
    refusal = begin(context)[0].refusal
    assert refusal is not None
    assert refusal.retry_after_s == 3_600


@pytest.mark.parametrize(
    ("output", "left"), [(10, 90), (100, 0), (500, -400)], ids=["less than predicted", "as predicted", "more"]
)
def test_the_limit_counts_the_output_that_was_generated(output: int, left: int) -> None:
    context = make_context(1_000)
    journey, _ = begin(context)
    journey.prefill_responded(0.0, lease_from_s=0.0, has_params=True)
    assert journey.decode_entry is not None
    journey.decode_entry.add_tokens(output)
    journey.decode_ended(0.0)
    wait_s = context.rate_limits.by_tier["free"].take("acme", 1_000, 0.0)
    assert wait_s == pytest.approx(60 * (1_000 - left) / 1_000)


def test_a_request_that_nobody_could_serve_costs_nothing() -> None:
    context = make_context(1_000)
    context.fleet["p1"].serving = context.fleet["d1"].serving = False
    assert [begin(context)[1] for _ in range(3)] == [Action.FAIL] * 3


def test_a_client_that_lies_about_its_output_pays_for_what_is_generated() -> None:
    context = make_context(1_000)
    journey, _ = begin(context, output_limit=1)
    journey.prefill_responded(0.0, lease_from_s=0.0, has_params=True)
    assert journey.decode_entry is not None
    journey.decode_entry.add_tokens(50_000)
    journey.client_left(0.0)
    assert context.rate_limits.by_tier["free"].take("acme", 100, 0.0) > 60 * 49
