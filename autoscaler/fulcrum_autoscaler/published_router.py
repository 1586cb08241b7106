"""Calls a router only while the operator has published its endpoint in the PDService's status.

A router is reached through the Service with the name of the PDService, and that Service may be somebody
else's. Then the operator publishes no endpoint, and the token for state ports must not be sent there: the
router counts as unavailable. The status also says whether the state port serves TLS. `program` gives it to
every loop.
"""

from collections.abc import Callable

from fulcrum_autoscaler.loop import RouterClient
from fulcrum_cluster.router_client import RouterUnavailable
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.router_state import FlipRequest, RouterState


class PublishedRouter:
    """A `RouterClient` that calls the router only while the service's status has an endpoint.

    Args:
        plain: Client of a state port without TLS.
        encrypted: Client of a state port with TLS.
        service: Returns the latest known PDService.
    """

    def __init__(
        self, plain: RouterClient, encrypted: RouterClient, service: Callable[[], PDService | None]
    ) -> None:
        self._plain, self._encrypted, self._service = plain, encrypted, service

    async def get_state(self, *, min_generation: int, timeout_s: float) -> RouterState:
        """See `RouterClient`."""
        return await self._find_router().get_state(min_generation=min_generation, timeout_s=timeout_s)

    async def wait_for_flip_request(self, *, after: int, timeout_s: float) -> FlipRequest | None:
        """See `RouterClient`."""
        return await self._find_router().wait_for_flip_request(after=after, timeout_s=timeout_s)

    def _find_router(self) -> RouterClient:
        service = self._service()
        if service is None or service.status.endpoint is None:
            raise RouterUnavailable("the status of the PDService has no endpoint")
        return self._encrypted if service.status.state_tls else self._plain
