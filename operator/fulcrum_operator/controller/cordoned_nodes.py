"""Learns which nodes take no new pods: `kubectl drain` cordons a node before it evicts pods.

Only cordoned nodes are listed, because a watch of all nodes would report every heartbeat of every node.
"""

import asyncio
from collections.abc import Callable

import structlog

from fulcrum_cluster.objects import NODE, ObjectApi
from fulcrum_core.errors import Forbidden, FulcrumError

INTERVAL_S = 3.0
"""Seconds between two lists."""
_SELECTOR = "spec.unschedulable=true"

_log = structlog.get_logger()


class CordonedNodes:
    """Names of the cordoned nodes, as of the last list.

    Args:
        objects: API to list nodes with.
        on_change: Called when nodes were cordoned or uncordoned.
        allowed: Whether this operator may list nodes. A Role cannot grant that to one of a single namespace.
    """

    def __init__(self, objects: ObjectApi, on_change: Callable[[], None], *, allowed: bool = True) -> None:
        self._objects, self._on_change = objects, on_change
        self.names: frozenset[str] = frozenset()
        self.allowed = allowed

    async def run(self) -> None:
        """List the cordoned nodes every `INTERVAL_S` until cancelled, or until that is forbidden."""
        while self.allowed:
            await self.refresh()
            await asyncio.sleep(INTERVAL_S)

    async def refresh(self) -> None:
        """List the cordoned nodes once. After an error the names stay."""
        try:
            found, _ = await self._objects.list(NODE, namespace="", fields=_SELECTOR)
        except Forbidden as error:
            self.allowed = False
            _log.warning("cannot list nodes: an eviction is not preceded by a replacement", error=str(error))
            self._set(frozenset())
            return
        except FulcrumError as error:
            _log.warning("cannot list cordoned nodes, retrying", retry_s=INTERVAL_S, error=str(error))
            return
        self._set(frozenset(node["metadata"]["name"] for node in found))

    def _set(self, names: frozenset[str]) -> None:
        changed, self.names = self.names != names, names
        if changed:
            self._on_change()
