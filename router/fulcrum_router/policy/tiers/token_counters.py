"""Fairness between tenants: a virtual token counter for each (VTC).

After Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): the tenant with the least counter
is served next, and its counter grows by the weighted tokens of its request. When a tenant begins to wait, its
counter is raised to the least counter of the waiting tenants: nobody saves up service by sending nothing. If
no other tenant waits, the counter is raised to that of the tenant served last.

Output tokens are charged as predicted when a request leaves, and corrected as they appear. While two tenants
wait all the time, their counters differ by the largest charge at most, and by the corrections of requests in
flight. `waiting.level` keeps one set for the tiers and one for the tenants of each tier, and `waiting_room`
charges them.
"""

from collections import OrderedDict
from collections.abc import Collection

INPUT_WEIGHT, OUTPUT_WEIGHT = 1.0, 2.0
"""Weights of a prompt token and of an output token, as in the paper."""
MAX_IDLE_TENANTS = 4_096
"""Tenants that do not wait and are remembered; of more, those not served for longest are forgotten."""


class TokenCounters:
    """The counters of all tenants of one queue. Who waits is the caller's knowledge."""

    __slots__ = ("_counters", "_last")

    def __init__(self) -> None:
        self._counters: OrderedDict[str, float] = OrderedDict()
        """Counters by tenant, in the order in which the tenants were last served."""
        self._last = 0.0
        """Counter of the tenant that was served last."""

    def __len__(self) -> int:
        return len(self._counters)

    def __getitem__(self, tenant: str) -> float:
        return self._counters.get(tenant, 0.0)

    def raise_to_waiting(self, tenant: str, least_waiting: float | None) -> None:
        """Raise the counter of a tenant that begins to wait.

        `least_waiting`: the least counter of the waiting tenants; None if no other tenant waits.
        """
        floor = self._last if least_waiting is None else least_waiting
        self._counters[tenant] = max(self[tenant], floor)

    def charge(self, tenant: str, tokens: float) -> None:
        """Add weighted tokens, less than 0 to give back."""
        counters = self._counters
        counter = counters.get(tenant)
        if counter is not None or tokens > 0:
            counters[tenant] = (counter or 0.0) + tokens
            counters.move_to_end(tenant)

    def serve(self, tenant: str, tokens: float) -> None:
        """Charge a request that leaves."""
        self.charge(tenant, tokens)
        self._last = self[tenant]

    def serve_alone(self, tenant: str, tokens: float) -> None:
        """Charge a request that goes to an instance while nobody waits.

        That is: raise the tenant's counter, charge the tenant, and forget others, in one step.
        """
        counters = self._counters
        counter = counters.get(tenant, 0.0)
        if counter < self._last:
            counter = self._last
        counters[tenant] = self._last = counter + tokens
        counters.move_to_end(tenant)
        if len(counters) > MAX_IDLE_TENANTS:
            self.forget_idle(())

    def forget_idle(self, waiting: Collection[str]) -> None:
        """Forget tenants beyond `MAX_IDLE_TENANTS` that do not wait."""
        counters = self._counters
        while len(counters) > MAX_IDLE_TENANTS + len(waiting):
            tenant = next(iter(counters))
            if tenant in waiting:
                counters.move_to_end(tenant)
            else:
                del counters[tenant]
