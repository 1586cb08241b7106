"""Can the pods run: is there a node that fits, and does their image come?"""

from collections.abc import Sequence
from typing import NamedTuple

from fulcrum_cli.doctor.facts import Body
from fulcrum_cli.doctor.findings import Finding, ok, problem, warning
from fulcrum_cli.doctor.quantities import Resources, parse_resources, spell
from fulcrum_core.spelling import format_count, format_list
from fulcrum_operator.plan.status.degraded import PULL_FAILURES

_BARRING = ("NoSchedule", "NoExecute")
_TOLD = 4
"""So many pods are named."""


def check_nodes(pods: Sequence[Body], nodes: Sequence[Body] | None, *, about: str = "") -> Finding:
    """Whether every pod has a node, and those without one could have one. None: nodes could not be read."""
    waiting = [(pod, message) for pod in pods if (message := _unschedulable(pod)) is not None]
    if not waiting:
        placed = sum(bool(pod["spec"].get("nodeName")) for pod in pods)
        return ok("nodes", f"{placed} of {format_count(len(pods), 'pod')} on a node", about=about)
    pod, message = waiting[0]
    names = ", ".join(pod["metadata"]["name"] for pod, _ in waiting)
    seen = f"no node fits {names}: {message or 'the scheduler does not say why'}"
    if nodes is None:
        return problem("nodes", seen, "kubectl describe the pod; nodes could not be looked at", about=about)
    return problem("nodes", f"{seen}{_best(pod, nodes)}", _advice(pod, nodes), about=about)


def _unschedulable(pod: Body) -> str | None:
    """The scheduler's word on a pod that it cannot place; None if there is no such word."""
    for condition in pod.get("status", {}).get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("message", ""))
    return None


def requests_of(pod: Body) -> dict[str, float]:
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


def lacking(requests: Resources, node: Body) -> dict[str, float]:
    """What even the empty node has too little of, and how much it has."""
    has = _allocatable(node)
    return {name: has.get(name, 0.0) for name, amount in requests.items() if has.get(name, 0.0) < amount}


def barring_taints(pod: Body, node: Body) -> list[str]:
    """The node's taints that keep the pod away."""
    tolerations = pod["spec"].get("tolerations", ())
    taints = [taint for taint in node["spec"].get("taints", ()) if taint.get("effect") in _BARRING]
    barring = [taint for taint in taints if not any(_tolerates(each, taint) for each in tolerations)]
    return [f"{taint['key']}={taint.get('value', '')}:{taint['effect']}" for taint in barring]


def _tolerates(toleration: Body, taint: Body) -> bool:
    if toleration.get("effect") not in (None, "", taint["effect"]):
        return False
    if toleration.get("key") in (None, ""):
        return toleration.get("operator") == "Exists"
    same = toleration["key"] == taint["key"]
    exists = toleration.get("operator") == "Exists"
    return same and (exists or toleration.get("value", "") == taint.get("value", ""))


def _best(pod: Body, nodes: Sequence[Body]) -> str:
    """What the nodes have too little of even when they are empty."""
    requests = requests_of(pod)
    lacks = [lacking(requests, node) for node in nodes]
    if not nodes or not all(lacks):
        return ""
    names = sorted(set.intersection(*(set(lack) for lack in lacks)) or set(lacks[0]))
    told = [
        f"it asks for {spell(name, requests[name])}, the most that a node has is "
        f"{spell(name, max(_allocatable(node).get(name, 0.0) for node in nodes))}"
        for name in names
    ]
    return f"; {'; '.join(told)}"


def _advice(pod: Body, nodes: Sequence[Body]) -> str:
    if not nodes:
        return "there is no node: add one"
    requests = requests_of(pod)
    big_enough = [node for node in nodes if not lacking(requests, node)]
    if not big_enough:
        return "add nodes of that size, or ask for less in spec.pools[].hardware or spec.pools[].template"
    barred = {node["metadata"]["name"]: barring_taints(pod, node) for node in big_enough}
    if all(barred.values()):
        name, taints = min(barred.items())
        return f"tolerate {', '.join(taints)} (node {name}) in spec.pools[].template, or take the taint away"
    if all(node["spec"].get("unschedulable") for node in big_enough):
        return "all nodes that are big enough are cordoned: kubectl uncordon one"
    return "nodes that are big enough are full, or affinity keeps the pod away: free one or add one"


def check_images(pods: Sequence[Body], *, about: str = "", said_in: str = "spec.engine.image") -> Finding:
    """Whether every container has its image; `said_in` is where the image is written down."""
    failing = [failure for pod in pods for failure in pull_failures(pod)]
    if failing:
        by_image = {image: [each for each in failing if each.image == image] for _, image, *_ in failing}
        return problem(
            "images", "; ".join(map(_pulls_told, by_image.values())),
            f"check {said_in}, that the registry is reachable from the nodes, and the pull secret",
            about=about,
        )  # fmt: skip
    return ok("images", f"no pod of {len(pods)} waits for its image", about=about)


class PullFailure(NamedTuple):
    """A container whose image does not come."""

    pod: str
    image: str
    reason: str
    message: str


def pull_failures(pod: Body) -> list[PullFailure]:
    """The pod's containers whose images do not come."""
    status = pod.get("status", {})
    found = []
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        waiting = container.get("state", {}).get("waiting") or {}
        if waiting.get("reason") in PULL_FAILURES:
            image, message = container.get("image", ""), waiting.get("message") or ""
            found.append(PullFailure(pod["metadata"]["name"], image, waiting["reason"], message))
    return found


def _pulls_told(failures: Sequence[PullFailure]) -> str:
    """Those of one image; the longest message says most, where some pods only wait for the next try."""
    names = list(dict.fromkeys(failure.pod for failure in failures))
    best = max(failures, key=lambda failure: len(failure.message))
    why = f": {best.message}" if best.message else ""
    return f"{format_list(names, at_most=_TOLD)}: {best.reason} {best.image}{why}"


def check_restarts(pods: Sequence[Body], *, about: str = "") -> Finding:
    """Whether a container is started again and again."""
    looping = [
        f"{pod['metadata']['name']} ({format_count(container.get('restartCount', 0), 'restart')})"
        for pod in pods
        for container in pod.get("status", {}).get("containerStatuses", ())
        if (container.get("state", {}).get("waiting") or {}).get("reason") == "CrashLoopBackOff"
    ]
    if looping:
        advice = "kubectl logs --previous of the pod says why it ended"
        return warning("restarts", f"ended again and again: {', '.join(looping)}", advice, about=about)
    return ok("restarts", "no container ends again and again", about=about)
