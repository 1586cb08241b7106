"""Predict the TTFT that a client sees, part by part, and measure how good the predictions are.

    TTFT = time since arrival + prefill queue + prefill + KV transfer + queue and first step of decode

The router measures the middle parts in pairs: an engine reports neither when it starts a prompt nor when it
has fetched the KV.

The journey predicts each request it sends and learns from the result; admission has a forecast of its own.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from fulcrum_router.policy.instance_record import InstanceRecord
from fulcrum_router.policy.kv_pairs.pair_record import SourcePairs
from fulcrum_router.policy.predictions.estimate import PredictionErrorMean
from fulcrum_router.policy.work import Work


class PredictedTtft(NamedTuple):
    """The parts of one request's TTFT in seconds, predicted when its prefill leg is sent."""

    elapsed_s: float
    """Time since the request's arrival."""
    queue_s: float
    """Prefill work of other requests on the prefill instance."""
    prefill_s: float
    transfer_s: float
    """Handshake, if the pair is cold, and lag of the network."""
    decode_s: float
    """Prefill work on the decode instance, and its first step."""

    @property
    def prefill_leg_s(self) -> float:
        """Predicted time from sending the prefill leg to its response."""
        return self.queue_s + self.prefill_s

    @property
    def decode_leg_s(self) -> float:
        """Predicted time from sending the decode leg to its first token."""
        return self.transfer_s + self.decode_s

    @property
    def total_s(self) -> float:
        """Predicted time from the request's arrival to the first token."""
        elapsed_s, queue_s, prefill_s, transfer_s, decode_s = self
        return elapsed_s + (queue_s + prefill_s) + (transfer_s + decode_s)


def predict_ttft(
    work: Work, prefill: InstanceRecord, decode: InstanceRecord, *, now_s: float, pairs: SourcePairs
) -> PredictedTtft:
    """Predict the TTFT of a request that is sent to these instances now, as one that uses both.

    Tokens of the prompt that the prefill instance has in its prefix cache cost nothing. A pair that has not
    transferred KV yet counts as one that must shake hands first.
    """
    tokens, ledger = work.prompt_tokens, decode.ledger
    pair = pairs.by_decode.get(decode.name)
    wait_s, lag_s = pairs.cold_s, 0.0
    if pair is not None:
        wait_s = pair.estimate_wait_s(pairs.cold_s, now_s)
        lag_s = (pair.lag_s_per_1k_tokens or 0.0) * tokens / 1_000
    batch = ledger.decode_tokens + ledger.reserved_tokens + tokens
    return PredictedTtft(
        now_s - work.arrival_s,
        prefill.ledger.remaining_s(now_s),
        prefill.prefill_model.ttft_s(work.count_computed(prefill.name)),
        wait_s + lag_s,
        ledger.remaining_s(now_s) + decode.decode_model.itl_s(batch),
    )


class TtftErrors:
    """Mean errors of the predictions of recent requests, by part; sums of predicted and measured TTFTs."""

    __slots__ = ("decode_leg", "measured_s", "predicted_s", "prefill_leg", "streams", "total")

    def __init__(self) -> None:
        self.prefill_leg = PredictionErrorMean()
        self.decode_leg = PredictionErrorMean()
        self.total = PredictionErrorMean()
        self.streams = 0
        """Streams whose TTFT was predicted; the sums are over them."""
        self.predicted_s = self.measured_s = 0.0

    def learn_prefill_leg(self, predicted: PredictedTtft, *, measured_s: float) -> None:
        """Learn from the response of a prefill leg."""
        self.prefill_leg.learn(predicted_s=predicted.prefill_leg_s, measured_s=measured_s)

    def learn_first_token(self, predicted: PredictedTtft, *, decode_leg_s: float, ttft_s: float) -> None:
        """Learn from the first token of a stream: measured times since the decode leg and since arrival."""
        total_s = predicted.total_s
        self.decode_leg.learn(predicted_s=predicted.decode_leg_s, measured_s=decode_leg_s)
        self.total.learn(predicted_s=total_s, measured_s=ttft_s)
        if total_s < math.inf:
            self.streams += 1
            self.predicted_s += total_s
            self.measured_s += ttft_s

    def items(self) -> Iterator[tuple[str, float]]:
        """The known errors, by the name of the part in metrics."""
        named = (("prefill_leg", self.prefill_leg), ("decode_leg", self.decode_leg), ("ttft", self.total))
        return ((part, mean.value) for part, mean in named if mean.value is not None)
