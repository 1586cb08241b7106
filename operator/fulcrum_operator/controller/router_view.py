"""`RouterView` of a cluster: a router's endpoint from the object cache, its state from its state port."""

from collections.abc import Callable
from pathlib import Path

from fulcrum_cluster.objects import ENDPOINT_SLICE
from fulcrum_cluster.router_client import HttpRouterClient, RouterUnavailable, open_http_client_for_all
from fulcrum_core.api import PDService
from fulcrum_core.router_state import RouterState
from fulcrum_operator.controller.cache import ObjectCache
from fulcrum_operator.controller.context import ServiceKey
from fulcrum_operator.controller.pods.router_pods import serves_tls
from fulcrum_operator.manifests.names import STATE_PORT, service_url

STATE_URL_TEMPLATE = f"http://{{service}}.{{namespace}}.svc:{STATE_PORT}"
_RESPONSE_TIMEOUT_S = 1.0


class ClusterRouterView:
    """`RouterView` of all services of a cluster. The owner calls `aclose`.

    Args:
        cache: Contains the EndpointSlice in which the active router of a service publishes its address.
        is_own_service: Returns whether the Service of this name is the service's: the token is sent to it.
        token_file: Token for the state ports; read for each request, since the kubelet replaces the file.
        state_url: URL of the state ports, with `{service}` and `{namespace}`.
    """

    def __init__(
        self,
        cache: ObjectCache,
        *,
        token_file: Path,
        is_own_service: Callable[[ServiceKey], bool],
        state_url: str = STATE_URL_TEMPLATE,
    ) -> None:
        self._cache, self._is_own_service, self._state_url = cache, is_own_service, state_url
        self._client = open_http_client_for_all(token_file)

    def endpoint(self, key: ServiceKey) -> str | None:
        """URL for the service's clients; None while no router is active."""
        endpoint_slice = self._cache.get_object(ENDPOINT_SLICE, key.namespace, f"{key.name}-router")
        endpoints = (endpoint_slice or {}).get("endpoints") or ()
        if not any(endpoint.get("conditions", {}).get("ready", True) for endpoint in endpoints):
            return None
        service = self._cache.get_resource(PDService, key.namespace, key.name)
        if service is None:
            return None
        return service_url(service, serves_tls=serves_tls(self._cache, service))

    async def read_state(self, key: ServiceKey) -> RouterState | None:
        """State of the active router; None if it does not respond or the Service is somebody else's."""
        if not self._is_own_service(key):
            return None
        client = HttpRouterClient(
            self._client, self._state_url.format(service=key.name, namespace=key.namespace)
        )
        try:
            return await client.get_state(response_margin_s=_RESPONSE_TIMEOUT_S)
        except RouterUnavailable:
            return None

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()
