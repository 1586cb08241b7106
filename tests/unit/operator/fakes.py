"""Fakes of ports for the operator's tests: an API server that stores pods, and a runtime of engines.

Everything else is the memory store's. Pods do not start by themselves; a test writes their status.
"""

import copy
from dataclasses import dataclass, field
from typing import Any

from fulcrum_cluster.objects import POD, ObjectKind
from fulcrum_core.api import PDInstance
from fulcrum_core.api.meta import format_time
from fulcrum_core.errors import AlreadyExists, NotFound
from fulcrum_core.ports import EngineObservation, InstanceKey
from tests.unit.operator.builders import EXITED, NOW_S, STARTING, engine

Json = dict[str, Any]


@dataclass
class FakePods:
    """An API server that stores pods. It removes a deleted pod at once and sends no watch events."""

    pods: dict[str, Json] = field(default_factory=dict)
    refusal: Exception | None = None
    """Error that `create` raises."""
    version: int = 100
    log: list[tuple[str, Json]] = field(default_factory=list)
    """Verb and pod of each creation and deletion, in order."""
    graces_s: list[float | None] = field(default_factory=list)
    """Grace period of each deletion in seconds; None: that of the pod's spec."""

    @property
    def deletions(self) -> list[str]:
        """Names of the deleted pods."""
        return [pod["metadata"]["name"] for verb, pod in self.log if verb == "delete"]

    async def create(self, kind: ObjectKind, body: Json, *, namespace: str) -> Json:
        assert (kind, namespace) == (POD, "default")
        if self.refusal is not None:
            raise self.refusal
        name = body["metadata"]["name"]
        if name in self.pods:
            raise AlreadyExists(name)
        self.log.append(("create", body))
        return self.put(body)

    async def get(self, _kind: ObjectKind, name: str, *, namespace: str) -> Json:
        return copy.deepcopy(self._find(name, namespace))

    async def patch(self, _kind: ObjectKind, name: str, patch: Json, *, namespace: str) -> Json:
        pod = self._find(name, namespace)
        labels = {**pod["metadata"]["labels"], **patch["metadata"]["labels"]}
        return self.put(pod | {"metadata": pod["metadata"] | {"labels": labels}})

    async def delete(
        self, _kind: ObjectKind, name: str, *, namespace: str, uid: str, grace_s: float | None = None
    ) -> None:
        pod = self._find(name, namespace)
        assert uid == pod["metadata"]["uid"]
        self.graces_s.append(grace_s)
        self.log.append(("delete", pod))
        del self.pods[name]

    def put(self, body: Json) -> Json:
        """Store the pod in a new version, as after a write by another client."""
        self.version += 1
        meta = {"uid": f"u-{self.version}", "creationTimestamp": format_time(NOW_S), **body["metadata"]}
        stored = body | {"metadata": meta | {"resourceVersion": str(self.version)}}
        self.pods[meta["name"]] = stored
        return copy.deepcopy(stored)

    def _find(self, name: str, namespace: str) -> Json:
        assert namespace == "default"
        if name not in self.pods:
            raise NotFound(name)
        return self.pods[name]


@dataclass
class FakeRuntime:
    """An `EngineRuntime` whose engines stop at once, and run after `become_ready` or, if so set, at once."""

    runs_at_once: bool = False

    observations: dict[str, EngineObservation] = field(default_factory=dict)
    startups_s: dict[str, float] = field(default_factory=dict)

    async def start(self, instance: PDInstance, *, startup_s: float) -> None:
        name = instance.metadata.name
        self.startups_s[name] = startup_s
        self.observations[name] = engine(name) if self.runs_at_once else engine(name, STARTING)

    async def stop(self, key: InstanceKey, *, drained: bool = False) -> None:  # noqa: ARG002
        self.observations.pop(key.name, None)

    def observe(self, namespace: str) -> tuple[EngineObservation, ...]:
        del namespace
        return tuple(self.observations[name] for name in sorted(self.observations))

    def become_ready(self, *names: str) -> None:
        for name in names or tuple(self.observations):
            self.observations[name] = engine(name, restarts=self.observations[name].restarts)

    def crash(self, name: str) -> None:
        self.observations[name] = engine(name, EXITED, exit_reason="signal SIGKILL")

    def restart(self, name: str) -> None:
        self.observations[name] = engine(name, STARTING, restarts=1, exit_reason="signal SIGKILL")
