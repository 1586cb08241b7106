"""The journey of one request: which legs are sent where, after which event, and what is retried."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from fulcrum_core.values import Role
from fulcrum_router.policy import PairKey, TransferPairs
from fulcrum_router.policy.dispatch import FlipProposalRules
from fulcrum_router.policy.faults.failures import Failure
from fulcrum_router.policy.faults.retry_budget import FLOOR
from fulcrum_router.policy.instance_record import InstanceRecord
from fulcrum_router.policy.journey import (
    FLIP_WAIT_BACKOFF_S,
    FLIP_WAIT_S,
    Action,
    Journey,
    JourneyContext,
    LocalPrefillReason,
    State,
    StopReason,
    TransferProtocol,
)
from fulcrum_router.policy.predictions.prompt_limit import ASSUMED_CONTEXT_TOKENS
from tests.unit.router.builders import IDENTITY, OTHER_MODEL, SLO, FakeFleet, instance, work

TOKENS = 100


def make_context(
    *instances: InstanceRecord, protocols: Mapping[str, TransferProtocol] | None = None
) -> JourneyContext[InstanceRecord]:
    """The context of a fleet; by default two prefill and two decode instances."""
    fleet = FakeFleet(instances or tuple(instance(name) for name in ("p1", "p2", "d1", "d2")))
    return JourneyContext(fleet, TransferPairs(), protocols=protocols or {})


def begin(
    context: JourneyContext[InstanceRecord], *, reason: LocalPrefillReason | None = None
) -> tuple[Journey[InstanceRecord], Action]:
    journey = Journey(context, work(TOKENS), local_prefill_reason=reason)
    return journey, journey.begin(0.0)


def begin_decode(context: JourneyContext[InstanceRecord]) -> Journey[InstanceRecord]:
    """A journey whose decode leg was sent with the KV of the prefill leg."""
    journey, action = begin(context)
    assert action is Action.SEND_PREFILL
    assert answer(journey) is Action.SEND_DECODE
    return journey


def answer(journey: Journey[InstanceRecord], now_s: float = 0.0, **changes: Any) -> Action:
    """The prefill leg is answered; its lease begins at 0."""
    return journey.prefill_responded(now_s, **{"lease_from_s": 0.0, "has_params": True, **changes})


def targets(journey: Journey[InstanceRecord]) -> tuple[str | None, str | None]:
    """Names of the instances of the last prefill leg and of the last decode leg."""
    prefill, decode = journey.prefill_instance, journey.decode_instance
    return prefill.name if prefill else None, decode.name if decode else None


@pytest.mark.parametrize(
    ("limits", "prompts", "counted"),
    [
        pytest.param(((400, 900), (300, None)), 1, 400, id="the longest prompt that an engine takes"),
        pytest.param(((900, 400), (300, None)), 1, 400, id="a KV cache smaller than the context"),
        pytest.param(((None, None), (None, None)), 1, ASSUMED_CONTEXT_TOKENS, id="not known"),
        pytest.param(((400, None), (None, 300)), 2, 800, id="two prompts"),
    ],
)
def test_a_prompt_counts_as_no_longer_than_engines_take(
    limits: tuple[tuple[int | None, int | None], ...], prompts: int, counted: int
) -> None:
    """An engine rejects a longer one; until then the others must not be refused because of it."""
    instances = instance("p1"), instance("d1")
    for each, (context_tokens, kv_capacity_tokens) in zip(instances, limits, strict=True):
        each.context_tokens, each.kv_capacity_tokens = context_tokens, kv_capacity_tokens
    context = make_context(*instances)
    journey = Journey(context, work(2_000_000, prompts=prompts, choices=prompts))
    journey.begin(0.0)
    ledgers = context.fleet["p1"].ledger, context.fleet["d1"].ledger
    assert (ledgers[0].prefill_tokens, ledgers[1].reserved_tokens) == (counted, counted)


def ledgers_are_empty(context: JourneyContext[InstanceRecord]) -> bool:
    assert isinstance(context.fleet, FakeFleet)
    names = (
        "prefill_queued_s",
        "prefill_tokens",
        "legs",
        "decode_tokens",
        "reserved_tokens",
        "pending_transfers",
        "awaited_first_tokens",
    )
    return not any(getattr(i.ledger, name) for i in context.fleet.instances for name in names)


def test_a_request_is_prefilled_transferred_and_decoded() -> None:
    context = make_context()
    journey, action = begin(context)
    assert (action, targets(journey), journey.state) == (Action.SEND_PREFILL, ("p1", "d1"), State.PREFILL)
    assert context.fleet["p1"].ledger.prefill_tokens == TOKENS
    assert context.fleet["d1"].ledger.reserved_tokens == TOKENS
    assert answer(journey, 0.1, tokens=90) is Action.SEND_DECODE
    assert (targets(journey), journey.state, journey.has_kv) == (("p1", "d1"), State.DECODE_SENT, True)
    assert (context.fleet["p1"].ledger.legs, context.fleet["p1"].ledger.pending_transfers) == (0, 1)
    assert context.fleet["d1"].ledger.decode_tokens == 90, "the engine's count replaces the estimate"
    journey.first_byte(0.2)
    assert (journey.state, context.fleet["p1"].ledger.pending_transfers) == (State.DECODE, 0)
    assert journey.decode_ended(0.3) is Action.END
    assert (journey.state, ledgers_are_empty(context)) == (State.DONE, True)


@pytest.mark.parametrize(
    ("choices", "prompts", "tokens"),
    [
        pytest.param(1, 1, 100, id="one text"),
        pytest.param(3, 1, 300, id="three texts of one prompt"),
        pytest.param(4, 2, 200, id="two texts of each of two prompts"),
    ],
)
def test_each_text_of_a_request_counts_its_prompt_in_decode(choices: int, prompts: int, tokens: int) -> None:
    context, several = make_context(), LocalPrefillReason.MULTIPLE_CHOICES
    journey = Journey(context, work(100, choices=choices, prompts=prompts), local_prefill_reason=several)
    assert journey.begin(0.0) is Action.SEND_DECODE
    ledger = context.fleet["d1"].ledger
    assert (ledger.decode_tokens, ledger.prefill_tokens) == (tokens, 100)


@pytest.mark.parametrize(
    ("reason", "make", "shown"),
    [
        pytest.param(
            LocalPrefillReason.MULTIPLE_CHOICES, make_context, "multiple_choices", id="several choices"
        ),
        pytest.param(
            None, lambda: make_context(instance("d1")), "no_prefill_instance", id="no prefill instance"
        ),
        pytest.param(
            None,
            lambda: make_context(instance("d1", role=Role.BOTH)),
            None,
            id="one instance with both roles",
        ),
    ],
)
def test_without_a_transfer_the_decode_instance_computes_the_prompt(
    reason: LocalPrefillReason | None, make: Callable[[], JourneyContext[InstanceRecord]], shown: str | None
) -> None:
    context = make()
    journey, action = begin(context, reason=reason)
    assert (action, targets(journey)) == (Action.SEND_DECODE, (None, "d1"))
    assert (journey.local_prefill_reason, journey.has_kv) == (shown, False)
    assert context.fleet["d1"].ledger.local_prefills == 1
    journey.first_byte(0.2)
    assert context.fleet["d1"].ledger.local_prefills == 0
    assert journey.decode_ended(0.3) is Action.END
    assert ledgers_are_empty(context)


@pytest.mark.parametrize(
    "failure",
    [f for f in Failure if f not in {Failure.LEASE_EXPIRED, Failure.TOO_LONG, Failure.TOO_LARGE}],
    ids=str,
)
def test_a_failed_prefill_leg_goes_to_another_instance(failure: Failure) -> None:
    context = make_context()
    journey, _ = begin(context)
    assert journey.prefill_failed(0.1, failure) is Action.SEND_PREFILL
    assert targets(journey)[0] == "p2"
    assert context.fleet["p1"].ledger.legs == 0


def test_after_all_prefill_instances_failed_the_decode_instance_computes_the_prompt() -> None:
    journey, _ = begin(make_context())
    assert journey.prefill_failed(0.1, Failure.STATUS, status=503) is Action.SEND_PREFILL
    assert journey.prefill_failed(0.2, Failure.STATUS, status=503) is Action.SEND_DECODE
    assert (targets(journey), journey.local_prefill_reason) == (("p2", "d1"), "prefill_failed")


def test_at_most_three_prefill_instances_are_tried() -> None:
    context = make_context(*(instance(name) for name in ("p1", "p2", "p3", "p4", "d1")))
    journey, _ = begin(context)
    actions = [journey.prefill_failed(0.1, Failure.REFUSED, started=False) for _ in range(3)]
    assert actions == [Action.SEND_PREFILL, Action.SEND_PREFILL, Action.SEND_DECODE]


@pytest.mark.parametrize(
    ("started", "action", "wants_kv"),
    [
        pytest.param(
            False, Action.SEND_DECODE, True, id="a leg that never started leaves the KV for another"
        ),
        pytest.param(True, Action.SEND_PREFILL, False, id="KV that may have been fetched is computed again"),
    ],
)
def test_a_failed_decode_leg_goes_to_another_instance(
    *, started: bool, action: Action, wants_kv: bool
) -> None:
    context = make_context()
    journey = begin_decode(context)
    assert journey.decode_failed(0.2, Failure.TIMEOUT, started=started) is action
    assert (journey.has_kv, context.fleet["d1"].ledger.decode_legs) == (wants_kv, 0)
    if started:
        answer(journey)
    assert targets(journey) == ("p1", "d2")


def test_a_decode_engine_that_answers_5xx_with_kv_counts_against_the_pair() -> None:
    context = make_context()
    begin_decode(context).decode_failed(0.2, Failure.STATUS, status=500)
    assert context.pairs[PairKey("p1", "d1")].suspect


def test_a_request_without_a_decode_instance_left_fails_with_the_last_failure() -> None:
    context = make_context(instance("p1"), instance("d1"))
    journey = begin_decode(context)
    context.fleet["p1"].serving = False
    assert journey.decode_failed(0.2, Failure.STATUS, status=503) is Action.FAIL
    assert (journey.stop_reason, journey.failure, journey.failed_status) == (
        StopReason.NO_INSTANCE,
        Failure.STATUS,
        503,
    )
    assert ledgers_are_empty(context)


def test_a_failure_after_the_first_byte_breaks_the_response() -> None:
    context = make_context()
    journey = begin_decode(context)
    journey.first_byte(0.2)
    assert journey.decode_failed(0.2, Failure.CLOSED) is Action.BREAK
    assert (journey.state, ledgers_are_empty(context)) == (State.DONE, True)


# --- retries ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("legs", ["pp", "pd", "dp", "dd"])
def test_after_two_engines_closed_the_connection_a_request_is_tried_no_more(legs: str) -> None:
    """A query of death: the first death may be chance, the second one is taken for the request's work."""
    journey, action = begin(make_context(*(instance(n) for n in ("p1", "p2", "p3", "d1", "d2", "d3"))))
    for leg in legs:
        if leg == "d" and action is Action.SEND_PREFILL:
            action = answer(journey)
        fail = journey.prefill_failed if leg == "p" else journey.decode_failed
        action = fail(0.1, Failure.CLOSED)
    assert (action, journey.stop_reason) == (Action.FAIL, StopReason.QUERY_OF_DEATH)


