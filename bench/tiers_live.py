"""A flood of the lowest tier against the promise of the highest one, with engine servers in real time.

    python bench/tiers_live.py [--seed N] [--for SECONDS]

Runs the local service of `fulcrum play` (8 simulated engines, three tiers, admission Enforce) twice, with the
same requests of all tiers: once alone, and once with one more tenant of the lowest tier that sends five times
what the service can serve, from 10 s after the start on. Prints each tier's requests, its SLO attainment over
those offered, and tokens a second within the objectives. Exit code 1 if the highest tier's attainment falls
by more than 2 points, the tokens by more than 5 %, a higher tier is refused before the lowest one, or the
machine did not keep up. Nothing else should run on it.
"""

import argparse
import sys
from collections.abc import Iterable

from bench.play import Report, Verdict, judge_requests, print_verdicts, run_play

HIGHEST, LOWEST = "premium", "free"
LOSS_MAX, TOKENS_MIN = 0.02, 0.95


def find_tokens_per_s(report: Report) -> float:
    """Prompt and output tokens a second of the requests within their objectives, of all tiers."""
    tokens: int = sum(tier["tokens_within_slo"] for tier in report["tiers"].values())
    return tokens / float(report["duration_s"])


def judge(alone: Report, flooded: Report) -> Iterable[Verdict]:
    """Compare the run with the flood with the one without it."""
    yield from judge_requests(alone)
    yield from judge_requests(flooded)
    shares = [report["tiers"][HIGHEST]["attainment"] for report in (alone, flooded)]
    loss = shares[0] - shares[1]
    yield (
        loss <= LOSS_MAX,
        f"{HIGHEST} {shares[0]:.1%} alone, {shares[1]:.1%} in the flood: {100 * loss:.1f} points",
    )
    tokens = [find_tokens_per_s(report) for report in (alone, flooded)]
    kept = tokens[1] / tokens[0]
    yield (
        kept >= TOKENS_MIN,
        f"{tokens[0]:.0f} and {tokens[1]:.0f} tokens/s within the objectives: {kept:.2f} x",
    )
    refused = flooded["tiers_by_first_refusal"]
    yield refused[:1] == [LOWEST], f"first refused, by tier: {', '.join(refused) or 'none'}"


def main() -> int:
    """Run the service twice and judge both runs; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--for", dest="seconds", type=float, default=300.0, metavar="SECONDS")
    given = parser.parse_args()
    common = ("--seed", str(given.seed), "--for", f"{given.seconds:g}s")
    alone, flooded = (run_play("--load", load, *common) for load in ("tiers", "tiers-flood"))
    return print_verdicts(judge(alone, flooded))


if __name__ == "__main__":
    sys.exit(main())
