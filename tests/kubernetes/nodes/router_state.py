"""Client of the active router's state port, with an autoscaler's token."""

import contextlib
import http.client
import json

from fulcrum_core.router_state import STATE_PORT_AUDIENCE, RouterState
from tests.kubernetes.nodes.installation import NAMESPACE
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.waiting import wait_for

PORT = 9091
MAX_ATTEMPTS = 20


class StatePort:
    """The state port behind a Service's address, over one connection to the active router."""

    def __init__(self, cluster: Cluster, address: str, node: str) -> None:
        self._cluster, self._address, self._node = cluster, address, node
        self._token = create_autoscaler_token(cluster)
        self._connection = self._connect()

    def read(self, *, min_generation: int = 0, timeout_s: float = 5.0) -> RouterState:
        """Return the router state once that generation is applied, or at the time-out.

        Callers check its generation. Reconnects after an error or a refusal, for example if the router is now
        a standby.

        Raises:
            LookupError: No attempt of `MAX_ATTEMPTS` returned a state.
            TimeoutError: Nothing accepts a connection for 10 s.
        """
        path = f"/state?min_generation={min_generation}&timeout_s={timeout_s}"
        status, body = 0, b""
        for _ in range(MAX_ATTEMPTS):
            with contextlib.suppress(OSError, http.client.HTTPException):
                self._connection.request("GET", path, headers={"Authorization": f"Bearer {self._token}"})
                response = self._connection.getresponse()
                status, body = response.status, response.read()
                if status == 200:
                    return RouterState.model_validate_json(body)
            self.close()
            wait_for(lambda: self._reconnect(), "a state port", timeout_s=10)
        raise LookupError(f"the state port responded {status} {body[:200]!r}")

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def _reconnect(self) -> bool:
        self._connection = self._connect()
        return True

    def _connect(self) -> http.client.HTTPConnection:
        with self._cluster.nodes[self._node].enter_network():
            connection = http.client.HTTPConnection(self._address, PORT, timeout=15)
            connection.connect()
        return connection


def open_state_port(
    cluster: Cluster, address: str, *, node: str = "n1"
) -> contextlib.AbstractContextManager[StatePort]:
    """Open the state port behind this Service's address; closed at the end of the block."""
    return contextlib.closing(StatePort(cluster, address, node))


def create_autoscaler_token(cluster: Cluster) -> str:
    """Create a token like the one that the autoscaler's pod mounts."""
    accounts = cluster.read(f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts")["items"]
    names = [account["metadata"]["name"] for account in accounts]
    name = next(name for name in names if name.endswith("autoscaler"))
    request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"audiences": [STATE_PORT_AUDIENCE]},
    }
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{name}/token"
    status, body = cluster.request("POST", path, json.dumps(request).encode())
    if status != 201:
        raise LookupError(f"no token for {name}: {body[:200]!r}")
    token: str = json.loads(body)["status"]["token"]
    return token
