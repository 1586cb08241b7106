"""`RouterView` of a cluster: a router's endpoint from the object cache, its state from its state port.

The scheme of the state port is that of the active router, which may differ from the spec during a roll-out.
`leader` gives it to reconciles; a local run has `fulcrum_cli.local.router_view`.
"""

from collections.abc import Callable
from pathlib import Path

from fulcrum_cluster.objects import ENDPOINT_SLICE
from fulcrum_cluster.router_client import (
    HttpRouterClient,
    RouterTlsFailed,
    RouterUnavailable,
    open_http_client_for_all,
    with_tls,
)
from fulcrum_core.api import PDService, conditions
from fulcrum_core.router_state import RouterState
from fulcrum_operator.controller.cache import ObjectCache
from fulcrum_operator.controller.context import ServiceKey
from fulcrum_operator.controller.pods.router_pods import serves_state_tls, serves_tls
from fulcrum_operator.manifests.names import STATE_PORT, service_url
from fulcrum_operator.plan.observed import FailureCause

STATE_URL_TEMPLATE = f"http://{{service}}.{{namespace}}.svc:{STATE_PORT}"
_RESPONSE_TIMEOUT_S = 1.0


class ClusterRouterView:
    """`RouterView` of all services of a cluster. The owner calls `aclose`.

    Args:
        cache: Contains the EndpointSlice in which the active router of a service publishes its address.
        is_own_service: Returns whether the Service of this name is the service's: the token is sent to it.
        token_file: Token for the state ports; read for each request, since the kubelet replaces the file.
        state_url: URL of the state ports, with `{service}` and `{namespace}`.
        ca_file: Authorities of state ports with TLS, as PEM; None: their certificates are not accepted.
    """

    def __init__(
        self,
        cache: ObjectCache,
        *,
        token_file: Path,
        is_own_service: Callable[[ServiceKey], bool],
        state_url: str = STATE_URL_TEMPLATE,
        ca_file: Path | None = None,
    ) -> None:
        self._cache, self._is_own_service, self._state_url = cache, is_own_service, state_url
        self._client, self._ca_file = open_http_client_for_all(token_file, ca_file=ca_file), ca_file
        self._tls_failures = dict[ServiceKey, str]()
        """Why the last request for the state of a service failed, by service, if TLS was the reason."""

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
        url = self._state_url.format(service=key.name, namespace=key.namespace)
        client = HttpRouterClient(self._client, with_tls(url) if self.serves_state_tls(key) else url)
        try:
            state = await client.get_state(response_margin_s=_RESPONSE_TIMEOUT_S)
        except RouterTlsFailed as error:
            self._tls_failures[key] = str(error)
            return None
        except RouterUnavailable:
            return None
        self._tls_failures.pop(key, None)
        return state

    def serves_state_tls(self, key: ServiceKey) -> bool:
        """Whether the state port of the service's active router serves TLS."""
        service = self._cache.get_resource(PDService, key.namespace, key.name)
        return service is not None and serves_state_tls(self._cache, service)

    def problems(self, key: ServiceKey) -> tuple[FailureCause, ...]:
        """Why the state of the router cannot be read, if a person has to change something."""
        why = self._tls_failures.get(key)
        if why is None or not self.serves_state_tls(key):
            self._tls_failures.pop(key, None)
            return ()
        advice = (
            ""
            if self._ca_file
            else "; the operator trusts no authority: set router.stateCASecret of the chart"
        )
        text = f"the state port of the router: {why}{advice}; nothing flips until its state can be read"
        return (FailureCause(conditions.STATE_PORT_UNTRUSTED, text, "state-port"),)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()
