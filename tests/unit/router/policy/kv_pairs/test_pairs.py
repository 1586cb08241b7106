"""Transfer pairs: outcomes, handshakes, slow and broken pairs, and which pairs are due for a canary."""

from collections.abc import Mapping

import pytest

from fulcrum_core.values import Role
from fulcrum_router.policy import (
    Candidates,
    Dispatch,
    DispatchReason,
    PairKey,
    TransferDelay,
    TransferOutcome,
    TransferPairs,
    choose_decode,
    choose_prefill,
    classify_transfer,
)
from fulcrum_router.policy.instance_record import InstanceRecord
from fulcrum_router.policy.kv_pairs.pair_record import PROBLEM_AFTER_MISSES, WARM_FOR_S, TransferPair
from fulcrum_router.policy.kv_pairs.pairs import (
    MAX_FULL_MESH_INSTANCES,
    MAX_PAIRS_PER_SOURCE,
    MAX_REPORTED_PAIRS,
    PROBLEM_PAIR_RETRY_S,
)
from tests.unit.router.builders import OTHER_MODEL, instance, work

KEY = PairKey("p1", "d1")


@pytest.mark.parametrize(
    ("prompt", "cached", "block", "expected"),
    [
        pytest.param(300, 300, 32, TransferOutcome.VERIFIED, id="the whole prompt was cached"),
        pytest.param(300, 288, 32, TransferOutcome.VERIFIED, id="all whole blocks were cached"),
        pytest.param(300, 256, 32, TransferOutcome.RECOMPUTED, id="one whole block is missing"),
        pytest.param(288, 256, 32, TransferOutcome.VERIFIED, id="only the last token's block was computed"),
        pytest.param(288, 255, 32, TransferOutcome.RECOMPUTED, id="more than the last block was computed"),
        pytest.param(1, 1, 32, TransferOutcome.VERIFIED, id="a prompt of one token"),
        pytest.param(300, 0, 32, TransferOutcome.RECOMPUTED, id="no token was cached"),
        pytest.param(20, 19, 32, TransferOutcome.VERIFIED, id="a prompt shorter than a block"),
        pytest.param(20, 0, 32, TransferOutcome.RECOMPUTED, id="no token of a short prompt was cached"),
        pytest.param(300, None, 32, TransferOutcome.UNKNOWN, id="the engine reports no count"),
    ],
)
def test_a_transfer_is_verified_when_every_whole_block_was_cached(
    prompt: int, cached: int | None, block: int, expected: TransferOutcome
) -> None:
    assert classify_transfer(prompt_tokens=prompt, cached_tokens=cached, block_tokens=block) is expected


def reasons(*outcomes: TransferOutcome, reason: str = "") -> list[str]:
    """The reason of a pair after each outcome."""
    pair, found = TransferPair(), []
    for number, outcome in enumerate(outcomes):
        pair.record(outcome, now_s=float(number), reason=reason)
        found.append(pair.reason)
    return found


VERIFIED, RECOMPUTED, UNKNOWN = TransferOutcome.VERIFIED, TransferOutcome.RECOMPUTED, TransferOutcome.UNKNOWN


def test_two_misses_in_a_row_make_a_pair_bad_and_one_success_clears_it() -> None:
    assert reasons(VERIFIED, RECOMPUTED, VERIFIED, RECOMPUTED, RECOMPUTED, RECOMPUTED, VERIFIED) == [
        *("Verified", "Verified", "Verified", "Verified"),
        *("Recomputed", "Recomputed", "Verified"),
    ]
    assert reasons(RECOMPUTED, RECOMPUTED, reason="LeaseExpired") == ["NoTrafficYet", "LeaseExpired"]
    known, unknown = TransferPair(), TransferPair()
    for pair, causes in ((known, ("Incompatible", "", "")), (unknown, ("", ""))):
        for reason in causes:
            pair.record(RECOMPUTED, now_s=0.0, reason=reason)
    assert (known.reason, unknown.reason) == ("Incompatible", "Recomputed")
    assert reasons(UNKNOWN, RECOMPUTED, UNKNOWN) == ["NotReported", "NotReported", "NotReported"]


