"""`python -m fulcrum_simulator.server`: one engine server, until SIGTERM or until its parent process ends."""

import os

_PARENT_PID = os.getppid()  # read before the slow imports, during which the parent may end

from fulcrum_cluster.process import (  # noqa: E402  (after the parent's pid)
    announce_ready,
    bind_socket,
    die_with_parent,
    exit_if_stopped_while_starting,
    exit_with_error,
)

if __name__ == "__main__":
    exit_if_stopped_while_starting()  # before the slow imports

import asyncio  # noqa: E402
import gc  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import sys  # noqa: E402
import time  # noqa: E402
from collections.abc import Sequence  # noqa: E402

import uvloop  # noqa: E402
from aiohttp import web  # noqa: E402

from fulcrum_core.errors import InvalidInput  # noqa: E402
from fulcrum_simulator.server.app import EngineApp  # noqa: E402
from fulcrum_simulator.server.log import log  # noqa: E402
from fulcrum_simulator.server.options import Options, parse_options  # noqa: E402
from fulcrum_simulator.server.service import EngineService  # noqa: E402
from fulcrum_simulator.server.side_channel_server import SideChannelServer, start_side_channel_server  # noqa: E402

DEATH_GRACE_S = 0.3
"""Time for which a dead engine still responds to /health, with 503."""
KEEP_ALIVE_TIMEOUT_S = 5.0
"""vLLM's limit for idle connections. The router's connection pool must cope with it."""
SHUTDOWN_TIMEOUT_S = 0.5
"""Time that open connections get to finish at shutdown."""


async def serve(
    options: Options, http: socket.socket, side_channel: socket.socket, *, started_s: float
) -> None:
    """Wait for the start-up time, print the ready line, and serve until a signal or until the engine dies."""
    service = EngineService(options)
    service.side_channel_port = side_channel.getsockname()[1]
    stop, died = asyncio.Event(), asyncio.Event()
    service.runner.on_death = died.set
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    if not await _wait_for_startup(options.profile.startup_s - (time.monotonic() - started_s), stop):
        return
    side_channel_server = SideChannelServer(
        service.runner, model=options.model, wait_while_hung=service.wait_while_hung
    )
    listener = await start_side_channel_server(side_channel_server, side_channel)
    runner = web.AppRunner(
        EngineApp(service).build(),
        access_log=None,
        handler_cancellation=True,
        keepalive_timeout=KEEP_ALIVE_TIMEOUT_S,
        shutdown_timeout=SHUTDOWN_TIMEOUT_S,
    )
    await runner.setup()
    await web.SockSite(runner, http, backlog=1024).start()
    announce_ready(port=http.getsockname()[1], side_channel_port=service.side_channel_port)
    gc.collect()
    gc.freeze()  # objects from start-up stay: scanning them would delay steps
    await _wait_for_end(service, stop, died)
    listener.close()
    await runner.cleanup()
    await service.puller.close()


async def _wait_for_startup(seconds: float, stop: asyncio.Event) -> bool:
    """Wait as long as a real engine loads its model; False if a signal arrived meanwhile."""
    try:
        async with asyncio.timeout(max(0.0, seconds)):
            await stop.wait()
    except TimeoutError:
        return True
    return False


async def _wait_for_end(service: EngineService, stop: asyncio.Event, died: asyncio.Event) -> None:
    waits = [asyncio.ensure_future(stop.wait()), asyncio.ensure_future(died.wait())]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()
    if died.is_set():
        log("error", "engine died", at_s=time.time(), instance=service.options.name)
        await asyncio.sleep(DEATH_GRACE_S)
        return
    if not await service.drain(service.options.shutdown_timeout_s):
        fields = {"instance": service.options.name, "requests": service.runner.live_requests}
        log("warning", "drain timed out", at_s=time.time(), **fields)
        await service.wait_for_clients()


def main(arguments: Sequence[str]) -> None:
    """Run one engine server. Invalid arguments print one line on stderr and exit with code 2."""
    started_s = time.monotonic()
    die_with_parent(parent_pid=_PARENT_PID, end_signal=signal.SIGKILL)
    try:
        options = parse_options(arguments)
        http = bind_socket(options.host, options.port, option="--port")
        side_channel = bind_socket(options.host, options.side_channel_port, option="--side-channel-port")
    except InvalidInput as error:
        exit_with_error(error)
    uvloop.run(serve(options, http, side_channel, started_s=started_s))


if __name__ == "__main__":
    main(sys.argv[1:])
