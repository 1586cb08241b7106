"""Admission: shorter answers, refused requests, requests that come back; simulated, or in real time.

    python bench/admission.py degrade [--seeds 1,2,3] [--live]
    python bench/admission.py replay --trace FILE [--speed 6.4] [--seeds 1,2,3] [--policy NAME] [--sample 10]
    python bench/admission.py comeback --trace FILE [--speed 6.4] [--seeds 1,2,3] [--policy NAME] [--live]
    python bench/admission.py swing [--trace FILE] [--speed 6.4] [--seeds 1,2,3]
    python bench/admission.py scaleout [--seeds 1,2,3]
    python bench/admission.py rate --trace FILE [--speed 6.4] [--seeds 1,2,3] [--policy NAME] [--live]

`degrade`: an overload of decode, refused or with answers of 128 tokens. `replay`: refused requests of a
trace, each admitted in a run of its own: the share of them that misses its objectives all the same.
`comeback`: all refused requests of a trace come back once, after their `Retry-After`: the share of them that
is admitted then. `swing`: the loads of prefill and of decode, once a second, with admission Off and Enforce
(of a trace, or twice the load of `stationary` with the split 4P4D): their autocorrelation, and how they go
together. A swing in anti-phase is an autocorrelation that falls below 0 and rises again, of both loads, with
a negative correlation between them. `scaleout`: half of the instances start while a load arrives that needs
all of them, with a TTFT objective of 30 s: requests in time if the router knows when they will serve, and if
it does not. `rate`: the highest rates at which 90 % of the offered requests are in time, with the policy and
with dispatch as it is published (requests wait in engines in the order of their arrival), each without
admission and with it. Also the share of the offered tokens that is in time at each of them. Mode Queue lets
late requests wait until others are served, so it alone has a part of the effect.
A flood of the lowest tier: `bench/tiers.py`.

With `--live` a local service with engine servers runs the same load in real time (`live_fleet`), for at most
150 s with each seed. Refused clients come back while it runs. `rate` compares two runs of the first 1,600
requests: without admission, where they wait in engines, at the highest rate at which a simulation has 90 % of
them in time, and with admission at 1.5 times that rate.

Exit code 1 if shorter answers serve less than 1.3 times as many requests, if less than 90 % of the replays
miss, if less than 80 % of those that come back are admitted, if the loads swing with Enforce, if fewer
requests are in time because the router knows of a scale-out, if the rate with admission is less than 1.5
times that of requests that wait in engines (live: if fewer are in time at 1.5 times the rate), or if it costs
more than 5 points of the tokens.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, median

from bench.live_fleet import LiveRuns, Run, run_simulated
from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Slo
from fulcrum_simulator.fleet.load import RecordedLoad, leave_out_overlong, prepare_load
from fulcrum_simulator.fleet.options import LateStart, RunOptions, parse_policy
from fulcrum_simulator.fleet.policy_runs import run_policy
from fulcrum_simulator.fleet.records import RequestResult
from fulcrum_simulator.fleet.run import simulate
from fulcrum_simulator.routing import Outcome
from fulcrum_simulator.workload import COMPOSED, WorkloadRequest, load_trace

INSTANCES = 8
PROFILE = load_profile("l70-h100-tp4")
SLO = Slo(ttft_s=3.0, tpot_s=0.1)
GAIN_MIN = 1.3
MISS_SHARE_MIN = 0.9
OVERLOAD_S = LIVE_S = 150.0
LIVE_REQUESTS, LIVE_ATTAINMENT_MIN = 1_600, 0.85
"""Of `rate --live`; with fewer in time without admission, it is no comparison with a rate of 90 %."""
REPLAYED_S = 300.0
"""Part of the trace that is replayed."""
WARM_UP_S = 30.0
LAGS_S = 1, 2, 5, 10, 20, 40
SWING_MIN = 0.3
"""Correlation from which it counts."""
ADMITTED_SHARE_MIN = 0.8
PATIENT_SLO = Slo(ttft_s=30.0, tpot_s=0.1)
ATTAINMENT_MIN, RATE_GAIN_MIN, TOKEN_LOSS_MAX, ENFORCE = 0.9, 1.5, 0.05, "+enforce"
IN_ENGINES = "+direct+nodeflect"
LATE, START_S, SERVES_S, SCALE_OUT_S = (2, 3, 6, 7), 60.0, 120.0, 180.0
"""Instances that are not there from the beginning, and when their engines start and serve."""


def main() -> int:
    """Run one measurement; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("measurement", choices=("degrade", "replay", "comeback", "swing", "scaleout", "rate"))
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--speed", type=float, default=6.4, help="of the trace")
    parser.add_argument(
        "--policy", default="arrow+enforce", help="of replay, comeback and rate (%(default)s)"
    )
    parser.add_argument("--sample", type=int, default=10, help="replayed requests of each seed")
    parser.add_argument("--live", action="store_true", help="degrade, comeback and rate in real time")
    arguments = parser.parse_args()
    seeds = [int(seed) for seed in arguments.seeds.split(",")]
    if arguments.live:
        return measure_live(arguments, seeds)
    if arguments.measurement == "degrade":
        return measure_shorter_answers(run_simulated, seeds)
    if arguments.measurement == "scaleout":
        return measure_scale_out(seeds)
    if arguments.measurement == "swing":
        return measure_swing(arguments.trace, arguments.speed, seeds)
    if arguments.trace is None:
        parser.error(f"{arguments.measurement} needs --trace")
    if arguments.measurement == "rate":
        return measure_rates(arguments.trace, arguments.speed, seeds, arguments.policy)
    if arguments.measurement == "comeback":
        return measure_comebacks(arguments.trace, arguments.speed, seeds, arguments.policy)
    return measure_replays(arguments.trace, arguments.speed, seeds, arguments.policy, arguments.sample)


