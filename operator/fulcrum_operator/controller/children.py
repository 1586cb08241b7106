"""What stands around a service's engines, brought to what `service_children` says and kept there.

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
from fulcrum_operator.controller.cache import OWNED_FIELDS, ObjectCache
from fulcrum_operator.controller.cached_store import check_is_leader
from fulcrum_operator.controller.field_ownership import FIELD_MANAGER, owns_all_fields
from fulcrum_operator.manifests.children import CREATE_ONLY_KINDS, service_children
from fulcrum_operator.manifests.names import InstallationSettings

APPLIED_HASH = "fulcrum.dev/applied-hash"
"""Annotation: the hash of what the object was last applied from."""

WATCHED_CHILDREN = (
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
        is_leader: Whether this process may write now.
    """

    def __init__(
        self,
        objects: ObjectApi,
        cache: ObjectCache,
        settings: InstallationSettings,
        *,
        is_leader: Callable[[], bool],
    ) -> None:
        self._objects, self._cache, self._settings, self._is_leader = objects, cache, settings, is_leader
        self._found_unwatched: dict[tuple[ObjectKind, str, str], str] = {}
        """Children of kinds that are not watched, as last looked for, with their owner's identity."""
        self._current_versions: dict[tuple[ObjectKind, str, str], str] = {}
        """The version in which a child was last found, or made, as it shall be."""

    async def sync(self, service: PDService, *, wanted: int) -> None:
        """Make and change what differs; nothing differs: nothing is written. Owners' ends delete them."""
        for child in service_children(
            service, self._settings, wanted=wanted
        ):  # in order: a binding needs its role
            await self._sync_child(child, service)

    def recheck_all(self) -> None:
        """Have the next pass of each service see whether what is not watched is still there."""
        self._found_unwatched.clear()
        self._current_versions.clear()

    async def _sync_child(self, child: Object, service: PDService) -> None:
        kind, meta = kind_of_body(child), child["metadata"]
        if child["kind"] in CREATE_ONLY_KINDS:
            await self._create_once(kind, child, service)
            return
        annotations = {**meta.get("annotations", {}), APPLIED_HASH: hash_child(child)}
        body = {**child, "metadata": {**meta, "annotations": annotations}}
        key = kind, meta["namespace"], meta["name"]
        if self._is_current(key, body):
            return
        check_is_leader(self._is_leader)
        applied = await self._objects.apply(body, manager=FIELD_MANAGER, force=True)
        self._cache.put_object(kind, applied)
        # What is not ours in the answer never will be: the server drops the field, or a webhook sets it.
        self._current_versions[key] = applied["metadata"].get("resourceVersion", "")
        _log.info("child applied", kind=kind.kind, name=meta["name"], namespace=meta["namespace"])

    def _is_current(self, key: tuple[ObjectKind, str, str], body: Object) -> bool:
        """Whether the child is as it was applied, and was applied from this."""
        held = self._cache.get_object(*key)
        if held is None:
            return False
        meta = held["metadata"]
        if meta.get("annotations", {}).get(APPLIED_HASH) != body["metadata"]["annotations"][APPLIED_HASH]:
            return False
        version, owned = meta.get("resourceVersion", ""), held.get(OWNED_FIELDS)
        if (
            self._current_versions.get(key) != version
            and owned is not None
            and not owns_all_fields(owned, body)
        ):
            return False
        self._current_versions[key] = version
        return True

    async def _create_once(self, kind: ObjectKind, child: Object, service: PDService) -> None:
        meta = child["metadata"]
        key = kind, meta["namespace"], meta["name"]
        if self._cache.get_object(*key) is not None or self._found_unwatched.get(key) == service.metadata.uid:
            return
        try:
            stored = await self._objects.get(kind, meta["name"], namespace=meta["namespace"])
        except NotFound:
            check_is_leader(self._is_leader)
            stored = await self._objects.create(kind, child, namespace=meta["namespace"])
            _log.info("child created", kind=kind.kind, name=meta["name"], namespace=meta["namespace"])
        owners = stored["metadata"].get("ownerReferences", ())
        if kind in WATCHED_CHILDREN:
            self._cache.put_object(kind, stored)
        elif any(owner["uid"] == service.metadata.uid for owner in owners):
            self._found_unwatched[key] = service.metadata.uid  # else it is its predecessor's, and goes soon


def hash_child(child: Object) -> str:
    """A hash of everything that a child shall be."""
    text = json.dumps(child, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
