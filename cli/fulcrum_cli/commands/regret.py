"""`fulcrum regret`: simulates the requests that the router recorded, as they were served and otherwise.

The router keeps the requests of the last hour in numbers: arrival, lengths, outcome. They are simulated with
the policy that ran, with others, with each fixed split, and with fewer and more instances. The simulation of
what ran may be written to a file, which `fulcrum web --replay` shows. Reading the requests is in the package
`regret`, simulating in `fulcrum_simulator.fleet`. The service is not touched.
"""

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx

from fulcrum_cli.option_values import check_not_combined
from fulcrum_cli.output_files import check_outputs, write_text_file
from fulcrum_cli.regret.alternatives import Alternative
from fulcrum_cli.regret.recorded_traffic import (
    PAGE_BYTES_MAX,
    RecordedTraffic,
    add_spec,
    parse_page,
    read_file,
)
from fulcrum_cli.simulation.page_states import build_states
from fulcrum_cli.simulation.progress import show_progress
from fulcrum_cli.target.connection import TargetConnection, connect
from fulcrum_cli.target.selection import TargetOptions, choose_target
from fulcrum_cli.terminal.output import format_columns
from fulcrum_cli.terminal.printable import print_lines
from fulcrum_cli.web.recording import write_states
from fulcrum_cluster.router_client import RouterUnavailable
from fulcrum_core.api.meta import format_duration
from fulcrum_core.errors import InvalidInput
from fulcrum_core.profiles import EngineProfile, is_profile_path, load_profile
from fulcrum_simulator.fleet.load import ReplayedLoad, leave_out_overlong
from fulcrum_simulator.fleet.options import RunOptions
from fulcrum_simulator.fleet.policy_runs import PolicyRuns, pick_best, run_policy

_READ_TIMEOUT_S = 30.0
_SEEDS_MAX = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class RegretOptions:
    """The options, as typed. Without a `profile` it is that of the simulated engines."""

    target: TargetOptions
    service: str | None
    file: Path | None
    save: Path | None
    record: Path | None
    profile: str | None
    seeds: int


@dataclass(frozen=True, slots=True)
class _Result:
    alternative: Alternative
    runs: PolicyRuns

    @property
    def attainment(self) -> float:
        """Mean over the seeds, 0 to 1."""
        return sum(run.attainment for run in self.runs.runs) / len(self.runs.runs)

    @property
    def spread(self) -> float:
        """Difference of the best and the worst seed, 0 to 1."""
        shares = [run.attainment for run in self.runs.runs]
        return max(shares) - min(shares)


def run(options: RegretOptions) -> None:
    """Read the recorded requests, simulate the alternatives and print them."""
    _check(options)
    if options.file is not None:
        document, source = read_file(options.file), str(options.file)
    else:
        document, source = asyncio.run(_fetch(options))
    traffic = parse_page(document, source)
    if options.save is not None:
        write_text_file("--save", options.save, json.dumps(document))
    profile = load_profile(options.profile or _find_profile(traffic))
    results, overlong = _simulate(traffic, profile, options.seeds)
    try:
        if options.record is not None:
            ran = results[0].runs.runs[0].result
            write_states(build_states(ran, load=f"recorded requests of {traffic.service}"), options.record)
    finally:  # also if the recording cannot be written
        described = (*_describe_traffic(traffic, profile), *overlong, "")
        print_lines((*described, *_describe_results(traffic, results)))


def _check(options: RegretOptions) -> None:
    if not 1 <= options.seeds <= _SEEDS_MAX:
        raise InvalidInput("--seeds", options.seeds, f"must be between 1 and {_SEEDS_MAX}")
    if options.file is not None:
        target = options.target
        named = {"--kubeconfig": target.kubeconfig, "--context": target.context}
        check_not_combined("--file", {"SERVICE": options.service, **named, "--namespace": target.namespace})
    profile = options.profile or ""
    inputs = {"--file": options.file, "--profile": Path(profile) if is_profile_path(profile) else None}
    check_outputs({"--save": options.save, "--record": options.record}, inputs)


async def _fetch(options: RegretOptions) -> tuple[Any, str]:
    """Return the page of the service's router with the service's spec, and its description for errors."""
    async with connect(choose_target(options.target), options.service) as connection:
        service = await connection.only_service(options.service)
        name = service.metadata.name
        try:
            page = await _read_page(connection, name)
        except RouterUnavailable as error:
            raise InvalidInput("SERVICE", name, f"its router has no recorded requests: {error}") from error
        return add_spec(page, service.spec), f"the router of {name}"


async def _read_page(connection: TargetConnection, service: str) -> Any:
    """Raises RouterUnavailable if the router does not respond."""
    if connection.objects is not None:
        from fulcrum_cli.web.sources import ClusterRouter

        router = ClusterRouter(connection.objects, service, namespace=connection.namespace)
        return await router.read_document("requests")
    assert connection.local_run is not None
    try:
        return json.loads(await _read_limited(f"{connection.local_run.router_metrics_url}/requests"))
    except (httpx.HTTPError, ValueError) as error:
        raise RouterUnavailable(str(error) or type(error).__name__) from error


