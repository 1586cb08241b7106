"""What the router takes for the batch of an instance: never more than its KV cache, unknown in prefill."""

import pytest

from fulcrum_router.policy.predictions.estimate import DEFAULT_DECODE, DEFAULT_PREFILL
from fulcrum_router.policy.predictions.learning import LearningInstance


@pytest.mark.parametrize(
    ("kv_usage", "kv_capacity_tokens", "expected"),
    [
        pytest.param(0.5, 100_000, 50_000, id="the others wait in the engine for room"),
        pytest.param(1.0, 100_000, 80_000, id="all of the ledger fits"),
        pytest.param(None, 100_000, 80_000, id="usage not reported"),
        pytest.param(0.5, None, 80_000, id="capacity not reported"),
    ],
)
def test_no_more_tokens_are_in_the_batch_than_in_the_kv_cache(
    kv_usage: float | None, kv_capacity_tokens: int | None, expected: int
) -> None:
    instance = LearningInstance("d", DEFAULT_PREFILL, DEFAULT_DECODE)
    instance.ledger.add_decode(tokens=80_000)
    instance.kv_usage, instance.kv_capacity_tokens = kv_usage, kv_capacity_tokens
    assert instance.measure_batch() == expected


def test_the_batch_is_not_known_while_prompts_are_computed() -> None:
    instance = LearningInstance("d", DEFAULT_PREFILL, DEFAULT_DECODE)
    instance.ledger.add_decode(tokens=80_000)
    instance.ledger.add_local_prefill(tokens=100, predicted_s=1.0, now_s=0.0)
    instance.kv_usage, instance.kv_capacity_tokens = 0.5, 100_000
    assert instance.measure_batch() == 0
