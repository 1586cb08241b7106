"""The state port of a service's active router, read as the autoscaler reads it: with its token."""

import contextlib
import http.client
import json
from collections.abc import Iterator

from fulcrum_core.state import RouterState
from tests.kubernetes.nodes.installation import NAMESPACE
from tools.kubernetes.cluster import Cluster

AUDIENCE = "fulcrum.dev/router-state"
PORT = 9091


class StatePort:
    """One connection to the state port, kept open between two questions."""

    def __init__(self, connection: http.client.HTTPConnection, token: str) -> None:
        self._connection, self._token = connection, token

    def read(self, *, min_generation: int = 0, timeout_s: float = 5.0) -> RouterState:
        """What the router says as soon as it has applied that generation; LookupError if it will not."""
        path = f"/state?min_generation={min_generation}&timeout_s={timeout_s}"
        self._connection.request("GET", path, headers={"Authorization": f"Bearer {self._token}"})
        answer = self._connection.getresponse()
        body = answer.read()
        if answer.status != 200:
            raise LookupError(f"the state port says {answer.status} {body[:200]!r}")
        return RouterState.model_validate_json(body)


@contextlib.contextmanager
def state_port(cluster: Cluster, address: str, *, node: str = "n1") -> Iterator[StatePort]:
    """The state port of the router that this Service's address leads to."""
    token = autoscaler_token(cluster)
    with cluster.nodes[node].network():
        connection = http.client.HTTPConnection(address, PORT, timeout=15)
        connection.connect()
    with contextlib.closing(connection):
        yield StatePort(connection, token)


def autoscaler_token(cluster: Cluster) -> str:
    """A token such as the autoscaler's pod has mounted."""
    accounts = cluster.read(f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts")["items"]
    names = [account["metadata"]["name"] for account in accounts]
    name = next(name for name in names if name.endswith("autoscaler"))
    request = {
        "apiVersion": "authentication.k8s.io/v1",
        "kind": "TokenRequest",
        "spec": {"audiences": [AUDIENCE]},
    }
    path = f"/api/v1/namespaces/{NAMESPACE}/serviceaccounts/{name}/token"
    status, body = cluster.request("POST", path, json.dumps(request).encode())
    if status != 201:
        raise LookupError(f"no token for {name}: {body[:200]!r}")
    token: str = json.loads(body)["status"]["token"]
    return token
