"""Where a request goes whose beginning is in the prefix cache of an instance."""

import math

import pytest

from fulcrum_router.policy import TransferPairs
from fulcrum_router.policy.instance_record import InstanceRecord
from fulcrum_router.policy.journey import Action, Journey, JourneyContext
from fulcrum_router.policy.prefix_index import PromptPrefix
from tests.unit.router.builders import PREFILL, FakeFleet, instance, work

TOKENS, CACHED = 1000, 900
PROMPT = PromptPrefix((11, 12, 13), (300, 600, 900))
SAVED_S = PREFILL.ttft_s(TOKENS) - PREFILL.ttft_s(TOKENS - CACHED)
"""Time that the prefix cache saves."""


def make_context(
    *, queued_s: float = 0.0, ahead_s: float = math.inf, aware: bool = True
) -> JourneyContext[InstanceRecord]:
    """p1 has no work; p2 has the prompt in its cache and work for `queued_s`."""
    fleet = FakeFleet((instance("p1"), instance("p2", queued_s=queued_s), instance("d1")))
    context = JourneyContext(fleet, TransferPairs())
    context.set_prefix_aware(aware)
    context.waiting_room.prefill_ahead_s = ahead_s
    if context.prefix_index is not None:
        index = context.prefix_index
        index.record(PROMPT, "p2", new_tokens=TOKENS, room_tokens=math.inf)
        index.report("p2", index.find_hits(PROMPT), PROMPT, cached_tokens=1)
    return context


def begin(context: JourneyContext[InstanceRecord], prefix: PromptPrefix = PROMPT) -> Journey[InstanceRecord]:
    journey = Journey(context, work(TOKENS, prefix=prefix))
    journey.begin(0.0)
    return journey


@pytest.mark.parametrize(
    ("queued_s", "aware", "chosen"),
    [
        pytest.param(0.9 * SAVED_S, True, "p2", id="less work than the cache saves"),
        pytest.param(1.1 * SAVED_S, True, "p1", id="more work than the cache saves"),
        pytest.param(0.9 * SAVED_S, False, "p1", id="dispatch is not prefix-aware"),
    ],
)
def test_a_request_goes_to_its_prefix_unless_the_work_there_takes_longer(
    queued_s: float, aware: bool, chosen: str
) -> None:
    journey = begin(make_context(queued_s=queued_s, aware=aware))
    assert journey.prefill_instance is not None
    assert journey.prefill_instance.name == chosen


def test_only_what_is_not_cached_counts_as_work_of_the_instance() -> None:
    context = make_context()
    begin(context)
    ledger = context.fleet["p2"].ledger
    assert ledger.prefill_queued_s == pytest.approx(PREFILL.ttft_s(TOKENS - CACHED))


def test_the_next_request_finds_what_was_sent_before() -> None:
    context = make_context()
    other = PromptPrefix((21, 22), PROMPT.ends)
    first = begin(context, other)
    assert first.prefill_instance is not None
    context.prefix_index.report(  # type: ignore[union-attr]  # it is aware
        first.prefill_instance.name, first._hits, other, cached_tokens=1
    )
    found = begin(context, other).work.cached_tokens
    assert found == {first.prefill_instance.name: 600}


def test_what_the_engine_reports_is_compared_with_the_prediction() -> None:
    context = make_context()
    index = context.prefix_index
    assert index is not None
    journey = begin(context)
    journey.prefill_responded(0.1, lease_from_s=0.1, has_params=True, cached_tokens=0)
    assert (index.predicted_tokens, index.reported_tokens) == (CACHED, 1)


def test_a_request_that_must_be_computed_again_has_no_hits() -> None:
    context = make_context(queued_s=0.9 * SAVED_S)
    journey = Journey(context, work(TOKENS, prefix=PROMPT))
    journey.must_recompute = True
    journey.begin(0.0)
    assert not journey.work.cached_tokens


@pytest.mark.parametrize(
    ("others_wait", "action"), [(False, Action.SEND_PREFILL), (True, Action.WAIT)], ids=["alone", "behind"]
)
def test_in_mode_queue_a_request_goes_to_its_prefix_if_it_passes_nobody(
    others_wait: bool, action: Action
) -> None:
    ahead_s = 0.1 * SAVED_S
    context = make_context(queued_s=0.5 * SAVED_S, ahead_s=ahead_s)
    context.fleet["p1"].ledger.add_prefill(tokens=9_000, predicted_s=10 * SAVED_S, now_s=0.0)
    if others_wait:
        begin(context, PromptPrefix())
    assert Journey(context, work(TOKENS, prefix=PROMPT)).begin(0.0) is action
