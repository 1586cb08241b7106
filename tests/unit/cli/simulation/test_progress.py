"""What the progress bar says of the run in progress."""

import io
import sys
from dataclasses import replace

import pytest

from fulcrum_cli.simulation.progress import show_progress
from fulcrum_core.profiles import load_profile
from fulcrum_core.values import Slo
from fulcrum_simulator.fleet.options import RunOptions, parse_policy


class Terminal(io.StringIO):
    """Keeps what is written, and says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def open_terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """Return standard error from now on. In a fixture, pytest would replace it again before the test."""
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    return terminal


def options(policy: str, *, seed: int = 1) -> RunOptions:
    return RunOptions(
        profile=load_profile("l70-h100-tp4"),
        instances=8,
        policy=parse_policy(policy, instances=8),
        slo=Slo(ttft_s=3.0, tpot_s=0.1),
        seed=seed,
    )


def test_it_counts_runs_and_not_the_rates_that_a_search_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    tried = [(options("arrow"), 1.0), (options("arrow"), 1.3), (options("arrow", seed=2), 1.2)]
    with show_progress(4) as on_run:
        for run, factor in [*tried, (options("balanced"), 1.0)]:
            on_run(run, factor)(0.5)
    assert "run 3 of 4: balanced:4P4D, seed 1" in terminal.getvalue()


def test_other_counts_of_instances_are_other_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    with show_progress(2) as on_run:
        for instances in (8, 9):
            on_run(replace(options("arrow"), instances=instances), 1.0)(0.5)
    assert "run 2 of 2: arrow:4P4D, seed 1" in terminal.getvalue()


def test_a_single_run_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = open_terminal(monkeypatch)
    with show_progress(1) as on_run:
        on_run(options("arrow"), 1.0)(0.5)
    assert "arrow:4P4D, seed 1" in terminal.getvalue()
    assert "run 1" not in terminal.getvalue()