@pytest.mark.parametrize(
    ("failure", "fields"),
    [
        pytest.param(Failure.CLOSED, {}, id="the engine closes the connection"),
        pytest.param(Failure.EJECTED, {}, id="the engine hangs and is ejected"),
        pytest.param(Failure.REFUSED, {}, id="the engine is gone after a lost reuse race"),
        pytest.param(Failure.STATUS, {"status": 500}, id="the engine answers 5xx"),
    ],
)
@pytest.mark.parametrize("legs", ["pp", "pd", "dd"])
def test_a_request_by_which_engines_fail_reaches_two_engines(
    legs: str, failure: Failure, fields: dict[str, Any]
) -> None:
    journey, action = begin(make_context(*(instance(n) for n in ("p1", "p2", "p3", "d1", "d2", "d3"))))
    for leg in legs:
        if leg == "d" and action is Action.SEND_PREFILL:
            action = answer(journey)
        fail = journey.prefill_failed if leg == "p" else journey.decode_failed
        action = fail(0.1, failure, **fields)
    assert (action, journey.stop_reason) == (Action.FAIL, StopReason.QUERY_OF_DEATH)


def test_if_all_engines_of_a_role_fail_a_request_with_two_5xx_gets_one_more_of_the_other_role() -> None:
    """Who raises the error share of all engines with such requests reaches three engines with the next."""
    failing = [instance(f"{role}{n}", error_share=0.8) for role in "pd" for n in (1, 2, 3)]
    context = make_context(*failing)
    journey, _ = begin(context)
    assert journey.prefill_failed(0.1, Failure.STATUS, status=500) is Action.SEND_PREFILL
    assert journey.prefill_failed(0.1, Failure.STATUS, status=500) is Action.SEND_DECODE
    assert (journey.local_prefill_reason, context.retry_budget.retries) == ("prefill_failed", 0)
    assert journey.decode_failed(0.1, Failure.STATUS, status=500) is Action.FAIL
    assert journey.stop_reason is StopReason.QUERY_OF_DEATH


