"""`fulcrum web`: shows a service of a local run or a cluster, or a recording, in the browser until Ctrl-C.

The package `web` reads the service and serves the page. Here the page has no buttons that change the service.
"""

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import uvloop

from fulcrum_cli.option_values import check_port, check_writable
from fulcrum_cli.target.connection import TargetConnection, connect
from fulcrum_cli.target.selection import TargetOptions, choose_target
from fulcrum_cli.terminal.interrupts import on_interrupt
from fulcrum_cli.terminal.logs import log_warnings_to_stderr
from fulcrum_cli.web.broadcast import Broadcast
from fulcrum_cli.web.feed import Feed
from fulcrum_cli.web.recording import read_states, record
from fulcrum_cli.web.replay import Replay
from fulcrum_cli.web.server import serve_page
from fulcrum_cli.web.sources import DECISIONS_READ, ClusterRouter, FeedSource, open_local_source
from fulcrum_core.api.pdservice import PDService


def run(target_options: TargetOptions, service: str | None, *, port: int, record_file: Path | None) -> None:
    """Serve the page of the service, print its address, record it if asked to, and end on Ctrl-C."""
    check_port(port)
    if record_file is not None:
        check_writable("--record", record_file)
    _run_until_interrupted(_serve_target(target_options, service, port, record_file))


def run_replay(file: Path, *, port: int) -> None:
    """Serve a page that replays the file, print its address, and end on Ctrl-C."""
    check_port(port)
    _run_until_interrupted(_serve_replay(Replay(read_states(file), file), file, port))


def _run_until_interrupted(coroutine: Coroutine[Any, Any, None]) -> None:
    log_warnings_to_stderr()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_end_on_interrupt(coroutine))


async def _end_on_interrupt(coroutine: Coroutine[Any, Any, None]) -> None:
    main_task = asyncio.current_task()
    assert main_task is not None
    try:
        with on_interrupt(main_task.cancel):
            await coroutine
    except asyncio.CancelledError:
        print("stopped", flush=True)


async def _serve_target(
    target_options: TargetOptions, name: str | None, port: int, record_file: Path | None
) -> None:
    async with connect(choose_target(target_options), name) as connection:
        service = await connection.only_service(name)
        await _serve(connection, service, port, record_file)


async def _serve_replay(replay: Replay, file: Path, port: int) -> None:
    broadcast = Broadcast()
    async with serve_page(broadcast, port=port, run_action=replay.run_action) as address:
        print(f"replay of {file}: page {address}\nstop with Ctrl-C", flush=True)
        await replay.run(broadcast)


async def _serve(
    connection: TargetConnection, service: PDService, port: int, record_file: Path | None
) -> None:
    name, broadcast = service.metadata.name, Broadcast()
    async with _open_source(connection, name) as source, serve_page(broadcast, port=port) as address:
        feed = Feed(connection.store, service, broadcast, source)
        print(f"{name}: live page {address}\ntarget {connection.description}; stop with Ctrl-C", flush=True)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(feed.run())
            if record_file is not None:
                tasks.create_task(record(broadcast, record_file))


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
