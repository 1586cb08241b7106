"""Pods as values, and signals to their processes: how a scenario kills or suspends a program."""

import signal
from dataclasses import dataclass
from typing import Any, Self

from tools.kubernetes.cluster import Cluster


@dataclass(frozen=True, slots=True)
class Pod:
    """The fields of a pod that scenarios use."""

    name: str
    namespace: str
    uid: str
    node: str
    address: str
    ready: bool
    terminating: bool
    image: str
    restarts: int
    containers: tuple[str, ...]
    labels: dict[str, str]

    @classmethod
    def from_object(cls, body: dict[str, Any]) -> Self:
        """Build the value from the API object."""
        meta, spec, status = body["metadata"], body["spec"], body.get("status", {})
        containers = status.get("containerStatuses") or []
        conditions = {c["type"]: c["status"] for c in status.get("conditions") or []}
        return cls(
            name=meta["name"],
            namespace=meta["namespace"],
            uid=meta["uid"],
            node=spec.get("nodeName", ""),
            address=status.get("podIP", ""),
            ready=conditions.get("Ready") == "True",
            terminating="deletionTimestamp" in meta,
            image=spec["containers"][0]["image"],
            restarts=sum(c["restartCount"] for c in containers),
            containers=tuple((c.get("containerID") or "").removeprefix("containerd://") for c in containers),
            labels=meta.get("labels", {}),
        )


def list_pods(cluster: Cluster, namespace: str, labels: str = "") -> list[Pod]:
    """Return the namespace's pods with these labels, sorted by name."""
    query = f"?labelSelector={labels.replace('=', '%3D').replace(',', '%2C')}" if labels else ""
    items = cluster.read(f"/api/v1/namespaces/{namespace}/pods{query}")["items"]
    return sorted((Pod.from_object(item) for item in items), key=lambda pod: pod.name)


def signal_pod(cluster: Cluster, pod: Pod, number: signal.Signals) -> None:
    """Send a signal to the first process of the pod's first container, from its node."""
    node = cluster.nodes[pod.node]
    tasks = node.run("ctr", "--namespace=k8s.io", "tasks", "ls").splitlines()
    found = [line.split()[1] for line in tasks if line.split()[0] == pod.containers[0]]
    if not found:
        raise LookupError(f"pod {pod.name} runs no container on {pod.node}")
    node.run("kill", f"-{number.name.removeprefix('SIG')}", found[0])
