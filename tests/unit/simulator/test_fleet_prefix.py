"""Simulated engines keep prompts for those that begin alike, and dispatch sends these there."""

from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Slo
from fulcrum_simulator.fleet.options import RunOptions, parse_policy
from fulcrum_simulator.fleet.run import simulate
from fulcrum_simulator.workload import WorkloadRequest

BLOCK, TURNS, CHATS = 512, 6, 4


def make_chats() -> list[WorkloadRequest]:
    """Chats that take turns; each prompt has the blocks of the last one and one more."""
    return [
        WorkloadRequest(
            arrival_s=2.0 * (turn * CHATS + chat),
            input_tokens=BLOCK * (turn + 4),
            output_tokens=2,
            prefix_hash_ids=tuple(100 * chat + block for block in range(turn + 4)),
        )
        for turn in range(TURNS)
        for chat in range(CHATS)
    ]


def count_cached(policy: str, *, prefix_caches: bool = True) -> int:
    """Prompt tokens that the prefill instances had in their caches."""
    options = RunOptions(
        profile=load_profile("l8-h100"),
        instances=4,
        policy=parse_policy(policy, instances=4),
        slo=Slo(3.0, 0.1),
        prefix_caches=prefix_caches,
        unscored_share=0.0,
    )
    return sum(record.cached_tokens for record in simulate(make_chats(), options).records)


def test_prefix_aware_dispatch_brings_each_turn_where_the_last_one_was() -> None:
    possible = CHATS * sum(BLOCK * (turn + 3) for turn in range(1, TURNS))
    aware = count_cached("static:3P1D+prefix")
    assert aware >= 0.8 * possible
    assert count_cached("static:3P1D") < aware


def test_without_prefix_caches_every_prompt_is_computed_in_full() -> None:
    assert count_cached("static:3P1D", prefix_caches=False) == 0
