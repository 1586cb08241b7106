"""PDPools: one for each pool of the PDService.

`replicas` is written when the pool is made and never again: from then on it belongs to whoever scales.
The bounds clamp every writer, and a clamp is reported. A changed model or engine reaches the pool and its
future instances; those that run keep what they were started with.
"""

from fulcrum_core.api import (
    Condition,
    ObjectMeta,
    PDInstance,
    PDPool,
    PDPoolSpec,
    PDPoolStatus,
    PDService,
    PoolSpec,
)
from fulcrum_core.api import conditions as words
from fulcrum_core.values import Phase
from fulcrum_operator.plan.status import judged

SERVICE_LABEL = "fulcrum.dev/service"
POOL_LABEL = "fulcrum.dev/pool"


def pool_name(service: str, pool: str) -> str:
    """The PDPool of a service's pool."""
    return f"{service}-{pool}"


def desired_pools(service: PDService, existing: tuple[PDPool, ...]) -> tuple[PDPool, ...]:
    """The pools that the spec asks for, in its order; those that exist keep `replicas` and status."""
    known = {pool.metadata.name: pool for pool in existing}
    return tuple(_desired_pool(service, pool, known) for pool in service.spec.resolved_pools())


def _desired_pool(service: PDService, pool: PoolSpec, known: dict[str, PDPool]) -> PDPool:
    name = pool_name(service.metadata.name, pool.name)
    before = known.get(name)
    spec = PDPoolSpec(
        service=service.metadata.name,
        model=service.spec.model,
        engine=service.spec.engine,
        role=pool.role,
        replicas=before.spec.replicas if before else pool.instances.min,
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


def wanted_replicas(pool: PDPool) -> int:
    """How many instances the pool shall have: what was asked, within its bounds."""
    return pool.spec.instances.clamp(pool.spec.replicas)


def pool_status(pool: PDPool, members: tuple[PDInstance, ...], *, now_s: float) -> PDPoolStatus:
    """What is seen of the pool, given its instances."""
    return PDPoolStatus(
        replicas=len(members),
        ready_replicas=sum(member.status.phase is Phase.SERVING for member in members),
        selector=f"{POOL_LABEL}={pool.metadata.name}",
        conditions=judged(pool.status.conditions, (_scaling_limited(pool),), now_s=now_s),
        observed_generation=pool.metadata.generation,
    )


def _scaling_limited(pool: PDPool) -> Condition:
    asked, given = pool.spec.replicas, wanted_replicas(pool)
    if asked == given:
        status, reason, message = "False", words.WITHIN_BOUNDS, f"{given} instances, as asked"
    else:
        status, reason = "True", words.TOO_MANY_REPLICAS if asked > given else words.TOO_FEW_REPLICAS
        bounds = pool.spec.instances
        message = f"asked for {asked} instances, the bounds {bounds.min} to {bounds.ceiling} allow {given}"
    return Condition.model_validate(
        {
            "type": words.SCALING_LIMITED,
            "status": status,
            "reason": reason,
            "message": message,
            "observedGeneration": pool.metadata.generation,
        }
    )
