"""Flips on mixed hardware, by simulation: victims that suit their new role, against Arrow's order alone.

    python bench/mixed_hardware.py [--seeds N] [--load NAME] [--attainment PERCENT]

Half of eight instances are the profile's, H100; the others compute and read memory slower or faster by the
published peaks of their device: A100 (0.32 and 0.61 of an H100) or H20 (0.15 and 1.19). Even numbers have the
one hardware and odd numbers the other, so that the first roles suit neither. Prints for each pair and policy
the highest rates at which so many of the offered requests are in time, and their ratio by seed. Exit code 1
if the median of the ratios of `balanced` is below 1.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median

from bench.compiled import ensure_compiled
from fulcrum_autoscaler.policy import victims
from fulcrum_core.profiles import EngineProfile, load_profile
from fulcrum_core.values import Slo
from fulcrum_simulator.fleet.load import ComposedLoad
from fulcrum_simulator.fleet.options import RunOptions, parse_policy
from fulcrum_simulator.fleet.run import RunResult, simulate
from fulcrum_simulator.rate_search import find_highest_factor

INSTANCES, PROFILE, SLO = 8, "l70-h100-tp4", Slo(ttft_s=3.0, tpot_s=0.1)
DEVICES = {"A100": (0.32, 0.61), "H20": (0.15, 1.19)}
"""Peak arithmetic (dense BF16) and memory bandwidth, as shares of those of an H100 SXM."""
POLICIES = "balanced", "arrow"


def build_profile(profile: EngineProfile, device: str) -> EngineProfile:
    """Return the profile of another device: prompts take as long as its arithmetic, steps as its memory."""
    arithmetic, memory = DEVICES[device]
    return profile.model_copy(
        update={
            "name": f"{profile.name}-{device.lower()}",
            "b": profile.b / arithmetic,
            "c": profile.c / arithmetic,
            "t0": profile.t0 / memory,
            "d1": profile.d1 / memory,
            "d2": profile.d2 / memory,
            "peak_flops": profile.peak_flops * arithmetic,
            "hbm_bytes_per_s": profile.hbm_bytes_per_s * memory,
        }
    )


@contextmanager
def order_by_work_alone() -> Iterator[None]:
    """Choose victims as Arrow does while the block runs: by their work, whatever their hardware."""
    margin, victims.SUITABILITY_MARGIN = victims.SUITABILITY_MARGIN, float("inf")
    try:
        yield
    finally:
        victims.SUITABILITY_MARGIN = margin


def find_rate(load: ComposedLoad, device: str, policy: str, *, attainment: float, seed: int) -> float:
    """Find the highest rate, in requests a second, at which so large a share is in time."""
    profile = load_profile(PROFILE)
    options = RunOptions(
        profile=profile,
        instances=INSTANCES,
        policy=parse_policy(policy, instances=INSTANCES),
        slo=SLO,
        seed=seed,
        other_profiles=dict.fromkeys(range(1, INSTANCES, 2), build_profile(profile, device)),
    )

    def run(factor: float) -> RunResult:
        workload = load.prepare(factor, slo=SLO, seed=seed)
        return simulate(workload, options, attainment_min=attainment)

    def accepts(result: RunResult) -> bool:
        return sum(one.meets(SLO) for one in result.scored) >= attainment * len(result.scored)

    result = find_highest_factor(run, accepts, first=0.5, step=1.2).result
    return len(result.records) / result.last_arrival_s if result else 0.0


def main() -> int:
    """Search and compare; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--load", default="phases-200s")
    parser.add_argument("--attainment", type=float, default=90.0)
    given = parser.parse_args()
    ensure_compiled()
    load, good = ComposedLoad(given.load, load_profile(PROFILE)), True
    for device in DEVICES:
        for policy in POLICIES:
            pairs = []
            for seed in range(1, given.seeds + 1):
                search = {"attainment": given.attainment / 100, "seed": seed}
                with order_by_work_alone():
                    before = find_rate(load, device, policy, **search)
                pairs.append((before, find_rate(load, device, policy, **search)))
            ratios = [after / before for before, after in pairs if before]
            rates = ", ".join(f"{before:.2f} and {after:.2f}" for before, after in pairs)
            print(
                f"4 H100 and 4 {device}, {policy}: {rates} requests/s, {median(ratios):.2f} × "
                f"({min(ratios):.2f} to {max(ratios):.2f})",
                flush=True,
            )
            good = good and (policy != POLICIES[0] or median(ratios) >= 1.0)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
