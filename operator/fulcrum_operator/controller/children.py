"""What stands around a service's engines, brought to what `children_of` says and kept there.

A child is applied when it is not there, when what it was last applied from, by hash, is not what it shall
be now, and when somebody else has changed what was applied. Those that are made once belong to somebody else
afterwards and are only looked for.
"""

import hashlib
import json
from collections.abc import Callable

import structlog

from fulcrum_cluster.objects import (
    DEPLOYMENT,
    ENDPOINT_SLICE,
    NETWORK_POLICY,
    PDB,
    ROLE,
    ROLE_BINDING,
    SERVICE,
    SERVICE_ACCOUNT,
    Object,
    ObjectApi,
    ObjectKind,
    kind_of_body,
)
from fulcrum_core.api import PDService
from fulcrum_core.errors import NotFound
from fulcrum_operator.controller.cache import OWNED, Cache
from fulcrum_operator.controller.cached_store import check_leading
from fulcrum_operator.controller.ownership import MANAGER, owns_all
from fulcrum_operator.manifests.children import MADE_ONCE, children_of
from fulcrum_operator.manifests.names import ClusterSettings

APPLIED = "fulcrum.dev/applied"
"""Annotation: the hash of what the object was last applied from."""

WATCHED = (
    *(DEPLOYMENT, SERVICE, ENDPOINT_SLICE, SERVICE_ACCOUNT),
    *(ROLE, ROLE_BINDING, PDB, NETWORK_POLICY),
)
"""Kinds of children whose changes are followed. Leases are renewed all the time and are not."""

_log = structlog.get_logger()


class Children:
    """The children of all services.

    Args:
        objects: Where they are applied.
        cache: Where they are seen.
        settings: What holds for all services.
        leads: Whether this process may write now.
    """

    def __init__(
        self, objects: ObjectApi, cache: Cache, settings: ClusterSettings, *, leads: Callable[[], bool]
    ) -> None:
        self._objects, self._cache, self._settings, self._leads = objects, cache, settings, leads
        self._met: dict[tuple[ObjectKind, str, str], str] = {}
        """Children of kinds that are not watched, as last looked for, with their owner's identity."""
        self._sound: dict[tuple[ObjectKind, str, str], str] = {}
        """The version in which a child was last found, or made, as it shall be."""

    async def tend(self, service: PDService, *, wanted: int) -> None:
        """Make and change what differs; nothing differs: nothing is written. Owners' ends delete them."""
        for child in children_of(
            service, self._settings, wanted=wanted
        ):  # in order: a binding needs its role
            await self._keep(child, service)

    def look_again(self) -> None:
        """Have the next pass of each service see whether what is not watched is still there."""
        self._met.clear()
        self._sound.clear()

    async def _keep(self, child: Object, service: PDService) -> None:
        kind, meta = kind_of_body(child), child["metadata"]
        if child["kind"] in MADE_ONCE:
            await self._make_once(kind, child, service)
            return
        annotations = {**meta.get("annotations", {}), APPLIED: fingerprint(child)}
        body = {**child, "metadata": {**meta, "annotations": annotations}}
        key = kind, meta["namespace"], meta["name"]
        if self._stands(key, body):
            return
        check_leading(self._leads)
        answer = await self._objects.apply(body, manager=MANAGER, force=True)
        self._cache.take(kind, answer)
        # What is not ours in the answer never will be: the server drops the field, or a webhook sets it.
        self._sound[key] = answer["metadata"].get("resourceVersion", "")
        _log.info("child applied", kind=kind.kind, name=meta["name"], namespace=meta["namespace"])

    def _stands(self, key: tuple[ObjectKind, str, str], body: Object) -> bool:
        """Whether the child is as it was applied, and was applied from this."""
        held = self._cache.object(*key)
        if held is None:
            return False
        meta = held["metadata"]
        if meta.get("annotations", {}).get(APPLIED) != body["metadata"]["annotations"][APPLIED]:
            return False
        version, owned = meta.get("resourceVersion", ""), held.get(OWNED)
        if self._sound.get(key) != version and owned is not None and not owns_all(owned, body):
            return False
        self._sound[key] = version
        return True

    async def _make_once(self, kind: ObjectKind, child: Object, service: PDService) -> None:
        meta = child["metadata"]
        key = kind, meta["namespace"], meta["name"]
        if self._cache.object(*key) is not None or self._met.get(key) == service.metadata.uid:
            return
        try:
            made = await self._objects.get(kind, meta["name"], namespace=meta["namespace"])
        except NotFound:
            check_leading(self._leads)
            made = await self._objects.create(kind, child, namespace=meta["namespace"])
            _log.info("child made", kind=kind.kind, name=meta["name"], namespace=meta["namespace"])
        owners = made["metadata"].get("ownerReferences", ())
        if kind in WATCHED:
            self._cache.take(kind, made)
        elif any(owner["uid"] == service.metadata.uid for owner in owners):
            self._met[key] = service.metadata.uid  # else it is its predecessor's, and goes soon


def fingerprint(child: Object) -> str:
    """A hash of everything that a child shall be."""
    text = json.dumps(child, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
