"""A load whose mix changes on three real vLLM engines: mode Auto against each fixed split.

    python bench/policy_vllm.py [--seeds N] [--period SECONDS] [--periods N]

Runs a local service with three engines. Each has its own share of the first processor (`processor_shares`,
which needs root); router and load have the others. So an engine is as fast while others work as alone, as
each would be on its own GPU. For each seed, measures what one engine serves, with split 2P1D: long prompts,
and long answers while their steps take the TPOT objective. The load has both all the time, and changes its
mix each period: prompts at 1.5 times and answers at 0.2 times that rate, then the other way round. So each
split has one engine too few half of the time. The objectives are five times the TTFT of a prompt alone, and
three times the TPOT of an answer alone. Requests with the same arrivals and lengths, but other texts (so that
no prefix cache helps), are sent with mode Auto and with each fixed split, in an order that rotates with the
seed. Prints SLO attainment, flips and failures. Exit code 1 if, in the median of the seeds, Auto is not above
every fixed split, if it never flipped in one of the directions, or if a request failed. Needs `make engine`.
A seed does not count if other programs used the processors during one of its runs, if the load was late, or
if the speed of the machine changed: TPOT of an answer alone after each run tells.
"""

import argparse
import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
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
from fulcrum_cli.assignment.writes import flip_instance
from fulcrum_cli.play.recorder import Recorder
from fulcrum_core.api import PDAssignment, PDService
from fulcrum_core.values import AutoscalingMode, Role, Slo
from fulcrum_simulator.client import Latencies, LoadOutcome, summarize_latencies
from fulcrum_simulator.workload import WorkloadRequest
from tests.engines.loads import Sender, draw_burst, draw_load, measure_rate_rps, send_load
from tests.engines.services import NAMESPACE, RunningService, VllmService, build_manifest

SERVICE, INSTANCES = "chat", 3
AUTO, SPLITS = "Auto", {"1P2D": 1, "2P1D": 2}
"""Prefill instances of each fixed split."""
Ranges = tuple[tuple[int, int], tuple[int, int]]
PROMPTS: Ranges = ((700, 1300), (2, 6))
ANSWERS: Ranges = ((16, 48), (100, 250))
"""Ranges of prompt and output tokens of the two mixes."""
LOAD_FACTORS = (1.5, 0.2), (0.2, 1.5)
"""Rates of prompts and of answers in turn, as factors of what one engine serves."""
TTFT_FACTOR, TPOT_FACTOR = 5.0, 3.0
"""The objectives, as multiples of the latencies of lone requests."""
LONE_REQUESTS, LONE_AFTER_RUN = 9, 3
"""Requests of each mix that run alone, before the runs of a seed; answers alone after each run."""
SPEED_CHANGE_MAX = 0.15
"""By so much the TPOT of these may differ: processors of shared hosts were slower by a third for minutes."""
ANSWER_TOKENS = round(fmean(ANSWERS[1]))
"""Tokens of each answer by which the rate of a decode engine is measured."""
BATCH_FIRST, BATCHES = 32, 5
"""Answers in the first measurement of that rate, and measurements at most."""
STEP_ERROR_MAX = 0.15
"""The rate counts if steps take the TPOT objective to within so much of it."""
WIDE_SLO = Slo(ttft_s=60.0, tpot_s=1.0)
"""Objectives while all this is measured: the router keeps no request from an engine to meet them."""
BURST, BURSTS, BESIDE = 120, 3, 20
"""Prompts of a burst by which the rate of prefill engines is measured; bursts, whose median counts; answers
beside each."""
MODEL = ("--load-format", "dummy", "--hf-overrides", '{"num_hidden_layers": 6}')
"""Random weights, in so many layers that engine steps take longer than router and load."""
BATCH_MAX = 128
"""With our default on CPUs, 16, a batch would be full long before its tokens were late."""
ENGINE_ARGS = (*MODEL, "--kv-cache-memory-bytes", str(768 * 2**20), "--max-num-seqs", str(BATCH_MAX))
ENGINE_SHARE = 0.3
"""Share of the first processor that an engine has."""
FLIPS_SEEN_EACH_S = 0.2


