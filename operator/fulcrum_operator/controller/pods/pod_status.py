"""Derives an `EngineObservation` from a pod's status: pure. Used by `pod_runtime` and `model_reader_pods`.

An engine is lost if its pod has finished (failed, evicted, preempted), if somebody else deleted the pod and
it no longer serves, or if its node is unreachable. For an unreachable node the node controller sets Ready to
False and leaves ContainersReady at True; a kubelet writes this combination only with an open readiness gate.
"""

from typing import Any, NamedTuple

from fulcrum_core.api import conditions
from fulcrum_core.api.meta import parse_time
from fulcrum_core.ports import EngineObservation, EngineState
from fulcrum_operator.manifests.engine_pod import ENGINE_CONTAINER
from fulcrum_operator.manifests.names import HTTP_PORT

Pod = dict[str, Any]

_FINISHED_PHASES = ("Failed", "Succeeded")
_OPEN_GATE_REASON = "ReadinessGatesNotReady"
_NORMAL_WAITING_REASONS = frozenset({"ContainerCreating", "PodInitializing", ""})
"""Waiting reasons of a normal start."""
_CRASH_LOOP = "CrashLoopBackOff"
_OOM_KILLED = "OOMKilled"
_SCHEDULING_ERRORS = frozenset({"Unschedulable", "SchedulerError"})
"""Reasons of the scheduler for a pod that it cannot place."""
_TOO_LITTLE = "Insufficient "
"""The scheduler's message has this before a resource of which no suitable node has enough left."""
_DIGEST_LENGTH = 12
_MESSAGE_LENGTH_MAX = 400
"""Longest message that is kept, in characters; the whole text is in the pod's status."""
_MESSAGE_HEAD_LENGTH = 120
"""Characters kept of the start of a longer message, which names what failed; the end names the cause."""


class StartFailure(NamedTuple):
    """Why a pod cannot start: a reason of the condition Degraded, and a message for people."""

    reason: str
    message: str
    cluster_reason: str
    """Reason of the scheduler or the kubelet; the message begins with it."""
    lacks_room: bool = False
    """Whether the scheduler found nodes that suit the pod but have too little of a resource left."""


def observe_pod(pod: Pod, *, stopped: bool = False) -> EngineObservation:
    """Observe the engine of one pod.

    Args:
        pod: The pod's `metadata`, `status` and `spec.nodeName`.
        stopped: Whether the operator deleted the pod; then its engine terminates and is not reported as lost.
    """
    meta, status = pod["metadata"], pod.get("status", {})
    terminating = stopped or "deletionTimestamp" in meta
    state, message, since = _engine_state(pod, terminating=terminating)
    if stopped and state is EngineState.LOST:
        state = EngineState.RUNNING  # it terminates because the operator deleted it
    start_failure = start_failure_of(pod) if state is EngineState.STARTING else None
    address, container = status.get("podIP"), _engine_container(pod)
    runs = state is EngineState.RUNNING and address
    return EngineObservation(
        name=meta["name"],
        state=state,
        restarts=container.get("restartCount", 0),
        endpoint=f"{_format_host(address)}:{HTTP_PORT}" if runs else None,
        exit_reason=_last_exit(container),
        reason=start_failure.reason if start_failure else "",
        message=start_failure.message if start_failure else message,
        lacks_room=start_failure is not None and start_failure.lacks_room,
        out_of_memory=_last_termination(container).get("reason") == _OOM_KILLED,
        image=container.get("imageID") or None,
        since_s=parse_time(since) if since else None,
        terminating=terminating,
        node=pod.get("spec", {}).get("nodeName") or "",
        node_lost=state is EngineState.LOST and _node_is_unreachable(pod),
    )


def short_digest(image: str) -> str:
    """The first characters of an image's digest, from `repository@sha256:0123…` or `sha256:0123…`."""
    return image.rpartition("sha256:")[2][:_DIGEST_LENGTH]


def _engine_state(pod: Pod, *, terminating: bool) -> tuple[EngineState, str, str | None]:
    """State, its cause (or ""), and the time since when, as in the pod's status."""
    status = pod.get("status", {})
    ready = _find_condition(pod, "Ready")
    since = ready.get("lastTransitionTime")
    lost = _loss_cause(pod)
    if lost is not None:
        return EngineState.LOST, lost, since
    if ready.get("status") == "True":
        return EngineState.RUNNING, "", since
    if terminating:
        return (
            EngineState.LOST,
            _disruption(pod) or "its pod was deleted",
            pod["metadata"].get("deletionTimestamp"),
        )
    container = _engine_container(pod)
    state = container.get("state", {})
    terminated = state.get("terminated")
    waiting = state.get("waiting", {})
    if terminated is not None or waiting.get("reason") == _CRASH_LOOP:
        return EngineState.EXITED, "", (terminated or {}).get("finishedAt") or since
    if _was_ready(ready, state):
        return EngineState.RUNNING, "its readiness probe fails", since
    return (
        EngineState.STARTING,
        "",
        status.get("startTime") or pod["metadata"].get("creationTimestamp"),
    )


def _loss_cause(pod: Pod) -> str | None:
    """Why the pod is lost; None if it is not."""
    status = pod.get("status", {})
    if status.get("phase") in _FINISHED_PHASES:
        cause = status.get("reason") or _last_exit(_engine_container(pod)) or status["phase"]
        return _format_reason(f"its pod ended: {cause}", status.get("message"))
    if _node_is_unreachable(pod):
        return f"its node {pod.get('spec', {}).get('nodeName', '')} does not respond"
    return None


