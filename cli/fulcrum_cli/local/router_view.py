"""`RouterView` of a local run: endpoint and state of the router process.

The operator's reconcile in `run` reads it; a cluster has `fulcrum_operator.controller.router_view`.
"""

import httpx

from fulcrum_cli.local.supervised_process import Program
from fulcrum_cluster.router_client import HttpRouterClient, RouterUnavailable
from fulcrum_core.ports import EngineState
from fulcrum_core.router_state import RouterState
from fulcrum_operator.controller.context import ServiceKey

_RESPONSE_TIMEOUT_S = 0.5


class LocalRouterView:
    """`RouterView` of the one router of a local run. The owner calls `aclose`.

    Args:
        program: The router process.
        host: Address that the router listens on.
        token: Token for the router's state port.
    """

    def __init__(self, program: Program, *, host: str, token: str) -> None:
        self._program, self._host = program, host
        self._client = httpx.AsyncClient(headers={"authorization": f"Bearer {token}"}, trust_env=False)

    def endpoint(self, key: ServiceKey) -> str | None:
        """URL for clients; None while the router does not run. A local run has one service."""
        del key
        return self.url("port") if self._program.state is EngineState.RUNNING else None

    def url(self, port_name: str) -> str:
        """URL of one of the router's ports, by the port's name in the ready line."""
        ports = self._program.ports or {}
        return f"http://{self._host}:{ports.get(port_name, 0)}"

    async def read_state(self, key: ServiceKey) -> RouterState | None:
        """State of the router; None if the router does not run or does not respond."""
        del key
        if self._program.state is not EngineState.RUNNING:
            return None
        try:
            client = HttpRouterClient(self._client, self.url("state_port"))
            return await client.get_state(response_margin_s=_RESPONSE_TIMEOUT_S)
        except RouterUnavailable:
            return None

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()
