"""Failures of routers name the pod, the cluster's reason and the last exit."""

from collections.abc import Callable
from typing import Any

import pytest

from fulcrum_cluster.objects import DEPLOYMENT, ENDPOINT_SLICE, POD
from fulcrum_core.api import PDService
from fulcrum_core.api.labels import ROUTER_LABEL
from fulcrum_core.api.meta import format_time
from fulcrum_operator.controller.cache import ObjectCache
from fulcrum_operator.controller.context import Problems, ServiceKey
from fulcrum_operator.controller.pods.router_pods import find_router_failures, serves_state_tls, serves_tls
from fulcrum_operator.plan.observed import FailureCause
from tests.unit.operator.builders import NOW_S, service

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
    return find_router_failures(cache, KEY, now_s=NOW_S).causes


def service_with_tls() -> PDService:
    made = service(router={"tls": {"secretName": "chat-tls"}})
    return made.replace(metadata=made.metadata.model_copy(update={"resource_version": "1"}))


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


def pod_without_sandbox(sandbox: str) -> dict[str, Any]:
    pod = waiting_pod("ContainerCreating")
    found = (("PodScheduled", "True", NOW_S), ("PodReadyToStartContainers", sandbox, NOW_S + 1))
    pod["status"]["conditions"] = [
        {"type": kind, "status": status, "lastTransitionTime": format_time(at_s)}
        for kind, status, at_s in found
    ]
    return pod


@pytest.mark.parametrize(
    ("sandbox", "after_s", "problems"),
    [
        pytest.param("False", 10.0, Problems((), 51.0), id="soon after the pod was placed"),
        pytest.param(
            "False",
            61.0,
            Problems(
                (
                    FailureCause(
                        "RouterStartFailed",
                        "router r-1: its volumes or its network are not ready after 60 s; "
                        "does the Secret chat-tls exist?",
                        "r-1/sandbox",
                    ),
                )
            ),
            id="a Secret that does not exist",
        ),
        pytest.param("True", 300.0, Problems(), id="an image that is being pulled"),
    ],
)
def test_a_router_whose_volumes_are_not_ready_names_the_secret(
    sandbox: str, after_s: float, problems: Problems
) -> None:
    cache = ObjectCache(lambda _key: None)
    cache.put_resource(service_with_tls())
    cache.put_object(POD, pod_without_sandbox(sandbox))
    assert find_router_failures(cache, KEY, now_s=NOW_S + after_s) == problems


@pytest.mark.parametrize(
    ("field", "option", "serves"),
    [
        pytest.param("tls", "--tls-certificate", serves_tls, id="port for clients"),
        pytest.param("stateTls", "--state-tls-certificate", serves_state_tls, id="state port"),
    ],
)
def test_a_port_of_the_service_is_used_as_its_active_router_serves(
    field: str, option: str, serves: Callable[[ObjectCache, PDService], bool]
) -> None:
    plain, with_tls = service(), service(router={field: {"secretName": "chat-tls"}})
    cache = ObjectCache(lambda _key: None)
    seen = [(serves(cache, plain), serves(cache, with_tls))]
    for version, args in enumerate(([], [option, "/tls.crt"]), start=1):
        pod = waiting_pod("") | {"spec": {"containers": [{"name": "router", "args": args}]}}
        pod["metadata"]["resourceVersion"] = str(version)
        endpoints = [{"addresses": ["10.0.0.1"], "targetRef": {"kind": "Pod", "name": "r-1"}}]
        meta = {"name": "chat-router", "namespace": "default", "resourceVersion": str(version)}
        cache.put_object(POD, pod)
        cache.put_object(ENDPOINT_SLICE, {"metadata": meta, "endpoints": endpoints})
        seen.append((serves(cache, plain), serves(cache, with_tls)))
    assert seen == [(False, True), (False, False), (True, True)]
