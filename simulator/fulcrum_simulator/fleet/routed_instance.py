"""The simulated router's view of one instance, with the shipped ledger and predictors; `router` uses it.

Dispatch and the journey read it in the place of the router's `fleet.instances`. The engine itself is
`instance`'s.
"""

from collections.abc import Iterable, Mapping

from fulcrum_core.latency import DecodeModel, PrefillModel
from fulcrum_core.router_state import InstanceState
from fulcrum_core.values import KV_LEASE_S, EngineIdentity, Role
from fulcrum_router.policy import Candidates
from fulcrum_router.policy.intervals import PROBE_INTERVAL_S
from fulcrum_router.policy.predictions.learning import LearningInstance
from fulcrum_simulator.fleet.instance import SimulatedInstance


class RoutedInstance:
    """Implements `policy.journey.JourneyInstance`.

    It holds a `LearningInstance` and does not inherit from it: that class may be compiled, and a class in
    Python cannot inherit from a compiled one.
    """

    __slots__ = (
        "_batch_tokens",
        "_learning",
        "context_tokens",
        "decode_model",
        "engine_read_at_s",
        "engine_requests",
        "engine_waiting",
        "error_share",
        "identity",
        "instance",
        "itl_s",
        "kv_capacity_tokens",
        "kv_lease_s",
        "kv_usage",
        "ledger",
        "name",
        "on_cpu",
        "prefill_model",
        "role",
        "serving",
    )

    def __init__(
        self,
        instance: SimulatedInstance,
        role: Role,
        prefill: PrefillModel,
        decode: DecodeModel,
        *,
        on_cpu: bool = False,
    ) -> None:
        self._learning = LearningInstance(prefill, decode)
        self.ledger = self._learning.ledger
        # What was learned, as attributes: dispatch reads it of all instances, and a property is slower.
        self.prefill_model = prefill
        self.decode_model = decode
        instance.on_tokens = self.ledger.add_shared_tokens
        self.on_cpu = on_cpu
        self.instance, self.name, self.role = instance, instance.name, role
        self.kv_capacity_tokens = instance.kv_capacity_tokens
        self.context_tokens: int | None = None
        self.serving = True
        self.error_share = 0.0
        self.identity: EngineIdentity | None = None
        self.kv_lease_s = KV_LEASE_S
        self.itl_s: float | None = None
        self._batch_tokens = 0
        self.kv_usage: float | None = None
        self.engine_requests: int | None = None
        self.engine_waiting: int | None = None
        """Requests that waited in the engine at the last probe, at `engine_read_at_s`."""
        self.engine_read_at_s = 0.0

    def record_prefill(self, *, tokens: int, cached_tokens: int, computed_for_s: float | None) -> None:
        """Learn from the response of a prefill leg; see `LearningInstance.record_prefill`."""
        self._learning.record_prefill(
            tokens=tokens, cached_tokens=cached_tokens, computed_for_s=computed_for_s
        )
        self.prefill_model = self._learning.prefill_model

    def discard_prefill_samples(self) -> None:
        """A prefill leg failed; see `LearningInstance.discard_prefill_samples`."""
        self._learning.discard_prefill_samples()

    @property
    def samples(self) -> tuple[int, int]:
        """Number of prefills and of decode steps that the models were learned from."""
        return self._learning.samples

    def probe(self, now_s: float) -> None:
        """Read the engine's counts and its inter-token latency of the last interval, and learn from it."""
        self.engine_read_at_s = now_s
        if not self.instance.alive:
            self.itl_s, self._batch_tokens = None, 0
            self.kv_usage = self.engine_requests = self.engine_waiting = None
            return
        gauges = self.instance.read_gauges()
        self.kv_usage, self.engine_waiting = gauges.kv_usage, gauges.waiting
        self.engine_requests = gauges.running + gauges.waiting
        samples = self.instance.take_samples().itl_s
        itl_s = sum(samples) / len(samples) if samples else None
        self.itl_s = self._learning.discount_deflected(itl_s, since_s=now_s - PROBE_INTERVAL_S)
        before = self._batch_tokens
        self._batch_tokens = now = self._learning.measure_batch(
            kv_usage=self.kv_usage, kv_capacity_tokens=self.kv_capacity_tokens
        )
        if itl_s and before and now:
            self._learning.learn_decode(tokens=(before + now) // 2, itl_s=itl_s)
            self.decode_model = self._learning.decode_model

    def report(self, now_s: float, *, waiting_s: float, decode_is_full: bool) -> InstanceState:
        """Return what the router reports of this instance at its state port.

        `waiting_s`: its share of the prefill work in the waiting room, in seconds.
        """
        ledger = self.ledger
        return InstanceState(
            name=self.name,
            role=self.role,
            serving=self.serving,
            prefill_queued_s=ledger.remaining_s(now_s) + waiting_s,
            prefill_tokens=ledger.prefill_tokens,
            decode_tokens=ledger.decode_tokens,
            decode_legs=ledger.decode_legs,
            legs=ledger.legs,
            pending_transfers=ledger.pending_transfers,
            itl_s=self.itl_s,
            kv_usage=self.kv_usage,
            engine_requests=self.engine_requests,
            engine_read_at_s=self.engine_read_at_s,
            reserved_tokens=ledger.reserved_tokens,
            decode_is_full=decode_is_full and self.role is Role.DECODE,
            engine_waiting=self.engine_waiting,
            kv_capacity_tokens=self.kv_capacity_tokens,
            itl_intercept_s=self.decode_model.intercept,
            itl_slope_s=self.decode_model.slope,
            on_cpu=self.on_cpu,
        )


class RoutedFleet:
    """The instances of the service; implements `policy.journey.FleetView`."""

    def __init__(self, instances: Iterable[RoutedInstance]) -> None:
        self.instances = tuple(instances)
        self._by_name: Mapping[str, RoutedInstance] = {view.name: view for view in self.instances}
        self.candidates = Candidates(self.instances)

    def __getitem__(self, name: str) -> RoutedInstance:
        return self._by_name[name]

    def refresh(self) -> None:
        """Prepare the candidates anew, after a change of roles or of who serves."""
        self.candidates = Candidates(self.instances)
