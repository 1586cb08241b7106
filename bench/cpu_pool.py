"""A pool of CPUs beside GPUs over their capacity: what it adds, and that requests on GPUs do not suffer.

    python bench/cpu_pool.py --trace FILE [--speed 1.3] [--policy NAME] [--cpus 4] [--slowness 10]
                             [--seconds 900] [--seeds 3] [--jobs 1]

The first seconds of a trace are simulated at a multiple of their speed, for each seed without and with CPU
instances whose steps take so many times as long as those of a GPU instance. Exit code 1 if a median misses
its bar: the attainment of all requests must rise, and that of the requests on GPUs must not fall.
"""

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import repeat
from statistics import fmean, median

from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Slo
from fulcrum_simulator.fleet.load import leave_out_overlong, prepare_load
from fulcrum_simulator.fleet.options import RunOptions, parse_policy
from fulcrum_simulator.fleet.records import RequestResult
from fulcrum_simulator.fleet.run import simulate
from fulcrum_simulator.workload import load_trace

INSTANCES, PROFILE, SLO = 8, "l70-h100-tp4", Slo(30.0, 0.1)


@dataclass(frozen=True, slots=True)
class Figures:
    """Shares of the scored requests."""

    met: float
    met_on_gpus: float
    tokens_in_time: float
    cpu_prompts: float
    cpu_tokens: float
    met_on_cpus: float

    def __str__(self) -> str:
        cpus = f"CPUs: {self.cpu_prompts:.1%} of the prompts, {self.cpu_tokens:.1%} of their tokens, "
        all_met = f"{self.met:.1%} met, {self.tokens_in_time:.1%} of the tokens in time"
        return f"{all_met}; on GPUs {self.met_on_gpus:.1%} met; {cpus}{self.met_on_cpus:.1%} met"


def measure(given: argparse.Namespace, seed: int, cpus: int) -> Figures:
    """Run one case."""
    profile = load_profile(PROFILE)
    requests, _ = leave_out_overlong(load_trace(given.trace).requests, profile)
    clip = [request for request in requests if request.arrival_s < given.seconds]
    workload = prepare_load(clip, scale=1.0, speed=given.speed, slo=SLO, seed=seed)
    options = RunOptions(
        profile=profile,
        instances=INSTANCES,
        policy=parse_policy(given.policy, instances=INSTANCES),
        slo=SLO,
        seed=seed,
        cpu_instances=cpus,
        cpu_slowness=given.slowness,
    )
    scored = simulate(workload, options).scored
    on_cpus = [record for record in scored if record.prefill.startswith("cpu")]
    on_gpus = [record for record in scored if not record.prefill.startswith("cpu")]
    prompt_tokens = sum(record.request.input_tokens for record in scored)
    return Figures(
        met=share_met(scored),
        met_on_gpus=share_met(on_gpus),
        tokens_in_time=sum(map(count_tokens, filter(meets, scored))) / sum(map(count_tokens, scored)),
        cpu_prompts=len(on_cpus) / len(scored),
        cpu_tokens=sum(record.request.input_tokens for record in on_cpus) / prompt_tokens,
        met_on_cpus=share_met(on_cpus),
    )


def meets(record: RequestResult) -> bool:
    """Whether the request met both objectives."""
    return record.meets(SLO)


def share_met(records: list[RequestResult]) -> float:
    """Share of the requests that met both objectives; 1 without requests."""
    return fmean(map(meets, records)) if records else 1.0


def count_tokens(record: RequestResult) -> int:
    """Tokens of the prompt and the answer."""
    return record.request.input_tokens + record.request.output_tokens


def main() -> int:
    """Print the figures; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trace", required=True)
    parser.add_argument("--speed", type=float, default=1.3)
    parser.add_argument("--policy", default="static:5P3D")
    parser.add_argument("--cpus", type=int, default=4)
    parser.add_argument("--slowness", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args()
    seeds = range(1, given.seeds + 1)
    with ProcessPoolExecutor(given.jobs) as pool:
        without = list(pool.map(measure, repeat(given), seeds, repeat(0)))
        with_cpus = list(pool.map(measure, repeat(given), seeds, repeat(given.cpus)))
    for seed, before, now in zip(seeds, without, with_cpus, strict=True):
        print(f"seed {seed}\n  without CPUs: {before.met:.1%} met, {before.tokens_in_time:.1%} of the tokens")
        print(f"  with {given.cpus} CPUs, {given.slowness:g} times as slow: {now}")
    gained = median(now.met - before.met for before, now in zip(without, with_cpus, strict=True))
    on_gpus = median(now.met_on_gpus - before.met for before, now in zip(without, with_cpus, strict=True))
    print(f"attainment {100 * gained:+.1f} points, on GPUs {100 * on_gpus:+.1f} points")
    return 0 if gained > 0 and on_gpus >= 0 else 1


if __name__ == "__main__":
    sys.exit(main())
