"""Parses and checks the options of `fulcrum simulate`, and reads profile and workload, before it runs.

`__main__` parses and the command `simulate` runs; the options of one run are `fulcrum_simulator.fleet`'s.
"""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TypedDict, Unpack

from fulcrum_cli.option_values import check_not_combined, parse_duration_s
from fulcrum_cli.output_files import check_outputs
from fulcrum_cli.trace_summary import describe_trace
from fulcrum_core.errors import InvalidInput
from fulcrum_core.profiles import EngineProfile, is_profile_path, load_profile
from fulcrum_core.validation_rules import shorten_value
from fulcrum_core.values import Slo
from fulcrum_simulator.fleet.load import ComposedLoad, RecordedLoad, leave_out_overlong
from fulcrum_simulator.fleet.options import (
    BEST_STATIC,
    ControlOptions,
    Policy,
    RunOptions,
    list_splits,
    parse_policy,
)
from fulcrum_simulator.workload import COMPOSED, OverlongRequests, load_trace

POLICY_DEFAULT = "balanced"
"""As in `__main__`, which imports this module late."""
INSTANCES_MAX = 1024
SEEDS_MAX = 100


class SimulateArguments(TypedDict):
    """The options, as typed."""

    trace: Path | None
    load: str | None
    instances: int
    profile: str
    policy: str
    compare: str | None
    find_rate: float | None
    check_rates: bool
    scale: float
    speed: float
    slo_ttft: str
    slo_tpot: str
    seed: int
    seeds: int
    state_age: str
    flip_latency: str
    model_error: float
    step_noise: float
    failures: float
    prefix_caches: bool
    json: Path | None
    plot: Path | None
    record: Path | None


