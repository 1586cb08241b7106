"""Deflection: which decode instance computes a prompt, and which requests are deflected."""

import math
from dataclasses import replace

import pytest

from fulcrum_core.deflection import MIXED_FACTOR, TPOT_SHARE, find_longest_prompt_s
from fulcrum_core.latency import DecodeModel, PrefillModel
from fulcrum_core.values import AdmissionMode, Role
from fulcrum_router.policy import TransferPairs
from fulcrum_router.policy.deflection import CAUGHT_UP_WITHIN_S, can_deflect_in_time, choose_deflection
from fulcrum_router.policy.dispatch import FlipProposalRules
from fulcrum_router.policy.faults.failures import Failure
from fulcrum_router.policy.instance_record import InstanceRecord
from fulcrum_router.policy.journey import Action, Journey, JourneyContext, LocalPrefillReason
from fulcrum_router.policy.ledger import MAX_AWAITED
from fulcrum_router.policy.predictions.learning import LearningInstance
from fulcrum_router.policy.tiers.admission import Admission
from fulcrum_router.policy.tiers.forecast_errors import MIN_SAMPLES, UNKNOWN_FACTOR
from tests.unit.router.builders import DECODE, PREFILL, SLO, FakeFleet, instance, work

TOKENS = 100
"""A prompt of 0.11 s among decodes."""
OUTPUT = 1_000.0
"""Mean answer; it bears each stall that is allowed."""
SPARE = 1.0 - 0.011 / (TPOT_SHARE * SLO.tpot_s)
"""Share of the time that a decode instance with no other request can spare."""


def decode_instance(
    name: str = "d1",
    *,
    decoding: int = 0,
    reserved: int = 0,
    capacity: int | None = None,
    caught_up_at_s: float = 0.0,
    role: Role = Role.DECODE,
    local_s: float = 0.0,
    prefill: PrefillModel = PREFILL,
    decode: DecodeModel = DECODE,
) -> InstanceRecord:
    made = instance(name, role=role, decoding=decoding, reserved=reserved)
    made.kv_capacity_tokens, made.prefill_model, made.decode_model = capacity, prefill, decode
    made.ledger.caught_up_at_s = caught_up_at_s
    if local_s:
        made.ledger.add_local_prefill(tokens=1, predicted_s=local_s, now_s=0.0)
    return made


def test_a_prompt_takes_the_time_that_decode_spares() -> None:
    found = choose_deflection([decode_instance()], work(TOKENS), now_s=0.0, by_s=1.0, output_tokens=OUTPUT)
    assert found is not None
    assert found._asdict() == {"instance": "d1", "recovery_s": pytest.approx(MIXED_FACTOR * 0.1 / SPARE)}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param(decode_instance("d1", decoding=1_000), decode_instance("d2"), id="the smaller batch"),
        pytest.param(decode_instance("d1", caught_up_at_s=0.5), decode_instance("d2"), id="caught up"),
        pytest.param(decode_instance("d3"), decode_instance("d2"), id="equal: by name"),
    ],
)
def test_the_instance_that_catches_up_first_gets_the_prompt(
    first: InstanceRecord, second: InstanceRecord
) -> None:
    found = choose_deflection([first, second], work(TOKENS), now_s=0.0, by_s=1.0, output_tokens=OUTPUT)
    assert found is not None
    assert found.instance == "d2"


@pytest.mark.parametrize(
    ("tokens", "made"),
    [
        pytest.param(TOKENS, decode_instance(decoding=3_000), id="no time to spare"),
        pytest.param(TOKENS, decode_instance(reserved=3_000), id="prompts on their way leave none"),
        pytest.param(TOKENS, decode_instance(decoding=850, capacity=1_000), id="no room in the KV cache"),
        pytest.param(
            TOKENS, decode_instance(caught_up_at_s=CAUGHT_UP_WITHIN_S + 0.1), id="has not caught up"
        ),
        pytest.param(TOKENS, decode_instance(local_s=0.95), id="behind other prompts it would be late"),
        pytest.param(TOKENS, decode_instance(role=Role.BOTH), id="role Both computes prompts anyway"),
        pytest.param(
            TOKENS, decode_instance(prefill=replace(PREFILL, c0=1e308, c1=1e308)), id="an infinite time"
        ),
    ],
)
def test_an_instance_that_cannot_spare_the_time_gets_no_prompt(tokens: int, made: InstanceRecord) -> None:
    assert choose_deflection([made], work(tokens), now_s=0.0, by_s=1.0, output_tokens=OUTPUT) is None