def test_a_pair_stays_warm_for_the_engine_ttl_and_turns_cold_on_a_miss() -> None:
    pair = TransferPair()
    warm = []
    for outcome in (VERIFIED, RECOMPUTED, UNKNOWN):
        pair.record(outcome, now_s=100.0)
        warm.append(pair.warm_until_s - 100.0)
    assert warm == [WARM_FOR_S, float("-inf"), WARM_FOR_S]


def test_three_slow_transfers_in_a_row_mark_the_pair_slow() -> None:
    pair, found = TransferPair(), []
    for duration_s in (1.0, 1.0, 0.1, 1.0, 1.0, 1.0, 0.1):
        pair.record_duration(duration_s, tokens=1000, recompute_s=0.2, cold=False)
        pair.record(VERIFIED, now_s=0.0)
        found.append(pair.reason)
    assert found == [*["Verified"] * 5, "SlowTransport", "Verified"]
    assert pair.handshake_s is None


@pytest.mark.parametrize(
    ("prompt", "duration_s", "expected"),
    [
        pytest.param(8_000, 0.11, "Verified", id="InfiniBand"),
        pytest.param(8_000, 0.3, "Verified", id="InfiniBand shared with other traffic"),
        pytest.param(8_000, 1.05, "SlowTransport", id="TCP"),
        pytest.param(2_000, 0.29, "SlowTransport", id="TCP with a shorter prompt"),
        pytest.param(300, 0.09, "Verified", id="a prompt too short to show the difference"),
    ],
)
def test_transfers_slower_than_the_declared_fabric_mark_the_pair_slow(
    prompt: int, duration_s: float, expected: str
) -> None:
    """70 billion parameters: 328 kB a token, 33 ms for 1,000 tokens at 10 GB/s, 131 ms over TCP."""
    pair = TransferPair()
    for _ in range(3):
        pair.record_duration(
            duration_s,
            tokens=prompt,
            recompute_s=0.08 * prompt / 1000,
            cold=False,
            wire_s=0.033 * prompt / 1000,
        )
        pair.record(VERIFIED, now_s=0.0)
    assert pair.reason == expected


def test_long_engine_steps_do_not_mark_the_pair_slow() -> None:
    def reason_with(step_s: float) -> str:
        pair = TransferPair()
        for _ in range(3):
            pair.record_duration(0.5, tokens=1000, recompute_s=0.1, cold=False, step_s=step_s, wire_s=0.03)
        pair.record(VERIFIED, now_s=0.0)
        return pair.reason

    assert [reason_with(0.0), reason_with(0.2)] == ["SlowTransport", "Verified"]


def test_only_a_long_prompt_clears_a_slow_pair() -> None:
    pair, found = TransferPair(), []
    for tokens, duration_s in ((4000, 0.6), (4000, 0.6), (300, 0.05), (4000, 0.6), (300, 0.05), (4000, 0.1)):
        pair.record_duration(
            duration_s, tokens=tokens, recompute_s=0.3, cold=False, wire_s=0.033 * tokens / 1000
        )
        pair.record(VERIFIED, now_s=0.0)
        found.append(pair.reason)
    assert found == [*["Verified"] * 3, *["SlowTransport"] * 2, "Verified"]
    assert pair.slow_prompt_tokens == 4000


def test_the_first_transfer_measures_the_handshake_and_short_prompts_are_not_timed() -> None:
    pair = TransferPair()
    pair.record_duration(0.25, tokens=1000, recompute_s=0.01, cold=True)
    pair.record_duration(9.0, tokens=100, recompute_s=0.01, cold=False)
    assert (pair.handshake_s, pair.transfer_s_per_1k_tokens) == (0.25, None)
    pair.record_duration(0.02, tokens=2000, recompute_s=0.01, cold=False)
    assert pair.transfer_s_per_1k_tokens == pytest.approx(0.01)


