"""Checks of pods: a node that fits, images that can be pulled, containers that keep running.

`examine` calls them for engines and routers, `components` for operator and autoscaler.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from fulcrum_cli.doctor.facts import Body
from fulcrum_cli.doctor.findings import Cause, CheckId, Finding, ok, problem, warning
from fulcrum_core.api import conditions
from fulcrum_core.api.quantity import parse_quantity
from fulcrum_core.formatting import format_count, format_list

_BLOCKING_EFFECTS = ("NoSchedule", "NoExecute")
_PODS_NAMED_MAX = 4
"""Pods named in one finding."""
_BINARY_UNITS = {"Ti": 2.0**40, "Gi": 2.0**30, "Mi": 2.0**20, "Ki": 2.0**10}

Resources = Mapping[str, float]
"""Amounts by resource name: cores, bytes, devices."""


def check_nodes(pods: Sequence[Body], nodes: Sequence[Body] | None, *, service: str = "") -> Finding:
    """Check that every pod has a node; if not, say why by the nodes (None if they could not be read)."""
    waiting = [(pod, message) for pod in pods if (message := _unschedulable_message(pod)) is not None]
    if not waiting:
        placed = sum(bool(pod["spec"].get("nodeName")) for pod in pods)
        return ok(CheckId.NODES, f"{placed} of {format_count(len(pods), 'pod')} on a node", service=service)
    pod, message = waiting[0]
    names = ", ".join(pod["metadata"]["name"] for pod, _ in waiting)
    observed = f"no node fits {names}: {message or 'the scheduler gives no reason'}"
    if nodes is None:
        advice = "see kubectl describe pod; this check has no permission to list nodes"
    else:
        observed += _describe_shortfall(pod, nodes)
        advice = _advise(pod, nodes)
    return problem(CheckId.NODES, observed, advice, service=service, cause=Cause.UNSCHEDULABLE)


def _unschedulable_message(pod: Body) -> str | None:
    """Return the scheduler's message on a pod that it cannot place; None for any other pod."""
    for condition in pod.get("status", {}).get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("message", ""))
    return None


def parse_resources(quantities: Mapping[str, str | int | float] | None) -> dict[str, float]:
    """Return the amounts of a Kubernetes resource list by resource name."""
    return {name: parse_quantity(amount) for name, amount in (quantities or {}).items()}


def format_amount(resource: str, amount: float) -> str:
    """Format an amount for people: `16Gi memory`, `4 nvidia.com/gpu`."""
    if resource == "memory" or resource.endswith("storage"):
        for suffix, factor in _BINARY_UNITS.items():
            if amount >= factor:
                return f"{amount / factor:.4g}{suffix} {resource}"
    return f"{amount:.4g} {resource}"


def pod_requests(pod: Body) -> dict[str, float]:
    """Return the pod's requests: the sum over its containers, but at least those of each init container."""
    total: dict[str, float] = {}
    for container in pod["spec"].get("containers", ()):
        for name, amount in parse_resources(container.get("resources", {}).get("requests")).items():
            total[name] = total.get(name, 0.0) + amount
    for container in pod["spec"].get("initContainers", ()):
        for name, amount in parse_resources(container.get("resources", {}).get("requests")).items():
            total[name] = max(total.get(name, 0.0), amount)
    return total


def _allocatable(node: Body) -> dict[str, float]:
    return parse_resources(node.get("status", {}).get("allocatable"))


def insufficient_resources(requests: Resources, node: Body) -> dict[str, float]:
    """Return the resources that even the empty node has too little of, with its allocatable amounts."""
    allocatable = _allocatable(node)
    return {
        name: allocatable.get(name, 0.0)
        for name, amount in requests.items()
        if allocatable.get(name, 0.0) < amount
    }


def blocking_taints(pod: Body, node: Body) -> list[str]:
    """List the node's taints that the pod does not tolerate."""
    tolerations = pod["spec"].get("tolerations", ())
    taints = [taint for taint in node["spec"].get("taints", ()) if taint.get("effect") in _BLOCKING_EFFECTS]
    blocking = [taint for taint in taints if not any(_tolerates(each, taint) for each in tolerations)]
    return [f"{taint['key']}={taint.get('value', '')}:{taint['effect']}" for taint in blocking]


