"""`fulcrum up --local`: a service as processes of this machine, until somebody ends it."""

import asyncio
from pathlib import Path

import uvloop

from fulcrum_cli.commands.manifests import built_in, read_manifest
from fulcrum_cli.local import LocalOptions, run_local
from fulcrum_cli.local.vllm_cpu import LocalEngine, on_vllm_cpu
from fulcrum_cli.terminal.arguments import check_port, one_of
from fulcrum_cli.terminal.interrupts import on_interrupt
from fulcrum_cli.terminal.logs import log_warnings
from fulcrum_core.api.meta import Resource
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.errors import InvalidInput
from fulcrum_core.spelling import format_count


def run(file: Path | None, *, engine: str | None, port: int) -> None:
    """Brings the manifest's service up, says where it is, and ends everything on Ctrl-C.

    Without a manifest it is the example that comes along for the engine.
    """
    check_port(port)
    objects = _asked(file, None if engine is None else one_of("--engine", engine, LocalEngine))
    log_warnings()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_up(objects, port))


def _asked(file: Path | None, engine: LocalEngine | None) -> tuple[Resource, ...]:
    if file is None and engine is None:
        raise InvalidInput("--file", "not given", "is needed where no --engine is named")
    objects = read_manifest(file or built_in(str(engine)))
    return objects if engine is None else tuple(on_vllm_cpu(obj) for obj in objects)


def _tell_begin(service: PDService) -> None:
    """What somebody reads who waits for router and autoscaler, which take seconds."""
    engines = format_count(sum(pool.instances.min for pool in service.spec.resolved_pools()), "engine")
    kind = service.spec.engine.type
    print(f"{service.metadata.name}: starting {engines} ({kind}), a router and an autoscaler", flush=True)


async def _up(objects: tuple[Resource, ...], port: int) -> None:
    me = asyncio.current_task()
    assert me is not None
    try:
        with on_interrupt(me.cancel):
            async with run_local(objects, LocalOptions(port=port), on_begin=_tell_begin) as service:
                info = service.info
                print(
                    f"{info.service}: endpoint {info.router_url}, waiting for the engines, "
                    f"which need {service.startup_s:g} s to start",
                    flush=True,
                )
                instances = await service.serving()
                serve = format_count(len(instances), "instance serves", "instances serve")
                print(f"{info.service}: {serve}; Ctrl-C ends the run", flush=True)
                await asyncio.Event().wait()
    except asyncio.CancelledError:
        print("ended", flush=True)
