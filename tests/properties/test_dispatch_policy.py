"""Invariants of dispatch and of the ledger, for any fleet and load."""

import math
import random
from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from fulcrum_core.latency import DecodeModel
from fulcrum_core.values import Role
from fulcrum_router.policy import (
    Candidates,
    DecodeEntry,
    Dispatch,
    DispatchDecision,
    FlipProposal,
    FlipProposalRules,
    Ledger,
    NoInstance,
    PendingTransferEntry,
    PrefillEntry,
    SourcePairs,
    TransferDelay,
    TransferPair,
    Work,
    choose_decode,
    choose_prefill,
)
from fulcrum_router.policy.instance_record import InstanceRecord
from tests.properties import reference_dispatch
from tests.unit.router.builders import IDENTITY, OTHER_MODEL, instance, work

RULES = FlipProposalRules(enabled=True, max_decode_load=0.5)
Choose = Callable[[list[InstanceRecord], int], DispatchDecision]


def prefill(fleet: list[InstanceRecord], tokens: int) -> DispatchDecision:
    return choose_prefill(Candidates(fleet), work(tokens), now_s=0.0, rules=RULES)


def decode(fleet: list[InstanceRecord], tokens: int) -> DispatchDecision:
    return choose_decode(Candidates(fleet), work(tokens), rules=RULES, now_s=0.0)


PHASES = st.sampled_from([prefill, decode])
TOKENS = st.integers(1, 100_000)
EIGHTHS = st.integers(0, 800).map(lambda eighths: eighths / 8)
"""Seconds that are added without a rounding error."""