def test_an_instance_that_sheds_gets_no_decode_leg_while_another_can_take_it() -> None:
    context = make_context()
    begin_decode(context).decode_failed(0.2, Failure.STATUS, status=503)
    journey, _ = begin(context)
    answer(journey, 0.3)
    assert targets(journey)[1] == "d2"
    context.fleet["d2"].serving = False
    assert journey.decode_failed(0.4, Failure.REFUSED, started=False) is Action.SEND_DECODE
    assert targets(journey)[1] == "d1"


def test_an_instance_that_sheds_gets_no_prefill_leg_while_another_can_take_it() -> None:
    context = make_context()
    first, _ = begin(context)
    assert first.prefill_failed(0.1, Failure.STATUS, status=429) is Action.SEND_PREFILL
    names = {begin(context)[0].prefill_instance.name for _ in range(6)}  # type: ignore[union-attr]
    assert names == {"p2"}


def test_instances_that_have_shed_are_forgotten() -> None:
    context = make_context()
    context.shed_until_s = {"removed": 0.1}
    begin_decode(context).decode_failed(0.2, Failure.STATUS, status=503)
    assert set(context.shed_until_s) == {"d1"}


@pytest.mark.parametrize(("others", "deaths"), [(0, 2), (2, 2), (3, 3), (6, 4), (60, 4)])
def test_where_engines_die_anyway_a_second_death_is_taken_for_chance(others: int, deaths: int) -> None:
    names = [f"{role}{n}" for role in "pd" for n in range(1, 5)]
    context = make_context(*(instance(name) for name in names))
    for n in range(others):
        context.engine_deaths.record(f"x{n}", 0.1)
    journey, action = begin(context)
    count = 0
    while action is not Action.FAIL:
        fail = journey.prefill_failed if action is Action.SEND_PREFILL else journey.decode_failed
        action, count = fail(0.1, Failure.CLOSED), count + 1
    assert (journey.stop_reason, count) == (StopReason.QUERY_OF_DEATH, deaths)


