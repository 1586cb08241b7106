"""Admission: which requests are refused, why, and when they may be sent again."""

from dataclasses import dataclass
from typing import Any

import pytest

from fulcrum_core.values import AdmissionMode, OverloadAction, Role, Slo
from fulcrum_router.policy import TransferPairs
from fulcrum_router.policy.instance_record import InstanceRecord
from fulcrum_router.policy.journey import Action, Journey, JourneyContext, LocalPrefillReason, StopReason
from fulcrum_router.policy.starts import ComingInstance
from fulcrum_router.policy.tiers.admission import (
    AdmissionDecision,
    Admitted,
    Forecast,
    Refusal,
    RefusalReason,
    TierAdmission,
    judge_request,
    predict_admission,
)
from fulcrum_router.policy.tiers.forecast_errors import MIN_SAMPLES
from fulcrum_router.policy.tiers.tier_reserve import Reserve
from tests.unit.router.builders import SLO, FakeFleet, instance, work

EVERY_TIER = TierAdmission()


def forecast(
    *, ttft_s: float = 0.5, alone_s: float = 0.1, load: float = 0.5, stay_s: float = 4.0
) -> Forecast:
    return Forecast(ttft_s, alone_s, load, stay_s)


@pytest.mark.parametrize(
    ("found", "tier", "reason", "retry_after_s"),
    [
        pytest.param(forecast(), EVERY_TIER, None, 0, id="a request in time is admitted"),
        pytest.param(forecast(ttft_s=1.0), EVERY_TIER, None, 0, id="just in time is in time"),
        pytest.param(forecast(ttft_s=3.4), EVERY_TIER, "prefill_full", 3, id="late by 2.4 s: again in 3 s"),
        pytest.param(forecast(ttft_s=1.1), EVERY_TIER, "prefill_full", 1, id="at least a second"),
        pytest.param(forecast(ttft_s=1e9), EVERY_TIER, "prefill_full", 60, id="at most a minute"),
        pytest.param(forecast(load=1.0), EVERY_TIER, None, 0, id="decode just full is not over"),
        pytest.param(forecast(load=2.0), EVERY_TIER, "decode_full", 2, id="half of decode ends in 2 s"),
        pytest.param(
            forecast(ttft_s=3.0, alone_s=3.0), EVERY_TIER, None, 0, id="too long for any SLO, instance idle"
        ),
        pytest.param(
            forecast(ttft_s=3.5, alone_s=3.0), EVERY_TIER, "prefill_full", 1, id="too long, no instance idle"
        ),
        pytest.param(
            forecast(ttft_s=9.0, load=9.0), TierAdmission(sheddable=False), None, 0, id="not sheddable"
        ),
    ],
)
def test_a_request_is_refused_if_it_would_be_late_or_decode_full(
    found: Forecast, tier: TierAdmission, reason: str | None, retry_after_s: int
) -> None:
    outcome = judge_request(found, work(100), tier)
    shown = (outcome.reason, outcome.retry_after_s) if isinstance(outcome, Refusal) else (None, 0)
    assert shown == (reason, retry_after_s)


QUEUE = TierAdmission(action=OverloadAction.QUEUE, max_queue_s=5.0)
DEGRADE = TierAdmission(action=OverloadAction.DEGRADE, max_output_tokens=50)


@pytest.mark.parametrize(
    ("found", "tier", "admitted"),
    [
        pytest.param(
            forecast(alone_s=0.1), EVERY_TIER, Admitted(give_up_at_s=0.9), id="until it cannot be in time"
        ),
        pytest.param(
            forecast(ttft_s=3.0, alone_s=3.0), EVERY_TIER, Admitted(give_up_at_s=0.0), id="never in time"
        ),
        pytest.param(forecast(), QUEUE, Admitted(give_up_at_s=5.0), id="Queue: for the longest wait"),
        pytest.param(
            forecast(ttft_s=5.0), QUEUE, Admitted(AdmissionDecision.QUEUE, 5.0), id="Queue: served late"
        ),
        pytest.param(
            forecast(load=5.0), QUEUE, Admitted(AdmissionDecision.QUEUE, 5.0), id="Queue: waits for decode"
        ),
        pytest.param(
            forecast(load=0.9),
            DEGRADE,
            Admitted(AdmissionDecision.DEGRADE, 0.9, 50),
            id="Degrade: less output while decode is nearly full",
        ),
        pytest.param(forecast(load=0.7), DEGRADE, Admitted(give_up_at_s=0.9), id="Degrade: decode has room"),
    ],
)
def test_an_admitted_request_is_served_as_its_tier_says(
    found: Forecast, tier: TierAdmission, admitted: Admitted
) -> None:
    assert judge_request(found, work(100), tier) == admitted


