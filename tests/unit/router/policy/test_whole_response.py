"""How long the router waits for a response that is not streamed, while its engine computes."""

import pytest

from fulcrum_router.policy.whole_response import compute_deadline_s, compute_max_response_s


@pytest.mark.parametrize(
    ("progress_at_s", "tokens", "deadline_s"),
    [
        pytest.param(0.0, 1000, 160.0, id="without progress since it was sent: the first-byte time-out"),
        pytest.param(300.0, 1000, 360.0, id="with progress: the first-byte time-out after it"),
        pytest.param(300.0, 100, 210.0, id="at most half a second a token and the first-byte time-out"),
        pytest.param(300.0, 0, 160.0, id="no tokens: the first-byte time-out"),
    ],
)
def test_a_whole_response_may_take_as_long_as_its_engine_computes_and_its_tokens_allow(
    progress_at_s: float, tokens: int, deadline_s: float
) -> None:
    longest_s = compute_max_response_s(first_byte_timeout_s=60.0, max_output_tokens=tokens)
    assert deadline_s == compute_deadline_s(
        sent_s=100.0, progress_at_s=progress_at_s, first_byte_timeout_s=60.0, max_response_s=longest_s
    )
