"""The operator process: its election and its end.

Several replicas may run: the holder of the Lease reconciles all services, the others are standbys.

`__main__` calls `main`; what the leader does is in `controller/leader`.
"""

import argparse
import asyncio
import contextlib
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import structlog
from aiohttp import web

from fulcrum_cluster.client import ClusterClient, open_cluster, resolve_client_config
from fulcrum_cluster.clock import SystemClock
from fulcrum_cluster.election_thread import HUNG_AFTER_S, ElectionThread
from fulcrum_cluster.leader_election import OPERATOR_TIMING, KubernetesLease, LeaderElector, StepDown
from fulcrum_cluster.logs import configure_logging
from fulcrum_cluster.objects import ObjectApi
from fulcrum_cluster.process import (
    announce_ready,
    bind_socket,
    exit_with_error,
)
from fulcrum_cluster.tracing import open_root_spans
from fulcrum_core.errors import InvalidInput
from fulcrum_operator.arguments import make_parser
from fulcrum_operator.controller.metrics import ApiCallCollector, Metrics, make_http_app
from fulcrum_operator.engines.images import EngineImages
from fulcrum_operator.manifests.names import InstallationSettings, ServiceAccount

if TYPE_CHECKING:
    from fulcrum_operator.controller.leader import Leader, OperatorOptions

_log = structlog.get_logger()


def main(argv: Sequence[str] | None = None) -> None:
    """Run until SIGTERM or SIGINT (exit code 0), or until the Lease is lost (exit code 1)."""
    args = make_parser().parse_args(argv)
    configure_logging(level=args.log_level)
    try:
        sys.exit(asyncio.run(_run_operator(args)))
    except (InvalidInput, OSError) as error:
        exit_with_error(error)


async def _run_operator(args: argparse.Namespace) -> int:
    stop = asyncio.Event()
    _stop_on_signals(stop)
    # Its own connections and its own thread: a renewal of the Lease must not wait for other work.
    lease_cluster = open_cluster(args.store, program="fulcrum-operator")

    def elect(on_change: Callable[[bool], None]) -> ElectionThread:
        return ElectionThread(
            partial(make_elector, lease_cluster.objects, args),
            lease_cluster.aclose,
            on_change,
            hung_after_s=HUNG_AFTER_S,
            clock=SystemClock(),
        )

    async with (
        open_root_spans("fulcrum-operator") as spans,
        open_cluster(args.store, program="fulcrum-operator") as cluster,
        AsyncExitStack() as threads,
    ):
        metrics = Metrics(spans)
        metrics.registry.register(ApiCallCollector(cluster.responses))
        candidate = Candidate(cluster, elect, args, metrics, stop)
        await threads.enter_async_context(candidate.election)
        app = make_http_app(metrics, candidate.unready_reason, candidate.unhealthy_reason)
        async with _serve_http(app, args.host, args.port) as port:
            announce_ready(port=port)
            return await candidate.run()


class Election(Protocol):
    """A leader election; see `LeaderElector`."""

    @property
    def leading(self) -> bool:
        """Whether to act as the leader now."""
        ...

    @property
    def holder(self) -> str | None:
        """Holder of the Lease when it was last observed; None: nobody."""
        ...

    async def run(self) -> None:
        """Take part in the election until cancelled."""
        ...

    async def release(self) -> None:
        """Release the Lease."""
        ...


E = TypeVar("E", bound=Election)


def make_elector(
    lease_objects: ObjectApi,
    args: argparse.Namespace,
    on_change: Callable[[bool], None],
    able_to_lead: Callable[[], bool] = lambda: True,
) -> LeaderElector:
    """The elector of this process, as the command line says."""
    return LeaderElector(
        KubernetesLease(lease_objects, args.service_account, namespace=args.lease_namespace),
        identity=args.identity,
        timing=OPERATOR_TIMING,
        step_down=StepDown.AT_DEADLINE,
        clock=SystemClock(),
        rng=random.Random(),
        on_change=on_change,
        able_to_lead=able_to_lead,
    )


