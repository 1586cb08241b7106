"""Why a service's routers cannot start: from the statuses of their Deployment and its pods."""

from collections.abc import Iterator
from typing import Any

from fulcrum_cluster.objects import DEPLOYMENT, POD
from fulcrum_core.api import conditions
from fulcrum_core.api.labels import ROUTER_LABEL
from fulcrum_operator.controller.cache import ObjectCache
from fulcrum_operator.controller.context import ServiceKey
from fulcrum_operator.controller.pods.pod_status import Pod, last_exit_of, start_failure_of
from fulcrum_operator.plan.observed import FailureCause

_MESSAGE_LENGTH_MAX = 400


def find_router_failures(cache: ObjectCache, key: ServiceKey) -> tuple[FailureCause, ...]:
    """The failures of a service's routers; empty while they start as usual, and once they run."""
    deployment = cache.get_object(DEPLOYMENT, key.namespace, f"{key.name}-router")
    pods = [
        pod
        for pod in cache.list_objects(POD, key.namespace)
        if pod["metadata"].get("labels", {}).get(ROUTER_LABEL) == key.name
    ]
    return (*_find_refused_pods(deployment or {}), *(f for pod in pods for f in _find_in_pod(pod)))


def _find_refused_pods(deployment: dict[str, Any]) -> Iterator[FailureCause]:
    """The Deployment cannot create a pod: a quota, a pod security standard, a webhook."""
    for condition in deployment.get("status", {}).get("conditions", ()):
        if condition.get("type") == "ReplicaFailure" and condition.get("status") == "True":
            reason = condition.get("reason")
            text = f"router: {reason}: {condition.get('message')}"
            yield FailureCause(conditions.ROUTER_START_FAILED, text[:_MESSAGE_LENGTH_MAX], f"router/{reason}")


def _find_in_pod(pod: Pod) -> Iterator[FailureCause]:
    failure = None if "deletionTimestamp" in pod["metadata"] else start_failure_of(pod)
    if failure is None:
        return
    name, ended = pod["metadata"]["name"], last_exit_of(pod, "router")
    text = f"router {name}: {failure.message}{f'; {ended}' if ended else ''}"
    if failure.reason == conditions.ENGINE_START_FAILED:
        yield FailureCause(conditions.ROUTER_START_FAILED, text, f"{name}/{failure.cluster_reason}")
    else:  # the kubelet alternates two reasons of an image pull
        yield FailureCause(failure.reason, text, f"{name}/{failure.reason}")
