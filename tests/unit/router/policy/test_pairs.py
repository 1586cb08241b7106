"""What the router concludes about pairs: proofs, warmth, badness, and whom a canary should try."""

from collections.abc import Mapping

import pytest

from fulcrum_core.values import Role
from fulcrum_router.policy import (
    Delay,
    Dispatch,
    PairKey,
    PairMap,
    Proof,
    Reason,
    choose_decode,
    choose_prefill,
    judge,
)
from fulcrum_router.policy.pairs import BAD_AFTER, MESH, MOST_PAIRS, RETRY_S, TOLD_PAIRS, WARM_S, Pair
from tests.unit.router.builders import OTHER_MODEL, SLO, View, instance

KEY = PairKey("p1", "d1")


@pytest.mark.parametrize(
    ("prompt", "cached", "block", "expected"),
    [
        pytest.param(300, 300, 32, Proof.PROVEN, id="all of it"),
        pytest.param(300, 288, 32, Proof.PROVEN, id="whole blocks"),
        pytest.param(
            300, 256, 32, Proof.RECOMPUTED, id="all whole blocks but one: its own cache may do that"
        ),
        pytest.param(288, 256, 32, Proof.PROVEN, id="all, and the last token's block anew"),
        pytest.param(288, 255, 32, Proof.RECOMPUTED, id="less than that"),
        pytest.param(1, 1, 32, Proof.PROVEN, id="a single token"),
        pytest.param(300, 0, 32, Proof.RECOMPUTED, id="nothing"),
        pytest.param(20, 19, 32, Proof.PROVEN, id="a prompt shorter than a block"),
        pytest.param(20, 0, 32, Proof.RECOMPUTED, id="nothing of a short prompt"),
        pytest.param(300, None, 32, Proof.UNKNOWN, id="not told"),
    ],
)
def test_a_hand_off_is_judged_by_what_was_not_computed(
    prompt: int, cached: int | None, block: int, expected: Proof
) -> None:
    assert judge(prompt_tokens=prompt, cached_tokens=cached, block_tokens=block) is expected


def reasons(*proofs: Proof, why: str = "") -> list[str]:
    pair, seen = Pair(), []
    for number, proof in enumerate(proofs):
        pair.record(proof, now_s=float(number), why=why)
        seen.append(pair.reason)
    return seen


YES, NO, MUTE = Proof.PROVEN, Proof.RECOMPUTED, Proof.UNKNOWN


def test_one_miss_makes_no_bad_pair_and_one_success_mends_it() -> None:
    assert reasons(YES, NO, YES, NO, NO, NO, YES) == [
        *("Proven", "Proven", "Proven", "Proven"),
        *("Recomputed", "Recomputed", "Proven"),
    ]
    assert reasons(NO, NO, why="LeaseExpired") == ["NoTrafficYet", "LeaseExpired"]
    known, unknown = Pair(), Pair()
    for pair, causes in ((known, ("NotCompatible", "", "")), (unknown, ("", ""))):
        for why in causes:
            pair.record(NO, now_s=0.0, why=why)
    assert (known.reason, unknown.reason) == ("NotCompatible", "Recomputed")
    assert reasons(MUTE, NO, MUTE) == ["CannotTell", "CannotTell", "CannotTell"]


def test_a_pair_is_warm_until_its_engines_forget_and_cold_after_a_miss() -> None:
    pair = Pair()
    warm = []
    for proof in (YES, NO, MUTE):
        pair.record(proof, now_s=100.0)
        warm.append(pair.warm_until_s - 100.0)
    assert warm == [WARM_S, float("-inf"), WARM_S]


def test_a_slow_wire_shows_after_several_slow_hand_offs_in_a_row() -> None:
    pair, seen = Pair(), []
    for seconds in (1.0, 1.0, 0.1, 1.0, 1.0, 1.0, 0.1):
        pair.timed(seconds, tokens=1000, recompute_s=0.2, cold=False)
        pair.record(YES, now_s=0.0)
        seen.append(pair.reason)
    assert seen == [*["Proven"] * 5, "SlowTransport", "Proven"]
    assert pair.handshake_s is None