@dataclass(frozen=True, slots=True)
class ComparedPolicy:
    """A policy by its name, with the policies of which the best one counts; usually itself only."""

    name: str
    policies: tuple[Policy, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """Options of the command, checked. `run` has the first of the compared policies."""

    run: RunOptions
    compared: tuple[ComparedPolicy, ...]
    load: RecordedLoad | ComposedLoad
    trace_text: str | None
    """Layout, size and rate of the trace, if the load is one."""
    overlong: OverlongRequests | None
    find_rate_share: float | None
    check_rates: bool
    seeds: range
    json: Path | None
    plot: Path | None
    record: Path | None


def parse_options(**arguments: Unpack[SimulateArguments]) -> SimulateOptions:
    """Check the options, and read the profile and the workload.

    Raises:
        InvalidInput: for the first option that breaks a rule.
    """
    _check_numbers(arguments)
    _check_outputs(arguments)
    compared = _parse_compared(arguments)
    profile = load_profile(arguments["profile"])
    load, trace_text, overlong = _parse_load(arguments, profile)
    _check_prefix_caches(arguments, compared, load)
    find_rate = arguments["find_rate"]
    return SimulateOptions(
        run=RunOptions(
            profile=profile,
            instances=arguments["instances"],
            policy=compared[0].policies[0],
            slo=Slo(
                parse_duration_s("--slo-ttft", arguments["slo_ttft"]),
                parse_duration_s("--slo-tpot", arguments["slo_tpot"]),
            ),
            seed=arguments["seed"],
            control=_parse_control(arguments),
            prefix_caches=arguments["prefix_caches"],
        ),
        compared=compared,
        load=load,
        trace_text=trace_text,
        overlong=overlong,
        find_rate_share=None if find_rate is None else find_rate / 100,
        check_rates=arguments["check_rates"],
        seeds=range(arguments["seed"], arguments["seed"] + arguments["seeds"]),
        json=arguments["json"],
        plot=arguments["plot"],
        record=arguments["record"],
    )


def _parse_load(
    arguments: SimulateArguments, profile: EngineProfile
) -> tuple[RecordedLoad | ComposedLoad, str | None, OverlongRequests | None]:
    """Read the trace, or find the composed workload; returns the load, and what to say of a trace."""
    trace, name = arguments["trace"], arguments["load"]
    if trace is None:
        if name is None:
            raise InvalidInput("--trace, --load", "neither is given", "are the workload: pass one of them")
        if name not in COMPOSED:
            raise InvalidInput("--load", name, f"is not one of {', '.join(COMPOSED)}")
        if arguments["speed"] != 1.0:
            raise InvalidInput("--speed", arguments["speed"], "is for traces; --scale changes a rate")
        return ComposedLoad(name, profile, arguments["scale"]), None, None
    check_not_combined("--trace", {"--load": name})
    read = load_trace(trace)
    recorded, overlong = leave_out_overlong(read.requests, profile)
    if not recorded:
        raise InvalidInput("--trace", trace, "has no request that fits the profile's KV cache")
    if arguments["find_rate"] is not None and recorded[0].arrival_s == recorded[-1].arrival_s:
        raise InvalidInput("--trace", trace, "has one time of arrival: no rate can be found")
    load = RecordedLoad(trace.name, recorded, arguments["scale"], arguments["speed"])
    return load, describe_trace(read), overlong


def _check_prefix_caches(
    arguments: SimulateArguments, compared: tuple[ComparedPolicy, ...], load: RecordedLoad | ComposedLoad
) -> None:
    """Reject prefix caches without block ids, and policies that need prefix caches."""
    if not arguments["prefix_caches"]:
        for each in compared:
            if each.policies[0].prefix_aware:
                option = "--policy" if arguments["compare"] is None else "--compare"
                raise InvalidInput(option, each.name, "needs --prefix-caches")
    elif not isinstance(load, RecordedLoad) or not any(r.prefix_hash_ids for r in load.requests):
        raise InvalidInput("--prefix-caches", load.name, "needs a trace with block ids")


def _check_numbers(arguments: SimulateArguments) -> None:
    for option, factor in (("--scale", arguments["scale"]), ("--speed", arguments["speed"])):
        if not 0 < factor <= 1000:
            raise InvalidInput(option, factor, "must be above 0, and at most 1000")
    if not 2 <= arguments["instances"] <= INSTANCES_MAX:
        raise InvalidInput("--instances", arguments["instances"], f"must be between 2 and {INSTANCES_MAX}")
    if arguments["seed"] < 0:
        raise InvalidInput("--seed", arguments["seed"], "must not be negative")
    if not 1 <= arguments["seeds"] <= SEEDS_MAX:
        raise InvalidInput("--seeds", arguments["seeds"], f"must be between 1 and {SEEDS_MAX}")
    for option, share in (
        ("--model-error", arguments["model_error"]),
        ("--step-noise", arguments["step_noise"]),
    ):
        if not 0 <= share < 1:
            raise InvalidInput(option, share, "must be at least 0, and below 1")
    if not 0 <= arguments["failures"] <= 1000:
        raise InvalidInput("--failures", arguments["failures"], "must be between 0 and 1000")
    if arguments["find_rate"] is not None and not 0 < arguments["find_rate"] <= 100:
        raise InvalidInput("--find-rate", arguments["find_rate"], "must be above 0, and at most 100")
    if arguments["check_rates"] and arguments["find_rate"] is None:
        raise InvalidInput("--check-rates", "no --find-rate", "needs a found rate: pass --find-rate")


def _check_outputs(arguments: SimulateArguments) -> None:
    """Reject what could not be written after the runs, which may take long."""
    outputs = {"--json": arguments["json"], "--plot": arguments["plot"], "--record": arguments["record"]}
    profile = arguments["profile"]
    inputs = {"--trace": arguments["trace"], "--profile": Path(profile) if is_profile_path(profile) else None}
    check_outputs(outputs, inputs)
    if arguments["plot"] is not None and find_spec("plotly") is None:
        raise InvalidInput("--plot", arguments["plot"], "needs plotly: pip install 'fulcrum[plot]'")


def _parse_compared(arguments: SimulateArguments) -> tuple[ComparedPolicy, ...]:
    """Parse the policies of --compare, or the one of --policy."""
    text, instances = arguments["compare"], arguments["instances"]
    if text is None:
        return (_parse_compared_policy(arguments["policy"].strip(), instances),)
    if arguments["policy"] != POLICY_DEFAULT:
        check_not_combined("--compare", {"--policy": arguments["policy"]})
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise InvalidInput("--compare", text, "must be names of policies, separated by commas")
    try:
        return tuple(_parse_compared_policy(name, instances) for name in names)
    except InvalidInput as error:
        raise InvalidInput("--compare", str(error.value), error.rule) from error


def _parse_compared_policy(name: str, instances: int) -> ComparedPolicy:
    base, plus, suffixes = name.lower().partition("+")
    if base == BEST_STATIC:
        splits = (f"{split}{plus}{suffixes}" for split in list_splits(instances))
        try:
            policies = tuple(parse_policy(split, instances=instances) for split in splits)
        except InvalidInput as error:
            raise InvalidInput("--policy", shorten_value(name), error.rule) from None
        return ComparedPolicy(BEST_STATIC + plus + suffixes, policies)
    policy = parse_policy(name, instances=instances)
    return ComparedPolicy(str(policy), (policy,))


def _parse_control(arguments: SimulateArguments) -> ControlOptions:
    return ControlOptions(
        state_age_s=parse_duration_s("--state-age", arguments["state_age"]),
        flip_latency_s=parse_duration_s("--flip-latency", arguments["flip_latency"]),
        model_error=arguments["model_error"],
        step_noise=arguments["step_noise"],
        failures_per_hour=arguments["failures"],
    )
