"""Reads and changes one PDService of a test cluster, and sends requests to it; every scenario gets one."""

import contextlib
import datetime
import http.client
import json
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from tests.kubernetes.nodes.pods import Pod, list_pods
from tools.kubernetes.cluster import Cluster
from tools.kubernetes.waiting import wait_for

API = "/apis/fulcrum.dev/v1alpha1"
MODEL = "laptop-1b"
INSTANCES = 4

MANIFEST = f"""
apiVersion: fulcrum.dev/v1alpha1
kind: PDService
metadata: {{name: chat}}
spec:
  model: {MODEL}
  instances: {INSTANCES}
  engine: {{type: Simulated, profile: laptop}}
"""

Object = dict[str, Any]

_OPPOSITE_ROLE = {"Prefill": "Decode", "Decode": "Prefill"}


class DeployedService:
    """One PDService: reads and writes its objects and pods with administrator permissions.

    It does not create or delete the service.
    """

    def __init__(self, cluster: Cluster, namespace: str, name: str) -> None:
        self._cluster, self._namespace, self._name = cluster, namespace, name

    # -- objects --

    def read(self, plural: str, name: str | None = None) -> Object:
        """Return one object of a kind of ours; by default the one with the service's name."""
        response: Object = self._cluster.read(f"{self._path(plural)}/{name or self._name}")
        return response

    def exists(self) -> bool:
        """Whether the PDService exists."""
        with contextlib.suppress(LookupError):
            return bool(self.read("pdservices"))
        return False

    def patch(self, plural: str, change: Object, *, name: str | None = None) -> Object:
        """Send a merge patch; RuntimeError with the response if the API server refuses the patch."""
        status, body = self._cluster.request(
            "PATCH",
            f"{self._path(plural)}/{name or self._name}",
            json.dumps(change).encode(),
            content_type="application/merge-patch+json",
        )
        if status != 200:
            raise RuntimeError(body.decode())
        response: Object = json.loads(body)
        return response

    def restore_spec(self) -> None:
        """Set what tests change to the values of a service made from MANIFEST, not to earlier values.

        These are instances, pools, SLO, QoS tiers, admission, autoscaling mode, flip strategy and engine
        arguments. Other fields keep their values, also the image.
        """
        autoscaling = {"mode": "Auto", "flip": {"strategy": "Auto"}}
        spec = {"instances": INSTANCES, "autoscaling": autoscaling, "engine": {"args": []}}
        absent = {"pools": None, "slo": None, "qosTiers": None, "router": {"admission": None}}
        self.patch("pdservices", {"spec": {**spec, **absent}})

    def read_assignment_entries(self) -> dict[str, Object]:
        """Return the entry of each instance in the PDAssignment's spec, by name."""
        entries: dict[str, Object] = self.read("pdassignments")["spec"].get("roles", {})
        return entries

    def instances(self) -> dict[str, Object]:
        """Return the status of each PDInstance of the service, by name."""
        items = self._cluster.read(self._path("pdinstances"))["items"]
        return {
            item["metadata"]["name"]: item.get("status", {})
            for item in items
            if item["spec"]["service"] == self._name
        }

    def serves_role(self, instance: str, role: str) -> bool:
        """Whether the instance serves in this role."""
        status = self.instances()[instance]
        return (status.get("phase"), status.get("role")) == ("Serving", role)

    def flip_one_instance(self) -> tuple[str, str]:
        """Flip one instance of the role with more instances, as a person; return its name and new role."""
        roles = {name: entry["role"] for name, entry in self.read_assignment_entries().items()}
        most = max(("Decode", "Prefill"), key=list(roles.values()).count)
        name = min(name for name, role in roles.items() if role == most)
        self._write_roles({name: _OPPOSITE_ROLE[most]})
        return name, _OPPOSITE_ROLE[most]

    def swap_roles(self) -> float:
        """Flip all instances in one write, as a person; return the time just before it (`time.monotonic`).

        With one prefill and one decode instance this is the only flip that the floors allow.
        """
        return self._write_roles(
            {name: _OPPOSITE_ROLE[entry["role"]] for name, entry in self.read_assignment_entries().items()}
        )

    def _write_roles(self, roles: dict[str, str]) -> float:
        since = datetime.datetime.fromtimestamp(time.time(), datetime.UTC).isoformat().replace("+00:00", "Z")
        attribution = {"since": since, "by": "Person", "reason": "a scenario"}
        entries = {name: {"role": role, **attribution} for name, role in roles.items()}
        began_s = time.monotonic()
        self.patch("pdassignments", {"spec": {"roles": entries}})
        return began_s

    def phases(self) -> Counter[str]:
        """Return the number of instances in each phase."""
        return Counter(status.get("phase", "Pending") for status in self.instances().values())

    def condition(self, kind: str) -> Object:
        """Return one condition of the PDService; empty if it is not set."""
        conditions = self.read("pdservices").get("status", {}).get("conditions", [])
        return next((c for c in conditions if c["type"] == kind), {})

    def messages(self) -> dict[str, str]:
        """Return the messages of the service's Events by reason; messages with one reason are joined."""
        messages: dict[str, str] = {}
        for event in self._cluster.read(f"/api/v1/namespaces/{self._namespace}/events")["items"]:
            if event["involvedObject"]["name"] == self._name:
                messages[event["reason"]] = f"{messages.get(event['reason'], '')} {event['message']}"
        return messages

    # -- pods --

    def engines(self) -> list[Pod]:
        """Return the engine pods."""
        labels = f"fulcrum.dev/service={self._name},app.kubernetes.io/name=fulcrum-engine"
        return list_pods(self._cluster, self._namespace, labels)

    def routers(self) -> list[Pod]:
        """Return the router pods, active and standby."""
        labels = f"fulcrum.dev/router={self._name},app.kubernetes.io/name=fulcrum-router"
        return list_pods(self._cluster, self._namespace, labels)

    def active_router(self) -> Pod:
        """Return the router that the Service directs traffic to; LookupError unless there is exactly one."""
        addresses = self.endpoints()
        found = [pod for pod in self.routers() if pod.address in addresses]
        if len(found) != 1:
            raise LookupError(f"{len(found)} active routers")
        return found[0]

    def endpoints(self) -> list[str]:
        """Return the ready router addresses in the Service's EndpointSlices."""
        selector = f"labelSelector=kubernetes.io%2Fservice-name%3D{self._name}"
        path = f"/apis/discovery.k8s.io/v1/namespaces/{self._namespace}/endpointslices?{selector}"
        slices = self._cluster.read(path)["items"]
        endpoints = [endpoint for item in slices for endpoint in item.get("endpoints") or ()]
        return [e["addresses"][0] for e in endpoints if (e.get("conditions") or {}).get("ready", True)]

    def find_duplicate_endpoints(self) -> list[str]:
        """Return the engine endpoints that more than one serving PDInstance has in its status."""
        claims = Counter(s.get("endpoint") for s in self.instances().values() if s.get("phase") == "Serving")
        return [str(endpoint) for endpoint, claimed in claims.items() if claimed > 1]

    # -- traffic --

    def address(self) -> str:
        """Return the Service's cluster address."""
        path = f"/api/v1/namespaces/{self._namespace}/services/{self._name}"
        address: str = self._cluster.read(path)["spec"]["clusterIP"]
        return address

    def receives_first_token(self, node: str) -> bool:
        """Request a completion from `node`; return whether the stream begins with a JSON event.

        Raises LookupError as `stream` does, and OSError without a connection.
        """
        with self.stream(node, tokens=4) as response:
            return response.readline().startswith(b"data: {")

    @contextlib.contextmanager
    def stream(
        self,
        node: str,
        *,
        tokens: int,
        headers: Mapping[str, str] | None = None,
        statuses: Collection[int] = (200,),
    ) -> Iterator[http.client.HTTPResponse]:
        """Request a streamed completion at the Service's address, from the network of `node`.

        LookupError if the status is not one of `statuses`.
        """
        body = json.dumps({"model": MODEL, "prompt": "Hello", "max_tokens": tokens, "stream": True})
        address = self.address()
        with self._cluster.nodes[node].enter_network():
            connection = http.client.HTTPConnection(address, 80, timeout=5)
            connection.connect()
        with contextlib.closing(connection):
            sent = {"Content-Type": "application/json", **(headers or {})}
            connection.request("POST", "/v1/completions", body, sent)
            response = connection.getresponse()
            if response.status not in statuses:
                raise LookupError(f"{response.status} {response.read()[:200]!r}")
            yield response

    # -- readiness --

    def is_fully_ready(self, instances: int = INSTANCES, *, routers: int = 2) -> bool:
        """Whether exactly `instances` serve with ready pods, and exactly `routers` are ready, one active."""
        engines, router_pods = self.engines(), self.routers()
        return (
            self.phases() == {"Serving": instances}
            and len(engines) == instances
            and all(pod.ready and not pod.terminating for pod in engines)
            and [pod.ready and not pod.terminating for pod in router_pods] == [True] * routers
            and len(self.endpoints()) == 1
        )

    def is_fully_ready_without(self, node: str, instances: int = INSTANCES) -> bool:
        """Whether the service is fully ready on the other nodes, with two routers, one of them active.

        Pods that are not ready are ignored. No instance on this node may be in phase Serving. LookupError
        unless exactly one router is active.
        """
        engines = [pod for pod in self.engines() if pod.ready and not pod.terminating and pod.node != node]
        routers = [pod for pod in self.routers() if pod.ready and not pod.terminating and pod.node != node]
        serving = self.phases()["Serving"]
        return (len(engines), serving, len(routers)) == (instances, instances, 2) and (
            self.active_router() in routers
        )

    def wait_until_ready(
        self, instances: int = INSTANCES, *, routers: int = 2, timeout_s: float = 60.0
    ) -> float:
        """Wait until `is_fully_ready`; return the seconds. A TimeoutError lists all instances and pods."""
        try:
            return wait_for(
                lambda: self.is_fully_ready(instances, routers=routers),
                f"{instances} instances",
                timeout_s=timeout_s,
            )
        except TimeoutError as error:
            for name, status in self.instances().items():
                error.add_note(f"{name}: {status.get('phase')} {status.get('message')}")
            for pod in (*self.engines(), *self.routers()):
                error.add_note(
                    f"pod {pod.name} on {pod.node}: ready={pod.ready} terminating={pod.terminating}"
                )
            error.add_note(f"endpoints of the Service: {self.endpoints()}")
            raise

    def _path(self, plural: str) -> str:
        return f"{API}/namespaces/{self._namespace}/{plural}"
