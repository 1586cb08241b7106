"""A flood of the lowest tier against the promise of the highest one, by simulation.

    python bench/tiers.py [--load NAME] [--policy POLICY] [--seeds N] [--flood-for SECONDS]
                          [--reserve FRACTION] [--jobs N]

Runs a composed workload with three tiers, with its flood and without it, with the same seeds. Requests
that arrive in the middle third count: SLO attainment of the highest tier over the requests offered, and
tokens a second of all requests within their objectives. Exit code 1 if the attainment falls by more than 2
points or the tokens by more than 5 %.
"""

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from functools import partial

from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Slo
from fulcrum_simulator.fleet.options import RunOptions, parse_policy
from fulcrum_simulator.fleet.run import simulate
from fulcrum_simulator.workload.composed import FLOODS, mix_tiers

INSTANCES, PROFILE, SLO = 8, "l70-h100-tp4", Slo(3.0, 0.1)
LOSS_MAX, TOKENS_MIN = 0.02, 0.95


def measure(case: tuple[str, int], *, policy: str, flood_s: float, reserve: float) -> tuple[int, int, float]:
    """Return premium requests offered and within the SLO, and tokens/s within it, in the middle third."""
    load, seed = case
    workload = mix_tiers(FLOODS[load], duration_s=3 * flood_s)(1.0, seed)
    options = RunOptions(
        profile=load_profile(PROFILE),
        instances=INSTANCES,
        policy=parse_policy(policy, instances=INSTANCES),
        slo=SLO,
        seed=seed,
        reserved={"premium": reserve},
    )
    records = [r for r in simulate(workload, options).records if flood_s <= r.request.arrival_s < 2 * flood_s]
    met = [record for record in records if record.meets(SLO)]
    tokens = sum(record.request.input_tokens + record.request.output_tokens for record in met)
    premium = [sum(r.request.tier == "premium" for r in chosen) for chosen in (records, met)]
    return premium[0], premium[1], tokens / flood_s


def main() -> int:
    """Run the cases and print one line for each seed; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--load", choices=sorted(FLOODS), default="tiers-prompt-flood")
    parser.add_argument("--policy", default="arrow+queue")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--flood-for", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument("--reserve", type=float, default=0.0, help="reservedFraction of the premium tier")
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    seeds = range(1, given.seeds + 1)
    cases = [(load, seed) for seed in seeds for load in ("tiers", given.load)]
    with ProcessPoolExecutor(given.jobs) as pool:
        measured = list(
            pool.map(
                partial(measure, policy=given.policy, flood_s=given.flood_for, reserve=given.reserve), cases
            )
        )
    passed = True
    for seed, (offered, met, tokens), (_, met_flooded, tokens_flooded) in zip(
        seeds, measured[::2], measured[1::2], strict=True
    ):
        loss, kept = (met - met_flooded) / offered, tokens_flooded / tokens
        passed &= loss <= LOSS_MAX and kept >= TOKENS_MIN
        print(
            f"{given.load}, {given.policy}, seed {seed}: of {offered} premium requests {met / offered:.1%} "
            f"within the SLO without the flood, {met_flooded / offered:.1%} with it; all tiers "
            f"{tokens / 1000:.1f} and {tokens_flooded / 1000:.1f} thousand tokens/s within the SLO",
            flush=True,
        )
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
