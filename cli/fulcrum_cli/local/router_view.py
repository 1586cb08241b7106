"""The router's state port, as the operator reads it."""

import httpx

from fulcrum_cli.local.supervised_process import Program
from fulcrum_cluster.router_client import HttpRouterClient, RouterUnavailable
from fulcrum_core.ports import EngineState
from fulcrum_core.router_state import RouterState
from fulcrum_operator.controller.reconcile import ServiceKey

_RESPONSE_TIMEOUT_S = 0.5


class LocalRouter:
    """`RouterView` of a router that runs as a process of this machine. To be closed.

    Args:
        program: The router.
        host: The address that it listens on.
        token: What its state port asks for.
    """

    def __init__(self, program: Program, *, host: str, token: str) -> None:
        self._program, self._host = program, host
        self._client = httpx.AsyncClient(headers={"authorization": f"Bearer {token}"}, trust_env=False)

    def endpoint(self, key: ServiceKey) -> str | None:
        """Where clients reach it; None while it is down. A run has one service."""
        del key
        return self.url("port") if self._program.state is EngineState.RUNNING else None

    def url(self, port_name: str) -> str:
        """The URL of one of its ports, by the name in its ready line."""
        ports = self._program.ports or {}
        return f"http://{self._host}:{ports.get(port_name, 0)}"

    async def read_state(self, key: ServiceKey) -> RouterState | None:
        """What it says of its instances; None if it does not answer."""
        del key
        if self._program.state is not EngineState.RUNNING:
            return None
        try:
            client = HttpRouterClient(self._client, self.url("state_port"))
            return await client.get_state(response_margin_s=_RESPONSE_TIMEOUT_S)
        except RouterUnavailable:
            return None

    async def aclose(self) -> None:
        """Close its connections."""
        await self._client.aclose()
