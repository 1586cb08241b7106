"""One local run from start to end: store, operator, engines, router and autoscaler.

The store and the operator's reconcile loop run in the calling process, everything else is a supervised
process. Leaving the context ends all of it, also after an error or Ctrl-C. What to start is decided by the
operator's plan.
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

from fulcrum_cli.local.engines import EngineContext, engine_facts, expected_startup_s
from fulcrum_cli.local.local_engine import simulate_unless_named
from fulcrum_cli.local.preflight import check_manifest, check_router_port
from fulcrum_cli.local.program_commands import ProgramCommands, SharedOptions
from fulcrum_cli.local.router_view import LocalRouterView
from fulcrum_cli.local.run_folder import RunInfo, open_run_folder, write_info, write_token
from fulcrum_cli.local.runtime import LocalRuntime
from fulcrum_cli.local.supervised_process import Ports, ProcessSpec, Program, ProgramTimeouts, StartFailed
from fulcrum_cluster.clock import SystemClock
from fulcrum_cluster.informer import Informer
from fulcrum_cluster.memory_store import MemoryStore
from fulcrum_cluster.store_server import serve_store
from fulcrum_core.api import PDAssignment, PDInstance, PDPool, PDService, QoSTier, Resource
from fulcrum_operator.controller.context import ReconcileContext, ServiceKey
from fulcrum_operator.controller.reconcile import reconcile
from fulcrum_operator.controller.work_queue import WorkQueue

STATUS_INTERVAL_S = 1.0
"""Shortest time between two status writes in seconds: a store in memory takes more writes than etcd."""

RESYNC_S = 30.0
"""Longest time between two reconciles of the service, in seconds."""

_WATCHED: tuple[type[Resource], ...] = (PDService, PDPool, PDInstance, PDAssignment, QoSTier)

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalRunOptions:
    """Options of a local run."""

    host: str = "127.0.0.1"
    port: int = 8000
    """Port of the router for clients; 0: any free port."""
    api_keys: Path | None = None
    """Folder of the files of the Secret that the service's spec.router.auth names."""
    run_dir: Path | None = None
    """Folder of the run; None: a temporary one, removed at the end."""
    program_timeouts: ProgramTimeouts = field(default_factory=ProgramTimeouts)


@asynccontextmanager
async def run_local(
    objects: Sequence[Resource],
    options: LocalRunOptions | None = None,
    *,
    commands: ProgramCommands | None = None,
    on_start: Callable[[PDService], None] = lambda _service: None,
) -> AsyncIterator["LocalRun"]:
    """Bring up the PDService of `objects`, with simulated engines unless it names another type.

    On entry router and autoscaler serve and the engines are starting.

    `on_start` is called after all checks, before anything is started.

    Raises:
        InvalidInput: if the manifest or an option breaks a rule; nothing was started.
        StartFailed: if the router or the autoscaler does not become ready; everything was stopped again.
    """
    options = options or LocalRunOptions()
    objects = tuple(simulate_unless_named(obj) for obj in objects)
    service = check_manifest(objects, api_keys=options.api_keys)
    check_router_port(options.host, options.port)
    on_start(service)
    with open_run_folder(options.run_dir, service=service.metadata.name) as folder:
        run = LocalRun(service, folder, options, commands or ProgramCommands())
        async with serve_store(run.store, folder / "store.sock"):
            try:
                await run.start(objects)
                yield run
            finally:
                await run.close()