@dataclass(frozen=True, slots=True)
class Run:
    """One load with one way to set the roles.

    `by_period`: SLO attainment of the requests of each period. `lone_ratio`: TPOT of answers alone after the
    run, to that when the rates were measured.
    """

    arm: str
    load: MeasuredLoad
    by_period: tuple[float, ...]
    to_prefill: int
    to_decode: int
    lone_ratio: float

    @property
    def has_other_speed(self) -> bool:
        """Whether the engines are faster or slower than when the rates were measured."""
        return abs(self.lone_ratio - 1) > SPEED_CHANGE_MAX

    @property
    def is_valid(self) -> bool:
        """Whether the figures are those of the service."""
        return self.load.is_valid and not self.has_other_speed

    def __str__(self) -> str:
        latencies = self.load.report.latencies
        tpot_ms = 1000 * (latencies.tpot_p99_s or 0.0)
        by_period = ", ".join(f"{100 * share:.0f}" for share in self.by_period)
        return (
            f"{self.arm}: {self.load.report.attainment or 0.0:.1%} of {self.load.report.offered} in time, "
            f"by period {by_period} %, "
            f"TTFT p99 {latencies.ttft_p99_s or 0.0:.2f} s, TPOT p99 {tpot_ms:.0f} ms, "
            f"{self.to_prefill} flips to Prefill, {self.to_decode} to Decode, {self.load.failed} failed; "
            f"{self.load.describe_machine()}, TPOT alone {self.lone_ratio:.2f} times that before"
            f"{' (DOES NOT COUNT)' if self.has_other_speed else ''}"
        )


def build_service() -> dict[str, Any]:
    """A service with our defaults, but for its engines and what `calibrate` sets."""
    return build_manifest(
        engine={"type": "vLLM", "args": list(ENGINE_ARGS)},
        instances=INSTANCES,
        slo=write_slo(WIDE_SLO),
        router={"dispatch": {"deflect": False}},  # until the rates are measured
        autoscaling={"mode": AutoscalingMode.OFF.value},
    )


def write_slo(slo: Slo) -> dict[str, str]:
    """The objectives as a manifest has them."""
    return {"ttft": f"{1000 * slo.ttft_s:.0f}ms", "tpot": f"{1000 * slo.tpot_s:.1f}ms"}


async def set_mode(service: VllmService, mode: AutoscalingMode) -> None:
    """Set the mode of autoscaling."""
    patch = {"spec": {"autoscaling": {"mode": mode.value}}}
    await service.store.patch(PDService, SERVICE, patch, namespace=NAMESPACE)


async def set_split(service: VllmService, prefill: int) -> None:
    """Give the first `prefill` instances the role Prefill and the others Decode; wait until they have it."""
    names = sorted(await service.list_instances())
    roles = {name: Role.PREFILL if number < prefill else Role.DECODE for number, name in enumerate(names)}
    while True:
        assignment = await service.store.get(PDAssignment, SERVICE, namespace=NAMESPACE)
        now = {name: entry.role for name, entry in assignment.spec.roles.items()}
        wrong = [name for name in names if now[name] is not roles[name]]
        if not wrong:
            break
        # The last instance of a role never flips.
        name = next(one for one in wrong if list(now.values()).count(now[one]) > 1)
        await flip_instance(
            service.store, SERVICE, name, roles[name], namespace=NAMESPACE, reason="split to be measured"
        )
    await service.wait_until(lambda: _has_roles(service, roles))


async def _has_roles(service: VllmService, roles: dict[str, Role]) -> bool:
    return {one.name: one.role for one in (await service.read_state()).instances} == roles


@dataclass(frozen=True, slots=True)
class Calibration:
    """Requests a second that one engine serves of both kinds, TPOT of an answer alone, and the objectives."""

    prompts_rps: float
    answers_rps: float
    lone_s: float
    slo: Slo


async def calibrate(service: VllmService, running: RunningService, *, seed: int) -> Calibration:
    """Measure what one engine of each role serves, and set the service's objectives."""
    await set_objectives(service, WIDE_SLO, deflect=False)
    await set_split(service, SPLITS["2P1D"])
    prompts_rps = await measure_prompts_rps(service, running, seed=seed) / SPLITS["2P1D"]
    lone = await measure_lone(service, running, PROMPTS, seed=seed + 10)
    lone_s = get_measured((await measure_lone(service, running, ANSWERS, seed=seed + 20)).tpot_p50_s)
    slo = Slo(ttft_s=TTFT_FACTOR * get_measured(lone.ttft_p50_s), tpot_s=TPOT_FACTOR * lone_s)
    beside_rps = LOAD_FACTORS[1][0] * prompts_rps
    answers_rps = await measure_answers_rps(service, running, lone_s, slo.tpot_s, beside_rps, seed=seed + 30)
    await set_objectives(service, slo, deflect=True)
    print(
        f"one engine serves {prompts_rps:.1f} prompts/s, or {answers_rps:.1f} answers/s; "
        f"objectives {write_slo(slo)}",
        flush=True,
    )
    return Calibration(prompts_rps, answers_rps, lone_s, slo)


async def set_objectives(service: VllmService, slo: Slo, *, deflect: bool) -> None:
    """Set the service's objectives, and whether decode instances compute prompts."""
    spec = {"slo": write_slo(slo), "router": {"dispatch": {"deflect": deflect}}}
    await service.store.patch(PDService, SERVICE, {"spec": spec}, namespace=NAMESPACE)


