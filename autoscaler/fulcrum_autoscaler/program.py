"""The autoscaler process, for one service or for all services of a cluster.

Starts the supervisor and the HTTP server, and stops both on SIGTERM or SIGINT. The decisions are made in
`loop`. `__main__` calls `main`.
"""

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from typing import Any

import httpx
import uvloop
from aiohttp import web

from fulcrum_autoscaler.decision_history import DecisionHistories
from fulcrum_autoscaler.loop import RouterClient
from fulcrum_autoscaler.metrics import AutoscalerMetrics
from fulcrum_autoscaler.options import IN_CLUSTER_ROUTER_STATE_URL, Options, parse_options
from fulcrum_autoscaler.published_router import PublishedRouter
from fulcrum_autoscaler.server import make_app
from fulcrum_autoscaler.supervisor import AutoscalerSupervisor
from fulcrum_cluster.client import open_store
from fulcrum_cluster.clock import SystemClock
from fulcrum_cluster.logs import configure_logging
from fulcrum_cluster.process import announce_ready, bind_socket, die_with_parent, exit_with_error
from fulcrum_cluster.router_client import HttpRouterClient, open_http_client_for_all, with_tls
from fulcrum_cluster.tracing import open_root_spans
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.errors import InvalidInput


def main(argv: Sequence[str] | None = None) -> None:
    """Run until SIGTERM or SIGINT. Invalid arguments print one line on stderr and exit with code 2."""
    die_with_parent()
    try:
        options = parse_options(argv)
        configure_logging(level=options.log_level)
        uvloop.run(_serve(options))
    except (InvalidInput, OSError) as error:
        exit_with_error(error)


async def _serve(options: Options) -> None:
    stopped = asyncio.Event()
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stopped.set)
    histories = DecisionHistories()
    async with (
        open_root_spans("fulcrum-autoscaler") as spans,
        open_store(options.store, program="fulcrum-autoscaler") as store,
        open_http_client_for_all(options.token_file, ca_file=options.state_ca) as client,
    ):
        metrics = AutoscalerMetrics(spans)
        supervisor = AutoscalerSupervisor(
            store,
            namespace=options.namespace,
            only_service=options.service,
            router_client_for=partial(_make_router_client, options, client),
            clock=SystemClock(),
            histories=histories,
            metrics=metrics,
        )
        app = make_app(histories, metrics.registry, lambda: supervisor.ready)
        async with _serve_http(app, options.host, options.port) as port:
            announce_ready(port=port)
            await _run_until(stopped, supervisor.run())


def _make_router_client(
    options: Options,
    client: httpx.AsyncClient,
    namespace: str,
    service: str,
    read_service: Callable[[], PDService | None],
) -> RouterClient:
    """The client of a service's router. With `--router-state` that is one given URL."""
    url = options.router_url(namespace, service)
    plain = HttpRouterClient(client, url)
    if options.router_state != IN_CLUSTER_ROUTER_STATE_URL:
        return plain
    return PublishedRouter(plain, HttpRouterClient(client, with_tls(url)), read_service)


async def _run_until(stopped: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` until `stopped` is set. An exception of `work` before that is raised."""
    async with asyncio.TaskGroup() as group:
        task = group.create_task(work)
        await stopped.wait()
        task.cancel()


@contextlib.asynccontextmanager
async def _serve_http(app: web.Application, host: str, port: int) -> AsyncIterator[int]:
    """Serve `app`; yields the port that it is bound to."""
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.2)
    await runner.setup()
    try:
        site = web.SockSite(runner, bind_socket(host, port, option="--port"))
        await site.start()
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()
