"""How much work an instance gets of lower tiers while a higher one sends requests."""

import pytest

from fulcrum_core.values import Role
from fulcrum_router.policy import FlipProposalRules, TransferPairs
from fulcrum_router.policy.instance_record import InstanceRecord
from fulcrum_router.policy.journey import Action, Journey, JourneyContext, State
from fulcrum_router.policy.tiers.decode_share import SENDS_FOR_S, TOKEN_SHARE
from fulcrum_router.policy.tiers.tier_reserve import SPARE_S
from fulcrum_router.policy.waiting.level import AGEING_FACTOR
from fulcrum_router.policy.waiting.waiting_room import WaitingRoom
from tests.unit.router.builders import DECODE, SLO, FakeFleet, instance, work

TOKENS = 100
"""A prompt of 0.1 s."""
HIGH, LOW = 10, 0


def make_context() -> JourneyContext[InstanceRecord]:
    """One instance of each role, which gets half a second of work, and two tiers."""
    fleet = FakeFleet([instance("p1"), instance("d1", role=Role.DECODE)])
    context = JourneyContext(fleet, TransferPairs())
    context.waiting_room = WaitingRoom(prefill_ahead_s=0.5)
    context.decode_share.set_tiers({LOW, HIGH}, tpot_s=SLO.tpot_s)
    return context


LIMIT = TOKEN_SHARE * DECODE.max_tokens(SLO.tpot_s)
"""Tokens of a decode instance that lower tiers may use."""


@pytest.mark.parametrize(
    ("load", "in_use", "flipped", "priority", "silent_s", "action"),
    [
        pytest.param(0.45, 0.8, 0.0, HIGH, 0.0, Action.ASK_FOR_FLIP, id="the highest tier"),
        pytest.param(0.3, 0.8, 0.0, LOW, 0.0, Action.WAIT, id="two would have 1.2 times their share"),
        pytest.param(0.35, 0.6, 0.0, LOW, 0.0, Action.ASK_FOR_FLIP, id="two would have 0.9 of it"),
        pytest.param(0.45, 0.6, 0.0, LOW, 0.0, Action.WAIT, id="two would have a load of 0.675"),
        pytest.param(0.3, 0.6, 0.9, LOW, 0.0, Action.WAIT, id="one has just flipped, with its answers"),
        pytest.param(
            0.45, 0.8, 0.0, LOW, SENDS_FOR_S + 0.1, Action.ASK_FOR_FLIP, id="no higher tier sends requests"
        ),
    ],
)
def test_a_lower_tier_asks_for_no_flip_after_which_decode_would_have_too_much(
    load: float, in_use: float, flipped: float, priority: int, silent_s: float, action: Action
) -> None:
    """The measured load may be old: the tokens in use count as well."""
    context = make_context()
    decoding, itl_s = int(in_use * LIMIT), load * SLO.tpot_s
    context.fleet = FakeFleet(
        [
            instance("p1", queued_s=1.0, decoding=int(flipped * LIMIT)),
            *(instance(name, decoding=decoding, itl_s=itl_s) for name in ("d1", "d2", "d3")),
        ]
    )
    context.flip_rules = FlipProposalRules(enabled=True, max_decode_load=0.6)
    context.decode_share.record_arrival(HIGH, 0.0)
    journey = Journey(context, work(TOKENS, priority=priority)._replace(deadline_s=silent_s + SLO.ttft_s))
    assert journey.begin(silent_s) is action


def begin(
    context: JourneyContext[InstanceRecord], priority: int, *, tokens: int = TOKENS, now_s: float = 0.0
) -> tuple[Journey[InstanceRecord], Action]:
    journey = Journey(context, work(tokens, priority=priority)._replace(deadline_s=now_s + 100.0))
    return journey, journey.begin(now_s)


@pytest.mark.parametrize(
    ("queued_s", "priority", "tokens", "silent_s", "action"),
    [
        pytest.param(
            0.4, HIGH, TOKENS, 0.0, Action.SEND_PREFILL, id="a prompt of the higher tier is not limited"
        ),
        pytest.param(0.05, LOW, TOKENS, 0.0, Action.WAIT, id="a second prompt of a lower tier"),
        pytest.param(0.0, LOW, 50 * TOKENS, 0.0, Action.SEND_PREFILL, id="the only prompt, however long"),
        pytest.param(SPARE_S / 2, LOW, 40, 0.0, Action.SEND_PREFILL, id="prompts that are short together"),
        pytest.param(
            0.4,
            LOW,
            TOKENS,
            SENDS_FOR_S + 0.1,
            Action.SEND_PREFILL,
            id="the higher tier has sent nothing for long",
        ),
    ],
)
def test_a_lower_tier_sends_one_prompt_to_an_instance_while_a_higher_one_sends_requests(
    queued_s: float, priority: int, tokens: int, silent_s: float, action: Action
) -> None:
    context = make_context()
    context.decode_share.record_arrival(HIGH, 0.0)
    if queued_s:
        context.fleet["p1"].ledger.add_prefill(tokens=1, predicted_s=queued_s, now_s=silent_s)
    assert begin(context, priority, tokens=tokens, now_s=silent_s)[1] is action


def test_a_lower_tier_does_not_starve_while_a_higher_one_keeps_all_instances_busy() -> None:
    context = make_context()
    higher = [begin(context, HIGH)[0] for _ in range(10)]
    lower, action = begin(context, LOW)
    higher += [begin(context, HIGH)[0] for _ in range(50)]
    assert action is Action.WAIT
    computed = 0
    while lower.state is State.WAITING:
        assert higher[computed].state is State.PREFILL
        # A client that leaves frees its instance, as the end of its prompt would.
        higher[computed].client_left(computed / 10)
        computed += 1
    assert computed <= AGEING_FACTOR + 1
