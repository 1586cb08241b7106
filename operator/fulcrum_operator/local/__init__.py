"""A PDService on one machine: the memory store, the operator's logic, and processes in the place of pods."""

from fulcrum_operator.local.commands import Commands
from fulcrum_operator.local.program import ProgramOptions, StartFailed
from fulcrum_operator.local.run import LocalOptions, LocalRun, run_local
from fulcrum_operator.local.rundir import RunInfo, find_runs
from fulcrum_operator.local.runtime import LocalRuntime

__all__ = [
    "Commands",
    "LocalOptions",
    "LocalRun",
    "LocalRuntime",
    "ProgramOptions",
    "RunInfo",
    "StartFailed",
    "find_runs",
    "run_local",
]
