"""What the router learns of the speed of one instance, from the responses of its legs and from its probes.

The router's instances and the simulated ones are built on it, so that both learn alike.
"""

from fulcrum_core.latency import DecodeModel, PrefillModel
from fulcrum_router.policy.instance_record import InstanceRecord
from fulcrum_router.policy.predictions.estimate import DecodePredictor, PrefillPredictor
from fulcrum_router.policy.predictions.prefill_samples import PrefillSampler


class LearningInstance(InstanceRecord):
    """The record of one instance, whose latency models are corrected by its responses."""

    __slots__ = ("_decode_predictor", "_deflections", "_prefill_predictor", "_prefill_sampler")

    def __init__(self, name: str, prefill: PrefillModel, decode: DecodeModel) -> None:
        super().__init__(name, prefill, decode)
        self._deflections = 0
        """Prompts that were deflected here until the last probe."""
        self._prefill_sampler = PrefillSampler()
        self._prefill_predictor, self._decode_predictor = PrefillPredictor(prefill), DecodePredictor(decode)

    def start_from(self, prefill: PrefillModel | None, decode: DecodeModel | None) -> None:
        """Predict with these models instead of what was learned, and learn from them on; None: no change."""
        if prefill is not None:
            self._prefill_predictor, self.prefill_model = PrefillPredictor(prefill), prefill
        if decode is not None:
            self._decode_predictor, self.decode_model = DecodePredictor(decode), decode

    def record_prefill(self, *, tokens: int, cached_tokens: int, computed_for_s: float | None) -> None:
        """Learn from the response of a prefill leg whose entry was released: see `PrefillSampler.add`.

        With decode legs on the instance the duration would include their steps.
        """
        ledger, predictor = self.ledger, self._prefill_predictor
        if ledger.decode_legs:
            self._prefill_sampler.clear()
            return
        for sample in self._prefill_sampler.add(
            tokens=tokens,
            cached_tokens=cached_tokens,
            computed_for_s=computed_for_s,
            more_in_flight=ledger.prefill_legs > 0,
        ):
            predictor.learn(sample)
            self.prefill_model = predictor.model

    def discard_prefill_samples(self) -> None:
        """Forget responses that are not learned from yet: a leg failed that the engine may still compute."""
        self._prefill_sampler.clear()

    def measure_batch(self) -> int:
        """Count the KV tokens of the requests that decode now; 0: not known, since prompts are computed, too.

        Called once for each probe. A prompt that was deflected here since the last one made steps longer.

        The ledger also has the requests that wait in the engine for room. The batch has no more tokens than
        the KV cache: otherwise an instance with a long queue would seem to be fast, and get a longer one.
        """
        ledger, deflections_before = self.ledger, self._deflections
        self._deflections = ledger.deflections
        if ledger.prefill_tokens or ledger.deflections != deflections_before:
            return 0
        if self.kv_usage is None or self.kv_capacity_tokens is None:
            return ledger.decode_tokens
        return min(ledger.decode_tokens, round(self.kv_usage * self.kv_capacity_tokens))

    def discount_deflected(self, itl_s: float | None, *, since_s: float) -> float | None:
        """Return the inter-token latency of decode alone, of one that was measured from `since_s` on.

        Deflected prompts make tokens late, and are no decode load: they come when decode has time to spare.
        If decode had to catch up, the latency counts as what is predicted for the batch, if that is less.
        """
        if itl_s is None or self.ledger.caught_up_at_s <= since_s:
            return itl_s
        return min(itl_s, self.decode_model.itl_s(self.ledger.decode_tokens))

    def learn_decode(self, *, tokens: int, itl_s: float) -> None:
        """Learn from a mean step time with `tokens` KV tokens in the batch."""
        self._decode_predictor.learn(tokens=tokens, itl_s=itl_s)
        self.decode_model = self._decode_predictor.model

    @property
    def drift(self) -> tuple[float | None, float | None]:
        """Predicted divided by measured time of recent prefills and of recent decode steps; None: unknown."""
        errors = self._prefill_predictor.drift.value, self._decode_predictor.drift.value
        return None if errors[0] is None else 1.0 + errors[0], None if errors[1] is None else 1.0 + errors[1]

    @property
    def samples(self) -> tuple[int, int]:
        """Number of prefills and of decode steps that the models were learned from."""
        return self._prefill_predictor.samples, self._decode_predictor.samples
