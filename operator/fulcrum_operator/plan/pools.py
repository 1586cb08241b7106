"""Desired PDPools: one for each pool of the PDService.

The operator writes `replicas` when it creates the pool; then the field belongs to the autoscaler or another
scaler. The pool's bounds clamp the value; a clamp is reported, not written back. Only if Fulcrum owns the
scale do changed bounds also change `replicas`. A changed launch spec reaches the pool at once and its
instances by a roll-out. `service` calls `desired_pools`, and `fulcrum plan` does without a cluster.
"""

from collections.abc import Collection
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
from fulcrum_operator.engines.images import EngineImages


def pool_name(service: str, pool: str) -> str:
    """Name of the PDPool for a pool of a service."""
    return f"{service}-{pool}"


def pool_role(instance: PDInstance, service: PDService) -> PoolRole:
    """Role of an instance's pool; Flexible if the spec no longer names the pool."""
    name = service.metadata.name
    roles = (p.role for p in service.spec.resolve_pools() if pool_name(name, p.name) == instance.spec.pool)
    return next(roles, "Flexible")


def list_pool_names(service: PDService) -> tuple[str, ...]:
    """Names of the PDPools that the service needs, in the order of its spec."""
    return tuple(pool_name(service.metadata.name, pool.name) for pool in service.spec.resolve_pools())


def desired_pools(
    service: PDService,
    existing: tuple[PDPool, ...],
    *,
    taken: Collection[str] = (),
    images: EngineImages | None = None,
) -> tuple[PDPool, ...]:
    """The pools of the spec, in its order, without those whose names are taken by others' pools.

    Existing pools keep `replicas` and status. `images` are the default images of engines; None where engines
    have no image, as in a local run.
    """
    known = {pool.metadata.name: pool for pool in existing}
    made = (_desired_pool(service, pool, known, images) for pool in service.spec.resolve_pools())
    return tuple(pool for pool in made if pool.metadata.name not in taken)


def _desired_pool(
    service: PDService, pool: PoolSpec, known: dict[str, PDPool], images: EngineImages | None
) -> PDPool:
    name = pool_name(service.metadata.name, pool.name)
    before = known.get(name)
    launch = LaunchSpec.model_construct(**_launch_fields(service, pool))
    spec = PDPoolSpec.model_construct(
        **{**dict(launch), "default_image": _default_image(launch, before, images)},
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


def _launch_fields(service: PDService, pool: PoolSpec) -> dict[str, Any]:
    """Fields of the pool's launch spec except the default image: those of the pool, else of the service."""
    values = {
        name: next(getattr(spec, name) for spec in (pool, service.spec) if hasattr(spec, name))
        for name in LaunchSpec.model_fields
        if name not in ("role_fixed_at_start", "default_image")
    }
    transfer = service.spec.kv_transfer
    fixed = transfer is not None and transfer.connector is Connector.LMCACHE
    if pool.template is None:
        values["template"] = service.spec.template
    return {**values, "role_fixed_at_start": fixed or service.spec.autoscaling.flip.strategy == "Restart"}


def _default_image(launch: LaunchSpec, before: PDPool | None, images: EngineImages | None) -> str | None:
    """Image of engines whose manifest names none; None if it names one, or if engines have no image.

    While the rest of the launch spec does not change, the pool keeps its image. A pool from before this field
    keeps none, so that its pods' images follow the operator's defaults.
    """
    if launch.engine.image is not None or images is None:
        return None
    if before is not None:
        known = before.spec.launch_spec
        if known.model_copy(update={"default_image": None}).launch_revision == launch.launch_revision:
            return known.default_image
    return images.default_for(launch)


def _replicas(service: PDService, pool: PoolSpec, before: PDPool | None) -> int:
    if before is None:
        return pool.instances.min
    moved = before.spec.instances != pool.instances
    if moved and service.spec.autoscaling.scale.owner == "Fulcrum":
        return pool.instances.clamp(before.spec.replicas)
    return before.spec.replicas


def desired_replicas(pool: PDPool) -> int:
    """Desired number of instances: the pool's `replicas`, clamped to its bounds."""
    return pool.spec.instances.clamp(pool.spec.replicas)