def _node_is_unreachable(pod: Pod) -> bool:
    status, ready = pod.get("status", {}), _find_condition(pod, "Ready")
    contradicted = (
        ready.get("status") == "False"
        and _find_condition(pod, "ContainersReady").get("status") == "True"
        and ready.get("reason") != _OPEN_GATE_REASON
    )
    silent = contradicted or ready.get("status") == "Unknown" or status.get("reason") == "NodeLost"
    return silent and status.get("phase") not in _FINISHED_PHASES


def _disruption(pod: Pod) -> str:
    target = _find_condition(pod, "DisruptionTarget")
    return (
        _format_reason(str(target.get("reason")), target.get("message"))
        if target.get("status") == "True"
        else ""
    )


def _was_ready(ready: dict[str, Any], state: dict[str, Any]) -> bool:
    """Whether the running container was ready before. Routers decide whether its engine still works."""
    started, changed = state.get("running", {}).get("startedAt"), ready.get("lastTransitionTime")
    return bool(started and changed and parse_time(changed) > parse_time(started))


def last_exit_of(pod: Pod, container: str) -> str | None:
    """Exit code and last log line of the last run of a container; None if no run has ended yet."""
    found = pod.get("status", {}).get("containerStatuses", ())
    return next((_last_exit(status) for status in found if status.get("name") == container), None)


def start_failure_of(pod: Pod) -> StartFailure | None:
    """Why the pod cannot start; None in an ordinary start."""
    scheduled = _find_condition(pod, "PodScheduled")
    if scheduled.get("status") == "False":
        return _start_failure(scheduled.get("reason") or "Unschedulable", scheduled.get("message"))
    status = pod.get("status", {})
    for container in (*status.get("initContainerStatuses", ()), *status.get("containerStatuses", ())):
        waiting = container.get("state", {}).get("waiting", {})
        if waiting.get("reason", "") not in _NORMAL_WAITING_REASONS:
            return _start_failure(waiting["reason"], waiting.get("message"))
    return None


def without_sandbox_since_s(pod: Pod) -> float | None:
    """Unix time since when the pod waits on its node for volumes and network; None if it does not.

    Images are pulled afterwards. The kubelet names a volume that it cannot mount in Events only.
    """
    scheduled, sandbox = (
        _find_condition(pod, "PodScheduled"),
        _find_condition(pod, "PodReadyToStartContainers"),
    )
    waits = scheduled.get("status") == "True" and sandbox.get("status") == "False"
    if not waits or pod.get("status", {}).get("phase") in _FINISHED_PHASES:
        return None
    since = sandbox.get("lastTransitionTime") or scheduled.get("lastTransitionTime")
    return parse_time(since) if since else None


def _start_failure(cluster_reason: str, message: str | None) -> StartFailure:
    """The failure with the cluster's own reason in front of its message."""
    if cluster_reason in conditions.IMAGE_PULL_ERRORS:
        reason = conditions.IMAGE_PULL_FAILED
    elif cluster_reason in _SCHEDULING_ERRORS:
        reason = conditions.UNSCHEDULABLE
    else:
        reason = conditions.ENGINE_START_FAILED
    lacks_room = reason == conditions.UNSCHEDULABLE and _TOO_LITTLE in (message or "")
    return StartFailure(reason, _format_reason(cluster_reason, message), cluster_reason, lacks_room)


def _last_exit(container: dict[str, Any]) -> str | None:
    """Exit code and last log line of the container's last run; None if no run has ended yet."""
    terminated = _last_termination(container)
    if not terminated:
        return None
    code, reason = terminated.get("exitCode", 0), terminated.get("reason", "")
    suffix = "" if reason in ("", "Error", "Completed") else f" ({reason})"
    last = (terminated.get("message") or "").strip().splitlines()[-1:]
    return _format_reason(f"exit code {code}{suffix}", last[0] if last else None)


def _last_termination(container: dict[str, Any]) -> dict[str, Any]:
    """The `terminated` state of the container's last run that has ended; empty if there is none."""
    found = (container.get(state, {}).get("terminated") for state in ("state", "lastState"))
    return next((terminated for terminated in found if terminated is not None), {})


def _engine_container(pod: Pod) -> dict[str, Any]:
    found = pod.get("status", {}).get("containerStatuses", ())
    return next((container for container in found if container.get("name") == ENGINE_CONTAINER), {})


def _find_condition(pod: Pod, kind: str) -> dict[str, Any]:
    found = pod.get("status", {}).get("conditions", ())
    return next((condition for condition in found if condition.get("type") == kind), {})


def _format_reason(reason: str, message: str | None) -> str:
    text = " ".join((message or "").split())
    return _cut_middle(f"{reason}: {text}") if text else reason


def _cut_middle(text: str) -> str:
    """Shorten a long text in the middle: the innermost of wrapped errors is at the end."""
    if len(text) <= _MESSAGE_LENGTH_MAX:
        return text
    return f"{text[:_MESSAGE_HEAD_LENGTH]} … {text[_MESSAGE_HEAD_LENGTH + 3 - _MESSAGE_LENGTH_MAX :]}"


def _format_host(address: str) -> str:
    return f"[{address}]" if ":" in address else address
