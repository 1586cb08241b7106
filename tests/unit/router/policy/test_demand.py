"""Demand: the sums of the work that arrives, and the prediction of output lengths."""

from collections.abc import Callable

import pytest

from fulcrum_core.latency import PrefillModel
from fulcrum_core.router_state import DemandState, DemandSums
from fulcrum_core.values import Role
from fulcrum_router.policy import InstanceRecord
from fulcrum_router.policy.demand import DEFAULT_OUTPUT_TOKENS, Demand, OutputLengths
from fulcrum_router.policy.journey import Journey, JourneyContext
from fulcrum_router.policy.kv_pairs.pairs import TransferPairs
from fulcrum_router.policy.ledger import Ledger
from tests.unit.router.builders import FakeFleet, instance, work


def test_arrivals_are_summed_up() -> None:
    demand = Demand()
    for _ in range(2):
        demand.record(tenant="", prompt_tokens=50, prefill_s=0.5)
    assert demand.snapshot() == DemandState(requests=2, prefill_s=1.0, output_tokens=200, token_steps=20_000)


@pytest.mark.parametrize(
    ("tenant", "prompt_tokens", "expected"),
    [
        pytest.param("a", 1100, 20.0, id="a prompt of about the length"),
        pytest.param("a", 200, 400.0, id="a prompt of another length"),
        pytest.param("b", 1100, 210.0, id="another tenant: the mean over all"),
    ],
)
def test_the_output_is_that_of_earlier_prompts_of_the_tenant_and_length(
    tenant: str, prompt_tokens: int, expected: float
) -> None:
    lengths = OutputLengths()
    lengths.learn("a", 1024, 20)
    lengths.learn("a", 200, 400)
    assert lengths.predict(tenant, prompt_tokens) == expected


def test_before_the_first_answer_a_usual_length_is_predicted() -> None:
    assert OutputLengths().predict("", 10) == DEFAULT_OUTPUT_TOKENS


def test_answers_in_decode_are_longer_than_the_mean_answer() -> None:
    """Of nine answers with 10 tokens and one with 910, decode computes mostly the long one."""
    lengths = OutputLengths()
    before = lengths.mean_in_decode
    for tokens in [10] * 9 + [910]:
        lengths.record_served(tokens)
    squares = 9 * 10**2 + 910**2
    found = (before, lengths.mean_served, lengths.mean_in_decode)
    assert found == pytest.approx((DEFAULT_OUTPUT_TOKENS, 100.0, squares / 1_000))


def test_the_prefill_work_of_an_arrival_is_the_mean_over_the_prefill_instances() -> None:
    instances = instance("p1"), instance("p2"), instance("d1")
    for each, seconds in zip(instances, (0.6, 0.2, 5.0), strict=True):
        each.prefill_model = PrefillModel(c0=seconds, c1=0.0, c2=0.0)
    context = JourneyContext(FakeFleet(instances), TransferPairs())
    Journey(context, work(100)).begin(0.0)
    assert context.demand.snapshot().prefill_s == 0.4


def test_a_large_fleet_is_asked_in_turn_so_that_no_instance_is_forgotten() -> None:
    """Of 128 instances, every second one is slow: one in two is asked for a request."""
    instances = [instance(f"p{number:03}") for number in range(128)]
    for number, each in enumerate(instances):
        each.prefill_model = PrefillModel(c0=0.6 if number % 2 else 0.2, c1=0.0, c2=0.0)
    context = JourneyContext(FakeFleet((*instances, instance("d1"))), TransferPairs())
    for _ in range(2):
        context.record_admitted(work(100), 0.0)
    assert context.demand.snapshot().prefill_s == pytest.approx(0.6 + 0.2)


def test_a_prompt_that_takes_longer_than_its_objective_counts_as_one_that_takes_as_long() -> None:
    context = JourneyContext(FakeFleet((instance("p1"), instance("d1"))), TransferPairs())
    Journey(context, work(2_000_000)).begin(0.0)
    assert context.demand.snapshot() == DemandState(
        requests=1, prefill_s=1.0, output_tokens=100, token_steps=105_000
    )


