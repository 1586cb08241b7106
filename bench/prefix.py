"""Prefix-aware dispatch against least work: TTFT, the hottest instance, memory and time of the index.

    python bench/prefix.py [--trace FILE] [--policy NAME] [--seconds N] [--cache-factor N] [--seeds N]
                           [--jobs N] [--live]

The index alone: memory with 2**20 blocks; CPU of a chat of 4 KiB with the shipped size, half full (hashing,
lookup, record and report). With `--trace` (a workload with block ids), its first N seconds are simulated with
engines that have prefix caches, without and with prefix-aware dispatch, for each seed. Compared are the fall
of the mean TTFT and what the additional hits predict for it: the mean of T(n) - T(n - hit) of both runs.
`--cache-factor` multiplies the KV cache of each engine, as a tier of host memory would whose reads take no
time. KV blocks have 128 tokens, which makes the simulation faster. With `--live` the same requests are also
sent to a local service with engine servers, in real time (`live_fleet`): the hits are those that its engines
report, and each saves as much as in the simulation. Exit code 1 if a median misses its bar.
"""

import argparse
import math
import random
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from statistics import fmean, median

import orjson

from bench.live_fleet import LiveRuns
from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Slo
from fulcrum_router.http1.bodies import parse_request_body
from fulcrum_router.http1.prompt_prefix import build_prefix
from fulcrum_router.policy.prefix_index import DEFAULT_BLOCKS, PrefixIndex
from fulcrum_simulator.fleet.load import leave_out_overlong
from fulcrum_simulator.fleet.options import RunOptions, parse_policy
from fulcrum_simulator.fleet.run import simulate
from fulcrum_simulator.workload import WorkloadRequest, jitter_arrivals, load_trace

INSTANCES, PROFILE, SLO, BLOCK_TOKENS = 8, "l70-h100-tp4", Slo(30.0, 0.1), 128
GAIN_MIN, HOTTEST_MAX, MEMORY_MAX, TIME_MAX_US = 0.8, 1.3, 64e6, 15.0
HITS_MORE_MIN = 0.005
"""Share of the tokens by which hits must rise, for their gain to be measured at all."""
CHATS, CHAT_BYTES, BLOCKS, PREFILL_INSTANCES = 2_000, 4_096, 1 << 20, 8