@pytest.mark.parametrize(
    ("found", "tier", "reason", "retry_after_s"),
    [
        pytest.param(forecast(ttft_s=8.1), QUEUE, "prefill_full", 3, id="Queue: waits longer than it may"),
        pytest.param(forecast(load=2.0, stay_s=20.0), QUEUE, "decode_full", 5, id="Queue: decode too full"),
        pytest.param(forecast(load=1.5), DEGRADE, "decode_full", 2, id="Degrade: less output is not enough"),
        pytest.param(forecast(ttft_s=3.0), DEGRADE, "prefill_full", 2, id="Degrade: does not help prefill"),
    ],
)
def test_a_tier_refuses_what_it_cannot_help(
    found: Forecast, tier: TierAdmission, reason: str, retry_after_s: int
) -> None:
    outcome = judge_request(found, work(100), tier)
    assert isinstance(outcome, Refusal)
    assert (outcome.reason, outcome.retry_after_s) == (reason, retry_after_s)


def test_a_request_that_asks_for_little_output_is_not_degraded() -> None:
    request = work(100, output_limit=50)
    assert judge_request(forecast(load=0.9), request, DEGRADE) == Admitted(give_up_at_s=0.9)


@dataclass(frozen=True)
class Predicted:
    """A prediction for a prompt of 100 tokens (0.1 s) by default."""

    prefill: tuple[InstanceRecord, ...] = (instance("p1"),)
    decode: tuple[InstanceRecord, ...] = (instance("d1"),)
    backlog_s: float = 0.0
    output_tokens: float = 0.0
    mean_output_tokens: float = 100.0
    output_tokens_in_decode: float = 100.0
    leaves_room: bool = False
    coming: tuple[ComingInstance, ...] = ()

    def find(self, **fields: Any) -> Forecast:
        return predict_admission(
            self.prefill,
            self.decode,
            work(100)._replace(**fields),
            now_s=0.0,
            backlog_s=self.backlog_s,
            output_tokens=self.output_tokens,
            mean_output_tokens=self.mean_output_tokens,
            output_tokens_in_decode=self.output_tokens_in_decode,
            delays={},
            leaves_room=self.leaves_room,
            coming=self.coming,
        )


@pytest.mark.parametrize(
    ("predicted", "ttft_s"),
    [
        pytest.param(Predicted(), 0.111, id="alone: the prompt and a step"),
        pytest.param(
            Predicted(prefill=(instance("p1", queued_s=3.0), instance("p2", queued_s=2.0))),
            2.111,
            id="the instance with the least work",
        ),
        pytest.param(
            Predicted(prefill=(instance("p1", queued_s=0.5), instance("p2", queued_s=0.5)), backlog_s=3.0),
            2.111,
            id="work that waits in the router is shared by the instances",
        ),
        pytest.param(
            Predicted(backlog_s=5.0, coming=(ComingInstance(2.0, Role.PREFILL),)),
            3.611,
            id="an instance that starts takes its share from then on",
        ),
        pytest.param(
            Predicted(
                backlog_s=5.0, coming=(ComingInstance(1.0, Role.DECODE), ComingInstance(6.0, Role.PREFILL))
            ),
            5.111,
            id="one that serves later, or decodes, takes none",
        ),
        pytest.param(
            Predicted(prefill=(instance("p1", queued_s=4.0),), decode=(instance("d1", queued_s=2.0),)),
            6.111,
            id="local prefills of the decode instance",
        ),
    ],
)
def test_the_predicted_ttft_counts_the_work_in_front(predicted: Predicted, ttft_s: float) -> None:
    found = predicted.find()
    assert (found.ttft_s, found.alone_s) == pytest.approx((ttft_s, 0.111))


