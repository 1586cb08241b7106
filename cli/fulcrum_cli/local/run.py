"""A whole run on this machine: store, operator, engines, router, autoscaler; up together, down together.

The store and the operator live in the calling process; everything else is a supervised process. Whatever
ends the run (the context's end, an error half-way, Ctrl-C) ends all of it.
"""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import structlog

from fulcrum_cli.local.commands import Commands, Surroundings
from fulcrum_cli.local.engines import Around, engine_facts, startup_s
from fulcrum_cli.local.life import Life, Ports
from fulcrum_cli.local.manifest import check_manifest, check_port_free
from fulcrum_cli.local.program import Program, ProgramOptions, StartFailed
from fulcrum_cli.local.router import LocalRouter
from fulcrum_cli.local.run_folder import RunInfo, run_folder, write_info, write_token
from fulcrum_cli.local.runtime import LocalRuntime
from fulcrum_cluster.clock import SystemClock
from fulcrum_cluster.memory import MemoryStore
from fulcrum_cluster.server import serve_store
from fulcrum_cluster.watching import Mirror
from fulcrum_core.api import PDAssignment, PDInstance, PDPool, PDService, QoSTier, Resource
from fulcrum_core.values import Phase
from fulcrum_operator.controller.reconcile import Cluster, ServiceKey, reconcile
from fulcrum_operator.controller.work_queue import KeyedQueue

STATUS_INTERVAL_S = 1.0
"""A service's status is written at most once in so long: memory bears more writes than etcd."""

RESYNC_S = 30.0

_WATCHED: tuple[type[Resource], ...] = (PDService, PDPool, PDInstance, PDAssignment, QoSTier)

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalOptions:
    """How a local run is laid out."""

    host: str = "127.0.0.1"
    port: int = 8000
    """Where the router listens; 0: any free port."""
    run_dir: Path | None = None
    """The folder of the run; None: one of its own, removed at the end."""
    programs: ProgramOptions = field(default_factory=ProgramOptions)


@asynccontextmanager
async def run_local(
    objects: Sequence[Resource],
    options: LocalOptions | None = None,
    *,
    commands: Commands | None = None,
    on_begin: Callable[[PDService], None] = lambda _service: None,
) -> AsyncIterator["LocalRun"]:
    """Bring up the PDService of `objects`: router and autoscaler serve when this is entered, engines start.

    `on_begin` is called when nothing was found to refuse, before anything is started.

    Raises:
        InvalidInput: if the manifest or an option breaks a rule: nothing was started.
        StartFailed: if the router or the autoscaler does not come to serve: everything is ended again.
    """
    options = options or LocalOptions()
    service = check_manifest(objects)
    check_port_free(options.host, options.port)
    on_begin(service)
    with run_folder(options.run_dir, service=service.metadata.name) as folder:
        run = LocalRun(service, folder, options, commands or Commands())
        async with serve_store(run.store, folder / "store.sock"):
            try:
                await run.start(objects)
                yield run
            finally:
                await run.close()


