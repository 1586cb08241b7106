"""A running router: its ports, and what it does beside answering requests."""

import asyncio
import contextlib
import gc
import random
import socket
import time
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from fulcrum_cluster.client import ClusterClient, open_cluster
from fulcrum_cluster.clock import SystemClock
from fulcrum_core.api.pdservice import TimeoutsSpec
from fulcrum_core.api.qostier import SloSpec
from fulcrum_core.errors import InvalidInput
from fulcrum_router.control.auth import Authenticator, ServiceAccountAuthenticator, SharedTokenAuthenticator
from fulcrum_router.control.background_task import background_task
from fulcrum_router.control.failover import Failover, RouterEndpoint
from fulcrum_router.control.metrics import build_registry
from fulcrum_router.control.state_port import make_app
from fulcrum_router.data_path.downstream import ClientServer
from fulcrum_router.fleet.instances import Instance
from fulcrum_router.kv_transfer.canaries import CanaryScheduler
from fulcrum_router.observe.engines import EngineProber
from fulcrum_router.observe.objects import StoreWatcher
from fulcrum_router.options import RouterOptions
from fulcrum_router.router import Router
from fulcrum_router.settings import DEFAULT_TIER, ServiceSettings, Tier, Timeouts

SWEEP_INTERVAL_S = 0.1
"""How exactly time-outs are kept."""
GC_THRESHOLD_OBJECTS = 50_000
"""So many more objects than at the last collection are due to a leak of cycles, not to requests in flight."""
SYNC_TIMEOUT_S = 5.0
"""How long a router of a cluster waits at its start to know what it serves; then it listens anyway."""
SHUTDOWN_GRACE_S = 0.7
"""How long requests in flight get at the end of a router that no other one follows."""


class RouterServer:
    """The clients' port, and the sweep that guards all waiting."""

    def __init__(
        self, router: Router, *, sweep_s: float = SWEEP_INTERVAL_S, grace_s: float = SHUTDOWN_GRACE_S
    ) -> None:
        self.router, self.grace_s = router, grace_s
        self._sweep_s = sweep_s
        self.clients = ClientServer(router, build_registry(router))

    async def _check_deadlines(self) -> None:
        """End what waits too long, until cancelled."""
        while True:
            await asyncio.sleep(self._sweep_s)
            now_s = time.monotonic()
            self.router.tick(now_s)
            self.router.fleet.enforce_timeouts(now_s)
            self.clients.enforce_timeouts(now_s)

    @contextlib.asynccontextmanager
    async def listening(self, bound: socket.socket) -> AsyncIterator[None]:
        """Serve clients on a bound socket; at the end requests in flight get a moment."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(self.clients, sock=bound, backlog=4096)
        async with background_task(self._check_deadlines()), background_task(EngineProber(self.router).run()):
            try:
                yield
            finally:
                self.router.stopping = True
                server.close()
                await self._drain()
                self.router.fleet.keep_only(())

    async def _drain(self) -> None:
        self.clients.close()
        deadline = time.monotonic() + self.grace_s
        while self.clients.connections and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for connection in list(self.clients.connections):
            connection.abort()


async def serve(options: RouterOptions, stopped: asyncio.Event, *, announce: Callable[..., None]) -> None:
    """Run one router until `stopped`."""
    clients, state = bind_socket(options.host, options.port, "--port"), None
    if options.has_state_port:
        state = bind_socket(options.host, options.state_port, "--state-port")
    router = Router()
    ports = {"port": _port(clients)}
    async with contextlib.AsyncExitStack() as stack:
        cluster = watcher = failover = None
        if options.store is not None:
            cluster = await stack.enter_async_context(open_cluster(options.store, program="fulcrum-router"))
            watcher = await _watch_store(stack, router, cluster, options)
        else:
            configure_statically(router, options)
        if state is not None:
            authenticator = _make_authenticator(options, cluster)
            if isinstance(authenticator, ServiceAccountAuthenticator):
                await stack.enter_async_context(background_task(authenticator.refresh_keys()))
            await stack.enter_async_context(_serve_state_port(router, authenticator, state))
            ports["state_port"] = _port(state)
        if watcher is not None and options.lease is not None:
            await _wait_until_synced(watcher)
        server = RouterServer(router)
        await stack.enter_async_context(server.listening(clients))
        if cluster is not None:
            await stack.enter_async_context(
                background_task(CanaryScheduler(router, rng=random.Random()).run())
            )
        announce(**ports)
        if cluster is not None and watcher is not None and options.lease is not None:
            failover = _make_failover(router, cluster, options, **ports)
        gc.collect()
        gc.freeze()  # what start-up left is never garbage: keep collections short, they delay every request
        gc.set_threshold(GC_THRESHOLD_OBJECTS)  # and rare: a request leaves no cycles
        if failover is None or watcher is None:
            await stopped.wait()
        else:
            await _run_election(failover, watcher, stopped)
            server.grace_s = router.settings.drain_timeout_s if router.settings else SHUTDOWN_GRACE_S


async def _watch_store(
    stack: contextlib.AsyncExitStack, router: Router, cluster: ClusterClient, options: RouterOptions
) -> StoreWatcher:
    """Watch the store for as long as the stack stands."""
    watcher = StoreWatcher(
        router,
        cluster.store,
        service=options.service,
        namespace=options.namespace,
        objects=None if options.lease is None else cluster.objects,
    )
    await stack.enter_async_context(background_task(watcher.run()))
    return watcher


async def _wait_until_synced(watcher: StoreWatcher) -> None:
    """Who started anew may still be the one clients are led to: better no answer than "not known yet"."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SYNC_TIMEOUT_S):
            await watcher.wait_until_synced()