@dataclass(frozen=True, slots=True)
class Case:
    """One run."""

    trace: str
    seconds: float
    policy: str
    seed: int
    cache_factor: float


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over the scored requests, in seconds; share of cached prompt tokens; the hottest instance."""

    ttft_s: float
    saved_s: float
    hits: float
    hottest: float

    def __str__(self) -> str:
        shares = f"{self.hits:.1%} of the tokens cached, hottest instance {self.hottest:.2f} x the mean"
        return f"mean TTFT {self.ttft_s:.3f} s, {shares}"


def make_run(case: Case) -> tuple[list[WorkloadRequest], RunOptions]:
    """Return the requests and the options of a case."""
    profile = load_profile(PROFILE)
    capacity = int(profile.kv_capacity_tokens * case.cache_factor)
    profile = profile.model_copy(update={"block_size": BLOCK_TOKENS, "kv_capacity_tokens": capacity})
    requests, _ = leave_out_overlong(load_trace(case.trace).requests, profile)
    clip = [request for request in requests if request.arrival_s < case.seconds]
    options = RunOptions(
        profile=profile,
        instances=INSTANCES,
        policy=parse_policy(case.policy, instances=INSTANCES),
        slo=SLO,
        seed=case.seed,
        prefix_caches=True,
    )
    return list(jitter_arrivals(clip, seed=case.seed)), options


def measure_live(case: Case, runs: LiveRuns, *, saved_each_s: float) -> Figures:
    """Run one case in real time; a hit of all tokens saves `saved_each_s` of a request."""
    workload, options = make_run(case)
    live = runs.run_whole(workload, options)
    first_s = options.compute_first_scored_s(0.0, workload[-1].arrival_s)
    scored = [record for record in live.records if record.request.arrival_s >= first_s]
    caches = [live.prefix_caches[name] for name in sorted(live.prefix_caches)][: options.policy.prefill]
    computed = [queried - found for queried, found in caches]
    hits = sum(found for _, found in caches) / sum(queried for queried, _ in caches)
    return Figures(
        ttft_s=fmean(math.inf if r.ttft_s is None else r.ttft_s for r in scored),
        saved_s=hits * saved_each_s,
        hits=hits,
        hottest=max(computed) / fmean(computed),
    )


def measure(case: Case) -> Figures:
    """Run one case."""
    workload, options = make_run(case)
    profile, scored = options.profile, simulate(workload, options).scored
    model = profile.step_model.prefill_model(profile.token_budget)
    load = dict.fromkeys((record.prefill for record in scored if record.prefill), 0.0)
    saved_s = []
    for record in scored:
        tokens, computed = record.request.input_tokens, record.request.input_tokens - record.cached_tokens
        saved_s.append(model.ttft_s(tokens) - model.ttft_s(computed))
        if record.prefill:
            load[record.prefill] += model.ttft_s(computed)
    return Figures(
        ttft_s=fmean(math.inf if r.ttft_s is None else r.ttft_s for r in scored),
        saved_s=fmean(saved_s),
        hits=sum(r.cached_tokens for r in scored) / sum(r.request.input_tokens for r in scored),
        hottest=max(load.values()) / fmean(load.values()),
    )


def measure_index() -> tuple[float, float]:
    """Return the memory of the index in bytes, and the CPU of one chat in microseconds."""
    draw = random.Random(1)
    index = PrefixIndex()
    text = "".join(draw.choices("abcdefgh ", k=CHATS * CHAT_BYTES))
    texts = [text[start : start + CHAT_BYTES] for start in range(0, len(text), CHAT_BYTES)]
    bodies = [
        parse_request_body(orjson.dumps({"messages": [{"role": "user", "content": t}]}), 0, chat=True)
        for t in texts
    ]
    for number in range(DEFAULT_BLOCKS // 2 // 64):
        blocks = build_prefix(bodies[0], tokens=1000, chat=True)._replace(
            hashes=[draw.getrandbits(62) for _ in range(64)]
        )
        index.record(blocks, f"i{number % PREFILL_INSTANCES}", new_tokens=1000, room_tokens=math.inf)

    def serve(name: str) -> float:
        started_s = time.process_time()
        for body in bodies:
            prefix = build_prefix(body, tokens=1000, chat=True)
            hits = index.find_hits(prefix)
            index.record(prefix, name, new_tokens=1000, room_tokens=math.inf, places=hits.places)
            index.report(name, hits, prefix, cached_tokens=1000)
        return (time.process_time() - started_s) / CHATS * 1e6

    for number in range(PREFILL_INSTANCES):
        serve(f"i{number}")
    times_us = [serve(f"i{number % PREFILL_INSTANCES}") for number in range(15)]
    memory_bytes = PrefixIndex(BLOCKS).memory_bytes
    print(f"index: {memory_bytes / 1e6:.1f} MB with {BLOCKS} blocks")
    print(
        f"a chat of {CHAT_BYTES} bytes: {median(times_us):.1f} us, {min(times_us):.1f} to {max(times_us):.1f}"
    )
    return memory_bytes, median(times_us)


def compare(cases: Sequence[tuple[Case, Case]], jobs: int, runs: LiveRuns | None) -> bool:
    """Run all pairs of cases and print them; return whether the medians meet their bars."""
    gains, hottest = [], []
    with ProcessPoolExecutor(jobs) as pool:
        figures = list(pool.map(measure, [case for pair in cases for case in pair]))
    for (plain, aware), base, better in zip(cases, figures[::2], figures[1::2], strict=True):
        has_hits = better.hits >= base.hits + HITS_MORE_MIN
        if runs is not None and has_hits:
            each_s = (better.saved_s - base.saved_s) / (better.hits - base.hits)
            base, better = (measure_live(case, runs, saved_each_s=each_s) for case in (plain, aware))
            has_hits = better.hits >= base.hits + HITS_MORE_MIN
        predicted_s, measured_s = better.saved_s - base.saved_s, base.ttft_s - better.ttft_s
        gains.append(measured_s / predicted_s if has_hits else -math.inf)
        hottest.append(better.hottest)
        print(f"seed {plain.seed}\n  {plain.policy}: {base}\n  {aware.policy}: {better}")
        print(f"  TTFT lower by {measured_s:.3f} s; the hits predict {predicted_s:.3f} s", flush=True)
    print(f"lower by {median(gains):.2f} x what the hits predict ({min(gains):.2f} to {max(gains):.2f})")
    print(f"hottest instance {median(hottest):.2f} x the mean ({min(hottest):.2f} to {max(hottest):.2f})")
    return median(gains) >= GAIN_MIN and median(hottest) <= HOTTEST_MAX


def main() -> int:
    """Print the figures; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trace")
    parser.add_argument("--policy", default="static:5P3D+direct")
    parser.add_argument("--seconds", type=float, default=900.0)
    parser.add_argument("--cache-factor", type=float, default=1.0)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--live", action="store_true", help="in real time, with engine servers")
    arguments = parser.parse_args()
    memory, time_us = measure_index()
    met = memory <= MEMORY_MAX and time_us <= TIME_MAX_US
    if arguments.trace is not None:
        cases = [
            Case(arguments.trace, arguments.seconds, policy, seed, arguments.cache_factor)
            for seed in range(1, arguments.seeds + 1)
            for policy in (arguments.policy, f"{arguments.policy}+prefix")
        ]
        runs = LiveRuns() if arguments.live else None
        met &= compare(list(zip(cases[::2], cases[1::2], strict=True)), arguments.jobs, runs)
        met &= runs is None or runs.all_valid
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
