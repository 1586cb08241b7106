"""Model reader pods: short pods that read a model's config.json where the operator has no access to it.

A pod is created when a plan requests one and deleted when no plan does. Its result is the termination message
of its container. Results are kept for ten minutes after the pod: a service whose status cannot store them
(CRDs older than the operator) gets one pod in ten minutes instead of one after the other. It is the
`ModelReader` of a reconcile; when to read is decided in `plan/model`.
"""

import json
from collections.abc import Callable
from typing import Any

import structlog

from fulcrum_cluster.objects import POD, Object, ObjectApi
from fulcrum_core.api import PDService
from fulcrum_core.api.meta import parse_time
from fulcrum_core.errors import AlreadyExists, Conflict, Forbidden, InvalidInput, NotFound
from fulcrum_core.ports import Clock
from fulcrum_operator.controller.cache import ObjectCache
from fulcrum_operator.controller.cached_store import check_is_leader
from fulcrum_operator.controller.context import ServiceKey
from fulcrum_operator.controller.pods.pod_status import start_failure_of
from fulcrum_operator.manifests.model_reader_pod import (
    ATTEMPT_ANNOTATION,
    MODEL_KEY_ANNOTATION,
    model_reader_pod,
    model_reader_pod_name,
)
from fulcrum_operator.manifests.names import InstallationSettings
from fulcrum_operator.plan.model import ModelReadRequest
from fulcrum_operator.plan.observed import ModelReadAttempt

RESULT_KEPT_S = 600.0
"""Time that a result is kept after its pod was deleted, in seconds."""

_log = structlog.get_logger()


class ModelReaderPods:
    """Creates, reads and deletes model reader pods, at most one for each service; a `context.ModelReader`.

    Args:
        objects: API to create and delete pods with.
        cache: Last known pods.
        settings: Settings of the installation.
        clock: Source of the time.
        is_leader: Returns whether this process may write now.
        on_change: Called with a service whose attempt has a new result.
    """

    def __init__(
        self,
        objects: ObjectApi,
        cache: ObjectCache,
        settings: InstallationSettings,
        clock: Clock,
        *,
        is_leader: Callable[[], bool],
        on_change: Callable[[ServiceKey], None],
    ) -> None:
        self._objects, self._cache, self._settings, self._clock = objects, cache, settings, clock
        self._is_leader, self._on_change = is_leader, on_change
        self._results: dict[ServiceKey, ModelReadAttempt] = {}
        """Results of deleted pods, and refusals of pods that could not be created."""

    def reading(self, key: ServiceKey) -> ModelReadAttempt | None:
        """See `ModelReader`."""
        pod = self._pod(key)
        if pod is not None:
            return observe_reader_pod(pod)
        result = self._results.get(key)
        return (
            result if result is not None and self._clock.now_s() < result.started_s + RESULT_KEPT_S else None
        )

    async def sync(self, service: PDService, read: ModelReadRequest | None) -> None:
        """Create the pod for this request, and delete a pod of another request; None: no pod is needed."""
        key = ServiceKey(service.metadata.namespace, service.metadata.name)
        pod, reading = self._pod(key), self.reading(key)
        if read is not None and reading is not None and _matches(reading, read):
            return
        if pod is not None:
            if reading is not None and (reading.facts is not None or reading.error is not None):
                self._results[key] = reading
            await self._delete(key, pod)
        elif read is not None:
            await self._create(key, service, read)

    def forget(self, key: ServiceKey) -> None:
        """Drop the result of a deleted service; garbage collection deletes its pod."""
        self._results.pop(key, None)

    async def _create(self, key: ServiceKey, service: PDService, read: ModelReadRequest) -> None:
        check_is_leader(self._is_leader)
        try:
            body = model_reader_pod(read, service, self._settings)
            self._cache.put_object(POD, await self._objects.create(POD, body, namespace=key.namespace))
            _log.info(
                "model reader pod created", service=key.name, namespace=key.namespace, attempt=read.attempt
            )
        except AlreadyExists:
            name = model_reader_pod_name(key.name)
            pod = await self._objects.get(POD, name, namespace=key.namespace)
            if observe_reader_pod(pod) is None:
                self._record_refusal(key, read, f"NameTaken: a pod {name} exists that Fulcrum did not create")
            else:
                self._cache.put_object(POD, pod)
        except (Forbidden, InvalidInput) as error:
            self._record_refusal(key, read, f"PodRefused: {error}")

    def _record_refusal(self, key: ServiceKey, read: ModelReadRequest, error: str) -> None:
        self._results[key] = ModelReadAttempt(
            key=read.key, attempt=read.attempt, started_s=self._clock.now_s(), error=error
        )
        _log.warning("model reader pod refused", service=key.name, namespace=key.namespace, error=error)
        self._on_change(key)

    async def _delete(self, key: ServiceKey, pod: Object) -> None:
        if "deletionTimestamp" in pod["metadata"]:
            return
        check_is_leader(self._is_leader)
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        try:
            await self._objects.delete(POD, name, namespace=key.namespace, uid=uid)
        except (NotFound, Conflict):
            self._cache.remove(POD, key.namespace, name)

    def _pod(self, key: ServiceKey) -> Object | None:
        pod = self._cache.get_object(POD, key.namespace, model_reader_pod_name(key.name))
        return pod if pod is not None and observe_reader_pod(pod) is not None else None


def observe_reader_pod(pod: Object) -> ModelReadAttempt | None:
    """The attempt that a pod makes, with its result if there is one; None for any other pod."""
    meta, status = pod["metadata"], pod.get("status", {})
    annotations = meta.get("annotations") or {}
    if MODEL_KEY_ANNOTATION not in annotations:
        return None
    facts, error = _termination_message(status)
    number, start_failure = annotations.get(ATTEMPT_ANNOTATION, ""), start_failure_of(pod)
    return ModelReadAttempt(
        key=annotations[MODEL_KEY_ANNOTATION],
        attempt=int(number) if number.isdecimal() else 0,
        started_s=parse_time(meta["creationTimestamp"]),
        facts=facts,
        error=error,
        start_failure=start_failure.message if start_failure else "",
    )


def _termination_message(status: dict[str, Any]) -> tuple[dict[str, Any] | None, str | None]:
    """The facts, or the error; neither while the pod runs."""
    terminated = _terminated_state(status)
    if terminated is None:
        failed = status.get("phase") == "Failed"
        return None, f"{status.get('reason') or 'Failed'}: {status.get('message', '')}" if failed else None
    message = (terminated.get("message") or "").strip()
    if terminated.get("exitCode") != 0:
        code = f"exit code {terminated.get('exitCode')} ({terminated.get('reason', '')})"
        return None, message.splitlines()[-1] if message else f"the model reader pod ended with {code}"
    try:
        facts = json.loads(message)
    except ValueError:
        facts = None
    return (facts, None) if isinstance(facts, dict) else (None, "the model reader pod ended without a result")


def _terminated_state(status: dict[str, Any]) -> dict[str, Any] | None:
    found = (
        container.get("state", {}).get("terminated") for container in status.get("containerStatuses", ())
    )
    return next((terminated for terminated in found if terminated is not None), None)


def _matches(reading: ModelReadAttempt, read: ModelReadRequest) -> bool:
    return (reading.key, reading.attempt) == (read.key, read.attempt)
