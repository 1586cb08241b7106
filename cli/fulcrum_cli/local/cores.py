"""Lets the engines of a local run use all cores of the machine.

vLLM's NIXL connector binds the thread that computes to the last core of a NUMA node, whatever the settings
say: all engines of one machine would share one core. `supervised_process` calls this for real engines.
"""

import os
from collections.abc import Iterator
from pathlib import Path

import structlog

_SESSION_FIELD = 3
"""Place of the session in /proc/PID/stat, counted from the end of the program's name."""

_log = structlog.get_logger()


def use_all_cores(session: int) -> None:
    """Let all threads of a session's processes run on every core that this process may use.

    What cannot be changed stays as it is, and is logged: an engine is slower then.
    """
    cores, failures = os.sched_getaffinity(0), list[OSError]()
    for thread in list_threads(session):
        try:
            os.sched_setaffinity(thread, cores)
        except ProcessLookupError:
            pass  # it has ended
        except OSError as error:
            failures.append(error)
    if failures:
        _log.warning(
            "threads stay bound to cores", session=session, count=len(failures), reason=str(failures[0])
        )


def list_threads(session: int) -> Iterator[int]:
    """List the ids of all threads of a session's processes."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            # A program's name, which comes first, may hold any bytes.
            fields = (process / "stat").read_bytes().rpartition(b")")[2].split()
            tasks = os.listdir(process / "task") if int(fields[_SESSION_FIELD]) == session else []
        except OSError:
            continue  # it has ended
        yield from map(int, tasks)