@st.composite
def fleets(draw: st.DrawFn) -> list[InstanceRecord]:
    """Up to six instances with distinct names and any work; some measurements are NaN or infinite."""
    names = draw(st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=6))
    return [
        instance(
            name,
            role=draw(st.sampled_from(Role)),
            queued_s=draw(st.one_of(EIGHTHS, st.just(math.nan), st.just(math.inf))),
            prefilling=draw(st.integers(0, 10_000)),
            decoding=draw(st.integers(0, 10_000)),
            reserved=draw(st.integers(0, 10_000)),
            error_share=draw(st.sampled_from([0.0, 0.0, 0.25, 1.0])),
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


DELAYS = st.builds(TransferDelay, st.floats(0, 2), st.floats(0, 1e-3))


@st.composite
def source_pairs(draw: st.DrawFn) -> SourcePairs:
    """The pairs of one prefill instance: cold, warm, slow or unknown."""
    by_decode = {}
    for name in draw(st.lists(st.sampled_from("abcdefgh"), unique=True)):
        pair = by_decode[name] = TransferPair()
        pair.warm_until_s = draw(st.sampled_from([-math.inf, 0.0, math.inf]))
        pair.lag_s_per_1k_tokens = draw(st.none() | st.floats(0, 1))
    return SourcePairs(by_decode, 0.2, draw(st.floats(0, 0.2)))


@given(
    fleets(),
    st.builds(work, st.integers(1, 5_000), cached_tokens=st.dictionaries(st.sampled_from("abc"), TOKENS)),
    st.floats(0, 1.2),
    st.frozensets(st.sampled_from("abcdefgh"), max_size=3),
    st.dictionaries(st.sampled_from("abcdefgh"), DELAYS),
    source_pairs(),
    st.booleans(),
)
def test_dispatch_decides_as_the_reference_does(
    fleet: list[InstanceRecord],
    request: Work,
    now_s: float,
    exclude: frozenset[str],
    delays: dict[str, TransferDelay],
    pairs: SourcePairs,
    has_source: bool,
) -> None:
    candidates, source = Candidates(fleet), fleet[0] if fleet and has_source else None
    decisions = (
        choose_prefill(candidates, request, now_s=now_s, exclude=exclude, delays=delays),
        choose_decode(candidates, request, now_s=now_s, prefilled_on=source, exclude=exclude, pairs=pairs),
    )
    expected = (
        reference_dispatch.choose_prefill(fleet, request, now_s=now_s, exclude=exclude, delays=delays),
        reference_dispatch.choose_decode(
            fleet, request, now_s=now_s, source=source, exclude=exclude, pairs=pairs
        ),
    )
    assert tuple(None if isinstance(d, NoInstance) else d for d in decisions) == expected


@given(fleets(), TOKENS, PHASES, st.randoms(use_true_random=False))
def test_the_order_of_instances_does_not_matter(
    fleet: list[InstanceRecord], tokens: int, choose: Choose, rng: random.Random
) -> None:
    shuffled = rng.sample(fleet, len(fleet))
    assert repr(choose(shuffled, tokens)) == repr(choose(fleet, tokens))  # NaN is not equal to itself


@given(fleets(), TOKENS, PHASES)
def test_only_serving_instances_are_chosen(fleet: list[InstanceRecord], tokens: int, choose: Choose) -> None:
    name = chosen(choose(fleet, tokens))
    assert name is None or name in {view.name for view in fleet if view.serving}


@given(fleets(), TOKENS)
def test_decode_finds_an_instance_whenever_one_serves(fleet: list[InstanceRecord], tokens: int) -> None:
    assert (chosen(decode(fleet, tokens)) is None) == (not any(view.serving for view in fleet))


@given(fleets(), TOKENS, PHASES)
def test_deciding_twice_decides_the_same(fleet: list[InstanceRecord], tokens: int, choose: Choose) -> None:
    assert repr(choose(fleet, tokens)) == repr(choose(fleet, tokens))


@given(fleets(), TOKENS, PHASES, st.integers(1, 10_000), st.floats(0, 10))
def test_more_load_on_the_others_never_changes_the_choice(
    fleet: list[InstanceRecord], tokens: int, choose: Choose, more_tokens: int, more_s: float
) -> None:
    before = chosen(choose(fleet, tokens))
    for view in fleet:
        if view.name != before:
            view.ledger.add_prefill(tokens=more_tokens, predicted_s=more_s, now_s=0.0)
            view.ledger.add_decode(tokens=more_tokens)
    after = chosen(choose(fleet, tokens))
    assert after == before


@given(fleets(), TOKENS)
def test_a_flip_is_proposed_only_from_a_role_with_two_or_more_instances(
    fleet: list[InstanceRecord], tokens: int
) -> None:
    for decision in (prefill(fleet, tokens), decode(fleet, tokens)):
        if isinstance(decision, FlipProposal):
            candidates = [v for v in fleet if v.serving and v.role is decision.role.other]
            assert len(candidates) > 1


@given(fleets(), TOKENS)
def test_kv_is_only_sent_where_it_can_be_read(fleet: list[InstanceRecord], tokens: int) -> None:
    source = instance("source", serving=False)
    decision = choose_decode(Candidates([*fleet, source]), work(tokens), now_s=0.0, prefilled_on=source)
    reader = {view.name: view.identity for view in fleet}.get(chosen(decision) or "")
    assert reader in (IDENTITY, None)


def add_entry(ledger: Ledger, kind: str, tokens: int) -> PrefillEntry | DecodeEntry | PendingTransferEntry:
    match kind:
        case "prefill":
            return ledger.add_prefill(tokens=tokens, predicted_s=tokens / 1000, now_s=0.0)
        case "local":
            return ledger.add_local_prefill(tokens=tokens, predicted_s=tokens / 1000, now_s=0.0)
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
        for _ in range(2):
            if isinstance(entry, PrefillEntry):
                entry.release(1.0)
            else:
                entry.release()
    assert not ledger.remaining_s(2.0)
    memory = {"_oldest_since_s", "_steps", "_next_number", "caught_up_at_s"}
    assert not any(getattr(ledger, name) for name in Ledger.__slots__ if name not in memory)


@given(
    st.lists(st.tuples(st.floats(0, 100), st.floats(0, 10), st.integers(0, 9)), max_size=20),
    st.floats(0, 1000),
)
def test_what_remains_of_prefill_work_is_never_more_than_all_of_it(
    work: list[tuple[float, float, int]], later_s: float
) -> None:
    """Each step adds a prompt some time after the step before, and releases one of those in flight."""
    ledger, open_, now_s = Ledger(), list[PrefillEntry](), 0.0
    for predicted_s, pause_s, released in work:
        now_s += pause_s
        open_.append(ledger.add_prefill(tokens=1, predicted_s=predicted_s, now_s=now_s))
        if released < len(open_):
            open_.pop(released).release(now_s)
        for at_s in (now_s, now_s + later_s):
            assert 0.0 <= ledger.remaining_s(at_s) <= ledger.prefill_queued_s + 1e-9


@given(st.floats(0.001, 1), st.floats(0, 1e-3), st.integers(0, 100_000), st.integers(0, 100_000))
def test_a_larger_batch_is_never_cheaper(intercept: float, slope: float, tokens: int, more: int) -> None:
    def cost(decoding: int) -> float:
        view = instance("d1", decoding=decoding)
        view.decode_model = DecodeModel(intercept=intercept, slope=slope)
        decision = choose_decode(Candidates([view]), work(1), now_s=0.0)
        assert isinstance(decision, Dispatch)
        return decision.cost[1]

    assert cost(tokens) <= cost(tokens + more)


@given(fleets(), TOKENS, EIGHTHS)
def test_equally_cold_pairs_do_not_change_the_choice(
    fleet: list[InstanceRecord], tokens: int, cold_s: float
) -> None:
    pairs = SourcePairs({}, cold_s, 0.0)
    delayed = choose_decode(Candidates(fleet), work(tokens), now_s=0.0, pairs=pairs)
    assert chosen(delayed) == chosen(choose_decode(Candidates(fleet), work(tokens), now_s=0.0))


@given(st.integers(0, 10_000), st.integers(0, 10_000), TOKENS, st.floats(1e-5, 10), st.booleans())
def test_of_two_equal_instances_the_one_without_delay_is_chosen(
    prefilling: int, decoding: int, tokens: int, delay_s: float, decodes: bool
) -> None:
    role = Role.DECODE if decodes else Role.PREFILL
    pair = [instance(n, role=role, prefilling=prefilling, decoding=decoding) for n in ("a", "b")]
    reader = instance("r", role=Role.DECODE if not decodes else Role.PREFILL)
    candidates, warm = Candidates([*pair, reader]), TransferPair()
    warm.warm_until_s = math.inf
    decision = (
        choose_decode(candidates, work(tokens), now_s=0.0, pairs=SourcePairs({"b": warm}, delay_s, 0.0))
        if decodes
        else choose_prefill(candidates, work(tokens), now_s=0.0, delays={"a": TransferDelay(delay_s)})
    )
    assert chosen(decision) == "b"
