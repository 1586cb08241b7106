"""The active router of a service, as the operator reads it: its address, and its state port."""

from pathlib import Path

import httpx

from fulcrum_cluster.objects import ENDPOINT_SLICE
from fulcrum_core.router_state import RouterState
from fulcrum_operator.controller.cache import ObjectCache
from fulcrum_operator.controller.reconcile import ServiceKey
from fulcrum_operator.manifests.names import SERVICE_PORT, STATE_PORT

STATE_URL_TEMPLATE = f"http://{{service}}.{{namespace}}.svc:{STATE_PORT}"
_RESPONSE_TIMEOUT_S = 1.0


class ClusterRouterView:
    """`RouterView` of all services of a cluster. To be closed.

    Args:
        cache: Where the EndpointSlice is seen in which the active router says that it is there.
        token_file: What its state port asks for; read at each use, since the kubelet replaces it.
        state_url: Where the state port is, with `{service}` and `{namespace}`.
    """

    def __init__(self, cache: ObjectCache, *, token_file: Path, state_url: str = STATE_URL_TEMPLATE) -> None:
        self._cache, self._token_file, self._state_url = cache, token_file, state_url
        self._client = httpx.AsyncClient(
            timeout=_RESPONSE_TIMEOUT_S, trust_env=False, verify=False
        )  # plain HTTP

    def endpoint(self, key: ServiceKey) -> str | None:
        """Where clients reach it; None while no router is active."""
        endpoint_slice = self._cache.get_object(ENDPOINT_SLICE, key.namespace, f"{key.name}-router")
        endpoints = (endpoint_slice or {}).get("endpoints") or ()
        if not any(endpoint.get("conditions", {}).get("ready", True) for endpoint in endpoints):
            return None
        port = "" if SERVICE_PORT == 80 else f":{SERVICE_PORT}"
        return f"http://{key.name}.{key.namespace}.svc{port}"

    async def read_state(self, key: ServiceKey) -> RouterState | None:
        """What it says of its instances; None if it does not answer."""
        url = self._state_url.format(service=key.name, namespace=key.namespace)
        try:
            token = self._token_file.read_text(encoding="utf-8").strip()
            response = await self._client.get(f"{url}/state", headers={"authorization": f"Bearer {token}"})
            return RouterState.model_validate_json(response.raise_for_status().content)
        except (OSError, httpx.HTTPError, ValueError):
            return None

    async def aclose(self) -> None:
        """Close its connections."""
        await self._client.aclose()
