"""The ports through which shells reach the world.

`Store` is where desired state lives: memory in a local run, Kubernetes in a cluster. One conformance
suite runs against every adapter, so what is written here is what a reconciler may rely on.
"""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from fulcrum_core.api.meta import Resource
from fulcrum_core.api.pdinstance import PDInstance

R = TypeVar("R", bound=Resource)


class EventType(StrEnum):
    """What happened to an object on a watch."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    BOOKMARK = "BOOKMARK"


@dataclass(frozen=True, slots=True)
class WatchEvent(Generic[R]):
    """One change. `object` is the state after it, or the last state of a deleted object.

    A BOOKMARK carries no object: it says that everything up to `resource_version` was delivered. Another
    event without one is about an object that its model cannot read: `unreadable` is its namespace and name.
    """

    type: EventType
    object: R | None
    resource_version: str
    unreadable: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Listing(Generic[R]):
    """All objects of a kind at one resourceVersion, ordered by namespace and name.

    `unreadable` are namespace and name of those that their model cannot read: a newer writer's.
    """

    items: tuple[R, ...]
    resource_version: str
    unreadable: tuple[tuple[str, str], ...] = ()


class Store(Protocol):
    """List, watch and write resources of one cluster. Every method may raise `StoreUnavailable`, `Forbidden`.

    Writes are validated and defaulted by the kind's model; a rule broken raises `InvalidInput`. A write of
    the main resource cannot touch `status`, and `patch_status` cannot touch anything else.
    `metadata.generation` grows with every change of `spec`, `metadata.resourceVersion` with every change; a
    write that changes nothing changes neither and is not seen by watches.
    """

    async def get(self, kind: type[R], name: str, *, namespace: str) -> R:
        """The object, or `NotFound`."""
        ...

    async def list(self, kind: type[R], *, namespace: str) -> Listing[R]:
        """All objects of the kind in the namespace ("": in all), and the version a watch continues from."""
        ...

    def watch(self, kind: type[R], *, namespace: str, since: str) -> AsyncIterator[WatchEvent[R]]:
        """Every change after `since`, in order, until caller or store end it; `Gone` if that is too old.

        The namespace "" stands for all.
        """
        ...

    async def create(self, obj: R) -> R:
        """The stored object, or `AlreadyExists`. A status is dropped, a resourceVersion refused."""
        ...

    async def apply(self, obj: R, *, manager: str) -> R:
        """Server-side apply: create or merge. What `manager` applied before and leaves out now is removed.

        A field that another manager owns raises `Conflict` naming it.
        """
        ...

    async def patch(
        self,
        kind: type[R],
        name: str,
        patch: Mapping[str, Any],
        *,
        namespace: str,
        resource_version: str | None = None,
    ) -> R:
        """JSON merge patch of all but status; `Conflict` if `resource_version` is given and not current."""
        ...

    async def patch_status(
        self,
        kind: type[R],
        name: str,
        patch: Mapping[str, Any],
        *,
        namespace: str,
        resource_version: str | None = None,
    ) -> R:
        """JSON merge patch of status (`patch` is the status itself)."""
        ...

    async def delete(self, kind: type[R], name: str, *, namespace: str, uid: str | None = None) -> None:
        """Delete the object, and later all that it owns (owner references); `NotFound` if there is none.

        `Conflict` if `uid` is given and the object of that name is another one by now.
        """
        ...


class Clock(Protocol):
    """The two clocks of a shell."""

    def now_s(self) -> float:
        """Unix time in seconds: what objects and other processes are told."""
        ...

    def monotonic_s(self) -> float:
        """Seconds that never jump: what durations are measured with."""
        ...


class EngineState(StrEnum):
    """What a runtime sees of one engine process or pod."""

    STARTING = "Starting"
    RUNNING = "Running"
    EXITED = "Exited"
    """It ended and is started again where it is."""
    LOST = "Lost"
    """It will not come back: deleted by somebody else, evicted, failed for good, or its node is gone."""


class InstanceKey(NamedTuple):
    """Which PDInstance an engine belongs to: two services in two namespaces may have one of the same name."""

    namespace: str
    name: str


def instance_key(instance: PDInstance) -> InstanceKey:
    """The key of an instance's engine."""
    return InstanceKey(instance.metadata.namespace, instance.metadata.name)


@dataclass(frozen=True, slots=True)
class EngineObservation:
    """One engine as the runtime sees it. `endpoint` is `host:port`, known once it answers."""

    name: str
    state: EngineState
    restarts: int
    endpoint: str | None = None
    exit_reason: str | None = None
    """Why its last life ended; None in its first."""
    reason: str = ""
    """Why the engine cannot start, as a reason of the condition Degraded (`conditions.IMAGE_PULL_FAILED`,
    `UNSCHEDULABLE` or `ENGINE_START_FAILED`); empty while nothing prevents the start."""
    message: str = ""
    """Why the engine is in this state, for people: the image cannot be pulled, no node fits, the pod was
    evicted. Empty if not known."""
    out_of_memory: bool = False
    """Whether its last run was killed because it used more memory than its limit."""
    image: str | None = None
    """The image it runs, by digest, where there is one."""
    since_s: float | None = None
    """Since when it is in this state, where that is known; unix seconds."""
    terminating: bool = False
    """Its end was asked for, by us or by somebody else. While it still serves its state is RUNNING."""
    node_lost: bool = False
    """It counts as LOST because its node is not heard of; who reaches the engine itself knows better."""


class EngineRuntime(Protocol):
    """Where engine instances run: processes in a local run, pods in a cluster. All calls are idempotent."""

    async def start(self, instance: PDInstance, *, startup_s: float) -> None:
        """Have the instance's engine run; one that exits is started again with back-off.

        It is expected to serve `startup_s` after a start; one that takes much longer is started again, too.
        An engine of that key that is there already, even one that is terminating, is left as it is.
        """
        ...

    async def stop(self, key: InstanceKey, *, drained: bool = False) -> None:
        """Ask the engine to end, and do not wait for it: `observe` shows it, `terminating`, until it is gone.

        One that is drained gets a few seconds for it: KV that it still holds is nobody's, such as a probe's.
        """
        ...

    def observe(self, namespace: str) -> tuple[EngineObservation, ...]:
        """Every engine of the namespace that was started and is not gone, by name."""
        ...
