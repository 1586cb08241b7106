"""What the router answers itself on the clients' port."""

import orjson
from prometheus_client import CollectorRegistry

from fulcrum_router.control.metrics import CONTENT_TYPE, exposition
from fulcrum_router.http1 import responses
from fulcrum_router.router import Router

PATHS = frozenset({b"/v1/models", b"/health", b"/ready", b"/metrics"})


def page(router: Router, registry: CollectorRegistry, path: bytes, *, head_only: bool, close: bool) -> bytes:
    """The answer to GET or HEAD of one of `PATHS`."""
    status, body, kind = 200, b"{}", b"application/json"
    if path == b"/metrics":
        body, kind = exposition(registry), CONTENT_TYPE
    elif path == b"/v1/models":
        body = _models(router)
    elif path == b"/ready" and not router.ready:
        status, body = 503, responses.error_object(503, "no instance serves")
    return responses.answer(status, body, content_type=kind, close=close, head_only=head_only)


def _models(router: Router) -> bytes:
    names = [router.settings.model] if router.settings else []
    models = [{"id": name, "object": "model", "created": 0, "owned_by": "fulcrum"} for name in names]
    return orjson.dumps({"object": "list", "data": models})
