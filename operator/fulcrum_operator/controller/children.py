"""Applies a service's children: the router's Deployment, Services, RBAC objects, PDB and NetworkPolicies.

A child is created if it is missing, and applied if its hash annotation differs from the manifest or if
somebody changed an applied field. Kinds in `CREATE_ONLY_KINDS` belong to the router after their creation. An
object that is not the service's is never changed: a missing child is created and not applied, because apply
would change an object of that name that appeared meanwhile, and apply names the uid of the child that was
judged. A child that cannot be made does not stop the others, except those that refer to its name: if that is
somebody else's object, they wait until it is gone.

`leader` calls `sync` in each reconcile of a cluster; a local run has no children.
"""

import contextlib
import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

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
    kind_of_resource,
)
from fulcrum_core.api import PDService, conditions
from fulcrum_core.errors import AlreadyExists, Conflict, Forbidden, InvalidInput, NotFound
from fulcrum_core.ports import Clock
from fulcrum_operator.controller.cache import OWNED_FIELDS, ObjectCache
from fulcrum_operator.controller.cached_store import check_is_leader
from fulcrum_operator.controller.context import Problems
from fulcrum_operator.controller.field_ownership import (
    FIELD_MANAGER,
    NO_FIELDS,
    as_applied_fields,
    owns_all_fields,
)
from fulcrum_operator.controller.pods.router_pods import serves_tls
from fulcrum_operator.controller.work_queue import backoff_s
from fulcrum_operator.manifests.children import CREATE_ONLY_KINDS, needed_children, service_children
from fulcrum_operator.manifests.names import ENGINE_ACCOUNT_SUFFIX, InstallationSettings
from fulcrum_operator.plan.observed import FailureCause
from fulcrum_operator.plan.ownership import (
    Ownership,
    describe_taken,
    is_labelled_as_child,
    judge_ownership,
    parse_metadata,
)

APPLIED_HASH = "fulcrum.dev/applied-hash"
"""Annotation with the hash of the manifest that was applied last."""

WATCHED_CHILDREN = (
    *(DEPLOYMENT, SERVICE, ENDPOINT_SLICE, SERVICE_ACCOUNT),
    *(ROLE, ROLE_BINDING, PDB, NETWORK_POLICY),
)
"""Kinds of children that are watched. Leases are not: routers renew them every few seconds."""

RETRY_DELAY_MIN_S, RETRY_DELAY_MAX_S = 0.5, 10.0
"""Delays after the first and after many refusals of a child, in seconds."""
_TRIES_MAX = 4
"""Tries to take over the fields of a created object that its controller changes at the same time."""

_ChildKey = tuple[ObjectKind, str, str]
_Name = tuple[str, str]
"""Kind and name of a child."""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class _Refusal:
    """A child that could not be made: tried again at `retry_s`, or when child or manifest have changed."""

    cause: FailureCause
    failures: int
    retry_s: float
    manifest: str
    cached_version: str