@pytest.mark.parametrize(
    ("prompt", "took_s", "expected"),
    [
        pytest.param(8_000, 0.11, "Proven", id="InfiniBand"),
        pytest.param(8_000, 0.3, "Proven", id="InfiniBand that others use, too"),
        pytest.param(8_000, 1.05, "SlowTransport", id="TCP"),
        pytest.param(2_000, 0.29, "SlowTransport", id="TCP, a shorter prompt"),
        pytest.param(300, 0.09, "Proven", id="a prompt too short to tell"),
    ],
)
def test_a_fall_back_to_tcp_shows_by_what_the_declared_fabric_would_take(
    prompt: int, took_s: float, expected: str
) -> None:
    """70 billion parameters: 328 kB a token, 33 ms for 1,000 tokens at 10 GB/s, 131 ms over TCP."""
    pair = Pair()
    for _ in range(3):
        pair.timed(
            took_s, tokens=prompt, recompute_s=0.08 * prompt / 1000, cold=False, wire_s=0.033 * prompt / 1000
        )
        pair.record(YES, now_s=0.0)
    assert pair.reason == expected


def test_an_engine_whose_steps_are_long_has_no_slow_wire() -> None:
    def seen(step_s: float) -> str:
        pair = Pair()
        for _ in range(3):
            pair.timed(0.5, tokens=1000, recompute_s=0.1, cold=False, step_s=step_s, wire_s=0.03)
        pair.record(YES, now_s=0.0)
        return pair.reason

    assert [seen(0.0), seen(0.2)] == ["SlowTransport", "Proven"]


def test_a_slow_pair_is_mended_by_a_prompt_that_tells_and_not_by_a_short_one() -> None:
    pair, seen = Pair(), []
    for tokens, seconds in ((4000, 0.6), (4000, 0.6), (300, 0.05), (4000, 0.6), (300, 0.05), (4000, 0.1)):
        pair.timed(seconds, tokens=tokens, recompute_s=0.3, cold=False, wire_s=0.033 * tokens / 1000)
        pair.record(YES, now_s=0.0)
        seen.append(pair.reason)
    assert seen == [*["Proven"] * 3, *["SlowTransport"] * 2, "Proven"]
    assert pair.slow_tokens == 4000


def test_the_first_hand_off_tells_the_handshake_and_short_ones_tell_nothing() -> None:
    pair = Pair()
    pair.timed(0.25, tokens=1000, recompute_s=0.01, cold=True)
    pair.timed(9.0, tokens=100, recompute_s=0.01, cold=False)
    assert (pair.handshake_s, pair.seconds_per_1k_tokens) == (0.25, None)
    pair.timed(0.02, tokens=2000, recompute_s=0.01, cold=False)
    assert pair.seconds_per_1k_tokens == pytest.approx(0.01)


def fleet(givers: int = 1, takers: int = 2) -> list[View]:
    return [*(instance(f"d{i + 1}") for i in range(takers)), *(instance(f"p{i + 1}") for i in range(givers))]


def used(pairs: PairMap, key: PairKey, proof: Proof = YES, *, times: int = 1, now_s: float = 0.0) -> None:
    for _ in range(times):
        pairs[key].record(proof, now_s=now_s)


def test_a_warm_pair_is_preferred_to_a_cold_one_by_what_the_handshake_costs() -> None:
    """200 ms are 200 tokens of this prefill model."""
    pairs, views = PairMap(), fleet()
    used(pairs, PairKey("p1", "d2"))
    pairs.refresh(views, now_s=1.0)
    assert pairs.delays == {"p1": {"d1": Delay(200.0, 0.0)}}
    source = views[-1]

    def chosen() -> Dispatch:
        decision = choose_decode(views, 100, SLO, prefilled_on=source, delays=pairs.delays["p1"])
        assert isinstance(decision, Dispatch)
        return decision

    assert (chosen().instance, chosen().reason) == ("d2", Reason.WITHIN_SLO)
    views[1].ledger.open_local_prefill(tokens=199, seconds=0.1)
    assert chosen().instance == "d2"
    views[1].ledger.open_local_prefill(tokens=2, seconds=0.1)
    assert chosen().instance == "d1"