@pytest.mark.parametrize(
    ("queued_s", "is_admitted"),
    [
        pytest.param((0.0,), True, id="the only instance is idle"),
        pytest.param((0.0, 0.9), True, id="another instance can still serve others in time"),
        pytest.param((0.0, 5.0), False, id="all others compute such prompts"),
        pytest.param((0.0, 5.0, 0.2), True, id="one of the others does"),
        pytest.param((0.5, 0.9), False, id="no instance is idle"),
    ],
)
def test_a_prompt_that_misses_its_objective_alone_leaves_an_instance_to_others(
    queued_s: tuple[float, ...], is_admitted: bool
) -> None:
    """It takes 3 s, and its objective is 1 s."""
    prefill = tuple(instance(f"p{n}", queued_s=seconds) for n, seconds in enumerate(queued_s))
    found = Predicted(prefill=prefill).find(prompt_tokens=3_000)
    outcome = judge_request(found, work(3_000), EVERY_TIER)
    assert isinstance(outcome, Admitted) is is_admitted


def test_decode_is_predicted_for_the_end_of_the_prefill() -> None:
    """3,000 tokens decode at 40 ms: 100 tokens of output take 4 s, so half of them end within 2 s."""
    decode = (instance("d1", decoding=3_000),)
    now = Predicted(decode=decode).find()
    later = Predicted(prefill=(instance("p1", queued_s=1.9),), decode=decode).find()
    assert now.decode_stay_s == pytest.approx(4.0)
    loads = [(3_000 * running + 100) / 4_000 for running in (0.975, 0.5)]
    assert [now.decode_load, later.decode_load] == pytest.approx(loads)


def test_a_decode_instance_that_starts_counts_if_it_serves_by_then() -> None:
    decode, busy = (instance("d1", decoding=3_000),), (instance("p1", queued_s=1.9),)
    alone, later, sooner = (
        Predicted(prefill=busy, decode=decode, coming=coming).find().decode_load
        for coming in ((), (ComingInstance(2.1, Role.DECODE),), (ComingInstance(1.9, Role.DECODE),))
    )
    assert (later, sooner) == pytest.approx((alone, alone / 2))


def test_long_answers_stay_in_decode_for_longer_than_the_mean_answer_takes() -> None:
    """3,000 tokens decode at 40 ms: an answer of 200 tokens takes 8 s, so three quarters remain after 2 s."""
    decode = (instance("d1", decoding=3_000),)
    prefill = (instance("p1", queued_s=1.9),)
    found = Predicted(prefill=prefill, decode=decode, output_tokens_in_decode=200.0).find()
    assert (found.decode_stay_s, found.decode_load) == pytest.approx((8.0, (3_000 * 0.75 + 100) / 4_000))


def test_prompts_that_are_computed_for_decode_count_before_they_arrive() -> None:
    none = Predicted().find()
    reserved = Predicted(decode=(instance("d1", reserved=3_000),)).find()
    waiting = Predicted(prefill=(instance("p1"),), backlog_s=3.0).find()
    assert none.decode_load == pytest.approx(100 / 4_000)
    assert reserved.decode_load > 0.7
    assert waiting.decode_load > none.decode_load


def test_lower_tiers_leave_room_in_decode() -> None:
    decode = (instance("d1", decoding=3_700),)
    highest = Predicted(decode=decode).find()
    lower = Predicted(decode=decode, leaves_room=True).find()
    assert (highest.decode_load < 1.0, lower.decode_load > 1.0) == (True, True)


@pytest.mark.parametrize(
    ("fields", "own_tokens"),
    [
        pytest.param({}, 150, id="one prompt"),
        pytest.param({"choices": 4}, 600, id="one prompt with four choices"),
        pytest.param({"choices": 4, "prompts": 4}, 300, id="four prompts, 100 tokens together"),
        pytest.param({"choices": 8, "prompts": 4}, 600, id="four prompts with two choices each"),
    ],
)
def test_decode_reads_each_prompt_once_for_each_of_its_choices(
    fields: dict[str, int], own_tokens: int
) -> None:
    found = Predicted(output_tokens=50.0).find(**fields)
    assert found.decode_load == pytest.approx(own_tokens / 4_000)