def fleet(prefills: int = 1, decodes: int = 2) -> list[InstanceRecord]:
    return [
        *(instance(f"d{i + 1}") for i in range(decodes)),
        *(instance(f"p{i + 1}") for i in range(prefills)),
    ]


def record(
    pairs: TransferPairs,
    key: PairKey,
    outcome: TransferOutcome = VERIFIED,
    *,
    times: int = 1,
    now_s: float = 0.0,
) -> None:
    for _ in range(times):
        pairs[key].record(outcome, now_s=now_s)


def choose(pairs: TransferPairs, views: list[InstanceRecord], tokens: int) -> tuple[str, float]:
    """The decode instance for a prompt on p1, and the first part of its cost."""
    source = next(view for view in views if view.name == "p1")
    decision = choose_decode(
        Candidates(views), work(tokens), now_s=1.0, prefilled_on=source, pairs=pairs.list_from("p1")
    )
    assert isinstance(decision, Dispatch)
    assert decision.reason is DispatchReason.WITHIN_SLO
    return decision.instance, round(decision.cost[0], 6)


def test_a_cold_pair_costs_one_handshake_more_than_a_warm_one() -> None:
    pairs, views = TransferPairs(), fleet()
    record(pairs, PairKey("p1", "d2"))
    assert choose(pairs, views, 100) == ("d2", 0.0)
    views[1].ledger.add_local_prefill(tokens=199, predicted_s=0.199, now_s=1.0)
    assert choose(pairs, views, 100) == ("d2", 0.199)
    views[1].ledger.add_local_prefill(tokens=2, predicted_s=0.002, now_s=1.0)
    assert choose(pairs, views, 100) == ("d1", 0.2)


def rounded(delays: Mapping[str, TransferDelay]) -> dict[str, tuple[float, ...]]:
    return {name: tuple(round(part, 9) for part in delay) for name, delay in delays.items()}


def record_duration(pairs: TransferPairs, key: PairKey, duration_s: float, *, tokens: int = 1000) -> None:
    """Record a verified transfer of a warm pair that took `duration_s`."""
    record(pairs, key)
    pairs[key].record_duration(duration_s, tokens=tokens, recompute_s=10.0, cold=False)


def test_the_delay_of_a_slow_pair_grows_with_the_prompt() -> None:
    """Beyond 100 ms of engine overhead, d2's lag is 100 ms and d1's 500 ms: 300 ms above twice d2's."""
    pairs, views = TransferPairs(), fleet()
    record_duration(pairs, PairKey("p1", "d1"), 0.6)
    record_duration(pairs, PairKey("p1", "d2"), 0.2)
    pairs.refresh(views, now_s=1.0)
    views[1].ledger.add_local_prefill(tokens=200, predicted_s=0.2, now_s=1.0)
    assert choose(pairs, views, 600) == ("d1", 0.18)
    assert choose(pairs, views, 800) == ("d2", 0.2)


@pytest.mark.parametrize(
    ("durations_s", "expected"),
    [
        pytest.param((0.02, 0.09), {}, id="both within the engine overhead"),
        pytest.param((0.3, 0.2), {"p1": (0.0, 0.0001)}, id="the lag is at most twice the fastest pair's"),
        pytest.param((5.0, 5.0), {"p1": (0.0, 0.0049)}, id="both are slow"),
    ],
)
def test_pairs_of_similar_speed_count_as_equally_fast(
    durations_s: tuple[float, float], expected: dict[str, tuple[float, float]]
) -> None:
    pairs, views = TransferPairs(), fleet()
    for decode, duration_s in zip(("d1", "d2"), durations_s, strict=True):
        record_duration(pairs, PairKey("p1", decode), duration_s)
    pairs.refresh(views, now_s=1.0)
    assert choose(pairs, views, 1000) == ("d1", 0.0)
    assert rounded(pairs.prefill_delays) == expected