@pytest.mark.parametrize(("seconds_less", "found"), [(0.01, True), (-0.01, False)])
def test_a_stall_has_a_longest_time_however_much_the_answers_bear(
    *, seconds_less: float, found: bool
) -> None:
    longest_s = find_longest_prompt_s(tpot_s=SLO.tpot_s, output_tokens=5_000.0)  # what `balanced` counts on
    tokens = int(1_000 * (longest_s - seconds_less))
    chosen = choose_deflection([decode_instance()], work(tokens), now_s=0.0, by_s=10.0, output_tokens=5_000.0)
    assert (chosen is not None) is found


@pytest.mark.parametrize(("output_tokens", "found"), [(16.0, True), (15.0, False)])
def test_answers_that_a_stall_would_make_late_keep_prompts_away(*, output_tokens: float, found: bool) -> None:
    """0.11 s of a quarter of what 16 tokens have left: 16 × (0.04 − 0.011) s / 4 = 0.116 s."""
    chosen = choose_deflection(
        [decode_instance()], work(TOKENS), now_s=0.0, by_s=1.0, output_tokens=output_tokens
    )
    assert (chosen is not None) is found


@pytest.mark.parametrize(
    ("caught_up_at_s", "found"), [(0.0, True), (0.005, True), (0.01, False), (0.5, False)]
)
def test_stalls_one_after_the_other_are_one_stall_for_a_short_answer(
    *, caught_up_at_s: float, found: bool
) -> None:
    """With answers of 16 tokens it is 16 × 0.04 s / 4 = 0.16 s in all, of which the prompt takes 0.152 s."""
    made = decode_instance(caught_up_at_s=caught_up_at_s)
    chosen = choose_deflection([made], work(TOKENS), now_s=0.0, by_s=1.0, output_tokens=16.0)
    assert (chosen is not None) is found


@pytest.mark.parametrize(("decoding", "found"), [(2_890, True), (2_895, False), (2_900, False)])
def test_no_prompt_takes_the_spare_time_of_minutes(*, decoding: int, found: bool) -> None:
    """Answers may be long: the instance would get no other prompt until its decodes have caught up."""
    made = decode_instance(decoding=decoding)
    chosen = choose_deflection([made], work(TOKENS), now_s=0.0, by_s=1.0, output_tokens=1e30)
    assert (chosen is not None) is found


def test_an_excluded_instance_gets_no_prompt() -> None:
    assert (
        choose_deflection(
            [decode_instance()], work(TOKENS), now_s=0.0, by_s=1.0, output_tokens=OUTPUT, exclude=("d1",)
        )
        is None
    )


def test_the_part_of_a_prompt_in_the_prefix_cache_takes_no_time() -> None:
    found = choose_deflection(
        [decode_instance()], work(TOKENS, cached_tokens={"d1": 90}), now_s=0.0, by_s=1.0, output_tokens=OUTPUT
    )
    assert found is not None
    assert found._asdict() == {"instance": "d1", "recovery_s": pytest.approx(MIXED_FACTOR * 0.01 / SPARE)}


def test_decode_catches_up_with_one_prompt_after_the_other() -> None:
    ledger = decode_instance().ledger
    caught_up = []
    for now_s in (10.0, 10.5, 20.0):
        ledger.deflect(recovery_s=2.0, now_s=now_s)
        caught_up.append(ledger.caught_up_at_s)
    assert caught_up == [12.0, 14.0, 22.0]


@pytest.mark.parametrize(
    ("due_s", "found"),
    [
        pytest.param([0.15], True, id="after the prompt"),
        pytest.param([0.14], False, id="before its end, if it takes 1.3 times as long"),
        pytest.param([-0.1], True, id="overdue"),
        pytest.param([9.0] * MAX_AWAITED, True, id="all have much time"),
        pytest.param([9.0] * (MAX_AWAITED + 1), False, id="too many to look at"),
        pytest.param([-0.1] * (MAX_AWAITED + 1), True, id="many that are overdue"),
        pytest.param([-0.1] * MAX_AWAITED + [0.14], False, id="one among many that are overdue"),
    ],
)
def test_a_prompt_delays_no_first_token_that_is_due(*, due_s: list[float], found: bool) -> None:
    """The prompt takes 0.11 s."""
    made = decode_instance()
    for each_s in due_s:
        made.ledger.add_decode(tokens=0).await_first_token(each_s, 0)
    chosen = choose_deflection([made], work(TOKENS), now_s=0.0, by_s=1.0, output_tokens=OUTPUT)
    assert (chosen is not None) is found