def test_a_request_larger_than_decode_counts_as_half_of_it() -> None:
    assert Predicted(output_tokens=100_000.0).find().decode_load == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("decode", "load", "stay_s"),
    [
        pytest.param((10**15, 0), 0.5, 3.0, id="one is full"),
        pytest.param((10**15, 2_000), 0.75, 4.0, id="one is full, the other half full"),
        pytest.param((6_000, 6_000), 1.5, 7.0, id="all are over their limits alike"),
        pytest.param((10**15, 6_000), 1.5, 7.0, id="one is far over its limit: the other is free first"),
    ],
)
def test_an_instance_that_is_far_over_its_limit_takes_no_room_of_others(
    decode: tuple[int, ...], load: float, stay_s: float
) -> None:
    """Each may decode 4,000 tokens."""
    instances = tuple(instance(f"d{number}", decoding=tokens) for number, tokens in enumerate(decode))
    found = Predicted(decode=instances, prefill=(instance("p1", queued_s=0.0),)).find(prompt_tokens=0)
    assert (found.decode_load, found.decode_stay_s) == pytest.approx((load, stay_s))


def test_reservations_for_one_instance_take_no_room_of_others() -> None:
    instances = (instance("d1", reserved=10**15), instance("d2"))
    assert Predicted(decode=instances).find().decode_load < 0.6


@pytest.mark.parametrize(
    ("decode", "slo"),
    [
        pytest.param((), SLO, id="no decode instance"),
        pytest.param(
            (instance("d1", decoding=10_000),), Slo(1.0, 0.001), id="an objective that an empty step misses"
        ),
    ],
)
def test_what_cannot_be_predicted_refuses_nobody(decode: tuple[InstanceRecord, ...], slo: Slo) -> None:
    assert Predicted(decode=decode).find(slo=slo).decode_load == 0.0


def make_context(mode: AdmissionMode, *, queued_s: float) -> JourneyContext[InstanceRecord]:
    context = JourneyContext(FakeFleet((instance("p1", queued_s=queued_s), instance("d1"))), TransferPairs())
    context.admission.mode = mode
    for _ in range(MIN_SAMPLES):
        context.admission.errors.learn(forecast_s=1.0, measured_s=1.0, objective_s=1.0)
    return context


@pytest.mark.parametrize(
    ("mode", "action", "counted"),
    [
        pytest.param(AdmissionMode.OFF, Action.SEND_PREFILL, {}, id="Off decides nothing"),
        pytest.param(
            AdmissionMode.ADVISE,
            Action.SEND_PREFILL,
            {"refuse": 1, "prefill_full": 1},
            id="Advise only counts",
        ),
        pytest.param(
            AdmissionMode.ENFORCE, Action.FAIL, {"refuse": 1, "prefill_full": 1}, id="Enforce refuses"
        ),
    ],
)
def test_only_enforce_refuses_a_request(mode: AdmissionMode, action: Action, counted: dict[str, int]) -> None:
    context = make_context(mode, queued_s=5.0)
    journey = Journey(context, work(100, tier="free"))
    assert journey.begin(0.0) is action
    found = context.admission.counts.get((mode, "free"))
    counts = [] if found is None else [*found.decisions.items(), *found.refusals.items()]
    assert {str(name): count for name, count in counts if count} == counted


def test_a_refused_request_leaves_nothing_in_the_ledgers() -> None:
    context = make_context(AdmissionMode.ENFORCE, queued_s=5.0)
    journey = Journey(context, work(100, tier="free"))
    journey.begin(0.0)
    ledgers = [(i.ledger.legs, i.ledger.reserved_tokens) for i in (context.fleet["p1"], context.fleet["d1"])]
    message = "the first token would come after 5.1 s, the objective is 1 s"
    assert (journey.stop_reason, journey.refusal, ledgers) == (
        StopReason.REFUSED,
        Refusal(RefusalReason.PREFILL_FULL, 5, message),
        [(1, 0), (0, 0)],
    )


def test_refused_requests_are_asked_to_come_back_one_after_another() -> None:
    """Each takes 0.1 s of the one prefill instance, of which those who come back are to fill 0.3."""
    context = make_context(AdmissionMode.ENFORCE, queued_s=5.0)
    times = []
    for now_s in [0.0] * 10 + [30.0]:
        journey = Journey(context, work(100)._replace(deadline_s=now_s + SLO.ttft_s))
        journey.begin(now_s)
        assert journey.refusal is not None
        times.append(journey.refusal.retry_after_s)
    assert times == [5, 6, 6, 7, 7, 7, 8, 8, 8, 9, 5]


