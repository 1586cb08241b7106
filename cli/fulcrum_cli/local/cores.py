"""Lets the engines of a local run use all cores of the machine.

vLLM's NIXL connector binds the thread that computes to the last core of a NUMA node, whatever the settings
say: all engines of one machine would share one core. `supervised_process` calls this for real engines.
"""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_SESSION_FIELD = 3
"""Place of the session in /proc/PID/stat, counted from the end of the program's name."""


def use_all_cores(session: int) -> None:
    """Let all threads of a session's processes run on every core that this process may use."""
    cores = os.sched_getaffinity(0)
    for thread in list_threads(session):
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(thread, cores)


def list_threads(session: int) -> Iterator[int]:
    """List the ids of all threads of a session's processes."""
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            if int(fields[_SESSION_FIELD]) == session:
                yield from [int(task.name) for task in (process / "task").iterdir()]
