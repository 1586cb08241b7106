"""Admission in the simulator: a flood of the lowest tier, shorter answers, and replays of refused requests.

    python bench/admission.py flood [--seeds 1,2,3] [--policies arrow+queue,arrow+queue+enforce]
    python bench/admission.py degrade [--seeds 1,2,3]
    python bench/admission.py replay --trace FILE [--speed 6.4] [--seeds 1,2,3] [--sample 10]

`flood`: the workloads with three tiers, without and with 120 s of flood at five times what the fleet can
serve; figures of the requests of that time. `degrade`: an overload of decode, refused or with answers of 128
tokens. `replay`: refused requests of a recording, each admitted in a run
of its own: the share of them that misses its objectives all the same. Exit code 1 if the premium tier loses
more than 2 points to the flood with the last policy (median), if shorter answers serve less than 1.3 times as
many requests, or if less than 90 % of the replays miss.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median

from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Slo
from fulcrum_simulator.fleet.load import leave_out_overlong, prepare_load
from fulcrum_simulator.fleet.options import RunOptions, parse_policy
from fulcrum_simulator.fleet.records import RequestResult
from fulcrum_simulator.fleet.run import simulate
from fulcrum_simulator.routing import Outcome
from fulcrum_simulator.workload import COMPOSED, WorkloadRequest, load_trace

INSTANCES = 8
PROFILE = load_profile("l70-h100-tp4")
SLO = Slo(ttft_s=3.0, tpot_s=0.1)
FROM_S, FLOOD_FROM_S, FLOOD_TO_S, TO_S = 200.0, 300.0, 420.0, 480.0
TIERS = ("premium", "standard", "free")
LOADS = ("tiers", "tiers-prompt-flood", "tiers-flood")
LOSS_MAX = 2.0
GAIN_MIN = 1.3
MISS_SHARE_MIN = 0.9
OVERLOAD_S = 150.0
REPLAYED_S = 300.0
"""Part of the recording that is replayed."""
REPLAYED = "replayed"


def main() -> int:
    """Run one measurement; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("measurement", choices=("flood", "degrade", "replay"))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--policies", default="arrow+queue,arrow+queue+enforce")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--speed", type=float, default=6.4, help="of the recording")
    parser.add_argument("--sample", type=int, default=10, help="replayed requests of each seed")
    arguments = parser.parse_args()
    seeds, policies = [int(seed) for seed in arguments.seeds.split(",")], arguments.policies.split(",")
    if arguments.measurement == "flood":
        return measure_floods(seeds, policies)
    if arguments.measurement == "degrade":
        return measure_shorter_answers(seeds)
    if arguments.trace is None:
        parser.error("replay needs --trace")
    return measure_replays(arguments.trace, arguments.speed, seeds, arguments.sample)


def make_options(policy: str, seed: int) -> RunOptions:
    """Return the options of a run in which every request counts."""
    return RunOptions(
        profile=PROFILE,
        instances=INSTANCES,
        policy=parse_policy(policy, instances=INSTANCES),
        slo=SLO,
        seed=seed,
        unscored_share=0.0,
        drain_s=60.0,
    )


def measure_floods(seeds: Sequence[int], policies: Sequence[str]) -> int:
    """Print a line for each policy, workload and seed."""
    met: dict[tuple[str, str], list[float]] = {}
    for policy in policies:
        for load in LOADS:
            for seed in seeds:
                found = run_flood(load, policy, seed)
                shares = [100 * _find_attainment([r for r in found if r.request.tier == t]) for t in TIERS]
                met.setdefault((policy, load), []).append(shares[0])
                tokens = sum(r.request.input_tokens + r.output_tokens for r in found if r.meets(SLO))
                refused = [sum(_is_refused(r) for r in found if r.request.tier == t) for t in TIERS]
                print(
                    f"{policy:22} {load:20} seed {seed}: met "
                    + ", ".join(f"{t} {share:.1f} %" for t, share in zip(TIERS, shares, strict=True))
                    + f"; refused {refused}; {tokens / (FLOOD_TO_S - FLOOD_FROM_S) / 1000:.1f} thousand "
                    "tokens/s within the objectives",
                    flush=True,
                )
    last = policies[-1]
    losses = [median(met[last, LOADS[0]]) - median(met[last, load]) for load in LOADS[1:]]
    print(f"premium loses {', '.join(f'{loss:.1f}' for loss in losses)} points with {last} (bar: {LOSS_MAX})")
    return int(max(losses) > LOSS_MAX)