def test_an_admitted_request_is_not_refused_when_it_is_tried_again() -> None:
    context = make_context(AdmissionMode.ENFORCE, queued_s=0.0)
    journey = Journey(context, work(100, tier="free"))
    assert journey.begin(0.0) is Action.SEND_PREFILL
    context.fleet["d1"].ledger.add_decode(tokens=100_000)
    assert journey.prefill_responded(5.0, lease_from_s=5.0, has_params=True) is Action.SEND_DECODE
    decisions = context.admission.counts[AdmissionMode.ENFORCE, "free"].decisions
    assert {decision: count for decision, count in decisions.items() if count} == {AdmissionDecision.ADMIT: 1}


def test_a_request_that_waits_in_the_router_is_refused_behind_those_that_wait() -> None:
    context = make_context(AdmissionMode.ENFORCE, queued_s=0.6)
    context.waiting_room.prefill_ahead_s = 0.5
    actions = [Journey(context, work(100, tier="free")).begin(0.0) for _ in range(6)]
    assert actions == [Action.WAIT] * 3 + [Action.FAIL] * 3


def test_the_queue_of_a_tenant_has_nobody_else_refused() -> None:
    """The room has tenants take turns, so that acme does not wait behind all requests of mallory."""
    context = make_context(AdmissionMode.ENFORCE, queued_s=0.6)
    context.waiting_room.prefill_ahead_s = 0.5
    tenants = "mallory", "mallory", "mallory", "mallory", "acme", "mallory"
    actions = [Journey(context, work(100, tenant=tenant)).begin(0.0) for tenant in tenants]
    assert actions == [Action.WAIT] * 3 + [Action.FAIL, Action.WAIT, Action.FAIL]


def test_a_request_that_waits_in_the_router_is_refused_when_it_cannot_be_in_time_any_more() -> None:
    context = make_context(AdmissionMode.ENFORCE, queued_s=0.6)
    room = context.waiting_room
    room.prefill_ahead_s = 0.5
    journey = Journey(context, work(100, tier="free"))
    moves: list[Action] = []
    journey.on_moved = moves.append
    assert journey.begin(0.0) is Action.WAIT
    context.fleet["p1"].ledger.add_prefill(tokens=1, predicted_s=9.0, now_s=0.0)
    room.tick(0.85)
    assert moves == []
    room.tick(0.9)
    assert (moves, journey.refusal and journey.refusal.reason, len(room)) == (
        [Action.FAIL],
        RefusalReason.WAITED_TOO_LONG,
        0,
    )
    refusals = context.admission.counts[AdmissionMode.ENFORCE, "free"].refusals
    assert refusals[RefusalReason.WAITED_TOO_LONG] == 1


def test_a_tier_with_action_queue_waits_late_and_gives_up_after_its_time() -> None:
    context = make_context(AdmissionMode.ENFORCE, queued_s=3.0)
    context.admission.tiers = {"free": QUEUE}
    room = context.waiting_room
    room.prefill_ahead_s = 0.5
    journey = Journey(context, work(100, tier="free"))
    assert journey.begin(0.0) is Action.WAIT
    context.fleet["p1"].ledger.add_prefill(tokens=1, predicted_s=9.0, now_s=0.0)
    room.tick(4.9)
    assert len(room) == 1
    room.tick(5.0)
    assert (len(room), journey.stop_reason) == (0, StopReason.REFUSED)


def test_a_degraded_answer_teaches_no_length_but_the_time_in_decode() -> None:
    context = make_context(AdmissionMode.ENFORCE, queued_s=0.0)
    context.admission.tiers = {"free": DEGRADE}
    context.fleet["d1"].ledger.add_decode(tokens=3_500)
    journey = Journey(context, work(100, tier="free"))
    journey.begin(0.0)
    journey.prefill_responded(0.1, lease_from_s=0.1, has_params=True)
    journey.decode_ended(1.0, output_tokens=50)
    lengths = context.demand.lengths
    assert (journey.output_limit, lengths.predict("", 100), lengths.mean_served) == (50, 100.0, 50.0)


