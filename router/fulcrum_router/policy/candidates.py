"""The instances that can take work now, by phase, prepared once for all requests until an instance changes.

Dispatch runs for every request, while a role, `serving` or an identity changes rarely. What depends only on
these is found here: who serves which phase, and which decode instances can fetch whose KV. Load and
predictions change with every request: dispatch reads them itself. The fleet keeps one `Candidates` and makes
another when an instance has changed.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Generic, TypeVar

from fulcrum_core.kv_compatibility import can_transfer
from fulcrum_core.values import EngineIdentity, Role
from fulcrum_router.policy.instance_record import InstanceRecord

V = TypeVar("V", bound=InstanceRecord)

_PREFILL, _DECODE = Role.PREFILL, Role.DECODE  # an attribute of an enum is slow to read
_SHORTEST_S = 1e-9  # a model may predict no time at all


class Candidates(Generic[V]):
    """The serving instances of one service by phase, as of one time.

    Valid until the role, `serving` or the identity of an instance changes; make a new one then.
    """

    __slots__ = ("_fetchers", "_pools", "decode", "other_role", "overflow", "prefill")

    def __init__(self, instances: Iterable[V]) -> None:
        serving = [instance for instance in instances if instance.serving]
        on_cpu = tuple(i for i in serving if i.on_cpu)
        self.overflow: tuple[V, ...] = () if len(on_cpu) == len(serving) else on_cpu
        """CPU instances beside accelerators: none of the other lists has them (`policy.overflow`)."""
        if self.overflow:
            serving = [i for i in serving if not i.on_cpu]
        self.decode: tuple[V, ...] = tuple(i for i in serving if i.role is not _PREFILL)
        """Instances that take decode legs."""
        self.other_role: tuple[V, ...] = tuple(i for i in serving if i.role is _PREFILL)
        """Instances that decode only if no instance of `decode` can."""
        self._fetchers: dict[int, tuple[EngineIdentity, tuple[V, ...], tuple[V, ...]]] = {}
        self.prefill: tuple[V, ...] = tuple(
            i
            for i in serving
            if i.role is not _DECODE and (not self.decode or self.list_fetchers(i.identity)[0])
        )
        """Instances that take prefill legs: some decode instance can fetch their KV, or none serves."""
        self._pools = _share_by_pool(self.prefill or self.decode)

    def predict_prefill_s(self, tokens: int) -> float:
        """Predict how long a prompt keeps an instance, whichever of those that may compute it gets it.

        With T_k the time on the instances of pool k, and f_k their share of all, that is 1 / Σ f_k / T_k: so
        much work, divided by the number of instances, takes as long as all of them together need for it. One
        instance stands for its pool. 0 without instances.
        """
        pools = self._pools
        if len(pools) == 1:
            return pools[0][0].prefill_model.ttft_s(tokens)
        speed = sum(share / max(_SHORTEST_S, i.prefill_model.ttft_s(tokens)) for i, share in pools)
        return 1.0 / speed if speed else 0.0

    def list_fetchers(self, source: EngineIdentity | None) -> tuple[tuple[V, ...], tuple[V, ...]]:
        """The instances of `decode`, and those of `other_role`, that can fetch the KV of engine `source`."""
        if source is None:
            return self.decode, self.other_role
        known = self._fetchers.get(id(source))
        if known is None:  # the identity is kept, so that no other object gets its id
            known = (source, _filter_fetchers(source, self.decode), _filter_fetchers(source, self.other_role))
            self._fetchers[id(source)] = known
        return known[1], known[2]


def _share_by_pool(instances: tuple[V, ...]) -> list[tuple[V, float]]:
    """Return the first instance of each pool, with the share of the instances that are of this pool."""
    first: dict[str, V] = {}
    for instance in instances:
        first.setdefault(instance.pool, instance)
    counts = Counter(instance.pool for instance in instances)
    return [(instance, counts[pool] / len(instances)) for pool, instance in first.items()]


def _filter_fetchers(source: EngineIdentity, instances: tuple[V, ...]) -> tuple[V, ...]:
    """Filter the instances that can fetch the KV of `source`, comparing each distinct identity once."""
    fetchable: dict[int, bool] = {}
    for instance in instances:
        fetcher = instance.identity
        if id(fetcher) not in fetchable:
            fetchable[id(fetcher)] = can_fetch(source, fetcher)
    return tuple(instance for instance in instances if fetchable[id(instance.identity)])


def can_fetch(source: EngineIdentity | None, fetcher: EngineIdentity | None) -> bool:
    """Whether an engine `fetcher` can use the KV of an engine `source`; unknown identities are compatible."""
    if source is None or fetcher is None or source is fetcher:
        return True
    return can_transfer(source, fetcher).allowed