async def _read_limited(url: str) -> bytes:
    """Read a page of at most `PAGE_BYTES_MAX`, which nobody packs."""
    raw = bytearray()
    async with (
        httpx.AsyncClient(trust_env=False, timeout=_READ_TIMEOUT_S) as client,
        client.stream("GET", url, headers={"Accept-Encoding": "identity"}) as response,
    ):
        response.raise_for_status()
        async for data in response.aiter_raw():
            raw += data
            if len(raw) > PAGE_BYTES_MAX:
                raise ValueError(f"the page has more than {PAGE_BYTES_MAX:,} bytes")
    return bytes(raw)


def _find_profile(traffic: RecordedTraffic) -> str:
    """Name the profile of simulated engines.

    Raises:
        InvalidInput: for real engines, whose speed a profile has to say.
    """
    engine = traffic.ran_as.spec.engine
    if engine.type != "Simulated":
        raise InvalidInput("--profile", "none", "is needed: measure the engines with fulcrum profile")
    return engine.profile


def _simulate(
    traffic: RecordedTraffic, profile: EngineProfile, seeds: int
) -> tuple[list[_Result], list[str]]:
    """Simulate what ran and its alternatives; returns the results, and what to say of requests left out."""
    requests, overlong = leave_out_overlong(traffic.requests, profile)
    if not requests:
        raise InvalidInput("recorded requests", len(traffic.requests), f"are all too long: {overlong}")
    load, results = ReplayedLoad("recorded requests", requests), list[_Result]()
    alternatives = list(traffic.ran_as.list_alternatives())
    policies = sum(len(alternative.policies) for alternative in alternatives)
    with show_progress(policies * seeds) as on_run:
        for alternative in alternatives:
            options = RunOptions(
                profile=profile,
                instances=alternative.instances,
                policy=alternative.policies[0],
                slo=traffic.slo,
                service=traffic.ran_as.spec,
            )
            runs = [
                run_policy(load, replace(options, policy=policy), range(1, seeds + 1), on_run=on_run)
                for policy in alternative.policies
            ]
            results.append(_Result(alternative, pick_best(runs)))
    return results, [str(overlong)] if overlong else []


def _describe_results(traffic: RecordedTraffic, results: Sequence[_Result]) -> list[str]:
    return [
        *format_columns(("POLICY", "INSTANCES", "SLO %", "DIFFERENCE"), *_list_rows(results)),
        "",
        *_describe_regret(traffic, results),
    ]


def _describe_traffic(traffic: RecordedTraffic, profile: EngineProfile) -> list[str]:
    requests = traffic.requests
    inputs = sum(request.input_tokens for request in requests) / len(requests)
    outputs = sum(request.output_tokens for request in requests) / len(requests)
    rate = len(requests) / traffic.duration_s if traffic.duration_s else 0.0
    lines = [
        f"{traffic.service}: {len(requests):,} requests in {format_duration(round(traffic.duration_s))}, "
        f"{rate:.2f}/s, mean prompt {inputs:,.0f} and mean answer {outputs:,.0f} tokens; "
        f"TTFT {format_duration(traffic.slo.ttft_s)}, TPOT {format_duration(traffic.slo.tpot_s)}",
        f"simulated with the profile {profile.name}; tiers are not simulated",
    ]
    if traffic.guessed_outputs:
        lines.append(f"{traffic.guessed_outputs:,} of them did not end: their answers get the median length")
    return lines


def _list_rows(results: Sequence[_Result]) -> list[tuple[str, ...]]:
    base = results[0].attainment
    return [
        (
            str(result.runs.policy),
            str(result.alternative.instances),
            _format_range(result),
            "as it ran" if number == 0 else f"{100 * (result.attainment - base):+.1f}",
        )
        for number, result in enumerate(results)
    ]


def _format_range(result: _Result) -> str:
    shares = [100 * run.attainment for run in result.runs.runs]
    spread = f" ({min(shares):.1f} to {max(shares):.1f})" if len(shares) > 1 else ""
    return f"{100 * result.attainment:.1f}{spread}"


def _describe_regret(traffic: RecordedTraffic, results: Sequence[_Result]) -> list[str]:
    """Say how far the simulation is from what was recorded, and what would have been better."""
    ran, margin, lines = results[0], max(100 * each.spread for each in results), list[str]()
    if traffic.attainment is not None:
        recorded, simulated = 100 * traffic.attainment, 100 * ran.attainment
        margin = max(margin, abs(simulated - recorded))
        lines.append(
            f"The router counted {recorded:.1f} %, the simulation of what ran {simulated:.1f} %. "
            f"Differences below {margin:.1f} points are not significant."
        )
    same = [each for each in results if each.alternative.instances == ran.alternative.instances]
    best = max(same, key=lambda each: each.attainment)
    gained = 100 * (best.attainment - ran.attainment)
    if gained > margin:
        lines.append(f"With as many instances, {best.runs.policy} is better by {gained:.1f} points.")
    else:
        lines.append("With as many instances, nothing is clearly better than what ran.")
    return lines
