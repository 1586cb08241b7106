"""From the objects of the store to the fleet: who plays which role, and where.

The PDAssignment is the desired assignment and is judged on receipt, since a person may have patched it by
hand; one
that is refused leaves the last good map in force and is judged again when readiness changes. While the
store is away the last known state stands.
"""

import asyncio
import random
import time
from collections.abc import Iterator, Mapping
from typing import Any

import structlog

from fulcrum_cluster.informer import Informer
from fulcrum_cluster.objects import ObjectApi
from fulcrum_core.api.pdassignment import PDAssignment, PDAssignmentSpec, RoleAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdpool import PDPool
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.api.qostier import QoSTier
from fulcrum_core.assignment import (
    AssignmentRules,
    awaits_restart,
    build_assignment_rules,
    find_restarted_by_flip,
    group_by_compatibility,
    may_apply,
    resolve_effective_roles,
)
from fulcrum_core.errors import InvalidInput
from fulcrum_core.latency import DecodeModel, PrefillModel
from fulcrum_core.ports import Store
from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Phase, Role
from fulcrum_router.fleet.instances import Instance, intern_identity, parse_endpoint
from fulcrum_router.observe.pods import PodWatcher
from fulcrum_router.policy.estimate import DEFAULT_DECODE, DEFAULT_PREFILL
from fulcrum_router.router import Router
from fulcrum_router.settings import resolve_settings

log = structlog.get_logger()

TYPICAL_REQUEST_TOKENS = 1_000
"""Request size at which a profile's step is read as a decode model."""


def phase_will_take_work(instance: PDInstance) -> bool:
    """Whether the phase precedes `PDInstance.phase_takes_work`: it starts, or is being verified."""
    return instance.status.phase in (Phase.STARTING, Phase.VERIFYING)