class LocalRun:
    """A run that `run_local` started. Callers may read, watch and write `store` directly."""

    def __init__(
        self, service: PDService, folder: Path, options: LocalRunOptions, commands: ProgramCommands
    ) -> None:
        self.key = ServiceKey(service.metadata.namespace, service.metadata.name)
        self.folder = folder
        self.store = MemoryStore(SystemClock())
        self._options, self._commands = options, commands
        self._waiters: list[asyncio.Future[None]] = []
        token_file = write_token(folder)
        self._shared_options = SharedOptions(
            service=self.key.name,
            namespace=self.key.namespace,
            host=options.host,
            store_address=f"unix:{folder / 'store.sock'}",
            token_file=token_file,
        )
        self._engine_context = EngineContext(service=service, host=options.host, folder=folder)
        self.runtime = LocalRuntime(
            lambda instance: commands.engine(instance, self._engine_context),
            host=options.host,
            logs=folder,
            on_change=lambda _name: self._wake(),
            timeouts=options.program_timeouts,
        )
        self._router = self._make_program("router", self._router_command)
        self._autoscaler = self._make_program("autoscaler", self._autoscaler_command)
        self._router_view = LocalRouterView(self._router, host=options.host, token=token_file.read_text())
        context = ReconcileContext(
            store=self.store,
            runtime=self.runtime,
            clock=SystemClock(),
            engine_facts=lambda instance: engine_facts(instance, self._engine_context),
            router=self._router_view,
            status_interval_s=STATUS_INTERVAL_S,
        )
        self._queue = WorkQueue[ServiceKey](lambda key: reconcile(key, context), resync_s=RESYNC_S)
        self._tasks: list[asyncio.Task[None]] = []
        self._started_at_s = SystemClock().now_s()

    @property
    def info(self) -> RunInfo:
        """Addresses of the run's parts, as in run.json."""
        host, ports = self._options.host, self._autoscaler.ports or {}
        return RunInfo(
            pid=os.getpid(),
            started_at_s=self._started_at_s,
            service=self.key.name,
            namespace=self.key.namespace,
            run_dir=str(self.folder),
            store_address=self._shared_options.store_address,
            token_file=str(self._shared_options.token_file),
            router_url=self._router_view.url("port"),
            router_state_url=self._router_view.url("state_port"),
            autoscaler_url=f"http://{host}:{ports.get('port', 0)}",
            router_metrics_url=self._router_view.url("metrics_port"),
        )

    @property
    def startup_s(self) -> float:
        """Seconds from an engine's start until it serves, if nothing fails."""
        return expected_startup_s(self._engine_context.service)

    async def start(self, objects: Sequence[Resource]) -> None:
        """Create the objects and start everything; engines and router start at the same time."""
        for obj in sorted(objects, key=lambda obj: isinstance(obj, PDService)):  # its tiers must exist first
            await self.store.create(obj)
        for kind in _WATCHED:
            informer = Informer(self.store, kind, namespace=self.key.namespace, on_change=self._on_object)
            self._start_task(informer.run())
        self._router.start()
        self._wake()
        await self._router.wait_ready()
        self._autoscaler.start()
        await self._autoscaler.wait_ready()
        write_info(self.info)

    async def wait_serving(self) -> tuple[PDInstance, ...]:
        """Return all instances once every instance serves.

        Raises:
            StartFailed: if the start of an engine counts as failed.
        """
        while True:
            for name, reason in self.runtime.start_failures().items():
                raise StartFailed(f"engine {name}", reason)
            found = (await self.store.list(PDInstance, namespace=self.key.namespace)).items
            if found and all(instance.is_serving for instance in found):
                return found
            await self.wait_change()

    async def wait_change(self) -> None:
        """Return after the next change of an object or a program."""
        waiter = asyncio.get_running_loop().create_future()
        self._waiters.append(waiter)
        await waiter

    def kill(self, instance: str) -> None:
        """Kill an engine as a crash would; it is restarted.

        Raises:
            KeyError: if there is no engine of that name.
        """
        self.runtime.kill(instance)

    def pids(self) -> dict[str, int]:
        """Process ids of all running programs, by name."""
        others = {p.name: p.pid for p in (self._router, self._autoscaler) if p.pid is not None}
        return {**self.runtime.pids(), **others}

    async def close(self) -> None:
        """Stop everything at the same time; returns when all processes have ended."""
        await self._queue.aclose()
        for task in self._tasks:
            task.cancel()
        stops = (self.runtime.close(), self._router.stop(), self._autoscaler.stop())
        await asyncio.gather(*self._tasks, *stops, self._router_view.aclose(), return_exceptions=True)

    def _on_object(self, _old: Resource | None, new: Resource | None) -> None:
        if isinstance(new, PDService) and new.metadata.name == self.key.name:
            self._engine_context = replace(self._engine_context, service=new)
        self._wake()

    def _wake(self) -> None:
        """Requeue the service and wake the waiters of `wait_change`."""
        waiters, self._waiters = self._waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._queue.add(self.key)

    def _make_program(self, name: str, command: Callable[[Ports | None], tuple[str, ...]]) -> Program:
        log = self.folder / f"{name}.log"
        return Program(
            name,
            lambda last_ports: ProcessSpec(command=command(last_ports)),
            log=log,
            on_change=self._wake,
            timeouts=self._options.program_timeouts,
        )

    def _router_command(self, last_ports: Ports | None) -> tuple[str, ...]:
        """A restarted router keeps its ports, which clients and the autoscaler know."""
        first_ports = {"port": self._options.port, "state_port": 0, "metrics_port": 0}
        command = self._commands.router(self._shared_options, last_ports or first_ports)
        keys = self._options.api_keys
        return command if keys is None else (*command, "--api-keys", str(keys))

    def _autoscaler_command(self, last_ports: Ports | None) -> tuple[str, ...]:
        """A restarted autoscaler keeps its port, which run.json names."""
        return self._commands.autoscaler(
            self._shared_options, last_ports["port"] if last_ports else 0, self._router_view.url("state_port")
        )

    def _start_task(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        task.add_done_callback(_log_crash)
        self._tasks.append(task)


def _log_crash(task: asyncio.Task[None]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        if error := task.exception():
            _log.error("store watch failed", error=repr(error))
