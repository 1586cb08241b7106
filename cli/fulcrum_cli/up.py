"""`fulcrum up --local`: a service as processes of this machine, until somebody ends it."""

import asyncio
from pathlib import Path

import uvloop

from fulcrum_cli.interrupts import on_interrupt
from fulcrum_cli.logs import log_warnings
from fulcrum_cli.manifests import read_manifest
from fulcrum_core.api.meta import Resource
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.errors import InvalidInput
from fulcrum_core.profiles import load_profile
from fulcrum_operator.local import LocalOptions, run_local


def run(file: Path, *, port: int) -> None:
    """Brings the manifest's service up, says where it is, and ends everything on Ctrl-C."""
    if not 0 <= port <= 65535:
        raise InvalidInput("--port", port, "must be between 0 and 65535")
    log_warnings()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_up(read_manifest(file), port))


def _startup_s(objects: tuple[Resource, ...]) -> float:
    """How long an engine of the service takes from its start to serving."""
    service = next(obj for obj in objects if isinstance(obj, PDService))
    return load_profile(service.spec.engine.profile).startup_s


async def _up(objects: tuple[Resource, ...], port: int) -> None:
    me = asyncio.current_task()
    assert me is not None
    try:
        with on_interrupt(me.cancel):
            async with run_local(objects, LocalOptions(port=port)) as service:
                info = service.info
                print(
                    f"{info.service}: endpoint {info.router_url}, waiting for the engines, "
                    f"which need {_startup_s(objects):g} s to start",
                    flush=True,
                )
                instances = await service.serving()
                print(f"{info.service}: {len(instances)} instances serve; Ctrl-C ends them", flush=True)
                await asyncio.Event().wait()
    except asyncio.CancelledError:
        print("ended", flush=True)
