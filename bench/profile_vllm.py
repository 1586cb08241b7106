"""Measures two real vLLM engines with `fulcrum profile`, and compares a load on them with its simulation.

    python bench/profile_vllm.py [--seeds N] [--for SECONDS]

Runs a local service with one prefill and one decode engine. Each has its own share of the first processor
(`processor_shares`, which needs root). The share is smaller the faster this processor is at the moment,
since processors of shared hosts change their speed by a factor of two within seconds. Router and load have
the other processors. So an engine is as fast while the other one works as it was while it was measured: two
that run at once would share caches and memory, which made decode a quarter to a half slower.
`fulcrum profile` measures them and writes a profile. Then a Poisson load that keeps the prefill engine half
busy goes through the router, and the simulator gets the same requests at the same times, this profile, and
the time outside of steps that the command printed, which no profile has. Prints the mean error of each curve
and, for each seed, mean TTFT, TPOT and whole duration of both. Exit code 1 if a curve, or the median over
the seeds of one of these differences, is off by more than 10 %, or if a request failed. Needs `make engine`.
A load that was late, or during which other programs used the processors, does not count.
"""

import argparse
import asyncio
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from bench.processor_shares import ProcessorShares, processor_shares
from bench.vllm_load import (
    MeasuredLoad,
    isolate_engines,
    measure_load,
    put_engines_on_one_processor,
    run_vllm_service,
)
from fulcrum_cli.local.engine_environment import find_engine_environment
from fulcrum_core.profiles import EngineProfile, load_profile
from fulcrum_core.values import Role, Slo
from fulcrum_simulator.client import OutcomeKind
from fulcrum_simulator.fleet.options import ControlOptions, RunOptions, parse_policy
from fulcrum_simulator.fleet.run import simulate
from fulcrum_simulator.routing import Outcome
from fulcrum_simulator.workload import WorkloadRequest
from tests.engines.loads import Sender, draw_load
from tests.engines.services import MODEL, RunningService, VllmService, build_manifest

DIFFERENCE_MAX = 0.10
ENGINE_SHARE = 0.4
"""Share of one processor that an engine has at the held speed; both have the same one, in turns. The rest is
left to the process that measures the processor's speed."""
LAYERS, TOKEN_BUDGET, BATCH_MAX = 24, 1024, 32
ENGINE_ARGS = (
    *("--load-format", "dummy", "--hf-overrides", json.dumps({"num_hidden_layers": LAYERS})),
    *("--kv-cache-memory-bytes", str(768 * 2**20), "--max-model-len", "2048"),
    *("--max-num-seqs", str(BATCH_MAX), "--max-num-batched-tokens", str(TOKEN_BUDGET)),
)
SLO = Slo(ttft_s=10.0, tpot_s=1.0)
"""Not judged here; so wide that no request counts as late in the router."""
PROMPT_TOKENS, OUTPUT_TOKENS, PREFILL_LOAD = (100, 1500), (20, 120), 0.5
FIGURES = ("TTFT", "TPOT", "duration")


def build_service() -> dict[str, Any]:
    """A service with one instance of each role, where decode computes no prompts."""
    return build_manifest(
        engine={"type": "vLLM", "args": list(ENGINE_ARGS)},
        slo={"ttft": f"{SLO.ttft_s:g}s", "tpot": f"{SLO.tpot_s:g}s"},
        router={"dispatch": {"deflect": False}},
    )