@pytest.mark.parametrize(("priority", "found"), [(9, True), (10, False), (11, False)])
def test_a_prompt_may_delay_the_first_tokens_of_lower_tiers(*, priority: int, found: bool) -> None:
    made = decode_instance()
    made.ledger.add_decode(tokens=0).await_first_token(0.1, priority)
    prompt = work(TOKENS, priority=10)
    chosen = choose_deflection([made], prompt, now_s=0.0, by_s=1.0, output_tokens=OUTPUT)
    assert (chosen is not None) is found


def test_prompts_in_front_delay_a_first_token_too() -> None:
    made = decode_instance(local_s=0.5)
    made.ledger.add_decode(tokens=0).await_first_token(0.6, 0)
    assert choose_deflection([made], work(TOKENS), now_s=0.0, by_s=1.0, output_tokens=OUTPUT) is None


@pytest.mark.parametrize(
    ("queued_s", "is_streamed", "awaited"),
    [
        pytest.param(0.0, True, [(1.0, 0)], id="after its prefill"),
        pytest.param(0.0, False, [], id="nobody will see it"),
        pytest.param(5.0, True, [], id="deflected: its own prompt goes first"),
    ],
)
def test_a_first_token_is_awaited_until_it_comes(
    queued_s: float, awaited: list[tuple[float, int]], *, is_streamed: bool
) -> None:
    context = make_context(queued_s=queued_s)
    journey = Journey(context, work(TOKENS, is_streamed=is_streamed))
    if journey.begin(0.0) is Action.SEND_PREFILL:
        journey.prefill_responded(0.1, lease_from_s=0.0, has_params=True)
    assert journey.decode_instance is not None
    ledger = journey.decode_instance.ledger
    before = list(ledger.awaited_first_tokens.values())
    journey.first_byte(0.2)
    assert (before, ledger.awaited_first_tokens, ledger.decode_legs) == (awaited, {}, 1)


def make_context(
    *, queued_s: float, deflects: bool = True, ahead_s: float = math.inf
) -> JourneyContext[InstanceRecord]:
    """One prefill instance with so much work, and two decode instances."""
    fleet = FakeFleet([instance("p1", queued_s=queued_s), instance("d1"), instance("d2")])
    context: JourneyContext[InstanceRecord] = JourneyContext(fleet, TransferPairs())
    context.deflects, context.waiting_room.prefill_ahead_s = deflects, ahead_s
    return context


@pytest.mark.parametrize(
    ("queued_s", "deflects", "expected"),
    [
        pytest.param(0.5, True, (Action.SEND_PREFILL, None), id="prefill is in time"),
        pytest.param(5.0, True, (Action.SEND_DECODE, LocalPrefillReason.DEFLECTED), id="prefill is late"),
        pytest.param(0.6, True, (Action.SEND_DECODE, LocalPrefillReason.DEFLECTED), id="prefill is at risk"),
        pytest.param(5.0, False, (Action.SEND_PREFILL, None), id="switched off"),
    ],
)
def test_a_request_that_prefill_would_make_late_is_deflected(
    queued_s: float, deflects: bool, expected: tuple[Action, LocalPrefillReason | None]
) -> None:
    journey = Journey(make_context(queued_s=queued_s, deflects=deflects), work(TOKENS))
    assert (journey.begin(0.0), journey.local_prefill_reason) == expected


@pytest.mark.parametrize(
    ("priority", "reason"),
    [
        pytest.param(10, LocalPrefillReason.DEFLECTED, id="the highest tier"),
        pytest.param(0, None, id="a lower one"),
    ],
)
def test_prompts_of_lower_tiers_stall_no_answers_while_a_higher_tier_sends_requests(
    priority: int, reason: LocalPrefillReason | None
) -> None:
    context = make_context(queued_s=5.0)
    context.decode_share.set_tiers({0, 10}, tpot_s=SLO.tpot_s)
    context.record_admitted(work(1, priority=10), 0.0)
    journey = Journey(context, work(TOKENS, priority=priority))
    journey.begin(0.0)
    assert journey.local_prefill_reason is reason