async def measure_prompts_rps(service: VllmService, running: RunningService, *, seed: int) -> float:
    """Prompts a second that all prefill engines compute, while some wait, beside a few answers."""
    rates_rps = []
    for number in range(1 + BURSTS):  # the first one opens connections and shows the router what prompts cost
        await service.wait_until_idle()
        burst = draw_burst(*PROMPTS, count=BURST, seed=f"{seed}/{number}")
        beside = draw_burst(*ANSWERS, count=BESIDE, seed=f"{seed}/{number}/beside")
        results, _ = await asyncio.gather(
            send_load(running.info, burst, slo=WIDE_SLO, seed=seed + number),
            send_load(running.info, beside, slo=WIDE_SLO, seed=seed + number + BURSTS + 1),
        )
        rates_rps.append(measure_rate_rps(results))
    return median(rates_rps[1:])


async def measure_lone(
    service: VllmService, running: RunningService, ranges: Ranges, *, seed: int, count: int = LONE_REQUESTS
) -> Latencies:
    """Latencies of requests that run alone: each is sent after the one before has ended."""
    await service.wait_until_idle()
    outcomes: list[LoadOutcome] = []
    for number in range(count):
        one = draw_burst(*ranges, count=1, seed=f"{seed}/{number}")
        outcomes += (await send_load(running.info, one, slo=WIDE_SLO, seed=seed + number)).outcomes
    return summarize_latencies(outcomes)


async def measure_answers_rps(
    service: VllmService,
    running: RunningService,
    lone_s: float,
    tpot_s: float,
    beside_rps: float,
    *,
    seed: int,
) -> float:
    """Answers a second of one decode engine while steps take `tpot_s`, beside `beside_rps` prompts a second.

    A batch of n with steps of I seconds gives n/I tokens a second. How I grows with n is not known: the next
    batch is interpolated between an answer alone and the last batch, as if I grew linearly.

    Raises:
        SystemExit: if no batch has such steps.
    """
    batch = BATCH_FIRST
    for number in range(BATCHES):
        step_s = await measure_step_s(service, running, batch, beside_rps, tpot_s, seed=seed + number)
        rate_rps = batch / (ANSWER_TOKENS * step_s)
        print(f"{batch} answers: TPOT {1000 * step_s:.1f} ms, {rate_rps:.1f}/s", flush=True)
        if abs(step_s / tpot_s - 1) <= STEP_ERROR_MAX:
            return rate_rps
        if step_s <= lone_s:
            raise SystemExit(f"{batch} answers together do not make steps longer than {lone_s:.4f} s")
        batch = min(BATCH_MAX, round(1 + (batch - 1) * (tpot_s - lone_s) / (step_s - lone_s)))
    raise SystemExit(f"no batch was found with steps of about {tpot_s:.4f} s")


async def measure_step_s(
    service: VllmService,
    running: RunningService,
    batch: int,
    beside_rps: float,
    tpot_s: float,
    *,
    seed: int,
) -> float:
    """Median TPOT of answers of the same length, `batch` on the one decode engine, beside prompts.

    Two prefill engines compute the prompts: with one, so many answers would wait for their KV, which counts
    in TPOT.
    """
    await service.wait_until_idle()
    answers = draw_burst(ANSWERS[0], (ANSWER_TOKENS, ANSWER_TOKENS), count=batch, seed=f"{seed}")
    prompts = draw_load([Sender("", beside_rps, *PROMPTS)], end_s=2 * ANSWER_TOKENS * tpot_s, seed=f"{seed}")
    results = await send_load(running.info, [*answers, *prompts], slo=WIDE_SLO, seed=seed)
    together = [outcome for outcome in results.outcomes if outcome.index < len(answers)]
    return get_measured(summarize_latencies(together).tpot_p50_s)


def get_measured(latency_s: float | None) -> float:
    """Return the latency.

    Raises:
        SystemExit: if there is none, since no request succeeded.
    """
    if latency_s is None:
        raise SystemExit("cannot measure what one engine serves: no request succeeded")
    return latency_s