def _make_authenticator(options: RouterOptions, cluster: ClusterClient | None) -> Authenticator:
    if options.token is not None or cluster is None:
        return SharedTokenAuthenticator(options.token or "")
    return ServiceAccountAuthenticator(cluster.objects.get_raw, options.state_callers, clock=SystemClock())


def _make_failover(
    router: Router, cluster: ClusterClient, options: RouterOptions, *, port: int, state_port: int
) -> Failover:
    endpoint = RouterEndpoint(
        name=options.lease or "",
        namespace=options.namespace,
        identity=options.identity,
        address=options.advertise_address,
        port=port,
        state_port=state_port,
    )
    return Failover(router, cluster.objects, endpoint, clock=SystemClock(), rng=random.Random())


async def _run_election(failover: Failover, watcher: StoreWatcher, stopped: asyncio.Event) -> None:
    """Stand for election once warm; when `stopped`, hand over first."""

    async def run_when_synced() -> None:
        await watcher.wait_until_synced()
        await failover.run()

    async with background_task(run_when_synced()):
        await stopped.wait()
    await failover.hand_over()


def configure_statically(router: Router, options: RouterOptions) -> None:
    """Fixed endpoints, roles and default settings."""
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


def bind_socket(host: str, port: int, option: str) -> socket.socket:
    """A bound socket, so that a port in use is one line for the user.

    Raises:
        InvalidInput: if it cannot be bound.
    """
    bound = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except (OSError, UnicodeError) as error:
        bound.close()
        reason = getattr(error, "strerror", None) or str(error)
        raise InvalidInput(option, f"{host}:{port}", f"cannot be bound: {reason.lower()}") from error
    bound.setblocking(False)
    return bound


def _port(bound: socket.socket) -> int:
    return int(bound.getsockname()[1])


@contextlib.asynccontextmanager
async def _serve_state_port(
    router: Router, authenticator: Authenticator, bound: socket.socket
) -> AsyncIterator[None]:
    runner = web.AppRunner(
        make_app(router, authenticator), access_log=None, shutdown_timeout=0.1, handler_cancellation=True
    )
    await runner.setup()
    try:
        await web.SockSite(runner, bound).start()
        yield
    finally:
        await runner.cleanup()