def test_all_legs_of_one_engine_that_dies_are_one_death() -> None:
    context = make_context(*(instance(n) for n in ("p1", "p2", "p3", "d1")))
    victims = [begin(context)[0] for _ in range(12)]
    for journey in victims:
        journey.prefill_failed(0.1, Failure.CLOSED)
    assert context.engine_deaths.count(0.1) == 3
    assert context.engine_deaths.count(10.2) == 0


def lose_stream(journey: Journey[InstanceRecord], now_s: float) -> Action:
    """The stream has its first byte, and its decode engine dies."""
    journey.first_byte(now_s)
    action = journey.decode_failed(now_s, Failure.CLOSED, delivered_tokens=3)
    return answer(journey, now_s) if action is Action.SEND_PREFILL else action


@pytest.mark.parametrize(("found", "stop"), [(2, StopReason.QUERY_OF_DEATH), (3, None)])
def test_deaths_of_engines_without_legs_let_a_stream_lose_more_engines(
    found: int, stop: StopReason | None
) -> None:
    """Of eight engines one is killed each second: few of the others have a leg that shows it."""
    context = make_context(*(instance(f"{role}{n}") for role in "pd" for n in range(1, 5)))
    for n in range(found):
        context.engine_deaths.record_found(f"p{n + 1}", since_s=0.0, now_s=0.1)
    journey = begin_decode(context)
    lose_stream(journey, 1.0)
    lose_stream(journey, 2.0)
    assert (journey.stop_reason, journey.state is State.DONE) == (stop, stop is not None)


def test_engines_that_probes_find_dead_after_a_request_are_not_others() -> None:
    """Else a request that kills its engines would excuse itself."""
    context = make_context(*(instance(f"{role}{n}") for role in "pd" for n in range(1, 5)))
    journey = begin_decode(context)
    for now_s in (1.0, 2.0):
        assert journey.decode_instance is not None
        name = journey.decode_instance.name
        lose_stream(journey, now_s)
        for later_s in (0.1, 0.5):
            context.engine_deaths.record_found(name, since_s=now_s - 0.5, now_s=now_s + later_s)
    assert (journey.stop_reason, context.engine_deaths.count(2.5)) == (StopReason.QUERY_OF_DEATH, 2)