@pytest.mark.parametrize("mode", AdmissionMode)
def test_a_deflected_request_is_demand(mode: AdmissionMode) -> None:
    context = make_context(queued_s=5.0)
    context.admission.mode = mode
    journey = Journey(context, work(TOKENS))
    journey.begin(0.0)
    counted = context.demand.snapshot().requests, context.retry_budget.requests
    assert (journey.local_prefill_reason, counted) == (LocalPrefillReason.DEFLECTED, (1, 1))


def test_a_deflected_request_leaves_nothing_in_the_ledger_but_the_time_to_catch_up() -> None:
    context = make_context(queued_s=5.0)
    journey = Journey(context, work(TOKENS))
    journey.begin(0.0)
    ledger = context.fleet["d1"].ledger
    during = ledger.local_prefills, ledger.decode_legs
    journey.first_byte(0.1)
    journey.decode_ended(1.0)
    assert (during, ledger.local_prefills, ledger.decode_legs, ledger.prefill_queued_s) == ((1, 1), 0, 0, 0.0)
    assert ledger.caught_up_at_s == pytest.approx(MIXED_FACTOR * 0.1 / SPARE)


@pytest.mark.parametrize(
    ("left_at_s", "share"),
    [
        pytest.param(0.0, 0.0, id="at once"),
        pytest.param(0.05, 0.5, id="when half of the prompt can be computed"),
        pytest.param(3.0, 1.0, id="when the whole prompt can be computed"),
    ],
)
@pytest.mark.parametrize("fails", [False, True], ids=["client leaves", "leg fails"])
def test_a_prompt_that_is_given_up_takes_no_spare_time_of_others(
    left_at_s: float, share: float, *, fails: bool
) -> None:
    """Otherwise a client that sends long prompts and leaves would keep all others from being deflected."""
    context = make_context(queued_s=5.0)
    ledger, computed_s = context.fleet["d1"].ledger, PREFILL.ttft_s(TOKENS)
    journey = Journey(context, work(TOKENS))
    journey.begin(0.0)
    whole_s = ledger.caught_up_at_s
    if fails:
        journey.decode_failed(left_at_s * computed_s / 0.1, Failure.STATUS, status=500)
    else:
        journey.client_left(left_at_s * computed_s / 0.1)
    assert ledger.caught_up_at_s == pytest.approx(share * whole_s)


def test_a_prompt_that_the_engine_rejects_takes_no_spare_time_of_others() -> None:
    context = make_context(queued_s=5.0)
    journey = Journey(context, work(TOKENS))
    journey.begin(0.0)
    journey.first_byte(0.001)
    journey.decode_rejected(0.001)
    assert context.fleet["d1"].ledger.caught_up_at_s == pytest.approx(0.0)


def test_a_continued_stream_that_is_rejected_gives_back_no_time() -> None:
    """The deflected prompt was computed; another instance was to continue after it."""
    context = make_context(queued_s=5.0)
    journey = Journey(context, work(TOKENS))
    journey.begin(0.0)
    ledgers = [context.fleet[name].ledger for name in ("d1", "d2")]
    before = [ledger.caught_up_at_s for ledger in ledgers]
    journey.first_byte(0.1)
    context.deflects = False
    journey.decode_failed(0.2, Failure.CLOSED, delivered_tokens=1)
    journey.decode_rejected(0.3)
    assert [ledger.caught_up_at_s for ledger in ledgers] == before


def test_a_request_is_deflected_before_it_asks_for_a_flip() -> None:
    actions = []
    for caught_up_at_s in (0.0, 9.0):
        context = make_context(queued_s=5.0)
        context.flip_rules = FlipProposalRules(enabled=True)
        for name in ("d1", "d2"):
            context.fleet[name].ledger.caught_up_at_s = caught_up_at_s
        actions.append(Journey(context, work(TOKENS)).begin(0.0))
    assert actions == [Action.SEND_DECODE, Action.ASK_FOR_FLIP]


def test_a_request_whose_leg_on_an_instance_failed_is_not_deflected_there() -> None:
    context = make_context(queued_s=5.0)
    journey = Journey(context, work(TOKENS))
    journey.begin(0.0)
    assert journey.decode_instance is not None
    assert journey.decode_instance.name == "d1"
    assert journey.decode_failed(0.0, Failure.CLOSED) is Action.SEND_DECODE
    assert (journey.decode_instance.name, journey.local_prefill_reason) == (
        "d2",
        LocalPrefillReason.DEFLECTED,
    )


def test_a_long_prompt_stays_on_an_idle_prefill_instance() -> None:
    """It is at risk there, but among decodes it takes longer."""
    journey = Journey(make_context(queued_s=0.0), work(680))
    assert (journey.begin(0.0), journey.local_prefill_reason) == (Action.SEND_PREFILL, None)


