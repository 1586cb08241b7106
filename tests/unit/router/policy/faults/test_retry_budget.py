"""The retry budget: a share of the requests of the last ten seconds, and a floor."""

from fulcrum_router.policy.faults.retry_budget import FLOOR, RetryBudget


def take_all(budget: RetryBudget, now_s: float) -> int:
    """Retries that the budget still allows at `now_s`."""
    taken = 0
    while budget.take_retry(now_s):
        taken += 1
    return taken


def test_without_requests_the_floor_is_allowed_and_no_more() -> None:
    budget = RetryBudget()
    assert take_all(budget, 100.0) == FLOOR
    assert take_all(budget, 109.0) == 0


def test_a_fifth_of_the_requests_may_be_retried_beside_the_floor() -> None:
    budget = RetryBudget()
    for n in range(1_000):
        budget.record_request(100.0 + n / 200)
    assert take_all(budget, 105.0) == FLOOR + 200


def test_requests_and_retries_leave_the_window_after_ten_seconds() -> None:
    budget = RetryBudget()
    for _ in range(100):
        budget.record_request(100.0)
    assert take_all(budget, 100.5) == FLOOR + 20
    assert (budget.requests, budget.retries) == (100, FLOOR + 20)
    assert take_all(budget, 110.0) == FLOOR
    assert budget.requests == 0


def test_a_long_silence_empties_the_window() -> None:
    budget = RetryBudget()
    budget.record_request(3.0)
    take_all(budget, 3.0)
    assert take_all(budget, 1e6) == FLOOR
