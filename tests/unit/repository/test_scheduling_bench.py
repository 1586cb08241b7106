"""The search for highest rates of `make bench NAME=scheduling`, and its file of runs."""

from argparse import Namespace
from pathlib import Path

import pytest

from bench import scheduling_runs
from bench.scheduling import choose_workloads, leave_out_warm_up, make_interval_figures
from bench.scheduling_runs import (
    Run,
    RunKey,
    RunStore,
    Task,
    Workload,
    find_highest_place,
    make_options,
    measure,
)
from fulcrum_simulator.workload import WorkloadRequest

KEY = RunKey("drift", "arrow", 1, "1.3")
LOST = Run(0.7, 0.9, 11.0, 20, 0.6)
WHOLE = Run(0.85, 0.0, 12.0, 40, 0.8)


@pytest.mark.parametrize("limit", [-13, -1, 0, 1, 7, 40])
@pytest.mark.parametrize("stride", [1, 8])
def test_the_highest_place_is_found_from_any_start(limit: int, stride: int) -> None:
    assert find_highest_place(lambda place: place <= limit, 0, stride) == limit


def test_a_search_from_the_right_place_needs_two_runs() -> None:
    tried: list[int] = []

    def keeps(place: int) -> bool:
        tried.append(place)
        return place <= 5

    assert find_highest_place(keeps, 5, 1) == 5
    assert tried == [5, 6]


def test_no_place_is_found_if_even_the_lowest_fails() -> None:
    assert find_highest_place(lambda place: None if place < -20 else False, 0, 1) is None


def test_a_run_that_was_ended_early_tells_nothing_about_lower_attainments() -> None:
    assert [LOST.meets(attainment) for attainment in (0.8, 0.9, 0.99)] == [None, False, False]
    assert [WHOLE.meets(attainment) for attainment in (0.8, 0.85, 0.9)] == [True, True, False]


def test_runs_are_found_again_in_their_file_and_the_whole_one_counts(tmp_path: Path) -> None:
    path = tmp_path / "runs"
    for run in (LOST, WHOLE, LOST):
        RunStore(path, "now").record(KEY, run)
    assert len(path.read_text().splitlines()) == 3
    assert RunStore(path, "now").find(KEY) == WHOLE
    assert RunStore(path, "now").find(KEY._replace(seed=2)) is None
    assert RunStore(None, "now").find(KEY) is None


def test_runs_of_other_code_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "runs"
    RunStore(path, "before").record(KEY, WHOLE)
    assert RunStore(path, "now").find(KEY) is None
    assert RunStore(path, "before").find(KEY) == WHOLE


def test_of_the_splits_near_the_best_one_that_with_the_highest_median_counts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """2P6D is two steps ahead with seed 1, and 1P7D with the other seeds.

    4P4D is behind with seed 1, and not beside the best one, so that the other seeds do not run it.
    """
    highest = {"static:2P6D": (12, 8, 8), "static:1P7D": (10, 10, 10), "static:4P4D": (2, 30, 30)}

    def run(_search: object, policy: str, seed: int, place: int, attainment: float) -> Run:
        met = place <= highest.get(policy, (0, 0, 0))[seed - 1]
        return Run(1.0 if met else 0.5, 0.0 if met else attainment, float(place), 0, 1.0)

    monkeypatch.setattr(scheduling_runs._Search, "run", run)
    workload = Workload("stationary", "development", moving=False, smooth=True)
    task = Task(workload, "static:best", (0.9,), seeds=3, ratio=1.02, traces=None, runs=None)
    found = measure(task)[0.9]
    assert found.policy == "static:1P7D"
    assert found.rates_rps == (10.0, 10.0, 10.0)


def test_bounds_are_those_of_the_requests_that_a_run_scores() -> None:
    requests = [WorkloadRequest(100.0 + number, 1000, 10) for number in range(11)]
    scored = leave_out_warm_up(requests, make_options("arrow"))
    assert [request.arrival_s for request in scored] == [101.0 + number for number in range(10)]


@pytest.mark.parametrize(
    ("use", "only", "rule"),
    [
        ("development", ["drift", "azure_code_2023.csv.gz"], "recorded, and needs --traces: azure_code_2023"),
        ("development", ["drfit"], "no development workload of this name: drfit"),
        ("development", ["documents-reasoning-drift"], "no development workload of this name: documents-"),
    ],
)
def test_a_workload_that_cannot_run_is_named(use: str, only: list[str], rule: str) -> None:
    with pytest.raises(ValueError, match=rule):
        choose_workloads(Namespace(use=use, only=only, quick=False, traces=None))


def test_without_a_folder_of_traces_the_composed_workloads_run() -> None:
    options = Namespace(use="development", only=None, quick=False, traces=None)
    assert [w.name for w in choose_workloads(options)] == [
        "phases-200s",
        "phases-600s",
        "drift",
        "stationary",
    ]
    options.traces = Path()
    assert len(choose_workloads(options)) == 5


def test_one_seed_has_no_interval_and_no_verdict() -> None:
    one, two = make_interval_figures("ours / other", [("drift", [1.2]), ("phases", [1.2, 1.21])])
    assert (one.passed, two.passed) == (None, True)