@pytest.mark.parametrize(
    ("queued_s", "now_s", "expected"),
    [
        pytest.param(0.9, 0.1, [Action.SEND_DECODE], id="prefill is late"),
        pytest.param(0.55, 0.0, [], id="prefill is in time"),
        pytest.param(9.0, 0.95, [], id="late everywhere"),
    ],
)
def test_a_waiting_request_is_deflected_while_that_helps(
    queued_s: float, now_s: float, expected: list[Action]
) -> None:
    context = make_context(queued_s=queued_s, ahead_s=0.5)
    waiting = Journey(context, work(TOKENS))
    moved: list[Action] = []
    waiting.on_moved = moved.append
    began = waiting.begin(0.0)
    context.waiting_room.tick(now_s)
    assert (began, moved) == (Action.WAIT, expected)


def test_a_request_that_is_late_everywhere_lets_those_behind_it_be_deflected() -> None:
    context = make_context(queued_s=9.0, ahead_s=0.5)
    moved: list[str] = []
    for name, tokens in (("long", 950), ("short", TOKENS)):
        journey = Journey(context, work(tokens))
        journey.on_moved = lambda _action, name=name: moved.append(name)
        assert journey.begin(0.0) is Action.WAIT
    context.waiting_room.tick(0.1)
    assert moved == ["short"]


def test_a_late_request_that_waits_for_prefill_lets_other_tenants_be_deflected() -> None:
    context = make_context(queued_s=9.0, ahead_s=0.5)
    moved: list[str] = []
    for now_s, tenant, tokens in ((0.1, "late", 950), (0.2, "in time", TOKENS)):
        journey = Journey(context, work(tokens, tenant=tenant))
        journey.on_moved = lambda _action, tenant=tenant: moved.append(tenant)
        assert journey.begin(now_s) is Action.WAIT
        context.waiting_room.tick(now_s)
    assert moved == ["in time"]


def test_a_request_is_not_late_because_decode_has_no_time_at_this_moment() -> None:
    context = make_context(queued_s=9.0, ahead_s=0.5)
    for name in ("d1", "d2"):
        context.fleet[name].ledger.caught_up_at_s = 1.3
    journey = Journey(context, work(TOKENS))
    assert journey.begin(0.0) is Action.WAIT
    states = []
    for now_s in (0.1, 0.5):
        context.waiting_room.tick(now_s)
        states.append((context.waiting_room.in_time_prefill_s, journey.local_prefill_reason))
    assert states == [(pytest.approx(0.1), None), (0.0, LocalPrefillReason.DEFLECTED)]


@pytest.mark.parametrize(
    ("made", "tokens", "output_tokens", "expected"),
    [
        pytest.param(decode_instance(), TOKENS, OUTPUT, True, id="with time to spare"),
        pytest.param(decode_instance(caught_up_at_s=1.8), TOKENS, OUTPUT, True, id="catches up in time"),
        pytest.param(decode_instance(caught_up_at_s=1.95), TOKENS, OUTPUT, False, id="catches up too late"),
        pytest.param(decode_instance(local_s=0.8), TOKENS, OUTPUT, True, id="behind other prompts, in time"),
        pytest.param(decode_instance(local_s=0.95), TOKENS, OUTPUT, False, id="behind too many"),
        pytest.param(
            decode_instance(decoding=90_000), TOKENS, OUTPUT, True, id="a batch that may get smaller"
        ),
        pytest.param(decode_instance(role=Role.BOTH), TOKENS, OUTPUT, False, id="not a decode instance"),
        pytest.param(decode_instance(), TOKENS, 10.0, False, id="longer than short answers bear"),
        pytest.param(decode_instance(), 1_000, OUTPUT, False, id="longer than the time that is left"),
    ],
)
def test_an_instance_may_compute_a_prompt_in_time_if_it_will_have_the_time(
    made: InstanceRecord, tokens: int, output_tokens: float, *, expected: bool
) -> None:
    assert can_deflect_in_time(made, work(tokens), now_s=0.0, output_tokens=output_tokens) == expected


def test_a_prompt_that_is_longer_than_one_stall_is_not_deflected_later() -> None:
    slow = work(1_400)._replace(deadline_s=9.0)
    fits, too_long = (
        can_deflect_in_time(decode_instance(), request, now_s=0.0, output_tokens=OUTPUT)
        for request in (slow._replace(prompt_tokens=1_300), slow)
    )
    assert (fits, too_long) == (True, False)