class Children:
    """The children of all services.

    Args:
        objects: API to apply them with.
        cache: Last known state of the watched kinds.
        settings: Settings of the installation.
        clock: Source of the time of retries.
        is_leader: Returns whether this process may write now.
    """

    def __init__(
        self,
        objects: ObjectApi,
        cache: ObjectCache,
        settings: InstallationSettings,
        clock: Clock,
        *,
        is_leader: Callable[[], bool],
    ) -> None:
        self._objects, self._cache, self._settings, self._clock = objects, cache, settings, clock
        self._is_leader = is_leader
        self._found_unwatched: dict[_ChildKey, str] = {}
        """Uid of the service whose child of an unwatched kind was found."""
        self._current_versions: dict[_ChildKey, str] = {}
        """Resource version in which a child was last found, or applied, as it should be."""
        self._refusals: dict[_ChildKey, _Refusal] = {}

    async def sync(self, service: PDService, *, min_available: int) -> Problems:
        """Create and change the children that differ; returns what could not be made.

        Deletion is left to owner references. `min_available`: least number of instances that evictions leave.
        """
        refusals = dict[_Name, _Refusal]()
        waiting = dict[_Name, _Name]()
        # One after the other, in this order: a RoleBinding needs its Role.
        made, invalid = _make_manifests(
            service,
            self._settings,
            min_available=min_available,
            serves_tls=serves_tls(self._cache, service),
        )
        for child in made:
            name = child["kind"], child["metadata"]["name"]
            taken = next((waiting[each] for each in needed_children(child) if each in waiting), None)
            if taken is not None:
                waiting[name] = taken
                await self._withdraw(child, service)
            elif (refusal := await self._sync_child(child, service)) is not None:
                refusals[name] = refusal
                if refusal.cause.reason == conditions.NAME_TAKEN:
                    waiting[name] = name
        retry_s = min((refusal.retry_s for refusal in refusals.values()), default=None)
        return Problems(
            (*(_with_waiting(refusal.cause, name, waiting) for name, refusal in refusals.items()), *invalid),
            None if retry_s is None else max(0.0, retry_s - self._clock.monotonic_s()),
        )

    def is_own(self, kind: ObjectKind, name: str, service: PDService | None) -> bool:
        """Whether the object exists and belongs to the service, as far as the watches have reported."""
        if service is None:
            return False
        stored = self._cache.get_object(kind, service.metadata.namespace, name)
        if stored is None:
            return False
        return judge_ownership(parse_metadata(stored), service, names_service=False) is Ownership.OURS

    def recheck_all(self) -> None:
        """Check every child again in the next reconcile of its service, unwatched kinds too."""
        self._found_unwatched.clear()
        self._current_versions.clear()

    async def _sync_child(self, child: Object, service: PDService) -> _Refusal | None:
        """Make one child; returns its refusal if the API server or somebody else's object prevents that."""
        kind, meta = kind_of_body(child), child["metadata"]
        if kind == ENDPOINT_SLICE:
            family = self._address_family(service)
            if family is None:
                return None  # the Service was refused
            child = {**child, "addressType": family}
        key, manifest = (kind, meta["namespace"], meta["name"]), hash_child(child)
        known = self._refusals.get(key)
        if (
            known is not None
            and self._clock.monotonic_s() < known.retry_s
            and (known.manifest, known.cached_version) == (manifest, self._cached_version(key))
        ):
            return known
        try:
            taken = await self._make(key, child, service)
        except (Forbidden, InvalidInput) as error:
            cause = FailureCause(conditions.CHILD_REFUSED, f"{kind.kind} {meta['name']}: {error}")
        else:
            if taken is None:
                self._refusals.pop(key, None)
                return None
            cause = FailureCause(conditions.NAME_TAKEN, taken)
        failures = known.failures + 1 if known is not None else 1
        if known is None or known.cause != cause:
            _log.warning("child refused", kind=kind.kind, name=meta["name"], error=cause.message)
        delay_s = backoff_s(failures, min_s=RETRY_DELAY_MIN_S, max_s=RETRY_DELAY_MAX_S)
        retry_s = self._clock.monotonic_s() + delay_s
        self._refusals[key] = _Refusal(cause, failures, retry_s, manifest, self._cached_version(key))
        return self._refusals[key]

    def _cached_version(self, key: _ChildKey) -> str:
        cached = self._cache.get_object(*key)
        return "" if cached is None else str(cached["metadata"].get("resourceVersion", ""))

    async def _make(self, key: _ChildKey, child: Object, service: PDService) -> str | None:
        """Create, adopt or change the child; returns whose object has its name, None if nobody else's."""
        kind = key[0]
        if child["kind"] in CREATE_ONLY_KINDS:
            body = child
        else:
            annotations = {**child["metadata"].get("annotations", {}), APPLIED_HASH: hash_child(child)}
            body = {**child, "metadata": {**child["metadata"], "annotations": annotations}}
        stored = await self._find_or_create(key, body, service)
        if stored is None:
            return None
        meta = parse_metadata(stored)
        ownership = judge_ownership(meta, service, names_service=is_labelled_as_child(meta, service))
        if ownership is Ownership.FOREIGN:
            return describe_taken(kind.kind, meta, service)
        if ownership is Ownership.ORPHANED:
            await check_not_deleted(service, self._objects)
        if (
            kind == ENDPOINT_SLICE and stored.get("addressType") != child["addressType"]
        ):  # it cannot be changed
            await self._delete(key, stored)
            await self._find_or_create(key, body, service)
        elif child["kind"] in CREATE_ONLY_KINDS:
            if ownership is Ownership.ORPHANED:
                await self._adopt(key, stored, child)
            if kind not in WATCHED_CHILDREN:
                self._found_unwatched[key] = service.metadata.uid
        elif not self._is_current(key, body):
            await self._change(key, body, stored)
        return None

    def _address_family(self, service: PDService) -> str | None:
        """Family of the Service's address, which the cluster chooses; None while there is no Service."""
        stored = self._cache.get_object(SERVICE, service.metadata.namespace, service.metadata.name)
        if stored is None:
            return None
        families: list[str] = stored.get("spec", {}).get("ipFamilies") or ["IPv4"]
        return families[0]

    async def _withdraw(self, child: Object, service: PDService) -> None:
        """Delete our EndpointSlice of a Service that is somebody else's now: it directs traffic to us."""
        kind, meta = kind_of_body(child), child["metadata"]
        if kind == ENDPOINT_SLICE and self.is_own(kind, meta["name"], service):
            place = kind, meta["namespace"], meta["name"]
            await self._delete(place, self._cache.get_object(*place) or {})

    async def _delete(self, key: _ChildKey, stored: Object) -> None:
        kind, namespace, name = key
        check_is_leader(self._is_leader)
        with contextlib.suppress(NotFound):
            await self._objects.delete(kind, name, namespace=namespace, uid=stored["metadata"]["uid"])
        self._cache.remove(kind, namespace, name)
        _log.info("child deleted", kind=kind.kind, name=name, namespace=namespace)

    async def _find_or_create(self, key: _ChildKey, body: Object, service: PDService) -> Object | None:
        """The object of this name that exists; None if it was created now or is known to be ours."""
        kind, namespace, name = key
        cached = self._cache.get_object(*key)
        if cached is not None:
            return cached
        if self._found_unwatched.get(key) == service.metadata.uid:
            return None
        if kind not in WATCHED_CHILDREN:  # not in the cache: most likely it exists
            try:
                return await self._objects.get(kind, name, namespace=namespace)
            except NotFound:
                pass
        check_is_leader(self._is_leader)
        try:
            created = await self._objects.create(kind, body, namespace=namespace)
        except AlreadyExists:
            return await self._objects.get(kind, name, namespace=namespace)
        _log.info("child created", kind=kind.kind, name=name, namespace=namespace)
        if body["kind"] not in CREATE_ONLY_KINDS:
            created = await self._own_created_fields(key, created)
        if kind in WATCHED_CHILDREN:
            self._cache.put_object(kind, created)  # not counted as current: it may have been edited meanwhile
        else:
            self._found_unwatched[key] = service.metadata.uid
        return None

    async def _own_created_fields(self, key: _ChildKey, stored: Object) -> Object:
        """Make the fields of a created object applied ones, so that a later apply can remove them.

        The API server counts the fields of a creation as those of another manager than the same manager's
        applied ones. If the object keeps changing meanwhile, the next `_change` tries again.
        """
        kind, namespace, name = key
        for _ in range(_TRIES_MAX):
            meta = stored["metadata"]
            entries = as_applied_fields(meta.get("managedFields") or ())
            if entries is None:
                return stored
            patch = {"metadata": {"managedFields": entries}}
            try:
                return await self._objects.patch(
                    kind, name, patch, namespace=namespace, resource_version=meta["resourceVersion"]
                )
            except Conflict:
                stored = await self._objects.get(kind, name, namespace=namespace)
        return stored

    async def _adopt(self, key: _ChildKey, stored: Object, child: Object) -> None:
        """Become the controller of an orphaned object of which nothing else is applied."""
        kind, namespace, name = key
        meta = stored["metadata"]
        owners = [*(meta.get("ownerReferences") or ()), *child["metadata"]["ownerReferences"]]
        check_is_leader(self._is_leader)
        adopted = await self._objects.patch(
            kind,
            name,
            {"metadata": {"ownerReferences": owners}},
            namespace=namespace,
            resource_version=meta["resourceVersion"],
        )
        if kind in WATCHED_CHILDREN:
            self._cache.put_object(kind, adopted)
        _log.info("child adopted", kind=kind.kind, name=name, namespace=namespace)

    async def _change(self, key: _ChildKey, body: Object, stored: Object) -> None:
        """Apply the manifest to the stored child; `Conflict` if it is no longer this object."""
        kind, namespace, name = key
        check_is_leader(self._is_leader)
        if stored.get(OWNED_FIELDS) == NO_FIELDS:  # created by an operator that ended right afterwards
            await self._own_created_fields(key, await self._objects.get(kind, name, namespace=namespace))
        # With the uid the API server refuses to create the object, or to change another one of this name.
        meta = {**body["metadata"], "uid": stored["metadata"]["uid"]}
        try:
            applied = await self._objects.apply({**body, "metadata": meta}, manager=FIELD_MANAGER, force=True)
        except Conflict:
            await self._refresh(key)
            raise
        self._cache.put_object(kind, applied)
        # Fields that are not ours now never will be: the server drops them or a webhook sets them.
        # So this version counts as current, otherwise every reconcile would apply the child again.
        self._current_versions[key] = applied["metadata"].get("resourceVersion", "")
        _log.info("child applied", kind=kind.kind, name=name, namespace=namespace)

    async def _refresh(self, key: _ChildKey) -> None:
        kind, namespace, name = key
        try:
            self._cache.put_object(kind, await self._objects.get(kind, name, namespace=namespace))
        except NotFound:
            self._cache.remove(kind, namespace, name)

    def _is_current(self, key: _ChildKey, body: Object) -> bool:
        """Whether the child was applied from this manifest and nobody has changed an applied field since."""
        cached = self._cache.get_object(*key)
        if cached is None:
            return False
        meta = cached["metadata"]
        if meta.get("annotations", {}).get(APPLIED_HASH) != body["metadata"]["annotations"][APPLIED_HASH]:
            return False
        version, owned = meta.get("resourceVersion", ""), cached.get(OWNED_FIELDS)
        if (
            self._current_versions.get(key) != version
            and owned is not None
            and not owns_all_fields(owned, body)
        ):
            return False
        self._current_versions[key] = version
        return True