def measure_live(arguments: argparse.Namespace, seeds: Sequence[int]) -> int:
    """Run one measurement in real time; return the exit code."""
    trace, speed, policy = arguments.trace, arguments.speed, arguments.policy
    runs = LiveRuns()
    if arguments.measurement == "degrade":
        missed = measure_shorter_answers(runs.run, seeds)
    elif arguments.measurement not in ("comeback", "rate"):
        raise SystemExit(f"error: --live ({arguments.measurement}) runs only degrade, comeback and rate")
    elif trace is None:
        raise SystemExit(f"error: {arguments.measurement} needs --trace")
    elif arguments.measurement == "comeback":
        missed = measure_live_comebacks(runs, trace, speed, seeds, policy)
    else:
        missed = measure_live_rates(runs, trace, speed, seeds, policy)
    return missed or int(not runs.all_valid)


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


def measure_shorter_answers(run: Run, seeds: Sequence[int]) -> int:
    """Print for each seed how many requests meet their objectives with and without shorter answers."""
    gains: list[float] = []
    for seed in seeds:
        requests, _ = leave_out_overlong(COMPOSED["stationary"](2.0, seed), PROFILE)
        workload = [request for request in requests if request.arrival_s < OVERLOAD_S]
        met: list[int] = []
        for policy in ("static:7P1D+enforce", "static:7P1D+degrade:128"):
            records = [r for r in run(workload, make_options(policy, seed)) if r.meets(SLO)]
            met.append(len(records))
            tokens = sum(record.output_tokens for record in records)
            print(f"{policy:24} seed {seed}: {len(records)} of {len(workload)} met, {tokens:,} output tokens")
        gains.append(met[1] / max(1, met[0]))
    print(f"shorter answers serve {median(gains):.2f} times as many (bar: {GAIN_MIN})")
    return int(median(gains) < GAIN_MIN)