class StoreWatcher:
    """Keeps one router's fleet and settings as the store says.

    With `objects` its instances are pods, which are watched, too.
    """

    def __init__(
        self,
        router: Router,
        store: Store,
        *,
        service: str,
        namespace: str,
        objects: ObjectApi | None = None,
        rng: random.Random | None = None,
    ) -> None:
        self._router, self._service = router, service
        self._last_good_assignment: PDAssignmentSpec | None = None
        self._last_refusal: tuple[int, frozenset[str]] | None = None
        """Generation and readiness on which the last refusal was judged."""
        self._services = Informer(store, PDService, namespace=namespace, on_change=self._service_changed)
        self._tiers = Informer(
            store, QoSTier, namespace=namespace, on_change=lambda *_: self._reconcile_settings()
        )
        self._pools = Informer(store, PDPool, namespace=namespace)
        self._instances = Informer(store, PDInstance, namespace=namespace, on_change=self._instance_changed)
        self._assignments = Informer(
            store, PDAssignment, namespace=namespace, on_change=self._assignment_changed
        )
        self._pods: PodWatcher | None = None
        if objects is not None:
            self._pods = PodWatcher(
                objects,
                service=service,
                namespace=namespace,
                on_change=self._reconcile_roles,
                rng=rng or random.Random(),
            )

    async def run(self) -> None:
        """Follow the store until cancelled."""
        async with asyncio.TaskGroup() as group:
            for informer in self._all_informers():
                group.create_task(informer.run())

    async def wait_until_synced(self) -> None:
        """Returns once all was listed: from then on this router can do what any other can."""
        for informer in self._all_informers():
            await informer.synced.wait()

    def _all_informers(self) -> Iterator[Informer[Any] | PodWatcher]:
        yield from (self._services, self._tiers, self._pools, self._instances, self._assignments)
        if self._pods is not None:
            yield self._pods

    # --- what changed --------------------------------------------------------------------------

    def _service_changed(self, old: PDService | None, new: PDService | None) -> None:
        if _name(new or old) == self._service:
            self._reconcile_settings()

    def _instance_changed(self, old: PDInstance | None, new: PDInstance | None) -> None:
        subject = new or old
        if subject is not None and subject.spec.service == self._service:
            self._reconcile_instances()
            self._reconcile_roles()

    def _assignment_changed(self, old: PDAssignment | None, new: PDAssignment | None) -> None:
        if _name(new or old) == self._service:
            self._reconcile_roles()

    # --- what follows from it ------------------------------------------------------------------

    def _reconcile_settings(self) -> None:
        service = self._services.objects.get(self._service)
        if service is None:
            return  # a service that is gone takes its router with it; until then serve on
        last = self._last_good_assignment.last_prefill_to_decode if self._last_good_assignment else None
        self._router.configure(
            resolve_settings(service, self._tiers.objects.values()), last_prefill_to_decode_s=last
        )

    def _list_own_instances(self) -> dict[str, PDInstance]:
        return {n: i for n, i in sorted(self._instances.objects.items()) if i.spec.service == self._service}

    def _reconcile_instances(self) -> None:
        fleet, own = self._router.fleet, self._list_own_instances()
        fleet.keep_only(own)
        for name, observed in own.items():
            instance = fleet.get(name)
            if instance is None:
                prefill, decode = _load_models(observed.spec.engine.profile)
                instance = Instance(name, prefill=prefill, decode=decode)
                fleet.add(instance)
            if observed.status.endpoint is not None:
                try:
                    instance.set_endpoint(*parse_endpoint(observed.status.endpoint))
                except ValueError as error:
                    log.warning("endpoint not understood", instance=name, reason=str(error))
            if observed.status.identity is not None:
                known = (i.identity for i in fleet.instances if i.identity is not None)
                instance.set_identity(intern_identity(known, observed.status.identity.to_identity()))

    def _reconcile_roles(self) -> None:
        """Apply the assignment if it may be, and draw the roles from the last good one either way."""
        desired = self._assignments.objects.get(self._service)
        ready = frozenset(
            name for name, instance in self._list_own_instances().items() if self._takes_work(instance)
        )
        if desired is not None and desired.spec != self._last_good_assignment:
            self._apply_desired(desired, ready)
        elif (
            desired is not None and desired.metadata.generation != self._router.applied_assignment.generation
        ):
            self._router.applied_assignment.advance(desired.metadata.generation, time.time())
        self._assign_roles(ready)

    def _takes_work(self, instance: PDInstance) -> bool:
        return instance.phase_takes_work and self._is_available(instance)

    def _is_available(self, instance: PDInstance) -> bool:
        """Whether it can be reached, and nobody ends it."""
        endpoint = instance.status.endpoint
        if endpoint is None or instance.metadata.deletion_timestamp is not None:
            return False
        return self._pods is None or self._pods.is_active_at(
            instance.metadata.name, endpoint.rpartition(":")[0].strip("[]")
        )

    def _apply_desired(self, desired: PDAssignment, ready: frozenset[str]) -> None:
        generation = desired.metadata.generation
        now_s = time.time()
        if self._last_good_assignment is not None:
            if self._last_refusal == (generation, ready):
                return
            verdict = may_apply(
                self._last_good_assignment, desired.spec, ready, self._load_rules(), now_s=now_s
            )
            if not verdict.allowed:
                self._last_refusal = (generation, ready)
                self._router.counters.refused_assignments += 1
                log.warning("assignment refused", generation=generation, reason=verdict.reason)
                return
        self._last_refusal = None
        self._last_good_assignment = desired.spec
        self._assign_roles(ready)
        self._reconcile_settings()
        self._router.applied_assignment.advance(generation, now_s)

    def _assign_roles(self, ready: frozenset[str]) -> None:
        roles = self._last_good_assignment.roles if self._last_good_assignment else {}
        found = self._list_own_instances()
        own = found.values()
        awaiting_restart = {i.metadata.name for i in own if _is_awaiting_restart(i, roles)}
        effective = resolve_effective_roles(
            roles,
            ready - awaiting_restart,
            group_by_compatibility(own),
            restarted_by_flip=find_restarted_by_flip(own),
        )
        for instance in self._router.fleet.instances:
            entry = roles.get(instance.name)
            role = None if entry is None or entry.cordoned else effective.get(instance.name)
            instance.assign(role)
            observed = found.get(instance.name)
            instance.starting = (
                observed is not None and phase_will_take_work(observed) and self._is_available(observed)
            )
            if role is None and entry is not None:
                instance.role = Role(entry.role)

    def _load_rules(self) -> AssignmentRules:
        service = self._services.objects.get(self._service)
        if service is None:
            return AssignmentRules(prefill_to_decode_cooldown_s=0.0)
        return build_assignment_rules(
            service.spec, self._pools.objects.values(), self._list_own_instances().values()
        )


def _is_awaiting_restart(instance: PDInstance, roles: Mapping[str, RoleAssignment]) -> bool:
    entry = roles.get(instance.metadata.name)
    return entry is not None and awaits_restart(instance, entry)


def _name(subject: PDService | PDAssignment | None) -> str:
    return subject.metadata.name if subject is not None else ""


def _load_models(profile: str) -> tuple[PrefillModel, DecodeModel]:
    """What a shipped profile predicts; another one is read where the engine runs, so start from caution."""
    try:
        loaded = load_profile(profile)
    except InvalidInput:
        return DEFAULT_PREFILL, DEFAULT_DECODE
    step = loaded.step_model
    return step.prefill_model(loaded.token_budget), step.decode_model(TYPICAL_REQUEST_TOKENS)
