"""A PDService on one machine: the memory store, the operator's logic, and processes in the place of pods."""

from fulcrum_cli.local.engine_environment import find_engine_environment
from fulcrum_cli.local.model_config import read_model_config
from fulcrum_cli.local.process_spec import ProcessSpec
from fulcrum_cli.local.program_commands import ProgramCommands
from fulcrum_cli.local.run import LocalRun, LocalRunOptions, run_local
from fulcrum_cli.local.run_folder import RunInfo, find_runs
from fulcrum_cli.local.runtime import LocalRuntime
from fulcrum_cli.local.supervised_process import ProgramTimeouts, StartFailed

__all__ = [
    "LocalRun",
    "LocalRunOptions",
    "LocalRuntime",
    "ProcessSpec",
    "ProgramCommands",
    "ProgramTimeouts",
    "RunInfo",
    "StartFailed",
    "find_engine_environment",
    "find_runs",
    "read_model_config",
    "run_local",
]
