"""`fulcrum up --local`: runs a service as processes on this machine until Ctrl-C.

`local.run` starts and ends them. No load is sent: that is `fulcrum play`.
"""

import asyncio
from pathlib import Path

import uvloop

from fulcrum_cli.local.local_engine import LocalEngine, replace_engine
from fulcrum_cli.local.run import LocalRunOptions, run_local
from fulcrum_cli.manifest_files import find_shipped_manifest, read_manifest
from fulcrum_cli.option_values import check_port, parse_choice
from fulcrum_cli.terminal.interrupts import on_interrupt
from fulcrum_cli.terminal.logs import log_warnings_to_stderr
from fulcrum_core.api.meta import Resource
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.errors import InvalidInput
from fulcrum_core.formatting import format_count


def run(file: Path | None, *, engine: str | None, port: int, api_keys: Path | None = None) -> None:
    """Start the manifest's service, print its endpoint, and stop everything on Ctrl-C.

    Without a manifest, `engine` must be vllm-cpu, whose shipped manifest is started then.
    """
    check_port(port)
    objects = _read_objects(file, None if engine is None else parse_choice("--engine", engine, LocalEngine))
    log_warnings_to_stderr()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run_until_interrupted(objects, LocalRunOptions(port=port, api_keys=api_keys)))


def _read_objects(file: Path | None, engine: LocalEngine | None) -> tuple[Resource, ...]:
    if file is None and engine is not LocalEngine.VLLM_CPU:
        raise InvalidInput("--file", "not given", "is required without --engine vllm-cpu")
    objects = read_manifest(file or find_shipped_manifest(str(engine)))
    return objects if engine is None else tuple(replace_engine(obj, engine) for obj in objects)


def _print_start(service: PDService) -> None:
    """Print what is starting: router and autoscaler take seconds."""
    engines = format_count(sum(pool.instances.min for pool in service.spec.resolve_pools()), "engine")
    kind = service.spec.engine.type
    print(f"{service.metadata.name}: starting {engines} ({kind}), a router and an autoscaler", flush=True)
    if service.spec.engine.is_simulated:
        print(
            f"{service.metadata.name}: simulated engines make up their text; "
            "--engine vllm-cpu runs real ones",
            flush=True,
        )


async def _run_until_interrupted(objects: tuple[Resource, ...], options: LocalRunOptions) -> None:
    main_task = asyncio.current_task()
    assert main_task is not None
    try:
        with on_interrupt(main_task.cancel):
            async with run_local(objects, options, on_start=_print_start) as service:
                info = service.info
                print(
                    f"{info.service}: endpoint {info.router_url}, waiting for the engines, "
                    f"which take {service.startup_s:g} s to start",
                    flush=True,
                )
                instances = await service.wait_serving()
                serving = format_count(len(instances), "instance serves", "instances serve")
                print(f"{info.service}: {serving}; stop with Ctrl-C", flush=True)
                await asyncio.Event().wait()
    except asyncio.CancelledError:
        print("stopped", flush=True)
