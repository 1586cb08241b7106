"""Predicted TTFT: the sum that the client sees, and its error by part."""

import math

import pytest

from fulcrum_router.policy import PredictedTtft, SourcePairs, TransferPair, TtftErrors, predict_ttft
from tests.unit.router.builders import instance, work


def make_pair(*, warm: bool, lag_s_per_1k_tokens: float | None = None) -> TransferPair:
    pair = TransferPair()
    pair.warm_until_s = math.inf if warm else -math.inf
    pair.lag_s_per_1k_tokens = lag_s_per_1k_tokens
    return pair


@pytest.mark.parametrize(
    ("pairs", "transfer_s"),
    [
        pytest.param({}, 0.2, id="a pair without a record waits for a handshake"),
        pytest.param({"d1": make_pair(warm=False)}, 0.2, id="so does a cold pair"),
        pytest.param({"d1": make_pair(warm=True)}, 0.0, id="a warm pair does not wait"),
        pytest.param(
            {"d1": make_pair(warm=True, lag_s_per_1k_tokens=0.5)}, 0.05, id="each token adds its lag"
        ),
    ],
)
def test_predicted_ttft_is_the_sum_that_the_client_sees(
    pairs: dict[str, TransferPair], transfer_s: float
) -> None:
    prefill, decode = (
        instance("p1", queued_s=0.3),
        instance("d1", decoding=1000, prefilling=10, queued_s=0.04),
    )
    decode.ledger.reserve(tokens=900)
    predicted = predict_ttft(
        work(100, cached_tokens={"p1": 40}), prefill, decode, now_s=0.02, pairs=SourcePairs(pairs, 0.2, 0.0)
    )
    # In 0.02 s both prefill queues shrink; the batch of 2,000 tokens has a step of 0.03 s.
    expected = PredictedTtft(0.02, 0.28, 0.06, transfer_s, 0.02 + 0.03)
    assert [round(part, 9) for part in predicted] == [round(part, 9) for part in expected]
    assert predicted.total_s == pytest.approx(0.41 + transfer_s)


def test_the_error_is_known_for_each_part_that_was_measured() -> None:
    errors, predicted = TtftErrors(), PredictedTtft(0.5, 1.0, 1.0, 0.1, 0.1)
    assert dict(errors.items()) == {}
    errors.learn_prefill_leg(predicted, measured_s=4.0)
    assert dict(errors.items()) == {"prefill_leg": -0.5}
    errors.learn_first_token(predicted, decode_leg_s=0.1, ttft_s=2.7)
    assert (errors.streams, errors.predicted_s, errors.measured_s) == (1, predicted.total_s, 2.7)
    rounded = {part: round(error, 9) for part, error in errors.items()}
    assert rounded == {"prefill_leg": -0.5, "decode_leg": 1.0, "ttft": 0.0}
