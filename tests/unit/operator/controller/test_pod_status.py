"""Engines are observed from statuses of pods, as API servers report them."""

from typing import Any

import pytest

from fulcrum_core.ports import EngineObservation, EngineState
from fulcrum_operator.controller.pods.pod_status import observe_pod, short_digest

STARTING, RUNNING, EXITED, LOST = (
    EngineState.STARTING,
    EngineState.RUNNING,
    EngineState.EXITED,
    EngineState.LOST,
)
T0, T1, T2 = "2026-11-21T13:00:00Z", "2026-11-21T13:00:05Z", "2026-11-21T13:01:00Z"
AT = {T0: 1795266000.0, T1: 1795266005.0, T2: 1795266060.0}
DIGEST = "localhost/fulcrum@sha256:0123"

Pod = dict[str, Any]


def condition(kind: str, status: str, at: str = T1, **fields: str) -> Pod:
    return {"type": kind, "status": status, "lastTransitionTime": at, **fields}


def conditions(ready: str, containers: str | None = None, at: str = T1, **fields: str) -> list[Pod]:
    return [
        condition("PodScheduled", "True", T0),
        condition("ContainersReady", containers or ready, at),
        condition("Ready", ready, at, **fields),
    ]


def container(state: Pod, last: Pod | None = None, restarts: int = 0, image: str = DIGEST) -> Pod:
    return {
        "name": "engine",
        "state": state,
        "lastState": last or {},
        "restartCount": restarts,
        "imageID": image,
    }


def pod(*, meta: Pod | None = None, phase: str = "Running", node: str = "n1", **status: Any) -> Pod:
    return {
        "metadata": {"name": "chat-0", "uid": "u", "creationTimestamp": T0, **(meta or {})},
        "spec": {"nodeName": node} if node else {},
        "status": {"phase": phase, **status},
    }


