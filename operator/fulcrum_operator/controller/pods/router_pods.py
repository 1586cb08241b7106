"""Why routers cannot start: from the statuses of their Deployment and its pods, with the causes of engines.

Each message is `router NAME: DETAIL: text`, as Events need it.
"""

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
            text = f"router: {condition.get('reason')}: {condition.get('message')}"
            yield FailureCause(conditions.ROUTER_START_FAILED, text[:_MESSAGE_LENGTH_MAX])


def _find_in_pod(pod: Pod) -> Iterator[FailureCause]:
    failure = None if "deletionTimestamp" in pod["metadata"] else start_failure_of(pod)
    if failure is None:
        return
    engine_reason = failure.reason == conditions.ENGINE_START_FAILED
    reason = conditions.ROUTER_START_FAILED if engine_reason else failure.reason
    ended = last_exit_of(pod, "router")
    detail = failure.message if ": " in failure.message else f"{failure.message}: no message"
    text = f"router {pod['metadata']['name']}: {detail}{f'; {ended}' if ended else ''}"
    yield FailureCause(reason, text)
