"""A flood of the lowest tier against the promise of the highest one, by simulation.

    python bench/tiers.py [--load NAME] [--policies LIST] [--seeds N] [--flood-for SECONDS]
                          [--reserve FRACTION] [--jobs N]

Runs a composed workload with three tiers, with its flood and without it, with the same seeds. Requests
that arrive in the middle third count: SLO attainment of each tier over the requests offered, refused
requests, and tokens a second of all requests within their objectives. Exit code 1 if, with the last policy
and in the median of the seeds, the attainment of the highest tier falls by more than 2 points or the tokens
by more than 5 %.
"""

import argparse
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import median

from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Slo
from fulcrum_router.policy.tiers.tier_reserve import Reserve
from fulcrum_simulator.fleet.options import RunOptions, parse_policy
from fulcrum_simulator.fleet.run import simulate
from fulcrum_simulator.routing import Outcome
from fulcrum_simulator.workload.composed import FLOODS, mix_tiers

INSTANCES, PROFILE, SLO = 8, "l70-h100-tp4", Slo(3.0, 0.1)
TIERS = ("premium", "standard", "free")
WITHOUT_FLOOD = "tiers"
LOSS_MAX, TOKENS_MIN = 0.02, 0.95


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    policy: str
    load: str
    seed: int
    flood_s: float
    reserve: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Requests of the middle third, by tier, and tokens a second within the objectives."""

    offered: Counter[str]
    met: Counter[str]
    refused: Counter[str]
    tokens_per_s: float

    @property
    def premium(self) -> float:
        """SLO attainment of the highest tier, 0 to 1."""
        return self.met[TIERS[0]] / max(1, self.offered[TIERS[0]])

    def __str__(self) -> str:
        shares = (f"{tier} {self.met[tier] / max(1, self.offered[tier]):.1%}" for tier in TIERS)
        refused = ", ".join(str(self.refused[tier]) for tier in TIERS)
        return f"{', '.join(shares)}; refused {refused}; {self.tokens_per_s / 1000:.1f} thousand tokens/s"


def measure(case: Case) -> Figures:
    """Run one case."""
    workload = mix_tiers(FLOODS[case.load], duration_s=3 * case.flood_s)(1.0, case.seed)
    options = RunOptions(
        profile=load_profile(PROFILE),
        instances=INSTANCES,
        policy=parse_policy(case.policy, instances=INSTANCES),
        slo=SLO,
        seed=case.seed,
        reserved={TIERS[0]: Reserve(case.reserve)},
    )
    first_s, last_s = case.flood_s, 2 * case.flood_s
    records = [r for r in simulate(workload, options).records if first_s <= r.request.arrival_s < last_s]
    met = [record for record in records if record.meets(SLO)]
    refused = [record for record in records if record.outcome is Outcome.REFUSED]
    tokens = sum(record.request.input_tokens + record.output_tokens for record in met)
    offered, kept, dropped = (Counter(r.request.tier for r in chosen) for chosen in (records, met, refused))
    return Figures(offered, kept, dropped, tokens / case.flood_s)


def main() -> int:
    """Run the cases and print two lines for each policy and seed; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    floods = sorted(set(FLOODS) - {WITHOUT_FLOOD})
    parser.add_argument("--load", choices=floods, default="tiers-prompt-flood")
    parser.add_argument("--policies", default="arrow")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--flood-for", type=float, default=120.0, metavar="SECONDS")
    parser.add_argument("--reserve", type=float, default=0.0, help="reservedFraction of the highest tier")
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    seeds, met = range(1, given.seeds + 1), False
    with ProcessPoolExecutor(given.jobs) as pool:
        for policy in given.policies.split(","):
            cases = [
                Case(policy, load, seed, given.flood_for, given.reserve)
                for seed in seeds
                for load in (WITHOUT_FLOOD, given.load)
            ]
            met = _report(cases, list(pool.map(measure, cases)))
    return 0 if met else 1


def _report(cases: Sequence[Case], figures: Sequence[Figures]) -> bool:
    """Print the runs of one policy; return whether it keeps its promise, in the median of the seeds."""
    for case, found in zip(cases, figures, strict=True):
        print(f"{case.policy:22} {case.load:20} seed {case.seed}: within the SLO {found}", flush=True)
    pairs = list(zip(figures[::2], figures[1::2], strict=True))
    loss = median(without.premium - flooded.premium for without, flooded in pairs)
    kept = median(flooded.tokens_per_s / without.tokens_per_s for without, flooded in pairs)
    print(
        f"{cases[0].policy}: premium loses {100 * loss:.1f} points (bar: {100 * LOSS_MAX:g}), "
        f"tokens {kept:.2f} x (bar: {TOKENS_MIN})"
    )
    return loss <= LOSS_MAX and kept >= TOKENS_MIN


if __name__ == "__main__":
    sys.exit(main())