def test_a_prefill_instance_slow_to_every_decode_instance_is_delayed_itself() -> None:
    pairs, views = TransferPairs(), fleet(prefills=3, decodes=2)
    pairs.refresh(views, now_s=1.0)
    all_cold = rounded(pairs.prefill_delays)
    for decode in ("d1", "d2"):
        record_duration(pairs, PairKey("p2", decode), 0.05)
        record_duration(pairs, PairKey("p3", decode), 0.5)
    pairs.refresh(views, now_s=1.0)
    assert all_cold == dict.fromkeys(("p1", "p2", "p3"), (0.2, 0.0))
    assert rounded(pairs.prefill_delays) == {"p1": (0.2, 0.0), "p3": (0.0, 0.0004)}

    def chosen(tokens: int) -> str:
        decision = choose_prefill(Candidates(views), work(tokens), now_s=0.0, delays=pairs.prefill_delays)
        assert isinstance(decision, Dispatch)
        return decision.instance

    views[3].ledger.add_prefill(tokens=150, predicted_s=0.15, now_s=0.0)
    assert [chosen(100), chosen(400)] == ["p3", "p2"]


def test_invalidating_an_instance_forgets_the_measured_speed_of_its_pairs() -> None:
    pairs, key = TransferPairs(), KEY
    record_duration(pairs, key, 5.0)
    pairs.invalidate("d1")
    assert (pairs[key].transfer_s_per_1k_tokens, pairs[key].lag_s_per_1k_tokens) == (None, None)


def test_a_pair_turns_cold_after_the_ttl_an_engine_restart_or_a_miss() -> None:
    views, key = fleet(decodes=1), KEY

    def cold_after(*, wait_s: float = 0.0, invalidate: str = "", misses: int = 0) -> bool:
        pairs = TransferPairs()
        record(pairs, key)
        if invalidate:
            pairs.invalidate(invalidate)
        record(pairs, key, RECOMPUTED, times=misses)
        pairs.refresh(views, now_s=wait_s)
        return bool(pairs.prefill_delays)

    assert [
        cold_after(),
        cold_after(wait_s=WARM_FOR_S - 1),
        cold_after(wait_s=WARM_FOR_S),
        cold_after(invalidate="p1"),
        cold_after(invalidate="d1"),
        cold_after(misses=1),
    ] == [False, False, True, True, True, True]


def test_a_prefill_instance_that_no_decode_instance_reaches_is_broken() -> None:
    pairs, views = TransferPairs(), fleet(prefills=2)
    for decode in ("d1", "d2"):
        for _ in range(PROBLEM_AFTER_MISSES):
            pairs[PairKey("p1", decode)].record(RECOMPUTED, now_s=0.0, reason="HandshakeFailed")
    record(pairs, PairKey("p2", "d1"), RECOMPUTED, times=PROBLEM_AFTER_MISSES)
    pairs.refresh(views, now_s=0.0)
    found = [pairs.broken_prefill_instances]
    record(pairs, PairKey("p1", "d2"))
    pairs.refresh(views, now_s=0.0)
    assert [*found, pairs.broken_prefill_instances] == [("p1",), ()]


def test_pairs_of_removed_instances_are_forgotten() -> None:
    pairs = TransferPairs()
    record(pairs, KEY)
    record(pairs, PairKey("p1", "d2"))
    pairs.refresh(fleet(decodes=1), now_s=0.0)
    assert list(pairs.pairs) == [KEY]


def test_due_pairs_are_the_unused_then_the_suspect_then_the_idle() -> None:
    pairs, views = TransferPairs(), fleet(decodes=1)
    reverse = PairKey("d1", "p1")

    def due(now_s: float) -> list[PairKey]:
        return pairs.list_due(views, now_s=now_s, interval_s=300.0)

    assert due(0.0) == [KEY, reverse]
    record(pairs, KEY)
    assert due(0.0) == [reverse]
    record(pairs, reverse)
    assert due(299.0) == []
    assert due(300.0) == [KEY, reverse]
    record(pairs, reverse, RECOMPUTED, now_s=100.0)
    assert due(100.0) == [reverse], "a suspect pair is due at once"
    record(pairs, reverse, RECOMPUTED, now_s=100.0)
    assert (due(100.0 + PROBLEM_PAIR_RETRY_S - 1), due(100.0 + PROBLEM_PAIR_RETRY_S)) == ([], [reverse])


