"""Watch the store's objects of one service, and update the router's fleet and settings.

The PDAssignment is checked on receipt, since a person may have patched it; a refused one leaves the last good
assignment in force and is checked again when readiness changes. While the store is unreachable, the last
known state is used. `server` runs it. It writes nothing to the store.
"""

import asyncio
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import structlog

from fulcrum_cluster.informer import Informer
from fulcrum_cluster.objects import ObjectApi
from fulcrum_core.api.engine import ParallelismSpec, QuantizationSpec
from fulcrum_core.api.pdassignment import PDAssignment, PDAssignmentSpec, RoleAssignment
from fulcrum_core.api.pdinstance import PDInstance, PDInstanceSpec
from fulcrum_core.api.pdpool import PDPool
from fulcrum_core.api.pdservice import PDService
from fulcrum_core.api.qostier import QoSTier
from fulcrum_core.assignment import AssignmentRules, build_assignment_rules, may_apply
from fulcrum_core.errors import InvalidInput
from fulcrum_core.hardware import resolve_hardware
from fulcrum_core.latency import DecodeModel, PrefillModel, StepModel
from fulcrum_core.models import Layout, estimate_step_model, parse_model_config
from fulcrum_core.ports import Store
from fulcrum_core.profiles import EngineProfile, load_profile, load_shipped_profile
from fulcrum_core.values import Phase, Role
from fulcrum_router.fleet.instances import Instance, intern_identity, parse_endpoint
from fulcrum_router.observe.pods import PodWatcher
from fulcrum_router.policy.predictions.estimate import DEFAULT_DECODE, DEFAULT_PREFILL, TYPICAL_REQUEST_TOKENS
from fulcrum_router.policy.roles import phase_precedes_work, resolve_working_roles
from fulcrum_router.router import Router
from fulcrum_router.settings import resolve_settings

log = structlog.get_logger()

USUAL_STEP_TOKENS = 8_192
"""Tokens of an engine's step if they are not set."""