@asynccontextmanager
async def record_flips(service: VllmService) -> AsyncIterator[Recorder]:
    """Record the flips while the block runs.

    Two flips of one instance within `FLIPS_SEEN_EACH_S` are missed; the autoscaler decides once a second.
    """
    recorder = Recorder()

    async def look() -> None:
        recorder.record_assignment(await service.store.get(PDAssignment, SERVICE, namespace=NAMESPACE))

    async def follow() -> None:
        while True:
            await asyncio.sleep(FLIPS_SEEN_EACH_S)
            await look()

    await look()
    task = asyncio.create_task(follow())
    try:
        yield recorder
        await look()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def measure_run(
    service: VllmService,
    running: RunningService,
    arm: str,
    requests: Sequence[WorkloadRequest],
    *,
    calibration: Calibration,
    period_s: float,
    seed: int,
) -> Run:
    """Send a load with mode Auto, beginning with 1P2D, or with a fixed split."""
    await service.wait_until_idle()
    await set_split(service, SPLITS.get(arm, 1))
    async with record_flips(service) as recorder:
        await set_mode(service, AutoscalingMode.AUTO if arm == AUTO else AutoscalingMode.OFF)
        load = await measure_load(running, requests, slo=calibration.slo, seed=seed)
        await set_mode(service, AutoscalingMode.OFF)
    lone = await measure_lone(service, running, ANSWERS, seed=seed + 100, count=LONE_AFTER_RUN)
    run = Run(
        arm,
        load,
        compute_by_period(load, calibration.slo, period_s),
        recorder.flips_to(Role.PREFILL),
        recorder.flips_to(Role.DECODE),
        get_measured(lone.tpot_p50_s) / calibration.lone_s,
    )
    print(run, flush=True)
    return run


def compute_by_period(load: MeasuredLoad, slo: Slo, period_s: float) -> tuple[float, ...]:
    """SLO attainment of the requests that arrived in each period."""
    met: dict[int, list[bool]] = {}
    for outcome in load.results.outcomes:
        period = int(load.requests[outcome.index].arrival_s // period_s)
        met.setdefault(period, []).append(outcome.meets(slo))
    return tuple(fmean(met[period]) for period in sorted(met))


def draw_moving(
    calibration: Calibration, *, period_s: float, periods: int, seed: int
) -> list[WorkloadRequest]:
    """Draw periods with mostly prompts and mostly answers in turn, beginning with prompts."""
    rates_rps = calibration.prompts_rps, calibration.answers_rps
    drawn = []
    for number in range(periods):
        senders = [
            Sender("", factor * rate_rps, *ranges, start_s=number * period_s)
            for factor, rate_rps, ranges in zip(
                LOAD_FACTORS[number % 2], rates_rps, (PROMPTS, ANSWERS), strict=True
            )
        ]
        drawn += draw_load(senders, end_s=(number + 1) * period_s, seed=f"{seed}/{number}")
    return drawn


async def measure_all(
    running: RunningService, shares: ProcessorShares, *, seeds: int, period_s: float, periods: int
) -> list[list[Run]]:
    """Send the load of each seed with each way to set the roles."""
    await isolate_engines(running, shares, ENGINE_SHARE)
    await put_engines_on_one_processor(running)
    async with running.connect() as service:
        found = []
        for seed in range(1, seeds + 1):
            calibration = await calibrate(service, running, seed=1000 * seed + 500)
            requests = draw_moving(calibration, period_s=period_s, periods=periods, seed=seed)
            arms = (AUTO, *SPLITS)
            first = (seed - 1) % len(arms)
            runs = [
                await measure_run(
                    service,
                    running,
                    arm,
                    requests,
                    calibration=calibration,
                    period_s=period_s,
                    seed=1000 * seed + number,
                )
                for number, arm in enumerate((*arms[first:], *arms[:first]))
            ]
            found.append(sorted(runs, key=lambda run: arms.index(run.arm)))
        return found


def judge(found: Sequence[Sequence[Run]]) -> bool:
    """Print the verdict of the seeds that count; return whether all bars are met."""
    counted = [runs for runs in found if all(run.is_valid for run in runs)]
    failed = sum(run.load.failed for runs in found for run in runs)
    print(f"{failed} failed, {len(counted)} of {len(found)} seeds count")
    if not counted:
        return False
    attainments = {
        runs[number].arm: [each[number].load.report.attainment or 0.0 for each in counted]
        for runs in counted[:1]
        for number in range(len(runs))
    }
    for arm, values in attainments.items():
        print(f"{arm}: {median(values):.1%} in time, {min(values):.1%} to {max(values):.1%}")
    auto = [run for runs in counted for run in runs if run.arm == AUTO]
    flips = min(sum(run.to_prefill for run in auto), sum(run.to_decode for run in auto))
    best_split = max(median(attainments[arm]) for arm in SPLITS)
    return median(attainments[AUTO]) > best_split and flips > 0 and not failed


def main() -> int:
    """Run the service and measure; return the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--period", type=float, default=45.0, metavar="SECONDS")
    parser.add_argument("--periods", type=int, default=4)
    given = parser.parse_args()
    with processor_shares() as shares, run_vllm_service(build_service()) as service:
        measuring = measure_all(
            service, shares, seeds=given.seeds, period_s=given.period, periods=given.periods
        )
        found = asyncio.run(measuring)
    return 0 if judge(found) else 1


if __name__ == "__main__":
    sys.exit(main())
