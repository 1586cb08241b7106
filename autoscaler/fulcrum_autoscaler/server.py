"""The autoscaler's own port: its decisions, its metrics, its pulse; carries no secret, takes no order."""

from aiohttp import web
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from fulcrum_autoscaler.journal import Journal

_DEFAULT_LIMIT = 100


def make_app(journal: Journal, registry: CollectorRegistry) -> web.Application:
    """`/decisions?limit=N` (JSON list, newest last), `/metrics`, `/health`."""

    async def decisions(request: web.Request) -> web.Response:
        limit = request.query.get("limit", str(_DEFAULT_LIMIT))
        if not limit.isdecimal():
            return web.json_response({"error": f"limit ({limit}) must be a whole number"}, status=400)
        return web.json_response([decision.dump() for decision in journal.recent(int(limit))])

    async def metrics(_request: web.Request) -> web.Response:
        return web.Response(body=generate_latest(registry), headers={"content-type": CONTENT_TYPE_LATEST})

    async def health(_request: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app = web.Application()
    app.add_routes(
        [web.get("/decisions", decisions), web.get("/metrics", metrics), web.get("/health", health)]
    )
    return app