def test_the_output_of_a_request_that_is_passed_through_cannot_be_limited() -> None:
    context = make_context(AdmissionMode.ENFORCE, queued_s=0.0)
    context.admission.tiers = {"free": DEGRADE}
    context.fleet["d1"].ledger.add_decode(tokens=3_500)
    journey = Journey(context, work(100, tier="free"), local_prefill_reason=LocalPrefillReason.PASSED_THROUGH)
    assert (journey.begin(0.0), journey.output_limit) == (Action.SEND_DECODE, None)


def test_a_passed_through_request_of_a_degraded_tier_is_refused_only_if_sheddable() -> None:
    context = make_context(AdmissionMode.ENFORCE, queued_s=5.0)
    context.fleet["d1"].ledger.add_decode(tokens=100_000)
    actions = []
    for sheddable in (True, False):
        context.admission.tiers = {"free": DEGRADE._replace(sheddable=sheddable)}
        passed = Journey(
            context, work(100, tier="free"), local_prefill_reason=LocalPrefillReason.PASSED_THROUGH
        )
        actions.append(passed.begin(0.0))
    assert actions == [Action.FAIL, Action.SEND_DECODE]


@pytest.mark.parametrize(
    ("mode", "requests"),
    [
        pytest.param(AdmissionMode.ENFORCE, 0, id="refused"),
        pytest.param(AdmissionMode.ADVISE, 1, id="served all the same"),
    ],
)
def test_a_refused_request_is_no_demand_allows_no_retry_and_takes_no_reserve_back(
    mode: AdmissionMode, requests: int
) -> None:
    context = make_context(mode, queued_s=5.0)
    context.tier_reserve.set_reserves({"gold": Reserve(0.5)})
    Journey(context, work(100, tier="gold")).begin(0.0)
    kept = context.tier_reserve.find_kept_fraction("free", 0.0)
    counted = context.demand.snapshot().requests, context.retry_budget.requests, kept
    assert counted == (requests, requests, 0.5 * requests)


@pytest.mark.parametrize(
    ("tier", "priority", "action"),
    [
        pytest.param("free", 0, Action.FAIL, id="others: by what the reserve leaves"),
        pytest.param("gold", 0, Action.WAIT, id="the tier: by its own work and its reserve"),
    ],
)
def test_admission_knows_the_reserve_of_a_tier(tier: str, priority: int, action: Action) -> None:
    """Two instances with 0.6 s of work each, and 0.7 s of the higher tier silver that wait."""
    fleet = FakeFleet([instance("p1", queued_s=0.6), instance("p2", queued_s=0.6), instance("d1")])
    context: JourneyContext[InstanceRecord] = JourneyContext(fleet, TransferPairs())
    context.admission.mode, context.waiting_room.prefill_ahead_s = AdmissionMode.ENFORCE, 0.5
    context.tier_reserve.set_reserves({"gold": Reserve(0.5)})
    context.tier_reserve.record_arrival("gold", 0.0)
    for number in range(7):
        request = work(100, tier="silver", tenant=str(number), priority=1)._replace(deadline_s=100.0)
        assert Journey(context, request).begin(0.0) is Action.WAIT
    assert Journey(context, work(200, tier=tier, tenant=tier, priority=priority)).begin(0.0) is action


def test_lower_tiers_wait_less_in_engines_the_lower_they_are() -> None:
    context = make_context(AdmissionMode.ENFORCE, queued_s=0.3)
    context.admission.limit_waits((10, 0, -10), ttft_s=1.0)
    assert context.admission.max_wait_s == {-10: 0.25, 0: 0.5}
    actions = [Journey(context, work(100, priority=p)).begin(0.0) for p in (-10, 0, 0, 0, 10)]
    assert actions == [
        Action.FAIL,
        Action.SEND_PREFILL,
        Action.SEND_PREFILL,
        Action.SEND_PREFILL,
        Action.SEND_PREFILL,
    ]
    assert Journey(context, work(100, priority=0)).begin(0.0) is Action.FAIL


def test_tiers_of_one_priority_have_no_limit_of_their_wait() -> None:
    context = make_context(AdmissionMode.ENFORCE, queued_s=0.8)
    context.admission.limit_waits((0,), ttft_s=1.0)
    assert Journey(context, work(100)).begin(0.0) is Action.SEND_PREFILL
