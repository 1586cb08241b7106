"""Failures of routers name the pod, the cluster's reason and the last exit."""

from typing import Any

import pytest

from fulcrum_cluster.objects import DEPLOYMENT, POD
from fulcrum_core.api.labels import ROUTER_LABEL
from fulcrum_operator.controller.cache import ObjectCache
from fulcrum_operator.controller.context import ServiceKey
from fulcrum_operator.controller.pods.router_pods import find_router_failures
from fulcrum_operator.plan.observed import FailureCause

KEY = ServiceKey("default", "chat")


def waiting_pod(reason: str, message: str | None = None) -> dict[str, Any]:
    waiting = {"reason": reason, **({"message": message} if message else {})}
    return {
        "metadata": {
            "name": "r-1",
            "namespace": "default",
            "resourceVersion": "1",
            "labels": {ROUTER_LABEL: "chat"},
        },
        "status": {"containerStatuses": [{"name": "router", "state": {"waiting": waiting}}]},
    }


def find_failures(pods: list[dict[str, Any]], *conditions: dict[str, str]) -> tuple[FailureCause, ...]:
    cache = ObjectCache(lambda _key: None)
    deployment = {
        "metadata": {"name": "chat-router", "namespace": "default", "resourceVersion": "1"},
        "status": {"conditions": list(conditions)},
    }
    cache.put_object(DEPLOYMENT, deployment)
    for pod in pods:
        cache.put_object(POD, pod)
    return find_router_failures(cache, KEY)


@pytest.mark.parametrize(
    ("pod", "cause"),
    [
        pytest.param(
            waiting_pod("CreateContainerConfigError", 'secret "token" not found'),
            FailureCause(
                "RouterStartFailed",
                'router r-1: CreateContainerConfigError: secret "token" not found',
                "r-1/CreateContainerConfigError",
            ),
            id="a missing secret",
        ),
        pytest.param(
            waiting_pod("CreateContainerError"),
            FailureCause("RouterStartFailed", "router r-1: CreateContainerError", "r-1/CreateContainerError"),
            id="a reason without a message",
        ),
        pytest.param(
            waiting_pod("ErrImagePull", "no such image"),
            FailureCause("ImagePullFailed", "router r-1: ErrImagePull: no such image", "r-1/ImagePullFailed"),
            id="an image that cannot be pulled",
        ),
    ],
)
def test_a_router_pod_that_cannot_start_is_a_failure_cause(pod: dict[str, Any], cause: FailureCause) -> None:
    assert find_failures([pod]) == (cause,)


def test_a_deployment_that_may_not_create_pods_is_a_failure_cause() -> None:
    quota = {
        "type": "ReplicaFailure",
        "status": "True",
        "reason": "FailedCreate",
        "message": "exceeded quota",
    }
    assert find_failures([], quota) == (
        FailureCause("RouterStartFailed", "router: FailedCreate: exceeded quota", "router/FailedCreate"),
    )


def test_a_starting_router_is_no_failure() -> None:
    assert find_failures([waiting_pod("ContainerCreating")]) == ()
