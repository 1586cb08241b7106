"""What a tenant pays by its rate limit and its fairness counter, however the journey of a request ends."""

from collections.abc import Callable

import pytest

from fulcrum_router.policy import TransferPairs
from fulcrum_router.policy.faults.failures import Failure
from fulcrum_router.policy.instance_record import InstanceRecord
from fulcrum_router.policy.journey import Action, Journey, JourneyContext, LocalPrefillReason
from fulcrum_router.policy.predictions.prompt_limit import ASSUMED_CONTEXT_TOKENS
from fulcrum_router.policy.tiers.token_counters import INPUT_WEIGHT, OUTPUT_WEIGHT
from tests.unit.router.builders import FakeFleet, instance, work

LIMIT = 100_000
PROMPT, EXPECTED = 900, 100
"""Tokens that are taken from the tenant."""

Story = Callable[[Journey[InstanceRecord]], Action]


def make_context() -> JourneyContext[InstanceRecord]:
    names = ("p1", "p2", "d1", "d2", "d3")
    context = JourneyContext(FakeFleet([instance(name) for name in names]), TransferPairs())
    context.rate_limits.set_limits({"free": LIMIT})
    context.waiting_room.prefill_ahead_s = 1_000.0
    return context


def find_used(context: JourneyContext[InstanceRecord]) -> tuple[float, float]:
    """The tokens that the bucket of the tenant lacks, and the counter of the tenant."""
    missing = context.rate_limits.by_tier["free"].take("acme", LIMIT, 0.0) * LIMIT / 60
    return round(missing, 6), context.waiting_room.find_counters(0, "free")["acme"]


def weigh(prompt: float, output: float) -> tuple[float, float]:
    return prompt + output, INPUT_WEIGHT * prompt + OUTPUT_WEIGHT * output


def prefill(journey: Journey[InstanceRecord], *, tokens: int | None = None) -> None:
    assert (
        journey.prefill_responded(0.0, lease_from_s=0.0, has_params=True, tokens=tokens) is Action.SEND_DECODE
    )


def stream(journey: Journey[InstanceRecord], tokens: int) -> None:
    journey.first_byte(0.0)
    assert journey.decode_entry is not None
    journey.decode_entry.add_tokens(tokens)


def is_streamed_without_usage(journey: Journey[InstanceRecord]) -> Action:
    prefill(journey)
    stream(journey, 30)
    return journey.decode_ended(0.0)


def ends_with_usage(journey: Journey[InstanceRecord]) -> Action:
    prefill(journey)
    stream(journey, 32)
    return journey.decode_ended(0.0, prompt_tokens=1_200, output_tokens=30)


def is_answered_whole(journey: Journey[InstanceRecord]) -> Action:
    prefill(journey, tokens=1_200)
    journey.first_byte(0.0)
    return journey.decode_ended(0.0, prompt_tokens=1_200, output_tokens=3_000)


def is_answered_whole_without_usage(journey: Journey[InstanceRecord]) -> Action:
    prefill(journey)
    journey.first_byte(0.0)
    return journey.decode_ended(0.0)


def breaks(journey: Journey[InstanceRecord]) -> Action:
    prefill(journey)
    stream(journey, 30)
    return journey.decode_failed(0.0, Failure.CLOSED)


def goes_on_elsewhere(journey: Journey[InstanceRecord]) -> Action:
    """The engine of the rest counts what the client had before as a part of the prompt."""
    prefill(journey, tokens=1_200)
    stream(journey, 30)
    assert journey.decode_failed(0.0, Failure.CLOSED, delivered_tokens=29) is Action.SEND_PREFILL
    prefill(journey, tokens=1_229)
    stream(journey, 12)
    return journey.decode_ended(0.0, prompt_tokens=1_229, output_tokens=10)


def goes_on_and_breaks_again(journey: Journey[InstanceRecord]) -> Action:
    prefill(journey)
    stream(journey, 30)
    journey.decode_failed(0.0, Failure.CLOSED, delivered_tokens=29)
    prefill(journey, tokens=929)
    stream(journey, 5)
    return journey.decode_failed(0.0, Failure.TIMEOUT)