def measure_replays(trace: Path, speed: float, seeds: Sequence[int], policy: str, sample: int) -> int:
    """Admit refused requests one by one, and print how many of them miss their objectives."""
    missed = replayed = 0
    for seed, workload in prepare_trace(trace, speed, seeds):
        records = simulate(workload, make_options(policy, seed)).records
        refused = [number for number, record in enumerate(records) if _is_refused(record)]
        chosen = refused[:: max(1, len(refused) // sample)][:sample]
        outcomes = [replay(workload, number, seed, policy) for number in chosen]
        missed, replayed = missed + outcomes.count(False), replayed + len(outcomes)
        print(
            f"seed {seed}: {len(refused)} of {len(workload)} refused; of {len(outcomes)} that were admitted, "
            f"{outcomes.count(False)} missed",
            flush=True,
        )
    print(f"{missed} of {replayed} replayed requests missed (bar: {100 * MISS_SHARE_MIN:.0f} %)")
    return int(not replayed or missed < MISS_SHARE_MIN * replayed)


def measure_comebacks(trace: Path, speed: float, seeds: Sequence[int], policy: str) -> int:
    """Let all refused requests come back once, and print how many of them are admitted."""
    admitted = returned = 0
    for seed, workload in prepare_trace(trace, speed, seeds):
        first = simulate(workload, make_options(policy, seed)).records
        again = [
            replace(r.request, arrival_s=r.request.arrival_s + r.retry_after_s)
            for r in first
            if _is_refused(r)
        ]
        arrivals = [(request, False) for request in workload] + [(request, True) for request in again]
        arrivals.sort(key=lambda arrival: arrival[0].arrival_s)
        records = simulate([request for request, _ in arrivals], make_options(policy, seed)).records
        found = [
            not _is_refused(record)
            for record, (_, has_returned) in zip(records, arrivals, strict=True)
            if has_returned
        ]
        admitted, returned = admitted + sum(found), returned + len(found)
        print(
            f"seed {seed}: {len(again)} of {len(workload)} come back, {sum(found)} are admitted", flush=True
        )
    return report_admitted(admitted, returned)


def report_admitted(admitted: int, returned: int) -> int:
    """Print the share of those that came back; return the exit code."""
    print(f"{admitted / max(1, returned):.0%} are admitted (bar: {100 * ADMITTED_SHARE_MIN:.0f} %)")
    return int(not returned or admitted < ADMITTED_SHARE_MIN * returned)


def measure_live_comebacks(
    runs: LiveRuns, trace: Path, speed: float, seeds: Sequence[int], policy: str
) -> int:
    """Let refused clients come back once while a load runs, and print how many of them are admitted."""
    admitted = returned = 0
    for seed, workload in prepare_trace(trace, speed, seeds):
        part = [request for request in workload if request.arrival_s < LIVE_S]
        live = runs.run_whole(part, make_options(policy, seed), returns=True)
        # Those that come back after the last arrival meet no load.
        back = [r for r in live.returned if r.request.arrival_s <= part[-1].arrival_s]
        found = sum(record.first_token_s is not None for record in back)
        admitted, returned = admitted + found, returned + len(back)
        refused = sum(map(_is_refused, live.records))
        print(
            f"seed {seed}: {refused} of {len(part)} refused, {len(back)} come back meanwhile, {found} are "
            "admitted",
            flush=True,
        )
    return report_admitted(admitted, returned)


def measure_live_rates(runs: LiveRuns, trace: Path, speed: float, seeds: Sequence[int], policy: str) -> int:
    """Print what is in time without admission, and with it at a rate that is 1.5 times as high."""
    recorded, _ = leave_out_overlong(load_trace(trace).requests, PROFILE)
    load = RecordedLoad(trace.name, recorded[:LIVE_REQUESTS], speed=speed)
    without, gains, losses, are_bases_valid = policy.removesuffix(ENFORCE), [], [], True
    for seed in seeds:
        base = make_options(without + IN_ENGINES, seed)
        (found,) = run_policy(load, base, [seed], attainment_min=ATTAINMENT_MIN, step=1.2).runs
        assert found.factor is not None
        figures = []
        for name, times in ((without + IN_ENGINES, 1.0), (without + ENFORCE, RATE_GAIN_MIN)):
            workload = load.prepare(found.factor * times, slo=SLO, seed=seed)[:LIVE_REQUESTS]
            records = runs.run(workload, make_options(name, seed))
            share = sum(record.meets(SLO) for record in records) / len(records)
            figures.append((share, find_token_share(records)))
            print(
                f"{name} seed {seed}: {times * found.rate_rps:.2f} requests/s, {share:.1%} in time, "
                f"{figures[-1][1]:.1%} of the tokens",
                flush=True,
            )
        are_bases_valid &= figures[0][0] >= LIVE_ATTAINMENT_MIN
        gains.append(figures[1][0] - figures[0][0])
        losses.append(figures[0][1] - figures[1][1])
    warning = "" if are_bases_valid else " (DOES NOT COUNT: too few without admission)"
    print(
        f"at {RATE_GAIN_MIN} times the rate {100 * median(gains):+.1f} points are in time with admission "
        f"(bar: 0), {100 * median(losses):.1f} points of the tokens less (bar: {100 * TOKEN_LOSS_MAX:.0f})"
        f"{warning}"
    )
    return int(not are_bases_valid or median(gains) < 0.0 or median(losses) > TOKEN_LOSS_MAX)


def measure_swing(trace: Path | None, speed: float, seeds: Sequence[int]) -> int:
    """Print for each seed and mode the correlations of the loads; a swing counts against Enforce."""
    swings = 0
    split = "static:4P4D" if trace is None else "arrow"
    for seed in seeds:
        if trace is None:
            requests, _ = leave_out_overlong(COMPOSED["stationary"](2.0, seed), PROFILE)
            workload = [request for request in requests if request.arrival_s < REPLAYED_S]
        else:
            ((_, workload),) = prepare_trace(trace, speed, [seed])
        for admission in ("", "+enforce"):
            result = simulate(workload, make_options(split + admission, seed))
            samples = [s for s in result.samples if WARM_UP_S <= s.at_s <= workload[-1].arrival_s]
            prefill, decode = [s.prefill_queued_s for s in samples], [float(s.decode_legs) for s in samples]
            together = correlate(prefill, decode)
            shown = [[correlate(load, load, lag) for lag in LAGS_S] for load in (prefill, decode)]
            rebounds = [find_rebound(load) for load in (prefill, decode)]
            swings += bool(admission) and together < -SWING_MIN and min(rebounds) > SWING_MIN
            lags = ", ".join(f"{lag} s" for lag in LAGS_S)
            first, second = (" ".join(f"{value:5.2f}" for value in values) for values in shown)
            print(
                f"{split + admission:20} seed {seed}: autocorrelation after {lags}: prefill {first}; decode "
                f"{second}; rebound {rebounds[0]:.2f}, {rebounds[1]:.2f}; together {together:.2f}",
                flush=True,
            )
    print(f"{swings} of {len(seeds)} runs with Enforce swing (bar: 0)")
    return int(swings > 0)


def measure_scale_out(seeds: Sequence[int]) -> int:
    """Print for each seed how many requests are in time, without and with a forecast of the scale-out."""
    gains: list[float] = []
    for seed in seeds:
        requests, _ = leave_out_overlong(COMPOSED["stationary"](1.4, seed), PROFILE)
        workload = [request for request in requests if request.arrival_s < SCALE_OUT_S]
        met: list[int] = []
        for begins_s in (SERVES_S, START_S):
            starts = tuple(LateStart(number=n, begins_s=begins_s, serves_s=SERVES_S) for n in LATE)
            options = replace(make_options("static:4P4D+enforce", seed), slo=PATIENT_SLO, late_starts=starts)
            records = simulate(workload, options).records
            refused = sum(map(_is_refused, records))
            met.append(sum(record.meets(PATIENT_SLO) for record in records))
            print(
                f"seed {seed}, {'known' if begins_s < SERVES_S else 'unknown'}: {met[-1]} of {len(workload)} "
                f"in time, {refused} refused, {len(workload) - refused - met[-1]} late",
                flush=True,
            )
        gains.append(met[1] / max(1, met[0]))
    print(f"{median(gains):.3f} times as many in time with a known scale-out (bar: 1)")
    return int(median(gains) < 1.0)


def measure_rates(trace: Path, speed: float, seeds: Sequence[int], policy: str) -> int:
    """Print for each seed the highest rates without and with admission, and the tokens in time there."""
    recorded, _ = leave_out_overlong(load_trace(trace).requests, PROFILE)
    load, found = RecordedLoad(trace.name, recorded, speed=speed), []
    without = policy.removesuffix(ENFORCE)
    names = [without + dispatch + admission for dispatch in (IN_ENGINES, "") for admission in ("", ENFORCE)]
    for name in names:
        runs = run_policy(load, make_options(name, 0), seeds, attainment_min=ATTAINMENT_MIN, step=1.2).runs
        found.append([(run.rate_rps, find_token_share(run.result.scored)) for run in runs])
        for seed, (rate_rps, share) in zip(seeds, found[-1], strict=True):
            print(f"{name} seed {seed}: {rate_rps:.2f} requests/s, {share:.1%} of the tokens", flush=True)
    in_engines, admitted_to_engines, same_dispatch, shipped = found
    gain, loss = compare_rates(in_engines, shipped)
    print(
        f"{gain:.2f} times the rate of requests that wait in engines, none of them refused (bar: "
        f"{RATE_GAIN_MIN}), {100 * loss:.1f} points of the tokens less (bar: {100 * TOKEN_LOSS_MAX:.0f})"
    )
    for where, base, other in (
        ("where requests wait in engines", in_engines, admitted_to_engines),
        ("where they wait in the router", same_dispatch, shipped),
    ):
        ratio, less = compare_rates(base, other)
        print(f"admission alone, {where}: {ratio:.2f} times, {100 * less:.1f} points of the tokens less")
    return int(gain < RATE_GAIN_MIN or loss > TOKEN_LOSS_MAX)


def compare_rates(
    base: Sequence[tuple[float, float]], other: Sequence[tuple[float, float]]
) -> tuple[float, float]:
    """Return the ratio of the rates and by how much the shares of the tokens are less, both in the median."""
    pairs = list(zip(base, other, strict=True))
    return median(o[0] / b[0] for b, o in pairs), median(b[1] - o[1] for b, o in pairs)


def find_token_share(scored: Sequence[RequestResult]) -> float:
    """Tokens of the requests in time, of those of all offered requests."""
    offered = sum(record.request.input_tokens + record.request.output_tokens for record in scored)
    met = sum(r.request.input_tokens + r.output_tokens for r in scored if r.meets(SLO))
    return met / max(1, offered)


def correlate(first: Sequence[float], second: Sequence[float], lag: int = 0) -> float:
    """Correlation of a load with another one `lag` seconds later, -1 to 1; 0 for a constant load."""
    means = fmean(first), fmean(second)
    spread = math.sqrt(sum((a - means[0]) ** 2 for a in first) * sum((b - means[1]) ** 2 for b in second))
    together = sum((a - means[0]) * (b - means[1]) for a, b in zip(first, second[lag:], strict=False))
    return together / spread if spread else 0.0


def find_rebound(load: Sequence[float]) -> float:
    """The highest autocorrelation after the first lag at which it is below 0, up to 60 s; 0: none is."""
    values = [correlate(load, load, lag) for lag in range(min(60, len(load)))]
    first = next((lag for lag, value in enumerate(values) if value < 0), len(values))
    return max(values[first:], default=0.0)


def prepare_trace(
    trace: Path, speed: float, seeds: Sequence[int]
) -> Iterator[tuple[int, list[WorkloadRequest]]]:
    """Yield the replayed part of a trace by seed."""
    recorded, _ = leave_out_overlong(load_trace(trace).requests, PROFILE)
    for seed in seeds:
        prepared = prepare_load(recorded, scale=1.0, speed=speed, slo=SLO, seed=seed)
        yield seed, [request for request in prepared if request.arrival_s < REPLAYED_S]


def replay(workload: Sequence[WorkloadRequest], number: int, seed: int, policy: str) -> bool:
    """Run the workload with one request admitted in any case; whether it met its objectives."""
    end_s = workload[number].arrival_s + 2 * SLO.ttft_s
    arrived = [request for request in workload if request.arrival_s < end_s]
    options = replace(make_options(policy, seed), unjudged=frozenset({number}))
    return simulate(arrived, options).records[number].meets(SLO)


def _is_refused(record: RequestResult) -> bool:
    return record.outcome is Outcome.REFUSED


if __name__ == "__main__":
    sys.exit(main())
