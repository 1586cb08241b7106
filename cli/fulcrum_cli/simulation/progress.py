"""A progress bar over simulated runs, on standard error and only if that is a terminal.

The commands `simulate` and `regret` pass it to `policy_runs`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fulcrum_simulator.fleet.options import Policy, RunOptions
from fulcrum_simulator.fleet.policy_runs import OnRun


@contextmanager
def show_progress(runs: int) -> Iterator[OnRun]:
    """Show the run in progress, of so many; yields the function to call before each simulation.

    All rates that a search tries with a policy, a seed and a number of instances are one run.
    """
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=1.0)
        number = 0
        last: tuple[Policy, int, int] | None = None

        def begin(run: RunOptions, factor: float) -> Callable[[float], None]:
            nonlocal number, last
            if (which := (run.policy, run.instances, run.seed)) != last:
                number, last = number + 1, which
            counted = f"run {number} of {runs}: " if runs > 1 else ""
            at_factor = "" if factor == 1.0 else f" at {factor:.3g} x the rate"
            description = f"{counted}{run.policy}, seed {run.seed}{at_factor}"
            progress.update(task, description=description, completed=0.0)
            return lambda share: progress.update(task, completed=share)

        yield begin