async def measure_profile(service: VllmService, folder: Path) -> tuple[EngineProfile, float, bool]:
    """Return the profile that `fulcrum profile` writes, the seconds outside of steps, and whether it fits."""
    urls = [
        await service.engine_url(await service.find_instance(role)) for role in (Role.PREFILL, Role.DECODE)
    ]
    out, model = folder / "measured.yaml", folder / "config.json"
    config = json.loads((find_engine_environment() / MODEL / "config.json").read_text(encoding="utf-8"))
    model.write_text(json.dumps({**config, "num_hidden_layers": LAYERS}), encoding="utf-8")
    options = {
        "--token-budget": TOKEN_BUDGET,
        "--max-seqs": BATCH_MAX,
        "--max-batch": BATCH_MAX // 2,
    }
    arguments = [str(part) for option in options.items() for part in option]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "fulcrum_cli", "profile", *urls),
        *("--model-config", str(model), "--out", str(out), *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    printed = (await process.communicate())[0].decode()
    print(printed, flush=True)
    found = re.search(r"outside of steps ([\d.e-]+) ms", printed)
    if found is None:
        raise SystemExit("fulcrum profile measured nothing")
    return load_profile(str(out)), float(found[1]) / 1000, process.returncode == 0


def draw(profile: EngineProfile, *, seconds: float, seed: int) -> list[WorkloadRequest]:
    """Draw a load that keeps the prefill engine busy for `PREFILL_LOAD` of the time."""
    model = profile.step_model.prefill_model(profile.token_budget)
    rate_rps = PREFILL_LOAD / model.ttft_s(sum(PROMPT_TOKENS) / 2)
    return draw_load([Sender("", rate_rps, PROMPT_TOKENS, OUTPUT_TOKENS)], end_s=seconds, seed=str(seed))


def simulate_load(
    requests: Sequence[WorkloadRequest], profile: EngineProfile, *, overhead_s: float, seed: int
) -> list[float]:
    """Return the figures of the simulated load; each leg is outside of steps for `overhead_s`."""
    options = RunOptions(
        profile=profile,
        instances=2,
        policy=parse_policy("static:1p1d+nodeflect", instances=2),
        slo=SLO,
        seed=seed,
        control=ControlOptions(hop_s=overhead_s / 2, model_error=0.0, step_noise=0.0),
    )
    ended = [one for one in simulate(requests, options).records if one.outcome is Outcome.OK]
    return compute_means((one.ttft_s, one.tpot_s, one.output_tokens) for one in ended)


def read_figures(load: MeasuredLoad) -> list[float]:
    """Return the figures of the load on the engines."""
    ended = [one for one in load.results.outcomes if one.kind is OutcomeKind.OK]
    return compute_means((one.ttft_s, one.tpot_s, one.output_tokens) for one in ended)


def compute_means(requests: Iterable[tuple[float | None, float | None, int]]) -> list[float]:
    """Return the means of TTFT, TPOT and whole duration, of requests with TTFT, TPOT and output tokens."""
    whole = [(ttft_s or 0.0, tpot_s or 0.0, tokens) for ttft_s, tpot_s, tokens in requests]
    return [
        fmean(ttft_s for ttft_s, _, _ in whole),
        fmean(tpot_s for _, tpot_s, _ in whole),
        fmean(ttft_s + (tokens - 1) * tpot_s for ttft_s, tpot_s, tokens in whole),
    ]


async def measure_all(
    running: RunningService, shares: ProcessorShares, folder: Path, *, seeds: int, seconds: float
) -> bool:
    """Measure profile and loads; print them, and return whether all bars are met."""
    await isolate_engines(running, shares, ENGINE_SHARE)
    await asyncio.to_thread(shares.hold_speed, await put_engines_on_one_processor(running))
    differences: list[list[float]] = []
    async with running.connect() as service:
        profile, overhead_s, good = await measure_profile(service, folder)
        print(f"processor below the held speed for {shares.take_time_too_slow():.0%} of this time\n")
        for seed in range(1, seeds + 1):
            requests = draw(profile, seconds=seconds, seed=seed)
            await service.wait_until_idle()
            shares.take_time_too_slow()
            load = await measure_load(running, requests, slo=SLO, seed=1000 + seed)
            too_slow = shares.take_time_too_slow()
            live = read_figures(load)
            simulated = simulate_load(requests, profile, overhead_s=overhead_s, seed=seed)
            texts = [
                f"{name} {1000 * one:.1f} and {1000 * other:.1f} ms ({other / one - 1:+.1%})"
                for name, one, other in zip(FIGURES, live, simulated, strict=True)
            ]
            print(
                f"seed {seed}: {len(requests)} requests, measured and simulated: {', '.join(texts)}; "
                f"{load.failed} failed; {load.describe_machine()}, "
                f"processor too slow for {too_slow:.0%} of the time",
                flush=True,
            )
            good = good and not load.failed
            if load.is_valid:
                differences.append([other / one - 1 for one, other in zip(live, simulated, strict=True)])
    medians = [median(values) for values in zip(*differences, strict=True)]
    described = ", ".join(f"{name} {one:+.1%}" for name, one in zip(FIGURES, medians, strict=False))
    print(f"{len(differences)} of {seeds} seeds count; medians: {described}")
    return good and bool(medians) and max(map(abs, medians)) <= DIFFERENCE_MAX


def main() -> int:
    """Run the service and measure; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--for", dest="seconds", type=float, default=180.0, metavar="SECONDS")
    given = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        processor_shares() as shares,
        run_vllm_service(build_service()) as service,
    ):
        measuring = measure_all(service, shares, Path(folder), seeds=given.seeds, seconds=given.seconds)
        return 0 if asyncio.run(measuring) else 1


if __name__ == "__main__":
    sys.exit(main())
