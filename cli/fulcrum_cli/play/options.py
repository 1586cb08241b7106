"""Parses and checks the options of `fulcrum play` before anything starts.

`__main__` and the command `play` call it; it reads the manifest and the trace, and opens nothing else.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, Unpack

from fulcrum_cli.local.local_engine import simulate_unless_named
from fulcrum_cli.local.preflight import check_manifest
from fulcrum_cli.manifest_files import find_shipped_manifest, read_manifest
from fulcrum_cli.option_values import check_port, parse_choice, parse_duration_s
from fulcrum_cli.output_files import check_outputs
from fulcrum_cli.play.loads import LOAD_SHAPES, TIERS, TIERS_FLOOD, list_shapes
from fulcrum_core.api.meta import Resource
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.errors import InvalidInput
from fulcrum_core.values import AutoscalingMode
from fulcrum_simulator.workload import (
    WorkloadRequest,
    jitter_arrivals,
    load_trace,
    scale_rate,
    speed_up_arrivals,
)

DEFAULT_SHAPE = "moving"


class PlayArguments(TypedDict):
    """The options, as typed."""

    load: str | None
    trace: Path | None
    speed: float
    scale: float
    mode: str | None
    duration: str | None
    seed: int
    port: int
    file: Path | None
    headless: bool
    web: bool
    record: Path | None
    json: Path | None
    kill_every: str | None
    flips: int
    snapshot: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayOptions:
    """Options of a run, checked. `trace_requests` replace the shape `load`.

    Without `duration_s` a generated load lasts until the user quits.
    """

    objects: tuple[Resource, ...]
    service: PDService
    load: str
    trace_requests: tuple[WorkloadRequest, ...] | None
    trace_name: str
    duration_s: float | None
    seed: int
    port: int
    headless: bool
    web: bool
    """Serve the live page, instead of the view on the terminal."""
    record: Path | None
    json: Path | None
    kill_every_s: float | None
    flips: int
    snapshot: Path | None


def parse_options(**arguments: Unpack[PlayArguments]) -> PlayOptions:
    """Check the options, and read the manifest (without one, a shipped one) and the trace.

    Engines whose type the manifest does not name become simulated ones. `--mode` replaces the service's mode
    of autoscaling; `--scale`, `--speed` and `--seed` change the arrivals of the trace.

    Raises:
        InvalidInput: for the first option that breaks a rule.
    """
    _check_numbers(arguments)
    file = arguments["file"] or find_shipped_manifest(_choose_manifest(arguments))
    objects = tuple(simulate_unless_named(obj) for obj in read_manifest(file))
    service = _with_mode(check_manifest(objects), arguments["mode"])
    load = arguments["load"] or DEFAULT_SHAPE
    if load not in list_shapes(service.spec.qos_tiers):
        raise InvalidInput("--load", load, "needs a service with the QoS tiers premium, standard and free")
    return PlayOptions(
        objects=tuple(service if isinstance(obj, PDService) else obj for obj in objects),
        service=service,
        load=load,
        trace_requests=_load_trace(arguments),
        trace_name=arguments["trace"].name if arguments["trace"] else "",
        duration_s=parse_duration_s("--for", arguments["duration"]),
        seed=arguments["seed"],
        port=arguments["port"],
        headless=arguments["headless"],
        web=arguments["web"],
        record=arguments["record"],
        json=arguments["json"],
        kill_every_s=parse_duration_s("--kill-every", arguments["kill_every"]),
        flips=arguments["flips"],
        snapshot=arguments["snapshot"],
    )


def _check_numbers(arguments: PlayArguments) -> None:
    load = arguments["load"]
    if load is not None and load not in LOAD_SHAPES:
        raise InvalidInput("--load", load, f"is not one of {', '.join(LOAD_SHAPES)}")
    if load is not None and arguments["trace"] is not None:
        raise InvalidInput("--load", load, "cannot be combined with --trace: a trace has its own shape")
    for option, value in (("--speed", arguments["speed"]), ("--scale", arguments["scale"])):
        if not 0 < value < float("inf"):
            raise InvalidInput(option, value, "must be a number above 0")
    for option, count in (("--flips", arguments["flips"]), ("--seed", arguments["seed"])):
        if count < 0:
            raise InvalidInput(option, count, "must not be negative")
    check_port(arguments["port"])
    if arguments["trace"] is None and (arguments["speed"], arguments["scale"]) != (1.0, 1.0):
        raise InvalidInput("--speed, --scale", "no --trace", "need a trace: pass one with --trace")
    inputs = {"--trace": arguments["trace"], "--file": arguments["file"]}
    outputs = {
        "--json": arguments["json"],
        "--snapshot": arguments["snapshot"],
        "--record": arguments["record"],
    }
    check_outputs(outputs, inputs)


def _choose_manifest(arguments: PlayArguments) -> str:
    if arguments["trace"]:
        return "replay"
    return "play-tiers" if arguments["load"] in (TIERS, TIERS_FLOOD) else "play"


def _with_mode(service: PDService, mode: str | None) -> PDService:
    if mode is None:
        return service
    chosen = parse_choice("--mode", mode, AutoscalingMode)
    autoscaling = service.spec.autoscaling.model_copy(update={"mode": chosen})
    return service.replace(spec=service.spec.model_copy(update={"autoscaling": autoscaling}))


def _load_trace(arguments: PlayArguments) -> tuple[WorkloadRequest, ...] | None:
    if arguments["trace"] is None:
        return None
    scaled = scale_rate(load_trace(arguments["trace"]).requests, arguments["scale"], seed=arguments["seed"])
    return tuple(speed_up_arrivals(jitter_arrivals(scaled, seed=arguments["seed"]), arguments["speed"]))
