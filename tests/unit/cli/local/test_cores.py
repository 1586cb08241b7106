"""Engines of a local run that bound themselves to one core are let run on all of them."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
from structlog.testing import capture_logs

from fulcrum_cli.local.cores import use_all_cores

BOUND = """
import os, signal, threading
open("/proc/self/comm", "wb").write(b"n\\xff) 1")
os.sched_setaffinity(0, [max(os.sched_getaffinity(0))])
if os.fork():
    threading.Thread(target=signal.pause).start()
    print("bound", flush=True)
signal.pause()
"""
"""A program with an odd name, two threads and a child process, all bound to the last core."""


@pytest.fixture
def program() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", BOUND]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as started:
        assert started.stdout is not None
        assert started.stdout.readline() == "bound\n"
        yield started
        os.killpg(started.pid, signal.SIGKILL)


def read_cores(pid: int) -> list[set[int]]:
    """Return the cores that each thread of a process and of its child processes may use."""
    threads = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    with open(f"/proc/{pid}/task/{pid}/children", encoding="ascii") as file:
        children = [int(name) for name in file.read().split()]
    own = [os.sched_getaffinity(thread) for thread in threads]
    return own + [cores for child in children for cores in read_cores(child)]


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="this machine has one core")
def test_all_threads_of_a_session_may_use_all_cores(program: subprocess.Popen[str]) -> None:
    ours = os.sched_getaffinity(0)
    assert read_cores(program.pid) == [{max(ours)}] * 3
    use_all_cores(program.pid)
    assert read_cores(program.pid) == [ours] * 3


def test_a_thread_that_cannot_be_changed_is_no_error(
    program: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_thread: int, _cores: set[int]) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)
    with capture_logs() as logs:
        use_all_cores(program.pid)
    assert [(entry["event"], entry["count"]) for entry in logs] == [("threads stay bound to cores", 3)]