def test_a_response_that_is_too_large_is_not_computed_by_a_second_prefill_instance() -> None:
    context = make_context()
    journey, _ = begin(context)
    assert journey.prefill_failed(0.1, Failure.TOO_LARGE) is Action.SEND_DECODE
    assert (journey.local_prefill_reason, context.retry_budget.retries) == ("prefill_failed", 0)


def test_the_retry_of_a_decode_leg_whose_response_was_too_large_is_charged() -> None:
    context = make_context()
    journey = begin_decode(context)
    assert journey.decode_failed(0.1, Failure.TOO_LARGE) is Action.SEND_PREFILL
    assert context.retry_budget.retries == 1


def test_engines_that_refuse_or_shed_or_are_removed_are_no_deaths() -> None:
    journey, action = begin(make_context())
    action = journey.prefill_failed(0.1, Failure.CLOSED)
    action = journey.prefill_failed(0.1, Failure.STATUS, status=503)
    assert action is Action.SEND_DECODE
    action = journey.decode_failed(0.1, Failure.REFUSED, started=False)
    assert (action, journey.stop_reason) == (Action.SEND_DECODE, None)
    journey.decode_failed(0.1, Failure.REMOVED)
    assert journey.stop_reason is None


def exhaust(context: JourneyContext[InstanceRecord]) -> None:
    while context.retry_budget.take_retry(0.0):
        pass


def test_without_retry_budget_a_failed_prefill_leg_is_not_sent_again_but_the_request_goes_on() -> None:
    context = make_context()
    exhaust(context)
    journey, _ = begin(context)
    assert journey.prefill_failed(0.1, Failure.STATUS, status=503) is Action.SEND_DECODE
    assert journey.local_prefill_reason is LocalPrefillReason.PREFILL_FAILED


def test_without_retry_budget_a_failed_decode_leg_fails_the_request() -> None:
    context = make_context()
    exhaust(context)
    journey = begin_decode(context)
    assert journey.decode_failed(0.1, Failure.TIMEOUT) is Action.FAIL
    assert (journey.stop_reason, journey.failure) == (StopReason.RETRY_BUDGET, Failure.TIMEOUT)


@pytest.mark.parametrize(
    "failure", [Failure.CLOSED, Failure.EJECTED, Failure.REFUSED, Failure.REMOVED], ids=str
)
def test_the_end_of_an_engine_is_not_charged_to_the_retry_budget(failure: Failure) -> None:
    context = make_context()
    exhaust(context)
    assert begin_decode(context).decode_failed(0.1, failure) is Action.SEND_PREFILL


def test_failing_engines_cannot_double_the_load() -> None:
    context = make_context()
    for n in range(1_000):
        journey, _ = begin(context)
        journey.prefill_failed(n / 1e4, Failure.TIMEOUT)
        journey.client_left(0.3)
    assert context.retry_budget.retries == FLOOR + 200


def test_one_client_cannot_use_up_the_retry_budget_with_requests_that_engines_answer_with_5xx() -> None:
    context = make_context()
    for n in range(100):
        journey, _ = begin(context)
        journey.prefill_failed(n / 1e4, Failure.STATUS, status=500)
        journey.prefill_failed(n / 1e4, Failure.STATUS, status=500)
    assert context.retry_budget.retries == 0


# --- responses that go on with another instance -------------------------------------------------------


def begin_stream(context: JourneyContext[InstanceRecord]) -> Journey[InstanceRecord]:
    journey = begin_decode(context)
    journey.first_byte(0.2)
    return journey


def test_a_broken_response_goes_on_with_another_instance_after_the_output_so_far() -> None:
    context = make_context()
    journey = begin_stream(context)
    assert journey.decode_failed(0.3, Failure.CLOSED, delivered_tokens=20) is Action.SEND_PREFILL
    assert (journey.continues, journey.work.prompt_tokens) == (True, TOKENS + 20)
    assert answer(journey, 0.4) is Action.SEND_DECODE
    assert (targets(journey), journey.has_kv) == (("p1", "d2"), True)
    journey.first_byte(0.5)
    assert journey.decode_ended(0.6) is Action.END
    assert ledgers_are_empty(context)


