"""The autoscaler's HTTP port: recent decisions, metrics, health. Read-only; exposes no secrets.

`program` serves it. `fulcrum explain`, `play` and the live page read `/decisions`, Prometheus reads
`/metrics`.
"""

from collections.abc import Callable

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from fulcrum_autoscaler.decision_history import DecisionHistories

_DEFAULT_LIMIT = 100
"""Decisions in a response of `/decisions` without `limit`."""


def make_app(
    histories: DecisionHistories, registry: CollectorRegistry, is_ready: Callable[[], bool]
) -> web.Application:
    """Build the application: `/decisions?namespace=&service=&limit=` (JSON, newest last), `/metrics`,
    `/healthz`, `/readyz`. A `limit` that is not a whole number is answered with status 400.
    """

    async def decisions(request: web.Request) -> web.Response:
        limit = request.query.get("limit", str(_DEFAULT_LIMIT))
        if not limit.isdecimal():
            return web.json_response({"error": f"limit ({limit}) must be a whole number"}, status=400)
        namespace, service = (request.query.get(name) or None for name in ("namespace", "service"))
        return web.json_response(histories.recent(int(limit), namespace=namespace, service=service))

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def healthz(_request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def readyz(_request: web.Request) -> web.Response:
        if is_ready():
            return web.json_response({"status": "ok"})
        return web.json_response({"status": "the API objects have not been listed yet"}, status=503)

    app = web.Application()
    app.add_routes(
        [
            web.get("/decisions", decisions),
            web.get("/metrics", metrics),
            web.get("/healthz", healthz),
            web.get("/readyz", readyz),
        ]
    )
    return app