def _tolerates(toleration: Body, taint: Body) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("key") in (None, ""):
        return toleration.get("operator") == "Exists"
    same = toleration["key"] == taint["key"]
    exists = toleration.get("operator") == "Exists"
    return same and (exists or toleration.get("value", "") == taint.get("value", ""))


def _describe_shortfall(pod: Body, nodes: Sequence[Body]) -> str:
    """Describe the resources that no node has enough of, even when empty; "" if a node is big enough."""
    requests = pod_requests(pod)
    shortfalls = [insufficient_resources(requests, node) for node in nodes]
    if not nodes or not all(shortfalls):
        return ""
    names = sorted(set.intersection(*(set(shortfall) for shortfall in shortfalls)) or set(shortfalls[0]))
    parts = [
        f"it requests {format_amount(name, requests[name])}, the largest node has "
        f"{format_amount(name, max(_allocatable(node).get(name, 0.0) for node in nodes))}"
        for name in names
    ]
    return f"; {'; '.join(parts)}"


def _advise(pod: Body, nodes: Sequence[Body]) -> str:
    if not nodes:
        return "the cluster has no node: add one"
    requests = pod_requests(pod)
    large_enough = [node for node in nodes if not insufficient_resources(requests, node)]
    if not large_enough:
        return "add larger nodes, or request less in spec.pools[].hardware or spec.pools[].template"
    taints_by_node = {node["metadata"]["name"]: blocking_taints(pod, node) for node in large_enough}
    if all(taints_by_node.values()):
        name, taints = min(taints_by_node.items())
        return f"tolerate {', '.join(taints)} (node {name}) in spec.pools[].template, or remove the taint"
    if all(node["spec"].get("unschedulable") for node in large_enough):
        return "all nodes that are large enough are cordoned: kubectl uncordon one"
    return "nodes that are large enough are full, or excluded by affinity: free one or add one"


def check_images(
    pods: Sequence[Body], *, service: str = "", image_setting: str = "spec.engine.image"
) -> Finding:
    """Check that every image can be pulled; `image_setting` is the setting that the advice refers to."""
    failing = [failure for pod in pods for failure in image_pull_failures(pod)]
    if failing:
        by_image = {image: [each for each in failing if each.image == image] for _, image, *_ in failing}
        return problem(
            CheckId.IMAGES, "; ".join(map(_format_pull_failures, by_image.values())),
            f"check {image_setting}, that the registry is reachable from the nodes, and the pull secret",
            service=service, cause=Cause.IMAGE_PULL_FAILED,
        )  # fmt: skip
    return ok(CheckId.IMAGES, f"{format_count(len(pods), 'pod')}, all with their image", service=service)


class ImagePullFailure(NamedTuple):
    """A container whose image cannot be pulled."""

    pod: str
    image: str
    reason: str
    message: str


def image_pull_failures(pod: Body) -> list[ImagePullFailure]:
    """List the pod's containers whose images cannot be pulled."""
    status = pod.get("status", {})
    found = []
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") in conditions.IMAGE_PULL_ERRORS:
            image, message = container.get("image", ""), waiting.get("message") or ""
            found.append(ImagePullFailure(pod["metadata"]["name"], image, waiting["reason"], message))
    return found


def _format_pull_failures(failures: Sequence[ImagePullFailure]) -> str:
    """Describe the failures of one image.

    The longest message is the most informative: that of a pod in back-off has no cause.
    """
    names = list(dict.fromkeys(failure.pod for failure in failures))
    best = max(failures, key=lambda failure: len(failure.message))
    why = f": {best.message}" if best.message else ""
    return f"{format_list(names, at_most=_PODS_NAMED_MAX)}: {best.reason} {best.image}{why}"


def check_restarts(pods: Sequence[Body], *, service: str = "") -> Finding:
    """Check that no container restarts repeatedly."""
    looping = [
        f"{pod['metadata']['name']} ({format_count(container.get('restartCount', 0), 'restart')})"
        for pod in pods
        for container in pod.get("status", {}).get("containerStatuses", ())
        if (container.get("state", {}).get("waiting") or {}).get("reason") == "CrashLoopBackOff"
    ]
    if looping:
        advice = "see kubectl logs --previous of the pod for the cause"
        return warning(
            CheckId.RESTARTS, f"restarting repeatedly: {', '.join(looping)}", advice, service=service
        )
    return ok(CheckId.RESTARTS, "no container restarts repeatedly", service=service)
