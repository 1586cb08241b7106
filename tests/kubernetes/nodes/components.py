"""Finds the pods of operator and autoscaler, and the operator that leads."""

from tests.kubernetes.nodes.installation import NAMESPACE
from tests.kubernetes.nodes.pods import Pod, list_pods
from tools.kubernetes.cluster import Cluster


def list_component_pods(cluster: Cluster, component: str) -> list[Pod]:
    """Return the pods of a component of the release."""
    return list_pods(cluster, NAMESPACE, f"app.kubernetes.io/component={component}")


def find_leading_operator(cluster: Cluster) -> Pod:
    """Return the pod of the leading operator; LookupError if there is none."""
    leases = cluster.read(f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases")["items"]
    holders = {lease["spec"].get("holderIdentity") for lease in leases}
    found = [pod for pod in list_component_pods(cluster, "operator") if pod.name in holders]
    if len(found) != 1:
        raise LookupError(f"{len(found)} operators lead")
    return found[0]


def find_active_autoscaler(cluster: Cluster) -> Pod:
    """Return the first ready autoscaler pod; LookupError if there is none."""
    found = [pod for pod in list_component_pods(cluster, "autoscaler") if pod.ready and not pod.terminating]
    if not found:
        raise LookupError("no autoscaler is ready")
    return found[0]


def has_restarted(cluster: Cluster, killed: Pod) -> bool:
    """Whether the killed pod runs a new process and is ready."""
    pods = list_pods(cluster, killed.namespace)
    return any(p.name == killed.name and p.ready and p.restarts > killed.restarts for p in pods)


def are_components_ready(cluster: Cluster) -> bool:
    """Whether each pod of the release is ready and none is terminating."""
    pods = [*list_component_pods(cluster, "operator"), *list_component_pods(cluster, "autoscaler")]
    return len(pods) > 1 and all(pod.ready and not pod.terminating for pod in pods)
