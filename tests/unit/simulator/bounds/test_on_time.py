"""The largest number of jobs that end in time, against exhaustive search and against hand-made cases."""

import itertools
import random
from collections.abc import Sequence

import pytest

from fulcrum_simulator.bounds.on_time import Job, can_end_all_on_time, count_on_time_at_most


def runs_in_order(jobs: Sequence[Job]) -> bool:
    now_s = 0.0
    for job in jobs:
        now_s = max(now_s, job.release_s) + job.work_s
        if now_s > job.deadline_s + 1e-9:
            return False
    return True


def search_exhaustively(jobs: Sequence[Job]) -> int:
    """Return the size of the largest subset that runs in time in order of release."""
    return max(
        size
        for size in range(len(jobs) + 1)
        for chosen in itertools.combinations(jobs, size)
        if runs_in_order(chosen)
    )


def draw_agreeable_jobs(rng: random.Random, count: int) -> list[Job]:
    releases_s = sorted(rng.choice((0, 1, 2, 3, 5, 8)) for _ in range(count))
    allowed_s = rng.choice((2, 4, 6))
    return [Job(release_s, rng.choice((0.5, 1, 2, 3, 5)), release_s + allowed_s) for release_s in releases_s]


def test_the_count_equals_exhaustive_search_on_random_instances(seed: int) -> None:
    rng = random.Random(seed)
    instances = [draw_agreeable_jobs(rng, rng.randint(1, 9)) for _ in range(400)]
    assert [count_on_time_at_most(jobs) for jobs in instances] == [
        search_exhaustively(jobs) for jobs in instances
    ]


def test_deadlines_that_keep_the_order_but_not_the_distance_are_searched_exactly(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(300):
        count = rng.randint(1, 8)
        releases_s = sorted(rng.uniform(0, 6) for _ in range(count))
        due_s = sorted(release_s + rng.uniform(0.5, 5) for release_s in releases_s)
        jobs = [
            Job(release, rng.uniform(0.1, 4), due) for release, due in zip(releases_s, due_s, strict=True)
        ]
        assert count_on_time_at_most(jobs) == search_exhaustively(jobs), jobs


@pytest.mark.parametrize(
    ("jobs", "on_time"),
    [
        pytest.param([], 0, id="no jobs"),
        pytest.param([Job(0, 2, 1)], 0, id="a job longer than its time"),
        pytest.param([Job(0, 1, 1), Job(0, 1, 1)], 1, id="two at once, time for one"),
        pytest.param([Job(0, 3, 4), Job(0, 1, 4), Job(1, 1, 5)], 3, id="all fit"),
        pytest.param([Job(0, 4, 4), Job(0, 2, 4), Job(1, 2, 5)], 2, id="the long one is dropped for two"),
        pytest.param([Job(0, 3, 3), Job(10, 3, 13)], 2, id="idle time between"),
        pytest.param([Job(0, float("inf"), 3), Job(1, 1, 3)], 1, id="a job that never ends"),
    ],
)
def test_counts_by_hand(jobs: list[Job], on_time: int) -> None:
    assert count_on_time_at_most(jobs) == on_time


def test_counting_ends_once_more_than_late_max_are_late() -> None:
    jobs = [Job(0, 1, 1)] * 10
    assert (count_on_time_at_most(jobs, late_max=9), count_on_time_at_most(jobs, late_max=2)) == (1, 1)


def demand_fits_every_interval(jobs: Sequence[Job]) -> bool:
    return all(
        sum(job.work_s for job in jobs if start_s <= job.release_s and job.deadline_s <= end_s)
        <= end_s - start_s + 1e-9
        for start_s in {job.release_s for job in jobs}
        for end_s in {job.deadline_s for job in jobs}
        if end_s > start_s
    )


def test_all_end_in_time_exactly_if_the_demand_of_every_interval_fits(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(400):
        jobs = [
            Job(release_s, rng.uniform(0.1, 1.5), release_s + rng.uniform(1, 8))
            for release_s in (rng.uniform(0, 6) for _ in range(rng.randint(1, 8)))
            if release_s
        ]
        feasible = [job for job in jobs if job.work_s <= job.deadline_s - job.release_s]
        assert can_end_all_on_time(feasible) == demand_fits_every_interval(feasible), feasible
