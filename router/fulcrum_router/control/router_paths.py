"""Paths of the clients' port that the router answers without an engine: models, health, readiness.

`/health` has always status 200; `/ready` has 503 unless an instance serves and the router is not stopping.

`downstream` calls it; every other path goes to an engine or is refused there.
"""

import orjson

from fulcrum_router.http1 import responses
from fulcrum_router.router import Router

ROUTER_PATHS = frozenset({b"/v1/models", b"/health", b"/ready"})


def build_router_response(router: Router, path: bytes, *, head_only: bool, close: bool) -> bytes:
    """Build the response to GET or HEAD of one of `ROUTER_PATHS`."""
    status, body = 200, b"{}"
    if path == b"/v1/models":
        body = _build_model_list(router)
    elif path == b"/ready" and not router.ready:
        status, body = 503, responses.build_error_body(503, "no instance is serving")
    return responses.build_response(status, body, close=close, head_only=head_only)


def _build_model_list(router: Router) -> bytes:
    names = [router.settings.model] if router.settings else []
    models = [{"id": name, "object": "model", "created": 0, "owned_by": "fulcrum"} for name in names]
    return orjson.dumps({"object": "list", "data": models})
