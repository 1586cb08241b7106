"""The operator process: its options, its election and its end.

Several replicas may run: the holder of the Lease reconciles all services, the others are standbys.
"""

import argparse
import asyncio
import contextlib
import json
import random
import signal
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import structlog
from aiohttp import web

from fulcrum_cluster.client import ClusterClient, open_cluster, resolve_client_config
from fulcrum_cluster.clock import SystemClock
from fulcrum_cluster.election_thread import HUNG_AFTER_S, ElectionThread
from fulcrum_cluster.leader_election import OPERATOR_TIMING, KubernetesLease, LeaderElector, StepDown
from fulcrum_cluster.logs import add_log_level_option, configure_logging
from fulcrum_cluster.objects import ObjectApi
from fulcrum_cluster.process import (
    ANY_ADDRESS,
    ArgumentParser,
    announce_ready,
    bind_socket,
    exit_with_error,
)
from fulcrum_cluster.tracing import open_root_spans
from fulcrum_core.errors import InvalidInput
from fulcrum_operator.controller.metrics import ApiCallCollector, Metrics, make_http_app
from fulcrum_operator.engines.images import EngineImages
from fulcrum_operator.manifests.names import InstallationSettings, ServiceAccount

if TYPE_CHECKING:
    from fulcrum_operator.controller.leader import Leader, OperatorOptions

_ENGINE_IMAGE_KINDS = tuple(field.name for field in fields(EngineImages))

_log = structlog.get_logger()


def main(argv: Sequence[str] | None = None) -> None:
    """Run until SIGTERM or SIGINT (exit code 0), or until the Lease is lost (exit code 1)."""
    args = _parser().parse_args(argv)
    configure_logging(level=args.log_level)
    try:
        sys.exit(asyncio.run(_run_operator(args)))
    except (InvalidInput, OSError) as error:
        exit_with_error(error)


def _parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog="fulcrum_operator", description="Reconcile all PDServices of a cluster.")
    add = parser.add_argument
    add("--store", default="in-cluster", help="API server: in-cluster or kubeconfig:[PATH][#CONTEXT]")
    add("--namespace", default="", help="reconcile this namespace only (default: all)")
    add("--image", required=True, help="image of routers, and of engines without an image of their own")
    add("--image-pull-secret", action="append", default=[], help="pull secret of that image; may be repeated")
    add(
        "--engine-image",
        action="append",
        type=_parse_engine_image,
        default=[],
        help=f"default image of engines, as KIND=IMAGE; KIND is one of {', '.join(_ENGINE_IMAGE_KINDS)}",
    )
    add("--hub-endpoint", default="", help="HF_ENDPOINT of engines and model readers (default: the hub)")
    add("--lease-namespace", required=True, help="namespace of this operator and of its Lease")
    add("--identity", required=True, help="holder name in the Lease: the name of this pod")
    add(
        "--service-account",
        default="fulcrum-operator",
        help="ServiceAccount of the operator, and name of its Lease",
    )
    add(
        "--autoscaler-service-account",
        type=_parse_account,
        help="ServiceAccount of the autoscaler, as NAMESPACE:NAME",
    )
    add(
        "--token-file",
        type=Path,
        required=True,
        help="file with the token for the routers' state ports; read again for each request",
    )
    add(
        "--metrics-callers",
        type=_parse_peers,
        default=(),
        help="peers of a NetworkPolicy that may scrape engines, as a JSON list (default: none)",
    )
    add("--router-state", default=None, help="URL of routers' state ports, with {service} and {namespace}")
    add("--state-ca", type=Path, help="PEM file with the authorities of state ports with TLS")
    add("--router-replicas", type=int, default=2, help="routers for each service, one of which is active")
    add(
        "--router-resources",
        type=_parse_resources,
        default={},
        help="resources of the router containers, as JSON (default: none)",
    )
    add(
        "--router-template",
        type=_parse_template,
        default={},
        help="strategic merge patch of the router pods, as JSON (default: none)",
    )
    add_log_level_option(parser)
    add("--host", default=ANY_ADDRESS, help="address for /healthz, /readyz and /metrics (default: all)")
    add("--port", type=int, default=9093, help="port for /healthz, /readyz and /metrics; 0: any free port")
    return parser


def _parse_account(text: str) -> ServiceAccount:
    namespace, colon, name = text.partition(":")
    if not (namespace and colon and name):
        raise argparse.ArgumentTypeError(f"{text} is not NAMESPACE:NAME")
    return ServiceAccount(namespace, name)


def _parse_engine_image(text: str) -> tuple[str, str]:
    kind, equals, image = text.partition("=")
    if kind not in _ENGINE_IMAGE_KINDS or not (equals and image):
        raise argparse.ArgumentTypeError(f"{text} is not KIND=IMAGE with {', '.join(_ENGINE_IMAGE_KINDS)}")
    return kind, image


def _parse_peers(text: str) -> tuple[dict[str, Any], ...]:
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, list) or not all(isinstance(peer, dict) and peer for peer in parsed):
        raise argparse.ArgumentTypeError(f"{text} is not a list of NetworkPolicy peers as JSON")
    return tuple(parsed)


def _parse_resources(text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict) or not set(parsed) <= {"requests", "limits", "claims"}:
        raise argparse.ArgumentTypeError(f"{text} is not a container's resources as JSON")
    return parsed


def _parse_template(text: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, dict) or not set(parsed) <= {"metadata", "spec"}:
        raise argparse.ArgumentTypeError(f"{text} is not a patch of a pod's metadata and spec as JSON")
    return parsed


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
