"""What a pod's status says of the engine in it: pure.

Three sources say that a pod will not come back: its own phase (evicted, preempted, failed), its deletion by
somebody else once it serves no more, and the node controller, which takes readiness away from the pods of a
node that it does not hear of. The latter cannot be told from the pod's conditions by their reasons; but a
kubelet never writes that a pod is not ready while all its containers are, unless a readiness gate is open.
"""

from typing import Any

from fulcrum_core.api.meta import parse_time
from fulcrum_core.ports import EngineObservation, EngineState
from fulcrum_operator.manifests.engine_pod import ENGINE
from fulcrum_operator.manifests.names import HTTP_PORT

Pod = dict[str, Any]

_ENDED = ("Failed", "Succeeded")
_OPEN_GATE = "ReadinessGatesNotReady"
_ORDINARY = frozenset({"ContainerCreating", "PodInitializing", ""})
"""What a container waits for in an ordinary start."""
_CRASHED = "CrashLoopBackOff"
_DIGEST = 12
_WORDS = 400
"""Longest text of a reason that is kept; the rest is in the pod."""
_FIRST_WORDS = 120
"""Of a longer one so much of its beginning, which names what failed, and the end, which says why."""


def observation_of(pod: Pod, *, stopped: bool = False) -> EngineObservation:
    """The engine of one pod.

    Args:
        pod: `metadata`, `status` and the node's name.
        stopped: We asked for its end: what is told then is how it ends, not that it was lost.
    """
    meta, status = pod["metadata"], pod.get("status", {})
    ending = stopped or "deletionTimestamp" in meta
    state, message, since = _judged(pod, ending=ending)
    if stopped and state is EngineState.LOST:
        state = EngineState.RUNNING  # on its way out, as wanted
    address, container = status.get("podIP"), _container(pod)
    runs = state is EngineState.RUNNING and address
    return EngineObservation(
        name=meta["name"],
        state=state,
        restarts=container.get("restartCount", 0),
        endpoint=f"{_host(address)}:{HTTP_PORT}" if runs else None,
        exit_reason=_last_end(container),
        message=message,
        image=container.get("imageID") or None,
        since_s=parse_time(since) if since else None,
        ending=ending,
        node_lost=state is EngineState.LOST and _node_is_silent(pod),
    )


def digest_of(image: str) -> str:
    """What tells an image from others, short: from `repository@sha256:0123…` or `sha256:0123…`."""
    return image.rpartition("sha256:")[2][:_DIGEST]


def _judged(pod: Pod, *, ending: bool) -> tuple[EngineState, str, str | None]:
    """The state, why, and since when."""
    status = pod.get("status", {})
    ready = _condition(pod, "Ready")
    since = ready.get("lastTransitionTime")
    lost = _lost(pod)
    if lost is not None:
        return EngineState.LOST, lost, since
    if ready.get("status") == "True":
        return EngineState.RUNNING, "", since
    if ending:
        return (
            EngineState.LOST,
            _disruption(pod) or "its pod was deleted",
            pod["metadata"].get("deletionTimestamp"),
        )
    container = _container(pod)
    state = container.get("state", {})
    ended = state.get("terminated")
    waits = state.get("waiting", {})
    if ended is not None or waits.get("reason") == _CRASHED:
        return EngineState.EXITED, "", (ended or {}).get("finishedAt") or since
    if _was_ready(ready, state):
        return EngineState.RUNNING, "its readiness probe fails", since
    return (
        EngineState.STARTING,
        hindrance_of(pod),
        status.get("startTime") or pod["metadata"].get("creationTimestamp"),
    )


def _lost(pod: Pod) -> str | None:
    """Why the pod will not come back; None if it may."""
    status = pod.get("status", {})
    if status.get("phase") in _ENDED:
        why = status.get("reason") or _last_end(_container(pod)) or status["phase"]
        return _text(f"its pod ended: {why}", status.get("message"))
    if _node_is_silent(pod):
        return f"its node {pod.get('spec', {}).get('nodeName', '')} does not answer"
    return None


def _node_is_silent(pod: Pod) -> bool:
    status, ready = pod.get("status", {}), _condition(pod, "Ready")
    contradicted = (
        ready.get("status") == "False"
        and _condition(pod, "ContainersReady").get("status") == "True"
        and ready.get("reason") != _OPEN_GATE
    )
    silent = contradicted or ready.get("status") == "Unknown" or status.get("reason") == "NodeLost"
    return silent and status.get("phase") not in _ENDED


def _disruption(pod: Pod) -> str:
    target = _condition(pod, "DisruptionTarget")
    return _text(str(target.get("reason")), target.get("message")) if target.get("status") == "True" else ""


def _was_ready(ready: dict[str, Any], state: dict[str, Any]) -> bool:
    """Whether the container that runs was ready before: it fell silent, which is the routers' to judge."""
    started, changed = state.get("running", {}).get("startedAt"), ready.get("lastTransitionTime")
    return bool(started and changed and parse_time(changed) > parse_time(started))


def hindrance_of(pod: Pod) -> str:
    """What keeps a pod from starting; nothing in an ordinary start."""
    scheduled = _condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return _text(scheduled.get("reason") or "Unschedulable", scheduled.get("message"))
    status = pod.get("status", {})
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        waits = container.get("state", {}).get("waiting", {})
        if waits.get("reason", "") not in _ORDINARY:
            return _text(waits["reason"], waits.get("message"))
    return ""


def _last_end(container: dict[str, Any]) -> str | None:
    """How the last life of the container ended, with its last words."""
    for state in (container.get("state", {}), container.get("lastState", {})):
        ended = state.get("terminated")
        if ended is not None:
            code, reason = ended.get("exitCode", 0), ended.get("reason", "")
            said = "" if reason in ("", "Error", "Completed") else f" ({reason})"
            last = (ended.get("message") or "").strip().splitlines()[-1:]
            return _text(f"exit code {code}{said}", last[0] if last else None)
    return None


def _container(pod: Pod) -> dict[str, Any]:
    found = pod.get("status", {}).get("containerStatuses", ())
    return next((container for container in found if container.get("name") == ENGINE), {})


def _condition(pod: Pod, kind: str) -> dict[str, Any]:
    found = pod.get("status", {}).get("conditions", ())
    return next((condition for condition in found if condition.get("type") == kind), {})


def _text(reason: str, message: str | None) -> str:
    words = " ".join((message or "").split())
    return _cut(f"{reason}: {words}") if words else reason


def _cut(text: str) -> str:
    """A text that is too long without its middle: errors are wrapped, the innermost stands last."""
    if len(text) <= _WORDS:
        return text
    return f"{text[:_FIRST_WORDS]} … {text[_FIRST_WORDS + 3 - _WORDS :]}"


def _host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
