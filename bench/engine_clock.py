"""Compares the engine model on a virtual clock with the engine server in real time, on one workload.

Simulations rely on the model; the server adds sockets, an event loop and a busy machine. Prints mean TTFT and
TPOT of both, and the difference.

    python bench/engine_clock.py [--seed N] [--for SECONDS] [--profile NAME]

Exit code 1 if a mean differs by more than 5 %, or if a request failed.
"""

import argparse
import json
import random
import secrets
import subprocess
import sys
import urllib.request
from collections import deque
from dataclasses import dataclass
from statistics import fmean

import uvloop

from fulcrum_core.profiles import EngineProfile, load_profile
from fulcrum_core.values import Slo
from fulcrum_simulator.client import LoadGenerator, LoadTarget
from fulcrum_simulator.engine import Engine, EngineRequest, OutputToken
from fulcrum_simulator.text import prompt_digest
from fulcrum_simulator.workload import WorkloadRequest

MEAN_DIFFERENCE_MAX = 0.05
MODEL = "bench"
NO_SLO = Slo(ttft_s=60.0, tpot_s=60.0)
PROMPT_UTILIZATION = 0.35  # share of the engine's time that prefill alone takes


@dataclass(frozen=True, slots=True)
class MeanLatencies:
    """Mean TTFT and TPOT over all requests, in seconds."""

    ttft_s: float
    tpot_s: float


def make_workload(profile: EngineProfile, *, seed: int, seconds: float) -> list[WorkloadRequest]:
    """Return Poisson arrivals of mixed lengths that keep the engine busy without overloading it."""
    rng = random.Random(seed)
    prefill = profile.step_model.prefill_model(profile.token_budget)
    mean_s = fmean(prefill.ttft_s(tokens) for tokens in range(64, 769, 64))
    requests: list[WorkloadRequest] = []
    arrival_s = 0.0
    while (arrival_s := arrival_s + rng.expovariate(PROMPT_UTILIZATION / mean_s)) < seconds:
        request = WorkloadRequest(arrival_s, rng.randrange(64, 769), rng.randrange(8, 65))
        requests.append(request)
    return requests


def run_on_virtual_clock(profile: EngineProfile, workload: list[WorkloadRequest]) -> MeanLatencies:
    """Run the workload through the engine model, from event to event."""
    engine = Engine(profile, engine_id="virtual")
    pending = deque(enumerate(workload))
    times: dict[str, list[float]] = {str(index): [] for index, _ in pending}
    now_s = 0.0
    while pending or engine.gauges.running or engine.gauges.waiting:
        while pending and pending[0][1].arrival_s <= now_s:
            engine.submit(_build_engine_request(*pending.popleft()))
        step = engine.start_step(now_s)
        if step is None:
            now_s = pending[0][1].arrival_s
            continue
        now_s += step.duration_s
        for event in engine.finish_step(now_s):
            if isinstance(event, OutputToken):
                times[event.request_id].append(now_s)
    arrivals = [request.arrival_s for request in workload]
    ttfts = [token_s[0] - arrival_s for token_s, arrival_s in zip(times.values(), arrivals, strict=True)]
    return MeanLatencies(fmean(ttfts), fmean((t[-1] - t[0]) / (len(t) - 1) for t in times.values()))


def _build_engine_request(index: int, request: WorkloadRequest) -> EngineRequest:
    return EngineRequest(
        id=str(index),
        arrival_s=request.arrival_s,
        prompt_tokens=request.input_tokens,
        max_tokens=request.output_tokens,
        digest=prompt_digest(str(index).encode()),
    )


async def run_over_loopback(port: int, workload: list[WorkloadRequest], *, seed: int) -> MeanLatencies:
    """Run the workload through the engine server; RuntimeError if a request fails."""
    generator = LoadGenerator(LoadTarget(host="127.0.0.1", port=port, model=MODEL), slo=NO_SLO, seed=seed)
    await generator.send(workload)
    await generator.finish(timeout_s=60.0)
    outcomes = generator.results.since(float("-inf"))
    await generator.close()
    wrong = [
        outcome for outcome in outcomes if outcome.ttft_s is None or outcome.tpot_s is None or outcome.reason
    ]
    if wrong or len(outcomes) != len(workload):
        raise RuntimeError(f"{len(wrong)} of {len(outcomes)} requests went wrong, first: {wrong[:1]}")
    return MeanLatencies(
        fmean(outcome.ttft_s for outcome in outcomes if outcome.ttft_s is not None),
        fmean(outcome.tpot_s for outcome in outcomes if outcome.tpot_s is not None),
    )


def run_in_real_time(
    profile: str, workload: list[WorkloadRequest], *, seed: int
) -> tuple[MeanLatencies, dict[str, float]]:
    """Start a server and run the workload; return the means and the step lateness."""
    command = [sys.executable, "-m", "fulcrum_simulator.server", "--name", "bench", "--model", MODEL]
    with subprocess.Popen([*command, "--profile", profile], stdout=subprocess.PIPE, text=True) as server:
        try:
            line = server.stdout.readline() if server.stdout else ""
            port = json.loads(line.removeprefix("ready "))["port"]
            means = uvloop.run(run_over_loopback(port, workload, seed=seed))
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/simulator/stats") as response:
                return means, json.load(response)["lateness_ms"]
        finally:
            server.terminate()


def main() -> int:
    """Run both, print both; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, default=secrets.randbelow(2**32))
    parser.add_argument("--for", dest="seconds", type=float, default=20.0, metavar="SECONDS")
    parser.add_argument("--profile", default="laptop")
    options = parser.parse_args()
    profile = load_profile(options.profile)
    workload = make_workload(profile, seed=options.seed, seconds=options.seconds)
    print(f"seed {options.seed}, profile {profile.name}, {len(workload)} requests in {options.seconds:g} s")
    virtual = run_on_virtual_clock(profile, workload)
    real, lateness_ms = run_in_real_time(options.profile, workload, seed=options.seed)
    print("              virtual        real  difference")
    rows = [("TTFT", virtual.ttft_s, real.ttft_s), ("TPOT", virtual.tpot_s, real.tpot_s)]
    differences = [found / expected - 1 for _, expected, found in rows]
    for (name, expected, found), share in zip(rows, differences, strict=True):
        print(f"mean {name}  {expected * 1000:9.2f} ms {found * 1000:9.2f} ms     {share:+.2%}")
    print(
        f"lateness ms   p50 {lateness_ms['p50']:g}, p99 {lateness_ms['p99']:g}, max {lateness_ms['max']:.2f}"
    )
    return 0 if all(abs(share) <= MEAN_DIFFERENCE_MAX for share in differences) else 1


if __name__ == "__main__":
    sys.exit(main())
