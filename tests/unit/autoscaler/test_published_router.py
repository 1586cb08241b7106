"""The token for state ports goes to no Service that may be somebody else's."""

import pytest

from fulcrum_autoscaler.published_router import PublishedRouter
from fulcrum_cluster.router_client import RouterUnavailable
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.router_state import FlipRequest, RouterState


class NoFlipRequests:
    """A router that counts calls."""

    def __init__(self) -> None:
        self.calls = 0

    async def get_state(self, *, min_generation: int, timeout_s: float) -> RouterState:  # noqa: ARG002
        raise AssertionError("not called")

    async def wait_for_flip_request(self, *, after: int, timeout_s: float) -> FlipRequest | None:  # noqa: ARG002
        self.calls += 1
        return None


def service(endpoint: str | None) -> PDService:
    manifest = {"metadata": {"name": "chat"}, "spec": {"model": "m"}, "status": {"endpoint": endpoint}}
    return PDService.model_validate(manifest)


async def test_a_router_is_called_only_while_the_service_has_an_endpoint() -> None:
    router = NoFlipRequests()
    with pytest.raises(RouterUnavailable):
        await PublishedRouter(router, lambda: service(None)).wait_for_flip_request(after=0, timeout_s=1)
    assert router.calls == 0
    await PublishedRouter(router, lambda: service("http://chat")).wait_for_flip_request(after=0, timeout_s=1)
    assert router.calls == 1