def test_a_retried_request_without_any_instance_fails_behind_a_late_one() -> None:
    fleet = FakeFleet([instance("d1"), instance("d2")])
    context: JourneyContext[InstanceRecord] = JourneyContext(fleet, TransferPairs())
    context.deflects, context.waiting_room.prefill_ahead_s = True, 0.5
    retried = Journey(context, work(TOKENS, tenant="retried")._replace(deadline_s=9.0))
    retried.begin(0.0)
    assert retried.decode_instance is not None
    failed_on = retried.decode_instance.name
    for name in ("d1", "d2"):
        fleet[name].ledger.add_local_prefill(tokens=0, predicted_s=3.0, now_s=0.0)
    moved: list[Action] = []
    retried.on_moved = moved.append
    retried.decode_failed(0.1, Failure.STATUS, status=500)
    Journey(context, work(950, tenant="late", priority=1)).begin(0.2)
    context.waiting_room.tick(1.5)
    fleet.instances = tuple(i for i in fleet.instances if i.name == failed_on)
    context.waiting_room.tick(1.6)
    assert moved == [Action.FAIL]


def test_a_cached_prompt_does_not_pass_a_late_request_that_waits_for_prefill() -> None:
    context = make_context(queued_s=0.6, ahead_s=0.5)
    context.set_prefix_aware(True)
    moved: list[str] = []
    for now_s, tenant, cached in ((0.0, "late", {}), (0.05, "cached", {"p1": 990})):
        journey = Journey(context, work(1_000, tenant=tenant))
        journey.on_moved = lambda _action, tenant=tenant: moved.append(tenant)
        journey.begin(now_s)
        journey.work = journey.work._replace(cached_tokens=cached)
        context.waiting_room.tick(now_s)
    assert moved == []


@pytest.mark.parametrize(("deflects", "factor"), [(True, UNKNOWN_FACTOR), (False, 0.5)])
def test_forecasts_are_not_corrected_by_deflected_requests(*, deflects: bool, factor: float) -> None:
    """Their forecast is 0.8 s, behind the work of prefill, and they take 0.3 s elsewhere."""
    admission = Admission()
    admission.mode = AdmissionMode.ADVISE
    for _ in range(MIN_SAMPLES):
        context = make_context(queued_s=0.7, deflects=deflects, ahead_s=0.5)
        context.admission = admission
        journey = Journey(context, work(TOKENS))
        assert journey.begin(0.0) is Action.WAIT
        context.waiting_room.tick(0.1 if deflects else 0.25)
        journey.first_byte(0.3)
    assert admission.errors.factor == factor


def test_a_waiting_request_is_not_deflected_while_decode_has_no_room_for_its_tier() -> None:
    context = make_context(queued_s=9.0, ahead_s=0.5)
    context.decode_share.set_tiers((0, 1), tpot_s=SLO.tpot_s)
    for name in ("d1", "d2"):
        context.fleet[name].kv_capacity_tokens = 1_000
        context.fleet[name].ledger.add_decode(tokens=700)
    low, high = (Journey(context, work(TOKENS, priority=priority)) for priority in (0, 1))
    moved: list[str] = []
    low.on_moved = lambda _action: moved.append("low")
    high.on_moved = lambda _action: moved.append("high")
    for journey in (low, high):
        journey.begin(0.0)
    context.waiting_room.tick(0.1)
    assert moved == ["high"]


def test_deflected_prompts_are_no_decode_load() -> None:
    learning = LearningInstance("d", PREFILL, DECODE)
    learning.ledger.add_decode(tokens=1_000)
    learning.ledger.deflect(recovery_s=2.0, now_s=10.0)
    latencies = [learning.discount_deflected(itl_s, since_s=11.0) for itl_s in (0.045, 0.015, None)]
    latencies.append(learning.discount_deflected(0.045, since_s=12.0))
    assert latencies == [pytest.approx(0.02), 0.015, None, 0.045]


def test_no_decode_time_is_learned_from_a_second_with_a_deflected_prompt() -> None:
    learning = LearningInstance("d", PREFILL, DECODE)
    learning.ledger.add_decode(tokens=80_000)
    batches = [learning.measure_batch()]
    learning.ledger.deflect(recovery_s=1.0, now_s=0.0)
    batches += [learning.measure_batch() for _ in range(2)]
    assert batches == [80_000, 0, 80_000]
