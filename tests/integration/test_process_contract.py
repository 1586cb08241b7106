"""Contract between a program of a local run and its parent: ready line, one-line error, common end."""

import json
import os
import signal
import subprocess
import sys

import pytest

HEAD = "import os, signal, sys, time\nfrom fulcrum_cluster.process import *\n"


def run(code: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HEAD + code]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)


def test_ready_is_one_line_with_the_ports() -> None:
    ended = run("announce_ready(port=8101, side_channel_port=8102)")
    first, _, ports = ended.stdout.partition(" ")
    assert (first, json.loads(ports), ended.stdout.count("\n")) == (
        "ready",
        {"port": 8101, "side_channel_port": 8102},
        1,
    )


def test_ready_line_is_flushed_before_the_program_ends() -> None:
    code = f"{HEAD}announce_ready(port=1)\nsys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == 'ready {"port": 1}\n'
        process.communicate("")


def test_an_error_is_one_line_and_exit_code_2() -> None:
    ended = run("exit_with_error('--port (80) is in use')")
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", "error: --port (80) is in use\n")


@pytest.mark.skipif(sys.platform != "linux", reason="needs Linux: PR_SET_PDEATHSIG")
def test_a_child_ends_with_a_parent_that_was_killed() -> None:
    """The child keeps the pipe open, so the end of the pipe is the end of the child."""
    child = f"{HEAD}die_with_parent()\nannounce_ready(pid=os.getpid())\nsignal.pause()"
    start = "subprocess.Popen([sys.executable, '-c', sys.argv[1]])"
    parent = f"import signal, subprocess, sys\n{start}\nsignal.pause()"
    with subprocess.Popen(
        [sys.executable, "-c", parent, child], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("ready ")
        os.kill(process.pid, signal.SIGKILL)
        assert process.stdout.read() == ""


STOP_WHILE_IMPORTING = """
import os, runpy, signal, sys

class Stop:
    def find_spec(self, name, path=None, target=None):
        if name in ("aiohttp", "uvloop"):
            os.kill(os.getpid(), signal.SIGTERM)

sys.meta_path.insert(0, Stop())
sys.argv[1:] = ["--help"]
runpy.run_module({module!r}, run_name="__main__", alter_sys=True)
"""


@pytest.mark.parametrize(
    "module", ["fulcrum_operator", "fulcrum_autoscaler", "fulcrum_router", "fulcrum_simulator.server"]
)
def test_a_program_that_is_stopped_while_it_imports_modules_ends_with_exit_code_0(module: str) -> None:
    """As pid 1 of a container it would get no SIGTERM at all without a handler of its own."""
    ended = run(STOP_WHILE_IMPORTING.format(module=module))
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
