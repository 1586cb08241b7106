"""Runs a workload in real time, as the options of a simulated run say: engine servers, router and operator.

`fairness`, `admission` and `prefix` take the records of both, and judge them by the same lines. What a client
cannot see is estimated: a prompt was sent at the latest when its first token came, less its prefill, KV
transfer and one decode step. The service is that of `fulcrum up --local`, in this process; nothing else
should run on the machine.
"""

import asyncio
import heapq
import math
import re
import tempfile
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import uvloop
import yaml

from fulcrum_cli.assignment.writes import flip_instance
from fulcrum_cli.local.run import LocalRun, LocalRunOptions, run_local
from fulcrum_cli.play.engine_lateness import TOO_SLOW_MS, parse_buckets, percentile_edge_s
from fulcrum_cli.terminal.logs import log_warnings_to_stderr
from fulcrum_core.api import parse_object
from fulcrum_core.values import OverloadAction, Role
from fulcrum_simulator.client import (
    LoadGenerator,
    LoadOutcome,
    LoadResults,
    LoadTarget,
    OutcomeKind,
    split_address,
)
from fulcrum_simulator.client.generator import UNFINISHED
from fulcrum_simulator.engine.links import estimate_transfer_s
from fulcrum_simulator.fleet.options import PolicyName, RunOptions
from fulcrum_simulator.fleet.records import RequestResult
from fulcrum_simulator.fleet.run import simulate
from fulcrum_simulator.routing import Outcome
from fulcrum_simulator.workload import WorkloadRequest, find_block_tokens

SERVICE, NAMESPACE, MODEL = "measured", "default", "simulated"
NO_TIER = "all"
"""Tier of the requests that name none. They need one: only a tier says what is done about an overload."""
MAX_CONNECTIONS = 15_000
LATE_MAX_S = 0.02
"""Largest p99 of how late requests are sent."""
POLL_S = 0.01
"""Time between two looks for clients that come back: they are late by as much at most."""
STARTUP_S = 0.5
"""Time in which the engine servers start. Real engines load a model for minutes."""
Run = Callable[[Sequence[WorkloadRequest], RunOptions], Sequence[RequestResult]]
"""Runs a workload, simulated or in real time."""
_OUTCOMES = {
    OutcomeKind.OK: Outcome.OK,
    OutcomeKind.REFUSED: Outcome.REFUSED,
    OutcomeKind.FAILED: Outcome.FAILED,
}


@dataclass(frozen=True, slots=True)
class LiveRun:
    """What happened to each request of the workload, and to those that came back, by arrival."""

    records: list[RequestResult]
    returned: list[RequestResult]
    failed: int
    """Requests that were not refused and had no whole and right response when they ended. Those that had not
    ended yet with the run are not counted."""
    engines_late_ms: float
    """p99 of how late the steps of an engine were, of the engine for which it is worst; infinite: unknown."""
    load_late_s: float
    """p99 of how late requests were sent; infinite: unknown, or some waited for a connection."""
    prefix_caches: Mapping[str, tuple[float, float]]
    """Prompt tokens that each instance looked up in its prefix cache, and those that it found there."""

    @property
    def is_valid(self) -> bool:
        """Whether latencies are those of the engine model, and not of this machine."""
        return self.engines_late_ms <= TOO_SLOW_MS and self.load_late_s <= LATE_MAX_S and not self.failed

    def __str__(self) -> str:
        warning = "" if self.is_valid else " (DOES NOT COUNT)"
        return (
            f"live: {len(self.records)} requests, {self.failed} failed; engines {self.engines_late_ms:g} ms "
            f"late, load {1000 * self.load_late_s:.0f} ms (p99){warning}"
        )


class LiveRuns:
    """Runs workloads in real time, and remembers whether all of the runs count."""

    def __init__(self) -> None:
        self.all_valid = True

    def run(self, workload: Sequence[WorkloadRequest], options: RunOptions) -> list[RequestResult]:
        """Run a workload; return what happened to each request."""
        return self.run_whole(workload, options).records

    def run_whole(
        self, workload: Sequence[WorkloadRequest], options: RunOptions, *, returns: bool = False
    ) -> LiveRun:
        """Run a workload; see `run_live`."""
        live = run_live(workload, options, returns=returns)
        self.all_valid &= live.is_valid
        return live


def run_simulated(workload: Sequence[WorkloadRequest], options: RunOptions) -> list[RequestResult]:
    """Simulate a workload."""
    return list(simulate(workload, options).records)


