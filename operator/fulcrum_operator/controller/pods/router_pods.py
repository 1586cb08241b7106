"""A service's router pods: why they cannot start, and whether the active one serves TLS.

`leader`, `children` and `router_view` ask; the pods are read from the object cache. Their Deployment is made
in `manifests/children`, and no pod is changed here.
"""

from collections.abc import Iterator
from typing import Any

from fulcrum_cluster.objects import DEPLOYMENT, ENDPOINT_SLICE, POD
from fulcrum_core.api import PDService, conditions
from fulcrum_core.api.labels import ROUTER_LABEL
from fulcrum_operator.controller.cache import ObjectCache
from fulcrum_operator.controller.context import Problems, ServiceKey
from fulcrum_operator.controller.pods.pod_status import (
    Pod,
    last_exit_of,
    start_failure_of,
    without_sandbox_since_s,
)
from fulcrum_operator.manifests.children import STATE_TLS_OPTION, TLS_OPTION
from fulcrum_operator.plan.observed import FailureCause

SANDBOX_WAIT_S = 60.0
"""Seconds for which a pod on its node may wait for its volumes and its network."""
_MESSAGE_LENGTH_MAX = 400


def find_router_failures(cache: ObjectCache, key: ServiceKey, *, now_s: float) -> Problems:
    """The failures of a service's routers, and when one may have lasted long enough to be reported.

    There are none while routers start as usual, and once they run.
    """
    deployment = cache.get_object(DEPLOYMENT, key.namespace, f"{key.name}-router")
    pods = [
        pod
        for pod in cache.list_objects(POD, key.namespace)
        if pod["metadata"].get("labels", {}).get(ROUTER_LABEL) == key.name
        and "deletionTimestamp" not in pod["metadata"]
    ]
    waits = [(pod, at_s + SANDBOX_WAIT_S) for pod in pods if (at_s := without_sandbox_since_s(pod))]
    service = cache.get_resource(PDService, key.namespace, key.name)
    stuck = (_describe_stuck(pod, service) for pod, deadline_s in waits if now_s >= deadline_s)
    later = (deadline_s - now_s for _, deadline_s in waits if now_s < deadline_s)
    found = (*_find_refused_pods(deployment or {}), *(f for pod in pods for f in _find_in_pod(pod)), *stuck)
    return Problems(found, min(later, default=None))


def serves_tls(cache: ObjectCache, service: PDService) -> bool:
    """Whether clients reach the service by TLS: as the active router serves; if there is none, as specified.

    After a change of `spec.router.tls` the former routers serve until new ones are ready.
    """
    return _active_router_has(cache, service, TLS_OPTION, specified=service.spec.router.tls is not None)


def serves_state_tls(cache: ObjectCache, service: PDService) -> bool:
    """Whether the state port has TLS: as the active router serves; if there is none, as specified."""
    specified = service.spec.router.state_tls is not None
    return _active_router_has(cache, service, STATE_TLS_OPTION, specified=specified)


def _active_router_has(cache: ObjectCache, service: PDService, option: str, *, specified: bool) -> bool:
    meta = service.metadata
    found = cache.get_object(ENDPOINT_SLICE, meta.namespace, f"{meta.name}-router") or {}
    names = (each.get("targetRef", {}).get("name", "") for each in found.get("endpoints") or ())
    pods = (cache.get_object(POD, meta.namespace, name) for name in names)
    active = next((pod for pod in pods if pod is not None), None)
    if active is None:
        return specified
    return any(option in container["args"] for container in active.get("spec", {}).get("containers", ()))


def _describe_stuck(pod: Pod, service: PDService | None) -> FailureCause:
    name, router = pod["metadata"]["name"], service.spec.router if service else None
    names = [tls.secret_name for tls in (router.tls, router.state_tls) if tls] if router else []
    secret = "".join(f"; does the Secret {each} exist?" for each in names)
    text = f"router {name}: its volumes or its network are not ready after {SANDBOX_WAIT_S:.0f} s{secret}"
    return FailureCause(conditions.ROUTER_START_FAILED, text, f"{name}/sandbox")


def _find_refused_pods(deployment: dict[str, Any]) -> Iterator[FailureCause]:
    """The Deployment cannot create a pod: a quota, a pod security standard, a webhook."""
    for condition in deployment.get("status", {}).get("conditions", ()):
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            reason = condition.get("reason")
            text = f"router: {reason}: {condition.get('message')}"
            yield FailureCause(conditions.ROUTER_START_FAILED, text[:_MESSAGE_LENGTH_MAX], f"router/{reason}")


def _find_in_pod(pod: Pod) -> Iterator[FailureCause]:
    failure = start_failure_of(pod)
    if failure is None:
        return
    name, ended = pod["metadata"]["name"], last_exit_of(pod, "router")
    text = f"router {name}: {failure.message}{f'; {ended}' if ended else ''}"
    if failure.reason == conditions.ENGINE_START_FAILED:
        yield FailureCause(conditions.ROUTER_START_FAILED, text, f"{name}/{failure.cluster_reason}")
    else:  # the kubelet alternates two reasons of an image pull
        yield FailureCause(failure.reason, text, f"{name}/{failure.reason}")
