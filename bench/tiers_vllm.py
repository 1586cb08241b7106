"""A flood of the lowest tier against the first tokens of the highest one, on real vLLM engines.

    python bench/tiers_vllm.py [--seed N] [--rounds N] [--for SECONDS] [--reserve]

Runs a local service with a prefill and a decode engine and two tiers, and measures what it can serve. Each
engine has its own share of a processor (`processor_shares`, which needs root). With `--reserve` there are
two prefill engines, of which the reserve of premium keeps one nearly idle. Then, in turn, premium alone
sends a tenth of that, and premium beside free requests at five times what it can serve, with lengths drawn
from the same ranges. Prints premium's time to the first token both ways, requests that failed, and free
requests that were refused. Exit code 1 if, in the median of the rounds, premium's p99 in the flood is more
than 1.5 times that alone, if a request fails, or if premium is refused. Needs `make engine`. A round during
which other programs used the processors, or the load was late, does not count.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from statistics import median
from typing import Any

from bench.processor_shares import ProcessorShares, processor_shares
from bench.vllm_load import MeasuredLoad, isolate_engines, measure_load, run_vllm_service
from fulcrum_core.values import Slo
from fulcrum_simulator.client import Latencies, summarize_latencies
from fulcrum_simulator.workload import WorkloadRequest
from tests.engines.loads import LARGER_MODEL, Sender, draw_burst, draw_load, measure_rate_rps, send_load
from tests.engines.services import RunningService, build_manifest

PREMIUM, FREE = "premium", "free"
PREMIUM_SHARE, FLOOD_SHARE = 0.1, 5.0
"""Rates, as multiples of what the service can serve."""
PROMPT_TOKENS, OUTPUT_TOKENS = (512, 1536), (2, 14)
SLO = Slo(ttft_s=2.0, tpot_s=0.2)
ENGINE_ARGS = (*LARGER_MODEL, "--kv-cache-memory-bytes", str(256 * 2**20))
ENGINE_SHARE = 0.5
"""Share of one processor that an engine has."""
BURST = 60
"""Requests by which the rate that the service can serve is measured."""
RATIO_MAX = 1.5

Round = tuple[MeasuredLoad, MeasuredLoad]
"""Premium alone, and premium in the flood."""


def build_objects(*, reserve: bool) -> list[dict[str, Any]]:
    """The tiers and the service; with `reserve` half of two prefill engines is premium's."""
    slo = {"ttft": f"{SLO.ttft_s:g}s", "tpot": f"{SLO.tpot_s:g}s"}
    specs: dict[str, dict[str, Any]] = {
        PREMIUM: {"priority": 10, "sheddable": False, "slo": slo},
        FREE: {"priority": -10, "slo": slo},
    }
    if reserve:
        specs[PREMIUM]["reservedFraction"] = 0.5
    tiers = [
        {"apiVersion": "fulcrum.dev/v1alpha1", "kind": "QoSTier", "metadata": {"name": name}, "spec": spec}
        for name, spec in specs.items()
    ]
    service = build_manifest(
        engine={"type": "vLLM", "args": list(ENGINE_ARGS)},
        qosTiers=[PREMIUM, FREE],
        slo={"ttft": "60s", "tpot": "1s"},  # of requests without a tier, which measure the capacity
        router={"admission": "Enforce"},
        **({"instances": 3, "roles": {"prefill": {"min": 2}}} if reserve else {}),
    )
    return [*tiers, service]


async def measure_capacity_rps(service: RunningService, seed: int) -> float:
    """Requests a second that the service serves while some wait all the time, beside one of premium.

    In the 10 s after that one decode computes no prompts, and the engine gets one prompt of the burst at a
    time. If a burst takes longer, the rate is too high.
    """
    for number in range(2):  # the first burst opens connections and teaches the router what requests cost
        premium = WorkloadRequest(0.0, PROMPT_TOKENS[0], OUTPUT_TOKENS[0], tenant=PREMIUM, tier=PREMIUM)
        burst = draw_burst(PROMPT_TOKENS, OUTPUT_TOKENS, count=BURST, seed=f"{seed}/burst/{number}")
        results = await send_load(service.info, [premium, *burst], slo=SLO, seed=100 * seed + 90 + number)
    return measure_rate_rps(results)