def withdraw_by_leaving(journey: Journey[InstanceRecord]) -> None:
    journey.client_left(0.9)


def withdraw_by_rejection(journey: Journey[InstanceRecord]) -> None:
    journey.prefill_rejected(0.9)


def leave_when_late(journey: Journey[InstanceRecord]) -> None:
    journey.client_left(1.1)


def leave_when_computed(journey: Journey[InstanceRecord]) -> None:
    journey.prefill_responded(0.5, lease_from_s=0.5, has_params=True)
    journey.client_left(0.9)


@pytest.mark.parametrize(
    ("end", "is_withdrawn"),
    [
        (withdraw_by_leaving, True),
        (withdraw_by_rejection, True),
        (leave_when_late, False),
        (leave_when_computed, False),
    ],
)
def test_work_that_no_engine_has_to_do_any_more_is_withdrawn(
    end: Callable[[Journey[InstanceRecord]], None], is_withdrawn: bool
) -> None:
    """With an objective of 1 s. What was late would have been served by more instances: it stays."""
    context = JourneyContext(FakeFleet((instance("p1"), instance("d1", role=Role.DECODE))), TransferPairs())
    journey = Journey(context, work(100))
    journey.begin(0.0)
    end(journey)
    journey.client_left(0.95)  # withdraws nothing twice
    state = context.demand.snapshot()
    counted = DemandSums(**{name: getattr(state, name) for name in DemandSums.model_fields})
    assert state.withdrawn == (counted if is_withdrawn else DemandSums())


@pytest.mark.parametrize(("reported", "predicted"), [(7, 7.0), (0, DEFAULT_OUTPUT_TOKENS)])
def test_a_whole_response_teaches_the_tokens_that_its_engine_reports(reported: int, predicted: float) -> None:
    context = JourneyContext(FakeFleet((instance("d1", role=Role.BOTH),)), TransferPairs())
    journey = Journey(context, work(100))
    journey.begin(0.0)
    journey.first_byte(0.1)
    journey.decode_ended(0.2, output_tokens=reported)
    assert context.demand.lengths.predict("", 100) == predicted


def test_a_journey_counts_its_arrival_and_learns_from_its_answer() -> None:
    context = JourneyContext(FakeFleet((instance("d1", role=Role.BOTH),)), TransferPairs())
    journey = Journey(context, work(100))
    journey.begin(0.0)
    assert journey.decode_entry is not None
    journey.first_byte(0.1)
    journey.decode_entry.add_tokens(7)
    journey.decode_ended(0.2)
    demand = context.demand
    assert (demand.snapshot().requests, demand.lengths.predict("", 100)) == (1, 7.0)


@pytest.mark.parametrize(
    ("outputs", "expected"),
    [
        pytest.param((), 10.0, id="none: the mean over all"),
        pytest.param((2, 4), 10.0, id="a short output so far says nothing"),
        pytest.param((30, 60), 90.0, id="twice the output so far"),
    ],
)
def test_answers_in_decode_count_where_none_has_ended(outputs: tuple[int, ...], expected: float) -> None:
    """Else a new mix with long answers is taken for one with short answers until those have ended."""
    lengths, ledger = OutputLengths(), Ledger()
    lengths.learn("a", 1024, 10)
    entries = [ledger.add_decode(tokens=0) for _ in outputs]
    for entry, output in zip(entries, outputs, strict=True):
        lengths.follow("a", 200, entry)
        entry.add_tokens(output)
    predicted = lengths.predict("a", 200)
    for entry in entries:
        lengths.forget("a", 200, entry)
    assert (predicted, lengths.predict("a", 200)) == (expected, 10.0)


def test_answers_in_decode_count_less_the_more_have_ended() -> None:
    lengths, ledger = OutputLengths(), Ledger()
    entry = ledger.add_decode(tokens=0)
    lengths.follow("", 200, entry)
    entry.add_tokens(100)
    found = []
    for more in (1, 2, 61):
        for _ in range(more):
            lengths.learn("", 200, 20)
        found.append(lengths.predict("", 200))
    assert found == pytest.approx([110.0, 65.0, 20.0])
