"""The simulated router's view of one instance, with the shipped ledger and predictors; `router` uses it.

The engine itself is `instance`'s.
"""

from collections.abc import Iterable, Mapping

from fulcrum_core.latency import DecodeModel, PrefillModel
from fulcrum_core.router_state import InstanceState
from fulcrum_core.values import Role
from fulcrum_router.policy import Candidates
from fulcrum_router.policy.intervals import PROBE_INTERVAL_S
from fulcrum_router.policy.predictions.learning import LearningInstance
from fulcrum_simulator.fleet.instance import SimulatedInstance


class RoutedInstance:
    """One instance: its engine, and what the router's policies know of it.

    It holds the record and does not inherit from it: that class may be compiled, and a class in Python cannot
    inherit from a compiled one.
    """

    __slots__ = (
        "_batch_tokens",
        "engine_requests",
        "instance",
        "record",
    )

    def __init__(
        self,
        instance: SimulatedInstance,
        role: Role,
        prefill: PrefillModel,
        decode: DecodeModel,
        *,
        on_cpu: bool = False,
        pool: str = "",
    ) -> None:
        record = LearningInstance(instance.name, prefill, decode)
        record.role, record.on_cpu, record.serving, record.pool = role, on_cpu, True, pool
        record.kv_capacity_tokens = instance.kv_capacity_tokens
        instance.on_tokens = record.ledger.add_shared_tokens
        self.instance, self.record = instance, record
        self._batch_tokens = 0
        self.engine_requests: int | None = None

    @property
    def pool(self) -> str:
        """See `learned_models.MeasuredInstance`."""
        return self.record.pool

    @property
    def samples(self) -> tuple[int, int]:
        """See `learned_models.MeasuredInstance`."""
        return self.record.samples

    @property
    def prefill_model(self) -> PrefillModel:
        """See `learned_models.MeasuredInstance`."""
        return self.record.prefill_model

    @property
    def decode_model(self) -> DecodeModel:
        """See `learned_models.MeasuredInstance`."""
        return self.record.decode_model

    def probe(self, now_s: float) -> None:
        """Read the engine's counts and its inter-token latency of the last interval, and learn from it."""
        record = self.record
        record.engine_read_at_s = now_s
        if not self.instance.alive:
            record.itl_s, self._batch_tokens = None, 0
            record.kv_usage = self.engine_requests = record.engine_running = record.engine_waiting = None
            return
        gauges = self.instance.read_gauges()
        record.kv_usage, record.engine_running = gauges.kv_usage, gauges.running
        record.engine_waiting = gauges.waiting_capacity + gauges.fetch_completed_waiting
        self.engine_requests = gauges.running + gauges.waiting
        samples = self.instance.take_samples().itl_s
        itl_s = sum(samples) / len(samples) if samples else None
        record.itl_s = record.discount_deflected(itl_s, since_s=now_s - PROBE_INTERVAL_S)
        before = self._batch_tokens
        self._batch_tokens = now = record.measure_batch()
        if itl_s and before and now:
            record.learn_decode(tokens=(before + now) // 2, itl_s=itl_s)

    def report(
        self, now_s: float, *, waiting_s: float, decode_is_full: bool, suits_prefill: float | None
    ) -> InstanceState:
        """Return what the router reports of this instance at its state port.

        `waiting_s`: its share of the prefill work in the waiting room, in seconds. `suits_prefill`: that of
        its pool.
        """
        record, ledger = self.record, self.record.ledger
        return InstanceState(
            name=record.name,
            role=record.role,
            serving=record.serving,
            prefill_queued_s=ledger.remaining_s(now_s) + waiting_s,
            prefill_tokens=ledger.prefill_tokens,
            decode_tokens=ledger.decode_tokens,
            decode_legs=ledger.decode_legs,
            legs=ledger.legs,
            pending_transfers=ledger.pending_transfers,
            itl_s=record.itl_s,
            kv_usage=record.kv_usage,
            engine_requests=self.engine_requests,
            engine_read_at_s=record.engine_read_at_s,
            reserved_tokens=ledger.reserved_tokens,
            decode_is_full=decode_is_full and record.role is Role.DECODE,
            max_seqs=record.max_seqs_shown,
            kv_capacity_tokens=record.kv_capacity_tokens,
            itl_intercept_s=record.decode_model.intercept,
            itl_slope_s=record.decode_model.slope,
            suits_prefill=suits_prefill,
            on_cpu=record.on_cpu,
        )


class RoutedFleet:
    """The instances of the service; implements `policy.journey.FleetView`."""

    def __init__(self, instances: Iterable[RoutedInstance]) -> None:
        self.instances = tuple(instances)
        self.records = tuple(routed.record for routed in self.instances)
        self.routed_by_name: Mapping[str, RoutedInstance] = {i.record.name: i for i in self.instances}
        self.candidates = Candidates(self.records)

    def __getitem__(self, name: str) -> LearningInstance:
        return self.routed_by_name[name].record

    def refresh(self) -> None:
        """Prepare the candidates anew, after a change of roles or of who serves."""
        self.candidates = Candidates(self.records)