class Candidate(Generic[E]):
    """One operator process: a standby until it holds the Lease, then the leader, until it stops or loses it.

    Args:
        cluster: Client for the API server.
        elect: Creates the election; gets the function to call when this process starts or stops to lead.
        args: The parsed command line.
        metrics: Metrics of this process.
        stop: Event that ends the process.
    """

    def __init__(
        self,
        cluster: ClusterClient,
        elect: Callable[[Callable[[bool], None]], E],
        args: argparse.Namespace,
        metrics: Metrics,
        stop: asyncio.Event,
    ) -> None:
        self._cluster, self._args, self._metrics, self._stop = cluster, args, metrics, stop
        self._elected, self._lease_lost = asyncio.Event(), False
        self._leader: Leader | None = None
        self.election = elect(self._on_leadership_change)

    def unready_reason(self) -> str | None:
        """Why the process is not ready; None for a leader that watches all objects, and for a standby."""
        if self._leader is not None:
            return self._leader.unready_reason()
        return None if self.election.holder is not None else "the Lease has not been read yet"

    def unhealthy_reason(self) -> str | None:
        """Why the kubelet must restart the process if it hangs; None while it can lead or leads."""
        return "the Lease was lost or leader election has ended" if self._lease_lost else None

    async def run(self) -> int:
        """Run until `stop` is set or the Lease is lost; returns the exit code."""
        election = asyncio.get_running_loop().create_task(self.election.run())
        election.add_done_callback(self._on_election_ended)
        try:
            await _wait_for_any(self._elected, self._stop)
            if not self._stop.is_set():
                await self._lead()
        finally:
            election.remove_done_callback(self._on_election_ended)
            election.cancel()
            await asyncio.gather(election, return_exceptions=True)
            await self.election.release()
        return 1 if self._lease_lost else 0

    async def _lead(self) -> None:
        # Imported here to save a standby's memory: only the leader needs kopf and the control loop.
        from fulcrum_operator.controller.kopf_feed import KopfFeed
        from fulcrum_operator.controller.leader import Leader

        access, args = resolve_client_config(self._args.store), self._args
        self._leader = Leader(
            self._cluster,
            lambda cache: KopfFeed(access, cache, namespace=args.namespace),
            _operator_options(args),
            self._metrics,
            lambda: self.election.leading,
        )
        leading = asyncio.get_running_loop().create_task(
            self._leader.run(self._stop, on_started=lambda: _stop_on_signals(self._stop))
        )
        stopping = asyncio.get_running_loop().create_task(self._stop.wait())
        await asyncio.wait((leading, stopping), return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        await self._leader.aclose()
        await self.election.release()  # now, so that a standby takes over: what still runs writes nothing
        self._stop.set()
        await leading

    def _on_election_ended(self, election: asyncio.Task[None]) -> None:
        """Election ends only by an error; without it this process can never lead, so it exits."""
        _log.error("leader election failed, exiting", error=repr(election.exception()))
        self._lease_lost = True
        self._stop.set()

    def _on_leadership_change(self, is_leader: bool) -> None:
        self._metrics.leader.set(int(is_leader))
        if is_leader:
            self._elected.set()
        elif not self._stop.is_set():
            _log.error("lease lost, exiting", holder=self.election.holder)
            self._lease_lost = True
            self._stop.set()


def _operator_options(args: argparse.Namespace) -> "OperatorOptions":
    from fulcrum_operator.controller.leader import OperatorOptions
    from fulcrum_operator.controller.router_view import STATE_URL_TEMPLATE

    operator_account = ServiceAccount(args.lease_namespace, args.service_account)
    return OperatorOptions(
        settings=InstallationSettings(
            image=args.image,
            operator=operator_account,
            autoscaler=args.autoscaler_service_account
            or ServiceAccount(args.lease_namespace, "fulcrum-autoscaler"),
            engine_images=replace(EngineImages(simulated=args.image), **dict(args.engine_image)),
            hub_endpoint=args.hub_endpoint,
            metrics_callers=args.metrics_callers,
            image_pull_secrets=tuple(args.image_pull_secret),
            router_replicas=args.router_replicas,
            log_level=args.log_level,
            router_resources=args.router_resources,
            router_template=args.router_template,
        ),
        namespace=args.namespace,
        token_file=args.token_file,
        router_state=args.router_state or STATE_URL_TEMPLATE,
        state_ca=args.state_ca,
    )


def _stop_on_signals(stop: asyncio.Event) -> None:
    for name in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(name, stop.set)


async def _wait_for_any(*events: asyncio.Event) -> None:
    """Return when one of the events is set."""
    waits = [asyncio.get_running_loop().create_task(event.wait()) for event in events]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    for wait in waits:
        wait.cancel()


@contextlib.asynccontextmanager
async def _serve_http(app: web.Application, host: str, port: int) -> AsyncIterator[int]:
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.SockSite(runner, bind_socket(host, port, option="--port"))
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()
