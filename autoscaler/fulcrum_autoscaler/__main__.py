"""`python -m fulcrum_autoscaler`: the fast loop of one service, until SIGTERM."""

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import Any, NoReturn

import structlog
import uvloop
from aiohttp import web

from fulcrum_autoscaler.desired import WatchedService
from fulcrum_autoscaler.journal import Journal
from fulcrum_autoscaler.loop import Autoscaler
from fulcrum_autoscaler.meters import Meters
from fulcrum_autoscaler.routers import HttpRouter, open_router
from fulcrum_autoscaler.server import make_app
from fulcrum_cluster.client import open_store
from fulcrum_cluster.clock import SystemClock
from fulcrum_cluster.process import announce_ready, die_with_parent, exit_with_error
from fulcrum_core.errors import InvalidInput


def main(argv: Sequence[str] | None = None) -> None:
    """Run until SIGTERM or SIGINT; bad arguments end it with one line and exit code 2."""
    die_with_parent()
    args = _parser().parse_args(argv)
    if not 0 <= args.port <= 65535:  # uvloop would bind what is left of it in 16 bits
        exit_with_error(InvalidInput("--port", args.port, "is not between 0 and 65535"))
    structlog.configure(
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
        wrapper_class=structlog.make_filtering_bound_logger(logging.INFO),
    )
    try:
        uvloop.run(_serve(args))
    except (InvalidInput, OSError) as error:
        exit_with_error(error)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:  # argparse's own prints its usage, too
        exit_with_error(message)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="fulcrum_autoscaler", description="Decides who plays which role in one service.")
    parser.add_argument("--service", required=True, help="name of the PDService")
    parser.add_argument("--namespace", default="default", help="its namespace")
    parser.add_argument("--store", required=True, help="where the objects are: unix:PATH")
    parser.add_argument("--router-state", required=True, help="URL of the router's state port")
    parser.add_argument("--token-file", required=True, type=Path, help="file with the state port's token")
    parser.add_argument("--host", default="127.0.0.1", help="address to serve /decisions and /metrics on")
    parser.add_argument("--port", default=0, type=int, help="port for them; 0: any free one")
    return parser


async def _serve(args: argparse.Namespace) -> None:
    stopped = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stopped.set)
    token = args.token_file.read_text().strip()
    journal, meters = Journal(), Meters()
    async with (
        open_store(args.store) as store,
        open_router(args.router_state, token=token) as client,
        _listening(make_app(journal, meters.registry), args.host, args.port) as port,
    ):
        desired = WatchedService(store, service=args.service, namespace=args.namespace)
        autoscaler = Autoscaler(
            desired=desired,
            store=store,
            router=HttpRouter(client),
            clock=SystemClock(),
            journal=journal,
            meters=meters,
        )
        announce_ready(port=port)
        await _until(stopped, desired.run(), autoscaler.run())


async def _until(stopped: asyncio.Event, *forever: Coroutine[Any, Any, None]) -> None:
    """Run these until `stopped`; what fails before that is raised."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run) for run in forever]
        await stopped.wait()
        for task in tasks:
            task.cancel()


@contextlib.asynccontextmanager
async def _listening(app: web.Application, host: str, port: int) -> AsyncIterator[int]:
    """Serve `app`, and give the port it is bound to."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


if __name__ == "__main__":
    main()
