"""Start and stop a router: open its ports and run its background tasks.

`__main__` calls `serve`. What a request goes through is in `data_path`; what the parts share is in `router`.
"""

import asyncio
import contextlib
import functools
import gc
import os
import random
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

from fulcrum_cluster.client import ClusterClient, open_cluster
from fulcrum_cluster.clock import SystemClock
from fulcrum_cluster.process import bind_socket
from fulcrum_cluster.tracing import open_otlp_sender, read_trace_settings
from fulcrum_core.api.qostier import SloSpec
from fulcrum_core.api.router import TimeoutsSpec
from fulcrum_core.errors import InvalidInput
from fulcrum_router.access.api_keys import ApiKeys
from fulcrum_router.control.auth import Authenticator, ServiceAccountAuthenticator, SharedTokenAuthenticator
from fulcrum_router.control.background_task import background_task
from fulcrum_router.control.failover import Failover, RouterEndpoint
from fulcrum_router.control.limited_port import serve_at_port
from fulcrum_router.control.metrics import build_registry
from fulcrum_router.control.metrics_port import make_metrics_app
from fulcrum_router.control.requests_page import RequestsPage
from fulcrum_router.control.state_port import make_app
from fulcrum_router.data_path import exchange
from fulcrum_router.data_path.downstream import ClientServer
from fulcrum_router.data_path.tls import TlsFiles, make_tls_context, reload_certificate
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.http1.limits import raise_file_limit, read_process_bytes
from fulcrum_router.http1.tls_handshakes import TlsAcceptor
from fulcrum_router.kv_transfer.canaries import CanaryScheduler
from fulcrum_router.observe.engines import EngineProber
from fulcrum_router.observe.objects import StoreWatcher
from fulcrum_router.options import RouterOptions
from fulcrum_router.policy.intervals import SWEEP_INTERVAL_S
from fulcrum_router.router import Router
from fulcrum_router.settings import DEFAULT_TIER, ServiceSettings, Tier, Timeouts
from fulcrum_router.tracing.request_trace import RequestTracer

BACKLOG = 4_096
"""Connections that wait to be accepted."""
GC_THRESHOLDS = (5_000, 3, 3_300)
"""Objects made and not freed after which the youngest are collected, then collections after which the next
generation is: a collection, for which all clients wait, looks at 20,000 objects at most, which takes 14 ms on
a slow core. Requests leave no cycles: what they made is freed when they end, so collections are rare. All
objects are looked at after fifty million more: with 10,000 streams that takes 0.2 s, for which all wait.
"""
SYNC_TIMEOUT_S = 5.0
"""Seconds that a router in a cluster waits for its first sync before it opens the clients' port anyway."""
SHUTDOWN_GRACE_S = 0.7
"""Seconds that requests in flight get to finish when a router without successor shuts down."""


def is_compiled() -> bool:
    """Whether the data path is compiled; without the compiled files the same sources run as Python."""
    return not exchange.__file__.endswith(".py")


class RouterServer:
    """The clients' port of one router, its regular checks (time-outs, waiting room, memory), and its probes.

    Args:
        router: State that requests use.
        sweep_s: Seconds between two checks of the time-outs.
        grace_s: Seconds that requests in flight get to finish when `listening` ends.
    """

    def __init__(
        self, router: Router, *, sweep_s: float = SWEEP_INTERVAL_S, grace_s: float = SHUTDOWN_GRACE_S
    ) -> None:
        self.router, self.grace_s = router, grace_s
        self._sweep_s = sweep_s
        self.clients = ClientServer(router)

    async def _check_deadlines(self) -> None:
        """Let requests leave the waiting room, end what exceeds a time-out, check the memory; until
        cancelled."""
        while True:
            await asyncio.sleep(self._sweep_s)
            now_s = time.monotonic()
            self.router.tick(now_s)
            self.router.fleet.enforce_timeouts(now_s)
            self.clients.enforce_timeouts(now_s)
            self.router.request_memory.check(read_process_bytes())

    @contextlib.asynccontextmanager
    async def listening(
        self, bound: socket.socket, *, tls: ssl.SSLContext | None = None
    ) -> AsyncIterator[None]:
        """Serve clients on a bound socket inside the block; at its end, requests in flight get `grace_s`."""
        router = self.router
        prober = EngineProber(router.fleet, on_ejection=router.record_ejection, on_death=router.record_death)
        async with (
            _keep_running(self.router, "time-outs", self._check_deadlines),
            _keep_running(self.router, "probes", prober.run),
        ):
            try:
                async with self._accepting(bound, tls):
                    yield
            finally:
                await self._drain()
                self.router.fleet.keep_only(())

    @contextlib.asynccontextmanager
    async def _accepting(self, bound: socket.socket, tls: ssl.SSLContext | None) -> AsyncIterator[None]:
        """Accept connections inside the block."""
        close: Callable[[], None]
        accepting: AbstractAsyncContextManager[object]
        if tls is None:
            server = await asyncio.get_running_loop().create_server(self.clients, sock=bound, backlog=BACKLOG)
            close, accepting = server.close, contextlib.AsyncExitStack()
        else:
            bound.setblocking(False)
            bound.listen(BACKLOG)
            run = functools.partial(
                TlsAcceptor(tls, self.clients, failures=self.router.counters.failed_handshakes).run, bound
            )
            close, accepting = bound.close, _keep_running(self.router, "handshakes", run)
        async with accepting:
            try:
                yield
            finally:
                self.router.stopping = True
        close()

    async def _drain(self) -> None:
        self.clients.close()
        deadline_s = time.monotonic() + self.grace_s
        while self.clients.connections and time.monotonic() < deadline_s:
            await asyncio.sleep(0.02)
        for connection in list(self.clients.connections):
            connection.abort()


