"""Invariants of dispatch and of the ledger, for any fleet and load."""

import math
import random
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from fulcrum_core.latency import DecodeModel
from fulcrum_core.values import Role
from fulcrum_router.policy import (
    DecodeEntry,
    Dispatch,
    DispatchDecision,
    FlipProposal,
    FlipProposalRules,
    Ledger,
    PendingTransferEntry,
    PrefillEntry,
    TransferDelay,
    choose_decode,
    choose_prefill,
)
from tests.unit.router.builders import IDENTITY, OTHER_MODEL, SLO, FakeInstance, instance

RULES = FlipProposalRules(enabled=True, max_decode_load=0.5)
Choose = Callable[[list[FakeInstance], int], DispatchDecision]


def prefill(fleet: list[FakeInstance], tokens: int) -> DispatchDecision:
    return choose_prefill(fleet, tokens, SLO, rules=RULES)


def decode(fleet: list[FakeInstance], tokens: int) -> DispatchDecision:
    return choose_decode(fleet, tokens, SLO, rules=RULES, now_s=0.0)


PHASES = st.sampled_from([prefill, decode])
TOKENS = st.integers(1, 100_000)


@st.composite
def fleets(draw: st.DrawFn) -> list[FakeInstance]:
    """Up to six instances with distinct names and any work; some measurements are NaN or infinite."""
    names = draw(st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=6))
    return [
        instance(
            name,
            role=draw(st.sampled_from(Role)),
            queued_s=draw(st.one_of(st.floats(0, 100), st.just(math.nan), st.just(math.inf))),
            prefilling=draw(st.integers(0, 10_000)),
            decoding=draw(st.integers(0, 10_000)),
            serving=draw(st.booleans()),
            identity=draw(st.sampled_from([IDENTITY, OTHER_MODEL, None])),
            itl_s=draw(st.one_of(st.none(), st.floats(0, 1), st.just(math.nan))),
        )
        for name in names
    ]


def chosen(decision: DispatchDecision) -> str | None:
    """Name of the instance that takes the request if no flip follows."""
    if isinstance(decision, FlipProposal):
        return decision.fallback.instance
    return decision.instance if isinstance(decision, Dispatch) else None


@given(fleets(), TOKENS, PHASES, st.randoms(use_true_random=False))
def test_the_order_of_instances_does_not_matter(
    fleet: list[FakeInstance], tokens: int, choose: Choose, rng: random.Random
) -> None:
    shuffled = rng.sample(fleet, len(fleet))
    assert repr(choose(shuffled, tokens)) == repr(choose(fleet, tokens))  # NaN is not equal to itself


@given(fleets(), TOKENS, PHASES)
def test_only_serving_instances_are_chosen(fleet: list[FakeInstance], tokens: int, choose: Choose) -> None:
    name = chosen(choose(fleet, tokens))
    assert name is None or name in {view.name for view in fleet if view.serving}


@given(fleets(), TOKENS)
def test_decode_finds_an_instance_whenever_one_serves(fleet: list[FakeInstance], tokens: int) -> None:
    assert (chosen(decode(fleet, tokens)) is None) == (not any(view.serving for view in fleet))


@given(fleets(), TOKENS, PHASES)
def test_deciding_twice_decides_the_same(fleet: list[FakeInstance], tokens: int, choose: Choose) -> None:
    assert repr(choose(fleet, tokens)) == repr(choose(fleet, tokens))


@given(fleets(), TOKENS, PHASES, st.integers(1, 10_000), st.floats(0, 10))
def test_more_load_on_the_others_never_changes_the_choice(
    fleet: list[FakeInstance], tokens: int, choose: Choose, more_tokens: int, more_s: float
) -> None:
    before = chosen(choose(fleet, tokens))
    for view in fleet:
        if view.name != before:
            view.ledger.add_prefill(tokens=more_tokens, predicted_s=more_s)
            view.ledger.add_decode(tokens=more_tokens)
    after = chosen(choose(fleet, tokens))
    assert after == before


