"""Learns which nodes are about to be drained or deleted, from their cordons and taints.

`kubectl drain` cordons a node before it evicts pods. Node autoscalers and handlers of termination notices add
a taint first. The operator watches all nodes, and keeps only the departures. `leader` runs the watch;
`plan/departing_nodes` decides what follows for instances.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from types import MappingProxyType

from fulcrum_cluster.informer import Reflector
from fulcrum_cluster.objects import NODE, Object, ObjectApi
from fulcrum_core.api import conditions
from fulcrum_core.errors import Forbidden
from fulcrum_core.ports import Clock, EventType, NodeDeparture
from fulcrum_operator.plan.observed import FailureCause

FIRST_RETRY_S, RETRY_S = 10.0, 60.0
"""Seconds until a list or watch is tried again after the first refusal, and after further ones."""
REFUSALS_REPORTED_FROM = 2
"""Refusals in a row that are reported: one alone may be an update of the permissions."""
CORDONED = "cordoned"
DELETION_TAINTS = frozenset(
    {
        "ToBeDeletedByClusterAutoscaler",
        *("karpenter.sh/disrupted", "karpenter.sh/disruption"),
        *("aws-node-termination-handler/spot-itn", "aws-node-termination-handler/scheduled-maintenance"),
        "aws-node-termination-handler/asg-lifecycle-termination",
        "cloud.google.com/impending-node-termination",
        "remediator.kubernetes.azure.com/unschedulable",
    }
)
"""Keys of the taints of nodes that will be deleted, by node autoscalers, AWS, GKE and AKS.

`DeletionCandidateOfClusterAutoscaler` is not among them: most candidates stay, and pods may still be placed
there.
"""

Event = tuple[EventType, Object]


class DepartingNodes(Reflector[Event]):
    """The departures of nodes, by name; `run` keeps them current.

    Args:
        objects: API to list and watch nodes with.
        clock: Time at which a departure becomes known.
        on_change: Called when departures, or the permission to watch nodes, have changed.
        sleep: Waits for a number of seconds.
    """

    def __init__(
        self,
        objects: ObjectApi,
        clock: Clock,
        on_change: Callable[[], None],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        super().__init__(NODE.kind, sleep=sleep)
        self._objects, self._clock, self._on_change = objects, clock, on_change
        self._refusals, self._refusal, self._watch_refused = 0, "", False
        self._found: dict[str, NodeDeparture] = {}

    @property
    def departures(self) -> Mapping[str, NodeDeparture]:
        """The departures; empty while nodes may not be listed and watched.

        A list without a watch is soon outdated and does not count: instances would move, and then move back.
        """
        return MappingProxyType(self._found if self.allowed else {})

    @property
    def allowed(self) -> bool:
        """Whether the API server did not refuse to list or watch nodes the last time."""
        return not self._refusals

    def causes(self) -> tuple[FailureCause, ...]:
        """Why departures are not known, for the condition Degraded; empty if they are."""
        if self._refusals < REFUSALS_REPORTED_FROM:
            return ()
        effect = "a drain of a node takes an instance away before there is a new one"
        return (FailureCause(conditions.NODES_FORBIDDEN, f"{self._refusal}; until it is allowed, {effect}"),)

    async def _list_and_watch(self) -> None:
        try:
            await super()._list_and_watch()
            self._note_allowed()
        except Forbidden as error:
            self._watch_refused, self._since = self._since is not None, None
            self._refusals, self._refusal = self._refusals + 1, str(error)
            if self._refusals <= REFUSALS_REPORTED_FROM:
                self._on_change()
            await self._sleep(FIRST_RETRY_S if self._refusals == 1 else RETRY_S)
            raise

    async def _relist(self) -> str:
        nodes, version = await self._objects.list(NODE, namespace="", keep=keep_read_fields)
        found = {node["metadata"]["name"]: node for node in nodes}
        before, was_allowed = dict(self.departures), self.allowed
        for name in self._found.keys() - found.keys():
            del self._found[name]
        for node in nodes:
            self._put(node)
        if not self._watch_refused:
            self._refusals = 0
        self.synced.set()
        if was_allowed is not self.allowed or self.departures != before:
            self._on_change()
        return version

    def _watch_changes(self, since: str) -> AsyncGenerator[Event, None]:
        return self._objects.watch(NODE, namespace="", since=since)

    def _apply_event(self, event: Event) -> str:
        kind, node = event
        self._note_allowed()
        name = node["metadata"].get("name", "")
        before = self.departures.get(name)
        if kind is EventType.DELETED:
            self._found.pop(name, None)
        elif kind is not EventType.BOOKMARK:
            self._put(node)
        if self.departures.get(name) != before:
            self._on_change()
        return str(node["metadata"]["resourceVersion"])

    def _note_allowed(self) -> None:
        """A watch was allowed."""
        was_allowed, self._refusals, self._watch_refused = self.allowed, 0, False
        if not was_allowed:
            self._on_change()

    def _put(self, node: Object) -> None:
        """Keep the node's departure; one that is known keeps its time."""
        name = node["metadata"]["name"]
        found, known = find_departure(node, now_s=self._clock.now_s()), self._found.get(name)
        if found is None:
            self._found.pop(name, None)
        elif known is None or (known.cause, known.is_certain) != (found.cause, found.is_certain):
            self._found[name] = found


def keep_read_fields(node: Object) -> Object:
    """The fields of a node that are read; the status with all images of the node is most of the object."""
    spec = node.get("spec", {})
    kept = {field: spec[field] for field in ("taints", "unschedulable") if field in spec}
    return {"metadata": {"name": node["metadata"]["name"]}, "spec": kept}


def find_departure(node: Object, *, now_s: float) -> NodeDeparture | None:
    """The node's departure, known since `now_s`; None if it has neither a cordon nor such a taint."""
    spec = node.get("spec", {})
    taints = {taint["key"] for taint in spec.get("taints") or ()}
    deletion = min(taints & DELETION_TAINTS, default=None)
    if deletion is None and not spec.get("unschedulable"):
        return None
    return NodeDeparture(deletion or CORDONED, now_s, is_certain=deletion is not None)