async def serve(options: RouterOptions, stopped: asyncio.Event, *, announce: Callable[..., None]) -> None:
    """Run one router until `stopped` is set.

    With a Lease it takes part in the election once it has read the store; when it is stopped it waits for a
    successor and gives the requests in flight the service's drain time-out. Without one it serves from the
    start, until `SHUTDOWN_GRACE_S` after the end.

    Args:
        options: Options of the router.
        stopped: Event that starts the shutdown.
        announce: Called with the ports once they accept connections.

    Raises:
        InvalidInput: if a port cannot be bound or the store's address is wrong.
    """
    clients, state = bind_socket(options.host, options.port, option="--port"), None
    if options.has_state_port:
        state = bind_socket(options.host, options.state_port, option="--state-port")
    metrics = bind_socket(options.host, options.metrics_port, option="--metrics-port")
    tls = None if options.tls is None else make_tls_context(options.tls)
    state_tls = None if options.state_tls is None else make_tls_context(options.state_tls)
    raise_file_limit()
    api_keys = ApiKeys(options.api_keys)
    router, ports = Router(api_keys=api_keys), {"port": _port(clients)}
    async with contextlib.AsyncExitStack() as stack:
        cluster = watcher = None
        await _keep_certificate_fresh(stack, router, tls, options.tls)
        await _keep_certificate_fresh(stack, router, state_tls, options.state_tls)
        if options.api_keys is not None:
            _read_api_keys(api_keys, options.api_keys)
            await stack.enter_async_context(_keep_running(router, "API keys", api_keys.keep_fresh))
        if options.store is not None:
            cluster = await stack.enter_async_context(open_cluster(options.store, program="fulcrum-router"))
            watcher = await _watch_store(stack, router, cluster, options)
        else:
            configure_statically(router, options)
        if state is not None:
            await _open_state_port(stack, router, cluster, options, state, state_tls)
            ports["state_port"] = _port(state)
        app = make_metrics_app(build_registry(router), RequestsPage(router))
        await stack.enter_async_context(serve_at_port(app, metrics))
        ports["metrics_port"] = _port(metrics)
        await _open_tracer(stack, router, options)
        if watcher is not None and options.lease is not None:
            await _wait_until_synced(watcher)
        server = RouterServer(router)
        await stack.enter_async_context(server.listening(clients, tls=tls))
        if cluster is not None:
            canaries = CanaryScheduler(router, rng=random.Random())
            await stack.enter_async_context(_keep_running(router, "canaries", canaries.run))
        announce(**ports)
        _limit_garbage_collection()
        if cluster is None or watcher is None or options.lease is None:
            await stopped.wait()
        else:
            failover = _make_failover(
                router, cluster, options, port=ports["port"], state_port=ports["state_port"]
            )
            await _run_election(router, failover, watcher, stopped)
            server.grace_s = router.settings.drain_timeout_s if router.settings else SHUTDOWN_GRACE_S


async def _keep_certificate_fresh(
    stack: contextlib.AsyncExitStack, router: Router, context: ssl.SSLContext | None, files: TlsFiles | None
) -> None:
    """Read the certificate of a port again when its files change, until the stack is closed."""
    if context is not None and files is not None:
        reload = functools.partial(reload_certificate, context, files)
        await stack.enter_async_context(_keep_running(router, "certificate", reload))