def run_flood(load: str, policy: str, seed: int) -> list[RequestResult]:
    """Run one workload; return the requests that arrived during the flood, or would have."""
    requests, _ = leave_out_overlong(COMPOSED[load](1.0, seed), PROFILE)
    workload = [
        request
        for request in requests
        if FROM_S <= request.arrival_s < TO_S
        and not (request.tenant == "flood" and request.arrival_s >= FLOOD_TO_S)
    ]
    records = simulate(workload, make_options(policy, seed)).records
    return [record for record in records if FLOOD_FROM_S <= record.request.arrival_s < FLOOD_TO_S]


def measure_shorter_answers(seeds: Sequence[int]) -> int:
    """Print for each seed how many requests meet their objectives with and without shorter answers."""
    gains: list[float] = []
    for seed in seeds:
        requests, _ = leave_out_overlong(COMPOSED["stationary"](2.0, seed), PROFILE)
        workload = [request for request in requests if request.arrival_s < OVERLOAD_S]
        met: list[int] = []
        for policy in ("static:7P1D+enforce", "static:7P1D+degrade:128"):
            records = [r for r in simulate(workload, make_options(policy, seed)).records if r.meets(SLO)]
            met.append(len(records))
            tokens = sum(record.output_tokens for record in records)
            print(f"{policy:24} seed {seed}: {len(records)} of {len(workload)} met, {tokens:,} output tokens")
        gains.append(met[1] / max(1, met[0]))
    print(f"shorter answers serve {median(gains):.2f} times as many (bar: {GAIN_MIN})")
    return int(median(gains) < GAIN_MIN)


def measure_replays(trace: Path, speed: float, seeds: Sequence[int], sample: int) -> int:
    """Admit refused requests one by one, and print how many of them miss their objectives."""
    recorded, _ = leave_out_overlong(load_trace(trace), PROFILE)
    missed = replayed = 0
    for seed in seeds:
        prepared = prepare_load(recorded, scale=1.0, speed=speed, slo=SLO, seed=seed)
        workload = [request for request in prepared if request.arrival_s < REPLAYED_S]
        records = simulate(workload, make_options("arrow+enforce", seed)).records
        refused = [number for number, record in enumerate(records) if _is_refused(record)]
        chosen = refused[:: max(1, len(refused) // sample)][:sample]
        outcomes = [replay(workload, number, seed) for number in chosen]
        missed, replayed = missed + outcomes.count(False), replayed + len(outcomes)
        print(
            f"seed {seed}: {len(refused)} of {len(workload)} refused; of {len(outcomes)} that were admitted, "
            f"{outcomes.count(False)} missed",
            flush=True,
        )
    print(f"{missed} of {replayed} replayed requests missed (bar: {100 * MISS_SHARE_MIN:.0f} %)")
    return int(missed < MISS_SHARE_MIN * replayed)


def replay(workload: Sequence[WorkloadRequest], number: int, seed: int) -> bool:
    """Run the workload with one request admitted in any case; whether it met its objectives."""
    end_s = workload[number].arrival_s + 2 * SLO.ttft_s
    changed = [request for request in workload if request.arrival_s < end_s]
    changed[number] = replace(workload[number], tier=REPLAYED)
    options = replace(make_options("arrow+enforce", seed), unsheddable_tiers=frozenset({REPLAYED}))
    return simulate(changed, options).records[number].meets(SLO)


def _is_refused(record: RequestResult) -> bool:
    return record.outcome is Outcome.REFUSED


def _find_attainment(records: Sequence[RequestResult]) -> float:
    return sum(record.meets(SLO) for record in records) / max(1, len(records))


if __name__ == "__main__":
    sys.exit(main())
