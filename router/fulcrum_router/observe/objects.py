"""From the objects of the store to the fleet: who plays which role, and where.

The PDAssignment is the wish and is judged on receipt, since a person may have patched it by hand; one
that is refused leaves the last good map in force and is judged again when readiness changes. While the
store is away the last known state stands.
"""

import asyncio
import random
import time
from collections.abc import Iterator, Mapping
from typing import Any

import structlog

from fulcrum_cluster.objects import ObjectApi
from fulcrum_cluster.watching import Mirror
from fulcrum_core.api.pdassignment import PDAssignment, PDAssignmentSpec, RoleAssignment
from fulcrum_core.api.pdinstance import PDInstance
from fulcrum_core.api.pdpool import PDPool
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.api.qostier import QoSTier
from fulcrum_core.assignment import (
    AssignmentRules,
    awaits_restart,
    effective_roles,
    groups_of,
    may_apply,
    restarts_of,
    rules_of,
)
from fulcrum_core.errors import InvalidInput
from fulcrum_core.latency import DecodeModel, PrefillModel
from fulcrum_core.ports import Store
from fulcrum_core.profiles import load_profile
from fulcrum_core.values import FlipStrategy, Phase, Role
from fulcrum_router.fleet.instances import Instance, interned, split_endpoint
from fulcrum_router.observe.pods import PodWatch
from fulcrum_router.policy.estimate import DEFAULT_DECODE, DEFAULT_PREFILL
from fulcrum_router.router import Router
from fulcrum_router.settings import settings_of

log = structlog.get_logger()

TYPICAL_TOKENS = 1_000
"""Request size at which a profile's step is read as a decode model."""


def takes_work(instance: PDInstance) -> bool:
    """Whether its phase allows new work. An instance that is only relabelled serves while it is verified."""
    status = instance.status
    relabelled = status.phase is Phase.VERIFYING and status.strategy is FlipStrategy.RELABEL
    return status.phase is Phase.SERVING or relabelled


def will_take_work(instance: PDInstance) -> bool:
    """Whether its phase is one before that: its engine starts, or runs and waits to be let in."""
    return instance.status.phase in (Phase.STARTING, Phase.VERIFYING)