def _read_api_keys(api_keys: ApiKeys, folder: Path) -> None:
    """Read the keys before the first request."""
    try:
        api_keys.read()
    except OSError as error:
        raise InvalidInput("--api-keys", folder, f"cannot be read: {error.strerror}") from error


def _keep_running(
    router: Router, name: str, run: Callable[[], Coroutine[Any, Any, None]]
) -> AbstractAsyncContextManager[None]:
    return background_task(run, name=name, failures=router.counters.task_failures)


async def _open_tracer(stack: contextlib.AsyncExitStack, router: Router, options: RouterOptions) -> None:
    """Trace requests if the environment names a receiver of spans, until the stack is closed."""
    settings = read_trace_settings(os.environ)
    instance = options.identity or options.service
    sender = await stack.enter_async_context(open_otlp_sender("fulcrum-router", settings, instance=instance))
    if sender is not None and settings is not None:
        router.tracer = RequestTracer(sender, ratio=settings.ratio, rng=random.Random())


async def _watch_store(
    stack: contextlib.AsyncExitStack, router: Router, cluster: ClusterClient, options: RouterOptions
) -> StoreWatcher:
    """Start to watch the store, until the stack is closed."""
    watcher = StoreWatcher(
        router,
        cluster.store,
        service=options.service,
        namespace=options.namespace,
        objects=None if options.lease is None else cluster.objects,
    )
    await stack.enter_async_context(_keep_running(router, "objects", watcher.run))
    return watcher


async def _wait_until_synced(watcher: StoreWatcher) -> None:
    """Wait for the first sync: traffic may still be directed to a router that has just restarted, and a delay
    is better than a 503."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SYNC_TIMEOUT_S):
            await watcher.wait_until_synced()


async def _open_state_port(
    stack: contextlib.AsyncExitStack,
    router: Router,
    cluster: ClusterClient | None,
    options: RouterOptions,
    bound: socket.socket,
    tls: ssl.SSLContext | None,
) -> None:
    authenticator = _make_authenticator(options, cluster)
    if isinstance(authenticator, ServiceAccountAuthenticator):
        await stack.enter_async_context(_keep_running(router, "keys", authenticator.keep_keys_fresh))
    await stack.enter_async_context(serve_at_port(make_app(router, authenticator), bound, tls=tls))


def _limit_garbage_collection() -> None:
    """Make collections short, and long ones rare, since each one delays all requests."""
    gc.collect()
    gc.freeze()  # the objects of the start-up stay until the end: never scan them again
    gc.set_threshold(*GC_THRESHOLDS)


def _make_authenticator(options: RouterOptions, cluster: ClusterClient | None) -> Authenticator:
    if options.token is not None or cluster is None:
        return SharedTokenAuthenticator(options.token or "")
    return ServiceAccountAuthenticator(cluster.objects.get_raw, options.state_callers, clock=SystemClock())


def _make_failover(
    router: Router, cluster: ClusterClient, options: RouterOptions, *, port: int, state_port: int
) -> Failover:
    endpoint = RouterEndpoint(
        lease_name=options.lease or "",
        namespace=options.namespace,
        identity=options.identity,
        address=options.advertise_address,
        port=port,
        state_port=state_port,
    )
    return Failover(router, cluster.objects, endpoint, clock=SystemClock(), rng=random.Random())


async def _run_election(
    router: Router, failover: Failover, watcher: StoreWatcher, stopped: asyncio.Event
) -> None:
    """Take part in the election once synced; when `stopped` is set, hand over to a successor."""

    async def run_when_synced() -> None:
        await watcher.wait_until_synced()
        await failover.run()

    async with _keep_running(router, "election", run_when_synced):
        await stopped.wait()
    await failover.hand_over()


def configure_statically(router: Router, options: RouterOptions) -> None:
    """Configure a router with fixed endpoints, their roles and default settings."""
    tier = Tier(DEFAULT_TIER, SloSpec().to_slo())
    settings = ServiceSettings(
        service=options.service,
        model=options.service,
        timeouts=Timeouts.from_spec(TimeoutsSpec()),
        default_tier=tier,
    )
    router.configure(settings, last_prefill_to_decode_s=None)
    for number, (role, host, port) in enumerate(options.static):
        instance = Instance(f"{options.service}-{number}")
        instance.set_endpoint(host, port)
        instance.assign(role)
        router.fleet.add(instance)


def _port(bound: socket.socket) -> int:
    return int(bound.getsockname()[1])