@given(fleets(), TOKENS)
def test_a_flip_is_proposed_only_from_a_role_with_two_or_more_instances(
    fleet: list[FakeInstance], tokens: int
) -> None:
    for decision in (prefill(fleet, tokens), decode(fleet, tokens)):
        if isinstance(decision, FlipProposal):
            candidates = [v for v in fleet if v.serving and v.role is decision.role.other]
            assert len(candidates) > 1


@given(fleets(), TOKENS)
def test_kv_is_only_sent_where_it_can_be_read(fleet: list[FakeInstance], tokens: int) -> None:
    source = instance("source", serving=False)
    decision = choose_decode([*fleet, source], tokens, SLO, prefilled_on=source)
    reader = {view.name: view.identity for view in fleet}.get(chosen(decision) or "")
    assert reader in (IDENTITY, None)


def add_entry(ledger: Ledger, kind: str, tokens: int) -> PrefillEntry | DecodeEntry | PendingTransferEntry:
    match kind:
        case "prefill":
            return ledger.add_prefill(tokens=tokens, predicted_s=tokens / 1000)
        case "local":
            return ledger.add_local_prefill(tokens=tokens, predicted_s=tokens / 1000)
        case "decode":
            return ledger.add_decode(tokens=tokens)
        case _:
            return ledger.add_pending_transfer()


@given(
    st.lists(
        st.tuples(st.sampled_from(["prefill", "local", "decode", "transfer"]), st.integers(0, 9999)),
        max_size=30,
    ),
    st.randoms(use_true_random=False),
)
def test_releasing_all_work_empties_the_ledger(work: list[tuple[str, int]], rng: random.Random) -> None:
    ledger = Ledger()
    opened = [add_entry(ledger, kind, tokens) for kind, tokens in work]
    for entry in rng.sample(opened, len(opened)):
        entry.release()
        entry.release()
    left = [getattr(ledger, name) for name in Ledger.__slots__]
    assert left == [0] * len(left)


@given(st.floats(0.001, 1), st.floats(0, 1e-3), st.integers(0, 100_000), st.integers(0, 100_000))
def test_a_larger_batch_is_never_cheaper(intercept: float, slope: float, tokens: int, more: int) -> None:
    def cost(decoding: int) -> float:
        view = instance("d1", decoding=decoding)
        view.decode_model = DecodeModel(intercept=intercept, slope=slope)
        decision = choose_decode([view], 1, SLO)
        assert isinstance(decision, Dispatch)
        return decision.cost[1]

    assert cost(tokens) <= cost(tokens + more)


DELAYS = st.builds(TransferDelay, st.floats(0, 1e4), st.floats(0, 10))


@given(fleets(), TOKENS, DELAYS)
def test_equal_delays_do_not_change_the_choice(
    fleet: list[FakeInstance], tokens: int, delay: TransferDelay
) -> None:
    delays = {view.name: delay for view in fleet}
    delayed = choose_decode(fleet, tokens, SLO, delays=delays)
    assert chosen(delayed) == chosen(choose_decode(fleet, tokens, SLO))


@given(st.integers(0, 10_000), st.integers(0, 10_000), TOKENS, DELAYS, st.booleans())
def test_of_two_equal_instances_the_one_without_delay_is_chosen(
    prefilling: int, decoding: int, tokens: int, delay: TransferDelay, decodes: bool
) -> None:
    role = Role.DECODE if decodes else Role.PREFILL
    pair = [instance(n, role=role, prefilling=prefilling, decoding=decoding) for n in ("a", "b")]
    reader = instance("r", role=Role.DECODE if not decodes else Role.PREFILL)
    choose = choose_decode if decodes else choose_prefill
    decision = choose([*pair, reader], tokens, SLO, delays={"a": delay})
    changes = delay.fixed + delay.per_token * tokens > 1e-6
    assert chosen(decision) in (("b",) if changes else ("a", "b"))