def _make_manifests(
    service: PDService, settings: InstallationSettings, *, min_available: int, serves_tls: bool
) -> tuple[list[Object], list[FailureCause]]:
    """The children, and why the last one cannot be made."""
    made = []
    try:
        for child in service_children(service, settings, min_available=min_available, serves_tls=serves_tls):
            made.append(child)  # noqa: PERF402 - those before an error count
    except InvalidInput as error:
        text = f"Deployment {service.metadata.name}-router: {error}"
        return made, [FailureCause(conditions.CHILD_REFUSED, text)]
    return made, []


async def check_not_deleted(service: PDService, objects: ObjectApi) -> None:
    """Raise `Conflict` if the service is deleted or terminating, by the API server itself.

    A deletion with `--cascade=orphan` is marked before any child loses its owner, but a watch may report the
    child first. A child that is adopted then would be deleted with the service.
    """
    meta = service.metadata
    try:
        found = await objects.get(kind_of_resource(PDService), meta.name, namespace=meta.namespace)
    except NotFound:
        found = {"metadata": {}}
    current = found["metadata"]
    if current.get("uid") != meta.uid or "deletionTimestamp" in current:
        raise Conflict(f"PDService {meta.name} was deleted meanwhile")


def _with_waiting(cause: FailureCause, name: _Name, waiting: Mapping[_Name, _Name]) -> FailureCause:
    """The cause, with the children that wait until the name of this one is free."""
    held = [" ".join(each) for each, taken in waiting.items() if taken == name != each]
    if name in waiting and name[1].endswith(ENGINE_ACCOUNT_SUFFIX):
        held = ["all engines"]
    if not held:
        return cause
    message = f"{cause.message}; not created until then: {', '.join(held)}"
    return FailureCause(cause.reason, message, cause.identity)


def hash_child(child: Object) -> str:
    """Hash of a child's whole manifest."""
    text = json.dumps(child, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