def test_a_broken_response_that_cannot_go_on_takes_no_retry_from_others() -> None:
    context = make_context()
    journey = begin_stream(context)
    action = journey.decode_failed(0.3, Failure.TIMEOUT)
    assert (action, context.retry_budget.retries) == (Action.BREAK, 0)


@pytest.mark.parametrize("event", ["death", "no instance", "rejected", "aborted"])
def test_a_response_that_cannot_go_on_is_broken(event: str) -> None:
    context = make_context()
    journey = begin_stream(context)
    if event == "no instance":
        for view in context.fleet.candidates.prefill + context.fleet.candidates.decode:
            view.serving = False
    tokens = None if event == "aborted" else 20
    action = journey.decode_failed(0.3, Failure.CLOSED, delivered_tokens=tokens)
    if event == "death":
        action = journey.prefill_failed(0.4, Failure.CLOSED)
        assert journey.stop_reason is StopReason.QUERY_OF_DEATH
    if event == "rejected":
        action = journey.prefill_rejected(0.4)
    assert (action, journey.state, ledgers_are_empty(context)) == (Action.BREAK, State.DONE, True)


# --- the KV lease ------------------------------------------------------------------------------------


def test_a_stale_transfer_is_not_used() -> None:
    context = make_context()
    journey, _ = begin(context)
    lease_s = context.fleet["p1"].kv_lease_s
    assert answer(journey, lease_s / 2 + 0.1) is Action.SEND_DECODE
    assert (journey.has_kv, journey.local_prefill_reason) == (False, LocalPrefillReason.STALE_KV_TRANSFER)
    assert context.fleet["d1"].ledger.local_prefills == 1
    assert context.pairs[PairKey("p1", "d1")].suspect


@pytest.mark.parametrize("kv_late", [True, False])
def test_after_an_expired_lease_any_instance_computes_the_prompt_again_without_kv(*, kv_late: bool) -> None:
    context = make_context()
    journey = begin_decode(context)
    action = journey.decode_failed(20.0, Failure.LEASE_EXPIRED, kv_late=kv_late)
    assert (action, targets(journey)[1]) == (Action.SEND_DECODE, "d1"), "the instance itself did not fail"
    assert (journey.source, journey.has_kv, journey.local_prefill_reason, journey.must_recompute) == (
        None,
        False,
        LocalPrefillReason.LEASE_EXPIRED,
        True,
    )
    assert context.pairs[PairKey("p1", "d1")].suspect is kv_late


@pytest.mark.parametrize(
    "problem", [LocalPrefillReason.WRONG_REMOTE_HOST, LocalPrefillReason.INCOMPLETE_KV_TRANSFER_PARAMS]
)
def test_an_answer_without_usable_parameters_ends_in_a_local_prefill(problem: LocalPrefillReason) -> None:
    journey, _ = begin(make_context())
    assert answer(journey, has_params=False, problem=problem) is Action.SEND_DECODE
    assert (journey.has_kv, journey.local_prefill_reason) == (False, problem)


def test_kv_that_no_instance_can_fetch_is_computed_again() -> None:
    context = make_context(instance("p1"), instance("d1"), instance("d2", identity=OTHER_MODEL))
    journey, _ = begin(context)
    context.fleet["p1"].serving = context.fleet["d1"].serving = False
    assert answer(journey) is Action.SEND_DECODE
    assert (targets(journey)[1], journey.local_prefill_reason) == ("d2", LocalPrefillReason.UNREADABLE_KV)


def test_an_instance_that_was_flipped_after_the_prefill_decodes_without_a_transfer() -> None:
    context = make_context()
    journey, _ = begin(context)
    context.fleet["p1"].role = Role.DECODE
    assert answer(journey) is Action.SEND_DECODE
    assert (targets(journey), journey.has_kv, journey.local_prefill_reason) == (("p1", "p1"), False, None)
    assert context.fleet["p1"].ledger.pending_transfers == 0


def test_no_prefill_leg_goes_to_an_instance_whose_pairs_are_all_broken() -> None:
    context = make_context()
    context.pairs.broken_prefill_instances = ("p1", "p2")
    journey, action = begin(context)
    assert (action, journey.local_prefill_reason) == (
        Action.SEND_DECODE,
        LocalPrefillReason.KV_TRANSFER_BROKEN,
    )


# --- flips -------------------------------------------------------------------------------------------