def test_a_slow_pair_is_not_due_before_its_interval() -> None:
    pairs, views = TransferPairs(), fleet(decodes=1)
    record(pairs, PairKey("d1", "p1"), now_s=299.0)
    for _ in range(3):
        pairs[KEY].record_duration(9.0, tokens=1000, recompute_s=1.0, cold=False)
    record(pairs, KEY)
    assert pairs[KEY].reason == "SlowTransport"
    assert pairs.list_due(views, now_s=299.0, interval_s=300.0) == []
    assert pairs.list_due(views, now_s=300.0, interval_s=300.0) == [KEY]


def test_no_pair_is_due_for_a_single_instance_or_incompatible_engines() -> None:
    other = instance("d2", identity=OTHER_MODEL)
    pairs = TransferPairs()
    assert pairs.list_due([instance("d1")], now_s=0.0, interval_s=0.0) == []
    assert pairs.list_due([instance("d1"), other], now_s=0.0, interval_s=0.0) == []


def test_few_instances_are_fully_meshed_and_many_are_sampled() -> None:
    def due_pairs(count: int) -> set[PairKey]:
        views = [instance(f"d{i:03}", role=Role.DECODE) for i in range(count)]
        return set(TransferPairs().list_due(views, now_s=0.0, interval_s=0.0))

    assert len(due_pairs(MAX_FULL_MESH_INSTANCES)) == MAX_FULL_MESH_INSTANCES * (MAX_FULL_MESH_INSTANCES - 1)
    many = due_pairs(100)
    assert len(many) == 700
    assert {len({k for k in many if k.prefill == f"d{i:03}"}) for i in range(100)} == {7}
    assert {len({k for k in many if k.decode == f"d{i:03}"}) for i in range(100)} == {7}


def test_the_least_recently_used_pair_of_an_instance_is_dropped_first() -> None:
    pairs, count = TransferPairs(), MAX_PAIRS_PER_SOURCE
    for i in range(count):
        record(pairs, PairKey("p1", f"d{i:05}"))
    record(pairs, PairKey("p1", "d00000"))
    record(pairs, PairKey("p1", "new"))
    record(pairs, PairKey("p2", "d00001"))
    dropped = PairKey("p1", "d00001")
    assert (len(pairs.pairs), dropped in pairs.pairs) == (count + 1, False)
    assert {PairKey("p1", "d00000"), PairKey("p1", "new"), PairKey("p2", "d00001")} <= set(pairs.pairs)


def test_all_pairs_of_forty_prefill_and_forty_decode_instances_stay_warm() -> None:
    pairs, views = TransferPairs(), fleet(prefills=40, decodes=40)
    keys = [PairKey(f"p{p + 1}", f"d{d + 1}") for p in range(40) for d in range(40)]
    for key in keys:
        record(pairs, key)
    pairs.refresh(views, now_s=1.0)
    cold = [k for k in keys if (pair := pairs.get(k)) is None or pair.warm_until_s <= 1.0]
    assert (cold, pairs.prefill_delays) == ([], {})


def test_the_reported_pairs_are_bounded_and_bad_ones_come_first() -> None:
    pairs = TransferPairs()
    for i in range(2 * MAX_REPORTED_PAIRS):
        record(pairs, PairKey(f"p{i % 5}", f"d{i:05}"), now_s=float(i))
    record(pairs, PairKey("p0", "d00005"), RECOMPUTED, times=PROBLEM_AFTER_MISSES, now_s=5.0)
    reported = dict(pairs.list_reported())
    assert len(reported) == MAX_REPORTED_PAIRS
    last = 2 * MAX_REPORTED_PAIRS - 1
    assert {PairKey("p0", "d00005"), PairKey(f"p{last % 5}", f"d{last:05}")} <= set(reported)
