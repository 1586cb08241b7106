"""Metrics, spans and health endpoints of an operator process, served by the leader and by standbys.

`program` serves them and `leader` records reconciles. Metrics about each service are `service_metrics`'.
"""

import time
from collections.abc import Callable, Iterable, Mapping

from aiohttp import web
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from fulcrum_cluster.tracing import RootSpans

# Else each counter has one series more, since when it counts.
disable_created_metrics()  # type: ignore[no-untyped-call]  # the library has no types here
_RECONCILE_BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
_DRAIN_BUCKETS_S = (1.0, 5.0, 15.0, 60.0, 180.0, 600.0, 1_800.0)


class ApiCallCollector(Collector):
    """Requests of one process to the API server; `responses` by method and status, see `ClusterClient`."""

    def __init__(self, responses: Mapping[tuple[str, int], int]) -> None:
        self._responses = responses

    def collect(self) -> Iterable[Metric]:
        """Build the family."""
        family = CounterMetricFamily(
            "fulcrum_operator_api_requests",
            "Requests to the API server, without the watches of kopf, by method (WATCH: a watch that was "
            "opened) and status of the response; none: there was no response.",
            labels=["method", "status"],
        )
        for (method, status), count in sorted(self._responses.items()):
            family.add_metric([method, str(status) if status else "none"], count)
        yield family


class Metrics:
    """Prometheus metrics of one process, in their own registry.

    Args:
        spans: Takes spans of reconciles; None: none are sent.
    """

    def __init__(self, spans: RootSpans | None = None) -> None:
        self._spans = spans
        self.registry = CollectorRegistry()
        self.reconciles = Counter(
            "fulcrum_operator_reconciles",
            "Reconciles of a service, by outcome: ok, conflict, unreadable, error.",
            ["outcome"],
            registry=self.registry,
        )
        self.reconcile_seconds = Histogram(
            "fulcrum_operator_reconcile_seconds",
            "Duration of a reconcile in seconds.",
            buckets=_RECONCILE_BUCKETS_S,
            registry=self.registry,
        )
        self.drain_seconds = Histogram(
            "fulcrum_operator_drain_seconds",
            "Duration of a drain of an instance, until its requests and KV transfers have ended or the drain "
            "timeout has passed, in seconds.",
            buckets=_DRAIN_BUCKETS_S,
            registry=self.registry,
        )
        self.active_reconciles = Gauge(
            "fulcrum_operator_active_reconciles",
            "Reconciles that are running.",
            registry=self.registry,
        )
        self.leader = Gauge(
            "fulcrum_operator_leader", "1 if this process is the leader, else 0.", registry=self.registry
        )

    def record_reconcile(self, namespace: str, service: str, outcome: str, *, took_s: float) -> None:
        """Count a reconcile that ended now, and send its span."""
        self.reconciles.labels(outcome).inc()
        self.reconcile_seconds.observe(took_s)
        if self._spans is not None:
            now_s = time.time()
            self._spans.send(
                "fulcrum.reconcile",
                start_s=now_s - took_s,
                end_s=now_s,
                attributes={
                    "fulcrum.namespace": namespace,
                    "fulcrum.service": service,
                    "fulcrum.outcome": outcome,
                },
                error=outcome if outcome == "error" else "",
                routine=True,
            )


def make_http_app(
    metrics: Metrics, unready_reason: Callable[[], str | None], unhealthy_reason: Callable[[], str | None]
) -> web.Application:
    """Build the application with `/healthz`, `/readyz` and `/metrics`.

    Args:
        metrics: The metrics to serve.
        unready_reason: Returns why the process is not ready, None if it is.
        unhealthy_reason: Returns why the process must be restarted, None if it need not.
    """

    async def serve_healthz(_request: web.Request) -> web.Response:
        return _probe_response(unhealthy_reason())

    async def serve_readyz(_request: web.Request) -> web.Response:
        return _probe_response(unready_reason())

    async def serve_metrics(_request: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(metrics.registry), headers={"content-type": CONTENT_TYPE_LATEST}
        )

    app = web.Application()
    app.add_routes(
        [
            web.get("/healthz", serve_healthz),
            web.get("/readyz", serve_readyz),
            web.get("/metrics", serve_metrics),
        ]
    )
    return app


def _probe_response(problem: str | None) -> web.Response:
    return web.Response(text=f"{problem or 'ok'}\n", status=503 if problem else 200)