SERVING = container({"running": {"startedAt": T0}})
WAITING = {"waiting": {"reason": "ContainerCreating"}}
TERMINATED = {
    "terminated": {
        "exitCode": 2,
        "reason": "Error",
        "message": "loading\nerror: no profile\n",
        "finishedAt": T1,
    }
}
KILLED = {"terminated": {"exitCode": 137, "reason": "OOMKilled", "finishedAt": T1}}
UNSCHEDULABLE = condition(
    "PodScheduled", "False", reason="Unschedulable", message="0/3 nodes are available:\n3 Insufficient cpu."
)
_NODES = "; ".join(f"node pool {number} had untolerated taint(s)" for number in range(20))
FULL_BEFORE_TAINTS = condition(
    "PodScheduled",
    "False",
    reason="Unschedulable",
    message=f"0/60 nodes are available: {'x' * 120} 3 Insufficient nvidia.com/gpu. {_NODES}",
)
PULL_FAILED = {"waiting": {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "x:1"'}}
CRASH_LOOP = {
    "waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting failed container"}
}
REGISTRY = (
    f'failed to pull and unpack image "registry.example/team/engine:{"9" * 300}": failed to do request: '
    'Head "https://registry.example/v2/": dial tcp 192.0.2.9:443: connect: connection refused'
)
UNREACHABLE = {"waiting": {"reason": "ErrImagePull", "message": REGISTRY}}
LOADING = {"running": {"startedAt": T1}}
DELETED = {"deletionTimestamp": T2, "deletionGracePeriodSeconds": 132}
EVICTED = condition(
    "DisruptionTarget",
    "True",
    reason="DeletionByTaintManager",
    message="Taint manager: deleting due to NoExecute",
)

TABLE: list[tuple[str, Pod, dict[str, Any]]] = [
    ("no status yet", pod(phase="Pending", node=""), {"state": STARTING, "since_s": AT[T0]}),
    (
        "no node has room",
        pod(phase="Pending", node="", conditions=[UNSCHEDULABLE]),
        {
            "state": STARTING,
            "reason": "Unschedulable",
            "message": "Unschedulable: 0/3 nodes are available: 3 Insufficient cpu.",
            "lacks_room": True,
            "since_s": AT[T0],
        },
    ),
    (
        "the container is being created",
        pod(
            phase="Pending",
            conditions=conditions("False"),
            containerStatuses=[container(WAITING, image="")],
            startTime=T1,
        ),
        {"state": STARTING, "since_s": AT[T1]},
    ),
    (
        "the image cannot be pulled",
        pod(
            phase="Pending",
            conditions=conditions("False"),
            containerStatuses=[container(PULL_FAILED, image="")],
        ),
        {
            "state": STARTING,
            "reason": "ImagePullFailed",
            "message": 'ImagePullBackOff: Back-off pulling image "x:1"',
            "since_s": AT[T0],
        },
    ),
    (
        "the image cannot be pulled, with a long message",
        pod(
            phase="Pending",
            conditions=conditions("False"),
            containerStatuses=[container(UNREACHABLE, image="")],
        ),
        {
            "state": STARTING,
            "reason": "ImagePullFailed",
            "message": f"{f'ErrImagePull: {REGISTRY}'[:120]} … {REGISTRY[-277:]}",
            "since_s": AT[T0],
        },
    ),
    (
        "the engine loads",
        pod(conditions=conditions("False", at=T0), containerStatuses=[container(LOADING)], podIP="192.0.2.7"),
        {"state": STARTING, "image": DIGEST, "since_s": AT[T0]},
    ),
    (
        "the engine serves",
        pod(conditions=conditions("True"), containerStatuses=[SERVING], podIP="192.0.2.7"),
        {"state": RUNNING, "endpoint": "192.0.2.7:8000", "image": DIGEST, "since_s": AT[T1]},
    ),
    (
        "the engine serves over IPv6",
        pod(conditions=conditions("True"), containerStatuses=[SERVING], podIP="fd00::7"),
        {"state": RUNNING, "endpoint": "[fd00::7]:8000", "image": DIGEST, "since_s": AT[T1]},
    ),
    (
        "the readiness probe of a serving engine fails",
        pod(conditions=conditions("False"), containerStatuses=[SERVING], podIP="192.0.2.7"),
        {
            "state": RUNNING,
            "endpoint": "192.0.2.7:8000",
            "message": "its readiness probe fails",
            "image": DIGEST,
            "since_s": AT[T1],
        },
    ),
    (
        "a readiness gate is open",
        pod(
            conditions=conditions("False", "True", at=T0, reason="ReadinessGatesNotReady"),
            containerStatuses=[SERVING],
            podIP="192.0.2.7",
        ),
        {"state": STARTING, "image": DIGEST, "since_s": AT[T0]},
    ),
    (
        "the container has ended and is restarted",
        pod(conditions=conditions("False"), containerStatuses=[container(TERMINATED, restarts=1)]),
        {
            "state": EXITED,
            "restarts": 1,
            "exit_reason": "exit code 2: error: no profile",
            "image": DIGEST,
            "since_s": AT[T1],
        },
    ),
    (
        "the container has ended often and waits",
        pod(conditions=conditions("False"), containerStatuses=[container(CRASH_LOOP, TERMINATED, 4)]),
        {
            "state": EXITED,
            "restarts": 4,
            "exit_reason": "exit code 2: error: no profile",
            "image": DIGEST,
            "since_s": AT[T1],
        },
    ),
    (
        "the engine loads again after an OOM kill",
        pod(
            conditions=conditions("False"),
            containerStatuses=[container({"running": {"startedAt": T2}}, KILLED, 1)],
        ),
        {
            "state": STARTING,
            "restarts": 1,
            "exit_reason": "exit code 137 (OOMKilled)",
            "out_of_memory": True,
            "image": DIGEST,
            "since_s": AT[T0],
        },
    ),
    (
        "the pod was evicted",
        pod(phase="Failed", reason="Evicted", message="The node was low on resource: memory."),
        {"state": LOST, "message": "its pod ended: Evicted: The node was low on resource: memory."},
    ),
    (
        "the node is unreachable",
        pod(conditions=conditions("False", "True"), containerStatuses=[SERVING], podIP="192.0.2.7"),
        {
            "state": LOST,
            "message": "its node n1 does not respond",
            "node_lost": True,
            "image": DIGEST,
            "since_s": AT[T1],
        },
    ),
    (
        "somebody deletes a serving pod",
        pod(meta=DELETED, conditions=conditions("True"), containerStatuses=[SERVING], podIP="192.0.2.7"),
        {
            "state": RUNNING,
            "endpoint": "192.0.2.7:8000",
            "image": DIGEST,
            "since_s": AT[T1],
            "terminating": True,
        },
    ),
    (
        "somebody deletes a pod that no longer serves",
        pod(meta=DELETED, conditions=conditions("False"), containerStatuses=[container(TERMINATED)]),
        {
            "state": LOST,
            "message": "its pod was deleted",
            "exit_reason": "exit code 2: error: no profile",
            "image": DIGEST,
            "since_s": AT[T2],
            "terminating": True,
        },
    ),
    (
        "the pods of an unreachable node are deleted",
        pod(meta=DELETED, conditions=[*conditions("False", "True"), EVICTED], containerStatuses=[SERVING]),
        {
            "state": LOST,
            "message": "its node n1 does not respond",
            "node_lost": True,
            "image": DIGEST,
            "since_s": AT[T1],
            "terminating": True,
        },
    ),
]


@pytest.mark.parametrize(
    ("observed_pod", "expected"), [row[1:] for row in TABLE], ids=[row[0] for row in TABLE]
)
def test_the_engine_is_observed_from_the_pods_status(observed_pod: Pod, expected: dict[str, Any]) -> None:
    node = observed_pod["spec"].get("nodeName", "")
    fields = {"name": "chat-0", "restarts": 0, "node": node, **expected}
    assert observe_pod(observed_pod) == EngineObservation(**fields)


@pytest.mark.parametrize(
    ("image", "digest"),
    [
        ("localhost/fulcrum@sha256:0123456789abcdef", "0123456789ab"),
        ("sha256:0123456789abcdef", "0123456789ab"),
        ("localhost/fulcrum:1", "localhost/fu"),
    ],
)
def test_a_short_digest_identifies_an_image(image: str, digest: str) -> None:
    assert short_digest(image) == digest


def test_a_stopped_engine_is_not_lost() -> None:
    stopped_pod = pod(
        meta=DELETED, phase="Failed", conditions=conditions("False"), containerStatuses=[container(KILLED)]
    )
    engine = observe_pod(stopped_pod, stopped=True)
    assert (engine.state, engine.endpoint, engine.terminating) == (RUNNING, None, True)


@pytest.mark.parametrize(
    ("cluster_reason", "reason"),
    [
        ("ErrImagePull", "ImagePullFailed"),
        ("InvalidImageName", "ImagePullFailed"),
        ("RegistryUnavailable", "ImagePullFailed"),
        ("CreateContainerConfigError", "EngineStartFailed"),
        ("CreateContainerError", "EngineStartFailed"),
    ],
)
def test_a_waiting_containers_reason_becomes_a_reason_of_the_condition_degraded(
    cluster_reason: str, reason: str
) -> None:
    waiting = container({"waiting": {"reason": cluster_reason, "message": "why"}}, image="")
    found = observe_pod(pod(phase="Pending", conditions=conditions("False"), containerStatuses=[waiting]))
    assert (found.reason, found.message) == (reason, f"{cluster_reason}: why")


def test_the_whole_message_of_the_scheduler_says_that_there_is_no_room() -> None:
    engine = observe_pod(pod(phase="Pending", node="", conditions=[FULL_BEFORE_TAINTS]))
    assert (engine.lacks_room, "Insufficient" in engine.message) == (True, False)
