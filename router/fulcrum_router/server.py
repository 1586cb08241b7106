"""A running router: its ports, and what it does beside answering requests."""

import asyncio
import contextlib
import gc
import socket
import time
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from fulcrum_cluster.client import open_store
from fulcrum_core.api.pdservice import TimeoutsSpec
from fulcrum_core.api.qostier import SloSpec
from fulcrum_core.errors import InvalidInput
from fulcrum_router.client import ClientServer
from fulcrum_router.fleet import Instance
from fulcrum_router.metrics import registry_of
from fulcrum_router.options import Options
from fulcrum_router.probes import Prober
from fulcrum_router.router import Router
from fulcrum_router.settings import DEFAULT_TIER, Settings, Tier, Timeouts
from fulcrum_router.state_port import make_app
from fulcrum_router.watches import Watches

SWEEP_S = 0.1
"""How exactly time-outs are kept."""
YOUNG_OBJECTS = 50_000
"""So many more objects than at the last collection are due to a leak of cycles, not to requests in flight."""
GRACE_S = 0.7
"""How long requests in flight get at the end."""


class Server:
    """The clients' port, and the sweep that guards all waiting."""

    def __init__(self, router: Router, *, sweep_s: float = SWEEP_S, grace_s: float = GRACE_S) -> None:
        self.router = router
        self._sweep_s, self._grace_s = sweep_s, grace_s
        self.clients = ClientServer(router, registry_of(router))

    async def _sweep(self) -> None:
        """End what waits too long, until cancelled."""
        while True:
            await asyncio.sleep(self._sweep_s)
            now_s = time.monotonic()
            self.router.fleet.check(now_s)
            self.clients.check(now_s)

    @contextlib.asynccontextmanager
    async def listening(self, bound: socket.socket) -> AsyncIterator[None]:
        """Serve clients on a bound socket; at the end requests in flight get a moment."""
        loop = asyncio.get_running_loop()
        server = await loop.create_server(self.clients, sock=bound, backlog=4096)
        sweep = asyncio.create_task(self._sweep())
        prober = asyncio.create_task(Prober(self.router).run())
        try:
            yield
        finally:
            self.router.stopping = True
            server.close()
            await self._drain()
            for task in (sweep, prober):
                task.cancel()
            await asyncio.wait((sweep, prober))
            self.router.fleet.keep_only(())

    async def _drain(self) -> None:
        self.clients.close()
        deadline = time.monotonic() + self._grace_s
        while self.clients.connections and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        for connection in list(self.clients.connections):
            connection.abort()


async def serve(options: Options, stopped: asyncio.Event, *, announce: Callable[..., None]) -> None:
    """Run one router until `stopped`."""
    clients, state = bind(options.host, options.port, "--port"), None
    if options.token is not None:
        state = bind(options.host, options.state_port, "--state-port")
    router = Router()
    ports = {"port": _port(clients)}
    async with contextlib.AsyncExitStack() as stack:
        if options.store is not None:
            store = await stack.enter_async_context(open_store(options.store))
            watches = Watches(router, store, service=options.service, namespace=options.namespace)
            following = asyncio.create_task(watches.run())
            stack.push_async_callback(_end, following)
        else:
            configure_statically(router, options)
        if state is not None and options.token is not None:
            await stack.enter_async_context(_state_port(router, options.token, state))
            ports["state_port"] = _port(state)
        await stack.enter_async_context(Server(router).listening(clients))
        announce(**ports)
        gc.collect()
        gc.freeze()  # what start-up left is never garbage: keep collections short, they delay every request
        gc.set_threshold(YOUNG_OBJECTS)  # and rare: a request leaves no cycles
        await stopped.wait()


def configure_statically(router: Router, options: Options) -> None:
    """Fixed endpoints, roles and default settings."""
    tier = Tier(DEFAULT_TIER, SloSpec().slo())
    settings = Settings(
        service=options.service,
        model=options.service,
        timeouts=Timeouts.of(TimeoutsSpec()),
        default_tier=tier,
    )
    router.configure(settings, last_to_decode_s=None)
    for number, (role, host, port) in enumerate(options.static):
        instance = Instance(f"{options.service}-{number}")
        instance.place(host, port)
        instance.assign(role)
        router.fleet.add(instance)


def bind(host: str, port: int, option: str) -> socket.socket:
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
async def _state_port(router: Router, token: str, bound: socket.socket) -> AsyncIterator[None]:
    runner = web.AppRunner(
        make_app(router, token), access_log=None, shutdown_timeout=0.1, handler_cancellation=True
    )
    await runner.setup()
    try:
        await web.SockSite(runner, bound).start()
        yield
    finally:
        await runner.cleanup()


async def _end(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))