def run_live(workload: Sequence[WorkloadRequest], options: RunOptions, *, returns: bool = False) -> LiveRun:
    """Run the workload, until `options.drain_s` after its last arrival; print one line about the run.

    With `returns`, each refused request is sent once more, after its `Retry-After`.
    """
    log_warnings_to_stderr()
    with (
        tempfile.TemporaryDirectory() as folder,
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        path = Path(folder) / "profile.yaml"
        profile = options.profile.model_dump() | {"startup_s": STARTUP_S}
        path.write_text(yaml.safe_dump(profile), encoding="utf-8")
        run = runner.run(_run(workload, options, path, returns=returns))
    print(run, flush=True)
    return run


def build_objects(
    workload: Iterable[WorkloadRequest], options: RunOptions, profile: Path
) -> list[dict[str, Any]]:
    """Return the tiers of the workload and a service as the options say."""
    policy, slo = options.policy, options.slo
    flips = policy.name in (PolicyName.ARROW, PolicyName.BALANCED)
    if not flips and policy.name is not PolicyName.STATIC:
        raise SystemExit(f"error: --policy ({policy}) does not run live")
    priorities = {request.tier or NO_TIER: request.priority for request in workload}
    spec = {
        "model": MODEL,
        "instances": options.instances,
        "engine": {"type": "Simulated", "profile": str(profile)},
        "qosTiers": sorted(priorities),
        "slo": {"ttft": f"{1000 * slo.ttft_s:.0f}ms", "tpot": f"{1000 * slo.tpot_s:.1f}ms"},
        "autoscaling": {"mode": "Auto", "policy": policy.name.value} if flips else {"mode": "Off"},
        "router": {
            "admission": policy.admission.value,
            "dispatch": {
                "mode": policy.dispatch.value,
                "deflect": policy.deflects,
                "prefixAware": policy.prefix_aware,
            },
            "timeouts": {"prefill": "1h", "firstByte": "1h"},
        },
    }
    tiers = [_build_tier(name, priority, options) for name, priority in sorted(priorities.items())]
    head = {"apiVersion": "fulcrum.dev/v1alpha1", "kind": "PDService", "metadata": {"name": SERVICE}}
    return [*tiers, {**head, "spec": spec}]


def _build_tier(name: str, priority: int, options: RunOptions) -> dict[str, Any]:
    admission, reserve = options.policy.tier_admission, options.reserved.get(name)
    spec: dict[str, Any] = {"priority": priority, "weight": options.weights.get(name, 1)}
    if name in options.unsheddable_tiers:
        spec["sheddable"] = False
    if admission.action is OverloadAction.DEGRADE:
        spec["admission"] = {"mode": "Degrade", "maxOutputTokens": admission.max_output_tokens}
    if reserve is not None and reserve.fraction:
        spec |= {
            "reservedFraction": reserve.fraction,
            "reclaimWithin": f"{1000 * reserve.reclaim_within_s:.0f}ms",
        }
    return {
        "apiVersion": "fulcrum.dev/v1alpha1",
        "kind": "QoSTier",
        "metadata": {"name": name},
        "spec": spec,
    }


async def _run(
    workload: Sequence[WorkloadRequest], options: RunOptions, profile: Path, *, returns: bool
) -> LiveRun:
    async with _start(build_objects(workload, options, profile), options) as service:
        block_tokens = find_block_tokens(workload) if options.prefix_caches else 0
        load, back = (
            _make_generator(service, options, seed, block_tokens) for seed in (options.seed, -options.seed)
        )
        start_s = asyncio.get_running_loop().time()
        returned: list[WorkloadRequest] = []
        returning = None
        if returns:
            returning = asyncio.create_task(_send_returns(load, back, workload, returned, start_s))
        try:
            await load.send(map(_name_tier, workload), start_s=start_s)
            await load.finish(timeout_s=options.drain_s)
        finally:
            if returning is not None:
                returning.cancel()
                await asyncio.gather(returning, return_exceptions=True)
            await back.finish(timeout_s=options.drain_s)
        late_ms, caches = await _read_engines(service)
    outcomes = load.results.outcomes, back.results.outcomes
    return LiveRun(
        records=_make_records(workload, outcomes[0], options),
        returned=_make_records(returned, outcomes[1], options),
        failed=sum(map(_has_failed, (*outcomes[0], *outcomes[1]))),
        engines_late_ms=late_ms,
        load_late_s=max(_find_late_s(one.results) for one in (load, back)),
        prefix_caches=caches,
    )


@asynccontextmanager
async def _start(objects: Iterable[dict[str, Any]], options: RunOptions) -> AsyncIterator[LocalRun]:
    """Run a service with the split of the policy while the block runs."""
    async with run_local([parse_object(one) for one in objects], LocalRunOptions(port=0)) as service:
        names = sorted(instance.metadata.name for instance in await service.wait_serving())
        for number, name in enumerate(names):
            to = Role.PREFILL if number < options.policy.prefill else Role.DECODE
            await flip_instance(
                service.store, SERVICE, name, to, namespace=NAMESPACE, reason="split to be measured"
            )
        yield service


def _make_generator(service: LocalRun, options: RunOptions, seed: int, block_tokens: int) -> LoadGenerator:
    host, port = split_address(service.info.router_url)
    target = LoadTarget(
        host=host,
        port=port,
        model=MODEL,
        block_tokens=block_tokens,
        degraded_tokens=options.policy.tier_admission.max_output_tokens,
        max_connections=MAX_CONNECTIONS,
    )
    return LoadGenerator(target, slo=options.slo, seed=seed)


def _name_tier(request: WorkloadRequest) -> WorkloadRequest:
    return replace(request, tier=request.tier or NO_TIER)


def _find_late_s(results: LoadResults) -> float:
    if not results.offered:
        return 0.0
    late_s = results.report().sent_late_p99_s
    return math.inf if late_s is None or results.connection_waits else late_s


def _has_failed(outcome: LoadOutcome) -> bool:
    kinds = OutcomeKind.FAILED, OutcomeKind.BROKEN, OutcomeKind.WRONG
    return outcome.kind in kinds and outcome.reason != UNFINISHED


async def _send_returns(
    load: LoadGenerator,
    back: LoadGenerator,
    workload: Sequence[WorkloadRequest],
    returned: list[WorkloadRequest],
    start_s: float,
) -> None:
    """Send what was refused once more, when its client was told to come back, until cancelled."""
    seen, due = 0, list[tuple[float, int]]()
    while True:
        for outcome in load.results.outcomes[seen:]:
            seen += 1
            if outcome.kind is OutcomeKind.REFUSED:
                heapq.heappush(due, (outcome.end_s + outcome.retry_after_s, outcome.index))
        while due and due[0][0] <= asyncio.get_running_loop().time():
            at_s, index = heapq.heappop(due)
            again = replace(workload[index], arrival_s=at_s - start_s)
            returned.append(again)
            await back.send([_name_tier(again)], start_s=start_s)
        await asyncio.sleep(POLL_S)


async def _read_engines(service: LocalRun) -> tuple[float, dict[str, tuple[float, float]]]:
    """Return how late engine steps were, in ms, and the lookups in prefix caches; see `LiveRun`."""
    late_ms, caches = [], {}
    async with httpx.AsyncClient(trust_env=False) as client:
        for instance in await service.wait_serving():
            text = (await client.get(f"http://{instance.status.endpoint}/metrics")).text
            late_s = percentile_edge_s(parse_buckets(text), 99)
            if late_s is not None:  # an engine that nobody used
                late_ms.append(1000 * late_s)
            caches[instance.metadata.name] = (
                _read_sum(text, "prefix_cache_queries"),
                _read_sum(text, "prefix_cache_hits"),
            )
    return max(late_ms, default=math.inf), caches


def _read_sum(text: str, name: str) -> float:
    found = re.findall(rf"^vllm:{name}_total(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE)
    return sum(map(float, found))


def _make_records(
    workload: Sequence[WorkloadRequest], outcomes: Iterable[LoadOutcome], options: RunOptions
) -> list[RequestResult]:
    records, profile = [RequestResult(request) for request in workload], options.profile
    model = profile.step_model.prefill_model(profile.token_budget)
    for outcome in outcomes:
        record = records[outcome.index]
        record.outcome = None if outcome.reason == UNFINISHED else _OUTCOMES.get(outcome.kind, Outcome.BROKEN)
        record.output_tokens, record.retry_after_s = outcome.output_tokens, outcome.retry_after_s
        if outcome.ttft_s is None:
            continue
        arrival_s = record.request.arrival_s
        record.first_token_s = arrival_s + outcome.ttft_s
        tokens = record.request.input_tokens
        transfer_s = estimate_transfer_s(
            tokens * profile.kv_bytes_per_token,
            link_bytes_per_s=profile.link_bytes_per_s,
            link_setup_s=profile.link_setup_s,
        )
        served_s = model.ttft_s(tokens) + transfer_s + (outcome.tpot_s or 0.0)
        record.prefill_sent_s = arrival_s + max(0.0, outcome.ttft_s - served_s)
        if outcome.kind is OutcomeKind.OK:
            gaps = max(0, outcome.output_tokens - 1)
            record.last_token_s = record.first_token_s + gaps * (outcome.tpot_s or 0.0)
    return records
