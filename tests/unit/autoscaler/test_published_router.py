"""The token for state ports goes to no Service that may be somebody else's."""

import contextlib

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


def service(endpoint: str | None, *, state_tls: bool = False) -> PDService:
    status = {"endpoint": endpoint, "stateTls": state_tls}
    return PDService.model_validate({"metadata": {"name": "chat"}, "spec": {"model": "m"}, "status": status})


async def count_calls(known: PDService) -> tuple[int, int]:
    """Calls of the state port without TLS, and with it, when the service's status is this one."""
    plain, encrypted = NoFlipRequests(), NoFlipRequests()
    with contextlib.suppress(RouterUnavailable):
        await PublishedRouter(plain, encrypted, lambda: known).wait_for_flip_request(after=0, timeout_s=1)
    return plain.calls, encrypted.calls


async def test_a_router_is_called_only_while_the_service_has_an_endpoint() -> None:
    assert await count_calls(service(None)) == (0, 0)
    assert await count_calls(service("http://chat")) == (1, 0)


async def test_a_state_port_with_tls_is_not_called_without() -> None:
    assert await count_calls(service("http://chat", state_tls=True)) == (0, 1)