class LocalRun:
    """A run as `run_local` gives it. `store` is the store itself: read it, watch it, write wishes to it."""

    def __init__(self, service: PDService, folder: Path, options: LocalOptions, commands: Commands) -> None:
        self.key = ServiceKey(service.metadata.namespace, service.metadata.name)
        self.folder = folder
        self.store = MemoryStore(SystemClock())
        self._options, self._commands = options, commands
        self._waiters: list[asyncio.Future[None]] = []
        token_file = write_token(folder)
        self._around = Surroundings(
            service=self.key.name,
            namespace=self.key.namespace,
            host=options.host,
            store=f"unix:{folder / 'store.sock'}",
            token_file=token_file,
        )
        self._engines = Around(service=service, host=options.host, folder=folder)
        self.runtime = LocalRuntime(
            lambda instance: commands.engine(instance, self._engines),
            host=options.host,
            logs=folder,
            on_change=lambda _name: self._look(),
            options=options.programs,
        )
        self._router = self._program("router", self._router_command)
        self._autoscaler = self._program("autoscaler", self._autoscaler_command)
        self._view = LocalRouter(self._router, host=options.host, token=token_file.read_text())
        cluster = Cluster(
            store=self.store,
            runtime=self.runtime,
            clock=SystemClock(),
            engine_facts=lambda instance: engine_facts(instance, self._engines),
            router=self._view,
            status_interval_s=STATUS_INTERVAL_S,
        )
        self._queue = KeyedQueue[ServiceKey](lambda key: reconcile(key, cluster), resync_s=RESYNC_S)
        self._tasks: list[asyncio.Task[None]] = []
        self._started_at_s = SystemClock().now_s()

    @property
    def info(self) -> RunInfo:
        """Where everything is, as `run.json` says it."""
        host, ports = self._options.host, self._autoscaler.ports or {}
        return RunInfo(
            pid=os.getpid(),
            started_at_s=self._started_at_s,
            service=self.key.name,
            namespace=self.key.namespace,
            run_dir=str(self.folder),
            store=self._around.store,
            token_file=str(self._around.token_file),
            router_url=self._view.url("port"),
            router_state_url=self._view.url("state_port"),
            autoscaler_url=f"http://{host}:{ports.get('port', 0)}",
        )

    @property
    def startup_s(self) -> float:
        """From an engine's start to serving, all going well."""
        return startup_s(self._engines.service)

    async def start(self, objects: Sequence[Resource]) -> None:
        """Put the objects into the store and start everything; engines and router side by side."""
        for obj in sorted(objects, key=lambda obj: isinstance(obj, PDService)):  # tiers before who names them
            await self.store.create(obj)
        for kind in _WATCHED:
            mirror = Mirror(self.store, kind, namespace=self.key.namespace, on_change=self._on_object)
            self._spawn(mirror.run())
        self._router.start()
        self._look()
        await self._router.served()
        self._autoscaler.start()
        await self._autoscaler.served()
        write_info(self.info)

    async def serving(self) -> tuple[PDInstance, ...]:
        """All instances, once every one of them serves.

        Raises:
            StartFailed: if an engine never will.
        """
        while True:
            for name, reason in self.runtime.hopeless().items():
                raise StartFailed(f"engine {name}", reason)
            found = (await self.store.list(PDInstance, namespace=self.key.namespace)).items
            if found and all(instance.status.phase is Phase.SERVING for instance in found):
                return found
            await self.changed()

    async def changed(self) -> None:
        """Returns when something of the run has changed: an object, a program."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def kill(self, instance: str) -> None:
        """Kill an engine as a crash would; it is started again. `KeyError` if there is none of that name."""
        self.runtime.kill(instance)

    def pids(self) -> dict[str, int]:
        """Process ids of everything that runs, by name."""
        others = {p.name: p.pid for p in (self._router, self._autoscaler) if p.pid is not None}
        return {**self.runtime.pids(), **others}

    async def close(self) -> None:
        """End everything, side by side; nothing is left afterwards."""
        await self._queue.aclose()
        for task in self._tasks:
            task.cancel()
        stops = (self.runtime.close(), self._router.stop(), self._autoscaler.stop())
        await asyncio.gather(*self._tasks, *stops, self._view.aclose(), return_exceptions=True)

    def _on_object(self, _old: Resource | None, new: Resource | None) -> None:
        if isinstance(new, PDService) and new.metadata.name == self.key.name:
            self._engines = replace(self._engines, service=new)
        self._look()

    def _look(self) -> None:
        """Something happened: have the operator look, and whoever waits for it."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._queue.add(self.key)

    def _program(self, name: str, command: Callable[[Ports | None], tuple[str, ...]]) -> Program:
        log = self.folder / f"{name}.log"
        return Program(
            name,
            lambda last: Life(command=command(last)),
            log=log,
            on_change=self._look,
            options=self._options.programs,
        )

    def _router_command(self, last: Ports | None) -> tuple[str, ...]:
        """A router that is started again keeps its ports: clients and the autoscaler know it by them."""
        port, state_port = (last["port"], last["state_port"]) if last else (self._options.port, 0)
        return self._commands.router(self._around, port, state_port)

    def _autoscaler_command(self, last: Ports | None) -> tuple[str, ...]:
        """Keeps its port, too: whoever reads its decisions knows it from `run.json`."""
        return self._commands.autoscaler(
            self._around, last["port"] if last else 0, self._view.url("state_port")
        )

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        task.add_done_callback(_tell_crash)
        self._tasks.append(task)


def _tell_crash(task: asyncio.Task[None]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        if error := task.exception():
            _log.error("watch ended", error=repr(error))
