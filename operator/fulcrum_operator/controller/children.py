"""Applies a service's children: the router's Deployment, Services, RBAC objects, PDB and NetworkPolicies.

A child is applied if it is missing, if its hash annotation differs from the manifest, or if somebody changed
an applied field. Kinds in `CREATE_ONLY_KINDS` are created once and belong to the router afterwards.
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
"""Annotation with the hash of the manifest that was applied last."""

WATCHED_CHILDREN = (
    *(DEPLOYMENT, SERVICE, ENDPOINT_SLICE, SERVICE_ACCOUNT),
    *(ROLE, ROLE_BINDING, PDB, NETWORK_POLICY),
)
"""Kinds of children that are watched. Leases are not: routers renew them every few seconds."""

_log = structlog.get_logger()


class Children:
    """The children of all services.

    Args:
        objects: API to apply them with.
        cache: Last known state of the watched kinds.
        settings: Settings of the installation.
        is_leader: Returns whether this process may write now.
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
        """Uid of the service whose child of an unwatched kind was found."""
        self._current_versions: dict[tuple[ObjectKind, str, str], str] = {}
        """Resource version in which a child was last found, or applied, as it should be."""

    async def sync(self, service: PDService, *, desired_replicas: int) -> None:
        """Create and change the children that differ. Deletion is left to owner references.

        `desired_replicas` is the desired number of instances of the service, over all pools.
        """
        # One after the other, in this order: a RoleBinding needs its Role.
        for child in service_children(service, self._settings, desired_replicas=desired_replicas):
            await self._sync_child(child, service)

    def recheck_all(self) -> None:
        """Check every child again in the next reconcile of its service, unwatched kinds too."""
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
        # Fields that are not ours now never will be: the server drops them or a webhook sets them.
        # So this version counts as current, otherwise every reconcile would apply the child again.
        self._current_versions[key] = applied["metadata"].get("resourceVersion", "")
        _log.info("child applied", kind=kind.kind, name=meta["name"], namespace=meta["namespace"])

    def _is_current(self, key: tuple[ObjectKind, str, str], body: Object) -> bool:
        """Whether the child was applied from this manifest and nobody has changed an applied field since."""
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
            # An object of a deleted service of this name does not count: garbage collection removes it soon.
            self._found_unwatched[key] = service.metadata.uid


def hash_child(child: Object) -> str:
    """Hash of a child's whole manifest."""
    text = json.dumps(child, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