async def measure_rounds(
    service: RunningService, shares: ProcessorShares, *, seed: int, rounds: int, seconds: float
) -> list[Round]:
    """Measure premium alone and in the flood, in turn."""
    await isolate_engines(service, shares, ENGINE_SHARE)
    capacity_rps = await measure_capacity_rps(service, seed)
    print(f"the service serves {capacity_rps:.1f} requests/s", flush=True)
    senders = [
        Sender(tier, share * capacity_rps, PROMPT_TOKENS, OUTPUT_TOKENS)
        for tier, share in ((PREMIUM, PREMIUM_SHARE), (FREE, FLOOD_SHARE))
    ]
    found = []
    for number in range(rounds):
        pair = []
        for count, name in ((1, "alone"), (2, "flood")):
            requests = draw_load(senders[:count], end_s=seconds, seed=f"{seed}/{number}")
            pair.append(await measure_load(service, requests, slo=SLO, seed=100 * seed + 2 * number + count))
            print(f"{name}  {describe(pair[-1])}", flush=True)
        found.append((pair[0], pair[1]))
    return found


def find_premium_latencies(load: MeasuredLoad) -> Latencies:
    """Latencies of the highest tier."""
    return summarize_latencies(one for one in load.results.outcomes if one.tier == PREMIUM)


def find_premium_p99_s(load: MeasuredLoad) -> float:
    """Time to the first token of the highest tier; infinite without a response."""
    p99_s = find_premium_latencies(load).ttft_p99_s
    return float("inf") if p99_s is None else p99_s


def describe(load: MeasuredLoad) -> str:
    """One line for one load."""
    tiers = ", ".join(
        f"{name} {counts.offered} offered, {counts.ok} ok, {counts.refused} refused"
        for name, counts in load.report.tiers.items()
    )
    return (
        f"premium TTFT {1000 * (find_premium_latencies(load).ttft_p50_s or 0.0):.0f} ms p50, "
        f"{1000 * find_premium_p99_s(load):.0f} ms p99; {tiers}; {load.failed} failed; "
        f"{load.describe_machine()}"
    )


def judge(rounds: Sequence[Round]) -> bool:
    """Print the verdict of the rounds that count; return whether all bars are met."""
    counted = [pair for pair in rounds if pair[0].is_valid and pair[1].is_valid]
    failed = sum(load.failed for pair in rounds for load in pair)
    refused = sum(load.report.tiers[PREMIUM].refused for pair in rounds for load in pair)
    print(f"{failed} failed, {refused} premium refused, {len(counted)} of {len(rounds)} rounds count")
    if not counted:
        return False
    ratios = [find_premium_p99_s(flood) / find_premium_p99_s(alone) for alone, flood in counted]
    print(
        f"premium TTFT p99 in the flood: {median(ratios):.2f} x that alone (bar: {RATIO_MAX}), "
        f"{min(ratios):.2f} to {max(ratios):.2f}"
    )
    return median(ratios) <= RATIO_MAX and not failed and not refused


def main() -> int:
    """Run the service and measure; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--for", dest="seconds", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument("--reserve", action="store_true", help="two prefill engines, one kept for premium")
    given = parser.parse_args()
    with processor_shares() as shares, run_vllm_service(*build_objects(reserve=given.reserve)) as service:
        measuring = measure_rounds(
            service, shares, seed=given.seed, rounds=given.rounds, seconds=given.seconds
        )
        rounds = asyncio.run(measuring)
    return 0 if judge(rounds) else 1


if __name__ == "__main__":
    sys.exit(main())