def make_late_context() -> JourneyContext[InstanceRecord]:
    """No prefill instance meets the TTFT objective, and a decode instance may flip."""
    context = make_context(instance("p1", queued_s=5.0), instance("d1"), instance("d2"))
    for name in ("d1", "d2"):
        context.fleet[name].itl_s = 0.0
    context.flip_rules = FlipProposalRules(enabled=True)
    context.flip_waits.enabled = True
    return context


def test_a_request_waits_for_its_flip_and_takes_the_flipped_instance() -> None:
    context = make_late_context()
    journey, action = begin(context)
    assert (action, journey.state) == (Action.ASK_FOR_FLIP, State.FLIP_REQUESTED)
    assert (journey.proposal and journey.proposal.role, journey.wait_until_s) == (Role.PREFILL, FLIP_WAIT_S)
    context.fleet["d1"].role = Role.PREFILL
    assert journey.flip_done(0.02) is Action.SEND_PREFILL
    assert targets(journey)[0] == "d1"


def test_without_the_flip_the_cheapest_instance_takes_the_request_after_the_wait() -> None:
    journey, _ = begin(make_late_context())
    assert journey.flip_wait_ended(FLIP_WAIT_S / 2) is Action.WAIT
    assert journey.flip_wait_ended(FLIP_WAIT_S) is Action.SEND_PREFILL
    assert targets(journey)[0] == "p1"


def test_after_a_wait_without_a_flip_others_do_not_wait_for_a_while() -> None:
    context = make_late_context()
    begin(context)[0].flip_wait_ended(FLIP_WAIT_S)
    journey, action = begin(context)
    assert (action, journey.wait_until_s) == (Action.ASK_FOR_FLIP, 0.0)
    assert journey.flip_wait_ended(0.0) is Action.SEND_PREFILL
    now_s = FLIP_WAIT_S + FLIP_WAIT_BACKOFF_S
    later = Journey(context, work(TOKENS)._replace(deadline_s=now_s + SLO.ttft_s))
    assert later.begin(now_s) is Action.ASK_FOR_FLIP
    assert later.wait_until_s == now_s + FLIP_WAIT_S


def test_without_an_acting_autoscaler_no_request_waits() -> None:
    context = make_late_context()
    context.flip_waits.enabled = False
    journey, action = begin(context)
    assert (action, journey.wait_until_s) == (Action.ASK_FOR_FLIP, 0.0)


def test_a_decode_leg_asks_for_a_flip_too() -> None:
    context = make_context(instance("p1"), instance("p2"), instance("d1", decoding=100_000))
    context.flip_rules = FlipProposalRules(enabled=True)
    context.flip_waits.enabled = True
    journey, _ = begin(context)
    assert answer(journey) is Action.ASK_FOR_FLIP
    assert journey.proposal is not None
    assert journey.proposal.role is Role.DECODE
    context.fleet["p2"].role = Role.DECODE
    assert journey.flip_done(0.01) is Action.SEND_DECODE
    assert (targets(journey), journey.has_kv) == (("p1", "p2"), True)


# --- clients that leave ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("when", "action"),
    [
        pytest.param("prefill", Action.ABORT_LEGS, id="during prefill"),
        pytest.param("transfer", Action.ABORT_LEGS, id="before the first byte"),
        pytest.param("decode", Action.ABORT_LEGS, id="during the stream"),
        pytest.param("done", Action.END, id="after the end"),
    ],
)
def test_a_client_that_leaves_aborts_the_leg_in_flight_and_empties_the_ledger(
    when: str, action: Action
) -> None:
    context = make_context()
    journey, _ = begin(context)
    if when != "prefill":
        answer(journey)
    if when in ("decode", "done"):
        journey.first_byte(0.2)
    if when == "done":
        journey.decode_ended(0.3)
    assert (journey.client_left(0.3), journey.proceed(0.3)) == (action, Action.END)
    assert (journey.state, ledgers_are_empty(context)) == (State.DONE, True)
    assert journey.decode_failed(0.4, Failure.CLOSED) is Action.END, "late events change nothing"


# --- other transfer protocols ------------------------------------------------------------------------

PUSH = TransferProtocol(name="push", decode_chosen_first=True, params_in_response=False, leased=False)
ROOM = TransferProtocol(
    name="room", decode_chosen_first=True, legs_at_once=True, params_in_response=False, leased=False
)


