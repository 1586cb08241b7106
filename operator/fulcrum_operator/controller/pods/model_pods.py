"""The pods that read models: made when a plan asks for one, deleted as soon as it does no more.

What such a pod says is read off the cache: its last words are the answer, and so is why there is none. It is
remembered beyond the pod: a status that does not keep it (of CRDs older than the operator) then asks for one
pod in ten minutes, not for one after the other.
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
from fulcrum_operator.controller.cache import Cache
from fulcrum_operator.controller.cached_store import check_leading
from fulcrum_operator.controller.pods.observation import hindrance_of
from fulcrum_operator.controller.reconcile import ServiceKey
from fulcrum_operator.manifests.model_reader_pod import ATTEMPT, KEY, reader_name, reader_pod
from fulcrum_operator.manifests.names import ClusterSettings
from fulcrum_operator.plan.model import Read
from fulcrum_operator.plan.observed import Reading

REMEMBERED_S = 600.0
"""For how long an answer stands without the status."""

_log = structlog.get_logger()


class ModelPods:
    """One short pod for each service whose model has to be read; `reconcile.ModelReader`.

    Args:
        objects: Where pods are made and deleted.
        cache: Where they are seen.
        settings: What holds for all services.
        clock: What time it is.
        leads: Whether this process may write now.
        on_change: Called with a service of which there is something new.
    """

    def __init__(
        self,
        objects: ObjectApi,
        cache: Cache,
        settings: ClusterSettings,
        clock: Clock,
        *,
        leads: Callable[[], bool],
        on_change: Callable[[ServiceKey], None],
    ) -> None:
        self._objects, self._cache, self._settings, self._clock = objects, cache, settings, clock
        self._leads, self._on_change = leads, on_change
        self._told: dict[ServiceKey, Reading] = {}
        """What pods said that are gone, or why there was none."""

    def reading(self, key: ServiceKey) -> Reading | None:
        """See `ModelReader`."""
        pod = self._pod(key)
        if pod is not None:
            return reading_of(pod)
        told = self._told.get(key)
        return told if told is not None and self._clock.now_s() < told.born_s + REMEMBERED_S else None

    async def tend(self, service: PDService, read: Read | None) -> None:
        """Have the pod that this asks for, and no other."""
        key = ServiceKey(service.metadata.namespace, service.metadata.name)
        pod, reading = self._pod(key), self.reading(key)
        if read is not None and reading is not None and _is_of(reading, read):
            return
        if pod is not None:
            if reading is not None and (reading.facts is not None or reading.error is not None):
                self._told[key] = reading
            await self._delete(key, pod)
        elif read is not None:
            await self._make(key, service, read)

    def forget(self, key: ServiceKey) -> None:
        """The service is gone; whom it owned the cluster deletes."""
        self._told.pop(key, None)

    async def _make(self, key: ServiceKey, service: PDService, read: Read) -> None:
        check_leading(self._leads)
        body = reader_pod(read, service, self._settings)
        try:
            self._cache.take(POD, await self._objects.create(POD, body, namespace=key.namespace))
            _log.info("model is read", service=key.name, namespace=key.namespace, attempt=read.attempt)
        except AlreadyExists:
            name = reader_name(key.name)
            pod = await self._objects.get(POD, name, namespace=key.namespace)
            if reading_of(pod) is None:
                self._refuse(key, read, f"NameTaken: there is a pod {name} that Fulcrum did not make")
            else:
                self._cache.take(POD, pod)
        except (Forbidden, InvalidInput) as error:
            self._refuse(key, read, f"PodRefused: {error}")

    def _refuse(self, key: ServiceKey, read: Read, why: str) -> None:
        self._told[key] = Reading(key=read.key, attempt=read.attempt, born_s=self._clock.now_s(), error=why)
        _log.warning("model is not read", service=key.name, namespace=key.namespace, why=why)
        self._on_change(key)

    async def _delete(self, key: ServiceKey, pod: Object) -> None:
        if "deletionTimestamp" in pod["metadata"]:
            return
        check_leading(self._leads)
        name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
        try:
            await self._objects.delete(POD, name, namespace=key.namespace, uid=uid)
        except (NotFound, Conflict):
            self._cache.drop(POD, key.namespace, name)

    def _pod(self, key: ServiceKey) -> Object | None:
        pod = self._cache.object(POD, key.namespace, reader_name(key.name))
        return pod if pod is not None and reading_of(pod) is not None else None


def reading_of(pod: Object) -> Reading | None:
    """What the pod says; None for a pod that reads no model."""
    meta, status = pod["metadata"], pod.get("status", {})
    said = meta.get("annotations") or {}
    if KEY not in said:
        return None
    facts, error = _last_words(status)
    number = said.get(ATTEMPT, "")
    return Reading(
        key=said[KEY],
        attempt=int(number) if number.isdecimal() else 0,
        born_s=parse_time(meta["creationTimestamp"]),
        facts=facts,
        error=error,
        hindrance=hindrance_of(pod),
    )


def _last_words(status: dict[str, Any]) -> tuple[dict[str, Any] | None, str | None]:
    """What was read, or why nothing was; neither while the pod is at it."""
    ended = _ended(status)
    if ended is None:
        failed = status.get("phase") == "Failed"
        return None, f"{status.get('reason') or 'Failed'}: {status.get('message', '')}" if failed else None
    message = (ended.get("message") or "").strip()
    if ended.get("exitCode") != 0:
        code = f"exit code {ended.get('exitCode')} ({ended.get('reason', '')})"
        return None, message.splitlines()[-1] if message else f"the pod that reads it ended with {code}"
    try:
        facts = json.loads(message)
    except ValueError:
        facts = None
    return (facts, None) if isinstance(facts, dict) else (None, "the pod that reads it did not say it")


def _ended(status: dict[str, Any]) -> dict[str, Any] | None:
    found = (
        container.get("state", {}).get("terminated") for container in status.get("containerStatuses", ())
    )
    return next((ended for ended in found if ended is not None), None)


def _is_of(reading: Reading, read: Read) -> bool:
    return (reading.key, reading.attempt) == (read.key, read.attempt)