def is_retried(journey: Journey[InstanceRecord]) -> Action:
    prefill(journey)
    assert journey.decode_failed(0.0, Failure.CLOSED) is Action.SEND_PREFILL
    prefill(journey)
    stream(journey, 30)
    return journey.decode_ended(0.0)


def is_shed_by_all(journey: Journey[InstanceRecord]) -> Action:
    prefill(journey, tokens=5_000)
    for _ in range(2):
        assert journey.decode_failed(0.0, Failure.REFUSED, started=False) is Action.SEND_DECODE
    return journey.decode_failed(0.0, Failure.REFUSED, started=False)


def times_out_everywhere(journey: Journey[InstanceRecord]) -> Action:
    prefill(journey)
    while (action := journey.decode_failed(0.0, Failure.TIMEOUT)) is not Action.FAIL:
        assert action is Action.SEND_PREFILL
        prefill(journey)
    return action


def takes_too_long(journey: Journey[InstanceRecord]) -> Action:
    prefill(journey)
    return journey.decode_failed(0.0, Failure.TOO_LONG)


def kills_two_engines(journey: Journey[InstanceRecord]) -> Action:
    assert journey.prefill_failed(0.0, Failure.CLOSED) is Action.SEND_PREFILL
    return journey.prefill_failed(0.0, Failure.CLOSED)


def is_rejected_before_decode(journey: Journey[InstanceRecord]) -> Action:
    return journey.prefill_rejected(0.0)


def is_rejected_by_decode(journey: Journey[InstanceRecord]) -> Action:
    prefill(journey)
    return journey.decode_rejected(0.0)


def is_left_during_the_prefill(journey: Journey[InstanceRecord]) -> Action:
    return journey.client_left(0.0)


def is_left_during_the_stream(journey: Journey[InstanceRecord]) -> Action:
    prefill(journey)
    stream(journey, 30)
    return journey.client_left(0.0)


def is_left_before_a_whole_response(journey: Journey[InstanceRecord]) -> Action:
    prefill(journey)
    return journey.client_left(0.0)


def is_left_twice(journey: Journey[InstanceRecord]) -> Action:
    breaks(journey)
    journey.client_left(0.0)
    return journey.proceed(0.0)


STORIES: list[tuple[Story, tuple[float, float]]] = [
    (is_streamed_without_usage, (PROMPT, 30)),
    (ends_with_usage, (1_200, 30)),
    (is_answered_whole, (1_200, 3_000)),
    (is_answered_whole_without_usage, (PROMPT, EXPECTED)),
    (breaks, (PROMPT, 30)),
    (goes_on_elsewhere, (1_200, 40)),
    (goes_on_and_breaks_again, (PROMPT, 35)),
    (is_retried, (PROMPT, 30)),
    (is_shed_by_all, (0, 0)),
    (times_out_everywhere, (PROMPT, 0)),
    (takes_too_long, (PROMPT, EXPECTED)),
    (kills_two_engines, (PROMPT, 0)),
    (is_rejected_before_decode, (PROMPT, 0)),
    (is_rejected_by_decode, (PROMPT, 0)),
    (is_left_during_the_prefill, (PROMPT, 0)),
    (is_left_during_the_stream, (PROMPT, 30)),
    (is_left_before_a_whole_response, (PROMPT, EXPECTED)),
    (is_left_twice, (PROMPT, 30)),
]


@pytest.mark.parametrize(("story", "used"), STORIES, ids=[story.__name__ for story, _ in STORIES])
def test_a_tenant_pays_once_for_what_its_request_has_used(story: Story, used: tuple[float, float]) -> None:
    context = make_context()
    journey = Journey(context, work(PROMPT, tier="free", tenant="acme"))
    assert journey.begin(0.0) is Action.SEND_PREFILL
    assert find_used(context) == weigh(PROMPT, EXPECTED)
    story(journey)
    assert find_used(context) == weigh(*used)
    assert not context.waiting_room.open_charges