def rounded(delays: Mapping[str, Delay]) -> dict[str, tuple[float, ...]]:
    return {name: tuple(round(part, 9) for part in delay) for name, delay in delays.items()}


def timed(pairs: PairMap, key: PairKey, seconds: float, *, tokens: int = 1000) -> None:
    """A warm pair that took so long."""
    used(pairs, key)
    pairs[key].timed(seconds, tokens=tokens, recompute_s=10.0, cold=False)


def test_a_decode_instance_that_gets_kv_late_waits_as_long_as_the_prompt_is() -> None:
    """100 ms are the engines' own; the quick pair takes 100 more, the slow one 500: 300 over twice that."""
    pairs, views = PairMap(), fleet()
    timed(pairs, PairKey("p1", "d1"), 0.6)
    timed(pairs, PairKey("p1", "d2"), 0.2)
    pairs.refresh(views, now_s=1.0)
    assert {name: rounded(delays) for name, delays in pairs.delays.items()} == {"p1": {"d1": (0.0, 0.3)}}
    source, delays = views[-1], pairs.delays["p1"]
    views[1].ledger.open_local_prefill(tokens=200, seconds=0.2)

    def chosen(tokens: int) -> Dispatch:
        decision = choose_decode(views, tokens, SLO, prefilled_on=source, delays=delays)
        assert isinstance(decision, Dispatch)
        return decision

    assert (chosen(600).instance, round(chosen(600).cost[0], 6)) == ("d1", 180.0)
    assert chosen(800).instance == "d2"


@pytest.mark.parametrize(
    "took_s",
    [
        pytest.param((0.02, 0.09), id="nobody notices the wire"),
        pytest.param((0.2, 0.3), id="up to twice the quickest"),
        pytest.param((5.0, 5.0), id="all slow"),
    ],
)
def test_pairs_that_are_alike_change_no_choice(took_s: tuple[float, float]) -> None:
    pairs, views = PairMap(), fleet()
    for decode, seconds in zip(("d1", "d2"), took_s, strict=True):
        timed(pairs, PairKey("p1", decode), seconds)
    pairs.refresh(views, now_s=1.0)
    assert (pairs.delays, pairs.giver_delays) == ({}, {})


def test_a_prefill_instance_whose_kv_everybody_gets_late_is_late_itself() -> None:
    pairs, views = PairMap(), fleet(givers=3, takers=2)
    cold = dict(pairs.giver_delays)
    pairs.refresh(views, now_s=1.0)
    all_cold = dict(pairs.giver_delays)
    for decode in ("d1", "d2"):
        timed(pairs, PairKey("p2", decode), 0.15)
        timed(pairs, PairKey("p3", decode), 0.6)
    pairs.refresh(views, now_s=1.0)
    assert (cold, all_cold) == ({}, {}), "where all are late, nobody is"
    assert rounded(pairs.giver_delays) == {"p1": (0.2, 0.0), "p3": (0.0, 0.0004)}

    def chosen(tokens: int) -> str:
        decision = choose_prefill(views, tokens, SLO, delays=pairs.giver_delays)
        assert isinstance(decision, Dispatch)
        return decision.instance

    views[3].ledger.open_prefill(tokens=150, seconds=0.15)
    assert [chosen(100), chosen(400)] == ["p3", "p2"]


def test_a_new_engine_process_may_be_anywhere_so_its_speed_is_forgotten() -> None:
    pairs, key = PairMap(), KEY
    timed(pairs, key, 5.0)
    pairs.cool("d1")
    assert (pairs[key].seconds_per_1k_tokens, pairs[key].lag_per_1k_tokens_s) == (None, None)


def test_a_pair_cools_with_time_with_its_engines_and_after_misses() -> None:
    views, key = fleet(takers=1), KEY

    def cold_after(*, wait_s: float = 0.0, cool: str = "", misses: int = 0) -> bool:
        pairs = PairMap()
        used(pairs, key)
        if cool:
            pairs.cool(cool)
        used(pairs, key, NO, times=misses)
        pairs.refresh(views, now_s=wait_s)
        return bool(pairs.delays)

    assert [
        cold_after(),
        cold_after(wait_s=WARM_S - 1),
        cold_after(wait_s=WARM_S),
        cold_after(cool="p1"),
        cold_after(cool="d1"),
        cold_after(misses=1),
    ] == [False, False, True, True, True, True]


