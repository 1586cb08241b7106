"""The parts that the chart installs: the operator, of which one leads, and the autoscaler."""

from tests.kubernetes.nodes.installation import NAMESPACE
from tests.kubernetes.nodes.pods import Pod, list_pods
from tools.kubernetes.cluster import Cluster


def list_component_pods(cluster: Cluster, component: str) -> list[Pod]:
    """The pods of a component of the release."""
    return list_pods(cluster, NAMESPACE, f"app.kubernetes.io/component={component}")


def find_leading_operator(cluster: Cluster) -> Pod:
    """The operator that acts; LookupError while none does."""
    leases = cluster.read(f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases")["items"]
    holders = {lease["spec"].get("holderIdentity") for lease in leases}
    found = [pod for pod in list_component_pods(cluster, "operator") if pod.name in holders]
    if len(found) != 1:
        raise LookupError(f"{len(found)} operators lead")
    return found[0]


def find_active_autoscaler(cluster: Cluster) -> Pod:
    """The autoscaler, or that of several which acts."""
    found = [pod for pod in list_component_pods(cluster, "autoscaler") if pod.ready and not pod.terminating]
    if not found:
        raise LookupError("no autoscaler is ready")
    return found[0]


def has_restarted(cluster: Cluster, killed: Pod) -> bool:
    """Whether a pod whose process was killed runs another one, and is ready."""
    pods = list_pods(cluster, killed.namespace)
    return any(p.name == killed.name and p.ready and p.restarts > killed.restarts for p in pods)


def are_components_ready(cluster: Cluster) -> bool:
    """Whether every pod of the release is ready and stays."""
    pods = [*list_component_pods(cluster, "operator"), *list_component_pods(cluster, "autoscaler")]
    return len(pods) > 1 and all(pod.ready and not pod.terminating for pod in pods)