class Watches:
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
        self._last_good: PDAssignmentSpec | None = None
        self._refused: tuple[int, frozenset[str]] | None = None
        """Generation and readiness on which the last refusal was judged."""
        self._services = Mirror(store, PDService, namespace=namespace, on_change=self._service_changed)
        self._tiers = Mirror(store, QoSTier, namespace=namespace, on_change=lambda *_: self._configure())
        self._pools = Mirror(store, PDPool, namespace=namespace)
        self._instances = Mirror(store, PDInstance, namespace=namespace, on_change=self._instance_changed)
        self._assignments = Mirror(
            store, PDAssignment, namespace=namespace, on_change=self._assignment_changed
        )
        self._pods: PodWatch | None = None
        if objects is not None:
            self._pods = PodWatch(
                objects,
                service=service,
                namespace=namespace,
                on_change=self._judge,
                rng=rng or random.Random(),
            )

    async def run(self) -> None:
        """Follow the store until cancelled."""
        async with asyncio.TaskGroup() as group:
            for mirror in self._all():
                group.create_task(mirror.run())

    async def synced(self) -> None:
        """Returns once all was listed: from then on this router can do what any other can."""
        for mirror in self._all():
            await mirror.synced.wait()

    def _all(self) -> Iterator[Mirror[Any] | PodWatch]:
        yield from (self._services, self._tiers, self._pools, self._instances, self._assignments)
        if self._pods is not None:
            yield self._pods

    # --- what changed --------------------------------------------------------------------------

    def _service_changed(self, old: PDService | None, new: PDService | None) -> None:
        if _name(new or old) == self._service:
            self._configure()

    def _instance_changed(self, old: PDInstance | None, new: PDInstance | None) -> None:
        subject = new or old
        if subject is not None and subject.spec.service == self._service:
            self._place()
            self._judge()

    def _assignment_changed(self, old: PDAssignment | None, new: PDAssignment | None) -> None:
        if _name(new or old) == self._service:
            self._judge()

    # --- what follows from it ------------------------------------------------------------------

    def _configure(self) -> None:
        service = self._services.objects.get(self._service)
        if service is None:
            return  # a service that is gone takes its router with it; until then serve on
        last = self._last_good.last_prefill_to_decode if self._last_good else None
        self._router.configure(settings_of(service, self._tiers.objects.values()), last_to_decode_s=last)

    def _mine(self) -> dict[str, PDInstance]:
        return {n: i for n, i in sorted(self._instances.objects.items()) if i.spec.service == self._service}

    def _place(self) -> None:
        fleet, mine = self._router.fleet, self._mine()
        fleet.keep_only(mine)
        for name, seen in mine.items():
            instance = fleet.get(name)
            if instance is None:
                prefill, decode = _models(seen.spec.engine.profile)
                instance = Instance(name, prefill=prefill, decode=decode)
                fleet.add(instance)
            if seen.status.endpoint is not None:
                try:
                    instance.place(*split_endpoint(seen.status.endpoint))
                except ValueError as error:
                    log.warning("endpoint not understood", instance=name, reason=str(error))
            if seen.status.identity is not None:
                known = (i.identity for i in fleet.all if i.identity is not None)
                instance.know(interned(known, seen.status.identity.value()))

    def _judge(self) -> None:
        """Apply the assignment if it may be, and draw the roles from the last good one either way."""
        wish = self._assignments.objects.get(self._service)
        ready = frozenset(name for name, instance in self._mine().items() if self._takes_work(instance))
        if wish is not None and wish.spec != self._last_good:
            self._take_wish(wish, ready)
        elif wish is not None and wish.metadata.generation != self._router.epoch.generation:
            self._router.epoch.advance(wish.metadata.generation, time.time())
        self._assign(ready)

    def _takes_work(self, instance: PDInstance) -> bool:
        return takes_work(instance) and self._stays(instance)

    def _stays(self, instance: PDInstance) -> bool:
        """Whether it can be reached, and nobody ends it."""
        endpoint = instance.status.endpoint
        if endpoint is None or instance.metadata.deletion_timestamp is not None:
            return False
        return self._pods is None or self._pods.takes_work(
            instance.metadata.name, endpoint.rpartition(":")[0].strip("[]")
        )

    def _take_wish(self, wish: PDAssignment, ready: frozenset[str]) -> None:
        generation = wish.metadata.generation
        now_s = time.time()
        if self._last_good is not None:
            if self._refused == (generation, ready):
                return
            verdict = may_apply(self._last_good, wish.spec, ready, self._rules(), now_s=now_s)
            if not verdict.allowed:
                self._refused = (generation, ready)
                self._router.books.refused_assignments += 1
                log.warning("assignment refused", generation=generation, reason=verdict.reason)
                return
        self._refused = None
        self._last_good = wish.spec
        self._assign(ready)
        self._configure()
        self._router.epoch.advance(generation, now_s)

    def _assign(self, ready: frozenset[str]) -> None:
        roles = self._last_good.roles if self._last_good else {}
        found = self._mine()
        mine = found.values()
        leaving = {i.metadata.name for i in mine if _leaves_its_role(i, roles)}
        playing = effective_roles(roles, ready - leaving, groups_of(mine), restarts=restarts_of(mine))
        for instance in self._router.fleet.all:
            entry = roles.get(instance.name)
            role = None if entry is None or entry.cordoned else playing.get(instance.name)
            instance.assign(role)
            seen = found.get(instance.name)
            instance.starting = seen is not None and will_take_work(seen) and self._stays(seen)
            if role is None and entry is not None:
                instance.role = Role(entry.role)

    def _rules(self) -> AssignmentRules:
        service = self._services.objects.get(self._service)
        if service is None:
            return AssignmentRules(prefill_to_decode_cooldown_s=0.0)
        return rules_of(service.spec, self._pools.objects.values(), self._mine().values())


def _leaves_its_role(instance: PDInstance, roles: Mapping[str, RoleAssignment]) -> bool:
    entry = roles.get(instance.metadata.name)
    return entry is not None and awaits_restart(instance, entry)


def _name(subject: PDService | PDAssignment | None) -> str:
    return subject.metadata.name if subject is not None else ""


def _models(profile: str) -> tuple[PrefillModel, DecodeModel]:
    """What a shipped profile predicts; another one is read where the engine runs, so start from caution."""
    try:
        loaded = load_profile(profile)
    except InvalidInput:
        return DEFAULT_PREFILL, DEFAULT_DECODE
    step = loaded.step_model
    return step.prefill_model(loaded.token_budget), step.decode_model(TYPICAL_TOKENS)