def test_an_instance_hands_nothing_over_once_nobody_reaches_its_side_channel() -> None:
    pairs, views = PairMap(), fleet(givers=2)
    for decode in ("d1", "d2"):
        for _ in range(BAD_AFTER):
            pairs[PairKey("p1", decode)].record(NO, now_s=0.0, why="HandshakeFailed")
    used(pairs, PairKey("p2", "d1"), NO, times=BAD_AFTER)
    pairs.refresh(views, now_s=0.0)
    found = [pairs.broken]
    used(pairs, PairKey("p1", "d2"))
    pairs.refresh(views, now_s=0.0)
    assert [*found, pairs.broken] == [("p1",), ()]


def test_pairs_of_instances_that_are_gone_are_forgotten() -> None:
    pairs = PairMap()
    used(pairs, KEY)
    used(pairs, PairKey("p1", "d2"))
    pairs.refresh(fleet(takers=1), now_s=0.0)
    assert list(pairs.pairs) == [KEY]


def test_canaries_try_the_pairs_of_the_roles_first_then_suspects_then_idle_ones() -> None:
    pairs, views = PairMap(), fleet(takers=1)
    back = PairKey("d1", "p1")

    def due(now_s: float) -> list[PairKey]:
        return pairs.due(views, now_s=now_s, interval_s=300.0)

    assert due(0.0) == [KEY, back]
    used(pairs, KEY)
    assert due(0.0) == [back]
    used(pairs, back)
    assert due(299.0) == []
    assert due(300.0) == [KEY, back]
    used(pairs, back, NO, now_s=100.0)
    assert due(100.0) == [back], "suspect: at once"
    used(pairs, back, NO, now_s=100.0)
    assert (due(100.0 + RETRY_S - 1), due(100.0 + RETRY_S)) == ([], [back])


def test_a_slow_pair_works_and_is_tried_in_its_turn() -> None:
    pairs, views = PairMap(), fleet(takers=1)
    used(pairs, PairKey("d1", "p1"), now_s=299.0)
    for _ in range(3):
        pairs[KEY].timed(9.0, tokens=1000, recompute_s=1.0, cold=False)
    used(pairs, KEY)
    assert pairs[KEY].reason == "SlowTransport"
    assert pairs.due(views, now_s=299.0, interval_s=300.0) == []
    assert pairs.due(views, now_s=300.0, interval_s=300.0) == [KEY]


def test_nobody_is_tried_alone_or_with_an_engine_that_cannot_read_it() -> None:
    other = instance("d2", identity=OTHER_MODEL)
    pairs = PairMap()
    assert pairs.due([instance("d1")], now_s=0.0, interval_s=0.0) == []
    assert pairs.due([instance("d1"), other], now_s=0.0, interval_s=0.0) == []


def test_every_pair_of_a_few_instances_is_tried_and_a_sample_of_many() -> None:
    def tried(count: int) -> set[PairKey]:
        views = [instance(f"d{i:03}", role=Role.DECODE) for i in range(count)]
        return set(PairMap().due(views, now_s=0.0, interval_s=0.0))

    assert len(tried(MESH)) == MESH * (MESH - 1)
    many = tried(100)
    assert len(many) == 700
    assert {len({k for k in many if k.prefill == f"d{i:03}"}) for i in range(100)} == {7}
    assert {len({k for k in many if k.decode == f"d{i:03}"}) for i in range(100)} == {7}


def test_the_map_is_bounded_and_tells_of_the_bad_ones_first() -> None:
    pairs = PairMap()
    for i in range(MOST_PAIRS + 10):
        used(pairs, PairKey("p1", f"d{i:05}"), now_s=float(i))
    used(pairs, PairKey("p1", "d00500"), NO, times=BAD_AFTER, now_s=500.0)
    told = dict(pairs.told())
    assert (len(pairs.pairs), len(told)) == (MOST_PAIRS, TOLD_PAIRS)
    assert PairKey("p1", "d00500") in told
    assert PairKey("p1", f"d{MOST_PAIRS + 9:05}") in told
