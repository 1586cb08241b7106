"""PDPools: one for each pool of the PDService.

`replicas` is written when the pool is made; from then on it belongs to whoever scales. The bounds clamp
every writer, and a clamp is reported, never written back. Only where Fulcrum owns the scale do changed bounds
move `replicas` with them, in the same write. What instances are started with reaches the pool at once, and
its instances by a roll-out.
"""

from typing import Any

from fulcrum_core.api import (
    LaunchSpec,
    ObjectMeta,
    PDInstance,
    PDPool,
    PDPoolSpec,
    PDService,
    PoolRole,
    PoolSpec,
)
from fulcrum_core.api.engine import Connector
from fulcrum_core.api.labels import SERVICE_LABEL


def pool_name(service: str, pool: str) -> str:
    """The PDPool of a service's pool."""
    return f"{service}-{pool}"


def pool_role(instance: PDInstance, service: PDService) -> PoolRole:
    """The role of an instance's pool; of one that the spec no longer names it is not known: any."""
    name = service.metadata.name
    roles = (p.role for p in service.spec.resolve_pools() if pool_name(name, p.name) == instance.spec.pool)
    return next(roles, "Flexible")


def desired_pools(service: PDService, existing: tuple[PDPool, ...]) -> tuple[PDPool, ...]:
    """The pools that the spec asks for, in its order; those that exist keep `replicas` and status."""
    known = {pool.metadata.name: pool for pool in existing}
    return tuple(_desired_pool(service, pool, known) for pool in service.spec.resolve_pools())


def _desired_pool(service: PDService, pool: PoolSpec, known: dict[str, PDPool]) -> PDPool:
    name = pool_name(service.metadata.name, pool.name)
    before = known.get(name)
    spec = PDPoolSpec.model_construct(
        **_start_fields(service, pool),
        service=service.metadata.name,
        role=pool.role,
        replicas=_replicas(service, pool, before),
        instances=pool.instances,
    )
    if before:
        return before.replace(spec=spec)
    meta = ObjectMeta(
        name=name,
        namespace=service.metadata.namespace,
        labels={SERVICE_LABEL: service.metadata.name},
        owner_references=(service.owner_reference(),),
    )
    return PDPool(metadata=meta, spec=spec)


def _start_fields(service: PDService, pool: PoolSpec) -> dict[str, Any]:
    """What the pool's instances are started with: what the pool says, else what the service says."""
    values = {
        name: next(getattr(spec, name) for spec in (pool, service.spec) if hasattr(spec, name))
        for name in LaunchSpec.model_fields
        if name != "role_fixed_at_start"
    }
    transfer = service.spec.kv_transfer
    fixed = transfer is not None and transfer.connector is Connector.LMCACHE
    return {**values, "role_fixed_at_start": fixed or service.spec.autoscaling.flip.strategy == "Restart"}


def _replicas(service: PDService, pool: PoolSpec, before: PDPool | None) -> int:
    if before is None:
        return pool.instances.min
    moved = before.spec.instances != pool.instances
    if moved and service.spec.autoscaling.scale.owner == "Fulcrum":
        return pool.instances.clamp(before.spec.replicas)
    return before.spec.replicas


def wanted_replicas(pool: PDPool) -> int:
    """How many instances the pool shall have: what was asked, within its bounds."""
    return pool.spec.instances.clamp(pool.spec.replicas)