def make_other_context(protocol: TransferProtocol) -> JourneyContext[InstanceRecord]:
    """Four instances whose engines speak a made-up protocol."""
    identity = replace(IDENTITY, connector="MadeUp")
    names = ("p1", "p2", "d1", "d2")
    return make_context(
        *(instance(name, identity=identity) for name in names), protocols={"MadeUp": protocol}
    )


def test_a_pushing_prefill_leg_knows_its_decode_instance_and_reserves_it() -> None:
    context = make_other_context(PUSH)
    journey, action = begin(context)
    assert (action, targets(journey)) == (Action.SEND_PREFILL, ("p1", "d1"))
    assert (context.fleet["d1"].ledger.reserved_tokens, journey.decode_open) == (TOKENS, False)
    assert answer(journey, has_params=False) is Action.SEND_DECODE
    assert (targets(journey), journey.has_kv) == (("p1", "d1"), True)
    journey.first_byte(0.2)
    journey.decode_ended(0.3)
    assert ledgers_are_empty(context)


def test_a_pushing_prefill_leg_is_repeated_if_its_decode_instance_stops_serving() -> None:
    context = make_other_context(PUSH)
    journey, _ = begin(context)
    context.fleet["d1"].serving = False
    assert answer(journey, has_params=False) is Action.SEND_PREFILL
    assert (targets(journey), context.fleet["d1"].ledger.reserved_tokens) == (("p1", "d2"), 0)


def test_both_legs_start_at_once_in_a_room_protocol() -> None:
    context = make_other_context(ROOM)
    journey, action = begin(context)
    assert (action, targets(journey)) == (Action.SEND_BOTH, ("p1", "d1"))
    assert (journey.prefill_open, journey.decode_open) == (True, True)
    assert answer(journey, has_params=False) is Action.WAIT
    journey.first_byte(0.2)
    assert (journey.state, journey.decode_ended(0.3)) == (State.DECODE, Action.END)
    assert ledgers_are_empty(context)


def test_a_prefill_leg_that_outlives_its_decode_leg_is_aborted() -> None:
    context = make_other_context(ROOM)
    journey, _ = begin(context)
    journey.first_byte(0.2)
    assert (journey.decode_ended(0.3), journey.proceed(0.1)) == (Action.ABORT_LEGS, Action.END)
    assert ledgers_are_empty(context)


def test_a_prefill_leg_that_fails_while_its_response_is_sent_rules_its_instance_out_for_the_rest() -> None:
    context = make_other_context(ROOM)
    journey, _ = begin(context)
    journey.first_byte(0.2)
    assert journey.prefill_failed(0.3, Failure.CLOSED) is Action.WAIT
    assert journey.decode_failed(0.4, Failure.CLOSED, delivered_tokens=3) is Action.SEND_BOTH
    assert targets(journey) == ("p2", "d2")


@pytest.mark.parametrize(
    ("fail", "targets_after"),
    [
        pytest.param("prefill", ("p2", "d1"), id="the prefill leg fails"),
        pytest.param("decode", ("p1", "d2"), id="the decode leg fails"),
    ],
)
def test_in_a_room_protocol_the_failure_of_one_leg_aborts_the_other(
    fail: str, targets_after: tuple[str, str]
) -> None:
    context = make_other_context(ROOM)
    journey, _ = begin(context)
    failed = journey.prefill_failed if fail == "prefill" else journey.decode_failed
    assert failed(0.1, Failure.STATUS, status=500) is Action.ABORT_LEGS
    assert (journey.prefill_open, journey.decode_open) == (False, False)
    assert journey.proceed(0.1) is Action.SEND_BOTH
    assert targets(journey) == targets_after


@pytest.mark.parametrize(
    ("cached", "cached_on"),
    [
        pytest.param({}, None, id="an earlier turn is nowhere"),
        pytest.param({"d2": 60}, "d2", id="d2 decoded the last turn"),
        pytest.param({"d2": 60, "p1": 60}, None, id="the prefill instance holds as much itself"),
    ],
)
def test_a_prefill_leg_may_fetch_the_last_turn_from_where_it_was_decoded(
    cached: dict[str, int], cached_on: str | None
) -> None:
    protocol = TransferProtocol(name="turns", fetches_cached=True)
    context = make_other_context(protocol)
    journey = Journey(context, work(TOKENS, cached_tokens=cached))
    assert journey.begin(0.0) is Action.SEND_PREFILL
    assert targets(journey)[0] == "p1"
    assert (journey.cached_on.name if journey.cached_on else None) == cached_on
