"""Can the pods run: is there a node that fits, and does their image come?"""

from collections.abc import Sequence
from typing import NamedTuple

from fulcrum_cli.doctor.facts import Body
from fulcrum_cli.doctor.findings import Finding, ok, problem, warning
from fulcrum_cli.doctor.quantities import Resources, format_amount, parse_resources
from fulcrum_core.api import conditions
from fulcrum_core.formatting import format_count, format_list

_BLOCKING_EFFECTS = ("NoSchedule", "NoExecute")
_PODS_NAMED_MAX = 4
"""So many pods are named."""


def check_nodes(pods: Sequence[Body], nodes: Sequence[Body] | None, *, service: str = "") -> Finding:
    """Whether every pod has a node, and those without one could have one. None: nodes could not be read."""
    waiting = [(pod, message) for pod in pods if (message := _unschedulable_message(pod)) is not None]
    if not waiting:
        placed = sum(bool(pod["spec"].get("nodeName")) for pod in pods)
        return ok("nodes", f"{placed} of {format_count(len(pods), 'pod')} on a node", service=service)
    pod, message = waiting[0]
    names = ", ".join(pod["metadata"]["name"] for pod, _ in waiting)
    observed = f"no node fits {names}: {message or 'the scheduler does not say why'}"
    if nodes is None:
        return problem(
            "nodes", observed, "kubectl describe the pod; nodes could not be looked at", service=service
        )
    return problem(
        "nodes", f"{observed}{_describe_shortfall(pod, nodes)}", _advise(pod, nodes), service=service
    )


def _unschedulable_message(pod: Body) -> str | None:
    """The scheduler's word on a pod that it cannot place; None if there is no such word."""
    for condition in pod.get("status", {}).get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("message", ""))
    return None


def pod_requests(pod: Body) -> dict[str, float]:
    """What the pod's containers ask of a node together, and at least what an init container does."""
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
    """What even the empty node has too little of, and how much it has."""
    allocatable = _allocatable(node)
    return {
        name: allocatable.get(name, 0.0)
        for name, amount in requests.items()
        if allocatable.get(name, 0.0) < amount
    }


def blocking_taints(pod: Body, node: Body) -> list[str]:
    """The node's taints that keep the pod away."""
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
    """What the nodes have too little of even when they are empty."""
    requests = pod_requests(pod)
    shortfalls = [insufficient_resources(requests, node) for node in nodes]
    if not nodes or not all(shortfalls):
        return ""
    names = sorted(set.intersection(*(set(shortfall) for shortfall in shortfalls)) or set(shortfalls[0]))
    parts = [
        f"it asks for {format_amount(name, requests[name])}, the most that a node has is "
        f"{format_amount(name, max(_allocatable(node).get(name, 0.0) for node in nodes))}"
        for name in names
    ]
    return f"; {'; '.join(parts)}"


def _advise(pod: Body, nodes: Sequence[Body]) -> str:
    if not nodes:
        return "there is no node: add one"
    requests = pod_requests(pod)
    big_enough = [node for node in nodes if not insufficient_resources(requests, node)]
    if not big_enough:
        return "add nodes of that size, or ask for less in spec.pools[].hardware or spec.pools[].template"
    taints_by_node = {node["metadata"]["name"]: blocking_taints(pod, node) for node in big_enough}
    if all(taints_by_node.values()):
        name, taints = min(taints_by_node.items())
        return f"tolerate {', '.join(taints)} (node {name}) in spec.pools[].template, or take the taint away"
    if all(node["spec"].get("unschedulable") for node in big_enough):
        return "all nodes that are big enough are cordoned: kubectl uncordon one"
    return "nodes that are big enough are full, or affinity keeps the pod away: free one or add one"


def check_images(
    pods: Sequence[Body], *, service: str = "", image_setting: str = "spec.engine.image"
) -> Finding:
    """Whether every container has its image; `image_setting` is where the image is written down."""
    failing = [failure for pod in pods for failure in image_pull_failures(pod)]
    if failing:
        by_image = {image: [each for each in failing if each.image == image] for _, image, *_ in failing}
        return problem(
            "images", "; ".join(map(_format_pull_failures, by_image.values())),
            f"check {image_setting}, that the registry is reachable from the nodes, and the pull secret",
            service=service,
        )  # fmt: skip
    return ok("images", f"no pod of {len(pods)} waits for its image", service=service)


class ImagePullFailure(NamedTuple):
    """A container whose image does not come."""

    pod: str
    image: str
    reason: str
    message: str


def image_pull_failures(pod: Body) -> list[ImagePullFailure]:
    """The pod's containers whose images do not come."""
    status = pod.get("status", {})
    found = []
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") in conditions.IMAGE_PULL_ERRORS:
            image, message = container.get("image", ""), waiting.get("message") or ""
            found.append(ImagePullFailure(pod["metadata"]["name"], image, waiting["reason"], message))
    return found


def _format_pull_failures(failures: Sequence[ImagePullFailure]) -> str:
    """Those of one image; the longest message says most, where some pods only wait for the next try."""
    names = list(dict.fromkeys(failure.pod for failure in failures))
    best = max(failures, key=lambda failure: len(failure.message))
    why = f": {best.message}" if best.message else ""
    return f"{format_list(names, at_most=_PODS_NAMED_MAX)}: {best.reason} {best.image}{why}"


def check_restarts(pods: Sequence[Body], *, service: str = "") -> Finding:
    """Whether a container is started again and again."""
    looping = [
        f"{pod['metadata']['name']} ({format_count(container.get('restartCount', 0), 'restart')})"
        for pod in pods
        for container in pod.get("status", {}).get("containerStatuses", ())
        if (container.get("state", {}).get("waiting") or {}).get("reason") == "CrashLoopBackOff"
    ]
    if looping:
        advice = "kubectl logs --previous of the pod says why it ended"
        return warning("restarts", f"ended again and again: {', '.join(looping)}", advice, service=service)
    return ok("restarts", "no container ends again and again", service=service)