class StoreWatcher:
    """Updates one router's fleet and settings from the objects of its service.

    Args:
        router: Router to update.
        store: Store of the project's objects.
        service: Name of the PDService.
        namespace: Namespace of all objects.
        objects: Access to pods, which are watched, too; None: instances are not pods.
        rng: Spreads the retries of the pod watch of many routers.
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
        """Generation and ready instances of the last refusal: not checked again while both are the same."""
        self._services = Informer(store, PDService, namespace=namespace, on_change=self._service_changed)
        self._tiers = Informer(
            store, QoSTier, namespace=namespace, on_change=lambda *_: self._reconcile_settings()
        )
        self._pools = Informer(store, PDPool, namespace=namespace)
        self._instances = Informer(store, PDInstance, namespace=namespace, on_change=self._instance_changed)
        self._assignments = Informer(
            store, PDAssignment, namespace=namespace, on_change=self._assignment_changed
        )
        # A path in a user's manifest would make a router of a cluster read its container's files.
        self._load_profile = load_profile if objects is None else load_shipped_profile
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
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as group:
            for informer in self._all_informers():
                group.create_task(informer.run())

    async def wait_until_synced(self) -> None:
        """Return once every kind was listed: from then on the router can serve."""
        for informer in self._all_informers():
            await informer.synced.wait()

    def _all_informers(self) -> Iterator[Informer[Any] | PodWatcher]:
        yield from (self._services, self._tiers, self._pools, self._instances, self._assignments)
        if self._pods is not None:
            yield self._pods

    # --- changes -------------------------------------------------------------------------------

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

    # --- updates of the router -----------------------------------------------------------------

    def _reconcile_settings(self) -> None:
        service = self._services.objects.get(self._service)
        if service is None:
            return  # deleting a service also ends its router; until then serve with the last settings
        last = self._last_good_assignment.last_prefill_to_decode if self._last_good_assignment else None
        self._router.configure(
            resolve_settings(service, self._tiers.objects.values()), last_prefill_to_decode_s=last
        )

    def _list_own_instances(self) -> dict[str, PDInstance]:
        return {n: i for n, i in sorted(self._instances.objects.items()) if i.spec.service == self._service}

    def _reconcile_instances(self) -> None:
        fleet, own = self._router.fleet, self._list_own_instances()
        fleet.keep_only(own)
        self._router.journeys.starts.keep_only({name: own[name].spec.pool for name in own})
        if self._router.journeys.prefix_index is not None:
            self._router.journeys.prefix_index.keep_only(own)
        for name, observed in own.items():
            instance = fleet.get(name)
            if instance is None:
                spec = observed.spec
                prefill, decode = load_models(spec, self._load_profile)
                instance = Instance(
                    name,
                    pool=spec.pool,
                    prefill=prefill,
                    decode=decode,
                    simulated=spec.engine.is_simulated,
                )
                instance.on_cpu = spec.is_on_cpu
                instance.start_from(*self._router.find_models(spec.pool))
                fleet.add(instance)
            if observed.status.endpoint is not None:
                try:
                    if instance.set_endpoint(*parse_endpoint(observed.status.endpoint)):
                        self._router.journeys.forget_prefixes(name)
                except ValueError as error:
                    log.warning("endpoint ignored", instance=name, reason=str(error))
            if observed.status.identity is not None:
                known = (i.identity for i in fleet.instances if i.identity is not None)
                instance.set_identity(intern_identity(known, observed.status.identity.to_identity()))

    def _reconcile_roles(self) -> None:
        """Apply the desired assignment if it is allowed; then set roles by the last good one."""
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
        """Whether the instance has an endpoint, is not being deleted, and its pod is active there."""
        if instance.status.endpoint is None or instance.metadata.deletion_timestamp is not None:
            return False
        if self._pods is None:
            return True
        known = self._router.fleet.get(instance.metadata.name)
        pool = None if known is None else known.connection_pool
        return pool is not None and self._pods.is_active_at(instance.metadata.name, pool.host)

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
            self._record_flips(self._last_good_assignment, desired.spec, now_s)
        self._last_refusal = None
        self._last_good_assignment = desired.spec
        self._assign_roles(ready)
        self._reconcile_settings()
        self._router.applied_assignment.advance(generation, now_s)

    def _record_flips(self, before: PDAssignmentSpec, after: PDAssignmentSpec, now_s: float) -> None:
        for name, entry in after.roles.items():
            if name in before.roles and before.roles[name].role != entry.role:
                self._router.counters.flips.observe(max(0.0, now_s - entry.since))

    def _assign_roles(self, ready: frozenset[str]) -> None:
        assigned = self._last_good_assignment.roles if self._last_good_assignment else {}
        own = self._list_own_instances()
        working = resolve_working_roles(assigned, own.values(), ready)
        for instance in self._router.fleet.instances:
            role, entry = working.get(instance.name), assigned.get(instance.name)
            instance.assign(role)
            if role is None and entry is not None:
                instance.set_role(Role(entry.role))
            observed = own.get(instance.name)
            instance.starting = (
                observed is not None and phase_precedes_work(observed) and self._is_available(observed)
            )
            if observed is not None:
                self._observe_start(observed, entry, serves=instance.name in ready)

    def _observe_start(self, observed: PDInstance, entry: RoleAssignment | None, *, serves: bool) -> None:
        """Follow the start of an instance; one on CPUs takes only what accelerators cannot."""
        starts, status, name = self._router.journeys.starts, observed.status, observed.metadata.name
        if serves:
            starts.end(name, time.monotonic())
        elif observed.metadata.deletion_timestamp is not None or status.reason or observed.spec.is_on_cpu:
            starts.give_up(name)
        elif status.phase is Phase.STARTING and status.phase_since is not None and entry is not None:
            since_s = time.monotonic() - max(0.0, time.time() - status.phase_since)
            starts.begin(name, pool=observed.spec.pool, role=Role(entry.role), since_s=since_s)
        elif status.phase is not Phase.VERIFYING:
            starts.give_up(name)

    def _load_rules(self) -> AssignmentRules:
        service = self._services.objects.get(self._service)
        if service is None:
            return AssignmentRules(prefill_to_decode_cooldown_s=0.0)
        return build_assignment_rules(
            service.spec, self._pools.objects.values(), self._list_own_instances().values()
        )


def _name(subject: PDService | PDAssignment | None) -> str:
    return subject.metadata.name if subject is not None else ""


def load_models(
    spec: PDInstanceSpec, load_profile: Callable[[str], EngineProfile]
) -> tuple[PrefillModel, DecodeModel]:
    """Load what to predict with before an engine was measured.

    For a simulated engine that is its profile; for a real one an estimate from model and hardware. Where
    these are not known: cautious defaults.
    """
    step, budget = (
        _load_step_model(spec, load_profile) if spec.engine.is_simulated else _estimate_step_model(spec)
    )
    if step is None:
        return DEFAULT_PREFILL, DEFAULT_DECODE
    return step.prefill_model(budget), step.decode_model(TYPICAL_REQUEST_TOKENS)


def _load_step_model(
    spec: PDInstanceSpec, load_profile: Callable[[str], EngineProfile]
) -> tuple[StepModel | None, int]:
    try:
        loaded = load_profile(spec.engine.profile)
    except InvalidInput:
        return None, 0
    return loaded.step_model, loaded.token_budget


def _estimate_step_model(spec: PDInstanceSpec) -> tuple[StepModel | None, int]:
    settings, hardware = spec.settings, spec.hardware
    budget = settings.max_batched_tokens if settings is not None else None
    if spec.config_excerpt is None or hardware is None:
        return None, 0
    parallelism, quantization = spec.parallelism or ParallelismSpec(), spec.quantization or QuantizationSpec()
    tensor = parallelism.tensor or max(1, hardware.count // (parallelism.pipeline * parallelism.data))
    layout = Layout(
        tensor=tensor,
        pipeline=parallelism.pipeline,
        data=parallelism.data,
        expert=parallelism.expert,
        weights=quantization.weights,
        kv=quantization.kv_cache,
    )
    device = resolve_hardware(hardware.type, resource=hardware.resource)
    try:
        facts = parse_model_config(spec.config_excerpt)
        return estimate_step_model(facts, device, layout), budget or USUAL_STEP_TOKENS
    except InvalidInput:
        return None, 0
