"""Whenever a tier returns, its reserve of decode is free again within its time, whatever it was lent to."""

from hypothesis import given
from hypothesis import strategies as st

from fulcrum_core.latency import DecodeModel
from fulcrum_core.values import Role
from fulcrum_router.policy.instance_record import InstanceRecord
from fulcrum_router.policy.journey import JourneyContext
from fulcrum_router.policy.kv_pairs.pairs import TransferPairs
from fulcrum_router.policy.ledger import DecodeEntry
from fulcrum_router.policy.tiers.tier_reserve import IDLE_S, Reserve
from fulcrum_router.policy.tiers.token_account import TokenAccount, Tokens
from fulcrum_router.policy.waiting.waiting_room import Charge
from tests.unit.router.builders import FakeFleet, instance, work

CAPACITY, STEP_S, WITHIN_S, FRACTION = 3_000, 0.01, 4.0, 0.5

answers = st.tuples(
    st.integers(0, 40),  # steps since the one before
    st.integers(1, 500),  # prompt
    st.integers(150, 800),  # expected output
    st.sampled_from((0.5, 0.9, 1.0)),  # its share that the answer has
)


@given(st.lists(answers, min_size=5, max_size=60), st.integers(0, 100))
def test_a_lent_reserve_is_free_again_in_time(drawn: list[tuple[int, int, int, float]], gap: int) -> None:
    decode = instance("d", role=Role.DECODE)
    decode.kv_capacity_tokens, decode.decode_model = CAPACITY, DecodeModel(intercept=STEP_S, slope=0.0)
    context: JourneyContext[InstanceRecord] = JourneyContext(FakeFleet([decode]), TransferPairs())
    context.tier_reserve.set_reserves({"gold": Reserve(FRACTION, WITHIN_S)})
    room, now = context.waiting_room, round(IDLE_S / STEP_S) + 1
    sent: list[tuple[int, int, TokenAccount, DecodeEntry, Charge]] = []
    for steps, prompt, expected, share in drawn:
        now += steps
        for begun, tokens, account, entry, charge in sent:
            entry.add_tokens(min(tokens, now - begun) - entry.output_tokens)
            if now - begun >= tokens and charge in room.open_charges:
                room.close_charge(charge, account.taken)
        if context.find_kept_decode(work(prompt, tier="free"), expected, now * STEP_S):
            continue  # not lent
        account = TokenAccount(Tokens(prompt, expected), output_max=10_000)
        entry = decode.ledger.add_decode(tokens=prompt)
        account.follow(entry)
        charge = room.charge(account, priority=0, tenant="t", tier="free")
        sent.append((now, max(1, round(share * expected)), account, entry, charge))
    free_from = now + gap + round(WITHIN_S / STEP_S)  # the tier returns after the gap
    held = [
        account.taken.prompt + free_from - begun
        for begun, tokens, account, _, _ in sent
        if free_from - begun < tokens
    ]
    assert sum(held) <= (1 - FRACTION) * CAPACITY
