"""A PDService on one machine: the memory store, the operator's logic, and processes in the place of pods."""

from fulcrum_operator.local.commands import Commands
from fulcrum_operator.local.environment import engine_environment
from fulcrum_operator.local.life import Life
from fulcrum_operator.local.models import read_model
from fulcrum_operator.local.program import ProgramOptions, StartFailed
from fulcrum_operator.local.run import LocalOptions, LocalRun, run_local
from fulcrum_operator.local.rundir import RunInfo, find_runs
from fulcrum_operator.local.runtime import LocalRuntime

__all__ = [
    "Commands",
    "Life",
    "LocalOptions",
    "LocalRun",
    "LocalRuntime",
    "ProgramOptions",
    "RunInfo",
    "StartFailed",
    "engine_environment",
    "find_runs",
    "read_model",
    "run_local",
]
