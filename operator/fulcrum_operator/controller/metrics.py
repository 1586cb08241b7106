"""What Prometheus reads of the operator, and what the kubelet asks it: served by leader and standby alike."""

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

_PASS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)


class Meters:
    """The metrics of one process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.passes = Counter(
            "fulcrum_operator_reconciles",
            "Passes over a service, by outcome: ok, conflict, unreadable, error.",
            ["outcome"],
            registry=self.registry,
        )
        self.duration = Histogram(
            "fulcrum_operator_reconcile_seconds",
            "How long a pass takes.",
            buckets=_PASS_S,
            registry=self.registry,
        )
        self.depth = Gauge(
            "fulcrum_operator_queue_depth",
            "Services being looked at, or to be at once.",
            registry=self.registry,
        )
        self.leader = Gauge(
            "fulcrum_operator_leader", "1 if this process leads, else 0.", registry=self.registry
        )


def make_app(
    meters: Meters, unready: Callable[[], str | None], dead: Callable[[], str | None]
) -> web.Application:
    """`/healthz`: it is of use. `/readyz`: it leads and has seen everything, or stands by. `/metrics`.

    Args:
        meters: What is measured.
        unready: Why the process is not ready; None if it is.
        dead: Why it has to be started anew; None while it is of use.
    """

    async def healthz(_request: web.Request) -> web.Response:
        return _said(dead())

    async def readyz(_request: web.Request) -> web.Response:
        return _said(unready())

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(meters.registry), headers={"content-type": CONTENT_TYPE_LATEST}
        )

    app = web.Application()
    app.add_routes([web.get("/healthz", healthz), web.get("/readyz", readyz), web.get("/metrics", metrics)])
    return app


def _said(why_not: str | None) -> web.Response:
    return web.Response(text=f"{why_not or 'ok'}\n", status=503 if why_not else 200)
