"""A progress bar over simulated runs, on standard error and only if that is a terminal.

The commands `simulate` and `regret` pass it to `policy_runs`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from fulcrum_simulator.fleet.options import RunOptions
from fulcrum_simulator.fleet.policy_runs import OnRun


@contextmanager
def show_progress() -> Iterator[OnRun]:
    """Show the run in progress; yields what is called before each run."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=1.0)

        def begin(run: RunOptions, factor: float) -> Callable[[float], None]:
            at_factor = "" if factor == 1.0 else f" at {factor:.3g} x the rate"
            progress.update(task, description=f"{run.policy}, seed {run.seed}{at_factor}", completed=0.0)
            return lambda share: progress.update(task, completed=share)

        yield begin
