"""A PDService on one machine: the memory store, the operator's logic, and processes in the place of pods."""

from fulcrum_cli.local.commands import Commands
from fulcrum_cli.local.environment import engine_environment
from fulcrum_cli.local.life import Life
from fulcrum_cli.local.models import read_model
from fulcrum_cli.local.program import ProgramOptions, StartFailed
from fulcrum_cli.local.run import LocalOptions, LocalRun, run_local
from fulcrum_cli.local.run_folder import RunInfo, find_runs
from fulcrum_cli.local.runtime import LocalRuntime

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