def test_output_of_several_choices_counts_once() -> None:
    context = make_context()
    several = work(PROMPT, tier="free", tenant="acme", choices=4)
    journey = Journey(context, several, local_prefill_reason=LocalPrefillReason.MULTIPLE_CHOICES)
    assert journey.begin(0.0) is Action.SEND_DECODE
    assert find_used(context) == weigh(PROMPT, 4 * EXPECTED)
    stream(journey, 80)
    journey.decode_ended(0.0)
    assert find_used(context) == weigh(PROMPT, 80)
    assert context.demand.lengths.predict("acme", PROMPT) == 20.0, "of one choice"


def test_an_engines_count_above_the_limit_of_the_client_is_not_believed() -> None:
    context = make_context()
    journey = Journey(context, work(PROMPT, tier="free", tenant="acme", choices=2, output_limit=50))
    journey.begin(0.0)
    prefill(journey)
    journey.first_byte(0.0)
    journey.decode_ended(0.0, prompt_tokens=PROMPT, output_tokens=10**8)
    assert find_used(context) == weigh(PROMPT, 100)


@pytest.mark.parametrize(
    ("output_limit", "reason", "most"),
    [
        pytest.param(16, LocalPrefillReason.MULTIPLE_CHOICES, 16, id="the limit of one choice"),
        pytest.param(0, LocalPrefillReason.MULTIPLE_CHOICES, ASSUMED_CONTEXT_TOKENS, id="no limit"),
        pytest.param(10**9, LocalPrefillReason.MULTIPLE_CHOICES, ASSUMED_CONTEXT_TOKENS, id="a huge limit"),
        pytest.param(
            16, LocalPrefillReason.PASSED_THROUGH, ASSUMED_CONTEXT_TOKENS, id="a response of several turns"
        ),
    ],
)
def test_a_wrong_count_of_one_engine_bends_the_expected_output_no_further_than_a_request_can(
    output_limit: int, reason: LocalPrefillReason, most: int
) -> None:
    context = make_context()
    request = work(PROMPT, tier="free", tenant="acme", choices=2, output_limit=output_limit)
    journey = Journey(context, request, local_prefill_reason=reason)
    journey.begin(0.0)
    journey.first_byte(0.0)
    journey.decode_ended(0.0, prompt_tokens=PROMPT, output_tokens=99_999_999)
    lengths = context.demand.lengths
    assert (lengths.mean_served, lengths.predict("acme", PROMPT)) == (most, most)


@pytest.mark.parametrize("leaves", [True, False], ids=["its client leaves", "the room is full"])
def test_a_request_that_no_engine_has_seen_costs_nothing(*, leaves: bool) -> None:
    context = make_context()
    context.waiting_room.prefill_ahead_s = 0.1
    for name in ("p1", "p2"):
        context.fleet[name].ledger.add_prefill(tokens=1, predicted_s=5.0, now_s=0.0)
    journey = Journey(context, work(PROMPT, tier="free", tenant="acme"))
    assert journey.begin(0.0) is Action.WAIT
    if leaves:
        journey.client_left(0.0)
    else:
        journey.give_way()
    assert find_used(context) == (0.0, 0.0)


def test_output_beyond_the_expectation_is_charged_to_the_counter_while_it_appears() -> None:
    context = make_context()
    journey = Journey(context, work(PROMPT, tier="free", tenant="acme"))
    journey.begin(0.0)
    prefill(journey, tokens=1_200)
    (charge,) = context.waiting_room.open_charges
    seen = []
    for tokens in (40, 200):
        stream(journey, tokens)
        charge.update()
        seen.append(find_used(context)[1])
    assert seen == [weigh(1_200, EXPECTED)[1], weigh(1_200, 240)[1]]


def test_a_limit_that_is_set_during_a_request_gives_it_nothing_back() -> None:
    context = make_context()
    context.rate_limits.set_limits({})
    journey = Journey(context, work(PROMPT, tier="free", tenant="acme"))
    journey.begin(0.0)
    context.rate_limits.set_limits({"free": LIMIT})
    context.rate_limits.by_tier["free"].take("acme", 500, 0.0)
    prefill(journey)
    stream(journey, 30)
    journey.decode_ended(0.0)
    assert find_used(context)[0] == 500
