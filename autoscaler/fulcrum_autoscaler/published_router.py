"""A router that is reached through the Service with the name of the PDService.

That Service may be somebody else's; then the operator publishes no endpoint in the PDService's status. The
token for state ports must not be sent there.
"""

from collections.abc import Callable

from fulcrum_autoscaler.loop import RouterClient
from fulcrum_cluster.router_client import RouterUnavailable
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.router_state import FlipRequest, RouterState


class PublishedRouter:
    """A `RouterClient` that calls the router only while the service's status has an endpoint.

    Args:
        router: Client of the router.
        service: Returns the latest known PDService.
    """

    def __init__(self, router: RouterClient, service: Callable[[], PDService | None]) -> None:
        self._router, self._service = router, service

    async def get_state(self, *, min_generation: int, timeout_s: float) -> RouterState:
        """See `RouterClient`."""
        self._check_published()
        return await self._router.get_state(min_generation=min_generation, timeout_s=timeout_s)

    async def wait_for_flip_request(self, *, after: int, timeout_s: float) -> FlipRequest | None:
        """See `RouterClient`."""
        self._check_published()
        return await self._router.wait_for_flip_request(after=after, timeout_s=timeout_s)

    def _check_published(self) -> None:
        service = self._service()
        if service is None or service.status.endpoint is None:
            raise RouterUnavailable("the status of the PDService has no endpoint")
