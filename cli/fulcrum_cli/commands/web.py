"""`fulcrum web`: shows a service of a local run or of a cluster in the browser, until Ctrl-C."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import uvloop

from fulcrum_cli.option_values import check_port
from fulcrum_cli.target.connection import TargetConnection, connect
from fulcrum_cli.target.selection import TargetOptions, choose_target
from fulcrum_cli.terminal.interrupts import on_interrupt
from fulcrum_cli.terminal.logs import log_warnings_to_stderr
from fulcrum_cli.web.broadcast import Broadcast
from fulcrum_cli.web.feed import Feed
from fulcrum_cli.web.server import serve_page
from fulcrum_cli.web.sources import DECISIONS_READ, ClusterRouter, FeedSource, open_local_source
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.errors import InvalidInput


def run(target_options: TargetOptions, service: str | None, *, port: int) -> None:
    """Serve the page of the service, print its address, and end on Ctrl-C."""
    check_port(port)
    log_warnings_to_stderr()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve_until_interrupted(target_options, service, port))


async def _serve_until_interrupted(target_options: TargetOptions, name: str | None, port: int) -> None:
    main_task = asyncio.current_task()
    assert main_task is not None
    try:
        with on_interrupt(main_task.cancel):
            async with connect(choose_target(target_options), name) as connection:
                service = await _find_service(connection, name)
                await _serve(connection, service, port)
    except asyncio.CancelledError:
        print("stopped", flush=True)


async def _find_service(connection: TargetConnection, name: str | None) -> PDService:
    services = await connection.services(name)
    if len(services) != 1:
        names = ", ".join(service.metadata.name for service in services) or "none"
        rule = "exist: name one of them" if services else f"exists: {connection.description} has no PDService"
        raise InvalidInput("SERVICE", names, rule)
    return services[0]


async def _serve(connection: TargetConnection, service: PDService, port: int) -> None:
    name, broadcast = service.metadata.name, Broadcast()
    async with _open_source(connection, name) as source, serve_page(broadcast, port=port) as address:
        feed = Feed(connection.store, service, broadcast, source)
        print(f"{name}: live page {address}\ntarget {connection.description}; stop with Ctrl-C", flush=True)
        await feed.run()


@asynccontextmanager
async def _open_source(connection: TargetConnection, service: str) -> AsyncIterator[FeedSource]:
    if connection.objects is None:
        assert connection.local_run is not None
        async with open_local_source(connection.local_run, connection.description) as source:
            yield source
        return
    router = ClusterRouter(connection.objects, service, namespace=connection.namespace)
    yield FeedSource(
        description=connection.description,
        read_metrics=router.read_metrics,
        read_decisions=partial(connection.fetch_decisions, service, limit=DECISIONS_READ),
    )
