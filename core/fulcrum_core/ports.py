"""Ports of the shells: store, clock and engine runtime. Adapters are in `cluster`, `operator` and `cli`.

One conformance suite runs against every `Store`, so callers may rely on everything that is written here.
"""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from fulcrum_core.api.meta import Resource
from fulcrum_core.api.pdinstance import PDInstance

R = TypeVar("R", bound=Resource)


class EventType(StrEnum):
    """Kind of change of a watched object."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"
    BOOKMARK = "BOOKMARK"


@dataclass(frozen=True, slots=True)
class WatchEvent(Generic[R]):
    """One change. `object` is the state after it, or the last state of a deleted object.

    A BOOKMARK has no object: everything up to `resource_version` was delivered. Another event without an
    object is about one that the model cannot read: `unreadable` is its namespace and name.
    """

    type: EventType
    object: R | None
    resource_version: str
    unreadable: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Listing(Generic[R]):
    """All objects of a kind at one resourceVersion, ordered by namespace and name.

    `unreadable` lists namespace and name of objects of a newer version, which the model cannot read.
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

        The namespace "" means all namespaces.
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
    """Wall clock and monotonic clock."""

    def now_s(self) -> float:
        """Unix time in seconds, for objects and messages to other processes."""
        ...

    def monotonic_s(self) -> float:
        """Seconds of a clock that never jumps, for measuring durations."""
        ...


class EngineState(StrEnum):
    """Observed state of an engine's process or pod; in a local run also of the router and the autoscaler."""

    STARTING = "Starting"
    RUNNING = "Running"
    EXITED = "Exited"
    """The engine ended and is being restarted in place."""
    LOST = "Lost"
    """The engine will not recover: its pod was deleted or evicted, failed for good, or its node is lost."""


class InstanceKey(NamedTuple):
    """Namespace and name of the PDInstance that an engine belongs to."""

    namespace: str
    name: str


def instance_key(instance: PDInstance) -> InstanceKey:
    """The key of an instance's engine."""
    return InstanceKey(instance.metadata.namespace, instance.metadata.name)


@dataclass(frozen=True, slots=True)
class NodeDeparture:
    """A node is about to be drained or deleted, and takes no new pods."""

    cause: str
    """How that is known: `cordoned`, or the key of a taint."""
    since_s: float
    """Time from which it is known, in unix seconds."""
    is_certain: bool
    """Whether the node will be deleted. A cordon alone can be removed, and may have another purpose."""


@dataclass(frozen=True, slots=True)
class EngineObservation:
    """State of one engine, observed by the runtime. `endpoint` is `host:port`, None until it responds."""

    name: str
    state: EngineState
    restarts: int
    endpoint: str | None = None
    exit_reason: str | None = None
    """Why the engine last exited; None if it never did."""
    reason: str = ""
    """Why the engine cannot start, as a reason of the condition Degraded (`conditions.IMAGE_PULL_FAILED`,
    `UNSCHEDULABLE` or `ENGINE_START_FAILED`); empty while nothing prevents the start."""
    message: str = ""
    """Why the engine is in this state, for people: the image cannot be pulled, no node fits, the pod was
    evicted. Empty if not known."""
    out_of_memory: bool = False
    """Whether the last run of the engine was killed because it exceeded its memory limit."""
    image: str | None = None
    """Image of the engine, by digest; None for an engine without an image."""
    since_s: float | None = None
    """Time at which the engine entered this state, in unix seconds; None if not known."""
    terminating: bool = False
    """Whether somebody requested the engine's deletion. The state stays RUNNING while the engine responds."""
    lacks_room: bool = False
    """STARTING, but no node has room for it, or a quota is used up: another engine would have to end."""
    node: str = ""
    """Node that the engine runs on; empty if there is none yet, or the runtime has no nodes."""
    node_departure: NodeDeparture | None = None
    """How the engine's node is about to leave the cluster; None for a node that stays."""
    node_lost: bool = False
    """LOST because the node does not report. A caller that reaches the engine itself overrides this."""


class EngineRuntime(Protocol):
    """Runs engines: as processes in a local run, as pods in a cluster. All calls are idempotent."""

    async def start(self, instance: PDInstance, *, startup_s: float) -> None:
        """Start the engine of the instance; restart the engine with back-off whenever it exits.

        The engine is expected to be ready `startup_s` seconds after a start; if it takes much longer, it is
        restarted. An engine of the same key that already exists, even a terminating one, is left unchanged.
        """
        ...

    async def stop(self, key: InstanceKey, *, drained: bool = False) -> None:
        """Request the end of the engine without waiting; `observe` returns it as `terminating` until it ends.

        A drained engine gets only a few seconds: no request waits for KV that the engine still keeps.
        """
        ...

    def observe(self, namespace: str) -> tuple[EngineObservation, ...]:
        """Return every engine of the namespace that was started and still exists, ordered by name."""
        ...
