"""What a run is asked for, checked before anything starts."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypedDict, Unpack

from fulcrum_cli.commands.manifests import built_in, read_manifest
from fulcrum_cli.local.manifest import check_manifest
from fulcrum_cli.play.loads import SHAPES
from fulcrum_cli.terminal.arguments import check_port, duration_s, one_of
from fulcrum_core.api.meta import Resource
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.errors import InvalidInput
from fulcrum_core.values import AutoscalingMode
from fulcrum_simulator.workload import WorkloadRequest, jitter, load_trace, replay_faster, scale_rate

DEFAULT_SHAPE = "moving"


class Given(TypedDict):
    """The options as typed."""

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
    json: Path | None
    kill_every: str | None
    flips: int
    snapshot: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayOptions:
    """A run. `recording` takes the place of the shape `load`; None of `ends_s`: until somebody quits."""

    objects: tuple[Resource, ...]
    service: PDService
    load: str
    recording: tuple[WorkloadRequest, ...] | None
    recording_name: str
    ends_s: float | None
    seed: int
    port: int
    headless: bool
    json: Path | None
    kill_every_s: float | None
    flips: int
    snapshot: Path | None


def parse_options(**given: Unpack[Given]) -> PlayOptions:
    """The run that was asked for, its manifest and its recording read.

    Raises:
        InvalidInput: for the first rule that is broken.
    """
    _check_numbers(given)
    objects = read_manifest(given["file"] or built_in("replay" if given["trace"] else "play"))
    service = _with_mode(check_manifest(objects), given["mode"])
    return PlayOptions(
        objects=tuple(service if isinstance(obj, PDService) else obj for obj in objects),
        service=service,
        load=given["load"] or DEFAULT_SHAPE,
        recording=_recording(given),
        recording_name=given["trace"].name if given["trace"] else "",
        ends_s=duration_s("--for", given["duration"]),
        seed=given["seed"],
        port=given["port"],
        headless=given["headless"],
        json=given["json"],
        kill_every_s=duration_s("--kill-every", given["kill_every"]),
        flips=given["flips"],
        snapshot=given["snapshot"],
    )


def _check_numbers(given: Given) -> None:
    load = given["load"]
    if load is not None and load not in SHAPES:
        raise InvalidInput("--load", load, f"is not one of {', '.join(SHAPES)}")
    if load is not None and given["trace"] is not None:
        raise InvalidInput("--load", load, "is for generated loads: a recording (--trace) has its own shape")
    for option, value in (("--speed", given["speed"]), ("--scale", given["scale"])):
        if not 0 < value < float("inf"):
            raise InvalidInput(option, value, "must be a number above 0")
    for option, count in (("--flips", given["flips"]), ("--seed", given["seed"])):
        if count < 0:
            raise InvalidInput(option, count, "must not be negative")
    check_port(given["port"])
    if given["trace"] is None and (given["speed"], given["scale"]) != (1.0, 1.0):
        raise InvalidInput("--speed, --scale", "no --trace", "change a recording: give one with --trace")
    for option, file in (("--json", given["json"]), ("--snapshot", given["snapshot"])):
        if file is not None:
            _check_writable(option, file)


def _check_writable(option: str, file: Path) -> None:
    """Before the run, as its figures would be lost after it."""
    if file.is_dir():
        raise InvalidInput(option, file, "must be a file, not a folder")
    if not file.absolute().parent.is_dir():
        raise InvalidInput(option, file, "must lie in a folder that exists")
    if not os.access(file if file.exists() else file.absolute().parent, os.W_OK):
        raise InvalidInput(option, file, "must be a file that may be written")


def _with_mode(service: PDService, mode: str | None) -> PDService:
    if mode is None:
        return service
    chosen = one_of("--mode", mode, AutoscalingMode)
    autoscaling = service.spec.autoscaling.model_copy(update={"mode": chosen})
    return service.replace(spec=service.spec.model_copy(update={"autoscaling": autoscaling}))


def _recording(given: Given) -> tuple[WorkloadRequest, ...] | None:
    if given["trace"] is None:
        return None
    scaled = scale_rate(load_trace(given["trace"]), given["scale"], seed=given["seed"])
    return tuple(replay_faster(jitter(scaled, seed=given["seed"]), given["speed"]))
